"""Calls of every public op and constructor with arguments that are right, nearly right, or absurd.

A worker process makes them, so that a crash ends it and is counted. An accepted call is compared with its definition in
float64. A rare call is over several virtual ranks, of which one may pass something else.

`python -m faults.op_calls TRIAL ...` makes the trials of these numbers again, in its own process, and shows tracebacks.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import ringtile
import torch
from oracle import dense_attention
from ringtile import (
    AttentionDropout,
    Layout,
    LoopbackWorld,
    RingtileError,
    ShardedSequence,
    ops,
    ring_attention,
)
from ringtile.sequence.mask import IntervalMask
from torch import Tensor, nn

from faults.counts import Counts

DEFAULT_TRIALS = 20_000
TRIAL_SECONDS = 30.0
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Of the largest magnitude of a tensor: rounding of inputs and weights, with room for sums over a few dozen tokens.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
NONSENSE: list[Any] = [None, "8", 2.5, -1, 0, 10**30, float("nan"), float("inf"), [1.0], object(), torch.relu, (), True]


def in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


KINDS: list[Callable[[Tensor], Tensor]] = [
    Tensor.to_sparse,
    Tensor.to_sparse_csr,
    Tensor.to_mkldnn,
    in_inference_mode,
    lambda x: torch.nested.nested_tensor([x, x]),
    lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    lambda x: x.new_zeros(()),
]


class Draw:
    """Random arguments. `hostile`: the chance that one of them is not what it should be."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.hostile = self.random.choice([0.0, 0.02, 0.08, 0.2])
        torch.manual_seed(seed)

    def chance(self, probability: float | None = None) -> bool:
        return self.random.random() < (self.hostile if probability is None else probability)

    def of(self, value: Any, *wrong: Any) -> Any:
        """The value; or, if hostile, something else."""
        return self.random.choice([*wrong, *NONSENSE]) if self.chance() else value

    def size(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def number(self, *values: float | None) -> Any:
        return self.of(self.random.choice(values), -1.0, 1e38, 1e39, 1e-44, 1e-320, torch.tensor(0.5), 1e400)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, high: int = 7) -> Any:
        """A tensor of any strides; if hostile, of another shape, dtype, device, kind or type, or freed."""
        if self.chance():
            dim = self.random.randrange(len(shape))
            shape = self.random.choice(
                [(*shape[:dim], *shape[dim + 1 :]), (*shape[:dim], 0, *shape[dim + 1 :]), (*shape, 2)]
            )
        if self.chance():
            dtype = self.random.choice([*FLOATS, torch.int64, torch.int32, torch.bool, torch.complex64])
        way = self.random.randrange(6)
        wide = (*shape[:-1], 2 * shape[-1] + 1) if shape else shape
        numbers = torch.randint(high, wide) if not (dtype.is_floating_point or dtype.is_complex) else torch.randn(wide)
        x = numbers.to(dtype)
        x = x[..., : shape[-1]] if shape else x
        if way == 0 and x.dim() > 1:
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        elif way == 1 and x.dim() > 2 and x.size(1):
            x = x[:, :1].expand(x.shape)
        elif way == 2 and shape and self.chance():
            x = numbers.to(dtype)[..., : 2 * shape[-1] : 2]  # another stride in the last dim
        elif way > 2:
            x = x.contiguous()
        if self.chance(self.hostile / 2):
            x = x.to("meta")
        elif self.chance(self.hostile / 2):
            x = x.clone()
            x.untyped_storage().resize_(self.random.choice([0, x.untyped_storage().nbytes() // 2]))
        elif self.chance(self.hostile / 2):
            with contextlib.suppress(RuntimeError, IndexError):  # of the kinds that do not take this dtype or shape
                x = self.random.choice(KINDS)(x)
        return self.of(x)

    def mask(self, rows: int, seq_len: int) -> Any:
        cut = self.size(0, seq_len)
        mask = self.random.choice(
            [
                lambda: IntervalMask.causal(self.of(seq_len)),
                lambda: IntervalMask.full(self.of(seq_len)),
                lambda: IntervalMask.sliding_window(seq_len, self.of(self.size(1, seq_len + 2))),
                lambda: IntervalMask.prefix_lm(seq_len, self.of(cut)),
                lambda: IntervalMask.chunked(seq_len, self.of(self.size(1, seq_len))),
                lambda: IntervalMask.documents(self.of([[cut, seq_len - cut]] * rows), self.chance(0.5)),
                lambda: IntervalMask.from_padding(self.tensor((rows, seq_len), torch.int64, 2)),
                lambda: IntervalMask.from_position_ids(self.tensor((rows, seq_len), torch.int64)),
                lambda: IntervalMask.from_bool(self.tensor((rows, seq_len, seq_len), torch.bool)),
                lambda: IntervalMask(*(self.tensor((rows, seq_len), torch.int32, seq_len) for _ in range(2))),
            ]
        )()
        return self.of(mask, torch.ones(seq_len, seq_len, dtype=torch.bool))

    def layout(self, seq_len: int, world_size: int, mask: Any) -> Any:
        lengths = [seq_len // 2, seq_len - seq_len // 2]
        seq_len = self.of(seq_len, seq_len + 1)
        make = self.random.choice(
            [
                lambda: Layout.contiguous(seq_len, self.of(world_size)),
                lambda: Layout.zigzag(seq_len, self.of(world_size)),
                lambda: Layout.striped(seq_len, self.of(world_size)),
                lambda: Layout.per_document(self.of(lengths), world_size),
                lambda: Layout.balanced(mask, self.of(world_size), chunk=self.of(2)),
                lambda: Layout.from_runs(self.of([[(0, 1, 0, seq_len)]])),
                lambda: Layout.from_tensor(self.of(Layout.contiguous(seq_len, world_size).tensor)),
            ]
        )
        return self.of(make(), "zigzag")


def freed(x: Tensor) -> bool:
    """Or expanded, or without a storage of strides."""
    odd = x.is_nested or x.is_quantized or x.layout != torch.strided
    return odd or x.untyped_storage().nbytes() < x.nbytes


def dense(mask: IntervalMask) -> Tensor:
    key = torch.arange(mask.seq_len)
    return (mask.begin[:, :, None] <= key) & (key < mask.end[:, :, None])


def differ(name: str, got: Tensor, expected: Tensor, dtype: torch.dtype) -> str:
    """What is wrong with a result; "" if nothing is. A result on meta has only a shape."""
    if got.shape != expected.shape:
        return f"{name} has shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if got.device.type == "meta" or expected.device.type == "meta":
        return ""
    got, expected = got.detach().double(), expected.detach().double()
    if not torch.equal(got.isnan(), expected.isnan()) or not torch.equal(got.isinf(), expected.isinf()):
        return f"{name} is not finite elsewhere than expected"
    got, expected = got[got.isfinite()], expected[expected.isfinite()]
    error = float((got - expected).abs().max()) if got.numel() else 0.0
    bound = TOLERANCE[dtype] * max(1.0, float(expected.abs().max()) if got.numel() else 0.0)
    return "" if error <= bound else f"{name} is off by {error:.1e}, expected at most {bound:.1e}"


# ---- trials: each makes one call, and returns what is wrong with its result, or "" --------------


def attention(draw: Draw) -> str:
    batch, seq_len, kv_heads, dtype = draw.size(0, 2), draw.size(1, 40), draw.size(1, 2), draw.random.choice(FLOATS)
    world_size = draw.random.choice([1, 1, 1, 2, 3])
    dims = draw.size(1, 20), draw.size(1, 20)
    heads = kv_heads * draw.size(1, 3)
    mask = draw.mask(max(batch, 1), seq_len)
    scale, softcap = draw.number(None, 0.3), draw.number(0.0, 5.0)
    q, k, v = (
        draw.tensor((batch, seq_len, count, dim), dtype)
        for count, dim in ((heads, dims[0]), (kv_heads, dims[0]), (kv_heads, dims[1]))
    )
    inputs = [x for x in (q, k, v) if isinstance(x, Tensor)]
    backward = draw.chance(0.5) and all(x.is_floating_point() for x in inputs) and len(inputs) == 3
    backward = backward and not any(freed(x) for x in inputs)  # they are cloned
    if world_size == 1:
        leaves = [x.detach().clone().requires_grad_() for x in inputs] if backward else [q, k, v]
        if draw.chance(0.5):
            out = ringtile.attention(*leaves, mask=mask, scale=scale, softcap=softcap)
        else:
            layout = draw.layout(seq_len, 1, mask)
            out = ring_attention(*leaves, mask=mask, layout=layout, scale=scale, softcap=softcap)
    else:
        layout = draw.layout(seq_len, world_size, mask)
        odd = draw.of({}, {"scale": 0.123}, {"mask": None}, {"layout": None}, {"q": None}, {"group": None})
        odd = odd if isinstance(odd, dict) else {}

        def on_rank(group: Any) -> Any:
            sequence = ShardedSequence(mask, layout, group)
            q_, k_, v_ = (sequence.shard(x, 1) for x in (q, k, v))
            usual = {"q": q_, "k": k_, "v": v_, "mask": mask, "layout": layout, "group": group}
            usual |= {"scale": scale, "softcap": softcap, **(odd if sequence.rank == 1 else {})}
            return sequence.unshard(ring_attention(**usual), 1)

        backward = False
        out = LoopbackWorld(world_size).run(on_rank)[0]
    scale = None if scale is None else float(scale)
    attend = dense(mask).expand(batch, -1, -1)
    if out.device.type == "meta":
        return differ("out", out, q.new_empty((*q.shape[:-1], v.size(-1))), q.dtype)
    wide = [x.detach().to(torch.float64, copy=True).requires_grad_() for x in inputs]
    expected, _ = dense_attention(*wide, attend, scale, float(softcap))
    problem = differ("out", out, expected, q.dtype)
    largest = abs(scale or 1.0) * q.size(-1) * float(wide[0].abs().amax() * wide[1].abs().amax()) if q.numel() else 0.0
    if largest * torch.finfo(ops.state_dtype(q.dtype)).eps > TOLERANCE[q.dtype]:
        return ""  # two scores that differ by their rounding have other weights
    if not backward or problem:
        return problem
    dout = torch.randn_like(expected)
    grads = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    wanted = torch.autograd.grad(expected, wide, dout.to(out.dtype).double())
    pairs = zip(("dq", "dk", "dv"), grads, wanted, strict=True)
    return next((found for name, x, y in pairs if (found := differ(name, x, y, q.dtype))), "")


def shard(draw: Draw) -> str:
    seq_len, world_size = draw.size(1, 30), draw.size(1, 3)
    layout = draw.layout(seq_len, world_size, None if draw.chance() else IntervalMask.causal(seq_len))
    if not isinstance(layout, Layout):
        layout = Layout.contiguous(seq_len, world_size)
    shape = [draw.size(0, 3) for _ in range(draw.size(1, 3))]
    dim = draw.random.randrange(len(shape))
    shape[dim] = seq_len
    x = draw.tensor(tuple(shape), draw.random.choice([*FLOATS, torch.int64, torch.bool]))
    dim = draw.of(dim, dim - len(shape), 9)
    dim = int(dim) if isinstance(dim, bool) else dim
    rank = draw.of(draw.size(0, world_size - 1))
    local = layout.shard(x, dim, rank)
    if local.device.type == "meta":
        return ""
    if not torch.equal(local, x.index_select(dim, layout.positions(rank))):
        return "shard took other tokens"
    whole = LoopbackWorld(layout.world_size).run(
        lambda group: ShardedSequence(IntervalMask.causal(layout.seq_len), layout, group).unshard(
            layout.shard(x, dim, group.transport.rank), dim
        )
    )
    return "" if all(torch.equal(each, x) for each in whole) else "unshard(shard(x)) is not x"


def plan(draw: Draw) -> str:
    seq_len, world_size, rows = draw.size(1, 30), draw.size(1, 4), draw.size(1, 2)
    mask = draw.mask(rows, seq_len)
    layout = draw.layout(seq_len, world_size, mask)
    heads, dim = draw.of(2), draw.of(4)
    found = ringtile.plan(mask, layout, num_heads=heads, num_kv_heads=draw.of(1), head_dim=dim, dtype=torch.float32)
    pairs = sum(round.num_pairs for rank in found.ranks for round in rank.rounds)
    expected = int(dense(mask).sum())
    return "" if pairs == expected and str(found) else f"{pairs} pairs, expected {expected}"


def raw_ops(draw: Draw) -> str:
    """The ops below the wrappers, with tensors that the wrappers would not make."""
    seq_len = draw.size(1, 20)
    layout = draw.of(Layout.contiguous(seq_len, 1).tensor, draw.tensor((2, 5), torch.int64))
    bounds = [draw.tensor((1, seq_len), torch.int32, seq_len) for _ in range(2)]
    runs = draw.of(ops.runs_tensor([(0, 1, 0, seq_len)]), draw.tensor((2, 4), torch.int64))
    x, y = (draw.tensor((2, seq_len, 3), torch.float32) for _ in range(2))
    gate, up, down = (draw.tensor((seq_len, 5), torch.float32) for _ in range(3))
    places = draw.tensor((seq_len, 2), torch.int64)
    labels, loss, lse = draw.tensor((seq_len,), torch.int64, 5), *(draw.tensor((seq_len,), torch.float32) for _ in "ab")
    q, k, out, dq, dk, dv = (draw.tensor((1, seq_len, 2, 4), torch.float32) for _ in range(6))
    state = draw.tensor((1, 2, seq_len), torch.float64)
    rows = draw.tensor((1,), torch.int64)
    drops = ops.WeightDropout(draw.of(0.3), draw.of(1), draw.of(2), draw.of(3), rows, labels)
    whole = {"mask": IntervalMask.causal(seq_len), "dropout": AttentionDropout(draw.of(0.3), rows, draw.of(1))}
    calls: list[Callable[[], Any]] = [
        lambda: ops.digest(*bounds, layout),
        lambda: ops.plan(*bounds, layout, draw.of(-1)),
        lambda: ops.layout_check(layout, draw.of(seq_len), draw.of(1)),
        lambda: ops.shard_seq_(x, runs, draw.of(1), y),
        lambda: ops.unshard_seq_(x, runs, draw.of(1), y),
        lambda: ops.glu_fwd(gate, up, draw.of(draw.size(0, 3))),
        lambda: ops.glu_bwd_(gate, up, down, draw.of(draw.size(0, 3))),
        lambda: ops.cross_entropy_fwd_bwd_(gate, labels, loss, lse, draw.of(-100), 0.0, draw.of(0.0), 0.0, True),
        lambda: ops.attn_fwd_(q, k, k, *bounds, runs, out, state, 0.5, draw.of(0.0), draw.chance(0.5)),
        lambda: ops.attn_fwd_(q, k, k, *bounds, runs, out, state, 0.5, 0.0, draw.chance(0.5), drops),
        lambda: ringtile.attention(q, k, k, **whole),
        lambda: ops.attn_bwd_(q, k, k, *bounds, runs, q, state, state, dq, dk, dv, 0.5, 0.0),
        lambda: ops.attn_delta(q, out, state),
        lambda: ops.dropout(gate, places, draw.of(0.5), draw.of(1), draw.of(2), draw.of(3)),
    ]
    try:
        draw.random.choice(calls)()
    except Exception as error:
        if "ringtile" in str(error) or isinstance(error, RingtileError):  # torch names the op whose schema is violated
            raise RingtileError(str(error)) from None
        raise
    return ""


class Gated(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, dtype=dtype) for sizes in ((4, 6), (4, 6), (6, 4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def tiled_mlp(draw: Draw) -> str:
    dtype = draw.random.choice(FLOATS)
    module = Gated(dtype)
    if draw.chance():
        module = module.to("meta")
    elif draw.chance():
        module.up.weight.data.untyped_storage().resize_(0)
    x = draw.tensor((draw.size(0, 2), draw.size(0, 9), 4), dtype)
    chosen = draw.of(module)
    try:
        out = ringtile.tiled_mlp(chosen, x, draw.of(draw.size(1, 5)), draw.chance(0.5))
    except RuntimeError as error:  # of the module itself?
        if isinstance(error, RingtileError) or not isinstance(chosen, nn.Module) or freed(module.up.weight):
            raise
        with contextlib.suppress(RuntimeError):
            module(x)
            raise
        raise RingtileError(str(error)) from None
    assert isinstance(out, Tensor)
    return differ("out", out, module.double()(x.double()), x.dtype)


def tiled_loss(draw: Draw) -> str:
    dtype, tokens = draw.random.choice(FLOATS), (draw.size(0, 2), draw.size(0, 9))
    hidden, weight = draw.tensor((*tokens, 4), dtype), draw.tensor((7, 4), dtype)
    labels = draw.of(draw.tensor(tokens, torch.int64), torch.full(tokens, -100))
    bias = draw.tensor((7,), dtype) if draw.chance(0.5) else None
    reduction, smoothing = draw.of(draw.random.choice(["sum", "none"])), draw.number(0.0, 0.1)
    scale, softcap, tile = draw.number(1.0, 0.5), draw.number(0.0, 3.0), draw.of(draw.size(1, 5))
    arguments = {"reduction": reduction, "label_smoothing": smoothing, "logit_scale": scale, "softcap": softcap}
    loss = ringtile.tiled_linear_cross_entropy(hidden, weight, labels, bias, tile_tokens=tile, **arguments)
    logits = nn.functional.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    logits = logits * float(scale)
    logits = float(softcap) * torch.tanh(logits / float(softcap)) if float(softcap) else logits
    expected = nn.functional.cross_entropy(
        logits.reshape(-1, 7), labels.reshape(-1), reduction=reduction, label_smoothing=float(smoothing)
    )
    return differ("loss", loss, expected.view(loss.shape), hidden.dtype)


TRIALS = (attention, attention, shard, plan, raw_ops, raw_ops, tiled_mlp, tiled_loss)

# ---- the campaign -------------------------------------------------------------------------------


Trial = Callable[[Draw], str]


def outcome_of(seed: int, kinds: Sequence[Trial] = TRIALS) -> tuple[str, str]:
    """The field of Counts that trial `seed` counts for, and a note."""
    draw = Draw(seed)
    trial = draw.random.choice(kinds)
    try:
        problem = trial(draw)
    except RingtileError:
        return "named", ""
    except Exception as error:
        traceback.print_exc()
        return "unnamed", f"trial {seed} ({trial.__name__}): {type(error).__name__}: {str(error).splitlines()[:1]}"
    return ("silent", f"trial {seed} ({trial.__name__}): {problem}") if problem else ("right", "")


def work(connection: Connection, kinds: Sequence[Trial], first: int, last: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for seed in range(first, last):
        with contextlib.redirect_stderr(io.StringIO()):
            connection.send(outcome_of(seed, kinds))


def campaign(trials: int | None, seed: int) -> Counts:
    return campaign_of(TRIALS, trials, seed)


def campaign_of(kinds: Sequence[Trial], trials: int | None, seed: int) -> Counts:
    counts = Counts()
    first, last = seed * 10**7, seed * 10**7 + (DEFAULT_TRIALS if trials is None else trials)
    context = multiprocessing.get_context("fork")
    while first < last:
        ours, theirs = context.Pipe()
        worker = context.Process(target=work, args=(theirs, kinds, first, last), daemon=True)
        worker.start()
        theirs.close()
        with contextlib.suppress(EOFError):
            while first < last and ours.poll(TRIAL_SECONDS):
                field, note = ours.recv()
                setattr(counts, field, getattr(counts, field) + 1)
                counts.notes += [note] if note else []
                first += 1
            if first < last:
                counts.hangs += 1
                counts.notes.append(f"trial {first}: no answer after {TRIAL_SECONDS:.0f} s")
                first += 1
                worker.kill()
        worker.join(TRIAL_SECONDS)
        if worker.exitcode not in (0, None, -9):
            counts.crashes += 1
            counts.notes.append(f"trial {first}: the process ended with {worker.exitcode}")
            first += 1
        worker.kill()
    return counts


if __name__ == "__main__":
    for number in sys.argv[1:]:
        print(number, *outcome_of(int(number)))
