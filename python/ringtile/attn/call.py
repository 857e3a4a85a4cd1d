"""A call of attention, and the one place that says in words what is wrong with its arguments.

What the core checks after it (csrc/attn/check.c) is only that memory is safe to read and write.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ringtile import arguments, derivatives, ops
from ringtile.errors import InputError, shown
from ringtile.scheme import Share, shares_of
from ringtile.sequence.plan import RankPlan, Round, Shape
from ringtile.sequence.sharded import ShardedSequence, living
from ringtile.transport.agreement import HeaderValue
from ringtile.transport.transport import Transport

AttentionKernel = Literal["auto", "ringtile", "aten"]
ATTENTION_KERNELS = ("auto", "ringtile", "aten")
_PLAIN = ((float, float, str), (type(None), float, str))  # types of options that do not change


@dataclass(frozen=True, eq=False)
class AttentionDropout:
    """Dropout of attention weights, after the softmax: each is 0 with this probability, the others are over 1 - p.

    Whether a weight is dropped depends on (seed, step, stream, row, query head, positions of query and key) alone, so
    any number of ranks drops the same. All fields are the same on every rank.

    - probability: in 0..1.
    - rows: int64 (B,), on q's device: the number of each row in the step, modulo 2^32.
    - seed, step, stream: in 0..2^32 - 1. Each attention call of a step needs a stream of its own.

    Query heads from 4096 on, and rows from 2^20 on, repeat the draws of others.
    """

    probability: float
    rows: Tensor
    seed: int
    step: int = 0
    stream: int = 0

    def in_numbers(self) -> AttentionDropout | None:
        """Return it in plain numbers; None where nothing is dropped. InputError: they are none, or out of range."""
        probability = arguments.check_number("the probability of dropout", self.probability)
        if not 0 <= probability <= 1:
            raise InputError(f"the probability of dropout is {probability}; expected 0..1")
        numbers = []
        for name in ("seed", "step", "stream"):
            numbers.append(arguments.check_int(f"the {name} of dropout", getattr(self, name)))
            if not 0 <= numbers[-1] < 2**32:
                raise InputError(f"the {name} of dropout is {numbers[-1]}; expected 0..2^32 - 1")
        return AttentionDropout(probability, self.rows, *numbers) if probability else None


class Options(NamedTuple):
    """What the caller of an attention chooses, as of `ring_attention`."""

    scale: Any = None  # a float; None: 1 / sqrt(D)
    softcap: float = 0.0
    attention_kernel: str = "auto"
    sinks: Tensor | None = None
    dropout: AttentionDropout | None = None
    returns_lse: bool = True

    def checked(self, q: Any, k: Any, v: Any) -> Options:
        """Return it with scale and softcap in numbers. InputError or RefusedError: what no call takes.

        torch.compile traces it, so it reads no tensor.
        """
        scale, softcap, kernel, sinks, dropout, _ = self
        for name, x in (("q", q), ("k", k), ("v", v)):
            arguments.check_tensor(name, x)
        if sinks is not None:
            arguments.check_tensor("sinks", sinks)
        if dropout is not None and not isinstance(dropout, AttentionDropout):
            raise InputError(f"dropout is a {type(dropout).__name__}; expected a ringtile.AttentionDropout")
        if kernel not in ATTENTION_KERNELS:
            raise InputError(f"attention_kernel is {shown(kernel)}; expected one of {', '.join(ATTENTION_KERNELS)}")
        derivatives.check_once("ring_attention", q, k, v, sinks)
        if scale is None:
            head_dim = q.size(-1) if q.dim() else 0
            if head_dim == 0:
                raise InputError(f"q has shape {tuple(q.shape)}, and so head dim 0; expected 1..{ops.MAX_HEAD_DIM}")
            scale = head_dim**-0.5
        scale, softcap = arguments.check_number("scale", scale), arguments.check_number("softcap", softcap)
        return self._replace(scale=scale, softcap=softcap)


class Blocks(Protocol):
    """Computes blocks of keys in place of choose.py: of others that it makes of them, or in parts."""

    weights: tuple[Tensor, ...]  # by which it is differentiated too

    def forward(self, call: Call, round: Round, q: Tensor, k: Tensor, v: Tensor, state: Any) -> None: ...

    def backward(self, call: Call, round: Round, q: Tensor, k: Tensor, v: Tensor, final: Any, grads: Any) -> None: ...

    def again(self, weights: Sequence[Tensor]) -> Any:
        """Return what computes the blocks of a backward, with the weights as they were saved."""

    def weight_gradients(self) -> Sequence[Tensor | None]:
        """Return the gradients of the weights after the last block."""


@dataclass(eq=False)
class Call:
    """Calls of one kind: all but the numbers in their tensors. Made once for each sequence, shape and options (`of`),
    checked, and kept by the sequence, which it keeps not alive; a call with tensors of its own is a copy."""

    shape: Shape  # of q, k and v as the caller gave them, with all heads
    options: Options  # checked: sinks (H) of the state dtype, without a graph; no dropout of probability 0
    plan: RankPlan
    device: torch.device
    shares: tuple[Share, ...]  # of the heads, by rank of those that share them
    local_len: int
    group_name: str
    fields: dict[str, HeaderValue]  # that ranks agree on
    group: Callable[[], Transport | None]  # weak
    of_last: int | None = None  # so many of the last tokens have queries; None: all
    backends: dict[object, Any] = field(default_factory=dict)  # who computes a round (choose.py)
    blocks: Blocks | None = None  # who computes blocks of one call in place of choose.py

    @classmethod
    def of(
        cls, sequence: ShardedSequence, q: Tensor, k: Tensor, v: Tensor, options: Options, *, of_last: bool = False
    ) -> Call:
        """Return the call as the kernels take it, its scheme resolved. of_last: q may be of the last tokens alone.

        Raise InputError where the arguments do not fit each other, the kernels or the sequence, RefusedError for what
        no call takes. Of a call that is like an earlier one in all but its numbers, only memory is checked.
        """
        arguments.check_whole(q=q, k=k, v=v)
        derivatives.check_once("ring_attention", q, k, v)
        key: Hashable = None
        if options.sinks is None and options.dropout is None and tuple(map(type, options[:3])) in _PLAIN:
            key = (
                *(q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()),
                *(q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, options, of_last),
            )
            if (call := sequence.calls.get(key)) is not None and sequence.is_unchanged():
                return call  # type: ignore[no-any-return]
        shape, options = check(sequence, q, k, v, options, of_last=of_last)
        num_last = q.shape[1] if q.shape[1] < k.shape[1] else None
        call = cls.kept(sequence, shape, q.device, options, of_last=num_last)
        if key is not None:
            sequence.remember_call(key, call)
        return call

    @classmethod
    def kept(
        cls,
        sequence: ShardedSequence,
        shape: Shape,
        device: torch.device,
        options: Options,
        *,
        of_last: int | None = None,
    ) -> Call:
        """Return a call of the kind that the sequence keeps, made if it is the first. InputError: of dropout alone."""
        sinks, drop = options.sinks, None if options.dropout is None else options.dropout.in_numbers()
        plain = options._replace(sinks=None, dropout=None)
        kind = shape, device, plain, of_last, sinks is None, drop is None
        if (call := sequence.calls.get(kind)) is None:
            with _disable_current_modes():  # of fake tensors: masks are real
                resolved = sequence.resolved(shape)
                plan, (layout_digest, mask_digest) = resolved.plan, sequence.digests
            sharing = 0 if plan.heads is None else len(plan.heads.ranks)
            shares = shares_of(sharing, shape.num_heads, shape.num_kv_heads) if sharing else ()
            fields: dict[str, HeaderValue] = {
                "batch": shape.batch,
                "seq_len": sequence.seq_len,
                "num_heads": shape.num_heads,
                "num_kv_heads": shape.num_kv_heads,
                "head_dim": shape.head_dim,
                "v_head_dim": shape.v_head_dim,
                "dtype": str(shape.dtype),
                "scale": plain.scale,
                "softcap": plain.softcap,
                "scheme": resolved.scheme,
                "layout digest": layout_digest,
                "mask digest": mask_digest,
            }
            about = shape, plain, plan, device, shares, sequence.local_len, sequence.group_name
            call = cls(*about, fields, sequence.weak_transport, of_last)
            sequence.remember_call(kind, call)
        if sinks is None and drop is None:
            return call
        sinks = None if sinks is None else sinks.detach().to(ops.state_dtype(shape.dtype))
        return call.but(options=plain._replace(sinks=sinks, dropout=drop))

    def but(self, **changes: Any) -> Call:
        """Return the call with some fields changed."""
        call = object.__new__(Call)
        vars(call).update(vars(self) | changes)
        vars(call).pop("terms", None)
        return call

    def with_lse(self) -> Call:
        """Return the call where ranks that share heads send lse back, too."""
        return self.but(options=self.options._replace(returns_lse=True))

    @functools.cached_property
    def rounds(self) -> tuple[Round, ...]:
        """Return the rounds on the device of q, without idle ones."""
        rounds, size = self.plan.on(self.device), self.local_len
        return rounds if self.of_last is None else tuple(x.of_queries(slice(size - self.of_last, size)) for x in rounds)

    @property
    def transport(self) -> Transport:
        """Return this rank's end of the group. InputError: the group is gone."""
        return self.group() or living(self.group)

    @functools.cached_property
    def state_dtype(self) -> torch.dtype:
        return ops.state_dtype(self.shape.dtype)

    @functools.cached_property
    def terms(self) -> dict[str, HeaderValue]:
        """Return the fields that all ranks must have alike."""
        fields, (*_, sinks, drop, returns_lse) = self.fields, self.options
        if self.shape.latent_dim:
            fields = fields | {"latent_dim": self.shape.latent_dim}
        if sinks is not None:
            fields = fields | {"sinks": sinks.size(0)}
        if self.plan.heads is not None:
            fields = fields | {"return_lse": str(returns_lse)}
        if drop is not None:
            fields = {**fields, "dropout": drop.probability, "dropout seed": drop.seed, "dropout stream": drop.stream}
        return fields

    def of_heads(self, heads: range) -> Call:
        """Return the call for some of the query heads."""
        sinks, drop = self.options.sinks, self.options.dropout
        sinks = None if sinks is None else sinks[heads.start : heads.stop]
        if drop is not None and heads.start:  # the kernel counts heads in bits 20.. of the row
            drop = replace(drop, rows=drop.rows + (heads.start << 20))
        return self.but(options=self.options._replace(sinks=sinks, dropout=drop))


