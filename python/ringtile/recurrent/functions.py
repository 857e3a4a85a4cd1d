"""Causal convolution, gated delta rule, Mamba and Mamba-2 over a sequence sharded over the ranks of a group.

The public functions, and every check of their arguments. What travels is in state_passing.py and heads.py, who computes
the tokens of one rank in choose.py.

Shape letters: B batch, N local tokens, C channels, W width, H heads, G heads of q and k (or groups of B and C), K key
dim (or state dim), V value dim.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from ringtile import arguments, derivatives, ops
from ringtile.errors import InputError, shown
from ringtile.recurrent.carried import running_chunk
from ringtile.recurrent.choose import function_for
from ringtile.recurrent.documents import Documents
from ringtile.recurrent.recurrence import Operand, Recurrence
from ringtile.recurrent.schemes import decide, run
from ringtile.recurrent.shares import groups_of_channels
from ringtile.recurrent.state_passing import Halos
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence, check_given, refuse
from ringtile.transport.agreement import HeaderValue
from ringtile.transport.groups import Group

# Of each tensor, a letter for each dim. The output is shaped as the first one; its third dim is that of the heads.
_DIMS = {
    "causal_conv1d": {"x": "BNC", "weight": "CW", "bias": "C"},
    "gated_delta_rule": {"v": "BNHV", "q": "BNGK", "k": "BNGK", "g": "BNH or BNHK", "beta": "BNH"},
    "ssd": {"x": "BNHV", "B": "BNGK", "C": "BNGK", "dt": "BNH", "A": "H", "D": "H"},
    "selective_scan": {"x": "BNC", "B": "BNK", "C": "BNK", "dt": "BNC", "A": "CK", "D": "C"},
}
_OPTIONAL = ("bias", "D")
_OF_ONE_DTYPE = ("q", "k", "B", "C")  # that of the first tensor
_STATE = {"gated_delta_rule": "BHKV", "ssd": "BHVK", "selective_scan": "BCK"}
_Given = tuple[Any, Any, Any, Any]  # sequence, mask, layout, group

_P = ParamSpec("_P")
PUBLIC: set[Callable[..., Tensor]] = set()  # the functions of this module


def _public(function: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """Let function modes see the call, such as that of `context_parallel`, which knows the sequence."""

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
    scheme: str | None = None,
    mask: IntervalMask | None = None,
    layout: Layout | None = None,
    group: Group | None = None,
) -> Tensor:
    """Convolve each channel with the W - 1 tokens before, of the same document or path of a tree.

    Depthwise and causal, as in Mamba (arXiv:2312.00752).

    - x (B, N, C): the local tokens. weight (C, W), weight[:, W - 1] for the token itself; W of 2..8. bias (C).
    - activation: "" or "silu".
    - scheme: None for "states", where the W - 1 tokens before a rank's own travel; "heads", where all do, takes any
      layout, and gradients are the same bits as on one rank.
    - sequence, or mask, layout and group: as in `ring_attention`, the same on every rank. The mask holds causal
      documents or trees; the layout has runs of neighboring tokens. Inside `context_parallel` the block has them.

    Returns y (B, N, C) of x's dtype, computed in float32 (float64 for float64). Padding, the tokens that do not attend
    themselves, has output and gradient 0. Differentiable once.

    Raises InputError, RefusedError (another mask or layout), RingMismatchError, PeerLostError.
    """
    op, tensors = "causal_conv1d", {"x": x, "weight": weight, "bias": bias}
    with _checking(op, tensors, (sequence, mask, layout, group)) as documents:
        _, sizes = _check_tensors(op, tensors, documents)
        if not 2 <= sizes["W"] <= ops.MAX_CONV_WIDTH:
            raise InputError(f"weight is {tuple(weight.shape)}; expected a width of 2..{ops.MAX_CONV_WIDTH}")
        if activation not in ("", "silu"):
            raise InputError(f"activation is {shown(activation)}; expected '' or 'silu'")
        kernel, options = function_for(op, x, sizes["W"]), {"activation": activation}

        def function(x: Tensor, weight: Tensor, bias: Tensor | None = None, **given: Any) -> tuple[Tensor, Tensor]:
            return kernel(x, weight, bias, **given)

        operands = [
            Operand(name, y, name == "x", 2 if name == "x" else 0) for name, y in tensors.items() if y is not None
        ]
        terms = {**_terms(x, documents, sizes), **options}
        recurrence = Recurrence(op, documents, terms, options, operands, operands[0], function, (), sizes["C"])
        decided = decide(recurrence, scheme or "states")

    def of_all(x: Tensor, *weights: Tensor) -> Tensor:
        stretches = documents.stretches if decided == "states" else ()
        if decided == "heads" or (documents.sequence.world_size == 1 and len(stretches) == 1):
            return run(recurrence.of([x, *weights]), decided)
        x, halo_of_stretch = Halos(op, documents, terms, sizes["W"] - 1).of(x)
        outs = {
            stretch.begin: recurrence.compute([x[:, stretch.tokens], *weights], stretch, halo)[0]
            for stretch, halo in zip(stretches, halo_of_stretch, strict=True)
        }
        return torch.cat([outs[begin] for begin in sorted(outs)], dim=1)

    return _run(recurrence, of_all)


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
    """Compute the gated delta rule (arXiv:2412.06464), or Kimi delta attention (arXiv:2510.26692).

    For each document: S_t = diag(exp g_t) S_{t-1}; S_t += k_t beta_t (v_t - k_t^T S_t)^T; out_t = scale q_t^T S_t, with
    S = 0 before it.

    - q, k (B, N, G, K), v (B, N, H, V), H a multiple of G. q and k are taken as they are: normalize them before.
    - g (B, N, H), of Kimi delta attention (B, N, H, K): the log of the decay. beta (B, N, H).
    - scale: 1 / sqrt(K) if None.
    - scheme: "states", "heads" (which takes any layout), "auto" for states where the layout lets them follow, or None
      for the one that goes with the sequence's own scheme (docs/design/recurrent_ranks.md); results are the same up to
      rounding.
    - sequence, mask, layout, group: as in `causal_conv1d`, and so are padding and errors.

    Returns out (B, N, H, V) of v's dtype; states and sums are in float32 (float64 for float64). Differentiable once.
    """
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    options = {"scale": scale}
    return _recurrence("gated_delta_rule", tensors, (sequence, mask, layout, group), scheme, options)


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
    """Compute Mamba-2's state space layer (arXiv:2405.21060).

    For each document: h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T; y_t = h_t C_t + D x_t, with h = 0 before it.
    x (B, N, H, V), dt (B, N, H) after its softplus, A (H) negative, B, C (B, N, G, K), H a multiple of G, D (H).
    scheme: as in `gated_delta_rule`. sequence, mask, layout, group, padding, errors: as in `causal_conv1d`. Returns y
    (B, N, H, V) of x's dtype; states and sums are in float32 (float64 for float64). Differentiable once.
    """
    tensors = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D}
    return _recurrence("ssd", tensors, (sequence, mask, layout, group), scheme, {})


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
    """Compute Mamba's selective scan (arXiv:2312.00752).

    For each document, and each channel of x with a state h of K numbers: h_t = exp(dt_t A) * h_{t-1} + dt_t x_t B_t;
    y_t = h_t C_t + D x_t, with h = 0 before it. x, dt (B, N, C), dt after its softplus, A (C, K) negative, B, C
    (B, N, K), D (C). Apply a gate outside: y * silu(z). scheme: as in `gated_delta_rule`; heads are groups of 64
    channels, or channels if they are no multiple of 64. sequence, mask, layout, group, padding, errors: as in
    `causal_conv1d`. Returns y (B, N, C) of x's dtype; states and sums are in float32 (float64 for float64).
    Differentiable once.
    """
    tensors = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D}
    return _recurrence("selective_scan", tensors, (sequence, mask, layout, group), scheme, {})


def _recurrence(
    op: str, tensors: Mapping[str, Tensor | None], given: _Given, scheme: str | None, options: dict[str, Any]
) -> Tensor:
    with _checking(op, tensors, given) as documents:
        dims, sizes = _check_tensors(op, tensors, documents)
        _check_heads(op, sizes)
        first = tensors[next(iter(dims))]
        assert first is not None
        if "scale" in options:
            options["scale"] = _check_scale(options["scale"], sizes["K"], first.dtype)
        shared = sizes.get("G") == 1  # then the heads of v (x) are split, and q and k (B and C) go with every share
        letters = ("H", "C") if shared else ("H", "C", "G")
        operands = {
            name: Operand(name, x, "N" in of, next((i for i, letter in enumerate(of) if letter in letters), None))
            for name, of in dims.items()
            if (x := tensors[name]) is not None
        }
        recurrence = Recurrence(
            op,
            documents,
            {**_terms(first, documents, sizes), **options, "inputs": ", ".join(f"{n} {dims[n]}" for n in operands)},
            options,
            list(operands.values()),
            operands[next(iter(dims))],
            function_for(op, first, sizes["K"], dims.get("g") == "BNHK"),
            tuple(sizes[letter] for letter in _STATE[op]),
            groups_of_channels(sizes["C"]) if "C" in sizes else sizes["H" if shared else "G"],
        )
        decided = decide(recurrence, scheme)

    return _run(recurrence, lambda *tensors: run(recurrence.of(tensors), decided))


def _run(recurrence: Recurrence, of_all: Callable[..., Tensor]) -> Tensor:
    """of_all(*tensors of all tokens of this rank), or what it gives on the chunk that a layer runs on now."""
    chunk = running_chunk()
    return of_all(*recurrence.tensors) if chunk is None else chunk.compute(recurrence, of_all)


# ---- checks -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _checking(op: str, tensors: Mapping[str, Tensor | None], given: _Given) -> Iterator[Documents]:
    """Yield the documents of the call; any error here or in the body is told to the other ranks, who would wait."""
    sequence, mask, layout, group = given
    try:
        for name, x in tensors.items():
            if x is not None or name not in _OPTIONAL:
                arguments.check_tensor(name, x)
        derivatives.check_once(op, *tensors.values(), vmap=False)
        check_given(op, sequence, mask, layout, group)
        if sequence is None:
            sequence = ShardedSequence.of(mask, layout, group)
        documents = Documents(sequence)
        _ = documents.facts.forest  # refused here, where the other ranks are told
        yield documents
    except Exception as error:
        refuse(op, error, sequence, layout, group)
        raise


def _check_tensors(
    op: str, tensors: Mapping[str, Tensor | None], documents: Documents
) -> tuple[dict[str, str], dict[str, int]]:
    """Return the dims of each tensor, and the size of each letter. InputError for other tensors than _DIMS says."""
    sequence, chunk = documents.sequence, running_chunk()
    num_tokens = sequence.local_len if chunk is None else chunk.tokens.stop - chunk.tokens.start
    dims, sizes = {}, {"N": num_tokens}
    first_name = next(iter(_DIMS[op]))
    first = tensors[first_name]
    assert first is not None
    for name, text in _DIMS[op].items():
        x = tensors[name]
        if x is None:
            continue
        if x.dtype not in ops.FLOAT_DTYPES:
            raise InputError(f"{name} is {x.dtype}; expected one of {', '.join(map(str, ops.FLOAT_DTYPES))}")
        options = text.split(" or ")
        dims[name] = next((option for option in options if len(option) == x.dim()), "")
        wanted = [sizes.setdefault(letter, size) for letter, size in zip(dims[name], x.shape, strict=False)]
        if not dims[name] or list(x.shape) != wanted:
            numbers = [[str(sizes.get(letter, letter)) for letter in option] for option in options]
            expected, letters = (" or ".join(f"({', '.join(of)})" for of in either) for either in (numbers, options))
            raise InputError(f"{name} is {tuple(x.shape)}; expected {expected}: {letters}")
        if name in _OF_ONE_DTYPE and x.dtype != first.dtype:
            raise InputError(f"{name} has dtype {x.dtype} but {first_name} has {first.dtype}; cast them to one dtype")
        arguments.check_devices(first_name, first, **{name: x})
    sequence.check_call(first_name, first)
    return dims, sizes


def _check_heads(op: str, sizes: Mapping[str, int]) -> None:
    """InputError for numbers of heads, and for dims, that no kernel computes."""
    heads, groups = sizes.get("H", 1), sizes.get("G", 1)
    v, k = ("v", "q and k") if op == "gated_delta_rule" else ("x", "B and C")
    if heads < 1 or groups < 1 or heads % groups:
        raise InputError(f"{v} has {heads} heads, {k} {groups}; expected a positive multiple")
    if sizes.get("C", 1) < 1:
        raise InputError("x has 0 channels; expected 1 or more")
    for name, letter in ((v, "V"), (k, "K")):
        if not 1 <= sizes.get(letter, 1) <= ops.MAX_HEAD_DIM:
            raise InputError(f"{letter}, the last dim of {name}, is {sizes[letter]}; expected 1..{ops.MAX_HEAD_DIM}")


def _check_scale(scale: Any, key_dim: int, dtype: torch.dtype) -> float:
    """Return the scale, 1 / sqrt(key_dim) for None. InputError: no arithmetic for the dtype holds the number."""
    number = arguments.check_number("scale", key_dim**-0.5 if scale is None else scale)
    state = ops.state_dtype(dtype)
    if not abs(number) <= torch.finfo(state).max:
        raise InputError(f"scale is {number}; expected a finite number of {state}")
    return number


def _terms(x: Tensor, documents: Documents, sizes: Mapping[str, int]) -> dict[str, HeaderValue]:
    own = {f"size {letter}": size for letter, size in sizes.items() if letter not in "BN"}  # N is of this rank alone
    return {"batch": x.size(0), "seq_len": documents.sequence.seq_len, "dtype": str(x.dtype), **own}
