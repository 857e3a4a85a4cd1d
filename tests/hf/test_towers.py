"""A vision tower split over ranks against the same tower in one process."""

import copy
import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import ringtile
import torch
from hf_training import TOLERANCE, make_trainer
from peft import LoraConfig, get_peft_model
from pool import run_ranks
from ringtile.errors import PeerLostError, RefusedError, RingMismatchError
from ringtile.hf import images, towers
from ringtile.hf.patches import Patches
from ringtile.transport.loopback import LoopbackWorld
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import AutoModel
from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig

from tools.models import tiny_images

GRID = torch.tensor([[1, 4, 4], [1, 2, 6], [1, 8, 4], [1, 2, 2], [1, 6, 6]])  # patches: 16, 12, 32, 4, 36
PATCH = 2 * 3 * 8 * 8


def _pixels(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _packed(grid: Tensor = GRID) -> dict[str, Any]:
    return {"pixel_values": _pixels(int(grid.prod(1).sum()), PATCH), "image_grid_thw": grid}


def _tiles(num_images: int = 5) -> dict[str, Any]:
    return {"pixel_values": _pixels(num_images, 3, 32, 32)}


def _masked_tiles() -> dict[str, Any]:
    mask = torch.ones(1, 5, 32, 32, dtype=torch.bool)
    mask[0, 1, :, 16:] = mask[0, 3, 8:] = False
    return {"pixel_values": _pixels(1, 5, 3, 32, 32), "pixel_attention_mask": mask}


def _sized() -> dict[str, Any]:
    sizes = torch.tensor([[32, 32], [16, 32], [32, 16], [16, 16], [32, 32]])
    return {"pixel_values": _pixels(5, 3, 32, 32), "image_sizes": sizes}


# By model type: the attribute that holds the tower, the call, and whether all of it computes in its own dtype.
TOWERS: dict[str, tuple[str, Callable[[], dict[str, Any]], bool]] = {
    "qwen2_5_vl": ("visual", _packed, False),
    "qwen3_vl": ("visual", _packed, True),
    "qwen3_5": ("visual", _packed, True),
    "glm4v": ("visual", _packed, False),
    "gemma3": ("vision_tower", _tiles, False),
    "llava": ("vision_tower", _tiles, False),
    "internvl": ("vision_tower", _tiles, True),
    "idefics3": ("vision_model", _masked_tiles, True),
    "smolvlm": ("vision_model", _masked_tiles, True),
    "mistral3": ("vision_tower", _sized, False),
}


def _model(model_type: str, dtype: torch.dtype = torch.float64) -> Any:
    """A tiny model in training, whose parameters are all other than 0 and 1."""
    model = tiny_images.image_model(model_type).to(dtype)
    model.set_attn_implementation("eager")
    return model


def _features(output: Any) -> Tensor:
    """All that the language model is given, in one vector."""

    def tensors(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value.flatten()
        else:  # a tuple by image, in later releases inside a list by layer; None
            for part in value or ():
                yield from tensors(part)

    return torch.cat([*tensors(output.pooler_output), *tensors(getattr(output, "deepstack_features", None))])


class _Flops(TorchDispatchMode):
    """Counts as torch's FlopCounterMode, but in the threads of several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out


class _Case:
    """A model, a call of what holds its tower, and a loss of which each rank has a part."""

    def __init__(
        self,
        model: nn.Module,
        tower: Callable[[nn.Module], nn.Module],
        call: Callable[[nn.Module], Tensor],
        context: Callable[[], Any] = torch.enable_grad,
    ) -> None:
        self.model, self.tower, self.call, self.context = model, tower, call, context
        with context(), _Flops() as counting:
            self.features = call(model)
        generator = torch.Generator().manual_seed(3)
        self.weights = torch.randn(self.features.shape, dtype=self.features.dtype, generator=generator)
        self.readers = torch.randint(0, 12, self.features.shape, generator=generator)  # whose tokens read a feature
        with counting:
            self.gradients = self.of(model, self.features, [*range(12)])
        self.flops = counting.flops
        self.features = self.features.detach()

    def of(self, model: nn.Module, features: Tensor, readers: list[int]) -> dict[str, Tensor]:
        """The gradients of the loss of some readers."""
        model.zero_grad()
        if features.requires_grad:
            weights = torch.where(torch.isin(self.readers, torch.tensor(readers)), self.weights, 0.0)
            (features * weights).sum().backward()
        return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}

    def on_ranks(self, world_size: int) -> list[SimpleNamespace]:
        """By rank: features, gradients, bytes and flops of the second call."""
        models = [copy.deepcopy(self.model) for _ in range(world_size)]

        def run(group):
            rank, patches = group.transport.rank, Patches()
            model = models[rank]
            original = self.tower(model).forward
            towers.split(self.tower(model), "tower", group, patches)
            with self.context():
                self.call(model)
            sent = group.transport.bytes_sent
            with self.context(), _Flops() as counting:
                features = self.call(model)
            forward_bytes = group.transport.bytes_sent - sent
            with counting:
                gradients = self.of(model, features, [*range(rank, 12, world_size)])
            patches.restore()
            assert self.tower(model).forward == original
            return SimpleNamespace(
                features=features.detach(),
                gradients=gradients,
                forward_bytes=forward_bytes,
                bytes=group.transport.bytes_sent - sent,
                flops=counting.flops,
            )

        return LoopbackWorld(world_size).run(run)

    def check(self, world_size: int, tolerance: float) -> list[SimpleNamespace]:
        ranks = self.on_ranks(world_size)
        for rank in ranks:
            assert (rank.features - self.features).abs().max() <= tolerance * self.features.abs().max()
            assert rank.gradients.keys() == self.gradients.keys()
        largest = max((x.abs().max() for x in self.gradients.values()), default=0.0)
        for name, expected in self.gradients.items():
            error = (sum(rank.gradients[name] for rank in ranks) - expected).abs().max()
            assert error <= tolerance * largest, name
        return ranks


def _case(model_type: str, dtype: torch.dtype = torch.float64, change: Any = None, **options: Any) -> _Case:
    attribute, make, _ = TOWERS[model_type]
    arguments = make() | options.pop("arguments", {})
    arguments["pixel_values"] = arguments["pixel_values"].to(dtype)
    model = _model(model_type, dtype)
    model = model if change is None else change(model)
    base = lambda model: model.get_base_model() if hasattr(model, "get_base_model") else model  # noqa: E731
    return _Case(
        model,
        lambda model: getattr(base(model).model, attribute),
        lambda model: _features(base(model).model.get_image_features(**arguments)),
        **options,
    )


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
    ranks = _case(model_type).check(world_size, 1e-12 if in_its_dtype else 1e-6)
    if world_size == 6:
        assert ranks[-1].forward_bytes == 0


@pytest.mark.long
@pytest.mark.parametrize("model_type", TOWERS)
def test_split_tower_equals_one_process_in_float32(model_type):
    _case(model_type, torch.float32).check(3, 1e-6)


def test_rank_without_image_has_gradients_of_zero():
    ranks = _case("qwen3_vl").check(6, 1e-12)
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
    return {"pixel_values": _pixels(len(sizes), 81, 192), "pixel_position_ids": places}


def test_gemma4_strips_padding_and_pools_patches():
    """Its outputs are packed, of images with an entry each."""
    arguments = _gemma4_images((9, 9), (3, 6), (6, 9))
    _Case(_gemma4_tower(), lambda tower: tower, lambda tower: tower(**arguments).last_hidden_state.flatten()).check(
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
    video = {"pixel_values_videos": _pixels(64, PATCH), "video_grid_thw": grid}
    call = lambda model: _features(model.model.get_video_features(**video))  # noqa: E731
    ranks = _Case(_model("qwen3_vl"), lambda model: model.model.visual, call).check(2, 1e-12)
    assert ranks[0].flops == ranks[1].flops
    assert all(rank.forward_bytes > 0 for rank in ranks)


def test_frames_that_mix_are_computed_whole(caplog):
    """Images still are split."""
    model = _model("qwen3_vl")
    tower = model.model.visual

    @functools.wraps(type(tower).forward)
    def mixing(self, hidden_states, grid_thw, **kwargs):
        output = type(self).forward(self, hidden_states, grid_thw, **kwargs)
        frames = grid_thw[:, 0].repeat_interleave(grid_thw.prod(1) // 4).sqrt()[:, None]
        return type(output)(**{**output, "pooler_output": output.pooler_output * frames})

    tower.forward = MethodType(mixing, tower)
    for arguments, is_split in ((_packed(), True), (_packed(torch.tensor([[2, 4, 4], [1, 4, 4]])), False)):
        call = lambda model, given=arguments: _features(model.model.get_image_features(**given))  # noqa: E731
        with caplog.at_level(logging.WARNING, logger="ringtile"):
            ranks = _Case(model, lambda model: model.model.visual, call).check(2, 1e-6)
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
    case = _case("qwen3_vl", change=change)
    names = [name for name in case.gradients if "visual" in name]
    assert bool(names) == (change is not _frozen)
    ranks = case.check(2, 1e-12)
    if change is _checkpointed:
        whole = _case("qwen3_vl").check(2, 1e-12)
        assert [rank.bytes for rank in ranks] == [rank.bytes for rank in whole]


def test_autocast_equals_one_process():
    """Features are rounded to bfloat16, as in one process; their gradients are summed over ranks in float32."""
    context = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    _case("llava", torch.float32, context=context).check(2, 2.0**-7)


def test_what_models_hand_on_to_all_is_no_argument_of_images():
    arguments = {"shift_labels": torch.zeros(2, 7, dtype=torch.int64), "num_items_in_batch": torch.tensor(3)}
    ranks = _case("qwen3_vl", arguments=arguments).check(2, 1e-12)
    assert all(rank.forward_bytes > 0 for rank in ranks)


# ---- flops and bytes ----------------------------------------------------------------------------


def _flops_of(*grid: int) -> int:
    """Of one image, in one process."""
    return _case("qwen3_5", arguments=_packed(torch.tensor([grid]))).flops


def test_equal_images_cost_each_rank_its_share():
    case = _case("qwen3_5", arguments=_packed(torch.tensor([[1, 4, 4]] * 4)))
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
    case = _case("qwen3_5")
    ranks = case.check(world_size, 1e-12)
    assert sum(rank.flops for rank in ranks) == sum(of_images)
    assert 3 * world_size * max(rank.flops for rank in ranks) <= best * (4 * world_size - 1)
    # Each rank sends its own features to all others, and to each other the gradients of the other's features.
    assert sum(rank.bytes for rank in ranks) == 2 * (world_size - 1) * case.features.nbytes


# ---- computed whole -----------------------------------------------------------------------------


def _replaced(forward):
    def change(model):
        tower = model.model.vision_tower

        @functools.wraps(type(tower).forward)
        def replaced(self, *args, **kwargs):
            return forward(type(self).forward(self, *args, **kwargs))

        tower.forward = MethodType(replaced, tower)
        return model

    return change


def _mixing(output):
    """A part of each feature, too small to tell from rounding, is of the images before."""
    mixed = output.last_hidden_state + 1e-9 * output.last_hidden_state.cumsum(0)
    return type(output)(last_hidden_state=mixed, hidden_states=tuple(mixed for _ in output.hidden_states))


def _counting(output):
    """An image's features depend on its place in the call."""
    place = torch.arange(output.last_hidden_state.size(0)).view(-1, 1, 1)
    moved = output.last_hidden_state + place
    return type(output)(last_hidden_state=moved, hidden_states=tuple(moved for _ in output.hidden_states))


def _strange(output):
    hidden_states = tuple(x.transpose(0, 1) for x in output.hidden_states)
    return type(output)(last_hidden_state=output.last_hidden_state, hidden_states=hidden_states)


def _normed(model):
    model.model.vision_tower.norm = nn.BatchNorm1d(2).double()
    return model


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_replaced(_mixing), "the features of an image change with the other images of the call"),
        (_replaced(_counting), "the features of an image are others when it is alone"),
        (_normed, "it has a batch norm, which mixes them"),
    ],
)
def test_tower_that_mixes_images_is_computed_whole_and_says_so_once(change, reason, caplog):
    model = change(_model("llava"))
    arguments = _tiles()
    with torch.no_grad():
        whole = _features(model.model.get_image_features(**arguments))

    def run(group):
        patches = Patches()
        mine = model if group.transport.rank == 0 else copied
        towers.split(mine.model.vision_tower, "the tower", group, patches)
        with torch.no_grad():
            twice = [_features(mine.model.get_image_features(**arguments)) for _ in range(2)]
        patches.restore()
        return twice

    copied = change(_model("llava"))
    with caplog.at_level(logging.WARNING, logger="ringtile"):
        ranks = LoopbackWorld(2).run(run)
    assert all(torch.equal(features, whole) for features in itertools.chain(*ranks))
    assert [record.getMessage() for record in caplog.records] == [
        f"ringtile: every rank computes all images of the tower: {reason}"
    ]


