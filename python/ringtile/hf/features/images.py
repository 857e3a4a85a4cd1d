"""The images of one call of a vision tower: which of its arguments, and of its outputs, belong to which image, what
each costs, and which rank computes it.

An image is whatever a tower computes on its own: an image, a tile of one, or a frame of a video. Towers take them in
one of two ways: patches (P, F), image after image, with a grid (V, 3) of frames, height and width; or tensors and lists
with an entry for each image.

Shape letters: I images, P patches of all images, V images and videos, F features, R runs of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringtile.hf.keys import LOSS, OUTPUT, is_scalar


class Rows(NamedTuple):
    """Where an output holds images: a row in `dim` for every so many patches of an image; None: one for each image.

    perhaps: if there is one for each image, all of them of so many patches, it may also be one for that many patches.
    """

    dim: int
    patches: int | None
    perhaps: int | None = None


@dataclass(frozen=True)
class Images:
    """The images of one call. arguments: of the call, by name. entries: by image, which of the V entries it is of."""

    arguments: Mapping[str, Any]
    entries: tuple[int, ...]
    patches: tuple[int, ...]
    costs: tuple[int, ...]
    per_entry: frozenset[str]  # the arguments with V entries
    main: str  # the argument that holds the pixels
    grid: str | None  # the argument (V, 3); then main is (P, F), and each frame of an entry is an image

    @property
    def are_frames(self) -> bool:
        """Whether some are frames of one video."""
        return len({*self.entries}) < len(self.entries)

    def take(self, images: Sequence[int]) -> dict[str, Any]:
        """The arguments of a call with some of the images; a frame is an image there."""
        taken = dict(self.arguments)
        for name in self.per_entry:
            taken[name] = _select(taken[name], [self.entries[image] for image in images])
        if self.grid is not None:
            taken[self.main] = _rows_of(taken[self.main], 0, self.patches, images)
            taken[self.grid] = _with_frames(taken[self.grid], 1)
        return taken

    def as_video(self) -> dict[str, Any]:
        """The arguments of a call with the images, of one size, as frames of one video."""
        assert self.grid is not None
        taken = {**self.arguments, **{name: _select(self.arguments[name], [0]) for name in self.per_entry}}
        return {**taken, self.grid: _with_frames(taken[self.grid], len(self.patches))}

    def with_changed(self, changed: Iterable[int]) -> Images:
        """The same images, some of which show something else."""
        main = self.arguments[self.main]
        if isinstance(main, Tensor):
            index = _index(self.patches if self.grid is not None else [1] * len(self.patches), changed, main.device)
            shown: Any = main.index_copy(0, index, _other(main[index]))
        else:
            shown = type(main)(_other(x) if image in changed else x for image, x in enumerate(main))
        return replace(self, arguments={**self.arguments, self.main: shown})

    def rows(self, x: Tensor) -> Rows | None:
        """Where an output of a call with all images holds them; None: it is not understood."""
        if x.dim() > 0 and self.grid is None and x.size(0) == len(self.patches):
            return Rows(0, None, self.patches[0] if len({*self.patches}) == 1 else None)
        for dim in (0, 1):
            if x.dim() <= dim or (dim == 1 and x.size(0) != 1) or x.size(dim) == 0:
                continue
            patches, rest = divmod(sum(self.patches), x.size(dim))
            if rest == 0 and all(count % patches == 0 for count in self.patches):
                return Rows(dim, patches)
        return None

    def counts(self, rows: Rows) -> list[int]:
        """How many rows each image has in an output."""
        return [1 if rows.patches is None else count // rows.patches for count in self.patches]

    def select(self, x: Tensor, rows: Rows, images: Sequence[int]) -> Tensor:
        """The rows of some images, in an output of a call with all."""
        return _rows_of(x, rows.dim, self.counts(rows), images)


def read(arguments: Mapping[str, Any], config: Any) -> Images | str:
    """The images of a call, or why it is not known which are there. config: of the tower."""
    main = next((name for name, value in arguments.items() if _holds_pixels(value)), None)
    if main is None:
        return f"its arguments {sorted(arguments)} hold no pixels"
    pixels = arguments[main]
    grid = next((name for name, x in arguments.items() if _is_grid(x, pixels)), None)
    num_entries = len(arguments[grid] if grid is not None else pixels)
    per_entry = set()
    for name, value in arguments.items():
        if (name == main and grid is not None) or name in LOSS | OUTPUT:
            continue  # models hand it on to everything that they call, and no tower reads it
        if _has_entries(value, num_entries):
            per_entry.add(name)
        elif not _is_for_all(value):
            kind = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            return f"its argument {name} {kind} has no entry for each of {num_entries} images"
    entries = [*range(num_entries)]
    if grid is None:
        patches = _patches(arguments, num_entries, config)
    else:
        sizes = arguments[grid].tolist()
        entries = [entry for entry, (frames, _, _) in enumerate(sizes) for _ in range(frames)]
        patches = [sizes[entry][1] * sizes[entry][2] for entry in entries]
    costs = _costs(pixels, patches if grid is not None or "image_sizes" in arguments else None, config)
    return Images(arguments, tuple(entries), tuple(patches), tuple(costs), frozenset(per_entry), main, grid)


def deal(costs: Sequence[int], world_size: int) -> list[list[int]]:
    """By rank, the images that it computes, in order: the same on every rank that calls it.

    The dearest image first, each to the rank with the least to do: at most 4/3 - 1/(3 W) of the best partition (Graham,
    "Bounds on multiprocessing timing anomalies", 1969). Ranks without an image, if any, are the last ones.
    """
    loads = [0] * world_size
    owned: list[list[int]] = [[] for _ in range(world_size)]
    for image in sorted(range(len(costs)), key=lambda image: (-costs[image], image)):
        rank = min(range(world_size), key=lambda rank: (loads[rank], rank))
        loads[rank] += costs[image]
        owned[rank].append(image)
    return [sorted(images) for images in owned]


def layout_of(counts: Sequence[int], owned: Sequence[Sequence[int]]) -> Tensor:
    """The layout, int64 (R, 5) as `all_gather_seq` takes it, of rows of which each image has so many, in order."""
    begins = [0]
    for count in counts:
        begins.append(begins[-1] + count)
    runs: list[list[int]] = []
    for rank, images in enumerate(owned):
        held = 0
        for image in images:
            if held and runs[-1][1] + runs[-1][4] == begins[image]:
                runs[-1][4] += counts[image]
            else:
                runs.append([rank, begins[image], 1, held, counts[image]])
            held += counts[image]
    return torch.tensor(runs, dtype=torch.int64, device="cpu")


# ---- arguments ----------------------------------------------------------------------------------


def _holds_pixels(value: Any) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return len(values) > 0 and all(isinstance(x, Tensor) and x.is_floating_point() and x.dim() >= 2 for x in values)


def _is_grid(value: Any, pixels: Any) -> bool:
    """Whether it is the grid (V, 3) of patches (P, F)."""
    is_sized = isinstance(value, Tensor) and not value.is_floating_point() and value.dim() == 2 and value.size(1) == 3
    return is_sized and isinstance(pixels, Tensor) and int(value.prod(1).sum()) == pixels.size(0)


def _has_entries(value: Any, num_entries: int) -> bool:
    if isinstance(value, list | tuple):
        return len(value) == num_entries and all(isinstance(x, Tensor | list | tuple) for x in value)
    return isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == num_entries


def _is_for_all(value: Any) -> bool:
    """Whether it is a setting, the same for all images."""
    return all(map(_is_for_all, value)) if isinstance(value, list | tuple) else is_scalar(value)


def _patches(arguments: Mapping[str, Any], num_entries: int, config: Any) -> list[int]:
    """The patches of each image, where the outputs of a tower may hold no others; 1 where all images are alike."""
    sizes = arguments.get("image_sizes")  # Pixtral: heights and widths in pixels, of images that were padded to one
    if sizes is not None and isinstance(patch := getattr(config, "patch_size", None), int):
        sizes = sizes.tolist() if isinstance(sizes, Tensor) else sizes
        return [(int(height) // patch) * (int(width) // patch) for height, width in sizes]
    places = arguments.get("pixel_position_ids")  # Gemma 4: (I, patches, 2), -1 for padding
    if isinstance(places, Tensor):
        counts: list[int] = places.ne(-1).all(-1).sum(-1).tolist()
        return counts
    return [1] * num_entries


def _costs(pixels: Any, patches: Sequence[int] | None, config: Any) -> list[int]:
    """What each image costs. patches: None: a tower computes the pixels of all, padding too."""
    if patches is None:
        return [x.numel() for x in pixels]
    # Of a patch in a layer: 4 d^2 multiply-adds in the projections of attention, 2 d m in the MLP, 2 d n in the scores
    # and sums over n patches. Divided by 2 d.
    width = _number(config, 0, "embed_dim", "hidden_size")
    linear = 2 * width + _number(config, 4 * width, "intermediate_size")
    return [count * (linear + count) for count in patches]


def _number(config: Any, default: int, *names: str) -> int:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), default)


def _with_frames(grid: Tensor, frames: int) -> Tensor:
    """The grid (V, 3) with so many frames in each entry."""
    return torch.cat([torch.full_like(grid[:, :1], frames), grid[:, 1:]], dim=1)


def _other(x: Tensor) -> Tensor:
    """Other pixels: no multiple of x, which a norm might make the same."""
    return 1 - x.flip(-1)


# ---- rows ---------------------------------------------------------------------------------------


def _index(counts: Sequence[int], images: Iterable[int], device: torch.device) -> Tensor:
    """int64: the rows of some images, of which each has so many."""
    ends = torch.tensor([0, *counts]).cumsum(0).tolist()
    return torch.cat([torch.arange(0), *(torch.arange(ends[image], ends[image + 1]) for image in images)]).to(device)


def _rows_of(x: Tensor, dim: int, counts: Sequence[int], images: Sequence[int]) -> Tensor:
    return x.index_select(dim, _index(counts, images, x.device))


def _select(value: Any, entries: Sequence[int]) -> Any:
    if isinstance(value, Tensor):
        return value[torch.tensor(entries, device=value.device)]
    return type(value)(value[entry] for entry in entries)
