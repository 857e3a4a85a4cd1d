"""A cut of a batch: some hundred tokens of each row, where a document or padding begins and tokens have targets.

Shape letters: B rows, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

TOKENS = 512  # of all rows together, at least
_ROW = 64  # tokens of a row, at least
_MARGIN = 8  # tokens of a row, at least, before the edge that the cut shows
_BY_TOKEN = "position_ids_by_token"  # (B, S, 3 or 4)
_TARGETS = ("labels", "completion_mask")  # in the names of the keys that say which tokens have targets


def cut_batch(inputs: Mapping[str, Any], row_tokens: int, *, at_targets: bool = False) -> dict[str, Any]:
    """The batch with at most `row_tokens` tokens of each row, but at least TOKENS in all rows and _ROW in each.

    at_targets: around the first target, even where there is an edge: rows of one prompt begin alike there.

    Tensors (B, S, ...) lose tokens, the same ones where their S is the same. Lengths of packed documents are counted
    anew. All else stays.
    """
    positions = inputs.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() == 3:  # (3 or 4, B, S), of M-RoPE
        rows = {name: value for name, value in inputs.items() if name != "position_ids"}
        cut = cut_batch(rows | {_BY_TOKEN: positions.permute(1, 2, 0)}, row_tokens, at_targets=at_targets)
        return cut | {"position_ids": cut.pop(_BY_TOKEN).permute(2, 0, 1).contiguous()}
    cut = dict(inputs)
    sizes: dict[int, list[str]] = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.dim() >= 2:
            sizes.setdefault(value.size(1), []).append(name)
    for seq_len, names in sizes.items():
        rows = max(inputs[name].size(0) for name in names)
        length = max(row_tokens, _ROW, TOKENS // rows)
        if seq_len <= length:
            continue
        begins = _begins({name: inputs[name] for name in names}, _documents(inputs, seq_len), rows, length, at_targets)
        for name in names:
            value = inputs[name]
            taken = begins[: value.size(0), None] + torch.arange(length, device=begins.device)
            index = taken.to(value.device).view(*taken.shape, *(1,) * (value.dim() - 2))
            cut[name] = value.gather(1, index.expand(-1, -1, *value.shape[2:]))
        _count_documents(cut, seq_len, int(begins[0]), length)
    return cut


def _begins(
    tensors: Mapping[str, Tensor], documents: Tensor | None, rows: int, length: int, at_targets: bool
) -> Tensor:
    """int64 (B,): where each row is cut: around its first edge with a target near, else around its first target."""
    seq_len = next(iter(tensors.values())).size(1)
    targets = [
        (x != -100) & (x != 0) if "mask" in name else x != -100
        for name, x in tensors.items()
        if name.endswith(_TARGETS) and x.dim() == 2
    ]
    has_target = torch.stack([x.expand(rows, -1).cpu() for x in targets]).all(0) if targets else None
    edges = torch.zeros(rows, seq_len, dtype=torch.bool)
    for name, x in tensors.items():
        if name.endswith(("attention_mask", "seq_idx")) and x.dim() == 2:
            edges[:, 1:] |= (x.diff(dim=1) != 0).cpu()
        elif name == "position_ids" and x.dim() == 2:
            edges[:, 1:] |= (x.diff(dim=1) != 1).cpu()
        elif name == _BY_TOKEN:
            edges[:, 1:] |= (x[..., 0].diff(dim=1) != 1).cpu()
    if documents is not None:
        edges[:, documents.cpu()] = True
    begins = []
    shared = any(x.size(0) != rows for x in tensors.values())  # a row for all: one cut for all
    for row in range(rows):
        wanted = torch.ones(seq_len, dtype=torch.bool) if has_target is None else has_target[row]
        counts = torch.cat([torch.zeros(1, dtype=torch.int64), wanted.cumsum(0)])
        places = edges[row].nonzero().flatten() if edges[row].any() else wanted.nonzero().flatten()[:1]
        starts = (places - length // 2).clamp(0, seq_len - length)
        held = starts[counts[starts + length] > counts[starts]]
        fallback = wanted.nonzero().flatten()[:1].sub(_MARGIN).clamp(0, seq_len - length)
        held = held[:0] if at_targets and has_target is not None else held
        begins.append(int(next(iter([*held, *fallback, 0]))))
    return torch.tensor(begins[:1] * rows if shared else begins)


def _documents(inputs: Mapping[str, Any], seq_len: int) -> Tensor | None:
    """Where the documents begin in a row, by cu_seq_lens, but for the first; None without."""
    lengths = inputs.get("cu_seq_lens_q")
    if not isinstance(lengths, Tensor):
        return None
    inner: Tensor = lengths.flatten().long()[1:]
    return inner[(inner > 0) & (inner < seq_len)]


def _count_documents(cut: dict[str, Any], seq_len: int, begin: int, length: int) -> None:
    """Moves the documents of cu_seq_lens to where a row was cut."""
    for side in ("q", "k"):
        ends = cut.get(f"cu_seq_lens_{side}")
        if isinstance(ends, Tensor) and int(ends.flatten()[-1]) == seq_len:
            moved = torch.unique((ends - begin).clamp(0, length))
            cut[f"cu_seq_lens_{side}"] = moved.to(ends.dtype)
            cut[f"max_length_{side}"] = int(moved.diff().max())
