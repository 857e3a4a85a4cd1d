"""Enables ringtile on every Trainer that a script builds."""

from __future__ import annotations

import functools
import os
from typing import Any

from transformers import Trainer

from ringtile.config import Config
from ringtile.errors import ConfigError
from ringtile.hf.patches import Patches
from ringtile.hf.trainer import enable

VARIABLE = "RINGTILE_CONFIG"


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
        enable(self, config)

    patches = Patches()
    patches.set(Trainer, "__init__", construct)
    return patches
