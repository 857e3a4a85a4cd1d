"""What `ringtile verify` compares: ops on all ranks, with the model's sizes, against plain float64 on one; trainings.

Shape letters: B batch, S global tokens, H query heads, G kv heads, D head dim, E hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

import ringtile
from ringtile.hf.config import Config
from ringtile.hf.features.mlp import find_mlps
from ringtile.hf.features.norm import find_norms
from ringtile.sequence.layout import PADDED_LIKE, resolved
from ringtile.sequence.mask import IntervalMask

MAX_TOKENS = 320  # in a check: enough for uneven shards and tiles; float64 scores of all pairs still fit
MAX_VOCABULARY = 4096
EPS = 2.0**-24  # half an ulp of 1 in float32
# Two runs of the same training may differ by this much, relative. Losses and norms are float32 sums of the same terms
# in another order: an ulp is 1.2e-7, a sum is off by a few, and every step starts from weights that are off as much.
LIMITS = {"losses": 1e-6, "grad_norms": 1e-5}


def max_rel_diff(values: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest |value - reference| / |reference|; NaN if any is NaN, infinite if the counts differ or
    are 0."""
    if len(values) != len(reference) or not values:
        return math.inf
    pairs = zip(values, reference, strict=True)
    diffs = [0.0 if x == y else abs(x - y) / abs(y) if y else math.inf for x, y in pairs]
    return math.nan if any(map(math.isnan, diffs)) else max(diffs)


class Proof(NamedTuple):
    """One line of the table: the largest |got - exact| over the largest |exact| of its tensors, and its limit."""

    name: str
    difference: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.difference <= self.limit  # False for NaN


def prove_ops(model: PreTrainedModel, config: Config, group: dist.ProcessGroup | None) -> list[Proof]:
    """Checks the ops that training this model with this configuration uses. A collective of the group.

    The limit is the worst case of a float32 sum: its number of terms times half an ulp.
    """
    torch.manual_seed(0)  # the same numbers on every rank
    text = model.config.get_text_config()
    proofs = []
    if config.context_parallel_size > 1:
        proofs += [_ring(name, mask, text, config, group) for name, mask in _masks(text).items()]
    if config.tiled_mlp and (mlps := find_mlps(model)):
        name, mlp = next(iter(mlps.items()))
        proofs.append(_tiled(f"tiled MLP, {name}", mlp, text.hidden_size, config.tile_tokens, False))
    if config.tiled_norm and (norms := find_norms(model)):
        name, norm = next(iter(norms.items()))
        (weight,) = norm.parameters()
        proofs.append(_tiled(f"tiled norm, {name}", norm, weight.numel(), config.tile_tokens, True))
    if config.tiled_loss:
        proofs.append(_tiled_loss(text))
    return proofs


def first_difference(got: Tensor, expected: Tensor) -> str:
    """Where, and from what, a tensor differs first; "": it has the same bits."""
    same = got.view(torch.uint8) == expected.view(torch.uint8) if got.dim() else (got == expected)[None]
    if bool(same.all()):
        return ""
    place = tuple((got != expected).nonzero()[0].tolist()) if got.dim() else ()
    return f"{list(place)} is {got[place].item()!r}, in one process {expected[place].item()!r}"


