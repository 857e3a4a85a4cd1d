"""A Trainer whose sequences are not sharded: what is exact on many ranks is on one.

Packed documents stay apart, dropout draws from counters. Trees come in batches, which nothing announces: the first one
that comes switches the Trainer to ringtile's attention, as a group of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel, Trainer

from ringtile.errors import RefusedError
from ringtile.hf import checks, model, recurrent
from ringtile.hf.dropout import CountedDropout, drops_attention
from ringtile.hf.model_loss import shifts_labels
from ringtile.hf.packing import Packing
from ringtile.hf.patches import Patches
from ringtile.hf.shared_rows import key_of_tree


class Alone:
    """One Trainer's. shard: installs what computes trees, with a record of its own."""

    def __init__(self, trainer: Trainer, base: PreTrainedModel, shard: Callable[[Patches], object]) -> None:
        self._trainer, self._base, self._shard = trainer, base, shard
        self._patches = Patches()

    def install(self, patches: Patches) -> None:
        patches.on_restore(self._patches.restore)
        trainer, base = self._trainer, self._base
        self._patches.wrap(trainer, "get_batch_samples", self._get_batch_samples)
        self._patches.wrap(trainer, "prediction_step", self._prediction_step)
        assert trainer.model is not None  # base_model has refused it otherwise
        self._patches.on_restore(trainer.model.register_forward_pre_hook(_refuse_tree, with_kwargs=True).remove)
        hybrid = bool(recurrent.mixers(model.text_modules(base)))
        packing = Packing(base, causal=shifts_labels(base), hybrid=hybrid, speaks=trainer.args.process_index == 0)
        packing.install_alone(trainer.model, self._patches)
        if hybrid:
            checks.check_recurrent(trainer, base)
            recurrent.install_alone(trainer.model, base, self._patches)
        elif reason := recurrent.unknown(model.text_modules(base)):
            recurrent.refuse_packed(trainer.model, reason, self._patches)
        dropout = CountedDropout(trainer, trainer.args.process_index, trainer.args.world_size)
        dropout.install(base, trainer.model, self._patches)
        # Not of a hybrid model, whose batches would look like shards to ringtile's attention.
        attention = base.config.get_text_config()._attn_implementation
        if not hybrid and drops_attention(base) and attention in ("sdpa", "eager"):
            _count_attention_dropout(trainer.model, self._patches)

    def _get_batch_samples(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The Trainer asks for the batches of a step."""
        samples, num_items = original(*args, **kwargs)
        self._watch(samples)
        return samples, num_items

    def _prediction_step(
        self, original: Callable[..., Any], model: nn.Module, inputs: Any, *args: Any, **kw: Any
    ) -> Any:
        if self._watch([inputs]):  # the method is another one now
            return self._trainer.prediction_step(model, inputs, *args, **kw)
        return original(model, inputs, *args, **kw)

    def _watch(self, batches: Iterable[Any]) -> bool:
        """Whether one of the batches is the first tree. It has no collective: the other ranks may have none."""
        if not any(isinstance(batch, Mapping) and key_of_tree(batch) for batch in batches):
            return False
        if self._trainer.args.torch_compile:
            raise RefusedError(
                "the batch holds a tree, and the model is compiled; expected torch_compile: false, or "
                "context_parallel_size of 2 or more: where no sequence is sharded, the first tree changes the attention"
            )
        self._patches.restore()  # these methods, too
        self._shard(self._patches)
        return True


def _refuse_tree(module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """A hook before the forward pass of a model, which would attend all tokens of the row before."""
    key = key_of_tree(kwargs)
    if key is not None:
        raise RefusedError(
            f"the batch holds {key}, and its model is called outside of the Trainer's steps; expected train(), "
            f"evaluate() or predict()"
        )


def _count_attention_dropout(wrapped: nn.Module, patches: Patches) -> None:
    """Switches the attention of a model on whole sequences to ringtile's, unless it has an attention of its own."""
    own = Patches()
    try:
        model.switch_attention(wrapped, own)
    except RefusedError:
        own.restore()
    else:
        patches.on_restore(own.restore)
