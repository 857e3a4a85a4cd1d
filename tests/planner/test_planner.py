"""`ringtile plan --model`: counts against real models and real saved tensors; sizes as people write them; refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from ringtile.cli import main
from ringtile.errors import ConfigError, RefusedError
from ringtile.hf.batch import CHECKPOINTING
from ringtile.hf.config import Config
from ringtile.planner import advice
from ringtile.planner.advice import Longest, longest, switches
from ringtile.planner.live import Live
from ringtile.planner.setup import Setup
from ringtile.planner.sizes import parse_bytes, parse_tokens, tokens_text
from ringtile.planner.step import StepMemory, TrainingStep
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from tools.models.tiny_models import tiny_config

LAYERS, E, V = 3, 64, 320
_TINY: dict[str, Any] = {
    **{"hidden_size": E, "intermediate_size": 96, "num_hidden_layers": LAYERS, "vocab_size": V, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096},
}
_TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def config_of(model_type: str = "llama", **keys: Any) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.for_model(model_type, **{**_TINY, **_TYPES.get(model_type, {}), **keys})
    return config


def planned(seq_len: int, setup: Setup) -> StepMemory:
    with TrainingStep(setup) as step:
        return step.run(seq_len)


@contextlib.contextmanager
def saving(*known: Any) -> Iterator[dict[int, tuple[int, Tensor]]]:
    """Inside, the bytes of each storage that autograd saves, once, and who holds it; but for those of some tensors."""
    pointers = {x.untyped_storage().data_ptr() for x in known if isinstance(x, Tensor)}
    found: dict[int, tuple[int, Tensor]] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in pointers:
            found.setdefault(storage.data_ptr(), (storage.nbytes(), x))
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        yield found


def planned_between_passes(step: TrainingStep, seq_len: int) -> tuple[int, StepMemory]:
    """The bytes that live after the forward but for weights, and the step."""
    between: list[int] = []

    def look() -> None:
        between.append(sum(step._live.parts[name] for name in ("activations", "attention", "logits")))

    with mock.patch.object(step._engine, "before_backward", look):
        memory = step.run(seq_len)
    return between[0], memory


# ---- sizes --------------------------------------------------------------------------------------


def test_sizes_are_read_as_people_write_them() -> None:
    tokens = {"4096": 4096, "32K": 2**15, "1M": 2**20, "1m": 2**20, "1.5K": 1536}
    assert {text: parse_tokens(text) for text in tokens} == tokens
    sizes = {"80GiB": 80 * 2**30, "512 MiB": 2**29, "80GB": 80 * 10**9, "1.5TiB": 3 * 2**39, "123": 123}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    assert [tokens_text(number) for number in (2**20, 3 * 2**15, 4097)] == ["1M", "96K", "4097"]


@pytest.mark.parametrize("text", ["", "0", "-1", "K", "1T", "1.0001", "2G", "1e6", "1 000"])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a number of tokens"):
        parse_tokens(text)


@pytest.mark.parametrize("text", ["", "0GiB", "-1GiB", "GiB", "80X", "80 Gi"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected bytes with a unit"):
        parse_bytes(text)


# ---- counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", _TYPES)
def test_parameters_and_state_are_those_of_the_real_model(model_type: str) -> None:
    config = config_of(model_type)
    real = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    num_bytes = sum(parameter.nbytes for parameter in real.parameters())
    with TrainingStep(Setup(config)) as step:
        assert step.num_parameters == real.num_parameters()
        parts = step.run(32).parts
    assert parts["weights"] == num_bytes
    steps = 4 * len(list(real.parameters()))  # AdamW counts its steps, in a float for each parameter
    assert parts["optimizer"] == 2 * num_bytes + steps


@pytest.mark.parametrize(("model_type", "lora_rank"), [*((name, 0) for name in _TYPES), ("llama", 4)])
def test_activations_are_what_autograd_really_saves(model_type: str, lora_rank: int) -> None:
    """Between the passes, to the byte, live the storages that a real forward saves, each once, and the loss."""
    config, seq_len = config_of(model_type, num_hidden_layers=1), 48
    real = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()
    if lora_rank:
        real = get_peft_model(real, LoraConfig(r=lora_rank, target_modules="all-linear"))
    ids = torch.randint(V, (1, seq_len))
    with saving(*real.parameters(), ids) as saved:
        loss = real(input_ids=ids, labels=ids, use_cache=False).loss
    expected = sum(num_bytes for num_bytes, _ in saved.values()) + loss.nbytes
    with TrainingStep(Setup(config, lora_rank=lora_rank)) as step:
        assert planned_between_passes(step, seq_len)[0] == expected


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=pytest.mark.long), "zero3"])
def test_adapters_alone_have_gradients_and_state(engine: str) -> None:
    """bfloat16 weights and PEFT's float32 adapters; DeepSpeed casts these, and updates a float32 copy."""
    config, ranks = config_of(), 4
    real = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    frozen = sum(parameter.numel() for parameter in real.parameters())
    real = get_peft_model(real, LoraConfig(r=8, target_modules="all-linear"))
    trained = sum(parameter.numel() for parameter in real.parameters() if parameter.requires_grad)
    setup = Setup(config, devices=ranks, engine=engine, dtype=torch.bfloat16, bf16=True, lora_rank=8)
    with TrainingStep(setup) as step:
        assert step.num_parameters == frozen + trained
        parts = step.run(64).parts
    if engine == "ddp":
        assert parts["weights"] == 2 * frozen + 4 * trained
        assert parts["optimizer"] == pytest.approx(8 * trained, rel=0.01)
    elif engine == "fsdp2":  # accelerate makes float32 of what is trained
        assert parts["optimizer"] == pytest.approx(8 * trained / ranks, rel=0.01)
    else:
        assert parts["weights"] == pytest.approx(2 * (frozen + trained) / ranks, rel=0.01)
        assert parts["optimizer"] == pytest.approx(12 * trained / ranks, rel=0.01)


