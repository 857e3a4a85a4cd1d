"""The cases of attention: what is attended, in global terms, and the published bug that each stands for.

Shape letters: B rows, S global tokens, H query heads, G kv heads, D head dim, V value head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ISSUES = "https://github.com/"


@dataclass(frozen=True)
class AttentionCase:
    """One call of attention, forward and backward. Rows of documents, or of padding, hold a tuple for each row."""

    name: str
    what: str
    bug: str  # that it stands for
    source: str  # an issue or a pull request, below ISSUES; or none is known
    batch: int = 1
    seq_len: int = 64
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 16
    value_dim: int = 16
    causal: bool = True
    documents: tuple[tuple[int, ...], ...] = ()  # their lengths, by row
    window: int | None = None  # tokens that a query attends, with itself
    chunk: int | None = None  # chunked attention: tokens of a chunk
    prefix: int = 0  # tokens at the begin that all tokens attend
    padding: tuple[tuple[int, int], ...] = ()  # [begin, end) of the real tokens, by row
    softcap: float = 0.0
    sinks: bool = False
    scale: float | None = None  # None: 1 / sqrt(D)
    steepness: float = 1.0  # of the queries: large scores

    @property
    def is_plain(self) -> bool:
        """Whether causal or full is all there is to know about its mask."""
        return not (self.documents or self.window or self.chunk or self.prefix or self.padding)

    def attends(self) -> Tensor:
        """Which key each query attends, (B, S, S). Queries of padding attend nothing."""
        query, key = torch.arange(self.seq_len)[:, None], torch.arange(self.seq_len)[None, :]
        allowed = (key <= query) | (key < self.prefix) if self.causal else torch.ones(query.size(0), query.size(0)) > 0
        if self.window is not None:
            allowed = allowed & (query - key < self.window)
        if self.chunk is not None:
            allowed = allowed & (query // self.chunk == key // self.chunk)
        rows = allowed.expand(self.batch, -1, -1)
        if self.documents:
            ids = self.document_ids()
            rows = rows & (ids[:, :, None] == ids[:, None, :])
        real = self.real()
        return rows & real[:, :, None] & real[:, None, :]

    def document_ids(self) -> Tensor:
        """(B, S)"""
        return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in self.documents])

    def position_ids(self) -> Tensor:
        """(B, S): they start again with each document; left padding counts from the first real token on."""
        if self.documents:
            return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in self.documents])
        rows = torch.arange(self.seq_len).repeat(self.batch, 1)
        if self.padding:
            rows -= torch.tensor(self.padding)[:, :1]
        return rows.clamp_min(0)

    def real(self) -> Tensor:
        """Which tokens are no padding, bool (B, S)."""
        real = torch.ones(self.batch, self.seq_len, dtype=torch.bool)
        for row, (begin, end) in enumerate(self.padding):
            real[row, :begin] = real[row, end:] = False
        return real

    def tensors(self, dtype: torch.dtype) -> Inputs:
        """The same numbers on every rank. No gradient comes back to padding."""
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        q = drawn(self.batch, self.seq_len, self.heads, self.head_dim) * self.steepness
        k = drawn(self.batch, self.seq_len, self.kv_heads, self.head_dim)
        v = drawn(self.batch, self.seq_len, self.kv_heads, self.value_dim)
        dout = drawn(self.batch, self.seq_len, self.heads, self.value_dim) * self.real()[..., None, None]
        sinks = drawn(self.heads) if self.sinks else None
        q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
        return Inputs(q, k, v, dout, None if sinks is None else sinks.to(dtype))


class Inputs(NamedTuple):
    """q (B, S, H, D), k (B, S, G, D), v (B, S, G, V), dout (B, S, H, V), sinks (H,) or None: whole, on every rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sinks: Tensor | None


@dataclass
class Outputs:
    """What a backend computes, whole again: out, dq, dk, dv and, with sinks, dsinks."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        named = {"out": self.out, "dq": self.dq, "dk": self.dk, "dv": self.dv}
        return named if self.dsinks is None else {**named, "dsinks": self.dsinks}


def exact(case: AttentionCase, inputs: Inputs, dtype: torch.dtype = torch.float64) -> Outputs:
    """Attention by its definition, in one process. In another dtype than float64: as eager attention of transformers,
    whose scores are rounded, whose softmax is in float32."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs[:3]]
    sinks = None if inputs.sinks is None else inputs.sinks.to(dtype).requires_grad_()
    out = dense(case, leaves[0], leaves[1], leaves[2], sinks)
    out.backward(inputs.dout.to(dtype))  # type: ignore[no-untyped-call]
    dq, dk, dv = (gradient(x) for x in leaves)
    return Outputs(out.detach(), dq, dk, dv, None if sinks is None else gradient(sinks))


def gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def dense(case: AttentionCase, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """Any number of heads, (B, S, heads, dim) -> (B, S, heads, V)."""
    groups = q.size(2) // k.size(2)
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (case.scale or 1 / math.sqrt(case.head_dim))
    scores = torch.tanh(scores / case.softcap) * case.softcap if case.softcap else scores
    scores = scores.masked_fill(~case.attends()[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    weights = scores.softmax(dim=-1, dtype=wide).nan_to_num(0.0)[..., : case.seq_len].to(q.dtype)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


UNEVEN = ((23, 9, 1, 31),)  # no edge of a document is an edge of a shard
CASES = [
    AttentionCase(
        "causal",
        "one causal row",
        "the ring's backward uses keys of another round",
        "huggingface/diffusers/issues/14265",
    ),
    AttentionCase(
        "bidirectional",
        "all tokens attend all",
        "wrong under head-tail balancing",
        "pytorch/pytorch/issues/141429",
        causal=False,
    ),
    AttentionCase(
        "documents",
        "a packed row of 4 documents, uneven",
        "a ring ignores packing",
        "axolotl-ai-cloud/axolotl/issues/3608",
        documents=UNEVEN,
    ),
    AttentionCase(
        "many documents",
        "22 short documents, several on a rank",
        "metadata of packing lost under another name",
        "NVIDIA-NeMo/RL/issues/4167",
        documents=((3,) * 21 + (1,),),
    ),
    AttentionCase(
        "rows of documents",
        "2 rows, packed differently",
        "boundaries of the first row for all",
        "NVIDIA-NeMo/Automodel/issues/2622",
        batch=2,
        documents=((23, 41), (7, 50, 7)),
    ),
    AttentionCase(
        "bidirectional documents",
        "packed documents of an encoder",
        "the mask of packing is causal",
        "NVIDIA-NeMo/Automodel/issues/2622",
        causal=False,
        documents=UNEVEN,
    ),
    AttentionCase(
        "window",
        "a sliding window of 11 tokens, across edges",
        "a window becomes full causal attention",
        "huggingface/accelerate/pull/4177",
        window=11,
    ),
    AttentionCase(
        "window of documents",
        "a window inside packed documents",
        "a window is dropped where rows are packed",
        "huggingface/accelerate/pull/4177",
        window=11,
        documents=UNEVEN,
    ),
    AttentionCase(
        "chunks",
        "chunked attention of Llama 4, 24 tokens",
        "chunks become full causal attention",
        "huggingface/accelerate/pull/4177",
        chunk=24,
    ),
    AttentionCase(
        "prefix",
        "a prefix of 20 tokens is attended by all",
        "a mask is dropped",
        "NVIDIA-NeMo/Automodel/issues/2622",
        prefix=20,
    ),
    AttentionCase(
        "padding right",
        "2 rows of 64 and 37 tokens",
        "padding is attended",
        "NVIDIA-NeMo/Automodel/issues/2622",
        batch=2,
        padding=((0, 64), (0, 37)),
    ),
    AttentionCase(
        "padding left",
        "2 rows of 64 and 37 tokens, padded before",
        "padding is attended",
        "NVIDIA-NeMo/Automodel/issues/2622",
        batch=2,
        padding=((0, 64), (27, 64)),
    ),
    AttentionCase(
        "grouped heads",
        "8 query heads, 4 kv heads",
        "gradients of keys are wrong",
        "NVIDIA/Megatron-LM/issues/1464",
        heads=8,
    ),
    AttentionCase(
        "kv heads < ranks",
        "8 query heads, 2 kv heads",
        "kv heads are repeated before the ring",
        "pytorch/torchtitan/issues/1283",
        heads=8,
        kv_heads=2,
    ),
    AttentionCase(
        "one kv head",
        "4 query heads, 1 kv head",
        "kv heads are repeated before the ring",
        "pytorch/torchtitan/issues/1283",
        kv_heads=1,
    ),
    AttentionCase(
        "odd heads",
        "6 heads",
        "heads that do not divide",
        "deepspeedai/DeepSpeed/pull/6392",
        heads=6,
        kv_heads=6,
    ),
    AttentionCase(
        "value dim",
        "MLA: head dim 24, value dim 16",
        "values of another width",
        "",
        head_dim=24,
    ),
    AttentionCase(
        "softcap",
        "scores capped at 2",
        "an argument swallowed by **kwargs",
        "PrimeIntellect-ai/prime-rl/issues/3397",
        softcap=2.0,
    ),
    AttentionCase(
        "sinks",
        "a sink for each head",
        "sinks swallowed by **kwargs",
        "PrimeIntellect-ai/prime-rl/issues/3397",
        sinks=True,
    ),
    AttentionCase(
        "scale",
        "another scale of the scores",
        "an argument swallowed by **kwargs",
        "PrimeIntellect-ai/prime-rl/issues/3397",
        scale=0.5,
    ),
    AttentionCase(
        "steep",
        "scores of several hundred",
        "partial results merged in a narrow type",
        "zhuzilin/ring-flash-attention/issues/42",
        steepness=64.0,
    ),
    AttentionCase(
        "odd length",
        "61 tokens",
        "the tokens that do not divide are dropped",
        "NVIDIA/TransformerEngine/issues/1930",
        seq_len=61,
    ),
    AttentionCase(
        "short",
        "5 tokens, fewer than two for each rank",
        "lengths that do not divide",
        "deepspeedai/DeepSpeed/issues/5177",
        seq_len=5,
    ),
]
