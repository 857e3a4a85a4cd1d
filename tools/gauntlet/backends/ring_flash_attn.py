"""zhuzilin/ring-flash-attention: its batch interface, and the varlen interface that it recommends, for documents."""

from __future__ import annotations

import importlib
import sys
import types
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tools.gauntlet.attention_cases import AttentionCase, Inputs, Outputs
from tools.gauntlet.backends import Backend, NotOfferedError, sharded
from tools.gauntlet.block_on_cpu import install_flash_attn


def _attend(case: AttentionCase, inputs: Inputs) -> Outputs:
    if case.softcap or case.sinks or case.prefix or case.padding or case.chunk:
        raise NotOfferedError("its functions have no argument for this")
    install_flash_attn()
    # Its adapter for transformers imports a name that transformers 5.17 does not have.
    adapters: Any = types.ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules.setdefault(adapters.__name__, adapters)
    peer: Any = importlib.import_module("ring_flash_attn")

    window = (-1, -1) if case.window is None else (case.window - 1, 0)
    options = {"causal": case.causal, "window_size": window, "softmax_scale": case.scale}
    if not case.documents:
        call = lambda q, k, v: peer.ring_flash_attn_func(q, k, v, group=dist.group.WORLD, **options)  # noqa: E731
        return sharded(inputs, call)
    lengths = [length for row in case.documents for length in row]
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    *of_rank, keys = peer.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, case.causal, rank, world_size)

    def call_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = peer.llama3_flash_attn_varlen_func(
            q[0], k[0], v[0], *of_rank, heads_k_stride=1, local_k_slice=keys, group=dist.group.WORLD, **options
        )
        return out[None]  # type: ignore[no-any-return]

    q, k, v, dout = (x.flatten(0, 1)[None] for x in inputs[:4])
    flat = Inputs(q, k, v, dout, None)
    found = sharded(flat, call_packed)
    return Outputs(*(x.reshape(case.batch, case.seq_len, *x.shape[2:]) for x in found.named().values()))


BACKENDS = [
    Backend(
        name="ring-flash-attn",
        package="ring-flash-attn",
        install="pip install ring-flash-attn",
        attend=_attend,
        setup="ring_flash_attn_func, and for documents llama3_flash_attn_varlen_func, with flash_attn on the CPU, in "
        "bfloat16",
        dtype=torch.bfloat16,
        documented=dict.fromkeys(("window", "window of documents"), 'its README: "window_size is not supported"'),
    )
]
