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
from ringtile.hf.patches import Patches

PACKAGE = pathlib.Path(ringtile.__file__).parent


def run_doctor(
    tmp_path: pathlib.Path, *statements: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, Any]]]:
    command = ["doctor", "--json", str(tmp_path / "doctor.json")]
    if "PYTHONPATH" in environment:  # another copy of the package
        program = [sys.executable, "-m", "ringtile", *command]
        done = subprocess.run(program, env=os.environ | environment, capture_output=True, text=True, cwd=tmp_path)
    else:
        program = ["import sys; from ringtile.cli import doctor, main", *statements, f"sys.exit(main({command}))"]
        done = run_program("\n".join(program), **environment)
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

    patches, forgotten = Patches(), Patches()
    patches.set(Owner(), "step", 1)
    forgotten.set(Owner(), "forgotten", 1)
    assert "Owner.step" in doctor.patched()["replaced here"]
    del forgotten
    assert "Owner.forgotten" not in doctor.patched()["replaced here"]
    patches.restore()
    assert "Owner.step" not in doctor.patched()["replaced here"]


@pytest.mark.long  # a process of its own; the tests below read the same report in this one
def test_doctor_patches_nothing_and_names_the_forced_instruction_set(tmp_path: pathlib.Path) -> None:
    done, report = run_doctor(tmp_path, RINGTILE_CPU_ISA="generic")
    assert done.returncode == 0, done.stderr
    assert report["kernels"]["isa"] == "generic"
    assert report["kernels"]["best_isa"] in ops.ISA_NAMES
    assert report["patched"]["replaced here"].startswith("nothing")
    assert report["environment"]["RINGTILE_CPU_ISA"] == "generic"


def test_doctor_names_an_unknown_instruction_set(tmp_path: pathlib.Path) -> None:
    done, report = run_doctor(tmp_path, "doctor.best_isa = lambda: None", RINGTILE_CPU_ISA="sse9")
    assert done.returncode == 1
    assert "RINGTILE_CPU_ISA" in report["kernels"]["error"]
    assert "Traceback" not in done.stderr


@pytest.mark.long
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


def bundle(tmp_path: pathlib.Path, config: dict[str, Any] | str, **variables: str) -> dict[str, str]:
    """The texts of the archive that doctor writes for a run's file."""
    path = tmp_path / "run.yaml"
    path.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        assert main(["doctor", "--bundle", str(tmp_path / "out" / "report.zip"), "--config", str(path)]) == 0
    with zipfile.ZipFile(tmp_path / "out" / "report.zip") as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """doctor without the kernels' checks."""
    monkeypatch.setattr(doctor, "self_tests", dict)


