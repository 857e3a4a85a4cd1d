"""Linear layer and softmax cross entropy in one: the logits exist for one tile of tokens only.

With one number as the result, the gradients of hidden, weight and bias are computed in the forward, tile by
tile, while the tile's logits are there; the backward multiplies all of them by what is only known then. With
one loss per token (reduction "none") every token has its own factor, so the backward computes the logits
again. Liger (arXiv:2410.10989) and cut cross entropy (arXiv:2411.09009) cut the problem along the same tokens.

Shape letters: T tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import ops
from .class_shard import ClassShard, Options, local_classes
from .errors import InputError
from .tiles import add_products_, as_gradients, check_tile_tokens, compute_dtype, linear, new_totals, tiles

LOGITS_BYTES = 64 * 2**20  # of one tile; products of fewer than MIN_TILE_TOKENS rows waste the machine
MIN_TILE_TOKENS = 256
WIDENED_CLASSES = 1024  # of halves that are widened for a product: a few MiB, which stay in the cache


def loss_tile_tokens(vocab_size: int, dtype: torch.dtype) -> int:
    """Tokens whose logits take LOGITS_BYTES, at least MIN_TILE_TOKENS, for products computed in dtype."""
    state = ops.state_dtype(dtype)
    token_bytes = vocab_size * (state.itemsize + (0 if dtype == state else dtype.itemsize))
    return max(MIN_TILE_TOKENS, LOGITS_BYTES // max(token_bytes, 1))


# A graph break under torch.compile: the tiles are a Python loop over buffers that are written in place.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def tiled_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    num_items: int | float | Tensor | None = None,
    tile_tokens: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """cross_entropy(hidden weight^T + bias, labels), never holding more logits than those of one tile.

    hidden (..., E), weight (V, E), bias (V); labels int64 (...), already aligned: labels[t] is the class of
    hidden[t], nothing is shifted here. With x = logit_scale * (hidden weight^T + bias),
    x' = softcap * tanh(x / softcap) (softcap 0: x' = x) and lse = log sum exp x', the loss of a token is

        (1 - label_smoothing) * (lse - x'[label]) + label_smoothing * (lse - mean x') + z_loss * lse ** 2

    A token labelled ignore_index takes no part: loss 0, gradient 0, no product. reduction: "none" one loss per
    token, shaped like labels; "sum"; "mean" the sum over num_items, or over the number of tokens that are not
    ignored. With num_items, the number of labels over all ranks and accumulated batches, a shard without a
    label returns exactly 0, with a graph; without it, the mean of nothing is nan, as it is in torch.

    The result is float32 (float64 for float64 hidden), also for bfloat16. tile_tokens: None bounds the logits
    of a tile to LOGITS_BYTES. Differentiable once, with respect to hidden, weight and bias.

    group: weight (v, E) and bias (v) hold this rank's share of the classes, in the order of the ranks and of any
    size; hidden, labels and everything else are the same on all ranks of the group. So is the loss, and so is the
    gradient of hidden, which is summed over the ranks. A weight that is a DTensor with placement Shard(0) brings its
    group along. The softmax goes over all classes; see class_shard.py.

    InputError: shapes, dtypes or options that do not fit together, a label outside [0, V), num_items not above 0.
    RingMismatch: the ranks of the group were not given the same hidden size, labels or options.
    """
    for name, number in (("label_smoothing", label_smoothing), ("softcap", softcap), ("z_loss", z_loss)):
        if not 0.0 <= number < math.inf or (name == "label_smoothing" and number > 1.0):
            raise InputError(f"{name} is {number}, expected {'0..1' if name == 'label_smoothing' else 'at least 0'}")
    if not math.isfinite(logit_scale):
        raise InputError(f"logit_scale is {logit_scale}, expected a finite number")
    if tile_tokens is not None:
        check_tile_tokens(tile_tokens)
    weight, bias, mesh_group = local_classes(weight, bias)
    group = mesh_group if group is None else group
    _check(hidden, weight, labels, bias, reduction, min_classes=1 if group is None else 0)
    labels_flat = labels.reshape(-1)
    rows = torch.nonzero(labels_flat != ignore_index).squeeze(1)
    labels_flat = labels_flat[rows]
    denominator = 1.0 if reduction == "sum" else float(rows.numel())
    if num_items is not None:
        denominator = float(num_items)
        if reduction != "mean" or not 0.0 < denominator < math.inf:
            raise InputError(
                f'num_items is {denominator} with reduction "{reduction}", expected a number above 0 with "mean": '
                "it is what the sum of the losses is divided by"
            )
    dtype, want_grad = compute_dtype(hidden, weight), torch.is_grad_enabled()
    options = Options(label_smoothing, softcap, z_loss)
    shard = None
    if group is not None:
        facts = {
            "the number of tokens": labels.numel(),
            "the number of tokens with a label": rows.numel(),
            "a checksum of the labels": int((labels_flat * torch.arange(1, rows.numel() + 1, device=rows.device)).sum())
            % 2**52,
            "the hidden size": hidden.size(-1),
            "hidden.requires_grad": hidden.requires_grad and want_grad,
            "the size of a number": dtype.itemsize,
            "tile_tokens": tile_tokens or 0,
            "logit_scale": logit_scale,
            **options._asdict(),
        }
        shard = ClassShard.agree(group, weight.size(0), facts, hidden.device)
    num_classes = weight.size(0) if shard is None else shard.num_classes
    if rows.numel() and not 0 <= int(labels_flat.min()) <= int(labels_flat.max()) < num_classes:
        raise InputError(
            f"labels go from {int(labels_flat.min())} to {int(labels_flat.max())}, expected 0..{num_classes - 1} "
            f"or ignore_index {ignore_index}"
        )
    tile_tokens = tile_tokens or loss_tile_tokens(weight.size(0) if shard is None else shard.largest, dtype)
    job = _Job(rows, labels_flat, dtype, tile_tokens, logit_scale, options, shard)
    hidden_rows = hidden.flatten(0, -2)
    if reduction == "none":
        per_token: Tensor = _PerToken.apply(job, hidden_rows, weight, bias)  # type: ignore[no-untyped-call]
        return per_token.view(labels.shape)
    total: Tensor = _Reduced.apply(job, denominator, want_grad, hidden_rows, weight, bias)  # type: ignore[no-untyped-call]
    return total


def _check(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, reduction: str, min_classes: int
) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise InputError(f'reduction is {reduction!r}, expected "mean", "sum" or "none"')
    if hidden.dtype not in ops.FLOAT_DTYPES or hidden.dim() < 2:
        raise InputError(f"hidden is {hidden.dtype} of shape {tuple(hidden.shape)}, expected floats (..., tokens, E)")
    if weight.dim() != 2 or weight.size(1) != hidden.size(-1) or weight.size(0) < min_classes:
        raise InputError(f"weight has shape {tuple(weight.shape)}, expected (vocab_size, {hidden.size(-1)})")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
        raise InputError(f"bias is {bias.dtype} {tuple(bias.shape)}, expected {weight.dtype} ({weight.size(0)},)")
    if labels.dtype != torch.int64 or labels.shape != hidden.shape[:-1]:
        raise InputError(
            f"labels are {labels.dtype} of shape {tuple(labels.shape)}, expected torch.int64 {tuple(hidden.shape[:-1])}"
        )


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which factors of dtype are multiplied: float32 for halves on a CPU that has no units for them,
    where torch's products of halves are 5 times as slow, or worse."""
    if device.type != "cpu" or dtype == ops.state_dtype(dtype):
        return dtype
    return dtype if dtype == torch.bfloat16 and ops.cpu_isa() == "avx512_bf16" else torch.float32


