"""Tiled MLPs under data-parallel engines: same weights as one untiled process, same number of collectives."""

import functools
import itertools
import warnings
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hf_engines import full_weights, needs_deepspeed
from hf_models import SIZES, tiny_model
from hf_training import train
from pool import run_ranks
from ringtile import RefusedError, tile_mlps
from ringtile.tiled.glu import find_glu
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

STEPS = 3
MODELS = {"llama": {}, "phi3": {}, "mixtral": {"num_local_experts": 4}}


def model_of(family: str, checkpointed: bool = False) -> nn.Module:
    model = tiny_model(family, **MODELS[family]).double().train()
    if family == "mixtral":
        model.set_experts_implementation("eager")  # the default has no float64
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def rows_of(rank: int) -> Tensor:
    """13 tokens on rank 0, 26 on rank 1, and so on, so that ranks have different numbers of tiles."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(3, SIZES["vocab_size"], (1, 13 * (rank + 1)), generator=generator)


def loss_of(model: nn.Module, rank: int) -> Tensor:
    return model(input_ids=rows_of(rank), use_cache=False).logits.square().mean()


def one_process(family: str, world_size: int = 2) -> dict[str, Tensor]:
    """The weights after STEPS of SGD on the mean of all ranks' losses, in one process, untiled."""
    model = model_of(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(model, rank) for rank in range(world_size)) / world_size).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def assert_near(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=STEPS * 1e-6, msg=name)


def shard(model: nn.Module, wrapped: str) -> nn.Module:
    """Applies FSDP2 to each decoder layer, also to each MLP, or HSDP to each layer."""
    world_size = dist.get_world_size()
    shape, names = ((world_size // 2, 2), ("replicate", "shard")) if wrapped == "HSDP" else ((world_size,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.model.layers:
        if wrapped == "mlp":
            fully_shard(layer.mlp, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Collectives(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def fsdp2(family: str, wrapped: str, tile_tokens: int | None, use_original_mlp: bool, checkpointed: bool):
    """The weights after STEPS of SGD with one row per rank, and the collectives of the last step."""
    model = model_of(family, checkpointed)
    if tile_tokens is not None:
        tile_mlps(model, tile_tokens, use_original_mlp=use_original_mlp)
    model = shard(model, wrapped)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with Collectives() as collectives, warnings.catch_warnings():
            if tile_tokens is not None:
                warnings.filterwarnings("error", "FSDP2-wrapped module")  # says that an output may lose its hook
            loss_of(model, dist.get_rank()).backward()
        optimizer.step()
    return full_weights(model), collectives.counts


@functools.cache
def reference(family: str) -> dict[str, Tensor]:
    return one_process(family)


@functools.cache
def untiled(family: str, wrapped: str, checkpointed: bool):
    return run_ranks(2, fsdp2, family, wrapped, None, False, checkpointed)


def _wrapped_cells():
    """Mark all but one of 12 cells long."""
    every_run = [("llama", "mlp", False, True)]
    places = (("llama", "layer"), ("llama", "mlp"), ("mixtral", "mlp"))
    for place, use_original_mlp, checkpointed in itertools.product(places, (False, True), (False, True)):
        cell = (*place, use_original_mlp, checkpointed)
        yield pytest.param(*cell, marks=() if cell in every_run else (pytest.mark.long,))


@pytest.mark.parametrize(("family", "wrapped", "use_original_mlp", "checkpointed"), _wrapped_cells())
def test_fsdp2_gathers_once_whatever_the_number_of_tiles(family, wrapped, use_original_mlp, checkpointed) -> None:
    """Other tiled MLPs gather once per tile, so ranks with different numbers of tiles deadlock."""
    plain = untiled(family, wrapped, checkpointed)
    for tile_tokens in (1000, 4):  # one tile on each rank; 4 on rank 0 and 7 on rank 1
        tiled = run_ranks(2, fsdp2, family, wrapped, tile_tokens, use_original_mlp, checkpointed)
        for (weights, collectives), (_, plain_collectives) in zip(tiled, plain, strict=True):
            assert_near(weights, reference(family))
            assert collectives == plain_collectives
    num_units = 2 * SIZES["num_hidden_layers"] + 1 if wrapped == "mlp" else SIZES["num_hidden_layers"] + 1
    # FSDP2 does not reshard the root between its forward and backward.
    assert plain[0][1] == {"c10d::_allgather_base_": 2 * num_units - 1, "c10d::_reduce_scatter_base_": num_units}


@pytest.mark.long
def test_hsdp_equals_one_process() -> None:
    for weights, _ in run_ranks(4, fsdp2, "llama", "HSDP", 4, False, False):
        assert_near(weights, one_process("llama", 4))


def sharded_parts() -> str:
    model = model_of("llama")
    tile_mlps(model, 4, use_original_mlp=True)
    for layer in model.model.layers:
        fully_shard(layer.mlp.gate_proj)
    with pytest.raises(RefusedError) as refusal:
        loss_of(fully_shard(model), dist.get_rank())
    return str(refusal.value)


def test_fsdp2_inside_an_mlp_is_refused() -> None:
    for message in run_ranks(2, sharded_parts):
        assert "tiled MLP: gate_proj is sharded by FSDP2 on its own" in message


# ---- under the Trainer, where test_hf_matrix.py has the numbers ----------------------------------

TRAINING = {"max_steps": STEPS, "num_rows": 48, "gradient_accumulation_steps": 1, "evaluate": False}


def zero3_collectives(config: dict[str, object]) -> Counter[str]:
    with Collectives() as collectives:
        train(config, engine="ZeRO-3", family="mixtral", **{**TRAINING, "max_steps": 2})
    return collectives.counts


def glus_found_under_zero3() -> set[bool]:
    """Return whether the MLPs of a Llama run on the GLU kernels; DeepSpeed has replaced torch.nn.functional.linear."""
    found: set[bool] = set()

    def find(*arguments: Any) -> Any:
        glu = find_glu(*arguments)
        found.add(glu is not None and torch.nn.functional.linear.__module__.startswith("deepspeed."))
        return glu

    with mock.patch("ringtile.tiled.mlp.find_glu", find):
        train({"tiled_mlp": True}, engine="ZeRO-3", **{**TRAINING, "max_steps": 1})
    return found


def test_zero3_leaves_the_glu_kernels_in_use() -> None:
    needs_deepspeed()
    assert run_ranks(2, glus_found_under_zero3) == [{True}, {True}]


@pytest.mark.long  # test_hf_matrix.py tiles under ZeRO-3 in every run
def test_zero3_gathers_once_whatever_the_number_of_tiles() -> None:
    """DeepSpeed's hooks on an MLP's submodules would gather once per tile; a leaf gathers its parameters together."""
    needs_deepspeed()
    one, other = run_ranks(2, zero3_collectives, {"tiled_mlp": True, "tile_tokens": 1000})
    assert one == other
    assert one["c10d::_allgather_base_"] > 0
    assert run_ranks(2, zero3_collectives, {"tiled_mlp": True, "tile_tokens": 7}) == [one, other]
