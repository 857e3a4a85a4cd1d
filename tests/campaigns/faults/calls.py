"""What the campaigns of calls share: random arguments that are right, nearly right, or absurd, and the judgement of a
trial. What is accepted is compared with its definition in float64; what is not is refused by name.

A worker process makes the trials, so that a crash ends it and is counted.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import random
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from ringtile import IntervalMask, Layout, RingtileError
from torch import Tensor

from faults.counts import Counts

TRIAL_SECONDS = 30.0
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Of the largest magnitude of a tensor: rounding of inputs and weights, with room for sums over a few dozen tokens.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
NONSENSE: list[Any] = [None, "8", 2.5, -1, 0, 10**30, float("nan"), float("inf"), [1.0], object(), torch.relu, (), True]


def in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


KINDS: list[Callable[[Tensor], Tensor]] = [
    Tensor.to_sparse,
    Tensor.to_sparse_csr,
    Tensor.to_mkldnn,
    in_inference_mode,
    lambda x: torch.nested.nested_tensor([x, x]),
    lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    lambda x: x.new_zeros(()),
]


class Draw:
    """Random arguments. `hostile`: the chance that one of them is not what it should be."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.hostile = self.random.choice([0.0, 0.02, 0.08, 0.2])
        self.on_meta = self.random.random() < 0.03  # every tensor: the results have shapes
        torch.manual_seed(seed)

    def chance(self, probability: float | None = None) -> bool:
        return self.random.random() < (self.hostile if probability is None else probability)

    def of(self, value: Any, *wrong: Any) -> Any:
        """The value; or, if hostile, something else."""
        return self.random.choice([*wrong, *NONSENSE]) if self.chance() else value

    def size(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def number(self, *values: float | None) -> Any:
        return self.of(self.random.choice(values), -1.0, 1e38, 1e39, 1e-44, 1e-320, torch.tensor(0.5), 1e400)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, high: int = 7) -> Any:
        """A tensor of any strides; if hostile, of another shape, dtype, device, kind or type, or freed."""
        if self.chance():
            dim = self.random.randrange(len(shape))
            shape = self.random.choice(
                [(*shape[:dim], *shape[dim + 1 :]), (*shape[:dim], 0, *shape[dim + 1 :]), (*shape, 2)]
            )
        if self.chance():
            dtype = self.random.choice([*FLOATS, torch.int64, torch.int32, torch.bool, torch.complex64])
        way = self.random.randrange(6)
        wide = (*shape[:-1], 2 * shape[-1] + 1) if shape else shape
        numbers = torch.randint(high, wide) if not (dtype.is_floating_point or dtype.is_complex) else torch.randn(wide)
        x = numbers.to(dtype)
        x = x[..., : shape[-1]] if shape else x
        if way == 0 and x.dim() > 1:
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        elif way == 1 and x.dim() > 2 and x.size(1):
            x = x[:, :1].expand(x.shape)
        elif way == 2 and shape and self.chance():
            x = numbers.to(dtype)[..., : 2 * shape[-1] : 2]  # another stride in the last dim
        elif way > 2:
            x = x.contiguous()
        if self.on_meta or self.chance(self.hostile / 2):
            x = x.to("meta")
        elif self.chance(self.hostile / 2):
            x = x.clone()
            x.untyped_storage().resize_(self.random.choice([0, x.untyped_storage().nbytes() // 2]))
        elif self.chance(self.hostile / 2):
            with contextlib.suppress(RuntimeError, IndexError):  # of the kinds that do not take this dtype or shape
                x = self.random.choice(KINDS)(x)
        return self.of(x)

    def mask(self, rows: int, seq_len: int) -> Any:
        cut = self.size(0, seq_len)
        mask = self.random.choice(
            [
                lambda: IntervalMask.causal(self.of(seq_len)),
                lambda: IntervalMask.full(self.of(seq_len)),
                lambda: IntervalMask.sliding_window(seq_len, self.of(self.size(1, seq_len + 2))),
                lambda: IntervalMask.prefix_lm(seq_len, self.of(cut)),
                lambda: IntervalMask.chunked(seq_len, self.of(self.size(1, seq_len))),
                lambda: IntervalMask.documents(self.of([[cut, seq_len - cut]] * rows), self.chance(0.5)),
                lambda: IntervalMask.from_padding(self.tensor((rows, seq_len), torch.int64, 2)),
                lambda: IntervalMask.from_position_ids(self.tensor((rows, seq_len), torch.int64)),
                lambda: IntervalMask.from_bool(self.tensor((rows, seq_len, seq_len), torch.bool)),
                lambda: IntervalMask(*(self.tensor((rows, seq_len), torch.int32, seq_len) for _ in range(2))),
                lambda: IntervalMask(*(self.tensor((rows, seq_len), torch.int32, seq_len) for _ in range(4))),
                lambda: IntervalMask.tree(self.of([[-1, 0, 0]] * rows), self.of([[cut, 0, seq_len - cut]] * rows)),
                lambda: IntervalMask.documents([[cut, seq_len - cut]] * rows).last_keys(
                    self.of(self.size(1, seq_len)), first=self.of(self.size(0, 3))
                ),
            ]
        )()
        return self.of(mask, torch.ones(seq_len, seq_len, dtype=torch.bool))

    def layout(self, seq_len: int, world_size: int, mask: Any) -> Any:
        lengths = [seq_len // 2, seq_len - seq_len // 2]
        seq_len = self.of(seq_len, seq_len + 1)
        make = self.random.choice(
            [
                lambda: Layout.contiguous(seq_len, self.of(world_size)),
                lambda: Layout.zigzag(seq_len, self.of(world_size)),
                lambda: Layout.striped(seq_len, self.of(world_size)),
                lambda: Layout.per_document(self.of(lengths), world_size),
                lambda: Layout.balanced(mask, self.of(world_size), chunk=self.of(2)),
                lambda: Layout.from_runs(self.of([[(0, 1, 0, seq_len)]])),
                lambda: Layout.from_tensor(self.of(Layout.contiguous(seq_len, world_size).tensor)),
            ]
        )
        return self.of(make(), "zigzag")


def freed(x: Tensor) -> bool:
    """Return whether it is freed, or expanded, or without a storage of strides."""
    odd = x.is_nested or x.is_quantized or x.layout != torch.strided
    return odd or x.untyped_storage().nbytes() < x.nbytes


def differ(name: str, got: Tensor, expected: Tensor, dtype: torch.dtype) -> str:
    """Return what is wrong with a result, "" if nothing is. A result on meta has only a shape."""
    if got.shape != expected.shape:
        return f"{name} has shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if got.device.type == "meta" or expected.device.type == "meta":
        return ""
    got, expected = got.detach().double(), expected.detach().double()
    if not torch.equal(got.isnan(), expected.isnan()) or not torch.equal(got.isinf(), expected.isinf()):
        return f"{name} is not finite elsewhere than expected"
    got, expected = got[got.isfinite()], expected[expected.isfinite()]
    error = float((got - expected).abs().max()) if got.numel() else 0.0
    bound = TOLERANCE[dtype] * max(1.0, float(expected.abs().max()) if got.numel() else 0.0)
    return "" if error <= bound else f"{name} is off by {error:.1e}, expected at most {bound:.1e}"


# ---- the campaign -------------------------------------------------------------------------------


Trial = Callable[[Draw], str]


def outcome_of(seed: int, kinds: Sequence[Trial]) -> tuple[str, str]:
    """The field of Counts that trial `seed` counts for, and a note."""
    draw = Draw(seed)
    trial = draw.random.choice(kinds)
    try:
        problem = trial(draw)
    except RingtileError:
        return "named", ""
    except Exception as error:
        traceback.print_exc()
        return "unnamed", f"trial {seed} ({trial.__name__}): {type(error).__name__}: {str(error).splitlines()[:1]}"
    return ("silent", f"trial {seed} ({trial.__name__}): {problem}") if problem else ("right", "")


def work(connection: Connection, kinds: Sequence[Trial], first: int, last: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for seed in range(first, last):
        with contextlib.redirect_stderr(io.StringIO()):
            connection.send(outcome_of(seed, kinds))


def campaign_of(kinds: Sequence[Trial], trials: int, seed: int) -> Counts:
    counts = Counts()
    first, last = seed * 10**7, seed * 10**7 + trials
    context = multiprocessing.get_context("fork")
    while first < last:
        ours, theirs = context.Pipe()
        worker = context.Process(target=work, args=(theirs, kinds, first, last), daemon=True)
        worker.start()
        theirs.close()
        with contextlib.suppress(EOFError):
            while first < last and ours.poll(TRIAL_SECONDS):
                field, note = ours.recv()
                setattr(counts, field, getattr(counts, field) + 1)
                counts.notes += [note] if note else []
                first += 1
            if first < last:
                counts.hangs += 1
                counts.notes.append(f"trial {first}: no answer after {TRIAL_SECONDS:.0f} s")
                first += 1
                worker.kill()
        worker.join(TRIAL_SECONDS)
        if worker.exitcode not in (0, None, -9):
            counts.crashes += 1
            counts.notes.append(f"trial {first}: the process ended with {worker.exitcode}")
            first += 1
        worker.kill()
    return counts
