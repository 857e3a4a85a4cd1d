"""Which MLPs are found in which models; tiling them changes no number, router logits keep their gradient."""

import re

import pytest
import torch
import transformers
from hf_models import SIZES, tiny_model
from ringtile import RefusedError, tile_mlps
from ringtile.hf.features.mlp import find_mlps
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

# The MLPs of transformers' causal language models, by name; * stands for any number.
FOUND = {
    "model.layers.*.mlp": """afmoe apertus arcee aria_text axk1 bitnet cohere cohere2 cohere2_moe cwm deepseek_v2
        deepseek_v3 deepseek_v32 diffllama doge ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma2
        gemma3_text gemma4_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss granite granite_swa helium hy_v3
        hy_v4 hyperclovax inkling_text jais2 jetmoe kimi_linear laguna llama mellum mimo_v2_flash minicpm3 minimax
        minimax_m2 ministral3 mistral mixtral mllama modernbert-decoder nanochat olmo olmo2 olmo3 olmo_hybrid olmoe
        persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss
        smollm3 solar_open stablelm starcoder2 vaultgemma youtu""",
    "model.layers.*.feed_forward": "bamba falcon_h1 jamba lfm2 llama4_text",
    "model.layers.*.block_sparse_moe": "granitemoe granitemoe_swa granitemoeshared",
    "model.layers.*.block_sparse_moe model.layers.*.shared_mlp": "granitemoehybrid",
    "model.layers.*.mlp model.layers.*.mlps.*": "longcat_flash",
    "model.layers.*.mixer": "nemotron_h",
    "model.layers.*.mlp_block": "recurrent_gemma",
    "model.language_model.layers.*.mlp": "fuyu gemma4",
    "model.language_model.layers.*.mlp model.vision_tower.encoder.layers.*.mlp": "gemma3",
    "model.language_model.layers.*.mlp model.vision_tower.layers.*.mlp": "got_ocr2",
    "transformer.h.*.mlp": "codegen falcon gpt2 gpt_bigcode gpt_neo gptj openai-gpt",
    "gpt_neox.layers.*.mlp": "gpt_neox",
    "transformer.h.*.ffn": "ctrl",
    "transformer.layer.*.ff": "xlnet",
    "transformer.ffns.*": "xlm",
    "backbone.blocks.*.ffn": "xlstm",
    # No MLP; linear maps called by the layer itself; or a second argument: bloom, mpt (residual), rwkv (previous token)
    "": """falcon_mamba mamba mamba2 bart bert biogpt blenderbot electra marian opt roberta roformer trocr xglm bloom
        deepseek_v4 mpt rwkv zamba2 zaya""",
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        pytest.param(model_type, names, marks=[pytest.mark.long] * (i > 1))
        for names, types in FOUND.items()
        for i, model_type in enumerate(types.split())
    ],
)
def test_mlps_are_found_by_structure(model_type, names) -> None:
    """On models of default size on the meta device; attention, state spaces, norms and projections are not MLPs."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type))
    found = find_mlps(model)
    assert {re.sub(r"\d+", "*", name) for name in found} == set(names.split())
    layers = {name.split(".")[-2] for name in found}
    if names.startswith("model.layers") and model_type not in ("nemotron_h", "longcat_flash"):
        assert len(layers) == model.config.get_text_config().num_hidden_layers
    if not found:
        with pytest.raises(RefusedError, match=rf"the layers of {type(model).__name__} have no module that takes one"):
            tile_mlps(model)


# ---- the numbers --------------------------------------------------------------------------------

MIXTURES = {
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {
        **{"n_routed_experts": 4, "moe_intermediate_size": 20, "n_group": 1, "topk_group": 1, "kv_lora_rank": 8},
        **{"q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_experts_per_tok": 2},
    },
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {"num_local_experts": 4},
}
DENSE = ("gpt2", "gpt_neox", "phi", "phi3", "glm", "starcoder2", "persimmon", "jais2", "nanochat", "lfm2")


def double_model(model_type: str, **settings: object) -> nn.Module:
    """In float64, with experts in plain torch, without dropout, which a tiled run would draw tile by tile."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **settings})
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def logits_and_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    ids = torch.randint(3, SIZES["vocab_size"], (2, 13), generator=torch.Generator().manual_seed(0))
    logits = model(input_ids=ids, use_cache=False).logits
    logits.square().mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model_type", [*DENSE, *MIXTURES])
