"""`ringtile train`: the YAML file and its refusals, the losses it reports, the comparison that must be able to fail."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import re
import subprocess
from typing import Any
from unittest import mock

import datasets
import pytest
import torch
import torch.distributed as dist
import transformers
import yaml
from pool import run_command
from ringtile.cli import main
from ringtile.cli import train as train_verb
from ringtile.cli.proofs import max_rel_diff
from ringtile.cli.recipe import DEFAULTS, SECTIONS, DataConfig, Recipe
from ringtile.errors import ConfigError
from ringtile.hf.config import Config

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


@pytest.mark.parametrize(
    ("change", "at", "value"),
    [
        ("tile_tokens=8192", ("ringtile", "tile_tokens"), 8192),
        ("training.learning_rate=1e-4", ("training", "learning_rate"), 1e-4),
        ("model.hidden_size=64", ("model", "hidden_size"), 64),
        ("data.packing=false", ("data", "packing"), False),
        ("training.lr_scheduler_kwargs.num_cycles=2", ("training", "lr_scheduler_kwargs"), {"num_cycles": 2}),
    ],
)
def test_set_changes_a_key_of_the_file(tmp_path: pathlib.Path, change: str, at: tuple[str, str], value: Any) -> None:
    path = write_config(tmp_path, tiled_mlp=True)
    section = getattr(Recipe.load(path, changes=[change]), at[0])
    assert (section[at[1]] if isinstance(section, dict) else getattr(section, at[1])) == value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("tile_tokens", "--set is 'tile_tokens' (a key of the file"),
        ("tile_token=1", "unknown key tile_token: did you mean tile_tokens?"),
        ("tile_tokens=[1", "--set is 'tile_tokens=[1' (while parsing"),
        ("tile_tokens.x=1", "tile_tokens is {'x': 1}; expected an integer"),
        ("tiled_mlp.x=1", "--set is 'tiled_mlp.x=1' (a key of the file"),
        ("training.max_step=1", "unknown key training.max_step: did you mean max_steps?"),
    ],
)
def test_set_of_another_form_is_refused(tmp_path: pathlib.Path, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Recipe.load(write_config(tmp_path, tiled_mlp=True), changes=[change])


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


def test_evaluation_and_padding(tmp_path: pathlib.Path) -> None:
    (tmp_path / "eval.jsonl").write_text('{"body": "held out"}\n{"body": "and another one"}\n')
    data = {"files": "eval.jsonl", "eval_files": "eval.jsonl", "seq_len": 16, "packing": False, "text_column": "body"}
    path = write_config(tmp_path, data=data, training=TRAINING | {"eval_strategy": "steps", "eval_steps": 2})
    evaluations = [log for log in train(path)["log_history"] if "eval_loss" in log]
    assert [log["step"] for log in evaluations] == [2, 4]
    assert evaluations[1]["eval_loss"] < evaluations[0]["eval_loss"]


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
    done = run_command(2, "train", str(path), "--compare", "--json", str(tmp_path / "out" / "train.json"))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "train.json").read_text())
    assert len(report["losses"]) == len(report["losses_single"]) == 4
    assert report["differences"]["losses"] <= 1e-6
    assert report["differences"]["grad_norms"] <= 1e-5
    assert done.stdout.count("one process") == 1  # rank 0 alone prints


# ---- the comparison -------------------------------------------------------------------------------


def test_max_rel_diff_of_anything_odd_is_no_number() -> None:
    assert max_rel_diff([2.0, 3.0], [2.0, 4.0]) == 0.25
    assert max_rel_diff([1.0], [1.0, 2.0]) == math.inf
    assert max_rel_diff([], []) == math.inf  # nothing was logged, so nothing is shown
    assert math.isnan(max_rel_diff([1.0, math.nan, 1.0], [1.0, 1.0, 1.0]))
    assert max_rel_diff([0.0], [0.0]) == 0.0
    assert max_rel_diff([1.0], [0.0]) == math.inf


@pytest.mark.parametrize(
    ("losses", "status"), [([2.0, 1.0], 0), ([2.0, 1.0 + 2e-6], 1), ([2.0, math.nan], 1), ([2.0], 1)]
)
def test_comparison_can_fail(losses: list[float], status: int, tmp_path: pathlib.Path) -> None:
    report = {"world_size": 2, "data_parallel_size": 1, "steps": [1, 2], "losses": losses, "grad_norms": [0.5]}
    single = {"losses_single": [2.0, 1.0], "grad_norms_single": [0.5]}
    args = argparse.Namespace(config=write_config(tmp_path), compare=True, set=[])
    with mock.patch.multiple(train_verb, train=lambda recipe: report, train_alone=lambda *unused: single):
        assert train_verb.run(args).status == status


# ---- refusals -------------------------------------------------------------------------------------


def errors_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("ringtile: error: ")]


def test_each_rank_says_why_it_refuses(tmp_path: pathlib.Path) -> None:
    done = run_command(2, "train", str(write_config(tmp_path, context_parallel_size=3)))
    assert done.args == [2, 2]
    start = [f"ringtile: error: rank {rank}: context_parallel_size is 3 but there are 2 ranks" for rank in range(2)]
    assert all(line.startswith(words) for line, words in zip(sorted(errors_of(done)), start, strict=True))


def _another_decay() -> None:
    load = Recipe.load

    def load_another(*args: Any, **kwargs: Any) -> Recipe:
        recipe = load(*args, **kwargs)
        decay = 0.1 * (1 + int(os.environ["RANK"]))
        return dataclasses.replace(recipe, training=recipe.training | {"weight_decay": decay})

    Recipe.load = load_another  # type: ignore[method-assign]


@pytest.mark.parametrize("verb", ["train", pytest.param("verify", marks=pytest.mark.long)])
def test_another_weight_decay_of_a_rank_is_refused(tmp_path: pathlib.Path, verb: str) -> None:
    done = run_command(2, verb, str(write_config(tmp_path)), prepare=_another_decay)
    assert done.args == [2, 2]
    words = "training.weight_decay is 0.1 on rank 0 and 0.2 on rank 1; expected the same file on every rank"
    assert sorted(errors_of(done)) == [f"ringtile: error: rank {rank}: {words}" for rank in range(2)]


def _rank_1_has_no_model() -> None:
    make_model = train_verb.make_model

    def failing(*args: Any) -> Any:
        if os.environ["RANK"] == "1":
            raise ConfigError("model: no folder")
        return make_model(*args)

    train_verb.make_model = failing


def test_rank_that_fails_alone_says_why(tmp_path: pathlib.Path) -> None:
    """Its launcher ends the others."""
    variables = {"HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    done = run_command(2, "train", str(write_config(tmp_path)), prepare=_rank_1_has_no_model, variables=variables)
    assert done.args[1] == 2
    assert done.args[0] != 0
    assert "ringtile: error: rank 1: model: no folder" in errors_of(done)


def _say_the_timeout_of_the_world() -> None:
    def make_model(*args: Any) -> Any:
        timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
        raise ConfigError(f"the timeout is {timeout.total_seconds():g} s")

    train_verb.make_model = make_model


def test_ddp_timeout_holds_on_cpus_too(tmp_path: pathlib.Path) -> None:
    """transformers passes it on with a GPU alone."""
    config = write_config(tmp_path, training=TRAINING | {"ddp_timeout": 7})
    variables = {"HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    done = run_command(2, "train", str(config), prepare=_say_the_timeout_of_the_world, variables=variables)
    assert "rank 0: the timeout is 7 s" in done.stderr


# ---- configurations and their documentation -------------------------------------------------------


def test_paths_start_at_the_folder_of_the_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    path = write_config(tmp_path)
    monkeypatch.chdir(tmp_path / "elsewhere")
    recipe = Recipe.load(pathlib.Path("..", path.name))
    assert recipe.data.files == [str(pathlib.Path.cwd() / ".." / "text.txt")]
    assert recipe.training == DEFAULTS | TRAINING | {"learning_rate": 0.1}
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
    existing = ["model", *(f"data.{key}" for key in DataConfig.names()), "training.*"]
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
