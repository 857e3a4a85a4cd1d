"""Enables ringtile on every Trainer that a script builds."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from transformers import Trainer

from ringtile.config import Config
from ringtile.errors import ConfigError
from ringtile.hf.patches import Patches
from ringtile.hf.trainer import enable

VARIABLE = "RINGTILE_CONFIG"
_USES = ("train", "evaluate", "predict")  # methods that an enabled Trainer runs otherwise


def install() -> Patches:
    """Makes every Trainer enable ringtile when it is built, with the YAML file that RINGTILE_CONFIG names.

    The variable is read here, once. `restore()` on the returned record leaves later Trainers alone.
    Raises ConfigError when the variable is unset or the file is not a configuration.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        raise ConfigError(f"{VARIABLE} is not set; expected the path of a YAML file with ringtile's keys")
    config = Config.load(path)
    original = Trainer.__init__

    @functools.wraps(original)
    def construct(self: Trainer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self).__init__ is Trainer.__init__:
            enable(self, config)
        else:
            _enable_when_used(self, config)

    patches = Patches()
    patches.set(Trainer, "__init__", construct)
    return patches


def _enable_when_used(trainer: Trainer, config: Config) -> None:
    """For a subclass, whose own __init__ goes on: TRL's makes reference models, and draws seeds, after Trainer's."""
    until_used = Patches()

    def use(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        until_used.restore()
        try:
            enable(trainer, config)
        except BaseException:
            _enable_when_used(trainer, config)  # the next use must not run without ringtile
            raise
        return getattr(trainer, original.__name__)(*args, **kwargs)

    for name in _USES:
        until_used.wrap(trainer, name, use)
