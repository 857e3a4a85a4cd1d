"""Where a model with images or sound is cut: everything before its language model sees whole sequences.

Embeddings are merged with the features of images, positions are counted and masks are drawn as in one process, on every
rank; what the language model is then given is sharded, once. Of the gradient that flows back, each rank has the part
of its own tokens, so that the engine's mean over the ranks is that of one process, as for every other weight.

Shape letters: B batch, S global tokens, P padded global tokens, N local tokens, I tokens of images, E hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from ringtile.errors import RefusedError
from ringtile.hf.attention import hidden_mask
from ringtile.hf.batch import ShardedBatch, active_batch, waiting_batch
from ringtile.hf.patches import Patches

# Arguments of a model's forward that are the same for text alone, or that say nothing of its tokens.
_OF_TEXT = frozenset(
    {
        *("self", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels", "kwargs"),
        *("past_key_values", "use_cache", "cache_position", "num_items_in_batch", "logits_to_keep", "return_dict"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "lm_kwargs"),
    }
)
_LOCAL = frozenset({"labels", "shift_labels", "num_items_in_batch"})  # sharded before the model, of which they are


class Seam:
    """The seam of one model, if it has one. entered(path, embeddings): sees what enters a language model; returns it.

    keys: what the model takes besides text, in whatever comes before its language model; none without a seam.
    """

    def __init__(self, base: PreTrainedModel, entered: Callable[[str, Tensor], Tensor], patches: Patches) -> None:
        self._name, self._entered = type(base).__name__, entered
        self.keys: frozenset[str] = frozenset()
        found = language_model(base)
        if found is None:
            return
        path, module = found
        self._path = path
        around = [base, *(base.get_submodule(".".join(path.split(".")[:i])) for i in range(1, path.count(".") + 1))]
        taken = {name for outer in around for name in inspect.signature(type(outer).forward).parameters}
        self.keys = frozenset(taken - _OF_TEXT)
        self._parameters = list(inspect.signature(type(module).forward).parameters)[1:]
        patches.on_restore(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        batch = waiting_batch()
        if batch is not None:
            batch.waits = False
            given = self._sharded(given, batch)
        elif (active := active_batch()) is not None and active.documents is not None:
            raise RefusedError(f"{self._name} runs its language model twice in a forward pass; expected once")
        if isinstance(given.get("inputs_embeds"), Tensor):
            given["inputs_embeds"] = self._entered(self._path, given["inputs_embeds"])
        return (), given

    def _sharded(self, given: Mapping[str, Any], batch: ShardedBatch) -> dict[str, Any]:
        """What a language model is called with, of whole sequences -> of this rank's tokens."""
        embeddings = given.get("inputs_embeds")
        if not isinstance(embeddings, Tensor) or embeddings.shape[1:2] != (batch.seq_len,):
            raise RefusedError(
                f"{self._name} gives its language model "
                f"{sorted(name for name, value in given.items() if value is not None)}; expected inputs_embeds (B, S, "
                f"E) with a token for each of the batch's S = {batch.seq_len}"
            )
        num_rows, device = embeddings.size(0), embeddings.device
        cut = _Cut(self._name, batch, num_rows, _image_tokens(given, num_rows, batch.seq_len))
        special = {"attention_mask", "position_ids"} | _LOCAL
        local = {name: value if name in special else cut.of(name, value) for name, value in given.items()}
        local["attention_mask"] = hidden_mask(self._name, given.get("attention_mask"), batch, num_rows, device)
        positions = given.get("position_ids")
        if positions is None:
            local["position_ids"] = batch.position_ids
        else:
            if positions.size(-1) != batch.seq_len:
                raise cut.refused("position_ids", positions)
            local["position_ids"] = cut.tokens(positions, positions.dim() - 1)
            batch.max_position = int(positions.max())
        local["use_cache"] = False
        return local


class _Cut:
    """This rank's part of what a language model is given. images: bool (B, S), the tokens of images, if there are any
    and the model says so."""

    def __init__(self, name: str, batch: ShardedBatch, num_rows: int, images: Tensor | None) -> None:
        self._name, self._batch, self._num_rows = name, batch, num_rows
        self._numbers: Tensor | None = None  # int64: which of the I tokens of images are here
        self._num_images = -1
        if images is not None:
            counted = images.flatten().cumsum(0).view_as(images)
            self._numbers = self.tokens(counted, 1)[self.tokens(images, 1)] - 1
            self._num_images = int(counted[-1, -1])

    def of(self, name: str, value: Any) -> Any:
        """RefusedError: a tensor of which it is not known which of its entries are of which tokens."""
        if isinstance(value, (list, tuple)):
            parts = [self.of(name, part) for part in value]
            return parts if isinstance(value, list) else tuple(parts)
        if isinstance(value, dict):
            return {key: self.of(name, part) for key, part in value.items()}
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if value.shape[:2] in ((self._num_rows, self._batch.seq_len), (1, self._batch.seq_len)):
            return self.tokens(value, 1)
        if self._numbers is not None and value.size(0) == self._num_images:
            return value[self._numbers]
        raise self.refused(name, value)

    def tokens(self, x: Tensor, dim: int) -> Tensor:
        """size S in `dim` -> size N"""
        sequence = self._batch.sequence
        padding = (0, 0) * (x.dim() - 1 - dim) + (0, sequence.seq_len - self._batch.seq_len)
        return sequence.shard(functional.pad(x, padding), dim=dim)

    def refused(self, name: str, value: Tensor) -> RefusedError:
        rows, tokens = self._num_rows, self._batch.seq_len
        return RefusedError(
            f"{self._name} gives its language model {name} {tuple(value.shape)}, which ringtile does not know how to "
            f"shard; expected an entry for each of the {rows} x {tokens} tokens, or for each token of an image: train "
            f"it on text, or with context_parallel_size: 1"
        )


def _image_tokens(given: Mapping[str, Any], num_rows: int, seq_len: int) -> Tensor | None:
    """bool (B, S): the tokens of images, where a model names them to its language model; None: it does not."""
    masks = [x for x in given.values() if isinstance(x, Tensor) and x.dtype == torch.bool]
    return next((x for x in masks if x.shape == (num_rows, seq_len)), None)


def language_model(base: PreTrainedModel) -> tuple[str, nn.Module] | None:
    """The module, with its path, that a model with other inputs too gives the embeddings of all tokens; None: none is
    known."""
    config = base.config.get_text_config()
    if config is base.config:
        return None
    found: list[tuple[str, nn.Module]] = []
    for path, module in base.named_modules():
        if not path or not isinstance(module, PreTrainedModel) or type(module.config) is not type(config):
            continue
        takes = "inputs_embeds" in inspect.signature(type(module).forward).parameters
        if takes and not any(path.startswith(f"{outer}.") for outer, _ in found):
            found.append((path, module))
    return found[0] if len(found) == 1 else None
