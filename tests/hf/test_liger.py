"""`use_liger_kernel: true` on ranks is what it is in one process, or refused. By a stand-in, and by Liger itself."""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ringtile
import torch
from hf_models import tiny_model
from hf_rollouts import train_rollouts
from hf_training import Run, assert_equal_training, enter_world, make_trainer, packed, train
from liger_kernels import stand_in
from losses import OwnLoss
from pool import run_ranks
from ringtile import RefusedError
from ringtile.hf.liger import from_liger
from transformers import LlamaForCausalLM

LIGER = {"use_liger_kernel": True, "max_steps": 2, "gradient_accumulation_steps": 1, "num_rows": 16}
_FORWARD, _COPY = "liger_kernel.transformers.model.llama", "another_package.llama"
CONFIG = {"context_parallel_size": 2}
PROVED = {"first_batch_check": True}


def train_with_liger(config: dict[str, Any] | None, options: dict[str, Any]) -> tuple[Run, int]:
    """The training, and how often it called the fused loss."""
    with stand_in() as losses, pytest.MonkeyPatch.context() as patch:
        if options.get("trainer_class") == "trl.DPOTrainer":
            options = options | {"trainer_arguments": {"ref_model": tiny_model(seed=3)}}
        options = LIGER | options
        if (name := options.pop("class_forward", None)) is not None:
            spec = importlib.util.find_spec(_FORWARD)
            spec = importlib.util.spec_from_file_location(name, spec.origin)
            patch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))
            spec.loader.exec_module(sys.modules[name])
            patch.setattr(LlamaForCausalLM, "forward", sys.modules[name].lce_forward)
        return train(config, **options), losses.calls


def check(options: dict[str, Any], config: dict[str, Any] | None = None, engine: str = "DDP") -> int:
    """Two ranks have the losses, gradient norms, weights and evaluation of one process. How often that called it."""
    enter_world()
    (expected, alone), ranks = (
        train_with_liger(None, options),
        run_ranks(2, train_with_liger, CONFIG | (config or {}), options | {"engine": engine}, timeout=200.0),
    )
    for run, _ in ranks:
        assert_equal_training(run, expected)
        assert run.eval_loss == pytest.approx(expected.eval_loss, rel=1e-6)
        if expected.predictions is not None:
            assert (run.predictions - expected.predictions).abs().max() <= 1e-5
        assert not run.said
    return alone


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"collator": packed, "gradient_accumulation_steps": 2, "gradient_checkpointing": True},
        {"late_targets": True, "average_tokens_across_devices": False, "lora": True, "evaluate": False},
        {"trainer_class": OwnLoss},
    ],
    ids=["Trainer", "packed, accumulated, checkpointed", "a rank without targets, LoRA", "a loss of one's own"],
)
def test_fused_loss_of_shards_is_that_of_the_sequence(options) -> None:
    assert check(options, PROVED if "collator" in options else None) > 0


@pytest.mark.parametrize("engine", [pytest.param("FSDP2", marks=pytest.mark.long), "ZeRO-3"])
def test_fused_loss_reads_the_weights_that_engines_split(engine) -> None:
    """It reads those of the output projection outside of that module's forward."""
    if engine == "ZeRO-3":
        pytest.importorskip("deepspeed")
    assert check({"evaluate": False}, engine=engine) > 0


@pytest.mark.parametrize("parts", [pytest.param({}, marks=pytest.mark.long), {"cross_entropy": True}])
def test_kernels_of_single_tokens_see_a_shard_as_a_sequence(parts) -> None:
    """Norms, RoPE, GLU and the cross entropy of logits, which overwrites them."""
    config = {"fused_linear_cross_entropy": False, **parts}
    assert check({"liger_kernel_config": config, "collator": packed}, PROVED) == 0


def test_balancing_loss_of_ligers_forward_is_that_of_the_group() -> None:
    """Its file has a name of its own for transformers' function."""
    assert check({"family": "mixtral-balanced", "collator": packed, "learning_rate": 0.01, "evaluate": False}) > 0


@pytest.mark.parametrize(
    "is_copy", [pytest.param(False, marks=pytest.mark.long), True], ids=["Liger's", "of another package"]
)
def test_forward_with_the_fused_loss_may_be_the_class_s(is_copy) -> None:
    """As axolotl has it before it loads a model: Liger's, or one of its own."""
    assert check({"use_liger_kernel": False, "class_forward": _COPY if is_copy else _FORWARD, "evaluate": False}) > 0


