"""The selective scan over the tokens of one GPU by the kernel of mamba_ssm, with states and documents, which it lacks.

selective_scan_fn begins with a state of 0, ignores the gradient of its last state, and knows no documents. So tokens
are put between those of the batch, which do this to the state of a channel, of K numbers:

    begin   K tokens with dt = 2^-40, x = 2^40 state and B = unit vectors add the state: exp(dt A) is 1 in float32
    reset   a token with dt = 1e30 and x = 0 leaves exp(-inf) = 0 of it
    read    K tokens with dt = 0 and C = unit vectors put it out, with its gradient

All products are with powers of two or with 0, so that nothing is rounded. It computes in float32: the scan multiplies
no matrices, so that 16 bits would save bandwidth only. Its gradients of A, B, C and D are sums in any order.

Shape letters: B batch, N tokens, L tokens with those between, C channels, K state dim.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ringtile.recurrent.packed import on_device, runs_of

INSTALL = "pip install mamba-ssm"
_MAX_STATE_DIM = 256
_STEP = 2.0**-40
_RESET = 1e30
_LEAST_DECAY = 1e-28  # of A: exp(_RESET A) is 0, and exp(dt A) is 1 for every other dt


@functools.cache
def _scan() -> Callable[..., Tensor]:
    module = importlib.import_module("mamba_ssm.ops.selective_scan_interface")
    return module.selective_scan_fn  # type: ignore[no-any-return]


@functools.cache
def _why_no_mamba() -> str:
    try:
        _scan()
    except ModuleNotFoundError as error:
        return f"mamba_ssm is not installed (no module {error.name}): {INSTALL}"
    except Exception as error:  # of its own imports, such as of an extension for another torch
        return f"mamba_ssm cannot be imported ({type(error).__name__}: {error}): {INSTALL}"
    return ""


def why_not(op: str, x: Tensor, state_dim: int) -> str:
    """Return why mamba_ssm cannot compute a selective scan of x (B, N, C), "" if it can."""
    if x.dtype == torch.float64:
        return "mamba_ssm does not compute in float64: pass float32, bfloat16 or float16"
    if state_dim > _MAX_STATE_DIM:
        return f"mamba_ssm takes a state dim of 1..{_MAX_STATE_DIM}, not {state_dim}"
    return _why_no_mamba()


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    seq_idx: Tensor,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See kernels.selective_scan."""
    (batch, num_tokens, num_channels), state_dim = x.shape, A.size(1)
    A = A.float()
    num_begins = state_dim if initial_state is not None else 0
    key = ("stretched", batch, num_begins, state_dim)
    s = on_device(seq_idx, x.device, key, lambda: _stretch(seq_idx, batch, num_begins, state_dim))
    units = torch.eye(state_dim, dtype=torch.float32, device=x.device)

    def spread(y: Tensor) -> Tensor:
        rows = y.new_zeros(batch * s.length, y.size(2), dtype=torch.float32)
        return rows.index_copy(0, s.places, y.float().flatten(0, 1).index_select(0, s.tokens))

    if s.has_resets:  # any other A, which would not be reset, is too small for any other dt to tell from 0
        least = torch.where(A.abs() < _LEAST_DECAY, -_LEAST_DECAY, A)
        A = A + (least - A).detach()
    x_, dt_, B_, C_ = (spread(y) for y in (x, dt, B, C))
    dt_ = dt_.index_fill(0, s.resets, _RESET)
    if initial_state is not None:
        begun = initial_state.float().mT.flatten(0, 1).index_select(0, s.states)  # (rows that go on, K) x C
        x_ = x_.index_copy(0, s.begins, begun / _STEP)
        dt_ = dt_.index_fill(0, s.begins, _STEP)
        B_ = B_.index_copy(0, s.begins, units.repeat(s.begins.numel() // state_dim, 1))
    C_ = C_.index_copy(0, s.reads, units.repeat(batch, 1))
    given = [y.view(batch, s.length, -1).transpose(1, 2).contiguous() for y in (x_, dt_, B_, C_)]
    y = _scan()(given[0], given[1], A, given[2], given[3], D=None if D is None else D.float())
    y = y.transpose(1, 2).flatten(0, 1)
    out = x.new_zeros(batch * num_tokens, num_channels).index_copy(0, s.tokens, y.index_select(0, s.places).to(x.dtype))
    final = y.index_select(0, s.reads).view(batch, state_dim, num_channels).mT
    return out.view(batch, num_tokens, num_channels), final


# ---- where tokens go ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stretched:
    """Places in rows of L tokens, flattened; int64, on the device."""

    length: int  # L
    has_resets: bool
    tokens: Tensor  # of the flattened batch, all but padding
    places: Tensor  # of these
    resets: Tensor
    begins: Tensor  # K for each row that goes on from the initial state
    states: Tensor  # rows of the initial states (B K) that these are
    reads: Tensor  # K for each row


def _stretch(seq_idx: Tensor, batch: int, num_begins: int, state_dim: int) -> _Stretched:
    """Return it on the host. num_begins: K where there is an initial state, else 0."""
    num_tokens = seq_idx.size(1)
    documents = [runs_of(row) for row in seq_idx]
    documents = documents * batch if len(documents) == 1 else documents
    tokens, places, resets, begins, states, ends = [], [], [], [], [], []
    for row, of_row in enumerate(documents):
        # The state of a row of padding is the initial one.
        at, holds_state = 0, num_begins > 0 and (not of_row or of_row[0][0] == 0)
        if holds_state:
            at = num_begins
            begins.append(torch.arange(at, device="cpu"))
            states.append(row * state_dim + begins[-1])
        else:
            begins.append(torch.zeros(0, dtype=torch.int64, device="cpu"))
        of_places, of_resets = [], []
        for i, (_, document) in enumerate(of_row):
            if i > 0:
                of_resets.append(at)
                at += 1
            tokens.append(row * num_tokens + document)
            of_places.append(torch.arange(at, at + document.numel(), device="cpu"))
            at += document.numel()
        places.append(_joined(of_places))
        resets.append(torch.tensor(of_resets, dtype=torch.int64, device="cpu"))
        ends.append(at)
    length = max(ends, default=0) + state_dim

    def flat(of_rows: list[Tensor]) -> Tensor:
        return _joined([row * length + x for row, x in enumerate(of_rows)])

    return _Stretched(
        length,
        any(x.numel() for x in resets),
        _joined(tokens),
        flat(places),
        flat(resets),
        flat(begins),
        _joined(states),
        flat([length - state_dim + torch.arange(state_dim, device="cpu")] * batch),
    )


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if tensors else torch.zeros(0, dtype=torch.int64, device="cpu")
