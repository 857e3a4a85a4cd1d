"""RMSNorms in tiles: the same numbers in less memory, for every RMSNorm of transformers."""

import ast
import importlib
import inspect
import pathlib

import pytest
import torch
import transformers
from hf_models import tiny_model
from ringtile import InputError, RefusedError, tile_norms
from ringtile.config import Config
from ringtile.hf.features.norm import find_norms
from ringtile.planner.setup import Setup
from ringtile.planner.step import TrainingStep
from torch import nn

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
def test_every_rms_norm_of_transformers(folders: str, shape: tuple[int, ...], at_least: int) -> None:
    """Each treats a token alone. A row takes some 16 roundings of numbers as large as `largest`, which the vector and
    the scalar form of a function may round differently; a weight's gradient sums those of all rows in another order."""
    torch.manual_seed(0)
    num_tiled = 0
    for module, name in classes_called_rms_norm(folders):
        norm, x, upstream = make_norm(module, name), torch.randn(shape), torch.randn(shape)
        if norm is None or not find_norms(nn.ModuleList([norm])):  # without a weight, or with others
            continue
        whole = run(norm, x, upstream)
        patches = tile_norms(nn.ModuleList([norm]), tile_tokens=2)
        tiled = run(norm, x, upstream)
        patches.restore()
        scale = x.square().mean(-1).rsqrt().max() * x.abs().max()
        weight = max(float(each.detach().abs().max()) for each in norm.parameters())
        largest = float((1 + weight) * upstream.abs().max() * (1 + scale**2) * max(1.0, scale / x.abs().max()))
        for got, expected, rows in zip(tiled, whole, (1, 1, x[..., 0].numel()), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=rows * 16 * 2.0**-24 * largest, msg=name)
        num_tiled += 1
    assert num_tiled > at_least


def test_peak_of_a_layer_without_its_float32_copies() -> None:
    """transformers' backward of a norm holds seven float32 tensors like the hidden states; in tiles, like a tile."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaConfig(**sizes, **heads)
    seq_len, peaks = 1024, []
    for tiled_norm in (False, True):
        config = Config(tiled_mlp=True, tiled_loss=True, tiled_norm=tiled_norm, tile_tokens=64, loss_tile_tokens=64)
        setup = Setup(model, ringtile=config, gradient_checkpointing=True, dtype=torch.bfloat16)
        with TrainingStep(setup) as step:
            peaks.append(step.run(seq_len).parts["activations"])
    assert peaks[0] - peaks[1] > 5 * seq_len * 64 * 4


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
        factor = torch.rsqrt(x.float().square().mean(dims, keepdim=True) + 1e-6)
        return self.weight * (x.float() * factor).to(x.dtype)


@pytest.mark.parametrize("how", ["over tokens", "over all", "over rows", "writes"])
@pytest.mark.parametrize("shape", [(2, TOKENS, WIDTH), (2, TOKENS, 3, WIDTH)])
def test_a_norm_that_is_none_is_refused_in_its_first_call(how: str, shape: tuple[int, ...]) -> None:
    model = nn.ModuleDict({"norm": type("MeanRMSNorm", (OwnRMSNorm,), {})(how)})
    patches = tile_norms(model, tile_tokens=2)
    what = "writes into its module" if how == "writes" else "another output for a row beside others than alone"
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
    patches.restore()
    assert torch.equal(tiled, model["norm"](x))


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
