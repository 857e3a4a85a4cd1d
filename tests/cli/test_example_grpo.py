"""examples/grpo_trl.py: it trains as printed, on two ranks."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "grpo_trl.py"


@pytest.mark.long
def test_example_trains_adapters_on_two_ranks(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(EXAMPLE), "--steps", "3", "--prompt", "100"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("rewards:")]
    rewards = [float(number) for number in line.split()[1:]]
    assert len(rewards) == 3
    assert all(0 <= each <= 1 for each in rewards)
    assert "2 ranks share a sequence" in done.stdout + done.stderr
