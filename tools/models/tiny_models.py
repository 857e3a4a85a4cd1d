"""Tiny configurations of transformers' model types, which keep every kind of layer that the type has.

One table of small sizes by attribute name serves all types; a second one holds what single types need besides.
"""

from __future__ import annotations

from typing import Any

import torch
from ringtile.cli.model_config import LAYER_COUNTS
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

VOCABULARY = 96
LAYERS_OF_A_KIND = 2
_HIDDEN, _HEADS, _HEAD_DIM, _INTERMEDIATE, _EXPERTS = 32, 4, 8, 48, 4

# The largest value of an integer attribute, by name. What is smaller stays.
_SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "audio_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "embedding_size"), _HIDDEN),
    **dict.fromkeys(("word_embed_proj_dim", "input_embedding_size", "output_embedding_size"), _HIDDEN),
    **dict.fromkeys(("backbone_hidden_size", "attention_hidden_size", "lru_width", "out_hidden_size"), _HIDDEN),
    **dict.fromkeys(("projection_dim", "classifier_proj_size", "prompt_mid_dim"), _HIDDEN),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "intermediate_size_mlp", "ffn_dim"), _INTERMEDIATE),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "dim_ff", "dff", "d_inner"), _INTERMEDIATE),
    **dict.fromkeys(("ffn_hidden_size", "expert_ffn_hidden_size", "dense_intermediate_size"), _INTERMEDIATE),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size", "mlp_dim"), _INTERMEDIATE),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "feed_forward_size"), _INTERMEDIATE),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), _HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "swa_num_attention_heads"), _HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads", "linear_num_heads"), _HEADS),
    **dict.fromkeys(("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"), _HEADS),
    "index_n_heads": 16,  # of few, a whole score is 0 after the relu for many keys, and torch.topk breaks no ties
    **dict.fromkeys(
        ("head_dim", "swa_head_dim", "d_head", "dim_head", "kv_channels", "attention_head_size"), _HEAD_DIM
    ),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "index_head_dim", "linear_key_head_dim"), _HEAD_DIM),
    **dict.fromkeys(("linear_value_head_dim", "linear_head_dim", "attention_head_dim", "mamba_head_dim"), _HEAD_DIM),
    **dict.fromkeys(("mamba_d_head", "mamba_headdim", "global_head_dim"), _HEAD_DIM),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 4),
    "qk_head_dim": _HEAD_DIM + 4,
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), _EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "num_experts_per_token", "top_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "zero_expert_num"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "gated_norm_rank", "laurel_rank", "hc_lowrank"), 16),
    **dict.fromkeys(("adapter_rank", "router_hidden_size", "hidden_size_per_layer_input", "ple_embed_dim"), 16),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_window_size"), 6),
    **dict.fromkeys(("local_attention", "attention_chunk_size", "index_topk", "keep_window_size"), 6),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "context_length", "context_window"), 64),
    "original_max_position_embeddings": 16,
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "max_window_layers"), LAYERS_OF_A_KIND),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "time_step_rank", "mamba_dt_rank"), 8),
    "mamba_d_ssm": 2 * _HIDDEN,
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    "embed_dim": _HIDDEN,
    "depth": LAYERS_OF_A_KIND,
    "image_size": 32,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    **dict.fromkeys(("eos_token_id", "sep_token_id", "cls_token_id", "eod_token_id", "mask_token_id"), 2),
    **dict.fromkeys(("decoder_start_token_id", "forced_eos_token_id", "unk_index", "mask_index"), 2),
}
# Of to_dict(), what some types do not take back, or make of the number of layers.
_NOT_ARGUMENTS = (
    *("transformers_version", "architectures", "dtype", "_name_or_path", "output_attentions", "per_layer_config"),
    *("model_type", "moe_layers", "kv_source_layers"),
)
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "linear_num_key_heads", "n_head_kv")
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_NO_BALANCE = {"output_router_logits": False}  # transformers 5.17 collects no router logits of these types and fails
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": _HEAD_DIM}
# What single types need besides, by model type: values that must fit each other, or that have no default.
_BESIDES: dict[str, dict[str, Any]] = {
    **{name: {"head_dim": 4} for name in ("axk1", "deepseek_v3", "youtu", "longcat_flash")},  # the part with RoPE
    **{name: {"head_dim": _HEAD_DIM} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    **dict.fromkeys(("granitemoe", "granitemoe_swa", "granitemoeshared", "doge"), _NO_BALANCE),
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "falcon_h1": _MAMBA,
    "granitemoehybrid": {
        **{**_MAMBA, **_NO_BALANCE},
        "layer_types": ["linear_attention", "full_attention"] * LAYERS_OF_A_KIND,
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": _SECTIONS}},
    **{name: {"rope_parameters": _SECTIONS} for name in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text")},
    **{name: {"rope_parameters": _SECTIONS} for name in ("glm4v_text", "glm_ocr_text", "paddleocr_vl_text")},
    "glm4v_moe_text": {"rope_parameters": {**_SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}},
    **{name: {"vision_start_token_id": VOCABULARY} for name in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")},
    **{name: {"index_topk": 16} for name in ("glm5_next", "glm5_next_text")},
    **{name: {"indexer_types": ["full", "shared"] * LAYERS_OF_A_KIND} for name in ("glm_moe_dsa", "hy_v4")},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_SECTIONS, "mrope_section": [1, 1, 2]}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"] * LAYERS_OF_A_KIND, "num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": _EXPERTS, "top_k_experts": 2, "moe_intermediate_size": _INTERMEDIATE},
    "hunyuan_vl_text": {"head_dim": _HEAD_DIM, "rope_parameters": {**_SECTIONS, "mrope_section": [1, 1, 1, 1]}},
    "step3p5": {
        **{"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * LAYERS_OF_A_KIND},
        "mlp_layer_types": ["dense", "sparse"] * LAYERS_OF_A_KIND,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")
        },
    },
    "chameleon": {"vocabulary_map": {"<image>": VOCABULARY - 1}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}, **_NO_BALANCE},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "dots1": {
        "n_routed_experts": _EXPERTS,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "gemma3n_text": {"num_kv_shared_layers": 2, "intermediate_size": [_INTERMEDIATE] * 4},
    "gemma4_text": {"per_layer_config": {i: {"head_dim": 2 * _HEAD_DIM} for i in (1, 3)}},
    "gemma4_unified_text": {"per_layer_config": {i: {"head_dim": 2 * _HEAD_DIM} for i in (1, 3)}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 0},
    # Its default is dense, and its checkpoints are not.
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * LAYERS_OF_A_KIND},
    "lfm2": {  # its default has no convolutions, and every checkpoint has
        **{"block_multiple_of": 16, "full_attn_idxs": None, "num_hidden_layers": 2 * LAYERS_OF_A_KIND},
        "layer_types": ["conv", "full_attention"] * LAYERS_OF_A_KIND,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * LAYERS_OF_A_KIND},
    **{name: {"vocab_size": VOCABULARY} for name in ("esm", "esmc")},
    "neomme": {"head_dim": 2 * _HEAD_DIM},
    "qwen3_next": {"num_labels": 8},  # of 2 classes the gradients are so steep that float32 differs by 3e-5
    "mamba2": {"num_heads": 8},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2},
    "reformer": {"axial_pos_embds": False},
    "roc_bert": {"pronunciation_vocab_size": VOCABULARY, "shape_vocab_size": VOCABULARY},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 2 * _HIDDEN, "attention_head_dim": 2 * _HEAD_DIM},
    "zamba2": {
        **{"attention_hidden_size": 2 * _HIDDEN, "attention_head_dim": 2 * _HEAD_DIM},
        "layers_block_type": ["linear_attention", "hybrid"] * LAYERS_OF_A_KIND,
        "hybrid_layer_ids": [1, 3],
    },
    # With the usual 1e-6, norms of tiny embeddings amplify rounding: transformers' float32 is 4e-6 from float64.
    **{name: {"rms_norm_eps": 1e-2} for name in ("qwen3_5_text", "qwen3_5_moe_text")},
    # Of the towers of images: windows of whole patches, features of layers that there are.
    **{
        name: {"window_size": 32, "fullatt_block_indexes": [1]}
        for name in ("qwen2_5_vl_vision", "qwen2_5_omni_vision_encoder", "exaone4_5_vision")
    },
    **{name: {"deepstack_visual_indexes": [0, 1]} for name in ("qwen3_vl_vision", "qwen3_vl_moe_vision")},
    # Of the towers of sound: as wide as the text; a projector that takes 2 or 4 outputs as one.
    "qwen3_asr_encoder": {"output_dim": _HIDDEN},
    "qwen2_5_omni_audio_encoder": {"output_dim": _HIDDEN, "n_window": 32},
    "voxtral_encoder": {"intermediate_size": 2 * _HIDDEN},
    "glmasr_encoder": {"intermediate_size": 4 * _HIDDEN},
    "siglip_vision_model": {"vision_use_head": False},  # as in every checkpoint with a language model
    **{name: {"mm_tokens_per_image": 4} for name in ("gemma3", "shieldgemma2")},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": _HEAD_DIM},
        **{"indexer_budget": 8, "indexer_compress_ratio": 2},
    },
}
# What the constructor of a configuration needs, by model type: its parts, where the default ones do not fit.
_PARTS: dict[str, dict[str, Any]] = {
    "granite4_vision": {
        **{"text_config": {"model_type": "granite4_vision_text"}, "deepstack_layer_map": [[0, 0]]},
        "downsample_rate": "1/2",
    },
    **{name: {"vision_config": {"model_type": "gemma4_vision"}} for name in ("gemma4", "diffusion_gemma")},
}

