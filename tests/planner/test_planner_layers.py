"""`ringtile plan --model`: layers in 4 bits, recurrent layers, and ops whose answers are remembered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ringtile.errors import RefusedError
from ringtile.hf.batch import ShardedBatch, active
from ringtile.hf.config import Config
from ringtile.hf.features import recurrent
from ringtile.hf.patches import Patches
from ringtile.planner.grpo import Grpo
from ringtile.planner.live import Live
from ringtile.planner.memo import Memo
from ringtile.planner.setup import Setup
from ringtile.planner.step import TrainingStep
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence
from ringtile.tiled.tiles import tiles
from test_planner import E, V, config_of, planned, planned_between_passes, saving
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AutoModelForCausalLM

from tools.models.tiny_models import tiny_config

# ---- remembered ops -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "engine"),
    [
        ("llama", "fsdp2"),
        pytest.param("qwen3_moe", "ddp", marks=pytest.mark.long),
        pytest.param("gemma2", "zero3", marks=pytest.mark.long),
    ],
)
def test_what_is_not_run_again_changes_nothing(model_type: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Config(context_parallel_size=2, tiled_loss=True, tiled_mlp=True, tiled_norm=True, tile_tokens=5)
    more = {"output_router_logits": True} if "moe" in model_type else {}
    config = config_of(model_type, num_hidden_layers=1, **more)
    setup = Setup(config, 2, engine, keys, gradient_checkpointing=engine != "ddp", bf16=True)
    with TrainingStep(setup) as step:
        _, remembered = step.run(38), step.run(38)  # 19 tokens of a rank: four tiles
    monkeypatch.setattr("ringtile.planner.memo.Memo.run", lambda memo, func, args, kwargs: func(*args, **kwargs))
    monkeypatch.setattr("ringtile.planner.live.Live.tiles", lambda live, *sizes: tiles(*sizes))
    with TrainingStep(setup) as step:
        asked = step.run(38)
    assert (remembered.phases, remembered.product_flops) == (asked.phases, asked.product_flops)


def test_tiles_are_left_out_where_they_leave_nothing_behind() -> None:
    live = Live(V, over_gloo=False)
    with FakeTensorMode(), live:
        weight, kept, run = torch.empty(3, 5), list[Tensor](), list[slice]()
        for tile in live.tiles(11, 2):
            run.append(tile)
            torch.empty(tile.stop - tile.start, 3) @ weight
        assert run == [slice(0, 2), slice(2, 4), slice(10, 11)]
        assert live.flops == 2 * 11 * 3 * 5
        for tile in live.tiles(11, 2):
            kept.append(torch.empty(tile.stop - tile.start))
    assert sum(x.numel() for x in kept) == 11


def test_a_remembered_op_aliases_what_it_aliased() -> None:
    """And reads no number, which other tensors of the same shape need not hold."""
    memo, aten = Memo(), torch.ops.aten
    with FakeTensorMode(allow_non_fake_inputs=True):
        for x, y in [(torch.empty(4, 6), torch.empty(4, 6)) for _ in range(2)]:
            parts = memo.run(aten.split.Tensor, (x, 3, 1), {})
            assert [part.storage_offset() for part in parts] == [0, 3]
            parts = *parts, memo.run(aten.view.default, (x, [24]), {})
            assert all(part.untyped_storage()._cdata == x.untyped_storage()._cdata for part in parts)
            assert memo.run(aten.add_.Tensor, (x, y), {}) is x
            assert memo.run(aten.add_.Tensor, (x, x), {}) is x
            made = memo.run(aten.mul.Tensor, (x, 2), {}), memo.run(aten.mul.out, (x, x), {"out": y})
            assert isinstance(made[0], FakeTensor)
            assert made[0].untyped_storage()._cdata != x.untyped_storage()._cdata
            assert made[1] is y
        whole = torch.ones(2, dtype=torch.int64)
        counts = [memo.run(aten.mul.Tensor, (whole, n), {}).dtype for n in (2, 2.0)]
        assert counts == [torch.int64, torch.float32]


def test_a_remembered_op_without_a_dtype_has_the_default_one() -> None:
    memo, made = Memo(), list[Tensor]()
    try:
        with FakeTensorMode():
            for dtype in (torch.bfloat16, torch.float32) * 2:
                torch.set_default_dtype(dtype)
                made.append(memo.run(torch.ops.aten.zeros.default, ([2],), {}))
    finally:
        torch.set_default_dtype(torch.float32)
    assert [x.dtype for x in made] == [torch.bfloat16, torch.float32] * 2
    assert len({x.untyped_storage()._cdata for x in made}) == 4


# ---- 4 bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_weights_in_4_bits_take_what_bitsandbytes_stores(engine: str) -> None:
    """By hand, of a layer: half a byte a number, a byte for each 64, 4 for each 16384, and 17 float32 numbers."""
    config = config_of("qwen3", num_hidden_layers=1, tie_word_embeddings=False, intermediate_size=300)
    setup = Setup(config, engine=engine, dtype=torch.bfloat16, bf16=True, lora_rank=2, load_in_4bit=True)
    shapes = [(64, 64), (32, 64), (32, 64), (64, 64), (300, 64), (300, 64), (64, 300)]
    packed, states = sum(f * e // 2 for f, e in shapes), 0
    for blocks, outer in [(64, 1), (32, 1), (32, 1), (64, 1), (300, 2), (300, 2), (300, 2)]:
        states += blocks + 4 * outer + 4 * 17
    kept = 2 * (2 * V * E + 3 * E + 2 * 16)  # head, embeddings, norms
    trained = sum(2 * (f + e) for f, e in shapes)
    with TrainingStep(setup) as step:
        parts = step.run(32).parts
        assert step.num_parameters == sum(f * e for f, e in shapes) + kept // 2 + trained
    assert parts["weights"] == packed + states + kept + 4 * trained
    assert parts["optimizer"] == pytest.approx(8 * trained, rel=0.01)


def test_weights_in_4_bits_take_what_a_published_file_has() -> None:
    """Llama 3 8B in nf4 with double quantization, its embeddings and head in bfloat16: 5.70 GB on the hub."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    setup = Setup(config_of(**sizes, **heads), dtype=torch.bfloat16, lora_rank=1, load_in_4bit=True, optimizer="sgd")
    with TrainingStep(setup) as step:
        adapters = sum(parameter.nbytes for parameter in step._engine.parameters)
        assert (step._live.parts["weights"] - adapters) / 1e9 == pytest.approx(5.70, abs=0.005)


