"""The device that the tests of this folder run on: the GPU or, as a rehearsal, the CPU."""

from __future__ import annotations

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = pytest.mark.skipif(DEVICE.type == "cpu", reason="there is no GPU")
