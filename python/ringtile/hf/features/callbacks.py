"""Callbacks for a Trainer. `CollectGarbageCallback` runs Python's garbage collector at the same steps on every rank;
`MetricsCallback` says what a training costs, in the Trainer's own log, and so in TensorBoard, W&B and all that read it.

Each logged line with a loss gets, over the steps since the line before it:

    tokens_per_s     tokens of all batches, padding included, each counted once; without evaluation and saving
    tokens_per_rank  such tokens in a step, over the number of ranks
    bytes_moved      bytes of a step that ringtile sends between the ranks that share sequences, all ranks together
    wait_share       the share of its time that a rank waits in ringtile for others, mean over the ranks; on CPUs only:
                     the host of a GPU does not wait
    peak_bytes       the most memory of any rank: resident, or on a GPU in tensors, since the process began

The last line of a training has no loss and none of them. bytes_moved and wait_share need a group of ranks.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback

from ringtile.errors import ConfigError, InputError, shown
from ringtile.hf.patches import Patches
from ringtile.peak_memory import peak_bytes
from ringtile.transport.transport import Transport


class MetricsCallback(TrainerCallback):
    """Adds tokens per second, bytes between ranks, waiting and memory of all ranks to each line of the Trainer's log.

    Give it to the Trainer (`callbacks=[ringtile.MetricsCallback()]`) before `ringtile.enable`, which connects the two.
    docs/guide/trainer.md has the numbers. ConfigError when training begins without `enable`.

    The ranks tell each other at the end of a step that is to be logged, as they do their losses, and not when the
    Trainer's `log` is called, which a user's code may do on one rank alone.
    """

    trainer: Trainer | None = None  # while it is enabled
    transport: Transport | None = None

    def install(
        self,
        trainer: Trainer,
        transport: Transport | None,
        group_size: int,
        proof_seconds: Callable[[], float],
        patches: Patches,
    ) -> None:
        """transport: of the group of ranks that share each sequence, group_size of them; None where none is shared.
        proof_seconds: what the check of the first batch has taken, which is no part of a step."""
        self.group_size, self.proof_seconds = group_size, proof_seconds
        self.found: dict[str, float] = {}  # for the next line of the log
        patches.set(self, "trainer", trainer)
        patches.set(self, "transport", transport)
        patches.wrap(trainer, "training_step", self._training_step)
        patches.wrap(trainer, "log", self._log)
        self._begin()

    def _begin(self) -> None:
        """Begins the next line."""
        self.steps = self.tokens = 0
        self.spent = [0.0, 0.0, 0.0]  # in its steps: seconds, bytes sent, seconds waited for bytes
        self.since = self._now()

    def _now(self) -> list[float]:
        """What `spent` counts, since ever."""
        counts = [0, 0.0] if self.transport is None else [self.transport.bytes_sent, self.transport.wait_seconds]
        return [time.perf_counter() - self.proof_seconds(), *counts]

    def _training_step(self, original: Callable[..., Any], model: Any, inputs: Any, /, *args: Any, **more: Any) -> Any:
        name = getattr(self.trainer.model if self.trainer else None, "main_input_name", "input_ids")
        tokens = inputs.get(name) if hasattr(inputs, "get") else None
        if isinstance(tokens, torch.Tensor) and tokens.dim() >= 2:
            self.tokens += tokens.size(0) * tokens.size(1)
        return original(model, inputs, *args, **more)

    def _log(self, original: Callable[..., Any], logs: dict[str, float], /, *args: Any, **kwargs: Any) -> Any:
        if "loss" in logs:
            logs |= self.found
            self.found = {}
        return original(logs, *args, **kwargs)

    # ---- the Trainer's calls --------------------------------------------------------------------

    def on_train_begin(self, *unused: Any, **also_unused: Any) -> None:
        if self.trainer is None:
            raise ConfigError(
                "MetricsCallback measures nothing yet; expected ringtile.enable(trainer, ...) after the callback was "
                "given to the Trainer, and before train()"
            )
        self._begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = self._now()
        self.spent = [spent + end - begin for spent, end, begin in zip(self.spent, now, self.since, strict=True)]
        self.since = now
        self.steps += 1
        self._find_if_logged(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._find_if_logged(control)

    def on_evaluate(self, *unused: Any, **also_unused: Any) -> None:
        self.since = self._now()

    def on_save(self, *unused: Any, **also_unused: Any) -> None:
        self.since = self._now()

    # ---- the numbers ----------------------------------------------------------------------------

    def _find_if_logged(self, control: Any) -> None:
        if control.should_log and self.steps and self.trainer is not None:
            self.found = self._find(self.trainer.args.device)
            self._begin()

    def _find(self, device: torch.device) -> dict[str, float]:
        """The numbers of all ranks. A collective."""
        mine = [self.tokens, peak_bytes(device.type), *self.spent]
        tokens, peak, seconds, sent, waited = self._of_all_ranks(mine, device).unbind(1)
        batch_tokens, num_ranks = tokens.sum().item() / self.group_size, tokens.numel()
        found = {"peak_bytes": peak.max().item()}
        if batch_tokens > 0:
            found["tokens_per_s"] = batch_tokens / seconds.max().item()
            found["tokens_per_rank"] = batch_tokens / self.steps / num_ranks
        if self.transport is not None:
            found["bytes_moved"] = sent.sum().item() / self.steps
            if device.type == "cpu":
                found["wait_share"] = (waited / seconds).mean().item()
        return found

    def _of_all_ranks(self, mine: list[float], device: torch.device) -> torch.Tensor:
        """float64 (ranks, numbers), on the CPU."""
        row = torch.tensor(mine, dtype=torch.float64, device=device)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return row[None].cpu()
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        return torch.stack(rows).cpu()


class CollectGarbageCallback(TrainerCallback):
    """Collects when training begins, at the start of step 0, and at the end of every `steps`-th step.

    Objects in reference cycles keep their memory until a collection. By default Python collects once it has created
    enough objects, which each rank does at a different moment, while the others wait for it in a collective.
    """

    def __init__(self, steps: int = 100) -> None:
        if type(steps) is not int or steps < 1:
            raise InputError(f"steps is {shown(steps)}; expected an integer of at least 1")
        self.steps = steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        collect()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:  # frees what wrapping the model and loading the first batch left behind
            collect()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.steps == 0:
            collect()


def collect() -> None:
    """Frees unreachable objects, then returns cached device memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
