"""What computes attention on a block of keys: the contract, and ringtile's kernels behind it.

Forward: one block of keys is merged into the running out and log-sum-exp of every query. Backward: its part of dq, dk
and dv, from the final out, log-sum-exp and dout, is added. All of these are of state_dtype, and the log-sum-exp is
float64, so backends can take turns: from block to block, and from forward to backward.

Shape letters: B batch, N local queries, K keys of the block, H query heads, G kv heads, D head dim, Dv value head dim,
R runs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ringtile import ops
from ringtile.attn.call import Options
from ringtile.sequence.plan import Round


class Block(NamedTuple):
    """The queries, a block of keys, and which of them attend which."""

    q: Tensor  # (B, N, H, D)
    k: Tensor  # (B, K, G, D)
    v: Tensor  # (B, K, G, Dv)
    round: Round  # on q's device
    options: Options  # checked


@dataclass(eq=False, slots=True)
class Running:
    """The state of a forward, into which its blocks are merged."""

    out: Tensor  # (B, N, H, Dv) of the state dtype; of no elements where it is fresh and rounded: nothing needs it
    lse: Tensor  # (B, H, N) float64
    fresh: bool  # no block came before, and both may be uninitialized
    rounded: Tensor | None = None  # like out, contiguous, of q's dtype: gets the merged out, and out any numbers


@dataclass(frozen=True, eq=False)
class Final:
    """The inputs of a backward that are the same for all blocks."""

    dout: Tensor  # (B, N, H, Dv) of q's dtype, unit stride in the last dim: see `of`
    out: Tensor  # (B, N, H, Dv) of q's dtype
    lse: Tensor  # (B, H, N) float64
    dlse: Tensor | None  # the gradient of lse, (B, H, N) float64; None: there is none

    @classmethod
    def of(cls, dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor) -> Final:
        """Take the gradients as autograd gives them: None where nothing depends on it, and with any strides."""
        if dout is None:
            dout = torch.zeros_like(out)
        return cls(dout if dout.stride(-1) == 1 else dout.contiguous(), out, lse, dlse)

    @functools.cached_property
    def delta(self) -> Tensor:
        """rowsum(dout * out) - dlse, (B, H, N); computed once per backward."""
        return ops.attn_delta(self.dout, self.out, None if self.dlse is None else self.dlse.contiguous())


class Gradients(NamedTuple):
    """The sums to which a backward adds the part of each block: each like its x, of the state dtype."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    fresh: bool  # dk and dv may be uninitialized, and the block has each of their rows
    rounded: tuple[Tensor, Tensor] | None = None  # contiguous, of k's dtype: get fresh dk and dv instead


class Backend(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def head_dim_step(self) -> int:
        """Head dims that are the same when rounded up to a multiple of it run the same code."""

    @property
    def length_step(self) -> int:
        """It takes numbers of queries and keys that are multiples of this."""

    def lacks(self, block: Block) -> str:
        """Return why it does not compute such a block; "" if it does."""

    def forward(self, block: Block, state: Running) -> None:
        """Merge the block into the state."""

    def backward(self, block: Block, final: Final, grads: Gradients) -> None:
        """Add the block's part to the gradients."""


# Aten's, by type of device, the one to be asked first in front; aten.py says which.
ATEN: dict[str, tuple[Backend, ...]] = {}


class Ringtile:
    """ringtile's own kernels, which take every mask."""

    name = "ringtile's attention"
    head_dim_step = 16
    length_step = 1

    def lacks(self, block: Block) -> str:
        reason = ops.why_no_kernels(block.q.device)
        return f"is not in use here: {reason}" if reason else ""

    def forward(self, block: Block, state: Running) -> None:
        (q, k, v, round, _), (scale, softcap, *_) = block, block.options
        dropout = block.options.dropout
        begin, end = round.bounds.read()
        given = q, k, v, begin, end, round.k_runs, state.out, state.lse, scale, softcap, state.fresh
        options = {} if dropout is None and not round.key_bounds else _options(block)
        if state.rounded is not None:
            options["rounded_out"] = state.rounded
        ops.attn_fwd_(*given, **options)

    def backward(self, block: Block, final: Final, grads: Gradients) -> None:
        (q, k, v, round, _), (scale, softcap, *_) = block, block.options
        dropout = block.options.dropout
        begin, end = round.bounds.read()
        given = q, k, v, begin, end, round.k_runs, final.dout, final.lse, final.delta, *grads[:3]
        options = {} if dropout is None and not round.key_bounds else _options(block)
        if grads.rounded is not None:
            options["rounded_dk"], options["rounded_dv"] = grads.rounded
        ops.attn_bwd_(*given, scale, softcap, grads.fresh, **options)


def _options(block: Block) -> dict[str, Any]:
    """Return what most blocks do without, by name."""
    options: dict[str, Any] = {"positions": block.round.positions.read()[0]}
    if (drop := block.options.dropout) is not None:
        options |= {"dropout": drop.probability, "seed": drop.seed, "step": drop.step, "stream": drop.stream}
        options["rows"] = drop.rows
    if block.round.key_bounds:
        options["key_begin"], options["key_end"] = block.round.key_bounds.read()
    return options


def why_slow(block: Block, *, backward: bool) -> str:
    """Return why ringtile's kernel for such a block takes some times longer than it could; "" if it does not.

    It has none for the tensor cores of the GPU's architecture (cuda/attn/dispatch.cu), or the tiles of the CPU.
    """
    q, head_dim = block.q, max(block.q.size(3), block.v.size(3))
    if not q.is_cuda:
        if q.dtype != torch.bfloat16:
            return ""
        ops.why_amx_is_refused()  # to log it; torch's kernels have no tiles then either
        return ops.why_no_amx()
    if ops.why_no_kernels(q.device):  # in use there
        return ""
    if block.options.dropout is not None:
        return "dropout of weights has no kernel for tensor cores; set the model's attention dropout to 0"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"{q.dtype} has no kernel for tensor cores; train in bfloat16 (bf16: true) or float16"
    if head_dim > 256:
        return f"head dim {head_dim} has no kernel for tensor cores, which take at most 256"
    major, _ = torch.cuda.get_device_capability(q.device)
    if major in (10, 11):
        return f"sm_{major}0 has no kernel of its own, only those of sm_80; install flash-attn-4, which has"
    if backward and major == 9 and head_dim > 128:
        return f"the backward of head dim {head_dim} has no kernel of sm_90a, only those of sm_80"
    return ""


def misaligned(block: Block) -> str:
    """Return which rows a CUDA kernel of ringtile's reads number by number; "" if none."""
    for name, x in (("q", block.q), ("k", block.k), ("v", block.v)) if block.q.is_cuda else ():
        rows = [x.data_ptr(), *(stride * x.itemsize for stride in x.stride()[:3])]
        if any(number % 16 for number in rows):
            place = f"head dim {x.size(3)}, the first {rows[0] % 16} bytes behind one"  # no length: it is said once
            return f"rows of {name} do not begin at multiples of 16 bytes: {place}"
    return ""
