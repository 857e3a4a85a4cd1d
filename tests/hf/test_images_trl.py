"""TRL's trainers with images, their collators and a processor of transformers: on ranks as in one process."""

import functools
from typing import Any

import pytest
import torch
from cells import Cell, check, params, table
from hf_models import tiny_tokenizer

from tools.models.tiny_images import END, FIRST_WORD, IMAGE, LAST_WORD, SIDE, START, image_model

pytest.importorskip("PIL")
datasets = pytest.importorskip("datasets")

STEPS = {"gradient_accumulation_steps": 1, "learning_rate": 0.01, "max_steps": 2, "evaluate": False}
NUM_IMAGES = (1, 2, 0, 1)
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %} <image> {% else %} "
    "{{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
)


def processor() -> Any:
    """Of Gemma 3, for the words of `tiny_tokenizer`; no hub, no torchvision."""
    from transformers import Gemma3ImageProcessorPil, Gemma3Processor

    tokenizer = tiny_tokenizer()
    for name, token in (("boi_token", START), ("eoi_token", END), ("image_token", IMAGE)):
        setattr(tokenizer, name, f"w{token}")
        setattr(tokenizer, f"{name}_id", token)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"w{token}" for token in (START, END, IMAGE)]})
    images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    template = TEMPLATE.replace("<image>", f"w{START}")
    return Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=template)


def rows(count: int, answers: tuple[str, ...]) -> Any:
    """Prompts with images, and completions of so many kinds."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)

    def words(number: int, role: str) -> list[dict[str, str]]:
        tokens = torch.randint(FIRST_WORD, LAST_WORD + 1, (number,), generator=generator).tolist()
        return [{"role": role, "content": " ".join(f"w{token}" for token in tokens)}]

    def image() -> Any:
        return Image.fromarray(torch.randint(256, (SIDE, SIDE, 3), generator=generator).byte().numpy())

    return datasets.Dataset.from_list(
        [
            {"images": [image() for _ in range(NUM_IMAGES[i % len(NUM_IMAGES)])], "prompt": words(4 + i % 3, "user")}
            | {answer: words(5 + i % 4, "assistant") for answer in answers}
            for i in range(count)
        ]
    )


def made(trainer: str) -> dict[str, Any]:
    model = image_model("gemma3")
    model.config.get_text_config().use_cache = False
    answers = ("completion",) if trainer == "SFTTrainer" else ("chosen", "rejected")
    data = {"train_dataset": rows(8, answers), "eval_dataset": rows(2, answers), "processing_class": processor()}
    if trainer == "DPOTrainer":
        data["ref_model"] = image_model("gemma3")  # else loaded by the name of the model
    return {"model": model, "trainer_class": f"trl.{trainer}", "trainer_arguments": data}


def cell(trainer: str, long: bool = True, **more: Any) -> Cell:
    return Cell(trainer, STEPS, made=functools.partial(made, trainer), long=long, needs=("trl", "PIL"), **more)


CELLS = table(cell("SFTTrainer"), cell("DPOTrainer"))


@pytest.mark.parametrize("cell", params(CELLS))
def test_ranks_train_with_images_as_one_process(cell: Cell) -> None:
    check(__name__, cell)
