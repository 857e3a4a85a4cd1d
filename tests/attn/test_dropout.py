"""The op ringtile::dropout: which features stay, against Python integers; and that they stay as if by chance.

The published numbers of the generator, every dtype and tail, and the exact threshold are in tests/c/test_dropout.c.
"""

from __future__ import annotations

import math

import pytest
import torch
from ringtile import RefusedError, ops
from torch import Tensor

SEED, STREAM = 1234, 0xC0FFEE


def places_of(rows: int, positions: int) -> Tensor:
    """Of the tokens (row, position), row after row."""
    grid = torch.meshgrid(torch.arange(rows), torch.arange(positions), indexing="ij")
    return torch.stack(grid, dim=-1).flatten(0, 1)


def kept(
    places: Tensor, features: int, p: float = 0.25, seed: int = SEED, step: int = 0, stream: int = STREAM
) -> Tensor:
    """Whether each feature of each token stays: bool (T, F)."""
    return ops.dropout(torch.ones(places.size(0), features), places, p, seed, step, stream) != 0


def random_word(row: int, position: int, feature: int, seed: int, step: int, stream: int) -> int:
    """Philox4x32-10 in Python integers."""
    word, keys = [feature // 4, position, row, stream], [seed, step]
    for _ in range(10):
        a, b = 0xD2511F53 * word[0], 0xCD9E8D57 * word[2]
        word = [b >> 32 ^ word[1] ^ keys[0], b % 2**32, a >> 32 ^ word[3] ^ keys[1], a % 2**32]
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    return word[feature % 4]


@pytest.mark.in_torch_too
def test_every_feature_stays_or_goes_as_its_random_word_says() -> None:
    places, p, step = torch.tensor([[0, 0], [3, 70000], [2**32 - 1, 2**31]]), 0.3, 2**32 - 1
    got = kept(places, 11, p, step=step)
    for token, (row, position) in enumerate(places.tolist()):
        for feature in range(11):
            word = random_word(row, position, feature, SEED, step, STREAM)
            assert bool(got[token, feature]) == (word < round((1 - p) * 2**32))


@pytest.mark.in_torch_too
def test_the_mask_of_a_token_depends_on_its_place_alone() -> None:
    places, order = places_of(3, 40), torch.randperm(120)
    whole = kept(places, 37)
    assert torch.equal(kept(places[order], 37), whole[order])
    tiles = [kept(tile.contiguous(), 37) for tile in places.split(7)]
    assert torch.equal(torch.cat(tiles), whole)
    assert torch.equal(kept(places, 21), whole[:, :21])


def chi_square(counts: Tensor, expected: Tensor | float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def bound(freedom: int) -> float:
    """Chi-square exceeds freedom + 2 sqrt(freedom t) + 2 t with probability at most exp(-t) (Laurent & Massart, 2000,
    lemma 1); t = 20. The seed is fixed, so that the test cannot fail by chance later."""
    return freedom + 2 * math.sqrt(freedom * 20) + 2 * 20


def test_masks_of_neighbors_are_independent() -> None:
    """The four outcomes of each pair occur as often as those of two independent draws: 3 degrees of freedom."""
    p, places = 0.25, places_of(9, 129)
    mask = kept(places, 65, p).view(9, 129, 65)
    base = mask[:8, :128, :64]
    others = {
        "row": mask[1:, :128, :64],
        "position": mask[:8, 1:, :64],
        "feature": mask[:8, :128, 1:],
        "step": kept(places, 65, p, step=1).view_as(mask)[:8, :128, :64],
        "seed": kept(places, 65, p, seed=SEED + 1).view_as(mask)[:8, :128, :64],
        "module": kept(places, 65, p, stream=STREAM + 1).view_as(mask)[:8, :128, :64],
    }
    chance = torch.tensor([p * p, p * (1 - p), p * (1 - p), (1 - p) ** 2]) * base.numel()
    for name, other in others.items():
        counts = torch.bincount((2 * base.int() + other.int()).flatten(), minlength=4)
        assert chi_square(counts, chance) <= bound(3), name


@pytest.mark.in_torch_too
@pytest.mark.parametrize("dtype", ops.FLOAT_DTYPES)
def test_forward_and_backward_are_those_of_the_mask(dtype: torch.dtype) -> None:
    """One rounding of the factor, one of the product, one to dtype: 2 eps of the dtype cover them."""
    places, p = places_of(2, 5), 0.3
    x = torch.randn(10, 24).to(dtype)[:, :21].requires_grad_()
    dy = torch.randn(21, 10).to(dtype).t()
    factor = kept(places, 21, p).double() / (1 - p)
    y = ops.dropout(x, places, p, SEED, 0, STREAM)
    (dx,) = torch.autograd.grad(y, x, dy)
    for got, from_ in ((y, x), (dx, dy)):
        expected = from_.double() * factor
        assert got.dtype == dtype
        assert bool(((got.double() - expected).abs() <= 2 * torch.finfo(dtype).eps * expected.abs()).all())


@pytest.mark.in_torch_too
def test_second_derivatives_are_right_and_transforms_are_refused() -> None:
    x, places = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), places_of(1, 3)
    assert torch.autograd.gradgradcheck(lambda x: ops.dropout(x * x, places, 0.3, 1, 2, 3), x)
    with pytest.raises(RefusedError, match=r"dropout inside torch\.func"):
        torch.func.grad(lambda x: ops.dropout(x, places, 0.3, 1, 2, 3).sum())(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": 1.5}, "a probability must be in"),
        ({"seed": 2**32}, "seed is 4294967296, expected 0"),
        ({"stream": -1}, "stream is -1, expected 0"),
        ({"places": torch.zeros(4, 2, dtype=torch.int64)}, "places has shape"),
        ({"places": torch.zeros(3, 2)}, "places has dtype"),
        ({"x": torch.zeros(3)}, "x has shape"),
        ({"x": torch.zeros(3, 5, dtype=torch.int64)}, "is not supported"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    arguments = {"x": torch.zeros(3, 5), "places": places_of(1, 3), "p": 0.5, "seed": 1, "step": 2, "stream": 3}
    with pytest.raises(RuntimeError, match=message):
        torch.ops.ringtile.dropout(*{**arguments, **change}.values())
