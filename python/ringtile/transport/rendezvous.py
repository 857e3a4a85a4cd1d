"""The store of a group: where its ranks meet before they connect, and what carries headers where they cannot connect.

A group that has NCCL alone opens no connection: a thread carries its headers between the store and a socket.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError

from ringtile.errors import RingMismatchError
from ringtile.transport.agreement import HEADER_VERSION, PeerGoneError, announcement, describe_difference, in_header
from ringtile.transport.sockets import LONGEST_WAIT, SocketChannel, part_of

_SENDER = struct.Struct("<I")  # of a header in an inbox
_LAST_SECONDS = 0.5  # that the last headers of a rank may take to reach the store


@contextlib.contextmanager
def store_named() -> Iterator[None]:
    """Turn an error of the store of a group into a PeerGoneError of rank 0, which serves it or joined it first."""
    try:
        yield
    except DistError as error:
        raise PeerGoneError(0, f"the store of the group has ended: {str(error).splitlines()[0]}") from None


def own_connection(store: Any) -> Store:
    """Return a connection to a store on which others do not wait. PeerGoneError, at once where the store is gone."""
    with store_named():
        store.check(["ringtile"])  # fails at once; a new connection would wait for the host of the store
        connection: Store = store.clone()
        return connection


class Rendezvous:
    """The ranks of a group say things to each other in steps; each of them says something in every step.

    Rank 0 reads what each says, and writes one answer. So a rank makes the same few operations of the store in a world
    of any size, and reads what is alike on all ranks once.

    hosts: by rank its host, numbered by its first rank. store_host: a name or address of the host of the store; "" if
    it is a file. fields: what a rank says of itself; `facts` has them by rank. failure: as of `say`.
    Raises PeerGoneError if a rank does not come within timeout_seconds, and RingMismatchError where one runs another
    version of ringtile.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        failure: PeerGoneError | None = None,
        **fields: Any,
    ) -> None:
        self.rank, self.timeout_seconds = rank, timeout_seconds
        self.deadline = time.monotonic() + timeout_seconds
        with store_named():
            # A world that was destroyed and made again may meet in the same store, under the same name.
            self.store = PrefixStore(f"ringtile/{store.add(f'ringtile/{rank}', 1)}/", store)
        self._ranks = range(world_size)
        self._step = 0
        said = self.say(failure, version=HEADER_VERSION, host=_host_id(), **fields)
        mine = {"version": HEADER_VERSION, "call": 1, "op": "connecting"}
        for peer, fact in said.items():
            if fact["version"] != HEADER_VERSION:
                raise RingMismatchError(describe_difference(rank, mine, peer, fact))
        self.facts = [said[peer] for peer in self._ranks]
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        self.store_host = str(getattr(store, "host", ""))
        names = [fact["host"] for fact in self.facts]
        self.hosts = tuple(map(names.index, names))

    def say(
        self, failure: PeerGoneError | None = None, *, of: Collection[int] | None = None, **fields: Any
    ) -> dict[int, dict[str, Any]]:
        """Return what each of these ranks says in this step, by rank, once all ranks have said something.

        of: the ranks; None: all. Each rank gives the same ranks, or each None.
        failure: why this rank goes no further. It raises that, and all others raise PeerGoneError with the reason.
        """
        self._step += 1
        reason = "" if failure is None else failure.reason
        if failure is not None and failure.peer != self.rank:
            reason = f"it cannot reach rank {failure.peer}: {reason}"
        keys = [f"{self._step}/{rank}" for rank in self._ranks]
        with store_named():
            self.store.set(keys[self.rank], json.dumps({**fields, "failure": in_header(reason)}))
            if failure is not None:
                if self.rank == 0:
                    self._answer(PeerGoneError(0, in_header(reason)))
                raise failure
            if self.rank == 0:
                self._read_all(keys, in_full=of is None)
            gone, columns = json.loads(self._take([f"{self._step}"], keys)[0])
            if gone is not None:
                raise PeerGoneError(*gone)
            if of is not None:
                texts = self._take([keys[peer] for peer in of], keys)
                return dict(zip(of, map(json.loads, texts), strict=True))
        return {
            rank: {name: values[at[rank] if at else 0] for name, (values, at) in columns.items()}
            for rank in self._ranks
        }

    def _read_all(self, keys: list[str], *, in_full: bool) -> None:
        """Read what every rank says, and answer: who has failed; in_full: by field its values, and which each has."""
        try:
            said = [json.loads(text) for text in self._take(keys, keys)]
        except PeerGoneError as gone:
            self._answer(gone)
            raise
        failures = [PeerGoneError(peer, each["failure"]) for peer, each in enumerate(said) if each["failure"]]
        columns: dict[str, tuple[list[Any], list[int]]] = {}
        for name in said[0] if in_full else ():
            texts = [json.dumps(each.get(name)) for each in said]
            places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
            columns[name] = [*map(json.loads, places)], [places[text] for text in texts] if len(places) > 1 else []
        self._answer(failures[0] if failures else None, columns)

    def _answer(self, gone: PeerGoneError | None, columns: Any = None) -> None:
        self.store.set(f"{self._step}", json.dumps([gone and [gone.peer, gone.reason], columns]))

    def _take(self, keys: list[str], all_keys: list[str]) -> list[bytes]:
        """Return what is under the keys, once all are there. all_keys: under which the ranks say something."""
        while True:
            try:
                self.store.wait(keys, datetime.timedelta(seconds=max(part_of(self.deadline), 0.001)))
                break
            except RuntimeError:
                if time.monotonic() < self.deadline or self.store.check(keys):
                    continue
                missing = [rank for rank, key in enumerate(all_keys) if not self.store.check([key])]
                raise PeerGoneError(min(missing, default=0), f"nothing came for {self.timeout_seconds:g} s") from None
        try:
            return self.store.multi_get(keys)
        except RuntimeError:  # a store of files gets one at a time
            return [self.store.get(key) for key in keys]


