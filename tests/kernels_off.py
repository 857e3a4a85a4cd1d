"""A device without ringtile's kernels, on a machine without a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

WHY = "not built: as a test says"


def kernels_off() -> AbstractContextManager[Any]:
    """As on a GPU where the CUDA kernels are missing: torch operations on every device, and aten's attention."""
    return mock.patch("ringtile.ops.why_no_kernels", lambda device: "" if device.type == "meta" else WHY)
