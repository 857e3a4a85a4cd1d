"""Agreement: how ranks make sure that they all make the same call, without waiting for each other each time.

A call is known by its *terms*: the op, the device type and whatever else must be equal on all ranks (shapes, dtypes,
scale, digests of mask and layout). Every rank tells every other its terms, with the number of the call, in a header
of one fixed size.

- New terms: the rank waits for all headers before a payload travels.
- Terms that all ranks have agreed on before: payloads start at once and the headers travel beside them. On the CPU
  they are compared before the first payload is used, at the latest before the call returns. On a GPU a thread
  compares them while the host runs ahead; a later call raises what it found.

Ranks agree on terms together, so terms that are new to one rank are new to all. If any two ranks differ, every rank
receives a header that differs from its own: each raises RingMismatch, and none is left waiting.
"""

from __future__ import annotations

import json
import zlib
from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor

from ringtile.errors import InputError

HEADER_VERSION = 2
# One size for ever: a receive of the wrong size kills the process, so a header must fit whatever the peer's version.
HEADER_BYTES = 1024
# Users may send on the group too (tags from 0 up); ours begin with the bytes "RT".
HEADER_TAG, HANG_UP_TAG, FIRST_PAYLOAD_TAG = 0x5254_0000, 0x5254_0001, 0x5254_0002
_NUM_PAYLOAD_TAGS = 2**31 - FIRST_PAYLOAD_TAG
_MAX_AGREED = 1024  # terms that a group remembers; the oldest are agreed on anew

HeaderValue = int | float | str


class Terms:
    """What all ranks must agree on for one kind of call: the op, the device type, and the fields of the caller."""

    def __init__(self, op: str, device_type: str, fields: Mapping[str, HeaderValue]) -> None:
        self.op = op
        text = json.dumps({"op": op, "device": device_type, **fields}).encode("ascii")
        # Fixed width: JSON ignores the spaces, and a header is made by writing one number into this template.
        self._prefix = b'{"version": %d, "call": ' % HEADER_VERSION
        self._suffix = b", " + text[1:]
        num_bytes = len(self._prefix) + 20 + len(self._suffix)
        if num_bytes > HEADER_BYTES:
            raise InputError(f"a header of {num_bytes} bytes; expected at most {HEADER_BYTES}")
        self._suffix = self._suffix.ljust(HEADER_BYTES - len(self._prefix) - 20)
        self._checksum = zlib.crc32(text)

    def header(self, call: int) -> Tensor:
        """uint8 (HEADER_BYTES,): the terms and the number of the call, as JSON padded with spaces."""
        return torch.frombuffer(bytearray(self._prefix + b"%20d" % call + self._suffix), dtype=torch.uint8)

    def payload_tag(self, call: int) -> int:
        """The tag of the payloads of a call. Different calls, or different terms, do not receive each other's."""
        return FIRST_PAYLOAD_TAG + zlib.crc32(call.to_bytes(8, "little"), self._checksum) % _NUM_PAYLOAD_TAGS


class AgreedTerms:
    """The terms that all ranks of a group have agreed on; the last _MAX_AGREED of them."""

    def __init__(self) -> None:
        self._agreed: OrderedDict[object, Terms] = OrderedDict()

    def find(self, key: object) -> Terms | None:
        return self._agreed.get(key)

    def add(self, key: object, terms: Terms) -> None:
        self._agreed[key] = terms
        if len(self._agreed) > _MAX_AGREED:
            self._agreed.popitem(last=False)


def decode(header: Tensor) -> dict[str, HeaderValue]:
    try:
        fields = json.loads(bytes(header.tolist()))
    except ValueError:
        fields = None
    return fields if isinstance(fields, dict) else {"version": "no ringtile header"}
