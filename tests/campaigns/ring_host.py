"""How long the host takes for attention on 8 ranks, where it only has to keep a GPU busy: CPU time a round.

    python tests/campaigns/ring_host.py [--calls 3000]

One rank of 8 runs alone, with two tokens, so that the CPU kernels that stand for those of a GPU have next to nothing to
do. Messages go the way of CUDA tensors, to torch's fake process group, which sends nothing; headers stay at home. What
CUDA and NCCL do on the host comes on top: launches, tensor maps, events.
"""

from __future__ import annotations

import argparse
import time
from unittest.mock import patch

import torch
import torch.distributed as dist
from ringtile import IntervalMask, Layout, ShardedSequence, ring_attention, self_test
from ringtile.transport import groups
from ringtile.transport.groups import ProcessGroupTransport
from ringtile.transport.transport import Messages, Works
from torch.testing._internal.distributed.fake_pg import FakeStore

WORLD_SIZES = (1, 4, 8)


class Alone(ProcessGroupTransport):
    """A rank that believes its group to be over NCCL, and its peers to agree."""

    def _post(self, messages: Messages, what: str) -> Works:
        return self._post_batch(messages, what)

    def _send_header(self, header: bytes, **options: bool) -> None:
        pass


def seconds(world_size: int, calls: int) -> tuple[float, float]:
    """Return the CPU time of a call, forward and backward: the tenth percentile, as the machine has other work."""
    group = dist.new_group(range(world_size))
    with patch.object(groups, "backend_name", lambda group, device_type: "nccl"):
        groups._transports[group] = Alone(group)
    seq_len = 2 * world_size
    sequence = ShardedSequence(IntervalMask.full(seq_len), Layout.zigzag(seq_len, world_size), group)
    q, k, v = (torch.randn(1, 2, heads, 8, dtype=torch.bfloat16).requires_grad_() for heads in (2, 1, 1))
    dout, times = torch.randn_like(q), []
    for _ in range(calls):
        began = time.thread_time()
        out = ring_attention(q, k, v, sequence=sequence)
        forward = time.thread_time()
        torch.autograd.grad(out, (q, k, v), dout)
        times.append((forward - began, time.thread_time() - forward))
    forwards, backwards = (sorted(each) for each in zip(*times, strict=True))
    return forwards[calls // 10], backwards[calls // 10]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=3000)
    calls = parser.parse_args().calls
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=max(WORLD_SIZES), store=FakeStore())
    with patch.object(self_test, "why_not", lambda key, test: self_test.failures.setdefault(key, "")):
        found = {world_size: seconds(world_size, calls) for world_size in WORLD_SIZES}
    print(
        "us        " + "".join(f"{size} ranks".rjust(10) for size in WORLD_SIZES) + "  a further round   of 8, all in"
    )
    for i, name in enumerate(("forward", "backward")):
        of = {size: 1e6 * times[i] for size, times in found.items()}
        further, all_in = (of[8] - of[4]) / 4, of[8] / 8
        print(f"{name:10}" + "".join(f"{of[size]:10.0f}" for size in WORLD_SIZES) + f"{further:17.0f}{all_in:16.0f}")


if __name__ == "__main__":
    main()
