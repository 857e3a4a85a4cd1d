"""Ranks on two nodes, which a slow link joins: the same bits, the right rank named when the link goes, a training."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml
from attention_calls import MASKS, assemble, forward_and_backward, problem, run_ring
from nodes import TwoNodes, two_nodes
from pool import Pool
from ringtile import Layout, PeerLostError, ShardedSequence
from ringtile.transport.groups import transport_of

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = [("causal", "zigzag"), ("documents", "contiguous"), ("window", "striped")]
TIMEOUT = 4.0


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    try:
        context = two_nodes()
        nodes = context.__enter__()
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield nodes
    context.__exit__(None, None, None)


def sequence_of(mask: str, layout: str) -> ShardedSequence:
    return ShardedSequence(MASKS[mask], Layout.named(layout, 48, 4), dist.group.WORLD)


def ring() -> tuple[frozenset[int], list[object]]:
    """The peers that this rank shares memory with, and its results."""
    transport = transport_of(dist.group.WORLD)
    results = [forward_and_backward(problem(), sequence_of(mask, layout))[0] for mask, layout in SETTINGS]
    return transport._shared.peers, results  # type: ignore[attr-defined]


def test_two_nodes_have_the_bits_of_one_process(nodes: TwoNodes) -> None:
    pool = Pool(4, prepare=functools.partial(nodes.enter, ranks_per_node=2))
    try:
        outcomes = pool.run(ring)
    finally:
        pool.close()
    assert [peers for peers, _ in outcomes] == [{1}, {0}, {3}, {2}]
    for i, (mask, layout) in enumerate(SETTINGS):
        expected = run_ring(problem(), MASKS[mask], Layout.named(layout, 48, 4))
        got = assemble([results[i] for _, results in outcomes], Layout.named(layout, 48, 4))
        assert all(x.equal(y) for x, y in zip(got, expected, strict=True))


def lost() -> tuple[str, float]:
    """Calls until the other node is gone; what is said of it, and after how long."""
    p, began = problem(), time.monotonic()
    try:
        while time.monotonic() < began + 60:
            began_call = time.monotonic()
            forward_and_backward(p, sequence_of("causal", "zigzag"))
    except PeerLostError as error:
        return str(error), time.monotonic() - began_call
    return "nothing was lost", 0.0


@pytest.mark.long
def test_a_link_that_goes_down_is_named_by_all_within_the_timeout(nodes: TwoNodes) -> None:
    pool = Pool(4, TIMEOUT, prepare=functools.partial(nodes.enter, ranks_per_node=2))
    try:
        for connection in pool._connections:
            connection.send((lost, (), {}))
        time.sleep(4.0)
        nodes.cut()
        outcomes = [connection.recv()[0] for connection in pool._connections]
    finally:
        pool.close()
    for rank, (message, seconds) in enumerate(outcomes):
        assert re.match("rank [23] was lost in" if rank < 2 else "rank [01] was lost in", message), (rank, message)
        assert seconds < TIMEOUT + 3, message


@pytest.mark.long
def test_torchrun_on_two_nodes_trains_as_one_process(nodes: TwoNodes, tmp_path: Path) -> None:
    report, config = tmp_path / "report.json", tmp_path / "config.yaml"
    settings = yaml.safe_load((ROOT / "configs/tiny_cpu.yaml").read_text())
    settings["context_parallel_size"] = 4
    settings["training"]["max_steps"] = 3
    settings["data"]["files"] = [str(ROOT / "README.md")]
    config.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--master-addr", nodes.addresses[0], "--master-port", "29477"]
    training = ["-m", "ringtile", "train", str(config), "--compare", "--json", str(report)]
    started = [
        subprocess.Popen(
            nodes.command(node, *command, "--node-rank", str(node), *training),
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": nodes.names[node]},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    printed = [each.communicate(timeout=200)[0] for each in started]
    assert [each.returncode for each in started] == [0, 0], "\n".join(printed)
    assert json.loads(report.read_text())
