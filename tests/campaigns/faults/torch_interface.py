"""Misuse of PyTorch's context-parallel interface, on two virtual ranks.

A trial draws a call and spoils some of its arguments. What it returns must be what one process computes, in float64;
otherwise the error must be ringtile's.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import strategies
import torch
import torch.nn.functional as F
from ringtile import (
    ContextParallel,
    ContextParallelPlan,
    IntervalMask,
    Layout,
    LoopbackWorld,
    PeerLostError,
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    create_cp_block_mask,
    flex_attention,
)
from ringtile.transport.loopback import LoopbackGroup
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

from faults import calls
from faults.counts import Counts

DEFAULT_TRIALS = 1500
TIMEOUT_SECONDS = 10.0
TOLERANCE = 1e-11  # sums of at most 100 products of float64 numbers of size 1, and what a backward makes of them


class Trial(NamedTuple):
    """A call: on a rank, whose results are local, heads before tokens; and of one process."""

    text: str
    layout: Layout
    on_rank: Callable[[LoopbackGroup], list[Tensor]]
    alone: Callable[[], list[Tensor]]


class Draw(random.Random):
    """Random arguments, a part of them wrong."""

    def spoiled(self, right: Any, *wrong: Any, share: float = 0.08) -> Any:
        return self.choice(wrong) if wrong and self.random() < share else right


JUNK = (None, 3, "x", 0.5, [], torch.zeros(3), torch.zeros(3, 3, dtype=torch.bool), object())


def judged(kind: Callable[[Draw], Trial]) -> calls.Trial:
    """Make a trial of that kind; it returns what is wrong with the results, or ""."""

    def trial(given: calls.Draw) -> str:
        drawn = kind(Draw(given.random.random()))
        try:
            ranks = LoopbackWorld(2, TIMEOUT_SECONDS).run(drawn.on_rank)
        except PeerLostError as error:
            if "nothing came" in str(error):
                raise TimeoutError(f"{drawn.text}: hung: {error}") from None
            raise
        finally:
            assert torch._C._len_torch_function_stack() == 0
        return compared(drawn, ranks)

    return trial


def compared(trial: Trial, ranks: list[list[Tensor]]) -> str:
    order = torch.cat([trial.layout.positions(rank) for rank in range(2)]).argsort()
    try:
        wanted = trial.alone()
    except Exception as error:
        return f"{trial.text}: one process raises {type(error).__name__}: {str(error)[:200]}"
    for shards, exact in zip(zip(*ranks, strict=True), wanted, strict=True):
        got = torch.cat(shards, 2).index_select(2, order)
        if got.shape != exact.shape or not (got - exact).abs().max() <= TOLERANCE * max(1.0, exact.abs().max()):
            error = (got - exact).abs().max() if got.shape == exact.shape else f"{got.shape} for {exact.shape}"
            return f"{trial.text}: off by {error}"
    return ""


def campaign(trials: int | None, seed: int) -> Counts:
    torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # type: ignore[attr-defined]  # dynamo serves one thread
    kinds = [judged(kind) for kind in (attention, attention, flex, style, resharded, besides)]
    return calls.campaign_of(kinds, DEFAULT_TRIALS if trials is None else trials, seed)


# ---- what is drawn ------------------------------------------------------------------------------


def tensors(draw: Draw, seq_len: int) -> list[Tensor]:
    """q, k, v, dout (B, H, S, D)."""
    heads, kv_heads = draw.choice(((2, 2), (2, 2), (4, 2), (1, 1)))
    shapes = ((heads, 8), (kv_heads, 8), (kv_heads, 4), (heads, 4))
    return [torch.randn(2, h, seq_len, d, dtype=torch.float64) for h, d in shapes]


def layout_of(draw: Draw, seq_len: int) -> Layout:
    return Layout.named(draw.choice(("zigzag", "contiguous", "striped")), seq_len, 2)


def mask_of(draw: Draw, seq_len: int) -> IntervalMask:
    cut = draw.randrange(seq_len + 1)
    return draw.choice(
        (
            IntervalMask.causal(seq_len),
            IntervalMask.full(seq_len),
            IntervalMask.documents([cut, seq_len - cut]),
            IntervalMask.documents([[cut, seq_len - cut], [0, seq_len]], causal=False),
            IntervalMask.sliding_window(seq_len, draw.randint(1, seq_len)),
        )
    )


def dense(mask: IntervalMask) -> Tensor:
    return strategies.dense(mask)[:, None]


def with_gradients(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def sdpa_alone(q: Tensor, k: Tensor, v: Tensor, attend: Tensor | None, **call: Any) -> Tensor:
    """Under a mask of booleans besides the call's own; a query that attends no key gets 0, as in the ring."""
    seq_len = q.size(2)
    allowed = torch.ones(1, 1, seq_len, seq_len, dtype=torch.bool) if attend is None else attend
    if call.pop("is_causal", False):
        allowed = allowed & torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
    if (own := call.pop("attn_mask", None)) is not None:
        allowed = allowed & (own if own.dim() != 3 else own[:, None])
    return sdpa(q, k, v, attn_mask=allowed, **call)


