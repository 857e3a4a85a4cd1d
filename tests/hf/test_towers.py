"""A vision tower split over ranks against the same tower in one process."""

import functools
import itertools
import logging
from types import MethodType
from typing import Any

import pytest
import ringtile
import torch
from hf_towers import (
    GRID,
    PATCH,
    TOWERS,
    Flops,
    TowerCase,
    features_of,
    packed,
    pixels,
    tower_case,
    tower_model,
)
from hf_training import TOLERANCE, make_trainer
from peft import LoraConfig, get_peft_model
from pool import run_ranks
from ringtile.hf import loss
from ringtile.hf.features import images, towers
from ringtile.hf.patches import Patches
from ringtile.transport.loopback import LoopbackWorld
from torch import Tensor, nn
from transformers import AutoModel
from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig

from tools.models import tiny_images

# ---- who computes what --------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("costs", [[5, 5, 4, 4, 3, 3, 3], [7], [1, 1, 1, 1], [9, 2, 2, 2, 2, 1], [100, 3, 50, 51, 7]])
def test_deal_is_close_to_the_best_partition(costs, world_size):
    owned = images.deal(costs, world_size)
    assert sorted(itertools.chain(*owned)) == [*range(len(costs))]
    assert all(mine == sorted(mine) for mine in owned)
    assert [bool(mine) for mine in owned] == sorted((bool(mine) for mine in owned), reverse=True)
    best = min(
        max(sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(world_size))
        for owners in itertools.product(range(world_size), repeat=len(costs))
    )
    assert 3 * world_size * max(sum(costs[image] for image in mine) for mine in owned) <= best * (4 * world_size - 1)


# ---- equal to one process -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "world_size"),
    [
        *(("qwen3_vl", 3), ("llava", 2), ("mistral3", 2)),
        *(
            pytest.param(model_type, world_size, marks=pytest.mark.long)
            for model_type, world_size in itertools.product(TOWERS, (2, 3, 4, 6))
        ),
    ],
)
def test_split_tower_equals_one_process(model_type, world_size):
    """With 6 ranks, the last of them has none of the 5 images."""
    in_its_dtype = TOWERS[model_type][2]
    ranks = tower_case(model_type).check(world_size, 1e-12 if in_its_dtype else 1e-6)
    if world_size == 6:
        assert ranks[-1].forward_bytes == 0


@pytest.mark.long
@pytest.mark.parametrize("model_type", TOWERS)
def test_split_tower_equals_one_process_in_float32(model_type):
    tower_case(model_type, torch.float32).check(3, 1e-6)


def test_rank_without_image_has_gradients_of_zero():
    ranks = tower_case("qwen3_vl").check(6, 1e-12)
    idle = {name: x for name, x in ranks[-1].gradients.items() if "visual" in name}
    assert idle
    assert not any(x.count_nonzero() for x in idle.values())


def _gemma4_tower():
    torch.manual_seed(0)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 32)
    config = Gemma4VisionConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=8, patch_size=8
    )
    return AutoModel.from_config(config, dtype=torch.float64, attn_implementation="eager").train()


def _gemma4_images(*sizes):
    """Of so many patches, high and wide; nine of them are a feature."""
    places = torch.full((len(sizes), 81, 2), -1)
    for image, (height, width) in enumerate(sizes):
        places[image, : height * width] = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(1)
    return {"pixel_values": pixels(len(sizes), 81, 192), "pixel_position_ids": places}


def test_gemma4_strips_padding_and_pools_patches():
    """Its outputs are packed, of images with an entry each."""
    arguments = _gemma4_images((9, 9), (3, 6), (6, 9))
    TowerCase(_gemma4_tower(), lambda tower: tower, lambda tower: tower(**arguments).last_hidden_state.flatten()).check(
        2, 1e-6
    )


@pytest.mark.parametrize("later", [[(9, 9), (3, 6), (6, 9)], [(3, 3)] * 3, [(3, 3), (3, 3), (9, 9)]])
def test_first_images_of_one_feature_leave_open_where_later_ones_are(later):
    """As many rows as images: one for each, or one for nine patches."""
    expected = _gemma4_tower()(**_gemma4_images(*later)).last_hidden_state
    of_ranks = [_gemma4_tower() for _ in range(2)]

    def run(group):
        tower, patches = of_ranks[group.transport.rank], Patches()
        towers.split(tower, "tower", group, patches)
        assert tower(**_gemma4_images((3, 3), (3, 3))).last_hidden_state.shape == (2, 32)
        features = tower(**_gemma4_images(*later)).last_hidden_state
        patches.restore()
        return features.detach()

    for features in LoopbackWorld(2).run(run):
        torch.testing.assert_close(features, expected.detach(), rtol=1e-9, atol=1e-9)


