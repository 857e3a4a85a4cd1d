"""Where the documents of local tokens start, as one byte for each token.

resets uint8 (Bm, N). STARTS: a document starts at this token, so no state and no input reaches it from before. PADDING:
the token reads and writes nothing; its output and its gradients are 0, whatever it holds. A state is that of the
document that is open after the last token.

Shape letters: Bm mask rows (B or 1), N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

STARTS, PADDING = 1, 2


def holds(resets: Tensor) -> Tensor:
    """bool (Bm, N): whether a token is no padding."""
    return (resets & PADDING) == 0


def kept_after(resets: Tensor, before: int) -> Tensor:
    """bool (Bm, before): which of the last inputs, those before the first token included, are of the open document."""
    padded = functional.pad(resets, (before, 0))
    held, starts = holds(padded), (padded & STARTS) > 0
    size = padded.size(1)
    of_document = torch.ones_like(held[:, 0])
    kept = []
    for at in range(size - 1, size - 1 - before, -1):
        of_document = of_document & held[:, at]
        kept.append(of_document)
        of_document = of_document & ~starts[:, at]
    return torch.stack(kept[::-1], dim=1) if kept else held[:, :0]
