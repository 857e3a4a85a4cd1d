"""What features share that run a module's own forward on parts of its tokens (hf/features: mlp, norm, stream)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector

from ringtile.errors import RefusedError, shown
from ringtile.hf.patches import Patches


@dataclass(frozen=True)
class TiledForward:
    """The forward of a tiled module. Bound to it as a method, so a deep copy of the model uses its own weights."""

    name: str
    own_forward: Callable[..., Any]

    @property
    def __name__(self) -> str:
        """By which pickle finds a method of a module: torch.save(model) stores the module's own forward."""
        return "forward"


def is_tiled(module: nn.Module) -> bool:
    """Return whether tiles have replaced the module's forward."""
    return isinstance(getattr(vars(module).get("forward"), "__func__", None), TiledForward)


def own_forward(name: str, module: nn.Module) -> Callable[..., Any]:
    """The module's forward as a function of (module, x). RefusedError: it was replaced."""
    forward = vars(module).get("forward")
    if forward is None:
        return type(module).forward
    if not isinstance(forward, MethodType) or forward.__self__ is not module:
        raise RefusedError(f"tiles: the forward of {name} was replaced by {shown(forward)}; expected its own method")
    if is_tiled(module):
        raise RefusedError(f"{name} is tiled already; restore() it first")
    return forward.__func__


def gather_as_one(module: nn.Module, patches: Patches) -> None:
    """Marks the module as a ZeRO-3 leaf: DeepSpeed then gathers its parameters once per pass, not once per tile."""
    if not hasattr(module, "_z3_leaf"):
        module._z3_leaf = True  # type: ignore[assignment]
        # Keep the mark if an engine was built since: it relies on it.
        patches.on_restore(lambda: None if hasattr(module, "ds_id") else delattr(module, "_z3_leaf"))


class RecordingForward:
    """A module's forward while transformers records outputs of modules inside it: router logits, for their loss.

    transformers' hooks append them to lists, one entry per tile and without a graph. Here each tile returns them after
    the module's own outputs, so the lists get one differentiable tensor over all tokens.
    """

    def __init__(self, own_forward: Callable[..., Any], keys: list[str]) -> None:
        self.own_forward, self.keys = own_forward, keys
        self.recorded_keys: list[str] = []  # the key of each recorded tensor

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        of_tile: dict[str, list[Tensor]] = {key: [] for key in self.keys}
        token = _active_collector.set(of_tile)  # type: ignore[no-untyped-call]
        try:
            result = self.own_forward(module, *args, **kwargs)
        finally:
            _active_collector.reset(token)  # type: ignore[no-untyped-call]
        self.recorded_keys = [key for key in self.keys for _ in of_tile[key]]
        if not self.recorded_keys:
            return result
        self.returns_tuple = isinstance(result, tuple)
        outputs = result if self.returns_tuple else (result,)
        return (*outputs, *(tensor for key in self.keys for tensor in of_tile[key]))

    def deliver(self, outputs: Any, recorded: dict[str, list[Tensor]]) -> Any:
        """Appends the recorded tensors to transformers' lists and returns the module's own outputs."""
        if not self.recorded_keys:
            return outputs
        for key, tensor in zip(self.recorded_keys, outputs[-len(self.recorded_keys) :], strict=True):
            recorded[key].append(tensor)
        own = outputs[: -len(self.recorded_keys)]
        return own if self.returns_tuple else own[0]


def with_recorded(own_forward: Callable[..., Any], run: Callable[[Callable[..., Any]], Any]) -> Any:
    """run(forward): with the module's own, or with one that records too, while transformers does."""
    recorded = _active_collector.get()  # type: ignore[no-untyped-call]
    if not recorded:
        return run(own_forward)
    forward = RecordingForward(own_forward, [key for key in recorded if not key.startswith("_")])
    return forward.deliver(run(forward), recorded)
