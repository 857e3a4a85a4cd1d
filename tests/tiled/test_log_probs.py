"""Tiled log-probabilities and entropies against their float64 definition, which knows nothing of tiles or ranks."""

import itertools

import pytest
import torch
import torch.distributed as dist
from counting import Alive, Counting, relative_error
from pool import run_ranks
from ringtile import InputError, RingMismatchError, tiled_log_probs
from test_tiled_loss import HIDDEN, VOCAB, assert_same, problem
from test_vocab_parallel import SHARDS, local_classes
from torch import Tensor
from torch.nn import functional

OPTIONS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.3, "logit_scale": -1.7, "softcap": 2.0},
]


def definition(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each token, in float64, from all logits; 0 where the label is -100."""
    logits = logit_scale * functional.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    log_probs = (logits / temperature).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    of_labels = log_probs.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return tuple(torch.where(labels == -100, 0.0, x) for x in (of_labels, entropy))


def factors(*shape: int) -> list[Tensor]:
    """A gradient of every token's log-probability, and one of its entropy."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]


@pytest.mark.in_torch_too(long=True)
@pytest.mark.parametrize("return_entropy", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_log_probs_entropies_and_gradients_equal_the_definition(options, with_bias, return_entropy) -> None:
    hidden, weight, labels, bias = problem()
    leaves = (hidden, weight, bias) if with_bias else (hidden, weight)
    ours = tiled_log_probs(*leaves[:2], labels, *leaves[2:], tile_tokens=5, return_entropy=return_entropy, **options)
    ours = ours if return_entropy else (ours,)
    oracle = definition(*leaves[:2], labels, *leaves[2:], **options)[: len(ours)]
    douts = factors(*labels.shape)[: len(ours)]
    assert_same(ours, oracle, leaves, douts)


def test_one_of_the_results_may_go_unused() -> None:
    hidden, weight, labels, _ = problem()
    ours, oracle = (tiled_log_probs(hidden, weight, labels, return_entropy=True), definition(hidden, weight, labels))
    for one, other in zip(ours, oracle, strict=True):
        assert_same([one], [other], (hidden, weight))


def test_every_number_of_tokens_and_tile_size() -> None:
    for num_tokens, tile_tokens in itertools.product(range(4), range(1, 5)):
        hidden, weight, labels, _ = problem(num_tokens)
        ours = tiled_log_probs(hidden, weight, labels, tile_tokens=tile_tokens, return_entropy=True)
        assert_same(ours, definition(hidden, weight, labels), (hidden, weight))


def test_leading_dims() -> None:
    hidden, weight, labels, _ = problem(24)
    rows, of_rows = hidden.view(4, 6, HIDDEN), labels.view(4, 6)
    ours = tiled_log_probs(rows, weight, of_rows, tile_tokens=5, return_entropy=True)
    assert_same(ours, definition(rows, weight, of_rows), (hidden, weight))


# ---- one path for new, old and reference log-probabilities --------------------------------------


@pytest.mark.in_torch_too
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_ratio_of_an_unchanged_policy_is_exactly_1(dtype) -> None:
    hidden, weight, labels, bias = problem(200, dtype)
    options = {"temperature": 0.7, "softcap": 3.0, "tile_tokens": 32}
    with torch.no_grad():
        old = tiled_log_probs(hidden, weight, labels, bias, **options)
        with_entropy, _ = tiled_log_probs(hidden, weight, labels, bias, return_entropy=True, **options)
    for return_entropy in (False, True):
        new = tiled_log_probs(hidden, weight, labels, bias, return_entropy=return_entropy, **options)
        new = new[0] if return_entropy else new
        assert new.requires_grad
        assert torch.equal(new, old)
        assert torch.equal((new - old).exp(), torch.ones_like(old))
    assert torch.equal(with_entropy, old)


# ---- numbers at the edges -----------------------------------------------------------------------


@pytest.mark.in_torch_too
def test_an_ignored_token_cannot_spoil_the_others() -> None:
    hidden, weight, labels, _ = problem()
    with torch.no_grad():
        hidden[::3] = torch.nan
    log_probs, entropy = tiled_log_probs(hidden, weight, labels, tile_tokens=5, return_entropy=True)
    dhidden, dweight = torch.autograd.grad((log_probs + entropy).sum(), (hidden, weight))
    for x in (log_probs, entropy, dhidden):
        assert x[::3].eq(0).all()
    assert dweight.isfinite().all()
    assert log_probs.isfinite().all()


@pytest.mark.in_torch_too
def test_classes_that_are_masked_out_have_no_part() -> None:
    """A bias of -inf, as vocabularies padded to a round size have."""
    hidden, weight, labels, bias = problem()
    labels[labels > 25] = 3
    with torch.no_grad():
        bias[26:] = -torch.inf
    ours = tiled_log_probs(hidden, weight, labels, bias, return_entropy=True)
    oracle = definition(hidden, weight[:26], labels, bias[:26])
    assert_same(ours, oracle, (hidden, weight), factors(len(labels)))


@pytest.mark.in_torch_too
@pytest.mark.parametrize("offset", [0.0, 3e4])
@pytest.mark.parametrize("gap", [1.0, 20.0, 60.0])
def test_entropy_of_a_sure_model_keeps_its_precision(gap, offset) -> None:
    """One class is ahead of 4999 by a gap: as lse minus the mean logit, an entropy of 1e-6 would be rounding alone.

    float32 has the gap exactly, so what is left are the roundings of exp and of sums of terms of one sign, by pairs.
    """
    logits = torch.full((1, 5000), offset)
    logits[0, 17] += gap
    _, entropy = tiled_log_probs(torch.ones(1, 1), logits.T.contiguous(), torch.tensor([17]), return_entropy=True)
    others = 4999 * torch.exp(torch.tensor(-gap, dtype=torch.float64))
    exact = torch.log1p(others) + others * gap / (1 + others)
    assert entropy.item() == pytest.approx(exact.item(), rel=16 * torch.finfo(torch.float32).eps, abs=1e-16)


@pytest.mark.in_torch_too(long=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entropy_is_no_worse_than_torch(dtype) -> None:
    """torch's way: logits in dtype, all at once, then log_softmax in float32."""
    hidden, weight, labels, _ = problem(512, dtype, ignored=False, vocab_size=64)
    exact = definition(hidden, weight, labels)
    ours = tiled_log_probs(hidden, weight, labels, tile_tokens=100, return_entropy=True)
    log_probs = functional.linear(hidden, weight).float().log_softmax(-1)
    plain = (log_probs.gather(-1, labels[:, None]).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1))
    douts = factors(512)
    gradients = [
        torch.autograd.grad(outs, (hidden, weight), [d.to(outs[0].dtype) for d in douts])
        for outs in (ours, plain, exact)
    ]
    float32_ulp = torch.finfo(torch.float32).eps
    for one, other, oracle in zip(ours, plain, exact, strict=True):
        assert one.dtype == torch.float32
        # both round the same logits; the last bit of a float32 result is down to chance
        assert relative_error(one, oracle) <= relative_error(other, oracle) + float32_ulp
    for one, other, oracle in zip(*gradients, strict=True):
        # half an ulp: hidden's gradient may be rounded to another neighbor
        assert relative_error(one, oracle) <= 1.1 * relative_error(other, oracle) + torch.finfo(dtype).eps / 2


# ---- what is computed and kept ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("return_entropy", [False, True])
def test_never_more_logits_than_one_tile(return_entropy, dtype) -> None:
    hidden, weight, labels, bias = problem(400, dtype, vocab_size=200)
    with Counting() as count:
        outs = tiled_log_probs(hidden, weight, labels, bias, tile_tokens=16, return_entropy=return_entropy)
        sum(x.sum() for x in outs).backward()
    assert count.largest == 16 * 200  # hidden and its gradient have 400 * 8


def test_one_tile_of_logits_is_alive_with_a_large_vocabulary() -> None:
    """Elements alive at a time: one tile of logits, and in the backward the sum of the weight's gradient (4 V)."""
    vocab_size, tile = 128256, 8 * 128256
    hidden, labels = torch.randn(64, 4, requires_grad=True), torch.randint(vocab_size, (64,))
    weight = torch.randn(vocab_size, 4, requires_grad=True)
    with Alive(at_least=vocab_size) as alive:
        log_probs, entropy = tiled_log_probs(hidden, weight, labels, tile_tokens=8, softcap=5.0, return_entropy=True)
        assert alive.peak == tile
        (log_probs + entropy).sum().backward()
    assert tile < alive.peak <= tile + 4 * vocab_size


def test_entropies_cost_no_product() -> None:
    hidden, weight, labels, _ = problem(30)
    unit = 2 * 20 * HIDDEN * VOCAB  # 20 of the 30 tokens have a label
    with Counting() as count:
        log_probs, entropy = tiled_log_probs(hidden, weight, labels, return_entropy=True)
        assert count.flops == unit
        (log_probs + entropy).sum().backward()
    assert count.flops == 4 * unit  # logits again, and a product for each gradient


# ---- vocabulary parallel ------------------------------------------------------------------------


def sharded_equals_the_definition(sizes: tuple[int, ...]) -> None:
    for options in OPTIONS:
        hidden, weight, labels, bias = problem()
        if sizes[0] < VOCAB:
            with torch.no_grad():
                bias[: sizes[0]] += 5e3 * (options == {})  # the largest logits lie on one rank
        leaves = (hidden, local_classes(sizes, weight), local_classes(sizes, bias))
        ours = tiled_log_probs(
            *leaves[:2], labels, leaves[2], group=dist.group.WORLD, tile_tokens=5, return_entropy=True, **options
        )
        alone = tiled_log_probs(*leaves[:2], labels, leaves[2], group=dist.group.WORLD, tile_tokens=5, **options)
        assert torch.equal(ours[0], alone)
        oracle = definition(hidden, weight, labels, bias, **options)
        exact = list(torch.autograd.grad(oracle, (hidden, weight, bias), factors(len(labels))))
        exact[1:] = [local_classes(sizes, x) for x in exact[1:]]
        got = torch.autograd.grad(ours, leaves, factors(len(labels)))
        for one, other in zip((*ours, *got), (*oracle, *exact), strict=True):
            if other.numel():
                torch.testing.assert_close(one, other.detach(), rtol=1e-11, atol=1e-11)  # logits of 5e3: exact to 1e-12


@pytest.mark.parametrize("sizes", [sizes for shards in SHARDS.values() for sizes in shards])
def test_sharded_classes_equal_the_definition(sizes) -> None:
    run_ranks(len(sizes), sharded_equals_the_definition, sizes)


def one_rank_wants_entropies() -> str:
    hidden, weight, labels, _ = problem()
    try:
        tiled_log_probs(hidden, weight, labels, group=dist.group.WORLD, return_entropy=dist.get_rank() == 0)
    except RingMismatchError as error:
        return str(error)
    return ""


def test_ranks_that_want_different_results_are_named() -> None:
    for message in run_ranks(2, one_rank_wants_entropies):
        assert "whether the entropy is asked for" in message


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan"), float("inf"), "1", torch.ones(1, requires_grad=True)])
def test_a_temperature_that_is_none_is_refused(temperature) -> None:
    hidden, weight, labels, _ = problem()
    with pytest.raises(InputError, match="temperature is"):
        tiled_log_probs(hidden, weight, labels, temperature=temperature)


@pytest.mark.parametrize("return_entropy", [False, True])
def test_what_the_loss_refuses_is_refused(return_entropy) -> None:
    hidden, weight, labels, _ = problem()
    with pytest.raises(InputError, match="labels go from 31 to 31"):
        tiled_log_probs(hidden, weight, torch.full_like(labels, VOCAB), return_entropy=return_entropy)
    with pytest.raises(InputError, match=r"softcap is -2.0|softcap is -4.0"):
        tiled_log_probs(hidden, weight, labels, softcap=-4, temperature=2, return_entropy=return_entropy)
