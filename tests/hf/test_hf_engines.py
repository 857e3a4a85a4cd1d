"""Engines, meshes and groups that are set up in another way than by the options of a row of test_hf_exact.py."""

import dataclasses
import datetime
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import ringtile
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from hf_engines import engine as engine_arguments
from hf_engines import needs_deepspeed
from hf_models import tiny_model
from hf_training import assert_equal_training, make_trainer, run_new_ranks, train
from pool import run_ranks
from ringtile.hf import group
from ringtile.hf.group import ContextParallelGroup

SIZE_TWO = {"context_parallel_size": 2}
SHORT = {"max_steps": 2, "evaluate": False}


def test_mesh_of_accelerate_launch_equals_one_process():
    """What `accelerate launch --use_parallelism_config --parallelism_config_cp_size 2` puts into the environment; by a
    scheme that one rank cannot have."""
    expected = train(None, **SHORT)
    for run in run_ranks(2, _train_launched):
        assert_equal_training(run, expected)


def _train_launched():
    variables = {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_CP_SIZE": "2",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
    }
    with mock.patch.dict(os.environ, variables):
        return train({"context_parallel_scheme": "usp:2"}, engine="FSDP2", **SHORT)


def _enable_on_mesh(config, mesh):
    with engine_arguments("FSDP2") as arguments:
        trainer = make_trainer(parallelism_config=ParallelismConfig(**mesh), **arguments)
        try:
            ringtile.enable(trainer, config)
        except ringtile.ConfigError as error:
            return str(error)


def test_other_size_than_in_parallelism_config_is_named():
    for message in run_ranks(2, _enable_on_mesh, {"context_parallel_size": 1}, {"cp_size": 2}):
        assert "context_parallel_size is 1 but ParallelismConfig.cp_size is 2" in message


def _context_of_accelerate():
    with engine_arguments("FSDP2") as arguments:
        trainer = make_trainer(parallelism_config=ParallelismConfig(cp_size=2), **arguments)
        ringtile.enable(trainer, {})
        prepared, context = trainer.accelerator._prepare_cp(trainer.model), trainer.accelerator._cp_context(buffers=[])
        ringtile.restore(trainer)
        return prepared == (trainer.model,), type(context).__name__, "_cp_context" in vars(trainer.accelerator)


def test_accelerate_puts_no_hooks_on_attention():
    assert run_ranks(2, _context_of_accelerate) == [(True, "nullcontext", False)] * 2


def test_scheme_that_one_rank_cannot_have_is_named_where_accelerate_gives_no_size():
    with pytest.raises(ringtile.ConfigError, match="context_parallel_scheme: the scheme is usp:2, but the group has 1"):
        ringtile.enable(make_trainer(), {"context_parallel_scheme": "usp:2"})


# ---- DeepSpeed ----------------------------------------------------------------------------------


def _train_loaded(folder):
    """ZeRO-3 shards a model while it is loaded, when the TrainingArguments exist already."""
    from transformers import AutoModelForCausalLM

    with engine_arguments("ZeRO-3") as arguments:
        trainer = make_trainer(**arguments)
        assert trainer.is_deepspeed_enabled
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert all(hasattr(parameter, "ds_id") for parameter in model.parameters())
    return train(SIZE_TWO, engine="ZeRO-3", model=model, **SHORT)


def test_model_loaded_in_shards_equals_one_process(tmp_path):
    needs_deepspeed()
    tiny_model().save_pretrained(tmp_path)
    expected = train(None, **SHORT)
    for run in run_ranks(2, _train_loaded, str(tmp_path)):
        assert_equal_training(run, expected)


@dataclasses.dataclass(frozen=True)
class AllOfOneLength:
    """Pads to 24 tokens with position ids and without a mask: DeepSpeed gathers what its ranks read."""

    def __call__(self, rows):
        fill = {"input_ids": 0, "labels": -100}
        batch = {name: torch.tensor([(row[name] + [fill[name]] * 24)[:24] for row in rows]) for name in fill}
        return {**batch, "position_ids": torch.arange(24).expand(len(rows), -1).contiguous()}


def _train_ulysses(config):
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    parallelism = ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=handler)
    options = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "include_num_input_tokens_seen": False,
    }
    return train(
        config, engine="ZeRO-2", parallelism_config=parallelism, collator=AllOfOneLength(), evaluate=False, **options
    )


@pytest.mark.long
def test_deepspeeds_own_sequence_parallelism_keeps_its_numbers():
    """Bit for bit with context parallelism enabled beside it; tiles work under it. Its group is made once a process."""
    needs_deepspeed()
    configs = (None, SIZE_TWO, {"tiled_mlp": True, "tiled_loss": True, "tile_tokens": 5})
    alone, beside, tiled = (run_new_ranks(2, _train_ulysses, config)[0] for config in configs)
    assert beside.losses == alone.losses
    assert all(torch.equal(beside.weights[name], weight) for name, weight in alone.weights.items())
    assert_equal_training(tiled, alone)


# ---- groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cuda:0"), ("gloo", "cuda:0"), ("gloo", "cpu")])
def test_messages_over_nccl_are_on_streams_of_high_priority(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: str
) -> None:
    """Rank 3 of 4 makes both groups of two, each with options of its own, since new_group writes to them."""
    made = []

    def new_group(ranks: list[int], *, timeout: datetime.timedelta, pg_options: SimpleNamespace | None) -> set[int]:
        made.append((ranks, timeout, pg_options, set(ranks)))
        return made[-1][3]

    monkeypatch.setattr(group, "backend_name", lambda found, device_type: backend if device_type == "cuda" else "gloo")
    nccl = SimpleNamespace(Options=lambda **given: SimpleNamespace(config=SimpleNamespace(), **given))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: "the world")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(group, "memory_bytes", lambda of: 2**30)
    monkeypatch.setattr(group, "meet_world", lambda seconds: None)
    monkeypatch.setattr(torch, "tensor", lambda value, device: value)
    monkeypatch.setattr(dist, "all_reduce", lambda *tensors, **options: None)
    assert ContextParallelGroup(2, 20.0, torch.device(device)).process_group is made[1][3]
    timeout = datetime.timedelta(seconds=20)
    assert [call[:2] for call in made] == [([0, 1], timeout), ([2, 3], timeout)]
    options = [call[2] for call in made]
    if backend == "nccl":
        for each in options:
            assert (each.is_high_priority_stream, each.config.max_ctas, each._timeout) == (True, 8, timeout)
        assert options[0] is not options[1]
    else:
        assert options == [None, None]


IDS = torch.tensor([[5, 17, 3, 99, 4, 61, 8, 2]])
OTHER_BATCHES = {
    "neighbors by +1, -2, +1": {"input_ids": IDS + torch.tensor([0, 0, 1, -2, 1, 0, 0, 0])},
    "labels likewise": {"labels": IDS + torch.tensor([0, 0, 1, -2, 1, 0, 0, 0])},
    "other tensors exchanged": {"attention_mask": torch.zeros_like(IDS), "token_type_ids": torch.ones_like(IDS)},
    "imaginary parts": {"features": torch.full((4,), 1 - 2j)},
}


@pytest.mark.parametrize("change", OTHER_BATCHES)
def test_batches_of_equal_shape_are_told_apart(change: str) -> None:
    batch = {"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)}
    batch |= {"token_type_ids": torch.zeros_like(IDS), "features": torch.full((4,), 1 + 2j)}
    one, other = (group._fingerprint(each) for each in (batch, batch | OTHER_BATCHES[change]))
    assert {name: int(x) for name, x in one.items()} != {name: int(x) for name, x in other.items()}
