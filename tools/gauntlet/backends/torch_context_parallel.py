"""torch.distributed.tensor.experimental.context_parallel, alone and behind accelerate's hooks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tools.gauntlet.attention_cases import AttentionCase, Inputs, Outputs
from tools.gauntlet.backends import Backend, NotOfferedError
from tools.gauntlet.block_on_cpu import install_aten_flash_attention

if TYPE_CHECKING:
    from transformers import Trainer

    from tools.gauntlet.training_cases import TrainingCase


def _attend(accelerate: bool, case: AttentionCase, inputs: Inputs) -> Outputs:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    if case.softcap or case.sinks:
        raise NotOfferedError("scaled_dot_product_attention has no softcap and no sinks")
    install_aten_flash_attention()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    buffers = [x.transpose(1, 2).clone(memory_format=torch.contiguous_format) for x in inputs[:4]]
    if not case.is_plain:
        buffers.append(case.attends()[:, None].contiguous())
    module = _SelfAttention(case)
    if accelerate:
        from accelerate.big_modeling import _attach_context_parallel_hooks

        _attach_context_parallel_hooks(_Model(module, case))
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers), no_restore_buffers=set(buffers)):
        q, k, v, dout = buffers[:4]
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = module(*leaves, attention_mask=None if case.is_plain else buffers[4])
        out.backward(dout)
        local = [out.detach(), *(x.grad for x in leaves)]
        whole = context_parallel_unshard(mesh, [x.contiguous() for x in local if x is not None], [2] * 4)
    out, dq, dk, dv = (x.transpose(1, 2) for x in whole)
    return Outputs(out, dq, dk, dv)


class _SelfAttention(nn.Module):
    """What a model of transformers does with its queries, keys and values."""

    def __init__(self, case: AttentionCase) -> None:
        super().__init__()
        self.case = case

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, is_causal: bool | None = None
    ) -> Tensor:
        causal = self.case.causal and attention_mask is None if is_causal is None else is_causal
        gqa = self.case.kv_heads != self.case.heads
        return nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_mask, is_causal=causal, scale=self.case.scale, enable_gqa=gqa
        )


class _Model(nn.Module):
    """As much of a model as accelerate looks at."""

    def __init__(self, self_attn: nn.Module, case: AttentionCase) -> None:
        super().__init__()
        self.self_attn = self_attn
        kinds = ["chunked_attention"] if case.chunk else ["sliding_attention"] if case.window else None
        self.config: Any = SimpleNamespace(layer_types=kinds)


def _trainer(case: TrainingCase, make: Callable[..., Trainer]) -> Trainer:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, ParallelismConfig

    if case.ringtile:
        raise NotOfferedError("it has no tiles")
    install_aten_flash_attention()
    # It sets up FSDP2, without which it shards no sequence, on accelerators only: this rank's CPU is shown as one.
    os.environ.update(ACCELERATE_TORCH_DEVICE="cpu", ACCELERATE_BYPASS_DEVICE_MAP="true")
    PartialState._prepare_backend = lambda *given: ("gloo", DistributedType.MULTI_GPU)
    sharded = ParallelismConfig(cp_size=dist.get_world_size())
    return make(use_cpu=False, fsdp=True, fsdp_config={"version": 2}, parallelism_config=sharded)


_CAUSAL_ONLY = "its source: dropping the mask is only equivalent for plain causal attention"
BACKENDS = [
    Backend(
        name="torch",
        package="torch",
        install="pip install torch",
        attend=functools.partial(_attend, False),
        setup="context_parallel around scaled_dot_product_attention, with CUDA's flash attention on the CPU; masks as "
        "attn_mask",
    ),
    Backend(
        name="accelerate",
        package="accelerate",
        install="pip install accelerate",
        attend=functools.partial(_attend, True),
        trainer=_trainer,
        multiple=4,
        setup="the same behind the hooks that Accelerator.prepare attaches to a model with cp_size",
        documented=dict.fromkeys(
            ("documents", "many documents", "rows of documents", "bidirectional documents", "bidirectional", "prefix",
             "padding left", "packed", "packed, padded inside"),
            _CAUSAL_ONLY,
        ),
    ),
]  # fmt: skip
