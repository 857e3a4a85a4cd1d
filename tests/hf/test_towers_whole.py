"""Vision towers that every rank computes whole, or that are refused, because a part would not be exact."""

import functools
import itertools
import logging
from types import MethodType, SimpleNamespace

import pytest
import torch
from hf_towers import GRID, TowerCase, features_of, masked_tiles, packed, tiles, tower_case, tower_model
from peft import LoraConfig, get_peft_model
from ringtile.errors import PeerLostError, RefusedError, RingMismatchError
from ringtile.hf.features import towers
from ringtile.hf.patches import Patches
from ringtile.transport.loopback import LoopbackWorld
from torch import nn

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
        (_replaced(_counting), "the features of an image depend on whether it is alone"),
        (_normed, "it has a batch norm, which mixes them"),
    ],
)
def test_tower_that_mixes_images_is_computed_whole_and_says_so_once(change, reason, caplog):
    model = change(tower_model("llava"))
    arguments = tiles()
    with torch.no_grad():
        whole = features_of(model.model.get_image_features(**arguments))

    def run(group):
        patches = Patches()
        mine = model if group.transport.rank == 0 else copied
        towers.split(mine.model.vision_tower, "the tower", group, patches)
        with torch.no_grad():
            twice = [features_of(mine.model.get_image_features(**arguments)) for _ in range(2)]
        patches.restore()
        return twice

    copied = change(tower_model("llava"))
    with caplog.at_level(logging.WARNING, logger="ringtile"):
        ranks = LoopbackWorld(2).run(run)
    assert all(torch.equal(features, whole) for features in itertools.chain(*ranks))
    assert [record.getMessage() for record in caplog.records] == [
        f"ringtile: every rank computes all images of the tower: {reason}"
    ]


def test_output_that_is_not_understood_makes_every_rank_compute_all(caplog):
    case = TowerCase(
        _replaced(_strange)(tower_model("llava")),
        lambda model: model.model.vision_tower,
        lambda model: model.model.vision_tower(**tiles(), output_hidden_states=True).hidden_states[0].flatten(),
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
        return features_of(inner(**tiles(), **arguments))

    case = TowerCase(tower_model("llava"), lambda model: model.model.vision_tower, call)
    with caplog.at_level(logging.WARNING, logger="ringtile"):
        assert all(rank.bytes == 0 for rank in case.check(2, 1e-6))
    assert caplog.text.count(reason) == 1


def test_one_image_is_computed_by_every_rank():
    """Nobody would wait less if one rank computed it."""
    ranks = tower_case("llava", arguments=tiles(1)).check(2, 1e-6)
    assert all(rank.bytes == 0 for rank in ranks)


def test_call_with_other_arguments_than_the_first_is_computed_by_every_rank(caplog):
    """It cannot be proved any more: another group of the world may not make that call now."""
    models = [tower_model("idefics3") for _ in range(2)]
    masked = masked_tiles()

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
    models = [tower_model("llava") for _ in range(2)]

    def run(group):
        tower = models[group.transport.rank].model.vision_tower
        towers.split(tower, "tower", group, Patches())
        for count in (9, 5):
            tower(**tiles(), cu_seqlens=torch.zeros(count, dtype=torch.int32))
        return group.transport.bytes_sent

    assert LoopbackWorld(2).run(run) == [0, 0]


def test_calls_of_one_rank_alone_are_left_alone():
    """Such as those of generation, in which ranks have different images."""
    model = tower_model("llava")

    def run(group):
        if group.transport.rank == 1:
            return None
        towers.split(model.model.vision_tower, "tower", group, Patches(), when=lambda: False)
        return features_of(model.model.get_image_features(**tiles()))

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
        tower_case("llava", change=change).on_ranks(2)


def test_ranks_that_disagree_are_named():
    models = [tower_model("qwen3_vl") for _ in range(2)]

    def run(group):
        rank = group.transport.rank
        towers.split(models[rank].model.visual, "tower", group, Patches())
        models[rank].model.get_image_features(**packed())
        with pytest.raises(RingMismatchError, match=r"rank 0 .*rank 1|rank 1 .*rank 0"):
            models[rank].model.get_image_features(**packed(GRID[rank:]))

    LoopbackWorld(2).run(run)


def test_rank_whose_tower_fails_is_named():
    models = [tower_model("qwen3_vl") for _ in range(2)]

    def run(group):
        rank = group.transport.rank
        towers.split(models[rank].model.visual, "tower", group, Patches())
        models[rank].model.get_image_features(**packed())
        if rank == 1:
            models[1].model.visual.blocks[0].register_forward_pre_hook(lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                models[1].model.get_image_features(**packed())
        else:
            with pytest.raises((RingMismatchError, PeerLostError), match="rank 1"):
                models[0].model.get_image_features(**packed())

    LoopbackWorld(2).run(run)
