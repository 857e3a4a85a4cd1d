"""Exact attention over a sequence sharded over the ranks of a group: a ring (arXiv:2310.01889), or another scheme.

The public functions, and a node of autograd behind them; what sees ops only (torch.compile, selective checkpointing,
function transforms) goes another way (traced.py). Heads are exchanged where ranks share them (ulysses.py), and keys
travel around the ring (ring.py); choose.py says who computes a block of them.

Shape letters: B batch, S global tokens, N local tokens, H query heads, G kv heads, D head dim, Dv value head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ringtile import arguments, derivatives, keep
from ringtile.attn import ulysses
from ringtile.attn.call import AttentionDropout, AttentionKernel, Call, Options
from ringtile.errors import InputError, shown
from ringtile.sequence.layout import Layout, check_types, named_layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence, check_given, refuse
from ringtile.transport.groups import Group

if TYPE_CHECKING:
    from ringtile.attn.latents import Latents


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequence: ShardedSequence | None = None,
    *,
    mask: IntervalMask | None = None,
    layout: Layout | None = None,
    group: Group | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout: AttentionDropout | None = None,
    attention_kernel: AttentionKernel = "auto",
    expand: Latents | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute softmax(scale q k^T, masked) v over a sequence sharded over ranks: ring attention (arXiv:2310.01889).

    - q (B, N, H, D), k (B, N, G, D), v (B, N, G, Dv): the local tokens; one dtype of float64, float32, bfloat16,
      float16; unit stride in the last dim, any other strides; H a multiple of G.
    - sequence: the same on every rank; or mask, layout and group, from which one is made.
    - scale: 1 / sqrt(D) if None.
    - softcap: c > 0 turns scores x into c tanh(x / c).
    - sinks (H), of any float dtype: one more key of each query head, whose score is the sink whatever the query, and
      whose value is 0. They are the same on every rank, which is not compared; their gradient is that by this rank's
      queries, as a parameter's.
    - dropout: of the weights, after the softmax; it does not depend on ranks or layout.
    - attention_kernel: "ringtile" is ringtile's kernels; "aten" has aten's compute it, and refuses what they cannot;
      "auto" is ringtile's but where those lack a kernel of the device's tensor cores, and aten's have one.
    - expand: makes the keys and values of k (B, N, g, d) and v (B, N, g, dv), which then are latents of any sizes: a
      `ringtile.Latents`. A ring sends the latents, if they are fewer numbers, and each rank expands what it receives.

    Every rank of the group makes the same calls in the same order, forward and backward; one group serves one thread.
    Differentiable once.

    Returns out (B, N, H, Dv) of q's dtype. With return_lse, returns (out, lse): the log-sum-exp of the scores,
    (B, H, N) in float32 (float64 for float64), differentiable too; it counts the sink. A query that attends no key has
    out 0, lse -inf (or its sink) and gradient 0; one whose scores are all -inf has the same out and lse. A key or value
    that is not finite makes the outputs of the queries that attend it not finite, and touches no other query.

    Raises InputError before any key is sent, RingMismatchError when ranks disagree or another refuses its arguments,
    PeerLostError when one is gone.
    """
    options = Options(scale, softcap, attention_kernel, sinks, dropout, return_lse)
    if torch.compiler.is_compiling() or (isinstance(q, Tensor) and not is_plain(q)):
        from ringtile.attn import traced

        return traced.ring_attention(q, k, v, sequence, (mask, layout, group), options, expand)
    parts: Any = mask, layout, group
    try:
        check_given("ring_attention", sequence, *parts)
        tokens = sequence or ShardedSequence.of(*parts)
        if expand is None:
            call = Call.of(tokens, q, k, v, options)
        else:
            call, k, v = expand.call(tokens, q, k, v, options)
        return _attend(call, q, k, v, sinks, return_lse)
    except Exception as error:
        refuse("ring_attention", error, sequence, layout, group)
        raise


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: IntervalMask | None = None,
    is_causal: bool | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout: AttentionDropout | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute attention of q (B, N, H, D), k (B, S, G, D), v (B, S, G, Dv) on one rank: softmax(scale q k^T, masked) v.

    Tokens come before heads, unlike in `scaled_dot_product_attention`: where S and H fit both, a swap goes unnoticed.
    mask, of the S keys, or is_causal (causal, else full): one of the two is required. Fewer queries than keys are those
    of the mask's last N tokens, as in decoding. Other arguments, results and errors: `ring_attention`.
    """
    if (mask is None) == (is_causal is None):
        raise InputError(
            f"mask is {shown(mask)} and is_causal {shown(is_causal)}; expected one of them, such as is_causal=True"
        )
    if mask is not None:
        check_types(mask)
    if not isinstance(q, Tensor) or not isinstance(k, Tensor):
        arguments.check_tensor("q", q)
        arguments.check_tensor("k", k)
    options = Options(scale, softcap, "auto", sinks, dropout, return_lse)
    if torch.compiler.is_compiling() or not is_plain(q):
        from ringtile.attn import traced

        return traced.attention(q, k, v, mask, bool(is_causal), options)
    mask = _mask_of(q, k, mask, bool(is_causal))
    sequence = ShardedSequence.of(mask, named_layout("contiguous", mask.seq_len, 1))
    return _attend(Call.of(sequence, q, k, v, options, of_last=True), q, k, v, sinks, return_lse)


def _mask_of(q: Tensor, k: Tensor, mask: IntervalMask | None, is_causal: bool) -> IntervalMask:
    """Return the mask of k's tokens, the last of which are q's. InputError: it is another's."""
    if q.dim() != 4 or k.dim() != 4:  # which a call refuses
        return mask or IntervalMask.whole(1, is_causal)
    num_queries, num_keys = q.shape[1], k.shape[1]
    if is_causal and num_queries < num_keys:
        raise InputError(
            f"q has {num_queries} tokens and k has {num_keys}, and is_causal does not say which of them are q's; pass "
            f"mask=IntervalMask.causal({num_keys}), under which q's are the last"
        )
    mask = mask or IntervalMask.whole(num_keys, is_causal)
    if num_queries > num_keys or mask.seq_len != num_keys:
        raise InputError(
            f"q has {num_queries} tokens, k has {num_keys} and the mask {mask.seq_len}; expected a mask of k's tokens, "
            f"and q of all of them or of the last"
        )
    return mask


