"""A call of attention, and the one place that says in words what is wrong with its arguments.

What the core checks after it (csrc/attn/check.c) is only that memory is safe to read and write.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias, cast

from torch import Tensor

from ringtile import arguments, derivatives, ops
from ringtile.attn.dropout import AttentionDropout
from ringtile.errors import InputError, shown
from ringtile.sequence.given import check_given
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence
from ringtile.transport.groups import Group

AttentionKernel = Literal["auto", "ringtile", "aten"]
ATTENTION_KERNELS = ("auto", "ringtile", "aten")


class Where(NamedTuple):
    """The sequence of a call, or what one is made from."""

    sequence: ShardedSequence | None
    mask: IntervalMask | None
    layout: Layout | None
    group: Group | None


class Options(NamedTuple):
    """The other arguments of a call."""

    scale: Any  # a float once it was checked; so is softcap
    softcap: Any = 0.0
    sinks: Tensor | None = None
    dropout: AttentionDropout | None = None
    attention_kernel: str = "auto"
    return_lse: bool = False


class AttentionCall(NamedTuple):
    """What a call is about, besides its tensors."""

    sequence: ShardedSequence
    scale: float
    softcap: float = 0.0
    attention_kernel: str = "auto"
    sinks: Tensor | None = None  # (H) of the state dtype, without a graph
    dropout: AttentionDropout | None = None  # None where its probability is 0
    returns_lse: bool = True  # where ranks share heads, lse travels back only then

    def of_heads(self, heads: range) -> AttentionCall:
        """Return the same for some of the query heads."""
        sinks = None if self.sinks is None else self.sinks[heads.start : heads.stop]
        return self._replace(sinks=sinks, dropout=self.dropout and self.dropout.of_heads(heads))


_Parts: TypeAlias = "tuple[IntervalMask, Layout, Group | None]"


def checked_options(q: Any, k: Any, v: Any, where: Where, options: Options) -> Options:
    """Return the options with numbers for scale and softcap. InputError, RefusedError: what no call takes."""
    scale, softcap, sinks, dropout, kernel, return_lse = options
    for name, x in (("q", q), ("k", k), ("v", v)):
        arguments.check_tensor(name, x)
    if sinks is not None:
        arguments.check_tensor("sinks", sinks)
    if dropout is not None and not isinstance(dropout, AttentionDropout):
        raise InputError(f"dropout is a {type(dropout).__name__}; expected a ringtile.AttentionDropout")
    check_given("ring_attention", *where)
    if kernel not in ATTENTION_KERNELS:
        raise InputError(f"attention_kernel is {shown(kernel)}; expected one of {', '.join(ATTENTION_KERNELS)}")
    derivatives.check_once("ring_attention", q, k, v, sinks)
    if scale is None:
        head_dim = q.size(-1) if q.dim() else 0
        if head_dim == 0:
            raise InputError(f"q has shape {tuple(q.shape)}, and so head dim 0; expected 1..{ops.MAX_HEAD_DIM}")
        scale = head_dim**-0.5
    scale, softcap = arguments.check_number("scale", scale), arguments.check_number("softcap", softcap)
    return Options(scale, softcap, sinks, dropout, kernel, return_lse)


def checked_call(q: Tensor, k: Tensor, v: Tensor, where: Where, options: Options) -> AttentionCall:
    """Return the call of checked options, on a sequence that is made where none is given. InputError."""
    scale, softcap, sinks, dropout, kernel, return_lse = options
    sequence = where.sequence or ShardedSequence.of(*cast(_Parts, where[1:]))
    drops = None if dropout is None else dropout.checked(q)
    call = AttentionCall(sequence, scale, softcap, kernel, fixed_sinks(sinks, q), drops, return_lse)
    check(call, q, k, v)
    return call


def check(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise InputError where the tensors do not fit each other, the kernels or the sequence.

    Their storages were checked.
    """
    check_tensors(q, k, v, call.scale, call.softcap)
    sequence = call.sequence
    if q.is_meta and sequence.world_size > 1:
        raise InputError("q, k and v are on meta, which holds no data for the other ranks; expected a real device")
    sequence.check_unchanged()
    sequence.transport.check_device(q.device)
    (batch, num_queries, *_), num_keys = q.shape, k.shape[1]
    if not num_queries == num_keys == sequence.local_len:
        raise InputError(
            f"q has {num_queries} tokens, k and v have {num_keys}; the layout gives rank {sequence.rank} "
            f"{sequence.local_len} of {sequence.seq_len} tokens"
        )
    if sequence.mask.begin.shape[0] not in (1, batch):
        raise InputError(
            f"the mask has {sequence.mask.begin.shape[0]} rows, the batch {batch}; expected the same number, or 1"
        )


