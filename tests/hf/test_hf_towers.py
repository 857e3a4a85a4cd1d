"""Models with towers for images or sound train on text: a tower that runs on a shard is refused by name."""

import pytest
import ringtile
import torch
from ringtile.cli.tiny_models import tiny_config, tiny_model
from ringtile.hf.batch import active
from ringtile.hf.model import refuse_towers, text_modules
from ringtile.hf.patches import Patches


def test_tower_runs_outside_of_a_shard_only():
    model = tiny_model(tiny_config("gemma3"))
    (tower,) = (path for path, _ in model.named_modules() if path.endswith("vision_tower"))
    paths = [path for path, _ in text_modules(model)]
    assert not any(path.startswith(tower) for path in paths)
    assert any(path.endswith("self_attn") for path in paths)
    patches, images = Patches(), torch.zeros(1, 3, 32, 32)
    refuse_towers(model, patches)
    model.get_submodule(tower)(images)
    expected = f"the batch makes {tower} run; expected text only"
    with active(object()), pytest.raises(ringtile.Refused, match=expected):
        model.get_submodule(tower)(images)
    patches.restore()
    model.get_submodule(tower)(images)