# ---- the trials ---------------------------------------------------------------------------------


def attention(draw: Draw) -> Trial:
    """scaled_dot_product_attention inside `context_parallel`, perhaps in a block inside another one."""
    seq_len = draw.randint(4, 40)
    x, layout = tensors(draw, seq_len), layout_of(draw, seq_len)
    mask = draw.choice((None, mask_of(draw, seq_len)))
    dims: list[Any] = [draw.choice((2, -2)) for _ in x]
    call: dict[str, Any] = {}
    if x[0].size(1) != x[1].size(1) or draw.random() < 0.2:
        call["enable_gqa"] = draw.spoiled(True, False)
    if draw.random() < 0.5:
        call["is_causal"] = True
    if draw.random() < (0.02 if "is_causal" in call else 0.3):
        local = (seq_len + 1) // 2
        call["attn_mask"] = draw.spoiled(
            draw.choice((dense(mask_of(draw, seq_len))[0, 0], dense(mask_of(draw, seq_len)))),
            torch.ones(local, local, dtype=torch.bool).tril(),
            torch.ones(local, seq_len, dtype=torch.bool),
            torch.rand(seq_len, seq_len) > 0.3,
            torch.zeros(seq_len, seq_len, dtype=torch.float64),
            share=0.4,
        )
    if draw.random() < 0.3:
        call["scale"] = 0.3
    if draw.random() < 0.05:
        call["dropout_p"] = 0.1
    if draw.random() < 0.1:
        dims[draw.randrange(4)] = draw.choice((0, 1, 3, 4, -5, None, "2", 2.0))
    block = {
        "buffer_seq_dims": draw.spoiled(dims, dims[:3], [2], 2, share=0.05),
        "layout": draw.spoiled(
            layout, "zebra", Layout.zigzag(seq_len + 1, 2), Layout.contiguous(max(seq_len, 3), 3), *JUNK, share=0.05
        ),
        "mask": draw.spoiled(mask, IntervalMask.causal(seq_len + 1), dense(mask_of(draw, seq_len)), 3, share=0.05),
    }
    nested = draw.choice((None, None, {"layout": layout}, {"layout": layout, "mask": mask}))
    spoil_q = draw.spoiled(None, lambda q: q[0], lambda q: q[:, :, :-1], lambda q: q[..., :-1], share=0.04)
    late = draw.random() < 0.2  # a checkpoint, whose backward runs when the block has ended

    def on_rank(group: LoopbackGroup) -> list[Tensor]:
        buffers = [t.clone() for t in x]
        with context_parallel(group, buffers=buffers, **block):
            if spoil_q is not None:
                return [sdpa(spoil_q(buffers[0]), *buffers[1:3], **call)]
            if nested is not None:
                with context_parallel(group, **nested):
                    return with_gradients(lambda *qkv: sdpa(*qkv, **call), *buffers)
            if late:
                leaves = [t.detach().clone().requires_grad_() for t in buffers[:3]]
                out: Any = checkpoint(lambda *qkv: sdpa(*qkv, **call), *leaves, use_reentrant=len(call) % 2 == 0)
                dout = buffers[3].clone()
            else:
                return with_gradients(lambda *qkv: sdpa(*qkv, **call), *buffers)
        out.backward(dout)
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    def alone() -> list[Tensor]:
        # The innermost block counts, with its mask or without one.
        attend = mask if nested is None else nested.get("mask")
        allowed = None if attend is None else dense(attend)
        return with_gradients(lambda *qkv: sdpa_alone(*qkv, allowed, **call), *x)

    return Trial(f"attention S {seq_len} {block} {call} nested {nested} late {late}", layout, on_rank, alone)


