"""Before training: the ranks tell each other, over the launcher's store, what they are about to do, or why they cannot.

The store is there before any process group is, so a rank whose file is broken, or another, is named by all at once.
From then on until training begins each rank watches the store: one that fails, for whatever reason only it has, ends
all others with its reason, wherever they wait for it. Once training has begun, hf/peers.py does that.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError, DistStoreError
from torch.distributed.rendezvous import rendezvous

from ringtile.cli import environment
from ringtile.ending import end
from ringtile.errors import ConfigError, PeerLostError, RingtileError, shown, with_kind

_LINGER_SECONDS = 3.0  # at most: the rank that hosts the store waits for the others to read why they end
_TOGETHER_SECONDS = 0.5  # how long a rank that fails waits for the others to fail too
_LOOK_SECONDS = 0.2  # between two looks at the store
_TELL_SECONDS = 60.0  # how long a rank that cannot load, and so knows no timeout, tries to tell the others why
_ANSWER_SECONDS = 3.0  # more than the host of the store needs for an answer, on a machine that is busy too


class Described(Protocol):
    """What a rank is about to do: mapping() has plain types, and no secrets; timeout_seconds: to wait for others."""

    @property
    def timeout_seconds(self) -> float: ...

    def mapping(self) -> dict[str, Any]: ...


T = TypeVar("T", bound=Described)
Answer = TypeVar("Answer")
_store: Store | None = None  # kept: the ranks use it until they end
_watch: Watch | None = None
_answers = True  # whether whoever hosts the store does
_said: str | None = None  # by `fail`


def alike(load: Callable[[], T]) -> T:
    """load(), on every rank of the world. ConfigError on all ranks, with one text, when a rank cannot load, or when
    two ranks load different things; PeerLostError: a rank does not come within the timeout of what was loaded.
    """
    global _store, _watch
    environment.check_world()
    if environment.world_size() == 1:
        return load()
    rank, world_size = environment.rank(), environment.world_size()
    mine: T | None = None
    refused: RingtileError | None = None
    said: dict[str, Any] = {"WORLD_SIZE": world_size}
    timeout_seconds = _TELL_SECONDS
    try:
        mine = load()
        said |= {"mapping": mine.mapping()}
        timeout_seconds = mine.timeout_seconds
    except RingtileError as error:
        refused, said["error"] = error, str(error)
    timeout = datetime.timedelta(seconds=timeout_seconds)

    def tell() -> str:
        store.set(f"rank {rank}", json.dumps(said))
        if rank == 0:
            store.set("verdict", _verdict(store, world_size, timeout))
        return store.get("verdict").decode()

    try:
        found = _within(timeout_seconds + _ANSWER_SECONDS, lambda: next(rendezvous("env://", timeout=timeout))[0])
        _store = store = PrefixStore("ringtile", found)
        verdict = _within(timeout_seconds + _ANSWER_SECONDS, tell)
    except (DistError, RuntimeError, ValueError, concurrent.futures.TimeoutError) as error:
        if refused is not None:
            raise refused from None
        reason = " ".join(str(error).split())[:200]
        if "EADDRINUSE" in reason:
            raise ConfigError(
                f"MASTER_PORT is {os.environ['MASTER_PORT']}, where another program of this machine listens; expected "
                f"a port that is free on the machine of rank 0: choose another, the same on every rank"
            ) from error
        raise PeerLostError(
            f"the {world_size} ranks of WORLD_SIZE did not meet at MASTER_ADDR and MASTER_PORT within "
            f"{timeout_seconds:g} s ({reason}); expected that many processes, and no other program that listens there: "
            f"see the log of the missing one"
        ) from error
    if verdict:
        raise ConfigError(verdict)
    assert mine is not None
    _watch = Watch(store.clone())  # type: ignore[attr-defined]
    return mine


def _verdict(store: Store, world_size: int, timeout: datetime.timedelta) -> str:
    """Why the world cannot train; "" if it can."""
    keys = [f"rank {rank}" for rank in range(world_size)]
    try:
        store.wait(keys, timeout)
    except DistStoreError:
        missing = ", ".join(key for key in keys if not store.check([key]))
        return f"{missing} did not come within {timeout.total_seconds():g} s; see its log for the cause"
    all_said = [json.loads(said) for said in store.multi_get(keys)]
    errors = {rank: said["error"] for rank, said in enumerate(all_said) if "error" in said}
    if errors:
        rank, error = next(iter(errors.items()))
        same_everywhere = len(errors) == world_size and len(set(errors.values())) == 1
        return error if same_everywhere else f"rank {rank}: {error}"
    first = _flat(all_said[0])
    for rank, said in enumerate(all_said):
        other = _flat(said)
        for key in {**first, **other}:
            values = [each.get(key, "not set") for each in (first, other)]
            if json.dumps(values[0]) != json.dumps(values[1]):
                return (
                    f"{key} is {shown(values[0])} on rank 0 and {shown(values[1])} on rank {rank}; expected the same "
                    f"configuration on every rank: give all of them the same file and the same variables"
                )
    return ""


def _flat(said: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings under the names that errors use: training.learning_rate."""
    flat: dict[str, Any] = {}
    for key, value in said.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat |= _flat(value, "" if name == "mapping" else f"{name}.")
        else:
            flat[name] = value
    return flat


