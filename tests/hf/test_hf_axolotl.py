"""The axolotl plugin: with axolotl where it is installed, else with a stand-in for its base class.

axolotl pins other versions of what ringtile is tested with, so it is no dependency of these tests.
"""

import importlib
import importlib.util
import os
import sys
import types
from unittest import mock

import datasets
import pytest
import ringtile
import yaml
from hf_training import TOLERANCE, Padded, assert_equal_training, make_rows, make_trainer, train
from pool import run_ranks
from pydantic import BaseModel, ValidationError
from transformers import Trainer

needs_axolotl = pytest.mark.skipif(not importlib.util.find_spec("axolotl"), reason="axolotl is not installed")


class BasePlugin:
    """As axolotl.integrations.base has it: hooks that do nothing."""

    def register(self, cfg):
        pass


def plugin_module():
    if importlib.util.find_spec("axolotl"):
        return importlib.import_module("ringtile.hf.axolotl")
    base = types.ModuleType("axolotl.integrations.base")
    base.BasePlugin = BasePlugin
    modules = {name: types.ModuleType(name) for name in ("axolotl", "axolotl.integrations")}
    sys.modules.update({**modules, base.__name__: base})
    try:
        return importlib.import_module("ringtile.hf.axolotl")
    finally:
        for name in (*modules, base.__name__):
            del sys.modules[name]


def registered(**cfg):
    """axolotl's configuration after the plugin saw it."""
    plugin_module().RingtilePlugin().register(cfg)
    return cfg


def test_keys_are_moved_out_of_axolotls_sight():
    cfg = registered(context_parallel_size=2, tiled_mlp=True, tiled_mlp_num_shards=4, layout="striped", gc_steps=5)
    ours = {"context_parallel_size": 2, "tiled_mlp": True, "tiled_mlp_num_shards": 4, "layout": "striped"}
    assert cfg == {"ringtile": ours, "gc_steps": 5}


MISSPELLED = {"tiled_mpl": "tiled_mlp", "context_paralel_size": "context_parallel_size", "eager_attention": ""}


@pytest.mark.parametrize("key", MISSPELLED)
def test_a_misspelled_key_outside_of_the_mapping_is_named(key, caplog):
    registered(**{key: 2})
    expected = [f"{key}: did you mean {MISSPELLED[key]}"] if MISSPELLED[key] else []
    assert [message.partition("?")[0] for message in caplog.messages] == expected


def test_old_name_of_the_size_and_the_section_are_read():
    assert registered(sequence_parallel_degree=2) == {"ringtile": {"context_parallel_size": 2}}
    assert registered(ringtile={"tiled_loss": True}) == {"ringtile": {"tiled_loss": True}}
    assert registered(context_parallel_size=2, sequence_parallel_degree=2)["ringtile"] == {"context_parallel_size": 2}


def test_two_sizes_are_named():
    with pytest.raises(ringtile.ConfigError, match=r"sequence_parallel_degree is 2, .* is 4;"):
        registered(context_parallel_size=4, sequence_parallel_degree=2)
    with pytest.raises(ringtile.ConfigError, match="size is 4 but context_parallel_size is 2 in the mapping ringtile"):
        registered(context_parallel_size=4, ringtile={"context_parallel_size": 2})


def test_names_of_other_libraries_are_taken():
    """axolotl drops a key that it does not know, without a word."""
    assert registered(cp_size=2) == {"ringtile": {"context_parallel_size": 2}}
    both = {"context_parallel_size": 2, "context_parallel_scheme": "ulysses"}
    assert registered(ulysses_sequence_parallel_size=2) == {"ringtile": both}
    assert registered(ringtile={"context_parallel": {"size": 2}}) == {"ringtile": {"context_parallel_size": 2}}


@pytest.mark.parametrize("value", [True, "legacy", "hidden_states", False, "disk"])
def test_offloading_into_host_memory_is_taken_over(value):
    cfg = registered(activation_offloading=value)
    left = {"activation_offloading": value, "ringtile": {}}
    assert cfg == (left if value in (False, "disk") else {"ringtile": {"activation_offloading": True}})


