"""Every error ringtile raises on purpose. Each message says what was got, what was expected, what to change."""

from __future__ import annotations


class RingtileError(Exception):
    """Base of all of them: `except ringtile.RingtileError` catches what ringtile refused."""


class InputError(RingtileError, ValueError):
    """A tensor argument has a wrong shape, dtype, device or stride."""


class MaskNotExpressible(RingtileError, ValueError):
    """A mask needs more than one interval of keys for some query; the message names the first such row."""


class LayoutError(RingtileError, ValueError):
    """Runs do not hold every global position exactly once, or a sequence is too short for a layout."""


class ConfigError(RingtileError, ValueError):
    """A configuration key is unknown, malformed, or contradicts another; the message names the YAML key."""


class Refused(RingtileError, NotImplementedError):
    """A feature of the model or trainer that ringtile cannot run exactly, refused by name."""


class RingMismatch(RingtileError, RuntimeError):
    """Two ranks of one ring disagree; the message names the field, both values and both ranks."""


class PeerLost(RingtileError, RuntimeError):
    """A rank of the ring died or fell silent; the message names the rank, the round and the op."""


class BuildError(RingtileError, ImportError):
    """The compiled extension is missing, does not fit this torch, or cannot run on this CPU."""