def check_tensors(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float) -> None:
    """Raise InputError for tensors and numbers that the kernels cannot take.

    q (B, N, H, D), k (B, K, G, D) and v (B, K, G, Dv) need one dtype of ops.FLOAT_DTYPES, one device, unit stride in
    the last dim, head dims in 1..512, and H a multiple of G. scale and softcap must be finite in state_dtype, softcap 0
    or a normal number.
    """
    ops.check_device("q", q)
    dtype, device = q.dtype, q.device
    for name, x in (("q", q), ("k", k), ("v", v)):
        shape = x.shape
        if len(shape) != 4:
            raise InputError(
                f"{name} has shape {tuple(shape)}, expected 4 dimensions (batch, tokens, heads, head_dim); "
                "transpose (batch, heads, tokens, head_dim) tensors with .transpose(1, 2)"
            )
        if x.dtype not in ops.FLOAT_DTYPES:
            raise InputError(f"{name} has dtype {x.dtype}, expected one of {', '.join(map(str, ops.FLOAT_DTYPES))}")
        if x.dtype != dtype:
            raise InputError(f"{name} has dtype {x.dtype} but q has {dtype}; cast them to one dtype")
        if x.device != device:
            raise InputError(f"{name} is on {x.device} but q is on {device}; move them to one device")
        dim = shape[3]
        if not 1 <= dim <= ops.MAX_HEAD_DIM:
            raise InputError(f"{name} has head dim {dim}, expected 1..{ops.MAX_HEAD_DIM}")
        if dim > 1 and x.stride(3) != 1:
            raise InputError(f"{name} has stride {x.stride(3)} in its last dim, expected 1; call .contiguous()")
    (batch, _, heads, dim), k_shape, v_shape = q.shape, k.shape, v.shape
    if not batch == k_shape[0] == v_shape[0]:
        raise InputError(f"q, k, v have batch sizes {batch}, {k_shape[0]}, {v_shape[0]}; expected the same size")
    if k_shape[3] != dim:
        raise InputError(f"k has head dim {k_shape[3]} but q has {dim}; expected the same head dim")
    if v_shape[1:3] != k_shape[1:3]:
        raise InputError(
            f"v has (tokens, heads) {tuple(v_shape[1:3])} but k has {tuple(k_shape[1:3])}; expected the same"
        )
    if k_shape[2] == 0 or heads == 0 or heads % k_shape[2]:
        raise InputError(
            f"q has {heads} heads and k, v have {k_shape[2]}; "
            "expected the query heads to be a positive multiple of the kv heads"
        )
    arguments.check_scale_and_softcap(dtype, scale, softcap)


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Raise InputError unless sinks hold one number of a float dtype for each head of q (B, N, H, D), where q is."""
    if sinks.shape != q.shape[2:3]:
        raise InputError(
            f"sinks has shape {tuple(sinks.shape)}; expected {tuple(q.shape[2:3])}, one number for each head of q"
        )
    if sinks.dtype not in ops.FLOAT_DTYPES:
        raise InputError(f"sinks has dtype {sinks.dtype}, expected one of {', '.join(map(str, ops.FLOAT_DTYPES))}")
    arguments.check_devices("q", q, sinks=sinks)
    arguments.check_storage("sinks", sinks)


def fixed_sinks(sinks: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the sinks as a call holds them. InputError where they do not fit q, before they are read."""
    if sinks is None:
        return None
    check_sinks(sinks, q)
    return sinks.detach().to(ops.state_dtype(q.dtype))