CUT_CROSS_ENTROPY = ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]


@pytest.mark.parametrize(
    ("cfg", "name"),
    [
        ({"plugins": CUT_CROSS_ENTROPY}, "cut_cross_entropy"),
        ({"cut_cross_entropy": True, "plugins": CUT_CROSS_ENTROPY}, "cut_cross_entropy"),
        ({"liger_fused_linear_cross_entropy": True}, "liger_fused_linear_cross_entropy"),
        ({"chunked_cross_entropy": True}, "chunked_cross_entropy"),
    ],
)
def test_losses_without_all_logits_become_tiled_loss(cfg, name):
    taken = registered(**cfg, context_parallel_size=2)
    assert taken == cfg | {name: False, "ringtile": {"context_parallel_size": 2, "tiled_loss": True}}
    assert registered(**cfg, tiled_loss=True)["ringtile"] == {"tiled_loss": True}
    with pytest.raises(ringtile.ConfigError, match=f"{name} is on and tiled_loss is False; expected tiled_loss: true"):
        registered(**cfg, context_parallel_size=2, tiled_loss=False)
    on_host = registered(**cfg, stream=True, activation_offloading="legacy")["ringtile"]
    assert on_host == {"stream": True, "activation_offloading": True, "tiled_loss": True}
    whole = registered(**cfg, tiled_norm=True)  # axolotl's losses are made for these
    assert whole == cfg | {"ringtile": {"tiled_norm": True}}


def test_a_loss_that_is_off_stays_off():
    cfg = {"plugins": CUT_CROSS_ENTROPY, "cut_cross_entropy": False, "context_parallel_size": 2}
    assert registered(**cfg)["ringtile"] == {"context_parallel_size": 2}


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"size": 4}, {}),
        ({"size": 4, "backend": "auto", "load_balance": "auto", "ring_impl": "auto"}, {"scheme": "auto"}),
        ({"size": 4, "backend": "ring", "load_balance": "head_tail"}, {"scheme": "ring", "layout": "zigzag"}),
        ({"size": 4, "backend": "ring", "load_balance": "none"}, {"scheme": "ring", "layout": "contiguous"}),
        ({"size": 4, "backend": "ring", "rotate_method": "alltoall"}, {"scheme": "ring"}),
        ({"size": 4, "backend": "ring", "rotate_method": "allgather"}, {"scheme": "all_gather"}),
        ({"size": 4, "backend": "ulysses"}, {"scheme": "ulysses"}),
        ({"size": 4, "backend": "usp", "ulysses_size": 2}, {"scheme": "usp:2"}),
        ({"size": 4, "ulysses_size": 2, "ring_size": 2}, {"scheme": "usp:2"}),
        ({"size": 4, "backend": "ring", "shard_in_collator": True}, {"scheme": "ring"}),
        ({"size": 4, "shard_in_collator": False}, {}),
        ({"size": 4, "scheme": "ulysses", "layout": "striped"}, {"scheme": "ulysses", "layout": "striped"}),
    ],
)
def test_the_mapping_of_axolotl_is_taken_over(given, ours):
    """Left where it is, axolotl would share the sequence once more."""
    names = {"scheme": "context_parallel_scheme", "layout": "layout"}
    expected = {"context_parallel_size": 4} | {names[key]: value for key, value in ours.items()}
    assert registered(context_parallel=given, tiled_loss=True) == {"ringtile": expected | {"tiled_loss": True}}
    ringtile.Config.load(expected)
    assert registered(context_parallel=given, context_parallel_size=4) == {"ringtile": expected}


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"context_parallel": 4}, "context_parallel is 4; expected a mapping"),
        (
            {"context_parallel": {"size": 4, "backend": "magi"}},
            "backend is 'magi', which .* expected one of auto, ring",
        ),
        ({"context_parallel": {"size": 4, "backend": "usp"}}, "backend is 'usp'; expected ulysses_size too"),
        (
            {"context_parallel": {"size": 4, "ulysses_size": 2, "ring_size": 4}},
            "ulysses_size is 2 and ring_size is 4 and context_parallel_size 4; expected",
        ),
        ({"context_parallel": {"size": 4, "backend": "ring", "ring_size": 4}}, "backend: ring says it, remove them"),
        ({"context_parallel": {"size": 4, "rotate_method": "alltoall"}}, "rotate_method is set and backend is None"),
        (
            {"context_parallel": {"size": 4, "load_balance": "distflash"}},
            "context_parallel.load_balance is 'distflash'",
        ),
        ({"context_parallel": {"size": 4, "load_balance": ["auto"]}}, "context_parallel.load_balance is"),
        ({"context_parallel": {"size": 4, "ring_impl": "hf_kernels"}}, "context_parallel.ring_impl is 'hf_kernels'"),
        ({"context_parallel": {"size": 4, "shard_in_collator": "no"}}, "context_parallel.shard_in_collator is 'no'"),
        ({"context_parallel": {"size": 4, "head_parallel": 2}}, "unknown key context_parallel.head_parallel"),
        ({"context_parallel": {"backend": "ring", "scheme": "ulysses"}}, "scheme is 'ulysses' but axolotl's keys"),
        ({"context_parallel": {"size": 4}, "context_parallel_size": 2}, "context_parallel_size is 2 but the mapping"),
    ],
)
def test_what_the_mapping_says_and_ringtile_does_not_do_is_named(cfg, message):
    with pytest.raises(ringtile.ConfigError, match=message):
        registered(**cfg)


