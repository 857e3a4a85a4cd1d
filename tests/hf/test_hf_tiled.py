"""Tiled MLP and tiled loss on transformers models and Trainers: same numbers, nothing left behind, or refused."""

import copy
import functools
import gc
from types import MethodType

import pytest
import ringtile
import torch
from counting import Counting
from hf_models import SIZES, tiny_model
from hf_training import make_trainer
from ringtile import Config, ConfigError, InputError, RefusedError, tile_mlps
from ringtile.hf.features.loss import (
    TiledLogits,
    _head_forward,
    install_tiled_loss,
    tile_tokens_of,
    tiled_causal_lm_loss,
)
from ringtile.hf.features.mlp import install_tiled_mlp
from ringtile.hf.patches import Patches
from torch import Tensor, nn

TILED = {"tiled_mlp": True, "tiled_loss": True, "tile_tokens": 7}


def batch() -> dict[str, Tensor]:
    """Two rows of 13 tokens; the first three labels of each, and another, are ignored."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, SIZES["vocab_size"], (2, 13), generator=generator)
    labels = ids.clone()
    labels[:, :3] = labels[0, 8] = -100
    return {"input_ids": ids, "labels": labels}


def tile_loss(model: nn.Module, **keys: object) -> Patches:
    patches = Patches()
    install_tiled_loss(model, Config(tiled_loss=True, **keys), patches)
    return patches


def loss_and_gradients(model: nn.Module, **inputs: object) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**{**batch(), **inputs}, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: tuple[Tensor, dict[str, Tensor]], theirs: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Equal in float64: rounding (1e-16 per step, some 1e3 steps) is far below the effect of any mistake."""
    assert ours[0].dtype == torch.float64
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-12, atol=0)
    assert ours[1].keys() == theirs[1].keys()
    for name, grad in ours[1].items():
        torch.testing.assert_close(grad, theirs[1][name], rtol=1e-10, atol=1e-13)


def double_model(family: str = "llama", **overrides: object) -> nn.Module:
    """In float64, with a float64 loss: transformers itself rounds logits to float32 before the loss."""
    model = tiny_model(family, **overrides).double().train()
    model._loss_function = causal_lm_loss
    return model


def causal_lm_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch=None, shift_labels=None, **kwargs: object
) -> Tensor:
    """The definition: each token's loss for its next token, averaged, or summed and divided by num_items_in_batch."""
    targets = labels[:, 1:] if shift_labels is None else shift_labels
    logits = logits[:, :-1] if shift_labels is None else logits
    total = nn.functional.cross_entropy(logits.reshape(-1, vocab_size), targets.reshape(-1), reduction="sum")
    return total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)


# ---- the MLP ------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_original_mlp", [False, True])
def test_tiled_mlp_changes_no_gradient(use_original_mlp) -> None:
    """Of a Llama; test_hf_mlp.py has other models."""
    model = double_model()
    expected = loss_and_gradients(model)
    handle = tile_mlps(model, tile_tokens=7, use_original_mlp=use_original_mlp)
    assert [owner for owner, _ in handle.entries] == [layer.mlp for layer in model.model.layers]
    assert_same(loss_and_gradients(model), expected)


def test_restore_leaves_no_trace() -> None:
    model = tiny_model()
    before = [dict(vars(module)) for module in model.modules()]
    handle = tile_mlps(model)
    handle.restore()
    for module, attributes in zip(model.modules(), before, strict=True):
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[name] is value for name, value in attributes.items())


def test_a_deep_copy_runs_its_own_weights() -> None:
    model = tiny_model()
    tile_mlps(model, 7)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.zero_()
        other.model.layers[1].mlp.down_proj.weight.zero_()
        x = torch.randn(1, 3, SIZES["hidden_size"])
        assert other.model.layers[0].mlp(x).eq(0).all()
        assert not model.model.layers[0].mlp(x).eq(0).any()


