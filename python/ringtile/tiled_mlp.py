"""An MLP computed a tile of tokens at a time: its intermediates exist for one tile only, in both passes.

The autograd graph of one tiled MLP is two nodes,

    x, weights -> _Keep -> anchor -> _Run -> outputs

_Keep saves the input and the weights; _Run computes the outputs and saves nothing. The backward of _Run hands
the gradients of the outputs over to the backward of _Keep, which does all the work and returns the gradient
of each weight once, so that hooks, DDP and FSDP see an ordinary parameter. Two nodes, because a non-reentrant
checkpoint (torch.utils.checkpoint) stops its recomputation at the last tensor that was saved: it stops in
_Keep, before the MLP is computed again. With 2 T*E*F flops a product, forward and backward together:

    plain                    3 products + 6                            18 T*E*F
    tiled GLU                3 + 2 (gate, up again) + 6                22 T*E*F, also inside a checkpoint
    tiled, any module        3 + 3 (all again) + 6                     24 T*E*F, also inside a checkpoint

Shape letters: B batch, N tokens, T = B*N tokens flattened, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from .errors import InputError, Refused
from .glu import GluTiles, find_glu
from .linear_sums import LinearSums
from .tiles import as_gradients, check_tile_tokens, tiles

Output = Tensor | tuple[Tensor | None, ...]


def tiled_mlp(module: nn.Module, x: Tensor, tile_tokens: int = 16384, use_original_mlp: bool = False) -> Output:
    """module(x), at most tile_tokens tokens at a time: the same output and gradients, the memory of one tile.

    x (B, N, E) or (T, E), or any leading dims. The module must treat every token by itself, as MLPs and
    mixtures of experts without a capacity do. Its output, or each tensor of a tuple, must have x's leading
    dims or a flat (T, ...); all of them are differentiable. Dropout, autocast and frozen weights are honoured.

    A module that is down(act(gate(x)) * up(x)) runs on ringtile's GLU kernels; any other, and every one with
    use_original_mlp, by its own forward. Cutting an MLP along its tokens and computing it again in the
    backward: Liu & Abbeel, arXiv:2305.19370; Chen et al., arXiv:1604.06174.

    InputError: x has no token dim, or its dtype is not the weights', or tile_tokens is below 1.
    Refused: a part of the module mixes tokens or is sharded by itself, or an output is not one row per token.
    """
    outputs: Output = run_tiles(module, type(module).forward, x, tile_tokens, use_original_mlp)
    return outputs


# A graph break under torch.compile: the tiles are a Python loop over buffers that are written in place.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_tiles(
    module: nn.Module, forward: Callable[..., Any], x: Tensor, tile_tokens: int, use_original_mlp: bool
) -> Output:
    """tiled_mlp, for a module whose own forward is forward(module, x)."""
    check_tile_tokens(tile_tokens)
    if x.dim() < 2 or not x.is_floating_point():
        raise InputError(f"x is {x.dtype} of shape {tuple(x.shape)}, expected floating point (..., tokens, hidden)")
    check_parts(module)
    glu = None if use_original_mlp else find_glu(module, forward)
    work: _Work = ModuleTiles(module, forward, x, tile_tokens) if glu is None else GluTiles(glu, x, tile_tokens)
    handover: list[Sequence[Tensor | None]] = []
    anchor = _Keep.apply(work, handover, x, *work.weights)  # type: ignore[no-untyped-call]
    outputs: Output = _Run.apply(anchor, handover, lambda: work.forward(x.detach(), *work.weights))  # type: ignore[no-untyped-call]
    return outputs


class _Work(Protocol):
    weights: tuple[Tensor | None, ...]

    def forward(self, x: Tensor, *weights: Tensor | None) -> Output:
        """The module's outputs, without a graph."""

    def backward(
        self, douts: Sequence[Tensor | None], needed: Sequence[bool], x: Tensor, *weights: Any
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """The gradient of x, and those of the weights in the dtype they were summed in; None if not needed."""


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, work: _Work, handover: list[Sequence[Tensor | None]], x: Tensor, *weights: Tensor | None
    ) -> Tensor:
        ctx.work, ctx.handover = work, handover
        ctx.save_for_backward(x, *weights)
        return x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, danchor: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        douts = ctx.handover.pop()
        if all(dout is None for dout in douts):
            return None, None, None, *(None for _ in weights)
        dx, totals = ctx.work.backward(douts, ctx.needs_input_grad[2:], x, *weights)
        return None, None, dx, *as_gradients(totals, weights)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, handover: list[Sequence[Tensor | None]], forward: Callable[[], Output]
    ) -> Output:
        outputs = forward()
        ctx.handover = handover
        ctx.set_materialize_grads(False)  # an output nobody used has no gradient
        ctx.mark_non_differentiable(
            *(out for out in _as_tuple(outputs) if out is not None and not out.is_floating_point())
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.handover.append(douts)
        defined = [dout for dout in douts if dout is not None]
        return defined[0].new_zeros(()) if defined else None, None, None


class ModuleTiles:
    """Any module, tile by tile; the backward runs its own forward again, with the same random numbers."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], x: Tensor, tile_tokens: int) -> None:
        self.call, self.tile_tokens = _Call(module, forward), tile_tokens
        parameters = {name: p for name, p in self.call.named_parameters() if p.requires_grad}
        self.names = tuple(parameters)
        self.weights: tuple[Tensor | None, ...] = tuple(parameters.values())
        device_type = x.device.type
        self.cpu_random_state = torch.get_rng_state()
        self.devices, self.device_random_states = get_device_states(x)
        self.autocast: dict[str, Any] = {
            "device_type": device_type,
            "enabled": torch.is_autocast_enabled(device_type),
            "dtype": torch.get_autocast_dtype(device_type),
        }

    def forward(self, x: Tensor, *weights: Tensor | None) -> Output:
        outputs: list[Any] = []  # no views: what FSDP hangs at an output would be lost with an in-place sum
        x_rows = x.flatten(0, -2)  # (T, E)
        is_tuple = False
        for tile in tiles(x_rows.size(0), self.tile_tokens):
            is_tuple = self._forward_tile(tile, x, x_rows, outputs)
        return tuple(outputs) if is_tuple else outputs[0]

    # A call of its own for every tile: what it made is freed before the next tile is begun.
    def _forward_tile(self, tile: slice, x: Tensor, x_rows: Tensor, outputs: list[Any]) -> bool:
        """Fills the outputs' rows of one tile, the first makes them; whether the module returns a tuple."""
        x_tile = _like_input(x_rows[tile], x).clone()  # the module may write into it: jitter of routers does
        result = self.call(x_tile)
        rows = _rows(result, x_tile)
        if not outputs:
            outputs += [None if out is None else out.new_empty(_shape(out, x_tile, x)) for out in _as_tuple(result)]
        for out, tile_rows in zip(outputs, rows, strict=True):
            if tile_rows is not None:
                out.view(x_rows.size(0), *tile_rows.shape[1:])[tile] = tile_rows
        return isinstance(result, tuple)

    def backward(
        self, douts: Sequence[Tensor | None], needed: Sequence[bool], x: Tensor, *weights: Any
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        x_rows = x.flatten(0, -2)
        dx = x.new_zeros(x_rows.shape) if needed[0] else None
        totals: list[Any] = [None] * len(weights)  # stays None if no tile used the weight
        # Leaves that share the weights' storage: hooks on the parameters must see the total, not every tile.
        leaves = {name: w.detach().requires_grad_() for name, w in zip(self.names, weights, strict=True)}
        sums = LinearSums(tuple(leaves.values()), totals)
        with (
            torch.random.fork_rng(self.devices, device_type=x.device.type),
            torch.autocast(**self.autocast),
            torch.enable_grad(),
            sums,
        ):
            torch.set_rng_state(self.cpu_random_state)
            set_device_states(self.devices, self.device_random_states, device_type=x.device.type)
            for tile in tiles(x_rows.size(0), self.tile_tokens):
                self._backward_tile(tile, _like_input(x_rows[tile].detach(), x), douts, leaves, sums, dx)
        return None if dx is None else dx.view(x.shape), totals

    def _backward_tile(
        self,
        tile: slice,
        x_tile: Tensor,
        douts: Sequence[Tensor | None],
        leaves: dict[str, Tensor],
        sums: LinearSums,
        dx: Tensor | None,
    ) -> None:
        """Computes one tile again, adds the gradients of its weights to the sums, fills its rows of dx."""
        x_tile.requires_grad_(dx is not None)
        rows = _rows(torch.func.functional_call(self.call, leaves, (x_tile.clone(),)), x_tile)
        pairs = [
            (out, dout.flatten(0, -out.dim())[tile])
            for out, dout in zip(rows, douts, strict=True)
            if out is not None and dout is not None and out.requires_grad
        ]
        if not pairs:
            return
        inputs = [*leaves.values()] if dx is None else [x_tile, *leaves.values()]
        tile_outputs, tile_douts = zip(*pairs, strict=True)
        grads = list(torch.autograd.grad(tile_outputs, inputs, tile_douts, allow_unused=True))
        if dx is not None and (dx_tile := grads.pop(0)) is not None:
            dx[tile] = dx_tile.view_as(dx[tile])
        for index, grad in enumerate(grads):
            if grad is not None:
                sums.total(index).add_(grad)


_SHARDED = {"FSDPModule": "FSDP2", "FullyShardedDataParallel": "FSDP1"}  # by name: not to import them


def check_parts(module: nn.Module) -> None:
    """Refused, naming the part, where tiles would not give the module's own outputs or all of its gradients."""
    for name, part in module.named_modules():
        kernel_size = part.kernel_size if isinstance(part, nn.modules.conv._ConvNd) else ()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) or any(size != 1 for size in kernel_size):
            problem = f"is a {type(part).__name__}, which mixes tokens; expected a module that treats each by itself"
        elif hasattr(part, "expert_capacity"):
            problem = "drops what exceeds an expert's capacity, counted over all tokens; expected no capacity"
        elif any(isinstance(value, Tensor) and value.requires_grad for value in vars(part).values()):
            problem = "holds a weight that is no parameter (FSDP1 or DataParallel); expected FSDP2, ZeRO or DDP"
        elif part is not module and (engine := _engine_of(part)):
            problem = (
                f"is sharded by {engine} on its own and would be gathered once per tile; expected the MLP in one: give "
                "fully_shard the MLP or its layer, call ringtile.enable or tile_mlps before deepspeed.initialize"
            )
        else:
            continue
        raise Refused(f"tiled MLP: {name or 'the module'} {problem}")


def _engine_of(part: nn.Module) -> str | None:
    """Which engine gathers this module's parameters by hooks of its own."""
    if hasattr(part, "ds_id"):
        return "ZeRO-3"
    return next((_SHARDED[cls.__name__] for cls in type(part).__mro__ if cls.__name__ in _SHARDED), None)


class _Call(nn.Module):
    """A module whose forward may have been replaced on the instance, called by the forward it had."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.own_forward = module, forward

    def forward(self, x: Tensor) -> Any:
        return self.own_forward(self.module, x)


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _like_input(rows: Tensor, x: Tensor) -> Tensor:
    """(T, E) as a batch of one sequence, with as many dims as x."""
    return rows.view(*(1,) * (x.dim() - 2), *rows.shape)


def _shape(out: Tensor, x_tile: Tensor, x: Tensor) -> tuple[int, ...]:
    """The shape of a whole output, of which out is the first tile."""
    num_leading = x.dim() - 1
    if out.shape[:num_leading] == x_tile.shape[:-1]:
        return (*x.shape[:-1], *out.shape[num_leading:])
    return (x.shape[:-1].numel(), *out.shape[1:])


def _rows(result: Any, x_tile: Tensor) -> list[Tensor | None]:
    """The outputs for one tile with one row per token, (t, ...) each."""
    num_tokens = x_tile.shape[:-1].numel()
    rows: list[Tensor | None] = []
    for index, out in enumerate(_as_tuple(result)):
        if out is None:
            rows.append(None)
        elif not isinstance(out, Tensor):
            raise Refused(f"tiled MLP: output {index} is a {type(out).__name__}, expected a tensor, or a tuple of them")
        elif out.shape[: x_tile.dim() - 1] == x_tile.shape[:-1]:
            rows.append(out.flatten(0, x_tile.dim() - 2))
        elif out.dim() > 0 and out.size(0) == num_tokens:
            rows.append(out)
        else:
            raise Refused(
                f"tiled MLP: output {index} has shape {tuple(out.shape)} for a tile of {num_tokens} tokens, expected "
                f"{tuple(x_tile.shape[:-1])} or ({num_tokens},) in front; a sum over tokens cannot be tiled"
            )
    return rows
