"""aten's attention kernels as backends: flash attention (2, and 4 or 3 where installed) and cuDNN's.

They know a mask by its pieces (pieces.py). Their results have q's dtype: in bfloat16 and float16 each block is rounded
once more than by ringtile's kernels, and merged or added in float32. docs/design/ring.md has the bound.

All of these are private functions of torch, so what is expected of each is compared with its definition before it is
used (self_test.py).

Shape letters: B batch, N local queries, K keys of the block, H query heads, G kv heads, D head dim, M queries of a
square or of a pack.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from ringtile import ops
from ringtile.attn.backend import ATEN, Block, Final, Gradients, Running
from ringtile.sequence.pieces import Pack, Square, packs_of, pieces_of, squares_of

FLASH_ATTENTION_4, FLASH_ATTENTION_3 = "flash_attn.cute.interface", "flash_attn_interface"  # as torch names them
MAX_SQUARES = 256  # calls a block of keys; a window over many times its width takes more
MAX_SQUARES_CUDNN = 2  # cuDNN plans each new shape for a second, and documents bring new ones with every batch
# Its backward on sm_90 gives NaN for 64 keys more than a multiple, in rows of a log-sum-exp below -88.7, and others of
# its kernels are wrong for one query or for lengths of no multiple (cudnn-frontend issues 628, 1072 and 160).
LENGTHS_CUDNN = 128

# Both with q (B, H, M, D) and k, v (B, G, K, D) of any strides: (q, k, v, causal, scale) -> out like q, lse of B H M
# numbers; (dout, q, k, v, out, lse (B, H, M), causal, scale) -> dq, dk, dv.
Attend = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
AttendBackward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor, Tensor]]


class _FlashFunctions(NamedTuple):
    """With the arguments of aten's _flash_attention_forward and _flash_attention_backward."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


@functools.cache
def _flash_functions(library: str) -> _FlashFunctions | str:
    """Return those of a library, or why it has none here."""
    if not library:
        return _FlashFunctions(torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward)
    try:  # torch's own adapters, which it otherwise calls in the place of its flash attention
        if library == "FA4":
            adapter: Any = importlib.import_module("torch.nn.attention._fa4")
            module = adapter._fa4_import_module(FLASH_ATTENTION_4)
            if "return_lse" not in inspect.signature(module._flash_attn_fwd).parameters:  # as flash-attn 2.8 ships it
                return (
                    "is not installed (flash_attn.cute takes no return_lse, as in flash-attn 2.8; install flash-attn-4)"
                )
            adapter._FA4_MODULE_PATH = FLASH_ATTENTION_4
            return _FlashFunctions(
                adapter._fa4_flash_attention_forward_impl, adapter._fa4_flash_attention_backward_impl
            )
        adapter = importlib.import_module("torch.nn.attention._fa3")
        adapter._fa3_import_module(FLASH_ATTENTION_3)
        return _FlashFunctions(
            adapter._fa3_flash_attention_forward_impl_default, adapter._fa3_flash_attention_backward_impl
        )
    except Exception as error:  # a library may raise anything while it is imported
        return f"is not installed ({next(iter(str(error).splitlines()), type(error).__name__)})"


@dataclass(frozen=True, eq=False)
class InSquares:
    """A kernel that knows full and causal blocks: a call for each square."""

    name: str
    attend: Attend
    attend_backward: AttendBackward
    max_squares: int = MAX_SQUARES
    length_step: int = 1
    head_dim_step: ClassVar[int] = 1

    def lacks(self, block: Block) -> str:
        if reason := _lacks(block):
            return reason
        squares = [square for _, square in squares_of(block.round)]
        if any(
            (each.q_end - each.q_begin) % self.length_step or (each.k_end - each.k_begin) % self.length_step
            for each in squares
        ):
            return f"takes lengths that are multiples of {self.length_step}"
        num = len(squares)
        return (
            ""
            if num <= self.max_squares
            else f"would be called {num} times for a block's mask, more than {self.max_squares} times"
        )

    def forward(self, block: Block, state: Running) -> None:
        q, k, v = block.q, block.k, block.v
        squares = squares_of(block.round)
        num_tokens = [(q.size(0) if rows == slice(None) else 1) * (at.q_end - at.q_begin) for rows, at in squares]
        state, at_once = _start(state, num_tokens)
        for rows, square in squares:
            queries, keys = _places(rows, square)
            part, part_lse = self.attend(
                _heads_first(q[queries], square),
                _heads_first(k[keys], square),
                _heads_first(v[keys], square),
                square.causal,
                block.options.scale,
            )
            part_lse = part_lse.reshape(part.shape[:3])
            part_lse = part_lse.flip(2) if square.flipped else part_lse
            first_row = (rows.start or 0) * q.size(1) + square.q_begin
            _merge_(state, at_once, _tokens_first(part, square), part_lse, first_row)
        _finish(state, at_once)

    def backward(self, block: Block, final: Final, grads: Gradients) -> None:
        q, k, v = block.q, block.k, block.v
        _start_gradients(grads)
        lse = final.lse.to(ops.state_dtype(q.dtype))
        for rows, square in squares_of(block.round):
            queries, keys = _places(rows, square)
            lse_part = lse[rows, :, square.q_begin : square.q_end]
            parts = self.attend_backward(
                _heads_first(final.dout[queries], square),
                _heads_first(q[queries], square),
                _heads_first(k[keys], square),
                _heads_first(v[keys], square),
                _heads_first(final.out[queries], square),
                (lse_part.flip(2) if square.flipped else lse_part).contiguous(),
                square.causal,
                block.options.scale,
            )
            for gradient, part, at in zip(grads[:3], parts, (queries, keys, keys), strict=True):
                gradient[at].add_(_tokens_first(part, square))
        _round(grads)