def test_output_that_is_not_understood_makes_every_rank_compute_all(caplog):
    case = _Case(
        _replaced(_strange)(_model("llava")),
        lambda model: model.model.vision_tower,
        lambda model: model.model.vision_tower(**_tiles(), output_hidden_states=True).hidden_states[0].flatten(),
    )
    with caplog.at_level(logging.WARNING, logger="ringtile"):
        assert all(rank.bytes == 0 for rank in case.check(2, 1e-6))
    assert "it is not known which rows of its output.hidden_states.0 (17, 2, 32) are of which of two" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"cu_seqlens": torch.zeros(9, dtype=torch.int32)}, r"its argument cu_seqlens (9,) has no entry for each of 5"),
        ({"settings": {"a": torch.zeros(5)}}, "its argument settings dict has no entry for each of 5 images"),
    ],
)
def test_argument_that_is_not_understood_makes_every_rank_compute_all(arguments, reason, caplog):
    def call(model):
        inner = lambda **kwargs: SimpleNamespace(pooler_output=model.model.vision_tower(**kwargs)[0])  # noqa: E731
        return _features(inner(**_tiles(), **arguments))

    case = _Case(_model("llava"), lambda model: model.model.vision_tower, call)
    with caplog.at_level(logging.WARNING, logger="ringtile"):
        assert all(rank.bytes == 0 for rank in case.check(2, 1e-6))
    assert caplog.text.count(reason) == 1


