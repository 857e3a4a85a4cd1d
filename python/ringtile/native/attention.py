"""What PyTorch's attention functions promise, computed by the ring over local tokens with heads before tokens.

Shape letters: B batch, H query heads, G kv heads, N local tokens, D head dim, Dv value head dim, S global tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError, Refused
from ..mask import IntervalMask
from ..transport import transport_of
from .sharding import NamedSequence, Sequence


def sdpa(
    group: str,
    sequence: Sequence | NamedSequence,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What torch.nn.functional.scaled_dot_product_attention promises, over the whole sequence of the group.

    query (B, H, N, D), key (B, G, N, D), value (B, G, N, Dv) hold local tokens -> (B, H, N, Dv). G is H without
    enable_gqa. attn_mask: bool, of the *global* sequence, (S, S), (B, S, S) or (B, 1, S, S), one interval per query.
    Raises InputError, Refused (dropout; a float mask), MaskNotExpressible; RingMismatch on the other ranks.
    """
    try:
        if dropout_p > 0:
            raise Refused(f"scaled_dot_product_attention got dropout_p {dropout_p}; the ring has no dropout: pass 0")
        if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
            raise InputError(
                f"query, key, value are {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}; expected "
                "(batch, heads, local tokens, head_dim) each"
            )
        if not enable_gqa and query.size(1) != key.size(1):
            raise InputError(
                f"query has {query.size(1)} heads, key {key.size(1)}; expected as many, or enable_gqa=True"
            )
        if attn_mask is not None:
            if is_causal:
                raise InputError("scaled_dot_product_attention got attn_mask and is_causal; expected one of them")
            sequence = _with_mask(sequence, attn_mask)
    except (InputError, Refused) as error:
        transport_of(group).refuse("scaled_dot_product_attention", error)
        raise
    out, _ = ring(group, sequence, query, key, value, is_causal, scale)
    return out


def ring(
    group: str,
    sequence: Sequence | NamedSequence,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """out (B, H, N, Dv) and the log-sum-exp (B, H, N), for heads before tokens; in autocast's dtype where it is on."""
    begin, end, layout = sequence.arguments(query, query.size(2), is_causal)
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, lse = torch.ops.ringtile.ring_attention(
        q, k, v, begin, end, layout, q.size(-1) ** -0.5 if scale is None else scale, 0.0, group
    )
    return out.transpose(1, 2), lse


def _with_mask(sequence: Sequence | NamedSequence, attn_mask: Tensor) -> Sequence:
    """The sequence under a dense mask of all its tokens."""
    if attn_mask.dtype != torch.bool:
        raise Refused(
            f"attn_mask is {attn_mask.dtype}; the ring adds nothing to scores: pass a bool mask, or is_causal"
        )
    if isinstance(sequence, NamedSequence):
        raise Refused("attn_mask under ContextParallel; give the mask to context_parallel(..., mask=...) around it")
    seq_len = sequence.layout.seq_len
    if attn_mask.shape[-2:] != (seq_len, seq_len):
        raise InputError(
            f"attn_mask is {tuple(attn_mask.shape)}; expected all {seq_len} global tokens in both of its last "
            "dimensions (leave it out of buffers), or no attn_mask and context_parallel(..., mask=...)"
        )
    given = IntervalMask(sequence.begin, sequence.end)
    return Sequence(sequence.layout, given & IntervalMask.from_bool(attn_mask))
