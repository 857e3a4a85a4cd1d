"""Models that take videos: rows with videos, with images, with both and with none, on ranks as in one process."""

import functools
from typing import Any

import pytest
import torch
from cells import Cell, check, params, table
from test_images import STEEP, STEPS, UNFLATTENED
from transformers import PreTrainedModel

from tools.models.tiny_images import ELSEWHERE, END, FIRST_WORD, LAST_WORD, START, Images, image_model

VIDEO = 1000  # the number of the first video; below, images
NUM_FRAMES = (2, 1, 3)  # of videos in turn, where they may differ
# By row: videos, images, both, none; then a batch with videos alone, one with images alone, and one of text.
VISUALS = (
    *((VIDEO,), (1,), (), (2, VIDEO + 1, VIDEO + 2)),
    *((VIDEO + 3,), (), (3,), (4, 5), (), ()),
)
TIMED = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "gemma4")  # a frame stands alone in the text
DTYPES = {"gemma4": torch.float64}  # at its random weights, float32 changes the norm of its gradient by 2e-6
AS_IMAGES = ("glm4v",)  # the tokens of a frame are those of an image


class Videos(Images):
    """What makes images and videos for one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._type = model.config.model_type
        super().__init__(model)

    def pixels(self, rows: Any) -> dict[str, torch.Tensor]:
        images = super().pixels([[number for number in row if number < VIDEO] for row in rows])
        return images | self._videos([number for row in rows for number in row if number >= VIDEO])

    def span(self, number: int) -> tuple[list[int], list[int]]:
        if number < VIDEO:
            return super().span(number)
        features: Any = self._features(number)
        count = features.numel() // features.size(-1)
        token = self._config.image_token_id if self._type in AS_IMAGES else ELSEWHERE
        frames = self.num_frames(number) if self._type in TIMED else 1
        if self._type in TIMED:
            return [START, *[token] * (count // frames), END] * frames, [0, *[2] * (count // frames), 0] * frames
        return [START, *[token] * count, END], [0, *[2] * count, 0]

    def num_frames(self, number: int) -> int:
        differ = self._takes & {"video_grid_thw", "num_frames_per_video"}
        return NUM_FRAMES[number % len(NUM_FRAMES)] if differ else 2

    @torch.no_grad()
    def _features(self, number: int) -> torch.Tensor:
        pixels = {name: x for name, x in self._videos([number]).items() if name != "second_per_grid_ts"}
        pixels = {name: x.to(self._base.dtype) if x.is_floating_point() else x for name, x in pixels.items()}
        first = next(iter(pixels))
        features = self._base.get_video_features(pixels.pop(first), **pixels, return_dict=True).pooler_output
        return features if isinstance(features, torch.Tensor) else torch.cat([x.flatten(0, -2) for x in features])

    def _videos(self, numbers: list[int]) -> dict[str, torch.Tensor]:
        if not numbers:
            return {}
        # The frames of a video are images of one size.
        shown = [[4 * (10 * number + i) + number % 4 for i in range(self.num_frames(number))] for number in numbers]
        frames = [super(Videos, self).pixels([of_video]) for of_video in shown]
        if "video_grid_thw" not in self._takes:
            if frames[0]["pixel_values"].dim() == 5:  # images in tiles, but whole frames
                frames = [{"pixel_values": x["pixel_values"][:, 0]} for x in frames]
            names = {"pixel_values": "pixel_values_videos", "image_position_ids": "video_position_ids"}
            if "num_frames_per_video" not in self._takes:
                return {name: torch.stack([x[key] for x in frames]) for key, name in names.items() if key in frames[0]}
            videos = {name: torch.cat([x[key] for x in frames]) for key, name in names.items()}
            return videos | {"num_frames_per_video": torch.tensor([self.num_frames(number) for number in numbers])}
        grids = [[len(x["image_grid_thw"]), *x["image_grid_thw"][0, 1:].tolist()] for x in frames]
        videos = {"pixel_values_videos": torch.cat([x["pixel_values"] for x in frames])}
        videos["video_grid_thw"] = torch.tensor(grids)
        if "second_per_grid_ts" in self._takes:
            videos["second_per_grid_ts"] = torch.tensor([1.0 + number % 2 for number in numbers])
        return videos


class Padded:
    """A data collator that pads rows with images and videos on the right."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._videos, self._dtype = Videos(model), model.dtype

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self._videos.batch([(row["words"], row["visuals"]) for row in rows], ignored=3)
        return {name: x.to(self._dtype) if x.is_floating_point() else x for name, x in batch.items()}


def make_rows(num_rows: int, images: bool) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(num_rows):
        count = int(torch.randint(8, 17, (), generator=generator))
        words = torch.randint(FIRST_WORD, LAST_WORD + 1, (count,), generator=generator)
        visuals = [number for number in VISUALS[i % len(VISUALS)] if images or number >= VIDEO]
        rows.append({"words": words.tolist(), "visuals": visuals})
    return rows


def made(name: str) -> dict[str, Any]:
    model = image_model(name, DTYPES.get(name, torch.float32))
    model.config.get_text_config().use_cache = False
    rows = make_rows(20, images=name not in AS_IMAGES)  # whose batches hold images or videos
    if name in UNFLATTENED:  # every batch must hold some
        rows = [row for row in rows if row["visuals"]]
    return {"model": model, "trainer_arguments": {"train_dataset": rows, "data_collator": Padded(model)}}


def cell(name: str, ranks: int = 2, long: bool = True) -> Cell:
    world = {"world": ranks, "config": {"context_parallel_size": ranks}}
    options = STEPS | STEEP.get(name, {}) | UNFLATTENED.get(name, {}) | {"max_steps": 3}
    return Cell(f"{name}, {ranks} ranks", options, made=functools.partial(made, name), long=long, **world)


MODELS = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "gemma4", "llava_onevision"),
    "llava_next_video",
)
CELLS = table(*(cell(name, ranks, long=(name, ranks) != ("qwen3_vl", 2)) for name in MODELS for ranks in (2, 3)))


@pytest.mark.parametrize("cell", params(CELLS))
def test_ranks_train_with_videos_as_one_process(cell: Cell) -> None:
    check(__name__, cell)
