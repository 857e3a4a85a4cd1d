"""Before the first training step, and before a first evaluation, a cut of the first batch proves that the ranks of a
group compute what one process computes (docs/design/first_batch.md).

Each rank computes the Trainer's own loss on the cut four times: alone, with nothing sharded; alone, with other
rounding; sharded over the group; and alone again. Hidden states, loss and gradients are compared, module by module.
Nothing of the run is changed by it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringtile.errors import RefusedError, RingtileError
from ringtile.first_batch.compare import Comparison
from ringtile.first_batch.proof import prove
from ringtile.first_batch.run import Run, record
from ringtile.first_batch.trace import Trace
from ringtile.first_batch.unchanged import Unchanged, without_checkpoints
from ringtile.hf.cut import cut_batch
from ringtile.hf.peers import of_a_collective
from ringtile.hf.shared_rows import key_of_tree
from ringtile.hf.strategy import Strategy
from ringtile.tiled.tiles import at_most
from ringtile.transport.groups import transport_of

logger = logging.getLogger("ringtile")

_TILES = 3  # tiles of a shard of the cut, at least
_LARGEST_WINDOW = 1024  # tokens: a cut is longer than windows and chunks up to this one
_WITH_IMAGES = 4096  # tokens of all rows of a batch that is proved with its images, of which no cut can be made


class FirstBatch:
    """The proof of one Trainer. comparison: the last one, for `ringtile verify`."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._trained = self._evaluated = False
        self.comparison: Comparison | None = None

    def install(self) -> None:
        strategy, trainer = self._strategy, self._strategy.trainer
        if strategy.makes_batches:
            strategy.replace(trainer, "compute_loss", self._compute_loss)
            return
        strategy.replace(trainer, "get_batch_samples", self._get_batch_samples)
        strategy.replace(trainer, "prediction_step", self._prediction_step)

    # ---- before the first step, and the first evaluation ----------------------------------------

    def _get_batch_samples(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The Trainer asks for the batches of a step."""
        samples, num_items = original(*args, **kwargs)
        if not self._trained and samples and isinstance(samples[0], Mapping):
            self._trained = True
            trainer = self._strategy.trainer
            self._strategy.prepare_training(trainer.model_wrapped)
            model = _without_engine(trainer.model_wrapped)
            trainer.current_gradient_accumulation_steps = len(samples)  # as the Trainer sets it next
            modes = {module: module.training for module in model.modules()}
            model.train()
            try:
                self._prove(model, trainer._prepare_inputs(dict(samples[0])), self._training_loss)
            finally:
                for module, training in modes.items():
                    module.training = training
        return samples, num_items

    def _prediction_step(
        self,
        original: Callable[..., Any],
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        *args: Any,
        **kw: Any,
    ) -> Any:
        if not (self._trained or self._evaluated) and isinstance(inputs, Mapping):
            self._evaluated = True

            def loss(model: nn.Module, cut: dict[str, Any]) -> Tensor | None:
                found: Tensor | None = original(model, cut, True, *args, **kw)[0]
                return found

            self._prove(_without_engine(model), self._strategy.trainer._prepare_inputs(dict(inputs)), loss)
        return original(model, inputs, prediction_loss_only, *args, **kw)

    def _compute_loss(
        self, original: Callable[..., Any], model: nn.Module, inputs: Mapping[str, Any], *args: Any, **kw: Any
    ) -> Any:
        """Of a Trainer whose batches are known no earlier."""
        if not self._trained and (model.training or not self._evaluated):
            self._trained, self._evaluated = model.training, True
            self._strategy.prepare_training(model)

            def loss(model: nn.Module, cut: dict[str, Any]) -> Tensor | None:
                found: Tensor | None = original(model, self._strategy.of_cut(model, cut), *args, **kw)
                return found

            self._prove(_without_engine(model), dict(inputs), loss)
        return original(model, inputs, *args, **kw)

    def _training_loss(self, model: nn.Module, cut: dict[str, Any]) -> Any:
        trainer = self._strategy.trainer
        num_items = trainer._get_num_items_in_batch([cut], trainer.args.device)
        with trainer.compute_loss_context_manager():
            loss: Any = trainer.compute_loss(model, dict(cut), num_items_in_batch=num_items)
        return loss

    # ---- the proof ------------------------------------------------------------------------------

    def _prove(
        self, model: nn.Module, inputs: dict[str, Any], loss_of: Callable[[nn.Module, dict[str, Any]], Tensor | None]
    ) -> None:
        """RefusedError, on every rank of the group: the sharded run differs by more than rounding explains.

        All ranks of the world decide alike what is proved: groups that make other forward passes of a model, or of its
        tower, hang under FSDP2 and ZeRO-3, which gather weights in each.
        """
        strategy = self._strategy
        images = strategy.of_model & {name for name, value in inputs.items() if value is not None}
        num_tokens = _num_tokens(inputs, images) if images else 0
        is_tree, num_tokens = strategy.group.largest_of_all(int(key_of_tree(inputs) is not None), num_tokens)
        if is_tree:
            logger.warning("ringtile: the first batch is a tree, of which no cut is made: it proves nothing")
            return
        if num_tokens > _WITH_IMAGES:
            logger.warning(
                f"ringtile: the first batch has images and {num_tokens} tokens; of more than {_WITH_IMAGES} a cut is "
                f"proved, without the images"
            )
            inputs, images = {name: value for name, value in inputs.items() if name not in images}, frozenset()
        at_targets = strategy.config.shared_prefix
        cut = inputs if images else cut_batch(inputs, self._row_tokens(), at_targets=at_targets)
        num_tokens = _num_tokens(cut, images)
        transport = transport_of(strategy.group.process_group)
        counted = transport.bytes_sent, transport.wait_seconds
        paths = {module: path for path, module in strategy.base.named_modules()}

        def run(whole: bool, **options: Any) -> Run:
            unchanged.restore()
            strategy.dropout.rewind()

            @contextlib.contextmanager
            def within(trace: Trace) -> Iterator[None]:
                with strategy.proving(trace, whole), at_most(0 if whole else self._tile_tokens(num_tokens)):
                    try:
                        yield
                    except RuntimeError as error:
                        _refuse_failure(error, trace)
                        raise

            return record(lambda: loss_of(model, dict(cut)), paths, within, **options)

        with without_checkpoints(model), torch.compiler.set_stance("force_eager"):
            unchanged = Unchanged(model, strategy.trainer)
            try:
                group = strategy.group.process_group
                self.comparison = prove(run, group, averages=True, num_tokens=num_tokens)
            finally:
                unchanged.restore()
                strategy.dropout.rewind()
                transport.bytes_sent, transport.wait_seconds = counted

    def _row_tokens(self) -> int:
        """Tokens of a row for which no rank is idle, and no window or chunk is longer."""
        windows = [
            size
            for layer in self._strategy.layers
            for size in (layer.window, layer.chunk)
            if size is not None and size <= _LARGEST_WINDOW
        ]
        return max([16 * self._strategy.group.size, *(size + size // 2 for size in windows)])

    def _tile_tokens(self, num_tokens: int) -> int:
        return max(1, num_tokens // (_TILES * self._strategy.group.size))


def _refuse_failure(error: RuntimeError, trace: Trace) -> None:
    """Raises RefusedError where the forward pass of a module fails on tokens of a batch that ringtile has prepared."""
    prepared = bool(trace.calls) and trace.calls[-1].sequence is not None
    is_known = isinstance(error, RingtileError | torch.OutOfMemoryError) or of_a_collective(error)
    if is_known or not prepared or not trace.place:
        return
    raise RefusedError(
        f"{trace.place} fails on a shard of the first batch ({' '.join(str(error).split())}); expected a module that "
        f"makes no attention mask of its own, of which a shard has none, and no tensor of the length of the sequence"
    ) from error


def _without_engine(model: nn.Module) -> nn.Module:
    """The module inside DDP or DeepSpeed, whose own passes would prepare a reduction of gradients. FSDP2 wraps none."""
    inner: Any = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    is_wrapped = isinstance(inner, DistributedDataParallel) or type(inner).__name__ == "DeepSpeedEngine"
    module: nn.Module = inner.module if is_wrapped else inner
    return module


def _num_tokens(batch: Mapping[str, Any], images: Set[str]) -> int:
    """The most tokens of a tensor of the batch, but for those of images."""
    tensors = [x for name, x in batch.items() if isinstance(x, Tensor) and x.dim() >= 2 and name not in images]
    sizes = [x.size(0) * x.size(1) for x in tensors]
    return max(sizes, default=1)
