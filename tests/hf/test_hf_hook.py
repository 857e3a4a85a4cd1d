"""`enable` shards each batch once, stands back for DeepSpeed, and `restore` leaves no trace."""

import contextlib
import functools
import os
import pathlib
import re
import signal
import sys
import threading
import types
from collections import Counter
from unittest import mock

import pytest
import ringtile
import torch
import torch.distributed as dist
from hf_models import hybrid, tiny_encoder, tiny_model
from hf_training import make_trainer
from losses import LastThird
from pool import run_ranks
from ringtile.hf import loss
from ringtile.hf import trainer as hf_trainer
from ringtile.hf.features import recurrent
from ringtile.hf.group import ContextParallelGroup
from ringtile.hf.loss_on_shards import LossOnShards
from ringtile.hf.patches import Patches
from ringtile.sequence.layout import Layout
from ringtile.transport.groups import transport_of
from transformers import Trainer, TrainerCallback

from tools.models.tiny_images import image_model

CONFIG = {"context_parallel_size": 2}
# An accelerate ParallelismConfig under which DeepSpeed shards the sequence (ALST / Ulysses).
DEEPSPEED = types.SimpleNamespace(
    sp_enabled=True, sp_backend="deepspeed", cp_enabled=False, cp_backend="torch", non_data_parallel_size=2
)


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_state_dict_hooks")


def _touchable(trainer):
    """All that `enable` may replace, by name: attributes of objects, functions of libraries, numbers of hooks."""
    found = {"model.attention": trainer.model.config._attn_implementation, "sys.excepthook": sys.excepthook}
    found["trainer.callbacks"] = tuple(type(callback).__name__ for callback in trainer.callback_handler.callbacks)
    found["threads"] = threading.active_count()
    found["signals"] = tuple(signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD))
    owners = {"trainer": trainer, "accelerator": trainer.accelerator, "args": trainer.args, "Trainer": Trainer}
    owners |= {name: file for name, file in sys.modules.items() if name.startswith(("transformers.", "trl."))}
    for path, module in trainer.model.named_modules():
        owners[f"model.{path}".rstrip(".")] = module
        found |= {f"model.{path}.{hooks}": len(getattr(module, hooks)) for hooks in HOOKS}
    for owner, held in owners.items():
        found |= {f"{owner}.{name}": value for name, value in vars(held).items() if name not in HOOKS}
    return found


def _differences(before, after):
    return [name for name in before | after if not _alike(before.get(name, HOOKS), after.get(name, HOOKS))]


def _alike(x, y):
    return x is y or (type(x) is type(y) and isinstance(x, int | str | tuple) and x == y)


# ---- the record of patches ----------------------------------------------------------------------


def test_ledger_restores_identical_objects():
    owner = types.SimpleNamespace(held=object())
    held = owner.held
    patches = Patches()
    patches.set(owner, "held", 1)
    patches.set(owner, "held", 2)
    patches.set(owner, "new", 3)
    assert [name for _, name in patches.entries] == ["held", "held", "new"]
    patches.restore()
    patches.restore()
    assert owner.held is held
    assert vars(owner) == {"held": held}
    assert patches.entries == ()


def test_ledger_restores_child_modules():
    parent = torch.nn.Sequential(torch.nn.Identity())
    child = parent[0]
    patches = Patches()
    patches.set(parent, "0", torch.nn.Linear(2, 2))
    patches.restore()
    assert parent[0] is child


def test_an_undo_that_fails_does_not_stop_the_others():
    def fail():
        raise KeyError("undo")

    owner = types.SimpleNamespace(first=1, last=1)
    patches = Patches()
    patches.set(owner, "first", 2)
    patches.on_restore(fail)
    patches.set(owner, "last", 2)
    with pytest.raises(KeyError, match="undo"):
        patches.restore()
    assert vars(owner) == {"first": 1, "last": 1}
    patches.restore()


def test_what_another_library_has_put_back_is_no_error():
    trainer = make_trainer()
    before, callbacks = _touchable(trainer), trainer.callback_handler.callbacks[:]
    ringtile.enable(trainer, {"activation_offloading": True})
    trainer.callback_handler.callbacks = callbacks
    ringtile.restore(trainer)
    assert _differences(before, _touchable(trainer)) == []
    assert trainer.callback_handler.callbacks == callbacks


