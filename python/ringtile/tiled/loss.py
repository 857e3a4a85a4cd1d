"""Fused linear layer and softmax cross entropy: logits exist for one tile of tokens at a time.

When the result is a scalar, the forward also computes the gradients of hidden, weight and bias, while each tile's
logits are in memory; the backward only scales them by the incoming gradient. With reduction "none" each token has a
factor of its own, so the backward recomputes the logits. Liger (arXiv:2410.10989) and cut cross entropy
(arXiv:2411.09009) also work tile by tile along the tokens.

Shape letters: T tokens, t tokens of a tile, E hidden size, V vocabulary, v classes of this rank.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringtile import arguments, derivatives, ops
from ringtile.checksum import checksum
from ringtile.errors import InputError, shown
from ringtile.tiled.host import HostTensor, RowReader, RowWriter, empty_like, multiply_
from ringtile.tiled.tiles import check_tile_tokens, compute_dtype, device_type, linear, tiles
from ringtile.tiled.vocab_parallel import LossOptions, Softmax, VocabParallel, group_of, local_vocab_shard
from ringtile.tiled.weight_grad import (
    add_linear_grads_,
    new_grad_sums,
    round_grad_sums,
    sums_16_bit_products,
)
from ringtile.transport.agreement import HeaderValue
from ringtile.transport.groups import Group, transport_of

_NAME = "the tiled loss"
# The default bound on the logits of one tile. Each tile reads and writes the sum of the weight's gradient, which is
# larger than a CPU's caches anyway; a GPU also needs many rows for its products. It is no share of the memory that is
# free: all ranks and the planner choose the same.
LOGITS_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
MIN_TILE_TOKENS = 256  # products with fewer rows use the machine poorly
WIDENED_CLASSES = 1024  # half-precision weights are widened this many classes at a time: a few MiB, which stay in cache


def loss_tile_tokens(vocab_size: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the default tile: as many tokens as fit LOGITS_BYTES, at least MIN_TILE_TOKENS. dtype: that of the
    product."""
    state = ops.state_dtype(dtype)
    token_bytes = vocab_size * (state.itemsize + (0 if dtype == state else dtype.itemsize))
    num_bytes = LOGITS_BYTES.get(device_type(device), LOGITS_BYTES["cpu"])
    return max(MIN_TILE_TOKENS, num_bytes // max(token_bytes, 1))


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
    group: Group | None = None,
) -> Tensor:
    """Return cross_entropy(hidden weight^T + bias, labels); only the logits of one tile exist at a time.

    - hidden (..., E), weight (V, E), bias (V).
    - labels int64 (...), already aligned: labels[t] is the class of hidden[t], nothing is shifted here. Tokens labeled
      ignore_index have loss 0 and gradient 0, and their logits are not computed.
    - reduction: "none" returns one loss per token, shaped like labels; "sum" their sum; "mean" the sum divided by
      num_items, or by the number of tokens that are not ignored.
    - num_items: the number of labels over all ranks and accumulated batches. With it, a shard without labels returns
      exactly 0, with a graph; without it, or where it is 0, the mean of nothing is nan, as in torch, and has
      gradients of 0.
    - tile_tokens: None chooses the largest tile whose logits fit the LOGITS_BYTES of the device.
    - group: vocabulary parallel; weight (v, E) and bias (v) hold this rank's shard of the classes, in rank order, of
      any size. Everything else must be the same on all ranks of the group; so are the loss and the gradient of hidden,
      which is summed over the ranks. A DTensor weight with placement Shard(0) supplies its own group. The softmax is
      over all classes; see vocab_parallel.py.

    With x = logit_scale * (hidden weight^T + bias),
    x' = softcap * tanh(x / softcap) (softcap 0: x' = x) and lse = log sum exp x', the loss of a token is

        (1 - label_smoothing) * (lse - x'[label]) + label_smoothing * (lse - mean x') + z_loss * lse ** 2

    The result is float32 (float64 for float64 hidden), also for bfloat16. Differentiable once, with respect to hidden,
    weight and bias.

    InputError: shapes, dtypes or options that do not fit together, a label outside [0, V), num_items below 0, or
    0 where there are labels.
    RingMismatchError: the ranks of the group were given different hidden sizes, labels or options.
    """
    call = LossCall(
        hidden, weight, labels, bias, reduction, ignore_index, label_smoothing, logit_scale, softcap, z_loss
    )
    result: Tensor = tiled_outputs(call._replace(num_items=num_items, tile_tokens=tile_tokens, group=group))
    return result