@dataclass(frozen=True, eq=False)
class InPacks:
    """aten's flash attention for CUDA, which takes many sequences in one call, and windows: a call for each pack.

    library: FA4 or FA3, called through torch without being activated there: the user's own attention stays what it is.
    "": what torch runs.
    """

    library: str = ""
    head_dim_step: ClassVar[int] = 1
    length_step: ClassVar[int] = 1

    @property
    def name(self) -> str:
        """Return the name of the implementation, which is a kernel of its own; the user may have activated one of
        torch's."""
        implementation = self.library or current_flash_attention_impl()
        return "aten's flash attention" + (f" ({implementation})" if implementation else "")

    def lacks(self, block: Block) -> str:
        functions = _flash_functions(self.library)
        return functions if isinstance(functions, str) else _lacks(block)

    @property
    def _functions(self) -> _FlashFunctions:
        functions = _flash_functions(self.library)
        if isinstance(functions, str):
            raise NotImplementedError(f"{self.library} {functions}")
        return functions

    def forward(self, block: Block, state: Running) -> None:
        q, k, v = block.q, block.k, block.v
        packs = packs_of(block.round, q, k)
        state, at_once = _start(state, [pack.num_queries for pack in packs])
        for pack in packs:
            given = (_take(x, rows) for x, rows in ((q, pack.q_rows), (k, pack.k_rows), (v, pack.k_rows)))
            found = self._functions.forward(*given, *_sequences(pack), False, **_options(pack, block))
            first_row, rows = (pack.q_rows.start, None) if isinstance(pack.q_rows, slice) else (0, pack.q_rows)
            _merge_(state, at_once, found[0][None], found[1][None], first_row, rows)
        _finish(state, at_once)

    def backward(self, block: Block, final: Final, grads: Gradients) -> None:
        q, k, v = block.q, block.k, block.v
        _start_gradients(grads)
        lse = final.lse.to(ops.state_dtype(q.dtype)).mT
        of_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        for pack in packs_of(block.round, q, k):
            q_rows, k_rows = pack.q_rows, pack.k_rows
            sides = ((final.dout, q_rows), (q, q_rows), (k, k_rows), (v, k_rows), (final.out, q_rows))
            parts = self._functions.backward(
                *(_take(x, rows) for x, rows in sides),
                _take(lse, q_rows).t().contiguous(),
                *_sequences(pack),
                *of_dropout,
                **_options(pack, block),
            )
            for gradient, part, rows in zip(grads[:3], parts, (q_rows, k_rows, k_rows), strict=True):
                if isinstance(rows, slice):
                    gradient.flatten(0, 1)[rows].add_(part)
                else:  # which hold none twice, so that no order matters
                    gradient.flatten(0, 1).index_add_(0, rows, part.to(gradient.dtype))
        _round(grads)


def _lacks(block: Block) -> str:
    """Return why aten has no kernel for a block; "" if it may have one."""
    q, v = block.q, block.v
    if block.options.dropout is not None:
        return "draws dropout from a generator, not from counters"
    if block.options.softcap != 0:
        return f"has no softcap, which is {block.options.softcap}"
    if v.size(3) != q.size(3):
        return f"has one head dim, which is {q.size(3)} for q and k, and {v.size(3)} for v"
    if q.device.type == "cuda" and q.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16 on CUDA, not {q.dtype}"
    if pieces_of(block.round) is None:
        return "takes masks of few pieces, of keys in the order of their positions"
    return ""