def _host_id() -> str:
    """Return what is equal for two processes exactly if they run on one host and in one network namespace."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino} {name}"
    return name


# ---- headers through the store -------------------------------------------------------------------


class StoreChannel(SocketChannel):
    """Carries headers through the store of the group, by threads: a host that runs ahead of its GPU does not wait.

    Each rank has an inbox there: one thread waits for the next header in it, the other for what this rank sends.
    """

    def __init__(self, store: Store, rank: int, peers: Collection[int], timeout_seconds: float) -> None:
        pairs = {peer: socket.socketpair() for peer in peers}
        super().__init__({peer: own for peer, (own, _) in pairs.items()}, timeout_seconds)
        inside = SocketChannel({peer: other for peer, (_, other) in pairs.items()}, timeout_seconds)
        inside.free.atexit = False  # a thread may still wait: it ends when this end is closed
        ways = (_put_all, store), (_take_all, own_connection(store))
        self._carriers = [
            threading.Thread(
                target=_carry, args=(way, end, rank, list(peers), inside), name="ringtile headers", daemon=True
            )
            for way, end in ways
        ]
        for carrier in self._carriers:
            carrier.start()

    def close(self) -> None:
        super().close()
        for carrier in self._carriers:
            carrier.join(_LAST_SECONDS)


def _carry(way: Callable[..., None], store: Store, rank: int, peers: list[int], inside: SocketChannel) -> None:
    try:
        way(store, rank, peers, inside)
    except RuntimeError as error:
        inside.send_last(announcement(f"the store of the group has ended: {str(error).splitlines()[0]}", peers[0]))


def _put_all(store: Store, rank: int, peers: list[int], inside: SocketChannel) -> None:
    """Put what this rank sends into its peers' inboxes until it hangs up; then what ends `_take_all` into its own."""

    def put(peer: int, sender: int, header: bytes) -> None:
        number = store.add(f"inbox {peer}", 1)
        store.set(f"inbox {peer}/{number}", _SENDER.pack(sender) + header)  # type: ignore[arg-type]

    left = [*peers]
    while left:
        inside.wait(left, LONGEST_WAIT)
        for peer in [*left]:
            try:
                while (header := inside.receive(peer)) is not None:
                    put(peer, rank, header)
            except PeerGoneError:
                left.remove(peer)
    put(rank, rank, b"")


def _take_all(store: Store, rank: int, peers: list[int], inside: SocketChannel) -> None:
    """Hand this rank what its peers put into its inbox."""
    for number in itertools.count(1):
        key = f"inbox {rank}/{number}"
        while True:
            with contextlib.suppress(DistError):
                store.wait([key], datetime.timedelta(seconds=LONGEST_WAIT))
                break
            store.check([key])  # the wait was long, or the store has ended, which this raises
        message = store.get(key)
        store.delete_key(key)
        if (sender := _SENDER.unpack_from(message)[0]) == rank:
            return
        inside.send(message[_SENDER.size :], (sender,))
