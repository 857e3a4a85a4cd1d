"""What a training step does on a GPU, seen on a simulated one: copies to the host, waits, products in float32, and what
grows with the length of the sequence. tests/gpu/README.md has the numbers."""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import ringtile
import torch
from hf_models import hybrid, tiny_model
from hf_training import make_trainer
from pool import run_ranks
from ringtile.hf import attention, loss, shard
from ringtile.hf.first_batch import FirstBatch
from ringtile.recurrent import choose, fla
from ringtile.sequence.plan import RankPlan
from simulated_gpu import CUDA, SimulatedGpu
from torch import Tensor
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

CONFIG = {"context_parallel_size": 2, "tiled_mlp": True, "tiled_loss": True}
MODELS = ["llama", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen3-moe", "qwen3_next"))]
SHORT, LONG = 128, 512  # tokens of a row; of each of a rank's two runs, 32 and 128
ROTATION = 16  # elements: models multiply positions by frequencies, of half a head, in float32


class Step(NamedTuple):
    """What `SimulatedGpu` recorded."""

    to_host: list[str]
    to_device: list[str]
    launches: Counter[str]
    collectives: Counter[str]
    wide_products: list[tuple[str, int]]


def batch_of(kind: str, seq_len: int, step: int = 0) -> dict[str, Tensor]:
    """Two rows, of which a fifth of the targets are ignored; documents and padding differ from step to step."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 96, (2, seq_len), generator=generator)
    batch = {"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -100)}
    places = torch.arange(seq_len).expand(2, -1)
    if kind == "packed":
        batch["position_ids"] = torch.where(places < seq_len // 3 + step, places, places - seq_len // 3 - step)
    if kind == "padded":
        batch["attention_mask"] = (places < seq_len - torch.tensor([[0], [5 + step]])).long()
    return batch


def _convolution(x: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, None]:
    """Stands in for flash-linear-attention's: of its shapes and dtypes, without a kernel and with other numbers."""
    return x * weight.sum(1), None


def _delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """As `_convolution`."""
    repeats = v.size(2) // k.size(2)
    weights = (q * k).sum(-1).repeat_interleave(repeats, dim=2) * (g.exp() * beta)
    states = (*v.shape[2:], k.size(3))
    return (v * weights[..., None]).to(v.dtype), v.new_zeros(len(options["cu_seqlens_cpu"]) - 1, *states).float().mT


@contextlib.contextmanager
def enabled(family: str, dtype: torch.dtype, gpu: SimulatedGpu | None, **arguments: Any) -> Iterator[Trainer]:
    make = hybrid if family == "qwen3_next" else functools.partial(tiny_model, max_position_embeddings=LONG)
    trainer = make_trainer(model=make(family).to(dtype).train(), **arguments)
    device = torch.device("cpu") if gpu is None else CUDA
    with (
        mock.patch.object(TrainingArguments, "device", property(lambda self: device)),
        mock.patch.object(attention, "_KERNEL", "ringtile"),
        mock.patch.object(choose, "why_not", return_value=""),
        mock.patch.object(fla, "_function", {"causal_conv1d": _convolution, "chunk_gated_delta_rule": _delta}.get),
        mock.patch.object(loss, "check_training_model"),  # no engine: its work is not ringtile's
        mock.patch.object(FirstBatch, "_prove"),  # a proof, which the simulated GPU cannot make, is over after a step
    ):
        if gpu is not None:
            gpu.move(trainer.model)
        ringtile.enable(trainer, CONFIG)
        yield trainer
        ringtile.restore(trainer)


def train_step(trainer: Trainer, batch: dict[str, Tensor]) -> Tensor:
    _, num_items = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
    return trainer.training_step(trainer.model, batch, num_items)


def recorded(family: str, kind: str, seq_lens: tuple[int, ...]) -> list[Step]:
    """Steps on rows of these lengths, after a first one, in which buffers are made."""
    steps = []
    with SimulatedGpu() as gpu, enabled(family, torch.bfloat16, gpu) as trainer:
        for step, seq_len in enumerate([seq_lens[0], *seq_lens]):
            batch = {name: x.to(CUDA) for name, x in batch_of(kind, seq_len, step).items()}
            gpu.forget()
            train_step(trainer, batch)
            steps.append(Step(gpu.to_host, gpu.to_device, gpu.launches, gpu.collectives, gpu.wide_products))
            gpu.forget()
    return steps[1:]


@functools.cache
def steps_of(family: str) -> list[Step]:
    """Steps on packed rows, short and long."""
    return run_ranks(2, recorded, family, "packed", (SHORT, LONG))[0]


@pytest.mark.parametrize("family", MODELS)
def test_the_host_waits_twice_a_step(family: str) -> None:
    """For what it must know of the batch, and of the labels."""
    for step in steps_of(family):
        assert [place.partition(" ")[2].rpartition(":")[0] for place in step.to_host] == [
            "ringtile/hf/masks.py",
            "ringtile/tiled/loss.py",
        ]
        # Recurrences copy which document each token is in.
        assert [place for place in step.to_device if "ringtile/recurrent/" not in place] == []


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.long), "padded"])
def test_other_batches_cost_no_more(kind: str) -> None:
    (step,) = run_ranks(2, recorded, "llama", kind, (SHORT,))[0]
    assert (len(step.to_host), step.to_device) == (2, [])