def test_frames_of_a_video_are_dealt():
    grid = torch.tensor([[4, 4, 4]])
    video = {"pixel_values_videos": pixels(64, PATCH), "video_grid_thw": grid}
    call = lambda model: features_of(model.model.get_video_features(**video))  # noqa: E731
    ranks = TowerCase(tower_model("qwen3_vl"), lambda model: model.model.visual, call).check(2, 1e-12)
    assert ranks[0].flops == ranks[1].flops
    assert all(rank.forward_bytes > 0 for rank in ranks)


def test_frames_that_mix_are_computed_whole(caplog):
    """Images still are split."""
    model = tower_model("qwen3_vl")
    tower = model.model.visual

    @functools.wraps(type(tower).forward)
    def mixing(self, hidden_states, grid_thw, **kwargs):
        output = type(self).forward(self, hidden_states, grid_thw, **kwargs)
        frames = grid_thw[:, 0].repeat_interleave(grid_thw.prod(1) // 4).sqrt()[:, None]
        return type(output)(**{**output, "pooler_output": output.pooler_output * frames})

    tower.forward = MethodType(mixing, tower)
    for arguments, is_split in ((packed(), True), (packed(torch.tensor([[2, 4, 4], [1, 4, 4]])), False)):
        call = lambda model, given=arguments: features_of(model.model.get_image_features(**given))  # noqa: E731
        with caplog.at_level(logging.WARNING, logger="ringtile"):
            ranks = TowerCase(model, lambda model: model.model.visual, call).check(2, 1e-6)
        assert all((rank.forward_bytes > 0) == is_split for rank in ranks)
    assert caplog.text.count("the features of a frame depend on other frames") == 1


def _frozen(model):
    model.model.visual.requires_grad_(False)
    return model


def _with_lora(model):
    targets = r".*visual.*(qkv|proj|linear_fc1)"
    return get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).double()


def _checkpointed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@pytest.mark.parametrize("change", [_frozen, _with_lora, _checkpointed])
def test_frozen_adapted_and_checkpointed_towers_equal_one_process(change):
    case = tower_case("qwen3_vl", change=change)
    names = [name for name in case.gradients if "visual" in name]
    assert bool(names) == (change is not _frozen)
    ranks = case.check(2, 1e-12)
    if change is _checkpointed:
        whole = tower_case("qwen3_vl").check(2, 1e-12)
        assert [rank.bytes for rank in ranks] == [rank.bytes for rank in whole]


def test_autocast_equals_one_process():
    """Features are rounded to bfloat16, as in one process; their gradients are summed over ranks in float32."""
    context = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    tower_case("llava", torch.float32, context=context).check(2, 2.0**-7)


def test_what_models_hand_on_to_all_is_no_argument_of_images():
    arguments = {"shift_labels": torch.zeros(2, 7, dtype=torch.int64), "num_items_in_batch": torch.tensor(3)}
    ranks = tower_case("qwen3_vl", arguments=arguments).check(2, 1e-12)
    assert all(rank.forward_bytes > 0 for rank in ranks)


# ---- flops and bytes ----------------------------------------------------------------------------


def _flops_of(*grid: int) -> int:
    """Of one image, in one process."""
    return tower_case("qwen3_5", arguments=packed(torch.tensor([grid]))).flops


def test_equal_images_cost_each_rank_its_share():
    case = tower_case("qwen3_5", arguments=packed(torch.tensor([[1, 4, 4]] * 4)))
    for rank in case.check(2, 1e-12):
        assert 2 * rank.flops == case.flops
        # To the one other rank: the features of its own images, and then the gradients of the other's.
        assert rank.bytes == 2 * rank.forward_bytes == case.features.nbytes


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_uneven_images_cost_as_the_best_partition(world_size):
    of_images = [_flops_of(*image) for image in GRID.tolist()]
    best = min(
        max(sum(x for x, owner in zip(of_images, owners, strict=True) if owner == rank) for rank in range(world_size))
        for owners in itertools.product(range(world_size), repeat=len(of_images))
    )
    case = tower_case("qwen3_5")
    ranks = case.check(world_size, 1e-12)
    assert sum(rank.flops for rank in ranks) == sum(of_images)
    assert 3 * world_size * max(rank.flops for rank in ranks) <= best * (4 * world_size - 1)
    # Each rank sends its own features to all others, and to each other the gradients of the other's features.
    assert sum(rank.bytes for rank in ranks) == 2 * (world_size - 1) * case.features.nbytes