# ---- enable and restore -------------------------------------------------------------------------


def _enable_and_restore():
    trainer = make_trainer("llama-dynamic")
    patches = ringtile.enable(trainer, CONFIG)
    entries = patches.entries
    again = ringtile.enable(trainer, CONFIG)
    try:
        ringtile.enable(trainer, {**CONFIG, "layout": "striped"})
    except ringtile.ConfigError as error:
        refusal = str(error)
    enabled_entries = patches.entries
    ringtile.restore(trainer)
    ringtile.restore(trainer)
    return again is patches and enabled_entries == entries, refusal


def test_enable_is_idempotent():
    for idempotent, refusal in run_ranks(2, _enable_and_restore):
        assert idempotent
        assert "call ringtile.restore(trainer) first" in refusal


def _fail_half_way():
    trainer = make_trainer()
    before = _touchable(trainer)
    with mock.patch.object(LossOnShards, "install_loss", side_effect=KeyError), contextlib.suppress(KeyError):
        ringtile.enable(trainer, CONFIG)  # after the group and its accelerator
    return _differences(before, _touchable(trainer))


def test_failed_enable_leaves_nothing_behind():
    assert run_ranks(2, _fail_half_way) == [[], []]


def _make_and_close_groups(number):
    for _ in range(number):
        ContextParallelGroup(2, 20.0, torch.device("cpu")).close()


def test_group_closed_at_once_does_not_fail_its_peers():
    """A rank that is connected already may not hang up on one that still connects: one in about ten did."""
    run_ranks(2, _make_and_close_groups, 40)


def test_nothing_is_patched_where_deepspeed_shards_the_sequence():
    trainer = make_trainer()
    trainer.accelerator.state.parallelism_config = DEEPSPEED
    before = _touchable(trainer)
    ringtile.enable(trainer, CONFIG)
    assert set(_differences(before, _touchable(trainer))) == SESSION
    ringtile.restore(trainer)


# ---- everything that `enable` touches -----------------------------------------------------------


def _touched_by(options, config):
    """The names of what differs under ringtile; those of layers that do so alike once."""
    given = {name: value() if name == "model" else value for name, value in options.items()}
    callback = given.pop("callback", TrainerCallback)
    trainer = make_trainer(**given)
    trainer.add_callback(callback)
    if dist.is_initialized():  # the connections between the ranks of a world outlast its Trainers
        with transport_of(dist.group.WORLD).agree("test", {}):
            pass
    before = _touchable(trainer)
    ringtile.enable(trainer, config)
    touched = _differences(before, _touchable(trainer))
    ringtile.restore(trainer)
    names = {re.sub(r"[.][0-9]+[.]", ".*.", name).replace("..", ".") for name in touched}
    return names, _differences(before, _touchable(trainer))


