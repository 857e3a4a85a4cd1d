"""`ringtile bench attention`: our kernels and torch's attention functions, taking turns in one process.

Shape letters: B batch, S tokens, H query heads, G kv heads, D head dim.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.bench.measure import (
    PASSES,
    Peak,
    Sampler,
    mean_sample,
    reset_resident_peak,
    resident_peak_bytes,
    take_turns,
    timed_passes,
)
from ringtile.bench.points import (
    Attend,
    Case,
    Entry,
    Found,
    Inputs,
    Measured,
    Point,
    check_kernel,
    flops_of,
    make_case,
    make_inputs,
    make_rows,
    shorter,
    why_skipped,
)
from ringtile.errors import RingtileError
from ringtile.mask import IntervalMask
from ringtile.ring import attention

MAX_ERROR_SEQ_LEN = 1024  # up to here the float64 result is computed too
WARM_UP_SEQ_LEN = 64


def ringtile_attend(case: Case) -> Attend:
    return lambda q, k, v: attention(q, k, v, mask=case.mask)


def torch_attend(case: Case) -> Attend | None:
    """SDPA that is told the mask by its own argument."""
    is_causal = case.is_causal
    return None if is_causal is None else lambda q, k, v: sdpa(q, k, v, is_causal=is_causal)


def torch_mask_attend(case: Case) -> Attend:
    """SDPA with a boolean mask, which is made once and not timed."""
    attend = bool_mask(case.mask)
    return lambda q, k, v: sdpa(q, k, v, attn_mask=attend)


def torch_per_document_attend(case: Case) -> Attend | None:
    """A causal SDPA for every document."""
    documents = case.documents
    if documents is None:
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = []
        for row in range(q.size(0)):
            spans = [slice(begin, end) for of_row, begin, end in documents if of_row == row]
            out = [sdpa(*(x[row : row + 1, span] for x in (q, k, v)), is_causal=True) for span in spans]
            rows.append(F.pad(torch.cat(out, dim=1), (0, 0, 0, 0, 0, q.size(1) - spans[-1].stop)))
        return torch.cat(rows)

    return attend


def flex_attend(case: Case) -> Attend:
    """flex_attention, compiled for this mask and shape; its block mask is made once and not timed."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # slow to import

    begin, end = (x.expand(case.mask.begin.size(0), -1) for x in (case.mask.begin, case.mask.end))

    def attends(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= begin[row, query]) & (key < end[row, query])

    seq_len = case.mask.seq_len
    block_mask = create_block_mask(attends, begin.size(0), None, seq_len, seq_len, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = compiled(q, k, v, block_mask=block_mask, enable_gqa=q.size(1) != k.size(1))
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    return attend


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """torch's scaled_dot_product_attention for our order of dimensions. attn_mask (B or 1, 1, S, S) bool."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.size(1) != k.size(1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, enable_gqa=gqa)
    return out.transpose(1, 2)


def bool_mask(mask: IntervalMask) -> Tensor:
    """bool (B or 1, 1, S, S), [query, key], True = attend."""
    keys = torch.arange(mask.seq_len)
    return ((keys >= mask.begin[:, :, None]) & (keys < mask.end[:, :, None]))[:, None]


class Provider(NamedTuple):
    """A way to compute attention. make: None for a case that it does not have."""

    make: Callable[[Case], Attend | None]
    backward: bool = True


PROVIDERS = {
    "ringtile": Provider(ringtile_attend),
    "torch": Provider(torch_attend),
    "torch_mask": Provider(torch_mask_attend),
    "torch_per_document": Provider(torch_per_document_attend),
    "flex": Provider(flex_attend, backward=False),  # it has none on a CPU
}


# ---- one point ----------------------------------------------------------------------------------


def measure(entries: Sequence[Entry], repeats: int) -> Iterator[Measured]:
    """Measures every entry, in their order."""
    for entry in entries:
        yield measure_entry(entry, repeats)


def measure_entry(entry: Entry, repeats: int) -> Measured:
    """The medians of `repeats` samples of every provider that has this case."""
    point = entry.point
    case = make_case(point.case, point.seq_len)
    inputs = make_inputs(point, case.mask.begin.size(0))
    exact = None
    if point.seq_len <= MAX_ERROR_SEQ_LEN:
        exact = results(torch_mask_attend(case), inputs.double(), True)
    peak = Peak()
    samplers: dict[str, Sampler] = {"peak": partial(mean_sample, peak.run)}
    found, skipped = {}, []
    for name in entry.providers:
        provider = PROVIDERS[name]
        try:
            attend = provider.make(case)
            if attend is None:
                continue
            first = results(attend, inputs, provider.backward)  # also warms it up
        except RingtileError:
            raise
        except Exception as error:  # whatever torch raises where a function of its is not supported
            skipped.append(why_skipped(name, point, error))
            continue
        memory = memory_of(name, point) if entry.memory and provider.backward else {}
        found[name] = Found({} if exact is None else max_errors(first, exact), memory)
        del first
        samplers[name] = partial(mean_sample, partial(timed_attention, attend, inputs, provider.backward))
    seconds = take_turns(samplers, repeats)
    peak_flops_per_s = peak.flops / seconds.pop("peak")["peak"].median
    return Measured(make_rows(point, case, seconds, peak_flops_per_s, found), skipped)


def timed_attention(attend: Attend, inputs: Inputs, backward: bool) -> dict[str, float]:
    """Seconds by pass. A forward whose backward follows keeps what that needs, as in training."""
    q, k, v, dout = inputs if backward else inputs.detached()
    grad = (lambda out: torch.autograd.grad(out, (q, k, v), dout)) if backward else None
    return timed_passes(lambda: attend(q, k, v), grad)


def results(attend: Attend, inputs: Inputs, backward: bool) -> tuple[Tensor, ...]:
    """out, and with backward dq, dk, dv."""
    q, k, v, dout = inputs if backward else inputs.detached()
    out = attend(q, k, v)
    return (out.detach(), *(torch.autograd.grad(out, (q, k, v), dout) if backward else ()))


def max_errors(got: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> dict[str, float]:
    """The largest absolute error of out, of the gradients, and of all, by pass."""
    errors = [float((mine.double() - right).abs().max()) for mine, right in zip(got, exact, strict=False)]
    if len(errors) == 1:
        return {"forward": errors[0]}
    return dict(zip(PASSES, (errors[0], max(errors[1:]), max(errors)), strict=True))


# ---- memory -------------------------------------------------------------------------------------


def memory_of(name: str, point: Point) -> dict[str, int]:
    """How far one forward and backward raise the memory of a fresh process, outputs included, in bytes by pass.

    Both the backward and the two together are counted from before the forward.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as process:
        return process.submit(_memory_of, name, point, torch.get_num_threads()).result()


def _memory_of(name: str, point: Point, num_threads: int) -> dict[str, int]:
    torch.set_num_threads(num_threads)
    growth: tuple[int, int] = (0, 0)
    for size in (shorter(point, WARM_UP_SEQ_LEN), point):  # the first loads what is loaded once
        case = make_case(size.case, size.seq_len)
        q, k, v, dout = make_inputs(size, case.mask.begin.size(0))
        attend = PROVIDERS[name].make(case)
        assert attend is not None  # the parent has run it
        reset_resident_peak()
        before = resident_peak_bytes()
        out = attend(q, k, v)
        forward = resident_peak_bytes() - before
        torch.autograd.grad(out, (q, k, v), dout)
        growth = (forward, resident_peak_bytes() - before)
    return dict(zip(PASSES, (growth[0], growth[1], growth[1]), strict=True))


# ---- what is measured ---------------------------------------------------------------------------


GRID: dict[str, tuple[str, ...] | tuple[int, ...]] = {
    "case": ("full", "causal", "window-1024", "documents-8", "padding"),
    "dtype": ("float32", "bfloat16"),
    "seq_len": (128, 512, 2048, 4096, 8192),
    "head_dim": (64, 128),
    "num_heads": (8,),
    "num_kv_heads": (8, 2),
    "world_size": (1,),
}


def check(point: Point) -> None:
    """Refuses what cannot be measured: ConfigError, InputError."""
    flops_of(point, make_case(point.case, point.seq_len).mask)
    check_kernel(point)


def quick_entries() -> Iterator[Entry]:
    """What docs/performance.md quotes."""
    for head_dim in (128, 64):
        yield Entry(Point("full", "float32", 2048, head_dim), ("ringtile", "torch"))
        yield Entry(Point("causal", "float32", 4096, head_dim), ("ringtile", "torch"), memory=head_dim == 128)
    yield Entry(Point("causal", "bfloat16", 4096, 128), ("ringtile", "torch"))
    yield Entry(Point("causal", "float32", 4096, 128, num_kv_heads=2), ("ringtile", "torch"))
    for dtype in ("float32", "bfloat16"):
        yield Entry(Point("causal", dtype, 512, 128), ("ringtile", "torch"))
        for case in ("full", "causal", "documents-2", "padding"):
            yield Entry(Point(case, dtype, 128, 128), ("ringtile", "torch", "torch_mask", "torch_per_document"))
    documents = ("ringtile", "torch_mask", "torch_per_document", "flex")
    yield Entry(Point("documents-8", "float32", 8192, 128), documents, memory=True)
    yield Entry(Point("window-1024", "float32", 8192, 64), ("ringtile", "torch_mask"))
