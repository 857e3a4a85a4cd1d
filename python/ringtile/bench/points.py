"""What is measured: the masks, sizes and inputs of attention, its flops and bytes, and the rows of any result.

Shape letters: B batch, S tokens, H query heads, G kv heads, D head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringtile import ops
from ringtile.bench.measure import PASSES, Summary
from ringtile.errors import ConfigError
from ringtile.layout import Layout
from ringtile.mask import IntervalMask
from ringtile.plan import plan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

Row = dict[str, Any]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q (B, S, H, D), k, v (B, S, G, D) -> out (B, S, H, D)


@dataclass(frozen=True)
class Point:
    """One mask at one size of attention."""

    case: str
    dtype: str
    seq_len: int
    head_dim: int
    num_heads: int = 8
    num_kv_heads: int = 8
    world_size: int = 1
    device: str = "cpu"


class Entry(NamedTuple):
    """What to measure at one point of a subject. memory: also each provider's memory, in a process of its own."""

    point: Any
    providers: tuple[str, ...]
    memory: bool = False


class Case(NamedTuple):
    """A mask, and the shorter ways in which other attention functions can be told of it."""

    mask: IntervalMask
    is_causal: bool | None  # the mask as that argument of torch's; None: it cannot be said so
    documents: tuple[tuple[int, int, int], ...] | None  # (row, begin, end) of causal documents, if it is made of them


def make_case(name: str, seq_len: int) -> Case:
    """The mask of that name. ConfigError: there is none."""
    family, _, text = name.partition("-")
    number = int(text) if text.isdecimal() and int(text) > 0 else 0
    if name == "full":
        return Case(IntervalMask.full(seq_len), False, None)
    if name == "causal":
        return Case(IntervalMask.causal(seq_len), True, None)
    if name == "padding":  # two rows, the second half empty
        num_tokens = (seq_len, (seq_len + 1) // 2)
        attention_mask = torch.arange(seq_len) < torch.tensor(num_tokens)[:, None]
        spans = tuple((row, 0, end) for row, end in enumerate(num_tokens))
        return Case(IntervalMask.from_padding(attention_mask.int()), None, spans)
    if family == "window" and number:
        return Case(IntervalMask.sliding_window(seq_len, number), None, None)
    if family == "documents" and 0 < number <= seq_len:
        bounds = [seq_len * i // number for i in range(number + 1)]
        lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
        return Case(IntervalMask.documents(lengths), None, tuple((0, *span) for span in itertools.pairwise(bounds)))
    raise ConfigError(
        f"case is {name!r} at {seq_len} tokens; expected full, causal, padding, window-TOKENS, or documents-COUNT with "
        "at most a document a token"
    )


class Inputs(NamedTuple):
    """Leaves q (B, S, H, D), k, v (B, S, G, D), and the gradient of out, dout (B, S, H, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def detached(self) -> Inputs:
        """The same numbers, for a forward alone."""
        return Inputs(*(x.detach() for x in self))

    def double(self) -> Inputs:
        """The same numbers in float64, in a graph of their own."""
        return leaves(x.detach().double() for x in self)


def make_inputs(point: Point) -> Inputs:
    """Normal random numbers, the same at every call; B is the rows of the point's mask."""
    batch = make_case(point.case, point.seq_len).mask.begin.size(0)
    generator = torch.Generator().manual_seed(0)
    heads = (point.num_heads, point.num_kv_heads, point.num_kv_heads, point.num_heads)
    shapes = [(batch, point.seq_len, count, point.head_dim) for count in heads]
    numbers = (torch.randn(shape, generator=generator) for shape in shapes)
    return leaves(x.to(point.device, DTYPES[point.dtype]) for x in numbers)


def leaves(tensors: Iterable[Tensor]) -> Inputs:
    """q, k, v that gradients are asked for, and dout."""
    q, k, v, dout = tensors
    return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)


def check_sizes(cases: Sequence[str], point: Any) -> None:
    """Refuses a case that is none of these, and sizes below 1: ConfigError."""
    if point.case not in cases:
        raise ConfigError(f"case is {point.case!r}; expected one of {', '.join(cases)}")
    for name, value in vars(point).items():
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"{name} is {value}; expected at least 1")


