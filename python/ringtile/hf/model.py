"""A model under context parallelism: its parts, and its attention."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ringtile.errors import RefusedError
from ringtile.hf import attention, temperature
from ringtile.hf.batch import active_batch
from ringtile.hf.patches import Patches

_NOT_TEXT = ("vision", "image", "video", "audio", "speech")  # in the names of a tower's configuration

# Of each switched model, the names of its attention before.
_own_attention: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, Any]] = weakref.WeakKeyDictionary()

# What to do about a model that no setting makes run on shards; ends a message.
INSTEAD = (
    "train it with context_parallel_size: 1, where tiled_mlp, tiled_loss and activation_offloading still save memory, "
    "or choose a type that docs/guide/models.md lists as exact"
)


def base_model(model: nn.Module | None) -> PreTrainedModel:
    """The transformers model inside PEFT's adapters. Raises RefusedError when there is none."""
    get_base_model = getattr(model, "get_base_model", None)
    base = get_base_model() if callable(get_base_model) else model
    if not isinstance(base, PreTrainedModel):
        raise RefusedError(f"the model is a {type(base).__name__}; expected a transformers PreTrainedModel")
    return base


def receiver(model: nn.Module) -> nn.Module:
    """The module whose inputs are whole sequences: the model, or the one inside it, if the model puts tokens of its own
    before each sequence (prompt tuning, p-tuning, CPT)."""
    return model.get_submodule("base_model") if adds_tokens(model) else model


def adds_tokens(model: nn.Module | None) -> bool:
    return any(config.is_prompt_learning for config in adapters_of(model))


def adapters_of(model: nn.Module | None) -> list[Any]:
    configs = getattr(model, "peft_config", None)
    return list(configs.values()) if isinstance(configs, dict) else []


def drops_attention(base: PreTrainedModel) -> bool:
    """Whether the configuration of the text model has a rate of attention dropout above 0."""
    return any(rate > 0 for rate in _attention_rates(base.config.get_text_config().to_dict()))


def _attention_rates(config: Mapping[str, Any]) -> Iterator[float]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _attention_rates(value)
        elif isinstance(value, int | float) and "att" in name and "drop" in name:
            yield value


def text_modules(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """The modules that run for text, with their paths: without the towers of a model that takes images or sound too."""
    roots = [f"{path}." for path in towers(model)]
    return [(path, m) for path, m in model.named_modules() if not any(f"{path}.".startswith(root) for root in roots)]


def refuse_modules(model: PreTrainedModel, reasons: dict[str, tuple[str, str]]) -> None:
    """Raises RefusedError for the first module whose class has a reason, with a setting that is on or none."""
    for path, module in text_modules(model):
        switch, reason = reasons.get(type(module).__name__, ("", ""))
        if reason and (not switch or getattr(module, switch, True)):
            raise RefusedError(
                f"{path} ({type(module).__name__}) {reason}; expected tokens that ranks can share: {INSTEAD}"
            )


def refuse_towers(model: PreTrainedModel, patches: Patches) -> None:
    """Raises RefusedError in a forward pass on a shard that reaches a tower, whose modules nothing has checked."""
    for path, tower in towers(model).items():

        def refuse(module: nn.Module, args: Any, path: str = path) -> None:
            if active_batch() is not None:
                raise RefusedError(f"the batch makes {path} run; expected text only: images and sound are not sharded")

        patches.on_restore(tower.register_forward_pre_hook(refuse).remove)


def towers(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """The parts of a model that turn images or sound into embeddings, by path; not those inside another."""
    configs = {type(getattr(model.config, name)) for name in _tower_configs(model)}
    configs -= {type(model.config.get_text_config())}
    found: dict[str, PreTrainedModel] = {}
    for path, module in model.named_modules():
        is_tower = isinstance(module, PreTrainedModel) and type(module.config) in configs
        if path and is_tower and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = module
    return found


def _tower_configs(model: PreTrainedModel) -> set[str]:
    """The names of the configurations of towers."""
    return {name for name in model.config.sub_configs if any(kind in name for kind in _NOT_TEXT)}


def switch_attention(wrapped: nn.Module, patches: Patches) -> None:
    """Makes every layer call ringtile's attention and mask functions. wrapped: the model with its adapters."""
    attention.register()
    # On the outermost module: adapters call the inner module's forward, which skips its hooks.
    patches.on_restore(wrapped.register_forward_pre_hook(attention.hide_attention_mask, with_kwargs=True).remove)
    model = base_model(wrapped)
    previous = {"": model.config._attn_implementation}
    without = []  # the configs of parts that do not attend: only the attribute takes None back
    for name in model.config.sub_configs:
        sub_config = getattr(model.config, name)
        if sub_config is not None and sub_config._attn_implementation is None:
            without.append(sub_config)
        elif sub_config is not None:
            previous[name] = sub_config._attn_implementation

    def restore() -> None:
        model.set_attn_implementation(previous)
        for config in without:
            config._attn_implementation = None
        _own_attention.pop(model, None)

    patches.on_restore(restore)
    _own_attention[model] = previous
    _set_attention(model)
    temperature.leave_to_ringtile(model, patches)
    if model.config.get_text_config()._attn_implementation != attention.NAME:
        raise RefusedError(
            f"{type(model).__name__} does not take its attention from transformers' AttentionInterface; expected a "
            f"model that does, since others would attend within a shard only: {INSTEAD}"
        )


@contextlib.contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside, a switched model attends as it did before: to generate, which may need a function for its cache."""
    model.set_attn_implementation(_own_attention[model])
    try:
        yield
    finally:
        _set_attention(model)


def _set_attention(model: PreTrainedModel) -> None:
    """Towers keep their own attention: they see whole images."""
    names = dict.fromkeys(model.config.sub_configs, attention.NAME) | {"": attention.NAME}
    previous = _own_attention[model]
    model.set_attn_implementation(names | {name: previous[name] for name in _tower_configs(model) & previous.keys()})
