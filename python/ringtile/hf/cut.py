"""How a batch was cut: what layers that mix tokens must know of the global sequence.

Shape letters: B batch, S global tokens, P padded global tokens, N local tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ringtile.block import BlockKernel
from ringtile.layout import Layout
from ringtile.mask import IntervalMask
from ringtile.transport import Group

CUT = "ringtile_cut"  # the keyword argument that carries a Cut through the model


@dataclass(eq=False)
class Cut:
    """How one batch was cut. Attention layers receive it as the keyword argument CUT."""

    seq_len: int  # S, before padding
    layout: Layout  # of P tokens
    group: Group
    mask: IntervalMask  # over P tokens
    max_position: int  # of the global position ids
    num_targets: Tensor | None  # int64 (): targets of the global batch; None without labels
    block_kernel: BlockKernel = "ringtile"
    attention_calls: int = 0  # attention layers that used this Cut so far
    loss_calls: int = 0  # loss functions that received this Cut so far
    _masks: dict[int, IntervalMask] = field(default_factory=dict)

    def mask_of(self, sliding_window: int | None) -> IntervalMask:
        """The mask of a layer: a query sees its own position and the sliding_window - 1 before it."""
        if sliding_window is None:
            return self.mask
        if sliding_window not in self._masks:
            window = IntervalMask.sliding_window(self.layout.seq_len, sliding_window)
            self._masks[sliding_window] = self.mask & window
        return self._masks[sliding_window]

    def join(self, local: Tensor) -> Tensor:
        """The global tensor (B, S, ...) of local tensors (B, N, ...), the padding dropped. A collective."""
        return self.layout.unshard(local, dim=1, group=self.group)[:, : self.seq_len]
