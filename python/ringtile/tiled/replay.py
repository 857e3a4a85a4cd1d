"""A part of a model that runs once in the forward and again, in parts, in the backward; autograd keeps only its inputs.

The autograd graph of one call is two nodes,

    x, weights -> _Keep -> anchor -> _Run -> outputs

_Keep saves the input and the weights; _Run computes the outputs and saves nothing. The backward of _Run passes the
gradients of the outputs to the backward of _Keep, which does all the work and returns each weight's gradient once, so
hooks, DDP and FSDP see an ordinary parameter. There are two nodes because a non-reentrant checkpoint
(torch.utils.checkpoint) stops recomputing at the last saved tensor: it stops in _Keep, before the part runs again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from ringtile import derivatives
from ringtile.tiled.weight_grad import WeightGradSums, round_grad_sums

Output = Tensor | tuple[Tensor | None, ...]


class Work(Protocol):
    weights: tuple[Tensor | None, ...]

    def forward(self, x: Tensor, *weights: Tensor | None) -> Output:
        """Return the outputs, detached."""

    def backward(
        self, douts: Sequence[Tensor | None], needed: Sequence[bool], x: Tensor, *weights: Any
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Return the gradient of x, and the weights' gradients in the dtype of their sums; None where not needed."""


def run(name: str, work: Work, x: Tensor) -> Output:
    """Return the outputs of a work, with its backward behind them. name: in errors."""
    handover: list[Sequence[Tensor | None]] = []
    derivatives.check_once(name, x, *work.weights, vmap=False)
    anchor = _Keep.apply(name, work, handover, x, *work.weights)  # type: ignore[no-untyped-call]
    outputs: Output = _Run.apply(anchor, handover, lambda: work.forward(x.detach(), *work.weights))  # type: ignore[no-untyped-call]
    return outputs


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, work: Work, handover: list[Sequence[Tensor | None]], x: Tensor, *weights: Tensor | None
    ) -> Tensor:
        ctx.name, ctx.work, ctx.handover = name, work, handover
        ctx.save_for_backward(x, *weights)
        return torch.zeros((), device=x.device)

    @staticmethod
    def backward(ctx: Any, danchor: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        douts = ctx.handover.pop()
        if all(dout is None for dout in douts):
            return None, None, None, None, *(None for _ in weights)

        def compute() -> tuple[Tensor | None, ...]:
            dx, sums = ctx.work.backward(douts, ctx.needs_input_grad[3:], x, *weights)
            return dx, *round_grad_sums(sums, weights)

        return None, None, None, *derivatives.gradients(ctx.name, compute, *douts, x, *weights)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, handover: list[Sequence[Tensor | None]], forward: Callable[[], Output]
    ) -> Output:
        outputs = forward()
        ctx.handover = handover
        ctx.set_materialize_grads(False)  # an unused output has no gradient
        ctx.mark_non_differentiable(
            *(out for out in as_tuple(outputs) if out is not None and not out.is_floating_point())
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.handover.append(douts)
        defined = [dout for dout in douts if dout is not None]
        return torch.zeros((), device=defined[0].device) if defined else None, None, None


def as_tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


class RandomState:
    """The state of torch's generators on the CPU and on the device of a tensor."""

    def __init__(self, x: Tensor) -> None:
        self._device_type, self._on_cpu = x.device.type, torch.get_rng_state()
        self.devices, self._on_devices = get_device_states(x)

    def restore(self) -> None:
        torch.set_rng_state(self._on_cpu)
        set_device_states(self.devices, self._on_devices, device_type=self._device_type)


class Replay:
    """A module, and what must be as it was when it runs again: its forward, autocast, and which weights are trained.

    parameters: module's, with their names, if the caller knows them.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        x: Tensor,
        parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    ) -> None:
        self.call = _Call(module, forward)
        named = module.named_parameters() if parameters is None else parameters
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.names = [name for name, _ in trained]
        self.weights: tuple[Tensor, ...] = tuple([parameter for _, parameter in trained])
        device_type = x.device.type
        self.autocast: dict[str, Any] = {
            "device_type": device_type,
            "enabled": torch.is_autocast_enabled(device_type),
            "dtype": torch.get_autocast_dtype(device_type),
        }

    @contextlib.contextmanager
    def again(self, weights: Sequence[Tensor], state: RandomState) -> Iterator[Recomputation]:
        """Inside, the module runs again, with gradients; the random numbers go on from that state."""
        again = Recomputation(self, weights)
        with torch.random.fork_rng(state.devices, device_type=self.autocast["device_type"]), again.running():
            state.restore()
            yield again


class Recomputation:
    """A module that runs again. grads: of its weights, in the dtype of their sums; None where none was added."""

    def __init__(self, replay: Replay, weights: Sequence[Tensor]) -> None:
        self._call, self._autocast = replay.call, replay.autocast
        # Leaves that share the weights' storage: hooks on the parameters must see the sum, not each part's gradient.
        self._leaves = {
            f"module.{name}": w.detach().requires_grad_() for name, w in zip(replay.names, weights, strict=True)
        }
        self._sums = WeightGradSums(tuple(self._leaves.values()), [None] * len(weights))
        self.grads: Sequence[Tensor | None] = self._sums.sums

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the module runs, with gradients."""
        with torch.autocast(**self._autocast), torch.enable_grad(), self._sums:
            yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(self._call, self._leaves, args, kwargs)

    def differentiate(
        self, outputs: Sequence[Tensor | None], douts: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradients of the inputs; those of the weights are added to their sums."""
        pairs = [
            (out, dout)
            for out, dout in zip(outputs, douts, strict=True)
            if out is not None and dout is not None and out.requires_grad
        ]
        if not pairs:
            return [None] * len(inputs)
        of, given = zip(*pairs, strict=True)
        grads: list[Tensor | None] = list(
            torch.autograd.grad(of, [*inputs, *self._leaves.values()], given, allow_unused=True)
        )
        for index, grad in enumerate(grads[len(inputs) :]):
            if grad is not None:
                self._sums.sum_of(index).add_(grad)
        return grads[: len(inputs)]


class _Call(nn.Module):
    """Calls a module through a given forward, because the instance's own may be the one that replays it."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.own_forward = module, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.own_forward(self.module, *args, **kwargs)