def test_what_optimizers_keep_and_what_the_host_keeps() -> None:
    config = config_of(tie_word_embeddings=False)
    real = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    count, embedding = real.num_parameters(), real.get_input_embeddings().weight.numel()
    kept = {name: planned(64, Setup(config, optimizer=name)).parts["optimizer"] for name in ("sgd", "adamw_8bit")}
    assert kept["sgd"] == 0
    assert kept["adamw_8bit"] == pytest.approx((2 + 1 / 32) * (count - embedding) + 8 * embedding, rel=1e-3)
    zero3 = Setup(config, devices=2, engine="zero3", dtype=torch.bfloat16, bf16=True)
    on_device, offloaded = (planned(64, dataclasses.replace(zero3, offload_optimizer=on)) for on in (False, True))
    assert (on_device.optimizer_host_bytes, offloaded.parts["optimizer"]) == (0, 0)
    assert offloaded.optimizer_host_bytes == pytest.approx((12 + 2) * count / 2, rel=1e-3)
    assert on_device.total - offloaded.total == pytest.approx(offloaded.optimizer_host_bytes, rel=1e-3)


def test_a_storage_is_counted_once_and_while_it_lives() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    live = Live(V, over_gloo=False)
    with FakeTensorMode(), live:
        x = torch.empty(8, 4)
        view = x[2:].t()
        y = x + 1
        del x
        assert live.total == 2 * 8 * 4 * 4
        del view
        assert live.total == 8 * 4 * 4
        del y
    assert (live.total, live.peak) == (0, 2 * 8 * 4 * 4)
    assert live.finish()["activations"] == live.peak


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_engines_shard_the_weights(engine: str) -> None:
    config = config_of(num_hidden_layers=1)
    whole = planned(64, Setup(config)).parts
    shard = planned(64, Setup(config, devices=4, engine=engine, ringtile=Config(context_parallel_size=4))).parts
    assert shard["weights"] == pytest.approx(whole["weights"] / 4, rel=1e-3)
    copies = 2 if engine == "fsdp2" else 3  # DeepSpeed updates a copy of the weights
    assert shard["optimizer"] == pytest.approx(copies * whole["weights"] / 4, rel=1e-3)