IMAGES, SOUND = "images", "sound"  # in place of a head: a language model's, with images or sound
_CLASSES_BY_HEAD: dict[str, tuple[Any, Any]] = {
    "masked-lm": (AutoModelForMaskedLM, MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "token-classification": (AutoModelForTokenClassification, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
    "sequence-classification": (AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
}


def causal_types() -> list[str]:
    """The model types of transformers' AutoModelForCausalLM."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def image_text_types() -> list[str]:
    """The other model types of AutoModelForImageTextToText, which train on text here."""
    return sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys())


def types_with_heads() -> list[str]:
    """The model types of the classes of _CLASSES_BY_HEAD, with the name of the head."""
    return [f"{name}:{head}" for head, (_, names) in _CLASSES_BY_HEAD.items() for name in sorted(names)]


def head_of(source: str | PretrainedConfig) -> str:
    """A key of _CLASSES_BY_HEAD, IMAGES or SOUND; "" for a language model on text. source: see `tiny_config`."""
    if isinstance(source, str):
        return source.partition(":")[2]
    architecture = (source.architectures or [""])[0]
    return next(
        (head for head, (factory, _) in _CLASSES_BY_HEAD.items() if architecture.endswith(factory.__name__[9:])), ""
    )


def tiny_config(source: str | PretrainedConfig) -> PretrainedConfig:
    """A type's default configuration, or the one given, with the smallest sizes that keep its kinds of layers."""
    name = source.partition(":")[0] if isinstance(source, str) else ""
    config = CONFIG_MAPPING[name](**_PARTS.get(name, {})) if isinstance(source, str) else source
    return _shrunk(config, is_decoder=head_of(source) in ("", IMAGES, SOUND))


def tiny_model(config: PretrainedConfig, head: str = "", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model with random weights, the same every time. No parameter stays at zero or one, where errors would hide."""
    causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    factory: Any = AutoModelForCausalLM if causal else AutoModelForImageTextToText
    if head:
        factory, _ = _CLASSES_BY_HEAD[head]
    return with_random_weights(factory, config, dtype)


def with_random_weights(factory: Any, config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model that a class makes of a configuration, in training. No parameter stays at zero or one."""
    torch.manual_seed(0)
    model: PreTrainedModel = factory.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):  # of a classifier, whose rate no configuration holds
            module.p = 0.0
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # grouped products lack float64
    model.to(dtype)  # type: ignore[arg-type]
    model.train()
    return model


def _shrunk(config: PretrainedConfig, is_decoder: bool = True) -> PretrainedConfig:
    values = config.to_dict()
    for name in _NOT_ARGUMENTS:
        values.pop(name, None)
    # A list with an entry for each layer stays one.
    count = next((values[name] for name in LAYER_COUNTS if isinstance(values.get(name), int)), None)
    lists = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == count}
    kinds = {name: _kinds(value) for name, value in lists.items()}
    layers = max([2 * LAYERS_OF_A_KIND, *(LAYERS_OF_A_KIND * len(kind) for kind in kinds.values())])
    heads = values.get("num_attention_heads")
    for name, value in values.items():
        if name in LAYER_COUNTS and isinstance(value, int):
            values[name] = layers
        elif name in kinds:
            values[name] = [_small(name, kinds[name][i % len(kinds[name])]) for i in range(layers)]
        elif name in _KV_HEADS and isinstance(value, int):
            values[name] = _HEADS if value == heads else min(value, _HEADS // 2)
        elif ("drop" in name and isinstance(value, float)) or (name.endswith("_noise") and isinstance(value, float)):
            values[name] = 0.0
        elif name in ("use_sliding_window", "output_router_logits"):
            values[name] = True
        elif name == "is_decoder":
            values[name] = is_decoder
        elif name in ("rope_parameters", "rope_scaling") and value:
            values[name] = _small_rope(value)
        else:
            values[name] = _small(name, value)
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            values[name] = _shrunk(inner)
    return type(config)(**{**values, **_BESIDES.get(config.model_type, {})})


def _kinds(values: list[Any]) -> list[Any]:
    """The different values in the order in which they appear."""
    return [value for i, value in enumerate(values) if value not in values[:i]]


def _small(name: str, value: Any) -> Any:
    limit = _SIZES.get(name)
    if limit is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return min(value, limit)
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return (
            [min(item, limit) for item in value][:1] if name.endswith("_token_id") else [min(i, limit) for i in value]
        )
    return value


def _small_rope(values: dict[str, Any]) -> dict[str, Any]:
    """RoPE's parameters, also where there are some for each kind of layer."""
    small: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            small[name] = _small_rope(value)
        elif name in ("short_factor", "long_factor"):
            small[name] = value[: _HEAD_DIM // 2]
        elif name == "mrope_section":
            small[name] = [2, 1, 1]
        else:
            small[name] = _small(name, value)
    return small
