"""Measures the cost of a training run: bytes between ranks (sent and planned), tokens, seconds."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

from ringtile.attn.auto import scheme_of
from ringtile.first_batch.run import is_recording
from ringtile.hf.batch import CHECKPOINTING, ShardedBatch, active_batch
from ringtile.hf.layers import LayerMask, layer_masks
from ringtile.peak_memory import reset_peak_bytes
from ringtile.planner.layer import Plan, plan_of
from ringtile.sequence.plan import Shape
from ringtile.sequence.sharded import ShardedSequence

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # whose memory counts


class Meter(TrainerCallback):
    """Measures this rank's optimizer steps, without evaluation.

    A hook on the model sees every sharded batch and adds the bytes that the plans of its rings have this rank send.
    The transport counts the bytes really sent.
    """

    def __init__(self, model: PreTrainedModel, args: TrainingArguments) -> None:
        self.config = model.config.get_text_config()
        self.dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else model.dtype
        self.forward_passes = 2 if getattr(args, CHECKPOINTING) else 1  # forward rings of a layer in one step
        self.moved_bytes = self.plan_bytes = self.tokens = self.batch_tokens = 0
        self.step_seconds: list[float] = []
        self.last_plan: Plan | None = None
        self.sequence: ShardedSequence | None = None  # of the last batch
        self.in_step = self.has_begun = False
        self.batches: list[tuple[ShardedBatch, int]] = []  # of this step, with their rows
        model.register_forward_pre_hook(self.before_forward, with_kwargs=True)

    def on_train_begin(self, *unused: Any, **also_unused: Any) -> None:
        self.has_begun = True  # optimizer, engine and checkpoint are ready
        reset_peak_bytes(DEVICE)

    def on_step_begin(self, *unused: Any, **also_unused: Any) -> None:
        self.in_step = True
        self.moved_bytes -= self.sent_bytes()
        self.began = time.perf_counter()

    def on_step_end(self, *unused: Any, **also_unused: Any) -> None:
        self.step_seconds.append(time.perf_counter() - self.began)
        self.moved_bytes += self.sent_bytes()
        self.in_step = False
        while self.batches:
            self.add_plans(*self.batches.pop(0))

    def sent_bytes(self) -> int:
        """The transport's counter; 0 before the first batch."""
        return 0 if self.sequence is None else self.sequence.transport.bytes_sent

    def before_forward(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the tokens of this rank, and note the batch."""
        if is_recording():
            return
        sharded = active_batch()
        if sharded is not None:
            self.sequence = sharded.sequence
        if not self.in_step:
            return
        self.batch_tokens = kwargs["input_ids"].numel()
        self.tokens += self.batch_tokens
        if sharded is None:
            return
        self.batches.append((sharded, kwargs["input_ids"].size(0)))

    def add_plans(self, sharded: ShardedBatch, batch_size: int) -> None:
        """Add what the plans of all layers have this rank send for a batch; after the step, which resolves schemes."""
        layers = layer_masks(self.config)
        plans = {layer: self.plan(sharded, layer, batch_size) for layer in {*layers}}
        for layer in layers:
            mine = plans[layer].ranks[sharded.sequence.rank]
            self.plan_bytes += self.forward_passes * mine.forward_bytes_sent + mine.backward_bytes_sent
            self.last_plan = plans[layer]

    def plan(self, sharded: ShardedBatch, layer: LayerMask, batch_size: int) -> Plan:
        """The ring of one layer for one batch."""
        num_heads, sequence = self.config.num_attention_heads, sharded.narrowed(layer)
        num_kv_heads = getattr(self.config, "num_key_value_heads", None) or num_heads
        head_dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // num_heads
        shape = Shape(batch_size, num_heads, num_kv_heads, head_dim, head_dim, self.dtype)
        return plan_of(sequence.mask, sequence.layout, shape, scheme_of(sequence, shape))

    def tokens_per_s(self) -> float:
        """Tokens per second of this rank in the median step, padding included."""
        if not self.step_seconds:
            return 0.0
        return self.tokens / len(self.step_seconds) / statistics.median(self.step_seconds)
