"""An MLP computed one tile of tokens at a time: in both passes, intermediates exist for one tile only.

The autograd graph of one tiled MLP is two nodes,

    x, weights -> _Keep -> anchor -> _Run -> outputs

_Keep saves the input and the weights; _Run computes the outputs and saves nothing. The backward of _Run passes the
gradients of the outputs to the backward of _Keep, which does all the work and returns each weight's gradient once, so
hooks, DDP and FSDP see an ordinary parameter. There are two nodes because a non-reentrant checkpoint
(torch.utils.checkpoint) stops recomputing at the last saved tensor: it stops in _Keep, before the MLP runs again. At
2 T*E*F flops per product, forward and backward together cost

    plain                    3 products + 6                            18 T*E*F
    tiled GLU                3 + 2 (gate and up recomputed) + 6        22 T*E*F, also inside a checkpoint
    tiled, any module        3 + 3 (all recomputed) + 6                24 T*E*F, also inside a checkpoint

Shape letters: B batch, N tokens, T = B*N tokens flattened, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from ringtile import arguments, derivatives
from ringtile.errors import InputError, RefusedError
from ringtile.tiled.glu import GluTiles, find_glu
from ringtile.tiled.tiles import check_tile_tokens, on_tile, tiles
from ringtile.tiled.weight_grad import WeightGradSums, round_grad_sums

Output = Tensor | tuple[Tensor | None, ...]


def tiled_mlp(module: nn.Module, x: Tensor, tile_tokens: int = 16384, use_original_mlp: bool = False) -> Output:
    """module(x), at most tile_tokens tokens at a time: the same output and gradients in the memory of one tile.

    x (B, N, E) or (T, E), or any leading dims. The module must process each token independently, as MLPs and
    mixtures of experts without a capacity do. Its output, or each tensor of a tuple, must have x's leading dims or be
    flat, (T, ...); all of them are differentiable. Dropout, autocast and frozen weights work.

    A module that computes exactly down(act(gate(x)) * up(x)) runs on ringtile's GLU kernels. Any other module runs its
    own forward on each tile, and so does every module with use_original_mlp. Tiling an MLP along its tokens and
    recomputing it in the backward: Liu & Abbeel, arXiv:2305.19370; Chen et al., arXiv:1604.06174.

    InputError: x has no token dim or a dtype other than the weights', or tile_tokens is below 1.
    RefusedError: a part of the module mixes tokens or is sharded on its own, or an output is not one row per token.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"module is a {type(module).__name__}; expected a torch.nn.Module: wrap a function in one")
    outputs: Output = run_tiles(module, type(module).forward, x, tile_tokens, use_original_mlp)
    return outputs


# A graph break under torch.compile: the loop over tiles writes its buffers in place.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_tiles(
    module: nn.Module, forward: Callable[..., Any], x: Tensor, tile_tokens: int, use_original_mlp: bool
) -> Output:
    """tiled_mlp for a module whose forward is forward(module, x), which may differ from type(module).forward."""
    check_tile_tokens(tile_tokens)
    arguments.check_tensor("x", x)
    if x.device.type == "meta":
        raise InputError("x is on meta; expected a real device: the tiled MLP has no shapes without numbers")
    if x.dim() < 2 or not x.is_floating_point():
        raise InputError(f"x is {x.dtype} of shape {tuple(x.shape)}, expected floating point (..., tokens, hidden)")
    check_parts(module)
    glu = None if use_original_mlp else find_glu(module, forward)
    work: _Work = ModuleTiles(module, forward, x, tile_tokens) if glu is None else GluTiles(glu, x, tile_tokens)
    handover: list[Sequence[Tensor | None]] = []
    _check_memory(x, work)
    derivatives.check_once("the tiled MLP", x, *work.weights, vmap=False)
    anchor = _Keep.apply(work, handover, x, *work.weights)  # type: ignore[no-untyped-call]
    outputs: Output = _Run.apply(anchor, handover, lambda: work.forward(x.detach(), *work.weights))  # type: ignore[no-untyped-call]
    return outputs


def _check_memory(x: Tensor, work: _Work) -> None:
    """InputError: a weight was freed, or is not where x is."""
    for index, weight in enumerate(work.weights):
        if weight is not None:
            arguments.check_storage(f"weight {index} of the module", weight)
            if isinstance(work, GluTiles) or weight.device.type == "meta":
                arguments.check_devices("x", x, **{f"weight {index} of the module": weight})


