"""Draws of every device's default generator are seen, whichever device is the current one."""

import pytest
import torch
from ringtile.tiled.module_state import drawn_since, random_states


class Generator(torch.Generator):
    """A GPU's, as far as its state goes: a seed and an offset."""

    def __init__(self):
        self.offset = 0

    def get_state(self):
        return torch.tensor([42, self.offset]).view(torch.uint8)


@pytest.fixture
def gpus(monkeypatch):
    """The default generators of two GPUs that this process has initialized."""
    generators = (Generator(), Generator())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    return generators


def test_draws_are_seen_on_every_device(gpus):
    before = random_states()
    assert list(before) == ["cpu", "cuda:0", "cuda:1"]
    assert drawn_since(before) == []
    torch.rand(1, generator=torch.Generator())
    assert drawn_since(before) == []
    torch.rand(1)
    gpus[1].offset = 4
    assert drawn_since(before) == ["cpu", "cuda:1"]


def test_cuda_may_be_initialized_meanwhile(gpus, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr(torch.cuda, "is_initialized", lambda: False)
        before = random_states()
    assert list(before) == ["cpu"]
    assert drawn_since(before) == []
    gpus[0].offset = 4
    assert drawn_since(before) == ["cuda:0"]