@pytest.mark.parametrize("family", MODELS)
def test_models_of_16_bits_multiply_16_bits(family: str) -> None:
    """But for rotations."""
    for step in steps_of(family):
        assert [(place, size) for place, size in step.wide_products if size > ROTATION] == []


@pytest.mark.parametrize("family", MODELS)
def test_longer_rows_launch_no_more(family: str) -> None:
    short, long = steps_of(family)
    assert long.launches == short.launches
    assert long.collectives == short.collectives


@pytest.mark.parametrize("family", MODELS)
def test_the_documentation_has_these_numbers(family: str) -> None:
    text = (Path(__file__).parents[2] / "tests/gpu/README.md").read_text(encoding="ascii")
    found = dict(re.findall(r"^\| `(\S+)` \|(.*)\|$", text, re.MULTILINE))
    step = steps_of(family)[0]
    kernels = sum(count for name, count in step.launches.items() if name.startswith("ringtile."))
    counted = [len(step.to_host), len(step.to_device), kernels, step.collectives["send"]]
    assert counted == [int(cell) for cell in found[family].split("|")]


# ---- the next batch -----------------------------------------------------------------------------


def with_mask(rows: Any) -> dict[str, Any]:
    """One row, and a mask of two documents that nothing else tells."""
    batch = DataCollatorWithFlattening()(rows)
    first = 1 + int(batch["labels"].sum()) % (batch["input_ids"].size(1) - 1)
    mask = ringtile.IntervalMask.documents([first, batch["input_ids"].size(1) - first])
    return {"input_ids": batch["input_ids"], "labels": batch["labels"], "interval_mask": mask}


