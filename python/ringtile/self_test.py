"""The first use of a kernel on a device compares a small case with its definition; a kernel that differs is not used.

Once a process for each kernel, device and dtype (attention: head dims too). Ranks may so differ in who computes, and
then in the last bits of their own rows, but nothing that they exchange depends on it. RINGTILE_SELF_TEST=0 switches it
off: every kernel counts as right. `ringtile doctor` runs the same cases in children, where a kernel may hang or crash.

Here are the cases of the ops that torch operations can replace (torch_ops.py), whose definition these are in float64.
A result is rounded once, by half an eps of its dtype. Each term of a sum, and each step of an elementary function, is
off by an eps of the dtype that the kernel computes in, of a number as large as the largest result.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringtile import torch_ops

VARIABLE = "RINGTILE_SELF_TEST"
REPEATS = {"cpu": 1, "cuda": 500}  # of a case's few tokens
_FEW = 64  # roundings of elementary functions and products, whose factors may be a few times their largest result

logger = logging.getLogger(__name__)
failures: dict[object, str] = {}  # by kernel, device, dtype, ...: what is wrong with it, "" if nothing
_warned: set[tuple[object, str]] = set()
_lock = threading.RLock()
_thread = threading.local()  # .tests: it runs a test, which uses other kernels untested


@functools.cache
def is_on() -> bool:
    """Return whether kernels are checked."""
    return os.environ.get(VARIABLE) != "0"


def why_not(key: object, test: Callable[[], str]) -> str:
    """Return what is wrong with a kernel; "" if nothing is. test finds out, the first time.

    A CUDA graph that is being captured is not disturbed: what no earlier call has checked is used unchecked there.
    """
    known = failures.get(key)
    return _run_once(key, test) if known is None else known


def _run_once(key: object, test: Callable[[], str]) -> str:
    if not is_on() or torch.compiler.is_compiling() or hasattr(_thread, "tests"):
        return ""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return ""
    with _lock:
        if key not in failures:
            failures[key] = run(test)
        return failures[key]


def run(test: Callable[[], str]) -> str:
    """Return test(), or the error that it raises. A thread of its own has none of the caller's modes and hooks."""
    results: list[str | Exception] = []

    def target() -> None:
        _thread.tests = True
        try:
            results.append(test())
        except Exception as error:  # a library may raise anything
            results.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    (result,) = results
    if isinstance(result, torch.OutOfMemoryError):  # which says nothing of the kernel
        raise result
    return error_of(result) if isinstance(result, Exception) else result


def error_of(error: Exception) -> str:
    """Return what is wrong with a kernel that raises."""
    return f"raises {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def warn_once(kernel: str, where: str, reason: str, instead: str) -> None:
    """Say once a process that a kernel is not used, and what runs instead."""
    if (kernel, where) not in _warned:
        _warned.add((kernel, where))
        logger.warning(
            "%s is not used for %s: it %s. %s runs instead; please report this with the output of: ringtile doctor",
            *(kernel, where, reason, instead),
        )


