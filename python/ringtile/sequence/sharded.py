"""A sequence sharded over a group: the one object that knows the global sequence.

Whatever mixes tokens (attention, and everything later that must see past its own shard) takes a `ShardedSequence`;
everything else works on local tokens and needs none.

Shape letters: B batch, S global tokens, N local tokens, R runs of all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ringtile.checksum import checksum
from ringtile.errors import InputError, RefusedError, RingtileError
from ringtile.scheme import Scheme, usp_of_hosts
from ringtile.sequence.heads import HeadGroup, join
from ringtile.sequence.layout import Layout, check_types
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.plan import RankPlan, Shape, cheapest
from ringtile.transport.groups import Group, group_name, only_group_of, transport_of
from ringtile.transport.transport import Transport

_MAX_REMEMBERED = 16  # sequences of a group, masks of a sequence; a model asks for the same few in every layer
_MAX_CALLS = 64  # kinds of calls of a sequence
# Of the sequences of a group, as many as have room in so many bytes, but the last few in any case.
_MAX_BYTES, _MIN_REMEMBERED = 64 << 20, 4


_version = operator.attrgetter("_version")


def living(transport: Callable[[], Transport | None]) -> Transport:
    """Return what a weak reference is to. InputError: the group is gone."""
    if (alive := transport()) is None:
        raise InputError("the group of this sequence was destroyed; make a new group and a new ShardedSequence")
    return alive


class ShardedSequence:
    """A global sequence of S tokens: who attends whom (mask), who holds what (layout), over the ranks of a group.

    Made once per batch; costs no communication. mask and layout are the same on every rank and stay as they are;
    group None is one rank. scheme: how the ranks share the work of attention (ringtile/scheme.py); the results do not
    depend on it. `sequence & mask` is the same sequence under a narrower mask.

    Attributes: mask, layout, scheme, group_name; rank and world_size of this process in the group, and local_len, the
    tokens that it holds; begin, end int32 (B or 1, S), or (2, B or 1, S) (IntervalMask.bounds), and layout_tensor int64
    (R, 5), mask and layout as the ops take them.

    Raises InputError when mask, layout and group do not fit each other.
    """

    def __init__(self, mask: IntervalMask, layout: Layout, group: Group | None = None, *, scheme: str = "ring") -> None:
        check_types(mask, layout)
        transport = transport_of(group)
        if layout.world_size != transport.world_size:
            forgotten = (
                "; group is None, which is one rank: pass the process group" if group is None else "; must agree"
            )
            raise InputError(
                f"the layout is for {layout.world_size} ranks, the group has {transport.world_size}{forgotten}"
            )
        if mask.seq_len != layout.seq_len:
            raise InputError(
                f"the mask is of {mask.seq_len} tokens, the layout of {layout.seq_len}; expected one length"
            )
        self._scheme = Scheme.parse(scheme)
        self._scheme.check(layout.world_size)
        self.mask, self.layout, self.scheme = mask, layout, self._scheme.text
        self.group_name = group_name(group)
        self.rank, self.world_size = transport.rank, transport.world_size
        self.local_len = layout.local_len(self.rank)
        (self.begin, self.end), self.layout_tensor = mask.bounds, layout.tensor
        self.weak_transport = weakref.ref(transport)  # a sequence does not keep its group alive
        # By the other mask or scheme, the last asked for last.
        self._derived: dict[IntervalMask | str, ShardedSequence] = {}
        # Apart, by window and causal: torch.compile traces it, and would guard on every key.
        self._windows: dict[tuple[int, bool], ShardedSequence] = {}
        self._schemes: dict[Shape, str] = {}  # of `auto`, by the shape of a call
        self.calls: dict[Hashable, Any] = {}  # of attention, checked (attn/call.py)
        # With two sides begin and end are copies: neither they nor what they are of may change. Nobody counts how often
        # an inference tensor is written to.
        watched = (self.begin, self.end, *(mask.tensors if mask.key_begin is not None else ()))
        self._watched = [x for x in watched if not x.is_inference()]
        self._versions = [x._version for x in self._watched]
        living_sequences[id(self)] = self

    def __repr__(self) -> str:
        return f"ShardedSequence({self.mask!r}, rank={self.rank}, world_size={self.world_size})"

    @property
    def seq_len(self) -> int:
        return self.layout.seq_len

    @property
    def transport(self) -> Transport:
        """This rank's end of the group. InputError: the group is gone."""
        return living(self.weak_transport)

    def check_call(self, name: str, x: Tensor) -> None:
        """Raise InputError where a call on x (B, N, ...) does not fit this sequence, or the mask was written to."""
        if not self.is_unchanged():
            raise InputError("the mask was written to after the sequence was made; make a new IntervalMask instead")
        rows, batch = self.begin.shape[-2], x.shape[0]
        if rows not in (1, batch):
            raise InputError(f"the mask has {rows} rows, the batch {batch}; expected the same number, or 1")
        if x.is_meta and self.world_size > 1:
            raise InputError(f"{name} is on meta, which holds no data for the other ranks; expected a real device")

    def is_unchanged(self) -> bool:
        """Return whether nobody wrote to the mask since the sequence was made."""
        return [*map(_version, self._watched)] == self._versions

    def remember_call(self, key: Hashable, call: Any) -> None:
        """Keep a call. Numbers of users may differ in every call: then all are forgotten."""
        if len(self.calls) == _MAX_CALLS:
            self.calls.clear()
        self.calls[key] = call

    # ---- tensors --------------------------------------------------------------------------------

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's tokens of a global tensor: size S in `dim` -> size N. See `Layout.shard`."""
        return self.layout.shard(x, dim, self.rank)

    def unshard(self, local: Tensor, dim: int) -> Tensor:
        """Return the global tensor, on every rank: size N in `dim` -> size S. A collective; see `Layout.unshard`."""
        return self.layout.unshard(local, dim, self.group_name)

    def check_same(self, *tensors: Tensor) -> None:
        """Raise RingMismatchError unless the ranks have the same numbers here, such as the token ids of a batch.

        A collective: the ranks compare 64 bits, on the host, which waits for the others and for a GPU. Attention itself
        compares shapes, masks and layouts, but no data: ranks that load different batches of equal shape get numbers of
        neither.
        """
        transport, what = self.transport, "check_same"
        if transport.world_size > 1:
            with transport.propagate_errors(what):
                data = int(checksum(*tensors))
            with transport.agree(what, {}, data=data):
                pass

    # ---- the same tokens under another mask or scheme -------------------------------------------

    def __and__(self, mask: IntervalMask) -> ShardedSequence:
        """Return the same tokens, where a query attends what both masks let it attend. The last ones are remembered."""
        check_types(mask)
        return self._derive(mask, lambda: self._like(self.mask & mask, self.scheme))

    def with_mask(self, mask: IntervalMask) -> ShardedSequence:
        """Return the same tokens under another mask, which need not be narrower."""
        return self._like(mask, self.scheme)

    def with_window(self, window: int | None, causal: bool = True) -> ShardedSequence:
        """Return `self & IntervalMask.sliding_window(seq_len, window, causal)`; None: self.

        With two sides the window is along each way of a tree, as where ways are rows (IntervalMask.last_keys).
        RefusedError: such a window that is not causal.
        """
        if window is None:
            return self
        if (window, causal) not in self._windows:
            if self.mask.key_begin is None:
                self._windows[window, causal] = self & IntervalMask.sliding_window(self.seq_len, window, causal=causal)
            elif causal:
                self._windows[window, causal] = self & self.causal.mask.last_keys(window)
            else:
                raise RefusedError(
                    "a window in both directions on a mask with two sides, as a tree's is; expected causal"
                )
        return self._windows[window, causal]

    @functools.cached_property
    def causal(self) -> ShardedSequence:
        """`self & IntervalMask.causal(seq_len)`."""
        return self & IntervalMask.causal(self.seq_len)

    def with_scheme(self, scheme: str) -> ShardedSequence:
        """Return the same tokens under another scheme. The last ones are remembered."""
        return self._derive(scheme, lambda: self._like(self.mask, scheme))

    def resolved(self, shape: Shape) -> ShardedSequence:
        """Return it under a scheme that names itself, for calls of that shape, alike on every rank.

        A collective where the scheme is `usp` or `auto` and the ranks' hosts are not known yet.
        """
        if self._scheme.is_resolved:
            return self
        if self.world_size == 1:
            return self.with_scheme("ring")
        hosts = self.transport.find_hosts()
        if self.scheme == "usp":
            return self.with_scheme(usp_of_hosts(hosts))
        if shape not in self._schemes:
            self._schemes[shape] = cheapest(self.mask, self.layout, shape, hosts)
        return self.with_scheme(self._schemes[shape])

    def _like(self, mask: IntervalMask, scheme: str) -> ShardedSequence:
        return ShardedSequence(mask, self.layout, self.group_name, scheme=scheme)

    def _derive(self, key: IntervalMask | str, make: Callable[[], ShardedSequence]) -> ShardedSequence:
        """Return what is remembered by key, or else made; the one that was asked for longest ago is forgotten."""
        found = self._derived.pop(key, None) or make()
        self._derived[key] = found  # the last one
        if len(self._derived) > _MAX_REMEMBERED:
            del self._derived[next(iter(self._derived))]
        return found

    def prepare(self, like: ShardedSequence) -> None:
        """Make the plans of the calls that another sequence of the group has had; that of `usp` waits for a call."""
        for each in (self,) if self._scheme.is_resolved else map(self.resolved, like._schemes):
            _ = each.plan

    # ---- what follows from it -------------------------------------------------------------------

    @functools.cached_property
    def plan(self) -> RankPlan:
        """Return the plan of this rank. InputError: the scheme is not resolved."""
        size = self._scheme.ranks_per_group(self.world_size)
        (group, place), layout, heads = divmod(self.rank, size), self.layout, None
        if size > 1:
            layout, rows = join(layout, size)
            heads = HeadGroup(range(group * size, (group + 1) * size), self.rank, rows)
        ranks = range(place, self.world_size, size)
        return RankPlan.of(self.mask, layout, group, at_once=self._scheme.at_once, ranks=ranks, heads=heads)

    @functools.cached_property
    def digests(self) -> tuple[int, int]:
        """Return 64 bits of the layout and 64 of the mask; compared across ranks."""
        return self.layout.digest, self.mask.digest

    # ---- found again ----------------------------------------------------------------------------

    @classmethod
    def of(
        cls, mask: IntervalMask, layout: Layout, group: Group | None = None, *, scheme: str = "ring"
    ) -> ShardedSequence:
        """Return the sequence of these: the same object for equal ones, of which the last are remembered."""
        transport = transport_of(group)
        latest = _latest.get(transport)
        if latest and latest.mask is mask and latest.layout is layout and latest.scheme == scheme:
            return latest
        check_types(mask, layout)
        with _lock:
            remembered = _remembered.setdefault(transport, OrderedDict())
            found = remembered.get((mask, layout, scheme))
            if found is None:
                found = remembered[mask, layout, scheme] = cls(mask, layout, group, scheme=scheme)
                while len(remembered) > _MIN_REMEMBERED and (
                    len(remembered) > _MAX_REMEMBERED or sum(map(_num_bytes, remembered.values())) > _MAX_BYTES
                ):
                    remembered.popitem(last=False)
            else:
                remembered.move_to_end((mask, layout, scheme))
            _latest[transport] = found
            return found


