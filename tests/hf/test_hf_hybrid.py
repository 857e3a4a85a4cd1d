"""Hybrid models: attention and recurrent layers, on ranks and on packed rows, train as each document does alone.

One process, without ringtile, trains on the documents as rows of their own, padded on the right, where nothing reaches
a document from before; transformers' own packed rows leak through convolutions and states.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import ringtile
import torch
from hf_training import TOLERANCE, Padded, Run, assert_equal_training, make_trainer, packed, train
from pool import run_ranks
from ringtile.cli.tiny_models import tiny_config
from ringtile.errors import Refused
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

FAMILIES = {  # by mechanism
    "convolution": ("lfm2", "lfm2_moe"),
    "gated delta rule": ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"),
    "Mamba-2": ("bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2", "mamba2"),
    "Kimi delta attention": ("kimi_linear",),
    "Mamba": ("jamba", "mamba", "falcon_mamba", "zamba"),
    "lightning attention": ("minimax",),
}
ALL = [family for families in FAMILIES.values() for family in families]
FIRST = [families[0] for families in FAMILIES.values()]
OPTIONS: dict[str, Any] = {"max_steps": 3, "evaluate": False, "learning_rate": 0.01, "num_rows": 24}


def hybrid(family: str) -> nn.Module:
    """A tiny model that forgets slowly, so that what leaks is seen."""
    config = tiny_config(family)
    config.get_text_config().output_router_logits = False  # its balance is tested apart
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)  # none stays at zero or one, where errors hide
            if name.endswith("A_log"):
                parameter.fill_(-3.0)  # a decay of about exp(-0.07) a token
    return model.train()


def run(family: str, config: dict[str, Any] | None, **options: Any) -> Run:
    return train(config, model=hybrid(family), **{**OPTIONS, **options})


def with_cu_seq_lens(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows)


@functools.cache
def alone(family: str, rows_of_a_batch: int = 2) -> Run:
    return run(family, None, collator=Padded(), per_device_train_batch_size=rows_of_a_batch)


def cells(quick: list[tuple[str, int, str]]) -> list[Any]:
    every = [(f, w, layout) for f in ALL for w in (2, 3, 4) for layout in ("contiguous", "zigzag")]
    return [pytest.param(*cell, marks=() if cell in quick else pytest.mark.long) for cell in every]


QUICK = [
    ("lfm2", 3, "zigzag"),
    ("qwen3_next", 2, "zigzag"),
    ("granitemoehybrid", 2, "contiguous"),
    ("kimi_linear", 2, "zigzag"),
]
QUICK += [("jamba", 2, "zigzag")]
QUICK_ALONE = ["minimax", "granitemoehybrid"]  # the other mechanisms run on ranks


@pytest.mark.parametrize(("family", "world_size", "layout"), cells(QUICK))
def test_packed_documents_on_ranks_train_as_each_alone(family: str, world_size: int, layout: str) -> None:
    config = {"context_parallel_size": world_size, "layout": layout}
    for of_rank in run_ranks(world_size, run, family, config, collator=packed, timeout=200.0):
        assert_equal_training(of_rank, alone(family))


@pytest.mark.long
@pytest.mark.parametrize("family", ALL)
def test_in_the_heads_scheme_packed_documents_train_as_each_alone(family: str) -> None:
    config = {"context_parallel_size": 2, "layout": "zigzag", "context_parallel_scheme": "ulysses"}
    for of_rank in run_ranks(2, run, family, config, collator=packed, timeout=200.0):
        assert_equal_training(of_rank, alone(family))


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.long) for f in ALL])
def test_two_groups_of_two_train_as_one_process(family: str) -> None:
    """On padded rows, with activation checkpointing."""
    config = {"context_parallel_size": 2, "layout": "zigzag"}
    options = {"collator": Padded("left" if family == "qwen3_next" else "right"), "gradient_checkpointing": True}
    for of_rank in run_ranks(4, run, family, config, per_device_train_batch_size=1, timeout=200.0, **options):
        assert_equal_training(of_rank, alone(family))


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in QUICK_ALONE else pytest.mark.long) for f in ALL])
def test_packing_in_one_process_trains_as_each_document_alone(family: str) -> None:
    expected = alone(family)
    assert_equal_training(run(family, {"context_parallel_size": 1}, collator=packed), expected)
    leaking = run(family, None, collator=packed)
    leak = max(abs(a / b - 1) for a, b in zip(leaking.grad_norms, expected.grad_norms, strict=True))
    assert leak > 10 * TOLERANCE  # what is above would see it


def test_a_model_whose_masks_know_no_positions_attends_through_ringtile_in_one_process() -> None:
    """Granite hands no position ids to its masks; ringtile's attention knows documents and padding of all kinds."""
    family, config = "granitemoehybrid", {"context_parallel_size": 1}
    assert_equal_training(run(family, config, collator=with_cu_seq_lens), alone(family))
    padded = {"collator": Padded("left")}
    assert_equal_training(run(family, config, **padded), run(family, None, **padded))