SESSION = {"model._ringtile_session", "trainer._ringtile_session"}
LOSS = SESSION | {  # on a shard, or on what a group of one rank makes of a batch
    *("model._forward_pre_hooks", "model.attention"),
    *(f"trainer.{name}" for name in ("_prepare_context_parallel_inputs", "compute_loss", "prediction_step")),
}
GROUPS = {  # count as many processes as there are different batches
    *("accelerator.gather_for_metrics", "accelerator.prepare_data_loader"),
    *("trainer._get_num_items_in_batch", "trainer.get_total_train_batch_size"),
    *("trainer._maybe_log_save_evaluate", "trainer.callbacks"),
}
LLAMA = LOSS | GROUPS
BALANCING = {"model._forward_hooks", "transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func"}
LAYERS = "model.model.layers.*"
UNCOUNTED = {"include_num_input_tokens_seen": "no"}
DROPPING = functools.partial(tiny_model, "phi", attention_dropout=0.1, resid_pdrop=0.1)
VISION = "model.model.vision_tower"
ON_TWO_RANKS = {  # what is touched besides
    "Llama": ({}, set()),
    "tokens are counted": ({"include_num_input_tokens_seen": "all"}, {"trainer._track_num_input_tokens"}),
    "RoPE that grows": ({"family": "llama-dynamic"}, {"model.model.rotary_emb.forward"}),
    "dropout": ({"model": DROPPING}, set()),
    "experts": ({"family": "mixtral-balanced"}, BALANCING),
    "hybrid": (  # its config has output_router_logits, which TRL's fused head reads
        {"model": functools.partial(hybrid, "lfm2")},
        {f"{LAYERS}.conv._forward_pre_hooks"} | {"transformers.models.lfm2.modeling_lfm2.causal_conv1d_fn", *BALANCING},
    ),
    "latents": ({"family": "deepseek-v3"}, {f"{LAYERS}.self_attn.expand_kv", *BALANCING}),
    "classes of tokens": (
        {"model": functools.partial(tiny_encoder, classes=True)},
        {"model._forward_hooks", "model._loss_function"},
    ),
    "a loss of its own": ({"trainer_class": LastThird}, {"model._forward_hooks", "model.generate"}),
    "images": (
        {"model": functools.partial(image_model, "llava")},
        {"model._forward_hooks", "model.model.language_model._forward_pre_hooks"} | {f"{VISION}.forward"},
    ),
}
TILES = SESSION | {
    *("model._loss_function", "model.lm_head.forward", "model.model.norm.forward"),
    *(f"{LAYERS}.{norm}_layernorm.forward" for norm in ("input", "post_attention")),
    *(f"{LAYERS}.mlp._z3_leaf", f"{LAYERS}.mlp.forward"),
}
TOUCHED = {
    "nothing asked": ({}, {}, set()),
    "nothing but its layout": ({}, {"context_parallel_size": 1, "layout": "striped"}, set()),
    "tiles": ({}, {"tiled_mlp": True, "tiled_norm": True, "tiled_loss": True}, TILES),
    "trees on one rank": ({}, {"shared_prefix": True}, LOSS),
    **{kind: (UNCOUNTED | options, CONFIG, LLAMA | more) for kind, (options, more) in ON_TWO_RANKS.items()},
}


@pytest.mark.parametrize("kind", TOUCHED)
def test_what_enable_touches(kind):
    options, config, expected = TOUCHED[kind]
    size = config.get("context_parallel_size", 1)
    runs = [_touched_by(options, config)] if size == 1 else run_ranks(size, _touched_by, options, config)
    for touched, left in runs:
        assert touched ^ expected == set()
        assert left == []


ROOT = pathlib.Path(__file__).parents[2]
DECLARED = frozenset[str]().union(*(each.touches for each in (*loss.FEATURES, *hf_trainer.FEATURES)))


def _attributes(touched):
    return {name.rpartition(".")[2] for name in touched}


def test_features_declare_what_they_touch():
    kinds = [ON_TWO_RANKS[kind][1] for kind in ("experts", "hybrid", "latents", "images")]
    assert _attributes(TILES.union(*kinds)) <= DECLARED | {"_ringtile_session"}


def test_the_documentation_lists_what_enable_touches():
    text = (ROOT / "docs/design/evidence.md").read_text()
    table = text[text.index("## What `enable` touches") :]
    names = {name for _, _, touched in TOUCHED.values() for name in _attributes(touched)}
    names |= DECLARED - recurrent._TOUCHES
    assert [name for name in sorted(names) if name not in table] == []


def test_no_feature_needs_another_and_no_other_module_a_feature():
    """But for towers, which hold images, and those that bring all together. What mypy alone imports is no need."""
    for path in (ROOT / "python/ringtile/hf").rglob("*.py"):
        found = set(re.findall(r"^from ringtile[.]hf[.]features[.]?(\S*) import", path.read_text(), re.MULTILINE))
        known = {"images"} if path.stem == "towers" else set()
        assert (
            path.stem in ("loss", "loss_on_sequences", "shard", "trainer", "axolotl", "first_batch") or found <= known
        ), path.stem


# ---- the hook -----------------------------------------------------------------------------------


def _call_hook(parallelism):
    """What the hook returns under an accelerate ParallelismConfig that says `parallelism`."""
    trainer = make_trainer()
    calls = []
    original_result = (object(), object())
    class_hook = Trainer._prepare_context_parallel_inputs

    @functools.wraps(class_hook)
    def recording_hook(self, *args):
        calls.append(args)
        return original_result

    Trainer._prepare_context_parallel_inputs = recording_hook
    try:
        ringtile.enable(trainer, CONFIG)
        trainer.accelerator.state.parallelism_config = parallelism
        model, inputs = trainer.model, {"input_ids": torch.zeros(1, 8)}
        result = trainer._prepare_context_parallel_inputs(model, inputs)
        return {
            "no-op": result[1] is inputs,
            "original": result is original_result,
            "arguments": len(calls) == 1 and calls[0][0] is model and calls[0][1] is inputs,
        }
    finally:
        trainer.accelerator.state.parallelism_config = None
        ringtile.restore(trainer)
        Trainer._prepare_context_parallel_inputs = class_hook


