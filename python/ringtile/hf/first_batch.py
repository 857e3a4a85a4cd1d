"""The first training step, and a first evaluation before it, proves on a cut of its batch that the ranks of a group
compute what one process computes (docs/design/first_batch.md).

The user's loss runs once, in the step itself. When it first calls the model, the model computes a cut of what it was
given three times: alone, with nothing sharded; alone, with other rounding; and sharded over the group. Hidden states,
outputs and gradients are compared, module by module, and whatever a forward pass may write is put back.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ringtile.errors import RefusedError, RingtileError
from ringtile.first_batch.compare import Comparison
from ringtile.first_batch.proof import prove
from ringtile.first_batch.run import LossRun, record
from ringtile.first_batch.trace import Trace, running_trace
from ringtile.first_batch.unchanged import Unchanged, without_checkpoints
from ringtile.hf.group import of_a_collective
from ringtile.hf.keys import key_of_tree
from ringtile.hf.model import inside_engine, own_attention
from ringtile.tiled.tiles import at_most
from ringtile.transport.groups import transport_of

if TYPE_CHECKING:
    from ringtile.hf.loss import ShardedLoss

logger = logging.getLogger("ringtile")

_TOKENS = 512  # of all rows together, at least
_ROW = 64  # tokens of a row, at least
_MARGIN = 8  # tokens of a row, at least, before the edge that the cut shows
_TARGETS = ("labels", "completion_mask")  # in the names of the keys that say which tokens have targets
_TILES = 3  # tiles of a shard of the cut, at least
_LARGEST_WINDOW = 1024  # tokens: a cut is longer than windows and chunks up to this one
_WITH_IMAGES = 4096  # tokens of all rows of a batch that is proved with its images, of which no cut can be made
_INSTEAD = "ringtile verify proves this machine and these versions, on models of its own"


class FirstBatch:
    """The proof of one Trainer. comparison: the last one, for `ringtile verify`. seconds: that proofs have taken."""

    def __init__(self, loss: ShardedLoss) -> None:
        self._loss = loss
        self._trained = self._evaluated = False
        self.comparison: Comparison | None = None
        self.seconds = 0.0

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
        num_items: int = 1,
        named: str = "the loss",
        numbers_of: object = None,
    ) -> None:
        """Proves a batch, if it is the first one, before the model is called on it.

        inputs: of the whole batch, on the model's device. loss_of(model, cut): the loss of a cut of it, which calls the
        model; None where there is none. num_items: what the loss is divided by. named: the loss, in words. numbers_of:
        an object besides the model whose numbers it may change.
        RefusedError, on every rank of the group: the sharded run differs by more than rounding explains, or nothing can
        be proved. A loss that is not finite leaves the proof to the next batch.
        """
        in_training = torch.is_grad_enabled()
        if running_trace() is not None or self._trained or (self._evaluated and not in_training):
            return
        self._trained, self._evaluated = in_training, True
        began, inner = time.perf_counter(), inside_engine(model)
        # What the user has wrapped around the call (a checkpoint, offloading) keeps its own tensors only.
        own_tensors = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with own_tensors, without_checkpoints(inner), torch.compiler.set_stance("force_eager"):
            unchanged = Unchanged(inner, numbers_of=numbers_of)
            self._prove(inner, inputs, loss_of, unchanged, num_items=num_items, named=named)
        self.seconds += time.perf_counter() - began

    def _prove(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        loss_of: Callable[[nn.Module, dict[str, Any]], Tensor | None],
        unchanged: Unchanged,
        *,
        num_items: int,
        named: str,
    ) -> None:
        """All ranks of the world decide alike what is proved: groups that make other forward passes of a model, or of
        its tower, hang under FSDP2 and ZeRO-3, which gather weights in each."""
        loss = self._loss
        images = loss.sharding.reading.besides & {name for name, value in inputs.items() if value is not None}
        num_tokens = _num_tokens(inputs, images) if images else 0
        is_tree, is_unknown, num_tokens = loss.group.largest_of_all(
            int(key_of_tree(inputs) is not None), int(bool(unchanged.unknown)), num_tokens
        )
        if is_tree:
            logger.warning("ringtile: the first batch is a tree, of which no cut is made: it proves nothing")
            return
        if is_unknown:
            what = unchanged.unknown or "another rank holds something"
            raise _unproved(f"{what}, which cannot be put back after a forward pass")
        if num_tokens > _WITH_IMAGES:
            logger.warning(
                f"ringtile: the first batch has images and {num_tokens} tokens; of more than {_WITH_IMAGES} a cut is "
                f"proved, without the images"
            )
            inputs, images = {name: value for name, value in inputs.items() if name not in images}, frozenset()
        at_targets = loss.config.shared_prefix
        cut = dict(inputs) if images else cut_batch(inputs, self._row_tokens(), at_targets=at_targets)
        num_tokens = _num_tokens(cut, images)
        transport = transport_of(loss.group.process_group)
        counted = transport.bytes_sent, transport.wait_seconds
        drawn = loss.dropout.drawn
        paths = {module: path for path, module in loss.base.named_modules()}
        # As ZeRO-3 does after each step: a weight that another module than its own reads, such as a mixer that of its
        # convolution, is else gathered in each run, which DeepSpeed takes for an error in the order of its weights.
        small: list[Any] = [weight for weight in model.parameters() if getattr(weight, "ds_persist", False)]
        if small:
            small[0].all_gather(small)

        def restore() -> None:
            unchanged.restore()
            loss.dropout.drawn = drawn

        def run(whole: bool, **options: Any) -> LossRun:
            restore()
            place = ""

            @contextlib.contextmanager
            def within(trace: Trace) -> Iterator[None]:
                nonlocal place
                trace.whole = whole
                with at_most(0 if whole else max(1, num_tokens // (_TILES * loss.group.size))):
                    try:
                        yield
                    except BaseException:
                        place = trace.place
                        raise

            try:
                copies = {  # that a forward pass may write, without the graph that made them
                    name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in cut.items()
                }
                with own_attention(loss.base) if whole else contextlib.nullcontext():
                    return record(lambda: loss_of(model, copies), paths, within, **options)
            except Exception as error:
                if isinstance(error, RingtileError | torch.OutOfMemoryError) or of_a_collective(error):
                    raise
                raise _failed(error, place or "the model", num_tokens if whole else 0) from error

        try:
            self.comparison = prove(
                run,
                loss.group.process_group,
                averages=True,
                num_tokens=num_tokens,
                num_items=num_items,
                named=named,
                key="shared_prefix" if loss.config.shared_prefix else "stream",
            )
        finally:
            restore()
            transport.bytes_sent, transport.wait_seconds = counted
        if loss.group.largest_of_all(int(self.comparison is None)) != [0]:
            self._trained = self._evaluated = False

    def _row_tokens(self) -> int:
        """Tokens of a row for which no rank is idle, and no window or chunk is longer."""
        windows = [
            size
            for layer in self._loss.sharding.reading.layers
            for size in (layer.window, layer.chunk)
            if size is not None and size <= _LARGEST_WINDOW
        ]
        return max([16 * self._loss.group.size, *(size + size // 2 for size in windows)])


def _unproved(why: str) -> RefusedError:
    return RefusedError(
        f"the first batch proves nothing: {why}. Set first_batch_check: false to train without the check; {_INSTEAD}"
    )


def _failed(error: Exception, place: str, num_tokens: int) -> RefusedError:
    """num_tokens: that one process computed; 0: it was a shard."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    if num_tokens:
        return _unproved(
            f"on {num_tokens} of its tokens, {place} fails in one process ({reason}); expected a model that takes rows "
            f"of any length"
        )
    return RefusedError(
        f"{place} fails on a shard of the first batch ({reason}); expected a module that makes no attention mask of "
        f"its own, of which a shard has none, and no tensor of the length of the sequence"
    )