def test_one_image_is_computed_by_every_rank():
    """Nobody would wait less if one rank computed it."""
    ranks = _case("llava", arguments=_tiles(1)).check(2, 1e-6)
    assert all(rank.bytes == 0 for rank in ranks)


def test_call_with_other_arguments_than_the_first_is_computed_by_every_rank(caplog):
    """It cannot be proved any more: another group of the world may not make that call now."""
    models = [_model("idefics3") for _ in range(2)]
    masked = _masked_tiles()

    def run(group):
        model, patches = models[group.transport.rank], Patches()
        tower = model.model.vision_model
        towers.split(tower, "tower", group, patches)
        tower(masked["pixel_values"][0])
        sent = group.transport.bytes_sent
        model.model.get_image_features(**masked)  # with patch_attention_mask
        patches.restore()
        return group.transport.bytes_sent - sent

    with caplog.at_level(logging.WARNING, logger="ringtile"):
        assert LoopbackWorld(2).run(run) == [0, 0]
    assert caplog.text.count("its first call had other arguments") == 1


def test_first_call_that_is_not_understood_leaves_later_ones_whole():
    """As many numbers as images are by chance no entries of them, and another group of the world has no such chance."""
    models = [_model("llava") for _ in range(2)]

    def run(group):
        tower = models[group.transport.rank].model.vision_tower
        towers.split(tower, "tower", group, Patches())
        for count in (9, 5):
            tower(**_tiles(), cu_seqlens=torch.zeros(count, dtype=torch.int32))
        return group.transport.bytes_sent

    assert LoopbackWorld(2).run(run) == [0, 0]


