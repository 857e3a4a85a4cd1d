"""A gated MLP of the usual structure, and inputs for it."""

import torch
from counting import assert_near
from ringtile.tiled.glu import Glu, find_glu
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, INTERMEDIATE = 12, 20  # E, F
ACTIVATIONS = {
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "relu": nn.ReLU(),
}


class Gated(nn.Module):
    def __init__(self, activation: str = "silu", bias: bool = False, dropout: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias)
        self.act_fn = ACTIVATIONS[activation]
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        prod = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(functional.dropout(prod, self.dropout, self.training) if self.dropout else prod)


class Fused(nn.Module):
    """Gate and up by one linear layer, as in Phi-3 and GLM; gate_half: which of its halves the gate is."""

    def __init__(self, activation: str = "silu", bias: bool = False, gate_half: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_up_proj = nn.Linear(HIDDEN, 2 * INTERMEDIATE, bias)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias)
        self.act_fn, self.gate_half = ACTIVATIONS[activation], gate_half

    def forward(self, x: Tensor) -> Tensor:
        halves = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(halves[1 - self.gate_half] * self.act_fn(halves[self.gate_half]))


def inputs(*shape: int, dtype: torch.dtype = torch.float64, requires_grad: bool = True) -> tuple[Tensor, Tensor]:
    """x (*shape, E) and the gradient of the output."""
    generator = torch.Generator().manual_seed(2)
    x, dout = (torch.randn(*shape, HIDDEN, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return x.requires_grad_(requires_grad), dout


def gradients(out: Tensor, dout: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, leaves, dout)


def assert_gradients_near(
    out: Tensor, oracle: Tensor, dout: Tensor, leaves: tuple[Tensor, ...], num_terms: int
) -> None:
    """Both outputs have the same gradients, as far as sums of num_terms products can."""
    for ours, theirs in zip(gradients(out, dout, *leaves), gradients(oracle, dout, *leaves), strict=True):
        assert_near(ours, theirs, num_terms)


def glu_of(module: nn.Module) -> Glu | None:
    return find_glu(module, type(module).forward)
