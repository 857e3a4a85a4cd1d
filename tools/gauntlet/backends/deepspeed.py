"""DeepSpeed: Ulysses of its sequence layer, and ALST, which transformers calls sp_backend deepspeed."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tools.gauntlet.attention_cases import AttentionCase, Inputs, Outputs, dense
from tools.gauntlet.backends import Backend, NotOfferedError, chunk, sharded


def _init() -> None:
    deepspeed: Any = importlib.import_module("deepspeed")
    backend_of_torch: Any = importlib.import_module("deepspeed.comm.torch")
    backend_of_torch.build_shm_op = lambda: None  # of all-reduces in shared memory, which it would compile now
    deepspeed.init_distributed("gloo")


def _layer(case: AttentionCase, inputs: Inputs) -> Outputs:
    layer: Any = importlib.import_module("deepspeed.sequence.layer")

    if case.sinks:
        raise NotOfferedError("DistributedAttention cuts q, k and v only, no parameter of a head")
    _init()

    class Local(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return dense(case, q, k, v, None)

    attention = layer.DistributedAttention(Local(), dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return sharded(inputs, lambda q, k, v: attention(q, k, v, 0))


def _alst(case: AttentionCase, inputs: Inputs) -> Outputs:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if case.softcap or case.sinks:
        raise NotOfferedError("the kernel that it wraps here, sdpa, has no softcap and no sinks")
    _init()
    alst: Any = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
    attention = alst.UlyssesSPAttentionHF(
        attn=sdpa_attention_forward,
        batch_size=case.batch,
        attn_head_count=case.heads,
        attn_head_size=case.head_dim,
        kv_head_count=case.kv_heads,
        num_hidden_layers=1,
        process_group=dist.group.WORLD,
        seq_length_is_variable=True,
    )
    module: Any = SimpleNamespace(
        is_causal=case.causal, num_key_value_groups=case.heads // case.kv_heads, training=True
    )
    positions = chunk(case.position_ids())

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        # Its wrapper discards the attention mask that transformers has made, and hands on the rest.
        out = attention(module, q, k, v, None, position_ids=positions, scaling=case.scale, sliding_window=case.window)[
            0
        ]
        return out.unflatten(-1, (case.heads, case.value_dim))  # type: ignore[no-any-return]

    return sharded(inputs, call)


_NO_MASK = 'its source: "SP relies on position_ids (not attention_mask)"'
_NO_DOCUMENTS = "accelerate's guide: \"sdpa doesn't handle multiple samples combined into one correctly\""
BACKENDS = [
    Backend(
        name="deepspeed",
        package="deepspeed",
        install="pip install deepspeed",
        imports=("deepspeed.runtime.sequence_parallel.ulysses_sp", "transformers.integrations.sdpa_attention"),
        attend=_layer,
        setup="DistributedAttention around attention of the whole sequence, which is given the case's mask",
    ),
    Backend(
        name="deepspeed-alst",
        package="deepspeed",
        install="pip install deepspeed",
        imports=("deepspeed.runtime.sequence_parallel.ulysses_sp", "transformers.integrations.sdpa_attention"),
        attend=_alst,
        setup="UlyssesSPAttentionHF around transformers' sdpa, as sp_backend deepspeed has it",
        documented={
            **dict.fromkeys(("prefix", "padding left"), _NO_MASK),
            **dict.fromkeys(
                ("documents", "many documents", "rows of documents", "bidirectional documents", "window of documents"),
                _NO_DOCUMENTS,
            ),
        },
    ),
]
