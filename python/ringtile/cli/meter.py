"""What a training run cost: bytes between ranks (sent, and planned), tokens, seconds, memory."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

from ringtile.bench.measure import reset_resident_peak, resident_peak_bytes
from ringtile.hf.cut import CUT, Cut
from ringtile.plan import Plan
from ringtile.plan import plan as make_plan
from ringtile.transport import transport_of


class Meter(TrainerCallback):
    """Counts the optimizer steps of this rank, evaluation left out.

    A hook on the model sees every batch after its cut and plans what this rank's rings must send for it; what they
    did send is counted by the transport.
    """

    def __init__(self, model: PreTrainedModel, args: TrainingArguments) -> None:
        self.config = model.config.get_text_config()
        self.dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else model.dtype
        self.forward_passes = 2 if args.gradient_checkpointing else 1  # rings of a layer before its backward
        self.moved_bytes = self.plan_bytes = self.tokens = self.batch_tokens = 0
        self.step_seconds: list[float] = []
        self.last_plan: Plan | None = None
        self.group: Any = None
        self.in_step = False
        model.register_forward_pre_hook(self.before_forward, with_kwargs=True)

    def on_train_begin(self, *unused: Any, **also_unused: Any) -> None:
        reset_peak_bytes()

    def on_step_begin(self, *unused: Any, **also_unused: Any) -> None:
        self.in_step = True
        self.moved_bytes -= self.sent_bytes()
        self.began = time.perf_counter()

    def on_step_end(self, *unused: Any, **also_unused: Any) -> None:
        self.step_seconds.append(time.perf_counter() - self.began)
        self.moved_bytes += self.sent_bytes()
        self.in_step = False

    def sent_bytes(self) -> int:
        """The transport's counter; 0 before the first batch."""
        return 0 if self.group is None else transport_of(self.group).bytes_sent

    def before_forward(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Counts the tokens of this rank, and plans the rings of all layers."""
        cut: Cut | None = kwargs.get(CUT)
        if cut is not None:
            self.group = cut.group
        if not self.in_step:
            return
        self.batch_tokens = kwargs["input_ids"].numel()
        self.tokens += self.batch_tokens
        if cut is None:
            return
        batch = kwargs["input_ids"].size(0)
        plans = {window: self.plan(cut, window, batch) for window in {*layer_windows(self.config)}}
        for window in layer_windows(self.config):
            mine = plans[window].ranks[transport_of(cut.group).rank]
            self.plan_bytes += self.forward_passes * mine.forward_bytes_sent + mine.backward_bytes_sent
            self.last_plan = plans[window]

    def plan(self, cut: Cut, window: int | None, batch: int) -> Plan:
        """The ring of one layer for one batch."""
        num_heads = self.config.num_attention_heads
        return make_plan(
            cut.mask_of(window),
            cut.layout,
            num_heads=num_heads,
            num_kv_heads=getattr(self.config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(self.config, "head_dim", None) or self.config.hidden_size // num_heads,
            dtype=self.dtype,
            batch=batch,
        )

    def tokens_per_s(self) -> float:
        """Tokens of this rank, padding included, in the median step."""
        if not self.step_seconds:
            return 0.0
        return self.tokens / len(self.step_seconds) / statistics.median(self.step_seconds)


def layer_windows(config: Any) -> list[int | None]:
    """The sliding window of each layer, in tokens; None: it sees the whole document."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def reset_peak_bytes() -> None:
    """Makes peak_bytes start anew, where the system can."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    reset_resident_peak()


def peak_bytes() -> int:
    """The most memory this rank held: of its GPU, or else resident memory of the process."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident_peak_bytes()
