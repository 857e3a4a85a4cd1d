"""Every configuration in configs/: its keys are known, and it trains, shrunk to what a CPU can do."""

from __future__ import annotations

import json
import pathlib
from typing import Any
from unittest import mock

import datasets
import pytest
import torch.distributed as dist
import transformers
import yaml
from hf_engines import engine, needs_deepspeed
from hf_training import enter_world
from pool import run_command, run_ranks
from ringtile.cli import main, train
from ringtile.cli.recipe import Recipe
from ringtile.errors import ConfigError
from test_cli_train import MODEL, TEXT

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
ALST = sorted((CONFIGS / "alst").glob("*.yaml"))
# What a CPU has no room or no unit for; plain gradient descent and no clipping, so that losses show every gradient.
SMALL = {
    "bf16": False,
    "max_steps": 3,
    "optim": "sgd",
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "max_grad_norm": 1e9,
    "save_strategy": "no",
    "disable_tqdm": True,
    "gradient_accumulation_steps": 2,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def shrunk(path: pathlib.Path, folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Write the same run on a tiny model and 2 ranks; every key that is no size stays."""
    config = yaml.safe_load(path.read_text())
    (folder / "text.txt").write_text(TEXT * 2)
    transformers.set_seed(0)
    model_config = transformers.LlamaConfig(**MODEL, vocab_size=257, max_position_embeddings=64)
    transformers.AutoModelForCausalLM.from_config(model_config).save_pretrained(folder / "model")  # ZeRO-3 draws others
    config |= {"model": "model", "context_parallel_size": 2, "tile_tokens": 20}
    config["data"] |= {"files": "text.txt", "seq_len": 64, "tokenizer": "bytes"}
    config["training"] |= SMALL | {"output_dir": str(folder / "out")} | changes
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder / "run.yaml"


@pytest.mark.parametrize("path", [*ALST, *sorted(CONFIGS.glob("*.yaml"))], ids=lambda path: path.stem)
def test_keys_are_known_and_commented(path: pathlib.Path) -> None:
    recipe = Recipe.load(path)
    assert recipe.ringtile.tiled_mlp
    for line in path.read_text().splitlines():
        if line.partition("#")[0].strip() and not line.partition("#")[0].rstrip().endswith(":"):
            assert "#" in line or line.lstrip().startswith("- "), line


def test_readme_has_every_key() -> None:
    text = (CONFIGS / "alst" / "README.md").read_text()
    keys = (CONFIGS.parent / "docs" / "reference" / "config.md").read_text()  # ringtile's, to which it leads
    for path in ALST:
        assert f"({path.name})" in text
        config = yaml.safe_load(path.read_text())
        for key in [*config["training"], *config["training"].get("fsdp_config", {})]:
            assert f"`{key}`" in text or f"`{key}:" in text, key
        assert [key for key in config.keys() - {"model", "data", "training"} if f"`{key}`" not in keys] == []


@pytest.mark.long  # test_cli_train.py compares the same engine
@pytest.mark.timeout(400)
def test_ddp_trains_as_one_process(tmp_path: pathlib.Path) -> None:
    path = shrunk(CONFIGS / "alst" / "ddp.yaml", tmp_path, use_cpu=True)
    cache = {"HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    done = run_command(2, "train", str(path), "--compare", "--json", str(tmp_path / "train.json"), variables=cache)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "train.json").read_text())
    assert len(report["losses"]) == 3
    assert report["losses"][2] < report["losses"][0]
    assert report["differences"]["losses"] <= 1e-6
    assert "nothing is offloaded" in done.stderr


def rank_losses(path: pathlib.Path, name: str, cache: pathlib.Path) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a run under an engine, on a rank of the pool, whose process group stays."""
    datasets.config.HF_DATASETS_CACHE = cache
    with engine(name), mock.patch.object(dist, "destroy_process_group"):
        enter_world()
        report = train.train(Recipe.load(path))
    enter_world()
    return report["losses"], report["grad_norms"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("file", "name"),
    [("fsdp2", "FSDP2"), ("deepspeed_zero3", "ZeRO-3")],
)
@pytest.mark.long  # test_tiled_engines.py has the numbers of both engines in every run
def test_sharded_engines_train_as_one_process(file: str, name: str, tmp_path: pathlib.Path) -> None:
    if name.startswith("ZeRO"):
        needs_deepspeed()
    changes: dict[str, Any] = {"use_cpu": False}
    config = yaml.safe_load((CONFIGS / "alst" / f"{file}.yaml").read_text())
    if "deepspeed" in config["training"]:  # it knows a few optimizers, and must be told of others
        changes["deepspeed"] = config["training"]["deepspeed"] | {"zero_allow_untested_optimizer": True}
    path = shrunk(CONFIGS / "alst" / f"{file}.yaml", tmp_path, **changes)
    runs = run_ranks(2, rank_losses, path, name, tmp_path / "datasets", timeout=180)
    enter_world()
    alone = Recipe.load(shrunk(CONFIGS / "alst" / f"{file}.yaml", tmp_path, use_cpu=True)).alone(1, str(tmp_path))
    expected = train.train(alone)
    for losses, norms in runs:
        assert losses == pytest.approx(expected["losses"], rel=1e-6)
        assert norms == pytest.approx(expected["grad_norms"], rel=1e-5)
    assert expected["losses"][2] < expected["losses"][0]


def test_fsdp_that_would_be_ignored_is_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """accelerate trains with DDP where it sees no accelerator, and says nothing."""
    path = shrunk(CONFIGS / "alst" / "fsdp2.yaml", tmp_path, use_cpu=True)
    assert main(["train", str(path)]) == 2
    assert "training: Using fsdp only works in distributed training" in capsys.readouterr().err
    assert (
        run_ranks(2, refusal, path, tmp_path / "datasets")
        == ["training.fsdp is set, but accelerate ignores it on a CPU; expected GPUs"] * 2
    )


def refusal(path: pathlib.Path, cache: pathlib.Path) -> str:
    with pytest.raises(ConfigError) as error:
        rank_losses(path, "DDP", cache)
    enter_world()
    return str(error.value)
