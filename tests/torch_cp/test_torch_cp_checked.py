"""What a model does inside `context_parallel` besides calling attention: right, refused, or shown by the check.

Shape letters: B batch, S global tokens, N local tokens, H heads, D head dim, W ranks.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hf_models import tiny_model
from pool import run_ranks
from ringtile import (
    ContextParallel,
    ContextParallelPlan,
    InputError,
    IntervalMask,
    Layout,
    LoopbackWorld,
    RefusedError,
    check_first_batch,
    context_parallel,
    tree_position_ids,
)
from ringtile.first_batch import proof
from ringtile.torch_context_parallel import first_block
from ringtile.torch_context_parallel import plan as plan_module
from ringtile.transport.loopback import LoopbackGroup
from strategies import dense
from test_torch_cp_context import assert_equal, expected, inputs
from test_torch_cp_flex import styled
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint


def in_block(function: Callable[[list[Tensor]], Any], world_size: int = 2, seq_len: int = 16, **arguments: Any) -> None:
    """function([q, k, v]) on local tokens (2, 4, N, 16), inside `context_parallel`."""
    x = inputs(seq_len)

    def on_rank(group: LoopbackGroup) -> None:
        tensors = [t.clone() for t in x[:3]]
        with context_parallel(group, buffers=tensors, buffer_seq_dims=[2] * 3, **arguments):
            function(tensors)

    LoopbackWorld(world_size).run(on_rank)


# ---- attention that the ring does not see -------------------------------------------------------


@pytest.mark.parametrize("name", ["_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention"])
def test_fused_kernels_by_their_own_names_are_refused(name: str) -> None:
    """The second is what torch.export keeps."""
    with pytest.raises(RefusedError, match=f"{name} attends this rank's tokens only"):
        in_block(lambda qkv: getattr(torch.ops.aten, name)(*qkv))


# ---- random numbers -----------------------------------------------------------------------------


def draw(x: list[Tensor]) -> None:
    torch.randn_like(x[0])


def draw_and_fail(x: list[Tensor]) -> None:
    draw(x)
    raise KeyError


def test_draws_from_the_default_generator_are_refused_when_the_block_ends() -> None:
    for drawing in (draw, lambda qkv: F.dropout(qkv[0], 0.1)):
        with pytest.raises(RefusedError, match="drawn from the default generator of cpu inside context_parallel"):
            in_block(drawing)
    in_block(lambda qkv: nn.Dropout(0.1).eval()(qkv[0]))
    in_block(lambda qkv: qkv[0].uniform_(generator=torch.Generator().manual_seed(0)))
    in_block(draw, world_size=1, mask=IntervalMask.causal(16))
    with pytest.raises(KeyError):  # another error is not hidden
        in_block(draw_and_fail)


# ---- checkpoints whose backward runs outside ----------------------------------------------------


def nested_checkpoint(function: Any, *qkv: Tensor, use_reentrant: bool) -> Any:
    return checkpoint(
        lambda *args: checkpoint(function, *args, use_reentrant=use_reentrant), *qkv, use_reentrant=use_reentrant
    )


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("how", [checkpoint, nested_checkpoint])
@pytest.mark.parametrize("style", [False, True])
@pytest.mark.parametrize("seq_len", [16, 8])  # 8: as many local tokens as heads, so that no shape tells the difference
def test_a_backward_outside_recomputes_in_the_ring(use_reentrant: bool, how: Any, style: bool, seq_len: int) -> None:
    x, mask = inputs(seq_len), IntervalMask.documents([5, seq_len - 5])

    def gradients(group: LoopbackGroup) -> list[Tensor | None]:
        tensors = [t.clone() for t in x]
        module: Any = styled(ContextParallel(2), sdpa, group) if style else sdpa
        with context_parallel(group, buffers=tensors, buffer_seq_dims=[2] * 4, layout="contiguous", mask=mask):
            leaves = [t.detach().clone().requires_grad_() for t in tensors[:3]]
            dout = tensors[3].clone()
            out = how(lambda *qkv: module(*(t.sin() for t in qkv)).sin(), *leaves, use_reentrant=use_reentrant)
        out.backward(dout)
        return [leaf.grad for leaf in leaves]

    leaves = [t.clone().requires_grad_() for t in x[:3]]
    wanted = torch.autograd.grad(sdpa(*(t.sin() for t in leaves), attn_mask=dense(mask)[:, None]).sin(), leaves, x.dout)
    ranks = LoopbackWorld(2).run(gradients)
    assert_equal([torch.cat(shards, 2) for shards in zip(*ranks, strict=True)], list(wanted))


def test_a_checkpoint_that_enters_the_block_itself() -> None:
    x = inputs(16)

    def gradients(group: LoopbackGroup) -> list[Tensor | None]:
        layout = Layout.contiguous(16, 2)
        leaves = [layout.shard(t, 2, group.transport.rank).requires_grad_() for t in x[:3]]

        def attend(*qkv: Tensor) -> Tensor:
            with context_parallel(group, layout=layout):
                return sdpa(*qkv)

        out = checkpoint(attend, *leaves, use_reentrant=True)
        out.backward(layout.shard(x.dout, 2, group.transport.rank))
        return [leaf.grad for leaf in leaves]

    ranks = LoopbackWorld(2).run(gradients)
    assert_equal([torch.cat(shards, 2) for shards in zip(*ranks, strict=True)], expected(x)[1:])


# ---- transformers' models -----------------------------------------------------------------------

LENGTHS = [7, 19, 6]


def batch(packed: bool) -> list[Tensor]:
    """input_ids, labels and position_ids."""
    ids = torch.randint(3, 90, (2, 32), generator=torch.Generator().manual_seed(0))
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    positions = torch.cat([torch.arange(n) for n in LENGTHS]) if packed else torch.arange(32)
    return [ids, labels, positions[None]]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def differences_in_block(
    model: Any, tensors: list[Tensor], single: Tensor, mask: IntervalMask | None, layout: str
) -> list[float]:
    """Return how far loss and gradients of input_ids, labels and position_ids in the page's loop are from `single`, the
    loss of one process, and its gradients; relative to the largest."""
    wanted = [single.detach(), *torch.autograd.grad(single, list(model.parameters()))]
    input_ids, labels, position_ids = tensors
    with context_parallel(
        dist.group.WORLD,
        buffers=tensors,
        buffer_seq_dims=[1, 1, 1],
        no_restore_buffers={input_ids, labels},
        mask=mask,
        layout=layout,
    ):
        loss = loss_of(model(input_ids, position_ids=position_ids).logits, labels)
        loss.backward()
    found = []
    for got, exact in zip([loss.detach(), *(p.grad for p in model.parameters())], wanted, strict=True):
        dist.all_reduce(got)
        found.append(((got - exact).abs().max() / exact.abs().max().clamp(min=1)).item())
    return found


def differences(
    family: str, packed: bool, use_cache: bool, mask: IntervalMask | None = None, layout: str = "zigzag"
) -> list[float]:
    model: Any = tiny_model(family).double().train()
    model.config.use_cache = use_cache
    input_ids, labels, position_ids = tensors = batch(packed)
    single = loss_of(model(input_ids, position_ids=position_ids).logits, labels)
    return differences_in_block(model, tensors, single, mask, layout)


PACKED = IntervalMask.documents(LENGTHS)
RIGHT = [
    ("llama", False, True, None, "zigzag"),
    ("llama", False, False, None, "striped"),
    ("llama", True, False, PACKED, "contiguous"),
    ("llama", True, False, PACKED, "zigzag"),
]


def all_differences() -> list[list[float]]:
    return [differences(*arguments) for arguments in RIGHT]


def test_a_transformers_model_as_the_page_calls_it() -> None:
    """float64: sums of a few hundred terms, through two layers."""
    for rank in run_ranks(2, all_differences):
        assert max(map(max, rank)) <= 1e-12


TREE = [-1, 0, 1, 1, 0], [9, 6, 5, 8, 4]
WAYS = [[0, 1, 2], [0, 1, 3], [0, 4]]  # the nodes on the way to each leaf


def differences_on_a_tree() -> list[float]:
    """Compare with each way as a row of its own, where the loss of a shared token counts in the first."""
    model: Any = tiny_model("llama").double().train()
    generator = torch.Generator().manual_seed(0)
    input_ids, labels = (torch.randint(3, 90, (2, 32), generator=generator) for _ in range(2))
    nodes = torch.arange(32).split(TREE[1])
    single, counted = torch.zeros((), dtype=torch.float64), torch.zeros(32, dtype=torch.bool)
    for way in (torch.cat([nodes[node] for node in nodes_of_way]) for nodes_of_way in WAYS):
        targets = labels[:, way].masked_fill(counted[way], -100)
        single = single + loss_of(model(input_ids[:, way]).logits, targets)
        counted[way] = True
    tensors = [input_ids, labels, tree_position_ids(*TREE)]
    return differences_in_block(model, tensors, single, IntervalMask.tree(*TREE), "zigzag")


def test_a_transformers_model_on_a_tree() -> None:
    """float64: the prompt once, and its branches as if each had its own. The gradient of a shared token goes through
    the model's norms as a sum here, and branch by branch there; all 5 compute in float32, and round it twice each."""
    for loss, *gradients in run_ranks(2, differences_on_a_tree):
        assert loss <= 1e-12
        assert max(gradients) <= 10 * 2**-24