def test_workers_of_ray_may_register_again():
    cfg = {"use_ray": True, "context_parallel_size": 1, "ringtile": {"context_parallel_size": 2}}
    assert registered(**cfg)["ringtile"] == {"context_parallel_size": 2}


def test_section_is_validated_with_axolotls_own_configuration():
    module = plugin_module()
    path, name = module.RingtilePlugin().get_input_args().rsplit(".", 1)
    assert path == module.__name__

    class AxolotlInputConfig(BaseModel):
        learning_rate: float

    merged = type("Merged", (AxolotlInputConfig, getattr(module, name)), {})
    assert merged(learning_rate=1.0, ringtile={"context_parallel_size": 2}).ringtile == {"context_parallel_size": 2}
    assert merged(learning_rate=1.0).ringtile is None
    with pytest.raises(ValidationError, match="unknown key layouts: did you mean layout"):
        merged(learning_rate=1.0, ringtile={"layouts": "zigzag"})


def test_rows_of_a_step_are_counted_once_per_group():
    plugin, cfg = (
        plugin_module().RingtilePlugin(),
        {"ringtile": {"context_parallel_size": 2}, "batch_size": 8, "world_size": 4},
    )
    plugin.load_datasets(cfg)
    plugin.load_datasets(cfg)
    assert cfg["batch_size"] == 4


def _enabled():
    plugin, trainer = plugin_module().RingtilePlugin(), make_trainer(max_steps=1)
    cfg = {"context_parallel_size": 2, "layout": "contiguous"}
    plugin.register(cfg)
    plugin.post_trainer_create(cfg, trainer)
    config = trainer._ringtile_session.config
    ringtile.restore(trainer)
    return config.context_parallel_size, config.layout


def test_trainer_is_enabled_once_it_is_built():
    assert run_ranks(2, _enabled) == [(2, "contiguous")] * 2


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        ({"tiled_mlp_num_shards": 4}, "tiled_mlp_num_shards is 4 but tiled_mlp is false; set tiled_mlp: true"),
        ({"tiled_mlp_use_original_mlp": False}, "tiled_mlp_use_original_mlp is False but tiled_mlp is false"),
        ({"tiled_mlp": True, "tiled_mlp_num_shards": 0}, "tiled_mlp_num_shards is 0; expected"),
    ],
)
def test_own_keys_are_checked(cfg, words):
    taken = registered(**cfg)
    with pytest.raises(ringtile.ConfigError, match=words):
        plugin_module().RingtilePlugin().post_trainer_create(taken, None)


