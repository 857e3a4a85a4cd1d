"""Two ranks on one GPU over real NCCL: the schemes, and a Trainer with the first batch proved, under DDP and FSDP2.

python tests/gpu/two_on_one.py FOLDER. NCCL refuses two ranks with one GPU on one host, so each is given a host's name
of its own (NCCL_HOSTID; from 2.30 on NCCL_MULTI_RANK_GPU_ENABLE), and messages travel over sockets: slow, by the code
that many GPUs run. The losses are those of one process without ringtile, trained first. On a CPU over gloo, a
rehearsal. Writes FOLDER/two_on_one_*.log and *.json; exits with 1 if a program failed, after all have run.
"""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
import time

import torch
from failures import LINES, failures, line

HERE = pathlib.Path(__file__).resolve().parent
LIMIT = 75.0  # seconds of each program; of a rehearsal ten times that
GRACE = 10.0  # seconds between a rank that fails and the end of the others
NCCL = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_DEBUG": "WARN",
}
PROVED = "ringtile: on the first batch 2 ranks compute what one process does"


def environment_of(rank: int, world_size: int, port: int) -> dict[str, str]:
    """As torchrun's, but that both ranks have the one GPU there is, each on a host of its own."""
    names = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    numbers = {name: str(value) for name, value in names.items()}
    return os.environ | NCCL | numbers | {"MASTER_ADDR": "127.0.0.1", "NCCL_HOSTID": f"host{rank}"}


def launch(folder: pathlib.Path, name: str, world_size: int, command: tuple[str, ...], limit: float) -> bool:
    """Run a program of this folder on each rank, with a log of its own. Return whether it ended well; else print the
    last lines of each rank, and FAILED lines unless the ranks have."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [folder / f"two_on_one_{name}_{rank}.log" for rank in range(world_size)]
    program = (sys.executable, str(HERE / command[0]), *command[1:])
    ranks = []
    for rank, log in enumerate(logs):
        environment = environment_of(rank, world_size, port)
        with log.open("w") as out:
            ranks.append(subprocess.Popen(program, env=environment, stdout=out, stderr=subprocess.STDOUT))
    began = time.monotonic()
    ends = began + limit
    while None in (codes := [rank.poll() for rank in ranks]) and time.monotonic() < ends:
        if any(codes):
            ends = min(ends, time.monotonic() + GRACE)  # the others may wait for the one that has failed
        time.sleep(0.1)
    for rank in ranks:
        rank.kill()
        rank.wait()
    if codes == [0] * world_size:
        print(f"two_on_one {name}: ok, {time.monotonic() - began:.1f} s", flush=True)
        return True
    said = [log.read_text(errors="replace") for log in logs]
    if not any(failures(text) for text in said):
        how = "failed" if any((code or 0) > 0 for code in codes) else "lost its process" if any(codes) else "hung"
        print(line(f"two_on_one {name}", how, f"exit codes {codes} after {time.monotonic() - began:.1f} s"))
    for rank, text in enumerate(said):
        print(*(line(*failure) for failure in failures(text).items()), sep="\n")
        print(f"{name}, rank {rank}:", *text.splitlines()[-LINES:], sep="\n    ", flush=True)
    return False


def main(folder: pathlib.Path) -> int:
    on_gpu = torch.cuda.is_available()
    limit = LIMIT if on_gpu else 10 * LIMIT
    if on_gpu:
        print(f"NCCL {torch.cuda.nccl.version()}")  # type: ignore[no-untyped-call]
    trainer = ("trainer.py", str(folder), "--parts", "small,small-packed", "--rows", "2")
    reference = ("--reference", str(folder / "alone.json"))
    # accelerate makes groups of NCCL alone: what ranks agree on then goes through the store.
    nccl_alone = ("--backend", "nccl") if on_gpu else ()
    programs = {
        "nccl": (2, ("nccl.py",)),
        "alone": (1, (*trainer, "--without", "--name", "alone")),
        "DDP": (2, (*trainer, *reference, "--name", "DDP")),
        "FSDP2": (2, (*trainer, *reference, *nccl_alone, "--name", "FSDP2", "--engine", "FSDP2")),
    }
    failed = 0
    for name, (world_size, command) in programs.items():
        is_right = launch(folder, name, world_size, command, limit)
        if is_right and name in ("DDP", "FSDP2") and PROVED not in (folder / f"two_on_one_{name}_0.log").read_text():
            print(line(f"two_on_one {name}", "failed", f"nothing was proved: its log has no {PROVED!r}"))
            is_right = False
        failed += not is_right
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