@pytest.mark.parametrize(("num_shards", "expected"), [(1, 26), (4, 7), (100, 1)])
def test_num_shards_counts_tiles(num_shards, expected, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(
        "ringtile.hf.features.mlp.run_tiles", lambda module, forward, x, tile, original: seen.append(tile) or x
    )
    model = tiny_model()
    tile_mlps(model, num_shards=num_shards)
    model.model.layers[0].mlp(torch.zeros(2, 13, SIZES["hidden_size"]))
    assert seen == [expected]  # 26 tokens, rounded up


def test_gradient_checkpointing_computes_no_mlp_twice() -> None:
    """A checkpointed layer recomputes attention only; its tiled MLP still costs 22 T*E*F."""
    counts = {}
    for tiled in (False, True):
        for checkpointed in (False, True):
            model = tiny_model("llama", num_hidden_layers=1).train()
            if tiled:
                tile_mlps(model, 7)
            if checkpointed:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            with Counting() as count:
                loss_and_gradients(model)
            counts[tiled, checkpointed] = count.flops
    unit = 2 * 13 * SIZES["hidden_size"] * SIZES["intermediate_size"]  # T*E*F
    again = counts[False, True] - counts[False, False]  # recomputed by plain checkpointing, including the MLP
    assert counts[True, False] - counts[False, False] == 4 * unit
    assert counts[True, True] - counts[True, False] <= again - 4 * unit  # gate and up are not recomputed once more


class LowRank(nn.Module):
    """An adapter as PEFT substitutes it for a linear layer (LoRA, arXiv:2106.09685): base(x) + up(down(x))."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_adapter_inside_a_tiled_mlp() -> None:
    model = double_model().requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.up_proj = LowRank(layer.mlp.up_proj)
    expected = loss_and_gradients(model)
    assert len(expected[1]) == 4
    tile_mlps(model, 7)
    assert_same(loss_and_gradients(model), expected)


def liger_forward(self: nn.Module, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_ligers_mlp_is_a_conflict_unless_its_own_forward_is_tiled(monkeypatch) -> None:
    monkeypatch.setattr(liger_forward, "__module__", "liger_kernel.transformers.swiglu")
    model = double_model()
    expected = loss_and_gradients(model)
    patched = MethodType(liger_forward, model.model.layers[1].mlp)
    model.model.layers[1].mlp.forward = patched
    with pytest.raises(
        ConfigError, match=r"layers\.1\.mlp is Liger's MLP.*ringtile.tile_mlps\(model, use_original_mlp=True\)"
    ):
        tile_mlps(model, 7)
    assert vars(model.model.layers[1].mlp)["forward"] is patched
    assert "forward" not in vars(model.model.layers[0].mlp)  # nothing is left half done
    handle = tile_mlps(model, 7, use_original_mlp=True)
    assert_same(loss_and_gradients(model), expected)
    handle.restore()
    assert vars(model.model.layers[1].mlp)["forward"] is patched
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp is Liger's MLP"):
        install_tiled_mlp(model, Config(tiled_mlp=True).tile_tokens, Patches())  # the Config's default, too


def test_tiling_twice_and_strange_forwards_are_refused() -> None:
    model = tiny_model()
    handle = tile_mlps(model)
    with pytest.raises(RefusedError, match=r"model\.layers\.0\.mlp is tiled already"):
        tile_mlps(model)
    handle.restore()
    model.model.layers[0].mlp.forward = lambda x: x
    with pytest.raises(RefusedError, match=r"the forward of model\.layers\.0\.mlp was replaced by .*<lambda>;"):
        tile_mlps(model)
    with pytest.raises(InputError, match="num_shards is 0"):
        tile_mlps(tiny_model(), num_shards=0)


def test_another_trainer_takes_over_a_model_that_was_tiled() -> None:
    """As a cell of a notebook that is run again after Ctrl-C: it makes a Trainer of the same model, and enables it."""
    mlps, model = {"tiled_mlp": True, "tile_tokens": 7}, double_model()
    plain, layer = loss_and_gradients(model), model.model.layers[0]
    first = make_trainer(model=model)
    ringtile.enable(first, mlps)
    second = make_trainer(model=model)
    ringtile.enable(second, mlps)
    assert layer.mlp.forward.__func__.tile_tokens == 7
    assert_same(loss_and_gradients(model), plain)
    with pytest.raises(InputError, match=r"enable was called for the model of this Trainer on another one"):
        first.train()
    ringtile.enable(first, mlps)  # and back
    with pytest.raises(InputError, match="on another one"):
        second.evaluate()
    del first, second
    gc.collect()
    ringtile.restore(model)
    assert "forward" not in vars(layer.mlp)
    assert not [name for part in model.modules() for name in vars(part) if "ringtile" in name]
    assert_same(loss_and_gradients(model), plain)


def test_a_model_is_saved_whole_while_it_is_tiled(tmp_path) -> None:
    """torch.save stores it with the forwards that it had."""
    model = double_model()
    plain = loss_and_gradients(model)
    trainer = make_trainer(model=model)
    ringtile.enable(trainer, {"tiled_mlp": True, "tiled_norm": True})
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert b"ringtile.hf" not in (tmp_path / "model.pt").read_bytes()  # but the function of a tiled loss
    assert_same(loss_and_gradients(loaded), plain)
    assert loaded.model.layers[0].mlp.forward.__func__ is type(model.model.layers[0].mlp).forward
    ringtile.restore(trainer)


# ---- the loss -----------------------------------------------------------------------------------


def test_tile_of_the_loss_is_bounded_by_the_device_and_by_the_key() -> None:
    sizes = {"vocab_size": 2**17, "dtype": torch.bfloat16}
    of = {name: functools.partial(tile_tokens_of, **sizes, device=torch.device(name)) for name in ("cpu", "cuda")}
    assert [of[name](Config(tiled_loss=True)) for name in of] == [256, 2**30 // (6 * 2**17)]
    assert [of[name](Config(tiled_loss=True, tile_tokens=200)) for name in of] == [200, 200]


@pytest.fixture
def oracle_loss(monkeypatch):
    """Substitutes the float64 definition for transformers' loss, so that double models pass the check for it."""
    monkeypatch.setattr("ringtile.hf.features.loss.ForCausalLMLoss", causal_lm_loss)


@pytest.mark.usefixtures("oracle_loss")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "keywords"),
    [("llama", "labels"), ("opt", "labels"), ("qwen3", "num_items"), ("mistral-sliding", "shift_labels")],
)
def test_tiled_loss_changes_no_gradient(family, keywords, tied) -> None:
    model = double_model(family, tie_word_embeddings=tied)
    inputs: dict[str, object] = {
        "labels": {},
        "num_items": {"num_items_in_batch": torch.tensor(37)},
        "shift_labels": {"shift_labels": batch()["labels"].roll(-2, 1), "num_items_in_batch": 11.5},
    }[keywords]
    expected = loss_and_gradients(model, **inputs)
    handle = tile_loss(model, tile_tokens=5)
    assert_same(loss_and_gradients(model, **inputs), expected)
    handle.restore()
    assert "forward" not in vars(model.lm_head)
    assert model.loss_function is causal_lm_loss