def test_ranks_that_share_experts_gather_their_own() -> None:
    """All ranks together hold each weight once, whoever gathers it; experts that a rank has whole are not gathered."""
    config = config_of("qwen3_moe", num_hidden_layers=1, moe_intermediate_size=256)
    setup = Setup(config, devices=4, engine="fsdp2", ringtile=Config(context_parallel_size=4))
    whole = planned(64, setup)
    experts = 4 * 3 * E * 256 * 4
    for size, gathered in ((2, experts // 2), (4, 0)):
        shared = planned(64, dataclasses.replace(setup, expert_parallel_size=size))
        assert shared.parts["engine"] == whole.parts["engine"] - experts + gathered
        assert all(shared.parts[name] == whole.parts[name] for name in ("weights", "gradients", "optimizer"))
        assert shared.product_flops == whole.product_flops
    for keys in ({"engine": "zero3"}, {"ringtile": Config(tiled_mlp=True)}):
        with pytest.raises(RefusedError, match=r"size is 2, beside (--engine zero3|tiled_mlp);"):
            planned(64, dataclasses.replace(setup, expert_parallel_size=2, **keys))


def test_ranks_that_share_a_sequence_hold_their_tokens_only() -> None:
    """The logits of a rank are those of its tokens, and so is what each layer saves."""
    config = config_of(num_hidden_layers=1)
    alone = planned(512, Setup(config))
    shared = planned(512, Setup(config, devices=4, ringtile=Config(context_parallel_size=4)))
    assert shared.parts["logits"] == alone.parts["logits"] / 4
    assert shared.product_flops == alone.product_flops / 4


def test_offload_leaves_two_hidden_states_on_the_device() -> None:
    """At the loss, where all of them are saved."""
    seq_len = 256
    setup = Setup(config_of(vocab_size=4096), gradient_checkpointing=True)
    kept = planned(seq_len, setup)
    with TrainingStep(dataclasses.replace(setup, ringtile=Config(activation_offloading=True))) as step:
        step.run(2 * seq_len)
        offloaded = step.run(seq_len)
    hidden = seq_len * E * 4
    assert offloaded.host_bytes == LAYERS * hidden
    assert kept.total - offloaded.total == (LAYERS - 2) * hidden


@pytest.mark.parametrize("scheme", ["ring", pytest.param("ulysses", marks=pytest.mark.long)])
def test_streamed_layers_over_ranks_hold_attention_of_all_tokens_and_no_hidden_states(scheme: str) -> None:
    """H D 64, G D 32, float32. Ring: k, v, dk, dv, and as many in transit. Ulysses: q, out, dout, dq and these twice,
    and in transit. lse and its sums; cos and sin; ids, labels, where they are, and the mask."""
    keys: dict[str, Any] = {"context_parallel_scheme": scheme, "layout": "contiguous", "keep_attention": False}
    config = Config(context_parallel_size=2, stream=True, tiled_loss=True, tile_tokens=64, **keys)
    slopes = []
    for on in (False, True):
        setup = Setup(config_of(), devices=2, ringtile=config.changed(activation_offloading=on))
        with TrainingStep(setup) as step:
            found, longer = step.run(512), step.run(1024)
        slopes.append((longer.total - found.total) / 256)
    attention = 2 * 4 * 4 * 32 if scheme == "ring" else 2 * 4 * (4 * 64 + 2 * 4 * 32)
    assert slopes[1] <= attention + 4 * (8 + 4 + 4) + 4 * 2 * 16 + 9 * 8
    assert slopes[0] >= slopes[1] + 2 * 4 * E  # a layer's input and its gradient
    assert len(found.attention) == 2 * LAYERS  # once in the forward, once more in the backward
    # Of each layer an end, of the last dout and dx; of attention out and dout, and in a ring q, dq and its sums.
    assert found.host_bytes == (LAYERS + (7 if scheme == "ring" else 4)) * 256 * E * 4


def test_a_step_leaves_nothing_behind() -> None:
    with TrainingStep(Setup(config_of(num_hidden_layers=1), devices=2, engine="fsdp2")) as step:
        first = step.run(64)
        again = step.run(128), step.run(64)
    assert first.parts == again[1].parts
    assert again[0].total > first.total


@pytest.mark.parametrize("ranks", [1, 2])
def test_balancing_loss_is_planned(ranks: int) -> None:
    """It counts tokens by expert, from data that fake tensors do not have, and is known by its values."""
    step, without = (
        planned(64, Setup(config, devices=ranks, ringtile=Config(context_parallel_size=ranks)))
        for config in (config_of("qwen3_moe", num_hidden_layers=1, output_router_logits=adds) for adds in (True, False))
    )
    assert step.parts["activations"] >= without.parts["activations"]
    assert step.product_flops == without.product_flops


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config_of(num_hidden_layers=1).to_dict()))
    return str(tmp_path)