@pytest.mark.long
@pytest.mark.parametrize("family", FIRST)
def test_autocast_to_bfloat16_does_not_depend_on_the_ranks(family: str) -> None:
    """Losses of one forward, to a unit of bfloat16: products are rounded alike, and states are in float32."""
    options = {"collator": packed, "bf16": True, "max_steps": 1}
    expected = run(family, {"context_parallel_size": 1}, **options)
    for of_rank in run_ranks(2, run, family, {"context_parallel_size": 2}, timeout=200.0, **options):
        assert of_rank.losses == pytest.approx(expected.losses, rel=2.0**-8)


# ---- what is left alone, and what is refused ----------------------------------------------------


def loss_of(model: nn.Module, **inputs: Any) -> float:
    ids = torch.arange(3, 19)[None]
    return float(model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss)


RESTARTING = torch.cat([torch.arange(6), torch.arange(10)])[None]


def test_other_models_and_restored_ones_are_as_they_were() -> None:
    model, other = hybrid("qwen3_next"), hybrid("qwen3_next")
    leaking = loss_of(model, position_ids=RESTARTING)
    trainer = make_trainer(model=model)
    ringtile.enable(trainer, {"context_parallel_size": 1})
    assert loss_of(model, position_ids=RESTARTING) != leaking
    assert loss_of(other, position_ids=RESTARTING) == leaking
    ringtile.restore(trainer)
    assert loss_of(model, position_ids=RESTARTING) == leaking
    assert not any("forward" in vars(module) for module in model.modules())


def test_generation_with_a_cache_is_left_to_transformers() -> None:
    model = hybrid("lfm2").eval()
    ids, options = torch.arange(3, 9)[None], {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **options)
    trainer = make_trainer(model=model)
    ringtile.enable(trainer, {"context_parallel_size": 1})
    assert torch.equal(model.generate(ids, **options), expected)
    ringtile.restore(trainer)


def test_models_that_take_a_short_cut_in_training_evaluate_too() -> None:
    trainer = make_trainer(model=hybrid("bamba"))
    ringtile.enable(trainer, {"context_parallel_size": 1})
    training = loss_of(trainer.model)
    assert loss_of(trainer.model.eval()) == training
    ringtile.restore(trainer)


REFUSED_BATCHES = {
    "seq_idx": {"seq_idx": torch.tensor([[0] * 6 + [1] * 10])},
    "numbers in attention_mask": {"attention_mask": torch.tensor([[1] * 6 + [2] * 10])},
}


@pytest.mark.parametrize("name", REFUSED_BATCHES)
def test_documents_that_attention_would_not_tell_apart_are_refused(name: str) -> None:
    trainer = make_trainer(model=hybrid("lfm2"))
    ringtile.enable(trainer, {"context_parallel_size": 1})
    with pytest.raises(Refused, match="documents are told apart by seq_idx, cu_seq_lens or numbers in attention_mask"):
        loss_of(trainer.model, **REFUSED_BATCHES[name])
    ringtile.restore(trainer)