@pytest.mark.usefixtures("oracle_loss")
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("gemma2", {"final_logit_softcapping": 0.3}),
        ("gemma3", {"final_logit_softcapping": 0.3}),
        ("granite", {"logits_scaling": 3.0}),
        ("cohere", {"logit_scale": 0.0625}),
    ],
)
def test_model_that_scales_or_caps_its_logits(family, overrides) -> None:
    model = double_model(family, **overrides)
    expected = loss_and_gradients(model)
    tile_loss(model, tile_tokens=5)
    assert_same(loss_and_gradients(model), expected)
    for name in overrides:  # another value gives another loss, so the number is not ignored
        setattr(model.config, name, 1.0)
        model.logit_scale = 1.0
    assert abs(loss_and_gradients(model)[0] - expected[0]) > 1e-4


@pytest.mark.usefixtures("oracle_loss")
@pytest.mark.parametrize(
    "change",
    [
        lambda logits: 3 * logits / 7.0,
        lambda logits: -2 * torch.tanh(logits / -2),
        lambda logits: nn.functional.tanh(logits * 5).float() * 0.2 / 3,
        lambda logits: (logits * 0.1).tanh().to(torch.float64) * -30,
    ],
)
def test_any_chain_of_factors_and_one_tanh(change) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(11, 8, dtype=torch.float64), nn.Linear(8, 31, bias=False, dtype=torch.float64)
    head.forward = MethodType(_head_forward, head)
    labels = torch.randint(0, 31, (1, 11))
    shift_labels = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    logits = change(head(hidden[None]))
    oracle = change(hidden[None] @ head.weight.t())
    ours = tiled_causal_lm_loss(Config(), logits, labels, 31)
    theirs = nn.functional.cross_entropy(oracle[0].double(), shift_labels[0])
    torch.testing.assert_close(ours, theirs, rtol=1e-6 if oracle.dtype == torch.float32 else 1e-14, atol=0)