def _num_bytes(sequence: ShardedSequence) -> int:
    """Return how many bytes its mask and its plan take, which are about as large."""
    return 2 * (sequence.begin.nbytes + sequence.end.nbytes)


# By id, the newest last.
living_sequences: weakref.WeakValueDictionary[int, ShardedSequence] = weakref.WeakValueDictionary()
_remembered: weakref.WeakKeyDictionary[Transport, OrderedDict[tuple[IntervalMask, Layout, str], ShardedSequence]] = (
    weakref.WeakKeyDictionary()
)
_latest: weakref.WeakKeyDictionary[Transport, ShardedSequence] = weakref.WeakKeyDictionary()  # the last of each
_lock = threading.Lock()


# ---- given to a call ----------------------------------------------------------------------------


def check_given(op: str, sequence: Any, mask: Any, layout: Any, group: Any) -> None:
    """Raise InputError unless op got a ShardedSequence, or mask, layout and group, from which one is made."""
    if sequence is None:
        check_types(mask, layout)
    elif not isinstance(sequence, ShardedSequence):
        raise InputError(
            f"sequence is a {type(sequence).__name__}; expected a ShardedSequence, or mask=, layout= and group="
        )
    elif mask is not None or layout is not None or group is not None:
        raise InputError(f"{op} got a sequence and mask, layout or group; expected one or the other")


def refuse(op: str, error: Exception, sequence: Any, layout: Any, group: Any) -> None:
    """Tell the other ranks, who would wait for this one, why it makes no call of op: if the group is known."""
    with contextlib.suppress(RingtileError):
        if isinstance(sequence, ShardedSequence):
            transport = sequence.transport
        elif group is None and isinstance(layout, Layout):  # forgotten?
            transport = transport_of(only_group_of(layout.world_size))
        else:
            transport = transport_of(group)
        transport.refuse(f"{op} forward", error)
