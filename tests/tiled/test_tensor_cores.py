"""What tiles do on CUDA, on CPU tensors: `as_on` chooses as there, and torch's product with out_dtype is given to the
CPU, which lacks it."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import ringtile
import torch
from counting import relative_error
from ringtile.planner.live import _PRODUCTS
from ringtile.tiled import weight_grad
from ringtile.tiled.tiles import as_on
from ringtile.tiled.weight_grad import add_linear_grads_
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kernel = torch.library.Library("aten", "IMPL")
    kernel.impl("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype), "CPU")
    tried = {(torch.device("cpu"), dtype): False for dtype in (torch.bfloat16, torch.float16)}
    monkeypatch.setattr(weight_grad, "_tried", tried)
    with as_on("cuda"):
        yield
    kernel._destroy()


class Products(TorchDispatchMode):
    """The dtypes of both factors of each matrix product, and the most elements of a tensor made from another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[tuple[torch.dtype, torch.dtype]] = []
        self.largest_cast = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (first := _PRODUCTS.get(func.overloadpacket)) is not None:
            self.factors.append((args[first].dtype, args[first + 1].dtype))
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.largest_cast = max(self.largest_cast, out.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1000, 7])
def test_weight_gradients_are_sums_of_exact_products(
    dtype: torch.dtype, num_rows: int, cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The factors are multiplied as they are, and added in float32 to the sum, a few rows at a time."""
    monkeypatch.setattr(weight_grad, "PRODUCT_BYTES", num_rows * 4 * 24)
    torch.manual_seed(0)
    dout, x, bias = torch.randn(50, 40).to(dtype), torch.randn(50, 24).to(dtype), torch.zeros(40)
    total = torch.randn(40, 24)
    exact = total.double() + dout.double().t() @ x.double()
    with Products() as products:
        add_linear_grads_(total, bias, dout, x)
    assert set(products.factors) == {(dtype, dtype)}
    assert len(products.factors) == -(-40 // num_rows)
    assert products.largest_cast == 0
    assert relative_error(total, exact) <= 51 * torch.finfo(torch.float32).eps  # 51 terms
    assert relative_error(bias, dout.double().sum(0)) <= 50 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("rounds", "copies", "calls"), [(False, False, [1, 0]), (True, False, [0, 4]), (False, True, [0, 4])]
)
def test_products_are_added_in_place_where_torch_does_so(
    rounds: bool, copies: bool, calls: list[int], cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried once for a dtype; not where the product is rounded before, or the sum is elsewhere afterwards."""
    added, original = [0, 0], torch.mm

    def addmm(total: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        added[0] += 1
        product = (a.to(out_dtype) @ b.to(out_dtype)).to(a.dtype if rounds else out_dtype).to(out_dtype)
        return out.set_(total + product) if copies else out.add_(product)  # type: ignore[call-overload]

    def mm(*args: Any, **options: Any) -> Tensor:
        added[1] += 1
        return original(*args, **options)

    monkeypatch.setattr(weight_grad, "_tried", {})
    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(weight_grad, "PRODUCT_BYTES", 10 * 4 * 24)
    torch.manual_seed(0)
    dout, x, total = torch.randn(50, 40).bfloat16(), torch.randn(50, 24).bfloat16(), torch.randn(40, 24)
    for _ in range(2):
        exact, sum_at = total.double() + dout.double().t() @ x.double(), total.data_ptr()
        add_linear_grads_(total, None, dout, x)
        assert relative_error(total, exact) <= 51 * torch.finfo(torch.float32).eps
        assert total.data_ptr() == sum_at
    assert added == [1 + 2 * calls[0], 2 * calls[1]]  # with the trial


def test_other_dtypes_are_multiplied_as_before(cuda: None) -> None:
    for dtype in (torch.float32, torch.float64):
        dout, x = torch.randn(50, 40, dtype=dtype), torch.randn(50, 24, dtype=dtype)
        total = torch.zeros(40, 24, dtype=dtype)
        add_linear_grads_(total, None, dout, x)
        torch.testing.assert_close(total, dout.t() @ x)


class Glu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(24, 40, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(40, 24, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("own_forward", [False, True])
def test_mlp_multiplies_nothing_in_float32(own_forward: bool, cuda: None) -> None:
    """And its gradients are those of a CPU's tiles but for the order of float32 sums: they round to bfloat16 alike, or
    one ulp apart. Where terms, of at most 6, cancel: two sums of 50, rounded with random signs, 2 sqrt(50) 6 eps, are
    1e-5 apart."""
    torch.manual_seed(0)
    module, x = Glu().bfloat16(), torch.randn(1, 50, 24).bfloat16()
    tiled = functools.partial(ringtile.tiled_mlp, module, x, 16, use_original_mlp=own_forward)
    with Products() as products:
        gradients = torch.autograd.grad(tiled().float().sum(), list(module.parameters()))
    assert set(products.factors) == {(torch.bfloat16, torch.bfloat16)}
    with as_on("cpu"):
        on_cpu = torch.autograd.grad(tiled().float().sum(), list(module.parameters()))
    for ours, theirs in zip(gradients, on_cpu, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-5)


@pytest.mark.parametrize("master", [torch.bfloat16, torch.float32])
def test_loss_multiplies_nothing_in_float32_and_is_as_near_as_autograd(master: torch.dtype, cuda: None) -> None:
    """The gradient of the weight, against float64, next to plain autograd's, which rounds dlogits as we do. Where the
    weight is float32, under autocast, nothing is rounded at the end."""
    torch.manual_seed(0)
    hidden = torch.randn(512, 64).bfloat16()
    weight = (torch.randn(1000, 64) / 8).bfloat16().to(master).requires_grad_()
    labels = torch.randint(1000, (512,))
    with torch.autocast("cpu", dtype=torch.bfloat16), Products() as products:
        loss = ringtile.tiled_linear_cross_entropy(hidden, weight, labels, tile_tokens=100)
    assert set(products.factors) == {(torch.bfloat16, torch.bfloat16)}
    (ours,) = torch.autograd.grad(loss, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = functional.cross_entropy(functional.linear(hidden, weight).float(), labels)
    (theirs,) = torch.autograd.grad(plain, weight)
    double = weight.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(functional.cross_entropy(functional.linear(hidden.double(), double), labels), double)
    ours, theirs = ((gradient.double() - exact).norm() for gradient in (ours, theirs))
    assert ours <= 1.05 * theirs
