"""Words between the ranks of a group through the store in which it has met, torch.distributed's own.

A `Meeting` is what they must know before they connect. A group that has NCCL alone opens no connection of its own: its
headers go through the store too, over a `StoreChannel`.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import json
import os
import socket
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError

from ringtile.errors import RingMismatchError
from ringtile.transport.agreement import HEADER_VERSION, MAX_REASON, PeerGoneError, describe_difference

_LOOK_SECONDS = 0.02  # at the most, between two looks for a header; at first it is a fortieth of that
_LAST_SECONDS = 0.5  # that the last headers of a rank may take to reach the store


class Meeting:
    """The ranks of a group say things to each other in steps; each of them says something in every step.

    hosts: by rank its host, numbered by its first rank. store_host: a name or address of the host of the store; "" if
    it is a file. fields: what a rank says of itself; `facts` has them by rank.
    Raises PeerGoneError if a rank does not come within timeout_seconds, and RingMismatchError where one runs another
    version of ringtile.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout_seconds: float, **fields: Any) -> None:
        self.rank, self.timeout_seconds = rank, timeout_seconds
        self.deadline = time.monotonic() + timeout_seconds
        # A world that was destroyed and made again may meet in the same store, under the same name.
        self.store = PrefixStore(f"ringtile/{store.add(f'ringtile/{rank}', 1)}/", store)
        self._ranks = range(world_size)
        self._step = 0
        self.facts = self.say(version=HEADER_VERSION, host=_host_id(), **fields)
        for peer, fact in enumerate(self.facts):
            if (theirs := fact["version"]) != HEADER_VERSION:
                mine = {"version": HEADER_VERSION}
                raise RingMismatchError(describe_difference(rank, mine, peer, {"version": theirs}, 1, "connecting"))
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        self.store_host = str(getattr(store, "host", ""))
        names = [each["host"] for each in self.facts]
        self.hosts = tuple(map(names.index, names))

    def say(self, failure: PeerGoneError | None = None, **fields: Any) -> list[dict[str, Any]]:
        """Return what each rank says in this step, by rank, once all have.

        failure: why this rank goes no further. It raises that, and all others raise PeerGoneError with the reason.
        """
        self._step += 1
        reason = ""
        if failure is not None:
            of_another = failure.peer != self.rank
            reason = f"it cannot reach rank {failure.peer}: {failure.reason}" if of_another else failure.reason
        keys = [f"{self._step}/{rank}" for rank in self._ranks]
        try:
            self.store.set(keys[self.rank], json.dumps({**fields, "failure": reason[:MAX_REASON]}))
            if failure is not None:
                raise failure
            self._wait(keys)
            said: list[dict[str, Any]] = [json.loads(text) for text in self._get(keys)]
        except DistError as error:
            raise PeerGoneError(0, f"the store of the group has ended: {str(error).splitlines()[0]}") from None
        for peer, each in enumerate(said):
            if each["failure"]:
                raise PeerGoneError(peer, each["failure"])
        return said

    def _get(self, keys: list[str]) -> list[bytes]:
        try:
            return self.store.multi_get(keys)
        except RuntimeError:  # a store of files gets one at a time
            return [self.store.get(key) for key in keys]

    def _wait(self, keys: list[str]) -> None:
        try:
            left = max(self.deadline - time.monotonic(), 0.001)
            self.store.wait(keys, datetime.timedelta(seconds=left))
        except RuntimeError:
            missing = [rank for rank in self._ranks if not self.store.check([keys[rank]])]
            if not missing:
                return
            raise PeerGoneError(missing[0], f"nothing came for {self.timeout_seconds:g} s") from None


def _host_id() -> str:
    """Return what is equal for two processes exactly if they run on one host and in one network namespace."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino} {name}"
    return name


# ---- headers ------------------------------------------------------------------------------------


class StoreChannel:
    """Carries headers between this rank and others, in order, through the store of their group.

    A thread of its own sends and receives until `close`: a host that runs ahead of its GPU does not wait for the store.
    """

    def __init__(self, store: Store, rank: int, peers: Collection[int], timeout_seconds: float) -> None:
        self._store, self._rank, self._timeout_seconds = store, rank, timeout_seconds
        self._changed = threading.Condition()
        self._outgoing: collections.deque[tuple[str, bytes]] = collections.deque()
        self._received: dict[int, collections.deque[bytes]] = {peer: collections.deque() for peer in peers}
        self._awaited: set[int] = set()  # the peers of which nothing had come when this rank last looked
        self._num_sent = dict.fromkeys(peers, 0)
        self._num_received = dict.fromkeys(peers, 0)
        self._ended = ""  # why
        self._thread = threading.Thread(target=self._carry, name="ringtile headers", daemon=True)
        self._thread.start()

    def send(self, header: bytes, peers: Collection[int]) -> None:
        """Send HEADER_BYTES bytes to these peers, without waiting for their receives."""
        with self._changed:
            for peer in peers:
                self._outgoing.append((f"{self._rank}>{peer}/{self._num_sent[peer]}", header))
                self._num_sent[peer] += 1
            self._changed.notify_all()

    def send_last(self, header: bytes) -> None:
        """Send it to every peer."""
        self.send(header, self._received)

    def receive(self, peer: int) -> bytes | None:
        """Return the next header of a peer, if it has arrived. PeerGoneError: none will."""
        with self._changed:
            if self._received[peer]:
                return self._received[peer].popleft()
            if self._ended:
                raise PeerGoneError(peer, self._ended)
            if peer not in self._awaited:
                self._awaited.add(peer)
                self._changed.notify_all()
            return None

    def wait(self, peers: Collection[int], timeout_seconds: float | None = None) -> None:
        """Return when there is something to receive from one of these peers.

        Raises PeerGoneError after the timeout; None: that of the group.
        """
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        with self._changed:
            self._awaited.update(peers)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._ended or any(self._received[peer] for peer in peers), seconds):
                raise PeerGoneError(min(peers), f"nothing came for {seconds:g} s")

    def shut_down(self, why: str = "this rank has left") -> None:
        """End the channel, for which another thread may be waiting."""
        with self._changed:
            self._ended = self._ended or why
            self._changed.notify_all()

    def close(self) -> None:
        """End the channel; peers may still receive what was sent before."""
        self.shut_down()
        if self._thread is not threading.current_thread():
            self._thread.join(_LAST_SECONDS)

    def _carry(self) -> None:
        pause = _LOOK_SECONDS
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._ended or self._outgoing or self._awaited)
                    if self._ended and not self._outgoing:
                        return
                    outgoing, awaited = list(self._outgoing), [] if self._ended else list(self._awaited)
                    self._outgoing.clear()
                for key, header in outgoing:
                    self._store.set(key, header)  # type: ignore[arg-type]
                arrived = [self._look(peer) for peer in awaited]
                pause = _LOOK_SECONDS / 40 if outgoing or any(arrived) else min(2 * pause, _LOOK_SECONDS)
                with self._changed:
                    self._changed.wait_for(lambda: self._ended or self._outgoing, pause)
        except RuntimeError as error:
            self.shut_down(f"the store of the group has ended: {str(error).splitlines()[0]}")

    def _look(self, peer: int) -> bool:
        """Take in the next header of a peer, if there is one."""
        key = f"{peer}>{self._rank}/{self._num_received[peer]}"
        if not self._store.check([key]):
            return False
        header = self._store.get(key)
        self._store.delete_key(key)
        with self._changed:
            self._num_received[peer] += 1
            self._received[peer].append(header)
            self._awaited.discard(peer)
            self._changed.notify_all()
        return True
