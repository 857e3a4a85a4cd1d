"""Shards a batch over the ranks of a context-parallel group: `shard_batch`, a pure function of the global batch, and
`Sharding`, which knows how the model of one Trainer reads its batches.

Labels are shifted and position ids made on the global sequence, one too short for the layout is padded, and
every tensor is sharded once. The `ShardedBatch` carries what the attention must know about the global sequence.

Shape letters: B batch, S global tokens, P padded global tokens, N local tokens, W ranks, E hidden size.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, Trainer

from ringtile import keep
from ringtile.errors import ConfigError, InputError, MaskNotExpressibleError, RefusedError
from ringtile.first_batch.trace import ModelCall, running_trace
from ringtile.hf.batch import ShardedBatch, SharedRows, main_input
from ringtile.hf.config import Config
from ringtile.hf.features.dynamic import join
from ringtile.hf.features.trees import share, unfold
from ringtile.hf.group import ContextParallelGroup
from ringtile.hf.keys import DOCUMENTS, IGNORE_INDEX, KEYS, LAST, MASK, OWN, PADDING, REFUSED, is_scalar, key_of_tree
from ringtile.hf.layers import LayerMask, layer_masks, mixers
from ringtile.hf.masks import chunks_count, mask_of_batch, read
from ringtile.hf.model import attends_causally, drops_attention, set_attention, shifts_labels, text_modules
from ringtile.hf.patches import Patches
from ringtile.hf.reading import BatchReader, Reading, positions_separate, tensors_per_token
from ringtile.hf.trainers import needs_full_sequences, shares_rows
from ringtile.hf.written import Written
from ringtile.sequence.layout import PADDED_LIKE, Layout, resolved
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.plan import to_device
from ringtile.sequence.sharded import ShardedSequence
from ringtile.tiled.tiles import tile_limit
from ringtile.transport.groups import Group, transport_of

_GLOBAL = {"labels"} | DOCUMENTS - PADDING.keys()  # read from the global batch, then dropped


class _Ahead(NamedTuple):
    """The sequence of a batch that has not come yet, and all that it was made of."""

    documents: dict[str, Any]  # by key, tensors on the host
    made_for: tuple[int, int, int | None]  # rows, their tokens, and those of a chunk
    sequence: ShardedSequence

    def is_of(self, on_host: Mapping[str, Any], made_for: tuple[int, int, int | None]) -> bool:
        given = _documents(on_host)
        if self.made_for != made_for or self.documents.keys() != given.keys():
            return False
        return all(_equal(x, given[name]) for name, x in self.documents.items())


class Sharding:
    """How the batches of one Trainer are sharded over a group."""

    def __init__(
        self, trainer: Trainer, base: PreTrainedModel, config: Config, group: ContextParallelGroup, patches: Patches
    ) -> None:
        self._trainer, self._base, self._config, self._group = trainer, base, config, group
        self.num_batches = 0  # that were sharded
        self._last: ShardedSequence | None = None  # of the last of them
        self._ahead: _Ahead | None = None  # of the next
        self.written = Written(base)
        self.budget: keep.CheckpointBudget | None = None  # for what checkpointed layers keep; made before each forward
        text, causal, hybrid = base.config.get_text_config(), attends_causally(base), bool(mixers(text_modules(base)))
        # States are passed from stretch to stretch, of which a balanced layout makes many.
        self._layout = resolved(config.layout) if hybrid else config.layout
        if config.dynamic_context_parallel and self._layout == "auto":
            self._layout = "whole_documents"
        self._shares_rows = shares_rows(trainer)
        self.shares_prefixes = config.shared_prefix
        self._keeps_padding = needs_full_sequences(trainer) and not self._shares_rows  # a user's loss may read it
        logs = trainer.args.process_index == 0
        per_token, per_row = frozenset(config.per_token), frozenset(config.per_row)
        if twice := (per_token & per_row) | ((per_token | per_row) & KEYS.keys()):
            raise ConfigError(
                f"per_token or per_row names {', '.join(sorted(twice))}; expected tensors of your own, each in one of "
                f"the two"
            )
        self._reader = BatchReader(base, patches, causal=causal, hybrid=hybrid, logs=logs)
        self.reading = Reading(
            positions_separate=bool(self._reader.separate),
            takes_rows=self._reader.takes_rows,
            causal=causal,
            shifts_labels=shifts_labels(base),
            layers=frozenset(layer_masks(text, causal)),
            per_token=per_token,
            per_row=per_row,
        )

    def takes(self, keys: set[str]) -> None:
        """The model takes these keys besides text."""
        self.reading = self.reading._replace(besides=self.reading.besides | keys)

    def look_ahead(self, inputs: Any) -> None:
        """Make the sequence of the next batch, with its plan, on the host while a GPU computes this one.

        inputs: as the data loader gave them. A batch of other documents, such as one that the Trainer makes of it, is
        read when it comes, and what is refused here is refused then.
        """
        main = main_input((), inputs) if isinstance(inputs, Mapping) and key_of_tree(inputs) is None else None
        if main is None or main.dim() < 2 or self._last is None:
            return
        documents = {name: x.clone() if isinstance(x, Tensor) else x for name, x in _documents(inputs).items()}
        made_for = main.size(0), main.size(1), self._chunk_tokens()
        if any(x.device.type != "cpu" for x in documents.values() if isinstance(x, Tensor)) or MASK in documents:
            return
        with contextlib.suppress(Exception):
            mask = mask_of_batch(documents, *made_for[:2], self.reading.positions_separate, self.reading.causal)
            group, scheme = self._group.process_group, self._config.context_parallel_scheme
            sequence = _sequence_of(mask, self._layout, group, scheme, made_for[2])
            for layer in self.reading.layers:
                if layer.chunk is None:
                    last, new = (each.with_window(layer.window, layer.causal) for each in (self._last, sequence))
                    new.prepare(last)
            self._ahead = _Ahead(documents, made_for, sequence)

    def shard(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], ShardedBatch | None]:
        """This rank's part of a batch, for the model. A collective.

        While the first batch is proved whole, the batch itself, and None if transformers' own code keeps its documents
        apart; else ringtile does so, on one rank.
        Raises RingMismatchError when the ranks of the group hold different batches, and whatever `shard_batch` raises.
        """
        trace = running_trace()
        whole, proves = trace is not None and trace.whole, trace is not None
        on_host = self._group.check_same_batch(inputs, None if proves else self.written)
        is_tree = key_of_tree(inputs) is not None
        given, rows, positions = dict(inputs), None, None
        if is_tree:
            given, rows = unfold(given, given.get("position_ids"))
        else:
            positions = self._reader.positions(on_host)
        shares = self.shares_prefixes or (self._config.reproducible and self._shares_rows)
        if shares and not is_tree and not whole:
            if not self._shares_rows:
                raise ConfigError(
                    f"shared_prefix: {type(self._trainer).__name__} may use more of its rows than log-probabilities of "
                    f"tokens, and the batch is no tree; expected tree_parents and tree_lengths in it, or TRL's "
                    f"GRPOTrainer, RLOOTrainer, DPOTrainer, KTOTrainer or RewardTrainer: set it to false"
                )
            given, rows = share(given, given.get("position_ids", positions), self._chunk_tokens())
            positions = None
        elif self._config.dynamic_context_parallel and not is_tree and not whole:
            given, rows = join(given, on_host, self.reading, positions, keeps_padding=self._keeps_padding)
            positions = positions if rows is None else None
        # Documents that a rank holds whole prove nothing of how ranks share them.
        layout = "per_document" if proves and self._layout == "whole_documents" else self._layout
        local, batch = shard_batch(
            given,
            self.reading,
            layout=layout,
            group=None if whole else self._group.process_group,
            scheme="ring" if whole else self._config.context_parallel_scheme,
            chunk_tokens=self._chunk_tokens(),
            on_host=on_host if rows is None else None,
            positions=positions,
            rows=rows,
            ahead=None if whole or rows is not None else self._ahead,
        )
        self._reader.check_largest(batch.max_position)
        counted = attention_mask.ne(0) if (attention_mask := inputs.get("attention_mask")) is not None else None
        if trace is not None and whole and not is_tree and self._is_plain(on_host):
            main = main_input((), inputs)
            assert main is not None  # of it the batch was made
            call = ModelCall((main.size(0), main.size(1)), None, main.size(1), counted)
            trace.begin(call, any(inputs.get(name) is not None for name in self.reading.besides))
            return {**{name: x for name, x in inputs.items() if name != MASK}, "use_cache": False}, None
        if whole:  # in the user's attention, which the proof has set
            set_attention(self._base)
        self.num_batches += 1
        self._last = batch.sequence
        self.written.batches += [] if proves else [batch]
        batch.group, batch.mean_share, batch.budget = self._group, 1 / batch.sequence.world_size, self.budget
        if trace is not None:
            assert batch.token_weights is not None
            shape = (batch.token_weights.size(0), batch.sequence.local_len)
            places = None if batch.rows is None else batch.rows.places
            call = ModelCall(shape, batch.sequence, batch.seq_len, counted, places)
            trace.begin(call, batch.before_language_model)
        return local, batch

    def _chunk_tokens(self) -> int | None:
        tokens = self._config.tile_tokens
        return min(tokens, tile_limit() or tokens) if self._config.reproducible else None

    def _is_plain(self, inputs: Mapping[str, Any]) -> bool:
        """Whether transformers' own code computes in this batch what ringtile's does."""
        main = main_input((), inputs)
        if main is None or self._reader.lacks_text_row(inputs):
            return False
        if mixers(text_modules(self._base)) or drops_attention(self._base):
            # Recurrent layers of transformers are less exact, and join documents; no counters drop its attention.
            return False
        rows, seq_len = main.shape[:2]
        causal = self.reading.causal
        mask = mask_of_batch(inputs, rows, seq_len, self.reading.positions_separate, causal)
        seen = {name: value for name, value in inputs.items() if name in ("attention_mask", "position_ids")}
        if seen.get("attention_mask") is not None:
            seen["attention_mask"] = seen["attention_mask"].ne(0).to(torch.int64)
        separate = bool(positions_separate(self._base, causal))
        try:
            return mask_of_batch(seen, rows, seq_len, separate, causal) == mask
        except (RefusedError, MaskNotExpressibleError):  # of what transformers sees of the batch
            return False


def shard_batch(
    inputs: Mapping[str, Any],
    reading: Reading,
    *,
    layout: str,
    group: Group | None,
    scheme: str = "ring",
    chunk_tokens: int | None = None,
    on_host: Mapping[str, Any] | None = None,
    positions: Tensor | None = None,
    rows: SharedRows | None = None,
    ahead: _Ahead | None = None,
) -> tuple[dict[str, Any], ShardedBatch]:
    """This rank's part of a global batch, and its ShardedBatch.

    `input_ids` (B, S) or `inputs_embeds` (B, S, E), `labels`, `shift_labels`, `position_ids` (B or 1, S) become (B, N),
    and (3 or 4, B, S) become (3 or 4, B, N). `attention_mask` (B, S) and the keys of packed batches become the mask;
    the local `attention_mask` (B, N) is left for code that counts tokens. There are no `shift_labels` where the model
    does not shift. A batch with anything that the model takes besides text stays whole but for its labels: it is
    sharded inside the model (features/seam.py). What `reading` calls per token is sharded too, what it calls per row is
    left whole. chunk_tokens: every shard is of whole chunks of so many.
    on_host: what `masks.read` returned for this batch, if it was called. positions (B, S): the model would make these
    instead of 0, 1, .... rows: of which this batch, of one row, is the tree. ahead: whose sequence may be that of this
    batch. Raises RefusedError for a batch whose result would differ from one process, MaskNotExpressibleError,
    InputError.
    """
    main = main_input((), inputs)
    if main is None or main.dim() < 2:
        raise InputError(f"the batch holds {sorted(inputs)}; expected input_ids (B, S) or inputs_embeds (B, S, E)")
    batch_size, seq_len = main.shape[:2]
    causal, shifts_labels = reading.causal, reading.shifts_labels
    # token_type_ids are embedded by encoders; decoders (Gemma 3) read from them which tokens attend later ones.
    unknown = ({"token_type_ids"} if causal else set()) | (set() if shifts_labels else {"shift_labels"})
    if inputs.get("is_causal") not in (None, causal):
        raise RefusedError(
            f"the model is called with is_causal={inputs['is_causal']}, and its config says {causal}; expected "
            f"config.is_causal set before ringtile.enable"
        )
    targets = "shift_labels" if shifts_labels else "labels"
    given = {name: inputs[name] for name in reading.besides if inputs.get(name) is not None}
    if inputs.get(MASK) is not None and (rows or given or any(each != LayerMask() for each in reading.layers)):
        what = "rows that share tokens" if rows else "images" if given else "windows or chunks of layers"
        raise RefusedError(f"the batch holds {MASK} beside {what}; expected layers that attend by it alone, and text")
    _refuse(inputs, ({*PADDING, *_GLOBAL} - unknown) | reading.besides | reading.per_token | reading.per_row)
    per_token = tensors_per_token(inputs, main, reading, positions)
    on_host = on_host or read(inputs)[0]
    if ahead is not None and ahead.is_of(on_host, (batch_size, seq_len, chunk_tokens)):
        sequence = ahead.sequence
    else:
        separate = reading.positions_separate
        mask = mask_of_batch(on_host, batch_size, seq_len, separate, causal) if rows is None else rows.mask
        sequence = _sequence_of(mask, layout, group, scheme, chunk_tokens)
    padding = sequence.seq_len - seq_len
    documents = mask_of_batch(on_host, batch_size, seq_len, reading.positions_separate, causal=False) if given else None
    columns = None
    if rows is not None and rows.columns is not None:
        columns = sequence.shard(to_device(functional.pad(rows.columns, (0, padding)), main.device), dim=1)[0]
    counted = positions if on_host.get("position_ids") is None else on_host["position_ids"]
    batch = ShardedBatch(
        sequence,
        seq_len=seq_len,
        max_position=seq_len - 1 if counted is None else int(counted.max()),
        num_targets=per_token[targets].ne(IGNORE_INDEX).sum() if targets in per_token else None,
        places=to_device(sequence.layout.positions(sequence.rank), main.device),
        columns=columns,
        count_chunks=functools.partial(
            chunks_count, {name: on_host.get(name) for name in DOCUMENTS}, seq_len, reading.positions_separate
        )
        if rows is None
        else rows.count_chunks,
        chunk_tokens=chunk_tokens,
        rows=rows,
        documents=documents,
        before_language_model=bool(given),
    )
    for layer in reading.layers:
        batch.narrowed(layer)
    local = {name: value for name, value in inputs.items() if name not in _GLOBAL}
    last = _last_tokens(on_host.get("attention_mask"), batch_size, seq_len) if padding else None
    for name, tensor in per_token.items():
        dim = tensor.dim() - 1 if name == "position_ids" else 1
        if last is not None:
            value = PADDING.get(name, IGNORE_INDEX if "label" in name else LAST)
            tensor = _padded(tensor, dim, padding, value, last)
        local[name] = sequence.shard(tensor, dim=dim)
    if "attention_mask" not in per_token:
        local["attention_mask"] = (batch.places < seq_len).long().expand(batch_size, -1)
    batch.token_weights, batch.position_ids = local["attention_mask"], local["position_ids"]
    if batch.position_ids.dim() == 3:  # of M-RoPE, whose first row is that of text
        batch.position_ids = batch.position_ids[0]
    if rows is not None:
        weights = functional.pad(rows.num_rows, (0, padding))
        batch.token_weights = sequence.shard(to_device(weights, main.device), dim=1)
    if shifts_labels and (inputs.get("labels") is not None or (rows is not None and targets in per_token)):
        local["labels"] = local["shift_labels"]  # labels make a model compute a loss, which reads shift_labels
    if given:  # whole, or absent; but a Trainer counts a rank's tokens by its mask, which the model does not see
        batch.whole_mask = inputs.get("attention_mask")
        of_rank = {"shift_labels", "attention_mask"}
        local = {name: x for name, x in local.items() if name in inputs or name in of_rank}
        local |= {name: inputs[name] for name in {*PADDING, *given, *reading.per_token} - of_rank if name in inputs}
    local["use_cache"] = False
    return local, batch


def _documents(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name in sorted(DOCUMENTS) if (x := inputs.get(name)) is not None}


def _equal(x: Any, y: Any) -> bool:
    """Return whether two tensors, or two numbers, are equal; nothing else is compared."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y)
    return type(x) is type(y) is int and x == y


