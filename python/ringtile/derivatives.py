"""Ops that autograd may differentiate once, in reverse: every other derivative of them is refused by name.

torch would go on in silence: forward-mode AD takes the derivative of an op that it does not know for 0, and torch's
`once_differentiable` says nothing where the incoming gradients need no gradient, though the gradients still depend on
the inputs.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from ringtile.errors import InputError, RefusedError

_requires_grad = operator.attrgetter("requires_grad")
_is_given = functools.partial(operator.is_not, None)


def check_once(op: str, *tensors: Tensor | None, vmap: bool = True) -> None:
    """RefusedError: forward-mode AD, or a transform of torch.func other than vmap, is to differentiate op by a tensor.

    vmap: whether op may run inside it. InputError: a tensor that autograd is to save was made in inference mode.
    """
    if is_compiling():
        if forward_ad._current_level >= 0:
            raise RefusedError(f"{op} inside forward-mode AD; expected first derivatives in reverse mode")
        return
    given: list[Any] = [*filter(_is_given, tensors)] if torch.is_grad_enabled() else []
    if any(map(_requires_grad, given)) and any(map(Tensor.is_inference, given)):
        raise InputError(
            f"{op} of tensors that require grad and of one made in inference mode, which autograd cannot save; make it "
            "under torch.no_grad(), or call .clone() outside of inference mode"
        )
    if forward_ad._current_level < 0 and maybe_current_level() is None:
        return
    if not vmap and maybe_current_level() is not None:
        raise RefusedError(f"{op} inside a transform of torch.func, such as vmap or grad; expected it outside of them")
    for x in tensors:
        if x is not None and (transform := _transform_of(x)):
            raise RefusedError(
                f"{op} inside {transform}; expected first derivatives in reverse mode: use torch.autograd.grad or "
                ".backward() outside of torch.func"
            )


def _transform_of(x: Tensor) -> str:
    """Return what differentiates by x besides autograd's reverse mode; "" if nothing does."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_gradtrackingtensor(x):  # of grad, vjp or jvp, at whatever depth
            return "torch.func (grad, vjp, jvp, jacrev, jacfwd, hessian, linearize)"
        x = functorch.get_unwrapped(x)
    # Inside of an op, whose call was checked, no tensor shows its tangent.
    if forward_ad._current_level < 0 or torch._C._dispatch_tls_is_dispatch_key_excluded("AutogradFunctionality"):
        return ""
    if forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        return "forward-mode AD (torch.func.jvp or torch.autograd.forward_ad)"
    return ""


# By an op's name: `Transport.propagate_errors`, where other ranks are to hear of an error.
PropagateErrors = Callable[[str], contextlib.AbstractContextManager[None]]


def gradients(
    op: str,
    compute: Callable[[], Iterable[Tensor | None]],
    *inputs: Tensor | None,
    propagate_errors: PropagateErrors = lambda op: contextlib.nullcontext(),
) -> tuple[Tensor | None, ...]:
    """compute(), the gradients that a backward of op returns; to differentiate them raises RefusedError.

    inputs: what the gradients depend on: the incoming gradients and the tensors saved by the forward. propagate_errors:
    around a refusal of which other ranks are to hear.
    """
    check_once(f"the backward of {op}", *inputs)
    if not torch.is_grad_enabled():  # autograd: create_graph=False
        return tuple(compute())
    with torch.no_grad():
        grads = tuple(compute())
    return _Refusing.apply(op, propagate_errors, len(grads), *grads, *inputs)  # type: ignore[no-any-return, no-untyped-call]


class _Refusing(torch.autograd.Function):
    """Gradients, in a graph that joins them to what they depend on."""

    @staticmethod
    def forward(
        ctx: Any, op: str, propagate_errors: PropagateErrors, num_grads: int, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.op, ctx.propagate_errors = op, propagate_errors
        return tensors[:num_grads]

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> None:
        with ctx.propagate_errors(f"the second derivative of {ctx.op}"):
            raise differentiated_again(ctx.op)


def differentiated_again(op: str) -> RefusedError:
    return RefusedError(
        f"the gradients of {op} were differentiated again (create_graph=True); expected first derivatives only"
    )
