"""Hooks on a model that shard its inputs and unshard its outputs, so that its caller sees full sequences.

Shape letters: B batch, S global tokens, N local tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ringtile.errors import RefusedError
from ringtile.hf.attention import hide_attention_mask
from ringtile.hf.batch import ShardedBatch, activate, active_batch
from ringtile.hf.group import ContextParallelGroup, exchanged
from ringtile.hf.patches import Patches
from ringtile.hf.random_draws import RandomDraws, Watch

# Outputs with an entry per token, (B, N, ...). The outputs of TRL's fused head have one per predicted token: S - 1.
_PER_TOKEN = {"logits", "last_hidden_state", "hidden_states"}
_PER_TARGET = {"log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask"}
_OF_IMAGES = {"image_hidden_states", "rope_deltas"}  # of whole sequences, before the language model
_FUSED = "fused_lm_head"  # the argument that asks for the fused head
# Keys of TRL's batches that models receive and ignore.
_IGNORED = {"margin"}


class UnshardedOutputs:
    """The hooks of one model.

    shard: turns a batch into (local batch, ShardedBatch, or None if it is not sharded), or None to leave it as it is.
    check_used(batch, watches_loss): checks that the model used the ShardedBatch. draws: watches the model, in training.
    """

    def __init__(
        self,
        shard: Callable[[Mapping[str, Any]], tuple[dict[str, Any], ShardedBatch | None] | None],
        check_used: Callable[[ShardedBatch, bool], None],
        group: ContextParallelGroup,
        draws: RandomDraws,
    ) -> None:
        self._shard, self._check_used, self._group, self._draws = shard, check_used, group, draws
        self._watch: Watch | None = None

    def install(self, model: nn.Module, base: PreTrainedModel, patches: Patches) -> None:
        """Hooks the model. A model with a `score` head (a classifier) pools its outputs, so its head is hooked."""
        if has_score(base):
            handles = [
                base.base_model.register_forward_pre_hook(self._shard_inputs, with_kwargs=True),
                base.get_submodule("score").register_forward_hook(self._unshard_scores),
            ]
        else:
            handles = [
                model.register_forward_pre_hook(self._shard_inputs, with_kwargs=True),
                model.register_forward_hook(self._unshard_outputs, with_kwargs=True),
            ]
        for handle in handles:
            patches.on_restore(handle.remove)

    def _shard_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = named_arguments(module, args, kwargs)
        for name, value in inputs.items():
            if isinstance(value, Tensor) and value.requires_grad and self._group.size > 1:
                inputs[name] = exchanged(value, lambda x: x.view_as(x), self._group.mean)
        sharded = self._shard({name: value for name, value in inputs.items() if name not in _IGNORED})
        if sharded is None:
            return None
        local, batch = sharded
        if batch is None:
            return (), local
        activate(batch)
        if local.get("labels") is not None and local.get("num_items_in_batch") is None:
            local["num_items_in_batch"] = batch.num_targets  # a mean over the batch, not over the shard
        self._watch = self._draws.watch(module)
        return hide_attention_mask(module, (), local)

    def stop_watching(self) -> None:
        """After a forward pass that has raised an error."""
        if self._watch is not None:
            self._watch.stop()

    def _check_forward(self, batch: ShardedBatch, watches_loss: bool) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.check()
        self._check_used(batch, watches_loss)

    def _unshard_scores(self, module: nn.Module, args: Any, scores: Tensor) -> Tensor | None:
        batch = active_batch()
        if batch is None:
            return None
        activate(None)
        self._check_forward(batch, False)
        return batch.unshard(scores)

    def _unshard_outputs(self, module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        batch = active_batch()
        if batch is None:
            return None
        activate(None)
        name = type(module).__name__
        if not isinstance(outputs, dict):
            raise RefusedError(f"{name} returns a {type(outputs).__name__}; expected return_dict=True")
        fused = bool(kwargs.get(_FUSED))
        self._check_forward(batch, not fused and outputs.get("loss") is not None)
        for key, value in list(outputs.items()):
            if key == "loss" and batch.rows is not None:
                outputs[key] = None  # a sum over tokens that are of several rows, once each
            elif key == "loss" and value is not None and batch.sequence.world_size > 1:
                outputs[key] = exchanged(value, self._group.sum, self._group.sum)
            else:
                outputs[key] = _unshard(batch, name, key, value)
        return outputs


def has_score(base: PreTrainedModel) -> bool:
    """Whether the model is a sequence classifier of transformers: it scores every token and keeps the last score."""
    return isinstance(getattr(base, "score", None), nn.Module) and type(base).__name__.endswith(
        "ForSequenceClassification"
    )


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name. Raises RefusedError for more positional arguments than forward() names."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    if len(args) > len(names):
        raise RefusedError(f"{type(module).__name__} was called with positional arguments; expected model(**inputs)")
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _unshard(batch: ShardedBatch, model: str, name: str, value: Any) -> Any:
    """One output of the model, unsharded. Raises RefusedError for an output that is not known to be per token."""
    is_tiled = name == "logits" and not isinstance(value, Tensor)  # these refuse to be read
    if value is None or name in ("aux_loss", "loss") or is_tiled:  # a balancing loss is that of the whole sequence
        return value
    if name == "hidden_states" and isinstance(value, tuple):
        return tuple(_unshard(batch, model, name, layer) for layer in value)
    if name in _PER_TOKEN and isinstance(value, Tensor):
        return batch.unshard(value)
    if name == "router_logits" and isinstance(value, tuple):  # of a layer (B N, E)
        assert batch.token_weights is not None
        rows = batch.token_weights.size(0)
        return tuple(batch.unshard(layer.unflatten(0, (rows, -1))).flatten(0, 1) for layer in value)
    if name in _OF_IMAGES:
        return value
    if name in _PER_TARGET and isinstance(value, Tensor):
        return batch.unshard(value)[:, :-1]  # the last token predicts nothing
    remedy = ": load the model with add_pooling_layer=False" if name == "pooler_output" else ""
    raise RefusedError(
        f"{model} returns {name}, which ringtile does not know how to unshard; expected only "
        f"loss, {', '.join(sorted(_PER_TOKEN | _PER_TARGET))}{remedy}"
    )
