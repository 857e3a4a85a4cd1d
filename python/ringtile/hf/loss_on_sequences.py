"""Trainers with a loss of their own: the model runs on shards, and the Trainer sees the outputs of full sequences.

Whatever the Trainer computes from the outputs (DPO's sigmoid of a sum over the sequence, a reward at the last token, a
custom loss) it computes as one process does. Each rank computes the loss of the full batch, as the one process of a
data-parallel rank would: inside, the accelerator counts a group as one process, and so does the number of items. The
backward of unshard sums the gradients of all ranks of the group, so the engine's mean over all ranks is the gradient of
one process.

Shape letters: B batch, S global tokens, N local tokens.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ringtile.errors import RefusedError
from ringtile.first_batch.outputs import sum_of_outputs
from ringtile.first_batch.trace import running_trace
from ringtile.hf import model
from ringtile.hf.attention import hide_attention_mask
from ringtile.hf.batch import ShardedBatch, activate, active, active_batch, main_input
from ringtile.hf.features import stream
from ringtile.hf.group import exchanged
from ringtile.hf.keys import OWN
from ringtile.hf.loss import ShardedLoss
from ringtile.hf.reading import Reading
from ringtile.hf.weights import refuse_inside_loss
from ringtile.tiled.tiles import at_most

# Outputs with an entry per token, (B, N, ...). The outputs of TRL's fused head have one per predicted token: S - 1.
_PER_TOKEN = {"logits", "last_hidden_state", "hidden_states", "router_logits"}
_PER_TARGET = {"log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask"}
_OF_IMAGES = {"image_hidden_states", "rope_deltas"}  # of whole sequences, before the language model
# Keys of TRL's batches that models receive and ignore.
_IGNORED = {"margin"}


class LossOnSequences(ShardedLoss):
    """Shards the inputs of every model that the Trainer's loss or evaluation calls, and unshards the outputs."""

    def check(self) -> None:
        if self.trainer.args.torch_compile:
            raise RefusedError(
                f"{type(self.trainer).__name__} computes its loss from the outputs of full sequences and uses "
                f"torch_compile; expected only one of the two: the hooks that shard and unshard have not been shown to "
                f"survive compilation"
            )
        if self.config.reproducible and getattr(self.trainer, "precompute_ref_logps", False):
            raise RefusedError(
                "reproducible: the reference's log-probs were computed before its layers are streamed, in batches that "
                "depend on the number of ranks; expected precompute_ref_log_probs=False"
            )
        model.check_model(self.base)

    def install_loss(self) -> None:
        trainer = self.trainer
        self.in_step = False  # inside compute_loss or prediction_step
        for name in ("compute_loss", "prediction_step"):
            self.patches.wrap(trainer, name, self._in_step)
        self.proved = self.hook(self.model)
        if (reference := getattr(trainer, "ref_model", None)) is not None:
            self.hook(reference)

    def hook(self, wrapped: nn.Module) -> nn.Module:
        """Makes a model run on shards where the Trainer's loss calls it. Returns the module that is called."""
        wrapped = model.receiver(self.trainer.accelerator.unwrap_model(wrapped))
        base = model.base_model(wrapped)
        if base is not self.base:
            model.check_model(base)  # a teacher may be of another type; no first batch proves it
        if self.config.reproducible and base is not self.base:  # a reference, or a teacher
            if any(hasattr(weight, "ds_id") for weight in base.parameters()):
                raise RefusedError(
                    f"reproducible: ZeRO-3 has prepared a second {type(base).__name__} before its layers are streamed; "
                    f"expected another engine, or adapters, which are their own reference"
                )
            stream.install(base, self.config.tile_tokens, self.patches)
        self.switch_model(wrapped, base)
        if hasattr(base, "generate"):
            self.patches.wrap(base, "generate", functools.partial(self._generate_whole, base))
        called = self.loss_entry(wrapped, base)
        UnshardedOutputs(self, called, base)
        return called

    def loss_entry(self, wrapped: nn.Module, base: PreTrainedModel) -> nn.Module:
        """The module whose forward the loss calls."""
        return wrapped

    def _in_step(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """compute_loss or prediction_step, inside which the models' hooks shard and unshard."""
        self.prepare_training(model)
        if self.in_step:
            return original(model, *args, **kwargs)
        with active(None), self.groups.as_one_process(), self.step(True), self._proving_first_call():
            return original(model, *args, **kwargs)

    @contextlib.contextmanager
    def _proving_first_call(self) -> Iterator[None]:
        """Inside, the first call of the trained model proves itself before it runs.

        Its hook comes before those of FSDP2 and ZeRO-3, inside which the model cannot be called.
        """
        if self.proof is None or not self.proof.waits:
            yield
            return
        hook = self.proved.register_forward_pre_hook(self._prove_call, with_kwargs=True, prepend=True)
        try:
            yield
        finally:
            hook.remove()

    def _prove_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.proof is not None
        inputs = named_arguments(module, args, kwargs)
        if self.in_step and main_input((), inputs) is not None:
            loss_of = functools.partial(_sum_of_outputs, uses_loss=not self.config.shared_prefix)
            self.proof.before(module, inputs, loss_of, named="what the model returns")

    def _generate_whole(self, base: PreTrainedModel, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """generate() inside a loss."""
        return self.on_whole_rows(base, original, *args, **kwargs) if self.in_step else original(*args, **kwargs)

    def on_whole_rows(self, base: PreTrainedModel, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What generate returns, on rows of this rank that nothing shards, with a cache, as in one process."""
        with self.step(False), model.own_attention(base), at_most(0):
            return generate(*args, **kwargs)

    @contextlib.contextmanager
    def step(self, inside: bool) -> Iterator[None]:
        """Inside, the models shard what they are given, or, in other code such as generate(), they do not."""
        was_inside, self.in_step = self.in_step, inside
        try:
            yield
        finally:
            self.in_step = was_inside

    def shard_in_step(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], ShardedBatch | None] | None:
        """None for a batch of other code, such as generate(), on which the model runs as it is.

        In a backward, it is that of a step: the loss has checkpointed the model, which runs again.
        """
        return self.sharding.shard(inputs) if self.in_step or torch._C._current_graph_task_id() != -1 else None


def _sum_of_outputs(model: nn.Module, inputs: dict[str, Any], *, uses_loss: bool) -> Tensor | None:
    """What a proof compares of the outputs of a model, whose loss is the Trainer's. A tree of rows has no loss."""
    main, attention_mask = main_input((), inputs), inputs.get("attention_mask")
    assert main is not None
    counted = main.new_ones(main.shape[:2], dtype=torch.bool)
    if attention_mask is not None and attention_mask.shape == counted.shape:
        counted = attention_mask.ne(0)
    outputs = model(**inputs)
    if not isinstance(outputs, Mapping):
        return None
    return sum_of_outputs({name: x for name, x in outputs.items() if uses_loss or name != "loss"}, counted)


# ---- the hooks of a model -------------------------------------------------------------------------


class UnshardedOutputs:
    """The hooks of one model, or of one whose head reads whole rows, of what is inside. A `score` is given to each
    token."""

    def __init__(self, loss: LossOnSequences, called: nn.Module, base: PreTrainedModel) -> None:
        self._loss, self._group, self._base = loss, loss.group, base
        self._passes_inputs = False  # whether the model was given inputs that have a gradient
        self._drawing = contextlib.ExitStack()  # from the inputs to the outputs
        inner = base.base_model if model.reads_rows(base) else called
        handles = [inner.register_forward_pre_hook(self._shard_inputs, with_kwargs=True)]
        if model.reads_rows(base) and isinstance(score := getattr(base, "score", None), nn.Module):
            handles.append(score.register_forward_hook(self._unshard_scores))
        else:
            handles.append(inner.register_forward_hook(self._unshard_outputs, with_kwargs=True))
        poolers = [module for path, module in model.text_modules(base) if path.rpartition(".")[2] == "pooler"]
        handles += [pooler.register_forward_pre_hook(self._unshard_pooled) for pooler in poolers]
        self._whole = _OF_IMAGES | ({"pooler_output"} if poolers else set())
        for handle in handles:
            loss.patches.on_restore(handle.remove)

    def _unshard_pooled(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """A pooler inside a sharded model reads whole rows, on every rank."""
        batch = active_batch()
        if batch is None:
            return None
        if len(args) != 1 or args[0].dim() != 3:
            raise RefusedError(
                f"{type(self._base).__name__} hands its pooler a part of a shard; expected (B, N, E) alone"
            )
        return batch.unshard(args[0])

    def _shard_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = named_arguments(module, args, kwargs)
        self._passes_inputs = False
        for name, value in inputs.items():
            if isinstance(value, Tensor) and value.requires_grad and self._group.size > 1:
                self._passes_inputs = True
                inputs[name] = exchanged(value, lambda x: x.view_as(x), self._group.mean)
        sharded = self._loss.shard_in_step({name: value for name, value in inputs.items() if name not in _IGNORED})
        if sharded is None:
            return None
        local, batch = sharded
        if batch is None:
            return (), local
        activate(batch)
        self._drawing.enter_context(self._loss.draws.of(batch, module))
        if local.get("labels") is not None and local.get("num_items_in_batch") is None:
            local["num_items_in_batch"] = batch.num_targets  # a mean over the batch, not over the shard
        return hide_attention_mask(module, (), local)

    def _unshard_scores(self, module: nn.Module, args: Any, scores: Tensor) -> Tensor | None:
        batch = active_batch()
        if batch is None:
            return None
        activate(None)
        self._drawing.close()
        whole = batch.unshard(scores)
        self._watch(whole)
        return whole

    def _unshard_outputs(self, module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        batch = active_batch()
        if batch is None:
            return None
        activate(None)
        self._drawing.close()
        name = type(module).__name__
        if not isinstance(outputs, dict):
            raise RefusedError(f"{name} returns a {type(outputs).__name__}; expected return_dict=True")
        for key, value in list(outputs.items()):
            if key == "loss" and batch.rows is not None and batch.rows.is_tree:
                outputs[key] = None  # a sum over tokens that are of several rows, once each
            elif key == "loss" and value is not None and batch.sequence.world_size > 1:
                outputs[key] = exchanged(value, self._group.sum, self._group.sum)
            elif key not in self._whole:
                outputs[key] = _unshard(batch, self._loss.sharding.reading, name, key, value)
            self._watch(outputs[key])
        return outputs

    def _watch(self, value: Any) -> None:
        """Checks the gradient of an output, or of a tuple of some, while a loss is computed."""
        for x in value if isinstance(value, tuple) else (value,):
            if isinstance(x, Tensor) and x.requires_grad and self._group.size > 1:
                check = functools.partial(self._check_gradient, passes_inputs=self._passes_inputs)
                x.register_hook(check)  # type: ignore[no-untyped-call]

    def _check_gradient(self, gradient: Tensor, passes_inputs: bool) -> None:
        if self._loss.in_step and running_trace() is None:
            refuse_inside_loss(self._base, passes_inputs=passes_inputs)


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name. Raises RefusedError for more positional arguments than forward() names."""
    forwards = (inspect.signature(type(x).forward).parameters.values() for x in (module, model.base_model(module)))
    named = ([x.name for x in of_one if x.kind is x.POSITIONAL_OR_KEYWORD][1:] for of_one in forwards)
    names = next(filter(None, named), [])  # PEFT's forward() may hand all of them on
    if len(args) > len(names):
        raise RefusedError(f"{type(module).__name__} was called with positional arguments; expected model(**inputs)")
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _unshard(batch: ShardedBatch, reading: Reading, model: str, name: str, value: Any) -> Any:
    """One output of the model, unsharded. Raises RefusedError for an output that is not known to be per token."""
    is_tiled = name == "logits" and not isinstance(value, Tensor)  # these refuse to be read
    if value is None or name in ("aux_loss", "loss") or is_tiled:  # a balancing loss is that of the whole sequence
        return value
    per_token = _PER_TOKEN | reading.per_token
    if isinstance(value, (tuple, list)) and name in per_token | reading.per_row:
        return tuple(_unshard(batch, reading, model, name, layer) for layer in value)
    whole = batch.unshard_output(value) if name in per_token and isinstance(value, Tensor) else None
    if whole is not None:
        return whole
    if name in reading.per_row and isinstance(value, Tensor):
        assert batch.group is not None
        return batch.group.check_same(f"{model} returns {name}, which", value)
    if name in _PER_TARGET and isinstance(value, Tensor):
        return batch.unshard(value)[:, :-1]  # the last token predicts nothing
    remedy = ": its pooler has another name; load it with add_pooling_layer=False" if name == "pooler_output" else ""
    held = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    raise RefusedError(
        f"{model} returns {name} {held}, which ringtile does not know how to unshard; expected only "
        f"loss, {', '.join(sorted(_PER_TOKEN | _PER_TARGET))}{remedy or f': {OWN}'}"
    )
