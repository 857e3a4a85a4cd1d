"""One training step of a transformers model on fake tensors: the model's own code, ringtile's tiles and ring.

Shape letters: B batch, S global tokens, N local tokens, E hidden size, W ranks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils._python_dispatch import _disable_current_modes
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ringtile import keep, ops
from ringtile.attn.attention import RingAttention
from ringtile.attn.call import Call, Options
from ringtile.errors import RefusedError
from ringtile.first_batch.quiet import without_checkpoints
from ringtile.hf.attention import empty_mask, latents_of
from ringtile.hf.batch import CHECKPOINTING, ShardedBatch, active, checkpoints
from ringtile.hf.features import latents, recurrent, stream
from ringtile.hf.features.loss import install_tiled_loss
from ringtile.hf.features.mlp import install_tiled_mlp
from ringtile.hf.features.norm import install_tiled_norm
from ringtile.hf.layers import mask_of_layer, mixers, refuse_indexers
from ringtile.hf.model import check_model, instead, text_modules
from ringtile.hf.patches import Patches
from ringtile.planner import experts, grpo
from ringtile.planner.adapters import add_lora
from ringtile.planner.engines import make_engine, silent_ranks
from ringtile.planner.images import PlannedImages, TowerShare, attend_as_loaded
from ringtile.planner.live import Live
from ringtile.planner.offload import HostMemory, Offload
from ringtile.planner.setup import Setup
from ringtile.recurrent import kernels
from ringtile.recurrent.documents import Documents
from ringtile.sequence.layout import Layout, resolved
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.plan import Shape
from ringtile.sequence.sharded import ShardedSequence
from ringtile.stream import attend, layer
from ringtile.stream.attend import CausalChunk, running_chunk
from ringtile.tiled import glu, loss, mlp, weight_grad
from ringtile.tiled.tiles import as_on
from ringtile.transport.loopback import LoopbackGroup, LoopbackState, LoopbackTransport
from ringtile.transport.transport import Exchange

_MAX_MODULES = 100_000
_NAME = "ringtile_plan"  # of the attention implementation


class PlannedCall(NamedTuple):
    """One call of attention that computes, where ranks share a sequence or not."""

    shape: Shape
    mask: IntervalMask
    is_again: bool  # computed again in a backward


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
        self._batch: ShardedBatch | None = None
        self._calls: list[PlannedCall] = []
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
        for name in ("_engine", "_model", "_reference", "_offload", "_batch", "_images"):
            vars(self).pop(name, None)
        _steps.clear()
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
        _switch_attention(model)
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
                patches.set(attend, name, functools.partial(self._attend_whole, name, getattr(attend, name)))
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
        self._calls = []
        if self._offload is not None:
            self._offload.saved_bytes = 0
        size = setup.ringtile.context_parallel_size
        layout = Layout.named(resolved(setup.ringtile.layout), -(-seq_len // _multiple(setup)) * _multiple(setup), size)
        mask = IntervalMask.causal(layout.seq_len)
        group = LoopbackGroup(_SilentTransport(size)) if size > 1 else None
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
        with self._fake, live, _planning(self), as_on(device), contextlib.ExitStack() as inside:
            if setup.grpo is not None and setup.grpo.generation_rows:
                phases |= self._generate(setup.grpo, layout.seq_len)
            inside.enter_context(active(mixed))
            self._batch, kept = batch, None
            if setup.grpo is not None:
                kept = grpo.make_rollouts(live, setup.grpo, layout.seq_len, setup.batch)
                phases["log-probs"] = self._peak(lambda: self._score(layout.seq_len, sequence.local_len))
            self._calls = []
            phases["train"] = self._peak(lambda: self._step(layout.seq_len, sequence.local_len))
            del kept
        if size > 1:
            for name in phases.keys() - {"prefill", "decode"}:
                phases[name]["buffers"] += mask.begin.nbytes + mask.end.nbytes
        host = 0 if self._offload is None else self._offload.host_bytes
        share = None if self._images is None else self._images.share
        # Attention in a tower: its backward is 2.5 times its forward.
        flops = live.flops + (9 if setup.gradient_checkpointing else 7) * live.attention_flops // 2
        return StepMemory(seq_len, phases, host, self._engine.host_bytes, flops, tuple(self._calls), share)

    def _peak(self, phase: Callable[[], None]) -> dict[str, int]:
        """The parts of a phase's peak."""
        self._live.reset_peak()
        phase()
        return self._live.finish()

    def _generate(self, settings: grpo.Grpo, seq_len: int) -> dict[str, dict[str, int]]:
        """A rank's part of the group's rows, which are not sharded."""
        self._batch = None
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
        if self._batch is not None and self.setup.ringtile.stream:
            self._batch.budget = self._budget
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

    # ---- attention ------------------------------------------------------------------------------

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """q (B, H, N, D), k, v (B, G, N, D) -> (B, N, H, Dv): ringtile's ring, or on whole sequences torch's."""
        batch = self._batch
        k, v, expand = latents_of(module, k, v)
        if torch.is_autocast_enabled("cpu"):
            q, k, v = (x.to(torch.get_autocast_dtype("cpu")) for x in (q, k, v))
        if batch is None:
            with self._live.making("attention"):
                return sdpa_attention_forward(module, q, k, v, mask, **{**options, "dropout": 0.0})
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with _disable_current_modes():  # plans are real
            sequence = batch.narrowed(mask_of_layer(module, options))
        if (chunk := running_chunk()) is not None:
            given = {"scale": options.get("scaling"), "softcap": options.get("softcap") or 0.0}
            keep.called_by(module)
            if expand is not None:
                k, v = expand(k, v)
            if isinstance(chunk, CausalChunk) and chunk.tokens.start == 0 and chunk.what != "keys":
                # Of all chunks, as if none were kept.
                self._calls.append(PlannedCall(Shape.of(q, k, v), sequence.mask, self._live.in_backward))
            with self._live.making("attention"):
                return chunk.attend(q, k, v, sequence, sinks=options.get("s_aux"), **given), None
        with _disable_current_modes():
            shape = Shape.of(q, k, v) if expand is None else expand.shape_of(q, k, v)
            of_call = PlannedCall(shape, sequence.mask, self._live.in_backward)
        if sequence.world_size == 1:
            self._calls.append(of_call)
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with self._live.making("attention"):
                return sdpa_attention_forward(module, q, k, v, mask, **{**options, "dropout": 0.0})
        keep.called_by(module)
        about: dict[str, Any] = {"scale": options.get("scaling"), "softcap": options.get("softcap") or 0.0}
        about |= {"sinks": options.get("s_aux"), "expand": expand}
        return self._ring(q, k, v, sequence, of_call, **about), None

    def _ring(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequence: ShardedSequence,
        of_call: PlannedCall,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        expand: Any = None,
    ) -> Tensor:
        """`ring_attention` over ranks; its out."""
        with self._live.making("attention"):
            about = Options(scale or q.size(-1) ** -0.5, softcap, sinks=sinks, returns_lse=False)
            call = Call.kept(sequence, of_call.shape, q.device, about)
            if expand is not None:
                call, k, v = expand.travel(call, q, k, v)
            weights = () if call.blocks is None else call.blocks.weights
            before = sequence.transport.num_calls
            out: Tensor
            out, _ = _Attention.apply(q, k, v, sinks, call, *weights)  # type: ignore[no-untyped-call]
            if sequence.transport.num_calls > before:
                self._calls.append(of_call)
        return out

    def _attend_whole(self, name: str, function: Callable[..., Any], call: Call, *given: Any) -> Any:
        """`forward` or `backward` of all tokens of a streamed layer."""
        before = call.transport.num_calls
        with self._live.making("attention"):
            result = function(call, *given)
        if name == "forward" and call.transport.num_calls > before:
            self._calls.append(PlannedCall(call.shape, call.plan.mask, self._live.in_backward))
        return result


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