def check_kernel(point: Point) -> None:
    """Refuses heads and dtypes that the kernels do not take: InputError."""
    q, k, v, _ = make_inputs(replace(point, case="full", seq_len=1))
    ops.check_attention(q, k, v, scale=1.0, softcap=0.0)


def attention_work(point: Point, case: Case) -> Work:
    """What attention takes at a point."""
    return Work(point, flops_of(point, case.mask), bytes_of(point, case.mask.begin.size(0)))


def flops_of(point: Point, mask: IntervalMask) -> dict[str, int]:
    """Flops of the unmasked pairs, by pass."""
    cost = plan(
        mask,
        Layout.contiguous(point.seq_len, 1),
        num_heads=point.num_heads,
        num_kv_heads=point.num_kv_heads,
        head_dim=point.head_dim,
        dtype=DTYPES[point.dtype],
    )
    numbers = (cost.forward_flops, cost.backward_flops, cost.forward_flops + cost.backward_flops)
    return dict(zip(PASSES, numbers, strict=True))


def bytes_of(point: Point, batch: int) -> dict[str, int]:
    """Bytes that memory must move at least, by pass: every input read once, every output written once."""
    tokens, element = batch * point.seq_len, DTYPES[point.dtype].itemsize
    queries = tokens * point.num_heads * point.head_dim * element  # q, out, dout and dq are as large
    keys = 2 * tokens * point.num_kv_heads * point.head_dim * element  # k and v; dk and dv
    lse = tokens * point.num_heads * 4
    forward, backward = 2 * queries + keys + lse, 4 * queries + 2 * keys + lse
    return dict(zip(PASSES, (forward, backward, forward + backward), strict=True))


class Measured(NamedTuple):
    """The rows of one entry, and by provider why it was left out."""

    point: Any
    rows: list[Row]
    skipped: dict[str, str]


def why_skipped(error: Exception) -> str:
    """One line about a provider that could not run."""
    reason = next(iter(str(error).strip().splitlines()), "no reason given")
    return f"not installed: {reason}" if isinstance(error, ImportError) else f"{type(error).__name__}: {reason}"


class Work(NamedTuple):
    """A point, and what it takes at least whoever computes it, by pass: flops; bytes read and written."""

    point: Any
    flops: Mapping[str, int]
    num_bytes: Mapping[str, int]


class Found(NamedTuple):
    """What is known of one provider at a point besides its time, by pass."""

    max_error: Mapping[str, float] = {}
    rms_error: Mapping[str, float] = {}
    peak_bytes: Mapping[str, int] = {}


def make_rows(
    work: Work,
    seconds: Mapping[str, Mapping[str, Summary]],
    peak_flops_per_s: float,
    found: Mapping[str, Found],
) -> list[Row]:
    """The rows of one point, one for every provider and pass of `seconds`.

    flops and bytes are those of the work, the same for all providers; ratio_to holds (its time / this row's time).
    """
    rows = []
    for provider, passes in seconds.items():
        for which, (median, spread, waited) in passes.items():
            others = {name: other for name, other in seconds.items() if name != provider and which in other}
            rows.append(
                {
                    **asdict(work.point),
                    "provider": provider,
                    "pass": which,
                    "threads": torch.get_num_threads(),
                    "median_s": median,
                    "spread": spread,
                    "waited": waited,
                    "flops": work.flops[which],
                    "bytes": work.num_bytes[which],
                    "peak_bytes": found[provider].peak_bytes.get(which),
                    "fraction_of_peak": work.flops[which] / median / peak_flops_per_s,
                    "max_error": found[provider].max_error.get(which),
                    "rms_error": found[provider].rms_error.get(which),
                    "ratio_to": {name: other[which].median / median for name, other in others.items()},
                }
            )
    return rows


def shorter(point: Point, seq_len: int) -> Point:
    """The same at another length."""
    return replace(point, seq_len=seq_len)
