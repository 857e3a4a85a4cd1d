"""The vocabulary-parallel tiled loss equals the loss with all classes on one rank, in float64.

A loss unaware of the sharding would take its softmax over each rank's own classes (cut cross entropy refuses or
breaks there).
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from counting import Counting, assert_near, relative_error
from pool import run_ranks
from ringtile import InputError, RingMismatchError, tiled_linear_cross_entropy
from test_tiled_loss import HIDDEN, OPTIONS, VOCAB, definition, problem, reduced
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

SHARDS = {2: [(17, 14), (31, 0)], 3: [(1, 10, 20)]}  # by world size, classes per rank
CASES = [
    {},
    *({name: value} for name, value in OPTIONS.items()),
    {**OPTIONS, "reduction": "none"},
    {**OPTIONS, "reduction": "sum"},
    {"num_items": 7},
]


def local_classes(sizes: tuple[int, ...], x: Tensor) -> Tensor:
    return x.detach().split(sizes)[dist.get_rank()].clone().requires_grad_()


def sharded_equals_the_definition(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    for case, with_bias in itertools.product(CASES, (False, True)):
        hidden, weight, labels, bias = problem(dtype=dtype)
        leaves = [hidden, local_classes(sizes, weight), *([local_classes(sizes, bias)] if with_bias else [])]
        loss = tiled_linear_cross_entropy(
            *leaves[:2], labels, *leaves[2:], group=dist.group.WORLD, tile_tokens=5, **case
        )
        options = {name: value for name, value in case.items() if name in OPTIONS}
        reduction = case.get("reduction", "mean")
        oracle = definition(hidden, weight, labels, bias if with_bias else None, **options)
        oracle = oracle.sum() / case["num_items"] if "num_items" in case else reduced(oracle, labels, reduction)
        dloss = torch.rand(labels.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        dloss = dloss if reduction == "none" else dloss[0]
        exact = list(torch.autograd.grad(oracle, [hidden, weight, bias][: len(leaves)], dloss))
        exact[1:] = [local_classes(sizes, x) for x in exact[1:]]
        ours = torch.autograd.grad(loss, leaves, dloss.to(loss.dtype))
        for one, other in zip((loss, *ours), (oracle, *exact), strict=True):
            if other.numel():
                # hidden's gradient: a sum over the ranks, of products rounded to dtype
                assert_near(one, other, num_terms=VOCAB)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sizes", [sizes for shards in SHARDS.values() for sizes in shards])
def test_sharded_loss_and_gradients_equal_the_definition(sizes, dtype) -> None:
    run_ranks(len(sizes), sharded_equals_the_definition, sizes, dtype)


def hard_problems() -> None:
    """Logits far from 0, far apart, or -inf: merging log-sum-exps must survive them."""
    hidden, weight, labels, bias = problem()
    for offset, spread in ((1e4, 1.0), (-1e4, 1.0), (0.0, 300.0)):
        with torch.no_grad():
            shifted = bias * spread + offset
            shifted[3] = -torch.inf
        labels[labels == 3] = 4
        sizes = (4, 27)
        leaves = [hidden, local_classes(sizes, weight), local_classes(sizes, shifted)]
        loss = tiled_linear_cross_entropy(*leaves[:2], labels, leaves[2], group=dist.group.WORLD)
        oracle = functional.cross_entropy(functional.linear(hidden, weight, shifted), labels)
        torch.testing.assert_close(loss, oracle, rtol=1e-12, atol=1e-10)  # logits of 1e4 are exact to 2e-12
        ours, theirs = torch.autograd.grad(loss, leaves[:2]), torch.autograd.grad(oracle, (hidden, weight))
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(ours[1], local_classes(sizes, theirs[1]).detach(), rtol=1e-9, atol=1e-11)


def test_logits_far_from_zero_and_masked_classes() -> None:
    run_ranks(2, hard_problems)


def bfloat16_errors() -> tuple[list[float], list[float]]:
    """Errors of loss and gradients against float64: vocabulary parallel, and with all classes on one rank."""
    hidden, weight, labels, _ = problem(256, torch.bfloat16, vocab_size=64)
    sizes = (32, 32)
    exact_loss = reduced(definition(hidden, weight, labels), labels, "mean")
    exact = (exact_loss, *torch.autograd.grad(exact_loss, (hidden, weight)))
    one_rank = tiled_linear_cross_entropy(hidden, weight, labels, tile_tokens=64)
    own = local_classes(sizes, weight)
    sharded = tiled_linear_cross_entropy(hidden, own, labels, tile_tokens=64, group=dist.group.WORLD)
    sharded_errors = [relative_error(sharded, exact_loss)]
    dhidden, dweight = torch.autograd.grad(sharded, (hidden, own))
    sharded_errors += [relative_error(dhidden, exact[1]), relative_error(dweight, local_classes(sizes, exact[2]))]
    ours = (one_rank, *torch.autograd.grad(one_rank, (hidden, weight)))
    return sharded_errors, [relative_error(one, other) for one, other in zip(ours, exact, strict=True)]


def test_bfloat16_loses_no_more_than_one_rounding_per_rank() -> None:
    for sharded, one_rank in run_ranks(2, bfloat16_errors):
        half_ulp = torch.finfo(torch.bfloat16).eps / 2
        assert sharded[0] <= one_rank[0] + torch.finfo(torch.float32).eps
        assert sharded[1] <= one_rank[1] + 2 * half_ulp  # each of the two ranks rounds its product before the sum
        assert sharded[2] <= one_rank[2] + half_ulp


def no_more_than_a_tile() -> list[int]:
    hidden, weight, labels, _ = problem(400, torch.float32, vocab_size=200)
    own = local_classes((100, 100), weight)
    largest = []
    for options in ({}, OPTIONS):
        with Counting() as count:
            tiled_linear_cross_entropy(
                hidden, own, labels, tile_tokens=40, group=dist.group.WORLD, **options
            ).backward()
        largest.append(count.largest)
    return largest


def test_no_more_logits_than_a_tile_of_the_local_classes() -> None:
    assert run_ranks(2, no_more_than_a_tile) == [[40 * 100] * 2] * 2  # hidden has 400 * 8


def dtensors(reduction: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    hidden, weight, labels, bias = problem()
    sharded = [distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_() for x in (weight, bias)]
    loss = tiled_linear_cross_entropy(hidden, sharded[0], labels, sharded[1], reduction=reduction, tile_tokens=5)
    oracle = reduced(definition(hidden, weight, labels, bias), labels, reduction)
    assert_near(loss, oracle, num_terms=VOCAB)
    exact = torch.autograd.grad(oracle.sum(), (hidden, weight, bias))
    ours = torch.autograd.grad(loss.sum(), (hidden, *sharded))
    for one, other in zip(ours, exact, strict=True):
        assert_near(one.full_tensor() if isinstance(one, DTensor) else one, other, num_terms=VOCAB)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_dtensor_weight_brings_its_group(reduction) -> None:
    run_ranks(2, dtensors, reduction)


def tied() -> None:
    """An embedding tied to the output projection and sharded over the same ranks: its two gradients add up."""
    _, table, labels, _ = problem()
    sizes, tokens = (17, 14), torch.arange(labels.numel()) % VOCAB
    own = local_classes(sizes, table)
    rank = dist.get_rank()
    mine = (tokens >= rank * 17) & (tokens < 17 + rank * 14)
    rows = torch.where(mine[:, None], own[(tokens - rank * 17).clamp(0, own.size(0) - 1)], 0)
    total = rows.detach().clone()
    dist.all_reduce(total)
    hidden = rows + (total - rows.detach())  # all embeddings; the gradient reaches only this rank's rows
    tiled_linear_cross_entropy(hidden, own, labels, group=dist.group.WORLD, tile_tokens=5).backward()
    oracle = reduced(definition(table[tokens], table, labels), labels, "mean")
    exact = torch.autograd.grad(oracle, table)[0].split(sizes)[rank]
    assert_near(own.grad, exact, num_terms=VOCAB)


def test_tied_and_sharded() -> None:
    run_ranks(2, tied)


def refusals() -> None:
    hidden, weight, labels, bias = problem()
    rank, own = dist.get_rank(), local_classes((17, 14), weight)
    world = {"group": dist.group.WORLD}

    def with_labels(*of_rank: list[int]) -> dict[str, Tensor]:
        return {"labels": torch.cat([torch.tensor(of_rank[rank]), labels[len(of_rank[rank]) :]])}

    for change in (
        {"labels": torch.where(labels == labels.max(), labels - rank, labels)},
        with_labels([3, 9, 4], [4, 7, 5]),  # by +1, -2, +1
        with_labels([-100, 7], [7, -100]),  # the same labels of other tokens
    ):
        with pytest.raises(RingMismatchError, match=r"disagree on a checksum of the labels in call .* rank \d has"):
            tiled_linear_cross_entropy(**{"hidden": hidden, "weight": own, "labels": labels, **world, **change})
    for name, change in {
        "the number of tokens with a label": {"labels": labels.index_fill(0, torch.tensor([1]), -100 if rank else 0)},
        "the number of tokens": {"hidden": hidden[: 23 - rank], "labels": labels[: 23 - rank]},
        "hidden.requires_grad": {"hidden": hidden.detach().requires_grad_(rank == 0)},
        "whether hidden, weight or bias needs a gradient": {
            "hidden": hidden.detach(),
            "weight": own.detach().requires_grad_(rank == 0),
        },
        "softcap": {"softcap": 2.0 + rank},
        "reduction": {"reduction": ["none", "sum"][rank]},
        "the divisor": {"num_items": 1 + rank},
    }.items():
        arguments = {"hidden": hidden, "weight": own, "labels": labels, **world, **change}
        with pytest.raises(RingMismatchError, match=rf"disagree on {name} in call .* rank \d has .*unshard\(\)"):
            tiled_linear_cross_entropy(**arguments)
    with pytest.raises(InputError, match=r"labels go from .* to 31, expected 0\.\.30"):
        tiled_linear_cross_entropy(hidden, own, labels.clamp(min=31), **world)
    mesh = init_device_mesh("cpu", (2,))
    sharded, replicated = (distribute_tensor(weight.detach(), mesh, [place]) for place in (Shard(0), Replicate()))
    with pytest.raises(InputError, match=r"weight is \(Replicate\(\),\), expected a DTensor sharded along its classes"):
        tiled_linear_cross_entropy(hidden, replicated, labels)
    with pytest.raises(InputError, match="bias is replicated, expected a DTensor"):
        tiled_linear_cross_entropy(hidden, sharded, labels, bias)


def test_ranks_that_disagree_and_other_placements_are_refused() -> None:
    """A weight that FSDP2 has sharded over data-parallel ranks is one such case: the ranks have different labels."""
    run_ranks(2, refusals)


def test_hidden_size_is_checked_against_the_local_classes() -> None:
    with pytest.raises(InputError, match=r"weight has shape \(0, 8\)"):
        tiled_linear_cross_entropy(torch.zeros(3, HIDDEN), torch.zeros(0, HIDDEN), torch.zeros(3, dtype=torch.int64))