def two_windows(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k <= q) & ((q - k < 3) | (k < 2))


def bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score - (h + 1) * (q - k).abs() * 0.1


def flex_alone(x: list[Tensor], mask_mod: Any, score_mod: Any, scale: Any, seq_len: int) -> Tensor:
    """The formula."""
    q, k, v = (t if t.size(1) == x[0].size(1) else t.repeat_interleave(x[0].size(1) // t.size(1), 1) for t in x[:3])
    scores = q @ k.mT * (q.size(-1) ** -0.5 if scale is None else scale)
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(b, h, i, j), -torch.inf)
    return torch.softmax(scores, -1).nan_to_num() @ v


def flex_arguments(draw: Draw, seq_len: int, gqa: bool) -> dict[str, Any]:
    mask = mask_of(draw, seq_len)

    def in_mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row = b * (mask.begin.size(0) > 1)
        return (mask.begin[row, q] <= k) & (k < mask.end[row, q])

    return {
        "mask_mod": draw.choice((None, in_mask, in_mask, two_windows)),
        "score_mod": draw.spoiled(draw.choice((None, None, bias)), 3, "x", torch.zeros(2)),
        "scale": draw.spoiled(draw.choice((None, 0.3)), torch.tensor(0.3, requires_grad=True)),
        "enable_gqa": draw.spoiled(gqa, not gqa),
        "return_lse": False,
        "kernel_options": draw.spoiled(None, {"BLOCK_M": 16}, 3),
    }


def flex(draw: Draw) -> Trial:
    """ringtile's flex_attention, inside `context_parallel` or with a BlockMask of local queries; forward only."""
    seq_len = draw.randint(4, 40)
    x, layout = tensors(draw, seq_len), layout_of(draw, seq_len)
    call = flex_arguments(draw, seq_len, x[0].size(1) != x[1].size(1))
    mask_mod, in_block = call.pop("mask_mod"), draw.random() < 0.6
    rows = draw.spoiled(2, 1, 3) if mask_mod is two_windows else 2
    other = draw.spoiled(layout, layout_of(draw, seq_len), share=0.15)
    wrong_mask = draw.spoiled(None, *JUNK[1:], share=0.05)

    def attend(group: LoopbackGroup, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        block_mask = wrong_mask
        if mask_mod is not None and wrong_mask is None:
            block_mask = create_cp_block_mask(mask_mod, rows, None, seq_len, seq_len, group, load_balancer=other)
        arguments = list(call.values())
        with torch.no_grad():
            return [flex_attention(q, k, v, arguments[0], block_mask, *arguments[1:])]

    def on_rank(group: LoopbackGroup) -> list[Tensor]:
        buffers = [t.clone() for t in x[:3]]
        if in_block:
            with context_parallel(group, buffers=buffers, buffer_seq_dims=[2] * 3, layout=layout):
                return attend(group, *buffers)
        local: Any = context_parallel_shard(group, buffers, [2] * 3, layout)
        if mask_mod is None or wrong_mask is not None:  # then it is PyTorch's function, of local tokens
            with context_parallel(group, layout=layout):
                return attend(group, *local)
        return attend(group, *local)

    def alone() -> list[Tensor]:
        return [flex_alone(x, mask_mod, call["score_mod"], call["scale"], seq_len)]

    text = f"flex S {seq_len} {mask_mod} rows {rows} {call} in block {in_block} layout {other == layout} {wrong_mask}"
    return Trial(text, layout, on_rank, alone)


class Module(nn.Module):
    """Calls attention with the arguments that it gets, or with some of its own."""

    def __init__(self, function: Any, **own: Any) -> None:
        super().__init__()
        self.function = function
        self.own = own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs, **self.own)


def style(draw: Draw) -> Trial:
    """A module under ContextParallel that calls flex_attention, its arguments given by position, name or itself."""
    seq_len = draw.randint(4, 40)
    x, layout = tensors(draw, seq_len), layout_of(draw, seq_len)
    gqa = x[0].size(1) != x[1].size(1)
    call = flex_arguments(draw, seq_len, gqa)
    mask_mod = call.pop("mask_mod")
    places = {name: draw.choice(("position", "name", "module")) for name in call}
    places["block_mask"] = draw.choice(("position", "name"))
    forgotten = draw.random() < 0.05  # no block, so the module cannot know the layout without a BlockMask

    def on_rank(group: LoopbackGroup) -> list[Tensor]:
        plan = ContextParallelPlan(group, layout=layout)
        local = plan.shard(dict(zip("qkv", x[:3], strict=True)), 2).values()
        block_mask = None
        if mask_mod is not None:
            block_mask = create_cp_block_mask(mask_mod, 2, None, seq_len, seq_len, group, load_balancer=layout)
        given = {"score_mod": call["score_mod"], "block_mask": block_mask} | call
        args = [*local]
        for name in given:  # those at the front may be given by position
            if places[name] != "position":
                break
            args.append(given[name])
        named = {name: value for name, value in list(given.items())[len(args) - 3 :] if places[name] != "module"}
        own = {name: value for name, value in list(given.items())[len(args) - 3 :] if places[name] == "module"}
        module = ContextParallel(2, ContextParallel.AttentionType.FLEX)._apply(Module(flex_attention, **own), group)  # type: ignore[arg-type]
        with torch.no_grad(), contextlib.nullcontext() if forgotten else plan.attention():
            return [module(*args, **named)]

    def alone() -> list[Tensor]:
        return [flex_alone(x, mask_mod, call["score_mod"], call["scale"], seq_len)]

    text = f"style S {seq_len} {mask_mod} {call} {places} forgotten {forgotten}"
    return Trial(text, layout, on_rank, alone)


def resharded(draw: Draw) -> Trial:
    """shard, then unshard by what may not be the layout; the result is checked where no error says so."""
    seq_len = draw.randint(4, 40)
    x, layout = tensors(draw, seq_len), layout_of(draw, seq_len)
    name = next(n for n in ("zigzag", "contiguous", "striped") if Layout.named(n, seq_len, 2) == layout)
    balance = draw.spoiled(draw.choice((name, layout)), *JUNK[1:], "zebra", Layout.zigzag(seq_len + 2, 2))
    back = draw.spoiled(draw.choice((name, layout, None)), 3, object(), Layout.zigzag(seq_len + 2, 2))
    dims = [draw.spoiled(2, 1, 4, None, "2", 2.5, share=0.04) for _ in x]
    spoil = draw.spoiled("", "tensor", "one dim", "string", "mesh", share=0.15)

    def on_rank(group: LoopbackGroup) -> list[Tensor]:
        buffers: Any = {"tensor": x[0], "string": "abcd"}.get(spoil, x)
        mesh: Any = draw.choice((None, 3, "no group")) if spoil == "mesh" else group
        seq_dims: Any = 2 if spoil == "one dim" else dims
        local: Any = context_parallel_shard(mesh, buffers, seq_dims, balance)
        full: Any = context_parallel_unshard(mesh, local, seq_dims, back)
        return [layout.shard(t, 2, group.transport.rank) for t in full]

    text = f"resharded S {seq_len} by {balance} back by {back} dims {dims} {spoil}"
    return Trial(text, layout, on_rank, lambda: x)


def besides(draw: Draw) -> Trial:
    """A layer with something beside attention, written for one process."""
    seq_len = draw.randint(4, 40)
    x, layout = tensors(draw, seq_len), layout_of(draw, seq_len)

    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(F.dropout(q, dropout_p), k, v, enable_gqa=True)

    def noisy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q + noise * torch.rand_like(q), k, v, enable_gqa=True)

    def routed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = F.softmax(q @ torch.ones(8, seq_len // 2, dtype=q.dtype), -1)
        return sdpa(q * weights.amax(-1, keepdim=True), k, v, is_causal=True, enable_gqa=True)

    dropout_p, noise = draw.choice((0.0, 0.3)), draw.choice((0.1, 1.0))
    layer = draw.choice((dropped, noisy, routed))
    mask = draw.choice((None, None, mask_of(draw, seq_len)))

    def on_rank(group: LoopbackGroup) -> list[Tensor]:
        buffers = [t.clone() for t in x]
        with context_parallel(group, buffers=buffers, buffer_seq_dims=[2] * 4, layout=layout, mask=mask):
            return with_gradients(layer, *buffers)

    def alone() -> list[Tensor]:
        if mask is None:
            return with_gradients(layer, *x)
        # One process has no block: its mask comes from attention under the same mask, with one rank.
        with context_parallel(LoopbackWorld(1).groups[0], mask=mask):
            return with_gradients(layer, *x)

    text = f"besides S {seq_len} {layer.__name__} {dropout_p} mask {mask}"
    return Trial(text, layout, on_rank, alone)
