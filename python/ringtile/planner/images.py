"""The images of a planned step: their pixels, the tower's share of a rank, and the embeddings that they become.

The tower and what projects its features are the model's own code on fake tensors. It reads sizes of images off small
tensors of integers, which are real (`Live.reads_numbers`).

Shape letters: B rows, S tokens of a row, N tokens of a rank, I images of all rows, T tokens of all
images, E hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

from ringtile.errors import ConfigError, RefusedError
from ringtile.hf.features.images import deal, read
from ringtile.hf.features.towers import gathered
from ringtile.hf.model import towers
from ringtile.hf.patches import Patches
from ringtile.planner.live import Live
from ringtile.transport.groups import Group

_OTHER = ("spatial_shapes", "image_position_ids", "pixel_attention_mask")  # say other things of pixels


@dataclass(frozen=True)
class ImageRows:
    """The images of each row, of one size in pixels; None: the only one that the model takes."""

    count: int
    size: tuple[int, int] | None = None  # height, width


@dataclass
class TowerShare:
    """What images are on the rank that has most of them to compute."""

    parameters: int = 0
    images: int = 0  # of a batch
    own: int = 0  # that this rank computes
    tokens: int = 0  # of an image
    flops: int = 0  # of the tower, forward and backward, attention too
    sent_bytes: int = 0  # features forward, and their gradients backward


class PlannedImages:
    """Makes a model run on images too: its forward then takes input_ids (B, S), local labels, and pixels."""

    def __init__(self, model: PreTrainedModel, rows: ImageRows, batch: int, live: Live, on_gpu: bool) -> None:
        self._rows, self._live, self._name, self._on_gpu = rows, live, type(model).__name__, on_gpu
        live.has_numbers = True
        found = towers(model)
        if len(found) != 1 or not hasattr(model.base_model, "get_image_features"):
            raise self._refused(f"it has {len(found)} towers")
        (self._tower,) = found.values()
        self._base: Any = model.base_model
        self.share = TowerShare(sum(x.numel() for x in self._tower.parameters()), rows.count * batch)
        self._takes = {
            name
            for forward in (type(model).forward, type(self._base).forward)
            for name in inspect.signature(forward).parameters
        }
        self.draws_masks = "token_type_ids" in self._takes  # in which images attend both ways: S x S, but on shards
        self._size = self._checked_size(model.config.vision_config)
        self._group: Group | None = None
        self._world_size = 1
        self._patches = Patches()
        self._patches.wrap(self._tower, "forward", self._run_tower)
        self._patches.wrap(model, "forward", self._forward)

    @property
    def _given(self) -> str:
        return "not given" if self._rows.size is None else "{} x {}".format(*self._rows.size)

    def _refused(self, reason: str) -> RefusedError:
        return RefusedError(
            f"{self._name}: the planner does not know what its processor makes of an image ({reason}); expected a "
            f"model that takes patches with image_grid_thw, or images of the size that its configuration has: measure "
            f"it with a short training"
        )

    def _checked_size(self, vision: Any) -> tuple[int, int]:
        if strange := [name for name in _OTHER if name in self._takes]:
            raise self._refused(f"it takes {strange[0]}")
        if "image_grid_thw" in self._takes:
            unit = vision.patch_size * getattr(vision, "spatial_merge_size", 1)
            if self._rows.size is None or any(side % unit for side in self._rows.size):
                raise ConfigError(
                    f"--image-size is {self._given}; expected HEIGHTxWIDTH in multiples of {unit} pixels, as the "
                    f"processor of {self._name} makes them"
                )
            return self._rows.size
        side = getattr(vision, "image_size", None)
        sides = [side, side] if isinstance(side, int) else side
        features = inspect.signature(self._base.get_image_features).parameters
        sized = "image_sizes" in features and features["image_sizes"].default is inspect.Parameter.empty
        if not isinstance(sides, list | tuple) or sized or vision.model_type == "pixtral":
            raise self._refused("its images have no fixed size")
        height, width = (int(x) for x in sides)
        if self._rows.size not in (None, (height, width)):
            raise ConfigError(
                f"--image-size is {self._given}; expected {height} x {width}, the only one that {self._name} takes, of "
                f"an image or of a tile: count tiles with --images"
            )
        return height, width

    # ---- one batch ------------------------------------------------------------------------------

    def inputs(self, loaded: list[Tensor], local_len: int) -> dict[str, Tensor]:
        """Of the model, beside this rank's labels. loaded: the tokens of all rows; gets what the host holds beside."""
        pixels = self._pixels()
        if not self._on_gpu:  # accelerate has read the next batch by then
            loaded.append(torch.empty_like(pixels["pixel_values"]))
        return {"input_ids": loaded[0], "places": torch.empty(local_len, dtype=torch.int64)} | pixels

    def _pixels(self) -> dict[str, Tensor]:
        (height, width), count, vision = self._size, self.share.images, self._base.config.vision_config
        channels = getattr(vision, "in_channels", getattr(vision, "num_channels", 3))
        if "image_grid_thw" not in self._takes:
            return {"pixel_values": torch.empty(count, channels, height, width)}
        grid = [1, height // vision.patch_size, width // vision.patch_size]
        features = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
        with _disable_current_modes():
            grids = torch.tensor([grid] * count)
        return {"pixel_values": torch.empty(count * grid[1] * grid[2], features), "image_grid_thw": grids}

    def enter(self, group: Group | None, world_size: int) -> None:
        """The next steps are of these ranks."""
        self._group, self._world_size = group, world_size
        self.share.flops = self.share.sent_bytes = 0

    def _run_tower(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The rank's images; then the features of all."""
        names = list(inspect.signature(original).parameters)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        images = read(arguments, self._tower.config)
        if isinstance(images, str):
            raise self._refused(images)
        owned = deal(images.costs, self._world_size)
        rank = max(range(self._world_size), key=lambda rank: sum(images.costs[image] for image in owned[rank]))
        self.share.own = len(owned[rank])
        with self._live.making("tower"):
            before = self._live.attention_flops + self._live.flops
            local = original(**images.take(owned[rank]))
            self.share.flops += self._live.attention_flops + self._live.flops - before
        if self._world_size == 1:
            return local
        return gathered(local, images, owned, rank, self._group, self._name, self._sent)

    def _sent(self, local: Tensor, whole: Tensor) -> None:
        others = self._world_size - 1
        self.share.sent_bytes += local.nbytes * others + (whole.nbytes - local.nbytes) * whole.requires_grad

    def _forward(self, original: Callable[..., Any], *, input_ids: Tensor, places: Tensor, **kwargs: Any) -> Any:
        """input_ids (B, S); places int64 (N,): of this rank's tokens, in the row."""
        pixels = {name: kwargs.pop(name) for name in ("pixel_values", "image_grid_thw") if name in kwargs}
        with self._live.reading_numbers():
            found: Any = self._base.get_image_features(**pixels, return_dict=True)
        levels = [
            self._tokens(found.pooler_output),
            *map(self._tokens, getattr(found, "deepstack_features", None) or []),
        ]
        self.share.tokens = levels[0].size(0) // self.share.images
        rows, seq_len = input_ids.shape
        embeddings = self._base.get_input_embeddings()(input_ids)
        mask = torch.empty((rows, seq_len, 1), dtype=torch.bool).expand_as(embeddings)
        merged = embeddings.masked_scatter(mask, levels[0].to(embeddings.dtype))
        local = merged.index_select(1, places)
        for level in levels[1:]:  # added to the tokens of images here, in a few layers of Qwen3-VL
            flat = local.flatten(0, 1)
            mine = level[: min(level.size(0) // self._world_size, flat.size(0))].to(local.dtype)
            local = torch.cat([flat[: mine.size(0)] + mine, flat[mine.size(0) :]]).view_as(local)
        return original(inputs_embeds=local, **kwargs)

    @staticmethod
    def _tokens(features: Any) -> Tensor:
        """(T, E)"""
        parts = [features] if isinstance(features, Tensor) else list(features)
        return torch.cat([x.flatten(0, -2) for x in parts])


def attend_as_loaded(model: nn.Module, name: str) -> dict[str, str]:
    """The implementations of attention of a model whose towers keep torch's."""
    config: Any = model.config
    of_towers = {type(tower.config) for tower in towers(model).values()}  # type: ignore[arg-type]
    return {"": name} | {
        sub: "sdpa" if type(getattr(config, sub)) in of_towers else name
        for sub in config.sub_configs
        if getattr(config, sub, None) is not None
    }
