"""Trainers with a loss of their own: the model runs on shards, its caller sees whole sequences.

The batch is cut on the way into the model and the outputs are joined on the way out, so whatever a Trainer computes
from them (DPO's sigmoid of a sum over the sequence, a reward at the last token, a custom loss) it computes as one
process does. Each rank is then a data-parallel rank like any other: its loss is that of the whole batch, and a join
adds up in its backward what all ranks of the group send, so the engine's mean over all ranks is the gradient.

Shape letters: B batch, S global tokens, N local tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from ringtile.errors import Refused
from ringtile.hf.attention import hide_attention_mask
from ringtile.hf.cut import Cut
from ringtile.hf.loss import TiledLogits
from ringtile.hf.patches import Ledger

# Outputs with an entry per token, (B, N, ...). Those of TRL's fused head have one per predicted token, S - 1 in all.
_PER_TOKEN = {"logits", "last_hidden_state", "hidden_states"}
_PER_TARGET = {"log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask"}
_FUSED = "fused_lm_head"  # the argument that asks for them
# Keys of TRL's batches that models are given and ignore.
_IGNORED = {"margin"}


class Joined:
    """The hooks that cut what goes into a model and join what comes out.

    begin: cuts a batch -> (local batch, Cut), or None where it is left whole; end(cut, watches_loss): checks that the
    model used the Cut.
    """

    def __init__(
        self,
        begin: Callable[[Mapping[str, Any]], tuple[dict[str, Any], Cut] | None],
        end: Callable[[Cut, bool], None],
    ) -> None:
        self._begin, self._end = begin, end
        self._cut: Cut | None = None  # of the batch that is inside the model now

    def install(self, model: nn.Module, base: PreTrainedModel, ledger: Ledger) -> None:
        """Hooks a model whose outputs are per token; one with a `score` head (a classifier) pools them first."""
        if has_score(base):
            handles = [
                base.base_model.register_forward_pre_hook(self._cut_batch, with_kwargs=True),
                base.get_submodule("score").register_forward_hook(self._join_scores),
            ]
        else:
            handles = [
                model.register_forward_pre_hook(self._cut_batch, with_kwargs=True),
                model.register_forward_hook(self._join_outputs, with_kwargs=True),
            ]
        for handle in handles:
            ledger.on_restore(handle.remove)

    def _cut_batch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = _named(module, args, kwargs)
        cut_batch = self._begin({name: value for name, value in inputs.items() if name not in _IGNORED})
        if cut_batch is None:
            return None
        local, self._cut = cut_batch
        if local.get("labels") is not None and local.get("num_items_in_batch") is None:
            local["num_items_in_batch"] = self._cut.num_targets  # a mean over the batch, not over the shard
        return hide_attention_mask(module, (), local)

    def _join_scores(self, module: nn.Module, args: Any, scores: Tensor) -> Tensor | None:
        cut, self._cut = self._cut, None
        if cut is None:
            return None
        self._end(cut, False)
        return cut.join(scores)

    def _join_outputs(self, module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        cut, self._cut = self._cut, None
        if cut is None:
            return None
        if not isinstance(outputs, dict):
            raise Refused(f"{type(module).__name__} returns a {type(outputs).__name__}; expected return_dict=True")
        fused = bool(kwargs.get(_FUSED))
        self._end(cut, not fused and outputs.get("loss") is not None)
        for name, value in list(outputs.items()):
            outputs[name] = _join(cut, type(module).__name__, name, value)
        return outputs


def has_score(base: PreTrainedModel) -> bool:
    """Whether the model is one of transformers' sequence classifiers: a backbone, a score per token, the last kept."""
    return isinstance(getattr(base, "score", None), nn.Module) and type(base).__name__.endswith(
        "ForSequenceClassification"
    )


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by their names. Raises Refused for positional ones without a name."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    if len(args) > len(names):
        raise Refused(f"{type(module).__name__} was called with positional arguments; expected model(**inputs)")
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _join(cut: Cut, model: str, name: str, value: Any) -> Any:
    """One output of the model, whole. Those that are not known to be per token are refused."""
    if value is None or isinstance(value, TiledLogits):  # which refuses to be read by itself
        return value
    if name == "loss":
        return _SumOverGroup.apply(value, cut.group)  # type: ignore[no-untyped-call]
    if name == "hidden_states" and isinstance(value, tuple):
        return tuple(_join(cut, model, name, layer) for layer in value)
    if name in _PER_TOKEN and isinstance(value, Tensor):
        return cut.join(value)
    if name in _PER_TARGET and isinstance(value, Tensor):
        return cut.join(value)[:, :-1]  # the last token predicts nothing
    raise Refused(
        f"{model} returns {name}, and ringtile does not know how to join the shards of it; expected only "
        f"loss, {', '.join(sorted(_PER_TOKEN | _PER_TARGET))}"
    )


class _SumOverGroup(torch.autograd.Function):
    """The sum of a scalar over the group, the same on every rank; so is the gradient that each rank gets."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _all_reduced(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(gradient, ctx.group), None


def _all_reduced(value: Tensor, group: Any) -> Tensor:
    total = value.detach().clone()
    dist.all_reduce(total, group=group)
    return total
