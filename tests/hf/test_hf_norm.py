"""RMSNorms in tiles: the same numbers in less memory, for every RMSNorm of transformers."""

import ast
import importlib
import inspect
import pathlib
from typing import Any

import pytest
import torch
import transformers
from hf_models import tiny_model
from ringtile import InputError, RefusedError, tile_norms
from ringtile.hf.config import Config
from ringtile.hf.features import norm as of_norms
from ringtile.hf.features.norm import find_norms
from ringtile.planner.setup import Setup
from ringtile.planner.step import TrainingStep
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

WIDTH, TOKENS = 16, 7


def classes_called_rms_norm(folders: str) -> list[tuple[str, str]]:
    """The module and the name of each, as far as they stand at the top of a file of transformers' models."""
    models = pathlib.Path(transformers.__file__).parent / "models"
    return sorted(
        (".".join(("transformers.models", *path.relative_to(models).with_suffix("").parts)), node.name)
        for path in models.glob(f"{folders}/modeling_*.py")
        for node in ast.parse(path.read_text(encoding="utf8")).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("RMSNorm")
    )


def make_norm(module: str, name: str) -> nn.Module | None:
    """None: it is made of a configuration."""
    kind = getattr(importlib.import_module(module), name)
    if "config" in inspect.signature(kind).parameters:
        return None
    norm: nn.Module = kind(WIDTH)
    for weight in norm.parameters():
        nn.init.normal_(weight)
    return norm


def run(module: nn.Module, x: torch.Tensor, upstream: torch.Tensor) -> tuple[torch.Tensor, ...]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = module(x)
    out.backward(upstream)
    return out.detach(), x.grad, *(weight.grad.clone() for weight in module.parameters())


