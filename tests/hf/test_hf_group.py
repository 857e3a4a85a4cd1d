"""The context-parallel group of a Trainer: how it is made."""

from __future__ import annotations

import datetime
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ringtile.hf import group
from ringtile.hf.group import ContextParallelGroup


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cuda:0"), ("gloo", "cuda:0"), ("gloo", "cpu")])
def test_messages_over_nccl_are_on_streams_of_high_priority(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: str
) -> None:
    """Rank 3 of 4 makes both groups of two, each with options of its own, since new_group writes to them."""
    made = []

    def new_group(ranks: list[int], *, timeout: datetime.timedelta, pg_options: SimpleNamespace | None) -> set[int]:
        made.append((ranks, timeout, pg_options, set(ranks)))
        return made[-1][3]

    monkeypatch.setattr(group, "backend_name", lambda found, device_type: backend if device_type == "cuda" else "gloo")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: "the world")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(ContextParallelGroup, "sum", lambda self, value: value)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
    assert ContextParallelGroup(2, 20.0, torch.device(device)).process_group is made[1][3]
    timeout = datetime.timedelta(seconds=20)
    assert [call[:2] for call in made] == [([0, 1], timeout), ([2, 3], timeout)]
    options = [call[2] for call in made]
    if backend == "nccl":
        assert all(vars(each) == {"is_high_priority_stream": True, "_timeout": timeout} for each in options)
        assert options[0] is not options[1]
    else:
        assert options == [None, None]


IDS = torch.tensor([[5, 17, 3, 99, 4, 61, 8, 2]])
OTHER_BATCHES = {
    "neighbours by +1, -2, +1": {"input_ids": IDS + torch.tensor([0, 0, 1, -2, 1, 0, 0, 0])},
    "labels likewise": {"labels": IDS + torch.tensor([0, 0, 1, -2, 1, 0, 0, 0])},
    "other tensors exchanged": {"attention_mask": torch.zeros_like(IDS), "token_type_ids": torch.ones_like(IDS)},
    "imaginary parts": {"features": torch.full((4,), 1 - 2j)},
}


@pytest.mark.parametrize("change", OTHER_BATCHES)
def test_batches_of_equal_shape_are_told_apart(change: str) -> None:
    batch = {"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)}
    batch |= {"token_type_ids": torch.zeros_like(IDS), "features": torch.full((4,), 1 + 2j)}
    one, other = (group._fingerprint(each) for each in (batch, batch | OTHER_BATCHES[change]))
    assert {name: int(x) for name, x in one.items()} != {name: int(x) for name, x in other.items()}