def _num_tokens(batch: Mapping[str, Any], images: Set[str]) -> int:
    """The most tokens of a tensor of the batch, but for those of images."""
    tensors = [x for name, x in batch.items() if isinstance(x, Tensor) and x.dim() >= 2 and name not in images]
    sizes = [x.size(0) * x.size(1) for x in tensors]
    return max(sizes, default=1)


# ---- a cut: some hundred tokens of each row, where a document or padding begins and tokens have targets --------------
# B rows, S tokens of a row


def cut_batch(inputs: Mapping[str, Any], row_tokens: int, *, at_targets: bool = False) -> dict[str, Any]:
    """The batch with at most `row_tokens` tokens of each row, but at least _TOKENS in all rows and _ROW in each.

    at_targets: around the first target, even where there is an edge: rows of one prompt begin alike there.

    Tensors (B, S, ...) lose tokens, the same ones where their S is the same. Lengths of packed documents are counted
    anew. All else stays.
    """
    positions: Any = inputs.get("position_ids")
    has_rows = isinstance(positions, Tensor) and positions.dim() == 3  # (3 or 4, B, S), of M-RoPE
    if has_rows:
        inputs = {**inputs, "position_ids": positions.permute(1, 2, 0)}
    cut = dict(inputs)
    sizes: dict[int, list[str]] = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.dim() >= 2:
            sizes.setdefault(value.size(1), []).append(name)
    for seq_len, names in sizes.items():
        rows = max(inputs[name].size(0) for name in names)
        length = max(row_tokens, _ROW, _TOKENS // rows)
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