def _sequence_of(
    mask: IntervalMask, layout: str, group: Group | None, scheme: str, chunk_tokens: int | None
) -> ShardedSequence:
    """The sequence of a mask (B or 1, S), with padding where the layout needs it, or chunks do."""
    world_size = transport_of(group).world_size
    layout = resolved(layout, mask)
    fewest = Layout.multiple(PADDED_LIKE.get(layout, layout), world_size)
    seq_len = mask.seq_len
    mask = mask.padded(
        max(0, fewest - seq_len) if chunk_tokens is None else -seq_len % (fewest * chunk_tokens), attends=True
    )
    return ShardedSequence.of(mask, Layout.of_mask(layout, mask, world_size), group, scheme=scheme)


def _last_tokens(attention_mask: Tensor | None, batch_size: int, seq_len: int) -> Tensor:
    """int64 (B,), on the host: the last token of each row that is no padding."""
    if attention_mask is None:
        return torch.full((batch_size,), seq_len - 1, device="cpu")
    return seq_len - 1 - attention_mask.ne(0).int().flip(1).argmax(1)


def _padded(x: Tensor, dim: int, padding: int, value: int | str, last: Tensor) -> Tensor:
    """x (..., B, S, ...) with more tokens at its end. dim: that of S. value: theirs; LAST: that of the row's last."""
    if isinstance(value, int):
        return functional.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, padding), value=value)
    rows = x.movedim((dim - 1, dim), (0, 1))
    places = torch.arange(rows.size(0), device=x.device), to_device(last, x.device)
    ends = rows.detach()[places].unsqueeze(1)
    padded = torch.cat([rows, ends.expand(-1, padding, *ends.shape[2:])], dim=1)
    return padded.movedim((0, 1), (dim - 1, dim))


def _refuse(inputs: Mapping[str, Any], known: set[str]) -> None:
    for name, reason in REFUSED.items():
        if inputs.get(name):
            raise RefusedError(f"the batch sets {name}; remove it under context parallelism: {reason}")
    for name, value in inputs.items():
        if name not in known and not is_scalar(value):
            held = tuple(value.shape) if isinstance(value, Tensor) else f"({type(value).__name__})"
            raise RefusedError(
                f"the batch holds {name} {held}, which ringtile does not know how to shard; expected "
                f"only {', '.join(sorted(known))}: {OWN}, or leave it out in your data collator"
            )
