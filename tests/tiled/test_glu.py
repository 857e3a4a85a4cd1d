"""Which modules the tiled MLP recognizes as plain GLUs; all others run their own forward."""

import pytest
import torch
from counting import assert_near
from gated_mlp import HIDDEN, INTERMEDIATE, Fused, Gated, assert_gradients_near, glu_of, inputs
from ringtile.tiled.mlp import tiled_mlp
from torch import Tensor, nn
from torch.nn import functional


class Scaled(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x) * 0.5) * self.up_proj(x))


class Negated(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(-x))


class Branching(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else -super().forward(x)


class Adapted(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * (self.up_proj(x) + self.adapter(x)))


class OtherOrder(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.mul(self.up_proj(x), functional.silu(self.gate_proj(x))))


class SameHalf(Fused):
    def forward(self, x: Tensor) -> Tensor:
        gate, _ = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(gate * self.act_fn(gate))


class HalvesOfTwo(Fused):
    def forward(self, x: Tensor) -> Tensor:
        gate, _ = self.gate_up_proj(x).chunk(2, dim=-1)
        _, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


class HalvesOfTokens(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(HalvesOfTokens, self).forward(half) for half in x.chunk(2, dim=0)])


@pytest.mark.parametrize("kind", [Scaled, Negated, Branching, Adapted, SameHalf, HalvesOfTwo, HalvesOfTokens])
def test_a_module_that_only_resembles_a_glu_runs_its_own_forward(kind) -> None:
    module = kind().double()
    assert glu_of(module) is None
    x, dout = inputs(9)
    tile = 9 if kind is Branching else 4
    assert_gradients_near(tiled_mlp(module, x, tile), module(x), dout, (x, *module.parameters()), INTERMEDIATE)


def test_a_glu_in_another_order_is_found() -> None:
    module = OtherOrder().double()
    assert glu_of(module) is not None
    x, dout = inputs(9)
    assert_gradients_near(tiled_mlp(module, x, 4), module(x), dout, (x, *module.parameters()), INTERMEDIATE)


@pytest.mark.parametrize("gate_half", [0, 1])
def test_fused_gate_and_up_are_found(gate_half) -> None:
    module = Fused(bias=True, gate_half=gate_half).double()
    assert glu_of(module) is not None
    x, dout = inputs(9)
    assert_gradients_near(tiled_mlp(module, x, 4), module(x), dout, (x, *module.parameters()), 2 * INTERMEDIATE)


def test_hooks_of_a_projection_are_not_bypassed() -> None:
    module = Gated().double()
    handle = module.up_proj.register_forward_hook(lambda *call: 2 * call[2])
    assert glu_of(module) is None
    x, _ = inputs(9)
    assert_near(tiled_mlp(module, x, 4), module(x), num_terms=INTERMEDIATE)
    handle.remove()
    assert glu_of(module) is not None


class Counting(Gated):
    """Writes into itself where a symbol gets."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "attribute":
            self.calls += 1
        elif self.how == "buffer in place":
            self.seen += 1
        elif self.how == "buffer":
            self.seen = self.seen + 1
        else:
            torch.rand(())
        return super().forward(x)


@pytest.mark.parametrize("how", ["attribute", "buffer in place", "buffer", "random numbers"])
def test_a_forward_that_writes_is_called_no_more_often_than_there_are_tiles(how) -> None:
    module, (x, _) = type(how, (Counting,), {})(how).double(), inputs(9)  # a class of its own
    for _ in range(2):
        before = module.calls, module.seen.item(), torch.default_generator.get_state()
        assert glu_of(module) is None
        after = module.calls, module.seen.item(), torch.default_generator.get_state()
        assert before[:2] == after[:2]
        assert torch.equal(before[2], after[2])
    with torch.no_grad():
        tiled_mlp(module, x, 3)
    assert module.calls + module.seen.item() == (0 if how == "random numbers" else 3)


def test_weight_norm_trains_through_the_glu_kernels() -> None:
    module = Gated().double()
    nn.utils.parametrizations.weight_norm(module.up_proj)
    assert glu_of(module) is not None
    x, dout = inputs(9)
    assert_gradients_near(tiled_mlp(module, x, 4), module(x), dout, (x, *module.parameters()), INTERMEDIATE)