def train_packed(
    looks: bool, changes: bool, scheme: str = "ring", masked: bool = False
) -> tuple[list[float], Counter[str]]:
    """The losses of six micro-batches of packed rows, two a step, from a data loader; what was made, and when.

    looks: whether the next batch is read while the simulated GPU computes; changes: documents of half of the batches,
    behind the data loader; masked: each has a mask of its own.
    """
    made: Counter[str] = Counter()
    now, losses = ["when it came"], []

    def counted(original: Any, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            made[f"{name} {now[-1]}"] += 1
            return original(*args, **kwargs)

        return call

    def look_ahead(self: shard.Sharding, inputs: Any) -> None:
        now.append("ahead")
        if looks:
            looked(self, inputs)
        now.pop()

    looked = shard.Sharding.look_ahead
    with (
        mock.patch.object(shard.Sharding, "look_ahead", look_ahead),
        mock.patch.object(shard, "mask_of_batch", counted(shard.mask_of_batch, "mask")),
        mock.patch.object(RankPlan, "of", counted(RankPlan.of, "plan")),
        mock.patch.dict(CONFIG, context_parallel_scheme=scheme),
        SimulatedGpu() as gpu,
        enabled("llama", torch.float32, gpu, collator=with_mask if masked else DataCollatorWithFlattening()) as trainer,
    ):
        loaded = iter(trainer.get_train_dataloader())
        for _ in range(3):
            batches, num_items = trainer.get_batch_samples(loaded, 2, trainer.args.device)
            for i, batch in enumerate(batches):
                if changes and i == 0:
                    batch["position_ids"] = torch.arange(batch["input_ids"].size(1))[None]
                losses.append(float(trainer.training_step(trainer.model, batch, num_items).cpu()))
    return losses, made


@pytest.mark.parametrize("changes", [False, True])
def test_the_next_batch_is_read_while_this_one_is_computed(changes: bool) -> None:
    """The mask and the plan of each batch but the first; one that was changed since is read again."""
    expected, _ = run_ranks(2, train_packed, False, changes)[0]
    for losses, made in run_ranks(2, train_packed, True, changes):
        assert made["mask ahead"] == made["plan ahead"] == 6  # of the batch that never comes, too
        assert made["mask when it came"] == made["plan when it came"] == (3 if changes else 1)
        assert losses == expected


def test_a_mask_in_the_next_batch_is_not_lost() -> None:
    expected, _ = run_ranks(2, train_packed, False, False, masked=True)[0]
    for losses, made in run_ranks(2, train_packed, True, False, masked=True):
        assert made["mask when it came"] == 6
        assert losses == expected


@pytest.mark.long
def test_the_next_batch_is_read_under_a_scheme_that_depends_on_it() -> None:
    for _, made in run_ranks(2, train_packed, True, False, "auto"):
        assert (made["plan ahead"], made["plan when it came"]) == (6, 1)


# ---- what is computed from the copies ------------------------------------------------------------


def losses(kind: str) -> tuple[float, float]:
    """Of a float32 model, on the simulated GPU and on the CPU."""
    batch = batch_of(kind, 45)  # padded by the layout
    with SimulatedGpu() as gpu, enabled("llama", torch.float32, gpu) as trainer:
        simulated = float(train_step(trainer, {name: x.to(CUDA) for name, x in batch.items()}).detach().cpu())
    with enabled("llama", torch.float32, None) as trainer:
        return simulated, float(train_step(trainer, batch))


@pytest.mark.parametrize("kind", [pytest.param("packed", marks=pytest.mark.long), "padded"])
def test_the_loss_is_that_of_the_cpu(kind: str) -> None:
    """float32, other tiles: as far apart as two orders of a sum of 90 numbers."""
    simulated, on_cpu = run_ranks(2, losses, kind)[0]
    assert simulated == pytest.approx(on_cpu, rel=90 * torch.finfo(torch.float32).eps)


def refusals() -> list[str]:
    """Of bad batches on the simulated GPU."""
    said = []
    with SimulatedGpu() as gpu, enabled("llama", torch.float32, gpu) as trainer:
        rank = torch.distributed.get_rank()
        ones = torch.ones(2, 48, dtype=torch.int64)
        bad: list[dict[str, Any]] = [
            {"input_ids": batch_of("plain", 48, rank)["input_ids"]},
            {"attention_mask": ones.index_fill(1, torch.tensor([3]), rank)},
            {"attention_mask": ones, "position_ids": batch_of("packed", 48)["position_ids"]},
            {"attention_mask": torch.ones(2, 1, 48, 48)},
            {"labels": ones * 96},
        ]
        for changes in bad:
            batch = {name: x.to(CUDA) for name, x in (batch_of("plain", 48) | changes).items()}
            with pytest.raises(ringtile.RingtileError) as raised:
                train_step(trainer, batch)
            said.append(f"{type(raised.value).__name__}: {raised.value}")
    return said


def test_batches_are_refused_as_on_a_cpu() -> None:
    names = ("RingMismatchError", "RingMismatchError", "RefusedError", "RefusedError", "InputError")
    parts = ("checksum of input_ids", "checksum of the other", "position_ids restart where", "4-D", "to 96, expected")
    for said in run_ranks(2, refusals):
        for text, name, part in zip(said, names, parts, strict=True):
            assert text.startswith(name)
            assert part in text


# ---- the simulated GPU ---------------------------------------------------------------------------


def test_the_simulated_gpu_sees_each_wait() -> None:
    with SimulatedGpu() as gpu:
        x = torch.arange(6).to(CUDA)
        waits = {
            "item": lambda: x.sum().item(),
            "int": lambda: int(x[1]),
            "bool": lambda: bool((x > 3).any()),
            "tolist": lambda: x.tolist(),
            "cpu": lambda: x.cpu(),
            "copy": lambda: torch.empty(6, dtype=torch.int64).copy_(x),
            "nonzero": lambda: x.nonzero(),
            "index by bool": lambda: x[x > 2],
            "masked_select": lambda: x.masked_select(x > 2),
            "unique": lambda: x.unique(),
            "equal": lambda: torch.equal(x, x + 1),
        }
        for name, wait in waits.items():
            gpu.forget()
            wait()
            assert len(gpu.to_host) == 1, name
        for make in (lambda: torch.ones(3).to(CUDA), lambda: torch.tensor([1, 2], device=CUDA)):
            gpu.forget()
            make()
            assert (len(gpu.to_host), len(gpu.to_device)) == (0, 1)
        gpu.forget()
        torch.ones(3).pin_memory().to(CUDA, non_blocking=True)
        torch.full((2,), 3, device=CUDA)
        assert gpu.to_host == gpu.to_device == []
        with pytest.raises(RuntimeError, match="on the GPU and on the CPU"):
            x + torch.arange(6)
        left = torch.ones(2, 3, device=CUDA, requires_grad=True)
        (left @ torch.ones(3, 2, device=CUDA)).sum().backward()
        assert len(gpu.wide_products) == 2
        assert left.grad is not None
        assert left.grad.is_cuda
