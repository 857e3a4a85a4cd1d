"""Multi-head latent attention: its layers hand ringtile the latents of their keys and values, which a ring sends.

transformers makes keys and values of all heads from the latents by a layer's `expand_kv`, before it attends. In a batch
that ranks share, `expand_kv` leaves that to `ring_attention`, and hands on what `hf/attention.py` finds it by.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ringtile.attn.latents import Latents
from ringtile.hf.attention import LATENTS
from ringtile.hf.batch import active_batch
from ringtile.hf.feature import Enabled, Feature
from ringtile.hf.model import text_modules
from ringtile.hf.patches import Patches
from ringtile.stream.attend import running_chunk

_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_READ = {"kv_b_proj", *_SIZES}  # what an `expand_kv` may read of its layer
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_PARTS = (nn.Linear, nn.Identity, nn.ModuleDict, nn.ParameterDict)


def install(model: PreTrainedModel, patches: Patches) -> bool:
    """Makes the layers of a model that know latents hand them on; others attend with heads, as before. Whether any
    does."""
    layers = [layer for _, layer in text_modules(model) if expands_alone(layer)]
    for layer in layers:
        patches.wrap(layer, "expand_kv", _hand_on)
    return bool(layers)


def expands_alone(layer: nn.Module) -> bool:
    """Whether its `expand_kv` is a function of latents, an up-projection and sizes."""
    function = getattr(type(layer), "expand_kv", None)
    if not isinstance(function, FunctionType) or "expand_kv" in vars(layer):
        return False
    read = {name for name in function.__code__.co_names if hasattr(layer, name)}
    return read == _READ and not function.__code__.co_freevars


def _hand_on(expand_kv: Callable[..., tuple[Tensor, Tensor]], kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """kv_nope (B, 1, N, C), k_rot (B, 1, N, R) -> the first one, and values without numbers that hold the rest."""
    batch = None if torch.compiler.is_compiling() or running_chunk() is not None else active_batch()
    layer: Any = expand_kv.__self__  # type: ignore[attr-defined]
    if batch is None or batch.sequence.world_size == 1 or not is_known(layer.kv_b_proj):
        return expand_kv(kv_nope, k_rot)
    value = k_rot[..., :0]
    setattr(value, LATENTS, (kv_nope, k_rot, _latents_of(layer, expand_kv)))
    return kv_nope, value


_made: WeakKeyDictionary[nn.Module, tuple[tuple[object, ...], Latents]] = WeakKeyDictionary()


def _latents_of(layer: Any, expand_kv: Callable[..., tuple[Tensor, Tensor]]) -> Latents:
    """Those of a layer: made again where another weight is there or trained, or autocast is another."""
    held = [layer.kv_b_proj, *layer.kv_b_proj.parameters()]
    device = held[1].device.type
    autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    now = (*autocast, *map(id, held), *(weight.requires_grad for weight in held[1:]))
    if (known := _made.get(layer)) is None or known[0] != now:
        module = _ExpandKV(layer, expand_kv.__func__)  # type: ignore[attr-defined]
        known = _made[layer] = now, Latents(module, layer.num_heads, layer.v_head_dim)
    return known[1]


def is_known(projection: nn.Module) -> bool:
    """Whether it may run on blocks of any ranks' tokens, and again: linear, with adapters or not, without anything else
    that runs along, and with its weights at hand."""
    for module in projection.modules():
        if not (isinstance(module, _PARTS) or type(module).__module__.startswith("peft.")):
            return False
        if any(getattr(module, hooks) for hooks in _HOOKS) or "forward" in vars(module):
            return False
        if isinstance(module, nn.Dropout) and module.training and module.p > 0:  # it would draw others, again
            return False
        if isinstance(module, FSDPModule) or hasattr(module, "ds_id"):  # gathered by the module's own hooks
            return False
    return not any(isinstance(weight, DTensor) for weight in projection.parameters())


class _ExpandKV(nn.Module):
    """A layer as its `expand_kv` sees it: the tokens come second."""

    def __init__(self, layer: Any, expand_kv: Callable[..., tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.kv_b_proj = layer.kv_b_proj
        for name in _SIZES:
            setattr(self, name, getattr(layer, name))
        self._expand_kv = expand_kv

    def forward(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, ...]:
        """(B, n, 1, C), (B, n, 1, R) -> (B, n, H, D), (B, n, H, Dv)."""
        return tuple(x.transpose(1, 2) for x in self._expand_kv(self, *(x.transpose(1, 2) for x in (kv_nope, k_rot))))


def _install(run: Enabled, patches: Patches) -> None:
    if run.group is not None and run.group.size > 1 and run.config.latents:
        install(run.base, patches)


FEATURE = Feature(frozenset({"expand_kv"}), _install)
