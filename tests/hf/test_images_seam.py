"""The seam of models with images: what leaks across it, and what is refused there."""

from typing import Any

import pytest
import ringtile
import torch
from cells import Cell, Refusal, check, check_on_ranks, params, table
from hf_models import tiny_model
from hf_training import enter_world, make_trainer
from pool import run_ranks
from ringtile.hf.batch import active_batch
from ringtile.hf.families import CACHES
from ringtile.hf.feature import Enabled
from ringtile.hf.features import seam
from ringtile.hf.features.seam import language_model
from ringtile.hf.patches import Patches
from test_images import MOVED, STEPS, Padded, made, make_rows

from tools.models.tiny_images import image_model

# Of four packed documents, by the images in each.
BEFORE, AFTER = [[0], [], [1], []], [[], [0], [1], []]


def gradients(name: str, images: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the loss of a packed row: the places of a rank's tokens, and the gradient of what enters its first layer."""
    enter_world()
    options = made(name, "by positions")
    model, collator = options["model"].eval(), options["trainer_arguments"]["data_collator"]
    trainer = make_trainer(**options, remove_unused_columns=False)
    # A balanced layout would cut the other documents elsewhere, so that their rounds add in another order.
    ringtile.enable(trainer, {"context_parallel_size": 2, "layout": "zigzag", "first_batch_check": False})
    caught: dict[str, torch.Tensor] = {}

    def catch(module: Any, args: Any, kwargs: Any) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        caught["places"] = active_batch().places
        x.register_hook(lambda gradient: caught.update(gradient=gradient))

    _, text = language_model(model)
    text.layers[0].register_forward_pre_hook(catch, with_kwargs=True)
    rows = [{"words": range(10 * i + 10, 10 * i + 20), "images": of_row} for i, of_row in enumerate(images)]
    trainer.compute_loss(model, collator(rows)).backward()
    ringtile.restore(trainer)
    return caught["places"], caught["gradient"]


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_an_image_that_moves_leaves_other_documents_alone(name):
    """Between the first two documents; the others keep their places in the row, and every bit of their gradients."""
    if name in MOVED:
        with pytest.raises(RuntimeError, match="draws the mask of packed documents with the blocks of tokens"):
            run_ranks(2, gradients, name, BEFORE)
        return
    length = 20 + sum(made(name, "by positions")["trainer_arguments"]["data_collator"].lengths(BEFORE[:2]))
    for (places, before), (_, after) in zip(
        run_ranks(2, gradients, name, BEFORE), run_ranks(2, gradients, name, AFTER), strict=True
    ):
        others = places >= length
        assert others.any()
        assert (~others).any()
        assert torch.equal(before[:, others], after[:, others])
        assert not torch.equal(before[:, ~others], after[:, ~others])


def test_a_cache_is_no_image():
    model = image_model("qwen3_vl")
    run = Enabled(None, model, model, ringtile.Config())
    seam.FEATURE.install(run, Patches())
    assert "pixel_values" in run.keys
    assert run.keys.isdisjoint(CACHES)


# ---- refusals -----------------------------------------------------------------------------------


def changed(name: str, **more: Any) -> dict[str, Any]:
    """A model whose batches hold more."""

    class More(Padded):
        def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            batch = super().__call__(rows)
            return batch | {key: value(batch) for key, value in more.items()}

    options = made(name)
    options["trainer_arguments"]["data_collator"] = More(options["model"])
    return options


def two_language_models() -> dict[str, Any]:
    """No module is the only one with the text configuration that takes embeddings."""
    options = made("internvl")
    model = options["model"]
    model.model.other = image_model("internvl").model.language_model
    model.model.other.config = model.config.get_text_config()
    return options


def without_images() -> dict[str, Any]:
    options = two_language_models()
    return options | {
        "trainer_arguments": options["trainer_arguments"] | {"train_dataset": make_rows(8, num_images=(0,))}
    }


def hand(model: torch.nn.Module, **arguments: Any) -> dict[str, Any]:
    """Make a model give its language model more than it does."""
    _, text = language_model(model)
    text.register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs | arguments), with_kwargs=True)
    return {}


def handing(**arguments: Any) -> Any:
    return lambda trainer: hand(trainer.model, **arguments)


OPTIONS = {"max_steps": 1, "remove_unused_columns": False}
REFUSED = table(
    Refusal(
        "an argument of no model",
        "the batch holds pixel_weights",
        OPTIONS,
        made=lambda: changed("internvl", pixel_weights=lambda batch: torch.ones(3, 2)),
    ),
    Refusal(
        "which of two language models",
        "the batch holds pixel_values",
        OPTIONS,
        made=two_language_models,
    ),
    Refusal(
        "keys and values of images",
        "gives its language model cross_attention_states (7, 5), which ringtile does not know how to shard",
        OPTIONS,
        made=lambda: made("internvl"),
        prepare=handing(cross_attention_states=torch.ones(7, 5)),
    ),
    Refusal(
        "a mask of its own",
        "an attention mask (2, 1, 3, 3) in which the keys of a query are not one interval",
        OPTIONS,
        made=lambda: made("internvl"),
        prepare=handing(attention_mask=torch.ones(2, 1, 3, 3)),
        config={"first_batch_check": False},  # for which one process would fail
    ),
)


@pytest.mark.parametrize("refusal", params(REFUSED))
def test_what_the_seam_does_not_know_is_refused(refusal: Refusal) -> None:
    check_on_ranks(__name__, "REFUSED", refusal)


CELLS = table(Cell("text alone, though it is not known where images enter", STEPS, made=without_images))


@pytest.mark.parametrize("cell", params(CELLS))
def test_text_trains_where_images_are_refused(cell: Cell) -> None:
    check(__name__, cell)


def test_models_of_text_have_no_seam():
    assert language_model(tiny_model("llama")) is None
