"""The memory of a pass of log-probabilities, forward and backward, of rows that two ranks share, in tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import run_ranks
from ringtile import sequence_log_probs
from transformers import LlamaConfig, LlamaForCausalLM

from tools.peak_memory import peak_bytes, reset_peak_bytes

VOCAB = 32768
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
MIB = 2**20


def tiny(num_tokens: int) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=num_tokens, **SIZES))


def growth(num_tokens: int, trains: bool = True) -> int:
    """Bytes that forward and backward of one row add to this process at their peak, or an evaluation."""
    model = tiny(num_tokens)
    input_ids = torch.randint(VOCAB, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    # The comparison with one process, and the first loads of libraries, are no part of a pass.
    sequence_log_probs(model, input_ids[:, :64], dist.group.WORLD)
    reset_peak_bytes()
    before = peak_bytes()
    with torch.set_grad_enabled(trains):
        log_probs, entropy = sequence_log_probs(model, input_ids, dist.group.WORLD, return_entropy=True)
    if trains:
        (log_probs.sum() + entropy.sum()).backward()
    return peak_bytes() - before


@pytest.mark.long
def test_64k_tokens_on_two_ranks_need_less_than_a_tenth_of_their_logits() -> None:
    """All logits are 8 GiB, in float32 and once. A tile of them is 64 MiB; 230 MiB were measured, for each rank."""
    for grown in run_ranks(2, growth, 65536, timeout=600):
        assert 64 * MIB < grown < 65536 * VOCAB * 4 / 10


@pytest.mark.long
def test_an_evaluation_grows_by_far_less_than_its_row() -> None:
    """Of 8K tokens, most is the tile of logits; four times as many added 1.3 times as much when it was measured."""
    short, long = (run_ranks(2, growth, num_tokens, False) for num_tokens in (8192, 32768))
    assert max(long) < 2 * max(short)
