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
from ringtile.planner.optimizers import OF_EMBEDDINGS, OPTIMIZERS
from ringtile.planner.setup import Setup

ENGINES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
# DeepSpeed's defaults, in elements: transformers sets them only where the configuration says "auto".
REDUCE_BUCKET, MAX_LIVE_PARAMETERS = 500_000_000, 1_000_000_000


class Plain:
    """One process, or DDP: whole weights, gradients and optimizer state; DDP also copies gradients into buckets."""

    def __init__(self, setup: Setup, model: nn.Module, live: Live) -> None:
        self.setup, self.model, self.live = setup, model, live
        self.optimizer: torch.optim.Optimizer | None = None
        self.held: list[Tensor] = []  # what the engine keeps throughout
        self.host_bytes = 0  # what it keeps on the host

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def alike(self) -> list[list[nn.Parameter]]:
        """The parameters, by the ranks that shard them."""
        meshes: dict[Any, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        return list(meshes.values())

    def prepare(self) -> nn.Module:
        """Counts weights and the engine's own buffers; returns the model to run. Inside the fake mode, once."""
        for parameter in self.model.parameters():
            self.live.count(parameter, "weights")
        if self.setup.devices > 1:
            self.hold("engine", sum(p.numel() for p in self.parameters), self.parameters[0].dtype)
        self.watch_gradients()
        self.make_states()
        return self.model

    def prepare_reference(self, model: nn.Module) -> None:
        """Counts the weights of a model that is not trained: whole on each rank, under DDP and ZeRO-1 and -2 too."""
        for parameter in model.parameters():
            self.live.count(parameter, "reference")

    def make_states(self) -> None:
        """Makes them by a step, in which DTensors also look up, once, how their ops are sharded: on whole tensors."""
        if self.setup.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW([{"params": each} for each in self.alike], fused=True)
        else:
            self.hold("optimizer", self.state_bytes(), torch.uint8)
        for parameter in self.parameters:
            parameter.grad = torch.empty_like(parameter)
        with self.live.making("optimizer"):
            self.step()

    def state_bytes(self) -> int:
        """Of an optimizer that is not run, for this rank's parts of the parameters."""
        name, total = self.setup.optimizer, 0
        embeddings = {id(module.weight) for module in self.model.modules() if isinstance(module, nn.Embedding)}
        for parameter in self.parameters:
            part = getattr(parameter, "_local_tensor", parameter)
            held = OF_EMBEDDINGS.get(name, name) if id(parameter) in embeddings else name
            total += int(OPTIMIZERS[held] * part.numel())
        return total

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
        torch.nn.utils.clip_grad_norm_(self.alike[0], 1.0)  # of the others it makes as few numbers
        if self.optimizer is not None:
            self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None

    def hold(self, part: str, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer that stays."""
        with self.live.making(part):
            self.held.append(torch.empty(numel, dtype=dtype))
        return self.held[-1]


class Fsdp2(Plain):
    """torch's fully_shard, wrapped by accelerate as `fsdp_config: {version: 2}` has it."""

    def shard(self) -> None:
        """Replaces the model by one whose weights are sharded."""
        from accelerate.utils import FullyShardedDataParallelPlugin
        from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model
        from torch.distributed.device_mesh import init_device_mesh

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            reshard_after_forward=True,
            cpu_ram_efficient_loading=False,
            activation_checkpointing=self.setup.gradient_checkpointing,
        )
        if self.setup.bf16:
            plugin.set_mixed_precision("bf16")
        plugin.set_auto_wrap_policy(self.model)
        with _disable_current_modes():  # its ranks are real numbers
            mesh = init_device_mesh("cpu", (self.setup.devices,), mesh_dim_names=("dp",))
        self.accelerator = accelerator = cast("Any", SimpleNamespace)(
            state=SimpleNamespace(fsdp_plugin=plugin),
            torch_device_mesh={("dp",): mesh},
            parallelism_config=SimpleNamespace(fsdp_dim_names=("dp",)),
            mixed_precision="bf16" if self.setup.bf16 else "no",
            is_main_process=False,
            device=torch.device("cpu"),
        )
        if plugin.activation_checkpointing:
            self.model = fsdp2_apply_ac(accelerator, self.model)
        self.model = fsdp2_prepare_model(accelerator, self.model)

    def prepare(self) -> nn.Module:
        self.shard()
        for parameter in self.model.parameters():
            self.live.count(parameter, "weights")
        self.live.gradients_made_by_engine = self._gradient_bytes
        self.make_states()
        _gather_once(self.model)
        return self.model

    def prepare_reference(self, model: nn.Module) -> None:
        """As TRL shards it: as one piece, which each pass gathers whole."""
        from trl.models.utils import prepare_fsdp

        prepare_fsdp(model, self.accelerator)
        super().prepare_reference(model)
        _gather_once(model)

    def _gradient_bytes(self) -> int:
        found = (parameter.grad for parameter in self.parameters if parameter.is_leaf)
        locals_ = [getattr(gradient, "_local_tensor", gradient) for gradient in found if gradient is not None]
        return sum(x.numel() * x.itemsize for x in locals_)


def _gather_once(model: nn.Module) -> None:
    """Allocates what gathered weights use from then on, which the engine's parts are known by."""
    from torch.distributed.fsdp import FSDPModule

    cast("FSDPModule", model)._get_fsdp_state()._lazy_init()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()


class Zero(Plain):
    """DeepSpeed's buffers. ZeRO-1 and -2: flat weights, this rank's part of them and of the optimizer's state in
    float32, gradients through one bucket into this rank's part. ZeRO-3: this rank's part of the weights too, and
    gathered weights up to MAX_LIVE_PARAMETERS, which DeepSpeed keeps from the forward to the backward.
    With offload_optimizer this rank's part of the gradients, and all that is float32, is on the host."""

    def prepare(self) -> nn.Module:
        self.stage, self.offload = int(self.setup.engine[-1]), self.setup.offload_optimizer
        total = sum(p.numel() for p in self.parameters)
        everything = sum(p.numel() for p in self.model.parameters())  # frozen weights too
        part, dtype = math.ceil(total / self.setup.devices), self.parameters[0].dtype
        self.bucket_numel = (
            REDUCE_BUCKET if self.setup.on_gpu else min(REDUCE_BUCKET, total)
        )  # a CPU's pages come when written
        if self.stage < 3:
            for parameter in self.model.parameters():
                self.live.count(parameter, "weights")
        else:
            for parameter in self.model.parameters():
                self.live.ignore(parameter)  # stands for a part and for what is gathered of it
            self.hold("weights", math.ceil(everything / self.setup.devices), dtype)
            self.hold_or_offload("gradients", part, dtype)
            self.hold("engine", self.bucket_numel, dtype)
        self.hold_or_offload("optimizer", part, torch.float32)  # a copy of the weights to update
        self.hold_or_offload("optimizer", int(OPTIMIZERS[self.setup.optimizer] * part), torch.uint8)
        self.part, self.dtype = part, dtype
        self.gathered: Tensor | None = None
        self.num_gathered = min(everything, MAX_LIVE_PARAMETERS)
        self.bucket: list[Tensor] = []
        self.own: list[Tensor] = []  # this rank's part of the gradients
        self.watch_gradients()
        return self.model

    def before_forward(self) -> None:
        if self.stage == 3:
            with self.live.making("engine"):
                self.gathered = torch.empty(self.num_gathered, dtype=self.dtype)

    def before_backward(self) -> None:
        if self.stage < 3 and self.setup.on_gpu:
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
        copies = 2 if self.stage == 3 and not self.setup.on_gpu else 1  # gloo copies what ZeRO-3 scatters
        with self.live.making("engine"):
            torch.empty(copies * self.num_in_bucket, dtype=self.dtype)  # the bucket again, flat, while it is reduced
        self.num_in_bucket = 0
        if self.stage < 3 and not self.own and not self.offload:
            with self.live.making("gradients"):
                self.own = [torch.empty(self.part, dtype=self.dtype)]

    def step(self) -> None:
        self._reduce()
        self.gathered = None
        self.bucket = []
        if not self.offload:
            with self.live.making("gradients"):
                self.own.append(torch.empty(self.part, dtype=torch.float32))  # flat, for the optimizer
        self.own = []

    def hold_or_offload(self, part: str, numel: int, dtype: torch.dtype) -> None:
        """A buffer that stays, on the host where the optimizer is there."""
        if self.offload:
            self.host_bytes += numel * dtype.itemsize
        else:
            self.hold(part, numel, dtype)


def make_engine(setup: Setup, model: nn.Module, live: Live) -> Plain:
    """The engine of the setup, not yet prepared."""
    if setup.expert_parallel_size > 1:
        from ringtile.planner.experts import Experts

        return Experts(setup, model, live)
    kind = Fsdp2 if setup.engine == "fsdp2" else Zero if setup.engine.startswith("zero") else Plain
    return kind(setup, model, live)


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