def test_tiling_any_mlp_changes_nothing(model_type) -> None:
    """2 x 13 tokens in tiles of 7: the last tile is shorter, and one spans two rows of the batch."""
    model = double_model(model_type, **MIXTURES.get(model_type, {}))
    logits, expected = logits_and_gradients(model)
    handle = tile_mlps(model, 7)
    assert len(handle.entries) == SIZES["num_hidden_layers"]
    tiled_logits, gradients = logits_and_gradients(model)
    assert gradients.keys() == expected.keys()
    # Routers and rotary embeddings always compute in float32, so its eps sets the tolerance.
    scale = max(grad.abs().max() for grad in expected.values())
    assert (tiled_logits - logits).abs().max() <= 1e-6 * logits.abs().max()
    for name, grad in gradients.items():
        assert (grad - expected[name]).abs().max() <= 1e-6 * scale, name


# ---- router logits ------------------------------------------------------------------------------


def auxiliary_loss(model: nn.Module) -> tuple[Tensor, tuple[Tensor, ...], dict[str, Tensor]]:
    """The loss including the load-balancing term, which transformers computes from recorded router logits."""
    model.zero_grad()
    ids = torch.randint(3, SIZES["vocab_size"], (2, 13), generator=torch.Generator().manual_seed(0))
    output = model(input_ids=ids, labels=ids, output_router_logits=True, use_cache=False)
    output.loss.backward()
    return output.loss.detach(), output.router_logits, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_router_logits_keep_their_gradient(family, checkpointed) -> None:
    """Recorded by hooks inside the MLP (mixtral) or returned by it: all tokens, once per layer, with a graph."""
    model = tiny_model(family, num_local_experts=4, router_aux_loss_coef=1.0).train()
    model.set_experts_implementation("eager")
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss, router_logits, expected = auxiliary_loss(model)
    model.config.router_aux_loss_coef, model.router_aux_loss_coef = 0.0, 0.0
    assert loss - auxiliary_loss(model)[0] > 0.5  # the term matters: at least 1 per layer
    model.config.router_aux_loss_coef, model.router_aux_loss_coef = 1.0, 1.0
    tile_mlps(model, 7)
    tiled_loss, tiled_logits, gradients = auxiliary_loss(model)
    torch.testing.assert_close(tiled_loss, loss)
    for tiled, plain in zip(tiled_logits, router_logits, strict=True):
        torch.testing.assert_close(tiled, plain)
        assert tiled.requires_grad
    for name, grad in gradients.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_an_mlp_called_with_more_than_one_tensor_is_refused() -> None:
    model = tiny_model()
    tile_mlps(model)
    mlp, x = model.model.layers[0].mlp, torch.zeros(1, 3, SIZES["hidden_size"])
    assert torch.equal(mlp(x=x), mlp(x))
    with pytest.raises(RefusedError, match=r"model\.layers\.0\.mlp was called with 2 arguments, expected one tensor"):
        mlp(x, scale=2.0)


# ---- other layers inside an MLP -----------------------------------------------------------------


class Packed(nn.Module):
    """A quantized linear layer as libraries build them: widths, packed integers, a scale, a forward that unpacks."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = linear.weight.detach().abs().max() / 127
        self.register_buffer("packed", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.packed.to(x.dtype) * self.scale)


@pytest.mark.parametrize("quantized", [("up_proj",), ("gate_proj", "up_proj", "down_proj")])
def test_quantized_layers_run_by_their_own_forward(quantized) -> None:
    model = double_model("llama")
    for layer in model.model.layers:
        for name in quantized:
            setattr(layer.mlp, name, Packed(getattr(layer.mlp, name)))
    logits, expected = logits_and_gradients(model)
    tile_mlps(model, 7)
    tiled_logits, gradients = logits_and_gradients(model)
    torch.testing.assert_close(tiled_logits, logits)
    assert gradients.keys() == expected.keys()
    for name, grad in gradients.items():
        torch.testing.assert_close(grad, expected[name], msg=name)


def test_a_router_may_write_jitter_into_its_input() -> None:
    """A single tile draws the numbers of an untiled run, and the backward draws those of the forward again."""
    model = double_model("mixtral", num_local_experts=4, router_jitter_noise=0.2)
    torch.manual_seed(3)
    logits, expected = logits_and_gradients(model)
    tile_mlps(model, 26)
    torch.manual_seed(3)
    tiled_logits, gradients = logits_and_gradients(model)
    torch.testing.assert_close(tiled_logits, logits)
    for name, grad in gradients.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.long  # test_tiled_mlp.py compiles the ops in every run
@pytest.mark.parametrize("use_original_mlp", [False, True])
def test_a_compiled_model_has_the_same_gradients(use_original_mlp) -> None:
    model = double_model("llama", num_hidden_layers=1)
    logits, expected = logits_and_gradients(model)
    tile_mlps(model, 7, use_original_mlp=use_original_mlp)
    compiled = torch.compile(model, backend="aot_eager")
    ids = torch.randint(3, SIZES["vocab_size"], (2, 13), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    tiled_logits = compiled(input_ids=ids, use_cache=False).logits
    tiled_logits.square().mean().backward()
    torch.testing.assert_close(tiled_logits, logits)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], msg=name)
