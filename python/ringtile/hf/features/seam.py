"""Where a model with images or sound is cut: everything before its language model sees whole sequences.

Embeddings are merged with the features of images, positions are counted and masks are drawn as in one process, on every
rank; what the language model is then given is sharded, once. Of the gradient that flows back, each rank has the part
of its own tokens, so that the engine's mean over the ranks is that of one process, as for every other weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ringtile.errors import RefusedError
from ringtile.first_batch.trace import running_trace
from ringtile.hf.attention import hidden_mask
from ringtile.hf.batch import ShardedBatch, active_batch, waiting_batch
from ringtile.hf.feature import Enabled, Feature
from ringtile.hf.keys import LOSS, TEXT
from ringtile.hf.language_model import Cut, language_model, parameters_of
from ringtile.hf.patches import Patches


def _install(run: Enabled, patches: Patches) -> None:
    """Hooks the language model of a model that has one behind other parts."""
    if (found := language_model(run.base)) is not None:
        _Seam(run, *found, patches)


class _Seam:
    """The seam of one model. What the model takes besides text, before its language model, becomes `run.keys`."""

    def __init__(self, run: Enabled, path: str, module: nn.Module, patches: Patches) -> None:
        base = run.base
        self._name, self._path = type(base).__name__, path
        around = [base, *(base.get_submodule(".".join(path.split(".")[:i])) for i in range(1, path.count(".") + 1))]
        taken = {name for outer in around for name in parameters_of(outer)}
        run.keys |= taken - TEXT - {"kwargs", "lm_kwargs"}
        self._parameters = parameters_of(module)
        patches.on_restore(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        batch = waiting_batch()
        if batch is not None:
            batch.before_language_model = False
            given = self._sharded(given, batch)
        elif (active := active_batch()) is not None and active.documents is not None:
            raise RefusedError(f"{self._name} runs its language model twice in a forward pass; expected once")
        if (trace := running_trace()) is not None and isinstance(given.get("inputs_embeds"), Tensor):
            given["inputs_embeds"] = trace.entered(self._path, given["inputs_embeds"])
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


FEATURE = Feature(frozenset({"_forward_pre_hooks"}), _install)
