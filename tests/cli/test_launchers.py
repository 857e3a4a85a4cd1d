"""`ringtile train` under other launchers than torchrun: the losses of one process."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest
from ringtile.cli import main
from test_cli_train import write_config

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
BIN = pathlib.Path(sys.executable).parent


def commands(port: str) -> dict[str, list[str]]:
    """Return what starts two ranks of `ringtile`, or of its verb `train`, by the module it needs."""
    deepspeed = ["--num_gpus", "2", "--master_port", port, "--module", "ringtile", "train"]
    accelerate = ["--multi_gpu", "--num_processes", "2", "--main_process_port", port, "-m", "ringtile", "train"]
    return {
        "accelerate": [str(BIN / "accelerate"), "launch", *accelerate],
        "deepspeed": [str(BIN / "deepspeed"), *deepspeed],
        "ray": [sys.executable, str(EXAMPLES / "ray_train.py"), "--workers", "2"],
    }


def test_argument_of_deepspeeds_launcher_is_accepted(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--local_rank=0", "train", str(tmp_path / "missing.yaml")]) == 2
    assert "missing.yaml: No such file" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["accelerate", "deepspeed", "ray"])
def test_losses_are_those_of_one_process(launcher: str, tmp_path: pathlib.Path) -> None:
    if importlib.util.find_spec(launcher) is None:
        pytest.skip(f"{launcher} is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    path, report = write_config(tmp_path, context_parallel_size=2, tiled_loss=True), tmp_path / "report.json"
    options = ["--compare", "--json", str(report)]
    variables = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [*commands(port)[launcher], str(path), *(["--"] if launcher == "ray" else []), *options],
        env=os.environ | variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(report.read_text())
    assert said["world_size"] == 2
    assert said["differences"]["losses"] <= 1e-6
    assert said["losses"][-1] < said["losses"][0]
