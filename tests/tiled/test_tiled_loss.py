"""The tiled linear cross entropy against its float64 definition, with a test for each known bug of others."""

import functools
import itertools
from collections.abc import Sequence

import pytest
import torch
from counting import Alive, Counting, assert_near, relative_error
from ringtile import InputError, tiled_linear_cross_entropy
from ringtile.tiled.loss import LOGITS_BYTES, MIN_TILE_TOKENS, loss_tile_tokens, product_dtype
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.loss.loss_utils import fixed_cross_entropy

NUM_TOKENS, HIDDEN, VOCAB = 23, 8, 31  # T, E, V
OPTIONS = {"label_smoothing": 0.1, "logit_scale": -1.7, "softcap": 2.0, "z_loss": 1e-2}


def problem(
    num_tokens: int = NUM_TOKENS, dtype: torch.dtype = torch.float64, ignored: bool = True, vocab_size: int = VOCAB
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden (T, E), weight (V, E), labels (T), every third one ignored, bias (V)."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((num_tokens, HIDDEN), (vocab_size, HIDDEN), (vocab_size,))
    hidden, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    labels = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    if ignored:
        labels[::3] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels, bias.requires_grad_()


def definition(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """One loss per token, in float64, from all logits."""
    logits = logit_scale * functional.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    lse = torch.logsumexp(logits, -1)
    label_logit = logits.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    loss = (1 - label_smoothing) * (lse - label_logit) + label_smoothing * (lse - logits.mean(-1)) + z_loss * lse**2
    return torch.where(labels == -100, 0.0, loss)


def assert_same(
    ours: Sequence[Tensor], oracle: Sequence[Tensor], leaves: Sequence[Tensor], douts: Sequence[Tensor] | None = None
) -> None:
    """The results, and the gradients of their sum or from douts, are those of the oracle."""
    douts = [torch.ones_like(x) for x in oracle] if douts is None else douts
    gradients = [torch.autograd.grad(outs, leaves, douts, retain_graph=True) for outs in (ours, oracle)]
    for one, other in zip((*ours, *gradients[0]), (*oracle, *gradients[1]), strict=True):
        assert_near(one, other, num_terms=VOCAB)


def reduced(per_token: Tensor, labels: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return per_token
    return per_token.sum() / (1 if reduction == "sum" else (labels != -100).sum())


@pytest.mark.in_torch_too(long=True)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("options", [{}, *({name: value} for name, value in OPTIONS.items()), OPTIONS])
def test_loss_and_gradients_equal_the_definition(options, with_bias, reduction) -> None:
    hidden, weight, labels, bias = problem()
    leaves = (hidden, weight, bias) if with_bias else (hidden, weight)
    loss = tiled_linear_cross_entropy(
        hidden, weight, labels, bias if with_bias else None, reduction=reduction, tile_tokens=5, **options
    )
    oracle = reduced(definition(hidden, weight, labels, *leaves[2:], **options), labels, reduction)
    dloss = torch.rand(NUM_TOKENS, dtype=torch.float64) if reduction == "none" else torch.tensor(0.37).double()
    assert_same([loss], [oracle], leaves, [dloss])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_torch_defines_the_same_loss(reduction) -> None:
    hidden, weight, labels, bias = problem()
    logits = functional.linear(hidden, weight, bias)
    oracle = functional.cross_entropy(logits, labels, reduction=reduction, label_smoothing=0.1)
    assert_near(
        tiled_linear_cross_entropy(hidden, weight, labels, bias, reduction=reduction, label_smoothing=0.1),
        oracle,
        num_terms=VOCAB,
    )


def test_every_number_of_tokens_and_tile_size() -> None:
    """The mean of tile means is not the mean over tokens if tiles have different numbers of labels."""
    for num_tokens, tile_tokens in itertools.product(range(1, 14), range(1, 15)):
        hidden, weight, labels, _ = problem(num_tokens)
        labels[-1] = 0  # at least one is not ignored
        loss = tiled_linear_cross_entropy(hidden, weight, labels, tile_tokens=tile_tokens)
        oracle = reduced(definition(hidden, weight, labels), labels, "mean")
        assert_same([loss], [oracle], (hidden, weight))


def test_leading_dims_and_strides() -> None:
    hidden, weight, labels, _ = problem(24)
    batch, batch_labels = hidden.view(6, 4, HIDDEN).transpose(0, 1), labels.view(6, 4).T
    loss = tiled_linear_cross_entropy(batch, weight, batch_labels, reduction="none", tile_tokens=5)
    assert_same([loss], [definition(batch, weight, batch_labels)], (hidden, weight))


# ---- what is computed and kept ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_never_more_logits_than_one_tile(reduction, dtype) -> None:
    hidden, weight, labels, bias = problem(400, dtype, vocab_size=200)
    with Counting() as count:
        tiled_linear_cross_entropy(hidden, weight, labels, bias, reduction=reduction, tile_tokens=16).sum().backward()
    assert count.largest == 16 * 200  # hidden and its gradient have 400 * 8


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("options", [{}, OPTIONS])
def test_one_tile_of_logits_is_alive_with_a_large_vocabulary(options, checkpointed) -> None:
    """TRL's documented chunks, concatenated inside a checkpointed layer, keep all tiles' logits for the backward.

    Elements alive at a time here: one tile of logits, and the gradient of the weight (4 V).
    """
    vocab_size, tile = 128256, 8 * 128256
    hidden, labels = torch.randn(64, 4, requires_grad=True), torch.randint(vocab_size, (64,))
    weight = torch.randn(vocab_size, 4, requires_grad=True)

    def loss(hidden: Tensor) -> Tensor:
        return tiled_linear_cross_entropy(hidden, weight, labels, tile_tokens=8, **options)

    with Alive(at_least=vocab_size) as alive:
        (checkpoint(loss, hidden, use_reentrant=False) if checkpointed else loss(hidden)).backward()
    assert (
        tile < alive.peak <= tile + (8 if checkpointed else 4) * vocab_size
    )  # a checkpoint sums the weight's gradient twice
    with Alive(at_least=vocab_size) as alive, torch.no_grad():
        loss(hidden)
    assert alive.peak == tile


@pytest.mark.parametrize(("device", "at_2_20"), [("cpu", MIN_TILE_TOKENS), ("cuda", 256)])
def test_default_tile_is_bounded_in_bytes(device, at_2_20) -> None:
    tokens, num_bytes = functools.partial(loss_tile_tokens, device=torch.device(device)), LOGITS_BYTES[device]
    assert 0.99 * num_bytes < tokens(32000, torch.float32) * 32000 * 4 <= num_bytes
    assert 0.99 * num_bytes < tokens(32000, torch.bfloat16) * 32000 * (2 + 4) <= num_bytes
    assert tokens(2**20, torch.float32) == at_2_20


def test_products_are_computed_for_labeled_tokens_only() -> None:
    hidden, weight, labels, _ = problem(30)
    unit = 2 * 20 * HIDDEN * VOCAB  # 20 of the 30 tokens have a label
    leaves: dict[str, tuple[bool, bool, int]] = {
        "both": (True, True, 3),
        "weight": (False, True, 2),
        "hidden": (True, False, 2),
        "neither": (False, False, 1),
    }
    for name, (hidden_grad, weight_grad, products) in leaves.items():
        with Counting() as count:
            tiled_linear_cross_entropy(
                hidden.detach().requires_grad_(hidden_grad), weight.detach().requires_grad_(weight_grad), labels
            )
        assert count.flops == products * unit, name
    with Counting() as count, torch.no_grad():
        tiled_linear_cross_entropy(hidden, weight, labels)
    assert count.flops == unit


@pytest.mark.in_torch_too
def test_an_ignored_token_cannot_spoil_the_others() -> None:
    hidden, weight, labels, _ = problem()
    with torch.no_grad():
        hidden[::3] = torch.nan
    loss = tiled_linear_cross_entropy(hidden, weight, labels, tile_tokens=5)
    dhidden, dweight = torch.autograd.grad(loss, (hidden, weight))
    assert loss.isfinite()
    assert dweight.isfinite().all()
    assert dhidden[::3].eq(0).all()


# ---- a regression test for each bug of other tiled losses ---------------------------------------


@pytest.mark.parametrize("num_items", [7, 3.5, torch.tensor(11)])
def test_every_gradient_is_scaled(num_items) -> None:
    """DeepSpeed scales hidden's gradient by the incoming gradient, but not the weight's."""
    hidden, weight, labels, bias = problem()
    loss = tiled_linear_cross_entropy(hidden, weight, labels, bias, num_items=num_items, tile_tokens=5)
    oracle = definition(hidden, weight, labels, bias).sum() / num_items
    assert_same([0.37 * loss], [0.37 * oracle], (hidden, weight, bias))


def test_four_accumulated_batches_equal_one() -> None:
    hidden, weight, labels, bias = problem(24)
    num_items = int((labels != -100).sum())
    for part in range(4):
        rows = slice(6 * part, 6 * part + 6)
        tiled_linear_cross_entropy(
            hidden[rows], weight, labels[rows], bias, num_items=num_items, tile_tokens=4
        ).backward()
    oracle = reduced(definition(hidden, weight, labels, bias), labels, "mean")
    for leaf, theirs in zip((hidden, weight, bias), torch.autograd.grad(oracle, (hidden, weight, bias)), strict=True):
        assert_near(leaf.grad, theirs, num_terms=VOCAB)


def test_float16_loss_scale() -> None:
    """A typical loss scale, which would overflow float16 unless the loss is divided by the number of tokens first."""
    hidden, weight, labels, bias = problem(dtype=torch.float16)
    leaves = (hidden, weight, bias)
    scale = 2.0**16
    loss = tiled_linear_cross_entropy(hidden, weight, labels, bias, num_items=10**5, tile_tokens=5)
    oracle = torch.autograd.grad(definition(hidden, weight, labels, bias).sum() * scale / 10**5, leaves)
    for ours, theirs in zip(torch.autograd.grad(loss * scale, leaves), oracle, strict=True):
        assert_near(ours, theirs, num_terms=VOCAB)


@pytest.mark.in_torch_too(long=True)
def test_weight_gradient_is_closer_than_the_plain_one() -> None:
    """The plain product adds the labels' few terms of size 1 to hundreds of size 1 / V, and rounds each to the size of
    the sum. Summed separately, the small terms are rounded at their own size."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(1024, 64), (torch.randn(4000, 64) / 8).requires_grad_()
    labels = torch.randint(4000, (1024,))
    exact, plain = (
        torch.autograd.grad(functional.cross_entropy(functional.linear(h, w), labels), w)[0]
        for h, w in ((hidden.double(), weight.double()), (hidden, weight))
    )
    (ours,) = torch.autograd.grad(tiled_linear_cross_entropy(hidden, weight, labels, tile_tokens=512), weight)
    assert relative_error(ours, exact) < relative_error(plain, exact) / 2


@pytest.fixture(params=["avx512_bf16", "amx_bf16", "generic"])
def isa(request, monkeypatch) -> str:
    """A CPU with bfloat16 products, and one that multiplies in float32, here 10 classes at a time."""
    monkeypatch.setattr("ringtile.ops.cpu_isa", lambda: request.param)
    monkeypatch.setattr("ringtile.tiled.loss.WIDENED_CLASSES", 10)
    return request.param


@pytest.mark.in_torch_too(long=True)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_bfloat16_is_no_worse_than_torch(reduction, isa) -> None:
    """The accuracy rule for the loss and the weight's gradient. torch's path: product in bfloat16, loss in float32.

    (torch's linear_cross_entropy returns a bfloat16 loss, off by up to half an ulp: 6e-3 to 2e-2.)
    """
    hidden, weight, labels, _ = problem(62 * 16, torch.bfloat16, vocab_size=64)
    exact_loss = reduced(definition(hidden, weight, labels), labels, reduction)
    logits = functional.linear(hidden, weight).float()
    torch_loss = functional.cross_entropy(logits, labels, reduction=reduction)
    loss = tiled_linear_cross_entropy(hidden, weight, labels, reduction=reduction, tile_tokens=16)
    assert loss.dtype == torch.float32
    ulp = torch.finfo(torch.float32).eps  # both round the same logits, so the last bit is down to chance
    assert relative_error(loss, exact_loss) <= relative_error(torch_loss, exact_loss) + ulp
    exact, theirs, ours = (
        torch.autograd.grad(one.sum() * 0.37, (hidden, weight)) for one in (exact_loss, torch_loss, loss)
    )
    assert relative_error(ours[1], exact[1]) <= 1.1 * relative_error(theirs[1], exact[1])
    # hidden's gradient is rounded once more, by half an ulp, because its factor arrives only in the backward
    once_more = torch.finfo(torch.bfloat16).eps / 2
    assert relative_error(ours[0], exact[0]) <= 1.1 * relative_error(theirs[0], exact[0]) + once_more


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_without_cpu_support_is_widened_and_not_rounded(dtype, monkeypatch) -> None:
    """The loss then has float32 accuracy for the bfloat16 numbers given."""
    monkeypatch.setattr("ringtile.ops.cpu_isa", lambda: "generic")
    monkeypatch.setattr("ringtile.tiled.loss.WIDENED_CLASSES", 10)
    assert product_dtype(dtype, torch.device("cpu")) == torch.float32
    assert product_dtype(dtype, torch.device("cuda")) == dtype
    hidden, weight, labels, bias = problem(dtype=dtype)
    loss = tiled_linear_cross_entropy(hidden, weight, labels, bias, tile_tokens=5, **OPTIONS)
    oracle = reduced(definition(hidden, weight, labels, bias, **OPTIONS), labels, "mean")
    assert_near(loss, oracle, num_terms=VOCAB)
    for ours, theirs in zip(
        torch.autograd.grad(loss, (hidden, weight, bias)),
        torch.autograd.grad(oracle, (hidden, weight, bias)),
        strict=True,
    ):
        assert_near(ours, theirs, num_terms=1)  # rounded at the end


def test_autocast(isa) -> None:
    hidden, weight, labels, bias = problem(dtype=torch.float32)
    leaves = (hidden, weight, bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = tiled_linear_cross_entropy(hidden, weight, labels, bias, tile_tokens=5)
        theirs = functional.cross_entropy(functional.linear(hidden, weight, bias).float(), labels)
    exact = reduced(definition(hidden, weight, labels, bias), labels, "mean")
    if isa != "generic":
        assert_near(loss, theirs, num_terms=VOCAB)  # the same bfloat16 logits
    # plus half an ulp: errors of 31 logits may cancel by chance in the mean
    assert relative_error(loss, exact) <= relative_error(theirs, exact) + torch.finfo(torch.bfloat16).eps / 2
    oracle = torch.autograd.grad(exact, leaves)
    for ours, plain, exact in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(theirs, leaves), oracle, strict=True
    ):
        assert ours.dtype == torch.float32
        # torch applies the factor 1 / 15 before it rounds to bfloat16, ringtile after: half an ulp of difference
        assert relative_error(ours, exact) <= relative_error(plain, exact) + torch.finfo(torch.bfloat16).eps / 2


@pytest.mark.parametrize("options", [{"num_items": 9}, {"reduction": "sum"}])
def test_shard_without_labels_is_exactly_zero_with_a_graph(options) -> None:
    hidden, weight, labels, bias = problem()
    loss = tiled_linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), bias, **options)
    assert loss.item() == 0.0
    assert loss.requires_grad
    for grad in torch.autograd.grad(loss, (hidden, weight, bias)):
        assert grad.eq(0).all()


@pytest.mark.in_torch_too(long=True)
def test_no_tokens_at_all() -> None:
    hidden, weight, labels, _ = problem(0)
    loss = tiled_linear_cross_entropy(hidden, weight, labels, reduction="sum")
    assert loss.item() == 0.0
    assert [grad.eq(0).all().item() for grad in torch.autograd.grad(loss, (hidden, weight))] == [True, True]


@pytest.mark.in_torch_too(long=True)
@pytest.mark.parametrize("num_items", [None, 0, 0.0, torch.tensor(0), torch.tensor(0.0)])
def test_the_mean_of_nothing_is_what_torch_and_transformers_compute(num_items) -> None:
    """nan, with gradients of 0: a Trainer logs 0, and its step changes nothing."""
    hidden, weight, labels, _ = problem()
    labels = torch.full_like(labels, -100)
    ours = tiled_linear_cross_entropy(hidden, weight, labels, num_items=num_items)
    theirs = fixed_cross_entropy(hidden @ weight.T, labels, None if num_items is None else torch.as_tensor(num_items))
    assert ours.isnan()
    assert theirs.isnan()
    for loss in (ours, theirs):
        assert [grad.eq(0).all().item() for grad in torch.autograd.grad(loss, (hidden, weight))] == [True, True]


def test_tied_weight_used_twice_and_a_second_backward() -> None:
    hidden, weight, labels, _ = problem()
    loss = tiled_linear_cross_entropy(weight[labels.clamp(min=0)] + hidden, weight, labels, tile_tokens=5)
    oracle = reduced(definition(weight[labels.clamp(min=0)] + hidden, weight, labels), labels, "mean")
    for _ in range(3):
        assert_same([loss], [oracle], (hidden, weight))


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reduction": "max"}, "reduction is 'max'"),
        ({"label_smoothing": 1.5}, r"label_smoothing is 1.5, expected 0..1"),
        ({"softcap": -1.0}, "softcap is -1.0, expected at least 0"),
        ({"z_loss": float("nan")}, "z_loss is nan"),
        ({"logit_scale": float("inf")}, "logit_scale is inf"),
        ({"num_items": 0}, 'num_items is 0.0 with reduction "mean" and .* labels'),
        ({"num_items": -1, "labels": torch.full((NUM_TOKENS,), -100)}, "num_items is -1.0"),
        ({"num_items": 3, "reduction": "sum"}, 'num_items is 3.0 with reduction "sum"'),
        ({"tile_tokens": 0}, "tile_tokens is 0"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, r"labels are torch.int64 of shape \(4,\)"),
        ({"labels": torch.zeros(NUM_TOKENS)}, "labels are torch.float32"),
        ({"labels": torch.full((NUM_TOKENS,), VOCAB)}, r"labels go from 31 to 31, expected 0..30"),
        ({"labels": torch.full((NUM_TOKENS,), -1)}, "labels go from -1 to -1"),
        ({"weight": torch.zeros(VOCAB, HIDDEN + 1)}, r"weight has shape \(31, 9\)"),
        ({"weight": torch.zeros(VOCAB, HIDDEN)}, "x has dtype torch.float64 but the weight torch.float32"),
        ({"bias": torch.zeros(VOCAB - 1)}, "bias is"),
        ({"hidden": torch.zeros(NUM_TOKENS, HIDDEN, dtype=torch.int64)}, "hidden is torch.int64"),
    ],
)
def test_input_that_does_not_fit_is_refused(change, words) -> None:
    hidden, weight, labels, bias = problem()
    arguments = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias, **change}
    if "weight" in change:
        arguments["bias"] = None
    with pytest.raises(InputError, match=words):
        tiled_linear_cross_entropy(**arguments)
