"""The checksum that ranks compare: it tells tensors apart, wherever and however they are stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ringtile import checksum as module
from ringtile.checksum import checksum
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def of(*tensors: Tensor) -> int:
    return int(checksum(*tensors))


IDS = torch.tensor([[5, 17, 3, 99, 4, 61, 8, 2]])
WAVE = torch.complex(torch.arange(6.0), torch.arange(6.0).flip(0))
DIFFERENT: dict[str, tuple[Tensor | list[Tensor], Tensor | list[Tensor]]] = {
    "neighbors by +1, -2, +1": (IDS, IDS + torch.tensor([0, 0, 1, -2, 1, 0, 0, 0])),
    "two tokens exchanged": (IDS, IDS[:, [0, 2, 1, 3, 4, 5, 6, 7]]),
    "words exchanged": (IDS, IDS.flip(1)),
    "imaginary parts": (WAVE, WAVE.conj().resolve_conj()),
    "imaginary parts, lazily": (WAVE, WAVE.conj()),
    "signs of small floats": (torch.tensor([1e-30, 1.0]), torch.tensor([-1e-30, 1.0])),
    "a bool": (torch.zeros(9, dtype=torch.bool), torch.arange(9) == 8),
    "a tail of zeros": (torch.ones(3, dtype=torch.uint8), torch.tensor([1, 1, 1, 0], dtype=torch.uint8)),
    "dtypes": (torch.zeros(4, dtype=torch.int32), torch.zeros(4)),
    "shapes": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "tensors exchanged": ([IDS, IDS + 1], [IDS + 1, IDS]),
    "one more": ([IDS], [IDS, IDS[:0]]),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_tensors_have_different_checksums(name: str) -> None:
    one, other = (x if isinstance(x, list) else [x] for x in DIFFERENT[name])
    assert of(*one) != of(*other)
    assert of(*one) == of(*[x.clone() for x in one])


def test_few_of_many_random_pairs_collide() -> None:
    """20,000 rows of 8 tokens of 128 that differ in three: a hash of 64 bits gives none, a linear one gave 11."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 128, (20_000, 8), generator=generator)
    assert len({of(row) for row in rows[:2000]}) == len({tuple(row.tolist()) for row in rows[:2000]})
    for _ in range(200):  # changes that a sum of words times places cannot see
        places = torch.randperm(8, generator=generator)[:3]
        a, b, c = (int(place) + 1 for place in places)
        change = torch.zeros(8, dtype=torch.int64)
        change[places] = torch.tensor([b - c, c - a, a - b])
        assert int((change * torch.arange(1, 9)).sum()) == 0
        assert of(rows[0]) != of(rows[0] + change)


STORED: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: torch.stack([x, x], 2).flatten(1)[:, ::2],
    "at an odd offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "negated lazily": lambda x: torch._neg_view(-x) if not x.is_complex() else x,
    "a parameter": torch.nn.Parameter,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("stored", STORED)
def test_how_a_tensor_is_stored_does_not_matter(
    stored: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut into pieces of 40 bytes, too."""
    x = torch.randn(7, 9).to(dtype)
    for num_bytes in (module._PIECE_BYTES, 40):
        monkeypatch.setattr(module, "_PIECE_BYTES", num_bytes)
        assert of(STORED[stored](x)) == of(x)


def test_a_checksum_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor that it makes is larger than a piece: not even for one that must be copied to be read."""
    x = torch.randn(64, 4, 500).to(torch.bfloat16)
    made = [0]

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for each in out if isinstance(out, list | tuple) else [out]:
                storage = each.untyped_storage()
                if storage.data_ptr() != x.untyped_storage().data_ptr():
                    made.append(storage.nbytes())
            return out

    monkeypatch.setattr(module, "_PIECE_BYTES", 4096)
    with Sizes():
        found = checksum(x.transpose(0, 2))
    assert max(made) <= 4096 < x.nbytes // 30
    assert int(found) == of(x.transpose(0, 2).contiguous())


def test_an_empty_list_and_empty_tensors_have_a_checksum() -> None:
    assert checksum().dtype == torch.int64
    assert of(torch.zeros(0, 3)) != of(torch.zeros(3, 0))
