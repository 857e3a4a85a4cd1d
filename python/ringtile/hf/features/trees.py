"""Rows of a batch that begin alike, as one row that holds what they share once: a tree of tokens.

A token of two rows is the same if the rows agree up to it: in ids, positions, and in what it predicts. So the last
token of a prompt is in the tree once for each completion, which it predicts the first token of.

Shape letters: B rows, S tokens of a row, T tokens of the tree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ringtile.errors import InputError, RefusedError
from ringtile.hf import trainers
from ringtile.hf.batch import SharedRows
from ringtile.hf.feature import Enabled, Feature
from ringtile.hf.keys import IGNORE_INDEX, SEGMENTS, TREE, key_of_tree
from ringtile.hf.model import attends_causally, dropping, shifts_labels
from ringtile.sequence.tree import nodes, tree_position_ids

_TILE_KEYS = 128  # as in csrc/attn/query_tile.h
_SHARED = ("input_ids", "attention_mask", "position_ids", "labels")


def in_chunks(held: Tensor, chunk_tokens: int) -> tuple[Tensor, SharedRows]:
    """Rows one after another, without their padding, each from the beginning of a chunk and of a kernel's tile of keys
    on. So what both hold depends on one row alone, and on neither the others nor the padding.

    held: bool (B, S) on the host, the tokens. Returns int64 (T,), the place of each token in the flattened rows, -1 for
    what fills up a row's last chunk; and where the rows have gone.
    """
    multiple = math.lcm(chunk_tokens, _TILE_KEYS)
    lengths = -(-held.sum(1) // multiple) * multiple
    if not lengths.any():
        lengths[0] = multiple
    num_tokens, firsts = int(lengths.sum()), lengths.cumsum(0) - lengths
    places = torch.where(held, firsts[:, None] + held.long().cumsum(1) - 1, -1)
    taken = torch.full((num_tokens,), -1, device="cpu")
    taken[places[held]] = held.flatten().nonzero()[:, 0]
    return taken, SharedRows(places, [-1] * len(lengths), lengths.tolist())


def share(
    inputs: Mapping[str, Any], position_ids: Tensor | None, chunk_tokens: int | None = None
) -> tuple[dict[str, Any], SharedRows]:
    """A batch of one row, the tree, and where its tokens come from; with chunk_tokens, of rows `in_chunks`.

    inputs: `input_ids` (B, S), maybe `attention_mask`, `labels`. position_ids (B or 1, S): those of the rows; None:
    they are counted from 0. The batch gets `shift_labels` where it had labels.
    Raises RefusedError for other keys, and rows with holes.
    """
    key = "shared_prefix" if chunk_tokens is None else "reproducible"
    for name, value in inputs.items():
        if isinstance(value, Tensor) and name not in _SHARED:
            raise RefusedError(
                f"{key}: the batch holds {name}; expected rows of one sequence each, with input_ids, "
                f"attention_mask, position_ids and labels: set {key}: false"
            )
    ids, mask, labels = (inputs.get(name) for name in ("input_ids", "attention_mask", "labels"))
    if ids is None:
        raise RefusedError(f"{key}: the batch holds no input_ids, by which rows are compared; set it to false")
    num_rows, seq_len = ids.shape
    targets = None if labels is None else functional.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]
    if position_ids is None:
        position_ids = torch.arange(seq_len, device=ids.device)[None]
    if position_ids.dim() != 2:
        raise RefusedError(f"{key}: position_ids are {tuple(position_ids.shape)}; expected (B, S), as of text")
    columns = {"input_ids": ids, "position_ids": position_ids.expand(num_rows, -1)}
    columns |= {} if targets is None else {"shift_labels": targets}
    held = torch.ones_like(ids) if mask is None else mask
    *on_host, mask = torch.stack([*columns.values(), held]).cpu().unbind()  # the host waits once
    keys, held = torch.stack(on_host, dim=-1), mask.ne(0)  # (B, S, 2 or 3), (B, S)
    firsts, counts = held.int().argmax(1).tolist(), held.sum(1).tolist()
    for row, (first, count) in enumerate(zip(firsts, counts, strict=True)):
        if not held[row, first : first + count].all():
            raise RefusedError(f"{key}: row {row} has padding between its tokens; expected it at its ends")
    steps = keys[..., 1].diff(dim=1)
    if bool(((steps != 1) & held[:, 1:] & held[:, :-1]).any()):
        raise RefusedError(
            f"{key}: position_ids start again in a row, of packed documents; expected one sequence a row"
        )
    if chunk_tokens is not None:
        places, shared = in_chunks(held, chunk_tokens)
        padding = torch.tensor([[0, 0, IGNORE_INDEX][: keys.size(2)]], device="cpu")
        taken = torch.cat([keys.flatten(0, 1), padding])[places]
    else:
        rows = [keys[row, first : first + count] for row, (first, count) in enumerate(zip(firsts, counts, strict=True))]
        shared, found = SharedRows(places=torch.full((num_rows, seq_len), -1)), list[Tensor]()
        _grow(shared, rows, list(range(num_rows)), 0, -1, firsts, found)
        taken = torch.cat(found) if found else keys[:0, 0]
    batch = {name: value for name, value in inputs.items() if name not in ("labels", "attention_mask", *columns)}
    return batch | {
        name: column[None].to(device=ids.device, dtype=columns[name].dtype)
        for name, column in zip(columns, taken.unbind(-1), strict=True)
    }, shared


def _nodes_of_segments(kv_index: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[list[int], list[int]]:
    """parents and lengths of the tree that TRL's TreeRow packs; int64 on the host, of which -1 is padding.

    The tokens of segment i are [cu_seqlens_q[i], cu_seqlens_q[i + 1]); those on its way from the root, its own last,
    kv_index[cu_seqlens_k[i] : cu_seqlens_k[i + 1]]. InputError: a way is not that of its parent and its own tokens.
    """
    kv_index, of_queries, of_keys = (x[x >= 0] for x in (kv_index, cu_seqlens_q, cu_seqlens_k))
    rising = all(len(x) > 1 and x[0] == 0 and bool((x.diff() > 0).all()) for x in (of_queries, of_keys))
    if not rising or len(of_queries) != len(of_keys) or of_keys[-1] != len(kv_index):
        raise InputError(
            f"{SEGMENTS[1]} is {of_queries.tolist()!r:.200}, {SEGMENTS[2]} {of_keys.tolist()!r:.200}; expected as many "
            f"bounds, 0, ..., rising, of keys up to {len(kv_index)}, as {SEGMENTS[0]} has"
        )
    ways = torch.split(kv_index, of_keys.diff().tolist())
    lengths, parents, of_last = of_queries.diff().tolist(), list[int](), dict[int, int]()
    for i, (way, end, length) in enumerate(zip(ways, of_queries[1:].tolist(), lengths, strict=True)):
        before, own = way[: max(0, len(way) - length)], torch.arange(end - length, end, device="cpu")
        parent = of_last.get(int(before[-1]), i) if len(before) else -1
        if not torch.equal(way[len(before) :], own) or (parent >= 0 and not torch.equal(before, ways[parent])):
            raise InputError(
                f"segment {i} of the tree has tokens {end - length} to {end - 1}, and its way from the root the "
                f"tokens {way.tolist()!r:.200}; expected the way of a segment before, and its own tokens"
            )
        parents.append(parent)
        of_last[end - 1] = i
    return parents, lengths


def unfold(inputs: Mapping[str, Any], position_ids: Tensor | None) -> tuple[dict[str, Any], SharedRows]:
    """A batch of one row that is a tree, `tree_parents` and `tree_lengths` (n) as `IntervalMask.tree` takes them; and
    where its tokens are in the tree that is computed. Or `tree_kv_index`, `tree_cu_seqlens_q` and `tree_cu_seqlens_k`,
    as `trl.experimental.async_grpo.packing.TreeRow.pack` makes them.

    The last token of a node that has children predicts the first token of each, so each child begins with a copy of it,
    where the batch has `labels`. With `shift_labels` a token predicts what they say, and nothing is copied.
    Raises InputError, RefusedError.
    """
    ids, mask, labels, targets = (inputs.get(x) for x in ("input_ids", "attention_mask", "labels", "shift_labels"))
    keys = TREE if key_of_tree(inputs) == TREE[0] else SEGMENTS
    for name in keys:
        if name not in inputs:
            raise InputError(f"{name} is missing in the batch; expected it beside {keys[0]}")
    # The longest segment and way, which TRL's kernel is told, follow from the bounds.
    dropped = {*keys, "shift_labels", *(["tree_max_seqlens"] if keys is SEGMENTS else [])}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and name not in dropped and name not in _SHARED:
            raise RefusedError(f"the batch holds {name} beside {keys[0]}; expected only {', '.join(_SHARED)}")
    columns = [torch.as_tensor(inputs[name]).flatten().long().cpu() for name in keys]
    parents, lengths = _nodes_of_segments(*columns) if keys is SEGMENTS else (x.tolist() for x in columns)
    num_tokens = sum(lengths)
    held = None if ids is None or ids.dim() != 2 else ids.size(1) if mask is None else int(mask.ne(0).sum())
    if ids is None or held != num_tokens or ids.size(0) != 1 or (mask is not None and not mask[0, :num_tokens].all()):
        raise InputError(
            f"the tree is of {num_tokens} tokens, input_ids {None if ids is None else tuple(ids.shape)}, of which "
            f"{held} are no padding; expected one row (1, S), all of it in the tree, but for padding at its end"
        )
    shared = SharedRows(places=torch.full(tuple(ids.shape), -1))
    of_node = nodes(parents, lengths)
    has_children = set(parents) if targets is None else set()
    taken: list[int] = []  # the token of the batch of each token
    followers: list[int] = []  # and the one that it predicts; -1: none
    last: list[int] = []  # token of each node's way
    for i, (parent, node) in enumerate(zip(parents, of_node, strict=True)):
        before = last[parent] if parent >= 0 else -1
        last.append(node.end - 1 if node.end > node.begin else before)
        way = [before] * (before >= 0 and targets is None) + list(range(node.begin, node.end))
        found = way[:-1] if i in has_children else way
        for place, token in enumerate(found, start=len(taken)):
            if shared.places[0, token] < 0:
                shared.places[0, token] = place
        taken += found
        followers += [*way[1:], -1][: len(found)]
        shared.parents.append(parent)
        shared.lengths.append(len(found))
    index = torch.tensor(taken, device=ids.device)
    if position_ids is None:
        position_ids = tree_position_ids(parents, lengths).to(ids.device)
    dropped |= {"labels", "attention_mask"}
    batch = {name: value for name, value in inputs.items() if name not in dropped}
    batch |= {"input_ids": ids[:, index], "position_ids": position_ids[:, index]}
    if targets is not None:
        batch["shift_labels"] = targets[:, index]
    elif labels is not None:
        after = torch.tensor(followers, device=ids.device)
        batch["shift_labels"] = torch.where(after >= 0, labels[:, after.clamp(min=0)], IGNORE_INDEX)
    return batch, shared


def _grow(
    shared: SharedRows,
    rows: Sequence[Tensor],
    members: list[int],
    depth: int,
    parent: int,
    firsts: Sequence[int],
    found: list[Tensor],
) -> None:
    """Adds what the members, rows that agree in their first `depth` tokens, hold from there on."""
    members = [row for row in members if len(rows[row]) > depth]
    branches: dict[tuple[int, ...], list[int]] = {}
    for row in members:
        branches.setdefault(tuple(rows[row][depth].tolist()), []).append(row)
    for branch in branches.values():
        shortest = min(len(rows[row]) for row in branch)
        one = rows[branch[0]][depth:shortest]
        agree = torch.ones(len(one), dtype=torch.bool)
        for row in branch[1:]:
            agree &= (rows[row][depth:shortest] == one).all(-1)
        length = int(agree.long().cumprod(0).sum())
        begin, node = shared.num_tokens, len(shared.lengths)
        shared.parents.append(parent)
        shared.lengths.append(length)
        found.append(one[:length])
        for row in branch:
            at = firsts[row] + depth
            shared.places[row, at : at + length] = torch.arange(begin, begin + length)
        _grow(shared, rows, branch, depth + length, node, firsts, found)


def _refuse(run: Enabled) -> None:
    """Raises RefusedError where rows that share tokens would not be those of the Trainer."""
    if not trainers.shares_rows(run.trainer):
        return  # else its batches must be trees
    model = run.base
    if not attends_causally(model) or not shifts_labels(model):
        raise RefusedError(f"shared_prefix: {type(model).__name__} is no causal language model; set it to false")
    if what := dropping(model):
        raise RefusedError(
            f"shared_prefix: the model drops ({what}), for each row other features of a token "
            f"that rows share; expected rates of 0: set disable_dropout=True, or lora_dropout=0.0"
        )


FEATURE = Feature(frozenset(), refuse=_refuse, key="shared_prefix")
