"""The Trainer's `tiled_loss: true`: a causal language model trains without materializing its logits.

In training, the output projection returns a TiledLogits, a placeholder for logits, and the model's loss function
computes the loss from it with `tiled_linear_cross_entropy`. A weight that FSDP2 or ZeRO-3 has sharded is gathered once
for all tiles. In eval mode both behave as they did before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ringtile.errors import ConfigError, InputError, RefusedError, shown
from ringtile.hf.batch import ShardedBatch, active_batch
from ringtile.hf.config import Config
from ringtile.hf.feature import Feature
from ringtile.hf.liger import has_fused_loss
from ringtile.hf.patches import Patches
from ringtile.ops import state_dtype
from ringtile.tiled.loss import LossCall, loss_tile_tokens, tiled_outputs
from ringtile.tiled.tiles import compute_dtype, tile_limit, tiles

_OPERATORS = (
    *("add", "radd", "sub", "rsub", "rtruediv", "floordiv", "pow", "matmul", "rmatmul"),
    *("iadd", "isub", "neg", "abs", "lt", "le", "gt", "ge"),
    *("getitem", "setitem", "len", "iter", "bool", "array"),
)
_SHARDING = ("torch.distributed.fsdp", "deepspeed.")  # their hooks gather and free weights; they do not touch outputs


class TiledLogits:
    """Stands for logits of shape (..., V) that are never computed: scale * head(hidden), softcapped.

    head: the output projection, weight (V, E); hidden (..., E). softcap None: not capped. A model may multiply and
    divide the logits by numbers and cap them once, `c * tanh(x / c)` in any spelling; both become arguments of the
    loss.

    Deliberately not a tensor: DDP, FSDP and accelerate search a model's outputs for tensors. Only the loss function
    knows how to use it. Any other operation raises RefusedError, so that a model, a Trainer or a metric that changes or
    reads the logits does not silently get something wrong.
    """

    def __init__(
        self, head: nn.Linear, hidden: Tensor, scale: Fraction = Fraction(1), softcap: Fraction | None = None
    ) -> None:
        self.head, self.hidden = head, hidden
        self.scale, self.softcap = scale, softcap  # exact: x / 30 * 30 is x
        self.shape = torch.Size((*hidden.shape[:-1], head.out_features))
        self.dtype, self.device = compute_dtype(hidden, head.weight), hidden.device

    def float(self) -> TiledLogits:
        """Returns self: the loss is computed in float32 anyway."""
        return self

    def contiguous(self) -> TiledLogits:
        return self

    def to(self, dtype: torch.dtype) -> TiledLogits:
        """Returns self for the dtype of the loss; RefusedError for any other."""
        if dtype != state_dtype(self.dtype):
            raise _refused(f"to({dtype})")
        return self

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def tanh(self) -> TiledLogits:
        """softcap * tanh(x / softcap) with a softcap of 1; multiplying the result later changes the softcap."""
        if self.softcap is not None:
            raise _refused("a second tanh")
        return TiledLogits(self.head, self.hidden, self.scale, Fraction(1))

    def __mul__(self, factor: Any) -> TiledLogits:
        return self._times(factor, "mul", invert=False)

    __rmul__ = __imul__ = __mul__

    def __truediv__(self, divisor: Any) -> TiledLogits:
        return self._times(divisor, "truediv", invert=True)

    __itruediv__ = __truediv__

    def _times(self, number: Any, operation: str, invert: bool) -> TiledLogits:
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number) or not number:
            raise _refused(f"{operation} by {shown(number)}")
        factor = 1 / Fraction(number) if invert else Fraction(number)
        # f c tanh(x / c) = C tanh(f x / C) with C = |f| c
        softcap = None if self.softcap is None else self.softcap * abs(factor)
        return TiledLogits(self.head, self.hidden, self.scale * factor, softcap)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in (torch.tanh, nn.functional.tanh) and len(args) == 1 and not kwargs:
            return args[0].tanh()
        raise _refused(getattr(function, "__name__", str(function)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python probes for these: copy, pickle, dataclasses
        raise _refused(name)


def _refused(operation: str) -> RefusedError:
    return RefusedError(
        f"tiled_loss: {operation!r} was applied to the logits, which do not exist in training; expected a model that "
        "passes them to its loss function unchanged, multiplied by a number, or softcapped. Set tiled_loss: false, or "
        "call model.eval() before reading logits"
    )


def _refusing(operation: str) -> Callable[..., Any]:
    def method(self: TiledLogits, *args: Any) -> Any:
        raise _refused(operation)

    return method


for _operator in _OPERATORS:
    setattr(TiledLogits, f"__{_operator}__", _refusing(_operator))


def install_tiled_loss(model: PreTrainedModel, config: Config, patches: Patches) -> None:
    """Replaces the output projection's forward and the model's loss function by tiled versions, for training.

    A tile has config.tile_tokens tokens, or as many as the default tile of `tiled_linear_cross_entropy`, whichever is
    fewer.

    RefusedError: the loss is not transformers' causal one, or the projection is not a plain torch.nn.Linear.
    ConfigError: Liger has replaced the model's forward.
    """
    name = type(model).__name__
    if has_fused_loss(model):
        raise ConfigError(
            f"tiled_loss: the forward of {name} was replaced by one with Liger's fused loss, which needs no tiles; "
            "expected one of the two: set tiled_loss: false, or liger_kernel_config="
            "{'fused_linear_cross_entropy': False} (in axolotl liger_fused_linear_cross_entropy: false)"
        )
    if model.loss_function is not ForCausalLMLoss:
        raise RefusedError(
            f"tiled_loss: {name} computes its loss with {shown(model.loss_function)}, expected ForCausalLMLoss"
        )
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    in_parts = vars(head).get("forward") if _holds_classes(head) else None  # transformers' tensor parallelism
    if in_parts is None and (other := not_plain(head)):
        raise RefusedError(
            f"tiled_loss: the output projection of {name} is {other}, expected a plain torch.nn.Linear; "
            "remove it from the adapter's target_modules and modules_to_save"
        )
    forward = functools.partial(_head_forward, in_parts=in_parts)
    forward.__name__ = "forward"  # type: ignore[attr-defined]  # as TiledForward's
    patches.set(head, "forward", MethodType(forward, head))
    patches.set(model, "_loss_function", functools.partial(tiled_causal_lm_loss, config))


def _holds_classes(head: nn.Module) -> bool:
    """Whether each rank holds some of the classes of a torch.nn.Linear, so that the loss is vocabulary-parallel."""
    weight = getattr(head, "weight", None)
    return isinstance(weight, DTensor) and "tp" in (weight.device_mesh.mesh_dim_names or ())


def not_plain(head: nn.Module) -> str:
    """What an output projection is instead of a torch.nn.Linear, bare or under FSDP2, with its own forward; "" if it is
    one."""
    is_linear = type(head) is nn.Linear or (isinstance(head, FSDPModule) and nn.Linear in type(head).__bases__)
    if is_linear and "forward" not in vars(head):
        return ""
    replaced = " with a replaced forward" if "forward" in vars(head) else ""
    return f"a {type(head).__module__}.{type(head).__name__}{replaced}"


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _head_forward(
    head: nn.Linear,
    hidden: Tensor,
    loss: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None,
    *,
    in_parts: Callable[[Tensor], Tensor] | None = None,
) -> Tensor | TiledLogits:
    """Called by the model: TiledLogits in training, logits otherwise. in_parts: the forward of a head that ranks share.

    Called by the loss function with loss(hidden, weight, bias): returns that loss. Going through the module runs
    ZeRO-3's hooks, which gather the weight.
    """
    if loss is not None:
        return loss(hidden, head.weight, head.bias)
    if not head.training or tile_limit() == 0:
        batch = active_batch()
        if in_parts is not None or batch is None or batch.chunk_tokens is None:
            return nn.Linear.forward(head, hidden) if in_parts is None else in_parts(hidden)
        chunks = tiles(hidden.size(1), batch.chunk_tokens)
        return torch.cat([nn.Linear.forward(head, hidden[:, chunk]) for chunk in chunks], dim=1)
    for hooks in (head._forward_pre_hooks, head._forward_hooks, head._backward_pre_hooks, head._backward_hooks):
        for hook in hooks.values():
            if not (getattr(hook, "__module__", None) or "").startswith(_SHARDING):
                raise RefusedError(
                    f"tiled_loss: the output projection has a hook that would never see logits, {shown(hook)}; remove "
                    "it, or set tiled_loss: false"
                )
    return TiledLogits(head, hidden)


def tile_tokens_of(config: Config, vocab_size: int, dtype: torch.dtype, device: torch.device) -> int:
    """Tokens in a tile of the loss."""
    return min(config.tile_tokens, loss_tile_tokens(vocab_size, dtype, device))


def tiled_causal_lm_loss(
    config: Config,
    logits: Tensor | TiledLogits,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """transformers' ForCausalLMLoss, tiled: the same arguments, label shift, and mean or sum over items."""
    batch = active_batch()
    if batch is not None and batch.chunk_tokens is None:
        batch = None
    if not isinstance(logits, TiledLogits):
        if batch is not None and shift_labels is not None and num_items_in_batch is not None:
            of_tokens = logits.float().flatten(0, -2), shift_labels.flatten().to(logits.device)
            losses = nn.functional.cross_entropy(*of_tokens, ignore_index=ignore_index, reduction="none")
            return (_total(batch, losses) / num_items_in_batch).to(losses.dtype)
        plain: Tensor = ForCausalLMLoss(
            logits,
            labels,
            vocab_size,
            num_items_in_batch,  # type: ignore[arg-type]
            ignore_index,
            shift_labels,
            **kwargs,
        )
        return plain
    if vocab_size != logits.shape[-1]:
        raise RefusedError(
            f"tiled_loss: the config's vocab_size is {vocab_size}, the output projection has {logits.shape[-1]} "
            "classes; expected them to be equal"
        )
    if shift_labels is None:
        assert labels is not None
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    if shift_labels.numel() != logits.shape[:-1].numel():
        raise InputError(
            f"tiled_loss: labels of shape {tuple(shift_labels.shape)} for logits of shape {tuple(logits.shape)}; "
            "expected one label per token; do not combine logits_to_keep with labels"
        )
    tile_tokens = tile_tokens_of(config, vocab_size, logits.dtype, logits.device)
    options: dict[str, Any] = {
        "logit_scale": float(logits.scale),
        "softcap": float(logits.softcap or 0),
        "num_items": num_items_in_batch,
        "tile_tokens": min(tile_tokens, tile_limit() or tile_tokens),
    }
    if batch is not None:
        options |= {"chunk_tokens": batch.chunk_tokens, "total": functools.partial(_total, batch)}
    labels, head = shift_labels.reshape(logits.shape[:-1]).to(logits.device), logits.head

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = tiled_outputs(LossCall(hidden, weight, labels, bias, "mean", ignore_index, **options))
        return result

    if isinstance(head, FSDPModule):
        head.unshard()  # a no-op if still gathered from the call that returned the logits; the backward frees it
    if hasattr(head.weight, "ds_id"):  # ZeRO-3
        gathered: Tensor = head(logits.hidden, loss=loss)
        return gathered
    return loss(logits.hidden, head.weight, head.bias)


def _total(batch: ShardedBatch, losses: Tensor) -> Tensor:
    """This rank's part, 1 / W, of the sum of all ranks' losses (B N): chunk by chunk in the order of the sequence."""
    whole = batch.sequence.unshard(losses.view(-1, batch.sequence.local_len), 1)
    total = losses.new_zeros((), dtype=torch.float64)
    for chunk in tiles(whole.size(1), batch.chunk_tokens or whole.size(1)):  # padding at the end adds 0
        total += whole[:, chunk].contiguous().sum(dtype=torch.float64)
    return total / batch.sequence.world_size


FEATURE = Feature(
    frozenset({"forward", "_loss_function"}),
    lambda run, patches: install_tiled_loss(run.base, run.config, patches),
    key="tiled_loss",
)
