"""Calls of the public ops that have no right answer: each is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ringtile import (
    InputError,
    IntervalMask,
    Layout,
    LoopbackWorld,
    Refused,
    ShardedSequence,
    attention,
    causal_conv1d,
    context_parallel,
    gated_delta_rule,
    ops,
    ring_attention,
    selective_scan,
    ssd,
    tiled_linear_cross_entropy,
    tiled_mlp,
)
from ringtile.attn.call import Options
from ringtile.attn.op import SequenceTensors, attend
from ringtile.transport.loopback import LoopbackGroup
from torch import Tensor, nn
from torch.autograd import forward_ad

B, S, H, D, V = 1, 8, 2, 4, 7
MASK, LAYOUT = IntervalMask.causal(S), Layout.contiguous(S, 1)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, 6), nn.Linear(D, 6), nn.Linear(6, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def tokens(batch: int = B, seed: int = 0) -> Tensor:
    return torch.randn(batch, S, H, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LABELS = torch.arange(B * S * H).view(B, S, H) % V
WEIGHT = torch.linspace(-1, 1, V * D, dtype=torch.float64).view(V, D)
GATED = Gated().double()
ONE = ShardedSequence(MASK, LAYOUT)
OF_ONE = SequenceTensors((ONE.begin, ONE.end, ONE.layout_tensor))
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "ring_attention": lambda x: ring_attention(x, x, x, ONE),
    "the op under a tracer": lambda x: attend(
        x, x, x, SequenceTensors((ONE.begin, ONE.end, ONE.layout_tensor)), Options(0.5)
    )[0],
    "shard": lambda x: ONE.shard(x, 1),
    "unshard": lambda x: ONE.unshard(x, 1),
    "tiled GLU": lambda x: tiled_mlp(GATED, x, tile_tokens=3),
    "tiled MLP": lambda x: tiled_mlp(GATED, x, tile_tokens=3, use_original_mlp=True),
    "tiled loss": lambda x: tiled_linear_cross_entropy(x, WEIGHT, LABELS, tile_tokens=3),
    "tiled loss per token": lambda x: tiled_linear_cross_entropy(x, WEIGHT, LABELS, reduction="none", tile_tokens=3),
}
LINEAR = {"shard", "unshard"}  # exact to any order

# ---- derivatives --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPS)
def test_gradients_of_gradients_are_exact_or_refused(name: str) -> None:
    """Where the incoming gradient needs no grad, where it does, and where only it does."""

    def twice(x: Tensor, factor: Tensor) -> Tensor:
        """The sum of squares of a gradient of sum(factor op(x)^p)."""
        out = OPS[name](2 * x)
        (grad,) = torch.autograd.grad((factor * out**3 if name in LINEAR else factor * out).sum(), x, create_graph=True)
        return (grad**2).sum()

    x, one = tokens().requires_grad_(), torch.ones((), dtype=torch.float64)
    if name in LINEAR:
        assert torch.autograd.gradgradcheck(lambda x: OPS[name](x) ** 3, x, torch.ones_like(x, requires_grad=True))
        return
    with pytest.raises(Refused, match="differentiated again"):
        twice(x, one).backward()
    with pytest.raises(Refused, match="differentiated again"):
        twice(x, one.clone().requires_grad_()).backward()
    factor = one.clone().requires_grad_()
    with pytest.raises(Refused, match="differentiated again"):
        torch.autograd.grad(twice(x, factor), factor)
    # create_graph alone asks for no second derivative.
    (expected,) = torch.autograd.grad(OPS[name](x).sum(), x)
    (grad,) = torch.autograd.grad(OPS[name](x).sum(), x, create_graph=True)
    assert torch.equal(grad, expected)


def test_double_backward_of_the_weights_is_refused() -> None:
    """A gradient penalty on weights, whose path leads through no input."""
    (grad,) = torch.autograd.grad(tiled_mlp(GATED, tokens()).sum(), GATED.up.weight, create_graph=True)
    with pytest.raises(Refused, match="the tiled MLP were differentiated again"):
        (grad**2).sum().backward()


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "vmap in jvp": lambda f, x: torch.func.jvp(torch.func.vmap(f), (x[None],), (x[None],)),
    "jvp in vmap": lambda f, x: torch.func.vmap(lambda x: torch.func.jvp(f, (x,), (x,)))(x[None]),
}


@pytest.mark.parametrize("name", sorted(set(OPS) - {"the op under a tracer"}))
def test_forward_mode_is_refused(name: str) -> None:
    """torch takes the tangent of an op that it does not know for 0."""
    x = tokens()
    for transform in TRANSFORMS.values():
        with pytest.raises(Refused, match="inside"):
            transform(OPS[name], x)
    with forward_ad.dual_level():
        OPS[name](x)  # no dual number, no derivative
        dual = forward_ad.make_dual(x, x)
        with pytest.raises(Refused, match="forward-mode AD"):
            OPS[name](dual)
        y = x.clone().requires_grad_()
        out = OPS[name](y)
        with pytest.raises(Refused, match="forward-mode AD"):
            torch.autograd.grad(out, y, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["ring_attention", "shard", "unshard"])
def test_vmap_is_exact(name: str) -> None:
    x = torch.stack([tokens(seed=seed) for seed in range(2)]).requires_grad_()
    out = torch.func.vmap(OPS[name])(x)
    assert torch.equal(out, torch.stack([OPS[name](row) for row in x]))
    weights = torch.arange(out.numel(), dtype=out.dtype).view_as(out)
    (got,) = torch.autograd.grad((out * weights).sum(), x)
    rows = torch.stack([OPS[name](row) for row in x])
    # To rounding: the gradients of q, k and v, here one tensor, are added in another order.
    torch.testing.assert_close(got, torch.autograd.grad((rows * weights).sum(), x)[0], rtol=1e-13, atol=1e-13)


# ---- devices and storages -----------------------------------------------------------------------


def everything_made(seq_len: int) -> list[Tensor]:
    """A batch computed with objects that are all made here, through every cache."""
    lengths = [seq_len // 3, seq_len - seq_len // 3]
    masks = [
        IntervalMask.causal(seq_len) & IntervalMask.sliding_window(seq_len, 5),
        IntervalMask.documents(lengths),
        IntervalMask.documents([lengths], causal=False),
        IntervalMask.prefix_lm(seq_len, 4) & IntervalMask.full(seq_len),
        IntervalMask.chunked(seq_len, 6),
    ]
    q = torch.arange(seq_len * D * 2, device="cpu", dtype=torch.float32).sin().view(1, seq_len, 2, D)
    outs = [attention(q, q, q, mask=mask) for mask in masks]
    layouts = [
        Layout.contiguous(seq_len, 2),
        Layout.striped(seq_len, 2),
        Layout.per_document(lengths, 2),
        Layout.balanced(masks[0], 2, chunk=4),
    ]

    def on_rank(group: LoopbackGroup, layout: Layout) -> Tensor:
        sequence = ShardedSequence(masks[0], layout, group)
        local = sequence.shard(q, 1)
        return sequence.unshard(ring_attention(local, local, local, sequence.with_window(3)), 1)

    return outs + [LoopbackWorld(2).run(lambda group, layout=layout: on_rank(group, layout))[0] for layout in layouts]


@pytest.mark.parametrize(
    ("seq_len", "default"), [(61, "device meta"), (62, "default device meta"), (63, "float64"), (64, "bfloat16")]
)
def test_defaults_of_torch_reach_no_host_tensor(seq_len: int, default: str) -> None:
    """transformers makes models under torch.device("meta"): what is made and remembered there serves later calls.

    The lengths differ from each other, so that nothing made before is found.
    """
    if default == "device meta":
        with torch.device("meta"):
            made = everything_made(seq_len)
    elif default == "default device meta":
        torch.set_default_device("meta")
        try:
            made = everything_made(seq_len)
        finally:
            torch.set_default_device(None)
    else:
        torch.set_default_dtype(getattr(torch, default))
        try:
            made = everything_made(seq_len)
        finally:
            torch.set_default_dtype(torch.float32)
    again = everything_made(seq_len)
    assert made[0].device.type == "cpu"
    for out, expected in zip(made, again, strict=True):
        assert torch.equal(out, expected)


def test_tensors_on_two_devices_are_refused() -> None:
    x, meta = tokens(), tokens().to("meta")
    for arguments in ((meta, x, x), (x, meta, x), (x, x, meta)):
        with pytest.raises(InputError, match="on meta"):
            ring_attention(*arguments, ONE)
    for change in ({"hidden": meta}, {"weight": WEIGHT.to("meta")}, {"labels": LABELS.to("meta")}):
        arguments = {"hidden": x, "weight": WEIGHT, "labels": LABELS, **change}
        with pytest.raises(InputError, match="meta"):
            tiled_linear_cross_entropy(**arguments)
    with pytest.raises(InputError, match="meta"):
        tiled_linear_cross_entropy(meta, WEIGHT.to("meta"), LABELS.to("meta"))
    for module, mixed in ((GATED, meta), (Gated().double().to("meta"), x)):
        for use_original_mlp in (True, False):
            with pytest.raises(InputError, match="on meta"):
                tiled_mlp(module, mixed, use_original_mlp=use_original_mlp)
    with pytest.raises(InputError, match="expected a CPU tensor"):
        Layout.from_tensor(LAYOUT.tensor.to("meta"))
    with pytest.raises(InputError, match="expected a CPU tensor"):
        ops.digest(MASK.begin.to("meta"), MASK.end.to("meta"), LAYOUT.tensor.to("meta"))
    runs = ops.runs_tensor([(0, 1, 0, S)])
    with pytest.raises(InputError, match="on meta"):
        ops.shard_seq_(x, runs, 1, meta)
    with pytest.raises(InputError, match="on meta"):
        torch.ops.ringtile.glu_fwd(x[0, 0], meta[0, 0], 0)


def test_calls_all_on_meta_give_shapes() -> None:
    meta = tokens().to("meta").requires_grad_()
    out = ring_attention(meta, meta, meta, ONE)
    assert (out.device.type, out.shape) == ("meta", meta.shape)
    assert torch.autograd.grad(out.sum(), meta)[0].shape == meta.shape
    assert ONE.shard(meta, 1).shape == meta.shape


def freed(x: Tensor, num_bytes: int = 0) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(num_bytes)
    return x


def test_freed_storages_are_refused() -> None:
    """FSDP frees the storage of a tensor and keeps the tensor. These crashed."""
    x = tokens()
    for small in (freed(x), freed(x, x.nbytes - 1)):
        for arguments in ((small, x, x), (x, small, x), (x, x, small)):
            with pytest.raises(InputError, match="freed or resized"):
                ring_attention(*arguments, ONE)
        for name in ("shard", "unshard", "tiled GLU", "tiled MLP", "tiled loss"):
            with pytest.raises(InputError, match="freed or resized"):
                OPS[name](small)
    with pytest.raises(InputError, match="freed or resized"):
        IntervalMask(freed(MASK.begin), MASK.end)
    with pytest.raises(InputError, match="freed or resized"):
        Layout.from_tensor(freed(LAYOUT.tensor))
    begin, wide = freed(MASK.begin), torch.randn(S, 2 * D)[:, ::2]
    for read in (ops.digest, ops.plan):
        with pytest.raises(InputError, match="freed or resized"):
            read(begin, MASK.end, LAYOUT.tensor)
    with pytest.raises(InputError, match="freed or resized"):
        ops.layout_check(freed(LAYOUT.tensor), S, 1)
    wide.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="freed or resized"):
        ops.dropout(wide, torch.zeros(S, 2, dtype=torch.int64), 0.5, 0, 0, 0)

    heads = torch.randn(B, H, D, S).transpose(2, 3)
    heads.untyped_storage().resize_(0)

    def on_rank(group: LoopbackGroup) -> None:
        with context_parallel(group), pytest.raises(InputError, match="freed or resized"):
            nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)

    LoopbackWorld(2).run(on_rank)
    for call in (
        lambda: ops.attn_delta(x, freed(x), torch.zeros(B, H, S, dtype=torch.float64)),
        lambda: ops.glu_fwd(x[0, 0], freed(x[0, 0]), 0),
    ):
        with pytest.raises(RuntimeError, match="freed or resized"):
            call()
    module = Gated().double()
    module.down.weight.data = freed(module.down.weight.data)
    with pytest.raises(InputError, match="freed or resized"):
        tiled_mlp(module, x)


def test_a_view_into_a_larger_storage_is_accepted() -> None:
    x = torch.cat([tokens(seed=seed) for seed in range(3)])
    assert torch.equal(ring_attention(*(x[1:2],) * 3, ONE), ring_attention(*(x[1:2].clone(),) * 3, ONE))
    one = tokens()[:, :, :1].expand(B, S, H, D)  # strides 0
    assert torch.equal(ring_attention(one, one, one, ONE), ring_attention(*(one.contiguous(),) * 3, ONE))


# ---- tensors without strides, or without numbers ------------------------------------------------


def tokens_of(*sizes: int) -> Tensor:
    return torch.rand(B, S, *sizes) * -1


RECURRENT: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "gated_delta_rule": (
        gated_delta_rule,
        [*(tokens_of(H, D) for _ in "qkv"), tokens_of(H), tokens_of(H)],
    ),
    "ssd": (ssd, [tokens_of(H, D), tokens_of(H), torch.zeros(H), tokens_of(1, D), tokens_of(1, D)]),
    "selective_scan": (
        selective_scan,
        [tokens_of(D), tokens_of(D), torch.zeros(D, D), tokens_of(D), tokens_of(D)],
    ),
    "causal_conv1d": (causal_conv1d, [tokens_of(D), torch.zeros(D, 3)]),
    "ring_attention": (ring_attention, [tokens_of(H, D) for _ in "qkv"]),
}
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "on meta": lambda x: x.to("meta"),
    "sparse": Tensor.to_sparse,
    "mkldnn": Tensor.to_mkldnn,
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "0-d": lambda x: x.new_zeros(()),
}


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_another_kind_are_refused(name: str, kind: str) -> None:
    op, tensors = RECURRENT[name]
    for index in range(len(tensors)):
        given = [KINDS[kind](x) if i == index else x for i, x in enumerate(tensors)]
        with pytest.raises(InputError, match=r"expected|device"):
            op(*given, ONE)


@pytest.mark.parametrize("name", RECURRENT)
def test_tensors_of_inference_mode_are_refused_where_autograd_would_save_them(name: str) -> None:
    op, tensors = RECURRENT[name]
    expected = op(*tensors, ONE)
    with torch.inference_mode():
        made = tensors[0].clone()
    assert torch.equal(op(made, *tensors[1:], ONE), expected)
    with pytest.raises(InputError, match="inference mode"):
        op(made, *(x.clone().requires_grad_() for x in tensors[1:]), ONE)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_call_on_meta_has_the_shapes_of_one_on_the_cpu(name: str) -> None:
    op, tensors = RECURRENT[name]
    out, expected = op(*(x.to("meta") for x in tensors), ONE), op(*tensors, ONE)
    assert (out.device.type, out.shape, out.dtype) == ("meta", expected.shape, expected.dtype)


@pytest.mark.parametrize("kind", ["on meta", "sparse"])
def test_raw_ops_refuse_what_is_partly_on_meta_or_not_dense(kind: str) -> None:
    runs, x = ops.runs_tensor([(0, 1, 0, S)]), torch.zeros(S, D)
    q, lse = torch.zeros(B, S, H, D), torch.zeros(B, H, S)
    bounds, move = (MASK.begin, MASK.end), KINDS[kind]
    for call in (
        lambda: ops.shard_seq_(x, move(runs), 0, x.clone()),
        lambda: ops.unshard_seq_(x, runs, 0, move(x)),
        lambda: ops.attn_fwd_(q, q, q, *bounds, move(runs), q.clone(), lse.clone(), 0.5, 0.0),
        lambda: ops.attn_bwd_(q, q, q, *bounds, move(runs), q, lse, lse, *(q.clone() for _ in "qkv"), 0.5, 0.0),
        lambda: ops.attn_bwd_(q, q, q, *bounds, runs, q, lse, lse, q.clone(), q.clone(), move(q), 0.5, 0.0),
        lambda: ops.digest(move(MASK.begin), MASK.end, LAYOUT.tensor),
        lambda: ops.plan(*bounds, move(LAYOUT.tensor)),
        lambda: ops.layout_check(move(LAYOUT.tensor), S, 1),
        lambda: ops.dropout(x, move(torch.zeros(S, 2, dtype=torch.int64)), 0.5, 0, 0, 0),
        lambda: ops.glu_fwd(x, move(x), 0),
    ):
        with pytest.raises(InputError):
            call()


# ---- empty batches ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPS)
def test_a_batch_of_no_rows_has_a_forward_and_a_backward(name: str) -> None:
    x = tokens(0).requires_grad_()
    call = OPS[name]
    if "loss" in name:
        reduction = "none" if "token" in name else "sum"

        def call(x: Tensor) -> Tensor:
            return tiled_linear_cross_entropy(x, WEIGHT, LABELS[:0], reduction=reduction)

    out = call(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.shape == x.shape


def test_a_ring_over_a_batch_of_no_rows() -> None:
    def on_rank(group: LoopbackGroup) -> torch.Size:
        sequence = ShardedSequence(MASK, Layout.zigzag(S, 2), group)
        q = sequence.shard(tokens(0), 1).requires_grad_()
        out = sequence.unshard(ring_attention(q, q, q, sequence), 1)
        return torch.autograd.grad(out.sum(), q)[0].shape

    assert LoopbackWorld(2).run(on_rank) == [(0, S // 2, H, D)] * 2


# ---- wrong arguments ----------------------------------------------------------------------------

BOOLS = torch.ones(S, S, dtype=torch.bool)
WRONG_CALLS: dict[str, Callable[[Any], Any]] = {
    "mask None": lambda x: attention(x, x, x, mask=None),  # type: ignore[arg-type]
    "bool mask": lambda x: attention(x, x, x, mask=BOOLS),  # type: ignore[arg-type]
    "lengths": lambda x: IntervalMask.documents(8),  # type: ignore[arg-type]
    "seq_len": lambda x: IntervalMask.causal("8"),  # type: ignore[arg-type]
    "window": lambda x: IntervalMask.sliding_window(8, 2.5),  # type: ignore[arg-type]
    "window of a sequence": lambda x: ONE.with_window("4"),  # type: ignore[arg-type]
    "attend": lambda x: IntervalMask.from_bool([[True]]),  # type: ignore[arg-type]
    "other mask": lambda x: MASK & BOOLS,  # type: ignore[operator]
    "world_size": lambda x: Layout.zigzag(8, None),  # type: ignore[arg-type]
    "rank": lambda x: LAYOUT.local_len(None),  # type: ignore[arg-type]
    "runs": lambda x: Layout.from_runs(8),  # type: ignore[arg-type]
    "dim": lambda x: ONE.shard(x, None),  # type: ignore[arg-type]
    "x a list": lambda x: ONE.shard([1.0] * S, 0),  # type: ignore[arg-type]
    "local a list": lambda x: ONE.unshard([1.0] * S, 0),  # type: ignore[arg-type]
    "a function": lambda x: tiled_mlp(torch.relu, x),  # type: ignore[arg-type]
    "mlp of a list": lambda x: tiled_mlp(GATED, [1.0]),  # type: ignore[arg-type]
    "hidden": lambda x: tiled_linear_cross_entropy(None, WEIGHT, LABELS),  # type: ignore[arg-type]
    "softcap": lambda x: tiled_linear_cross_entropy(x, WEIGHT, LABELS, softcap="x"),  # type: ignore[arg-type]
    "ignore_index": lambda x: tiled_linear_cross_entropy(x, WEIGHT, LABELS, ignore_index=None),  # type: ignore[arg-type]
    "num_items": lambda x: tiled_linear_cross_entropy(x, WEIGHT, LABELS, num_items="x"),  # type: ignore[arg-type]
    "a mask for a sequence": lambda x: ring_attention(x, x, x, MASK),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_types_are_input_errors(name: str) -> None:
    with pytest.raises(InputError, match="expected"):
        WRONG_CALLS[name](tokens())
