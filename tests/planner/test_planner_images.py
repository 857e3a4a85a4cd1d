"""`ringtile plan` of models with images: the tower's share of a rank, against the real tower."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from ringtile.cli import main
from ringtile.hf.config import Config
from ringtile.hf.model import towers
from ringtile.planner.images import ImageRows
from ringtile.planner.setup import Setup
from ringtile.planner.step import StepMemory, TrainingStep
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import PretrainedConfig

from tools.models.tiny_images import image_model

SIZES: dict[str, tuple[int, int] | None] = {"qwen3_vl": (32, 64), "gemma3": None}
SIZES |= {"qwen2_5_vl": (32, 64), "glm4v": (32, 64), "llava": None, "internvl": None}
COUNT, SEQ_LEN = 4, 256


def planned(model_type: str, devices: int = 1, **keys: Any) -> StepMemory:
    config = Config(context_parallel_size=devices)
    images = ImageRows(COUNT, SIZES[model_type])
    setup = Setup(image_model(model_type).config, devices=devices, ringtile=config, images=images, **keys)
    with TrainingStep(setup) as step:
        return step.run(SEQ_LEN)


def real_pixels(config: PretrainedConfig, size: tuple[int, int] | None) -> dict[str, Tensor]:
    vision = config.vision_config
    if size is None:
        side = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
        return {"pixel_values": torch.randn(COUNT, 3, side, side)}
    grid = [1, size[0] // vision.patch_size, size[1] // vision.patch_size]
    width = 3 * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    pixels = torch.randn(COUNT * grid[1] * grid[2], width)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid] * COUNT)}


@pytest.mark.parametrize(
    "model_type", [*SIZES][:1] + [pytest.param(name, marks=pytest.mark.long) for name in [*SIZES][1:]]
)
def test_a_tower_is_planned_as_it_runs(model_type: str) -> None:
    """Its weights, the tokens of an image, its flops; two ranks have half of the images each, of flops and of what is
    saved, and send features to the other, then gradients."""
    model: Any = image_model(model_type)
    model.set_attn_implementation("sdpa")
    (tower,) = towers(model).values()
    counted = FlopCounterMode(display=False)
    with counted, torch.no_grad():
        found = model.model.get_image_features(**real_pixels(model.config, SIZES[model_type]), return_dict=True)
    counts = {str(op): flops for op, flops in counted.get_flop_counts()[type(tower).__name__].items()}
    of_features = found.pooler_output
    features = of_features if isinstance(of_features, Tensor) else torch.cat([x.flatten(0, -2) for x in of_features])
    alone, shared = planned(model_type), planned(model_type, 2)
    assert alone.tower is not None
    assert shared.tower is not None
    assert alone.tower.parameters == sum(x.numel() for x in tower.parameters())
    assert alone.tower.tokens * COUNT == features.numel() // features.size(-1)
    assert alone.parts["tower"] == pytest.approx(2 * shared.parts["tower"], rel=0.05)
    assert (alone.tower.own, shared.tower.own) == (COUNT, COUNT // 2)
    assert alone.tower.sent_bytes == 0
    if SIZES[model_type] is not None:  # the features that the tower returns, half of them forward, half backward
        deep = tree_leaves(getattr(found, "deepstack_features", None) or [])  # by image too, from transformers 5.24 on
        assert shared.tower.sent_bytes == features.nbytes + sum(x.nbytes for x in deep)
    assert alone.tower.flops == 2 * shared.tower.flops
    products = sum(flops for op, flops in counts.items() if "convolution" not in op)
    assert products <= alone.tower.flops  # torch does not count attention on a CPU
    heads = alone.tower.flops - products
    assert heads < 0.5 * alone.tower.flops


REFUSED = {
    "--image-size is not given; expected HEIGHTxWIDTH in multiples of 16 pixels": ["qwen3_vl", "--images=2"],
    "--image-size is 40 x 40; expected": ["qwen3_vl", "--images=2", "--image-size=40x40"],
    "--image-size is '4k'; expected pixels, HEIGHTxWIDTH": ["qwen3_vl", "--images=2", "--image-size=4k"],
    "--image-size is of the images of a row": ["qwen3_vl", "--image-size=32x32"],
    "--images is 0; expected at least 1": ["qwen3_vl", "--images=0"],
    "a GRPO step is planned of text": ["qwen3_vl", "--images=1", "--image-size=32x32", "--completion-tokens=8"],
    "expected a causal language model, or --images too": ["qwen3_vl"],
    "--seq-len is 8, and --images 4 are": ["gemma3", "--images=4", "--seq-len=8"],
    "the only one that Gemma3ForConditionalGeneration takes": ["gemma3", "--images=4", "--image-size=8x8"],
    "what its processor makes of an image (it takes pixel_attention_mask)": ["smolvlm", "--images=4"],
}


@pytest.mark.parametrize("words", REFUSED)
def test_images_that_cannot_be_planned_are_refused(
    words: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_type, *options = REFUSED[words]
    image_model(model_type).config.save_pretrained(tmp_path)
    assert main(["plan", f"--model={tmp_path}", "--seq-len=64", "--no-switches", *options]) == 2
    assert words in capsys.readouterr().err


def test_plan_prints_the_tower(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    image_model("qwen3_vl").config.save_pretrained(tmp_path)
    report = tmp_path / "report.json"
    options = ["--images=4", "--image-size=32x64", "--devices=2", "--no-switches"]
    assert main(["plan", f"--model={tmp_path}", "--seq-len=64", *options, f"--json={report}"]) == 0
    printed = capsys.readouterr().out
    assert (
        "4 images of 32 x 64 pixels a row, 8 tokens each; a tower of 0.000 G parameters: a rank computes 2 of 4"
        in printed
    )
    assert json.loads(report.read_text())["tower"]["own"] == 2
