"""What the documentation shows is run: its Python, its YAML, and the configurations it points to."""

import functools
import pathlib
import re
from unittest import mock

import pytest
import ringtile
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from hf_engines import engine
from hf_models import tiny_model, tiny_tokenizer
from hf_training import Padded, enter_world, make_rows
from pool import run_ranks
from ringtile.config import Config
from test_hf_axolotl import registered

ROOT = pathlib.Path(__file__).parent.parent


def _blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def _run_huggingface(code, folder):
    from transformers import Trainer, TrainingArguments

    enter_world()
    args = TrainingArguments(folder, use_cpu=True, max_steps=1, report_to=[], disable_tqdm=True, save_strategy="no")
    names = {"Trainer": Trainer, "model": tiny_model(), "args": args, "rows": make_rows(8), "collator": Padded()}
    exec(code, names)
    return names["trainer"].state.global_step


def test_page_of_the_trainer_runs(tmp_path):
    (code,) = _blocks("huggingface.md", "python")
    assert run_ranks(2, _run_huggingface, code, str(tmp_path)) == [1, 1]


def _run_trl(code, folder):
    import datasets
    import trl

    enter_world()
    with engine("DDP"):
        arguments = {"use_cpu": True, "max_steps": 1, "report_to": [], "save_strategy": "no", "bf16": False}
        config = functools.partial(trl.SFTConfig, **arguments)
        trainer = functools.partial(trl.SFTTrainer, processing_class=tiny_tokenizer())
        names = {"model": tiny_model(), "rows": datasets.Dataset.from_list(make_rows(8))}
        with mock.patch.object(trl, "SFTConfig", config), mock.patch.object(trl, "SFTTrainer", trainer):
            exec(code.replace('"out"', repr(folder)), names)
    return names["trainer"].state.global_step


def test_page_of_trl_runs(tmp_path):
    pytest.importorskip("trl")
    (code,) = _blocks("trl.md", "python")
    assert run_ranks(2, _run_trl, code, str(tmp_path)) == [1, 1]


AXOLOTL = [
    *((f"docs/axolotl.md {i}", text) for i, text in enumerate(_blocks("axolotl.md", "yaml"))),
    *((path.name, path.read_text()) for path in sorted((ROOT / "configs" / "axolotl").glob("*.yaml"))),
]


@pytest.mark.parametrize("text", [text for _, text in AXOLOTL], ids=[name for name, _ in AXOLOTL])
def test_axolotl_configuration_is_one_of_ours(text):
    cfg = registered(**yaml.safe_load(text))
    assert Config.load(cfg["ringtile"]).context_parallel_size == 8
    assert not cfg.keys() & (Config.model_fields.keys() - {"gc_steps"})


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "accelerate").glob("*.yaml")), ids=lambda path: path.name)
def test_accelerate_reads_its_configuration(path):
    config = load_config_from_file(str(path))
    assert config.fsdp_config["fsdp_version"] == 2
    sizes = config.parallelism_config or {}
    assert sizes.get("parallelism_config_cp_size", 1) in (1, 4)
    assert config.num_processes == 8


def test_names_on_the_page_of_migrating_exist():
    text = (ROOT / "docs" / "migrating.md").read_text()
    ours = [row.split(" | ")[-1] for row in text.splitlines() if row.startswith("|") and "---" not in row]
    keys = {key for cell in ours for key in re.findall(r"`([a-z_]+): ", cell)} - {"train_batch_size", "plugins"}
    assert keys
    assert keys <= Config.model_fields.keys()
    for owner, name in re.findall(r"(IntervalMask|Layout)\.(\w+)\(", " ".join(ours)):
        assert hasattr(getattr(ringtile, owner), name), name


def test_window_of_the_page_of_migrating_is_ring_flash_attns():
    """window_size=(w - 1, 0) there is w keys here, the query's own among them."""
    mask = ringtile.IntervalMask.causal(6) & ringtile.IntervalMask.sliding_window(6, 3)
    assert torch.equal(mask.end - mask.begin, torch.tensor([[1, 2, 3, 3, 3, 3]], dtype=torch.int32))
