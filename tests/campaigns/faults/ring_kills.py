"""Kills or stops a random rank at a random moment of a ring: every survivor must name it, and soon."""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from pool import Pool, start_server
from ringtile import IntervalMask, Layout, PeerLostError, ShardedSequence, ring_attention

from faults.counts import Counts
from faults.training_kills import SCHEMES

NEED_EVEN_HEADS = ("ulysses", "usp:2")  # an even number of ranks, with 4 heads

# A killed rank is noticed without a timeout; a stopped one is missed after it.
_GROUP_TIMEOUT = {signal.SIGKILL: 60.0, signal.SIGSTOP: 2.0}
_SOON = {signal.SIGKILL: 3.0, signal.SIGSTOP: 2.0 + 3.0}  # seconds from the signal to a survivor's error


def run_until_lost(victim: int, number: int, after: float, when: str, scheme: str) -> tuple[int | None, str, float]:
    """Forwards and backwards for ever; the victim sends itself the signal. Who was lost, what was said, and when."""
    layout = Layout.contiguous(48, dist.get_world_size())
    sequence = ShardedSequence(IntervalMask.causal(48), layout, dist.group.WORLD, scheme=scheme)
    q, k, v = (torch.ones(1, 48 // dist.get_world_size(), 4, 8, requires_grad=True) for _ in range(3))
    long = torch.zeros(48 // dist.get_world_size(), 2**17)  # megabytes: a helper thread moves them

    def communicate() -> None:
        ring_attention(q, k, v, sequence).sum().backward()
        sequence.unshard(long, 0)

    for _ in range(2):  # all ranks have agreed and are connected
        communicate()
    dist.barrier()
    if dist.get_rank() == victim:

        def send() -> None:
            time.sleep(after)
            Path(when).write_text(str(time.monotonic()))
            os.kill(os.getpid(), number)

        threading.Thread(target=send, daemon=True).start()
    try:
        while True:
            communicate()
    except PeerLostError as error:
        return error.rank, str(error), time.monotonic()


def campaign(trials: int | None, seed: int) -> Counts:
    start_server()
    counts, chance = Counts(), random.Random(seed)
    seconds: dict[signal.Signals, list[float]] = {signal.SIGKILL: [], signal.SIGSTOP: []}
    for trial in range(trials or 50):
        world_size = 2 + trial % 3
        number = signal.SIGSTOP if trial % 5 == 4 else signal.SIGKILL
        schemes = SCHEMES if world_size != 3 else [each for each in SCHEMES if each not in NEED_EVEN_HEADS]
        scheme = schemes[trial % len(schemes)]
        victim, after = chance.randrange(world_size), chance.uniform(0.0, 0.1)
        pool = Pool(world_size, _GROUP_TIMEOUT[number])
        try:
            with tempfile.TemporaryDirectory() as folder:
                when = Path(folder) / "when"
                stopped = victim if number == signal.SIGSTOP else None
                outcomes = pool.outcomes(
                    run_until_lost, victim, number, after, str(when), scheme, timeout=60.0, stopped=stopped
                )
                start = float(when.read_text()) if when.exists() else None
        finally:
            pool.close()
        what = f"trial {trial}: {number.name} of rank {victim} of {world_size} under {scheme}"
        if start is None and number == signal.SIGSTOP:  # a busy machine exceeded the short timeout before: no trial
            print(f"{what}: no signal was sent: {outcomes}", flush=True)
            continue
        if start is None:
            counts.unnamed += 1
            counts.notes.append(f"{what}: no signal was sent: {outcomes}")
            continue
        survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
        hung = [outcome for outcome in survivors if isinstance(outcome, BaseException)]
        wrong = [outcome for outcome in survivors if not isinstance(outcome, BaseException) and outcome[0] != victim]
        late = [outcome for outcome in survivors if outcome not in hung and outcome[2] - start > _SOON[number]]
        if hung or late:
            counts.hangs += 1
            counts.notes.append(f"{what}: {(hung or late)[0]!r}")
        elif wrong:
            counts.unnamed += 1
            counts.notes.append(f"{what}: {wrong[0][1]}")
        else:
            counts.named += 1
            seconds[number] += [outcome[2] - start for outcome in survivors]
    left = [name for name in os.listdir("/dev/shm") if "ringtile" in name]
    if left:
        counts.unnamed += 1
        counts.notes.append(f"left in /dev/shm: {left}")
    for number, times in seconds.items():
        if times:
            median, longest = statistics.median(times), max(times)
            counts.notes.insert(
                0, f"{len(times)} ranks, {number.name} to error: median {median:.2f} s, longest {longest:.2f} s"
            )
    return counts