class LossCall(NamedTuple):
    """The arguments of `tiled_linear_cross_entropy`."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None
    reduction: str
    ignore_index: int
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    softcap: float = 0.0
    z_loss: float = 0.0
    num_items: int | float | Tensor | None = None
    tile_tokens: int | None = None
    group: Group | None = None
    chunk_tokens: int | None = None  # no tile has tokens of two chunks of so many tokens
    total: Callable[[Tensor], Tensor] | None = None  # of the losses (T): their sum over all ranks; None: this rank's
    entropy: bool = False  # whether to compute that of each token too, with reduction "none"


# A graph break under torch.compile: the loop over tiles writes its buffers in place.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def tiled_outputs(call: LossCall) -> Tensor:
    """Return the loss of each token (...), or its reduction; with the entropy, (..., 2)."""
    hidden, weight, labels, bias, reduction, ignore_index, label_smoothing, logit_scale, softcap, z_loss = call[:10]
    num_items, tile_tokens, group, chunk_tokens, total_of, entropy = call[10:]
    group = group_of(weight, group)
    with transport_of(group).propagate_errors(_NAME):
        for name, x in (("hidden", hidden), ("weight", weight), ("labels", labels), ("bias", bias)):
            if x is not None or name != "bias":
                arguments.check_tensor(name, x)
        label_smoothing = arguments.check_number("label_smoothing", label_smoothing)
        softcap, z_loss = arguments.check_number("softcap", softcap), arguments.check_number("z_loss", z_loss)
        logit_scale = arguments.check_number("logit_scale", logit_scale)
        ignore_index = arguments.check_int("ignore_index", ignore_index)
        for name, number in (("label_smoothing", label_smoothing), ("softcap", softcap), ("z_loss", z_loss)):
            if not 0.0 <= number < math.inf or (name == "label_smoothing" and number > 1.0):
                expected = "0..1" if name == "label_smoothing" else "at least 0"
                raise InputError(f"{name} is {number}, expected {expected}")
        if not math.isfinite(logit_scale):
            raise InputError(f"logit_scale is {logit_scale}, expected a finite number")
        if tile_tokens is not None:
            check_tile_tokens(tile_tokens)
        weight, bias = local_vocab_shard(weight, bias)
        _check(hidden, weight, labels, bias, reduction, min_classes=1 if group is None else 0)
        arguments.check_devices("hidden", hidden, weight=weight, labels=labels, bias=bias)
        if hidden.device.type == "meta":
            raise InputError("hidden is on meta; expected a real device: the loss reads the labels")
        derivatives.check_once(_NAME, hidden, weight, bias, vmap=False)
        labels_flat = labels.reshape(-1)
        known = _Known.of(labels_flat, ignore_index, num_items)
        rows = torch.nonzero_static(known.counted, size=known.num_labels).squeeze(1)
        labels_flat = labels_flat[rows]
        denominator = 1.0 if reduction == "sum" else float(rows.numel())
        if num_items is not None:
            denominator = arguments.check_number("num_items", known.num_items)
            is_none = denominator == 0.0 and rows.numel() == 0  # a step without labels: nan, with gradients of 0
            if reduction != "mean" or not (0.0 < denominator < math.inf or is_none):
                raise InputError(
                    f'num_items is {denominator} with reduction "{reduction}" and {rows.numel()} labels, expected a '
                    'number above 0 with "mean", or 0 where there are no labels: the sum of the losses is divided by it'
                )
        dtype, want_grad = compute_dtype(hidden, weight), torch.is_grad_enabled()
        arguments.check_scale_and_softcap(dtype, logit_scale, softcap)
        options = LossOptions(label_smoothing, softcap, z_loss)
        vocab_parallel = None
        if group is not None:
            facts: dict[str, HeaderValue] = {
                "the number of tokens": labels.numel(),
                "the number of tokens with a label": rows.numel(),
                "a checksum of the labels": int(checksum(rows, labels_flat)),
                "the hidden size": hidden.size(-1),
                "whether hidden, weight or bias needs a gradient": want_grad
                and any(x is not None and x.requires_grad for x in (hidden, weight, bias)),
                "hidden.requires_grad": hidden.requires_grad and want_grad,
                "the size of a number": dtype.itemsize,
                "tile_tokens": tile_tokens or 0,
                "reduction": reduction,
                "whether the entropy is asked for": entropy,
                "the divisor": denominator,
                "logit_scale": logit_scale,
                **options._asdict(),
            }
            vocab_parallel = VocabParallel.agree(transport_of(group), weight.size(0), facts, hidden.device)
        num_classes = weight.size(0) if vocab_parallel is None else vocab_parallel.num_classes
        if rows.numel() and not 0 <= known.smallest <= known.largest < num_classes:
            raise InputError(
                f"labels go from {known.smallest} to {known.largest}, expected 0..{num_classes - 1} or ignore_index "
                f"{ignore_index}"
            )
        if tile_tokens is None:  # the same on all ranks: each tile is a collective
            max_local_classes = weight.size(0) if vocab_parallel is None else vocab_parallel.max_local_classes
            tile_tokens = loss_tile_tokens(max_local_classes, dtype, hidden.device)
        kept = rows, labels_flat, dtype, tile_tokens, chunk_tokens
        job = Job(*kept, logit_scale, options, vocab_parallel, total_of or _sum, entropy)
        if group is not None and isinstance(hidden, HostTensor):
            hidden = hidden.clone()  # on the device, where its gradient is summed over the ranks
        hidden_rows = hidden.flatten(0, -2)
        if reduction == "none":
            per_token: Tensor = _PerToken.apply(job, hidden_rows, weight, bias)  # type: ignore[no-untyped-call]
            return per_token.view(*labels.shape, *job.outputs)
        total: Tensor = _Reduced.apply(job, denominator, want_grad, hidden_rows, weight, bias)  # type: ignore[no-untyped-call]
        return total


def _sum(losses: Tensor) -> Tensor:
    return losses.sum(dtype=torch.float64)


def _check(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, reduction: str, min_classes: int
) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise InputError(f'reduction is {shown(reduction)}, expected "mean", "sum" or "none"')
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


class _Known(NamedTuple):
    """Which labels are not ignored, and what the host must know of these."""

    counted: Tensor  # bool (T)
    num_labels: int
    smallest: int
    largest: int
    num_items: int | float | Tensor | None

    @classmethod
    def of(cls, labels: Tensor, ignore_index: int, num_items: int | float | Tensor | None) -> _Known:
        """labels int64 (T). In one copy from a GPU, for which the host waits once."""
        counted, limits = labels != ignore_index, torch.iinfo(torch.int64)
        if labels.numel() == 0:
            return cls(counted, 0, 0, 0, num_items)
        numbers = [counted.sum(), labels.where(counted, limits.max).amin(), labels.where(counted, limits.min).amax()]
        # A number that is none, or that wants a gradient, stays as it is, to be refused.
        if isinstance(num_items, Tensor) and num_items.numel() == 1 and num_items.device == labels.device:
            arguments.check_storage("num_items", num_items)
            if not num_items.requires_grad and not num_items.is_complex():
                numbers.append(num_items.reshape(()))
        num_labels, smallest, largest, *items = map(float, torch.stack([each.double() for each in numbers]).cpu())
        return cls(counted, int(num_labels), int(smallest), int(largest), items[0] if items else num_items)


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which matrices of dtype are multiplied.

    float32 for half precision on a CPU without instructions for it: torch's own products are at least 5 times slower.
    """
    if device_type(device) != "cpu" or dtype == ops.state_dtype(dtype) or sums_16_bit_products(device, dtype):
        return dtype
    return torch.float32


