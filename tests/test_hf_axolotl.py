"""The axolotl plugin, with a stand-in for axolotl's base class: axolotl pins other versions of what we stand on."""

import importlib
import sys
import types

import pytest
import ringtile
from hf_training import make_trainer
from pool import run_ranks
from pydantic import BaseModel, ValidationError


class BasePlugin:
    """As axolotl.integrations.base has it: hooks that do nothing."""

    def register(self, cfg):
        pass


def _plugin():
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
    _plugin().RingtilePlugin().register(cfg)
    return cfg


def test_keys_are_moved_out_of_axolotls_sight():
    cfg = registered(context_parallel_size=2, tiled_mlp=True, tiled_mlp_num_shards=4, layout="striped", gc_steps=5)
    ours = {"context_parallel_size": 2, "tiled_mlp": True, "tiled_mlp_num_shards": 4, "layout": "striped"}
    assert cfg == {"ringtile": ours, "gc_steps": 5}


def test_old_name_of_the_size_and_the_section_are_read():
    assert registered(sequence_parallel_degree=2) == {"ringtile": {"context_parallel_size": 2}}
    assert registered(ringtile={"tiled_loss": True}) == {"ringtile": {"tiled_loss": True}}
    assert registered(context_parallel_size=2, sequence_parallel_degree=2)["ringtile"] == {"context_parallel_size": 2}


def test_two_sizes_are_named():
    with pytest.raises(ringtile.ConfigError, match="context_parallel_size is 4 but context_parallel_size is 2 too"):
        registered(context_parallel_size=4, sequence_parallel_degree=2)


def test_section_is_validated_with_axolotls_own_configuration():
    module = _plugin()
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
        _plugin().RingtilePlugin(),
        {"ringtile": {"context_parallel_size": 2}, "batch_size": 8, "world_size": 4},
    )
    plugin.load_datasets(cfg)
    plugin.load_datasets(cfg)
    assert cfg["batch_size"] == 4


def _enabled():
    plugin, trainer = _plugin().RingtilePlugin(), make_trainer(max_steps=1)
    cfg = {"context_parallel_size": 2, "layout": "contiguous"}
    plugin.register(cfg)
    plugin.post_trainer_create(cfg, trainer)
    config = trainer._ringtile_session.config
    ringtile.restore(trainer)
    return config.context_parallel_size, config.layout


def test_trainer_is_enabled_once_it_is_built():
    assert run_ranks(2, _enabled) == [(2, "contiguous")] * 2


def test_orpo_is_refused():
    with pytest.raises(ringtile.ConfigError, match="orpo_alpha"):
        _plugin().RingtilePlugin().post_trainer_create({"orpo_alpha": 0.1}, None)