class _Work(Protocol):
    weights: tuple[Tensor | None, ...]

    def forward(self, x: Tensor, *weights: Tensor | None) -> Output:
        """The module's outputs, detached."""

    def backward(
        self, douts: Sequence[Tensor | None], needed: Sequence[bool], x: Tensor, *weights: Any
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """The gradient of x, and the weights' gradients in the dtype of their sums; None where not needed."""


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, work: _Work, handover: list[Sequence[Tensor | None]], x: Tensor, *weights: Tensor | None
    ) -> Tensor:
        ctx.work, ctx.handover = work, handover
        ctx.save_for_backward(x, *weights)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, danchor: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        douts = ctx.handover.pop()
        if all(dout is None for dout in douts):
            return None, None, None, *(None for _ in weights)

        def compute() -> tuple[Tensor | None, ...]:
            dx, sums = ctx.work.backward(douts, ctx.needs_input_grad[2:], x, *weights)
            return dx, *round_grad_sums(sums, weights)

        return None, None, *derivatives.gradients("the tiled MLP", compute, *douts, x, *weights)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, handover: list[Sequence[Tensor | None]], forward: Callable[[], Output]
    ) -> Output:
        outputs = forward()
        ctx.handover = handover
        ctx.set_materialize_grads(False)  # an unused output has no gradient
        ctx.mark_non_differentiable(
            *(out for out in _as_tuple(outputs) if out is not None and not out.is_floating_point())
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.handover.append(douts)
        defined = [dout for dout in douts if dout is not None]
        return defined[0].new_zeros(()) if defined else None, None, None


class ModuleTiles:
    """Any module, tile by tile; the backward reruns the module's forward with the same random numbers."""

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
        outputs: list[Any] = []  # not views: an in-place add to a view would drop the hook FSDP puts on an output
        x_rows = x.flatten(0, -2)  # (T, E)
        is_tuple = False
        for tile in tiles(x_rows.size(0), self.tile_tokens):
            is_tuple = self._forward_tile(tile, x, x_rows, outputs)
        return tuple(outputs) if is_tuple else outputs[0]

    # A separate call per tile frees the tile's tensors before the next tile starts.
    def _forward_tile(self, tile: slice, x: Tensor, x_rows: Tensor, outputs: list[Any]) -> bool:
        """Fills one tile's rows of the outputs, which the first tile allocates. Whether the module returns a tuple."""
        x_tile = _like_input(x_rows[tile], x).clone()  # the module may modify it: router jitter does
        with on_tile(tile):
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
        # Leaves that share the weights' storage: hooks on the parameters must see the sum, not each tile's gradient.
        leaves = {name: w.detach().requires_grad_() for name, w in zip(self.names, weights, strict=True)}
        grads: list[Any] = [None] * len(weights)  # stays None if no tile used the weight
        sums = WeightGradSums(tuple(leaves.values()), grads)
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
        return None if dx is None else dx.view(x.shape), grads

    def _backward_tile(
        self,
        tile: slice,
        x_tile: Tensor,
        douts: Sequence[Tensor | None],
        leaves: dict[str, Tensor],
        sums: WeightGradSums,
        dx: Tensor | None,
    ) -> None:
        """Recomputes one tile, adds its weight gradients to the sums and fills its rows of dx."""
        x_tile.requires_grad_(dx is not None)
        with on_tile(tile):
            result = torch.func.functional_call(self.call, leaves, (x_tile.clone(),))
        rows = _rows(result, x_tile)
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
                sums.sum_of(index).add_(grad)


_SHARDED = {"FSDPModule": "FSDP2", "FullyShardedDataParallel": "FSDP1"}  # by name, to avoid the imports


def check_parts(module: nn.Module) -> None:
    """RefusedError, naming the part, if tiling would change the module's outputs or lose gradients."""
    for name, part in module.named_modules():
        kernel_size = part.kernel_size if isinstance(part, nn.modules.conv._ConvNd) else ()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) or any(size != 1 for size in kernel_size):
            problem = f"is a {type(part).__name__}, which mixes tokens; expected a module that processes each alone"
        elif hasattr(part, "expert_capacity"):
            problem = "drops tokens beyond an expert's capacity, counted over all tokens; expected no capacity"
        elif any(isinstance(value, Tensor) and value.requires_grad for value in vars(part).values()):
            problem = "holds a weight that is not a parameter (FSDP1 or DataParallel); expected FSDP2, ZeRO or DDP"
        elif part is not module and (engine := _engine_of(part)):
            problem = (
                f"is sharded by {engine} on its own and would be gathered once per tile; expected the MLP to be "
                "gathered as a unit: apply fully_shard to the MLP or its layer, or call ringtile.enable or tile_mlps "
                "before deepspeed.initialize"
            )
        else:
            continue
        raise RefusedError(f"tiled MLP: {name or 'the module'} {problem}")


def _engine_of(part: nn.Module) -> str | None:
    """The engine that gathers this module's parameters through hooks on the module, if there is one."""
    if hasattr(part, "ds_id"):
        return "ZeRO-3"
    return next((_SHARDED[cls.__name__] for cls in type(part).__mro__ if cls.__name__ in _SHARDED), None)


class _Call(nn.Module):
    """Calls a module through a given forward, because the instance's own may be the tiled one."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.own_forward = module, forward

    def forward(self, x: Tensor) -> Any:
        return self.own_forward(self.module, x)


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _like_input(rows: Tensor, x: Tensor) -> Tensor:
    """Rows (t, E) as a batch of one sequence, with as many dims as x."""
    return rows.view(*(1,) * (x.dim() - 2), *rows.shape)


def _shape(out: Tensor, x_tile: Tensor, x: Tensor) -> tuple[int, ...]:
    """The shape of an output over all tokens, given its first tile."""
    num_leading = x.dim() - 1
    if out.shape[:num_leading] == x_tile.shape[:-1]:
        return (*x.shape[:-1], *out.shape[num_leading:])
    return (x.shape[:-1].numel(), *out.shape[1:])


def _rows(result: Any, x_tile: Tensor) -> list[Tensor | None]:
    """One tile's outputs, (t, ...) each: one row per token."""
    num_tokens = x_tile.shape[:-1].numel()
    rows: list[Tensor | None] = []
    for index, out in enumerate(_as_tuple(result)):
        if out is None:
            rows.append(None)
        elif not isinstance(out, Tensor):
            raise RefusedError(
                f"tiled MLP: output {index} is a {type(out).__name__}, expected a tensor, or a tuple of them"
            )
        elif out.shape[: x_tile.dim() - 1] == x_tile.shape[:-1]:
            rows.append(out.flatten(0, x_tile.dim() - 2))
        elif out.dim() > 0 and out.size(0) == num_tokens:
            rows.append(out)
        else:
            raise RefusedError(
                f"tiled MLP: output {index} has shape {tuple(out.shape)} for a tile of {num_tokens} tokens, expected "
                f"{tuple(x_tile.shape[:-1])} or ({num_tokens},) as its leading dims; a sum over tokens cannot be tiled"
            )
    return rows
