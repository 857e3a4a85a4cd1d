"""The compiled recurrences and their convolution over the tokens of one device, differentiable once.

    gated_delta_rule   S = diag(exp g) S;  u = beta (v - S^T k);  S += k u^T;  out = scale S^T q   (arXiv:2412.06464)
    ssd                S = exp(dt A) S + dt B x^T;  y = S^T C + D x                                (arXiv:2405.21060)
    selective_scan     S = exp(dt A) S + dt B x;  y = S C + D x, of each channel       (arXiv:2312.00752)
    causal_conv1d      y = act(bias + sum over i of weight[i] x_(t - width + 1 + i))

seq_idx, int32 (B or 1, N), on the CPU: each token's document, as in mamba_ssm and causal_conv1d. Neighboring tokens of
one number are of one document, and no other reaches them. A first document 0 goes on from the initial state, all others
start from 0. Negative: padding, which is skipped: its numbers are not read, its output and gradients are 0. The final
state is that after the last token. States are float32, or float64 for float64.

Shape letters: B batch, N tokens, H heads, G heads of q and k (of B and C; H is a multiple), K and V their dims, C
channels, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringtile import arguments, derivatives, ops, self_test
from ringtile.errors import RefusedError
from ringtile.recurrent import self_test as recurrent_self_test

_ops = torch.ops.ringtile


# ---- self-test ---------------------------------------------------------------------------------

KERNELS = {"delta": "gated delta rule", "kda": "KDA", "ssd": "SSD", "selective": "selective scan"}
KERNELS["convolution"] = "causal convolution"
_OPS = {"ssd": "ssd", "selective": "selective_scan", "convolution": "causal_conv1d"}


def why_not_kernel(name: str, dtype: torch.dtype) -> str:
    """Return what is wrong with one of KERNELS on the CPU, "" if nothing is. Found out once a process."""
    op = _OPS.get(name, "gated_delta_rule")
    given = globals()[op], op, dtype, torch.device("cpu"), (4 if name == "convolution" else 5, 3), name == "kda", False
    return self_test.why_not((KERNELS[name], dtype), lambda: recurrent_self_test.failure(*given))


def _check_kernel(name: str, x: Tensor) -> None:
    """Raise RefusedError where a kernel for tensors such as x is wrong."""
    if torch.compiler.is_compiling() or x.device.type == "meta":
        return
    if reason := why_not_kernel(name, x.dtype):
        raise RefusedError(
            f"ringtile's {KERNELS[name]} kernel cannot be used for {x.dtype}: it {reason}; try "
            "RINGTILE_CPU_ISA=generic, and report this with the output of: ringtile doctor"
        )


# ---- the functions: functions.py has checked the tensors ----------------------------------------


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, seq_idx: Tensor, initial_state: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """Convolve x (B, N, C) with weight (C, W), causal and depthwise, and add bias (C).

    initial_state (B, W - 1, C): the inputs before the first token, 0 if None. activation: "" or "silu". Returns y
    (B, N, C) of x's dtype, and the last W - 1 inputs of the last document, 0 before its start.
    """
    _check_kernel("convolution", x)
    state = ops.state_dtype(x.dtype)
    tensors = (_as(state, weight), _as(state, bias), seq_idx.contiguous(), _as(state, initial_state))
    y, final_state = _ops.causal_conv1d(_unit_last_stride(x), *tensors, activation == "silu")
    return y, final_state


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    seq_idx: Tensor,
    initial_state: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule of q, k (B, N, G, K) and v (B, N, H, V), with g <= 0 and beta (B, N, H).

    g (B, N, H), or (B, N, H, K) for a decay of each channel (KDA). initial_state (B, H, K, V), 0 if None. Returns out
    (B, N, H, V) of v's dtype and the final state.
    """
    _check_kernel("kda" if g.dim() == 4 else "delta", v)
    state = ops.state_dtype(v.dtype)
    rows = [_unit_last_stride(x) for x in (q, k, v)]
    given = (*rows, _as(state, g), _as(state, beta), None, None, seq_idx.contiguous(), _as(state, initial_state))
    out, final_state, _ = _ops.scan(*given, scale, _keeps(given))
    return out, final_state


