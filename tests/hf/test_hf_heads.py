"""Models whose heads no number of ranks divides, and models loaded with another attention: exact, under each scheme."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from hf_models import SIZES
from hf_training import Run, assert_equal_training, packed, train
from pool import run_ranks

SCHEMES = {2: ("ring", "all_gather", "ulysses", "staged:2"), 3: ("ulysses", "staged:3"), 4: ("ulysses", "usp:2")}


def model(kv_heads: int = 3, attention: str = "sdpa") -> transformers.PreTrainedModel:
    """Llama with 3 query heads."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 3, "num_key_value_heads": kv_heads, "head_dim": 8, "hidden_size": 24}
    config = transformers.AutoConfig.for_model("llama", **{**SIZES, **heads})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


OPTIONS: dict[str, Any] = {"max_steps": 2, "gradient_accumulation_steps": 1, "evaluate": False, "num_rows": 8}


def run(config: dict[str, Any] | None, kv_heads: int, attention: str = "sdpa", **options: Any) -> Run:
    return train(config, model=model(kv_heads, attention), **OPTIONS, **options)


@functools.cache
def reference(kv_heads: int) -> Run:
    return run(None, kv_heads, collator=packed)


@pytest.mark.parametrize(("ranks", "scheme"), [(ranks, scheme) for ranks in SCHEMES for scheme in SCHEMES[ranks]])
@pytest.mark.parametrize("kv_heads", [3, pytest.param(1, marks=pytest.mark.long)])
def test_three_heads_equal_one_process(ranks: int, scheme: str, kv_heads: int) -> None:
    config = {"context_parallel_size": ranks, "context_parallel_scheme": scheme}
    for each in run_ranks(ranks, run, config, kv_heads, collator=packed):
        assert_equal_training(each, reference(kv_heads))


@pytest.mark.parametrize("collator", [None, packed])
def test_model_loaded_with_flex_attention_equals_one_process(collator: Any) -> None:
    expected = run(None, 3, collator=collator)
    for each in run_ranks(2, run, {"context_parallel_size": 2}, 3, "flex_attention", collator=collator):
        assert_equal_training(each, expected)
