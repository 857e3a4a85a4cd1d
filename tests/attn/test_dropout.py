"""The op ringtile::dropout: which features stay, against Python integers.

The published numbers of the generator, every dtype and tail, and the exact threshold are in tests/c/test_dropout.c.
"""

from __future__ import annotations

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


@pytest.mark.in_torch_too
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
        ops.dropout(*{**arguments, **change}.values())  # type: ignore[arg-type]
