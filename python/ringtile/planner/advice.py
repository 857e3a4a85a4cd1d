"""What follows from planned steps: the longest sequence that fits, what each switch saves, the seconds of a step."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

from ringtile.errors import RingtileError
from ringtile.hf.batch import CHECKPOINTING
from ringtile.planner.setup import Setup
from ringtile.planner.simulate import LayerSeconds, simulate
from ringtile.planner.sizes import Rates
from ringtile.planner.step import StepMemory, TrainingStep
from ringtile.scheme import Scheme
from ringtile.sequence.layout import Layout, resolved
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.plan import Counts

_MAX_LOCAL_TOKENS, _MAX_CHUNKS = 2**20, 2**8  # planned; beyond, memory is a line through what was
_STEPS = 8  # of the search


class Longest(NamedTuple):
    """The longest sequence that fits, in tokens; 0: none. is_planned: else from the line through shorter ones."""

    seq_len: int
    is_planned: bool


class Switch(NamedTuple):
    """What changing one key alone does to the peak."""

    key: str
    total: int | None  # bytes of a rank at the peak; None: refused
    refused: str = ""


def multiple_of(setup: Setup) -> int:
    """What a sequence is padded to a multiple of."""
    return Layout.multiple(resolved(setup.ringtile.layout), setup.ringtile.context_parallel_size)


def padded(setup: Setup, seq_len: int) -> int:
    """Return the tokens of a sequence that is padded for its layout."""
    return -(-seq_len // multiple_of(setup)) * multiple_of(setup)


def longest(step: TrainingStep, memory: int, known: StepMemory) -> Longest:
    """Return the longest sequence whose peak is at most `memory` bytes, to 1 % below. known: one step that was planned.

    The peak is the largest of several sums that grow with the tokens, so it is convex. The line through two lengths
    meets the limit before the peak does where it lies between them, and after the peak does beyond both.
    """
    unit, keys = multiple_of(step.setup), step.setup.ringtile
    local = min(_MAX_LOCAL_TOKENS, _MAX_CHUNKS * keys.tile_tokens if keys.stream else _MAX_LOCAL_TOKENS)
    fits, most = known, keys.context_parallel_size * local // unit * unit
    above: StepMemory | None = None
    before: StepMemory | None = None
    if known.total > memory:
        fits, above = step.run(unit), known
        if fits.total > memory:
            return Longest(0, True)
    for _ in range(_STEPS):
        ends = [] if before is None else [_meets(before, fits, memory)]
        ends += [] if above is None else [above.seq_len]
        if ends and min(ends) - fits.seq_len <= max(unit, fits.seq_len // 100):
            break
        guess = 2 * fits.seq_len if not ends else ends[0] if above is None else _meets(fits, above, memory)
        guess = guess // unit * unit
        if guess > most:
            if fits.seq_len >= most // 2:
                return Longest(guess, False)
            guess = most
        if guess <= fits.seq_len:
            break
        found = step.run(guess)
        if found.total <= memory:
            before, fits = fits, found
        else:
            above = found
    return Longest(fits.seq_len, True)


def _meets(shorter: StepMemory, longer: StepMemory, memory: int) -> int:
    """Return the tokens at which the line through two lengths meets the limit, or twice the longer for a level line."""
    if longer.total <= shorter.total:
        return 2 * longer.seq_len
    slope = (longer.total - shorter.total) / (longer.seq_len - shorter.seq_len)
    return shorter.seq_len + int((memory - shorter.total) / slope)


def switches(setup: Setup, seq_len: int, fits: bool = True) -> list[Switch]:
    """The peak with each key that is off turned on, and with each other engine that shards more.

    What does not fit is also planned with twice the ranks, and with adapters, on weights in 4 bits too.
    """
    config = setup.ringtile
    changes: dict[str, dict[str, Any]] = {}
    if not (setup.gradient_checkpointing or config.stream):
        changes[f"{CHECKPOINTING}: true"] = {"gradient_checkpointing": True}
    elif not config.activation_offloading:
        changes["activation_offloading: true"] = {"activation_offloading": True}
    keeps = config.stream or (setup.gradient_checkpointing and config.context_parallel_size > 1)
    if keeps and config.keep_attention:
        changes["keep_attention: false"] = {"keep_attention": False}
    for key in ("tiled_loss", "stream") if config.stream else ("tiled_loss", "tiled_mlp", "tiled_norm", "stream"):
        if not getattr(config, key):
            changes[f"{key}: true"] = {key: True}
    if config.context_parallel_size < setup.devices:
        changes[f"context_parallel_size: {setup.devices}"] = {"context_parallel_size": setup.devices}
    if setup.devices > 1:
        for engine in ("fsdp2", "zero3"):
            if setup.engine != engine:
                changes[f"--engine {engine}"] = {"engine": engine}
    if setup.engine.startswith("zero") and not setup.offload_optimizer:
        changes["offload_optimizer: {device: cpu}"] = {"offload_optimizer": True}
    if not fits and setup.grpo is None:
        size, rank = 2 * config.context_parallel_size, setup.lora_rank or 16
        twice = {"context_parallel_size": size, "devices": 2 * setup.devices}
        changes[f"{2 * setup.devices} devices, context_parallel_size: {size}"] = twice
        if not setup.lora_rank:
            changes[f"--lora-rank {rank}"] = {"lora_rank": rank}
        if not setup.load_in_4bit:
            changes[f"--lora-rank {rank} --load-in-4bit"] = {"lora_rank": rank, "load_in_4bit": True}
    return [_tried(key, setup, changed, seq_len) for key, changed in changes.items()]


def _tried(key: str, setup: Setup, changed: dict[str, Any], seq_len: int) -> Switch:
    """changed: fields of the setup, and keys of ringtile's."""
    config = setup.ringtile
    keys = {name: changed[name] for name in changed.keys() & set(config.names())}
    fields = {name: changed[name] for name in changed.keys() - keys.keys()}
    try:
        config = type(config)(**{**config.given, **keys})
        with TrainingStep(dataclasses.replace(setup, ringtile=config, **fields)) as step:
            return Switch(key, step.run(seq_len).total)
    except RingtileError as error:
        return Switch(key, None, str(error))


def step_seconds(
    setup: Setup, memory: StepMemory, rates: Rates, hosts: tuple[int, ...], beside: IntervalMask | None = None
) -> LayerSeconds:
    """Return what matrix products and attention of one batch take, recomputed ones too; no rounds.

    hosts: of each device. beside: a mask of a padded sequence, with which those of the layers are intersected. What
    engines send, loading data and the optimizer are not counted.
    """
    size, config = setup.ringtile.context_parallel_size, setup.ringtile
    layout = Layout.of_mask(config.layout, beside or IntervalMask.causal(padded(setup, memory.seq_len)), size)
    scheme = Scheme.parse(config.context_parallel_scheme if size > 1 else "ring")
    products = memory.product_flops / rates.flops
    computing, mean, sending, together = products, products, 0.0, products
    for (shape, mask, is_again), count in collections.Counter(memory.attention).items():
        counts = Counts(mask if beside is None else mask & beside, layout, shape, scheme)
        of_call = simulate(counts, rates, hosts[:size], 0.0 if is_again else 1.0)
        computing += count * of_call.computing
        mean += count * of_call.mean
        sending += count * of_call.sending
        together += count * of_call.together
    return LayerSeconds(computing, mean, sending, together)
