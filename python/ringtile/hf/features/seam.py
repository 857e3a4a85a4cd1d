"""Where a model with images or sound is cut: everything before its language model sees whole sequences.

Embeddings are merged with the features of images, positions are counted and masks are drawn as in one process, on every
rank; what the language model is then given is sharded, once. Of the gradient that flows back, each rank has the part
of its own tokens, so that the engine's mean over the ranks is that of one process, as for every other weight.

Shape letters: B batch, S global tokens, N local tokens, E hidden size, I tokens of images.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ringtile.errors import RefusedError
from ringtile.first_batch.trace import running_trace
from ringtile.hf.attention import hidden_mask
from ringtile.hf.batch import ShardedBatch, active_batch, waiting_batch
from ringtile.hf.feature import Enabled, Feature
from ringtile.hf.keys import LOSS, TEXT
from ringtile.hf.patches import Patches
from ringtile.sequence.sharded import ShardedSequence


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


def language_model(base: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the module, with its path, that a transformers model with other inputs too gives the embeddings of all
    tokens; None: none is known."""
    get_text_config = getattr(getattr(base, "config", None), "get_text_config", None)
    config = None if get_text_config is None else get_text_config()
    if config is None or config is base.config:
        return None
    found: list[tuple[str, nn.Module]] = []
    for path, module in base.named_modules():
        if not path or type(getattr(module, "config", None)) is not type(config):
            continue
        takes = "inputs_embeds" in parameters_of(module)
        if takes and not any(path.startswith(f"{outer}.") for outer, _ in found):
            found.append((path, module))
    return found[0] if len(found) == 1 else None


def parameters_of(module: nn.Module) -> list[str]:
    """Return the names of what a module's class is called with, in order."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


class Cut:
    """This rank's part of what a language model is given for whole sequences.

    name: of the model, in messages. Raises RefusedError where it is given no embeddings (B, S, E).
    """

    def __init__(self, name: str, given: Mapping[str, Any], sequence: ShardedSequence, seq_len: int) -> None:
        embeddings = given.get("inputs_embeds")
        if not isinstance(embeddings, Tensor) or embeddings.shape[1:2] != (seq_len,):
            raise RefusedError(
                f"{name} gives its language model "
                f"{sorted(name for name, value in given.items() if value is not None)}; expected inputs_embeds (B, S, "
                f"E) with a token for each of the batch's S = {seq_len}"
            )
        self._name, self._given, self._sequence, self._seq_len = name, given, sequence, seq_len
        self.num_rows, self.device = embeddings.size(0), embeddings.device
        self._numbers: Tensor | None = None  # int64: which of the I tokens of images are here
        self._num_images = -1
        images = _image_tokens(given, self.num_rows, seq_len)
        if images is not None:
            counted = images.flatten().cumsum(0).view_as(images)
            self._numbers = self.tokens(counted, 1)[self.tokens(images, 1)] - 1
            self._num_images = int(counted[-1, -1])

    def all_but(self, names: Iterable[str]) -> dict[str, Any]:
        """Everything but these, sharded. RefusedError: of a tensor it is not known which entry is of which token."""
        return {name: self._of(name, value) for name, value in self._given.items() if name not in {*names}}

    def positions(self, whole: Tensor) -> Tensor:
        """size S in the last dim -> size N"""
        if whole.size(-1) != self._seq_len:
            raise self._refused("position_ids", whole)
        return self.tokens(whole, whole.dim() - 1)

    def tokens(self, x: Tensor, dim: int) -> Tensor:
        """size S in `dim` -> size N"""
        padding = self._sequence.seq_len - self._seq_len
        if padding and x.is_floating_point():  # of hidden states, none of zeros: the norm of those has no gradient
            last = x.detach().narrow(dim, -1, 1)
            x = torch.cat([x, last.expand(*(padding if i == dim else n for i, n in enumerate(x.shape)))], dim)
        else:
            x = functional.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, padding))
        return self._sequence.shard(x, dim=dim)

    def _of(self, name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            parts = [self._of(name, part) for part in value]
            return parts if isinstance(value, list) else tuple(parts)
        if isinstance(value, dict):
            return {key: self._of(name, part) for key, part in value.items()}
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if value.shape[:2] in ((self.num_rows, self._seq_len), (1, self._seq_len)):
            return self.tokens(value, 1)
        if self._numbers is not None and value.size(0) == self._num_images:
            return value[self._numbers]
        raise self._refused(name, value)

    def _refused(self, name: str, value: Tensor) -> RefusedError:
        return RefusedError(
            f"{self._name} gives its language model {name} {tuple(value.shape)}, which ringtile does not know how to "
            f"shard; expected an entry for each of the {self.num_rows} x {self._seq_len} tokens, or for each token of "
            f"an image: train it on text, or with context_parallel_size: 1"
        )


def _image_tokens(given: Mapping[str, Any], num_rows: int, seq_len: int) -> Tensor | None:
    """bool (B, S): the tokens of images, where a model names them to its language model; None: it does not."""
    masks = [x for x in given.values() if isinstance(x, Tensor) and x.dtype == torch.bool]
    return next((x for x in masks if x.shape == (num_rows, seq_len)), None)


FEATURE = Feature(frozenset({"_forward_pre_hooks"}), _install)
