"""`ringtile.sequence_log_probs` on 1 to 4 ranks against one process in float64, which knows nothing of ranks or tiles.

Shape letters: B rows, S tokens of a row, W ranks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hf_models import tiny_model
from peft import LoraConfig, get_peft_model
from pool import run_ranks
from ringtile import (
    InputError,
    LayoutError,
    MaskNotExpressibleError,
    RefusedError,
    RingMismatchError,
    RingtileError,
    sequence_log_probs,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

TEMPERATURE = 0.8
# Sums of a few hundred terms in float64 through two layers, as in test_torch_cp_checked.py, and a factor W. The norms
# of all families but GPT-2 round to float32 even in a float64 model, where a difference of 1e-16 may become one of
# 6e-8, and the gradients sum up to a hundred tokens.
TOLERANCE = {True: 1e-11, False: 1e-5}


class Rows(NamedTuple):
    input_ids: Tensor
    attention_mask: Tensor | None
    completion_mask: Tensor | None
    position_ids: Tensor | None = None


def ids(rows: int, tokens: int) -> Tensor:
    return torch.randint(3, 90, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


def ones_between(tokens: int, *spans: tuple[int, int]) -> Tensor:
    """int64 (rows, tokens): 1 in [begin, end) of each row."""
    mask = torch.zeros(len(spans), tokens, dtype=torch.int64)
    for row, (begin, end) in zip(mask, spans, strict=True):
        row[begin:end] = 1
    return mask


def scattered() -> Tensor:
    return torch.randint(0, 2, (3, 29), generator=torch.Generator().manual_seed(1)).bool()


PADDED = ones_between(29, (0, 29), (9, 29), (5, 21))
ROWS: dict[str, Callable[[], Rows]] = {
    "whole rows": lambda: Rows(ids(2, 32), None, None),
    "a length that divides by nothing": lambda: Rows(ids(2, 31), None, None),
    "padding left and right": lambda: Rows(ids(3, 29), PADDED, None),
    "positions that begin after the padding": lambda: Rows(
        ids(3, 29), PADDED, None, (PADDED.cumsum(1) - 1).masked_fill(PADDED == 0, 1)
    ),
    "completions at the end": lambda: Rows(ids(3, 29), PADDED, ones_between(29, (20, 29), (25, 29), (10, 21))),
    "a completion mask of any shape": lambda: Rows(ids(3, 29), PADDED.bool(), scattered()),
    "shards without a response": lambda: Rows(ids(2, 32), None, ones_between(32, (2, 4), (1, 3))),
    "completions of length 0": lambda: Rows(ids(2, 32), None, ones_between(32, (30, 32), (0, 0))),
    "no completion at all": lambda: Rows(ids(2, 32), None, torch.zeros(2, 32, dtype=torch.int64)),
    "rows of one token among longer ones": lambda: Rows(ids(3, 16), ones_between(16, (15, 16), (0, 1), (0, 16)), None),
    "rows of one token": lambda: Rows(ids(2, 1), None, None),
    "rows of two tokens": lambda: Rows(ids(2, 2), None, None),
    "padding alone": lambda: Rows(ids(2, 16), ones_between(16, (0, 0), (0, 0)), None),
    "packed documents": lambda: Rows(
        ids(2, 32), torch.tensor([[1] * 7 + [2] * 19 + [3] * 4 + [0] * 2, [1] * 32]), None
    ),
}


def documents_of(rows: Rows) -> Tensor:
    return torch.ones_like(rows.input_ids) if rows.attention_mask is None else rows.attention_mask.long()


def one_process(model: nn.Module, rows: Rows) -> tuple[Tensor, Tensor]:
    """log_probs and entropies (B, S - 1), each document of each row computed alone, from all of its logits."""
    found = torch.zeros(2, rows.input_ids.size(0), rows.input_ids.size(1), dtype=torch.float64)
    parts = []
    for row, documents in enumerate(documents_of(rows)):
        for number in documents.unique():
            (places,) = (documents == number).nonzero(as_tuple=True)
            if number == 0 or len(places) < 2:
                continue
            positions = torch.arange(rows.input_ids.size(1))[None]
            positions = positions if rows.position_ids is None else rows.position_ids[row : row + 1]
            logits = model(input_ids=rows.input_ids[row : row + 1, places], position_ids=positions[:, places]).logits
            log_probs = (logits[0, :-1] / TEMPERATURE).log_softmax(-1)
            of_tokens = log_probs.gather(1, rows.input_ids[row, places[1:], None])[:, 0]
            parts.append((row, places[1:] - 1, torch.stack([of_tokens, -(log_probs.exp() * log_probs).sum(-1)])))
    for row, places, values in parts:
        index = torch.zeros_like(found, dtype=torch.bool)
        index[:, row, places] = True
        found = found.masked_scatter(index, values)
    wanted = torch.ones_like(rows.input_ids) if rows.completion_mask is None else rows.completion_mask
    log_probs, entropy = torch.where(wanted[:, 1:] != 0, found[:, :, :-1], 0.0).unbind(0)
    return log_probs, entropy


def one_process_with_gradients(model: nn.Module, rows: Rows) -> tuple[list[Tensor], list[Tensor]]:
    oracle, params = one_process(model, rows), list(model.parameters())
    loss = loss_of(*oracle)
    if not loss.requires_grad:
        return [*oracle], [torch.zeros_like(p) for p in params]
    return [*oracle], list(torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True))


def loss_of(log_probs: Tensor, entropy: Tensor) -> Tensor:
    """A loss of whole rows with another factor for each token."""
    factors = torch.linspace(-1.0, 2.0, log_probs.numel(), dtype=torch.float64).view(log_probs.shape)
    return (factors * log_probs.exp()).sum() + (factors.flip(1) * entropy).sum()


def averaged(model: nn.Module) -> list[Tensor]:
    """The mean of the ranks' gradients, as an engine takes it; 0 for a parameter without one."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return gradients


