"""The accuracy rule, "not less exact than torch", bounds in units in the last place (ulp), and of optimizer steps.

Rows are those of the last dimension: one token and head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from oracle import Attention
from torch import Tensor

# Kernels that multiply in 16 bits (AMX, Tensor Cores; cuDNN, FlashAttention and torch's own among them) round each
# weight once, relative to the maximum that they know then. Over 24 draws of (2, 256, 4, 64), a float64 model that
# rounds relative to a running maximum of 64 keys had 0.95 to 0.99 of the mean square error of one that rounds relative
# to the maximum of the row: who rounds when is worth 5 %, and the rule allows twice that.
SHIFT = 1.1
CHANCE = 1e-4  # how often two draws of one distribution may exceed the rule


def slack(num_numbers: int) -> tuple[float, float]:
    """Return by how much the mean square and the largest of n errors may exceed those of another draw of them.

    Errors are normal in units of their row's, so a mean square deviates by (2 / n)^(1/2) of itself, and the logarithm
    of the ratio of two by 2 / n^(1/2): CHANCE lies 3.7 deviations away. The largest of n has a Gumbel distribution of
    scale 1 / (2 ln n) of itself; two differ by more than x with probability 1 / (1 + exp(2 x ln n)).
    """
    of_largest = math.log(1 / CHANCE - 1) / (2 * math.log(max(num_numbers, 2)))
    return SHIFT * math.exp(3.72 * 2 / num_numbers**0.5), SHIFT**0.5 * math.exp(of_largest)


def assert_not_less_exact(mine: Tensor, theirs: Tensor, exact: Tensor, name: str = "", factor: float = 1.0) -> None:
    """Check the accuracy rule: the mean square error and, in units of the error of its row, the largest error of mine
    are at most those of theirs, as far as two draws of one rounding agree.

    factor: times as much of the mean square, where mine rounds more often than theirs by design. If theirs rounds only
    once, the largest error is one rounding of a large number after some 64 roundings of the state, and chance decides
    whose is larger: errors of that size pass. A row's error is that of both: a row that attends two keys has many
    times the others', and which of the two is lucky there is chance.
    """
    my_error, their_error = ((x.double() - exact).abs() for x in (mine, theirs.detach()))
    of_square, of_largest = slack(exact.numel())
    squares = [error.square().mean().item() for error in (my_error, their_error)]
    assert squares[0] <= factor * of_square * squares[1], (name, "mean square error", *squares)
    once = (torch.finfo(mine.dtype).eps / 2 + 64 * torch.finfo(torch.float32).eps) * exact.abs().max()
    unit = (my_error.square() + their_error.square()).mean(-1, keepdim=True).sqrt().clamp(min=1e-300)
    largest = [x.max().item() for x in (my_error.where(my_error > once, 0.0) / unit, their_error / unit)]
    assert largest[0] <= factor**0.5 * of_largest * largest[1], (name, "largest error", *largest)


def assert_within_ulp(
    got: Attention, expected: Attention, number: int, dtype: torch.dtype, whole: Attention | None = None
) -> None:
    """Call `assert_tensor_within_ulp` for each field. whole: expected unless given, as it must be where most of
    expected is masked."""
    for name, x, y, size in zip(Attention._fields, got, expected, whole or expected, strict=True):
        assert_tensor_within_ulp(name, x, y, number, dtype, size)


def assert_tensor_within_ulp(
    name: str, got: Tensor, expected: Tensor, number: int, dtype: torch.dtype, whole: Tensor
) -> None:
    """Check that numbers of this field of Attention differ by at most so many ulp, in that dtype, of the largest
    magnitude in their row of whole, and are finite where expected is.

    A row of out is one query and head. Gradients are sums over S terms that cancel, so a row's own magnitude says
    nothing of its rounding; their row, like that of lse, is one head of one sequence.
    """
    row_dims: int | tuple[int, int] = -1 if name in ("out", "lse") else (1, 3)
    finite = expected.isfinite()
    assert torch.equal(finite, got.isfinite()), name
    x, y = got.double().where(finite, 0.0), expected.double().where(finite, 0.0)
    size = whole.double().where(whole.isfinite(), 0.0).abs().amax(row_dims, keepdim=True)
    error = (x - y).abs() / (torch.finfo(dtype).eps * size).clamp(min=1e-300)
    assert error.max() <= number, (name, error.max())


def assert_same_steps(got: Sequence[float], expected: Sequence[float], per_step: float) -> None:
    """Check numbers of successive optimizer steps, such as losses: those of step n to n times per_step, relative.

    Each step adds its own rounding to that of the weights that the steps before left.
    """
    assert len(got) == len(expected)
    for step, (x, y) in enumerate(zip(got, expected, strict=True), 1):
        assert x == pytest.approx(y, rel=step * per_step), (step, got, expected)
