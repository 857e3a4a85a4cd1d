"""Models of images and text, with images: on ranks as in one process, the weights of the tower included."""

import functools
from typing import Any

import pytest
import torch
from cells import Cell, check, params, table
from hf_training import TOLERANCE
from ringtile.cli.tiny_images import FIRST_WORD, LAST_WORD, Images, image_model
from torch.nn import functional
from transformers import PreTrainedModel

STEPS = {"gradient_accumulation_steps": 2, "learning_rate": 0.01, "max_steps": 2, "remove_unused_columns": False}
# Gemma 4 has gradients of 14 at its random weights: a large step multiplies the rounding of the first.
STEEP = {"gemma4": {"learning_rate": 1e-4}}
# How many images are in each row of a batch: several, one, none in a row, none in a batch.
NUM_IMAGES = (2, 1, 0, 1, 3, 0, 0, 0, 1, 1)


def make_rows(num_rows: int, seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(num_rows):
        count = int(torch.randint(8, 17, (), generator=generator))
        words = torch.randint(FIRST_WORD, LAST_WORD + 1, (count,), generator=generator)
        rows.append({"words": words.tolist(), "images": [10 * i + j for j in range(NUM_IMAGES[i % len(NUM_IMAGES)])]})
    return rows


class Padded:
    """A data collator that pads rows with images on the right."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._images = Images(model)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return self._images.batch([(row["words"], row["images"]) for row in rows], ignored=3)

    def lengths(self, images: list[list[int]]) -> list[int]:
        """Of documents with these images and no words."""
        return [len(self._images.row([], of_row)[0]) for of_row in images]


class Packed(Padded):
    """A data collator that puts rows with images one after another; positions start again with each, or cu_seq_lens
    say where each ends."""

    def __init__(self, model: PreTrainedModel, named: bool) -> None:
        super().__init__(model)
        self._named = named
        self._get_rope_index = getattr(model.base_model, "get_rope_index", None)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        documents = [super(Packed, self).__call__([row]) for row in rows]
        of_tokens = [name for name in documents[0] if documents[0][name].shape == documents[0]["input_ids"].shape]
        batch = {name: torch.cat([document[name] for document in documents], 1) for name in of_tokens}
        batch |= self._images.pixels([[image for row in rows for image in row["images"]]])
        del batch["attention_mask"]
        if self._named:
            ends = torch.tensor([document["input_ids"].size(1) for document in documents]).cumsum(0)
            bounds = functional.pad(ends, (1, 0)).int()
            return batch | {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        return batch | {"position_ids": torch.cat([self._positions(document) for document in documents], -1)}

    def _positions(self, document: dict[str, torch.Tensor]) -> torch.Tensor:
        """(1, S); of M-RoPE (4, 1, S), of which the first row is that of text."""
        counted = torch.arange(document["input_ids"].size(1))[None]
        if self._get_rope_index is None:
            return counted
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw")
        positions, _ = self._get_rope_index(**{name: document.get(name) for name in names})
        return torch.cat([counted[None], positions])


def of_text(outputs: Any, labels: Any) -> torch.Tensor:
    """The logits, of a model that returns features of images too."""
    return outputs[0] if isinstance(outputs, tuple) else outputs


def made(name: str, packing: str = "") -> dict[str, Any]:
    model = image_model(name)
    collator = Packed(model, packing == "named") if packing else Padded(model)
    model.config.get_text_config().use_cache = False  # transformers cannot gather the cache of an evaluation
    data = {"train_dataset": make_rows(20), "eval_dataset": make_rows(5, seed=1), "data_collator": collator}
    return {"model": model, "trainer_arguments": {**data, "preprocess_logits_for_metrics": of_text}}


def cell(name: str, what: str = "", long: bool = True, **more: Any) -> Cell:
    options = STEPS | STEEP.get(name, {}) | more.pop("options", {})
    return Cell(f"{name}{what}", options, made=functools.partial(made, name), long=long, **more)


EVERY_RUN = ("qwen2_5_vl", "qwen3_vl", "gemma3")  # M-RoPE and windows; deep features; images that attend both ways
OTHERS = (
    *("qwen2_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma4", "internvl", "llava", "llava_next"),
    *("llava_onevision", "glm4v", "smolvlm", "idefics3", "mistral3"),
)
MODELS = [*(cell(name, long=name not in EVERY_RUN) for name in (*EVERY_RUN, *OTHERS))]
# ---- numbers of ranks, engines, ways to train -----------------------------------------------------

WHOLE = {"options": {"evaluate": True}, "predictions": 10 * TOLERANCE}  # after steps, of which each passes rounding on
WRAPPED = {"gemma3": ["Gemma3DecoderLayer", "SiglipEncoderLayer"]}  # its tower has no model of text


def under(name: str, engine: str) -> Cell:
    layers = {"transformer_layer_cls_to_wrap": WRAPPED[name]} if name in WRAPPED else {}
    fsdp = {"fsdp_config": {"version": 2, **layers}} if engine == "FSDP2" else {}
    return cell(name, f", {engine}", ranks={"engine": engine, **fsdp})


WAYS = [
    cell("qwen3_vl", ", evaluation", **WHOLE),
    cell("gemma3", ", evaluation", **WHOLE),
    cell("qwen3_vl", ", checkpointing", options={"gradient_checkpointing": True}),
    cell("gemma3", ", checkpointing", options={"gradient_checkpointing": True}),
    cell("qwen3_vl", ", own token average", options={"average_tokens_across_devices": False}),
    *(
        cell(name, f", {ranks} ranks", world=ranks, config={"context_parallel_size": ranks})
        for name in EVERY_RUN
        for ranks in (3, 4)
    ),
    *(cell(name, ", two groups", world=4, processes=2) for name in EVERY_RUN),
    *(under(name, engine) for name in EVERY_RUN for engine in ("FSDP2", "ZeRO-3")),
    *(cell("gemma3", f", {layout}", config={"layout": layout}) for layout in ("contiguous", "striped", "balanced")),
    cell("gemma3", ", ulysses", config={"context_parallel_scheme": "ulysses"}),
]

# ---- packed rows -----------------------------------------------------------------------------------


def packed(name: str, packing: str, long: bool = True) -> Cell:
    """As each document does in a row of its own."""
    return Cell(
        f"{name}, packed, {packing}",
        STEPS | STEEP.get(name, {}),
        made=functools.partial(made, name, packing),
        made_alone=functools.partial(made, name),
        ranks={"collator": None},  # but another, of `made`
        long=long,
    )


PACKED = [
    packed(name, packing)
    for name in (*EVERY_RUN, "qwen3_5", "gemma4", "internvl")
    for packing in ("by positions", "named")
]

CELLS = table(*MODELS, *WAYS, *PACKED)


@pytest.mark.parametrize("cell", params(CELLS))
def test_ranks_train_with_images_as_one_process(cell: Cell) -> None:
    check(__name__, cell)
