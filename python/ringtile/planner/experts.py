"""Experts over ranks by transformers' expert parallelism (5.24), on fake tensors: as many tokens come as are sent."""

from __future__ import annotations

import importlib
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

from ringtile.errors import RefusedError
from ringtile.planner.engines import Fsdp2
from ringtile.planner.setup import Setup


def check(setup: Setup) -> None:
    """Raise RefusedError beside what was not compared with one process, or is not planned."""
    config = setup.ringtile
    refused = {
        f"--engine {setup.engine}": setup.engine != "fsdp2",
        "tiled_mlp": config.tiled_mlp,
        "stream": config.stream,
        "adapters": bool(setup.lora_rank),
        "a GRPO step": setup.grpo is not None,
        "images": setup.images is not None,
    }
    for name, is_set in refused.items():
        if is_set:
            raise RefusedError(
                f"expert_parallel_size is {setup.expert_parallel_size}, beside {name}; expected fsdp2, and a step on "
                f"text that trains all weights, without tiles of the MLP or chunks of layers"
            )


class Experts(Fsdp2):
    """FSDP2 as transformers applies it while it loads a model: experts on ep ranks, each sharded over the others."""

    def shard(self) -> None:
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.expert_parallel import EPImplementationInterface
        from transformers.distributed.utils import TransformersDeviceMesh

        EPImplementationInterface.register("ringtile_plan", _balanced())
        devices, size = self.setup.devices, self.setup.expert_parallel_size
        config = DistributedConfig(fsdp_size=devices, ep_size=size, ep_implementation="ringtile_plan")
        with _disable_current_modes():  # ranks are real numbers
            dense = init_device_mesh("cpu", (1, 1, devices, 1), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
            names = ("pp", "dp_replicate", "efsdp", "ep")
            manager = TransformersDeviceMesh(
                dense, init_device_mesh("cpu", (1, 1, devices // size, size), mesh_dim_names=names)
            )
        make = _disable_current_modes()(DeviceMesh.__init__)
        with mock.patch.object(DeviceMesh, "__init__", make):
            self.model = cast("PreTrainedModel", self.model).maybe_distribute_model(self.model, config, manager)


def _balanced() -> type:
    """Return transformers' all-to-all dispatch, of which each rank gets as many rows as it sends."""
    ep: Any = importlib.import_module("transformers.distributed.expert_parallel")

    class Balanced(ep.AllToAllEP):  # type: ignore[misc]
        def _dispatch_tokens(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
            order = torch.argsort(top_k_index.reshape(-1))
            rows, size = len(order), self.ep_mesh.size()
            sizes = [rows - rows // size * (size - 1), *[rows // size] * (size - 1)]
            sent = hidden_states[order // top_k_index.size(-1)]
            received = ep.all_to_all_single_autograd(sent, sizes, sizes, self.ep_mesh.get_group())
            ids = torch.zeros((rows, 1), dtype=torch.int64, device=sent.device)
            state = ep._AllToAllState(top_k_weights, order, sizes, sizes, len(hidden_states))
            return ep._WaitTensor.apply(received), ids, torch.ones_like(ids, dtype=sent.dtype), state

    return Balanced
