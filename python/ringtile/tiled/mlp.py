"""An MLP computed one tile of tokens at a time: in both passes, intermediates exist for one tile only.

Autograd keeps its input and its weights (replay.py). At 2 T*E*F flops per product, forward and backward together cost

    plain                    3 products + 6                            18 T*E*F
    tiled GLU                3 + 2 (gate and up recomputed) + 6        22 T*E*F, also inside a checkpoint
    tiled, any module        3 + 3 (all recomputed) + 6                24 T*E*F, also inside a checkpoint

Shape letters: B batch, N tokens, T = B*N tokens flattened, E hidden size.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped

from ringtile import arguments
from ringtile.errors import InputError, RefusedError
from ringtile.tiled.glu import GluTiles, find_glu
from ringtile.tiled.replay import Output, RandomState, Recomputation, Replay, Work, as_tuple, run
from ringtile.tiled.tiles import check_tile_tokens, tiles

_MAX_GLU_PARTS = 48  # of a module that is traced as a GLU: three projections with adapters have 35


def tiled_mlp(module: nn.Module, x: Tensor, tile_tokens: int = 16384, use_original_mlp: bool = False) -> Output:
    """Compute module(x) in tiles of at most tile_tokens tokens: the same output and gradients in less memory.

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
    if (proof := _proofs.get(module)) is None or not proof.holds():
        proof = _proofs[module] = _Proof(module)
    glu = None if use_original_mlp or proof.num_parts > _MAX_GLU_PARTS else find_glu(module, forward)
    work: Work = (
        GluTiles(glu, x, tile_tokens)
        if glu is not None
        else ModuleTiles(module, forward, x, tile_tokens, proof.parameters())
    )
    _check_memory(x, work)
    return run("the tiled MLP", work, x)


def _check_memory(x: Tensor, work: Work) -> None:
    """InputError: a weight was freed, or is not where x is."""
    weights: Any = work.weights
    if not isinstance(work, GluTiles):  # torch's own ops read them, of hundreds of experts: at a glance
        plain = set(map(type, weights)) <= {nn.Parameter} and not any(map(is_wrapped, weights))
        if plain and all(map(Tensor.data_ptr, weights)):
            return
    for index, weight in enumerate(weights):
        if weight is not None:
            arguments.check_storage(f"weight {index} of the module", weight)
            if isinstance(work, GluTiles) or weight.device.type == "meta":
                arguments.check_devices("x", x, **{f"weight {index} of the module": weight})


