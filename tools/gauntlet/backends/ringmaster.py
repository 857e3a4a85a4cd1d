"""axolotl-ringmaster: the attention functions that it registers with transformers, behind its own sharding.

transformers makes no mask for a name that has no mask function, as these have none, so they get none here.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tools.gauntlet.attention_cases import AttentionCase, Inputs, Outputs
from tools.gauntlet.backends import Backend, NotOfferedError, sharded, unchunk


def _attend(kind: str, case: AttentionCase, inputs: Inputs) -> Outputs:
    rm: Any = importlib.import_module("ringmaster")
    shards: Any = importlib.import_module("ringmaster.shard")

    if kind == "ulysses" and (case.softcap or case.sinks):
        raise NotOfferedError("the kernel that it wraps here, sdpa, has no softcap and no sinks")
    sizes = {"ring": (1, 4), "ulysses": (4, 1), "usp": (2, 2)}[kind]
    config = rm.RingmasterConfig(size=dist.get_world_size(), ulysses_size=sizes[0], ring_size=sizes[1])
    runtime = rm.setup(config, num_kv_heads=case.kv_heads, device_type="cpu", inner_attn="sdpa")
    batch = {"input_ids": torch.zeros(case.batch, case.seq_len, dtype=torch.long), "position_ids": case.position_ids()}
    if case.padding:
        batch["attention_mask"] = case.real().long()
    batch = shards.prepare_global_batch(batch)
    positions = batch["position_ids"]
    padded = case.seq_len + -case.seq_len % dist.get_world_size()
    runtime.varlen = shards.varlen_meta(positions, padded)
    kinds = ["chunked_attention"] if case.chunk else ["sliding_attention"] if case.window else ["full_attention"]
    module: Any = SimpleNamespace(
        config=SimpleNamespace(layer_types=kinds, attention_chunk_size=case.chunk, _attn_implementation=None),
        layer_idx=0,
        is_causal=case.causal,
        num_key_value_groups=case.heads // case.kv_heads,
    )
    options: dict[str, Any] = {"scaling": case.scale, "sliding_window": case.window}
    sinks = None if inputs.sinks is None else inputs.sinks.clone().requires_grad_()
    if case.softcap:
        options["softcap"] = case.softcap
    if sinks is not None:
        options["s_aux"] = sinks
    function = _function(kind)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return function(module, q, k, v, None, **options)[0]  # type: ignore[no-any-return]

    def shard(x: Tensor) -> Tensor:
        local, _ = shards.shard_batch({**batch, "x": x}, cp_rank=dist.get_rank(), cp_size=dist.get_world_size())
        return local["x"]  # type: ignore[no-any-return]

    return sharded(inputs, call, shard, lambda x: unchunk(x)[:, : case.seq_len], sinks=sinks)


def _function(kind: str) -> Any:
    """With the block that the package has for CPUs, "math"."""
    strategy: Any = importlib.import_module(f"ringmaster.strategies.{kind}")
    if kind == "ulysses":
        return strategy.make_ulysses_attention("sdpa")
    config: Any = importlib.import_module("ringmaster.config")
    make = strategy.make_ring_attention if kind == "ring" else strategy.make_usp_attention
    return make("math", "math", config.RotateMethod.ALLGATHER)


_SETUP = {
    "ring": "its ring, all-gather, with its own block for CPUs",
    "ulysses": "its Ulysses around transformers' sdpa",
    "usp": "its USP, Ulysses 2 x ring 2, with its own block for CPUs",
}
_CAUSAL = {
    "ring": 'its source: "requires an unpadded causal sequence"',
    "ulysses": 'its source: "supports dense causal attention only"',
    "usp": "as its ring and its Ulysses",
}
BACKENDS = [
    Backend(
        name=f"ringmaster-{kind}",
        package="axolotl-ringmaster",
        install="pip install axolotl-ringmaster",
        attend=functools.partial(_attend, kind),
        setup=setup,
        documented=dict.fromkeys(("prefix", "bidirectional", "bidirectional documents"), _CAUSAL[kind]),
    )
    for kind, setup in _SETUP.items()
]
