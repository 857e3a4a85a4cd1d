"""`ringtile doctor`: tells the truth about this process, also where the compiled ops do not load."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import zipfile
from typing import Any

import pytest
import ringtile
import torch
import yaml
from pool import run_program
from ringtile import ops
from ringtile.cli import doctor, main
from ringtile.hf.ledger import Ledger

PACKAGE = pathlib.Path(ringtile.__file__).parent


def run_doctor(
    tmp_path: pathlib.Path, **environment: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, Any]]]:
    command = ["doctor", "--json", str(tmp_path / "doctor.json")]
    if "PYTHONPATH" in environment:  # another copy of the package
        program = [sys.executable, "-m", "ringtile", *command]
        done = subprocess.run(program, env=os.environ | environment, capture_output=True, text=True, cwd=tmp_path)
    else:
        done = run_program(f"import sys; from ringtile.cli import main; sys.exit(main({command}))", **environment)
    return done, json.loads((tmp_path / "doctor.json").read_text())


def test_doctor_reports_this_machine(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", str(tmp_path / "doctor.json")]) == 0
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert report["versions"]["torch"] == torch.__version__
    assert report["kernels"]["isa"] == ops.cpu_isa()
    assert report["kernels"]["threads"] == torch.get_num_threads()
    assert report["process groups"]["gloo"] is True
    assert torch.__version__ in capsys.readouterr().out


def test_doctor_lists_what_ledgers_replaced() -> None:
    class Owner:
        pass

    ledger, forgotten = Ledger(), Ledger()
    ledger.set(Owner(), "step", 1)
    forgotten.set(Owner(), "forgotten", 1)
    assert "Owner.step" in doctor.patched()["replaced here"]
    del forgotten
    assert "Owner.forgotten" not in doctor.patched()["replaced here"]
    ledger.restore()
    assert "Owner.step" not in doctor.patched()["replaced here"]


def test_doctor_patches_nothing_and_names_the_forced_instruction_set(tmp_path: pathlib.Path) -> None:
    done, report = run_doctor(tmp_path, RINGTILE_CPU_ISA="generic")
    assert done.returncode == 0, done.stderr
    assert report["kernels"]["isa"] == "generic"
    assert report["kernels"]["best_isa"] in ops.ISA_NAMES
    assert report["patched"]["replaced here"].startswith("nothing")
    assert report["environment"]["RINGTILE_CPU_ISA"] == "generic"


def test_doctor_names_an_unknown_instruction_set(tmp_path: pathlib.Path) -> None:
    done, report = run_doctor(tmp_path, RINGTILE_CPU_ISA="sse9")
    assert done.returncode == 1
    assert "RINGTILE_CPU_ISA" in report["kernels"]["error"]
    assert "Traceback" not in done.stderr


def test_doctor_works_without_the_compiled_ops(tmp_path: pathlib.Path) -> None:
    """A copy of the package without its binary, as after a failed build."""
    (tmp_path / "ringtile").mkdir()
    for part in PACKAGE.iterdir():
        if part.suffix != ".so":
            (tmp_path / "ringtile" / part.name).symlink_to(part)
    done, report = run_doctor(tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "pip install" in report["kernels"]["error"]
    assert report["versions"]["torch"] == torch.__version__
    assert "Traceback" not in done.stderr


# ---- the bundle -----------------------------------------------------------------------------------


def test_bundle_has_what_a_bug_report_needs_and_no_secret(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "HF_TOKEN": "hunter2",
        "WANDB_API_KEY": "hunter2",
        "AWS_SESSION": "hunter2",  # does not look like one, and is none of a run's variables
        "HF_ENDPOINT": "https://me:hunter2@hub.example/x",
        "OMP_NUM_THREADS": "3",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        monkeypatch.setenv(name, value)
    config = tmp_path / "run.yaml"
    config.write_text("training: {hub_token: hunter2, max_steps: 5}  # hunter2\ntile_tokens: 64\n")
    auto = tmp_path / "auto.yaml"
    auto.write_text("layout: [zigzag\nhub_token: hunter2\n")  # not YAML
    monkeypatch.setenv("RINGTILE_CONFIG", str(auto))
    assert main(["doctor", "--bundle", str(tmp_path / "out" / "report.zip"), "--config", str(config)]) == 0
    assert "read it before you send it" in capsys.readouterr().out
    with zipfile.ZipFile(tmp_path / "out" / "report.zip") as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert not any("hunter2" in text for text in texts.values())
    assert torch.__version__ in texts["doctor.txt"]
    assert json.loads(texts["doctor.json"])["versions"]["torch"] == torch.__version__
    assert f"torch=={torch.__version__}\n" in texts["packages.txt"]
    assert yaml.safe_load(texts["config.yaml"]) == {
        "training": {"hub_token": "<hub_token>", "max_steps": 5},
        "tile_tokens": 64,
    }
    assert texts["ringtile_config.yaml"].startswith("# auto.yaml is left out: it is no YAML file that ringtile reads")
    lines = texts["environment.txt"].splitlines()
    assert {"OMP_NUM_THREADS=3", "TOKENIZERS_PARALLELISM=false", "HF_TOKEN=<HF_TOKEN>"} <= {*lines}
    assert "HF_ENDPOINT=https://<login>@hub.example/x" in lines
    assert not any(line.startswith("AWS") for line in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bundle", "report.tar"], "--bundle is report.tar; expected a file name ending in .zip"),
        (["--config", "run.yaml"], "--config is given without --bundle"),
        (["--bundle", "report.zip", "--config", "missing.yaml"], "--config: missing.yaml is no file"),
        (["--bundle", "/proc/report.zip"], "--bundle: cannot write"),
    ],
)
def test_bundle_that_cannot_be_written_is_refused(
    options: list[str],
    message: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *options]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
