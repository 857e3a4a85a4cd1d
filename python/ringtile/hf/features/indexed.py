"""Learned sparse attention (DSA): the indexer of a layer chooses the keys of each query, which attends no others.

An indexer's forward scores all keys of the row for each query, S x S numbers, and takes the highest. Here its own code
still makes its queries, keys and weights, but a symbol stands for what it computes from the keys of the row: its steps
are noted, one that is not known is refused, and the choice is made from the keys of all ranks, in blocks
(attn/indexed.py). Of equal scores the key that comes first is chosen, where nothing is sharded too.

Shape letters: B batch, S global tokens, N local tokens, H heads of an indexer, D its head dim, I indices of a query.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ringtile.attn.indexed import choose_keys
from ringtile.errors import RefusedError
from ringtile.hf import model
from ringtile.hf.batch import ShardedBatch, active_batch, check_not_recomputed
from ringtile.hf.families import CACHES
from ringtile.hf.feature import Enabled, Feature
from ringtile.hf.layers import indexers
from ringtile.hf.patches import Patches
from ringtile.hf.trainers import needs_full_sequences
from ringtile.sequence.sharded import ShardedSequence


def _refuse(run: Enabled) -> None:
    """Raises RefusedError where the choice of keys has not been shown to be that of one process."""
    found = indexers(model.text_modules(run.base))
    if not found:
        return
    path, indexer = next(iter(found.items()))
    place = f"{path} ({type(indexer).__name__})"
    beside = {
        "torch_compile": run.trainer.args.torch_compile,
        "attention dropout": model.drops_attention(run.base),
        "shared_prefix": run.config.shared_prefix,
        f"{type(run.trainer).__name__}, whose loss needs whole sequences": needs_full_sequences(run.trainer),
    }
    for what in (what for what, asked in beside.items() if asked):
        raise RefusedError(
            f"{place} chooses the keys of each query (learned sparse attention), which has not been shown to be exact "
            f"with {what}; expected one of the two: {model.INSTEAD}"
        )


def install(base: PreTrainedModel, patches: Patches) -> None:
    """Make the indexers of a model choose from whole sequences where it runs on shards."""
    for path, indexer in indexers(base.named_modules()).items():
        place = f"{path} ({type(indexer).__name__})"
        patches.wrap(indexer, "forward", functools.partial(_forward, place))


def _forward(place: str, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """original: the indexer's own method -> int32 (B, N, I), of a shard positions in the padded row."""
    signature = inspect.signature(original)
    bound = signature.bind(*args, **kwargs)
    given, batch = bound.arguments, active_batch()
    has_cache = any(given.get(name) is not None for name in CACHES)
    if batch is None:
        if has_cache:
            return original(*args, **kwargs)
        check_not_recomputed(place)
        with _FirstOfEqual():
            return original(*args, **kwargs)
    if has_cache:
        raise RefusedError(f"{place} got a cache; expected none: it chooses from whole sequences")
    scores = _Scores(place, _sequence_of(place, batch))
    cache = next((name for name in CACHES if name in signature.parameters), None)
    if cache is None or "attention_mask" not in given:
        raise scores.refused(f"a forward{signature}")
    given[cache], given["attention_mask"] = SimpleNamespace(update_indexer=scores.of_keys), _Mask()
    chosen = original(*bound.args, **bound.kwargs)
    if scores.stage != "chosen":
        raise scores.refused(f"{scores.stage}, and no top-k of them")
    return chosen


def _sequence_of(place: str, batch: ShardedBatch) -> ShardedSequence:
    if batch.documents is not None or batch.sequence.mask.key_begin is not None:
        raise RefusedError(
            f"{place} chooses keys (learned sparse attention) in a batch with images or sound, or in a tree of tokens, "
            f"which has not been shown to be exact; expected rows of text"
        )
    return batch.sequence


class _FirstOfEqual(TorchFunctionMode):
    """Inside, a top-k is that of a stable descending sort."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.topk:
            return func(*args, **(kwargs or {}))
        scores, count = args
        return SimpleNamespace(indices=scores.sort(dim=-1, descending=True, stable=True).indices[..., :count])


class _Mask:
    """Stands for the mask of all queries and keys (B, N, S): True where a key may be attended."""

    dtype = torch.bool

    def __invert__(self) -> _Mask:
        return self


class _Scores:
    """Stands for the keys of the whole row in an indexer's forward, and for what follows from them: the products of
    queries and keys, the scores, and those under the mask."""

    def __init__(self, place: str, sequence: ShardedSequence) -> None:
        self.place, self.sequence, self.stage, self.scale = place, sequence, "nothing", 1.0
        self.queries: Any = None
        self.keys: Any = None
        self.weights: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.sequence.seq_len,)

    def of_keys(self, keys: Tensor, *layer: Any) -> _Scores:
        """As a cache's update_indexer. keys (B, N, D): those of the local tokens."""
        self.keys = keys
        return self._then("keys", nothing="keys")

    def transpose(self, *dims: int) -> _Scores:
        return self._then("a transpose", keys="keys")

    def float(self) -> _Scores:
        return self._then("a cast", keys="keys")

    def unsqueeze(self, dim: int) -> _Scores:
        return self._then("an unsqueeze", keys="keys")

    def __mul__(self, factor: Any) -> _Scores:
        if not isinstance(factor, int | float):
            raise self.refused(f"{self.stage} times a {type(factor).__name__}")
        self.scale *= factor
        return self._then("a product with a number", products="products")

    def squeeze(self, dim: int) -> _Scores:
        return self._then("a squeeze", scores="scores")

    def masked_fill(self, mask: Any, value: Any) -> _Scores:
        if not isinstance(mask, _Mask) or value != -torch.inf:
            raise self.refused("a mask of its own")
        return self._then("masked_fill", scores="masked scores")

    def topk(self, count: int, dim: int) -> Any:
        """.indices: int32 (B, N, I)."""
        self._then("a top-k", **{"masked scores": "chosen"})
        given = self.queries, self.keys, self.weights, self.sequence, count, self.scale
        return SimpleNamespace(indices=choose_keys(*given))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The products of queries (B, N, H, D) and keys, their relu, and its sum by weights (B, N, 1, H)."""
        scores: _Scores = next(x for x in args if isinstance(x, cls))
        if func is torch.matmul and scores.stage == "keys":
            scores.queries = args[0]
            return scores._then("a product", keys="products")
        if func is functional.relu:
            return scores._then("relu", products="rectified products")
        if func is torch.matmul and scores.stage == "rectified products":
            scores.weights = args[0].squeeze(-2)
            return scores._then("a product", **{"rectified products": "scores"})
        raise scores.refused(f"{getattr(func, '__name__', func)} of {scores.stage}")

    def _then(self, step: str, **stages: str) -> _Scores:
        """stages: by the one before. RefusedError: there is another now."""
        if self.stage not in stages:
            raise self.refused(f"{step} of {self.stage}")
        self.stage = stages[self.stage]
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self.refused(f"{name} of {self.stage}")

    def refused(self, found: str) -> RefusedError:
        return RefusedError(
            f"{self.place} computes {found}; expected the top-k of scores under the attention mask, sums over heads of "
            f"weights * relu(scale * q . k): ringtile knows no other choice of keys"
        )


FEATURE = Feature(frozenset({"forward"}), lambda run, patches: install(run.base, patches), _refuse)
