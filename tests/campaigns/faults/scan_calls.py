"""Calls of the recurrences and their convolution: any shapes, dtypes, documents, padding, layouts whose pieces lie in
no order, decays that are strong, absent or -inf; and arguments that are nearly right or absurd.

Accepted calls are compared with their definitions in float64, forward and backward.

`python -m faults.scan_calls TRIAL ...` makes the trials of these numbers again, and shows tracebacks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import ringtile
import scan_oracle
import torch
from ringtile import Layout, LoopbackWorld, ShardedSequence
from ringtile.sequence.mask import IntervalMask
from strategies import dense
from torch import Tensor
from torch.nn import functional

from faults.calls import FLOATS, Draw, campaign_of, differ, freed, outcome_of
from faults.counts import Counts

Tensors = dict[str, Any]
DECAYS = (0.0, 0.1, 1.0, 1e4, float("inf"))


def lengths_of(draw: Draw, seq_len: int) -> list[int]:
    lengths: list[int] = []
    while sum(lengths) < seq_len:
        lengths.append(draw.size(1, seq_len - sum(lengths)))
    return lengths


def layout_of(draw: Draw, seq_len: int, world_size: int) -> Any:
    """Pieces of any length, of any rank, in any order on it."""
    if draw.chance(0.3):
        return draw.layout(seq_len, world_size, IntervalMask.causal(seq_len))
    pieces: list[tuple[int, int]] = []
    for length in lengths_of(draw, seq_len):
        pieces.append((sum(pieces[-1]) if pieces else 0, length))
    draw.random.shuffle(pieces)
    ranks: list[list[tuple[int, int, int, int]]] = [[] for _ in range(world_size)]
    for begin, length in pieces:
        runs = draw.random.choice(ranks)
        runs.append((begin, 1, sum(run[3] for run in runs), length))
    return Layout.from_runs(ranks)


def mask_of(draw: Draw, batch: int, seq_len: int) -> Any:
    if draw.chance():
        return draw.mask(max(batch, 1), seq_len)
    padding = draw.size(0, seq_len - 1) if draw.chance(0.3) else 0
    rows = [lengths_of(draw, seq_len - padding) for _ in range(draw.random.choice([1, max(batch, 1)]))]
    if seq_len <= 30 and draw.chance(0.5):  # the definition takes every token's path
        mask = IntervalMask.tree([parents_of(draw, len(row)) for row in rows], rows)
    else:
        mask = IntervalMask.documents(rows)
    return mask.padded(padding) if padding else mask


def parents_of(draw: Draw, num_nodes: int) -> list[int]:
    """Of the nodes of trees, in depth-first order."""
    parents, path = list[int](), list[int]()
    for node in range(num_nodes):
        del path[draw.random.randint(0, len(path)) :]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return parents


def of_paths(
    compute: Callable[..., Tensor], tensors: Tensors, parameters: tuple[str, ...], mask: IntervalMask
) -> Tensor:
    """compute(tensors, seq_idx) -> out, where a token is the last one of a row of its own: of what it attends."""
    batch, seq_len = next(x for n, x in tensors.items() if n not in parameters).shape[:2]
    attends = dense(mask).expand(batch, -1, -1)
    held = [(row, q) for row in range(batch) for q in range(seq_len) if attends[row, q, q]]
    paths = [row * seq_len + attends[row, q].nonzero().flatten() for row, q in held]
    longest = max((len(path) for path in paths), default=0)
    places = torch.stack(
        [functional.pad(path, (longest - len(path), 0), value=-1) for path in paths] or [torch.zeros(0)]
    )
    rows = {n: x if n in parameters else x.flatten(0, 1)[places.clamp(min=0).long()] for n, x in tensors.items()}
    out = compute(rows, torch.where(places < 0, -1, 0))[:, -1]
    whole = out.new_zeros(batch * seq_len, *out.shape[1:])
    return whole.index_copy(0, torch.tensor([row * seq_len + q for row, q in held]), out).unflatten(0, (batch, seq_len))


def seq_idx_of(mask: IntervalMask) -> Tensor:
    positions = torch.arange(mask.seq_len)
    held = (mask.begin <= positions) & (positions < mask.end)
    return torch.where(held, (held & (mask.begin == positions)).cumsum(1), -1)


def is_usable(x: Any) -> bool:
    """Return whether torch itself computes with it: of a freed storage it reads what is not there."""
    return isinstance(x, Tensor) and x.is_floating_point() and not freed(x)


def decay_of(draw: Draw, x: Any) -> Any:
    """Log decays: of one strength everywhere, or of all strengths."""
    if not is_usable(x) or x.device.type == "meta":
        return x
    strengths = torch.tensor(draw.random.choice([[s] for s in DECAYS] + [list(DECAYS)]), dtype=torch.float64)
    strength = strengths[torch.randint(len(strengths), x.shape)]
    return (-strength * (x.double().abs() + 0.1)).nan_to_num(0.0, neginf=-torch.inf).to(x.dtype)


def moderate(x: Any) -> Any:
    """Numbers in (0, 1)."""
    return x.sigmoid() if is_usable(x) else x


def of_length_one(x: Any) -> Any:
    return functional.normalize(x, dim=-1) if is_usable(x) and x.dim() > 0 else x


def run(
    draw: Draw, name: str, batch: int, seq_len: int, tensors: Tensors, parameters: tuple[str, ...], options: Tensors
) -> str:
    """One call, over one rank or more; options: keyword arguments that are no tensors."""
    world_size = draw.random.choice([1, 1, 2, 3])
    mask, layout = mask_of(draw, batch, seq_len), layout_of(draw, seq_len, world_size)
    function: Callable[..., Tensor] = getattr(ringtile, name)
    given = {n: x for n, x in tensors.items() if x is not None or n not in ("bias", "D")}
    if (
        not all(is_usable(x) for x in given.values())
        or not isinstance(mask, IntervalMask)
        or not isinstance(layout, Layout)
    ):
        function(**tensors, **options, mask=mask, layout=layout)
        return ""

    def on_rank(group: Any) -> tuple[Tensor, Tensors]:
        sequence = ShardedSequence(mask, layout, group)
        local = {n: (x if n in parameters else sequence.shard(x, 1)).detach() for n, x in given.items()}
        local = {n: x.clone().requires_grad_() for n, x in local.items()}
        out = function(**local, **options, sequence=sequence)
        slopes = torch.linspace(-1, 1, out.size(-1), device=out.device).to(out.dtype)
        (out * slopes).sum().backward()
        gradients = {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in local.items()}
        whole = {n: x if n in parameters else sequence.unshard(x, 1) for n, x in gradients.items()}
        return sequence.unshard(out.detach(), 1), whole

    results = LoopbackWorld(layout.world_size).run(on_rank)
    out, gradients = results[0]
    if out.device.type == "meta" or not out.numel():
        return differ("out", out, given["v" if "v" in given else "x"], out.dtype)  # its shape
    for n in parameters:
        if n in gradients:
            gradients[n] = sum((of_rank[n].double() for _, of_rank in results[1:]), gradients[n].double())
    exact = {n: x.detach().to(torch.float64, copy=True).requires_grad_() for n, x in given.items()}
    oracle: Callable[..., tuple[Tensor, Tensor]] = getattr(scan_oracle, name)
    absent = {n: None for n, x in tensors.items() if x is None}

    def compute(tensors: Tensors, seq_idx: Tensor) -> Tensor:
        return oracle(**tensors, **absent, **options, seq_idx=seq_idx, initial_state=None)[0]

    expected = (
        of_paths(compute, exact, parameters, mask) if mask.key_begin is not None else compute(exact, seq_idx_of(mask))
    )
    dtype = next(iter(given.values())).dtype
    if problem := differ("out", out, expected.to(dtype), dtype):  # which may hold no number so large
        return problem
    slopes = torch.linspace(-1, 1, out.size(-1)).to(out.dtype).double()
    leaves = list(exact.values())
    total = (expected * slopes).sum()
    wanted = [torch.zeros_like(x) for x in leaves]  # of padding alone
    if total.requires_grad:
        wanted = list(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))
    for n, want in zip(exact, wanted, strict=True):
        known = bool(want.isfinite().all())  # not so autograd's 0 times the slope of exp at -inf
        rounded_to = max(dtype, given[n].dtype, key=lambda of: torch.finfo(of).eps)
        if known and (problem := differ(f"gradient of {n}", gradients[n], want.to(given[n].dtype), rounded_to)):
            return problem
    return ""


def convolution(draw: Draw) -> str:
    batch, seq_len, channels, dtype = sizes(draw)
    width = draw.size(2, 8)
    tensors = {"x": draw.tensor((batch, seq_len, channels), dtype), "weight": draw.tensor((channels, width), dtype)}
    tensors["bias"] = draw.tensor((channels,), dtype) if draw.chance(0.5) else None
    options = {"activation": draw.of(draw.random.choice(["", "silu"]))}
    return run(draw, "causal_conv1d", batch, seq_len, tensors, ("weight", "bias"), options)


def delta(draw: Draw) -> str:
    batch, seq_len, _, dtype = sizes(draw)
    groups, dims = draw.size(1, 3), (draw.size(1, 9), draw.size(1, 9))
    heads = groups * draw.size(1, 2)
    q, k = (of_length_one(draw.tensor((batch, seq_len, groups, dims[0]), dtype)) for _ in range(2))
    tensors = {"q": q, "k": k, "v": draw.tensor((batch, seq_len, heads, dims[1]), dtype)}
    shape = (batch, seq_len, heads, dims[0]) if draw.chance(0.5) else (batch, seq_len, heads)
    tensors["g"] = decay_of(draw, draw.tensor(shape, dtype))
    tensors["beta"] = moderate(draw.tensor((batch, seq_len, heads), dtype))
    return run(draw, "gated_delta_rule", batch, seq_len, tensors, (), {"scale": draw.number(0.7, -0.5)})


def ssd(draw: Draw) -> str:
    batch, seq_len, _, dtype = sizes(draw)
    groups, dims = draw.size(1, 3), (draw.size(1, 9), draw.size(1, 9))
    heads = groups * draw.size(1, 2)
    tensors = {"x": draw.tensor((batch, seq_len, heads, dims[1]), dtype)}
    tensors["dt"] = moderate(draw.tensor((batch, seq_len, heads), dtype))
    tensors["A"] = decay_of(draw, draw.tensor((heads,), dtype))
    for name in "BC":
        tensors[name] = of_length_one(draw.tensor((batch, seq_len, groups, dims[0]), dtype))
    tensors["D"] = draw.tensor((heads,), dtype) if draw.chance(0.5) else None
    return run(draw, "ssd", batch, seq_len, tensors, ("A", "D"), {})


def selective(draw: Draw) -> str:
    batch, seq_len, channels, dtype = sizes(draw)
    states = draw.size(1, 6)
    tensors = {"x": draw.tensor((batch, seq_len, channels), dtype)}
    tensors["dt"] = moderate(draw.tensor((batch, seq_len, channels), dtype))
    tensors["A"] = decay_of(draw, draw.tensor((channels, states), dtype))
    for name in "BC":
        tensors[name] = of_length_one(draw.tensor((batch, seq_len, states), dtype))
    tensors["D"] = draw.tensor((channels,), dtype) if draw.chance(0.5) else None
    return run(draw, "selective_scan", batch, seq_len, tensors, ("A", "D"), {})


def sizes(draw: Draw) -> tuple[int, int, int, torch.dtype]:
    """Batch, tokens (some times more than a chunk of the kernels), channels (more than one of their tasks), dtype."""
    seq_len = draw.random.choice([draw.size(1, 30), draw.size(1, 30), draw.size(60, 140)])
    channels = draw.random.choice([draw.size(1, 9), draw.size(1, 9), draw.size(60, 140)])
    return draw.size(0, 2), seq_len, channels, draw.random.choice(FLOATS)


TRIALS = (convolution, delta, ssd, selective)
DEFAULT_TRIALS = 2000


def campaign(trials: int | None, seed: int) -> Counts:
    return campaign_of(TRIALS, DEFAULT_TRIALS if trials is None else trials, seed)


if __name__ == "__main__":
    for number in sys.argv[1:]:
        print(number, *outcome_of(int(number), TRIALS))