def assert_equal(got: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for one, other in zip(got, exact, strict=True):
        assert one.shape == other.shape
        scale = max(1.0, other.abs().max().item()) if other.numel() else 1.0
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * scale)


# Gemma 3 can cap its logits, as Gemma 2 does, which only eager attention serves. Here it goes without windows, which
# are refused on more than one rank.
CAPPED = {"layer_types": ["full_attention"] * 2, "final_logit_softcapping": 2.0}


def cases_are_exact(families: list[str], names: list[str], layout: str, scheme: str) -> list[Tensor]:
    """What this rank gets, which the first one compares with one process."""
    results, is_first = [], dist.get_rank() == 0
    for family in families:
        model: Any = tiny_model(family, **(CAPPED if family == "gemma3" else {})).double().train()
        for name in names:
            rows = ROWS[name]()
            model.zero_grad()
            oracle, exact = one_process_with_gradients(model, rows) if is_first else ([], [])
            options = {"attention_mask": rows.attention_mask, "completion_mask": rows.completion_mask}
            ours = sequence_log_probs(
                model,
                rows.input_ids,
                dist.group.WORLD,
                **options,
                position_ids=rows.position_ids,
                temperature=TEMPERATURE,
                return_entropy=True,
                layout=layout,
                scheme=scheme,
            )
            try:
                loss_of(*ours).backward()
                found = [*(x.detach() for x in ours), *averaged(model)]
                if is_first:
                    assert_equal(found, [*oracle, *exact], TOLERANCE[family == "gpt2"])
            except AssertionError as error:
                raise AssertionError(f"{family}, {name}: {error}") from None
            results += found
    return results


def check(world_size: int, *case: Any) -> None:
    first, *others = run_ranks(world_size, cases_are_exact, *case)
    assert all(torch.equal(x, y) for rank in others for x, y in zip(first, rank, strict=True))


@pytest.mark.parametrize("world_size", [3, *(pytest.param(size, marks=pytest.mark.long) for size in (1, 2, 4))])
def test_rows_and_gradients_equal_one_process(world_size: int) -> None:
    check(world_size, ["gpt2"], list(ROWS), "zigzag", "ring")


