"""Tiny images for tiny models: pixels as the processor of each model type makes them, and rows of text that hold them.

Pixels are random numbers; no processor is loaded. How many tokens an image has, the model's own tower says.

Shape letters: B rows, S tokens, I images, P pixels of a side.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from tools.models.tiny_models import VOCABULARY, tiny_config, with_random_weights

START, END, IMAGE = VOCABULARY - 3, VOCABULARY - 2, VOCABULARY - 1  # tokens around an image, and of it
FIRST_WORD, LAST_WORD = 3, VOCABULARY - 8  # tokens of text
SIDE = 32  # pixels
_MAX_POSITIONS = 256
# The model types whose processors' pixels are imitated here.
TYPES = (
    *("aya_vision", "cohere2_vision", "cohere_compass", "cosmos3_edge", "cosmos3_omni", "deepseek_vl"),
    *("ernie4_5_vl_moe", "exaone4_5", "florence2", "gemma3", "gemma4", "glm46v", "glm4v", "glm4v_moe", "glm5_next"),
    *("glm_ocr", "glmga", "got_ocr2", "hunyuan_vl", "idefics2", "idefics3", "internvl", "janus", "lfm2_vl"),
    *("lighton_ocr", "llava", "llava_next", "llava_next_video", "llava_onevision", "mistral3", "ovis2"),
    *("paligemma", "pp_chart2table", "qianfan_ocr", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl", "qwen3_5"),
    *("qwen3_5_moe", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp", "shieldgemma2", "smolvlm"),
    "step3p7",
)
_SIZES = ((1.0, 1.0), (0.5, 1.0), (1.0, 0.5), (1.0, 1.0))  # of images in turn, where images may differ: height, width
_TYPES = ("token_type_ids", "mm_token_type_ids")  # 1 for a token of an image
ELSEWHERE = VOCABULARY - 7  # the token of videos and sound, of which there are none here


def image_model(
    source: str | PretrainedConfig, dtype: torch.dtype = torch.float32, factory: Any = AutoModelForImageTextToText
) -> PreTrainedModel:
    """A tiny model of images and text with random weights, the same every time; source: see `tiny_config`."""
    config = tiny_config(source)
    for name in vars(config):
        if name.endswith(("_token_id", "_token_index")) and isinstance(getattr(config, name), int):
            kind = name.rpartition("_token_")[0]
            tokens = {"image": IMAGE, "vision_start": START, "vision_end": END, "image_start": START, "image_end": END}
            if kind not in ("pad", "bos", "eos"):
                setattr(config, name, tokens.get(kind, ELSEWHERE))
    config.get_text_config().max_position_embeddings = _MAX_POSITIONS
    return with_random_weights(factory, config, dtype)


class Images:
    """What makes images for one model."""

    def __init__(self, model: Any) -> None:
        self._base, self._config = model.base_model, model.config
        forwards = (type(model).forward, type(self._base).forward)
        self._takes = {name for forward in forwards for name in inspect.signature(forward).parameters}
        features = inspect.signature(self._base.get_image_features).parameters
        self._needs_sizes = "image_sizes" in features and features["image_sizes"].default is inspect.Parameter.empty
        self._of_features = set(features)
        self._sizes = [self._count(number) for number in range(len(_SIZES))]

    def pixels(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """The tensors of the images of each row, by number; {} without images."""
        images = [number for row in rows for number in row]
        if not images:
            return {}
        if "image_grid_thw" in self._takes:
            return self._patches(images)
        if "spatial_shapes" in self._takes:
            return self._patches_with_shapes(images)
        if "image_position_ids" in self._takes:
            return self._patches_with_places(images)
        if "pixel_attention_mask" in self._takes:
            return self._of_rows(rows)
        if self._needs_sizes:
            return self._padded(images)
        return {"pixel_values": torch.stack([_pixels(number, 3, SIDE, SIDE) for number in images])}

    def num_tokens(self, number: int) -> int:
        """Of an image."""
        return self._sizes[number % len(_SIZES)]

    def _count(self, number: int) -> int:
        pixels = {name: x for name, x in self.pixels([[number]]).items() if name in self._of_features}
        with torch.no_grad():
            features: Any = self._base.get_image_features(**pixels, return_dict=True)
        features = getattr(features, "pooler_output", features)
        of_image = features if isinstance(features, Tensor) else torch.cat([x.flatten(0, -2) for x in features])
        return of_image.numel() // of_image.size(-1)

    def span(self, number: int) -> tuple[list[int], list[int]]:
        """The tokens of an image, and their types."""
        count = self.num_tokens(number)
        return [START, *[IMAGE] * count, END], [0, *[1] * count, 0]

    def row(self, words: Sequence[int], images: Sequence[int]) -> tuple[list[int], list[int]]:
        """Words with images between them -> tokens, and their types: 1 for those of an image."""
        tokens: list[int] = []
        types: list[int] = []
        step = len(words) // (len(images) + 1)
        for i, number in enumerate(images):
            of_image, its_types = self.span(number)
            tokens += [*words[i * step : (i + 1) * step], *of_image]
            types += [0] * step + its_types
        tail = list(words[len(images) * step :])
        return tokens + tail, types + [0] * len(tail)

    def batch(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], ignored: int = 0) -> dict[str, Tensor]:
        """Rows of words and images, padded on the right, with labels of all words but the first `ignored` of a row."""
        made = [self.row(words, images) for words, images in rows]
        length = max(len(tokens) for tokens, _ in made)
        columns: dict[str, list[list[int]]] = {name: [] for name in ("input_ids", "attention_mask", "labels", "types")}
        for tokens, types in made:
            padding = length - len(tokens)
            is_word = [FIRST_WORD <= token <= LAST_WORD and i >= ignored for i, token in enumerate(tokens)]
            columns["input_ids"].append(tokens + [0] * padding)
            columns["attention_mask"].append([1] * len(tokens) + [0] * padding)
            columns["labels"].append(
                [token if held else -100 for token, held in zip(tokens, is_word, strict=True)] + [-100] * padding
            )
            columns["types"].append(types + [0] * padding)
        batch = {name: torch.tensor(column) for name, column in columns.items()}
        of_tokens = batch.pop("types")
        batch |= {name: of_tokens for name in _TYPES if name in self._takes}
        return batch | self.pixels([images for _, images in rows])

    # ---- pixels, by what the model takes ---------------------------------------------------------

    def _patches(self, images: list[int]) -> dict[str, Tensor]:
        """Patches of all images one after another (Qwen-VL, GLM-4V): rows of pixels, and the grid of each image."""
        vision = self._config.vision_config
        side = SIDE // vision.patch_size
        depth = getattr(vision, "temporal_patch_size", 1)
        channels = getattr(vision, "in_channels", getattr(vision, "num_channels", 3))
        grids = [[1, int(side * height), int(side * width)] for height, width in map(_size, images)]
        width = channels * depth * vision.patch_size**2
        pixels = [_pixels(n, grid[1] * grid[2], width) for n, grid in zip(images, grids, strict=True)]
        return {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}

    def _patches_with_shapes(self, images: list[int]) -> dict[str, Tensor]:
        """(I, patches, pixels), the height and width of each image, and 0 for padding (LFM2-VL)."""
        patch = self._config.vision_config.patch_size
        side = SIDE // patch
        shapes = torch.tensor([[int(side * part) for part in _size(number)] for number in images])
        held = torch.arange(side * side) < shapes.prod(1)[:, None]
        pixels = torch.stack([_pixels(number, side * side, 3 * patch**2) for number in images])
        return {
            "pixel_values": pixels * held[..., None],
            "spatial_shapes": shapes,
            "pixel_attention_mask": held.long(),
        }

    def _patches_with_places(self, images: list[int]) -> dict[str, Tensor]:
        """(I, patches, pixels) with the place of each patch, -1 for padding (Gemma 4)."""
        vision = self._config.vision_config
        side = 2 * vision.pooling_kernel_size
        pixels, places = [], []
        for number in images:
            height, width = (int(side * part) for part in _size(number))
            held = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(1)
            missing = side * side - height * width
            patches = _pixels(number, height * width, 3 * vision.patch_size**2)
            pixels.append(functional.pad(patches, (0, 0, 0, missing)))
            places.append(functional.pad(held, (0, 0, 0, missing), value=-1))
        return {"pixel_values": torch.stack(pixels).sigmoid(), "image_position_ids": torch.stack(places)}

    def _of_rows(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """(B, most images of a row, 3, P, P), of which some are zero (Idefics3, SmolVLM)."""
        most = max(map(len, rows))
        pixels = torch.zeros(len(rows), most, 3, SIDE, SIDE)
        for i, row in enumerate(rows):
            for j, number in enumerate(row):
                pixels[i, j] = _pixels(number, 3, SIDE, SIDE)
        mask = pixels.ne(0).all(2).long()
        return {"pixel_values": pixels, "pixel_attention_mask": mask}

    def _padded(self, images: list[int]) -> dict[str, Tensor]:
        """(I, 3, P, P), with the size of each image (Mistral 3), or in tiles (I, tiles, 3, P, P) (LLaVA-NeXT)."""
        sizes = [[int(SIDE * part) for part in _size(number)] for number in images]
        if hasattr(self._config, "image_grid_pinpoints"):
            self._config.image_grid_pinpoints = [[SIDE, SIDE]]
            tiles = torch.stack([_pixels(number, 2, 3, SIDE, SIDE) for number in images])  # the whole, and one tile
            return {"pixel_values": tiles, "image_sizes": torch.tensor([[SIDE, SIDE]] * len(images))}
        pixels = torch.zeros(len(images), 3, SIDE, SIDE)
        for i, (number, (height, width)) in enumerate(zip(images, sizes, strict=True)):
            pixels[i, :, :height, :width] = _pixels(number, 3, height, width)
        return {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}


def _size(number: int) -> tuple[float, float]:
    return _SIZES[number % len(_SIZES)]


def _pixels(number: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))
