"""`ringtile train`: the YAML file and its refusals, the losses it reports, the comparison that must be able to fail."""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import datasets
import pytest
import torch
import transformers
import yaml
from pool import run_command
from ringtile.cli import main
from ringtile.cli.data import DataConfig, find_files
from ringtile.cli.recipe import SECTIONS, TRAINING_DEFAULTS, Recipe
from ringtile.cli.report import compare, max_rel_diff
from ringtile.cli.training import LossBar
from ringtile.config import Config
from ringtile.hf.layers import LayerMask, layer_masks
from ringtile.peak_memory import peak_bytes, reset_peak_bytes

ROOT = pathlib.Path(__file__).parents[2]
TEXT = "Every rank holds a part of the sequence; the ring brings the keys. " * 8

MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TRAINING = {
    "use_cpu": True,
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "optim": "sgd",
    "learning_rate": "1e-1",  # a string to YAML: the dot is missing
    "lr_scheduler_type": "constant",
    "save_strategy": "no",
    "disable_tqdm": True,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def write_config(folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """A run on TEXT; `changes` replace whole top-level keys."""
    (folder / "text.txt").write_text(TEXT)
    config = {"model": MODEL, "data": {"files": "text.txt", "seq_len": 64}, "training": TRAINING} | changes
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder / "run.yaml"


def train(path: pathlib.Path, *options: str) -> dict[str, Any]:
    result = path.parent / "result.json"
    assert main(["train", str(path), *options, "--json", str(result)]) == 0
    report: dict[str, Any] = json.loads(result.read_text())
    return report


# ---- what a run reports ---------------------------------------------------------------------------


def test_losses_are_those_of_a_plain_loop(tmp_path: pathlib.Path) -> None:
    """One packed row, seen again and again, against SGD written out over its two documents; nothing is rounded."""
    texts = [TEXT[:70], TEXT[70:126]]
    (tmp_path / "one.txt").write_text(texts[0])
    (tmp_path / "two.jsonl").write_text(json.dumps({"text": texts[1]}) + "\n")
    documents = [torch.tensor([[*text.encode(), 256]]) for text in texts]
    seq_len = sum(tokens.numel() for tokens in documents)
    report = train(write_config(tmp_path, data={"files": ["one.txt", "two.jsonl"], "seq_len": seq_len}))

    transformers.set_seed(42)  # TrainingArguments' default
    config = transformers.LlamaConfig(**MODEL, vocab_size=257, max_position_embeddings=seq_len)
    model = transformers.AutoModelForCausalLM.from_config(config)
    losses, norms = [], []
    for _ in range(4):
        predictions = torch.cat([model(input_ids=tokens).logits[0, :-1] for tokens in documents])
        targets = torch.cat([tokens[0, 1:] for tokens in documents])
        loss = torch.nn.functional.cross_entropy(predictions, targets)
        model.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    # Both are float32 over the same sums, taken in another order: a few ulp of 1.2e-7.
    assert report["losses"] == pytest.approx(losses, rel=1e-6)
    assert report["grad_norms"] == pytest.approx(norms, rel=1e-5)
    assert report["losses"][-1] < report["losses"][0]
    assert report["steps"] == [1, 2, 3, 4]
    assert report["bytes_moved"] == report["plan_bytes"] == 0
    assert report["patched"] == []


def test_rows_longer_than_a_pretrained_model_was_made_for(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are refused with the keys to write, which keep what they do not name; the rest is transformers'."""
    keys = MODEL | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    config = transformers.LlamaConfig(**keys, vocab_size=257, max_position_embeddings=64)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 40.0  # so that it matters which tokens attend which
    model.save_pretrained(tmp_path / "short")
    (tmp_path / "one.txt").write_text(TEXT[:99])
    data = {"files": "one.txt", "seq_len": 100, "tokenizer": "bytes"}
    assert main(["train", str(write_config(tmp_path, model="short", data=data))]) == 2
    said = capsys.readouterr().err
    assert "model.max_position_embeddings is 64; expected at least 100, for data.seq_len. With YaRN: model: " in said
    advice = yaml.safe_load(said[said.index("{name") : said.index("}}") + 2])
    assert advice["rope_parameters"] == {
        "rope_type": "yarn",
        "factor": 1.5625,
        "original_max_position_embeddings": 64,
    }
    report = train(write_config(tmp_path, model=advice, data=data, training=TRAINING | {"max_steps": 1}))
    scaled = transformers.AutoConfig.from_pretrained(tmp_path / "short")
    scaled.rope_parameters |= advice["rope_parameters"]
    scaled.max_position_embeddings = 100
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "short", config=scaled)
    assert model.config.rope_parameters["rope_theta"] == 500.0
    ids = torch.tensor([[*TEXT[:99].encode(), 256]])
    loss = model(input_ids=ids, labels=ids).loss.item()
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "short")
    assert abs(plain(input_ids=ids, labels=ids).loss.item() - loss) > 1e-5 * loss  # ten times what is allowed
    assert report["losses"] == pytest.approx([loss], rel=1e-6)
    assert main(["train", str(write_config(tmp_path, model={"name": "short", "rope_parameter": 1}, data=data))]) == 2
    assert "unknown key model.rope_parameter: did you mean rope_parameters" in capsys.readouterr().err


def test_evaluation_padding_and_plot(tmp_path: pathlib.Path) -> None:
    (tmp_path / "eval.jsonl").write_text('{"body": "held out"}\n{"body": "and another one"}\n')
    data = {"files": "eval.jsonl", "eval_files": "eval.jsonl", "seq_len": 16, "packing": False, "text_column": "body"}
    path = write_config(tmp_path, data=data, training=TRAINING | {"eval_strategy": "steps", "eval_steps": 2})
    report = train(path, "--plot", str(tmp_path / "plots" / "loss.png"))
    assert report["eval_steps"] == [2, 4]
    assert report["eval_losses"][1] < report["eval_losses"][0]
    assert (tmp_path / "plots" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_trained_model_and_its_folder_are_taken_as_model(tmp_path: pathlib.Path) -> None:
    first = train(
        write_config(tmp_path, training=TRAINING | {"save_strategy": "steps", "output_dir": str(tmp_path / "m")})
    )
    again = write_config(tmp_path, model="m", data={"files": "text.txt", "seq_len": 64, "tokenizer": "bytes"})
    assert train(again)["losses"][0] < first["losses"][0]


@pytest.mark.timeout(400)
def test_two_ranks_equal_one_process(tmp_path: pathlib.Path) -> None:
    """The path of `make train`, smaller, and with what makes the bytes harder to foretell: windows, checkpointing."""
    (tmp_path / "more.txt").write_text(TEXT[: len(TEXT) // 3])
    path = write_config(
        tmp_path,
        model=MODEL | {"model_type": "mistral", "sliding_window": 20},
        data={"files": ["text.txt", "more.txt"], "eval_files": "more.txt", "seq_len": 96},
        training=TRAINING
        | {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "eval_strategy": "steps", "eval_steps": 2},
        context_parallel_size=2,
        tiled_mlp=True,
        tile_tokens=40,
        tiled_loss=True,
    )
    options = [
        "--compare",
        "--json",
        str(tmp_path / "out" / "train.json"),
        "--plot",
        str(tmp_path / "out" / "loss.png"),
    ]
    done = run_command(2, "train", str(path), *options)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "train.json").read_text())
    assert len(report["losses"]) == len(report["losses_single"]) == 4
    assert report["max_rel_loss_diff"] <= 1e-6
    assert report["max_rel_grad_norm_diff"] <= 1e-5
    assert report["bytes_moved"] == report["plan_bytes"] > 0
    assert len(report["peak_bytes"]) == 2
    assert report["eval_losses"][1] < report["eval_losses"][0]
    assert (tmp_path / "out" / "loss.png").exists()
    assert done.stdout.count("against one process") == 1  # rank 0 alone prints


def torchrun(world_size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_DATASETS_CACHE": str(datasets.config.HF_DATASETS_CACHE),
    }
    return subprocess.run([*launcher, "-m", "ringtile", *arguments], env=environment, capture_output=True, text=True)


def test_each_layer_is_planned_with_its_own_window() -> None:
    window = {"sliding_window": 8, "num_hidden_layers": 3}
    assert layer_masks(transformers.MistralConfig(**window)) == [LayerMask(window=8)] * 3
    assert layer_masks(transformers.LlamaConfig(num_hidden_layers=2)) == [LayerMask()] * 2
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    expected = [LayerMask(), LayerMask(window=8), LayerMask()]
    assert layer_masks(transformers.Gemma3TextConfig(**window, layer_types=kinds)) == expected


def test_peak_memory_starts_anew() -> None:
    bytearray(b"x") * (256 << 20)
    reset_peak_bytes()
    before = peak_bytes()
    held = bytearray(b"x") * (64 << 20)
    # Resident pages, counted in KiB: all of the array, but for what the allocator had at hand.
    assert 60 << 20 <= peak_bytes() - before <= len(held) + (8 << 20)


def test_progress_bar_shows_loss_and_speed() -> None:
    """Return the metrics of all ranks, or this process's own where it is alone; else none."""
    bar = LossBar(SimpleNamespace(tokens_per_s=lambda: 7.0))  # type: ignore[arg-type]
    bar.training_bar = mock.Mock()
    for world_size, more in ((2, {"tokens_per_s": 123.4}), (1, {}), (2, {})):
        bar.on_log(SimpleNamespace(world_size=world_size), None, None, logs={"loss": 2.5, **more})
    bar.on_log(SimpleNamespace(world_size=2), None, None, logs={"eval_loss": 2.5})
    shown = [call.args[0] for call in bar.training_bar.set_postfix.call_args_list]
    assert shown == [{"loss": "2.5000", "tokens/s": "123"}, {"loss": "2.5000", "tokens/s": "7"}, {"loss": "2.5000"}]


# ---- the comparison -------------------------------------------------------------------------------


def test_max_rel_diff_of_anything_odd_is_no_number() -> None:
    assert max_rel_diff([2.0, 3.0], [2.0, 4.0]) == 0.25
    assert max_rel_diff([1.0], [1.0, 2.0]) == math.inf
    assert math.isnan(max_rel_diff([1.0, math.nan, 1.0], [1.0, 1.0, 1.0]))
    assert max_rel_diff([0.0], [0.0]) == 0.0
    assert max_rel_diff([1.0], [0.0]) == math.inf


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        ({}, None),
        ({"losses": [2.0, 1.0 + 2e-6]}, "max_rel_loss_diff"),
        ({"losses": [2.0, math.nan]}, "max_rel_loss_diff"),
        ({"losses": [2.0]}, "max_rel_loss_diff"),
        ({"grad_norms": [0.5, 0.5 + 1e-4]}, "max_rel_grad_norm_diff"),
        ({"bytes_moved": 8}, "bytes_moved"),
        ({"data_digest": "b"}, "data.files"),
    ],
)
def test_comparison_fails_by_name(change: dict[str, Any], failure: str | None) -> None:
    single = {"losses": [2.0, 1.0], "grad_norms": [0.5, 0.5], "tokens_per_s": 1.0, "data_digest": "a"}
    failures = compare(single | {"bytes_moved": 4, "plan_bytes": 4} | change, single)
    assert [line.split()[0] for line in failures] == ([] if failure is None else [failure])


