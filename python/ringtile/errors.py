"""Every error ringtile raises on purpose. Each message says what it got, what it expected and what to change."""

from __future__ import annotations

import contextlib
import re
import reprlib
import sys
from collections.abc import Iterator
from typing import Any

# What pip installs for an extra of pyproject.toml, wherever ringtile itself came from.
EXTRAS = {"hf": "'transformers>=5.17' 'accelerate>=1.15' 'numpy>=1.26'"}
EXTRAS["train"] = f"{EXTRAS['hf']} 'datasets>=4' 'matplotlib>=3.8'"
# Of an object without a repr of its own. The same on every rank without it; and no reader has a use for it.
_ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")


PAGES = "https://<host>/<owner>/ringtile/blob/main/"  # before the path of a page in an error or a help


class RingtileError(Exception):
    """The base class: `except ringtile.RingtileError` catches everything ringtile raises on purpose.

    Its message shows no address, whatever it quotes.
    """

    def __str__(self) -> str:  # not __init__, which torch.compile could not trace
        return _ADDRESS.sub("", super().__str__())


class InputError(RingtileError, ValueError):
    """An argument is wrong (shape, dtype, device, stride, mask, group, number), or a second thread uses the group."""


class MaskNotExpressibleError(RingtileError, ValueError):
    """Some query attends more than one interval of keys; the message names the first such row."""


class LayoutError(RingtileError, ValueError):
    """A layout's runs miss or repeat a global position, or the sequence is too short for the layout."""


class ConfigError(RingtileError, ValueError):
    """A configuration key is unknown, malformed, or contradicts another; the message names the YAML key."""


class RefusedError(RingtileError, NotImplementedError):
    """The model or trainer uses a feature that ringtile cannot run exactly; the message names it."""


class RingMismatchError(RingtileError, RuntimeError):
    """Two ranks of a group disagree; the message names the field, both values and both ranks.

    breaks_group: a rank has gone on with the call, as on a GPU, and later calls of the group raise this error too.
    """

    breaks_group = False


class PeerLostError(RingtileError, RuntimeError):
    """A rank died or stopped responding; the message names the rank, the round and the op.

    rank: that rank, in the world; None if the group had failed before.
    """

    rank: int | None = None


class BuildError(RingtileError, ImportError):
    """The compiled extension is missing, does not fit this torch, or cannot run on this CPU."""


class MissingPackageError(RingtileError, ModuleNotFoundError):
    """A package that this part of ringtile needs is not installed, or does not fit; the message names the extra."""


@contextlib.contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Tells a failed import of another package as MissingPackageError. what: that the imports in the body are for."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "ringtile").partition(".")[0]
        if package == "ringtile" or isinstance(error, MissingPackageError):
            raise
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            problem = f"needs {package}, which is not installed; expected the packages"
        else:  # a module or a name that other versions have
            version = getattr(sys.modules.get(package), "__version__", "the installed one")
            problem = f"needs another {package} than {version} ({error}); expected the versions"
        raise MissingPackageError(
            f"{what} {problem} of the extra {extra}: pip install {EXTRAS[extra]}",
            name=error.name,
        ) from error


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Tells what other libraries raise in the body as a ConfigError. what: the key that they work on."""
    try:
        yield
    except RingtileError:
        raise
    except Exception as error:
        plain = isinstance(error, ValueError | ImportError | OSError) and str(error)
        raise ConfigError(f"{what}: {error if plain else with_kind(error)}") from error


def with_kind(error: BaseException) -> str:
    """Return the kind of an error, and what it says: "ValueError: a bad row"; the kind alone if it says nothing."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


class _Repr(reprlib.Repr):
    def repr_instance(self, x: Any, level: int) -> str:
        name = getattr(x, "__qualname__", None)  # of a function, a method or a class
        try:
            text = name if isinstance(name, str) else _ADDRESS.sub("", repr(x))
        except Exception:
            text = f"<{type(x).__name__}>"
        return text if len(text) <= self.maxother else f"{text[: self.maxother - 3]}..."

    def repr_Tensor(self, x: Any, level: int) -> str:
        return f"<{x.dtype} tensor>"  # its numbers may be gone: torch would read them

    repr_Parameter = repr_Tensor


_repr = _Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80


def shown(value: Any) -> str:
    """repr(value) for an error: short, whatever the value; of a function, a method or a class the name."""
    try:
        return _repr.repr(value)
    except ValueError:  # Python prints no integer of more than 4300 digits
        return f"an {type(value).__name__} of more than 4000 digits"
