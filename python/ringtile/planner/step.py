"""One training step of a transformers model on fake tensors: the model's own code, ringtile's tiles and ring.

Shape letters: B batch, S global tokens, N local tokens, E hidden size, W ranks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from ringtile import keep, ops
from ringtile.errors import RefusedError
from ringtile.first_batch.quiet import without_checkpoints
from ringtile.hf.batch import CHECKPOINTING, ShardedBatch, active, checkpoints
from ringtile.hf.features import latents, recurrent, stream
from ringtile.hf.features.loss import install_tiled_loss
from ringtile.hf.features.mlp import install_tiled_mlp
from ringtile.hf.features.norm import install_tiled_norm
from ringtile.hf.layers import mixers, refuse_indexers
from ringtile.hf.model import check_model, instead, text_modules
from ringtile.hf.patches import Patches
from ringtile.planner import experts, grpo
from ringtile.planner.adapters import add_lora
from ringtile.planner.attention import PlannedAttention, PlannedCall, SilentTransport, switch_attention
from ringtile.planner.engines import make_engine, silent_ranks
from ringtile.planner.images import PlannedImages, TowerShare
from ringtile.planner.live import Live
from ringtile.planner.offload import HostMemory, Offload
from ringtile.planner.setup import Setup
from ringtile.recurrent import kernels
from ringtile.recurrent.documents import Documents
from ringtile.sequence.layout import Layout, resolved
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence
from ringtile.stream import attend, layer
from ringtile.tiled import glu, loss, mlp, weight_grad
from ringtile.tiled.tiles import as_on
from ringtile.transport.loopback import LoopbackGroup

_MAX_MODULES = 100_000


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one rank at the peak of a step."""

    seq_len: int
    phases: dict[str, dict[str, int]]  # the parts of the peak of each, by PARTS; one where a step only trains
    host_bytes: int  # of offloaded hidden states
    optimizer_host_bytes: int  # of what the engine keeps there
    product_flops: int  # of matrix products, attention not counted but for that of a tower
    attention: tuple[PlannedCall, ...]
    tower: TowerShare | None = None

    @property
    def phase(self) -> str:
        """The one that takes most."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def parts(self) -> dict[str, int]:
        return self.phases[self.phase]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class TrainingStep:
    """A model with its engine and ringtile's switches on fake tensors; a context, in which steps of any length run.

    Raises RefusedError for what ringtile refuses to train, and for layers that the planner cannot run on fake tensors.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._stack = contextlib.ExitStack()
        self._budget: keep.CheckpointBudget | None = None
        self._offload: Offload | None = None
        self._reference: PreTrainedModel | None = None
        self._images: PlannedImages | None = None
        self._is_recurrent = self._has_latents = False
        self.num_packed = 0  # numbers of the model that its parameters in 4 bits do not count

    def __enter__(self) -> TrainingStep:
        setup, stack = self.setup, self._stack
        try:
            self._fake = FakeTensorMode(allow_non_fake_inputs=True)
            self._live = Live(setup.model.get_text_config().vocab_size, over_gloo=not setup.on_gpu)
            self._attention = PlannedAttention(self._live)
            if setup.engine == "fsdp2":
                stack.enter_context(silent_ranks(setup.devices))
            with self._fake:
                self._build()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def _close(self) -> None:
        for name in ("_engine", "_model", "_reference", "_offload", "_attention", "_images"):
            vars(self).pop(name, None)
        self._stack.close()

    def _make_model(self) -> PreTrainedModel:
        setup = self.setup
        mixed_zero = setup.bf16 and setup.engine.startswith("zero")
        dtype = torch.bfloat16 if mixed_zero else setup.dtype
        with _few_modules(), no_init_weights():  # fake tensors hold no numbers, which some initializations read
            made: Any = AutoModelForCausalLM if setup.images is None else AutoModelForImageTextToText
            model: PreTrainedModel = made.from_config(setup.model, dtype=dtype, trust_remote_code=False)
            model.tie_weights()
        check(model, setup)
        switch_attention(model)
        if setup.lora_rank:
            dtype_of_adapters = torch.bfloat16 if mixed_zero else torch.float32  # which DeepSpeed casts
            self.num_packed += add_lora(model, setup.lora_rank, dtype_of_adapters, setup.load_in_4bit, setup.engine)
        return model

    def _build(self) -> None:
        setup = self.setup
        if setup.grpo is not None:
            grpo.check(setup.engine)
        model = self._make_model().train()
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters()) + self.num_packed
        patches = Patches()
        self._stack.callback(patches.restore)
        for module in (attend, glu, layer, loss, mlp, weight_grad):
            patches.set(module, "tiles", self._live.tiles)
        if setup.images is not None:
            self._images = PlannedImages(model, setup.images, setup.batch, self._live, setup.on_gpu)
            self._attention.draws_masks = self._images.draws_masks
        if mixers(text_modules(model)):
            self._is_recurrent = True
            recurrent.install(model, patches)
            patches.set(kernels, "_check_kernel", lambda name, x: None)  # which computes
            if setup.on_gpu:
                patches.set(recurrent, "uses_libraries", lambda device: True)  # and so are not given wider numbers
        if setup.ringtile.context_parallel_size > 1 and setup.ringtile.latents and setup.engine != "zero3":
            self._has_latents = latents.install(model, patches)
        if setup.ringtile.stream:
            stream.install(model, setup.ringtile.tile_tokens, patches, recurs=True)
            for name in ("forward", "backward"):
                patches.set(attend, name, functools.partial(self._attention.attend_whole, name, getattr(attend, name)))
            patches.set(layer, "drawn_since", lambda before: False)  # states of generators are not fake
        if setup.ringtile.tiled_mlp:
            install_tiled_mlp(model, setup.ringtile.tile_tokens, patches)
        if setup.ringtile.tiled_norm:
            install_tiled_norm(model, setup.ringtile.tile_tokens, patches)
        if setup.grpo is not None:
            grpo.add_log_probs(model, entropy=True)
            if setup.on_gpu:
                grpo.compute_log_probs_as_on_gpu(patches)
        elif setup.ringtile.tiled_loss:
            install_tiled_loss(model, setup.ringtile, patches)
        by_engine = setup.engine == "fsdp2" and setup.expert_parallel_size == 1
        if setup.gradient_checkpointing and not by_engine:
            getattr(model, f"{CHECKPOINTING}_enable")({"use_reentrant": False, "preserve_rng_state": False})
        self._engine = make_engine(setup, model, self._live)
        self._fake.cache_enabled = False  # from here on a Memo remembers, for less
        with self._live:
            for buffer in model.buffers():
                self._live.count(buffer, "buffers")
            if setup.load_in_4bit:
                from ringtile.planner import four_bit

                for state in four_bit.states(model):
                    self._live.count(state, "weights")
            self._model = self._engine.prepare()
            if setup.grpo is not None and setup.grpo.has_reference and not setup.lora_rank:  # else the model's own
                self._reference = self._make_model().train(False)
                grpo.add_log_probs(self._reference, entropy=False)
                for buffer in self._reference.buffers():
                    self._live.count(buffer, "buffers")
                self._engine.prepare_reference(self._reference)
        if setup.ringtile.activation_offloading and (setup.gradient_checkpointing or setup.ringtile.stream):
            self._offload = Offload(self._model, patches, HostMemory(self._live, self._fake))
        if setup.ringtile.context_parallel_size > 1:
            for owner, name, checkpoint in checkpoints(self._model):
                patches.set(owner, name, functools.partial(self._checkpointed, checkpoint))

    def _checkpointed(self, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **of: Any) -> Any:
        """A layer, which keeps what that of a Trainer would."""
        running = contextlib.nullcontext if self._budget is None else keep.Kept(self._budget).running

        def run(*args: Any, **of: Any) -> Any:
            with running():
                return function(*args, **of)

        return checkpoint(run, *args, **of)

    def run(self, seq_len: int) -> StepMemory:
        """A step on sequences of seq_len tokens, after the first: the optimizer has its state."""
        setup, live = self.setup, self._live
        self._attention.calls = []
        if self._offload is not None:
            self._offload.saved_bytes = 0
        size = setup.ringtile.context_parallel_size
        layout = Layout.named(resolved(setup.ringtile.layout), -(-seq_len // _multiple(setup)) * _multiple(setup), size)
        mask = IntervalMask.causal(layout.seq_len)
        group = LoopbackGroup(SilentTransport(size)) if size > 1 else None
        sequence = ShardedSequence(mask, layout, group, scheme=setup.ringtile.context_parallel_scheme)
        zero = torch.zeros((), dtype=torch.int64)
        batch = ShardedBatch(sequence, seq_len, seq_len, zero, zero)
        if self._images is not None:
            self._images.enter(group, size)
        if self._is_recurrent:
            facts = Documents(sequence).facts  # of real masks
            _ = facts.whole, *(facts.windows(before) for before in range(1, ops.MAX_CONV_WIDTH))
        phases: dict[str, dict[str, int]] = {}
        device = "cuda" if setup.on_gpu else "cpu"
        is_mixed = self._is_recurrent or self._has_latents or setup.ringtile.stream
        mixed = batch if is_mixed else None
        with self._fake, live, self._attention.running(), as_on(device), contextlib.ExitStack() as inside:
            if setup.grpo is not None and setup.grpo.generation_rows:
                phases |= self._generate(setup.grpo, layout.seq_len)
            inside.enter_context(active(mixed))
            self._attention.batch, kept = batch, None
            if setup.grpo is not None:
                kept = grpo.make_rollouts(live, setup.grpo, layout.seq_len, setup.batch)
                phases["log-probs"] = self._peak(lambda: self._score(layout.seq_len, sequence.local_len))
            self._attention.calls = []
            phases["train"] = self._peak(lambda: self._step(layout.seq_len, sequence.local_len))
            del kept
        if size > 1:
            for name in phases.keys() - {"prefill", "decode"}:
                phases[name]["buffers"] += mask.begin.nbytes + mask.end.nbytes
        host = 0 if self._offload is None else self._offload.host_bytes
        share = None if self._images is None else self._images.share
        # Attention in a tower: its backward is 2.5 times its forward.
        flops = live.flops + (9 if setup.gradient_checkpointing else 7) * live.attention_flops // 2
        return StepMemory(seq_len, phases, host, self._engine.host_bytes, flops, tuple(self._attention.calls), share)

    def _peak(self, phase: Callable[[], None]) -> dict[str, int]:
        """The parts of a phase's peak."""
        self._live.reset_peak()
        phase()
        return self._live.finish()

    def _generate(self, settings: grpo.Grpo, seq_len: int) -> dict[str, dict[str, int]]:
        """A rank's part of the group's rows, which are not sharded."""
        self._attention.batch = None
        prompt, rows = settings.prompt_tokens(seq_len), settings.generation_rows
        rows = -(-rows // self.setup.ringtile.context_parallel_size)
        generation = grpo.Generation(self._model, self._call, self._live, rows)
        found = {"prefill": self._peak(lambda: generation.run(prompt))}
        if seq_len > prompt + 1:  # the last token is generated, and never read
            generation.skip(seq_len - prompt - 2)
            found["decode"] = self._peak(lambda: generation.run(1))
        return found

    def _score(self, seq_len: int, local_len: int) -> None:
        """The log-probs of a batch by the policy as it was, and by the reference."""
        inputs, loaded = self._inputs(seq_len, local_len)
        for model in (self._model, self._reference):
            if model is not None:
                with torch.no_grad(), without_checkpoints(model):
                    self._call(model, **inputs, use_cache=False)
        del loaded

    def _inputs(self, seq_len: int, local_len: int) -> tuple[dict[str, Any], list[Tensor]]:
        """Of the model, and what was loaded for it."""
        batch = self.setup.batch
        with self._live.making("buffers"):
            loaded = [torch.empty((batch, seq_len), dtype=torch.int64) for _ in range(2)]  # input_ids, labels
            inputs: dict[str, Any] = {"input_ids": loaded[0], "labels": loaded[1]}
            if seq_len != local_len:
                names = ("input_ids", "labels", "position_ids", "attention_mask")
                inputs = {name: torch.empty((batch, local_len), dtype=torch.int64) for name in names}
                inputs["shift_labels"] = inputs["labels"]
                del inputs["attention_mask"]
            inputs["num_items_in_batch"] = torch.ones((), dtype=torch.int64)
            if self._images is not None:
                inputs |= self._images.inputs(loaded, local_len)
        if self.setup.grpo is not None:
            inputs["fused_lm_head"] = True
        return inputs, loaded

    def _step(self, seq_len: int, local_len: int) -> None:
        live, (inputs, loaded) = self._live, self._inputs(seq_len, local_len)
        self._budget = keep.checkpoint_budget(self.setup.ringtile.keep_attention, self.setup.memory_bytes)
        if self.setup.ringtile.stream and (batch := self._attention.batch) is not None:
            batch.budget = self._budget
        self._engine.before_forward()
        loss = self._call(self._model, **inputs, use_cache=False)["loss"]  # frees other outputs, as the Trainer does
        self._engine.before_backward()
        live.in_backward = True
        loss.backward()
        live.in_backward = False
        del loss, loaded
        self._engine.step()

    def _call(self, model: nn.Module, **inputs: Any) -> Any:
        """A model as accelerate has wrapped it."""
        if self.setup.bf16 and (self.setup.engine == "ddp" or self.setup.expert_parallel_size > 1):
            from accelerate.utils import convert_outputs_to_fp32

            with torch.autocast("cpu", dtype=torch.bfloat16):
                return convert_outputs_to_fp32(model.__call__)(**inputs)
        return model(**inputs)


@contextlib.contextmanager
def _few_modules() -> Iterator[None]:
    """RefusedError inside: a model of so many modules, each of which takes its time, that a plan would take hours."""
    count = itertools.count(1)

    def look(*unused: object) -> None:
        if next(count) > _MAX_MODULES:
            raise RefusedError(
                f"the model has more than {_MAX_MODULES} modules, each of which the planner runs; expected fewer "
                f"layers, or fewer experts that are modules of their own"
            )

    handle = register_module_module_registration_hook(look)
    try:
        yield
    finally:
        handle.remove()


def check(model: PreTrainedModel, setup: Setup) -> None:
    """RefusedError: what ringtile does not train exactly, or what the planner cannot run on fake tensors."""
    name = type(model).__name__
    if setup.expert_parallel_size > 1:
        experts.check(setup)
    refuse_indexers(name, text_modules(model), lambda: instead(model))
    if reason := recurrent.unknown(text_modules(model)):
        raise RefusedError(f"{name}: {reason}, which the planner does not know; measure it with a short training")
    if mixers(text_modules(model)) and (setup.grpo is not None or setup.images is not None):
        raise RefusedError(
            f"{name} has recurrent layers, with which a GRPO step and images are not planned; expected a step on text: "
            f"measure it with a short training"
        )
    if setup.load_in_4bit and (setup.engine == "zero3" or setup.grpo is not None):
        raise RefusedError(
            f"weights in 4 bits are not planned {'under ZeRO-3' if setup.grpo is None else 'of a GRPO step'}; expected "
            f"a step of ddp, fsdp2, zero1 or zero2 that generates nothing"
        )
    if setup.ringtile.context_parallel_size > 1:
        with unset_fake_temporarily():  # some of the model's functions are tried on numbers
            check_model(model)


def _multiple(setup: Setup) -> int:
    return Layout.multiple(resolved(setup.ringtile.layout), setup.ringtile.context_parallel_size)
