"""One batch under context parallelism: its sharded sequence, and what the Trainer layer must remember about it.

The batch that is inside a model is the active one of its thread. Whatever mixes or counts tokens asks for it by
`active_batch`; a checkpointed layer, which runs again in the backward, maybe in another thread, brings its own along.

Shape letters: B batch, S global tokens, P padded global tokens, N local tokens; T tokens of a tree of rows.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ringtile import keep
from ringtile.errors import RefusedError
from ringtile.hf.group import ContextParallelGroup
from ringtile.hf.layers import LayerMask
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.plan import to_device
from ringtile.sequence.sharded import ShardedSequence


@dataclass(eq=False)
class SharedRows:
    """Rows that one row holds as a tree (features/trees.py), or one after another (features/dynamic.py)."""

    is_tree: ClassVar[bool] = True
    places: Tensor  # int64 (B, S): of each token of the rows, in the one row; -1: padding
    parents: list[int] = field(default_factory=list)  # of each node, as IntervalMask.tree takes them
    lengths: list[int] = field(default_factory=list)
    columns: Tensor | None = None  # int64 (1, T): of each token, in its own row; None: in the one row
    count_chunks: Callable[[], Tensor] | None = None  # as ShardedBatch has it

    @functools.cached_property
    def num_rows(self) -> Tensor:
        """int64 (1, T): of how many rows each token is."""
        return torch.bincount(self.places[self.places >= 0], minlength=self.num_tokens)[None]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def mask(self) -> IntervalMask:
        if max(self.parents, default=-1) < 0:
            return IntervalMask.documents(self.lengths)
        return IntervalMask.tree(self.parents, self.lengths)

    def unshared(self, of_tree: Tensor) -> Tensor:
        """(1, T, ...) -> (B, S, ...); 0 for padding. Differentiable: gradients of a token of several rows add up."""
        padding = of_tree.new_zeros(1, *of_tree.shape[2:])  # the last one, -1
        return torch.cat([of_tree[0], padding])[to_device(self.places, of_tree.device)]


@dataclass(eq=False)
class ShardedBatch:
    """One batch, sharded over a group."""

    sequence: ShardedSequence  # of P tokens
    seq_len: int  # S, before padding
    max_position: int  # the largest global position id
    num_targets: Tensor | None  # int64 (): targets in the global batch; None without labels
    places: Tensor  # int64 (N,): of the local tokens, in the row
    count_chunks: Callable[[], Tensor] | None = None  # int64 (B or 1, S), on the host: by what chunks are; None: places
    columns: Tensor | None = None  # int64 (N,): of the local tokens, in the row before rows were joined; None: places
    chunk_tokens: int | None = None  # of which shards are whole chunks, so that bits are those of any number of ranks
    position_ids: Tensor | None = None  # (B, N)
    token_weights: Tensor | None = None  # (B, N): the local attention mask; 1 without one, 0 for the layout's padding
    mean_share: float = 1.0  # the factor, in the loss of a shard, of what is not divided by a number of items
    balancing_loss: Tensor | None = None  # (): of the sequence, where the model has computed one
    told_padding: bool = False  # whether code of the user's has asked which tokens are real
    is_counted: bool = False  # whether a loss that does not shift was given the number of targets of all shards
    group: ContextParallelGroup | None = None
    dropout: tuple[int, int, int] | None = None  # in training: seed and step of attention's, and the first row's number
    budget: keep.CheckpointBudget | None = None  # for what its checkpointed layers keep; None: nothing
    rows: SharedRows | None = None  # the rows that its only row holds as a tree; None: its rows are the batch's
    # Of a batch that is sharded where the language model begins (features/seam.py): who may attend whom but for
    # causality.
    documents: IntervalMask | None = None
    whole_mask: Tensor | None = None  # (B, S): what the model then gets as its attention mask
    before_language_model: bool = False  # inside the model, where whole sequences run
    only_recurrences: bool = False  # of one rank: whole, and recurrent layers alone keep its documents apart
    draws_masks: bool = False  # whether the model has drawn masks itself: each layer then gets one
    _chunked: dict[int, ShardedSequence] = field(default_factory=dict)

    def narrowed(self, layer: LayerMask) -> ShardedSequence:
        """The sequence as a layer sees it. torch.compile cannot make its mask: a call outside must have done so."""
        if layer.chunk is None:
            return self.sequence.with_window(layer.window, layer.causal)
        if (self.rows is not None and self.rows.is_tree) or self.sequence.mask.key_begin is not None:
            raise RefusedError(
                "a layer attends in chunks, which are counted over rows; expected full or sliding attention for a tree "
                "of tokens: set shared_prefix: false"
            )
        if layer.chunk not in self._chunked:
            padding, counted = self.sequence.seq_len - self.seq_len, None
            if self.count_chunks is not None:
                counted = torch.nn.functional.pad(self.count_chunks(), (0, padding))
            chunks = IntervalMask.chunked(self.sequence.seq_len, layer.chunk, counted=counted)
            self._chunked[layer.chunk] = self.sequence & chunks
        return self._chunked[layer.chunk]

    def unshard(self, local: Tensor) -> Tensor:
        """The shards (B, N, ...) of all ranks -> (B, S, ...) without the padding. A collective, differentiable."""
        whole = self.sequence.unshard(local, dim=1)[:, : self.seq_len]
        return whole if self.rows is None else self.rows.unshared(whole)

    def unshard_output(self, local: Tensor) -> Tensor | None:
        """What a model returns, (..., B, N, ...) or (B N, ...) -> of all tokens; None: it has no such dimensions."""
        assert self.token_weights is not None
        shape = self.token_weights.shape
        for dim in range(local.dim() - 1):
            if local.shape[dim : dim + 2] == shape:
                dims = (dim, dim + 1)
                # Contiguous, as in one process: losses of users flatten logits with view.
                return self.unshard(local.movedim(dims, (0, 1))).movedim((0, 1), dims).contiguous()
        if local.dim() and local.size(0) == shape.numel():
            return self.unshard(local.reshape(*shape, *local.shape[1:])).flatten(0, 1)
        return None


def main_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """What a model is called with: token ids (B, S), or embeddings (B, S, E)."""
    for given in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]):
        if isinstance(given, Tensor):
            return given
    return None


# ---- the active batch ---------------------------------------------------------------------------


# What TrainingArguments and models call checkpointing of layers: transformers 5.23 has renamed it.
CHECKPOINTING = (
    "activation_checkpointing"
    if hasattr(PreTrainedModel, "activation_checkpointing_enable")
    else "gradient_checkpointing"
)
STREAMED = "ringtile_streamed"  # of a module that is streamed: how its output goes to host memory; None: it stays
_CHECKPOINTS = frozenset({"_gradient_checkpointing_func", "checkpoint_fn"})


class _Inside(threading.local):
    batch: ShardedBatch | None = None
    kept: bool = False  # by a checkpoint, whose layer runs here again


_inside = _Inside()


def active_batch() -> ShardedBatch | None:
    """Return the batch that is inside a model in this thread; None: what is inside is not sharded, or nothing is."""
    batch = _inside.batch
    return None if batch is None or batch.before_language_model or batch.only_recurrences else batch


def recurrent_batch() -> ShardedBatch | None:
    """Return the batch whose documents the recurrent layers of a model in this thread keep apart: the active one, or
    one that is whole."""
    batch = _inside.batch
    return None if batch is None or batch.before_language_model else batch


def waiting_batch() -> ShardedBatch | None:
    """Return the batch that is inside a model in this thread, before its language model."""
    batch = _inside.batch
    return batch if batch is not None and batch.before_language_model else None


def activate(batch: ShardedBatch | None) -> None:
    """Make a batch the active one, until the next call."""
    _inside.batch = batch


@contextlib.contextmanager
def active(batch: ShardedBatch | None) -> Iterator[None]:
    """Make a batch the active one inside the context."""
    before = _inside.batch
    activate(batch)
    try:
        yield
    finally:
        activate(before)


def check_not_recomputed(place: str) -> None:
    """RefusedError: without a batch, a backward computes a layer again, by a checkpoint that `keep_in_checkpoints` has
    not seen."""
    if not _inside.kept and torch._C._current_graph_task_id() != -1:
        raise RefusedError(
            f"{place} is computed again in the backward, outside of the forward pass of its batch; expected it to be "
            f"checkpointed by the Trainer's {CHECKPOINTING}"
        )


def keep_in_checkpoints(model: nn.Module) -> None:
    """Make each checkpointed layer run with the same active batch again when the backward recomputes it.

    It then takes what its attention and recurrences gave at first, within the budget of the batch (keep.py).

    Call it before each forward pass with a backward: training begins with new checkpoints.
    """
    for module, name, checkpoint in checkpoints(model):
        if not isinstance(checkpoint, _Keeping):
            setattr(module, name, _Keeping(checkpoint))


def forget_checkpoints(model: nn.Module) -> None:
    """Undo `keep_in_checkpoints`."""
    for module, name, checkpoint in checkpoints(model):
        if isinstance(checkpoint, _Keeping):
            setattr(module, name, checkpoint.checkpoint)


def checkpoints(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield the functions that checkpoint layers: transformers', and those of torch's wrappers."""
    for module in model.modules():
        for name in _CHECKPOINTS & vars(module).keys():
            yield module, name, vars(module)[name]


@dataclass(frozen=True)
class _Keeping:
    """A checkpoint function whose function runs with the batch that is active at the call."""

    checkpoint: Callable[..., Any]

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kept = _Kept(function)
        kept.inside = as_now()
        return self.checkpoint(kept, *args, **kwargs)


class _Kept(functools.partial[Any]):
    """A call of a layer, with its batch; a partial, in which checkpoint functions of other libraries find the layer."""

    inside: Callable[[], AbstractContextManager[None]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.inside():
            return super().__call__(*args, **kwargs)


def as_now() -> Callable[[], AbstractContextManager[None]]:
    """Return what to enter around something that runs now, and again in the backward: it brings the batch that is
    active now, and what attention and recurrences gave at first, within the budget of the batch."""
    batch, results = recurrent_batch(), cast("Callable[[], AbstractContextManager[None]]", contextlib.nullcontext)
    if batch is not None and batch.budget is not None and torch.is_grad_enabled():
        results = keep.Kept(batch.budget).running

    @contextlib.contextmanager
    def inside() -> Iterator[None]:
        kept, _inside.kept = _inside.kept, True
        try:
            with active(batch), results():
                yield
        finally:
            _inside.kept = kept

    return inside
