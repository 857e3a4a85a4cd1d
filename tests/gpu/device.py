"""What the tests of this folder run on: the GPU or, as a rehearsal, the CPU; and ringtile's own kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ringtile import IntervalMask, Layout, ShardedSequence, ring_attention
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = pytest.mark.skipif(DEVICE.type == "cpu", reason="there is no GPU")


def attention(q: Tensor, k: Tensor, v: Tensor, *, mask: IntervalMask, **options: Any) -> Any:
    """`ringtile.attention`, never by aten: on a GPU "auto" may choose its kernels."""
    layout = Layout.contiguous(mask.seq_len, 1)
    return ring_attention(q, k, v, ShardedSequence.of(mask, layout), attention_kernel="ringtile", **options)