# ---- refusals -------------------------------------------------------------------------------------


def test_ranks_refuse_alike_and_one_says_it(tmp_path: pathlib.Path) -> None:
    done = run_command(2, "train", str(write_config(tmp_path, context_parallel_size=3)))
    assert done.returncode != 0
    assert done.stderr.count("ringtile: error: ") == 1
    assert "context_parallel_size is 3 but there are 2 ranks" in done.stderr


# ---- configurations and their documentation -------------------------------------------------------


def test_paths_start_at_the_folder_of_the_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    path = write_config(tmp_path)
    monkeypatch.chdir(tmp_path / "elsewhere")
    recipe = Recipe.load(pathlib.Path("..", path.name))
    assert find_files(recipe.data.files, "data.files") == [str(tmp_path / "text.txt")]
    assert recipe.training == TRAINING_DEFAULTS | TRAINING | {"learning_rate": 0.1}
    (tmp_path / "elsewhere" / "again.yaml").write_text(json.dumps(recipe.mapping()))
    assert Recipe.load(tmp_path / "elsewhere" / "again.yaml") == recipe


def test_run_in_one_process_has_the_same_rows_and_no_ringtile(tmp_path: pathlib.Path) -> None:
    recipe = Recipe.load(write_config(tmp_path, context_parallel_size=2, tiled_loss=True))
    alone = recipe.alone(data_parallel_size=3, output_dir="elsewhere")
    assert alone.ringtile == Config()
    assert alone.training["per_device_train_batch_size"] == 2 * 3
    assert (alone.model, alone.data) == (recipe.model, recipe.data)


def test_documentation_has_every_key() -> None:
    """The rows of docs/guide/train.md between "## Keys" and the next heading, against the keys beside ringtile's."""
    section = (ROOT / "docs" / "guide" / "train.md").read_text().split("## Keys")[1].split("\n## ")[0]
    documented = re.findall(r"^\| `([\w.*]+)` \|", section, flags=re.MULTILINE)
    existing = ["model", *(f"data.{key}" for key in DataConfig.model_fields), "training.*"]
    assert sorted(documented) == sorted(existing)
    assert set(SECTIONS) == {key.split(".")[0] for key in documented}


def test_tiny_cpu_configuration_is_valid_and_explains_every_key() -> None:
    path = ROOT / "configs" / "tiny_cpu.yaml"
    recipe = Recipe.load(path)
    assert recipe.training["max_steps"] == 30
    assert recipe.ringtile.context_parallel_size == 2
    assert recipe.ringtile.tiled_mlp
    assert recipe.ringtile.tiled_loss
    assert recipe.data.packing
    lines = path.read_text().splitlines()
    bare = [line for line in lines if re.match(r"\s*\w+:", line) and "#" not in line and not line.endswith(":")]
    assert bare == []