def _masks(text: Any) -> dict[str, IntervalMask]:
    lengths = [MAX_TOKENS // 8, MAX_TOKENS // 2, MAX_TOKENS - MAX_TOKENS // 8 - MAX_TOKENS // 2]
    causal, documents = IntervalMask.causal(MAX_TOKENS), IntervalMask.documents(lengths)
    window = getattr(text, "sliding_window", None) or MAX_TOKENS // 4
    return {
        "causal": causal,
        f"{len(lengths)} documents": documents,
        f"window {window}": causal & IntervalMask.sliding_window(MAX_TOKENS, window),
        "tree of 3 nodes": IntervalMask.shared_prefix(lengths[1], [lengths[0], lengths[2]]),
    }


def _ring(name: str, mask: IntervalMask, text: Any, config: Config, group: dist.ProcessGroup | None) -> Proof:
    """Ring attention forward and backward: out, dq, dk, dv."""
    heads, kv_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    named = resolved(config.layout, mask)
    multiple = ringtile.Layout.multiple(PADDED_LIKE.get(named, named), config.context_parallel_size)
    seq_len = MAX_TOKENS + -MAX_TOKENS % multiple
    mask = mask.padded(seq_len - MAX_TOKENS)
    layout = ringtile.Layout.of_mask(named, mask, config.context_parallel_size)
    shapes = [(1, seq_len, heads, head_dim), *[(1, seq_len, kv_heads, head_dim)] * 2, (1, seq_len, heads, head_dim)]
    q, k, v, gradient = (torch.randn(shape) for shape in shapes)

    sequence = ringtile.ShardedSequence(mask, layout, group, scheme=config.context_parallel_scheme)
    local = [sequence.shard(x, dim=1).requires_grad_() for x in (q, k, v)]
    out = ringtile.ring_attention(local[0], local[1], local[2], sequence)
    out.backward(sequence.shard(gradient, dim=1))
    got = [sequence.unshard(_present(x), dim=1) for x in (out.detach(), *(x.grad for x in local))]

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    reference = _dense_attention(mask, *exact)
    reference.backward(gradient.double())  # type: ignore[no-untyped-call]
    terms = seq_len * heads // kv_heads + head_dim
    return _compare(f"ring attention, {name}", got, [reference, *(_present(x.grad) for x in exact)], terms)


def _dense_attention(mask: IntervalMask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v with the mask as a matrix; 0 for a query that attends no key. (1, S, H, D)"""
    groups, keys = q.size(2) // k.size(2), torch.arange(q.size(1))
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    seen = (mask.begin[..., None] <= keys) & (keys < mask.end[..., None])  # (1, S, S)
    if mask.key_begin is not None and mask.key_end is not None:
        seen &= (mask.key_begin[:, None] <= keys[:, None]) & (keys[:, None] < mask.key_end[:, None])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.size(-1))
    weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(dim=-1).nan_to_num(0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def _tiled(title: str, module: nn.Module, width: int, tile_tokens: int, use_own_forward: bool) -> Proof:
    """One module of the model in uneven tiles against the same one untiled: output, dx, dweights."""
    x, gradient = torch.randn(1, MAX_TOKENS, width), torch.randn(1, MAX_TOKENS, width)
    tile_tokens = min(tile_tokens, MAX_TOKENS // 3 + 1)

    def run(module: nn.Module, dtype: torch.dtype, tiled: bool) -> list[Tensor]:
        module.to(dtype).zero_grad()
        leaf = x.to(dtype, copy=True).requires_grad_()
        outputs: Any = ringtile.tiled_mlp(module, leaf, tile_tokens, use_own_forward) if tiled else module(leaf)
        out: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        out.backward(gradient.to(dtype))  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        return [out.detach(), _present(leaf.grad), *(one.clone() for one in gradients)]

    got = run(module, torch.float32, True)
    exact = run(module, torch.float64, False)
    widest = max(dim for parameter in module.parameters() for dim in parameter.shape)
    return _compare(title, got, exact, max(widest, MAX_TOKENS) + width)


def _tiled_loss(text: Any) -> Proof:
    """Linear cross entropy in uneven tiles against untiled logits: loss, dhidden, dweight."""
    vocab_size = min(text.vocab_size, MAX_VOCABULARY)
    hidden, weight = torch.randn(MAX_TOKENS, text.hidden_size), torch.randn(vocab_size, text.hidden_size)
    weight /= math.sqrt(text.hidden_size)
    labels = torch.randint(vocab_size, (MAX_TOKENS,)).masked_fill(torch.rand(MAX_TOKENS) < 0.2, -100)

    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    loss = ringtile.tiled_linear_cross_entropy(*leaves, labels, tile_tokens=MAX_TOKENS // 3 + 1)
    loss.backward()
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    reference = functional.cross_entropy(exact[0] @ exact[1].T, labels)
    reference.backward()  # type: ignore[no-untyped-call]
    got = [loss.detach(), *(_present(x.grad) for x in leaves)]
    return _compare(
        "tiled loss",
        got,
        [reference, *(_present(x.grad) for x in exact)],
        max(vocab_size, MAX_TOKENS) + text.hidden_size,
    )


def _present(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _compare(name: str, got: Iterable[Tensor], exact: Iterable[Tensor], terms: int) -> Proof:
    differences = [
        float((one.double() - other.detach()).abs().max() / other.detach().abs().max())
        for one, other in zip(got, exact, strict=True)
    ]
    largest = math.nan if any(map(math.isnan, differences)) else max(differences)
    return Proof(name, largest, terms * EPS)
