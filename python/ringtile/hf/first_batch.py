"""The first training step, and a first evaluation before it, proves on a cut of its batch that the ranks of a group
compute what one process computes (docs/design/first_batch.md).

The user's loss runs once, in the step itself. When it first calls the model, the model computes a cut of what it was
given three times: alone, with nothing sharded; alone, with other rounding; and sharded over the group. Hidden states,
outputs and gradients are compared, module by module, and what the model has written.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ringtile.errors import RefusedError, RingtileError
from ringtile.first_batch.compare import Comparison
from ringtile.first_batch.own import own_code
from ringtile.first_batch.proof import prove
from ringtile.first_batch.quiet import without_checkpoints, without_hooks
from ringtile.first_batch.state import State
from ringtile.first_batch.trace import Trace, running_trace
from ringtile.hf.features import stream
from ringtile.hf.features.dropout import without_dropout
from ringtile.hf.group import of_a_collective
from ringtile.hf.keys import MASK, key_of_tree
from ringtile.hf.model import inside_engine, own_attention
from ringtile.sequence.mask import IntervalMask
from ringtile.tiled.tiles import at_most

if TYPE_CHECKING:
    from ringtile.hf.loss import ShardedLoss

logger = logging.getLogger("ringtile")

_TOKENS = 512  # of all rows together, at least
_ROW = 64  # tokens of a row, at least
_MARGIN = 8  # tokens of a row, at least, before the edge that the cut shows
_TARGETS = ("labels", "completion_mask")  # in the names of the keys that say which tokens have targets
_TILES = 3  # tiles of a shard of the cut, at least
_LARGEST_WINDOW = 1024  # tokens: a cut is longer than windows and chunks up to this one
_MULTIPLES = ("pad_to_multiple_of", "chunk_size", "mamba_chunk_size", "block_size")  # of a row's tokens, declared
_WITH_IMAGES = 4096  # tokens of all rows of a batch that is proved with its images, of which no cut can be made
_LONGEST = 8192  # tokens of a batch that is proved whole, where its cut fails
_ALIKE_SECONDS = 20.0  # within which all ranks fail that fail at the same place, between two gathers of weights
_INSTEAD = "ringtile verify proves this machine and these versions, on models of its own"


class _UnprovedError(RefusedError):
    """Nothing can be compared. Raised on every rank of the world."""


class FirstBatch:
    """The proof of one Trainer. comparison: the last one, for `ringtile verify`."""

    def __init__(self, loss: ShardedLoss) -> None:
        self._loss = loss
        self._trained = self._evaluated = False
        self.comparison: Comparison | None = None

    @property
    def waits(self) -> bool:
        """Whether a call of the model in training is still to be proved."""
        return not self._trained

    def before(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        loss_of: Callable[[nn.Module, dict[str, Any]], Tensor | None],
        *,
        num_items: Tensor | float | None = None,
        named: str = "the loss",
        numbers_of: object = None,
    ) -> None:
        """Proves a batch, if it is the first one, before the model is called on it.

        inputs: of the whole batch, on the model's device. loss_of(model, cut): the loss of a cut of it, which calls the
        model; None where there is none. num_items: what the loss is divided by, which only a proof reads. named: the
        loss, in words. numbers_of: an object besides the model whose numbers it may change.
        RefusedError, on every rank of the group: the sharded run differs by more than rounding explains; or, under
        first_batch_check: require, nothing can be proved, of which there is else a warning. A loss that is not finite
        leaves the proof to the next batch.
        """
        in_training = torch.is_grad_enabled()
        if running_trace() is not None or self._trained or (self._evaluated and not in_training):
            return
        self._trained, self._evaluated = in_training, True
        inner = inside_engine(model)
        # What the user has wrapped around the call (a checkpoint, offloading) keeps its own tensors only.
        own_tensors = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        count = 1 if num_items is None else int(num_items)
        options = {"num_items": count, "named": named, "averages": True}
        try:
            with own_tensors, without_checkpoints(inner), torch.compiler.set_stance("force_eager"):
                # In a copy of the context: variables of contextvars are set in it alone.
                contextvars.copy_context().run(self._prove, inner, inputs, loss_of, numbers_of, options)
        except _UnprovedError as error:
            self._say(error)

    def _say(self, unproved: _UnprovedError) -> None:
        """Warns, or refuses."""
        if self._loss.config.first_batch_check == "require":
            raise RefusedError(f"{unproved}. Set first_batch_check: auto to train without the proof; {_INSTEAD}")
        if self._loss.trainer.args.process_index == 0:
            logger.warning("ringtile: %s; the training goes on unproved. %s", unproved, _INSTEAD)

    def _prove(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        loss_of: Callable[[nn.Module, dict[str, Any]], Tensor | None],
        numbers_of: object,
        options: dict[str, Any],
    ) -> None:
        """All ranks of the world decide alike what is proved: groups that make other forward passes of a model, or of
        its tower, hang under FSDP2 and ZeRO-3, which gather weights in each."""
        loss = self._loss
        images = loss.sharding.reading.besides & {name for name, value in inputs.items() if value is not None}
        code = own_code(model, ALL_ATTENTION_FUNCTIONS.values())
        with without_hooks(model) as hooks:
            try:
                state = State(model, code, holder=numbers_of)
            except Exception as error:  # of an object of the user's, which does not let itself be read
                state = State(model, [], holder=numbers_of)
                state.unknown = f"code of yours runs in the model, and its state ({type(error).__name__}: {error})"
            is_tree, is_unknown, has_code, num_tokens = loss.group.largest_of_all(
                *(int(key_of_tree(inputs) is not None), int(bool(state.unknown)), int(bool(code))),
                _num_tokens(inputs, images) if images else 0,
            )
            if is_tree:
                raise _UnprovedError("the first batch proves nothing: it is a tree, of which no cut is made")
            if is_unknown:
                what = state.unknown or "another rank holds something"
                raise _UnprovedError(
                    f"the first batch proves nothing: {what}, which a forward pass may change for good"
                )
            if num_tokens > _WITH_IMAGES:
                logger.warning(
                    f"ringtile: the first batch has images and {num_tokens} tokens; of more than {_WITH_IMAGES} a cut "
                    f"is proved, without the images"
                )
                inputs, images = {name: value for name, value in inputs.items() if name not in images}, frozenset()
            options |= {"own_code": bool(has_code), "besides": [_of_hooks(hooks)] * bool(hooks)}
            try:
                self._prove_cut(model, inputs, images, loss_of, state, options)
            finally:
                state.restore()
        if loss.group.largest_of_all(int(self.comparison is None)) != [0]:
            self._trained = self._evaluated = False
            return
        self._report(state)

    def _report(self, state: State) -> None:
        """Says what is no difference, but may be an error."""
        found, group = self.comparison, self._loss.group
        assert found is not None
        if found.parts and self._loss.trainer.args.process_index == 0:
            logger.warning(
                "ringtile: in a forward pass each rank writes a part of %s, and one process their sum, mean or "
                "largest: reduce it over the ranks before it is used",
                ", ".join(found.parts),
            )
        is_unsteady, is_lost = group.largest_of_all(int(bool(found.unsteady)), int(bool(state.lost)))
        if is_lost:
            raise _UnprovedError(f"a forward pass writes {state.lost or 'a weight'}, which the proof has changed")
        if is_unsteady:
            raise _UnprovedError(
                f"the sharded run of the first batch, made twice, gave other bits, first in "
                f"{found.unsteady or 'a module of another rank'}: its code keeps a state that the proof "
                f"has changed, or its kernels round otherwise each time"
            )

    def _prove_cut(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        images: Set[str],
        loss_of: Callable[[nn.Module, dict[str, Any]], Tensor | None],
        state: State,
        options: dict[str, Any],
    ) -> None:
        """Of a cut on which one process fails, the batch itself is tried, once. Where the ranks differ, shared_prefix
        and stream are switched off, one after the other: the rest of the path is that of any batch."""
        loss, batch, is_whole, first, off = self._loss, self._cut(inputs, images), False, "", list[str]()
        optional = [key for key in ("shared_prefix", "stream") if getattr(loss.config, key)]
        keeps = loss.config.reproducible or loss.config.first_batch_check == "require"
        paths = {module: path for path, module in loss.base.named_modules()}
        # As ZeRO-3 does after each step: a weight that another module than its own reads, such as a mixer that of its
        # convolution, is else gathered in each run, which DeepSpeed takes for an error in the order of its weights.
        small: list[Any] = [weight for weight in model.parameters() if getattr(weight, "ds_persist", False)]
        if small:
            small[0].all_gather(small)
        while True:
            num_tokens = _num_tokens(batch, images)
            try:
                found = prove(
                    functools.partial(self._computed, model, batch, loss_of, num_tokens),
                    state,
                    paths,
                    loss.group.process_group,
                    num_tokens=num_tokens,
                    key=(optional or ["stream"])[0],
                    largest_of_all=lambda number: loss.group.largest_of_all(number)[0],
                    **options,
                )
            except _UnprovedError:
                longest = loss.group.largest_of_all(_num_tokens(inputs, images), -num_tokens)
                if is_whole or not -longest[1] < longest[0] <= _LONGEST:
                    raise
                batch, is_whole = dict(inputs), True
                continue
            first = first or (found.refusal if found else "")
            if not loss.group.largest_of_all(int(found is not None and bool(found.refusal)))[0]:
                self.comparison = found
                if off and loss.trainer.args.process_index == 0:
                    logger.warning("ringtile: %s switched off: %s", " and ".join(off), first or "another group differs")
                return
            if keeps or not optional:
                raise RefusedError(first or "the first batch of another group differs, as the log of its ranks says")
            off.append(optional.pop(0))
            if off[-1] == "shared_prefix":
                loss.sharding.shares_prefixes = False
            else:
                stream.switch_off(loss.base)

    @contextlib.contextmanager
    def _computed(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        loss_of: Callable[[nn.Module, dict[str, Any]], Tensor | None],
        num_tokens: int,
        trace: Trace,
    ) -> Iterator[Tensor | None]:
        """The loss of a batch, whole or sharded, as `prove` asks for it."""
        group, failed = self._loss.group, ""
        copies = {  # that a forward pass may write, without the graph that made them
            name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in batch.items()
        }
        tile_tokens = 0 if trace.whole else max(1, num_tokens // (_TILES * group.size))
        try:
            attention = own_attention(self._loss.base) if trace.whole else contextlib.nullcontext()
            with attention, at_most(tile_tokens), without_dropout(model):
                yield loss_of(model, copies)
        except Exception as error:
            if isinstance(error, RingtileError):
                raise
            gathers = any(isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in model.parameters())
            if of_a_collective(error):
                lost = group.failure_of_peer() if trace.whole and gathers else None
                raise lost or error from error
            reason = f"{trace.place or 'the model'} fails {{}} ({' '.join(f'{type(error).__name__}: {error}'.split())})"
            if not trace.whole:
                raise RefusedError(
                    f"{reason.format('on a shard of the first batch')}; expected a module that makes no attention mask "
                    f"of its own, of which a shard has none, and no tensor of the length of the sequence"
                ) from error
            alone = f"on the first batch, {reason.format('on this rank, and not on all,')}"
            if gathers and group.fails_alone(alone, _ALIKE_SECONDS):
                raise RefusedError(
                    f"{alone}, where the engine gathers weights on all ranks, which wait for this one; expected the "
                    f"same on all ranks, or first_batch_check: false"
                ) from error
            failed = reason.format("in one process")
        if trace.whole and group.largest_of_all(int(bool(failed))) != [0]:
            reason = failed or "the model fails on another rank"
            raise _UnprovedError(f"the first batch proves nothing: on {num_tokens} of its tokens, {reason}")

    def _cut(self, inputs: Mapping[str, Any], images: Set[str]) -> dict[str, Any]:
        if images:
            return dict(inputs)
        loss = self._loss
        holders = (loss.trainer.data_collator, loss.trainer.processing_class, loss.base.config.get_text_config())
        sizes = [getattr(holder, name, None) for holder in holders for name in _MULTIPLES]
        multiple = math.lcm(*(size for size in sizes if type(size) is int and 0 < size <= _LARGEST_WINDOW))
        row_tokens = self._row_tokens()
        keys: dict[str, Any] = {"at_targets": loss.config.shared_prefix, "per_row": loss.sharding.reading.per_row}
        return cut_batch(inputs, row_tokens, multiple=multiple, **keys)

    def _row_tokens(self) -> int:
        """Tokens of a row for which no rank is idle, and no window or chunk is longer."""
        windows = [
            size
            for layer in self._loss.sharding.reading.layers
            for size in (layer.window, layer.chunk)
            if size is not None and size <= _LARGEST_WINDOW
        ]
        return max([16 * self._loss.group.size, *(size + size // 2 for size in windows)])


def _of_hooks(names: list[str]) -> str:
    hooks = f"{len(names)} hooks of yours" if len(names) > 1 else "a hook of yours"
    return f"{hooks} did not run in it: {', '.join(dict.fromkeys(names))}"


def _num_tokens(batch: Mapping[str, Any], images: Set[str]) -> int:
    """The most tokens of a tensor of the batch, but for those of images."""
    tensors = [x for name, x in batch.items() if isinstance(x, Tensor) and x.dim() >= 2 and name not in images]
    sizes = [x.size(0) * x.size(1) for x in tensors]
    return max(sizes, default=1)


# ---- a cut: some hundred tokens of each row, where a document or padding begins and tokens have targets --------------
# B rows, S tokens of a row


def cut_batch(
    inputs: Mapping[str, Any],
    row_tokens: int,
    *,
    at_targets: bool = False,
    multiple: int = 1,
    per_row: Set[str] = frozenset(),
) -> dict[str, Any]:
    """The batch with at most `row_tokens` tokens of each row, but at least _TOKENS in all rows and _ROW in each, and of
    a multiple of `multiple`.

    at_targets: around the first target, even where there is an edge: rows of one prompt begin alike there.

    Tensors (B, S, ...) lose tokens, the same ones where their S is the same. Lengths of packed documents are counted
    anew. All else stays, as the tensors `per_row` do.
    """
    positions: Any = inputs.get("position_ids")
    has_rows = isinstance(positions, Tensor) and positions.dim() == 3  # (3 or 4, B, S), of M-RoPE
    if has_rows:
        inputs = {**inputs, "position_ids": positions.permute(1, 2, 0)}
    cut = dict(inputs)
    sizes: dict[int, list[str]] = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.dim() >= 2 and name not in per_row:
            sizes.setdefault(value.size(1), []).append(name)
    for seq_len, names in sizes.items():
        rows = max(inputs[name].size(0) for name in names)
        length = -(-max(row_tokens, _ROW, _TOKENS // rows) // multiple) * multiple
        if seq_len <= length:
            continue
        begins = _begins(
            {name: inputs[name] for name in names}, _document_begins(inputs, seq_len), rows, length, at_targets
        )
        for name in names:
            value = inputs[name]
            taken = begins[: value.size(0), None] + torch.arange(length, device=begins.device)
            index = taken.to(value.device).view(*taken.shape, *(1,) * (value.dim() - 2))
            cut[name] = value.gather(1, index.expand(-1, -1, *value.shape[2:]))
        _count_documents(cut, seq_len, int(begins[0]), length)
        if isinstance(mask := inputs.get(MASK), IntervalMask) and mask.seq_len == seq_len:
            firsts = begins[:, None].cpu()
            taken = firsts + torch.arange(length, device="cpu")
            moved = (x.expand(len(taken), -1).gather(1, taken) - firsts for x in mask.tensors)
            cut[MASK] = IntervalMask(*(x.clamp(0, length).int() for x in moved))
    if has_rows:
        cut["position_ids"] = cut["position_ids"].permute(2, 0, 1).contiguous()
    return cut


def _begins(
    tensors: Mapping[str, Tensor], documents: Tensor | None, rows: int, length: int, at_targets: bool
) -> Tensor:
    """int64 (B,): where each row is cut: around its first edge with a target near, else around its first target."""
    seq_len = next(iter(tensors.values())).size(1)
    targets = [
        (x != -100) & (x != 0) if "mask" in name else x != -100
        for name, x in tensors.items()
        if name.endswith(_TARGETS) and x.dim() == 2
    ]
    has_target = torch.stack([x.expand(rows, -1).cpu() for x in targets]).all(0) if targets else None
    edges = torch.zeros(rows, seq_len, dtype=torch.bool)
    for name, x in tensors.items():
        if name.endswith(("attention_mask", "seq_idx")) and x.dim() == 2:
            edges[:, 1:] |= (x.diff(dim=1) != 0).cpu()
        elif name == "position_ids":
            edges[:, 1:] |= ((x if x.dim() == 2 else x[..., 0]).diff(dim=1) != 1).cpu()
    if documents is not None:
        edges[:, documents.cpu()] = True
    begins = []
    shared = any(x.size(0) != rows for x in tensors.values())  # a row for all: one cut for all
    for row in range(rows):
        wanted = torch.ones(seq_len, dtype=torch.bool) if has_target is None else has_target[row]
        counts = torch.cat([torch.zeros(1, dtype=torch.int64), wanted.cumsum(0)])
        places = edges[row].nonzero().flatten() if edges[row].any() else wanted.nonzero().flatten()[:1]
        starts = (places - length // 2).clamp(0, seq_len - length)
        held = starts[counts[starts + length] > counts[starts]]
        fallback = wanted.nonzero().flatten()[:1].sub(_MARGIN).clamp(0, seq_len - length)
        held = held[:0] if at_targets and has_target is not None else held
        begins.append(int(next(iter([*held, *fallback, 0]))))
    return torch.tensor(begins[:1] * rows if shared else begins)


def _document_begins(inputs: Mapping[str, Any], seq_len: int) -> Tensor | None:
    """Where the documents begin in a row, by cu_seq_lens, but for the first; None without."""
    lengths = inputs.get("cu_seq_lens_q")
    if not isinstance(lengths, Tensor):
        return None
    inner: Tensor = lengths.flatten().long()[1:]
    return inner[(inner > 0) & (inner < seq_len)]


def _count_documents(cut: dict[str, Any], seq_len: int, begin: int, length: int) -> None:
    """Moves the documents of cu_seq_lens to where a row was cut."""
    for side in ("q", "k"):
        ends = cut.get(f"cu_seq_lens_{side}")
        if isinstance(ends, Tensor) and int(ends.flatten()[-1]) == seq_len:
            moved = torch.unique((ends - begin).clamp(0, length))
            cut[f"cu_seq_lens_{side}"] = moved.to(ends.dtype)
            cut[f"max_length_{side}"] = int(moved.diff().max())
