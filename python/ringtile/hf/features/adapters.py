"""PEFT's adapters that put a cache before every sequence, or a term into the loss. By name of their configuration's
peft_type, so that peft is not imported; others that mix tokens are named by the first batch."""

from __future__ import annotations

from ringtile.errors import RefusedError
from ringtile.hf.feature import Enabled, Feature
from ringtile.hf.model import adapters_of

_PAST = "its keys and values stand before every sequence in a cache, which no rank holds a shard of"
_REFUSED = {
    "PREFIX_TUNING": _PAST,
    "CARTRIDGE": _PAST,
    "ADALORA": "each rank would add its regularizer to the loss in full",
}


def _refuse(run: Enabled) -> None:
    """Raises RefusedError for adapters whose outputs or losses would differ on shards."""
    for config in adapters_of(run.wrapped):
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind in _REFUSED:
            raise RefusedError(
                f"the model has an adapter of PEFT with {kind}; expected another one under context parallelism: "
                f"{_REFUSED[kind]}. LoRA, DoRA, IA3, OFT, prompt tuning and p-tuning are exact"
            )


FEATURE = Feature(frozenset(), refuse=_refuse)
