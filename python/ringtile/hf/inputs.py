"""Shards a batch over the ranks of a context-parallel group: a pure function of the global batch.

Labels are shifted and position ids made on the global sequence, the sequence is padded to what the layout needs, and
every tensor is sharded once. The `ShardedBatch` carries what the attention must know about the global sequence.

Shape letters: B batch, S global tokens, P padded global tokens, N local tokens, W ranks, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ringtile.attn.call import AttentionKernel
from ringtile.errors import InputError, RefusedError
from ringtile.hf.batch import ShardedBatch, main_input
from ringtile.hf.keys import DOCUMENTS, IGNORE_INDEX, PADDING, REFUSED
from ringtile.hf.layers import LayerMask
from ringtile.hf.masks import chunks_count, mask_of_batch, read
from ringtile.sequence.device_mask import to_device
from ringtile.sequence.layout import PADDED_LIKE, Layout, resolved
from ringtile.sequence.sharded import ShardedSequence
from ringtile.transport.groups import Group, transport_of

if TYPE_CHECKING:
    from ringtile.hf.features.trees import SharedRows

_GLOBAL = {"labels"} | DOCUMENTS - PADDING.keys()  # read from the global batch, then dropped


class Reading(NamedTuple):
    """How a model reads a batch."""

    makes_positions: bool = True  # it counts 0, 1, ... for a batch without position ids, and so does `shard_batch`
    positions_separate: bool = True  # position ids that start again start a document
    takes_rows: bool = False  # it takes position ids (3 or 4, B, S) too
    causal: bool = True  # it attends no later token
    shifts_labels: bool = True  # a token predicts the next label, not its own
    layers: Iterable[LayerMask] = ()  # what its layers attend, whose masks torch.compile cannot make
    besides: frozenset[str] = frozenset()  # what it takes besides text, such as images
    checked: frozenset[str] = frozenset()  # switches that are refused elsewhere, of which its shards' part is known


def shard_batch(
    inputs: Mapping[str, Any],
    reading: Reading,
    *,
    layout: str,
    group: Group | None,
    scheme: str = "ring",
    attention_kernel: AttentionKernel = "auto",
    on_host: Mapping[str, Any] | None = None,
    positions: Tensor | None = None,
    rows: SharedRows | None = None,
) -> tuple[dict[str, Any], ShardedBatch]:
    """This rank's part of a global batch, and its ShardedBatch.

    `input_ids` (B, S) or `inputs_embeds` (B, S, E), `labels`, `shift_labels`, `position_ids` (B or 1, S) become (B, N),
    and (3 or 4, B, S) become (3 or 4, B, N). `attention_mask` (B, S) and the keys of packed batches become the mask;
    the local `attention_mask` (B, N) is left for code that counts tokens. There are no `shift_labels` where the model
    does not shift. A batch with anything that the model takes besides text stays whole but for its labels: it is
    sharded inside the model (features/seam.py). on_host: what `masks.read` returned for this batch, if it was called.
    positions (B, S): the model would make these instead of 0, 1, .... rows: of which this batch, of one row, is the
    tree. Raises RefusedError for a batch whose result would differ from one process, MaskNotExpressibleError,
    InputError.
    """
    main = main_input((), inputs)
    if main is None or main.dim() < 2:
        raise InputError(f"the batch holds {sorted(inputs)}; expected input_ids (B, S) or inputs_embeds (B, S, E)")
    batch_size, seq_len = main.shape[:2]
    causal, shifts_labels = reading.causal, reading.shifts_labels
    # token_type_ids are embedded by encoders; decoders (Gemma 3) read from them which tokens attend later ones.
    unknown = {
        name for name, is_known in (("token_type_ids", not causal), ("shift_labels", shifts_labels)) if not is_known
    }
    targets = "shift_labels" if shifts_labels else "labels"
    given = {name: inputs[name] for name in reading.besides if inputs.get(name) is not None}
    _refuse(inputs, ({*PADDING, *_GLOBAL} - unknown) | reading.besides, reading.checked)
    per_token = _per_token(inputs, main, reading, positions)
    on_host = read(inputs)[0] if on_host is None else on_host
    made = (
        mask_of_batch(on_host, batch_size, seq_len, reading.positions_separate, causal) if rows is None else rows.mask
    )
    documents = mask_of_batch(on_host, batch_size, seq_len, reading.positions_separate, causal=False) if given else None
    world_size = transport_of(group).world_size
    layout = resolved(layout, made)
    padding = -seq_len % Layout.multiple(PADDED_LIKE.get(layout, layout), world_size)
    mask = made.padded(padding)
    sequence = ShardedSequence.of(mask, Layout.of_mask(layout, mask, world_size), group, scheme=scheme)
    batch = ShardedBatch(
        sequence,
        seq_len=seq_len,
        max_position=_max_position(on_host.get("position_ids"), positions, seq_len),
        num_targets=per_token[targets].ne(IGNORE_INDEX).sum() if targets in per_token else None,
        places=to_device(sequence.layout.positions(sequence.rank), main.device),
        chunks_count=functional.pad(chunks_count(on_host, seq_len, reading.positions_separate), (0, padding)),
        attention_kernel=attention_kernel,
        causal=causal,
        rows=rows,
        documents=documents,
        before_language_model=bool(given),
    )
    for layer in reading.layers:
        batch.narrowed(layer)
    local = {name: value for name, value in inputs.items() if name not in _GLOBAL}
    for name, tensor in per_token.items():
        dim = tensor.dim() - 1 if name == "position_ids" else 1
        width = (0, 0) * (tensor.dim() - 1 - dim) + (0, padding)
        local[name] = sequence.shard(functional.pad(tensor, width, value=PADDING.get(name, IGNORE_INDEX)), dim=dim)
    batch.token_weights, batch.position_ids = local["attention_mask"], _of_text(local["position_ids"])
    if rows is not None:
        weights = functional.pad(rows.num_rows, (0, padding))
        batch.token_weights = sequence.shard(to_device(weights, main.device), dim=1)
    if shifts_labels and (inputs.get("labels") is not None or (rows is not None and targets in per_token)):
        local["labels"] = local["shift_labels"]  # labels make a model compute a loss, which reads shift_labels
    if given:  # whole, or absent; but a Trainer counts a rank's tokens by its mask, which the model does not see
        batch.whole_mask = inputs.get("attention_mask")
        of_rank = {"shift_labels", "attention_mask"}
        local = {name: x for name, x in local.items() if name in inputs or name in of_rank}
        local |= {name: inputs[name] for name in {*PADDING, *given} - of_rank if name in inputs}
    local["use_cache"] = False
    return local, batch


def _refuse(inputs: Mapping[str, Any], known: set[str], checked: frozenset[str]) -> None:
    for name, reason in REFUSED.items():
        if inputs.get(name) and name not in checked:
            raise RefusedError(f"the batch sets {name}; remove it under context parallelism: {reason}")
    for name, value in inputs.items():
        if name not in known and not _is_scalar(value):
            held = tuple(value.shape) if isinstance(value, Tensor) else f"({type(value).__name__})"
            raise RefusedError(
                f"the batch holds {name} {held}, which ringtile does not know how to shard; expected "
                f"only {', '.join(sorted(known))}: leave it out in your data collator"
            )


def _is_scalar(value: Any) -> bool:
    """Whether a shard may get the value as it is. Nested metadata may hold tensors of the whole sequence."""
    return (
        value is None or isinstance(value, bool | int | float | str) or (isinstance(value, Tensor) and value.dim() == 0)
    )


def _per_token(
    inputs: Mapping[str, Any], main: Tensor, reading: Reading, positions: Tensor | None
) -> dict[str, Tensor]:
    """The global tensors with one entry per token: the keys of PADDING, and labels that are not to be shifted."""
    batch_size, seq_len = main.shape[:2]
    for name in ("input_ids", "inputs_embeds", "labels", "shift_labels"):
        if inputs.get(name) is not None and inputs[name].shape[:2] != (batch_size, seq_len):
            raise InputError(f"{name} is {tuple(inputs[name].shape)}; expected ({batch_size}, {seq_len}) as the batch")
    per_token = {name: inputs[name] for name in PADDING if inputs.get(name) is not None}
    if "position_ids" not in per_token:
        if not reading.makes_positions:
            raise RefusedError(
                "the batch has no position_ids, and ringtile does not know how this model counts positions; add "
                "position_ids (B, S) in your data collator: a shard does not know its positions"
            )
        counted = torch.arange(seq_len, device=main.device)[None]
        per_token["position_ids"] = counted if positions is None else positions.to(main.device)
    per_token["position_ids"] = _rows(per_token["position_ids"], batch_size, seq_len, reading.takes_rows)
    per_token.setdefault("attention_mask", torch.ones(batch_size, seq_len, dtype=torch.int64, device=main.device))
    if inputs.get("labels") is not None and not reading.shifts_labels:
        per_token["labels"] = inputs["labels"]
    elif inputs.get("labels") is not None and "shift_labels" not in per_token:
        per_token["shift_labels"] = functional.pad(inputs["labels"], (0, 1), value=IGNORE_INDEX)[:, 1:]
    return per_token


def _max_position(given: Tensor | None, made: Tensor | None, seq_len: int) -> int:
    """The largest of the position ids: of the batch's, on the host, of those that the model would make, or S - 1."""
    ids = made if given is None else given
    return seq_len - 1 if ids is None else int(ids.max())


def _rows(position_ids: Tensor, batch_size: int, seq_len: int, takes_rows: bool) -> Tensor:
    """(B, S) from (B, S) or from (1, S), which models accept for all rows; likewise behind 3 or 4 rows of M-RoPE."""
    known = position_ids.dim() == 2 or (takes_rows and position_ids.dim() == 3 and position_ids.size(0) in (3, 4))
    if not known or position_ids.size(-2) not in (1, batch_size) or position_ids.size(-1) != seq_len:
        raise InputError(
            f"position_ids are {tuple(position_ids.shape)}; expected ({batch_size}, {seq_len}) or (1, {seq_len})"
            + (" or, for the M-RoPE of this model, either behind a dimension of 3 or 4" if takes_rows else "")
        )
    return position_ids.expand(*position_ids.shape[:-2], batch_size, seq_len)


def _of_text(position_ids: Tensor) -> Tensor:
    """(B, N) from (B, N) or from (3 or 4, B, N)."""
    return position_ids if position_ids.dim() == 2 else position_ids[0]