# ---- tiles --------------------------------------------------------------------------------------


PARTS = {"tiled_mlp": "swiglu", "tiled_norm": "rms_norm", "tiled_loss": "cross_entropy"}


@pytest.mark.parametrize(
    "keys", [("tiled_mlp", "tiled_loss"), pytest.param(("tiled_norm",), marks=pytest.mark.long)], ids=str
)
def test_tiles_run_beside_ligers_other_kernels(keys) -> None:
    off = {"fused_linear_cross_entropy": False} | {PARTS[key]: False for key in keys}
    tiles = dict.fromkeys(keys, True) | {"tile_tokens": 5}
    assert check({"liger_kernel_config": off}, tiles) == 0


def test_train_leaves_tiled_modules_as_they_are() -> None:
    """The Trainer would put Liger's kernels in when training begins, over their forward."""
    with stand_in():
        trainer = make_trainer(**{**LIGER, "liger_kernel_config": {"fused_linear_cross_entropy": False}})
        ringtile.enable(trainer, {"tiled_loss": True})
        tiles = ringtile.tile_mlps(trainer.model, use_original_mlp=True)
        tiled = [layer.mlp.forward for layer in trainer.model.model.layers]
        trainer.train()
        assert [layer.mlp.forward for layer in trainer.model.model.layers] == tiled
        tiles.restore()
        ringtile.restore(trainer)
        assert all(from_liger(layer.mlp) for layer in trainer.model.model.layers)
        other = make_trainer(**LIGER)
        other.train()  # that of another Trainer, which is not enabled
        assert from_liger(other.model)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"tiled_loss": True}, r"fused loss.*tiled_loss: false.*'fused_linear_cross_entropy': False"),
        ({"tiled_mlp": True}, r"layers\.0\.mlp is Liger's MLP.*'swiglu': False"),
        ({"tiled_norm": True}, "Liger's need no tiles: set tiled_norm: false"),
    ],
)
def test_tiles_of_what_liger_has_replaced_are_refused(config, words) -> None:
    with stand_in(), pytest.raises(ringtile.RingtileError, match=words):
        ringtile.enable(make_trainer(**LIGER), config)


# ---- TRL ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", ["SFTTrainer", pytest.param("DPOTrainer", marks=pytest.mark.long)])
def test_trl_keeps_its_own_loss(trainer) -> None:
    pytest.importorskip("trl")
    assert check({"trainer_class": f"trl.{trainer}", "evaluate": False}) == 0


def train_grpo_with_liger(config: dict[str, Any] | None) -> Run:
    with stand_in():
        size = (config or {}).get("context_parallel_size", 1)
        steps = {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "max_steps": 2}
        options = {"num_iterations": 2, "beta": 0.1, **steps}
        return train_rollouts(config, group=size, use_liger_kernel=True, **options)


def test_grpo_keeps_its_own_loss() -> None:
    pytest.importorskip("trl")
    expected = train_grpo_with_liger(None)
    for run in run_ranks(2, train_grpo_with_liger, CONFIG, timeout=200.0):
        assert_equal_training(run, expected)


@pytest.mark.parametrize("of_trls", [True, False], ids=["TRL's own", "the model's"])
def test_fused_losses_of_trl_before_1_15_are_refused(of_trls) -> None:
    pytest.importorskip("trl")
    enter_world()
    with stand_in():
        trainer = make_trainer(trainer_class="trl.SFTTrainer", **LIGER)
        if of_trls:
            trainer.use_liger_kernel = True
        else:
            trainer.args.liger_kernel_config = None
        with pytest.raises(RefusedError, match=r"set liger_kernel_config={'fused_linear_cross_\w+': False}"):
            ringtile.enable(trainer, CONFIG)


# ---- Liger itself -------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_ligers_own_kernels_are_exact_on_shards(tmp_path) -> None:
    for package in ("liger_kernel", "triton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    script = [str(Path(__file__).with_name("interpreted_liger.py")), str(tmp_path)]
    paths = os.pathsep.join(str(Path(__file__).parents[up]) for up in (2, 0, 1))
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]):
        done = subprocess.run(
            [sys.executable, *launcher, *script],
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    expected, run = (Run(**torch.load(tmp_path / ranks)) for ranks in ("1", "2"))
    assert_equal_training(run, expected)
    assert run.eval_loss == pytest.approx(expected.eval_loss, rel=1e-6)
    assert not run.said
