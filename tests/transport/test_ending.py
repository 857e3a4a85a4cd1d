"""A program that has lost a rank ends soon, whatever waits for that rank, and with its reason last."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import ringtile
from ringtile.ending import _CLEAN_UP_SECONDS

# The package without its __init__, which imports torch: each program is a new Python.
PACKAGE = f"""
import importlib.machinery, importlib.util, sys
spec = importlib.machinery.ModuleSpec("ringtile", None, is_package=True)
spec.submodule_search_locations = {list(ringtile.__path__)!r}
sys.modules["ringtile"] = importlib.util.module_from_spec(spec)
"""
PROGRAM = """
import atexit, sys, threading, time
from ringtile.ending import end_soon_if_uncaught
from ringtile.errors import PeerLostError

class Waits:
    def __del__(self):
        time.sleep(60)

kept = Waits()
threading.Thread(target=time.sleep, args=(60,)).start()
atexit.register(print, "cleaned up", file=sys.stderr)
{more}
end_soon_if_uncaught()
others, sys.excepthook = sys.excepthook, lambda *error: others(*error)  # as torch does in each init_process_group
end_soon_if_uncaught()
print(time.time(), flush=True)
try:
    raise PeerLostError("rank 0 was lost")
except PeerLostError as error:
    {raises}
"""


@pytest.mark.parametrize("more", ["", "atexit.register(time.sleep, 60)"])
@pytest.mark.parametrize(("raises", "last"), [("raise", "PeerLostError: rank 0 was lost"), ("raise OSError('x')", "x")])
def test_a_loss_that_nobody_catches_ends_the_program(more: str, raises: str, last: str) -> None:
    if more and raises != "raise":
        pytest.skip("the same")
    program = PROGRAM.format(more=more, raises=raises)
    done = subprocess.run([sys.executable, "-c", PACKAGE + program], capture_output=True, text=True, timeout=50)
    ended = time.time()
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(last)
    assert ("cleaned up" in done.stderr) is not bool(more)
    assert ended - float(done.stdout) < _CLEAN_UP_SECONDS + 1.5
    assert done.stderr.count("Traceback") == (1 if raises == "raise" else 2)


def test_a_loss_that_is_caught_ends_nothing() -> None:
    program = """
from ringtile.ending import end_soon_if_uncaught
from ringtile.errors import PeerLostError
end_soon_if_uncaught()
try:
    raise PeerLostError("rank 0 was lost")
except PeerLostError:
    print("caught")
raise SystemExit(7)
"""
    done = subprocess.run([sys.executable, "-c", PACKAGE + program], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (7, "caught\n", "")
