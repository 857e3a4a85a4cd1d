"""Tiny sounds for tiny models: features as the processor of each model type makes them, in rows of text.

Features are random numbers; no processor is loaded. How many tokens a sound has, the model's own tower says.

Shape letters: A sounds, M mel bins, T frames.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForMultimodalLM, AutoModelForSeq2SeqLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from tools.models.tiny_images import ELSEWHERE, END, START, Images, image_model

# The model types whose processors' features are imitated here.
TYPES = (
    *("audioflamingo3", "glmasr", "qwen2_5_omni_thinker", "qwen2_audio", "qwen3_asr", "qwen3_omni_moe_thinker"),
    "voxtral",
)
_LENGTHS = (1.0, 0.5, 0.75)  # of sounds in turn, over the longest


def sound_model(source: str | PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny model of sound and text with random weights, the same every time; source: see `tiny_config`."""
    name = source.partition(":")[0] if isinstance(source, str) else source.model_type
    is_multimodal = name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    model = image_model(source, dtype, AutoModelForMultimodalLM if is_multimodal else AutoModelForSeq2SeqLM)
    model.config.audio_token_id = ELSEWHERE  # Voxtral's default is None
    return model


class Sounds(Images):
    """What makes sounds, by number, for one model."""

    def __init__(self, model: Any) -> None:
        self._base, self._config = model.base_model, model.config
        forwards = (type(model).forward, type(self._base).forward)
        self._takes = {name for forward in forwards for name in inspect.signature(forward).parameters}
        self._dtype = model.dtype
        self._counts = [self._count(number) for number in range(len(_LENGTHS))]

    def pixels(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """The features (A, M, T) of the sounds of each row, and which are no padding; {} without sounds."""
        numbers = [number for row in rows for number in row]
        if not numbers:
            return {}
        audio = self._config.audio_config
        length = 2 * getattr(audio, "n_window", getattr(audio, "max_source_positions", 64))
        features = torch.stack(
            [torch.randn(audio.num_mel_bins, length, generator=torch.Generator().manual_seed(n)) for n in numbers]
        )
        frames = torch.arange(length)
        masks = torch.stack([frames < int(length * _LENGTHS[n % len(_LENGTHS)]) for n in numbers]).long()
        names = {"feature_attention_mask", "input_features_mask"} & self._takes
        if names:
            features = features * masks[:, None]
        return {"input_features": features.to(self._dtype), **dict.fromkeys(names, masks)}

    def span(self, number: int) -> tuple[list[int], list[int]]:
        """The tokens of a sound, and their types."""
        count = self._counts[number % len(_LENGTHS)]
        return [START, *[ELSEWHERE] * count, END], [0] * (count + 2)

    @torch.no_grad()
    def _count(self, number: int) -> int:
        features = self.pixels([[number]])
        if not hasattr(self._base, "get_audio_features"):  # Qwen2-Audio
            lengths = features["feature_attention_mask"].sum(-1)
            return int(self._base.audio_tower._get_feat_extract_output_lengths(lengths)[1])
        output = self._base.get_audio_features(**features, return_dict=True)
        found = output.last_hidden_state if output.pooler_output is None else output.pooler_output
        return int(found.numel() // found.size(-1))
