"""What ringtile takes for granted of transformers' models, by the name of a class: the one table of such facts.

Everything else is asked of the model (its config, its modules), or proved on the first
batch. Attention needs no entry: all models of transformers call one interface. A new release of transformers may add
classes to any table, or change what an entry says: `python -m tools.models` tries every type, and
tests/hf/test_hf_families.py reads the installed release and names the first class that is not as it is written here.
"""

from __future__ import annotations

# The names under which models and their modules take a cache: `cache` since 5.24, which changes the others into it.
CACHES = ("cache", "past_key_values", "cache_params")

# ---- recurrent layers ---------------------------------------------------------------------------

_CONV = frozenset({"causal_conv1d_fn"})
_DELTA = _CONV | {"torch_chunk_gated_delta_rule"}
_MAMBA = _CONV | {"mamba_selective_scan"}
_MAMBA2 = _CONV | {"mamba2_split_conv1d_scan_combined", "mamba2_chunk_scan"}

# Mixers that were read and tested, with the functions of their file that their forward calls to mix tokens. Each has
# an equal in features/recurrent.py. Check: the forward calls no other function that mixes tokens, and each of
# these takes the arguments of its equal. Documents and padding are in the batch; a mixer gets no mask.
MIXERS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), _CONV),
    **dict.fromkeys(("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"), _DELTA),
    **dict.fromkeys(("OlmoHybridGatedDeltaNet", "LaraMiniGatedDeltaNet"), _DELTA),
    **dict.fromkeys(
        ("KimiLinearDeltaAttention", "BailingHybridDeltaAttention"), _CONV | {"chunk_kimi_delta_attention"}
    ),
    **dict.fromkeys(("BambaMixer", "GraniteMoeHybridMambaLayer", "FalconH1Mixer"), _MAMBA2),
    **dict.fromkeys(("NemotronHMamba2Mixer", "Zamba2MambaMixer", "Mamba2Mixer"), _MAMBA2),
    **dict.fromkeys(("JambaMambaMixer", "ZambaMambaMixer"), _MAMBA),
    **dict.fromkeys(("MambaMixer", "FalconMambaMixer"), _MAMBA | {"mamba_inner_fn"}),
    "MiniMaxLightningAttention": frozenset(),  # it calls none: its forward is replaced
}
# Fused functions, of which mixers try one in training only, and go on without.
SHORT_CUTS = frozenset({"mamba_inner_fn", "mamba2_split_conv1d_scan_combined"})
# Recurrences that no op of ringtile computes, by the class of the module that has them.
UNKNOWN_RECURRENCES = {
    "RecurrentGemmaRglru": "the RG-LRU (real-gated linear recurrent unit)",
    "RwkvSelfAttention": "RWKV's WKV recurrence and token shift",
    "xLSTMBlock": "xLSTM's mLSTM, with its running maximum",
}

# ---- attention and masks ------------------------------------------------------------------------

# Types whose own eager function computes what scaled_dot_product_attention cannot: sinks.
EAGER_SINKS = frozenset({"gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"})


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Classes of transformers 5.24 whose causal masks get no position ids: in one process, documents that these alone tell
# apart attend each other. HunYuanVL's must not get them: ValueError for the row that they need.
JOIN_DOCUMENTS = _names("""
    AfmoeModel BartDecoder BigBirdModel BigBirdPegasusDecoder BioGptModel BlenderbotDecoder BlenderbotSmallDecoder
    BlipTextModel BloomModel CLIPSegTextModel CLIPTextModel ClvpDecoder DeepseekOcr2VisionEncoder DiaDecoder
    EvollaModel GptOssModel GraniteMoeHybridModel GroupViTTextTransformer HunYuanVLTextModel ImageGPTModel
    InformerDecoder Kosmos2_5TextTransformer LEDDecoder LongT5Stack M2M100Decoder MarianDecoder MBartDecoder
    MegatronBertModel MetaClip2TextModel MptModel MT5Stack MusicgenDecoder MusicgenMelodyDecoder MvpDecoder
    NllbMoeDecoder OPTDecoder Owlv2TextTransformer OwlViTTextTransformer PegasusDecoder PegasusXDecoder PI0Model
    Pix2StructTextModel PLBartDecoder Pop2PianoStack PPFormulaNetTextModel RemBertModel RoFormerModel
    SeamlessM4TDecoder SeamlessM4Tv2Decoder Speech2TextDecoder SpeechT5Decoder SwitchTransformersStack T5Stack
    TimeSeriesTransformerDecoder TimesFm2_5Model TrOCRDecoder UdopStack UMT5Stack VideoPrismTextModel XCLIPTextModel
    XGLMModel
""")

# Classes with M-RoPE whose masks tell documents apart by a first row of text in position ids (4, B, S): those that make
# that row themselves of ids (B, S), and all.
MAKE_TEXT_ROW = _names("""
    CohereCompassTextModel Qwen3_5MoeTextModel Qwen3_5TextModel Qwen3OmniMoeTalkerModel Qwen3OmniMoeThinkerTextModel
    Qwen3VLMoeTextModel Qwen3VLTextModel Qwen4ExpTextModel
""")
TAKE_TEXT_ROW = MAKE_TEXT_ROW | _names("""
    Cosmos3EdgeTextModel Ernie4_5_VLMoeTextModel Glm4vMoeTextModel Glm4vTextModel GlmImageTextModel GlmOcrTextModel
    HYV4VLTextModel PaddleOCRTextModel Qwen2_5_VLTextModel Qwen2_5OmniTalkerModel Qwen2_5OmniThinkerTextModel
    Qwen2VLTextModel
""")

# ---- modules that need whole sequences ----------------------------------------------------------

# By class: the attribute that makes them so, if one does, and what they do.
WHOLE_SEQUENCES = {
    "DogeAttention": ("", "picks the keys of each query (keep_window_size) by the values of all keys of the sequence"),
    "EsmEmbeddings": ("token_dropout", "scales embeddings by how many tokens of the row are masked (token_dropout)"),
    "MobileBertEmbeddings": ("trigram_input", "joins the embeddings of neighboring tokens (trigram_input)"),
}
SAMPLING = {  # where scores are nearly equal alone, which the first batch need not show
    "PhimoeTopKRouter": ("", "samples the experts of each token in training, whatever router_jitter_noise is"),
}