@pytest.mark.parametrize(
    ("layout", "scheme", "first"),  # the first call of a model is compared with one process: here on too few tokens
    [
        ("contiguous", "ring", "rows of one token"),
        ("striped", "all_gather", "padding alone"),
        ("zigzag", "ulysses", "rows of two tokens"),
    ],
)
def test_layouts_and_schemes(layout: str, scheme: str, first: str) -> None:
    check(2, ["gpt2"], [first, "padding left and right", "shards without a response"], layout, scheme)


def test_models_that_scale_or_cap_their_logits() -> None:
    """Cohere multiplies them, Granite divides them, Gemma 3 caps them; Phi's head has a bias, Llama's nothing."""
    families = ["cohere", "granite", "gemma3", "phi", "llama"]
    check(2, families, ["completions at the end"], "zigzag", "ring")


def test_windows_on_one_rank() -> None:
    check(1, ["mistral-sliding"], ["whole rows", "padding left and right"], "zigzag", "ring")


# ---- one path for new, old and reference log-probabilities --------------------------------------


def ratios(dtype: torch.dtype) -> list[Tensor]:
    rows = ROWS["completions at the end"]()
    model = tiny_model("llama").to(dtype)
    call = functools.partial(
        sequence_log_probs,
        *(model, rows.input_ids, dist.group.WORLD),
        attention_mask=rows.attention_mask,
        completion_mask=rows.completion_mask,
    )
    with torch.no_grad():
        old = call()
    new, entropy = call(return_entropy=True)
    assert new.requires_grad
    assert entropy.requires_grad
    assert not old.requires_grad
    assert new.dtype == torch.float32
    return [(new - old).exp().detach(), torch.ones_like(old)]


@pytest.mark.parametrize(("dtype", "world_size"), [(torch.float32, 1), (torch.bfloat16, 3)])
def test_the_ratio_of_an_unchanged_policy_is_exactly_1(dtype: torch.dtype, world_size: int) -> None:
    for ratio, one in run_ranks(world_size, ratios, dtype):
        assert torch.equal(ratio, one)


# ---- engines: the mean of the ranks' gradients is the gradient of one process -------------------


