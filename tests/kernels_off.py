"""A device without ringtile's kernels, on a machine without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch
from ringtile import ops, self_test

WHY = "not built: as a test says"
# The ops that CUDA tensors need no kernel for.
ON_THE_HOST = ("layout_check", "plan_rank", "plan_counts", "pieces", "run_positions", "digest", "balance", "cpu_isa")


@contextlib.contextmanager
def kernels_off() -> Iterator[None]:
    """As on a GPU where the CUDA kernels are missing: torch operations on every device, and aten's attention.

    Whoever asks for another op fails.
    """
    there = SimpleNamespace(**{name: getattr(torch.ops.ringtile, name) for name in ON_THE_HOST})
    verdicts = {key: self_test.failures.pop(key) for key in [*self_test.failures] if key[0] in ops.KERNELS}
    try:
        with mock.patch("ringtile.ops.why_no_kernels", return_value=WHY), mock.patch("ringtile.ops._ops", there):
            yield
    finally:
        self_test.failures.update(verdicts)