# ---- until training begins ----------------------------------------------------------------------


class Watch:
    """A thread that ends this process, with status 2, when another rank has failed and this one goes on, or waits."""

    def __init__(self, store: Store) -> None:
        self._store = store  # a connection of its own
        self._ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # who hosts the store has ended
            while not self._ended.wait(_LOOK_SECONDS):
                if self._store.check(["failed"]):
                    break
            # This rank may fail too, and say so itself.
            if not self._ended.wait(2 * _TOGETHER_SECONDS):
                self._end_process(self._store.get("failed").decode())

    def _end_process(self, message: str) -> None:
        from ringtile.cli import REFUSED, refuse

        refuse(message)
        leave()
        end(REFUSED)


def end_watch() -> None:
    """Called when training begins: from then on ranks wait for each other in collectives only."""
    if _watch is not None:
        _watch.end()


def fail(error: Exception) -> str:
    """Tells the other ranks, once, why this one ends: they need the store, and must hear it before they miss this rank.

    Returns the reason, with the rank unless all ranks fail alike.
    """
    global _said
    message = str(error) if isinstance(error, RingtileError) else with_kind(error)
    if _store is None or _said is not None:
        return _said or message
    end_watch()
    rank, world_size = environment.rank(), environment.world_size()
    named = f"rank {rank}: {message}"

    def tell(store: Store) -> str:
        keys = [f"failed {other}" for other in range(world_size)]
        store.set(keys[rank], message)
        if store.add("failures", 1) == 1:
            store.set("failed", named)
        with contextlib.suppress(DistStoreError):  # some ranks do not fail
            store.wait(keys, datetime.timedelta(seconds=_TOGETHER_SECONDS))
            return message if len(set(store.multi_get(keys))) == 1 else named
        return named

    _said = _ask(tell, named, _TOGETHER_SECONDS)
    return _said


def heard() -> str:
    """Why another rank has failed; "" if none says so."""
    return _ask(lambda store: store.get("failed").decode() if store.check(["failed"]) else "", "")


# ---- one line -----------------------------------------------------------------------------------


def first_to_say(line: str) -> bool:
    """Whether this rank is to print a line: the first one to ask; before the ranks have met, the first of a machine."""
    if _store is None:
        return environment.local_rank() == 0
    line = re.sub("0x[0-9a-f]+", "", line)  # an address within a rank
    key = f"said {hashlib.sha256(line.encode()).hexdigest()}"
    return _ask(lambda store: bool(store.add(key, 1) == 1), True)


def leave() -> None:
    """Called when this rank has refused: the host of the store waits a little for the others to use it."""

    def wait(store: Store) -> None:
        gone = store.add("gone", 1)
        deadline = time.monotonic() + _LINGER_SECONDS
        while environment.rank() == 0 and gone < environment.world_size() and time.monotonic() < deadline:
            time.sleep(0.05)
            gone = store.add("gone", 0)

    _ask(wait, None, _LINGER_SECONDS)


# ---- a host that does not answer ----------------------------------------------------------------


def _ask(talk: Callable[[Store], Answer], otherwise: Answer, seconds: float = 0.0) -> Answer:
    """talk(store), which may wait so long itself; `otherwise` without a store, or where its host has ended or stopped:
    then nobody asks it again."""
    global _answers
    if _store is None or not _answers:
        return otherwise
    store = _store
    try:
        return _within(seconds + _ANSWER_SECONDS, lambda: talk(store))
    except (RuntimeError, concurrent.futures.TimeoutError):
        _answers = False
        return otherwise


def _within(seconds: float, call: Callable[[], Answer]) -> Answer:
    """call(), from a thread that may wait for ever: torch has no limit for a host that is stopped, or is no store."""
    done: concurrent.futures.Future[Answer] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return done.result(seconds)
    except concurrent.futures.TimeoutError:
        raise concurrent.futures.TimeoutError("no answer") from None