class ModuleTiles:
    """Any module, tile by tile; the backward reruns the module's forward with the same random numbers."""

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        x: Tensor,
        tile_tokens: int,
        parameters: Iterable[tuple[str, nn.Parameter]],
    ) -> None:
        self.replay, self.tile_tokens = Replay(module, forward, x, parameters), tile_tokens
        self.weights: tuple[Tensor | None, ...] = self.replay.weights
        self.random_state = RandomState(x)

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
        result = self.replay.call(x_tile)
        rows = _rows(result, x_tile)
        if not outputs:
            outputs += [None if out is None else out.new_empty(_shape(out, x_tile, x)) for out in as_tuple(result)]
        for out, tile_rows in zip(outputs, rows, strict=True):
            if tile_rows is not None:
                out.view(x_rows.size(0), *tile_rows.shape[1:])[tile] = tile_rows
        return isinstance(result, tuple)

    def backward(
        self, douts: Sequence[Tensor | None], needed: Sequence[bool], x: Tensor, *weights: Any
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        x_rows = x.flatten(0, -2)
        dx = x.new_zeros(x_rows.shape) if needed[0] else None
        with self.replay.again(weights, self.random_state) as again:
            for tile in tiles(x_rows.size(0), self.tile_tokens):
                self._backward_tile(tile, _like_input(x_rows[tile].detach(), x), douts, again, dx)
        return None if dx is None else dx.view(x.shape), again.grads

    def _backward_tile(
        self, tile: slice, x_tile: Tensor, douts: Sequence[Tensor | None], again: Recomputation, dx: Tensor | None
    ) -> None:
        """Recomputes one tile, adds its weight gradients to the sums and fills its rows of dx."""
        x_tile.requires_grad_(dx is not None)
        result = again(x_tile.clone())
        rows = _rows(result, x_tile)
        of_rows = [
            None if out is None or dout is None else dout.flatten(0, -out.dim())[tile]
            for out, dout in zip(rows, douts, strict=True)
        ]
        for dx_tile in again.differentiate(rows, of_rows, [] if dx is None else [x_tile]):
            if dx is not None and dx_tile is not None:
                dx[tile] = dx_tile.view_as(dx[tile])


class _Proof:
    """That a module may run in tiles, and its parameters: found once, as long as its parts and parameters stay.

    Keeps none of them alive.
    """

    def __init__(self, module: nn.Module) -> None:
        check_parts(module)
        parts, named = list(module.modules()), dict(module.named_parameters())
        self.num_parts, self._stamp = len(parts), _stamp(parts)
        self._gone: list[weakref.ref[Any]] = []  # a new object may have the id of one that is gone
        self._parts = [weakref.ref(part, self._gone.append) for part in parts]
        self._names, self._parameters = [*named], [weakref.ref(x, self._gone.append) for x in named.values()]

    def holds(self) -> bool:
        """Return whether parts and parameters are the same objects, of the same classes, with as many attributes."""
        parts: list[Any] = [ref() for ref in self._parts]
        return not self._gone and _stamp(parts) == self._stamp

    def parameters(self) -> Iterable[tuple[str, Any]]:
        """Return (name, parameter) of each, if it holds."""
        return zip(self._names, [ref() for ref in self._parameters], strict=True)


_proofs: weakref.WeakKeyDictionary[nn.Module, _Proof] = weakref.WeakKeyDictionary()
_held, _modules, _parameters = operator.attrgetter("__dict__"), *map(operator.itemgetter, ("_modules", "_parameters"))


def _stamp(parts: Sequence[nn.Module]) -> list[object]:
    """Return what an engine, an adapter or a user that changes a module changes: a few calls in C for each part."""
    held = list(map(_held, parts))
    inside = filter(None, chain(map(_modules, held), map(_parameters, held)))  # most are empty
    return [*map(type, parts), *map(len, held), *map(id, chain.from_iterable(map(dict.values, inside)))]


_SHARDED = {"FSDPModule": "FSDP2", "FullyShardedDataParallel": "FSDP1"}  # by name, to avoid the imports


def check_parts(
    module: nn.Module, what: str = "tiled MLP", unit: str = "the MLP", mixers: Collection[str] = ()
) -> None:
    """RefusedError, naming the part, if running in parts would change the module's outputs or lose gradients. mixers:
    paths of parts whose convolutions go on from chunk to chunk."""
    for name, part in module.named_modules():
        goes_on = name.rpartition(".")[0] in mixers
        kernel_size = part.kernel_size if isinstance(part, nn.modules.conv._ConvNd) and not goes_on else ()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) or any(size != 1 for size in kernel_size):
            problem = f"is a {type(part).__name__}, which mixes tokens; expected a module that processes each alone"
        elif hasattr(part, "expert_capacity"):
            problem = "drops tokens beyond an expert's capacity, counted over all tokens; expected no capacity"
        elif sends_tokens(part):
            problem = "sends tokens to experts of other ranks, which may have more or fewer tiles; expected ep_size 1"
        elif any(isinstance(value, Tensor) and value.requires_grad for value in vars(part).values()):
            problem = "holds a weight that is not a parameter (FSDP1 or DataParallel); expected FSDP2, ZeRO or DDP"
        elif part is not module and (engine := _engine_of(part)):
            problem = (
                f"is sharded by {engine} on its own and would be gathered once per tile; expected {unit} to be "
                f"gathered as a unit: apply fully_shard to {unit} or its layer, or call ringtile.enable (or what turns "
                f"the {what} on) before deepspeed.initialize"
            )
        else:
            continue
        raise RefusedError(f"{what}: {name or 'the module'} {problem}")


def sends_tokens(part: nn.Module) -> bool:
    """Return whether transformers' expert parallelism (DistributedConfig.ep_size) has replaced its forward."""
    return bool(vars(part).get("_is_expert_parallel", False))


def _engine_of(part: nn.Module) -> str | None:
    """Return the engine that gathers this module's parameters through hooks on the module, if there is one."""
    if hasattr(part, "ds_id"):
        return "ZeRO-3"
    return next((_SHARDED[cls.__name__] for cls in type(part).__mro__ if cls.__name__ in _SHARDED), None)


def _like_input(rows: Tensor, x: Tensor) -> Tensor:
    """Rows (t, E) as a batch of one sequence, with as many dims as x."""
    return rows.view(*(1,) * (x.dim() - 2), *rows.shape)


def _shape(out: Tensor, x_tile: Tensor, x: Tensor) -> tuple[int, ...]:
    """Return the shape of an output over all tokens, given its first tile."""
    num_leading = x.dim() - 1
    if out.shape[:num_leading] == x_tile.shape[:-1]:
        return (*x.shape[:-1], *out.shape[num_leading:])
    return (x.shape[:-1].numel(), *out.shape[1:])


def _rows(result: Any, x_tile: Tensor) -> list[Tensor | None]:
    """One tile's outputs, (t, ...) each: one row per token."""
    num_tokens = x_tile.shape[:-1].numel()
    rows: list[Tensor | None] = []
    for index, out in enumerate(as_tuple(result)):
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