def check(
    sequence: ShardedSequence, q: Tensor, k: Tensor, v: Tensor, options: Options, *, of_last: bool = False
) -> tuple[Shape, Options]:
    """Return the shape of a call and its options in numbers. InputError, RefusedError: as of `Call.of`."""
    options = options.checked(q, k, v)
    shape = check_tensors(q, k, v, options)
    sequence.check_call("q", q)
    num_queries, num_keys = q.shape[1], k.shape[1]
    if num_keys != sequence.local_len or not (num_queries == num_keys or (of_last and num_queries < num_keys)):
        raise InputError(
            f"q has {num_queries} tokens, k and v have {num_keys}; the layout gives rank {sequence.rank} "
            f"{sequence.local_len} of {sequence.seq_len} tokens"
        )
    sequence.transport.check_device(q.device)
    return shape, options


def unwritten_keys(q: Tensor, num_kv_heads: int, v_head_dim: int, num_tokens: int = 1) -> tuple[Tensor, Tensor]:
    """Return k (B, n, G, D) and v (B, n, G, Dv) like q, of any numbers."""
    k, v = (q.new_empty((*q.shape[:1], num_tokens, num_kv_heads, dim)) for dim in (q.shape[-1], v_head_dim))
    return k, v


def check_tensors(q: Tensor, k: Tensor, v: Tensor, options: Options = Options()) -> Shape:  # noqa: B008
    """Return the shape of q, k and v. Raise InputError for tensors and numbers that the kernels cannot take.

    q (B, N, H, D), k (B, K, G, D) and v (B, K, G, Dv) need one dtype of ops.FLOAT_DTYPES, one device, unit stride in
    the last dim, head dims in 1..512, and H a multiple of G. scale and softcap must be finite in state_dtype, softcap 0
    or a normal number. sinks (H), where q is, of any float dtype. rows, of dropout, int64 (B), contiguous, where q is.
    """
    arguments.check_device("q", q)
    sinks, rows = options.sinks, None if options.dropout is None else options.dropout.rows
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
    (batch, _, heads, dim), k_shape, v_shape = q.shape, k.shape, v.shape  # a shape costs what one size does
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
    arguments.check_scale_and_softcap(dtype, options.scale or 0.0, options.softcap)
    if sinks is not None:
        if sinks.shape != (heads,):
            raise InputError(
                f"sinks has shape {tuple(sinks.shape)}; expected ({heads},), one number for each head of q"
            )
        if sinks.dtype not in ops.FLOAT_DTYPES:
            raise InputError(f"sinks has dtype {sinks.dtype}, expected one of {', '.join(map(str, ops.FLOAT_DTYPES))}")
        arguments.check_devices("q", q, sinks=sinks)
        arguments.check_storage("sinks", sinks)
    if rows is not None:
        arguments.check_tensor("rows of dropout", rows)
        if rows.shape != (batch,) or rows.dtype != torch.int64 or not rows.is_contiguous():
            raise InputError(
                f"rows of dropout are {rows.dtype} {tuple(rows.shape)}; expected int64 ({batch},), contiguous: the "
                f"number of each row of q"
            )
        arguments.check_devices("q", q, **{"rows of dropout": rows})
    return Shape(batch, heads, k_shape[2], dim, v_shape[3], dtype)