def ssd(
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
    """Compute Mamba-2's scan of x (B, N, H, V) with B and C (B, N, G, K), A (H) < 0, D (H).

    dt (B, N, H) after its softplus. initial_state (B, H, V, K), 0 if None. Returns y (B, N, H, V) of x's dtype and the
    final state.
    """
    _check_kernel("ssd", x)
    state = ops.state_dtype(x.dtype)
    dt = _as(state, dt)
    # Padding may hold anything, which autograd would multiply by its gradient of 0.
    is_padding = (seq_idx < 0)[..., None].to(dt.device)  # or on meta, as the tensors
    g = torch.where(is_padding, 0, dt) * A.to(state)
    rows = [_unit_last_stride(x) for x in (C, B, x)]
    before = None if initial_state is None else _as(state, initial_state.mT)
    given = (*rows, g.contiguous(), None, dt, _as(state, D), seq_idx.contiguous(), before)
    y, final_state, _ = _ops.scan(*given, 1.0, _keeps(given))
    return y, final_state.mT


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
    """Compute Mamba's scan of x (B, N, C) with B and C (B, N, K), A (C, K) < 0, D (C).

    dt (B, N, C) after its softplus. initial_state (B, C, K), 0 if None. Returns y (B, N, C) of x's dtype and the final
    state.
    """
    _check_kernel("selective", x)
    state = ops.state_dtype(x.dtype)
    before = None if initial_state is None else _as(state, initial_state.mT)
    x, B, C = (_unit_last_stride(x) for x in (x, B, C))
    given = (x, _as(state, dt), _as(state, A.mT), B, C, _as(state, D), seq_idx.contiguous(), before)
    y, final_state, _ = _ops.selective_scan(*given, _keeps(given))
    return y, final_state.mT


def _keeps(given: tuple[Tensor | None, ...]) -> bool:
    """Return whether a backward will follow, which needs the states between chunks."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)


def _as(dtype: torch.dtype, x: Tensor | None) -> Any:
    """x in that dtype, contiguous; None for None."""
    return None if x is None else x.to(dtype).contiguous()


def _unit_last_stride(x: Tensor) -> Tensor:
    return x if x.size(-1) < 2 or x.stride(-1) == 1 else x.contiguous()


# ---- the ops: shapes and derivatives ------------------------------------------------------------


def _num_states(num_tokens: int) -> int:
    return (num_tokens - 1) // ops.CHUNK_TOKENS if num_tokens else 0


_Fake = TypeVar("_Fake", bound=Callable[..., Any])


def _register_fake(op: str) -> Callable[[_Fake], _Fake]:
    """Register the fake kernel of an op. A call with one tensor on meta comes to it too: InputError."""

    def register(fake: _Fake) -> _Fake:
        def checked(*given: Any) -> Any:
            tensors = (x for x in given if isinstance(x, Tensor))
            first, *others = (x for x in tensors if x.is_floating_point() or x.is_meta)  # seq_idx may be on the host
            arguments.check_devices("an argument", first, **{f"argument {i}": x for i, x in enumerate(others)})
            return fake(*given)

        torch.library.register_fake(f"ringtile::{op}", checked)
        return fake

    return register


@_register_fake("scan")
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, num_tokens, num_heads, v_dim = v.shape
    state, keep = (q.size(3), v_dim), others[-1]
    kept = (batch, num_heads, _num_states(num_tokens) if keep else 0, *state)
    return v.new_empty(v.shape), g.new_empty(batch, num_heads, *state), g.new_empty(kept)


@_register_fake("scan_backward")
def _(dout: Tensor, dfinal_state: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    q, k, v, g, beta, dt, D = inputs[:7]
    batch, num_tokens, num_heads, v_dim = v.shape
    has_factor = beta is not None or dt is not None
    shapes = [q.shape, k.shape, v.shape, g.shape]
    shapes += [torch.Size([batch, num_tokens, num_heads if has else 0]) for has in (has_factor, D is not None)]
    shapes.append(torch.Size([batch, num_heads, q.size(3), v_dim]))
    return tuple(g.new_empty(shape) for shape in shapes)


@_register_fake("selective_scan")
def _(x: Tensor, dt: Tensor, A: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, num_tokens, _ = x.shape
    kept = A.new_empty(batch, _num_states(num_tokens) if others[-1] else 0, *A.shape)
    return x.new_empty(x.shape), A.new_empty(batch, *A.shape), kept


@_register_fake("selective_scan_backward")
def _(dout: Tensor, dfinal_state: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    x, dt, A, B, C, D = inputs[:6]
    shapes = [x.shape, dt.shape, A.shape, B.shape, C.shape]
    shapes += [torch.Size([0 if D is None else x.size(2)]), torch.Size([x.size(0), *A.shape])]
    return tuple(A.new_empty(shape) for shape in shapes)


@_register_fake("causal_conv1d")
def _(x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(x.size(0), weight.size(1) - 1, x.size(2))


@_register_fake("causal_conv1d_backward")
def _(dy: Tensor, dfinal_state: Tensor | None, x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, ...]:
    dbias = weight.new_empty(0 if others[0] is None else x.size(2))
    dinitial = weight.new_empty(x.size(0), weight.size(1) - 1, x.size(2))
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias, dinitial


def _register_autograd(
    op: str,
    name: str,
    num_tensors: int,
    num_options: int = 0,
    out_like: int = 0,
    in_order: Callable[..., tuple[Tensor, ...]] = lambda *gradients: gradients,
) -> None:
    """Register how an op is differentiated, once.

    It takes so many tensors, of which the last two are seq_idx and the initial state, then options, of which its
    backward takes the first num_options; it returns out, which is like the tensor out_like, the final state, and what
    else its backward takes. in_order(*what the backward returns): a gradient for each tensor but seq_idx.
    name: in errors.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options = inputs[num_tensors:]
        ctx.save_for_backward(*inputs[:num_tensors], *output[2:])
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)

    def backward(
        ctx: Any, dout: Tensor | None, dfinal_state: Tensor | None, *others: None
    ) -> tuple[Tensor | None, ...]:
        derivatives.check_once(f"the backward of {name}", dout, dfinal_state)
        saved = ctx.saved_tensors
        out = saved[out_like]
        dout = out.new_zeros(out.shape) if dout is None else _unit_last_stride(dout)
        dfinal_state = None if dfinal_state is None else dfinal_state.contiguous()
        backward_of = getattr(_ops, f"{op}_backward")
        found = in_order(*backward_of(dout, dfinal_state, *saved, *ctx.options[:num_options]))
        gradients = zip(saved, (*found[:-1], None, found[-1]), strict=False)
        return (
            *(None if x is None or dx is None else dx.to(x.dtype) for x, dx in gradients),
            *(None for _ in ctx.options),
        )

    def refuse(ctx: Any, *gradients: Tensor) -> None:
        raise derivatives.differentiated_again(name)

    torch.library.register_autograd(f"ringtile::{op}", backward, setup_context=setup)
    torch.library.register_autograd(f"ringtile::{op}_backward", refuse)


_register_autograd(
    *("scan", "gated_delta_rule or ssd", 9, 1, 2),
    # of q, k, v, g, the factor (beta or dt, whichever is given), and of D for each token
    lambda dq, dk, dv, dg, dfactor, dD, dinitial: (dq, dk, dv, dg, dfactor, dfactor, dD.sum((0, 1)), dinitial),
)
_register_autograd("selective_scan", "selective_scan", 8)
_register_autograd("causal_conv1d", "causal_conv1d", 5, 1)
