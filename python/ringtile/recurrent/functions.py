"""Causal convolution, gated delta rule, Mamba and Mamba-2 over a sequence sharded over the ranks of a group.

The public functions: what they check, and how they part the work. What travels is in state_passing.py and heads.py, who
computes the tokens of one rank in local.py.

Shape letters: B batch, N local tokens, C channels, W width, H heads, G heads of q and k (or groups of B and C), K key
dim (or state dim), V value dim.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from ringtile import arguments, derivatives, ops
from ringtile.errors import InputError, shown
from ringtile.recurrent.costs import units_of_channels
from ringtile.recurrent.documents import Documents
from ringtile.recurrent.kernels import MAX_WIDTH, check_scale
from ringtile.recurrent.local import computing_on
from ringtile.recurrent.recurrence import Operand, Recurrence, check_tensors
from ringtile.recurrent.schemes import decide, run
from ringtile.recurrent.state_passing import Halos
from ringtile.sequence.given import check_given, tell_others
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence
from ringtile.transport.agreement import HeaderValue
from ringtile.transport.groups import Group

_P = ParamSpec("_P")
PUBLIC: set[Callable[..., Tensor]] = set()  # the functions of this module


def _public(function: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """Lets function modes see the call, such as that of `context_parallel`, which knows the sequence."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @functools.wraps(function)
    def public(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        if torch._C._is_torch_function_mode_enabled():
            return handle_torch_function(public, (), *args, **kwargs)  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    PUBLIC.add(public)
    return public  # type: ignore[no-any-return]


@_public
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    sequence: ShardedSequence | None = None,
    *,
    bias: Tensor | None = None,
    activation: str = "",
    mask: IntervalMask | None = None,
    layout: Layout | None = None,
    group: Group | None = None,
) -> Tensor:
    """Each channel's convolution with the W - 1 tokens before, of the same document: depthwise and causal.

    x (B, N, C): the local tokens; weight (C, W), weight[:, W - 1] for the token itself; W of 2..8; bias (C);
    activation: "" or "silu". sequence, or mask, layout and group, as in `ring_attention`, on every rank alike: causal
    documents and runs of neighbouring tokens; inside `context_parallel` its own, if none is given. Returns y (B, N, C)
    of x's dtype, computed in float32 (float64 for float64). Padding, the tokens that do not attend themselves, has
    output and gradient 0. Differentiable once.

    Raises InputError, Refused (another mask or layout), RingMismatch, PeerLost.
    """
    op = "causal_conv1d"
    with _checking(op, sequence, mask, layout, group, x, weight, optional=bias) as documents:
        channels = x.size(2) if x.dim() == 3 else None
        check_tensors(
            documents,
            {"x": (x, (None, _num_tokens(documents), None)), "weight": (weight, (channels, None))}
            | {"bias": (bias, (channels,))},
        )
        if not 2 <= weight.size(1) <= MAX_WIDTH:
            raise InputError(f"weight is {tuple(weight.shape)}; expected a width of 2..{MAX_WIDTH}")
        if activation not in ("", "silu"):
            raise InputError(f"activation is {shown(activation)}; expected '' or 'silu'")
        pieces = documents.pieces
    terms = _terms(x, documents) | {"channels": x.size(2), "width": weight.size(1)}
    halos = Halos(op, documents, terms, weight.size(1) - 1)
    compute = computing_on(x.device).causal_conv1d
    if documents.sequence.world_size == 1 and len(pieces) == 1:
        y: Tensor = compute(x, weight, bias, pieces[0].seq_idx, None, activation)[0]
        return y
    x, halo_of_piece = halos.of(x)
    outs = {
        piece.begin: compute(x[:, piece.tokens], weight, bias, piece.seq_idx, halo, activation)[0]
        for piece, halo in zip(pieces, halo_of_piece, strict=True)
    }
    return torch.cat([outs[begin] for begin in sorted(outs)], dim=1)