def test_bundle_has_what_a_bug_report_needs(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    auto = tmp_path / "auto.yaml"
    auto.write_text("layout: [zigzag\nhub_token: hunter2\n")  # not YAML
    config = {
        "model": {"model_type": "llama", "hidden_size": 64, "rope_parameters": {"rope_theta": 1e4, "extra": "x"}},
        "data": {"files": ["a.txt"], "seq_len": 512},
        "training": {"max_steps": 5, "learning_rate": "1e-3", "bf16": True, "output_dir": "out", "run_name": None},
        "context_parallel_scheme": "usp:2",
        "tile_tokens": 64,
        "training_": {"max_steps": 1},
    }
    texts = bundle(
        tmp_path, config, OMP_NUM_THREADS="3", TOKENIZERS_PARALLELISM="false", RINGTILE_CONFIG=str(auto), HF_TOKEN="x"
    )
    assert "read it before you send it" in capsys.readouterr().out
    assert torch.__version__ in texts["doctor.txt"]
    report = json.loads(texts["doctor.json"])
    assert report["versions"]["torch"] == torch.__version__
    assert report["kernels"]["binary"].endswith(".so")
    assert pathlib.Path(report["kernels"]["binary"]).name == report["kernels"]["binary"]
    assert report["environment"]["OMP_NUM_THREADS"] == "3"
    assert f"torch=={torch.__version__}\n" in texts["packages.txt"]
    hidden = "<not shown>"
    assert yaml.safe_load(texts["config.yaml"]) == {
        "model": {"model_type": "llama", "hidden_size": 64, "rope_parameters": {"rope_theta": 1e4, "extra": hidden}},
        "data": {"files": hidden, "seq_len": 512},
        "training": {"max_steps": 5, "learning_rate": "1e-3", "bf16": True, "output_dir": hidden, "run_name": hidden},
        "context_parallel_scheme": "usp:2",
        "tile_tokens": 64,
        "training_": hidden,
    }
    assert texts["ringtile_config.yaml"] == (
        "# ringtile_config.yaml is left out: it is no YAML file that ringtile reads (line 2)\n"
    )
    lines = {*texts["environment.txt"].splitlines()}
    assert {"OMP_NUM_THREADS=3", "TOKENIZERS_PARALLELISM=false", "HF_TOKEN=<not shown>"} <= lines


SECRET = "hunter2"
HOSTILE_VALUES = (
    SECRET,
    f"https://me:{SECRET}@files.example/data.jsonl",
    f"//me:{SECRET}@files.example/data.jsonl",
    f"s3://bucket/data.jsonl?token={SECRET}&x=1",
    f"https://account.example/data?sv=1&sig={SECRET}",
    f"/home/{SECRET}/data.jsonl",
    f"C:\\Users\\{SECRET}\\data",
    [f"~{SECRET}/data", SECRET],
    {"inner": SECRET, SECRET + "@x": {"deeper": [SECRET]}},
)
HOSTILE_KEYS = (
    *("private_key", "credentials", "tokens", "wandb_apikey", "hub_token", "password", "api_key", "pat", "cookie"),
    *("files", "eval_files", "tokenizer", "output_dir", "run_name", "hub_model_id", "resume_from_checkpoint"),
    *("context_parallel_rates", "anything", "name_or_path", "trackio_space_id", "project"),
)


@pytest.mark.parametrize("value", HOSTILE_VALUES)
def test_bundle_shows_no_value_of_a_key_that_is_not_known(quick: None, tmp_path: pathlib.Path, value: Any) -> None:
    keys = dict.fromkeys(HOSTILE_KEYS, value)
    nested = {**keys, "deepspeed": {**keys, "zero_optimization": keys}}
    config = {**keys, "model": value, "data": nested, "training": {**nested, "optim": "sgd"}}
    texts = bundle(tmp_path, config)
    assert not any(SECRET in text for text in texts.values())
    hidden = dict.fromkeys(HOSTILE_KEYS, "<not shown>")
    below = {**hidden, "deepspeed": {**hidden, "zero_optimization": hidden}}
    expected = {**hidden, "model": "<not shown>", "data": below, "training": {**below, "optim": "sgd"}}
    found = yaml.safe_load(texts["config.yaml"])
    if isinstance(value, dict):
        assert found.pop("model") == {"inner": "<not shown>", "<not shown>": "<not shown>"}
        del expected["model"]
    assert found == expected


def test_bundle_shows_no_value_of_a_variable_that_is_not_known(quick: None, tmp_path: pathlib.Path) -> None:
    names = ("HF_PAT", "TORCH_PW", "WANDB_SERVICE", "WANDB_API_KEY", "HF_TOKEN", "HF_ENDPOINT", "SLURM_JOB_USER")
    names = (*names, "PYTHONSTARTUP", "TORCH_HOME", "MASTER_ADDR", "NCCL_CONF_FILE", "RINGTILE_OTHER", "PATHS")
    texts = bundle(tmp_path, {}, **dict.fromkeys(names, SECRET), AWS_SESSION=SECRET, NCCL_ALGO=f"//me:{SECRET}@host")
    assert not any(SECRET in text for text in texts.values())
    assert {f"{name}=<not shown>" for name in (*names, "NCCL_ALGO")} <= {*texts["environment.txt"].splitlines()}
    assert "AWS_SESSION" not in texts["environment.txt"]


def test_bundle_shows_no_folder(quick: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which names the user, in the path of the binary, in what the loader says, and in a variable."""
    home = tmp_path / "Ann B Smith"
    monkeypatch.setenv("HOME", str(home))
    error = f"{home}/venv/_C.abi3.so: undefined symbol: aoti_x (in '/opt/Smith/lib.so' or C:\\Smith\\lib.dll)"
    found = {"binary": f"{home}/venv/ringtile/_C.abi3.so", "error": f"not loaded: {error}", "isa": "avx2"}
    monkeypatch.setattr(doctor, "kernels", lambda: found)
    monkeypatch.setattr(doctor.environment, "reported", lambda: {"RINGTILE_CONFIG": f"{home}/a.yaml"})
    assert main(["doctor", "--bundle", str(tmp_path / "report.zip")]) == 1
    with zipfile.ZipFile(tmp_path / "report.zip") as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert not any(name in texts[file] for name in ("Smith", "Ann") for file in ("doctor.txt", "doctor.json"))
    kernels = json.loads(texts["doctor.json"])["kernels"]
    assert kernels == {
        "binary": "_C.abi3.so",
        "error": "not loaded: <path> undefined symbol: aoti_x (in '<path>' or <path>)",
        "isa": "avx2",
    }


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
