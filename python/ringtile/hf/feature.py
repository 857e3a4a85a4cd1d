"""What a feature is: something that a model, a Trainer or a key asks for, and that nothing else needs (hf/features)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel, Trainer

from ringtile.hf.config import Config
from ringtile.hf.group import ContextParallelGroup
from ringtile.hf.patches import Patches


@dataclass(eq=False)
class Enabled:
    """One model of a Trainer, and what features must know to enable it."""

    trainer: Trainer
    wrapped: nn.Module  # with its adapters
    base: PreTrainedModel  # inside them
    config: Config
    group: ContextParallelGroup | None = None  # of the ranks that share a sequence; None: none is sharded
    keys: set[str] = field(default_factory=set)  # of a batch, that the model takes besides text: features add theirs


def _nothing(*args: object) -> None:
    pass


@dataclass(frozen=True)
class Feature:
    """touches: the attributes that it replaces, or whose hooks it adds. refuse: raises RefusedError or ConfigError,
    before anything changes, where a result would not be exact. install: does what the model asks for. key: of the
    configuration, that asks for it; "": the model does.
    """

    touches: frozenset[str]
    install: Callable[[Enabled, Patches], None] = _nothing
    refuse: Callable[[Enabled], None] = _nothing
    key: str = ""


HOOKS = frozenset({"_forward_pre_hooks", "_forward_hooks"})
