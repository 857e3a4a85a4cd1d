"""Every kernel op under torch.library.opcheck, and the arguments that each refuses."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from ringtile import InputError, Layout, ops
from ringtile.recurrent import kernels as _  # noqa: F401  (registers what autograd and fake tensors need)
from torch import Tensor

B, N, K, H, G, D, Dv = 2, 5, 7, 4, 2, 6, 3


def attention_arguments(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """One block of 7 keys at positions 0..6, and 5 queries that attend positions [0, 3)."""
    state = ops.state_dtype(dtype)
    return {
        "q": torch.randn(B, N, H, D).to(dtype),
        "k": torch.randn(B, K, G, D).to(dtype),
        "v": torch.randn(B, K, G, Dv).to(dtype),
        "begin": torch.zeros(1, N, dtype=torch.int32),
        "end": torch.full((1, N), 3, dtype=torch.int32),
        "k_runs": ops.runs_tensor([(0, 1, 0, K)]),
        "out": torch.zeros(B, N, H, Dv, dtype=state),
        "lse": torch.full((B, H, N), float("-inf"), dtype=state),
        "dout": torch.randn(B, N, H, Dv).to(dtype),
        "delta": torch.zeros(B, H, N, dtype=state),
        "dq": torch.zeros(B, N, H, D, dtype=state),
        "dk": torch.zeros(B, K, G, D, dtype=state),
        "dv": torch.zeros(B, K, G, Dv, dtype=state),
    }


BLOCK = ("q", "k", "v", "begin", "end", "k_runs")
FORWARD = (*BLOCK, "out", "lse")
BACKWARD = (*BLOCK, "dout", "lse", "delta", "dq", "dk", "dv")


def pick(arguments: dict[str, torch.Tensor], names: tuple[str, ...]) -> tuple[torch.Tensor | float, ...]:
    return (*(arguments[name] for name in names), 0.5, 0.0)


def drops(**changes: object) -> tuple[object, ...]:
    """fresh, and dropout."""
    usual = {"p": 0.3, "seed": 1, "step": 2, "stream": 3, "rows": torch.arange(B), "positions": torch.arange(N)}
    return (False, *(usual | changes).values())


def causal(seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(seq_len, dtype=torch.int32)
    return torch.zeros(1, seq_len, dtype=torch.int32), positions[None] + 1


def scan_arguments() -> tuple[torch.Tensor | None, ...]:
    """q, k, v, g, beta, dt, D, seq_idx, initial_state: one token of the second chunk has a kept state."""
    q, k, v = (torch.randn(B, 66, heads, dim) for heads, dim in ((G, D), (G, D), (H, Dv)))
    seq_idx = torch.zeros(1, 66, dtype=torch.int32)
    return q, k / D, v, -torch.rand(B, 66, H), torch.rand(B, 66, H), None, None, seq_idx, torch.randn(B, H, D, Dv)


def selective_arguments() -> tuple[torch.Tensor, ...]:
    """x, dt, A, B, C, D, seq_idx, initial_state: as scan_arguments."""
    x, dt, b, c = (torch.randn(B, 66, size) for size in (3, 3, D, D))
    seq_idx = torch.zeros(1, 66, dtype=torch.int32)
    return x, dt.abs(), -torch.rand(D, 3), b, c, torch.randn(3), seq_idx, torch.randn(B, D, 3)


def convolution_arguments() -> tuple[torch.Tensor, ...]:
    """x, weight, bias, seq_idx, initial_state."""
    seq_idx = torch.zeros(1, N, dtype=torch.int32)
    return torch.randn(B, N, 3), torch.randn(3, 4), torch.randn(3), seq_idx, torch.randn(B, 3, 3)


def rows_arguments(
    batch: int, num_rows: int, dim: int
) -> tuple[list[torch.Tensor], torch.Tensor, int, list[torch.Tensor]]:
    """Two tensors, runs of every second row but the first, dim, and two with these rows."""
    xs, ys = ([torch.randn(batch, rows, width) for width in (dim, dim + 1)] for rows in (num_rows, num_rows // 2))
    return xs, ops.runs_tensor([(num_rows % 2, 2, 0, num_rows // 2)]), 1, ys


TWO_HALVES = torch.tensor([[0, 0, 1, 0, 4], [1, 4, 1, 0, 4]])

OPCHECK_CASES = {
    "attn_fwd_": lambda: (
        *pick(attention_arguments(), FORWARD), *drops(), torch.zeros(B, N, H, Dv), *causal(K),
    ),
    "attn_bwd_": lambda: (
        *pick({**attention_arguments(), "lse": torch.zeros(B, H, N)}, BACKWARD), True, *drops()[1:],
        torch.zeros(B, K, G, D), torch.zeros(B, K, G, Dv), *causal(K),
    ),
    "attn_delta": lambda: (torch.randn(B, N, H, Dv), torch.randn(B, N, H, Dv), torch.randn(B, H, N).double()),
    "attn_merge_": lambda: (
        torch.randn(1, N, H, Dv), torch.randn(1, H, N), torch.randn(2, N, H, Dv), torch.randn(2, H, N).double(), False,
        0, torch.arange(N), torch.zeros(2, N, H, Dv),
    ),
    **dict.fromkeys(("rows_pack_", "rows_unpack_", "rows_add_"), lambda: rows_arguments(2, 8, 3)),
    "shard_seq": lambda: (torch.randn(2, 8, 3, requires_grad=True), [6, 1, 0, 2, 0, 1, 2, 2], 1, 4, False),
    "layout_check": lambda: (TWO_HALVES, 8, 2),
    "run_positions": lambda: (ops.runs_tensor([(1, 2, 0, 4)]),),
    "plan_rank": lambda: (*causal(8), TWO_HALVES, 0, False),
    "plan_counts": lambda: (*causal(8), TWO_HALVES),
    "digest": lambda: (*causal(8), TWO_HALVES),
    "balance": lambda: (*causal(8), None, 2, 3),
    "pieces": lambda: (*causal(8), ops.runs_tensor([(0, 1, 0, 8)]), *causal(8), torch.arange(8), 9, 9),
    "mask_hulls": lambda: (*causal(8), *causal(8)),
    "glu_fwd": lambda: (torch.randn(3, 5), torch.randn(3, 5), 0),
    "glu_bwd_": lambda: (torch.randn(3, 5), torch.randn(3, 5), torch.randn(3, 5), 0),
    "cross_entropy_fwd_bwd_": lambda: (
        torch.randn(3, 5), torch.tensor([0, 4, -100]), torch.zeros(3), torch.zeros(3), -100, 0.1, 0.0, 0.0, True,
    ),
    "weight_grad_add_": lambda: (torch.randn(3, 5).bfloat16(), torch.randn(3, 4).bfloat16(), torch.randn(5, 4)),
    "scan": lambda: (*scan_arguments(), 0.5, True),
    "scan_backward": lambda: (
        torch.randn(B, 66, H, Dv), torch.randn(B, H, D, Dv), *scan_arguments(), torch.randn(B, H, 1, D, Dv), 0.5,
    ),
    "selective_scan": lambda: (*selective_arguments(), True),
    "selective_scan_backward": lambda: (
        torch.randn(B, 66, 3), torch.randn(B, D, 3), *selective_arguments(), torch.randn(B, 1, D, 3),
    ),
    "causal_conv1d": lambda: (*convolution_arguments(), True),
    "causal_conv1d_backward": lambda: (torch.randn(B, N, 3), torch.randn(B, 3, 3), *convolution_arguments(), True),
}  # fmt: skip
# Their results become numbers of Python at once, so that no graph holds them, and no fake would say their sizes.
PLANS = ("balance", "pieces", "plan_counts", "plan_rank")


@pytest.mark.parametrize("name", sorted(OPCHECK_CASES))
def test_op_passes_opcheck(name: str) -> None:
    arguments, op = OPCHECK_CASES[name](), getattr(torch.ops.ringtile, name).default
    tests = {"test_utils": "test_schema"} if name in PLANS else {}
    torch.library.opcheck(op, arguments, **tests)


def test_every_op_is_opchecked() -> None:
    """A new op needs a case here; the tests of the ring and the layout check the ops that need a group."""
    importlib.import_module("ringtile.torch_context_parallel.group_layouts")
    schemas = torch._C._jit_get_all_schemas()
    names = {schema.name.removeprefix("ringtile::") for schema in schemas if schema.name.startswith("ringtile::")}
    elsewhere = {"ring_attention", "ring_attention_backward", "unshard", "sequence_of"}
    assert names == {*OPCHECK_CASES, "cpu_isa"} | elsewhere


def test_ops_of_a_group_stay_out_of_compiled_cuda_graphs() -> None:
    """They communicate, and read masks and layouts on the host, which no replay would do."""
    importlib.import_module("ringtile.torch_context_parallel.group_layouts")
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("ringtile::")]
    of_a_group = [each.name[10:] for each in schemas if "group_name" in {given.name for given in each.arguments}]
    assert len(of_a_group) == 4
    for name in of_a_group:
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.ringtile, name).default.tags, name


@pytest.mark.parametrize("name", sorted(set(OPCHECK_CASES) - {"shard_seq"}))
def test_compiled_op_names_each_tensor_that_is_missing(name: str) -> None:
    """None reaches an op as an undefined tensor, which has no dtype; torch answers where no other is left."""
    arguments, schema = OPCHECK_CASES[name](), getattr(torch.ops.ringtile, name).default._schema
    for i in (i for i, argument in enumerate(schema.arguments) if str(argument.type) == "Tensor"):
        with pytest.raises(RuntimeError, match=rf"ringtile.{name}: .* is None, expected|no tensor arguments"):
            getattr(torch.ops.ringtile, name)(*arguments[:i], None, *arguments[i + 1 :])


def delta_arguments() -> dict[str, torch.Tensor]:
    rows = {name: torch.randn(B, N, H, Dv) for name in ("dout", "out")}
    return rows | {"dlse": torch.randn(B, H, N).double()}


def with_a_stride(x: Tensor) -> Tensor:
    return x.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize(
    ("op", "name", "change", "message"),
    [
        ("attn_fwd_", "q", lambda x: x[0], "q has shape"),
        ("attn_fwd_", "q", lambda x: x.int(), "k has dtype Float, expected Int"),
        ("attn_fwd_", "q", with_a_stride, "stride"),
        ("attn_fwd_", "k", lambda x: x.double(), "k has dtype"),
        ("attn_fwd_", "k", lambda x: x[:, :, :, :-1], "k has shape"),
        ("attn_fwd_", "v", lambda x: x[:, :-1], "v has shape"),
        ("attn_fwd_", "v", lambda x: x[:1], "v has shape"),
        ("attn_fwd_", "k_runs", lambda x: x.int(), "k_runs has dtype"),
        ("attn_fwd_", "k_runs", lambda x: x[:, :3].contiguous(), "k_runs has shape"),
        ("attn_fwd_", "k_runs", lambda x: x + 1, "a run needs"),
        ("attn_fwd_", "begin", lambda x: x.long(), "begin has dtype"),
        ("attn_fwd_", "begin", lambda x: x[:, :-1].contiguous(), "begin has shape"),
        ("attn_fwd_", "end", lambda x: x.expand(3, N).contiguous(), "end has shape"),
        ("attn_fwd_", "out", lambda x: x.half(), "out has dtype"),
        ("attn_fwd_", "out", lambda x: x[..., :-1], "out has shape"),
        ("attn_fwd_", "out", lambda x: x[:1, :, :1].expand(x.shape), "out: an output must not overlap itself"),
        ("attn_fwd_", "lse", lambda x: x.transpose(1, 2), "lse"),
        ("attn_fwd_", "q", lambda x: x[:, :, :3], "num_heads must be a multiple of num_kv_heads"),
        *(
            ("attn_bwd_", name, lambda x: x[:, :-1].contiguous(), f"{name} has shape")
            for name in ("dout", "delta", "dq", "dk", "dv")
        ),
        ("attn_delta", "dout", lambda x: x[0], "dout has shape"),
        ("attn_delta", "dout", lambda x: x.int(), "out has dtype Float, expected Int"),
        ("attn_delta", "dout", with_a_stride, "dout has stride"),
        ("attn_delta", "out", lambda x: x[:, :-1], "out has shape"),
        ("attn_delta", "out", lambda x: x.half(), "out has dtype"),
        ("attn_delta", "out", with_a_stride, "out has stride"),
        ("attn_delta", "dlse", lambda x: x.float(), "dlse has dtype"),
        ("attn_delta", "dlse", lambda x: x.transpose(1, 2), "dlse must be contiguous"),
        ("attn_delta", "dlse", lambda x: x[:, :-1].contiguous(), "dlse has shape"),
    ],
)
def test_attention_ops_refuse_unreadable_arguments(
    op: str, name: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    arguments = delta_arguments() if op == "attn_delta" else attention_arguments()
    arguments[name] = change(arguments[name])
    if name == "q":
        arguments["out"] = arguments["out"][:, :, : arguments["q"].shape[-2]]
        arguments["lse"] = arguments["lse"][:, : arguments["q"].shape[-2]].contiguous()
    names = {"attn_fwd_": FORWARD, "attn_bwd_": BACKWARD}
    given = pick(arguments, names[op]) if op in names else arguments.values()
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.ringtile, op)(*given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": 1.5}, "a probability must be in"),
        ({"seed": 2**32}, "seed is 4294967296, expected 0"),
        ({"stream": -1}, "stream is -1, expected 0"),
        ({"rows": torch.zeros(B)}, "rows has dtype"),
        ({"rows": torch.arange(B + 1)}, "rows has shape"),
        ({"positions": torch.arange(2 * N)[::2]}, "positions must be contiguous"),
        ({"positions": None}, "positions is None"),
        ({"key_end": None}, "only one of key_begin and key_end"),
        ({"key_begin": torch.zeros(1, K)}, "key_begin has dtype"),
        ({"key_begin": torch.zeros(K, dtype=torch.int32)}, "key_begin has shape"),
        ({"key_end": torch.zeros(1, K - 1, dtype=torch.int32)}, "key_end has shape"),
        ({"key_end": torch.zeros(3, K, dtype=torch.int32)}, "key_end has shape"),
        ({"p": 0.0, "rows": None, "positions": None}, "there is a key_begin and positions is None"),
        ({"positions": torch.arange(N + 1)}, "positions has shape"),
        ({"positions": torch.arange(N).int()}, "positions has dtype"),
    ],
)
def test_attention_op_refuses_malformed_dropout_and_intervals_of_keys(change: dict[str, object], message: str) -> None:
    sides = dict(zip(("key_begin", "key_end"), causal(K), strict=True))
    with pytest.raises(RuntimeError, match=message):
        torch.ops.ringtile.attn_fwd_(
            *pick(attention_arguments(), FORWARD), *drops(**{"rounded_out": None, **sides, **change})
        )


@pytest.mark.parametrize(
    ("begin", "end", "message"),
    [
        (torch.zeros(3, 1, 8, dtype=torch.int32), torch.zeros(3, 1, 8, dtype=torch.int32), "begin has shape"),
        (torch.zeros(2, 1, 8, dtype=torch.int32), torch.zeros(1, 8, dtype=torch.int32), "end has shape"),
        (torch.zeros(1, 8, dtype=torch.int32), torch.zeros(2, 1, 8, dtype=torch.int32), "end has shape"),
        (torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32), "begin has shape"),
    ],
)
def test_plan_refuses_masks_of_no_two_sides(begin: Tensor, end: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        torch.ops.ringtile.plan_rank(begin, end, TWO_HALVES, 0, False)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.ringtile.plan_counts(begin, end, TWO_HALVES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.half(), "has dtype"),
        (lambda x: x[:, :-1].contiguous(), "has shape"),
        (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "must be contiguous"),
    ],
)
def test_attention_ops_refuse_malformed_rounded_results(change: Callable[[Tensor], Tensor], message: str) -> None:
    arguments = attention_arguments()
    with pytest.raises(RuntimeError, match=f"rounded_out {message}"):
        ops.attn_fwd_(*pick(arguments, FORWARD), rounded_out=change(arguments["out"].clone()))
    rounded = [change(arguments["dk"].clone()), arguments["dv"].clone()]
    with pytest.raises(RuntimeError, match=f"rounded_dk {message}"):
        ops.attn_bwd_(*pick(arguments, BACKWARD), True, rounded_dk=rounded[0], rounded_dv=rounded[1])
    with pytest.raises(RuntimeError, match="rounded_dv need them fresh, and need each other"):
        ops.attn_bwd_(*pick(arguments, BACKWARD), rounded_dv=rounded[1])


@pytest.mark.in_torch_too
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("part", lambda x: x.int(), "is not supported"),
        ("part", lambda x: x[0], r"part has shape \(5, 4, 3\), expected 4 dim"),
        ("part_lse", lambda x: x.double(), "part_lse has dtype"),
        ("part_lse", lambda x: x[:, :-1], "part_lse"),
        ("out", lambda x: x.half(), "out has dtype"),
        ("out", lambda x: x[0], "out has shape"),
        ("out", lambda x: x[..., :-1].contiguous(), "out has shape"),
        ("lse", lambda x: x.float(), "lse has dtype"),
        ("lse", lambda x: x[:1], "lse has shape"),
        ("rounded", lambda x: x.double(), "rounded has dtype"),
        ("rows", lambda x: x[:-1], "rows has shape"),
        ("rows", lambda x: x.flip(0), "must rise"),
        ("rows", lambda x: x + 4, "must rise, and lie in"),
        ("rows", lambda x: x - 3, "must rise, and lie in"),
        ("rows", lambda x: None, "must rise, and lie in"),  # first_row is too large
    ],
)
def test_merge_op_refuses_unreadable_arguments(name: str, change: object, message: str) -> None:
    arguments = {
        "part": torch.randn(1, N, H, Dv),
        "part_lse": torch.randn(1, H, N),
        "out": torch.randn(2, N, H, Dv),
        "lse": torch.randn(2, H, N).double(),
        "fresh": False,
        "first_row": N + 1,
        "rows": torch.arange(2, N + 2),
        "rounded": torch.zeros(2, N, H, Dv),
    }
    ops.attn_merge_(**arguments)
    arguments[name] = change(arguments[name])  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=message):
        ops.attn_merge_(**arguments)


@pytest.mark.parametrize("x", [True, 2.5, [], [torch.ones(2, 3), 1]])
def test_what_is_no_tensor_is_refused_by_name(x: object) -> None:
    given = torch.ones(2, 3)
    with pytest.raises(InputError, match=r"gate is a .*; expected a tensor"):
        ops.glu_bwd_(x, given, given, 0)
    with pytest.raises(InputError, match=r"x is a .*; expected a tensor"):
        ops.rows_pack_(x, ops.runs_tensor([(0, 1, 0, 2)]), 0, [given])


@pytest.mark.parametrize(
    ("layout", "seq_len", "message"),
    [
        (torch.tensor([[0, 0, 1, 0, 4], [1, 3, 1, 0, 4]]), 8, "exactly once"),
        (torch.tensor([[1, 0, 1, 0, 4], [0, 4, 1, 0, 4]]), 8, "rank after rank"),
        (torch.tensor([[0, 0, 1, 0, 8]]), 8, "expected world_size 2"),
        (torch.tensor([[0, 0, 0, 0, 4], [1, 4, 1, 0, 4]]), 8, "a run needs"),
        (torch.tensor([[0, 0, 1, 0, 2**62], [1, 4, 1, 0, 4]]), 8, "a run needs|exactly once"),
    ],
)
def test_layout_check_refuses_runs_that_do_not_partition(layout: torch.Tensor, seq_len: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        torch.ops.ringtile.layout_check(layout, seq_len, 2)


@pytest.mark.in_torch_too
def test_shard_refuses_a_run_outside_the_sequence() -> None:
    with pytest.raises(RuntimeError, match="a run needs"):
        ops.rows_pack_([torch.zeros(2, 8)], ops.runs_tensor([(5, 1, 0, 4)]), 1, [torch.zeros(2, 4)])
    with pytest.raises(InputError, match="dim 2"):
        Layout.contiguous(8, 2).shard(torch.zeros(2, 8), 2, 0)


@pytest.mark.in_torch_too
def test_shard_refuses_runs_and_outputs_that_overlap() -> None:
    """A position in two runs would get one of two gradients; an expanded output has several elements in one place."""
    with pytest.raises(RuntimeError, match="two runs of a rank must not share a position"):
        ops.shard_seq(torch.zeros(2, 8), [(0, 1, 0, 4), (3, 1, 4, 2)], 1)
    with pytest.raises(RuntimeError, match="must not overlap itself"):
        ops.rows_unpack_([torch.zeros(8).expand(2, 8)], ops.runs_tensor([(0, 1, 0, 4)]), 1, [torch.zeros(2, 4)])


ROW_RUNS = {  # global_begin, stride, local_begin, length
    "none": [],
    "one": [(0, 1, 0, 7)],
    "head": [(0, 1, 0, 3)],
    "several": [(5, 1, 1, 3), (9, 2, 4, 2), (0, 1, 6, 1)],
    "many": [(3 * r, 1, 2 * r, 2) for r in range(100)],
}
ROW_DTYPES = (*ops.FLOAT_DTYPES, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn)


@pytest.mark.in_torch_too
@pytest.mark.parametrize("runs", ROW_RUNS)
@pytest.mark.parametrize("dtype", ROW_DTYPES)
def test_rows_are_those_of_indexing(runs: str, dtype: torch.dtype) -> None:
    """Of k (B, N, G, D), v (B, N, G, Dv), views of wider tensors, and one of another dtype, as in an all-to-all."""
    rows = [run[0] + run[1] * j for run in ROW_RUNS[runs] for j in range(run[3])]
    packed = [run[2] + j for run in ROW_RUNS[runs] for j in range(run[3])]
    kinds = [((2, 3, 8), dtype), ((2, 3, 5), dtype), ((3,), torch.float64)]

    def numbers(num_rows: int) -> list[torch.Tensor]:
        wide = [torch.randint(0, 2, (2, num_rows, *shape[1:-1], shape[-1] + 1)).to(kind) for shape, kind in kinds]
        return [wide[0][..., :-1], wide[1][..., 1:], wide[2][..., 1:]]

    ops_of = {"pack": ops.rows_pack_, "unpack": ops.rows_unpack_, "add": ops.rows_add_}
    for name, op in ops_of.items():
        xs, ys = numbers(300), numbers(201)
        if name == "add":
            if dtype not in (torch.float32, torch.float64):
                continue
            xs, ys = ([torch.randn(x.shape, dtype=dtype)[..., 1:] for x in of] for of in (xs, ys))
        all_before = [[x.clone() for x in of] for of in (xs, ys)]
        op(xs, ops.runs_tensor(ROW_RUNS[runs]), 1, ys)
        for x, y, before_x, before_y in zip(xs, ys, *all_before, strict=True):
            if name == "pack":
                before_y[:, packed] = before_x[:, rows]
            elif name == "unpack":
                before_x[:, rows] = before_y[:, packed]
            else:
                before_x[:, rows] = before_x[:, rows] + before_y[:, packed]
            assert torch.equal(x, before_x), name
            assert torch.equal(y, before_y), name


@pytest.mark.in_torch_too
def test_rows_refuse_what_does_not_fit() -> None:
    xs, runs, dim, ys = rows_arguments(2, 8, 3)
    for op in (ops.rows_pack_, ops.rows_unpack_, ops.rows_add_):
        with pytest.raises(RuntimeError, match="2 tensors and 1 of their rows"):
            op(xs, runs, dim, ys[:1])
        with pytest.raises(RuntimeError, match="local"):
            op(xs, runs, dim, ys[::-1])
        with pytest.raises(RuntimeError, match="dtype"):
            op(xs, runs, dim, [ys[0], ys[1].double()])
        with pytest.raises(RuntimeError, match="a run needs"):
            op(xs, runs + 2, dim, ys)
        with pytest.raises(RuntimeError, match="dim 3 is not a dimension"):
            op(xs, runs, 3, ys)
    for dtype in (torch.bfloat16, torch.int32):
        with pytest.raises(RuntimeError, match=r"float32 or float64|not supported"):
            ops.rows_add_([x.to(dtype) for x in xs], runs, dim, [y.to(dtype) for y in ys])


def test_rows_of_two_tensors_may_not_meet() -> None:
    """The kernels' own: torch operations would write them one after another."""
    xs, runs, dim, ys = rows_arguments(2, 8, 3)
    with pytest.raises(RuntimeError, match="rows_pack_: local and local: an output must not share memory"):
        ops.rows_pack_([xs[0], xs[0]], runs, dim, [ys[0], ys[0]])
    with pytest.raises(RuntimeError, match="33 tensors, expected at most 32"):
        ops.rows_pack_([xs[0]] * 33, runs, dim, [ys[0]] * 33)


