"""The random states of torch, Python and numpy, as one; and numbers of a rank's own."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ringtile.tiled.module_state import random_states, set_torch_states


def all_random_states() -> tuple[dict[str, Tensor], Any, Any]:
    """Snapshot torch's, Python's and numpy's random states; None for numpy's without numpy."""
    numpy = sys.modules.get("numpy")
    return random_states(), random.getstate(), None if numpy is None else numpy.random.get_state()


def host_random_states() -> tuple[dict[str, Tensor], Any, Any]:
    """Return the states of `all_random_states` without a GPU's, which are of one rank's device."""
    ours, pythons, numpys = all_random_states()
    return {"cpu": ours["cpu"]}, pythons, numpys


def set_random_states(states: tuple[dict[str, Tensor], Any, Any]) -> None:
    """Puts back what `all_random_states` returned."""
    ours, pythons, numpys = states
    set_torch_states(ours)
    random.setstate(pythons)
    if numpys is not None:
        sys.modules["numpy"].random.set_state(numpys)


def random_digest() -> str:
    """Return a hash of the host's states and the current GPU's: equal on ranks that have drawn the same, each on its
    GPU."""
    ours, pythons, numpys = all_random_states()
    current = f"cuda:{torch.cuda.current_device()}" if len(ours) > 1 else "cpu"
    states = [bytes(ours[device].numpy()) for device in dict.fromkeys(("cpu", current))], pythons, numpys
    return hashlib.sha256(pickle.dumps(states)).hexdigest()


@contextlib.contextmanager
def random_numbers_of(seed: int) -> Iterator[None]:
    """Inside, all random numbers are those of a seed in 0..2^32-1; outside, nothing was drawn."""
    before = all_random_states()
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    try:
        yield
    finally:
        set_random_states(before)