def wrapped(engine: str, model: Any) -> Any:
    if engine == "DDP":
        return DistributedDataParallel(model)
    if engine == "FSDP2":
        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)
    if engine == "FSDP2 with a group for the head":
        fully_shard([model.model.norm, model.lm_head])
        return fully_shard(model)
    return model


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def engine_is_exact(engine: str, checkpointed: bool) -> None:
    """Each of the groups of two ranks has rows of its own; the loss is the mean over the groups."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "cp"))
    rows = [Rows(ids(3, 29) + group, PADDED, scattered()) for group in range(mesh.size(0))]
    model: Any = tiny_model("llama").double().train()
    params = list(model.parameters())
    exact = torch.autograd.grad(sum(loss_of(*one_process(model, each)) for each in rows) / len(rows), params)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model = wrapped(engine, model)
    own = rows[mesh["dp"].get_local_rank()]
    call = functools.partial(
        sequence_log_probs,
        *(model, own.input_ids, mesh["cp"]),
        attention_mask=own.attention_mask,
        completion_mask=own.completion_mask,
        temperature=TEMPERATURE,
        return_entropy=True,
    )
    with torch.no_grad():
        old, _ = call()
    ours = call()
    assert torch.equal(ours[0], old)
    loss_of(*ours).backward()
    gradients = averaged(model) if engine == "none" else [whole(p.grad) for p in model.parameters()]
    assert_equal(gradients, list(exact), TOLERANCE[False])


@pytest.mark.parametrize(
    ("engine", "checkpointed", "world_size"),
    [
        *(("DDP", True, 2), ("FSDP2", True, 4), ("FSDP2 with a group for the head", False, 2)),
        *(pytest.param(name, False, 2, marks=pytest.mark.long) for name in ("none", "DDP", "FSDP2")),
        pytest.param("DDP", False, 4, marks=pytest.mark.long),
    ],
)
def test_engines_take_the_mean(engine: str, checkpointed: bool, world_size: int) -> None:
    run_ranks(world_size, engine_is_exact, engine, checkpointed)


def zero3_is_exact() -> float:
    """The largest error of a gradient, in units of the largest of its weight's in float64."""
    import deepspeed
    import hf_engines
    import hf_training

    hf_training.enter_world()
    rows, model = Rows(ids(3, 29), PADDED, scattered()), tiny_model("llama").train()
    in_float64 = copy.deepcopy(model).double()
    loss = loss_of(*one_process(in_float64, rows))
    exact = dict(zip(model.state_dict(), torch.autograd.grad(loss, list(in_float64.parameters())), strict=True))
    stage: dict[str, Any] = {"train_micro_batch_size_per_gpu": 3, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD(model.parameters())
    with hf_engines.engine("ZeRO-3"):
        config = stage | {"zero_optimization": {"stage": 3}}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        masks = {"attention_mask": rows.attention_mask, "completion_mask": rows.completion_mask}
        options: dict[str, Any] = {**masks, "temperature": TEMPERATURE, "return_entropy": True}
        with torch.no_grad():
            old, _ = sequence_log_probs(engine, rows.input_ids, dist.group.WORLD, **options)
        ours = sequence_log_probs(engine, rows.input_ids, dist.group.WORLD, **options)
        assert torch.equal(ours[0], old)
        engine.backward(loss_of(*ours))
        found = {name: deepspeed.utils.safe_get_full_grad(x) for name, x in engine.module.named_parameters()}
    return max(float((found[name] - x).abs().max() / x.abs().max()) for name, x in exact.items())


def test_zero3_takes_the_mean() -> None:
    """float32: sums of some 100 terms that cancel; a gradient of a part of the row is off by more than 1e-2."""
    pytest.importorskip("deepspeed")
    assert max(run_ranks(2, zero3_is_exact)) <= 100 * torch.finfo(torch.float32).eps


def compiled_layers_are_exact() -> None:
    model, input_ids = tiny_model("llama"), ids(2, 32)
    eager = sequence_log_probs(model, input_ids, dist.group.WORLD)
    model.model.layers[1].compile(backend="eager")
    ours = sequence_log_probs(model, input_ids, dist.group.WORLD)
    ours.sum().backward()
    torch.testing.assert_close(ours, eager)


def test_compiled_layers() -> None:
    run_ranks(2, compiled_layers_are_exact)


def adapters_are_exact() -> None:
    rows = ROWS["completions at the end"]()
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model: Any = get_peft_model(tiny_model("llama").double(), config)
    params = [p for p in model.parameters() if p.requires_grad]
    oracle = one_process(model, rows)
    exact = torch.autograd.grad(loss_of(*oracle), params)
    with model.disable_adapter(), torch.no_grad():
        reference = one_process(model, rows)
        call = functools.partial(sequence_log_probs, temperature=TEMPERATURE, return_entropy=True)
        call = functools.partial(call, attention_mask=rows.attention_mask, completion_mask=rows.completion_mask)
        assert_equal(list(call(model, rows.input_ids, dist.group.WORLD)), list(reference), TOLERANCE[False])
    engine = DistributedDataParallel(model)
    ours = call(engine, rows.input_ids, dist.group.WORLD)
    assert_equal(list(ours), list(oracle), TOLERANCE[False])
    loss_of(*ours).backward()
    assert_equal([p.grad for p in params], list(exact), TOLERANCE[False])


def test_adapters_and_the_reference_without_them() -> None:
    run_ranks(2, adapters_are_exact)


def advantages_of_zero() -> list[bool]:
    """The gradient of a batch whose rewards are all equal is 0, and nothing hangs."""
    rows = ROWS["completions of length 0"]()
    model = DistributedDataParallel(tiny_model("llama"))
    log_probs = sequence_log_probs(model, rows.input_ids, dist.group.WORLD, completion_mask=rows.completion_mask)
    (torch.zeros(2, 1) * (log_probs - log_probs.detach()).exp()).sum().backward()
    return [bool(p.grad.eq(0).all()) for p in model.parameters()]


def test_advantages_that_are_all_0() -> None:
    for rank in run_ranks(2, advantages_of_zero):
        assert all(rank)


# ---- refusals -----------------------------------------------------------------------------------


class Own(nn.Module):
    """A model of one's own: logits (B, N, V) of input_ids (B, N), from each token alone."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.mixes = nn.Embedding(96, 8), nn.Linear(8, 96), mixes

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> Tensor:
        x = self.embedding(input_ids) + position_ids[..., None] / 100
        return self.head(x + x.mean(1, keepdim=True) if self.mixes else x)


def own_model_is_exact() -> None:
    model, input_ids = Own().double(), ids(2, 32)
    ours = sequence_log_probs(model, input_ids, dist.group.WORLD)
    logits = model(input_ids, torch.arange(32)[None], False)
    exact = logits[:, :-1].log_softmax(-1).gather(2, input_ids[:, 1:, None])[..., 0]
    assert_equal([ours], [exact], TOLERANCE[True])


def test_a_model_of_ones_own() -> None:
    run_ranks(2, own_model_is_exact)


def call(model: Any = None, rows: Rows | None = None, **options: Any) -> Any:
    rows = rows or ROWS["whole rows"]()
    model = tiny_model("llama") if model is None else model
    masks = {"attention_mask": rows.attention_mask, "completion_mask": rows.completion_mask}
    return sequence_log_probs(model, rows.input_ids, dist.group.WORLD, **{**masks, **options})


class Squared(Own):
    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> Tensor:
        return super().forward(input_ids, position_ids, use_cache) ** 2


class Without(Own):
    def forward(self, input_ids: Tensor, use_cache: bool, **kwargs: Any) -> Tensor:
        return super().forward(input_ids, torch.zeros_like(input_ids), use_cache)


class Pooled(Own):
    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> Tensor:
        return self.embedding(input_ids).sum()


def adapted_head() -> Any:
    return get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["lm_head"]))


def rounded() -> Any:
    return fully_shard(tiny_model("llama"), mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))


def of_rank(x: Tensor) -> Tensor:
    return x + dist.get_rank()


REFUSED: dict[str, tuple[type[RingtileError], Callable[[], Any]]] = {
    "input_ids are torch.float32": (InputError, lambda: call(rows=Rows(torch.ones(2, 8), None, None))),
    "input_ids are torch.int64 (2, 0)": (InputError, lambda: call(rows=Rows(ids(2, 8)[:, :0], None, None))),
    "completion_mask is torch.int64 (2, 8); expected bool or integers (2, 32)": (
        InputError,
        lambda: call(completion_mask=torch.ones(2, 8, dtype=torch.int64)),
    ),
    "attention_mask is torch.float32": (InputError, lambda: call(attention_mask=torch.ones(2, 32))),
    "position_ids are torch.int64 (32,)": (InputError, lambda: call(position_ids=torch.arange(32))),
    "temperature is 0.0": (InputError, lambda: call(temperature=0)),
    "2 intervals": (
        MaskNotExpressibleError,
        lambda: call(attention_mask=ones_between(32, (0, 32), (0, 32)) * (torch.arange(32) != 5)),
    ),
    "model is a str": (InputError, lambda: call("llama")),
    "Linear has no output projection": (RefusedError, lambda: call(nn.Linear(2, 2))),
    "the output projection of LlamaForCausalLM is a peft": (RefusedError, lambda: call(adapted_head())),
    "OptimizedModule is compiled as a whole": (RefusedError, lambda: call(torch.compile(tiny_model("llama")))),
    "'pow' was applied to the logits": (RefusedError, lambda: call(Squared())),
    "Without takes no position_ids": (RefusedError, lambda: call(Without())),
    "Pooled returns no logits of its output projection": (RefusedError, lambda: call(Pooled(), check=False)),
    "frequencies depend on the length of the row": (RefusedError, lambda: call(tiny_model("llama-dynamic"))),
    "multiplies queries by a temperature": (
        RefusedError,
        lambda: call(tiny_model("llama4", layer_types=["full_attention"] * 2)),
    ),
    "has layers of chunked attention": (RefusedError, lambda: call(tiny_model("llama4"))),
    "has a sliding window of 6 tokens": (RefusedError, lambda: call(tiny_model("mistral-sliding"))),
    "has a sliding window of 5 tokens": (RefusedError, lambda: call(tiny_model("gemma3"))),
    "hides from the ring": (RefusedError, lambda: call(tiny_model(attn_implementation="eager"))),
    "the engine has rounded log-probabilities to torch.bfloat16": (RefusedError, lambda: call(rounded(), check=False)),
    "2 ranks do not compute what one process computes": (RefusedError, lambda: call(Own(mixes=True))),
    "fingerprint of the data": (RingMismatchError, lambda: call(rows=Rows(of_rank(ids(2, 32)), None, None))),
    "disagree on fingerprint of the data": (RingMismatchError, lambda: call(completion_mask=of_rank(0 * ids(2, 32)))),
    "fingerprint of the data in call": (RingMismatchError, lambda: call(position_ids=of_rank(torch.arange(32)[None]))),
    "ranks disagree on fingerprint": (
        RingMismatchError,
        lambda: call(attention_mask=of_rank(torch.arange(32).repeat(2, 1)) // 16 + 1, completion_mask=0 * ids(2, 32)),
    ),
    "the shape of input_ids": (RingMismatchError, lambda: call(rows=Rows(ids(2, 32 + dist.get_rank()), None, None))),
    "temperature": (RingMismatchError, lambda: call(temperature=1.0 + dist.get_rank())),
    "ranks disagree on layout": (RingMismatchError, lambda: call(layout=["zigzag", "striped"][dist.get_rank()])),
    "layout is 'balanced'": (LayoutError, lambda: call(layout="balanced")),
}


def messages() -> list[tuple[str, str]]:
    """Return what each of them raises; the group goes on, and so does the model."""
    found = [message_of(raises) for _, raises in REFUSED.values()]
    call()
    return found


def message_of(function: Callable[[], Any]) -> tuple[str, str]:
    try:
        function()
    except RingtileError as error:
        return type(error).__name__, str(error)
    return "", "nothing"


def test_what_cannot_be_exact_is_refused_by_name() -> None:
    for rank in run_ranks(2, messages):
        for (part, (kind, _)), (name, message) in zip(REFUSED.items(), rank, strict=True):
            assert part in message, message
            assert name == kind.__name__, message


def error_of_one_rank() -> str:
    """A token id that the embedding does not have, in the shard of rank 0 alone."""
    input_ids = ids(1, 32)
    input_ids[0, 0] = 1000
    model = tiny_model("llama")
    with pytest.raises(IndexError if dist.get_rank() == 0 else RingtileError) as info:
        sequence_log_probs(model, input_ids, dist.group.WORLD, check=False)
    return str(info.value)


def test_an_error_inside_the_model_of_one_rank_is_told_to_the_others() -> None:
    _, other = run_ranks(2, error_of_one_rank)
    assert "rank 0" in other
    assert "index out of range" in other


def test_a_model_is_whole_again_after_an_error() -> None:
    model = Squared()
    with pytest.raises(RefusedError, match="pow"):
        sequence_log_probs(model, ids(1, 8))
    assert "forward" not in vars(model.head)
    assert not model._forward_hooks
    assert model(ids(1, 8), torch.arange(8)[None], False).shape == (1, 8, 96)


def _gradients_of_norms() -> list[Tensor]:
    """Of a model that takes the norm of hidden states, whose gradient is infinite at 0, where the embedding of 0 is."""
    model = tiny_model().double()
    model.model.embed_tokens.weight.data[0] = 0.0
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, x: x + 0.1 * x.square().sum(-1, keepdim=True).sqrt())
    rows, mesh = ids(2, 5), init_device_mesh("cpu", (dist.get_world_size(),))  # 5 tokens on 4 ranks, which take 8
    loss_of(*sequence_log_probs(model, rows, mesh=mesh, temperature=TEMPERATURE, return_entropy=True)).backward()
    expected = one_process_with_gradients(model, Rows(rows, None, None))[1]
    return [got - wanted for got, wanted in zip(averaged(model), expected, strict=True)]


def test_norms_of_padding_have_a_gradient() -> None:
    for difference in run_ranks(4, _gradients_of_norms)[0]:
        assert float(difference.abs().max()) < TOLERANCE[False]
