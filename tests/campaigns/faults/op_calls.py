"""Calls of every public op and constructor with arguments that are right, nearly right, or absurd.

An accepted call is compared with its definition in float64. A rare call is over several virtual ranks, of which one may
pass something else: what it is refused, every other rank is told, and the group is as good as before.

`python -m faults.op_calls TRIAL ...` makes the trials of these numbers again, in its own process, and shows tracebacks.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import ringtile
import torch
from oracle import dense_attention
from ringtile import (
    AttentionDropout,
    IntervalMask,
    Layout,
    LoopbackWorld,
    RefusedError,
    RingMismatchError,
    RingtileError,
    ShardedSequence,
    ops,
    ring_attention,
)
from ringtile.attn.call import Options
from ringtile.attn.traced import SequenceTensors, attend
from strategies import dense
from torch import Tensor, nn
from torch.autograd import forward_ad

from faults.calls import FLOATS, TOLERANCE, Draw, campaign_of, differ, freed, outcome_of
from faults.counts import Counts

DEFAULT_TRIALS = 20_000

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
    if world_size > 1:
        out, told = over_ranks(
            draw, world_size, seq_len, mask, {"q": q, "k": k, "v": v, "scale": scale, "softcap": softcap}
        )
        if out is None:
            return told
        backward = False
    else:
        leaves = [x.detach().clone().requires_grad_() for x in inputs] if backward else [q, k, v]
        if draw.chance(0.5):
            out = ringtile.attention(*leaves, mask=mask, scale=scale, softcap=softcap)
        else:
            layout = draw.layout(seq_len, 1, mask)
            out = ring_attention(*leaves, mask=mask, layout=layout, scale=scale, softcap=softcap)
    scale = None if scale is None else float(scale)
    allowed = dense(mask).expand(batch, -1, -1)
    if out.device.type == "meta":
        return differ("out", out, q.new_empty((*q.shape[:-1], v.size(-1))), q.dtype)
    wide = [x.detach().to(torch.float64, copy=True).requires_grad_() for x in inputs]
    expected, _ = dense_attention(*wide, allowed, scale, float(softcap))
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
    if isinstance(mask, IntervalMask):
        mask = mask & draw.of(mask)
    if isinstance(layout, Layout):
        layout.local_len(draw.of(0))
    heads, dim = draw.of(2), draw.of(4)
    found = ringtile.plan_attention(
        mask, layout, num_heads=heads, num_kv_heads=draw.of(1), head_dim=dim, dtype=torch.float32
    )
    pairs = sum(round.num_pairs for rank in found.ranks for round in rank.rounds)
    expected = int(dense(mask).sum())
    return "" if pairs == expected and str(found) else f"{pairs} pairs, expected {expected}"


def raw_ops(draw: Draw) -> str:
    """The ops below the wrappers, with tensors that the wrappers would not make."""
    seq_len = draw.size(1, 20)
    layout = draw.of(Layout.contiguous(seq_len, 1).tensor, draw.tensor((2, 5), torch.int64))
    bounds = [draw.tensor((1, seq_len), torch.int32, seq_len) for _ in range(2)]
    two_bounds = [draw.tensor((1, seq_len), torch.int32, seq_len) for _ in range(2)]
    key_side = dict(zip(("key_begin", "key_end"), two_bounds, strict=True), positions=draw.of(torch.arange(seq_len)))
    runs = draw.of(ops.runs_tensor([(0, 1, 0, seq_len)]), draw.tensor((2, 4), torch.int64))
    x, y = (draw.tensor((2, seq_len, 3), torch.float32) for _ in range(2))
    gate, up, down = (draw.tensor((seq_len, 5), torch.float32) for _ in range(3))
    places = draw.tensor((seq_len, 2), torch.int64)
    labels, loss, lse = draw.tensor((seq_len,), torch.int64, 5), *(draw.tensor((seq_len,), torch.float32) for _ in "ab")
    q, k, out, dq, dk, dv = (draw.tensor((1, seq_len, 2, 4), torch.float32) for _ in range(6))
    state, part_lse = (draw.tensor((1, 2, seq_len), dtype) for dtype in (torch.float64, torch.float32))
    rows = draw.tensor((1,), torch.int64)
    drops = draw.of(0.3), draw.of(1), draw.of(2), draw.of(3), rows, labels
    whole = {"mask": IntervalMask.causal(seq_len), "dropout": AttentionDropout(draw.of(0.3), rows, draw.of(1))}
    calls: list[Callable[[], Any]] = [
        lambda: ops.digest(*bounds, layout),
        lambda: ops.mask_hulls(*bounds, *two_bounds, draw.of(draw.size(0, 3))),
        lambda: ops.plan_rank(*bounds, layout, draw.of(0), draw.chance(0.5)),
        lambda: ops.plan_counts(*bounds, layout),
        lambda: ops.balance(*bounds, draw.of(None, places), draw.of(2), draw.of(3)),
        lambda: ops.pieces(*bounds, runs, *two_bounds, draw.of(torch.arange(seq_len)), draw.of(9), draw.of(9)),
        lambda: ops.layout_check(layout, draw.of(seq_len), draw.of(1)),
        lambda: ops.rows_pack_([x], runs, draw.of(1), [y]),
        lambda: draw.random.choice((ops.rows_unpack_, ops.rows_add_))([x], runs, draw.of(1), [y]),
        lambda: ops.glu_fwd(gate, up, draw.of(draw.size(0, 3))),
        lambda: ops.glu_bwd_(gate, up, down, draw.of(draw.size(0, 3))),
        lambda: ops.cross_entropy_fwd_bwd_(gate, labels, loss, lse, draw.of(-100), 0.0, draw.of(0.0), 0.0, True),
        lambda: ops.attn_fwd_(q, k, k, *bounds, runs, out, state, 0.5, draw.of(0.0), draw.chance(0.5)),
        lambda: ops.attn_fwd_(q, k, k, *bounds, runs, out, state, 0.5, 0.0, draw.chance(0.5), *drops),
        lambda: ops.attn_fwd_(q, k, k, *bounds, runs, out, state, 0.5, 0.0, draw.chance(0.5), **key_side),
        lambda: ops.attn_bwd_(q, k, k, *bounds, runs, q, state, state, dq, dk, dv, 0.5, 0.0, **key_side),
        lambda: ringtile.attention(q, k, k, **whole),
        lambda: ops.attn_bwd_(q, k, k, *bounds, runs, q, state, state, dq, dk, dv, 0.5, 0.0),
        lambda: ops.attn_delta(q, out, state),
        lambda: ops.attn_merge_(q, part_lse, out, state, draw.chance(0.5), draw.of(0), draw.of(torch.arange(seq_len))),
    ]
    try:
        draw.random.choice(calls)()
    except Exception as error:
        if "ringtile" in str(error) or isinstance(error, RingtileError):  # torch names the op whose schema is violated
            raise RingtileError(str(error)) from None
        raise
    return ""


def over_ranks(
    draw: Draw, world_size: int, seq_len: int, mask: Any, arguments: dict[str, Any]
) -> tuple[Tensor | None, str]:
    """The whole output, of ranks of which one may pass something else; or None, and what is wrong with who was told."""
    layout = draw.layout(seq_len, world_size, mask)
    odd = draw.random.randrange(world_size)
    name = draw.random.choice(["q", "k", "v", "scale", "softcap", "mask", "layout", "attention_kernel"])
    changes = {name: draw.of(draw.tensor((1, 4, 2, 4), torch.float64), 0.123)} if draw.chance(0.5) else {}

    def on_rank(group: Any) -> tuple[Tensor | None, RingtileError | None]:
        sequence = ShardedSequence(mask, layout, group)
        sharded = {n: sequence.shard(x, 1) if n in "qkv" else x for n, x in arguments.items()}
        usual = {**sharded, "mask": mask, "layout": layout, "group": group}
        error = None
        try:
            ring_attention(**{**usual, **(changes if sequence.rank == odd else {})})
        except RingtileError as caught:
            error = caught
        return sequence.unshard(ring_attention(**usual), 1), error  # the group is as good as before

    outs, errors = zip(*LoopbackWorld(world_size, timeout_seconds=20).run(on_rank), strict=True)
    told = [isinstance(error, RingMismatchError) for error in errors]
    if any(error is not None for error in errors) and sum(told) < world_size - 1:
        return None, f"not every rank was told: {errors}"
    return outs[0], ""


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


def derivatives(draw: Draw) -> str:
    """A transform of an op, or a derivative of its gradients: that of its definition, or refused."""
    seq_len, heads, reduction = draw.size(2, 5), draw.size(1, 2), draw.random.choice(["sum", "none"])
    mask = IntervalMask.causal(seq_len)
    sequence = ShardedSequence(mask, Layout.contiguous(seq_len, 1))
    tensors = SequenceTensors(sequence.begin, sequence.end, sequence.layout_tensor)
    mlp, weight = Gated(torch.float64), torch.randn(7, 4, dtype=torch.float64)
    labels = torch.randint(7, (1, seq_len, heads))

    def loss(x: Tensor) -> Tensor:
        each = nn.functional.cross_entropy((x @ weight.T).flatten(0, 2), labels.flatten(), reduction=reduction)
        return each.view(labels.shape) if reduction == "none" else each

    ops_and_definitions: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "attention": (lambda x: ring_attention(x, x, x, sequence), lambda x: dense_attention(x, x, x, dense(mask))[0]),
        # What a tracer sees; it alone differentiates.
        "the op": (
            lambda x: attend(x, x, x, tensors, Options(0.5))[0],
            lambda x: dense_attention(x, x, x, dense(mask))[0],
        ),
        "shard": (lambda x: sequence.shard(x, 1), lambda x: x.clone()),
        "unshard": (lambda x: sequence.unshard(x, 1), lambda x: x.clone()),
        "GLU": (lambda x: ringtile.tiled_mlp(mlp, x, 3), mlp),
        "MLP": (lambda x: ringtile.tiled_mlp(mlp, x, 3, True), mlp),
        "loss": (
            lambda x: ringtile.tiled_linear_cross_entropy(x, weight, labels, reduction=reduction, tile_tokens=3),
            loss,
        ),
    }
    name = draw.random.choice(list(ops_and_definitions))
    how = draw.random.choice([way for way in TRANSFORMS if name != "the op" or way in GRADIENTS])
    x = torch.randn(1, seq_len, heads, 4, dtype=torch.float64)
    op, definition = ops_and_definitions[name]
    try:
        got = TRANSFORMS[how](op, x)
    except RefusedError:
        promised = how == "gradient" or (how in ("vmap", "twice") and name in ("shard", "unshard"))
        if promised or (how, name) == ("vmap", "attention"):
            return f"{how} of {name} was refused"
        raise
    return differ(f"{how} of {name}", got, TRANSFORMS[how](definition, x), torch.float64)


def of_gradient(f: Callable[[Tensor], Tensor], x: Tensor, wanted: str) -> Tensor:
    """The gradient of sum(factor f(2 x)^3), or how the sum of its squares changes with x, or with the factor."""
    x, factor = x.clone().requires_grad_(), torch.ones((), dtype=x.dtype, requires_grad=wanted != "x")
    (grad,) = torch.autograd.grad((factor * f(2 * x) ** 3).sum(), x, create_graph=True)
    return grad if not wanted else torch.autograd.grad(grad.square().sum(), factor if wanted == "factor" else x)[0]


def tangent(f: Callable[[Tensor], Tensor], x: Tensor, of_backward: bool) -> Tensor:
    """Return what forward-mode AD makes of the op, or of its backward."""
    with forward_ad.dual_level():
        if of_backward:
            x = x.clone().requires_grad_()
            out = f(x)
            dout = torch.ones_like(out)
            (found,) = torch.autograd.grad(out, x, forward_ad.make_dual(dout, dout))
        else:
            f(x)  # no dual number, no derivative
            found = f(forward_ad.make_dual(x, x.cos()))
        primal, change = forward_ad.unpack_dual(found)
        return torch.zeros_like(primal) if change is None else change


GRADIENTS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "gradient": lambda f, x: of_gradient(f, x, ""),
    "twice": lambda f, x: of_gradient(f, x, "x"),
    "twice, of a factor that needs grad": lambda f, x: of_gradient(f, x, "x and factor"),
    "twice, by the factor": lambda f, x: of_gradient(f, x, "factor"),
}
TRANSFORMS = {
    **GRADIENTS,
    "dual number": lambda f, x: tangent(f, x, False),
    "dual gradient": lambda f, x: tangent(f, x, True),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sin().sum())(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sin().sum())(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x.cos()])),
    "vmap in jvp": lambda f, x: torch.func.jvp(torch.func.vmap(f), (x[None],), (x[None],))[1],
    "jvp in vmap": lambda f, x: torch.func.vmap(lambda x: torch.func.jvp(f, (x,), (x,))[1])(x[None]),
}


def not_finite(draw: Draw) -> str:
    """Numbers that are not finite stay where the mask lets them go, and all others are what one rank computes."""
    seq_len, world_size = draw.size(6, 20), draw.size(1, 4)
    q, k, v, dout = tensors = [torch.randn(1, seq_len, 2, 3, dtype=torch.float64) for _ in range(4)]
    for _ in range(draw.size(1, 2)):
        x = draw.random.choice(tensors)
        x.view(-1)[draw.random.randrange(x.numel())] = draw.random.choice([torch.inf, -torch.inf, torch.nan])
    cut = draw.size(1, seq_len - 1)
    window = IntervalMask.sliding_window(seq_len, cut)
    documents = IntervalMask.documents([cut, seq_len - cut], causal=False)
    mask = draw.random.choice([IntervalMask.causal(seq_len), window, documents])
    made = draw.random.choice([Layout.contiguous, Layout.striped])(seq_len, world_size)
    wanted, got = (finite_outputs(tensors, mask, layout) for layout in (Layout.contiguous(seq_len, 1), made))
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, wanted, strict=True):
        if not torch.equal(x.isfinite(), y.isfinite()):
            return f"other numbers of {name} are finite on {world_size} ranks"
        if problem := differ(name, x[x.isfinite()], y[y.isfinite()], torch.float64):
            return problem
    attends = dense(mask)[0]

    def bad(x: Tensor) -> Tensor:
        return ~x.isfinite().all(-1)[0]  # (tokens, heads)

    forward = bad(q) | (attends[:, :, None] & (bad(k) | bad(v))[None]).any(1)
    backward = forward | bad(dout)
    of_keys = (attends[:, :, None] & backward[:, None]).any(0)
    reached = (forward, forward, backward, of_keys, of_keys)
    for name, x, may in zip(("out", "lse", "dq", "dk", "dv"), got, reached, strict=True):
        if (bad(x if x.dim() == 4 else x[..., None]) & ~may).any():
            return f"{name} is not finite where the mask does not lead"
    return ""


def finite_outputs(tensors: list[Tensor], mask: IntervalMask, layout: Layout) -> list[Tensor]:
    """out, lse (as out), dq, dk, dv, global."""

    def on_rank(group: Any) -> list[Tensor]:
        sequence = ShardedSequence(mask, layout, group)
        *local, dout = (sequence.shard(x, 1) for x in tensors)
        leaves = [x.requires_grad_() for x in local]
        out, lse = ring_attention(*leaves, sequence, return_lse=True)
        gradients = torch.autograd.grad(out, leaves, dout)
        return [sequence.unshard(x.detach(), 1) for x in (out, lse.transpose(1, 2), *gradients)]

    return LoopbackWorld(layout.world_size).run(on_rank)[0]


# ---- the campaign -------------------------------------------------------------------------------

TRIALS = (attention, attention, shard, plan, raw_ops, raw_ops, tiled_mlp, tiled_loss, derivatives, not_finite)


def campaign(trials: int | None, seed: int) -> Counts:
    return campaign_of(TRIALS, DEFAULT_TRIALS if trials is None else trials, seed)


if __name__ == "__main__":
    for number in sys.argv[1:]:
        print(number, *outcome_of(int(number), TRIALS))