def _attend(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, return_lse: bool) -> Any:
    """Return out, with return_lse (out, lse). sinks: as the caller gave them, maybe with a graph."""
    weights = () if call.blocks is None else call.blocks.weights
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad) or weights
    ):
        out, lse = RingAttention.apply(q, k, v, sinks, call, *weights)  # type: ignore[no-untyped-call]
    else:
        out, lse, _ = (ulysses.forward if keep.inside.kept is None else kept_forward)(call, q, k, v)
    return (out, lse.to(call.state_dtype)) if return_lse else out


def is_plain(q: Tensor) -> bool:
    """Return whether nothing but autograd looks at the call: no fake or other tensor, no dispatch mode, no function
    transform.

    Tracing, selective checkpointing and vmap see ops only.
    """
    return (
        type(q) in (Tensor, torch.nn.Parameter)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.maybe_current_level() is None
        and not torch._C._is_tracing()
    )


def kept_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, ulysses.Saved]:
    """Do `ulysses.forward` in a checkpointed layer, which keeps (out, lse): those of the local tokens."""
    is_local, slot = call.plan.heads is not None, _slot(call)
    if slot is None:
        return ulysses.forward(call, q, k, v)
    if (kept := slot.take()) is not None:
        (out, lse), number = kept
        return out, lse, ulysses.Saved(q, k, v, out, lse, number, is_local)
    out, lse, saved = ulysses.forward(call.with_lse() if is_local else call, q, k, v)
    slot.fill((out, lse), saved.number)
    return out, lse, ulysses.Saved(q, k, v, out, lse, saved.number, is_local=True) if is_local else saved


def _slot(call: Call) -> keep.Slot | None:
    """Return where a checkpointed layer keeps (out, lse) of this call."""
    shape, drop = call.shape, call.options.dropout
    draws = drop and (drop.probability, drop.seed, drop.step, drop.stream)
    about = shape, call.options.attention_kernel, call.options.returns_lse, draws
    key = "ring_attention", *call.fields.values(), call.group_name, about
    per_token = shape.batch * shape.num_heads * (shape.v_head_dim * shape.dtype.itemsize + 8)
    max_local_len = -(-call.plan.mask.seq_len // call.transport.world_size)  # of any rank
    return keep.slot(key, per_token * max_local_len)


class RingAttention(torch.autograd.Function):
    """The node of the eager path, which takes the Call itself."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse, saved = (ulysses.forward if keep.inside.kept is None else kept_forward)(call, q, k, v)
        rows = None if call.options.dropout is None else call.options.dropout.rows
        ctx.save_for_backward(sinks, rows, *saved[:5], *weights)  # rows: so that a write is noticed
        ctx.call, ctx.called = call, saved[5:]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        transport = call.transport
        try:
            sinks, _, *kept = inputs = ctx.saved_tensors
            saved = ulysses.Saved(*kept[:5], *ctx.called)
            if call.blocks is not None:
                call = call.but(blocks=call.blocks.again(kept[5:]))

            def compute() -> tuple[Tensor | None, ...]:
                gradients = ulysses.backward(call, saved, dout, dlse, sinks if ctx.needs_input_grad[3] else None)
                return *gradients, *(() if call.blocks is None else call.blocks.weight_gradients())

            gradients = derivatives.gradients(
                "ring_attention", compute, dout, dlse, *inputs, propagate_errors=transport.propagate_errors
            )
        except Exception as error:
            transport.refuse("ring_attention backward", error)
            raise
        return *gradients[:4], None, *gradients[4:]
