"""One table: each mask, layout, scheme, option and backend, alone and over ranks, against one definition in float64.

A cell says what is computed; `check` shows of every cell that values and gradients are the definition's, that each rank
sends the bytes that the plan says, that bits depend neither on the number of threads nor on what memory held, and that
what is not finite stays where the mask lets it go. Few cells, in which any two values of two axes meet, run every time;
the product of the five axes above is `long`, with the others drawn.

Shape letters: B batch, S global tokens, H query heads, G kv heads, W ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from accuracy import assert_within_ulp
from aten_stand_ins import STAND_INS, install_libraries
from attention_calls import (
    FLOAT64_TOLERANCE,
    MASKS,
    SEQ_LEN,
    Problem,
    Ran,
    assert_close,
    forward_and_backward,
    layout_of,
    problem,
    run,
    same_bits,
    together,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernels_off import kernels_off
from oracle import Attention, gradients_with_sinks, kept
from pool import run_ranks
from ringtile import AttentionDropout, Config, IntervalMask, Layout, ShardedSequence, ops, plan_attention, self_test
from ringtile.attn import aten
from ringtile.scheme import Scheme, candidates
from strategies import any_masks, dense, layouts
from torch import Tensor

SCHEMES = (*candidates((0, 0, 1, 1), 4, 4), "all_gather", "usp:1")
BATCH, POISONED = 2, [2, 20]
ROWS = {  # masks whose rows differ, of which one is that of MASKS
    "rows": IntervalMask.documents([[13, 1, 20, 14], [30, 18]]),
    "padded-rows": IntervalMask.from_padding(torch.tensor([[0] * 5 + [1] * 43, [1] * 40 + [0] * 8])),
    "trees": IntervalMask.tree(
        [[-1, 0, 1, 1, 0, -1, 5, 5], [-1, 0, 0, 0, 0, 4]], [[9, 7, 3, 6, 5, 8, 4, 4], [19, 1, 9, 6, 5, 6]]
    ).padded(2),
}
OPTIONS: dict[str, dict[str, Any]] = {  # of_lse: with a gradient of lse
    "out": {"return_lse": False},
    "lse": {},
    "sinks": {"sinks": True, "of_lse": False},
    "softcap": {"softcap": 2.0, "scale": 0.3},
    "dropout": {"dropout": 0.3},
    "all": {"softcap": 1.5, "scale": 0.2, "sinks": True, "dropout": 0.5},
}
# Their stand-ins take any lengths.
OF_CUDA = {
    each.name: dataclasses.replace(each, length_step=1) if isinstance(each, aten.InSquares) else each
    for each in aten.ATEN["cuda"]
}
AXES: dict[str, list[Any]] = {
    "mask": ["full", "causal", "documents-bidirectional", "window", "prefix", "chunked", *ROWS],
    "layout": [*typing.get_args(typing.get_type_hints(Config)["layout"]), "uneven"],
    "scheme": [*SCHEMES],
    "option": [*OPTIONS],
    "backend": ["ringtile", "aten", "torch operations", *OF_CUDA],
    "world_size": [1, 2, 3, 4],
    "heads": [(8, 8), (8, 2), (7, 7), (4, 1), (6, 3)],
    "dtype": list(ops.FLOAT_DTYPES),
    "poison": [torch.nan, torch.inf, -torch.inf, 1e30],
}


class Cell(NamedTuple):
    mask: str
    layout: str
    scheme: str
    option: str
    backend: str
    world_size: int
    heads: tuple[int, int]
    dtype: torch.dtype
    poison: float

    @property
    def size(self) -> int:
        """How many ranks share heads."""
        return Scheme.parse(self.scheme).group_size or self.world_size

    @property
    def is_allowed(self) -> bool:
        """The others are refused by name (test_schemes.py, test_attention_kernel.py), or no stand-in takes them."""
        in_order = self.layout != "striped" or (self.scheme != "all_gather" and self.size in (1, self.world_size))
        return self.world_size % self.size == 0 and (
            self.backend == "ringtile"
            # aten takes neither softcap nor dropout nor a gradient of lse, and keys in the order of their positions.
            or (
                (self.option in ("out", "sinks") and in_order)
                and (self.backend not in OF_CUDA or self.dtype == torch.float64)
            )
        )


def drawn(rng: random.Random, values: dict[str, Any], least: int) -> list[Cell]:
    """Allowed cells with these values, the other axes at random: least of them, or fewer if there are none."""
    tries = (Cell(**{axis: rng.choice(AXES[axis]) for axis in AXES} | values) for _ in range(400))
    return [*itertools.islice((cell for cell in tries if cell.is_allowed), least)]


def pairwise() -> list[Cell]:
    """A few cells, greedily chosen, in which each two values of two axes meet that may."""

    def pairs(cell: Cell) -> Iterator[tuple[Any, ...]]:
        return itertools.combinations(zip(AXES, cell, strict=True), 2)

    rng, chosen = random.Random(0), []
    left = {
        ((one, x), (other, y)): None
        for one, other in itertools.combinations(AXES, 2)
        for x, y in itertools.product(AXES[one], AXES[other])
    }
    while left:
        pair = next(iter(left))
        cells = drawn(rng, dict(pair), 20)
        if cells:
            chosen.append(max(cells, key=lambda cell: sum(each in left for each in pairs(cell))))
        for each in [pair, *(pairs(chosen[-1]) if cells else ())]:
            left.pop(each, None)
    return chosen


CELLS = pairwise()


# ---- one call -----------------------------------------------------------------------------------


class Call(NamedTuple):
    p: Problem
    mask: IntervalMask
    layout: Layout
    scheme: str
    options: dict[str, Any]

    def run(self) -> Ran:
        return run(self.p, self.mask, self.layout, self.scheme, **self.options)

    def by_definition(self) -> tuple[Attention, Tensor | None]:
        options = {name: value for name, value in self.options.items() if name in ("scale", "softcap")}
        drop: AttentionDropout | None = self.options.get("dropout")
        if drop is not None:
            options["factors"] = kept(drop, self.p.q.size(2), self.p.q.size(1)).double() / (1 - drop.probability)
        of_lse = self.returns_lse and self.options.get("of_lse", True)
        tensors = self.p.q, self.p.k, self.p.v, dense(self.mask), self.p.dout, self.p.dlse if of_lse else None
        results, dsinks = gradients_with_sinks(*tensors, self.options.get("sinks"), **options)
        return results if self.returns_lse else results._replace(lse=torch.zeros_like(results.lse)), dsinks

    @property
    def returns_lse(self) -> bool:
        return bool(self.options.get("return_lse", True))


def call_of(cell: Cell) -> Call:
    p = problem(BATCH, SEQ_LEN, *cell.heads, 8, 16 if cell.backend == "ringtile" else 8, cell.dtype)
    mask = (MASKS | ROWS)[cell.mask]
    options = dict(OPTIONS[cell.option])
    if cell.backend != "torch operations":
        options["attention_kernel"] = "ringtile" if cell.backend == "ringtile" else "aten"
        # Ranks that share heads also send back a gradient of each lse that they return, which aten does not take.
    if cell.backend != "ringtile" and cell.size > 1:
        options["return_lse"] = False
    if "sinks" in options:
        options["sinks"] = torch.linspace(-1, 3, cell.heads[0], dtype=torch.float64)
    if "dropout" in options:
        rows = torch.tensor([3, 2**33])[:BATCH]
        options["dropout"] = AttentionDropout(options["dropout"], rows, seed=1234, step=5, stream=0xC0FFEE)
    return Call(p, mask, layout_of(cell.layout, mask, cell.world_size), cell.scheme, options)


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Who computes: aten's kernels for CUDA by stand-ins that take the arguments of their schemas, on CPU tensors."""
    with contextlib.ExitStack() as stack:
        if name == "torch operations":
            stack.enter_context(kernels_off())
        if name in OF_CUDA:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            library = torch.library.Library("aten", "IMPL")
            stack.callback(library._destroy)
            for each, function in STAND_INS.items():
                library.impl(each, function, "CPU")
            patch.setattr(aten, "_flash_functions", aten._flash_functions.__wrapped__)  # not remembered for others
            install_libraries(patch)
            kernel = OF_CUDA[name]
            if isinstance(kernel, aten.InSquares):  # which in use takes fewer
                kernel = dataclasses.replace(kernel, max_squares=aten.MAX_SQUARES)
            patch.setitem(aten.ATEN, "cpu", (kernel,))
            stack.callback(self_test.forget)
            self_test.forget()
        yield