@pytest.mark.parametrize("parallelism", [None, DEEPSPEED], ids=["ringtile shards", "DeepSpeed shards"])
def test_hook_leaves_inputs_alone_or_stands_back_for_deepspeed(parallelism):
    ours = parallelism is None
    for result in run_ranks(2, _call_hook, parallelism):
        assert result == {"no-op": ours, "original": not ours, "arguments": not ours}


def _count_sharded():
    """How often each tensor was sharded, by phase, step, dtype and content."""
    trainer = make_trainer(max_steps=2)
    sharded, phase, step = Counter(), "train", 0
    shard = Layout.shard

    def counting_shard(self, x, dim, rank):
        sharded[phase, step, str(x.dtype), tuple(x.flatten().tolist())] += 1
        return shard(self, x, dim, rank)

    class Steps(TrainerCallback):
        def on_substep_end(self, *args, **kwargs):
            nonlocal step
            step += 1

        on_step_end = on_prediction_step = on_substep_end

    with mock.patch.object(Layout, "shard", counting_shard):
        ringtile.enable(trainer, CONFIG | {"first_batch_check": False})  # which shards a cut
        trainer.add_callback(Steps)
        trainer.train()
        phase = "evaluate"
        trainer.evaluate()
        phase = "predict"
        trainer.predict([{"input_ids": row["input_ids"]} for row in trainer.eval_dataset])
        ringtile.restore(trainer)
    return sharded


def test_every_tensor_is_sharded_once_per_step():
    for sharded in run_ranks(2, _count_sharded):
        assert set(sharded.values()) == {1}
        per_step = Counter((phase, step) for phase, step, _, _ in sharded)
        # Ids, labels, positions, padding: 2 x 2 micro-steps, 3 batches to evaluate, 3 to predict without labels.
        steps = [("train", 4)] * 4 + [("evaluate", 4)] * 3 + [("predict", 3)] * 3
        assert per_step == {(phase, step): count for step, (phase, count) in enumerate(steps)}


# ---- ringtile.auto ------------------------------------------------------------------------------


def _auto(path):
    construct = Trainer.__init__
    os.environ["RINGTILE_CONFIG"] = path
    import ringtile.auto

    try:
        trainer = make_trainer()
        enabled = trainer._ringtile_session.config
        ringtile.restore(trainer)
    finally:
        ringtile.auto.restore()
        del os.environ["RINGTILE_CONFIG"]
    return enabled.context_parallel_size, Trainer.__init__ is construct, "_ringtile_session" in vars(make_trainer())


def test_auto_enables_trainers_built_afterwards(tmp_path):
    path = tmp_path / "ringtile.yaml"
    path.write_text("context_parallel_size: 2\n")
    assert run_ranks(2, _auto, str(path)) == [(2, True, False)] * 2


class _Subclass(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


def test_auto_that_refuses_a_subclass_does_so_each_time_that_it_is_used(tmp_path, monkeypatch):
    from ringtile.hf.trainer import enable_every_trainer

    path = tmp_path / "ringtile.yaml"
    path.write_text("context_parallel_size: 2\n")
    monkeypatch.setenv("RINGTILE_CONFIG", str(path))
    patches = enable_every_trainer()
    try:
        trainer = make_trainer(trainer_class=_Subclass)
    finally:
        patches.restore()
    for name in ("train", "train", "evaluate", "predict"):
        with pytest.raises(ringtile.ConfigError, match="context_parallel_size is 2 but there is 1 rank"):
            getattr(trainer, name)()
    assert trainer.state.global_step == 0


def test_auto_without_the_variable_says_so(monkeypatch):
    from ringtile.hf.trainer import enable_every_trainer

    monkeypatch.delenv("RINGTILE_CONFIG", raising=False)
    with pytest.raises(ringtile.ConfigError, match="RINGTILE_CONFIG is not set"):
        enable_every_trainer()
