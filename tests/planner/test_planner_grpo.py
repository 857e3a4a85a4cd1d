"""`ringtile plan --model --completion-tokens`: a GRPO step's phases against real caches, formulas and refusals."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import Any

import pytest
import torch
from ringtile.cli import main
from ringtile.errors import RefusedError
from ringtile.hf.config import Config
from ringtile.planner.grpo import Grpo
from ringtile.planner.setup import Setup
from ringtile.planner.step import StepMemory, TrainingStep
from test_planner import E, config_of, planned
from transformers import AutoModelForCausalLM

pytest.importorskip("trl")

LAYERS, HEADS, D = 3, 2, 16  # kv heads
S, C = 96, 40  # of a row; 56 are its prompt
FLOAT = 4


@functools.cache
def step_of(rows: int, ranks: int = 1, *, reference: bool = False, **more: Any) -> StepMemory:
    config = Config(context_parallel_size=ranks)
    return planned(S, Setup(config_of(), ranks, ringtile=config, grpo=Grpo(C, rows, reference), **more))


# ---- generation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "ranks", "of_rank"),
    [*(pytest.param(*case, marks=pytest.mark.long) for case in ((4, 1, 4), (4, 2, 2))), (5, 2, 3)],
)
def test_each_rank_keeps_keys_and_values_of_its_rows(rows: int, ranks: int, of_rank: int) -> None:
    """Two numbers a layer, row, kv head, token and dimension, and of whole rows: the last token is never read. The keys
    or values of one layer are there twice while they grow, which is the peak in some releases of transformers."""
    memory = step_of(rows, ranks)
    token = of_rank * HEADS * D * FLOAT
    held = 2 * LAYERS * token * (S - 1)
    assert memory.phases["decode"]["kv cache"] in (held, held + token * (S - 2))
    assert memory.phases["prefill"]["kv cache"] == 2 * LAYERS * of_rank * HEADS * (S - C) * D * FLOAT
    assert memory.phases["train"]["kv cache"] == memory.phases["log-probs"]["kv cache"] == 0
    assert all(parts["reference"] == 0 for parts in memory.phases.values())


@pytest.mark.parametrize("keys", [{}, {"model_type": "mistral", "sliding_window": 24}])
def test_cache_is_that_of_a_real_generation(keys: dict[str, Any]) -> None:
    rows, config = 3, config_of(**{"model_type": "llama", **keys})
    real = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ids = torch.randint(3, 300, (rows, S - C))
    generated = real.generate(ids, min_new_tokens=C, max_new_tokens=C, return_dict_in_generate=True)
    assert generated.sequences.shape == (rows, S)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in generated.past_key_values.layers)
    with TrainingStep(Setup(config, grpo=Grpo(C, rows))) as step:
        assert step.run(S).phases["decode"]["kv cache"] >= held
        assert sum(x.nbytes for layer in last_cache(step) for x in (layer.keys, layer.values)) == held


def last_cache(step: TrainingStep) -> list[Any]:
    """The layers of the cache at the end of a generation."""
    found: list[Any] = []
    original = TrainingStep._peak

    def peak(self: TrainingStep, phase: Any) -> Any:
        parts = original(self, phase)
        found.extend(cell.cell_contents for cell in phase.__closure__ if hasattr(cell.cell_contents, "cache"))
        return parts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingStep, "_peak", peak)
        step.run(S)
    return list(found[-1].cache.layers)


def test_rows_that_are_generated_elsewhere_take_nothing() -> None:
    assert list(step_of(0).phases) == ["log-probs", "train"]
    assert list(step_of(4).phases) == ["prefill", "decode", "log-probs", "train"]


def test_gradient_checkpointing_leaves_the_cache() -> None:
    plain, saving = step_of(4), step_of(4, gradient_checkpointing=True)
    assert saving.phases["decode"] == plain.phases["decode"]
    assert saving.phases["train"]["activations"] < plain.phases["train"]["activations"]


# ---- log-probs and training -----------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["ddp", "zero2", "fsdp2"])
def test_reference_is_a_second_model(engine: str) -> None:
    """Whole on each rank, as TRL prepares it; under FSDP2 it is sharded, and gathered as a whole for its log-probs."""
    memory = step_of(4, 4, reference=True, engine=engine)
    num_bytes = sum(p.nbytes for p in AutoModelForCausalLM.from_config(config_of(), dtype=torch.float32).parameters())
    for phase, parts in memory.phases.items():
        assert parts["reference"] == pytest.approx(num_bytes / (4 if engine == "fsdp2" else 1), rel=1e-3), phase
    if engine == "fsdp2":
        assert memory.phases["log-probs"]["engine"] >= num_bytes


def test_rollouts_are_kept_whole_while_they_are_trained_on() -> None:
    """Ids and masks of 8 bytes a token, two log-probs of 4 bytes a token of a completion, an advantage of 4 bytes."""
    few, many = (step_of(rows, reference=True).phases["train"]["buffers"] for rows in (2, 6))
    assert many - few == 4 * (2 * 8 * S + 2 * 4 * C + 4)


@pytest.mark.parametrize(("on_gpu", "tiles"), [(True, 1.2), (False, 10)])
def test_logits_never_exist_whole(on_gpu: bool, tiles: float) -> None:
    """TRL's tile has 4096 tokens and 32768 classes. Its backward in torch operations, on a CPU, holds eight more, and
    a mask of a quarter. The gradient of the output weight is summed in float32, and cast."""
    seq_len, vocab_size = 2**14, 2**17
    config = config_of(vocab_size=vocab_size, num_hidden_layers=1)
    memory = planned(seq_len, Setup(config, grpo=Grpo(C, 0), on_gpu=on_gpu, gradient_checkpointing=True))
    tile, weight = 4096 * 2**15 * FLOAT, vocab_size * E * FLOAT
    for phase, parts in memory.phases.items():
        held = parts["activations"] + parts["logits"]
        assert tile <= held <= tiles * tile + 2 * weight < seq_len * vocab_size * FLOAT, phase


def test_the_largest_phase_is_the_peak() -> None:
    for rows, phase in ((4, "train"), (2000, "prefill")):
        memory = step_of(rows)
        assert memory.phase == phase
        assert memory.total == max(sum(parts.values()) for parts in memory.phases.values())
        assert memory.parts == memory.phases[phase]


def test_a_step_after_another_is_the_same() -> None:
    config = config_of(num_hidden_layers=1)
    with TrainingStep(Setup(config, devices=2, engine="fsdp2", grpo=Grpo(C, 4, True))) as step:
        first, second, third = step.run(S), step.run(2 * S), step.run(S)
    assert first.phases == third.phases
    assert second.total > first.total


def test_a_training_has_one_phase() -> None:
    setup = Setup(config_of(num_hidden_layers=1))
    assert list(planned(S, setup).phases) == ["train"]


# ---- refusals and the command ---------------------------------------------------------------------


def test_zero3_is_refused_by_name() -> None:
    with pytest.raises(RefusedError, match="not planned under zero3: TRL gathers all weights to generate"):
        step_of(2, 2, engine="zero3")


def test_another_trl_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("trl.kernels.chunked_logprob._forward_tile")
    with pytest.raises(RefusedError, match=r"not planned with trl .*; expected trl 1\.16"):
        step_of(2, on_gpu=True)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config_of(num_hidden_layers=1).to_dict()))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--completion-tokens", "64"], "at least one token is the prompt's"),
        (["--completion-tokens", "1X"], "--completion-tokens is '1X'"),
        (["--completion-tokens", "32", "--batch", "2", "--generation-rows", "3"], "expected a multiple of it"),
        (["--completion-tokens", "32", "--generation-rows", "-1"], "expected a multiple of it"),
        (["--completion-tokens", "32", "--rates", "1e9,1e9"], "gives no seconds of a GRPO step"),
        (["--generation-rows", "2"], "expected --completion-tokens too"),
        (["--reference-model"], "expected --completion-tokens too"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: list[str], said: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", folder, "--seq-len", "64", *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_missing_trl_is_named(folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringtile.planner.grpo.importlib.util.find_spec", lambda name: None)
    assert main(["plan", "--model", folder, "--seq-len", "64", "--completion-tokens", "8"]) == 2
    assert "pip install trl" in capsys.readouterr().err


def test_phases_are_printed_drawn_and_written(
    folder: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringtile.planner.advice._STEPS", 1)
    picture, written = tmp_path / "plan.png", tmp_path / "plan.json"
    options = ["--seq-len", "1K", "--completion-tokens", "256", "--generation-rows", "4", "--reference-model"]
    options += ["--devices", "2", "--memory", "1GiB", "--no-switches", "--plot", str(picture), "--json", str(written)]
    assert main(["plan", "--model", folder, *options]) == 0
    printed = capsys.readouterr().out
    assert "GRPO: 256 tokens of a row are generated, 4 rows at once by the ranks that share a sequence" in printed
    assert "prefill     decode  log-probs      train GiB" in printed
    assert picture.stat().st_size > 1000
    report = json.loads(written.read_text())
    sums = {name: sum(parts.values()) for name, parts in report["phases"].items()}
    assert report["total"] == max(sums.values())
    assert report["parts"] == report["phases"][max(sums, key=sums.__getitem__)]
    assert report["setup"]["grpo"] == dataclasses.asdict(Grpo(256, 4, True))
    assert report["longest"] > 1024