# ---- what is shown of it ------------------------------------------------------------------------


def assert_near(got: Attention, expected: Attention, call: Call, whole: Attention | None = None) -> None:
    """In float64, weights that stay are multiplied by up to 10, which what the bound is relative to need not hold. In
    float32 sums of 48 terms lose up to 9 ulp in these cells; 16 bits are rounded once by ringtile, three times by aten.
    whole: what ulp are relative to, as in `assert_within_ulp`.
    """
    if call.p.q.dtype == torch.float64:
        assert_close(got, expected, FLOAT64_TOLERANCE * (10 if "dropout" in call.options else 1))
    else:
        assert_within_ulp(got, expected, 16 if call.p.q.dtype == torch.float32 else 3, call.p.q.dtype, whole)


def check_bytes(call: Call, sent: list[tuple[int, int]]) -> None:
    """Those of the plan; and, because lse is returned, where ranks share heads a float64 of each token and head back,
    and its gradient there."""
    p = call.p
    shape = {"num_heads": p.q.size(2), "num_kv_heads": p.k.size(2), "head_dim": p.q.size(3), "v_head_dim": p.v.size(3)}
    batch, dtype = p.q.size(0), p.q.dtype
    cost = plan_attention(call.mask, call.layout, **shape, scheme=call.scheme, dtype=dtype, batch=batch)
    size = Scheme.parse(call.scheme).ranks_per_group(call.layout.world_size)
    for of_rank, each in zip(cost.ranks, sent, strict=True):
        others = [other for other in cost.ranks if other.rank // size == of_rank.rank // size and other is not of_rank]
        size_of_lse = 8 * batch * call.returns_lse
        lse = size_of_lse * of_rank.num_heads * sum(other.local_len for other in others)
        dlse = size_of_lse * of_rank.local_len * sum(other.num_heads for other in others)
        assert each == (of_rank.forward_bytes_sent + lse, of_rank.backward_bytes_sent + dlse)
    assert cost.forward_bytes == sum(rank.forward_bytes_received for rank in cost.ranks)
    assert cost.backward_bytes == sum(rank.backward_bytes_received for rank in cost.ranks)


def check_bits(call: Call, first: Ran) -> None:
    """The same again, of views, in memory that held nan; on one thread more, where ringtile's kernels compute."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads + (call.options.get("attention_kernel") == "ringtile"))
    torch.use_deterministic_algorithms(True)  # which fills what is empty
    try:
        assert torch.empty(3).isnan().all()
        again = call._replace(options=call.options | {"in_views": True}).run()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(num_threads)
    assert same_bits(again.results, first.results)
    assert first.dsinks is None or torch.equal(again.dsinks, first.dsinks)


def check_poison(call: Call, clean: Ran, poison: float) -> None:
    """Two tokens of row 0 hold it in a number of each head; a mask may let nobody attend the first. The queries that
    attend them know, and by their dout the keys that these attend; nobody else: to the bit where it is finite. Else a
    kernel may compute the tile by another way (of attended pairs alone; AMX then rounds no weight): within the rounding
    of all that the row holds when clean."""
    p = Problem(*(x.clone() for x in call.p))
    for x in (p.q, p.k, p.v, p.dout):
        x[0, POISONED, :, 3] = poison
    got = call._replace(p=p).run().results
    attend = dense(call.mask)[0]
    knows = attend[:, POISONED].any(1)
    is_finite = bool(p.q.isfinite().all())
    if not is_finite and "dropout" not in call.options:  # which may drop that very weight
        assert not got.out[0, knows].isfinite().all(-1).any()
    holds = torch.zeros_like(knows).index_fill(0, torch.tensor(POISONED), True)
    queries = knows | (holds & attend.any(1))
    keys = attend[queries].any(0) | (holds & attend.any(0))
    results = [Attention(*(x.clone() for x in each)) for each in (got, clean.results)]
    for each in results:
        for x in (each.out, each.dq, each.lse.transpose(1, 2)):
            x[0, queries] = 0
        for x in (each.dk, each.dv):
            x[0, keys] = 0
    if is_finite:
        assert same_bits(*results)
    else:
        assert_near(*results, call, whole=clean.results)


def check(call: Call, poison: float | None = None) -> None:
    ran, (expected, dsinks) = call.run(), call.by_definition()
    assert_near(ran.results, expected, call)
    if dsinks is not None:
        eps = {torch.float64: 10 * FLOAT64_TOLERANCE}.get(call.p.q.dtype, 8 * torch.finfo(call.p.q.dtype).eps)
        assert (ran.dsinks - dsinks).abs().max() <= eps * max(1, dsinks.abs().max())
    check_bytes(call, ran.sent)
    check_bits(call, ran)
    if poison is not None:
        check_poison(call, ran, poison)


def check_cell(cell: Cell) -> None:
    with backend(cell.backend):
        check(call_of(cell), cell.poison if cell.backend == "ringtile" else None)  # aten's kernels may spread it


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)).replace(" ", ""))
def test_cells_where_any_two_values_meet(cell: Cell) -> None:
    check_cell(cell)


@pytest.mark.long
@pytest.mark.parametrize("name", AXES["backend"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_cells(scheme: str, name: str) -> None:
    """Of mask, layout, scheme, option and backend."""
    rng = random.Random(f"{scheme} {name}")
    for mask, layout, option in itertools.product(AXES["mask"], AXES["layout"], OPTIONS):
        values = {"mask": mask, "layout": layout, "scheme": scheme, "option": option, "backend": name}
        for cell in drawn(rng, values, 1):
            check_cell(cell)


# ---- any call, drawn ----------------------------------------------------------------------------


@st.composite
def any_calls(draw: st.DrawFn) -> Call:
    """Any heads, also fewer than ranks, ranks of any lengths, head dims that align nothing."""
    world_size = draw(st.integers(1, 8))
    batch, seq_len = draw(st.integers(1, 2)), draw(st.integers(world_size, 40))
    num_kv_heads = draw(st.integers(1, 3))
    heads = num_kv_heads * draw(st.integers(1, 4)), num_kv_heads
    p = problem(batch, seq_len, *heads, *(draw(st.integers(1, 24)) for _ in "qv"), seed=draw(st.integers(0, 1000)))
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    scheme = draw(st.sampled_from([*SCHEMES[:2], "all_gather", *(f"usp:{size}" for size in sizes)]))
    options: dict[str, Any] = {
        "scale": draw(st.sampled_from([None, 0.3])),
        "softcap": draw(st.sampled_from([0.0, 2.0])),
    }
    if draw(st.booleans()):
        options["sinks"] = torch.linspace(-1, 3, heads[0], dtype=torch.float64)
    if draw(st.booleans()):
        word = st.integers(0, 2**32 - 1)
        rows = torch.tensor(draw(st.lists(st.integers(0, 2**34), min_size=batch, max_size=batch)))
        options["dropout"] = AttentionDropout(
            draw(st.sampled_from([0.1, 0.5, 0.9])), rows, *(draw(word) for _ in "ssp")
        )
    options |= draw(st.sampled_from([{"return_lse": False}, {"of_lse": False}, {}, {}]))
    return Call(p, draw(any_masks(batch, seq_len)), draw(layouts(seq_len, world_size)), scheme, options)


@settings(max_examples=settings.default.max_examples // 2)
@given(any_calls())
@example(Call(problem(seq_len=8), IntervalMask.causal(8), Layout.striped(8, 8), "ring", {}))  # one token a rank
def test_any_call_equals_the_definition(call: Call) -> None:
    check(call)


# ---- over processes -----------------------------------------------------------------------------


def of_processes(world_size: int, cells: list[Cell]) -> list[Any]:
    """This rank's part of each cell. A group of three of four ranks: no rank has its global number."""
    first = dist.get_world_size() - world_size
    group = dist.new_group([*range(first, dist.get_world_size())]) if first else dist.group.WORLD
    calls = [call_of(cell) for cell in cells] if dist.get_rank(group) >= 0 else []
    return [
        forward_and_backward(call.p, ShardedSequence(call.mask, call.layout, group, scheme=call.scheme), **call.options)
        for call in calls
    ]


@pytest.mark.parametrize("world_size", [*(pytest.param(ranks, marks=pytest.mark.long) for ranks in (2, 3)), 4])
def test_processes_have_the_bits_of_virtual_ranks_and_send_as_many_bytes(world_size: int) -> None:
    cells = [cell for cell in CELLS if cell.world_size == world_size and cell.backend == "ringtile"]
    ranks = run_ranks(2 if world_size == 2 else 4, of_processes, world_size, cells)[-world_size:]
    for cell, of_ranks in zip(cells, zip(*ranks, strict=True), strict=True):
        call = call_of(cell)
        got, virtual = together(of_ranks, call.layout), call.run()
        assert same_bits(got.results, virtual.results), cell
        assert got.sent == virtual.sent, cell
        assert got.dsinks is None or torch.equal(got.dsinks, virtual.dsinks), cell
