"""The tiled MLP against the untiled module in float64, with a test for each known bug of other tiled MLPs."""

import gc
import sys
import threading
import weakref

import pytest
import torch
from counting import Alive, Counting, assert_near, relative_error
from gated_mlp import ACTIVATIONS, HIDDEN, INTERMEDIATE, Fused, Gated, assert_gradients_near, glu_of, gradients, inputs
from ringtile import InputError, RefusedError
from ringtile.tiled.mlp import tiled_mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Experts(nn.Module):
    """A mixture of experts: hidden states, router logits with one row per flat token, the chosen experts, None."""

    def __init__(self, num_experts: int = 3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.router = nn.Linear(HIDDEN, num_experts)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        rows = x.view(-1, x.size(-1))
        logits = self.router(rows)
        chosen = logits.argmax(-1)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            picked = (chosen == index).nonzero().squeeze(1)
            if picked.numel():
                weight = logits.softmax(-1)[picked, index, None]
                out = out.index_add(0, picked, weight * expert(rows[picked]))
        return out.view_as(x), logits, chosen, None


@pytest.mark.in_torch_too(long=True)
@pytest.mark.parametrize("use_original_mlp", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", [Gated, Fused])
def test_output_and_gradients_equal_the_untiled_module(kind, activation, bias, use_original_mlp) -> None:
    module = kind(activation, bias).double()
    assert glu_of(module) is not None
    x, dout = inputs(2, 11)  # B = 2: a tile crosses from one row of the batch to the next
    out = tiled_mlp(module, x, tile_tokens=5, use_original_mlp=use_original_mlp)
    oracle = module(x)
    assert_near(out, oracle, num_terms=INTERMEDIATE)
    assert_gradients_near(out, oracle, dout, (x, *module.parameters()), 22)


@pytest.mark.parametrize("counts", [(1, 3, 16, 17, 31), pytest.param(range(1, 65), marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("use_original_mlp", [False, True])
def test_every_number_of_tokens_and_tiles(use_original_mlp, counts) -> None:
    """Others lose gradients when torch.chunk returns fewer pieces than requested, e.g. 1000 tokens in 62 tiles."""
    module = Gated().float()
    double = Gated().double()
    for num_tokens in counts:
        x, dout = inputs(num_tokens, dtype=torch.float32)
        x_double = x.detach().double().requires_grad_()
        oracle = gradients(double(x_double), dout.double(), x_double, *double.parameters())
        for tile_tokens in {-(-num_tokens // num_tiles) for num_tiles in range(1, 17)}:
            out = tiled_mlp(module, x, tile_tokens, use_original_mlp)
            for ours, theirs in zip(gradients(out, dout, x, *module.parameters()), oracle, strict=True):
                assert_near(ours, theirs, num_terms=max(num_tokens, INTERMEDIATE))


@pytest.mark.parametrize("use_original_mlp", [False, True])
def test_a_weight_that_was_freed_is_named(use_original_mlp) -> None:
    """As FSDP leaves those of a module that it has not gathered: torch itself reads from nowhere."""
    module = Gated().double()
    weight = next(module.parameters())
    weight.untyped_storage().resize_(0)
    with pytest.raises(InputError, match=f"weight 0 of the module needs {weight.nbytes} bytes but its storage has 0"):
        tiled_mlp(module, inputs(3)[0], use_original_mlp=use_original_mlp)


@pytest.mark.parametrize("use_original_mlp", [False, True])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 1), (2, 3, 4), (0,), (2, 0)])
def test_shapes(shape, use_original_mlp) -> None:
    module = Gated(bias=True).double()
    x, dout = inputs(*shape)
    out = tiled_mlp(module, x, 4, use_original_mlp)
    assert out.shape == x.shape
    assert_gradients_near(out, module(x), dout, (x, *module.parameters()), INTERMEDIATE)


def test_strided_input_and_gradient() -> None:
    module = Gated().double()
    x = torch.randn(6, 5, HIDDEN, dtype=torch.float64).transpose(0, 1).requires_grad_()
    for dout in (
        torch.ones(1, dtype=torch.float64).expand(5, 6, HIDDEN),
        torch.randn(6, 5, HIDDEN).double().transpose(0, 1),
    ):
        for use_original_mlp in (False, True):
            out = tiled_mlp(module, x, 4, use_original_mlp)
            assert_gradients_near(out, module(x), dout, (x, *module.parameters()), 30)


# ---- how much is computed, how much is kept -----------------------------------------------------

NUM_TOKENS = 24
UNIT = NUM_TOKENS * HIDDEN * INTERMEDIATE  # T*E*F


@pytest.mark.parametrize(("use_original_mlp", "products"), [(False, 11), (True, 12)])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", [Gated, Fused])
def test_products_computed(kind, use_original_mlp, products, checkpointed) -> None:
    """22 T*E*F flops on the GLU kernels, 24 otherwise, and no more inside a checkpointed layer."""
    module, norm = kind(), nn.LayerNorm(HIDDEN)
    x, dout = inputs(NUM_TOKENS, dtype=torch.float32)

    def layer(x: Tensor) -> Tensor:
        return x + tiled_mlp(module, norm(x), 5, use_original_mlp)

    with Counting() as count:
        out = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        out.backward(dout)
    assert count.flops == 2 * products * UNIT


@pytest.mark.parametrize("frozen", ["gate_proj", "up_proj", "down_proj"])
def test_frozen_weight_skips_its_product(frozen) -> None:
    module = Gated(bias=True)
    getattr(module, frozen).requires_grad_(False)
    x, dout = inputs(NUM_TOKENS, dtype=torch.float32)
    with Counting() as count:
        tiled_mlp(module, x, 5).backward(dout)
    assert count.flops == 2 * 10 * UNIT
    assert {name for name, p in module.named_parameters() if p.grad is None} == {f"{frozen}.weight", f"{frozen}.bias"}


@pytest.mark.parametrize("use_original_mlp", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_no_intermediate_of_more_than_one_tile(use_original_mlp, checkpointed) -> None:
    """Concatenating checkpointed chunks would keep all chunks' intermediates alive in the backward."""
    module = Gated()
    num_tokens, tile = 600, 16
    x, dout = inputs(num_tokens, dtype=torch.float32)

    def run(x: Tensor) -> Tensor:
        return tiled_mlp(module, x, tile, use_original_mlp)

    with Counting() as count:
        (checkpoint(run, x, use_reentrant=False) if checkpointed else run(x)).backward(dout)
    assert count.largest == num_tokens * HIDDEN  # out and dx; an intermediate would be num_tokens * INTERMEDIATE


@pytest.mark.parametrize("use_original_mlp", [False, True])
def test_no_more_is_alive_than_results_and_one_tile(use_original_mlp) -> None:
    """Elements alive for one tile of t tokens, besides the output, or dx and the weights' gradients.

    GLU kernels: gate, up and their product, t F each. Any module, forward: a copy of x (t E), act(gate), up and their
    product; backward: the copy, the output (t E), gate, act(gate), up, and the gradients of the product and of both
    its factors.
    """
    num_tokens, tile = 256, 16
    module = Gated()
    x, dout = inputs(num_tokens, dtype=torch.float32)
    sizes = ((1, 3), (2, 6)) if use_original_mlp else ((0, 3), (0, 3))
    forward, backward = (tile * (num_e * HIDDEN + num_f * INTERMEDIATE) for num_e, num_f in sizes)
    with Alive(at_least=2) as alive:
        out = tiled_mlp(module, x, tile, use_original_mlp)
    assert alive.peak <= num_tokens * HIDDEN + forward
    with Alive(at_least=2) as alive:
        out.backward(dout)
    assert alive.peak <= num_tokens * HIDDEN + 3 * HIDDEN * INTERMEDIATE + backward


def test_nothing_is_kept_without_gradients() -> None:
    module = Gated()
    x, _ = inputs(NUM_TOKENS, dtype=torch.float32)
    with torch.no_grad():
        assert not tiled_mlp(module, x, 5).requires_grad


# ---- bugs of tiled MLPs elsewhere ---------------------------------------------------------------
#
# Bugs of DeepSpeed, Liger, axolotl and TRL, and the test that would catch each here:
#   fewer tiles than requested, so gradients were never marked ready          test_every_number_of_tokens_and_tiles
#   the forward tiled dim 1, the backward flat rows: wrong for B > 1          test_batch_rows_do_not_exchange_gradients
#   hooks of parameters fired once per tile                                   test_parameter_hooks_fire_once
#   gradients summed in bfloat16                                              test_bfloat16_weight_gradients_...
#   only the first output of a tuple had a gradient                           test_every_output_of_a_tuple_...
#   no graph if x needs no gradient                                           test_input_without_gradient_...
#   different dropout or autocast when recomputed                             test_dropout_..., test_autocast_...
#   collectives per tile, and another to agree on the number of tiles         test_tiled_engines.py
#   an MLP in a checkpointed layer computed three times                       test_products_computed
#   all tiles' intermediates alive at once                                    test_no_intermediate_of_more_than_one_tile


@pytest.mark.parametrize("module", [Gated(bias=True), Fused(), Experts()], ids=lambda module: type(module).__name__)
def test_batch_rows_do_not_exchange_gradients(module) -> None:
    """Tiles of 4 tokens over three rows of 7, so tiles cross rows; each row alone has the same gradient."""
    module = module.double()
    x, dout = inputs(3, 7)

    def run(x: Tensor) -> Tensor:
        out = tiled_mlp(module, x, 4)
        return out[0] if isinstance(out, tuple) else out

    (dx,) = gradients(run(x), dout, x)
    for row in range(3):
        alone = x.detach()[row : row + 1].requires_grad_()
        assert_near(dx[row : row + 1], gradients(run(alone), dout[row : row + 1], alone)[0], num_terms=INTERMEDIATE)


@pytest.mark.parametrize("use_original_mlp", [False, True])
def test_parameter_hooks_fire_once(use_original_mlp) -> None:
    """One autograd.backward per tile would fire them per tile: DDP fails, and hooks see partial sums."""
    module = Gated(bias=True).double()
    x, dout = inputs(2, 9)
    expected = gradients(module(x), dout, *module.parameters())
    seen: dict[str, list[Tensor]] = {name: [] for name, _ in module.named_parameters()}
    accumulated: list[str] = []
    for name, p in module.named_parameters():
        p.register_hook(lambda grad, name=name: seen[name].append(grad))
        p.register_post_accumulate_grad_hook(lambda p, name=name: accumulated.append(name))
    tiled_mlp(module, x, 4, use_original_mlp).backward(dout)
    assert sorted(accumulated) == sorted(seen)
    for (name, grads), oracle in zip(seen.items(), expected, strict=True):
        assert len(grads) == 1, name
        assert_near(grads[0], oracle, num_terms=18)


@pytest.mark.parametrize("use_original_mlp", [False, True])
def test_bfloat16_weight_gradients_do_not_lose_with_the_number_of_tiles(use_original_mlp) -> None:
    """Summing 62 tiles in bfloat16 would have 5 times the error of a single product."""
    module = Gated().bfloat16()
    x, dout = inputs(62 * 16, dtype=torch.bfloat16)
    double = Gated().bfloat16().double()
    oracle = gradients(double(x.double()), dout.double(), *double.parameters())
    plain = gradients(module(x), dout, *module.parameters())
    tiled = gradients(tiled_mlp(module, x, 16, use_original_mlp), dout, *module.parameters())
    for ours, theirs, exact in zip(tiled, plain, oracle, strict=True):
        assert relative_error(ours, exact) <= 1.1 * relative_error(theirs, exact)


def test_bfloat16_products_are_not_rounded_before_they_are_added() -> None:
    """A single linear layer: rounding each tile's product would double the error of rounding the sum."""
    module = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False).bfloat16()
    x, _ = inputs(62 * 16, dtype=torch.bfloat16)
    dout = torch.randn(62 * 16, 4 * HIDDEN, generator=torch.Generator().manual_seed(5)).bfloat16()
    exact = dout.double().t() @ x.detach().double()
    (tiled,) = gradients(tiled_mlp(module, x, 16), dout, module.weight)
    # The float32 error of a sum of 992 terms flips only the bfloat16 roundings that are close to a tie.
    assert (tiled.double() - exact).norm() <= 1.1 * (exact.bfloat16().double() - exact).norm()


def test_every_output_of_a_tuple_has_its_gradient() -> None:
    module = Experts().double()
    x, dout = inputs(2, 7)
    out, logits, chosen, nothing = tiled_mlp(module, x, 3)
    oracle = module(x)
    assert nothing is None
    assert torch.equal(chosen, oracle[2])
    assert not chosen.requires_grad
    dlogits = torch.randn(14, 3, dtype=torch.float64)
    leaves = (x, *module.parameters())
    for names in ((out, logits), (out,), (logits,)):
        used = [index for index, one in enumerate((out, logits)) if any(one is name for name in names)]
        douts = [(dout, dlogits)[index] for index in used]
        ours = torch.autograd.grad(names, leaves, douts, allow_unused=True, retain_graph=True)
        theirs = torch.autograd.grad([oracle[i] for i in used], leaves, douts, allow_unused=True, retain_graph=True)
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert_near(one, other, num_terms=14)


@pytest.mark.parametrize("use_original_mlp", [False, True])
def test_input_without_gradient_still_trains_the_weights(use_original_mlp) -> None:
    module = Gated().double()
    x, dout = inputs(2, 9, requires_grad=False)
    out = tiled_mlp(module, x, 4, use_original_mlp)
    assert_gradients_near(out, module(x), dout, tuple(module.parameters()), 18)


def test_dropout_is_the_same_when_recomputed() -> None:
    """out is linear in the down projection, so <d down, down> = <dout, out> if both passes drew the same dropout."""
    module = Gated(dropout=0.5).double()
    assert glu_of(module) is None
    x, dout = inputs(4, 9)
    out = tiled_mlp(module, x, 5)
    torch.rand(100)  # advances the generator between forward and backward
    state = torch.get_rng_state()
    (ddown,) = gradients(out, dout, module.down_proj.weight)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close((ddown * module.down_proj.weight).sum(), (dout * out).sum())
    assert not torch.equal(out, tiled_mlp(module, x, 5))


@pytest.mark.parametrize("use_original_mlp", [False, True])
def test_autocast_is_the_same_when_recomputed(use_original_mlp) -> None:
    module = Gated(bias=True)
    x, dout = inputs(2, 9, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, plain = tiled_mlp(module, x, 5, use_original_mlp), module(x)
    assert out.dtype == plain.dtype == torch.bfloat16
    double = Gated(bias=True).double()
    x_double = x.detach().double().requires_grad_()
    oracle = gradients(double(x_double), dout.double(), x_double, *double.parameters())
    leaves = (x, *module.parameters())
    ours = gradients(out, dout.bfloat16(), *leaves)
    for grad, leaf, exact in zip(ours, leaves, oracle, strict=True):
        assert grad.dtype == leaf.dtype == torch.float32
        # x, gate, up, prod, dout and dgate are rounded to bfloat16, each by up to eps / 2 of its size
        assert relative_error(grad, exact) <= 6 * torch.finfo(torch.bfloat16).eps


def test_autocast_around_the_backward_changes_nothing() -> None:
    module = Gated()
    x, dout = inputs(9, dtype=torch.float32)
    for use_original_mlp in (False, True):
        expected = gradients(tiled_mlp(module, x, 4, use_original_mlp), dout, *module.parameters())
        out = tiled_mlp(module, x, 4, use_original_mlp)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            grads = gradients(out, dout, *module.parameters())
        assert all(torch.equal(one, other) for one, other in zip(grads, expected, strict=True))


# ---- combined with other machinery --------------------------------------------------------------


@pytest.mark.parametrize("use_original_mlp", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layer_has_the_same_gradients(use_reentrant, use_original_mlp) -> None:
    module, norm = Gated().double(), nn.LayerNorm(HIDDEN).double()
    x, dout = inputs(2, 9)

    def layer(x: Tensor, run) -> Tensor:
        return x + run(norm(x))

    leaves = (x, *norm.parameters(), *module.parameters())
    checkpoint(
        lambda x: layer(x, lambda y: tiled_mlp(module, y, 4, use_original_mlp)), x, use_reentrant=use_reentrant
    ).backward(dout)
    for leaf, oracle in zip(leaves, gradients(layer(x, module), dout, *leaves), strict=True):
        assert_near(leaf.grad, oracle, num_terms=18)


class CheckpointedInside(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("use_original_mlp", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_checkpoint_inside_the_module(checkpointed, use_original_mlp) -> None:
    module = CheckpointedInside(bias=True).double()
    x, dout = inputs(2, 9)

    def run(x: Tensor) -> Tensor:
        return tiled_mlp(module, x, 4, use_original_mlp)

    out = checkpoint(run, x, use_reentrant=False) if checkpointed else run(x)
    assert_gradients_near(out, module(x), dout, (x, *module.parameters()), 18)


@pytest.mark.parametrize("use_original_mlp", [False, True])
def test_used_twice_in_one_graph_and_differentiated_twice(use_original_mlp) -> None:
    module = Gated().double()
    x, dout = inputs(2, 9)
    leaves = (x, *module.parameters())
    out = tiled_mlp(module, tiled_mlp(module, x, 4, use_original_mlp), 7, use_original_mlp)
    oracle = gradients(module(module(x)), dout, *leaves)
    for _ in range(2):
        for ours, theirs in zip(torch.autograd.grad(out, leaves, dout, retain_graph=True), oracle, strict=True):
            assert_near(ours, theirs, num_terms=22, num_roundings=8)


def test_threads_do_not_disturb_each_other() -> None:
    def work(index: int) -> None:
        module = modules[index]
        for _ in range(20):
            results[index] = gradients(tiled_mlp(module, x, 4), dout, *module.parameters())

    modules = [Gated(seed=index).double() for index in range(2)]
    x, dout = inputs(2, 9)
    expected = [gradients(tiled_mlp(module, x, 4), dout, *module.parameters()) for module in modules]
    results: dict[int, tuple[Tensor, ...]] = {}
    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, oracle in enumerate(expected):
        assert all(torch.equal(one, other) for one, other in zip(results[index], oracle, strict=True))


def test_inside_a_compiled_function() -> None:
    module = Gated().double()
    x, dout = inputs(2, 9)
    compiled = torch.compile(lambda x: torch.sin(tiled_mlp(module, torch.cos(x), 4)), backend="eager")
    assert_gradients_near(compiled(x), torch.sin(module(torch.cos(x))), dout, (x, *module.parameters()), 18)


# ---- refusals -----------------------------------------------------------------------------------


class Normalized(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)


def with_part(**parts: object) -> nn.Module:
    module = Gated()
    for name, part in parts.items():
        setattr(module.down_proj, name, part)
    return module


class Returning(nn.Module):
    def __init__(self, result) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: Tensor):
        return self.result(x)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Normalized(), "norm is a BatchNorm1d, which mixes tokens"),
        (with_part(conv=nn.Conv1d(4, 4, 3)), r"down_proj\.conv is a Conv1d, which mixes tokens"),
        (with_part(expert_capacity=3), "down_proj drops tokens beyond an expert's capacity"),
        (with_part(view=torch.zeros(3, requires_grad=True)), "down_proj holds a weight that is not a parameter"),
        (with_part(ds_id=3), "down_proj is sharded by ZeRO-3 on its own"),
        (Returning(lambda x: (x, x.sum())), r"output 1 has shape \(\)"),
        (Returning(lambda x: x[:, :2]), r"output 0 has shape \(1, 2, 12\) for a tile of 4 tokens"),
        (Returning(lambda x: [x]), "output 0 is a list"),
    ],
)
def test_module_that_cannot_be_tiled_is_refused(module, words) -> None:
    x, _ = inputs(1, 8, dtype=torch.float32)
    with pytest.raises(RefusedError, match=words):
        tiled_mlp(module, x, 4, use_original_mlp=True)


def test_the_glu_kernels_refuse_the_same_modules() -> None:
    with pytest.raises(RefusedError, match="not a parameter"):
        tiled_mlp(with_part(view=torch.zeros(3, requires_grad=True)), inputs(4, dtype=torch.float32)[0])


# ---- proven once -------------------------------------------------------------------------------


class ExpertModules(nn.Module):
    """A mixture whose experts are modules of their own."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.SiLU()) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts[0](x) * self.experts[1](x)


def test_a_module_is_proven_once_and_again_where_it_changes() -> None:
    """Of many parts, each call looks at each once, in C: the Python calls do not grow with their number."""
    x = torch.randn(1, 6, 4)

    def num_calls(module: nn.Module) -> int:
        calls = 0

        def count(frame, event, argument) -> None:
            nonlocal calls
            calls += event == "call" and "/ringtile/tiled/" in frame.f_code.co_filename

        tiled_mlp(module, x, 4)
        sys.setprofile(count)
        tiled_mlp(module, x, 4)
        sys.setprofile(None)
        return calls

    few, many = ExpertModules(50), ExpertModules(200)
    assert num_calls(few) == num_calls(many)

    alive = weakref.ref(many)
    del many
    gc.collect()
    assert alive() is None


class Changing(ExpertModules):
    """Computes by whatever its first expert holds."""

    def __init__(self) -> None:
        super().__init__(3)
        self.register_buffer("shift", torch.ones(()))
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.shift


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


CHANGES = {
    "a parameter": lambda m: setattr(m.experts[0][0], "weight", nn.Parameter(torch.randn(4, 4))),
    "a parameter, by an engine": lambda m: m.experts[0][0]._parameters.update(weight=nn.Parameter(torch.randn(4, 4))),
    "a parameter gone": lambda m: setattr(m.experts[0][0], "bias", None),
    "a parameter more": lambda m: m.experts[1][0].register_parameter("more", nn.Parameter(torch.randn(4))),
    "a parameter shared": lambda m: setattr(m.experts[0][0], "weight", m.experts[1][0].weight),
    "frozen": lambda m: m.experts[0][0].weight.requires_grad_(False),
    "numbers of a parameter": lambda m: m.experts[0][0].weight.data.mul_(2),
    "a buffer": lambda m: setattr(m, "shift", torch.zeros(())),
    "numbers of a buffer": lambda m: m.shift.mul_(3),
    "an attribute": lambda m: setattr(m, "scale", 0.5),
    "a submodule": lambda m: m.experts[0].__setitem__(1, nn.Tanh()),
    "a submodule with weights": lambda m: m.experts[0].__setitem__(0, nn.Linear(4, 4)),
    "a submodule more": lambda m: m.experts[0].append(nn.Linear(4, 4)),
    "a submodule gone": lambda m: m.experts[0].__delitem__(1),
    "a submodule's class": lambda m: setattr(m.experts[0][0], "__class__", Doubled),
    "a submodule's forward": lambda m: setattr(m.experts[0][0], "forward", lambda x: x @ m.experts[0][0].weight),
    "a hook": lambda m: m.experts[0][0].register_forward_hook(lambda *call: call[2] * 2),
    "a hook before": lambda m: m.experts[0][0].register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "a parametrization": lambda m: nn.utils.parametrizations.weight_norm(m.experts[0][0]),
    "a mode": lambda m: m.eval(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_after_the_proof_is_in_the_numbers(change) -> None:
    """Gradients of x and of each weight that the module has by then are the untiled module's."""
    torch.manual_seed(0)
    module, x = Changing(), torch.randn(1, 6, 4, requires_grad=True)
    tiled_mlp(module, x, 4)
    change(module)
    out, expected = tiled_mlp(module, x, 4), module(x)
    torch.testing.assert_close(out, expected)
    wanted = [x, *(each for each in module.parameters() if each.requires_grad)]
    dout = torch.randn_like(expected)
    grads = [torch.autograd.grad(y, wanted, dout, allow_unused=True, materialize_grads=True) for y in (out, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m.experts[1][1], "ds_id", 3), r"experts\.1\.1 is sharded by ZeRO-3"),
        (lambda m: setattr(m.experts[1][1], "expert_capacity", 3), r"1\.1 drops tokens"),
        (lambda m: m.experts[1].__setitem__(1, nn.BatchNorm1d(4)), r"1\.1 is a BatchNorm1d"),
        (
            lambda m: setattr(m.experts[1][1], "view", torch.ones(1, requires_grad=True)),
            "holds a weight that is not",
        ),
        (
            lambda m: setattr(m.experts[1][1], "__class__", type("FSDPModule", (nn.SiLU,), {})),
            "sharded by FSDP2",
        ),
    ],
)
def test_a_change_after_the_proof_is_refused_too(change, words) -> None:
    module, x = ExpertModules(3), torch.randn(1, 6, 4)
    tiled_mlp(module, x, 4)
    change(module)
    with pytest.raises(RefusedError, match=words):
        tiled_mlp(module, x, 4)