@_public
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    sequence: ShardedSequence | None = None,
    *,
    scale: float | None = None,
    scheme: str | None = None,
    mask: IntervalMask | None = None,
    layout: Layout | None = None,
    group: Group | None = None,
) -> Tensor:
    """The gated delta rule (arXiv:2412.06464), and Kimi delta attention where g has a decay for each channel.

    For each document: S_t = diag(exp g_t) S_{t-1}; S_t += k_t beta_t (v_t - k_t^T S_t)^T; out_t = scale q_t^T S_t, with
    S = 0 before it. q, k (B, N, G, K), v (B, N, H, V), H a multiple of G; g (B, N, H) or (B, N, H, K), the log of the
    decay; beta (B, N, H); scale: 1 / sqrt(K) if None. q and k are taken as they are: normalize them before. scheme:
    "states", "heads" (which takes any layout), "auto" for the cheaper one, or None for the one that goes with the
    sequence's own scheme (docs/design/recurrent_ranks.md); results are the same up to rounding. sequence, mask, layout,
    group, padding, errors: as in `causal_conv1d`. Returns out (B, N, H, V) of v's dtype; states and sums
    are in float32 (float64 for float64). Differentiable once.
    """
    op = "gated_delta_rule"
    with _checking(op, sequence, mask, layout, group, q, k, v, g, beta) as documents:
        if k.dim() != 4 or v.dim() != 4:
            raise InputError(f"k is {tuple(k.shape)}, v {tuple(v.shape)}; expected (B, N, G, K) and (B, N, H, V)")
        batch, num_tokens, num_heads, value_dim = v.size(0), _num_tokens(documents), v.size(2), v.size(3)
        num_key_heads, key_dim = k.shape[2:]
        by_channel = (key_dim,) if g.dim() == 4 else ()
        check_tensors(
            documents,
            {
                "v": (v, (batch, num_tokens, num_heads, value_dim)),
                "q": (q, (batch, num_tokens, num_key_heads, key_dim)),
                "k": (k, (batch, num_tokens, num_key_heads, key_dim)),
                "g": (g, (batch, num_tokens, num_heads, *by_channel)),
                "beta": (beta, (batch, num_tokens, num_heads)),
            },
        )
        _check_heads("v", v, "k", k, "q", q)
        scale = check_scale(key_dim**-0.5 if scale is None else scale, v.dtype)
        alone = num_key_heads == 1  # then the heads of v are parted, and q and k go to every part
        key_heads = None if alone else 2

        def compute(given: list[Tensor], seq_idx: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
            q, k, v, g, beta = given
            return computing_on(v.device).gated_delta_rule(q, k, v, g, beta, seq_idx, state, scale)  # type: ignore[no-any-return]

        terms = {"num_heads": num_heads, "num_key_heads": num_key_heads, "key_dim": key_dim, "value_dim": value_dim}
        recurrence = Recurrence(
            op,
            documents,
            _terms(v, documents) | terms | {"scale": scale, "decays a head": key_dim if by_channel else 1},
            compute,
            [Operand(q, heads=key_heads), Operand(k, heads=key_heads), Operand(v), Operand(g), Operand(beta)],
            Operand(v),
            (batch, num_heads, key_dim, value_dim),
            num_heads if alone else num_key_heads,
        )
        scheme = decide(recurrence, scheme)
    return run(recurrence, scheme)


@_public
def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    sequence: ShardedSequence | None = None,
    *,
    D: Tensor | None = None,
    scheme: str | None = None,
    mask: IntervalMask | None = None,
    layout: Layout | None = None,
    group: Group | None = None,
) -> Tensor:
    """Mamba-2's state space layer (arXiv:2405.21060).

    For each document: h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T; y_t = h_t C_t + D x_t, with h = 0 before it.
    x (B, N, H, V), dt (B, N, H) after its softplus, A (H) negative, B, C (B, N, G, K), H a multiple of G, D (H).
    scheme: as in `gated_delta_rule`. sequence, mask, layout, group, padding, errors: as in `causal_conv1d`. Returns y
    (B, N, H, V) of x's dtype; states and sums are in float32 (float64 for float64). Differentiable once.
    """
    op = "ssd"
    with _checking(op, sequence, mask, layout, group, x, dt, A, B, C, optional=D) as documents:
        if x.dim() != 4 or B.dim() != 4:
            raise InputError(f"x is {tuple(x.shape)}, B {tuple(B.shape)}; expected (B, N, H, V) and (B, N, G, K)")
        batch, num_tokens, num_heads, value_dim = x.size(0), _num_tokens(documents), x.size(2), x.size(3)
        num_groups, state_dim = B.shape[2:]
        check_tensors(
            documents,
            {
                "x": (x, (batch, num_tokens, num_heads, value_dim)),
                "dt": (dt, (batch, num_tokens, num_heads)),
                "A": (A, (num_heads,)),
                "B": (B, (batch, num_tokens, num_groups, state_dim)),
                "C": (C, (batch, num_tokens, num_groups, state_dim)),
                "D": (D, (num_heads,)),
            },
        )
        _check_heads("x", x, "B", B, "C", C)
        alone = num_groups == 1
        group_heads = None if alone else 2

        def compute(given: list[Tensor], seq_idx: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
            x, dt, A, B, C, *D = given
            return computing_on(x.device).ssd(x, dt, A, B, C, D[0] if D else None, seq_idx, state)  # type: ignore[no-any-return]

        operands = [Operand(x), Operand(dt), Operand(A, tokens=False, heads=0)]
        operands += [Operand(B, heads=group_heads), Operand(C, heads=group_heads)]
        operands += [] if D is None else [Operand(D, tokens=False, heads=0)]
        terms = {"num_heads": num_heads, "num_groups": num_groups, "head_dim": value_dim, "state_dim": state_dim}
        recurrence = Recurrence(
            op,
            documents,
            _terms(x, documents) | terms | {"D": "given" if D is not None else "none"},
            compute,
            operands,
            Operand(x),
            (batch, num_heads, value_dim, state_dim),
            num_heads if alone else num_groups,
        )
        scheme = decide(recurrence, scheme)
    return run(recurrence, scheme)


@_public
def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    sequence: ShardedSequence | None = None,
    *,
    D: Tensor | None = None,
    scheme: str | None = None,
    mask: IntervalMask | None = None,
    layout: Layout | None = None,
    group: Group | None = None,
) -> Tensor:
    """Mamba's selective scan (arXiv:2312.00752).

    For each document, and each channel of x with a state h of K numbers: h_t = exp(dt_t A) * h_{t-1} + dt_t x_t B_t;
    y_t = h_t C_t + D x_t, with h = 0 before it. x, dt (B, N, C), dt after its softplus, A (C, K) negative, B, C
    (B, N, K), D (C). Apply a gate outside: y * silu(z). scheme: as in `gated_delta_rule`; heads are groups of 64
    channels, or channels if they are no multiple of 64. sequence, mask, layout, group, padding, errors: as in
    `causal_conv1d`. Returns y (B, N, C) of x's dtype; states and sums are in float32 (float64 for float64).
    Differentiable once.
    """
    op = "selective_scan"
    with _checking(op, sequence, mask, layout, group, x, dt, A, B, C, optional=D) as documents:
        if x.dim() != 3 or B.dim() != 3:
            raise InputError(f"x is {tuple(x.shape)}, B {tuple(B.shape)}; expected (B, N, C) and (B, N, K)")
        batch, num_tokens, num_channels, state_dim = x.size(0), _num_tokens(documents), x.size(2), B.size(2)
        check_tensors(
            documents,
            {
                "x": (x, (batch, num_tokens, num_channels)),
                "dt": (dt, (batch, num_tokens, num_channels)),
                "A": (A, (num_channels, state_dim)),
                "B": (B, (batch, num_tokens, state_dim)),
                "C": (C, (batch, num_tokens, state_dim)),
                "D": (D, (num_channels,)),
            },
        )
        if num_channels < 1 or not 1 <= state_dim <= ops.MAX_HEAD_DIM:
            raise InputError(
                f"x has {num_channels} channels, B a state dim of {state_dim}; expected 1 or more, and "
                f"1..{ops.MAX_HEAD_DIM}"
            )
        _check_dtype("x", x, B=B, C=C)

        def compute(given: list[Tensor], seq_idx: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
            x, dt, A, B, C, *D = given
            return computing_on(x.device).selective_scan(x, dt, A, B, C, D[0] if D else None, seq_idx, state)  # type: ignore[no-any-return]

        operands = [Operand(x), Operand(dt), Operand(A, tokens=False, heads=0), Operand(B, heads=None)]
        operands += [Operand(C, heads=None)] + ([] if D is None else [Operand(D, tokens=False, heads=0)])
        terms = {"channels": num_channels, "state_dim": state_dim, "D": "given" if D is not None else "none"}
        recurrence = Recurrence(
            op,
            documents,
            _terms(x, documents) | terms,
            compute,
            operands,
            Operand(x),
            (batch, num_channels, state_dim),
            units_of_channels(num_channels),
        )
        scheme = decide(recurrence, scheme)
    return run(recurrence, scheme)


# ---- checks -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _checking(
    op: str, sequence: Any, mask: Any, layout: Any, group: Any, *tensors: Any, optional: Any = None
) -> Iterator[Documents]:
    """The documents of the call; any error here or in the body is told to the other ranks, who would wait."""
    try:
        for x in (*tensors, *([] if optional is None else [optional])):
            arguments.check_tensor("an argument", x)
        derivatives.check_once(op, *tensors, optional, vmap=False)
        check_given(op, sequence, mask, layout, group)
        if sequence is None:
            sequence = ShardedSequence.of(mask, layout, group)
        documents = Documents(sequence)
        _ = documents.facts.seq_idx  # refused here, where the other ranks are told
        yield documents
    except Exception as error:
        tell_others(op, error, sequence, layout, group)
        raise