REFUSED: dict[str, Callable[[], Any]] = {
    "position_ids of packed documents, which context_parallel": lambda: differences(
        "llama", True, False, IntervalMask.tree([-1, 0, 0], [7, 20, 5])
    ),
    "position_ids of packed documents": lambda: differences("llama", True, False),
    "mask=IntervalMask.from_position_ids(position_ids)": lambda: differences(
        "llama", True, False, IntervalMask.documents([16, 16])
    ),
    "transformers makes such a mask of local tokens": lambda: differences("mistral-sliding", False, False),
}


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (InputError, RefusedError) as error:
        return str(error)
    return "nothing"


def refusals() -> list[str]:
    """Return what each of them says; the group goes on."""
    return [message_of(call) for call in REFUSED.values()]


def test_transformers_habits_that_depend_on_the_local_length_are_refused() -> None:
    for rank in run_ranks(2, refusals):
        for part, message in zip(REFUSED, rank, strict=True):
            assert part in message


# ---- what a cut of the batch shows ---------------------------------------------------------------


def checked(
    family: str = "llama", positions: bool = True, labels: str = "", packed: bool = False, **options: Any
) -> Any:
    """Check a model of transformers with a loss of its own, or of the loop's."""
    mask, packed = options.pop("mask", None), options.pop("packed", False)
    ignored = options.pop("ignored", 0)
    model: Any = tiny_model(family, **options).double()
    tensors = dict(zip(("input_ids", "labels", "position_ids"), batch(packed), strict=True))
    tensors["labels"][:, :ignored] = -100

    def loss(model: Any, batch: Any) -> Tensor:
        given = {"position_ids": batch["position_ids"]} if positions else {}
        if labels:
            return model(batch["input_ids"], **given | {"labels": batch["labels"], labels: batch["labels"]}).loss
        return loss_of(model(batch["input_ids"], **given).logits, batch["labels"])

    reduction: Any = "mean" if labels else "sum"
    return check_first_batch(model, tensors, loss, dist.group.WORLD, mask=mask, reduction=reduction).num_modules


