"""One batch under context parallelism: its sharded sequence, and what the Trainer layer must remember about it.

Shape letters: B batch, S global tokens, P padded global tokens, N local tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ringtile.attn.choose import AttentionKernel
from ringtile.hf.layers import LayerMask
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence

BATCH_ARGUMENT = "ringtile_batch"  # the keyword argument that carries a ShardedBatch through the model


@dataclass(eq=False)
class ShardedBatch:
    """One batch, sharded over a group. Attention layers receive it as the keyword argument BATCH_ARGUMENT."""

    sequence: ShardedSequence  # of P tokens
    seq_len: int  # S, before padding
    max_position: int  # the largest global position id
    num_targets: Tensor | None  # int64 (): targets in the global batch; None without labels
    places: Tensor  # int64 (N,): of the local tokens, in the row
    first_tokens: tuple[int, ...] = (0,)  # of each row, or of all: how many tokens of padding it begins with
    attention_kernel: AttentionKernel = "ringtile"
    position_ids: Tensor | None = None  # (B, N)
    token_weights: Tensor | None = None  # (B, N): the local attention mask; 1 without one, 0 for the layout's padding
    causal: bool = True  # whether its mask lets no query attend a later token
    mean_share: float = 1.0  # the factor, in the loss of a shard, of what is not divided by a number of items
    balancing_loss: Tensor | None = None  # (): of the sequence, where the model has computed one
    attention_calls: int = 0  # attention layers that have used this batch
    recurrent_calls: int = 0  # recurrent mixers that have
    loss_calls: int = 0  # loss functions that have received it
    _chunked: dict[int, ShardedSequence] = field(default_factory=dict)

    def narrowed(self, layer: LayerMask) -> ShardedSequence:
        """The sequence as a layer sees it. torch.compile cannot make its mask: a call outside must have done so."""
        if layer.chunk is None:
            return self.sequence.with_window(layer.window, layer.causal)
        if layer.chunk not in self._chunked:
            chunks = IntervalMask.chunked(self.sequence.seq_len, layer.chunk, first=self.first_tokens)
            self._chunked[layer.chunk] = self.sequence & chunks
        return self._chunked[layer.chunk]

    def unshard(self, local: Tensor) -> Tensor:
        """The shards (B, N, ...) of all ranks -> (B, S, ...) without the padding. A collective, differentiable."""
        return self.sequence.unshard(local, dim=1)[:, : self.seq_len]


def main_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """What a model is called with: token ids (B, S), or embeddings (B, S, E)."""
    main = kwargs.get("input_ids", kwargs.get("inputs_embeds", args[0] if args else None))
    return main if isinstance(main, Tensor) else None
