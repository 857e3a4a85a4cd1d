"""Who of all ranks is lost, when a collective of the engine, of accelerate or of torch fails in a sharded training.

gloo's own error says that a connection was closed, on the rank that noticed, and names no rank. The world's transport
has connections that carry nothing while all is well (transport/failures.py): that of a rank that has died shows it at
once, a rank that fails says why, and every rank hears of it. A rank that is stopped says nothing. A world of NCCL alone
has no connections: its watchdog ends a process whose collective fails.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ringtile.errors import PeerLostError, with_kind
from ringtile.hf.group import ContextParallelGroup
from ringtile.hf.patches import Patches
from ringtile.transport.failures import Loss
from ringtile.transport.groups import transport_of
from ringtile.transport.transport import Transport, reason_of

_SEARCH_SECONDS = 1.25  # how long a rank waits for its neighbors to fail too, of the 2 s that its end may take
_LEAVE_SECONDS = 5.0  # after which a rank that has raised, and is still there, tells those that wait for it


class Peers:
    """This rank's part in naming a lost one. A collective of the world.

    group: the ranks that share a sequence, two or more, which train and evaluate together.
    """

    def __init__(self, group: ContextParallelGroup) -> None:
        self.rank = dist.get_rank()
        self._group = group
        self._failure: PeerLostError | None = None
        self._depth = 0  # of `named`: how deep this rank is in it
        self._failed = False  # whether the other ranks have heard that this one has, since `named` last began
        self._leaving = threading.Timer(0.0, lambda: None)  # once this rank has raised
        world = transport_of(distributed_c10d._get_default_group())
        with world.agree("enable()", {}):  # connects the ranks
            self._detector = world.detector
        self._detector.period += 1  # what was said under another Trainer counts no more
        me = weakref.ref(self)

        def hear_left() -> None:
            if (peers := me()) is not None:
                peers._stop_waiting()

        self._detector.hear_left = hear_left

    def wrap(self, owner: Any, name: str, patches: Patches) -> None:
        """Makes a method raise PeerLostError where a collective inside it fails because a rank was lost."""

        def naming(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self.named(name):
                return original(*args, **kwargs)

        patches.wrap(owner, name, naming)

    @contextlib.contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Turns the loss of a rank inside the context into a PeerLostError that names it by its rank in the world.

        Any other error is told to the other ranks, which will lose this one, unless they fail too.
        """
        if self._depth == 0 and self._failed:
            self._leaving.cancel()
            self._detector.period += 1
            self._failed = False
        self._depth += 1
        try:
            if self._depth == 1:
                self._meet(f"{what}() of the Trainer")
            yield
        except PeerLostError as error:
            if error is self._failure:  # by an inner context
                raise
            self._give_up(what, error, self._lost(error))
        except (Exception, KeyboardInterrupt) as error:  # of a notebook, which stays
            if of_a_collective(error):
                self._give_up(what, error, None)
            if self._depth == 1:
                self._tell(with_kind(error), self.rank)
                self._leave_later(error)
            raise
        finally:
            self._depth -= 1

    def _leave_later(self, error: BaseException) -> None:
        """Those that wait for this rank would do so until it ends, which may take long: what the program does with the
        error is its own. They hear that they wait in vain, unless it begins again in time."""
        period = self._detector.period

        def leave() -> None:
            if self._detector.period == period:
                self._detector.fail(with_kind(error), self.rank, left=True)

        self._leaving = threading.Timer(_LEAVE_SECONDS, leave)
        self._leaving.daemon = True
        self._leaving.start()

    def _stop_waiting(self) -> None:
        """Ends what this rank waits for, in train() and its like. From the detector's thread."""
        if self._depth > 0 and not self._failed:
            for group in list(distributed_c10d._world.pg_map):
                if (transport := _transport_on_cpu(group)) is not None:
                    transport.stop_waiting()

    def _give_up(self, what: str, error: BaseException, suspect: Loss | None) -> NoReturn:
        """Raise PeerLostError, and leave the world: the others hear of it, and none of them waits for this rank."""
        self._tell(str(error))
        if (world := _transport_on_cpu(distributed_c10d._get_default_group())) is not None:
            world.stop_waiting()  # at once: those that wait for this rank fail too, and say so
        lost = self._detector.find(suspect, f"a collective failed: {reason_of(error)}", _SEARCH_SECONDS)
        if lost is None:  # all ranks are there: it is another error
            if suspect is not None:  # those that fail because this rank has hung up hear why
                self._tell(suspect.reason, suspect.rank)
            raise error
        self._tell(lost.reason, lost.rank)
        if isinstance(error, PeerLostError) and error.rank == lost.rank:  # the ring has named it already
            self._failure = error
            raise error
        self._failure = _lost(lost.rank, f"{what}() of rank {self.rank}", lost.reason)
        raise self._failure from error

    def meet_when_loaded(self, trainer: Any, patches: Patches) -> None:
        """Makes the ranks that share a sequence wait for each other when each has loaded the batches of a step, or one
        to evaluate, before a Trainer counts what they hold over all ranks."""

        def get_batch_samples(
            original: Callable[..., Any], batches: Iterable[Any], number: int, /, *args: Any, **kwargs: Any
        ) -> Any:
            return original(self._meeting(batches, number), number, *args, **kwargs)

        def prediction_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._meet_in_step()
            return original(*args, **kwargs)

        patches.wrap(trainer, "get_batch_samples", get_batch_samples)
        patches.wrap(trainer, "prediction_step", prediction_step)

    def _meeting(self, batches: Iterable[Any], number: int) -> Iterator[Any]:
        loaded = 0
        for loaded, batch in enumerate(batches, start=1):
            if loaded == number:
                self._meet_in_step(loaded)
            yield batch
        if loaded < number:
            self._meet_in_step(loaded)

    def _meet_in_step(self, batches: int = 1) -> None:
        # The host of a GPU runs ahead here too, and a later call finds a difference.
        self._meet("the next step of the Trainer", self._group.device, batches=batches)

    def _meet(self, what: str, device: torch.device | None = None, **fields: int) -> None:
        """Waits for the ranks that share a sequence, for ddp_timeout: without it, one that has stopped or called
        something else would be waited for in the engine's next collective, for its own timeout. device: see `agree`."""
        with transport_of(self._group.process_group).agree(what, fields, device):
            pass

    def _lost(self, error: PeerLostError) -> Loss | None:
        """Whom the ring has named, by its rank in the world."""
        if error.rank is None:
            return None
        return Loss(self._group.world_rank(error.rank), str(error))

    def leave(self, error: Exception) -> None:
        """Tells the others that this rank fails, and why, and ends its messages in all of its groups: no rank waits for
        it any longer, and those of a ring hear why."""
        self._tell(with_kind(error), self.rank)
        for group in list(distributed_c10d._world.pg_map):
            if (transport := _transport_on_cpu(group)) is not None:
                with contextlib.suppress(RuntimeError):
                    transport.give_up(error)

    def _tell(self, reason: str, *lost: int) -> None:
        self._failed = True
        self._detector.fail(reason, *lost)


def _lost(rank: int, where: str, reason: str) -> PeerLostError:
    error = PeerLostError(f"rank {rank} was lost in {where}: {reason}; see rank {rank}'s log for the cause")
    error.rank = rank
    return error


def _transport_on_cpu(group: dist.ProcessGroup) -> Transport | None:
    """None without a backend for the CPU: then there are no connections to close."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None
    return transport_of(group)


def of_a_collective(error: BaseException | None) -> bool:
    """Whether torch.distributed raised it, or what it was raised from."""
    while error is not None:
        said = str(error) if isinstance(error, RuntimeError) else ""
        # gloo says where it failed, except to those that use a pair after a timeout has closed it.
        if isinstance(error, dist.DistError) or "gloo/" in said or "timeout caused pair closure" in said:
            return True
        error = error.__cause__ or error.__context__
    return False
