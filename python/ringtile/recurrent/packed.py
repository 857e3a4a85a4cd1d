"""The documents of a batch as one row of sequences, which is how libraries of GPU kernels take them: cu_seqlens.

Padding is left out, so that its numbers are not read. All of it is found on the host, once for each seq_idx, and copied
to the device behind what the device has still to do: no call waits for the device.

Shape letters: B batch, N tokens, T tokens of all sequences, n sequences.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from ringtile.sequence.plan import DeviceTensors

CHUNK = 64  # tokens that fla computes at once


@dataclass(frozen=True)
class Sequences:
    """Where the tokens of a batch go, in a row of one sequence for each document. Tensors are int64, on the device.

    A convolution puts the `before` tokens of its initial state before a document that goes on: in the flattened batch
    they follow all tokens, as rows B N .. B (N + before).
    """

    size: tuple[int, int]  # (B, N)
    taken: Tensor | None  # (T,): rows of the flattened batch; None: all in order
    own: Tensor | None  # which of the T are tokens of the batch; None: all
    tokens: Tensor | None  # which rows of the flattened batch these are; None: all in order
    cu_seqlens: Tensor  # (n + 1)
    cu_seqlens_cpu: Tensor
    chunk_indices: Tensor  # (chunks, 2): sequence and chunk in it
    going_on: Tensor | None  # sequences that go on from the initial state; None: all, one for each batch row
    rows_going_on: Tensor  # the batch rows of these
    last: Tensor  # (B,): the last sequence of each batch row; n + the row where it has none
    recent: Tensor  # (B, before): the rows of the flattened batch that end the last document, or -1
    num_rows_going_on: int
    has_empty_rows: bool

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    def pack(self, *tensors: Tensor) -> list[Tensor]:
        """Return (B, N, ...) -> (1, T, ...), where no tokens precede a document."""
        return [take(x.flatten(0, 1), self.taken)[None] for x in tensors]

    def unpack(self, x: Tensor) -> Tensor:
        """Return (1, T, ...) -> (B, N, ...), 0 for padding."""
        x = take(x[0], self.own)
        if self.tokens is not None:
            x = x.new_zeros(self.size[0] * self.size[1], *x.shape[1:]).index_copy(0, self.tokens, x)
        return x.view(*self.size, *x.shape[1:])

    def initial(self, state: Tensor | None) -> Tensor | None:
        """Return (B, ...) -> (n, ...): the state that each sequence begins with; None: 0."""
        if state is None or self.going_on is None or not self.num_rows_going_on:
            return state if self.num_rows_going_on else None
        zeros = state.new_zeros(self.num_sequences, *state.shape[1:])
        return zeros.index_copy(0, self.going_on, state.index_select(0, self.rows_going_on))

    def final(self, states: Tensor, initial: Tensor | None) -> Tensor:
        """Return (n, ...) -> (B, ...): the state after the last token of each batch row."""
        if self.has_empty_rows:
            kept = states.new_zeros(self.size[0], *states.shape[1:]) if initial is None else initial
            states = torch.cat([states, kept.to(states.dtype)])
        return states.index_select(0, self.last)


def take(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


_remembered: Any = WeakTensorKeyDictionary()  # by seq_idx, which nobody writes to


def sequences_of(
    seq_idx: Tensor, batch: int, device: torch.device, before: int = 0, *, has_state: bool = True
) -> Sequences:
    """Return the sequences of a seq_idx (B or 1, N), as in kernels.py, on the device, but for names in _cpu.

    before: inputs in the state of a convolution.
    """
    found: dict[object, tuple[DeviceTensors, Sequences]] = _remembered.setdefault(seq_idx, {})
    key = (device, batch, before, has_state)
    if key not in found:
        host = _sequences(seq_idx, batch, before, has_state)
        tensors = {name: x for name, x in vars(host).items() if isinstance(x, Tensor) and not name.endswith("_cpu")}
        copies = DeviceTensors(device, *tensors.values())
        there: dict[str, Any] = dict(zip(tensors, copies.read(), strict=True))
        found[key] = copies, replace(host, **there)
    copies, sequences = found[key]
    copies.read()  # on this stream too
    return sequences


def runs_of(row: Tensor) -> list[tuple[int, Tensor]]:
    """Return each document of a seq_idx (N,), in order: its number, and its tokens."""
    held = (row >= 0).nonzero()[:, 0]
    numbers = row[held]
    cuts = ((numbers[1:] != numbers[:-1]).nonzero()[:, 0] + 1).tolist()
    bounds = [0, *cuts, held.numel()] if held.numel() else []
    return [(int(numbers[begin]), held[begin:end]) for begin, end in itertools.pairwise(bounds)]


def _sequences(seq_idx: Tensor, batch: int, before: int, has_state: bool) -> Sequences:
    """Return them on the host."""
    num_tokens = seq_idx.size(1)
    num_rows = batch * num_tokens
    documents = [runs_of(row) for row in seq_idx]
    documents = documents * batch if len(documents) == 1 else documents
    taken: list[Tensor] = []
    going_on, rows_going_on, last = [], [], []
    recent = torch.full((batch, before), -1, dtype=torch.int64, device="cpu")
    for row, of_row in enumerate(documents):
        of_state = num_rows + row * before + torch.arange(before if has_state else 0, device="cpu")
        sequence = of_state
        for i, (number, tokens) in enumerate(of_row):
            sequence = row * num_tokens + tokens
            if has_state and i == 0 and number == 0:
                going_on.append(len(taken))
                rows_going_on.append(row)
                sequence = torch.cat([of_state, sequence])
            taken.append(sequence)
        last.append(len(taken) - 1 if of_row else -1 - row)
        kept = sequence[max(0, sequence.numel() - before) :]
        recent[row, before - kept.numel() :] = kept
    everything = torch.cat(taken) if taken else _numbers([])
    is_token = everything < num_rows
    tokens, has_others = everything[is_token], not bool(is_token.all())
    in_order = tokens.numel() == num_rows
    lengths = _numbers([sequence.numel() for sequence in taken])
    cu_seqlens = functional.pad(lengths.cumsum(0), (1, 0))
    chunks = [(i, j) for i, length in enumerate(lengths.tolist()) for j in range(-(-length // CHUNK))]
    return Sequences(
        size=(batch, num_tokens),
        taken=None if in_order and not has_others else everything,
        own=is_token.nonzero()[:, 0] if has_others else None,
        tokens=None if in_order else tokens,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens,
        chunk_indices=_numbers(chunks).view(-1, 2),
        going_on=None if len(going_on) == len(taken) == batch else _numbers(going_on),
        rows_going_on=_numbers(rows_going_on),
        last=_numbers([len(taken) - 1 - i if i < 0 else i for i in last]),
        recent=recent,
        num_rows_going_on=len(going_on),
        has_empty_rows=any(i < 0 for i in last),
    )


def _numbers(of: list[int] | list[tuple[int, int]]) -> Tensor:
    return torch.tensor(of, dtype=torch.int64, device="cpu")
