"""Weight gradients by the CPU's kernel, which multiplies bfloat16 as it is, against float64."""

import contextlib

import pytest
import torch
from counting import relative_error
from kernels_off import kernels_off
from ringtile import ops, tiled_linear_cross_entropy
from ringtile.tiled.weight_grad import MIN_KERNEL_TOKENS, add_linear_grads_
from torch import Tensor
from torch.nn import functional

EPS = torch.finfo(torch.float32).eps


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each call of the kernel, of a CPU that has instructions for bfloat16."""
    tokens: list[int] = []
    kernel = ops.weight_grad_add_

    def counted(dout: Tensor, x: Tensor, total: Tensor) -> None:
        tokens.append(x.size(0))
        kernel(dout, x, total)

    monkeypatch.setattr(ops, "cpu_isa", lambda: "amx_bf16")
    monkeypatch.setattr(ops, "weight_grad_add_", counted)
    return tokens


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


LAYOUTS = {  # of dout (T, F)
    "rows": lambda dout: dout,
    "columns of a wider matrix": lambda dout: functional.pad(dout, (5, 6))[:, 5:-6],
    "transposed": lambda dout: dout.t().contiguous().t(),
    "one row": lambda dout: dout[:1].expand_as(dout),
    "one column": lambda dout: dout[:, :1].expand_as(dout),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_bfloat16_is_summed_in_float32(layout: str, num_threads: int, calls: list[int]) -> None:
    """T + 1 terms: each of as many roundings is of at most the sum of all."""
    dout, x, total = LAYOUTS[layout](normal(67, 203)), normal(67, 90), normal(203, 90, dtype=torch.float32)
    exact = total.double() + dout.double().t() @ x.double()
    largest = total.double().abs() + dout.double().abs().t() @ x.double().abs()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        add_linear_grads_(total, None, dout, x)
    finally:
        torch.set_num_threads(before)
    assert bool(((total - exact).abs() <= 68 * EPS * largest).all())
    assert calls == [67]


def test_what_the_kernel_does_not_take_is_added_by_torch(calls: list[int]) -> None:
    """Few tokens, other dtypes, a sum in columns."""
    for num_tokens, dtype, in_columns in (
        (MIN_KERNEL_TOKENS - 1, torch.bfloat16, False),
        (50, torch.float16, False),
        (50, torch.float32, False),
        (50, torch.bfloat16, True),
    ):
        dout, x = normal(num_tokens, 40, dtype=dtype), normal(num_tokens, 24, dtype=dtype)
        total = torch.zeros(24, 40).t() if in_columns else torch.zeros(40, 24)
        add_linear_grads_(total, None, dout, x)
        assert relative_error(total, dout.double().t() @ x.double()) <= 50 * EPS
    assert calls == []


def test_torch_operations_stand_in_for_a_wrong_kernel(calls: list[int]) -> None:
    dout, x, total = normal(67, 40), normal(67, 24), torch.zeros(40, 24)
    with kernels_off():
        add_linear_grads_(total, None, dout, x)
    assert calls == [67]
    assert relative_error(total, dout.double().t() @ x.double()) <= 67 * EPS


def test_what_is_not_finite_spreads_as_in_torch(calls: list[int]) -> None:
    dout, x = normal(64, 40), normal(64, 24)
    dout[3, 7], dout[40, 8], x[5, 2], x[6, 23] = torch.nan, torch.inf, -torch.inf, torch.nan
    dout[5, 0] = 0  # times -inf
    total = torch.zeros(40, 24)
    add_linear_grads_(total, None, dout, x)
    assert torch.equal(total.isfinite(), (dout.float().t() @ x.float()).isfinite())
    assert calls == [64]


@pytest.mark.parametrize("op", ["kernel", "torch"])
@pytest.mark.parametrize(
    ("dout", "x", "total", "message"),
    [
        (normal(5), normal(5, 3), torch.zeros(4, 3), "dout has shape"),
        (normal(5, 4), normal(6, 3), torch.zeros(4, 3), "x has shape"),
        (normal(5, 4), normal(5, 3).half(), torch.zeros(4, 3), "x has dtype"),
        (normal(5, 4), normal(5, 3), torch.zeros(3, 4), "sum has shape"),
        (normal(5, 4), normal(5, 3), torch.zeros(4, 3).bfloat16(), "sum has dtype"),
        (normal(5, 4), normal(5, 3), torch.zeros(3).expand(4, 3), "an output must not overlap itself"),
        (normal(5, 4).int(), normal(5, 3).int(), torch.zeros(4, 3), "dtype .* is not supported"),
    ],
)
def test_wrong_arguments_are_refused_by_name(dout: Tensor, x: Tensor, total: Tensor, message: str, op: str) -> None:
    device = kernels_off() if op == "torch" else contextlib.nullcontext()
    with device, pytest.raises(RuntimeError, match=f"weight_grad_add_: (sum: )?{message}"):
        ops.weight_grad_add_(dout, x, total)


def test_the_losses_terms_of_labels_are_not_rounded(calls: list[int]) -> None:
    """Against float64 of the same logits. A float32 weight, under autocast, so that the sum is not rounded: the terms
    of all other classes alone are off by half an ulp of bfloat16, and each of 512 terms by 32 roundings of its softmax
    and those of their sum."""
    hidden, labels = normal(512, 64), torch.randint(1000, (512,), generator=torch.Generator().manual_seed(0))
    weight = (normal(1000, 64, dtype=torch.float32) / 8).bfloat16().float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = tiled_linear_cross_entropy(hidden, weight, labels, reduction="sum", tile_tokens=128)
    (ours,) = torch.autograd.grad(loss, weight)
    p = torch.cat([torch.mm(x, weight.detach().bfloat16().t()) for x in hidden.split(128)]).double().softmax(1)
    is_label = functional.one_hot(labels, 1000)
    x, eps = hidden.double(), torch.finfo(torch.bfloat16).eps
    terms, others = ((each.t() @ x.abs()) for each in ((p - is_label).abs(), p * (1 - is_label)))
    bound = eps / 2 * others + (32 + 512) * EPS * terms
    assert bool(((ours - (p - is_label).t() @ x).abs() <= bound).all())
    assert calls == [128] * 4
