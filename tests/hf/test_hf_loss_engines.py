"""The tiled loss where the output projection's weight is cut over the ranks by FSDP2 or ZeRO-3, and under TRL."""

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hf_training import enter_world, train
from pool import run_ranks
from ringtile import RefusedError
from ringtile.hf.features.loss import TiledLogits
from test_hf_tiled import TILED, assert_same, batch, double_model, loss_and_gradients, oracle_loss, tile_loss
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

__all__ = ["oracle_loss"]  # a fixture
foreach_all_gather = _fsdp_param_group.foreach_all_gather
WHERE = ["root", "own", "own, kept", "with the norm", "tied"]


def wrap(model: nn.Module, where: str, **settings: object) -> None:
    """Shards the model over all ranks; the output projection in a group that `where` names."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    settings["mesh"] = mesh
    for layer in model.model.layers:
        fully_shard(layer, **settings)
    if where == "with the norm":
        fully_shard([model.model.norm, model.lm_head], **settings)
    elif where == "tied":  # as accelerate does
        fully_shard(
            [model.model.norm, model.model.embed_tokens, model.lm_head], reshard_after_forward=False, **settings
        )
    elif where != "root":
        fully_shard(model.lm_head, reshard_after_forward=where == "own", **settings)
    fully_shard(model, **settings)


def fsdp2_gradients(
    where: str | None, tile_tokens: int, tied: bool = False
) -> tuple[float, dict[str, Tensor], list[int]]:
    """Two accumulated batches, a row per rank; where None: no engine, no tiles, gradients averaged by hand."""
    enter_world()
    model = double_model(tie_word_embeddings=tied)
    if where is not None:
        del model._loss_function  # what is tiled is transformers' own
        tile_loss(model, tile_tokens=tile_tokens)
        wrap(model, where)
    rank, losses, gathers = dist.get_rank(), [], []
    for part in range(2):
        rows = slice(rank, rank + 1)
        inputs = {name: x[rows].roll(part, 1) for name, x in batch().items()}
        with mock.patch.object(_fsdp_param_group, "foreach_all_gather", wraps=foreach_all_gather) as gather:
            loss = model(**inputs, num_items_in_batch=21).loss
            loss.backward()
        gathers.append(gather.call_count)
        losses.append(loss.item())
    gradients = {}
    for name, p in model.named_parameters():
        gradients[name] = p.grad.full_tensor() if where is not None else p.grad.clone()
        if where is None:
            dist.all_reduce(gradients[name])
            gradients[name] /= dist.get_world_size()
    return sum(losses), gradients, gathers


@functools.cache
def gradients_without_engine(tied: bool):
    return run_ranks(2, fsdp2_gradients, None, 1, tied)


@pytest.mark.parametrize("where", WHERE)
def test_fsdp2_gives_the_gradients_of_no_engine(where) -> None:
    """And gathers as often with 1 token in a tile as with all in one."""
    tied = where == "tied"
    expected = gradients_without_engine(tied)
    one, many = (run_ranks(2, fsdp2_gradients, where, tile_tokens, tied) for tile_tokens in (1, 100))
    for rank in range(2):
        for runs in (one, many):
            assert runs[rank][0] == pytest.approx(expected[rank][0], rel=1e-12)
            for name, gradient in expected[rank][1].items():
                torch.testing.assert_close(runs[rank][1][name], gradient, rtol=1e-10, atol=1e-13)
        assert one[rank][2] == many[rank][2]
        # both layers twice, the root once; the output projection: before its call, and for the loss if freed by then
        assert many[rank][2] == [{"root": 5, "own": 7, "own, kept": 6, "with the norm": 7, "tied": 5}[where]] * 2


def test_trl_keeps_its_own_tiles() -> None:
    """SFTTrainer multiplies by the output projection's weight itself, in tiles (fused_lm_head): the projection is not
    called, its loss and metrics are TRL's, and evaluation is as it was."""
    trl = pytest.importorskip("trl")
    options = {"trainer_class": trl.SFTTrainer, "num_rows": 4, "max_steps": 1, "gradient_accumulation_steps": 1}
    plain = train(None, evaluate=False, **options)
    with mock.patch.object(TiledLogits, "__init__", side_effect=AssertionError("called the output projection")):
        tiled = train({**TILED}, evaluate=False, **options)
    assert tiled.losses == pytest.approx(plain.losses, rel=1e-6)
    for name, weight in plain.weights.items():
        torch.testing.assert_close(tiled.weights[name], weight, rtol=1e-6, atol=1e-6)


def adapted(**settings: object) -> nn.Module:
    peft = pytest.importorskip("peft")
    model = double_model()
    torch.manual_seed(8)
    peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **settings))
    return model.double()


@pytest.mark.parametrize(
    "settings",
    [{"target_modules": ["q_proj", "lm_head"]}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}],
)
def test_peft_on_the_output_projection_is_refused(settings) -> None:
    """TRL's chunked loss takes the weight of what PEFT has wrapped, and loses the adapter."""
    with pytest.raises(RefusedError, match="remove it from the adapter's target_modules and modules_to_save"):
        tile_loss(undo_oracle(adapted(**settings)))


def undo_oracle(model: nn.Module) -> nn.Module:
    del model._loss_function  # what is tiled is transformers' own
    return model


@pytest.mark.usefixtures("oracle_loss")
def test_peft_elsewhere_changes_no_gradient() -> None:
    model = adapted(target_modules=["q_proj", "down_proj"])
    expected = loss_and_gradients(model)
    assert len(expected[1]) == 8
    tile_loss(model, tile_tokens=5)
    assert_same(loss_and_gradients(model), expected)