WINDOW = {"family": "mistral-sliding", "sliding_window": 20}
CHECKED: dict[str, tuple[str, dict[str, Any]]] = {
    "a loop": ("", {}),
    "eager attention": ("2 ranks do not compute what one process computes", {"attn_implementation": "eager"}),
    "own positions": ("2 ranks do not compute what one process computes", {"positions": False}),
    "own shifts": ("2 ranks do not compute what one process computes", {"labels": "labels"}),
    "means": ("2 ranks do not compute what one process computes", {"labels": "shift_labels", "ignored": 20}),
    "a window": (r"has a sliding window of 20 tokens, and attention gets no mask of it for the 32 tokens", WINDOW),
    "another window": ("sliding window of 20", WINDOW | {"mask": IntervalMask.sliding_window(32, 21)}),
    "its window": ("", WINDOW | {"mask": IntervalMask.sliding_window(32, 20)}),
    "short documents": ("", WINDOW | {"mask": IntervalMask.documents(LENGTHS), "packed": True}),
}


def said_of(what: list[str]) -> list[str]:
    return [message_of(functools.partial(checked, **CHECKED[name][1])) for name in what]


def test_what_a_model_derives_from_a_shard_is_seen_by_the_check() -> None:
    for rank in run_ranks(2, said_of, [*CHECKED]):
        for (name, (words, _)), message in zip(CHECKED.items(), rank, strict=True):
            assert message == "nothing" if not words else words in message, (name, message)


class Chunked(nn.Module):
    """A layer of Llama 4, whose chunk attention is not told of."""

    config, layer_idx = SimpleNamespace(layer_types=["chunked_attention"], attention_chunk_size=10), 0

    def forward(self, x: Tensor) -> Tensor:
        return sdpa(x, x, x, is_causal=True)


def chunks_said() -> list[str]:
    x = {"x": torch.randn(2, 2, 16, 8, generator=torch.Generator().manual_seed(0))}
    masks = (None, IntervalMask.sliding_window(16, 10), IntervalMask.chunked(16, 10))

    def check(mask: IntervalMask | None) -> None:
        plan = ContextParallelPlan(dist.group.WORLD, mask, seq_len=16)
        plan.check(Chunked(), lambda model, batch: model(batch["x"]).square().sum(), x, seq_dim=2, reduction="sum")

    return [message_of(functools.partial(check, mask)) for mask in masks]


def test_chunks_that_attention_is_not_told_of_are_refused_by_the_check() -> None:
    for no_mask, window, chunks in run_ranks(2, chunks_said):
        assert "has chunks of 10 tokens" in no_mask
        assert "has chunks of 10 tokens" in window
        assert chunks == "nothing"


def test_a_loop_that_nothing_compared_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(first_block, "compared", False)
    monkeypatch.setattr(plan_module, "_unwarned", threading.Lock())
    for world_size in (1, 2, 2):
        in_block(lambda qkv: sdpa(*qkv), world_size=world_size)
    assert sum("nothing has compared this loop with one process" in message for message in caplog.messages) == 1
    monkeypatch.setattr(plan_module, "_unwarned", threading.Lock())
    monkeypatch.setattr(first_block, "compared", True)
    caplog.clear()
    in_block(lambda qkv: sdpa(*qkv))
    assert not caplog.messages


def test_the_proof_is_seen_where_no_logging_is_configured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A script of a stranger configures none."""
    caplog.set_level("INFO", "ringtile")
    proof._tell("in the log")
    assert caplog.messages == ["in the log"]
    assert not capsys.readouterr().err
    caplog.set_level("NOTSET", "ringtile")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    proof._tell("on stderr")
    assert capsys.readouterr().err == "on stderr\n"
    monkeypatch.setattr(logging.getLogger("ringtile"), "level", logging.WARNING)
    proof._tell("nowhere")
    assert not capsys.readouterr().err
