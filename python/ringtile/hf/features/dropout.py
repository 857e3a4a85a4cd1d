"""Random numbers of a sharded model in training: each rank draws what its own tokens drop.

Generators are seeded alike on all ranks, for whatever decides a token of the data. Inside a model, that of the device
is the rank's own: seeded for each forward pass by the seed, the step, the pass and the rank, so a resumed run draws the
same. Attention drops by counters (AttentionDropout), since ranks must agree on what a pair of tokens drops.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel, Trainer

from ringtile.errors import RefusedError
from ringtile.first_batch.trace import running_trace
from ringtile.hf.batch import CHECKPOINTING, ShardedBatch
from ringtile.hf.group import ContextParallelGroup
from ringtile.hf.model import dropping
from ringtile.hf.patches import Patches

_DROPS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout}


class Draws:
    """What the models of one Trainer draw on shards."""

    def __init__(self, trainer: Trainer, base: PreTrainedModel, group: ContextParallelGroup) -> None:
        self._trainer, self._base, self._group = trainer, base, group
        self._pass = (-1, 0)  # the step, and the forward passes of it so far
        config = base.config.get_text_config().to_dict()
        # On a CPU one generator draws what is dropped and which layers are left out, which must be so on all ranks.
        on_cpu, leaves_out = group.device.type == "cpu", any("layerdrop" in name and config[name] for name in config)
        self._is_own = group.size > 1 and group.device.type in ("cpu", "cuda") and not (on_cpu and leaves_out)

    @contextlib.contextmanager
    def of(self, batch: ShardedBatch | None, model: nn.Module) -> Iterator[None]:
        """Inside, the forward pass of a rank's part of a batch draws this rank's numbers, if it trains.

        RefusedError: a backward runs the whole model again, which cannot tell of which forward pass that is.
        """
        if batch is None or not model.training:
            yield
            return
        if torch._C._current_graph_task_id() != -1 and (what := dropping(self._base)):
            raise RefusedError(
                f"the model drops ({what}), and the loss has checkpointed it as a whole; expected {CHECKPOINTING} of "
                f"the Trainer, or rates of 0"
            )
        step = self._trainer.state.global_step
        count = self._pass[1] + 1 if self._pass[0] == step else 0
        if drops := running_trace() is None:  # a proof drops nothing
            self._pass = step, count
        rows = 1 if batch.token_weights is None else batch.token_weights.size(0)
        first = (count * self._group.data_size + self._group.data_index) * rows
        batch.dropout = self._trainer.args.seed % 2**32, step, first
        if drops and self._trainer.neftune_noise_alpha is not None:
            self._scale_noise(batch, self._trainer.neftune_noise_alpha)
        if not self._is_own:
            yield
            return
        generator = torch.default_generator
        if self._group.device.type == "cuda" and torch.cuda.is_available():
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before = generator.get_state()
        key = f"{self._trainer.args.seed} {step} {count} {self._group.data_index} {self._group.rank}"
        generator.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little"))
        try:
            yield
        finally:
            generator.set_state(before)

    def _scale_noise(self, batch: ShardedBatch, alpha: float) -> None:
        """NEFTune's noise is over the root of the tokens of a row, of which its hook sees those of a shard."""
        embeddings: Any = self._base.get_input_embeddings()
        if hasattr(embeddings, "neftune_noise_alpha"):
            share = 1.0 if batch.before_language_model else batch.sequence.local_len / batch.seq_len
            embeddings.neftune_noise_alpha = alpha * math.sqrt(share)


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Inside, nothing of a model drops, and NEFTune adds no noise."""
    rates = Patches()
    for module in model.modules():  # of which attention hands some to kernels that no mode sees
        for name, rate in list(vars(module).items()):
            if isinstance(rate, float) and ("drop" in name or name in ("p", "neftune_noise_alpha")):
                rates.set(module, name, 0.0)
    try:
        with _NoDropout():
            yield
    finally:
        rates.restore()


class _NoDropout(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)