@pytest.mark.in_torch_too
def test_an_output_that_is_an_input_is_named_with_it() -> None:
    arguments = attention_arguments()
    arguments["dk"] = arguments["k"]
    with pytest.raises(RuntimeError, match="attn_bwd_: dk and k: an output must not share memory with another array"):
        torch.ops.ringtile.attn_bwd_(*pick(arguments, BACKWARD))


def test_glu_and_cross_entropy_refuse_bad_kind_and_label() -> None:
    with pytest.raises(RuntimeError, match="GLU kind"):
        ops.glu_fwd(torch.zeros(2, 3), torch.zeros(2, 3), 99)
    logits = torch.zeros(1, 3)
    with pytest.raises(RuntimeError, match="label"):
        ops.cross_entropy_fwd_bwd_(logits, torch.tensor([3]), torch.zeros(1), torch.zeros(1), -100, 0.0, 0.0, 0.0, True)
    assert torch.equal(logits, torch.zeros(1, 3))


@pytest.mark.in_torch_too
def test_shard_is_the_adjoint_of_unshard() -> None:
    """<shard(x), y> = <x, unshard(y)> in float64, as the autograd formula claims."""
    x = torch.randn(2, 8, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ops.shard_seq(x, [(6, 1, 0, 2), (0, 2, 2, 3)], 1), x)


@pytest.mark.parametrize("name", OPCHECK_CASES)
def test_one_tensor_on_meta_is_refused(name: str) -> None:
    """Such a call comes to the fake kernel: what it makes on the other tensors' device would be uninitialized."""
    op, given = getattr(torch.ops.ringtile, name), list(OPCHECK_CASES[name]())
    places = [i for i, x in enumerate(given) if isinstance(x, Tensor)]
    for i in places if len(places) > 1 else []:
        changed = [x.to("meta") if i == j else x for j, x in enumerate(given)]
        try:
            found = op(*changed)
        except (InputError, RuntimeError):
            continue
        made = [x for x in (found if isinstance(found, tuple) else (found,)) if isinstance(x, Tensor)]
        assert made, i
        assert all(x.is_meta for x in made), i