@pytest.mark.usefixtures("oracle_loss")
def test_bias_of_the_output_projection() -> None:
    model = double_model()
    torch.manual_seed(6)
    model.lm_head = nn.Linear(SIZES["hidden_size"], SIZES["vocab_size"], dtype=torch.float64)
    expected = loss_and_gradients(model)
    tile_loss(model, tile_tokens=5)
    assert_same(loss_and_gradients(model), expected)


def test_transformers_own_loss_is_the_same_in_float32() -> None:
    model = tiny_model().train()
    expected = model(**batch()).loss
    tile_loss(model)
    torch.testing.assert_close(model(**batch()).loss, expected)


def test_evaluation_still_has_logits() -> None:
    model = tiny_model()
    expected = model(**batch())
    tile_loss(model)
    output = model(**batch())
    assert torch.equal(output.logits, expected.logits)
    assert torch.equal(output.loss, expected.loss)


def test_training_makes_no_logits() -> None:
    model = tiny_model("llama", vocab_size=3000, num_hidden_layers=1).train()
    tile_loss(model, tile_tokens=2)
    with Counting() as count:
        output = model(**batch())
        output.loss.backward()
    assert count.largest == 3000 * SIZES["hidden_size"]  # the weight's gradient; logits would be 26 * 3000
    assert isinstance(output.logits, TiledLogits)
    assert output.logits.shape == (2, 13, 3000)


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda logits: logits / torch.ones(96), "truediv by <torch.float32 tensor>"),
        (lambda logits: logits * 0, "mul by 0"),
        (lambda logits: logits - 1, "sub"),
        (lambda logits: logits[:, -1], "getitem"),
        (lambda logits: torch.tanh(3 * torch.tanh(logits)), "a second tanh"),
        (lambda logits: logits.to(torch.bfloat16), r"to\(torch.bfloat16\)"),
        (lambda logits: nn.functional.log_softmax(logits, -1), "log_softmax"),
        (lambda logits: torch.cat([logits]), "cat"),
        (lambda logits: logits.argmax(-1), "argmax"),
        (lambda logits: logits.detach(), "detach"),
        (lambda logits: logits.float().view(-1), "view"),
        (lambda logits: list(logits), "iter"),
        (lambda logits: logits > 0, "gt"),
    ],
)
def test_any_use_of_logits_in_training_is_refused(use, name) -> None:
    model = tiny_model().train()
    tile_loss(model)
    logits = model(**batch()).logits
    with pytest.raises(RefusedError, match=f"{name}.*' was applied to the logits"):
        use(logits)


def test_what_tiled_loss_cannot_replace_is_refused() -> None:
    model = tiny_model()
    model._loss_function = causal_lm_loss
    with pytest.raises(RefusedError, match="LlamaForCausalLM computes its loss with causal_lm_loss,"):
        tile_loss(model)

    model = tiny_model()
    model.lm_head = LowRank(model.lm_head)
    with pytest.raises(
        RefusedError, match=r"the output projection of .* is a .*LowRank, expected a plain torch\.nn\.Linear"
    ):
        tile_loss(model)

    model = tiny_model()
    tile_loss(model)
    with pytest.raises(RefusedError, match="computes its loss with functools"):
        tile_loss(model)

    model = tiny_model().train()
    tile_loss(model)
    model.lm_head.register_forward_hook(lambda *call: None)
    with pytest.raises(RefusedError, match="the output projection has a hook"):
        model(**batch())

    model = tiny_model().train()
    tile_loss(model)
    model.config.vocab_size += 1
    with pytest.raises(RefusedError, match="vocab_size is 97, the output projection has 96"):
        model(**batch())


def test_ligers_forward_is_a_conflict(monkeypatch) -> None:
    monkeypatch.setattr(liger_forward, "__module__", "liger_kernel.transformers.model.llama")
    model = tiny_model()
    model.forward = MethodType(liger_forward, model)
    with pytest.raises(ConfigError, match="the forward of LlamaForCausalLM was replaced by one with Liger's"):
        tile_loss(model)


# ---- the Trainer --------------------------------------------------------------------------------


def test_restore_after_enable_leaves_the_model_as_it_was() -> None:
    trainer = make_trainer()
    model = trainer.model
    ringtile.enable(trainer, TILED)
    assert "forward" in vars(model.lm_head)
    ringtile.restore(trainer)
    assert "forward" not in vars(model.lm_head)
    assert "_loss_function" not in vars(model)
    assert not any("forward" in vars(layer.mlp) for layer in model.model.layers)
