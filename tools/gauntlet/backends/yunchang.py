"""feifeibear/long-context-attention (yunchang): LongContextAttention, Ulysses 2 x ring 2."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tools.gauntlet.attention_cases import AttentionCase, Inputs, Outputs
from tools.gauntlet.backends import Backend, NotOfferedError, sharded
from tools.gauntlet.block_on_cpu import install_flash_attn


def _attend(case: AttentionCase, inputs: Inputs) -> Outputs:
    if case.documents or case.sinks or case.prefix or case.padding or case.chunk:
        raise NotOfferedError("LongContextAttention has no argument for this")
    install_flash_attn()
    yunchang: Any = importlib.import_module("yunchang")

    rank, world_size = dist.get_rank(), dist.get_world_size()
    yunchang.set_seq_parallel_pg(2, 2, rank, world_size)
    attention = yunchang.LongContextAttention(ring_impl_type="basic")
    window = (-1, -1) if case.window is None else (case.window - 1, 0)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(  # type: ignore[no-any-return]
            q, k, v, softmax_scale=case.scale, causal=case.causal, window_size=window, softcap=case.softcap
        )

    return sharded(inputs, call)


BACKENDS = [
    Backend(
        name="yunchang",
        package="yunchang",
        install="pip install yunchang",
        attend=_attend,
        setup="LongContextAttention, Ulysses 2 x ring 2, ring_impl_type basic, with flash_attn on the CPU, in bfloat16",
        dtype=torch.bfloat16,
    )
]