@dataclass(frozen=True)
class Job:
    """One call of the loss, checked: everything but the tensors that autograd saves."""

    rows: Tensor  # int64: the tokens that are not ignored
    labels: Tensor  # int64: their labels
    dtype: torch.dtype  # hidden, weight and bias are rounded to it before they are multiplied
    tile_tokens: int
    chunk_tokens: int | None  # no tile has tokens of two chunks of so many; None: tiles are of tile_tokens
    logit_scale: float
    options: LossOptions
    vocab_parallel: VocabParallel | None  # None: this rank holds all classes
    total: Callable[[Tensor], Tensor]  # of the losses (T): float64 ()
    entropy: bool

    @property
    def outputs(self) -> tuple[int, ...]:
        """Return the shape of what is computed of each token."""
        return (2,) if self.entropy else ()

    def _tiles(self) -> Iterator[slice]:
        """Yield the tiles of the rows; the planner leaves out those that equal others."""
        if self.chunk_tokens is None:
            yield from tiles(self.rows.numel(), self.tile_tokens)
            return
        counts = torch.unique_consecutive(self.rows // self.chunk_tokens, return_counts=True)[1].tolist()
        for begin, end in itertools.pairwise(itertools.accumulate(counts or [0], initial=0)):
            for tile in tiles(end - begin, self.tile_tokens):
                yield slice(begin + tile.start, begin + tile.stop)

    def propagate_errors(self, op: str) -> contextlib.AbstractContextManager[None]:
        """Around what may fail on one rank: told to the others, if there are any."""
        return (
            contextlib.nullcontext()
            if self.vocab_parallel is None
            else self.vocab_parallel.transport.propagate_errors(op)
        )

    def run(
        self,
        direction: str,
        needed: tuple[bool, ...],
        factors: Tensor | None,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the outputs of each token (T, *outputs), and the gradients of sum(factors * outputs), not yet
        multiplied by logit_scale.

        factors (T, *outputs): None for ones. needed: whether hidden (T, E), weight (V, E) and bias (V) need a gradient.
        The gradients of weight and bias are float32 (float64 for float64); hidden's has hidden's dtype, except under
        vocabulary parallelism, where it is summed over the ranks in float32 (float64).
        """
        if self.vocab_parallel is None:
            return self._run(needed, factors, hidden, weight, bias)
        with self.vocab_parallel.call(direction, self.rows.numel(), hidden.device):
            return self._run(needed, factors, hidden, weight, bias)

    def _run(
        self, needed: tuple[bool, ...], factors: Tensor | None, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, list[Tensor | None]]:
        state, product = ops.state_dtype(self.dtype), product_dtype(self.dtype, hidden.device)
        outputs = torch.zeros(hidden.size(0), *self.outputs, dtype=state, device=hidden.device)
        read, dhidden = RowReader(hidden, self.rows, self.tile_tokens), None
        if needed[0]:
            empty = empty_like(hidden, dtype=state if self.vocab_parallel else None)
            dhidden = RowWriter(empty, self.rows, self.tile_tokens)
        weight_sum, bias_sum = new_grad_sums((weight, bias), needed[1:])
        num_rows = min(self.tile_tokens, self.rows.numel())
        product_buffer = torch.empty((num_rows, weight.size(0)), dtype=product, device=hidden.device)
        # In the dtype of the sums: the loss is computed in it, and no product is rounded twice.
        state_buffer = None if product == state else torch.empty_like(product_buffer, dtype=state)
        # If weights must be widened, a few classes at a time; otherwise all classes at once.
        num_columns = max(1, weight.size(0)) if product == self.dtype else WIDENED_CLASSES
        # As autograd does, with its error. To keep dlogits whole would cost a second product, and help the classes of
        # labels alone: the others' p was moved by more when the logits were rounded. float16 would lose p below 6e-5.
        round_dlogits = product == torch.bfloat16 and sums_16_bit_products(hidden.device, product)
        with torch.autocast(hidden.device.type, enabled=False):
            for tile in self._tiles():
                rows, labels = self.rows[tile], self.labels[tile]
                x = read.take(tile).to(self.dtype).to(product)  # (t, E)
                products = product_buffer[: x.size(0)]
                for columns in tiles(weight.size(0), num_columns):
                    part, part_bias = weight[columns], None if bias is None else bias[columns]
                    part_bias = None if part_bias is None else part_bias.to(self.dtype).to(product)
                    linear(x, part.to(self.dtype).to(product), part_bias, products[:, columns])
                logits = products if state_buffer is None else state_buffer[: x.size(0)].copy_(products)
                if self.logit_scale != 1.0:
                    logits.mul_(self.logit_scale)
                of_rows = None if factors is None else factors[rows]
                outputs[rows] = self.outputs_of_tile_(logits, labels, of_rows, any(needed))
                if not any(needed):
                    continue
                if round_dlogits or dhidden is not None:
                    products.copy_(logits)  # their gradient now
                if weight_sum is not None:
                    self._add_weight_grad_(weight_sum, logits, products if round_dlogits else logits, x, labels)
                add_linear_grads_(None, bias_sum, logits, x)
                if dhidden is not None:
                    dx = torch.zeros_like(x)
                    for columns in tiles(weight.size(0), num_columns):
                        dx.addmm_(products[:, columns], weight[columns].to(self.dtype).to(product))
                    dhidden.put(tile, dx.to(dhidden.out.dtype))
        of_hidden = None if dhidden is None else dhidden.close()
        if self.vocab_parallel is not None and of_hidden is not None:
            self.vocab_parallel.sum_(of_hidden)
        return outputs, [of_hidden, weight_sum, bias_sum]

    def _add_weight_grad_(
        self, weight_sum: Tensor, dlogits: Tensor, factors: Tensor, x: Tensor, labels: Tensor
    ) -> None:
        """`add_linear_grads_` of factors, which are dlogits or their roundings; on a CPU, the labels' terms (p - 1,
        large) are not rounded, and added after those of all other classes (p, small).

        In a single sum, each small term would be rounded to the size of the large ones. Only on a CPU: a GPU's
        index_add_ has no fixed order, so results would differ from run to run.
        """
        if device_type(x.device) != "cpu":
            return add_linear_grads_(weight_sum, None, factors, x)
        own = torch.arange(labels.numel(), device="cpu"), labels
        if self.vocab_parallel is not None:
            own = self.vocab_parallel.own(labels, factors.size(1))
        of_labels, kept = dlogits[own], factors[own]
        factors[own] = 0
        add_linear_grads_(weight_sum, None, factors, x)
        weight_sum.index_add_(0, own[1], of_labels[:, None] * x[own[0]].to(weight_sum.dtype))
        factors[own] = kept

    def outputs_of_tile_(self, logits: Tensor, labels: Tensor, factors: Tensor | None, want_grad: bool) -> Tensor:
        """Return the outputs of a tile (t, *outputs). If want_grad, its logits (t, v) are replaced by the gradient of
        sum(factors * outputs); factors (t, *outputs), None for ones."""
        by_kernel = self.vocab_parallel is None and not (self.entropy and want_grad)
        if by_kernel:  # the same bits with entropies and without
            loss, lse = (logits.new_empty(labels.numel()) for _ in range(2))
            # -1: no token is ignored
            ops.cross_entropy_fwd_bwd_(logits, labels, loss, lse, -1, *self.options, want_grad)
            if want_grad and factors is not None:
                logits.mul_(factors[:, None])
            if not self.entropy:
                return loss
        softmax = Softmax.of(logits, labels, self.options, self.vocab_parallel, self.entropy)
        if not by_kernel:
            loss = softmax.loss
        if want_grad:
            softmax.gradient_(loss.new_ones(loss.shape) if factors is None else factors)
        return torch.stack([loss, softmax.entropy], dim=1) if self.entropy else loss


class _PerToken(torch.autograd.Function):
    """reduction "none": the backward recomputes the logits, once each token's factor is known."""

    @staticmethod
    def forward(ctx: Any, job: Job, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.job = job
        ctx.save_for_backward(hidden, weight, bias)
        loss, _ = job.run("forward", (False, False, False), None, hidden, weight, bias)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        def compute() -> list[Tensor | None]:
            factors = dloss * ctx.job.logit_scale
            _, gradients = ctx.job.run("backward", ctx.needs_input_grad[1:], factors, *inputs)
            return round_grad_sums(gradients, inputs)

        with ctx.job.propagate_errors(f"{_NAME} backward"):
            inputs = ctx.saved_tensors
            return None, *derivatives.gradients(
                _NAME, compute, dloss, *inputs, propagate_errors=ctx.job.propagate_errors
            )


class _Reduced(torch.autograd.Function):
    """reduction "sum" and "mean": the forward computes the gradients, the backward multiplies them by one factor."""

    @staticmethod
    def forward(
        ctx: Any,
        job: Job,
        denominator: float,
        want_grad: bool,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.job, ctx.denominator = job, denominator
        ctx.save_for_backward(hidden, weight, bias)
        needed = ctx.needs_input_grad[3:] if want_grad else (False, False, False)
        loss, ctx.gradients = job.run("forward", needed, None, hidden, weight, bias)
        return (job.total(loss) / denominator).to(loss.dtype)

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        def compute() -> list[Tensor | None]:
            gradients, ctx.gradients = ctx.gradients, None  # scaled in place below: a second backward recomputes them
            if gradients is None:
                _, gradients = ctx.job.run("backward", ctx.needs_input_grad[3:], None, *inputs)
            # `or 1.0`: the mean over no tokens has gradient 0. view(1): a 0-dim factor would be rounded to bfloat16.
            factor = (dtotal * (ctx.job.logit_scale / (ctx.denominator or 1.0))).view(1)
            for gradient in gradients:
                if gradient is not None:
                    multiply_(gradient, factor, ctx.job.tile_tokens)
            return round_grad_sums(gradients, inputs)

        with ctx.job.propagate_errors(f"{_NAME} backward"):
            inputs = ctx.saved_tensors
            return (
                None,
                None,
                None,
                *derivatives.gradients(_NAME, compute, dtotal, *inputs, propagate_errors=ctx.job.propagate_errors),
            )