def test_own_keys_reach_the_tiles():
    trainer, cfg = make_trainer(max_steps=1), {"tiled_mlp": True, "tiled_norm": True, "tiled_mlp_num_shards": 3}
    plugin = plugin_module().RingtilePlugin()
    plugin.register(cfg)
    plugin.post_trainer_create(cfg, trainer)
    (mlp, *_) = (layer.mlp for layer in trainer.model.model.layers)
    assert mlp.forward.__func__.num_shards == 3
    ringtile.restore(trainer)
    assert "forward" not in vars(mlp)


def test_streamed_layers_train():
    cfg = {"stream": True, "tile_tokens": 8, "activation_offloading": True, "tiled_loss": True}
    trainer, plugin, expected = make_trainer(max_steps=1), plugin_module().RingtilePlugin(), make_trainer(max_steps=1)
    plugin.register(cfg)
    assert cfg.keys() == {"ringtile"}
    plugin.post_trainer_create(cfg, trainer)
    assert all("forward" in vars(layer) for layer in trainer.model.model.layers)
    losses = [each.train().training_loss for each in (trainer, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE)
    ringtile.restore(trainer)


def test_orpo_is_refused():
    with pytest.raises(ringtile.ConfigError, match="orpo_alpha"):
        plugin_module().RingtilePlugin().post_trainer_create({"orpo_alpha": 0.1}, None)


def test_experts_over_ranks_are_refused_before_a_model_is_loaded():
    """axolotl's dispatch is DeepEP's, on GPUs. Without shared sequences they are axolotl's own matter."""
    for keys in ({"sequence_parallel_degree": 2}, {"ringtile": {"context_parallel_size": 2}}):
        with pytest.raises(ringtile.ConfigError, match="expert_parallel_size is 2 and context_parallel_size 2;"):
            registered(expert_parallel_size=2, **keys)
    assert registered(expert_parallel_size=2, tiled_loss=True)["expert_parallel_size"] == 2
    assert registered(expert_parallel_size=1, cp_size=2)["ringtile"] == {"context_parallel_size": 2}


def _rows_are_balanced_for():
    plugin, trainer = plugin_module().RingtilePlugin(), make_trainer(max_steps=1)
    trainer._data_parallel_size = lambda: trainer.args.world_size  # as axolotl 0.21 has it
    cfg = {"context_parallel_size": 2}
    plugin.register(cfg)
    plugin.post_trainer_create(cfg, trainer)
    groups = trainer._data_parallel_size()
    ringtile.restore(trainer)
    return groups, trainer._data_parallel_size()


def test_labels_are_balanced_over_groups_of_ranks():
    """balance_labels orders rows for as many ranks as it is told; one process has one."""
    assert run_ranks(2, _rows_are_balanced_for) == [(1, 2)] * 2


class AxolotlTrainer(Trainer):
    __module__ = "axolotl.core.trainers.base"


def _axolotl_shards_too(config):
    parallelism = types.SimpleNamespace(cp_enabled=True, cp_size=2, sp_enabled=False, tp_size=1)
    trainer = make_trainer(trainer_class=AxolotlTrainer, max_steps=1)
    with mock.patch.object(trainer.accelerator.state, "parallelism_config", parallelism, create=True):
        ringtile.enable(trainer, config)


@pytest.mark.parametrize("config", [{"context_parallel_size": 2}, {"tiled_loss": True}])
def test_a_second_partition_is_refused(config):
    """Without the plugin axolotl sees its keys, shards each batch itself, and ringtile would shard the shards."""
    with pytest.raises(ringtile.RefusedError, match="uses axolotl's own context parallelism; unset it"):
        _axolotl_shards_too(config)


# ---- axolotl itself -----------------------------------------------------------------------------

BASE = """
base_model: none
datasets: [{path: none, type: alpaca}]
micro_batch_size: 1
gradient_accumulation_steps: 1
learning_rate: 1.0e-5
plugins: [ringtile.hf.axolotl.RingtilePlugin]
"""


def validated(text, **keys):
    """What axolotl makes of a YAML file on a machine with 8 H100: the plugin's register, then its schema."""
    from axolotl.utils.config import prepare_plugins, validate_config
    from axolotl.utils.dict import DictDefault

    cfg = DictDefault({**yaml.safe_load(text), **keys})
    prepare_plugins(cfg)
    capabilities = {"bf16": True, "fp8": True, "tf32": True, "n_gpu": 8, "compute_capability": "sm_90"}
    return validate_config(cfg, capabilities=capabilities, env_capabilities={"torch_version": "2.13.0"})


@needs_axolotl
def test_axolotl_itself_never_sees_our_keys():
    keys = {"context_parallel_size": 2, "tiled_mlp": True, "tiled_mlp_num_shards": 4, "layout": "striped"}
    cfg = validated(BASE, **keys, sample_packing=True, micro_batch_size=2)
    assert cfg.ringtile == keys
    assert (cfg.context_parallel_size, cfg.tiled_mlp, cfg.tiled_mlp_num_shards) == (1, None, None)
    assert validated(BASE, sequence_parallel_degree=4).ringtile == {"context_parallel_size": 4}
    cfg = validated(BASE, context_parallel={"size": 2, "backend": "ring", "shard_in_collator": True})
    assert cfg.ringtile == {"context_parallel_size": 2, "context_parallel_scheme": "ring"}
    assert (cfg.context_parallel_size, (cfg.context_parallel or {}).get("size", 1)) == (1, 1)


@needs_axolotl
@pytest.mark.parametrize("engine", [{}, {"deepspeed": "zero3.json"}])
def test_axolotl_itself_asks_accelerate_for_no_groups(engine):
    """Under DeepSpeed, axolotl 0.21 has accelerate's Ulysses share a sequence, else its own or accelerate's mesh."""
    from axolotl.utils.trainer import setup_parallelism_envs

    with mock.patch.dict(os.environ):
        before = dict(os.environ)
        setup_parallelism_envs(validated(BASE, context_parallel_size=2, **engine))
        assert dict(os.environ) == before


@needs_axolotl
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"context_parallel_size": "two"}, "context_parallel_size is 'two'"),
        ({"layout": "zigzags"}, "layout is 'zigzags'"),
        ({"ringtile": {"layouts": "zigzag"}}, "unknown key layouts: did you mean layout"),
        ({"tiled_mlp_num_shards": 4}, "tiled_mlp_num_shards is 4 but tiled_mlp is false"),
    ],
)
def test_axolotl_itself_refuses_our_mistakes(keys, words):
    with pytest.raises(ValidationError, match=words):
        validated(BASE, **keys)


def _train_axolotl(config, **options):
    from axolotl.core.trainers.base import AxolotlTrainer
    from axolotl.core.training_args import AxolotlTrainingArguments

    rows = {"train_dataset": make_rows(22), "eval_dataset": make_rows(5, seed=1)}
    arguments = {name: datasets.Dataset.from_list(some) for name, some in rows.items()}
    options["trainer_arguments"] = {"eval_data_collator": Padded(), **arguments}
    # axolotl's log asks accelerate for the rank before the Trainer has said that this is a CPU
    with mock.patch.dict(os.environ, ACCELERATE_USE_CPU="true"):
        return train(config, trainer_class=AxolotlTrainer, arguments_class=AxolotlTrainingArguments, **options)


@needs_axolotl
def test_axolotls_trainer_on_two_ranks_equals_one_process():
    options = {"remove_unused_columns": False}
    expected = _train_axolotl(None, **options)
    for run in run_ranks(2, _train_axolotl, {"context_parallel_size": 2}, timeout=200.0, **options):
        assert_equal_training(run, expected)
        assert run.eval_loss == pytest.approx(expected.eval_loss, rel=TOLERANCE)