# ---- advice -------------------------------------------------------------------------------------


def test_the_longest_sequence_fits_and_a_longer_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(config_of(num_hidden_layers=1), devices=2, ringtile=Config(context_parallel_size=2))
    with TrainingStep(setup) as step:
        memory = step.run(3000).total
        found = longest(step, memory, step.run(256))
        assert step.run(found.seq_len).total <= memory < step.run(found.seq_len + found.seq_len // 50).total
    assert 2950 <= found.seq_len <= 3000
    monkeypatch.setattr(advice, "_MAX_CHUNKS", 2**3)  # a chunk takes a tenth of a second
    keys = Config(stream=True, tiled_loss=True, reproducible=True, tile_tokens=1)
    with TrainingStep(Setup(config_of(num_hidden_layers=1), ringtile=keys)) as step:
        assert not longest(step, 2**40, step.run(4)).is_planned  # 2**20 chunks would take hours
    assert "not shown" in {each.key: each.refused for each in switches(step.setup, 64)}["activation_offloading: true"]


def test_memory_that_no_sequence_fits(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The table is printed all the same, and what one more switch does: there is no other advice."""
    assert main(["plan", "--model", folder, "--seq-len", "64", "--memory", "64KiB"]) == 0
    said = capsys.readouterr().out
    assert "does NOT fit" in said
    assert "no sequence fits, however short; the largest part here: " in said
    assert "of optimizer" in said
    assert "tiled_loss: true" in said
    for remedy in ("2 devices, context_parallel_size: 2 ", "--lora-rank 16  ", "--lora-rank 16 --load-in-4bit  "):
        assert f"  {remedy}" in said
    assert "saves -" not in said


@pytest.mark.long
def test_each_switch_that_is_off_is_tried() -> None:
    setup = Setup(config_of(vocab_size=8192, num_hidden_layers=1), devices=2, engine="ddp")
    saved = {switch.key: switch.total for switch in switches(setup, 512)}
    named = {"tiled_loss", "tiled_mlp", "tiled_norm", "stream", "context_parallel_size", "--engine fsdp2"}
    assert {key.split(":")[0] for key in saved} == {CHECKPOINTING, "--engine zero3", *named}
    assert saved["tiled_loss: true"] is not None
    assert saved["tiled_loss: true"] < planned(512, setup).total
    streamed = [key for key, *_ in switches(dataclasses.replace(setup, devices=1, ringtile=Config(stream=True)), 512)]
    assert streamed == ["activation_offloading: true", "keep_attention: false", "tiled_loss: true"]


# ---- the file of a run ----------------------------------------------------------------------------

AS_OPTIONS = ["--devices", "4", "--context-parallel-size", "2", "--batch", "3", "--memory", "80GiB", "--no-switches"]


def write_run(folder: str, **training: Any) -> pathlib.Path:
    run = {
        "context_parallel_size": 2,
        "tiled_loss": True,
        **{name: training.pop(name) for name in ("stream", "activation_offloading") if name in training},
        "model": {"name": folder, "use_cache": False},
        "data": {"files": "nothing.txt", "seq_len": 256},
        "training": {"per_device_train_batch_size": 3, **training},
    }
    path = pathlib.Path(folder, "run.yaml")
    path.write_text(yaml.safe_dump(run))
    return path


@pytest.mark.parametrize(
    ("training", "options"),
    [
        ({"gradient_checkpointing": True, "use_liger_kernel": True}, ["--engine", "ddp", "--gradient-checkpointing"]),
        (
            {"fsdp": True, "fsdp_config": {"fsdp_version": 2, "activation_checkpointing": True}, "bf16": True},
            ["--engine", "fsdp2", "--gradient-checkpointing", "--bf16"],
        ),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, ["--engine", "zero3"]),
        (
            {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": False, "offload": True}},
            ["--engine", "ddp", "--gradient-checkpointing", "--activation-offloading"],
        ),
        ({"stream": True, "activation_offloading": True}, ["--stream", "--activation-offloading"]),
    ],
)
def test_the_file_of_a_run_says_what_the_options_say(
    training: dict[str, Any],
    options: list[str],
    folder: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No data and no weights are read."""
    monkeypatch.setattr("ringtile.planner.advice.longest", lambda step, memory, known: Longest(memory, True))
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    run = str(write_run(folder, **training))
    assert main(["plan", run, "--devices", "4", "--no-switches", "--json", str(one)]) == 0
    assert ("use_liger_kernel is not planned" in capsys.readouterr().out) == ("use_liger_kernel" in training)
    model = ["--model", folder, "--seq-len", "256", "--tiled-loss"]
    assert main(["plan", *model, *AS_OPTIONS, *options, "--json", str(two)]) == 0
    of_run, of_options = (json.loads(path.read_text()) for path in (one, two))
    for key in ("parameters", "seq_len", "parts", "total", "memory"):
        assert of_run[key] == of_options[key], key
    setups = of_run["setup"], of_options["setup"]
    assert all(setups[0][key] == setups[1][key] for key in setups[0].keys() - {"ringtile"})


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "said"),
    [("recurrent_gemma", "the RG-LRU"), ("bloom", "AttentionInterface"), ("doge", "keep_window_size")],
)
def test_models_that_do_not_run_on_shards_are_refused(model_type: str, said: str) -> None:
    setup = Setup(tiny_config(model_type), devices=2, ringtile=Config(context_parallel_size=2))
    with pytest.raises(RefusedError, match=said):
        planned(64, setup)