@pytest.mark.parametrize(
    ("folders", "shape", "at_least"),
    [
        ("gemma*", (2, TOKENS, WIDTH), 5),  # some of 1 + weight
        ("qwen3*", (2, TOKENS, 3, WIDTH), 8),
        *(
            pytest.param("*", shape, 150, marks=pytest.mark.long)
            for shape in ((2, TOKENS, WIDTH), (2, TOKENS, 3, WIDTH))
        ),
    ],
)
@pytest.mark.parametrize("has_kernel", [False, True])
def test_every_rms_norm_of_transformers(
    folders: str, shape: tuple[int, ...], at_least: int, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where torch has one kernel, which computes most of them. Each treats a token alone. A row takes some 16
    roundings of numbers as large as `largest`, which the vector and the scalar form of a function may round
    differently; a weight's gradient sums those of all rows in another order."""
    torch.manual_seed(0)
    monkeypatch.setattr(of_norms, "_has_kernel", lambda x: has_kernel)
    num_tiled = num_torchs = 0
    for module, name in classes_called_rms_norm(folders):
        norm, x, upstream = make_norm(module, name), torch.randn(shape), torch.randn(shape)
        if norm is None or not find_norms(nn.ModuleList([norm])):  # without a weight, or with others
            continue
        whole = run(norm, x, upstream)
        patches = tile_norms(nn.ModuleList([norm]), tile_tokens=2)
        tiled = run(norm, x, upstream)
        num_torchs += norm.forward.__func__.eps.get((True, x.dtype)) is not None
        patches.restore()
        scale = x.square().mean(-1).rsqrt().max() * x.abs().max()
        weight = max(float(each.detach().abs().max()) for each in norm.parameters())
        largest = float((1 + weight) * upstream.abs().max() * (1 + scale**2) * max(1.0, scale / x.abs().max()))
        for got, expected, rows in zip(tiled, whole, (1, 1, x[..., 0].numel()), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=rows * 16 * 2.0**-24 * largest, msg=name)
        num_tiled += 1
    assert num_tiled > at_least
    assert num_torchs * 2 > at_least if has_kernel else num_torchs == 0


@pytest.mark.parametrize(("tile_tokens", "saves"), [(64, 5 * 4), (1024, 2 * 4)])
def test_peak_of_a_layer_without_its_float32_copies(tile_tokens: int, saves: int) -> None:
    """transformers' backward of a norm holds seven float32 tensors like the hidden states; in tiles, like a tile.

    Until then it keeps a float32 copy of its input; as a single tile, the input. saves: at least so many bytes a number
    of the hidden states.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaConfig(**sizes, **heads)
    seq_len, peaks = 1024, []
    for tiled_norm in (False, True):
        config = Config(tiled_mlp=True, tiled_loss=True, tiled_norm=tiled_norm, tile_tokens=tile_tokens)
        setup = Setup(model, ringtile=config, gradient_checkpointing=True, dtype=torch.bfloat16)
        with TrainingStep(setup) as step:
            peaks.append(step.run(seq_len).parts["activations"])
    assert peaks[0] - peaks[1] > saves * seq_len * 64


class OwnRMSNorm(nn.Module):
    """As transformers' are written, over the last dim; or over others; or with a running mean."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.ones(WIDTH)), how
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dims = {"over tokens": (-2, -1), "over all": tuple(range(x.dim())), "over rows": (0, -1)}.get(self.how, -1)
        if self.how == "writes" and self.training:
            self.seen.add_(x.detach().square().mean())
        if self.how == "drops":
            x = nn.functional.dropout(x, 0.1, self.training)
        if self.how == "unpacks":
            B, S, D = x.shape
            x = x.view(B * S, D)
        factor = torch.rsqrt(x.float().square().mean(dims, keepdim=True) + 1e-6)
        y = self.weight * (x.float() * factor).to(x.dtype)
        if self.how == "unpacks":
            y = y.view(B, S, D)
        return (y, x) if self.how == "with its input" else y


@pytest.mark.parametrize("how", ["unpacks", "with its input"])
@pytest.mark.parametrize("has_kernel", [False, True])
def test_a_norm_of_other_forms_is_the_same_in_tiles(
    how: str, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that unpacks (B, S, D), and one that returns its input too: outputs and gradients of each row are alone."""
    monkeypatch.setattr(of_norms, "_has_kernel", lambda x: has_kernel)
    norm = type("MyRMSNorm", (OwnRMSNorm,), {})(how)
    inputs = torch.randn(2, 2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    x, upstream = inputs[0].clone().requires_grad_(), inputs[1]

    def of_all() -> list[Any]:
        output = norm(x)
        y, *residual = output if isinstance(output, tuple) else (output,)
        assert len(residual) == (how == "with its input")
        sum([y * upstream, *residual]).sum().backward()
        gradients = [x.grad, norm.weight.grad]
        x.grad = norm.weight.grad = None
        return [y.detach(), *(each.detach() for each in residual), *gradients]

    whole = of_all()
    patches = tile_norms(nn.ModuleList([norm]), tile_tokens=2)
    tiled = of_all()
    patches.restore()
    for got, expected in zip(tiled, whole, strict=True):  # a weight's gradient is a sum over rows in another order
        torch.testing.assert_close(got, expected, rtol=0, atol=2 * TOKENS * 2.0**-23 * float(expected.abs().max()))


@pytest.mark.parametrize("how", ["over tokens", "over all", "over rows", "writes", "drops"])
@pytest.mark.parametrize("shape", [(2, TOKENS, WIDTH), (2, TOKENS, 3, WIDTH)])
def test_a_norm_that_is_none_is_refused_in_its_first_call(how: str, shape: tuple[int, ...]) -> None:
    model = nn.ModuleDict({"norm": type("MeanRMSNorm", (OwnRMSNorm,), {})(how)})
    patches = tile_norms(model, tile_tokens=2)
    draws = "draws random numbers or writes into its module"
    what = draws if how in ("writes", "drops") else "another output for a row beside others than alone"
    for _ in range(2):
        with pytest.raises(RefusedError, match=rf"the forward of norm \(MeanRMSNorm\) .*{what}.*tiled_norm: false"):
            model["norm"](torch.randn(shape))
    assert model["norm"].seen == 0
    patches.restore()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_norm_of_the_users_own_is_tiled(dtype: torch.dtype) -> None:
    model = nn.ModuleDict({"norm": type("MyRMSNorm", (OwnRMSNorm,), {})("over features")}).to(dtype)
    patches = tile_norms(model, tile_tokens=2)
    x = torch.randn(2, TOKENS, WIDTH, dtype=dtype)
    tiled = model["norm"](x)
    assert hash(model["norm"].forward)  # whoever keeps methods by their hash meets this one
    patches.restore()
    assert torch.equal(tiled, model["norm"](x))


# ---- torch's norm, where it is one kernel -------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 2048, 64), (2, 512, 3, 64)])
def test_torchs_norm_is_at_most_as_wrong_as_the_models(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root mean squares of output and gradients against float64. The model rounds to 16 bits before the weight, too."""
    torch.manual_seed(0)
    norm = Qwen3RMSNorm(64, eps=1e-5).to(dtype)
    with torch.no_grad():
        norm.weight += 0.3 * torch.randn(64).to(dtype)
    x, upstream = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    models = run(norm, x, upstream)
    monkeypatch.setattr(of_norms, "_has_kernel", lambda x: True)
    patches = tile_norms(nn.ModuleList([norm]), tile_tokens=2)
    torchs = run(norm, x, upstream)
    patches.restore()
    y, weight = x.double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    exact = y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    gradients = torch.autograd.grad(exact, (y, weight), upstream.double())
    for got, other, expected in zip(torchs, models, (exact.detach(), *gradients), strict=True):
        error, of_model = ((each.double() - expected).square().mean().sqrt() for each in (got, other))
        assert got.dtype == other.dtype
        assert error <= of_model * (0.8 if dtype != torch.float32 else 1 + 1e-6)


@pytest.mark.parametrize(("has_kernel", "forwards"), [(False, [3, 0]), (True, [0, 2])])
def test_a_checkpointed_norm_runs_twice_as_one_kernel(
    has_kernel: bool, forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own forward runs in the first pass, in the recomputed one and in the backward of a tile."""
    counts, rms_norm, own = [0, 0], torch.nn.functional.rms_norm, Qwen3RMSNorm.forward

    def counted(index: int, function: Any) -> Any:
        def call(*given: Any) -> Any:
            counts[index] += 1
            return function(*given)

        return call

    norm, x = Qwen3RMSNorm(WIDTH), torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    monkeypatch.setattr(of_norms, "_has_kernel", lambda x: has_kernel)
    patches = tile_norms(nn.ModuleList([norm]))
    norm(x)  # finds out what it computes
    patches.restore()
    monkeypatch.setattr(of_norms.functional, "rms_norm", counted(1, rms_norm))
    monkeypatch.setattr(Qwen3RMSNorm, "forward", counted(0, own))
    patches = tile_norms(nn.ModuleList([norm]))
    norm(x)
    counts[:] = [0, 0]
    checkpoint(lambda x: norm(x).square(), x, use_reentrant=False).sum().backward()
    patches.restore()
    assert counts == forwards


class LooksLikeRMSNorm(nn.Module):
    """Equal to torch's for a weight of ones, or for rows of a usual size."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.how, self.eps = nn.Parameter(torch.ones(WIDTH)), how, 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.square().mean(-1, keepdim=True)
        factor = {
            "eps beside the root": lambda: 1 / (size.sqrt() + self.eps),
            "largest eps": lambda: size.clamp(min=self.eps).rsqrt(),
        }.get(self.how, lambda: (size + self.eps).rsqrt())()
        weight = {
            "square of the weight": lambda: self.weight**2,
            "size of the weight": lambda: self.weight.abs(),
            "clamped weight": lambda: self.weight.clamp(max=1.5),
        }.get(self.how, lambda: self.weight)()
        y = weight * (x * factor)
        return y.double() if self.how == "float64" else y


@pytest.mark.parametrize(
    ("how", "is_torchs"),
    [
        ("the same", True),
        *(
            (how, False)
            for how in (
                "eps beside the root", "largest eps", "square of the weight", "size of the weight", "clamped weight",
                "float64",
            )
        ),
    ],
)  # fmt: skip
def test_what_looks_like_torchs_norm_runs_itself(how: str, is_torchs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_norms, "_has_kernel", lambda x: True)
    norm, x = LooksLikeRMSNorm(how), torch.randn(2, TOKENS, WIDTH)
    whole = norm(x)
    patches = tile_norms(nn.ModuleList([norm]), tile_tokens=2)
    tiled = norm(x)
    assert (norm.forward.__func__.eps == {(True, torch.float32): 1e-6}) == is_torchs
    patches.restore()
    torch.testing.assert_close(tiled, whole, rtol=1e-6, atol=0)
    assert torch.equal(norm.weight, torch.ones(WIDTH))


def test_refuses_what_has_no_such_norm_and_what_is_tiled() -> None:
    with pytest.raises(RefusedError, match=r"GPT2LMHeadModel has no RMSNorm.*set tiled_norm: false"):
        tile_norms(tiny_model("gpt2"))
    with pytest.raises(InputError, match="tile_tokens is 0"):
        tile_norms(tiny_model(), tile_tokens=0)
    model = tiny_model()
    patches = tile_norms(model)
    with pytest.raises(RefusedError, match=r"model\.layers\.0\.input_layernorm is tiled already"):
        tile_norms(model)
    patches.restore()
    assert not any("forward" in vars(module) for module in model.modules())
