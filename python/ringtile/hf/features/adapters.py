"""PEFT's adapters that do more than change weights: prompts, terms in the loss, means over tokens. By name of their
configuration's peft_type, so that peft is not imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringtile.errors import RefusedError
from ringtile.hf.batch import active_batch
from ringtile.hf.feature import Enabled, Feature
from ringtile.hf.model import adapters_of
from ringtile.hf.patches import Patches

_PAST = "its keys and values stand before every sequence in a cache, which no rank holds a shard of"
_REFUSED = {
    "PREFIX_TUNING": _PAST,
    "CARTRIDGE": _PAST,
    "LILY": "it weights its experts by a mean over the tokens of the batch",
    "SHADOW": "it adds a loss of its own, over labels that it shifts within each shard",
    "XLORA": "its classifier runs the model a first time, which has not been compared with one process",
}
_REFUSED_SETTINGS = {
    "alora_invocation_tokens": "it looks for these tokens in a shard, where they may not be, or be cut in two",
    "velora_config": "its projections are means over the tokens of the batch",
}


def _refuse(run: Enabled) -> None:
    """Raises RefusedError for adapters whose outputs or losses would differ on shards."""
    for config in adapters_of(run.wrapped):
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        for name, reason in (_REFUSED | _REFUSED_SETTINGS).items():
            if name == kind or (name in _REFUSED_SETTINGS and getattr(config, name, None)):
                raise RefusedError(
                    f"the model has an adapter of PEFT with {name}; expected another one under context parallelism: "
                    f"{reason}. LoRA, DoRA, IA3, OFT, prompt tuning and p-tuning are exact"
                )


def _install(run: Enabled, patches: Patches) -> None:
    """AdaLoRA's forward adds the distance of its factors from orthogonal ones to the loss, in full on every rank; here
    its share of it, like a balancing loss."""
    tuner: Any = getattr(run.wrapped, "base_model", None)
    if type(tuner).__name__ != "AdaLoraModel":
        return

    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = active_batch()
        if batch is None:
            return original(*args, **kwargs)
        config = tuner.peft_config[tuner.trainable_adapter_name]
        weight = config.orth_reg_weight
        config.orth_reg_weight = weight * batch.mean_share
        try:
            return original(*args, **kwargs)
        finally:
            config.orth_reg_weight = weight

    patches.wrap(tuner, "forward", forward)


FEATURE = Feature(frozenset({"forward"}), _install, _refuse)  # of AdaLoRA's tuner
