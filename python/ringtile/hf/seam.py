"""Where a model with images or sound is cut: everything before its language model sees whole sequences.

Embeddings are merged with the features of images, positions are counted and masks are drawn as in one process, on every
rank; what the language model is then given is sharded, once. Of the gradient that flows back, each rank has the part
of its own tokens, so that the engine's mean over the ranks is that of one process, as for every other weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ringtile.errors import RefusedError
from ringtile.hf.attention import hidden_mask
from ringtile.hf.batch import ShardedBatch, active_batch, waiting_batch
from ringtile.hf.keys import LOSS, TEXT
from ringtile.hf.patches import Patches
from ringtile.seam import Cut, language_model, parameters_of


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
        taken = {name for outer in around for name in parameters_of(outer)}
        self.keys = frozenset(taken - TEXT - {"kwargs", "lm_kwargs"})
        self._parameters = parameters_of(module)
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
        cut = Cut(self._name, given, batch.sequence, batch.seq_len)
        special = {"attention_mask", "position_ids", *LOSS}  # the latter were sharded before the model
        local = {name: value for name, value in given.items() if name in LOSS} | cut.all_but(special)
        mask = given.get("attention_mask")
        local["attention_mask"] = hidden_mask(self._name, mask, batch, cut.num_rows, cut.device)
        positions = given.get("position_ids")
        if positions is not None:
            batch.max_position = int(positions.max())
        local["position_ids"] = batch.position_ids if positions is None else cut.positions(positions)
        local["use_cache"] = False
        return local