def test_calls_of_one_rank_alone_are_left_alone():
    """Such as those of generation, in which ranks have different images."""
    model = _model("llava")

    def run(group):
        if group.transport.rank == 1:
            return None
        towers.split(model.model.vision_tower, "tower", group, Patches(), when=lambda: False)
        return _features(model.model.get_image_features(**_tiles()))

    assert LoopbackWorld(2).run(run)[0] is not None


# ---- refused ------------------------------------------------------------------------------------


def _drops_in_attention(model):
    model.model.vision_tower.config.attention_dropout = 0.1
    return model


def _drops_in_adapter(model):
    targets = r".*vision_tower.*q_proj"
    return get_peft_model(model, LoraConfig(r=2, target_modules=targets, lora_dropout=0.25)).double().train()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drops_in_attention, "the attention of tower drops weights"),
        (_drops_in_adapter, r"tower\..*q_proj.lora_dropout.default drops with p = 0.25"),
    ],
)
def test_dropout_in_training_is_refused(change, message):
    with pytest.raises(RefusedError, match=message):
        _case("llava", change=change).on_ranks(2)


def test_ranks_that_disagree_are_named():
    models = [_model("qwen3_vl") for _ in range(2)]

    def run(group):
        rank = group.transport.rank
        towers.split(models[rank].model.visual, "tower", group, Patches())
        models[rank].model.get_image_features(**_packed())
        with pytest.raises(RingMismatchError, match=r"rank 0 .*rank 1|rank 1 .*rank 0"):
            models[rank].model.get_image_features(**_packed(GRID[rank:]))

    LoopbackWorld(2).run(run)


def test_rank_whose_tower_fails_is_named():
    models = [_model("qwen3_vl") for _ in range(2)]

    def run(group):
        rank = group.transport.rank
        towers.split(models[rank].model.visual, "tower", group, Patches())
        models[rank].model.get_image_features(**_packed())
        if rank == 1:
            models[1].model.visual.blocks[0].register_forward_pre_hook(lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                models[1].model.get_image_features(**_packed())
        else:
            with pytest.raises((RingMismatchError, PeerLostError), match="rank 1"):
                models[0].model.get_image_features(**_packed())

    LoopbackWorld(2).run(run)


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
    tower = _model("qwen3_vl").model.visual
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
            output = wrapped(_packed(grid)["pixel_values"], grid)
            features = output if engine == "DDP" else _features(output)
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
        return _features(self.tower(pixel_values, grid_thw=grid))


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
    model, flops = tiny_images.image_model("qwen3_vl"), _Flops()

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
                patch.setattr(towers, "install", lambda *args: None)
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