def test_learned_sparse_attention_is_refused_on_one_rank_too() -> None:
    """Where transformers scores S x S pairs."""
    with pytest.raises(RefusedError, match="DeepseekV32ForCausalLM chooses the keys of each query"):
        planned(64, Setup(tiny_config("deepseek_v32")))


@pytest.mark.parametrize("key", ["version", "fsdp_version"])
def test_a_run_under_fsdp1_is_refused_as_in_training(
    key: str, folder: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fsdp.json").write_text(json.dumps({key: 1}))
    for fsdp in ({key: 1}, str(tmp_path / "fsdp.json")):
        assert main(["plan", str(write_run(folder, fsdp=True, fsdp_config=fsdp))]) == 2
        assert "training.fsdp_config: version is 1; expected 2" in capsys.readouterr().err


def test_a_run_that_checkpoints_some_layers_is_refused(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    kwargs = {f"{CHECKPOINTING}_kwargs": {"every_n_layers": 2}}
    assert main(["plan", str(write_run(folder, **{CHECKPOINTING: True}, **kwargs))]) == 2
    said = f"training.{CHECKPOINTING}_kwargs: every_n_layers is 2, which is not planned; expected 1"
    assert said in capsys.readouterr().err


def test_a_hub_name_that_cannot_be_fetched_is_told_how_to(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(AutoConfig, "from_pretrained", side_effect=OSError("no network")):
        assert main(["plan", "--model", "no/model", "--seq-len", "64"]) == 2
    assert "hf download no/model --local-dir FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "lama", "--seq-len", "1K"], "did you mean llama"),
        (["--model", "bert", "--seq-len", "1X"], "expected a number of tokens"),
        (["--model", "FOLDER", "--seq-len", "64", "--devices", "4", "--context-parallel-size", "3"], "divides"),
        (["--model", "FOLDER", "--seq-len", "64", "--devices", "0"], "at least 1"),
        (["--model", "FOLDER", "--seq-len", "64", "--memory", "80X"], "expected bytes"),
        (["--num-heads", "4"], "--seq-len is missing"),
        (["RUN", "--engine", "zero3"], "--engine is given beside"),
        (["RUN", "--num-heads", "4"], "of one attention layer"),
        (["RUN", "--generation-rows", "8"], "--generation-rows is given beside"),
        (["RUN", "--devices", "3"], "expected a multiple of 2"),
        (["RUN", "--load-in-4bit"], "expected --lora-rank too"),
        (["RUN", "--lora-rank", "-1"], "--lora-rank is -1; expected a rank"),
        (["--model", "FOLDER", "--seq-len", "64", "--offload-optimizer"], "expected zero1, zero2 or zero3"),
        (["RUN", "--seq-len", "8K"], "model.max_position_embeddings is 4096; expected at least 8192"),
        (["--model", "FOLDER", "--seq-len", "64", "--offload"], "--gradient-checkpointing or --stream too"),
        (["RUN", "--stream"], "--stream is given beside"),
        (["--model", "FOLDER", "--seq-len", "64", "--num-heads", "4"], "of one attention layer"),
        (["--model", "FOLDER", "--seq-len", "64", "--scheme", "auto"], "expected one by name"),
        (["--seq-len", "64", "--world-size", "2"], "expected --model"),
        (
            ["--seq-len", "64", "--world-size", "2", "--num-heads", "4", "--head-dim", "8", "--tiled-mlp"],
            "of a model's training",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: list[str], said: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"FOLDER": folder, "RUN": str(write_run(folder))}
    assert main(["plan", *(places.get(word, word) for word in options)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


# What a config.json holds instead, and what is said of it.
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 100_000}, "model.num_hidden_layers is 100000; expected at most 512"),
    "layers of a part": ({"text_config": {"n_layer": 2**40}}, "model.n_layer is 1099511627776; expected at most 512"),
    "labels": ({"num_labels": 10**9}, "model.num_labels is 1000000000; expected at most 65536"),
    "padding": ({"pad_token_id": 10**6}, "model: AssertionError: Padding_idx must be within num_embeddings"),
    "rope": ({"rope_parameters": {"rope_type": "spiral"}}, "model: KeyError: 'spiral'"),
    "dtype": ({"dtype": "spiral"}, "model: AttributeError: module 'torch' has no attribute 'spiral'"),
    "activation": ({"hidden_act": 7}, "Field 'hidden_act' expected str, got int"),
    "partial": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 99}},
        "broadcastable",
    ),
    "parts": ({"sub_configs": 3}, "ringtile: error: model: "),  # in the words of the release
    "auto map": ({"model_type": "none", "auto_map": {"AutoConfig": "a.B"}}, "trust_remote_code"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_configuration_is_one_line(
    name: str, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, said = HOSTILE[name]
    monkeypatch.setattr("builtins.input", pytest.fail)  # nobody is asked
    model_type = "glm4_moe" if name == "partial" else "llama"
    (tmp_path / "config.json").write_text(json.dumps({**config_of(model_type).to_dict(), **changes}))
    assert main(["plan", "--model", str(tmp_path), "--seq-len", "64", "--no-switches"]) == 2
    error = capfd.readouterr().err
    assert said in error
    assert error.count("ringtile: error: ") == 1
    assert "Traceback" not in error


def test_a_head_that_no_kernel_takes_is_one_line(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Said before a kernel is tested with such a head, which never ended."""
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama").to_dict() | {"head_dim": 1_000_000}))
    given = ["plan", "--model", str(tmp_path), "--seq-len", "64", "--no-switches", "--devices", "2"]
    assert main([*given, "--context-parallel-size", "2"]) == 2
    assert "the head dims are 1000000 and 1000000; expected 1..512" in capfd.readouterr().err


def _keys_and_values() -> Iterator[Any]:
    in_every_run = [("_attn_implementation", "someone/kernel"), ("_experts_implementation", "spiral")]
    for key in ("_attn_implementation", "attn_implementation", "_experts_implementation"):
        for value in ("someone/kernel", "flash_attention_2", "spiral", ["x"], {"": "someone/kernel"}):
            marks = () if (key, value) in in_every_run else (pytest.mark.long,)
            yield pytest.param(key, value, marks=marks)


@pytest.mark.parametrize(("key", "value"), _keys_and_values())
def test_configuration_loads_no_kernel_of_a_hub(
    key: str, value: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is of ringtile's attention, whatever the file names."""

    def load(*given: Any, **options: Any) -> None:
        raise AssertionError(f"loads {given}")

    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", load)
    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", load, raising=False)
    (tmp_path / "config.json").write_text(json.dumps({**config_of(num_hidden_layers=1).to_dict(), key: value}))
    assert main(["plan", "--model", str(tmp_path), "--seq-len", "64", "--no-switches"]) == 0


def test_model_of_too_many_modules_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringtile.planner.step._MAX_MODULES", 20)
    with pytest.raises(
        RefusedError, match="more than 20 modules, each of which the planner runs; expected fewer layers"
    ):
        planned(64, Setup(config_of()))


def test_a_plan_of_a_model_is_printed_drawn_and_written(
    folder: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringtile.planner.advice._STEPS", 1)
    picture, written = tmp_path / "plan.png", tmp_path / "plan.json"
    sizes = ["--seq-len", "1K", "--devices", "2", "--memory", "64MiB", "--device", "cpu", "--rates", "1e9,1e9"]
    files = ["--plot", str(picture), "--json", str(written)]
    assert main(["plan", "--model", folder, *sizes, "--tiled-loss", *files]) == 0
    printed = capsys.readouterr().out
    assert "longest sequence that fits" in printed
    assert f"{CHECKPOINTING}: true" in printed
    assert picture.stat().st_size > 1000
    report = json.loads(written.read_text())
    assert report["total"] == sum(report["parts"].values())
    assert report["fits"]
    assert report["longest"] > 1024
    assert report["seconds"]["computing"] > 0 < report["seconds"]["sending"]
    assert "A batch takes the busiest rank" in printed


def test_documents_shorten_the_seconds_of_a_model(
    folder: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["plan", "--model", folder, "--seq-len", "1K", "--devices", "2", "--device", "cpu", "--no-switches"]
    written = tmp_path / "plan.json"
    found = []
    for mask in ([], ["--mask", "packed:100,28"]):
        assert main([*sizes, *mask, "--rates", "1e9,1e9", "--json", str(written)]) == 0
        found.append(json.loads(written.read_text())["seconds"])
    whole, packed = found
    assert packed["computing"] < whole["computing"]
    assert packed["sending"] < whole["sending"]
    for each in found:
        assert each["together"] == pytest.approx(each["computing"] + each["exposed"])
        assert each["mean"] <= each["computing"]
    assert main([*sizes, "--mask", "packed:100,28"]) == 2
    assert "--mask of a model changes its seconds alone" in capsys.readouterr().err


def test_a_plan_of_one_layer_says_so_and_reads_1k(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--seq-len", "1K", "--world-size", "2", "--num-heads", "4", "--head-dim", "8"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("One attention layer")
    assert "1024 tokens over 2 ranks" in printed


@pytest.mark.parametrize(
    ("engine", "keys", "latent_dim"),
    [
        ("ddp", {}, 20),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("ddp", {"latents": False}, 0), ("zero3", {}, 0))),
    ],
)
def test_latents_are_planned_where_they_travel(engine: str, keys: dict[str, Any], latent_dim: int) -> None:
    config = Config.load({"context_parallel_size": 2, **keys})
    step = planned(256, Setup(tiny_config("deepseek_v3"), devices=2, engine=engine, ringtile=config))
    assert [shape.latent_dim for shape, *_ in step.attention] == [latent_dim] * 4