def test_a_mixer_that_would_miss_the_batch_is_refused() -> None:
    """A checkpoint that ringtile has not seen, a cache, a mixer that goes another way."""
    trainer = make_trainer(model=hybrid("lfm2"))
    layer, ids = trainer.model.model.layers[0], torch.arange(3, 19)[None]
    ringtile.enable(trainer, {"context_parallel_size": 1})
    again = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    with mock.patch.object(layer, "forward", again):
        loss = trainer.model(input_ids=ids, labels=ids).loss
    with pytest.raises(Refused, match=r"model.layers.0.conv \(Lfm2ShortConv\) is computed again in the backward"):
        loss.backward()
    with pytest.raises(Refused, match=r"model.layers.0.conv \(Lfm2ShortConv\) got a cache; expected none"):
        trainer.model.train(False)(torch.ones(1, 4).long(), use_cache=False, past_key_values=_filled(trainer.model))
    ringtile.restore(trainer)
    ringtile.enable(trainer, {"context_parallel_size": 1})
    with (
        mock.patch.object(layer.conv, "forward", lambda hidden_states, **kwargs: hidden_states),
        pytest.raises(Refused, match=r"\(Lfm2ShortConv\) called none of the functions that mix its tokens"),
    ):
        loss_of(trainer.model)
    ringtile.restore(trainer)


def _filled(model: nn.Module) -> Any:
    """A cache that holds three tokens."""
    return model.train(False)(torch.ones(1, 3).long(), use_cache=True).past_key_values


def test_compilation_and_unknown_mixers_are_refused() -> None:
    trainer = make_trainer(model=hybrid("lfm2"))
    trainer.args.torch_compile = True
    with pytest.raises(Refused, match="has recurrent layers and Trainer uses torch_compile"):
        ringtile.enable(trainer, {"context_parallel_size": 1})
    assert "model.layers.0.temporal_block.rg_lru (RecurrentGemmaRglru) is the RG-LRU" in failure_of_enable(
        hybrid("recurrent_gemma")
    )
    mixed = hybrid("bamba")
    mixed.model.layers[0].extra = nn.Conv1d(4, 4, 3)
    message = failure_of_enable(mixed, first_batch_check=False)
    assert "mixes neighbouring tokens in model.layers.0.extra (Conv1d)" in message


@pytest.mark.parametrize(
    "family", ["recurrent_gemma", *(pytest.param(f, marks=pytest.mark.long) for f in ("rwkv", "xlstm"))]
)
def test_an_unknown_recurrence_trains_on_rows_of_one_document_alone(family: str) -> None:
    options = {"max_steps": 2, "collator": Padded()}
    config = {"context_parallel_size": 1}
    assert_equal_training(run(family, config, **options), run(family, None, **options))
    with pytest.raises(Refused, match="carry its state from each document of a packed row into the next"):
        run(family, config, collator=packed)


def failure_of_enable(model: nn.Module, **config: bool) -> str:
    with pytest.raises(Refused) as raised:
        ringtile.enable(make_trainer(model=model), {"context_parallel_size": 2, **config})
    return str(raised.value)


WRAPPED = {  # the layers that FSDP2 must be told of: a text model has no vision blocks, and a shared layer no group
    "qwen3_5_text": "Qwen3_5DecoderLayer",
    "qwen3_5_moe_text": "Qwen3_5MoeDecoderLayer",
    "zamba": "ZambaMambaDecoderLayer",
    "zamba2": "Zamba2MambaDecoderLayer",
}


@pytest.mark.parametrize(
    ("family", "engine", "collator"),
    [
        pytest.param(
            *(family, engine, collator),
            marks=() if (family, engine, collator) == ("qwen3_next", "FSDP2", packed) else pytest.mark.long,
        )
        for family in ALL
        for engine in ("FSDP2", "ZeRO-3")
        for collator in (packed, Padded())
    ],
)
def test_engines_that_shard_parameters_train_as_one_process(family: str, engine: str, collator: Any) -> None:
    """A convolution's weight is read without calling its module, whose hooks would gather it."""
    config, options = {"context_parallel_size": 2}, {"collator": collator, "engine": engine, "timeout": 200.0}
    if engine == "FSDP2" and family in WRAPPED:
        options["fsdp_config"] = {"version": 2, "transformer_layer_cls_to_wrap": [WRAPPED[family]]}
    for of_rank in run_ranks(2, run, family, config, **options):
        assert_equal_training(of_rank, alone(family))
