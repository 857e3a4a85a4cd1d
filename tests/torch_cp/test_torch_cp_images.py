"""`context_parallel(model=...)`: models of images and text in a plain loop, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hf_models import tiny_model, with_lora
from pool import run_ranks
from ringtile import IntervalMask, context_parallel
from test_torch_cp_noticed import loss_of, message_of
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tools.models.tiny_images import FIRST_WORD, Images, image_model

# Two images and one; the second row ends with padding. Then text alone.
ROWS = [(range(FIRST_WORD, FIRST_WORD + 14), [0, 1]), (range(FIRST_WORD + 20, FIRST_WORD + 31), [2])]
TEXT = [(words, []) for words, _ in ROWS]
LOSS = 1e-12  # sums of a few hundred terms in float64
# The norms of these compute in float32, and round gradients twice each, in 5 of them.
ROUNDED = {"qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "mistral3", "glm4v"}


def made(name: str, rows: Any = ROWS) -> tuple[Any, dict[str, Tensor], Tensor]:
    """A model, what it is called with, and labels that are shifted."""
    model: Any = image_model(name, torch.float64)
    batch = Images(model).batch(rows)
    batch = {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}
    return model, batch, F.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)


def differences(
    name: str, layout: str = "zigzag", checkpoints: str = "", after: bool = False, rows: Any = ROWS, within: str = ""
) -> list[float]:
    """Return how far loss and gradients of a loop on ranks are from those of one process, relative to the largest."""
    model, batch, labels = made(name, rows)
    model = with_lora(model) if within == "adapters" else model
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    single = loss_of(model(**batch).logits, labels)
    wanted = [single.detach(), *torch.autograd.grad(single, weights, allow_unused=True)]
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoints == "reentrant"})
    if within == "DDP":
        model = DistributedDataParallel(model, find_unused_parameters=True)
    mask = IntervalMask.from_padding(batch["attention_mask"], causal=False)
    with context_parallel(
        dist.group.WORLD,
        buffers=[labels],
        buffer_seq_dims=[1],
        no_restore_buffers={labels},
        model=model,
        mask=mask,
        layout=layout,
    ):
        loss = loss_of(model(**batch).logits, labels)
        if not after:
            loss.backward()
    if after:
        loss.backward()
    found = []
    for got, exact in zip([loss.detach(), *(weight.grad for weight in weights)], wanted, strict=True):
        if exact is None:  # not used
            assert got is None or not got.any()
            continue
        dist.all_reduce(got)
        found.append(((got - exact).abs().max() / exact.abs().max().clamp(min=1)).item())
    return found


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


CASES = [
    ("qwen3_vl", 3, {"checkpoints": "yes"}),
    ("gemma3", 2, {}),
    *(long(name, 2, {}) for name in ("qwen2_5_vl", "gemma4", "internvl", "llava", "smolvlm", "mistral3", "glm4v")),
    *(long("qwen3_vl", 2, {"layout": layout}) for layout in ("contiguous", "striped")),
    *(long("gemma3", 3, {"checkpoints": kind, "after": after}) for kind in ("yes", "reentrant") for after in (0, 1)),
    long("llava", 2, {"rows": TEXT}),
    *(long("llava", 2, {"within": within}) for within in ("DDP", "adapters")),
    long("gemma3", 2, {"rows": TEXT}),
]


@pytest.mark.parametrize(("name", "ranks", "options"), CASES)
def test_images_in_a_plain_loop(name: str, ranks: int, options: dict[str, Any]) -> None:
    for loss, *gradients in run_ranks(ranks, differences, name, **options):
        assert loss <= LOSS
        assert max(gradients) <= (10 * 2**-24 if name in ROUNDED else LOSS)


# ---- refusals -----------------------------------------------------------------------------------


def run_in_block(model: Any, batch: dict[str, Tensor], labels: Tensor, called: Any = None, **options: Any) -> None:
    with context_parallel(dist.group.WORLD, **{"buffers": [labels], "buffer_seq_dims": [1], "model": model, **options}):
        (called or model)(**batch)


def inside_another() -> None:
    x, of_model = torch.zeros(2, 8), made("llava")
    with context_parallel(dist.group.WORLD, buffers=[x], buffer_seq_dims=[1]):
        run_in_block(*of_model)


def of_text() -> None:
    run_in_block(tiny_model(), *made("llava")[1:])


def the_language_model() -> None:
    model, batch, labels = made("llava")
    embeddings = torch.zeros(*batch["input_ids"].shape, 32, dtype=torch.float64)
    run_in_block(model, {"inputs_embeds": embeddings}, labels, called=model.model.language_model)


def the_model_inside() -> None:
    model, batch, labels = made("llava")
    run_in_block(model, batch, labels, called=model.model)


def keys_of_images() -> None:
    model, batch, labels = made("llava")
    mask = IntervalMask.from_padding(batch["attention_mask"], causal=False)
    model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"cross_attention_states": torch.ones(7, 5)}), with_kwargs=True
    )
    run_in_block(model, batch, labels, mask=mask)


REFUSED = {
    "pass it mask=IntervalMask.from_padding(attention_mask)": lambda: run_in_block(*made("llava")),
    "LlamaForCausalLM has no language model that ringtile knows": of_text,
    "expected one call, of the module that context_parallel was given": the_language_model,
    "the layout gives rank": the_model_inside,  # whose tower is attention of images over the ring
    "gives its language model cross_attention_states (7, 5)": keys_of_images,
    "expected it in the outermost block": inside_another,
    "no buffers; expected labels": lambda: run_in_block(*made("llava"), buffers=None, buffer_seq_dims=None),
    "expected no check beside model": lambda: run_in_block(*made("llava"), check=(torch.nn.Linear(1, 1), print)),
}


def refusals() -> list[str]:
    """Return what each of them says; the group goes on."""
    return [message_of(call) for call in REFUSED.values()]


def test_what_a_block_cannot_cut_is_refused() -> None:
    for rank in run_ranks(2, refusals):
        for part, message in zip(REFUSED, rank, strict=True):
            assert part in message