# ---- engines ------------------------------------------------------------------------------------


def _average_gradients(steps, engine):
    """This rank's gradients of a tower after an engine has averaged them over the ranks, whose losses are W times the
    part of each. steps: the grids of each group; the gradients are those of the last."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    rank, world_size, num_groups, patches = dist.get_rank(), dist.get_world_size(), len(steps[0]), Patches()
    size = max(1, world_size // num_groups)
    groups = [dist.new_group([*range(i, i + size)]) for i in range(0, world_size, size)]
    tower = tower_model("qwen3_vl").model.visual
    names = [name for name, _ in tower.named_parameters()]
    towers.split(tower, "tower", groups[rank // size], patches)
    wrapped: Any = tower
    if engine == "FSDP2":
        for block in tower.blocks:
            fully_shard(block)
        fully_shard(tower)
    elif engine == "DDP":
        wrapped = DistributedDataParallel(_OfFeatures(tower))
    for grids in steps:
        wrapped.zero_grad()
        for grid in grids if world_size == 1 else [grids[rank // size]]:
            output = wrapped(packed(grid)["pixel_values"], grid)
            features = output if engine == "DDP" else features_of(output)
            weights = torch.randn(features.shape, generator=torch.Generator().manual_seed(3), dtype=features.dtype)
            (world_size * (features * weights)[rank % size :: size]).sum().backward()
    patches.restore()
    return {
        name: (x.grad.full_tensor() if engine == "FSDP2" else x.grad)
        for name, x in zip(names, tower.parameters(), strict=True)
    }


class _OfFeatures(nn.Module):
    def __init__(self, tower):
        super().__init__()
        self.tower = tower

    def forward(self, pixel_values, grid):
        return features_of(self.tower(pixel_values, grid_thw=grid))


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "steps", "engine"),
    [
        (3, [[GRID[:2]]] * 2, "DDP"),
        (3, [[GRID[:2]]] * 2, "FSDP2"),
        (4, [[GRID[:3], GRID[3:4]], [GRID[2:4], GRID]], "FSDP2"),
    ],
)
def test_engine_averages_gradients_of_ranks_with_few_images(world_size, steps, engine):
    """Two images on three ranks: the last one gathers the parameters that the others do, and has no gradient. Two
    groups, of which one begins with a single image: they make as many forward passes of the tower."""
    expected = run_ranks(1, _average_gradients, steps, "")[0]
    for gradients in run_ranks(world_size, _average_gradients, steps, engine):
        for name, gradient in gradients.items():
            # Softmax is computed in float32.
            assert (gradient - expected[name]).abs().max() <= 1e-6 * expected[name].abs().max(), name


# ---- in a training ------------------------------------------------------------------------------


class _EqualImages:
    """A data collator of rows with words and images of one size."""

    def __init__(self, model: Any) -> None:
        self._images = tiny_images.Images(model)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return self._images.batch([(row["words"], row["images"]) for row in rows])


def _trained(split: bool | None) -> tuple[dict[str, Tensor], int]:
    """The weights after a step on four images, and the flops of this rank in the forward of the tower's blocks.

    split: whether the tower is split over the ranks; None: one process without ringtile.
    """
    model, flops = tiny_images.image_model("qwen3_vl"), Flops()

    def enter(block: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():  # no proof
            flops.__enter__()

    def leave(block: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            flops.__exit__(None, None, None)

    for block in model.model.visual.blocks:
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)
    rows = [{"words": [3, 4 + i, 5, 6, 7 + i], "images": [8 * i, 8 * i + 4]} for i in range(2)]
    settings = {"max_steps": 1, "gradient_accumulation_steps": 1, "remove_unused_columns": False}
    data = {"train_dataset": rows, "eval_dataset": None, "data_collator": _EqualImages(model)}
    trainer = make_trainer(model=model, trainer_arguments=data, **settings)
    if split is not None:
        with pytest.MonkeyPatch.context() as patch:
            if not split:
                patch.setattr(loss, "FEATURES", tuple(x for x in loss.FEATURES if x is not towers.FEATURE))
            ringtile.enable(trainer, {"context_parallel_size": 2, "first_batch_check": False})
    trainer.train()
    return {name: x.detach().clone() for name, x in model.named_parameters()}, flops.flops


def test_training_with_a_split_tower_equals_one_process_and_costs_half():
    expected, whole = _trained(None)
    for split, ranks in ((True, 2), (False, 1)):
        for weights, flops in run_ranks(2, _trained, split):
            assert flops * ranks == whole
            for name, weight in weights.items():
                assert (weight - expected[name]).abs().max() <= TOLERANCE * expected[name].abs().max(), name
