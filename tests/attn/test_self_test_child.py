"""Kernels that hang or crash are found by a child process, and its verdicts are kept.

Most children here are programs that answer as self_test_child.py does, without importing torch; the device is the CPU,
whose kernels are asked about as a GPU's are.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attention_calls import MASKS, problem
from pool import run_ranks
from ringtile import Layout, ops, self_test
from ringtile.attn import self_test as attn_self_test
from ringtile.attn.choose import RINGTILE
from ringtile.cli import doctor
from ringtile.self_test import child_process, kernels
from ringtile.self_test.child_process import Question
from test_attention_kernel import run_ring

CPU = torch.device("cpu")
GLU, LOSS = Question("GLU", "float32"), Question("loss", "float32")
CRASH = "os.kill(os.getpid(), signal.SIGSEGV)"
HANG = "time.sleep(100)"

# Counts itself in {count}; {fault} runs after it has said which question it begins, {start} before anything.
ANSWERING = """
import json, os, signal, sys, time
with open({count!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")
{start}
answers, request = int(sys.argv[1]), json.loads(sys.argv[2])
def say(line):
    os.write(answers, line.encode() + b"\\n")
say("ready")
for question in request["questions"]:
    say(question)
    reason = ""
    {fault}
    say(reason)
"""


class Children:
    """The children that this process starts: what they do, and their process ids."""

    def __init__(self, folder: Path) -> None:
        self.count = folder / "children"
        self.answer()

    def answer(self, fault: str = "", of: str = "", start: str = "") -> None:
        """fault: what happens at questions that have the text `of`."""
        fault = f"if {of!r} in question: {fault}" if fault else ""
        child_process.PROGRAM = ANSWERING.format(count=str(self.count), fault=fault, start=start)

    @property
    def started(self) -> list[int]:
        return [int(line) for line in self.count.read_text().split()] if self.count.exists() else []


@contextlib.contextmanager
def asking_children(folder: Path) -> Iterator[Children]:
    """Each question goes to a child, and verdicts to a folder; for all threads of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_test, "IN_PROCESS", ())
        patch.setattr(child_process, "PROGRAM", "")
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        self_test.forget()
        yield Children(folder)
    self_test.forget()


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    with asking_children(tmp_path) as children:
        yield children


def kept() -> Path:
    """The file of verdicts."""
    return child_process._path(child_process.environment(CPU))


# ---- crash, hang -------------------------------------------------------------------------

FAULTS = {
    "crash": (CRASH, "crashes: signal 11 (SIGSEGV)"),
    "hang": (HANG, "hangs: no answer within 1 s"),
}


@pytest.mark.parametrize("name", ["crash", pytest.param("hang", marks=pytest.mark.long)])
def test_training_goes_on_with_the_next_backend(
    children: Children, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """The same outputs and gradients, step after step; one warning, also in the next process, without a child."""
    monkeypatch.setattr(child_process, "LIMIT_SECONDS", 1.0)
    fault, reason = FAULTS[name]
    p, layout = problem(v_head_dim=16, dtype=torch.float32), Layout.zigzag(48, 2)
    right = run_ring(p, MASKS["documents"], layout, "auto")
    kept().unlink()
    before = len(children.started)
    children.answer(fault, of='"ringtile\'s attention"')
    for _ in range(2):
        self_test.forget()
        caplog.clear()
        for _ in range(2):
            result = run_ring(p, MASKS["documents"], layout, "auto")
            for got, expected in zip(result, right, strict=True):
                torch.testing.assert_close(got, expected)
        (message,) = caplog.messages
        assert (
            f"ringtile's attention is not used for torch.float32 with head dims 16 and 16 on cpu: it {reason}"
            in message
        )
        assert "aten's flash attention runs instead" in message
    assert len(children.started) == before + 4  # of the kernels of rows, of attention, aten's, and of merges
    for pid in children.started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_only_the_kernel_that_crashed_is_wrong(children: Children) -> None:
    """The others are asked of another child, also of a later process."""
    children.answer(CRASH, of="GLU")
    assert child_process.why_not(CPU, LOSS, GLU, Question("rows", "bool")) == ""
    assert len(children.started) == 2
    children.answer(start="sys.exit(1)")
    child_process.forget()
    questions = LOSS, GLU, Question("rows", "bool")
    assert [child_process.why_not(CPU, each) for each in questions] == ["", "crashes: signal 11 (SIGSEGV)", ""]


def test_a_child_that_hangs_is_killed_and_not_waited_for(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits for a driver does not end when it is killed."""
    monkeypatch.setattr(child_process, "LIMIT_SECONDS", 0.3)
    monkeypatch.setattr(child_process, "GRACE_SECONDS", 0.2)
    killed = []
    monkeypatch.setattr(os, "killpg", lambda *given: killed.append(given))
    children.answer(HANG, of="GLU")
    assert child_process.why_not(CPU, GLU).startswith("hangs")
    monkeypatch.undo()
    assert killed == [(children.started[0], signal.SIGKILL)]
    os.killpg(*killed[0])


# ---- what says nothing of a kernel --------------------------------------------------------------

SAYS_NOTHING = {
    "import error": ({"start": "import no_such_module"}, "status 1: ModuleNotFoundError: No module named 'no_such_mod"),
    "no memory": ({"fault": "raise MemoryError('of the device')", "of": "GLU"}, "status 1: MemoryError: of the device"),
    "killed": ({"fault": "os.kill(os.getpid(), signal.SIGKILL)", "of": "GLU"}, "status -9: no message"),
    "crash at start": ({"start": CRASH}, "crashes: signal 11 (SIGSEGV)"),
    "an early end": ({"fault": "sys.exit()", "of": "GLU"}, "status 0: no message"),
    "hang at start": ({"start": HANG}, "does not start within 1 s"),
}


@pytest.mark.parametrize("name", SAYS_NOTHING)
def test_a_kernel_that_cannot_be_tested_is_not_used_and_tested_again(
    children: Children, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    behavior, reason = SAYS_NOTHING[name]
    children.answer(**behavior)
    with monkeypatch.context() as patch:
        if "hang" in name:
            patch.setattr(child_process, "START_SECONDS", 1.0)
        for _ in range(2):
            said = child_process.why_not(CPU, GLU)
            assert said.startswith("cannot be tested: its child process ")
            assert reason in said
    assert len(children.started) == 1
    child_process.forget()
    children.answer()
    assert child_process.why_not(CPU, GLU) == ""


def test_no_child_can_be_started(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert child_process.why_not(CPU, GLU).startswith("cannot be tested: [Errno 2] No such file or directory")


def test_what_a_library_prints_is_no_answer(children: Children) -> None:
    """Nor does a child have anything of this process's: input, sockets."""
    children.answer(
        f"print('\\n'.join([question, ''] * 2), flush=True); {CRASH}",
        of="GLU",
        start="assert not sys.stdin.read(); opened = set(os.listdir('/proc/self/fd')) - {*'012', sys.argv[1]}; "
        "assert len(opened) == 1, opened",  # listdir's own
    )
    ours, theirs = os.pipe()
    os.set_inheritable(ours, True)
    assert child_process.why_not(CPU, GLU) == "crashes: signal 11 (SIGSEGV)"
    os.close(ours)
    os.close(theirs)


# ---- the file -----------------------------------------------------------------------------------


def test_another_process_reads_the_verdicts(children: Children, tmp_path: Path) -> None:
    children.answer("reason = 'is wrong'", of="loss")
    child_process.why_not(CPU, GLU, LOSS)
    assert run_ranks(2, _ask_children, tmp_path) == [["", "is wrong"]] * 2
    assert len(children.started) == 1


def test_two_processes_at_once_start_one_child(tmp_path: Path) -> None:
    assert run_ranks(2, _ask_children, tmp_path) == [["", ""]] * 2
    assert len((tmp_path / "children").read_text().split()) == 1


def _ask_children(folder: Path) -> list[str]:
    with asking_children(folder) as children:
        children.answer(start="time.sleep(0.3)")
        dist.barrier()
        return [child_process.why_not(CPU, GLU, LOSS), child_process.why_not(CPU, LOSS)]


def test_a_process_that_tests_for_too_long_is_not_waited_for(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "WAIT_SECONDS", 0.2)
    path = kept()
    path.parent.mkdir(parents=True)
    with open(path.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        began = time.monotonic()
        assert child_process.why_not(CPU, GLU) == ""
        assert time.monotonic() - began >= 0.2


def edited(change: dict[str, Any]) -> bytes:
    good = {"environment": child_process.environment(CPU), "found": {json.dumps(GLU): ""}}
    return json.dumps(good | change).encode()


BROKEN = {
    "truncated": lambda: edited({})[:-9],
    "empty": lambda: b"",
    "of another driver": lambda: edited({"environment": child_process.environment(CPU) | {"driver": "1"}}),
    "numbers": lambda: edited({"found": {json.dumps(GLU): 0}}),
    "a list": lambda: edited({"found": []}),
    "no table": lambda: b"[]",
    "no text": lambda: b"\xff\x00",
    "nested": lambda: b"[" * 100_000,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_not_of_this_environment_is_not_believed(children: Children, name: str) -> None:
    path = kept()
    path.parent.mkdir(parents=True)
    path.write_bytes(edited({}))
    child_process.why_not(CPU, GLU)
    assert children.started == []
    path.write_bytes(BROKEN[name]())
    child_process.forget()
    child_process.why_not(CPU, GLU)
    assert len(children.started) == 1
    assert json.loads(path.read_text()) == json.loads(edited({}))


def _fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _link(path: Path) -> None:
    target = path.parent.parent / "elsewhere"
    if path.exists():
        path.rename(target)
    path.symlink_to(target)


OF_OTHERS: dict[str, Callable[[Path], None]] = {
    "another user's": lambda path: os.chown(path, 65534, 65534),
    "open to others": lambda path: path.chmod(0o666),
    "a FIFO": _fifo,
    "a link": _link,
    "large": lambda path: path.write_bytes(edited({"found": {json.dumps(GLU): "x" * (2 << 20)}})),
    "a lock that is a link": lambda path: _link(path.with_suffix(".lock")),
    "a lock that is a FIFO": lambda path: _fifo(path.with_suffix(".lock")),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", OF_OTHERS)
def test_a_file_that_others_may_have_written_is_not_believed(children: Children, name: str, tmp_path: Path) -> None:
    """Nor waited for, nor followed."""
    if name == "another user's" and os.geteuid() != 0:
        pytest.skip("needs root")
    path = kept()
    path.parent.mkdir(parents=True)
    path.write_bytes(edited({"found": {json.dumps(GLU): "crashes: signal 11"}}))
    if "lock" in name:
        path.unlink()
    OF_OTHERS[name](path)
    assert child_process.why_not(CPU, GLU) == ""
    assert len(children.started) == 1
    assert name != "a lock that is a link" or not (path.parent.parent / "elsewhere").exists()


@pytest.mark.parametrize("name", ["no folder", "full", "a folder in its place", "no home"])
def test_without_the_file_each_process_tests(
    children: Children, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    if name == "no folder":
        (tmp_path / "cache").write_text("a file")
    elif name == "full":
        monkeypatch.setattr(os, "replace", full)
    elif name == "no home":
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    else:
        kept().mkdir(parents=True)
    for count in (1, 2):
        assert child_process.why_not(CPU, GLU) == child_process.why_not(CPU, GLU) == ""
        assert len(children.started) == count
        child_process.forget()
    cache = tmp_path / "cache" / "ringtile"
    assert not cache.exists() or {path.suffix for path in cache.iterdir()} <= {".lock", ".json"}
    assert not (Path.cwd() / "~").exists()


# ---- who asks -----------------------------------------------------------------------------------


def test_nothing_is_started_while_a_graph_is_captured_or_traced(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert ops.why_not_kernel("GLU", CPU, torch.float32) == ""
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert ops.why_not_kernel("GLU", CPU, torch.float32) == ""
    assert children.started == []


def test_doctor_asks_one_child_for_each_kernel_that_crashes_and_one_more(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "HEAD_DIMS", (16,))
    children.answer(CRASH, of='["dropout", "float16"')
    for _ in range(2):  # the second time from the file
        report = doctor.self_tests()
        dropout, attention = report["cpu: ringtile's dropout"], report["cpu: ringtile's attention, head dim 16"]
        assert dropout.startswith("right for float64, float32, bfloat16 (")
        assert dropout.endswith("; not used for float16: it crashes: signal 11 (SIGSEGV)")
        assert attention.startswith("right for float64, float32, bfloat16, float16 (")
        assert len(children.started) == 2
        self_test.forget()


# ---- the program --------------------------------------------------------------------------------

FAULTY = """
import sys; sys.path[:] = sys.argv[3:]
import ctypes, functools, time
from ringtile import ops
from ringtile.attn import backend
from ringtile.self_test_child import main
backend.Ringtile.forward = lambda self, block, state: [x.zero_() for x in (state.out, state.lse)]
ops.KERNELS["GLU"] = lambda *given: ctypes.string_at(0)
main()
"""


def test_the_program_tests_ringtiles_kernels_and_then_likely_ones(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the environment of one of torchrun's workers. Asked about one kernel, it ends at the first that crashes."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "no.such.host", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(child_process, "PROGRAM", FAULTY)
    asked = Question(RINGTILE.name, "float32", 16, 24, True, True)
    assert child_process.why_not(CPU, asked).startswith("gives another out than its definition: off by ")
    found = json.loads(kept().read_text())["found"]
    crashed = [
        json.loads(question)[:2] for question, reason in found.items() if reason == "crashes: signal 11 (SIGSEGV)"
    ]
    assert crashed == [["GLU", "bfloat16"]]
    assert found[json.dumps(Question("rows", "int64"))] == ""


@pytest.mark.long  # two more children that import torch
def test_the_program_as_it_is(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every likely kernel is right, and is asked with the first; what then hangs is asked of a second child."""
    monkeypatch.undo()
    monkeypatch.setattr(self_test, "IN_PROCESS", ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(children.count.parent / "cache"))
    program = "import sys; sys.path[:] = sys.argv[3:]; from ringtile.self_test_child import main; main()"
    monkeypatch.setattr(child_process, "PROGRAM", program)
    assert ops.why_not_kernel("rows", CPU, torch.int64) == ""
    monkeypatch.setattr(child_process, "PROGRAM", "")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert [ops.why_not_kernel(name, CPU, dtype) for name in ops.KERNELS] == [""] * len(ops.KERNELS)
        for grouped in (False, True):
            assert attn_self_test.failure(RINGTILE, CPU, Question.of(RINGTILE.name, dtype, 64, 64, grouped)) == ""
    hanging = FAULTY.replace("ctypes.string_at(0)", "time.sleep(100)")
    monkeypatch.setattr(child_process, "PROGRAM", hanging)
    monkeypatch.setattr(child_process, "LIMIT_SECONDS", 2.0)
    assert ops.why_not_kernel("GLU", CPU, torch.float64) == "hangs: no answer within 2 s"


# ---- cases of a GPU's size ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ops.KERNELS)
def test_kernels_are_right_in_a_gpus_cases(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(kernels.REPEATS, "cpu", kernels.REPEATS["cuda"])
    assert self_test.run(lambda: ops.KERNELS[name](torch.ops.ringtile, CPU, torch.float32)) == ""


@pytest.mark.long  # seconds each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("drops", "two_sides"), [(False, False), (True, False), (False, True), (True, True)])
def test_attention_is_right_in_a_gpus_case(dtype: torch.dtype, drops: bool, two_sides: bool) -> None:
    question = Question.of(RINGTILE.name, dtype, 64, 64, True, drops, two_sides)
    assert self_test.run(lambda: attn_self_test.run_case(RINGTILE, CPU, question, attn_self_test.LARGE)) == ""
