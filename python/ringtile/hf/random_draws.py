"""Random numbers drawn inside a forward pass on a shard: noticed, and refused by name.

Dropout and router jitter draw a number for each token. A shard would draw other numbers than the sequence has, and the
ranks of a group, which share a seed, would all draw the same ones. Which modules draw is not known beforehand
(functional dropout is no module), so the states of torch's default generators are compared around each forward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import PreTrainedModel

from ringtile.errors import RefusedError
from ringtile.random_states import drawn_since, random_states


class RandomDraws:
    """Refuses draws in forward passes of one model in training. Finds the module that drew in the first of them."""

    def __init__(self, base: PreTrainedModel) -> None:
        self._base = base
        self._searched = False

    def watch(self, model: nn.Module) -> Watch | None:
        """Begins to watch a forward pass of the model, base with its wrappers; None if it is in eval mode."""
        if not model.training:
            return None
        finds, self._searched = not self._searched and not _is_compiled(model), True
        return Watch(self._base, finds)

    @contextlib.contextmanager
    def refused(self, model: nn.Module) -> Iterator[None]:
        """Raises RefusedError at the end of the context, if the model is in training and random numbers were drawn."""
        watch = self.watch(model)
        try:
            yield
        except BaseException:
            if watch is not None:
                watch.stop()
            raise
        if watch is not None:
            watch.check()


class Watch:
    """The states of torch's default generators from the start of one forward pass to its end.

    finds: compares the states whenever a module is entered or left. The hooks are those of all modules of the process:
    with hooks of its own, a module could not be tiled.
    """

    def __init__(self, base: PreTrainedModel, finds: bool) -> None:
        self._base = base
        self._inside = [f"{type(base).__name__}, outside of its layers,"]  # the modules that run, outermost first
        self._found = None if finds else f"{type(base).__name__}, in a module that is not known,"
        self._handles: list[Any] = []
        self._before = random_states()
        self._places: dict[nn.Module, str] = {}
        if finds:
            self._places = {
                module: f"{path} ({type(module).__name__})" for path, module in base.named_modules() if path
            }
            self._handles.append(register_module_forward_pre_hook(self._enter))
            self._handles.append(register_module_forward_hook(self._leave))

    def stop(self) -> None:
        """Removes the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def check(self) -> None:
        """Ends the watch. Raises RefusedError if random numbers were drawn since its start."""
        self.stop()
        if not (drawn := drawn_since(self._before)) or (drawn == ["cpu"] and self._only_skipped_none()):
            return
        raise RefusedError(
            f"{self._found or self._inside[0]} draws random numbers in its forward pass (dropout or noise); expected "
            f"none under context parallelism: the random numbers of a shard are not those of the full sequence. Set "
            f"what asks for them to 0 in the model's config, such as residual_dropout or router_jitter_noise"
        )

    def _only_skipped_none(self) -> bool:
        """Whether the CPU's draws were those of LayerDrop with probability 0 (OPT, BART), one a layer, or of PEFT's
        module_dropout (LoHa, LoKr), one an adapted module."""
        modules = list(self._base.modules())
        rates = [module.layerdrop for module in modules if hasattr(module, "layerdrop")]
        dropped = [rate for module in modules for rate in dict(getattr(module, "module_dropout", {})).values()]
        if not rates + dropped or any(rates + dropped):
            return False
        generator = torch.Generator()
        generator.set_state(self._before["cpu"])
        layers = [module for module in self._base.modules() if isinstance(module, nn.ModuleList)]
        for _ in range(max(map(len, layers), default=0) + len(dropped)):
            torch.rand([], generator=generator)
            if torch.equal(generator.get_state(), torch.get_rng_state()):
                return True
        return False

    def _enter(self, module: nn.Module, args: Any) -> None:
        if module in self._places:
            self._blame()
            self._inside.append(self._places[module])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._inside[-1] == self._places.get(module):  # not one that was entered before the watch began
            self._blame()
            self._inside.pop()

    def _blame(self) -> None:
        """Nothing was drawn before the last hook, so that a draw was made by the innermost module that runs."""
        if self._found is None and drawn_since(self._before):
            self._found = self._inside[-1]


def _is_compiled(model: nn.Module) -> bool:
    """Whether any part of it was compiled: hooks would break its graphs."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
