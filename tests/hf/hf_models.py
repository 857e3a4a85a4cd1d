"""Tiny transformers models, made from a configuration, for the tests of ringtile.hf."""

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tools.models.tiny_models import tiny_config

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATING = ["sliding_attention", "full_attention"]
EXPERTS = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 1, "moe_intermediate_size": 16},
}
FAMILIES = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-sliding": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "mistral-sliding": ("mistral", {"sliding_window": 6}),
    "gemma2": (
        "gemma2",
        {
            **{"sliding_window": 5, "layer_types": ALTERNATING, "query_pre_attn_scalar": 8},
            # So low that scores of random weights meet it; sdpa, the default, leaves it out.
            **{"attn_logit_softcapping": 0.5, "attn_implementation": "eager"},
        },
    ),
    "gemma3": ("gemma3_text", {"sliding_window": 5, "layer_types": ALTERNATING, "query_pre_attn_scalar": 8}),
    "granite": ("granite", {}),
    "cohere": ("cohere", {}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "gpt2": ("gpt2", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    # OPT's biases start at 0, and that of a key has no gradient: of it, only rounding could be compared.
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "enable_bias": False}),
    "phi": ("phi", {}),
    "stablelm": ("stablelm", {}),
    "llama-dynamic": (
        "llama",
        {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "phi3-longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [3.0] * 4,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "num_local_experts": 2,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 4,
            "floor_scale": 3,  # the temperature rises every 3 tokens
            "attn_scale": 0.5,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "sliding_window": 5,
            "layer_types": ALTERNATING,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": 96,
            "num_kv_shared_layers": 0,
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **EXPERTS,
            **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 16},
            "num_key_value_heads": 4,
        },
    ),
    "glm4-moe": ("glm4_moe", EXPERTS),
    "cohere2": ("cohere2", {"sliding_window": 5, "layer_types": ALTERNATING}),
    "phi3-sliding": ("phi3", {"sliding_window": 5}),
    "granite-swa": ("granite_swa", {"sliding_window": 5, "layer_types": ALTERNATING}),
    "mimo-v2": ("mimo_v2_flash", {**EXPERTS, "sliding_window": 5, "layer_types": ALTERNATING, "v_head_dim": 6}),
    "qwen2-moe-sliding": (
        "qwen2_moe",
        {
            **{"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2, "layer_types": ALTERNATING},
            **{"num_experts": 4, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        },
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "mixtral": ("mixtral", {"num_local_experts": 2}),
    "mixtral-balanced": (
        "mixtral",
        {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5, "initializer_range": 0.1},
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "initializer_range": 0.1},
            **{"output_router_logits": True, "router_aux_loss_coef": 0.5},
        },
    ),
    "olmoe": (
        "olmoe",
        {
            **{"num_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.1},
            **{"output_router_logits": True, "router_aux_loss_coef": 0.5},
        },
    ),
    "seed-oss": ("seed_oss", {}),
    "phimoe": ("phimoe", {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "phimoe-sliding": (
        "phimoe",
        {
            **{"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 5},
            **{"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
        },
    ),
    "starcoder2": ("starcoder2", {}),
    "doge": ("doge", {}),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 5}),
}


def tiny_model(family: str = "llama", seed: int = 0, **overrides: object) -> PreTrainedModel:
    """A model with random weights in eval mode, the same for the same seed."""
    model_type, settings = FAMILIES[family]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**SIZES, **settings, **overrides})
    return AutoModelForCausalLM.from_config(config).eval()


ENCODERS = {
    "modernbert": ("modernbert", {"local_attention": 6, "layer_types": ALTERNATING}),
    "eurobert": ("eurobert", {}),
    "bert": ("bert", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "llama": ("llama", {"classifier_dropout": 0.0}),  # classifies tokens, and stays causal
}
NUM_LABELS = 5  # classes of a token


def tiny_encoder(family: str = "modernbert", classes: bool = False, **overrides: object) -> PreTrainedModel:
    """A model of masked words, or of classes of tokens. No parameter is 0: the bias of a key has no gradient, so that
    of one at 0 only rounding could be compared."""
    model_type, settings = ENCODERS[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, "num_labels": NUM_LABELS, **settings, **overrides})
    model = (AutoModelForTokenClassification if classes else AutoModelForMaskedLM).from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.train()


def hybrid(family: str, **overrides: object) -> PreTrainedModel:
    """A model with recurrent layers that forgets slowly, so that what leaks is seen."""
    config = tiny_config(family)
    vars(config).update(overrides)
    config.get_text_config().output_router_logits = False  # its balance is tested apart
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)  # none stays at zero or one, where errors hide
            if name.endswith("A_log"):
                parameter.fill_(-3.0)  # a decay of about exp(-0.07) a token
    return model.train()


def with_lora(model: PreTrainedModel, dropout: float = 0.0) -> Any:
    """The model with LoRA adapters on attention and MLP. Neither factor starts at zero, so both have gradients."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, lora_dropout=dropout)
    return get_peft_model(model, config)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of as many words, w3 to w95, as the models have tokens, for trainers that want to hold one."""
    special = {0: "<pad>", 1: "<bos>", 2: "<eos>"}
    words = {special.get(i, f"w{i}"): i for i in range(96)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
