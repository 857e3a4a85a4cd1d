"""What all ranks of a group must know alike to choose a scheme: which of them share a host, and how fast things are.

Ranks tell each other once, in a call of their own. The rates are those of rank 0, so that all choose the same.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from ringtile.errors import ConfigError
from ringtile.transport.rates import Rates, host_id, known_rates, rates_json, with_threads
from ringtile.transport.transport import Transport

_MAX_BYTES = 1 << 14  # of what a rank says

# Weak: what is known of a living group.
_hosts: weakref.WeakKeyDictionary[Transport, tuple[int, ...]] = weakref.WeakKeyDictionary()
_rates: weakref.WeakKeyDictionary[Transport, dict[str, Rates]] = weakref.WeakKeyDictionary()
_paths: weakref.WeakKeyDictionary[Transport, str] = weakref.WeakKeyDictionary()


def use_rates(transport: Transport, path: str) -> None:
    """From now on the rates of this group are those of a file, of which rank 0's counts."""
    if _paths.get(transport) != path:
        _paths[transport] = path
        _rates.pop(transport, None)  # others may have been agreed on


def hosts_of(transport: Transport) -> tuple[int, ...]:
    """By rank, its host, numbered by the first rank on it. A collective the first time. RingMismatch, PeerLost."""
    if transport not in _hosts:
        said = _tell(transport, "agree on hosts", {"host": host_id()})
        names = [each["host"] for each in said]
        _hosts[transport] = tuple(map(names.index, names))
    return _hosts[transport]


def rates_of(transport: Transport, device_type: str) -> Rates:
    """Rank 0's. A collective the first time. ConfigError: it cannot read them; RingMismatch on the others, PeerLost."""
    of_devices = _rates.setdefault(transport, {})
    if device_type not in of_devices:
        op, num_hosts = f"agree on rates of {device_type}", len(set(hosts_of(transport)))
        mine: Mapping[str, Any] = {}
        if transport.rank == 0:
            with transport.propagate_errors(op):
                known = known_rates(device_type, _paths.get(transport), num_hosts)
                mine = rates_json(with_threads(known, torch.get_num_threads()))
                if len(json.dumps(mine)) > _MAX_BYTES:
                    raise ConfigError(f"the rates take more than {_MAX_BYTES} bytes; expected a few dtypes")
        of_devices[device_type] = Rates.of(_tell(transport, op, mine)[0])
    return of_devices[device_type]


def _tell(transport: Transport, op: str, mine: Mapping[str, Any]) -> list[Any]:
    """What each rank says, by rank."""
    if transport.world_size == 1:
        return [dict(mine)]
    peers = [peer for peer in range(transport.world_size) if peer != transport.rank]
    own = torch.frombuffer(bytearray(json.dumps(mine).encode().ljust(_MAX_BYTES)), dtype=torch.uint8)
    theirs = {peer: torch.empty_like(own) for peer in peers}
    with transport.agree(op, {}):
        transport.exchange(dict.fromkeys(peers, own), theirs, op).wait()
        transport.bytes_sent -= len(peers) * _MAX_BYTES  # no payload of a plan
    said = {transport.rank: own} | theirs
    return [json.loads(bytes(said[rank].tolist())) for rank in range(transport.world_size)]
