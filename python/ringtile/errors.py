"""Every error ringtile raises on purpose. Each message says what it got, what it expected and what to change."""

from __future__ import annotations


class RingtileError(Exception):
    """The base class: `except ringtile.RingtileError` catches everything ringtile raises on purpose."""


class InputError(RingtileError, ValueError):
    """A tensor argument has a wrong shape, dtype, device or stride."""


class MaskNotExpressible(RingtileError, ValueError):
    """Some query attends more than one interval of keys; the message names the first such row."""


class LayoutError(RingtileError, ValueError):
    """A layout's runs miss or repeat a global position, or the sequence is too short for the layout."""


class ConfigError(RingtileError, ValueError):
    """A configuration key is unknown, malformed, or contradicts another; the message names the YAML key."""


class Refused(RingtileError, NotImplementedError):
    """The model or trainer uses a feature that ringtile cannot run exactly; the message names it."""


class RingMismatch(RingtileError, RuntimeError):
    """Two ranks of a group disagree; the message names the field, both values and both ranks."""


class PeerLost(RingtileError, RuntimeError):
    """A rank died or stopped responding; the message names the rank, the round and the op.

    rank: that rank, within its group; None if the group had failed before.
    """

    rank: int | None = None


class CheckpointError(RingtileError, RuntimeError):
    """A checkpoint is damaged or could not be written; the message names the file and the last whole checkpoint."""


class BuildError(RingtileError, ImportError):
    """The compiled extension is missing, does not fit this torch, or cannot run on this CPU."""