@dataclass(frozen=True)
class _Job:
    rows: Tensor  # int64: the tokens that are not ignored
    labels: Tensor  # int64: theirs
    dtype: torch.dtype  # to which the factors of the products are rounded
    tile_tokens: int
    logit_scale: float
    options: Options
    shard: ClassShard | None  # None: all classes are here

    def run(
        self, needed: tuple[bool, ...], factors: Tensor | None, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The loss of every token (T), and gradients of the sum of factors * loss (None: factors of 1), which are
        still to be multiplied by logit_scale.

        needed: whether hidden (T, E), weight (V, E), bias (V) need a gradient. hidden's has its dtype, or, summed
        over the ranks of a shard, the one that the other two have: float32 (float64).
        """
        state, product = ops.state_dtype(self.dtype), product_dtype(self.dtype, hidden.device)
        loss = hidden.new_zeros(hidden.size(0), dtype=state)
        dhidden = torch.zeros_like(hidden, dtype=state if self.shard else None) if needed[0] else None
        weight_total, bias_total = new_totals((weight, bias), needed[1:])
        num_rows = min(self.tile_tokens, self.rows.numel())
        product_buffer = hidden.new_empty((num_rows, weight.size(0)), dtype=product)
        # bfloat16 logits are exact in float32, and their gradient is then not rounded before dW is summed.
        state_buffer = None if product == state else torch.empty_like(product_buffer, dtype=state)
        # All classes at once, or as many as are to be widened at a time.
        num_columns = max(1, weight.size(0)) if product == self.dtype else WIDENED_CLASSES
        with torch.autocast(hidden.device.type, enabled=False):
            for tile in tiles(self.rows.numel(), self.tile_tokens):
                rows, labels = self.rows[tile], self.labels[tile]
                x = hidden[rows].to(self.dtype).to(product)  # (t, E)
                products = product_buffer[: x.size(0)]
                for columns in tiles(weight.size(0), num_columns):
                    part, part_bias = weight[columns], None if bias is None else bias[columns]
                    part_bias = None if part_bias is None else part_bias.to(self.dtype).to(product)
                    linear(x, part.to(self.dtype).to(product), part_bias, products[:, columns])
                logits = products if state_buffer is None else state_buffer[: x.size(0)].copy_(products)
                if self.logit_scale != 1.0:
                    logits.mul_(self.logit_scale)
                loss[rows] = self._cross_entropy_(logits, labels, any(needed))
                if not any(needed):
                    continue
                dlogits = logits if factors is None else logits.mul_(factors[rows, None])
                self._add_products_(weight_total, bias_total, dlogits, x, labels)
                if dhidden is not None:
                    products.copy_(dlogits)
                    dx = torch.zeros_like(x)
                    for columns in tiles(weight.size(0), num_columns):
                        dx.addmm_(products[:, columns], weight[columns].to(self.dtype).to(product))
                    dhidden[rows] = dx.to(dhidden.dtype)
        if self.shard is not None and dhidden is not None:
            self.shard.sum_(dhidden)
        return loss, [dhidden, weight_total, bias_total]

    def _add_products_(
        self, weight_total: Tensor | None, bias_total: Tensor | None, dlogits: Tensor, x: Tensor, labels: Tensor
    ) -> None:
        """`add_products_`, with what comes from the labels, p - 1 of a token, added after what comes from all other
        classes, p: in one sum the few large terms would round every small one."""
        if weight_total is None or self.shard is not None or x.device.type != "cpu":  # on a GPU no fixed order
            return add_products_(weight_total, bias_total, dlogits, x)
        rows = torch.arange(labels.numel())
        of_labels = dlogits[rows, labels]
        dlogits[rows, labels] = 0
        add_products_(weight_total, None, dlogits, x)
        weight_total.index_add_(0, labels, of_labels[:, None] * x.to(weight_total.dtype))
        dlogits[rows, labels] = of_labels
        add_products_(None, bias_total, dlogits, x)

    def _cross_entropy_(self, logits: Tensor, labels: Tensor, want_grad: bool) -> Tensor:
        """The loss of every token; the logits become its gradient if want_grad."""
        if self.shard is not None:
            return self.shard.cross_entropy_fwd_bwd_(logits, labels, self.options, want_grad)
        loss, lse = (logits.new_empty(labels.numel()) for _ in range(2))
        ops.cross_entropy_fwd_bwd_(logits, labels, loss, lse, -1, *self.options, want_grad)  # -1: none is ignored
        return loss


class _PerToken(torch.autograd.Function):
    """reduction "none": the backward computes the logits again, now that every token's factor is known."""

    @staticmethod
    def forward(ctx: Any, job: _Job, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.job = job
        ctx.save_for_backward(hidden, weight, bias)
        loss, _ = job.run((False, False, False), None, hidden, weight, bias)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        _, gradients = ctx.job.run(ctx.needs_input_grad[1:], dloss * ctx.job.logit_scale, *ctx.saved_tensors)
        return None, *as_gradients(gradients, ctx.saved_tensors)


class _Reduced(torch.autograd.Function):
    """reduction "sum" and "mean": the gradients are made in the forward, their common factor is known later."""

    @staticmethod
    def forward(
        ctx: Any,
        job: _Job,
        denominator: float,
        want_grad: bool,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.job, ctx.denominator = job, denominator
        ctx.save_for_backward(hidden, weight, bias)
        needed = ctx.needs_input_grad[3:] if want_grad else (False, False, False)
        loss, ctx.gradients = job.run(needed, None, hidden, weight, bias)
        return (loss.sum(dtype=torch.float64) / denominator).to(loss.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place, so good for one backward only
        if gradients is None:
            _, gradients = ctx.job.run(ctx.needs_input_grad[3:], None, *ctx.saved_tensors)
        # The mean of no token has no gradient. One dim: a factor without dims would be rounded to bfloat16.
        factor = (dtotal * (ctx.job.logit_scale / (ctx.denominator or 1.0))).view(1)
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(factor)
        return None, None, None, *as_gradients(gradients, ctx.saved_tensors)
