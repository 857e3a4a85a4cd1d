"""Which sequence a call of attention is about, and the call into the ring.

Shape letters: B batch, H query heads, G kv heads, N local tokens, D head dim, Dv value head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringtile import arguments
from ringtile.attn.attention import is_plain, ring_attention
from ringtile.attn.call import Options
from ringtile.attn.traced import SequenceTensors, attend
from ringtile.derivatives import check_once
from ringtile.errors import RefusedError, RingtileError
from ringtile.sequence.sharded import ShardedSequence
from ringtile.torch_context_parallel.group_layouts import sequence_in_force, sequence_of
from ringtile.transport.groups import Group, group_name, propagate_errors, transport_of

_E = TypeVar("_E", bound=RingtileError)


@dataclass(frozen=True, eq=False)
class AttentionScope:
    """The sequence that PyTorch's attention functions run over.

    group: the group, which the scope keeps alive, or its name.
    sequence: None for that of the block around the call, `sequence_in_force`.
    is_masked: whether the user gave the mask; otherwise every query attends every key unless the call is causal.
    """

    group: Group
    sequence: ShardedSequence | None = None
    is_masked: bool = False

    @property
    def group_name(self) -> str:
        return group_name(self.group)

    def told(self, error: _E, op: str = "attention") -> _E:
        """The error, after telling the other ranks of the group, which would wait for this one."""
        return transport_of(self.group).refuse(op, error)

    def check_scale(self, scale: Any) -> None:
        """Refuses a scale whose gradient would be lost."""
        if isinstance(scale, Tensor) and scale.requires_grad:
            raise self.told(
                RefusedError(
                    "scale is a tensor that requires grad, and would get none; multiply query by it, and pass 1.0"
                )
            )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        """`ring_attention` with heads before tokens, in autocast's dtype where autocast is on.

        query (B, H, N, D), key (B, G, N, D), value (B, G, N, Dv) -> out (B, H, N, Dv); with return_lse (out, lse),
        lse (B, H, N). Raises as `ring_attention` and `sequence_in_force` do.
        """
        self.check_scale(scale)
        for name, x in (("query", query), ("key", key), ("value", value)):
            arguments.check_storage(name, x)  # which may be read to make a copy
        device = query.device.type
        if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
            query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        result = self._ring_attention(q, k, v, is_causal, scale, return_lse)
        if not return_lse:
            return result.transpose(1, 2)
        out, lse = result
        return out.transpose(1, 2), lse

    def _ring_attention(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, return_lse: bool
    ) -> Any:
        """`ring_attention` of this scope's sequence: out (B, N, H, Dv), with return_lse (out, lse)."""
        sequence = self.sequence
        if sequence is None and (torch.compiler.is_compiling() or not is_plain(q)):
            with propagate_errors(self.group, "attention", q):
                check_once("ring_attention", q, k, v)
            # A graph would keep the sequence that it was traced with; the op looks it up on every run.
            begin, end, layout = sequence_of(q, q.size(1), is_causal, self.group_name)
            scale = q.size(-1) ** -0.5 if scale is None else scale
            tensors = SequenceTensors(begin, end, layout, self.group_name)
            return attend(q, k, v, tensors, Options(scale, 0.0, "auto", None, None, return_lse))
        if sequence is None:
            sequence = sequence_in_force(self.group_name, q.size(1))
        if is_causal:
            sequence = sequence.causal
        # softcap is passed because dynamo would trace the default as a variable, and compile a second time without it.
        return ring_attention(q, k, v, sequence, scale=scale, softcap=0.0, return_lse=return_lse)