def _switch_attention(model: PreTrainedModel) -> None:
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    model.set_attn_implementation(attend_as_loaded(model, _NAME))
    if model.config.get_text_config()._attn_implementation != _NAME:
        raise RefusedError(
            f"{type(model).__name__} does not take its attention from transformers' AttentionInterface; expected a "
            f"model that does: {instead(model)}"
        )


_steps: list[TrainingStep] = []  # the one that runs


@contextlib.contextmanager
def _planning(step: TrainingStep) -> Iterator[None]:
    _steps.append(step)
    try:
        yield
    finally:
        _steps.pop()


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    return _steps[-1].attend(module, query, key, value, attention_mask, options)


def _mask(**options: Any) -> Tensor | None:
    """On whole sequences, transformers makes a mask where a window is shorter than the sequence, where prompts of
    several rows that are generated are padded, or where images attend both ways."""
    step, window = _steps[-1], options.get("local_size")
    if step._batch is None and options["batch_size"] > 1:
        return sdpa_mask(**{**options, "allow_is_causal_skip": False})
    is_sharded = step._batch is not None and step._batch.sequence.world_size > 1
    if step._images is not None and step._images.draws_masks and not is_sharded:
        return sdpa_mask(**{**options, "allow_is_causal_skip": False})
    if is_sharded:
        return empty_mask(options["batch_size"], options["device"])
    if window is None or options["kv_length"] <= window:
        return None
    return sdpa_mask(**options)


class _Attention(RingAttention):
    """Counts the gradients as the attention's."""

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        with _steps[-1]._live.making("attention"):
            return RingAttention.backward(ctx, dout, dlse)


class _SilentTransport(LoopbackTransport):
    """Rank 0 of a group whose messages are allocated and never travel."""

    def __init__(self, world_size: int) -> None:
        super().__init__(0, world_size, LoopbackState(1, 0.0))

    @contextlib.contextmanager
    def agree(self, *terms: Any, **more: Any) -> Iterator[int]:
        self.num_calls += 1
        yield self.num_calls

    def exchange(self, sends: Any, receives: Any, what: str) -> Exchange:
        return Exchange([], [*sends.values(), *receives.values()], self, what)


def _multiple(setup: Setup) -> int:
    return Layout.multiple(resolved(setup.ringtile.layout), setup.ringtile.context_parallel_size)
