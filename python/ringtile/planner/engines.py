"""What each data-parallel engine keeps on a rank, on fake tensors: DDP, FSDP2, DeepSpeed's ZeRO-1, -2 and -3.

FSDP2 is torch's and accelerate's own, over a group that sends nothing. DDP's buckets and DeepSpeed's buffers are
allocated here as those libraries allocate them, because both need real ranks. P parameters, W ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ringtile.errors import InputError
from ringtile.planner.live import Live

ENGINES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
# DeepSpeed's defaults, in elements: transformers sets them only where the configuration says "auto".
REDUCE_BUCKET, MAX_LIVE_PARAMETERS = 500_000_000, 1_000_000_000


class Plain:
    """One process, or DDP: whole weights, gradients and optimizer state; DDP also copies gradients into buckets."""

    def __init__(self, model: nn.Module, live: Live, num_ranks: int, on_gpu: bool) -> None:
        self.model, self.live, self.num_ranks, self.on_gpu = model, live, num_ranks, on_gpu
        self.held: list[Tensor] = []  # what the engine keeps throughout

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def prepare(self) -> nn.Module:
        """Counts weights and the engine's own buffers; returns the model to run. Inside the fake mode, once."""
        for parameter in self.model.parameters():
            self.live.count(parameter, "weights")
        if self.num_ranks > 1:
            self.hold("engine", sum(p.numel() for p in self.parameters), self.parameters[0].dtype)
        self.watch_gradients()
        self.make_states()
        return self.model

    def prepare_reference(self, model: nn.Module) -> None:
        """Counts the weights of a model that is not trained: whole on each rank, under DDP and ZeRO-1 and -2 too."""
        for parameter in model.parameters():
            self.live.count(parameter, "reference")

    def make_states(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters, fused=True)
        for parameter in self.parameters:
            parameter.grad = torch.empty_like(parameter)
        with self.live.making("optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def watch_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.gradient_is_there)  # type: ignore[no-untyped-call]

    def gradient_is_there(self, parameter: Tensor) -> None:
        """Called when the backward has added to a gradient."""
        assert parameter.grad is not None
        self.live.count(parameter.grad, "gradients")

    def before_forward(self) -> None:
        """What an engine gathers."""

    def before_backward(self) -> None:
        """What an engine allocates between the passes."""

    def step(self) -> None:
        """The optimizer's step; afterwards no gradient is left."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def hold(self, part: str, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer that stays."""
        with self.live.making(part):
            self.held.append(torch.empty(numel, dtype=dtype))
        return self.held[-1]


class Fsdp2(Plain):
    """torch's fully_shard, wrapped by accelerate as `fsdp_config: {version: 2}` has it."""

    def __init__(self, model: nn.Module, live: Live, num_ranks: int, on_gpu: bool, plugin: Any, mixed: bool) -> None:
        super().__init__(model, live, num_ranks, on_gpu)
        self.plugin, self.mixed = plugin, mixed

    def prepare(self) -> nn.Module:
        from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model
        from torch.distributed.device_mesh import init_device_mesh

        self.plugin.set_auto_wrap_policy(self.model)
        with _disable_current_modes():  # its ranks are real numbers
            mesh = init_device_mesh("cpu", (self.num_ranks,), mesh_dim_names=("dp",))
        self.accelerator = accelerator = cast("Any", SimpleNamespace)(
            state=SimpleNamespace(fsdp_plugin=self.plugin),
            torch_device_mesh={("dp",): mesh},
            parallelism_config=SimpleNamespace(fsdp_dim_names=("dp",)),
            mixed_precision="bf16" if self.mixed else "no",
            is_main_process=False,
            device=torch.device("cpu"),
        )
        if self.plugin.activation_checkpointing:
            self.model = fsdp2_apply_ac(accelerator, self.model)
        self.model = fsdp2_prepare_model(accelerator, self.model)
        for parameter in self.model.parameters():
            self.live.count(parameter, "weights")
        self.live.gradients_made_by_engine = self._gradient_bytes
        self.make_states()
        return self.model

    def prepare_reference(self, model: nn.Module) -> None:
        """As TRL shards it: as one piece, which each pass gathers whole."""
        from trl.models.utils import prepare_fsdp

        prepare_fsdp(model, self.accelerator)
        super().prepare_reference(model)

    def _gradient_bytes(self) -> int:
        found = (parameter.grad for parameter in self.parameters)
        locals_ = [getattr(gradient, "_local_tensor", gradient) for gradient in found if gradient is not None]
        return sum(x.numel() * x.itemsize for x in locals_)


class Zero(Plain):
    """DeepSpeed's buffers. ZeRO-1 and -2: flat weights, this rank's part of them and of the optimizer's state in
    float32, gradients through one bucket into this rank's part. ZeRO-3: this rank's part of the weights too, and
    gathered weights up to MAX_LIVE_PARAMETERS, which DeepSpeed keeps from the forward to the backward."""

    def __init__(self, model: nn.Module, live: Live, num_ranks: int, on_gpu: bool, stage: int) -> None:
        super().__init__(model, live, num_ranks, on_gpu)
        self.stage = stage

    def prepare(self) -> nn.Module:
        total = sum(p.numel() for p in self.parameters)
        part, dtype = math.ceil(total / self.num_ranks), self.parameters[0].dtype
        self.bucket_numel = (
            REDUCE_BUCKET if self.on_gpu else min(REDUCE_BUCKET, total)
        )  # a CPU's pages come when written
        if self.stage < 3:
            for parameter in self.model.parameters():
                self.live.count(parameter, "weights")
        else:
            for parameter in self.model.parameters():
                self.live.ignore(parameter)  # stands for a part and for what is gathered of it
            self.hold("weights", part, dtype)
            self.hold("gradients", part, dtype)
            self.hold("engine", self.bucket_numel, dtype)
        for _ in range(3):  # a copy of the weights to update, and AdamW's two states
            self.hold("optimizer", part, torch.float32)
        self.part, self.dtype = part, dtype
        self.gathered: Tensor | None = None
        self.num_gathered = min(total, MAX_LIVE_PARAMETERS)
        self.bucket: list[Tensor] = []
        self.own: list[Tensor] = []  # this rank's part of the gradients
        self.watch_gradients()
        return self.model

    def before_forward(self) -> None:
        if self.stage == 3:
            with self.live.making("engine"):
                self.gathered = torch.empty(self.num_gathered, dtype=self.dtype)

    def before_backward(self) -> None:
        if self.stage < 3 and self.on_gpu:
            with self.live.making("engine"):
                self.bucket = [torch.empty(self.bucket_numel, dtype=self.dtype)]
        self.num_in_bucket = 0

    def gradient_is_there(self, parameter: Tensor) -> None:
        """A full bucket is reduced into this rank's part; a gradient is copied into the bucket, and freed."""
        if self.num_in_bucket + parameter.numel() > REDUCE_BUCKET:
            self._reduce()
        self.num_in_bucket += parameter.numel()
        held = sum(x.numel() for x in self.bucket)
        if self.stage < 3 and held < min(self.num_in_bucket, REDUCE_BUCKET):  # of a CPU
            with self.live.making("engine"):
                self.bucket.append(torch.empty(self.num_in_bucket - held, dtype=self.dtype))
        parameter.grad = None

    def _reduce(self) -> None:
        copies = 2 if self.stage == 3 and not self.on_gpu else 1  # gloo copies what ZeRO-3 scatters
        with self.live.making("engine"):
            torch.empty(copies * self.num_in_bucket, dtype=self.dtype)  # the bucket again, flat, while it is reduced
        self.num_in_bucket = 0
        if self.stage < 3 and not self.own:
            with self.live.making("gradients"):
                self.own = [torch.empty(self.part, dtype=self.dtype)]

    def step(self) -> None:
        self._reduce()
        self.gathered = None
        self.bucket = []
        with self.live.making("gradients"):
            self.own.append(torch.empty(self.part, dtype=torch.float32))  # flat, for the optimizer
        self.own = []


def make_engine(
    name: str, model: nn.Module, live: Live, num_ranks: int, *, on_gpu: bool, mixed: bool, checkpointing: bool
) -> Plain:
    """The engine of that name, not yet prepared. checkpointing: whether FSDP2 checkpoints the layers it wraps."""
    if name == "fsdp2":
        from accelerate.utils import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            reshard_after_forward=True,
            cpu_ram_efficient_loading=False,
            activation_checkpointing=checkpointing,
        )
        if mixed:
            plugin.set_mixed_precision("bf16")
        return Fsdp2(model, live, num_ranks, on_gpu, plugin, mixed)
    if name.startswith("zero"):
        return Zero(model, live, num_ranks, on_gpu, stage=int(name[-1]))
    return Plain(model, live, num_ranks, on_gpu)


@contextlib.contextmanager
def silent_ranks(num_ranks: int) -> Iterator[None]:
    """Inside, torch.distributed has that many ranks, which send nothing."""
    if dist.is_initialized():
        raise InputError("torch.distributed is initialized; expected to plan FSDP2 in a process of its own")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
