"""A callback for `Trainer(callbacks=[...])`, to copy: what a training with ringtile costs, in each line of the log.

tokens_per_s      tokens of all batches, each counted once; needs include_num_input_tokens_seen="all"
bytes_per_step    that this rank sends to the ranks that share its sequences
peak_bytes        the most memory of this rank: in tensors of its GPU, or resident

Numbers are of rank 0, which logs. Evaluations and saves count in the time.
"""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
import torch.distributed as dist
from ringtile.transport.groups import transport_of
from transformers import TrainerCallback


class MetricsCallback(TrainerCallback):
    def __init__(self) -> None:
        self._seconds, self._tokens, self._steps, self._bytes = 0.0, 0, 0, 0

    def _sent(self) -> int:
        """Bytes of all groups of this rank."""
        if not dist.is_initialized():
            return 0
        return sum(transport_of(group).bytes_sent for group in list(dist.distributed_c10d._world.pg_map))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin(state)

    def _begin(self, state: Any) -> None:
        self._seconds, self._bytes = time.perf_counter(), self._sent()
        self._tokens, self._steps = int(state.num_input_tokens_seen), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        steps = state.global_step - self._steps
        if logs is None or "loss" not in logs or steps == 0:
            return
        tokens = int(state.num_input_tokens_seen) - self._tokens
        if tokens:
            logs["tokens_per_s"] = tokens / (time.perf_counter() - self._seconds)
        logs["bytes_per_step"] = (self._sent() - self._bytes) / steps
        on_gpu = args.device.type == "cuda"
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        logs["peak_bytes"] = torch.cuda.max_memory_allocated() if on_gpu else resident
        self._begin(state)
