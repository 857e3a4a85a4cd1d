"""Models of images and text, with images: on ranks as in one process, the weights of the tower included."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cells import Cell, check, params, table
from hf_training import TOLERANCE
from peft import LoraConfig, get_peft_model
from ringtile.hf.masks import CHUNKS_FOLLOW_POSITIONS
from torch.nn import functional
from transformers import PreTrainedModel

from tools.models.tiny_images import FIRST_WORD, LAST_WORD, Images, image_model

STEPS = {"gradient_accumulation_steps": 2, "learning_rate": 0.01, "max_steps": 2, "remove_unused_columns": False}
# Gemma 4 has gradients of 14 at its random weights: a large step multiplies the rounding of the first.
STEEP = {"gemma4": {"learning_rate": 1e-4}}
# How many images are in each row of a batch: several, one, none in a row, none in a batch.
PROJECTIONS = "qkv|proj|q_proj|v_proj|linear_fc1|fc1|up_proj|down_proj"  # of towers and language models
NUM_IMAGES = (2, 1, 0, 1, 3, 0, 0, 0, 1, 1)


def make_rows(num_rows: int, seed: int = 0, num_images: Sequence[int] = NUM_IMAGES) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(num_rows):
        count = int(torch.randint(8, 17, (), generator=generator))
        words = torch.randint(FIRST_WORD, LAST_WORD + 1, (count,), generator=generator)
        rows.append({"words": words.tolist(), "images": [10 * i + j for j in range(num_images[i % len(num_images)])]})
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


def made(name: str, packing: str = "", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    model = image_model(name, dtype)
    collator = Packed(model, packing == "named") if packing else Padded(model)
    model.config.get_text_config().use_cache = False  # transformers cannot gather the cache of an evaluation
    data = {"train_dataset": make_rows(20), "eval_dataset": make_rows(5, seed=1), "data_collator": collator}
    return {"model": model, "trainer_arguments": {**data, "preprocess_logits_for_metrics": of_text}}


def adapted(name: str, part: str) -> dict[str, Any]:
    """With LoRA in the tower, in the language model, or in both. Adapters of a tower alone learn of images alone, so
    that every row has one."""
    options = made(name, dtype=torch.float64)
    tower, text = (rf".*(visual|vision_tower).*\.({PROJECTIONS})", rf".*language_model.*\.({PROJECTIONS})")
    targets = {"tower": tower, "language model": text, "both": f"({tower}|{text})"}[part]
    torch.manual_seed(1)
    lora = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    rows = {"train_dataset": make_rows(20, num_images=(2, 1, 1, 3)) if part == "tower" else make_rows(20)}
    adapted = get_peft_model(options["model"], lora).double()
    return options | {"model": adapted, "trainer_arguments": options["trainer_arguments"] | rows}


def cell(name: str, what: str = "", long: bool = True, **more: Any) -> Cell:
    options = STEPS | STEEP.get(name, {}) | more.pop("options", {})
    return Cell(f"{name}{what}", options, made=functools.partial(made, name), long=long, **more)


EVERY_RUN = ("qwen2_5_vl", "qwen3_vl", "gemma3")  # M-RoPE and windows; deep features; images that attend both ways
OTHERS = (  # than those of PROMISED
    "aya_vision",  # its tower has a norm that nothing but its last output shows
    "qwen2_vl",
    "qwen3_5_moe",
    "llava_next",
)
# In every run test_videos.py trains a whole Qwen3-VL, whose M-RoPE and deep features are beside gemma3's.
MODELS = [cell(name, long=name != "gemma3") for name in (*EVERY_RUN, *OTHERS)]

# ---- engines, ways to train -------------------------------------------------------------------------

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
    *(under(name, engine) for name in EVERY_RUN for engine in ("FSDP2", "ZeRO-3")),
    *(cell("gemma3", f", {layout}", config={"layout": layout}) for layout in ("contiguous", "striped", "balanced")),
    cell("gemma3", ", ulysses", config={"context_parallel_scheme": "ulysses"}),
]

# ---- LoRA ------------------------------------------------------------------------------------------


def lora(name: str, part: str, long: bool = True, **options: Any) -> Cell:
    made = functools.partial(adapted, name, part)
    what = ", checkpointing" * bool(options)
    return Cell(f"{name}, LoRA in {part}{what}", STEPS | options, made=made, trained="lora", long=long)


LORA = [
    lora("qwen3_vl", "tower", long=False),
    *(
        lora(name, part)
        for name in ("qwen3_vl", "gemma3")
        for part in ("tower", "language model", "both")[name == "qwen3_vl" :]
    ),
    lora("qwen3_vl", "both", gradient_checkpointing=True),
    lora("gemma3", "tower", gradient_checkpointing=True),
]

# ---- all that is promised, of all types of towers ----------------------------------------------------

# In float64 but for norms and softmax, so that five steps pass no rounding on.
PROMISED = (
    *("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "gemma3", "gemma4", "internvl", "llava"),
    *("llava_onevision", "glm4v", "smolvlm", "idefics3", "mistral3"),
)
WORLDS = {"2": (2, 2), "3": (3, 3), "4": (4, 4), "2 x 2": (4, 2)}  # ranks, and those that share a sequence
# In transformers 5.24, position ids that start again move the images in its sliding masks, which is refused.
MOVED = ("gemma3",) * CHUNKS_FOLLOW_POSITIONS
# DDP that looks for unused parameters cannot build the outputs of this model again, in transformers 5.24 by itself too;
# and must, where a batch of one of several groups has no image.
UNFLATTENED = {"qwen3_vl_moe": {"ddp_find_unused_parameters": False}}
PACKINGS = {"2": "by positions", "3": "named", "4": "by positions", "2 x 2": "named"}


def promised(name: str, ranks: str, packing: str) -> Cell:
    """Packed rows train as each document does in a row of its own."""
    world, size = WORLDS[ranks]
    alone = functools.partial(made, name, dtype=torch.float64)
    return Cell(
        f"{name}, 5 steps, {ranks} ranks, {packing or 'padded'}",
        STEPS | STEEP.get(name, {}) | UNFLATTENED.get(name, {}) | {"max_steps": 5},
        {"context_parallel_size": size},
        made=functools.partial(made, name, packing, torch.float64),
        made_alone=alone if packing else None,
        ranks={"collator": None} if packing else {},  # but another, of `made`
        world=world,
        processes=world // size,
        long=True,
    )


ALL = [
    promised(name, ranks, packing)
    for name, ranks in itertools.product(PROMISED, WORLDS)
    for packing in ("", "named" if name in MOVED else PACKINGS[ranks])
    if not (name in UNFLATTENED and ranks == "2 x 2")
]

CELLS = table(*MODELS, *WAYS, *LORA, *ALL)


@pytest.mark.parametrize("cell", params(CELLS))
def test_ranks_train_with_images_as_one_process(cell: Cell) -> None:
    check(__name__, cell)