def forget() -> None:
    """Reset all verdicts, as in a new process."""
    failures.clear()
    _warned.clear()
    is_on.cache_clear()


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Tensor:
    """Return numbers of a normal distribution, the same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(device, dtype)


def difference(what: str, got: Tensor, exact: Tensor, bound: Tensor) -> str:
    """Return how a result differs from its definition by more than the bound; "" if it does not. A NaN does."""
    off = (got.double() - exact).abs()
    if bool(((off <= bound) | (got.double() == exact)).all()):
        return ""
    worst = (off / bound).nan_to_num(torch.inf).argmax()
    most, much = (float(x.flatten()[worst]) for x in (bound.expand_as(off), off))
    return f"gives another {what} than its definition: off by {much:.1e}, rounding explains {most:.1e}"


def rounding(got: Tensor, exact: Tensor, num_terms: int) -> Tensor:
    """Return by how much a result may be off that is a sum of so many terms (the module's docstring)."""
    limits, e = torch.finfo(got.dtype), torch.finfo(torch.promote_types(got.dtype, torch.float32)).eps
    size = exact.abs().nan_to_num(posinf=0.0)
    return limits.eps / 2 * size + num_terms * e * (size.amax() if size.numel() else 0) + limits.tiny


# ---- ops that torch operations can replace ---------------------------------------------------------


class _Call(NamedTuple):
    op: str
    arguments: list[Any]
    num_terms: int  # of its sums; 0: the same bits
    unread: tuple[int, ...] = ()  # arguments that may hold any numbers afterwards


class _Make(NamedTuple):
    """Makes tensors of the dtype and device under test, of any bits where they are no numbers."""

    device: torch.device
    dtype: torch.dtype

    def __call__(self, seed: int, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        x = 1000 * normal(seed, *shape) if not (dtype or self.dtype).is_floating_point else normal(seed, *shape)
        return (x > 0 if self.dtype == torch.bool else x).to(self.device, dtype or self.dtype)

    @property
    def state(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


def of_op(name: str, ops: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Return what is wrong with one of CASES, of ringtile's ops; "" if nothing is."""
    for op, arguments, num_terms, unread in CASES[name](_Make(device, dtype), REPEATS[device.type]):
        ours, exact = (_copied(arguments, wide) for wide in (False, num_terms > 0))
        outputs = getattr(ops, op)(*ours), getattr(torch_ops, op)(*exact)
        every = zip(_tensors([outputs[0], *ours], unread), _tensors([outputs[1], *exact], unread), strict=True)
        for x, y in every:
            if num_terms == 0 and not torch.equal(x, y):
                return f"gives another tensor of {op} than its definition"
            if (
                num_terms
                and x.is_floating_point()
                and (reason := difference(op, x, y.double(), rounding(x, y.double(), num_terms)))
            ):
                return reason
    return ""


def _copied(x: Any, wide: bool) -> Any:
    if isinstance(x, list):
        return [_copied(each, wide) for each in x]
    if not isinstance(x, Tensor) or 0 in x.stride():  # the latter is not written to
        return x.double() if isinstance(x, Tensor) and wide else x
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
    return copy.double() if wide and x.is_floating_point() else copy


def _tensors(values: list[Any], unread: tuple[int, ...]) -> list[Tensor]:
    """Return all tensors; values: what an op returned, and then its arguments."""
    read = [x for i, x in enumerate(values, -1) if i not in unread]
    return [x for each in read for x in (each if isinstance(each, list) else [each]) if isinstance(x, Tensor)]


def _glu(t: _Make, n: int) -> list[_Call]:
    gate, up, dprod = (t(seed, 3 * n, 150)[:, :139] for seed in range(3))
    backward = [_Call("glu_bwd_", [gate, up, dprod, kind], _FEW) for kind in torch_ops.ACTIVATIONS]
    return backward + [_Call("glu_fwd", [gate, up, kind], _FEW) for kind in torch_ops.ACTIVATIONS]


def _loss(t: _Make, n: int) -> list[_Call]:
    """One token is ignored."""
    logits, labels = 3 * t(0, 5 * n, 320)[:, :301], torch.tensor([0, 300, -100, 17, 150] * n).to(t.device)
    given = [logits, labels, *(torch.zeros(5 * n, dtype=t.state, device=t.device) for _ in range(2))]
    options = (-100, 0.0, 0.0, 0.0, True), (-100, 0.1, 5.0, 0.01, True)
    return [_Call("cross_entropy_fwd_bwd_", [*given, *each], 8 * 301) for each in options]


def _rows(t: _Make, n: int) -> list[_Call]:
    """Return calls on rows of strided tensors, and of tensors with rows of two sizes."""
    runs = torch.tensor([[8 * n, 1, 0, 3 * n], [1, 2, 3 * n, 4 * n]], device="cpu")
    wholes = [t(seed, 13 * n, 2, 3 + seed).transpose(0, 1) for seed in range(2)]
    shards = [t(seed + 2, 2, 7 * n, 3 + seed) for seed in range(2)]
    ops = ["rows_pack_", "rows_unpack_"] + ["rows_add_"] * (t.dtype in (torch.float32, torch.float64))
    return [_Call(op, [wholes, runs, 1, shards], 0) for op in ops]


def _delta(t: _Make, n: int) -> list[_Call]:
    """Return a call of delta, one gradient for two heads."""
    dout, out = t(0, 2, 9 * n, 1, 70).expand(-1, -1, 2, -1), t(1, 2, 9 * n, 2, 70)
    return [_Call("attn_delta", [dout, out, t(2, 2, 2, 9 * n, dtype=torch.float64)], 72)]


def _merge(t: _Make, n: int) -> list[_Call]:
    """Return merges of rows, rounded or not, into sums or none; one has no weight, and one no key before."""
    part, part_lse = t(0, 1, 9 * n, 2, 83)[..., :70], t(1, 1, 2, 9 * n, dtype=t.state)
    out, lse = t(2, 2, 9 * n, 2, 70, dtype=t.state), t(3, 2, 2, 9 * n, dtype=torch.float64)
    part_lse[..., 0], lse[0, :, 3] = torch.inf, -torch.inf
    given, rows = [part, part_lse, out, lse], torch.arange(1, 18 * n, 2).to(t.device)
    return [
        _Call("attn_merge_", [*given, False, 1, rows, None], 8),
        _Call("attn_merge_", [*given, False, 1, None, torch.zeros(out.shape, dtype=t.dtype, device=t.device)], 8, (2,)),
        _Call("attn_merge_", [*given, True, 1, None, None], 8),
    ]


def _weight_grad(t: _Make, n: int) -> list[_Call]:
    """Return a call of an odd number of tokens, on a CPU."""
    given = t(0, 37 * n, 150)[:, :139], t(1, 37 * n, 99)[:, :83], t(2, 139, 90, dtype=t.state)[:, :83]
    return [_Call("weight_grad_add_", [*given], 38 * n)] if t.device.type == "cpu" else []


CASES = {"GLU": _glu, "loss": _loss, "rows": _rows, "delta": _delta, "merge": _merge, "weight gradient": _weight_grad}
