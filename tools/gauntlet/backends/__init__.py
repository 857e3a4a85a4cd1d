"""The implementations that `python -m tools.gauntlet` judges: a module for each package, and what they share.

A module imports its package inside its functions only, which run in processes that end with the case.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from ringtile.errors import ConfigError
from torch import Tensor

from tools.gauntlet.attention_cases import AttentionCase, Inputs, Outputs, gradient

if TYPE_CHECKING:
    from transformers import Trainer

    from tools.gauntlet.training_cases import TrainingCase


class NotOfferedError(Exception):
    """The interface of a backend has no way to ask for this case. Nothing wrong is computed."""


@dataclass(frozen=True)
class Backend:
    """An implementation of attention over ranks.

    attend: called on every rank with the whole inputs, gives whole outputs. dtype: what its kernels take. documented:
    by the name of a case, words of its documentation that exclude the case. setup: said of it in the page.
    trainer: makes the Trainer of transformers that the package shards, by a function that takes TrainingArguments;
    None: the package leaves the loop to its users. multiple: to which those who train with it pad their rows, all with
    position ids.
    """

    name: str
    package: str
    install: str
    attend: Callable[[AttentionCase, Inputs], Outputs]
    setup: str
    dtype: torch.dtype = torch.float32
    documented: Mapping[str, str] = field(default_factory=dict)
    imports: tuple[str, ...] = ()  # modules that take long
    trainer: Callable[[TrainingCase, Callable[..., Trainer]], Trainer] | None = None
    multiple: int = 1

    def version(self) -> str | None:
        """None where it is not installed."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None


def backends() -> dict[str, Backend]:
    """All of them by name, ringtile first."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    found = {backend.name: backend for module in modules for backend in module.BACKENDS}
    return dict(sorted(found.items(), key=lambda item: not item[0].startswith("ringtile")))


def backend(name: str) -> Backend:
    if name not in backends():
        raise ConfigError(f"BACKEND is {name}; expected all, or one of {', '.join(backends())}")
    return backends()[name]


# ---- for adapters -------------------------------------------------------------------------------


def chunk(x: Tensor, dim: int = 1) -> Tensor:
    """This rank's part of x, for packages whose users cut the sequence themselves."""
    world_size = dist.get_world_size()
    if x.size(dim) % world_size:
        raise NotOfferedError("its users cut the sequence, into equal parts")
    return x.chunk(world_size, dim=dim)[dist.get_rank()].contiguous()


def unchunk(x: Tensor, dim: int = 1) -> Tensor:
    """All ranks' parts, joined."""
    parts: list[Tensor] = [x] * dist.get_world_size()
    dist.all_gather_object(parts, x.detach().contiguous())
    return torch.cat(parts, dim=dim)


def sharded(
    inputs: Inputs,
    call: Callable[[Tensor, Tensor, Tensor], Tensor],
    shard: Callable[[Tensor], Tensor] = chunk,
    unshard: Callable[[Tensor], Tensor] = unchunk,
    sinks: Tensor | None = None,
) -> Outputs:
    """Shards q, k, v, calls attention, and goes back through it. call: (B, N, heads, dim) -> (B, N, H, V).

    sinks: a leaf, of which each rank computes a part of the gradient.
    """
    leaves = [shard(x).clone().requires_grad_() for x in inputs[:3]]
    out = call(*leaves)
    out.backward(shard(inputs.dout).to(out.dtype))  # type: ignore[no-untyped-call]
    dq, dk, dv = (unshard(gradient(x)) for x in leaves)
    dsinks = None
    if sinks is not None:
        dsinks = gradient(sinks)
        dist.all_reduce(dsinks)
    return Outputs(unshard(out.detach()), dq, dk, dv, dsinks)
