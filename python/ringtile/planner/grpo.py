"""What a GRPO step adds to a training, on fake tensors, as TRL's GRPOTrainer (1.16) and transformers' generate have it.

Shape letters: B rows of a batch, R rows of a group's generation batch, S tokens of a row, N local tokens, P tokens of
its prompt, C of its completion, V vocabulary, E hidden size, G kv heads, D head dim.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ringtile.errors import ConfigError, RefusedError
from ringtile.first_batch.quiet import without_checkpoints
from ringtile.hf.families import CACHES
from ringtile.hf.patches import Patches
from ringtile.planner.live import Live


@dataclass(frozen=True)
class Grpo:
    """A GRPO step, apart from the length of its rows."""

    completion_tokens: int
    generation_rows: int  # R; 0: completions come from elsewhere
    has_reference: bool = False  # a reference model: beta above 0

    def prompt_tokens(self, seq_len: int) -> int:
        """P of rows of S tokens: at least one, where a row is shorter than a completion."""
        return max(seq_len - self.completion_tokens, 1)


def check(engine: str) -> None:
    """RefusedError: an engine whose weights TRL gathers. ConfigError: TRL is missing."""
    if engine == "zero3":
        raise RefusedError(
            "a GRPO step is not planned under zero3: TRL gathers all weights to generate, and how long DeepSpeed keeps "
            "those of a reference model was not measured; expected --engine ddp, fsdp2, zero1 or zero2"
        )
    if importlib.util.find_spec("trl") is None:
        raise ConfigError("a GRPO step is planned with TRL's own log-probs, but trl is not installed: pip install trl")


def add_log_probs(model: PreTrainedModel, *, entropy: bool) -> None:
    """Gives a model the head that GRPOTrainer gives it: log-probs (B, N) in tiles, never logits (B, N, V)."""
    importlib.import_module("trl.trainer.utils").add_fused_lm_head(
        model, outputs=("log_probs", "entropy") if entropy else ("log_probs",)
    )


def compute_log_probs_as_on_gpu(patches: Patches) -> None:
    """Replaces what TRL's head computes otherwise where Triton is: kernels that allocate nothing, on copied rows.

    On a GPU it copies the rows that have a label, (T, E), and one kernel each turns a tile of logits, at most
    4096 x 32768, into sums, or into its gradient in place. On a CPU, torch operations hold several such tiles.
    RefusedError: another version of TRL, which does not have these functions.
    """
    utils, kernels = (importlib.import_module(f"trl.{name}") for name in ("trainer.utils", "kernels.chunked_logprob"))
    function: Any = getattr(utils, "_ChunkedLogProbFunction", None)
    names = ("_forward_tile", "_backward_tile", "_addmm_fp32")
    if function is None or not all(hasattr(kernels, name) for name in names):
        version = importlib.import_module("trl").__version__
        raise RefusedError(f"a GRPO step is not planned with trl {version}; expected trl 1.16, whose tiles it knows")
    for name in names:
        patches.set(kernels, name, lambda *args, **kwargs: None)

    class Rows:
        @staticmethod
        def apply(hidden: Tensor, *args: Any) -> Any:
            return function.apply(hidden.index_select(0, torch.arange(hidden.size(0))), *args)

    patches.set(utils, "_ChunkedLogProbFunction", Rows)


def make_rollouts(live: Live, grpo: Grpo, seq_len: int, batch: int) -> list[Tensor]:
    """What GRPOTrainer keeps of a generation batch until it has trained on it, whole on every rank of a group.

    Ids and masks, int64 (R, S); old and reference log-probs, float32 (R, C); advantages, float32 (R). R is at least B.
    """
    rows, completion = max(grpo.generation_rows, batch), seq_len - grpo.prompt_tokens(seq_len)
    with live.making("buffers"):
        kept = [torch.empty((rows, seq_len), dtype=torch.int64) for _ in range(2)]
        return [*kept, *(torch.empty((rows, completion)) for _ in range(1 + grpo.has_reference)), torch.empty(rows)]


class _Cache(DynamicCache):
    """The cache that `generate` makes by default, counted as such: keys and values, (rows, G, S, D) of a layer."""

    def __init__(self, live: Live, model: PreTrainedModel) -> None:
        super().__init__(config=model.config)  # of a layer with a window, as many tokens as that has
        self._live = live

    def update(self, *args: Any, **kwargs: Any) -> Any:
        with self._live.making("kv cache"):
            return super().update(*args, **kwargs)


class Generation:
    """The rows that one rank generates, unsharded: each token's keys and values stay until all are generated.

    call: runs a model.
    """

    def __init__(self, model: Any, call: Callable[..., Any], live: Live, rows: int) -> None:
        self.model, self.call, self.live, self.rows = model, call, live, rows
        self.cache = _Cache(live, model)

    def run(self, num_tokens: int) -> None:
        """A forward pass on the next tokens of each row: the prompt, or one token."""
        seen = self.cache.get_seq_length()
        with self.live.making("buffers"):
            ids = torch.empty((self.rows, num_tokens), dtype=torch.int64)
            mask = torch.empty((self.rows, seen + num_tokens), dtype=torch.int64)
        taken = inspect.signature(type(self.model).forward).parameters
        inputs = {"input_ids": ids, "attention_mask": mask, next(name for name in CACHES if name in taken): self.cache}
        with torch.no_grad(), without_checkpoints(self.model):  # as TRL generates: beside them there is no cache
            self.call(self.model, **inputs, use_cache=True, logits_to_keep=1)

    def skip(self, num_tokens: int) -> None:
        """As if so many tokens more had been generated."""
        layers: list[Any] = self.cache.layers
        for index, layer in enumerate(layers):
            new = (x.new_empty((*x.shape[:2], num_tokens, x.size(3))) for x in (layer.keys, layer.values))
            self.cache.update(*new, index)
