"""Trees of tokens: a prefix that several branches share is in a row once.

A tree is a list of nodes in depth-first order: node i has lengths[i] tokens and hangs from node parents[i], or from
nothing (-1). A row holds the tokens of node 0, then those of node 1, ... A token follows those of its ancestors: each
way from a root to a leaf is a sequence of its own. A row may hold several trees.

Shape letters: B rows, S tokens of a row, n nodes of a row.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringtile.errors import InputError

MAX_SEQ_LEN = 2**31 - 1  # of a row: positions are int32
Numbers = Sequence[int] | Sequence[Sequence[int]]  # of one row, or a list for each row


class Node(NamedTuple):
    """Tokens [begin, end) of a row; those of its descendants follow, up to subtree_end."""

    begin: int
    end: int
    subtree_end: int
    root: int  # where the tree begins
    depth: int  # tokens of its ancestors


def nodes(parents: Sequence[int], lengths: Sequence[int]) -> list[Node]:
    """Return the nodes of one row. InputError: they are no tree in depth-first order."""
    if len(parents) != len(lengths):
        raise InputError(f"parents has {len(parents)} nodes, lengths {len(lengths)}; expected as many")
    found: list[Node] = []
    ends = [0] * len(parents)
    path: list[int] = []  # from a root to the node before
    at = 0
    for node, (parent, length) in enumerate(zip(parents, lengths, strict=True)):
        if length < 0:
            raise InputError(f"lengths[{node}] is {length}; expected at least 0 tokens")
        while path and path[-1] != parent:
            ends[path.pop()] = at
        if parent != -1 and not path:
            raise InputError(
                f"parents[{node}] is {parent}; expected -1, or node {node - 1} or one of its ancestors: nodes in "
                "depth-first order, each after its parent"
            )
        root, depth = (found[parent].root, found[parent].depth + lengths[parent]) if path else (at, 0)
        found.append(Node(at, at + length, at, root, depth))
        path.append(node)
        at += length
    for node in path:
        ends[node] = at
    return [node._replace(subtree_end=end) for node, end in zip(found, ends, strict=True)]


def rows_of(parents: Numbers, lengths: Numbers) -> list[list[Node]]:
    """Return the nodes of each row. InputError: not integers, or rows of unequal length."""
    try:
        given: list[list[Any]] = [list(parents), list(lengths)]
        if not any(isinstance(row, Sequence) for rows in given for row in rows):
            given = [[row] for row in given]
        of_parents, of_lengths = ([[operator.index(x) for x in row] for row in rows] for rows in given)
    except TypeError:
        raise InputError(
            f"parents is {parents!r:.200} and lengths {lengths!r:.200}; expected integers, those of one row, or a list "
            "of them per row"
        ) from None
    sums = [sum(row) for row in of_lengths]
    if len(of_parents) != len(of_lengths) or len(set(sums)) != 1:
        raise InputError(
            f"parents has {len(of_parents)} rows, lengths rows of {sums!r:.200} tokens; expected as many rows, and as "
            "many tokens in each"
        )
    if sums[0] > MAX_SEQ_LEN:
        raise InputError(f"lengths has rows of {sums[0]} tokens; expected at most {MAX_SEQ_LEN}")
    return [nodes(*row) for row in zip(of_parents, of_lengths, strict=True)]


def of_blocks(seq_len: int, block: int) -> tuple[list[int], list[int]]:
    """parents and lengths of IntervalMask.block_diffusion: each block's noised tokens, a leaf, then its clean ones."""
    if not 1 <= seq_len <= MAX_SEQ_LEN // 2 or block < 1:
        raise InputError(
            f"seq_len is {seq_len} and block {block}; expected 1..{MAX_SEQ_LEN // 2} tokens, and at least 1 a block"
        )
    parents, lengths = [], []
    for i, begin in enumerate(range(0, seq_len, block)):
        parents += [2 * i - 1] * 2  # the clean tokens before; -1 for the first
        lengths += [min(block, seq_len - begin)] * 2
    return parents, lengths


def bounds(parents: Numbers, lengths: Numbers, causal: bool) -> list[Tensor]:
    """begin, end, key_begin, key_end int32 (B, S) of IntervalMask.tree."""
    rows = rows_of(parents, lengths)

    def by_token(field: str) -> Tensor:
        return torch.stack([_by_token([getattr(node, field) for node in row], row) for row in rows])

    first, last = by_token("begin"), by_token("end")
    if causal:
        first = torch.arange(first.size(1), dtype=torch.int64, device="cpu").expand_as(first)
        last = first + 1
    return [bound.int() for bound in (by_token("root"), last, first, by_token("subtree_end"))]


def tree_position_ids(parents: Numbers, lengths: Numbers) -> Tensor:
    """Return int64 (B, S): how many tokens come before each on its way from the root, as for the positions of RoPE.

    parents and lengths as in `IntervalMask.tree`. InputError.
    """
    rows = rows_of(parents, lengths)
    offsets = torch.stack([_by_token([node.depth - node.begin for node in row], row) for row in rows])
    return offsets + torch.arange(offsets.size(1), device="cpu")


def _by_token(numbers: list[int], row: list[Node]) -> Tensor:
    """Return int64 (S): the number of the node of each token."""
    of_nodes = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    lengths = torch.tensor([node.end - node.begin for node in row], dtype=torch.int64, device="cpu")
    return torch.repeat_interleave(of_nodes, lengths)