def _num_tokens(documents: Documents) -> int:
    return documents.sequence.layout.local_len(documents.sequence.rank)


def _check_heads(name: str, x: Tensor, k_name: str, k: Tensor, q_name: str, q: Tensor) -> None:
    """InputError, before a message is sent, for what no kernel computes. x (B, N, H, V), k and q (B, N, G, K)."""
    num_heads, num_groups = x.size(2), k.size(2)
    if num_groups < 1 or num_heads < 1 or num_heads % num_groups:
        raise InputError(f"{name} has {num_heads} heads, {k_name} {num_groups}; expected a multiple")
    _check_dtype(name, x, **{k_name: k, q_name: q})
    for other, y in ((name, x), (k_name, k)):
        if not 1 <= y.size(3) <= ops.MAX_HEAD_DIM:
            raise InputError(f"{other} has head dim {y.size(3)}; expected 1..{ops.MAX_HEAD_DIM}")


def _check_dtype(name: str, x: Tensor, **others: Tensor) -> None:
    for other, y in others.items():
        if y.dtype != x.dtype:
            raise InputError(f"{other} has dtype {y.dtype} but {name} has {x.dtype}; cast them to one dtype")


def _terms(x: Tensor, documents: Documents) -> dict[str, HeaderValue]:
    return {"batch": x.size(0), "seq_len": documents.sequence.seq_len, "dtype": str(x.dtype)}
