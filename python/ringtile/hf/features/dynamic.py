"""Dynamic context parallelism: the rows that the ranks of a group would get each are one packed row of all of them.

A group gets the rows of as many processes in each batch. Their tokens become one row without padding, a document for
each of the rows' documents, and the layout decides how many ranks a document is on. A step, its loss and its counts
are those of one process with all rows.

Shape letters: B rows, S tokens of a row, T tokens of the joined row, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from ringtile.errors import RefusedError
from ringtile.hf import trainers
from ringtile.hf.batch import SharedRows, main_input
from ringtile.hf.feature import Enabled, Feature
from ringtile.hf.keys import DOCUMENTS, IGNORE_INDEX
from ringtile.hf.masks import chunks_count, mask_of_batch
from ringtile.hf.patches import Patches
from ringtile.hf.reading import Reading, tensors_per_token
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.plan import to_device


class JoinedRows(SharedRows):
    """Rows that one row holds one after another."""

    is_tree = False

    def __init__(self, places: Tensor, mask: IntervalMask, weights: Tensor, count_chunks: Callable[[], Tensor]) -> None:
        columns = torch.arange(places.size(1), device="cpu").expand_as(places)[places >= 0]
        super().__init__(places, [-1], [mask.seq_len], columns[None], count_chunks)
        self._mask, self._weights = mask, weights

    @property
    def mask(self) -> IntervalMask:
        return self._mask

    @property
    def num_rows(self) -> Tensor:
        """(1, T): of a token of a row its attention mask, as code that counts tokens reads it."""
        return self._weights


def join(
    inputs: Mapping[str, Any],
    on_host: Mapping[str, Any],
    reading: Reading,
    positions: Tensor | None = None,
    *,
    keeps_padding: bool = False,
) -> tuple[dict[str, Any], JoinedRows | None]:
    """A batch of one row that holds the rows of a batch; None where it is one row already.

    Padding at the ends of a row that predicts nothing is left out, unless keeps_padding: a loss may read it.
    on_host: what `masks.read` returned for this batch. positions: as in `shard_batch`. The batch gets `position_ids`,
    and `shift_labels` where it had labels that are to be shifted. RefusedError: rows hold more than tokens.
    """
    main = main_input((), inputs)
    if main is None or main.dim() < 2 or main.size(0) == 1:
        return dict(inputs), None
    num_rows, seq_len = main.shape[:2]
    for name in sorted(reading.besides | reading.per_row):
        if inputs.get(name) is not None:
            raise RefusedError(
                f"dynamic_context_parallel: the batch holds {num_rows} rows with {name}, which cannot be joined; "
                f"expected tensors of tokens, or one packed row from the data collator"
            )
    columns = tensors_per_token(inputs, main, reading, positions)
    targets = columns.get("shift_labels" if reading.shifts_labels else "labels")
    mask = mask_of_batch(on_host, num_rows, seq_len, reading.positions_separate, reading.causal)
    held = torch.ones(num_rows, seq_len, dtype=torch.bool, device="cpu")
    if not keeps_padding and (real := inputs.get("attention_mask")) is not None:
        held = (real.ne(0) if targets is None else real.ne(0) | targets.ne(IGNORE_INDEX)).cpu()
        held[0, 0] |= not held.any()
    # From the first to the last token of a row: padding between them is a matter of the mask.
    inside = (held.cumsum(1) > 0) & (held.flip(1).cumsum(1).flip(1) > 0)
    lengths, firsts = inside.sum(1, keepdim=True), inside.int().argmax(1, keepdim=True)
    offsets = lengths.cumsum(0) - lengths
    places = torch.where(inside, inside.cumsum(1) - 1 + offsets, -1)

    def moved(bound: Tensor) -> Tensor:
        in_row = (bound.expand(num_rows, -1) - firsts).clamp(min=0).minimum(lengths)
        return (in_row + offsets)[inside][None].int()

    taken = to_device(inside.flatten().nonzero()[:, 0], main.device)
    batch = {
        name: x for name, x in inputs.items() if name not in columns and name != "labels" and name not in DOCUMENTS
    }
    for name, x in columns.items():
        dim = x.dim() - 2 if name == "position_ids" else 0
        rows = x.expand(*x.shape[:dim], num_rows, *x.shape[dim + 1 :])
        batch[name] = rows.flatten(dim, dim + 1).index_select(dim, taken).unsqueeze(dim)
    weights = batch.get("attention_mask", torch.ones_like(taken)[None]).ne(0).long()
    documents = {name: on_host.get(name) for name in DOCUMENTS}

    def count_chunks() -> Tensor:
        counts = chunks_count(documents, seq_len, reading.positions_separate)
        return counts.expand(num_rows, -1)[inside][None]

    return batch, JoinedRows(places, IntervalMask(*map(moved, mask.tensors)), weights.cpu(), count_chunks)


def _refuse(run: Enabled) -> None:
    trainer = run.trainer
    name, loader = type(trainer).__name__, trainers.home(trainer, "get_train_dataloader")
    refused = {
        f"{name} generates the rows of a step": trainers.generates(trainer),
        f"the samplers of axolotl's {name} count batches of ranks": name != "Trainer"
        and any(cls.__module__.startswith("axolotl.") for cls in type(trainer).__mro__),
        f"{loader.__name__} makes its own train dataloader": loader is not Trainer,
        "accelerator_config has split_batches, by which ranks divide a batch": trainer.accelerator.split_batches,
    }
    for reason, holds in refused.items():
        if holds:
            raise RefusedError(
                f"dynamic_context_parallel: {reason}, and ringtile cannot add up the rows of all ranks; set "
                f"context_parallel_size to the number of ranks and per_device_train_batch_size to the rows of all"
            )


def batch_rows_of(ranks: int, trainer: Trainer, patches: Patches) -> None:
    """Make the batches of a training hold the rows of so many processes."""

    def of_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for_call = Patches()
        for_call.set(trainer, "_train_batch_size", trainer._train_batch_size * ranks)
        try:
            return original(*args, **kwargs)
        finally:
            for_call.restore()

    for method in ("get_train_dataloader", "get_total_train_batch_size"):
        patches.wrap(trainer, method, of_group)


FEATURE = Feature(
    frozenset({"get_train_dataloader", "get_total_train_batch_size"}), refuse=_refuse, key="dynamic_context_parallel"
)