def test_a_grpo_step_of_recurrent_layers_is_refused() -> None:
    with pytest.raises(RefusedError, match="recurrent layers, with which a GRPO step"):
        planned(64, Setup(tiny_config("bamba"), grpo=Grpo(8, 1, False)))


@pytest.mark.parametrize("keys", [{"engine": "zero3"}, {"grpo": Grpo(8, 1, False)}])
def test_what_is_not_planned_in_4_bits_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match="4 bits are not planned"):
        planned(64, Setup(config_of(), **keys, lora_rank=2, load_in_4bit=True))


def test_a_layer_in_4_bits_holds_its_weights_whole_only_while_it_multiplies() -> None:
    """Of a wide layer and few tokens, the peak is one dequantized weight and its blocks' maxima."""
    config = config_of(num_hidden_layers=1, hidden_size=512, intermediate_size=4096, vocab_size=64)
    setup = Setup(config, dtype=torch.bfloat16, lora_rank=1, load_in_4bit=True, optimizer="sgd")
    parts = planned(2, setup).parts
    whole = 4096 * 512 * 2 + 4096 * 512 // 64 * 4
    assert whole < parts["activations"] < 1.05 * whole


# ---- recurrent layers -----------------------------------------------------------------------------


_MORE = ("mamba", "lfm2", "olmo_hybrid", "falcon_h1", "zamba2", "qwen3_5_text")


@pytest.mark.parametrize("model_type", ["bamba", *(pytest.param(name, marks=pytest.mark.long) for name in _MORE)])
def test_recurrent_layers_save_what_autograd_really_saves(model_type: str) -> None:
    """To the byte, as ringtile's own recurrences compute on one rank; documents are numbered in int32, not counted."""
    config, seq_len = tiny_config(model_type), 130
    real = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    ids = torch.randint(3, config.vocab_size, (1, seq_len))
    sequence = ShardedSequence.of(IntervalMask.causal(seq_len), Layout.contiguous(seq_len, 1), None)
    batch = ShardedBatch(sequence, seq_len, seq_len, None, torch.arange(seq_len))
    patches = Patches()
    try:
        recurrent.install(real, patches)
        with active(batch), saving(*real.parameters(), *real.buffers(), ids) as saved:
            loss = real(input_ids=ids, labels=ids, use_cache=False).loss
    finally:
        patches.restore()
    expected = sum(num_bytes for num_bytes, x in saved.values() if x.dtype != torch.int32) + loss.nbytes
    with TrainingStep(Setup(config)) as step:
        assert planned_between_passes(step, seq_len)[0] == expected


@pytest.mark.parametrize("scheme", ["ring", "ulysses"])
def test_recurrent_layers_over_ranks_hold_their_tokens_only(scheme: str) -> None:
    config = tiny_config("bamba")
    keys: dict[str, Any] = {"context_parallel_size": 2, "context_parallel_scheme": scheme}
    alone, shared = planned(512, Setup(config)), planned(512, Setup(config, devices=2, ringtile=Config(**keys)))
    assert shared.parts["logits"] == alone.parts["logits"] / 2
    assert shared.parts["activations"] == pytest.approx(alone.parts["activations"] / 2, rel=0.05)