def _start(state: Running, num_tokens: list[int]) -> tuple[Running, bool]:
    """Return the state with an out, and whether a block is merged at once, as one part of all queries; else the state
    is ready for several.

    num_tokens: of each part.
    """
    if state.rounded is not None and state.out.numel() == 0:
        state = replace(state, out=torch.empty_like(state.rounded, dtype=state.out.dtype))
    at_once = num_tokens == [state.out.size(0) * state.out.size(1)]
    if state.fresh and not at_once:
        state.out.zero_()
        state.lse.fill_(float("-inf"))
    return state, at_once


def _merge_(
    state: Running, at_once: bool, part: Tensor, part_lse: Tensor, first_row: int, rows: Tensor | None = None
) -> None:
    """Merge a part as by `ops.attn_merge_`: at once also into a fresh state, and into the rounded out."""
    rounded = state.rounded if at_once else None
    given = part, part_lse.contiguous(), state.out, state.lse
    ops.attn_merge_(*given, state.fresh and at_once, first_row, rows, rounded)


def _finish(state: Running, at_once: bool) -> None:
    if state.rounded is not None and not at_once:
        state.rounded.copy_(state.out)


def _start_gradients(grads: Gradients) -> None:
    if grads.fresh:
        grads.dk.zero_()
        grads.dv.zero_()


def _round(grads: Gradients) -> None:
    if grads.rounded is not None:
        grads.rounded[0].copy_(grads.dk)
        grads.rounded[1].copy_(grads.dv)


# ---- squares and packs --------------------------------------------------------------------------


def _places(rows: slice, square: Square) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Return where a square has its queries in (B, N, ...), and its keys in (B, K, ...)."""
    return (rows, slice(square.q_begin, square.q_end)), (rows, slice(square.k_begin, square.k_end))


def _heads_first(x: Tensor, square: Square) -> Tensor:
    """Transpose (B, M, H, D) to (B, H, M, D), the last token first where the square is flipped: then it is causal."""
    return (x.flip(1) if square.flipped else x).transpose(1, 2)


def _tokens_first(x: Tensor, square: Square) -> Tensor:
    """Transpose (B, H, M, D) back to (B, M, H, D)."""
    return (x.flip(2) if square.flipped else x).transpose(1, 2)


def _take(x: Tensor, rows: Tensor | slice) -> Tensor:
    """Return those rows of (B, M, ...) as one sequence."""
    return x.flatten(0, 1)[rows] if isinstance(rows, slice) else x.flatten(0, 1).index_select(0, rows)


def _sequences(pack: Pack) -> tuple[Any, ...]:
    """Return where the sequences begin, the longest, no dropout, and whether each is causal, as aten takes them."""
    causal = pack.left < 0 and pack.right == 0
    return pack.q_offsets, pack.k_offsets, pack.max_queries, pack.max_keys, 0.0, causal


def _options(pack: Pack, block: Block) -> dict[str, Any]:
    return {"scale": block.options.scale, "window_size_left": pack.left, "window_size_right": pack.right}


# ---- the kernels --------------------------------------------------------------------------------


def _flash_for_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    # It gives 0, and not -inf, for a query whose scores are all -inf, which would weigh in a merge.
    state, group = ops.state_dtype(q.dtype), q.size(1) // k.size(1)
    for batch, head, row in (lse == 0).nonzero().tolist():
        keys = k[batch, head // group, : row + 1 if causal else None].to(state)
        if bool((scale * (keys @ q[batch, head, row].to(state)) == -torch.inf).all()):
            lse[batch, head, row] = -torch.inf
    return out, lse


def _flash_for_cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal, scale=scale
    )
    return dq, dk, dv


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return found[0], found[1]


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    seed, offset = (torch.zeros((), dtype=torch.int64, device=q.device) for _ in range(2))  # of no dropout
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(dout, q, k, v, out, lse[..., None], seed, offset, None, None, None, q.size(2), k.size(2), 0.0, causal),
        scale=scale,
    )
    return dq, dk, dv


ATEN["cpu"] = (InSquares("aten's flash attention", _flash_for_cpu, _flash_for_cpu_backward),)
ATEN["cuda"] = (
    InPacks("FA4"),
    InPacks("FA3"),
    InSquares("aten's cuDNN attention", _cudnn, _cudnn_backward, MAX_SQUARES_CUDNN, LENGTHS_CUDNN),
    InPacks(),
)
