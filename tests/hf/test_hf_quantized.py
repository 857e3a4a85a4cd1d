"""QLoRA: adapters on linear layers of 4 bits (bitsandbytes, whose kernels run on a CPU too)."""

import functools
from dataclasses import replace

import pytest
import torch
from hf_engines import needs_deepspeed
from hf_models import tiny_model
from hf_training import Run, assert_equal_training, enter_world, train
from pool import run_ranks

TILED = {"context_parallel_size": 2, "tiled_mlp": True, "tiled_loss": True, "tile_tokens": 5}


def _train(config, folder, engine="DDP", **options):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    enter_world()
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=torch.float32 if engine == "FSDP2" else torch.uint8,  # it shards floating point only
    )
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=torch.float32)
    assert {type(part).__name__ for part in model.model.layers[0].mlp.children()} == {"Linear4bit", "SiLUActivation"}
    return train(config, model=model.train(), lora=True, engine=engine, **{"evaluate": False, **options})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    path = str(tmp_path_factory.mktemp("model"))
    tiny_model().save_pretrained(path)
    return path


@functools.cache
def _reference(folder: str, **options) -> Run:
    return _train(None, folder, **options)


@pytest.mark.parametrize("config", [{"context_parallel_size": 2}, TILED], ids=["plain", "tiled"])
def test_adapters_on_4_bits_equal_one_process(config, folder):
    """The quantized weights are the same bits; losses, gradient norms and the adapters' weights are equal to 1e-6."""
    for run in run_ranks(2, _train, config, folder):
        assert_equal_training(run, _reference(folder))


@pytest.mark.parametrize("engine", ["FSDP2", "ZeRO-2", "ZeRO-3"])
def test_engines_equal_one_process(engine, folder):
    """Only the adapters are compared: an engine may keep the quantized weights in pieces, or as another dtype."""
    if engine != "FSDP2":
        needs_deepspeed()
    expected = _adapters(_reference(folder))
    assert len(expected.weights) == 20
    for run in run_ranks(2, _train, TILED, folder, engine):
        assert_equal_training(_adapters(run), expected)


def _adapters(run: Run) -> Run:
    return replace(run, weights={name: weight for name, weight in run.weights.items() if "lora" in name})
