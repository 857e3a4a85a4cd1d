"""torchao's float8 linear layers: what is scaled by the largest of all tokens is scaled by that of the whole sequence.

A scale of one token (rowwise, in the forward and in the gradient of the input) is the same on a shard, and so are those
of MX blocks of a token's features. A scale of a tensor, and the scales of the gradient of the weight, are of all
tokens: there the largest value is that of all ranks that share the sequence, by one all-reduce of a number, or of a row
of features, for each tensor. torchao does it itself where it is asked to; nothing is computed otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from ringtile.errors import RefusedError
from ringtile.hf.batch import active_batch
from ringtile.hf.feature import Enabled, Feature
from ringtile.hf.group import ContextParallelGroup
from ringtile.hf.patches import Patches

_MODULE = "torchao.float8.float8_linear"
# Layers, or classes of weights, that scale the gradient of a weight by blocks of tokens, or by values seen before.
_OTHERS = (
    *(f"torchao.prototype.{name}." for name in ("moe_training", "blockwise_fp8_training", "float8nocompile")),
    "torchao.prototype.quantized_training.int8_mixed_precision",
    "transformer_engine.",
)


class _Group(NamedTuple):
    """What torchao asks for the process group."""

    group: ContextParallelGroup

    def get_group(self) -> dist.ProcessGroup | None:
        return self.group.process_group


def _layers(model: nn.Module) -> list[Any]:
    return [x for x in model.modules() if any(cls.__module__ == _MODULE for cls in type(x).__mro__)]


def _refuse(run: Enabled) -> None:
    """RefusedError: blocks or histories of values that are not those of one process."""
    if run.trainer.accelerator.mixed_precision == "fp8":
        raise RefusedError(
            "mixed_precision is fp8, by which accelerate replaces layers after ringtile.enable; expected a model whose "
            "layers torchao.float8.convert_to_float8_training has replaced before the Trainer was built"
        )
    for path, each in (*run.wrapped.named_modules(), *run.wrapped.named_parameters()):
        home, in_16_bits = type(each).__module__, getattr(getattr(each, "config", each), "wgrad_with_hp", False)
        if home.startswith(_OTHERS) and not in_16_bits:
            raise RefusedError(
                f"{path} is a {type(each).__name__} of {home}; expected torchao's Float8Linear, MXFP8 with "
                f"wgrad_with_hp, or 16 bits: blocks of tokens, and histories of the largest value, are those of a "
                f"shard, and not of the sequence"
            )
    if _layers(run.wrapped) and (tiles := [key for key in ("tiled_mlp", "stream") if getattr(run.config, key)]):
        raise RefusedError(
            f"{' and '.join(tiles)}: Float8Linear scales by the largest value of all tokens, a tile by its own; "
            f"expected one of the two"
        )


def _install(run: Enabled, patches: Patches) -> None:
    layers, group = _layers(run.wrapped), run.group
    if not layers or group is None or group.size == 1:
        return
    plain = layers[0].linear_mm_config

    class OfShard(type(plain)):  # type: ignore[misc]  # which the backward is given, too
        pass

    def scaled(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_weight = getattr(kwargs.get("gemm_input_role"), "name", "") == "WEIGHT"
        if isinstance(args[2], OfShard) and not is_weight and kwargs.get("axiswise_dim") in (None, 0):
            kwargs |= {"reduce_amax": True, "device_mesh": _Group(group)}
        return original(*args, **kwargs)

    def mark(layer: Any, args: Any) -> None:
        batch = active_batch()
        is_shard = batch is not None and batch.sequence.world_size > 1
        layer.linear_mm_config = (OfShard if is_shard else type(plain))(*layer.linear_mm_config)

    patches.wrap(sys.modules[_MODULE], "hp_tensor_to_float8_dynamic", scaled)
    for layer in layers:
        patches.on_restore(layer.register_forward_pre_hook(mark).remove)
        patches.set(layer, "linear_mm_config", layer.linear_mm_config)


FEATURE = Feature(
    frozenset({"hp_tensor_to_float8_dynamic", "linear_mm_config", "_forward_pre_hooks"}), _install, _refuse
)
