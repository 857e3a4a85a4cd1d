"""`ringtile verify` says that two ranks compute what one does, and does not when they do not."""

import glob
import json
import pathlib
import re
import string
import subprocess
from collections.abc import Callable

import pytest
import torch
from pool import run_command
from ringtile.cli.recipe import Recipe
from ringtile.cli.verify import default_data

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
}


def _break_scale() -> None:
    """Doubles the count that scales the loss."""
    from ringtile.hf.one_process import Groups

    original = Groups._count_items
    Groups._count_items = lambda *args: 2 * original(*args)


def _verify(
    tmp_path: pathlib.Path,
    model_type: str,
    prepare: Callable[[], None] | None = None,
    options: tuple[str, ...] = (),
    **keys: object,
) -> tuple[subprocess.CompletedProcess[str], pathlib.Path]:
    config, result = tmp_path / "run.yaml", tmp_path / "verify.json"
    model = {"model_type": model_type, **SIZES}
    training = {"use_cpu": True, "output_dir": str(tmp_path / "out"), "per_device_train_batch_size": 1}
    (tmp_path / "text.txt").write_text(string.printable * 100)
    data = {"files": "text.txt", "seq_len": 256}
    mapping = {"model": model, "context_parallel_size": 2, "training": training, "data": data, **keys}
    config.write_text(json.dumps(mapping))
    cache = {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = run_command(2, "verify", *options, str(config), "--json", str(result), prepare=prepare, variables=cache)
    return done, result


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("llama", {"tiled_mlp": True, "tiled_norm": True, "tiled_loss": True}),
        pytest.param("qwen3", {"layout": "striped"}, marks=pytest.mark.long),
        pytest.param("mistral", {}, marks=pytest.mark.long),
        pytest.param("mistral", {"stream": True, "tile_tokens": 50}, marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(240)
def test_tiny_model_is_verified(model_type, keys, tmp_path):
    done, result = _verify(tmp_path, model_type, **keys)
    assert done.returncode == 0, done.stderr
    assert "verdict: the same numbers" in done.stdout
    outcome = json.loads(result.read_text())
    names = [row["name"] for row in outcome["rows"]]
    assert sum(name.startswith("ring attention") for name in names) == 4
    assert any(name.startswith("tiled MLP") for name in names) == ("tiled_mlp" in keys)
    assert any(name.startswith("tiled norm") for name in names) == ("tiled_norm" in keys)
    assert ("tiled loss" in names) == ("tiled_loss" in keys)
    assert all(row["difference"] <= row["limit"] for row in outcome["rows"])
    assert len(outcome["losses"]) == len(outcome["losses_single"]) == 5
    assert done.stdout.count("equal") == len(names)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_smallest_configuration_of_the_docs_is_verified(tmp_path):
    page = (pathlib.Path(__file__).parents[2] / "docs/guide/exact.md").read_text()
    config = tmp_path / "run.yaml"
    config.write_text(page.split("```yaml\n")[1].split("```")[0])
    done = run_command(2, "verify", str(config), cwd=tmp_path, variables={"HF_DATASETS_CACHE": str(tmp_path / "cache")})
    assert done.returncode == 0, done.stderr
    assert "verdict: the same numbers" in done.stdout


@pytest.mark.timeout(240)
def test_broken_scale_is_found(tmp_path):
    done, result = _verify(tmp_path, "llama", _break_scale)
    assert done.returncode == 1
    assert "verdict: NOT the same numbers" in done.stdout
    different = [row["name"] for row in json.loads(result.read_text())["rows"] if row["difference"] > row["limit"]]
    assert different == ["loss of 5 training steps", "gradient norm of 5 training steps"]


BITS = {"stream": True, "tiled_loss": True, "reproducible": True, "tile_tokens": 64}


def _disturb() -> None:
    """Adds an ulp to what the second layer is given, where ranks share a sequence."""
    from ringtile.hf.features import stream

    original = stream.run_chunks

    def run_chunks(name: str, module: object, forward: object, x: torch.Tensor, *args: object, **options: object):
        if name.endswith("1") and stream.active_batch().sequence.world_size > 1:
            x = x * (1 + 2.0**-23)
        return original(name, module, forward, x, *args, **options)

    stream.run_chunks = run_chunks


@pytest.mark.timeout(240)
def test_bits_are_verified(tmp_path):
    done, result = _verify(tmp_path, "llama", options=("--bits",), **BITS)
    assert done.returncode == 0, done.stderr
    assert "verdict: the same bits" in done.stdout
    assert json.loads(result.read_text())["rows"] == ["model.layers.0", "model.layers.1", "loss"]


@pytest.mark.timeout(240)
def test_other_bits_are_named(tmp_path):
    done, result = _verify(tmp_path, "llama", _disturb, options=("--bits",), **BITS)
    assert done.returncode == 1, done.stderr
    assert "verdict: NOT the same bits" in done.stdout
    different = json.loads(result.read_text())["different"]
    assert next(iter(different)) == "model.layers.1"
    assert re.match(r"\[0, 0, \d+\] is \S+, in one process ", different["model.layers.1"])


@pytest.mark.parametrize("keys", [{}, BITS | {"context_parallel_size": 1}])
@pytest.mark.timeout(240)
def test_bits_need_reproducible_and_ranks(keys, tmp_path):
    done, _ = _verify(tmp_path, "llama", options=("--bits",), **keys)
    assert done.returncode == 2
    assert "expected true and at least 2" in done.stderr


def test_data_may_be_left_out(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {model_type: llama}")
    data = Recipe.load(path, default_data=default_data()).data
    assert len(glob.glob(data.files[0], recursive=True)) > 20
    assert data.tokenizer == "bytes"
