"""The stand-in for Liger, which leaves transformers as it was."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers.integrations.liger
from torch import nn

_STAND_INS = str(Path(__file__).parent / "stand_ins")
_PATCHED = ("llama", "mixtral")  # types of models in whose files Liger replaces names


@contextlib.contextmanager
def stand_in() -> Iterator[Any]:
    """Inside, `import liger_kernel` is the stand-in. Yields the module of its fused loss, which counts its calls."""
    asked = transformers.integrations.liger.is_liger_kernel_available
    with _unchanged():
        sys.path.insert(0, _STAND_INS)
        transformers.integrations.liger.is_liger_kernel_available = lambda: True
        try:
            yield importlib.import_module("liger_kernel.transformers.model.loss_utils")
        finally:
            sys.path.remove(_STAND_INS)
            transformers.integrations.liger.is_liger_kernel_available = asked


@contextlib.contextmanager
def _unchanged() -> Iterator[None]:
    """Afterwards Liger is not imported, and what it replaces in other modules is as before."""
    files = [importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in _PATCHED]
    held = [(owner, dict(vars(owner))) for owner in (*files, nn.functional)]
    imported = {name: sys.modules.pop(name) for name in _of_liger()}
    try:
        yield
    finally:
        for owner, names in held:
            for name, value in names.items():
                setattr(owner, name, value)
        for name in _of_liger():
            del sys.modules[name]
        sys.modules.update(imported)


def _of_liger() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]
