"""Dropout of attention weights by counters: the same for any number of ranks, any layout and order of the blocks.

docs/design/dropout.md has the formula.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ringtile import arguments
from ringtile.errors import InputError


@dataclass(frozen=True, eq=False)
class AttentionDropout:
    """What attention drops: each weight with this probability, after the softmax; the others are divided by 1 - p.

    Which weights stay is a function of seed, step and stream, of the row (rows, int64 (B,), on q's device, numbers the
    rows of a batch), the query head, and the positions of query and key in the global sequence. Give each call of a
    step a stream of its own. probability is in 0..1 and the same on every rank, like everything here; seed, step
    and stream are in 0..2^32 - 1, rows count modulo 2^32. A query head beyond 4096, or a row beyond 2^20, draws again
    what another pair of them has drawn.
    """

    probability: float
    rows: Tensor
    seed: int
    step: int = 0
    stream: int = 0

    def checked(self, q: Tensor) -> AttentionDropout | None:
        """The same in plain numbers; None where nothing is dropped. InputError: malformed, or not for q."""
        probability = arguments.check_number("the probability of dropout", self.probability)
        if not 0 <= probability <= 1:
            raise InputError(f"the probability of dropout is {probability}; expected 0..1")
        numbers = []
        for name in ("seed", "step", "stream"):
            numbers.append(arguments.check_int(f"the {name} of dropout", getattr(self, name)))
            if not 0 <= numbers[-1] < 2**32:
                raise InputError(f"the {name} of dropout is {numbers[-1]}; expected 0..2^32 - 1")
        arguments.check_tensor("rows of dropout", self.rows)
        if self.rows.shape != q.shape[:1] or self.rows.dtype != torch.int64 or not self.rows.is_contiguous():
            raise InputError(
                f"rows of dropout are {self.rows.dtype} {tuple(self.rows.shape)}; expected int64 {tuple(q.shape[:1])}, "
                f"contiguous: the number of each row of q"
            )
        arguments.check_devices("q", q, **{"rows of dropout": self.rows})
        return AttentionDropout(probability, self.rows, *numbers) if probability else None

    def of_heads(self, heads: range) -> AttentionDropout:
        """Return the same for a call on some of the query heads: the kernel counts heads in bits 20.. of the row."""
        return replace(self, rows=self.rows + (heads.start << 20)) if heads.start else self
