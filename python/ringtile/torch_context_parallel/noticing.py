"""What a model does inside a RingMode that the ring does not see: noticed by the functions it calls, and refused.

Attention must come as scaled_dot_product_attention or flex_attention to run as a ring. Other ways to it would silently
attend this rank's tokens only. Noticed are: softmax of scores that a product of two activations gave (eager attention),
PyTorch's fused kernels by their own names, convolutions along the tokens, dropout, positions that count a shard's
tokens from 0, labels that are shifted or averaged within a shard, and a window that the calling function knows of and
attention does not; this alone is read from its frame. Nothing is noticed in a compiled graph.

Shape letters: B batch, S global tokens, N local tokens, W ranks.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ringtile.errors import InputError, RefusedError
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence
from ringtile.torch_context_parallel.scope import AttentionScope
from ringtile.transport.groups import transport_of

_PRODUCTS = frozenset(
    (torch.matmul, torch.bmm, torch.baddbmm, torch.einsum, Tensor.matmul, Tensor.__matmul__, Tensor.bmm, Tensor.baddbmm)
)
_SOFTMAXES = frozenset((F.softmax, torch.softmax, torch.special.softmax, Tensor.softmax))
_DROPOUTS = frozenset(
    (F.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout, torch.dropout)
)
_ADDITIONS = frozenset((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__))
_KERNELS = ("_scaled_dot_product_", "_flash_attention", "_efficient_attention", "_cudnn_attention", "flash_attn")


class ShardedBuffer(NamedTuple):
    """A buffer of `context_parallel`, which holds local tokens inside, and its global content."""

    local: Tensor
    full: Tensor
    seq_dim: int


class Noticing:
    """One RingMode's look at every function that is called inside it."""

    def __init__(self, scope: AttentionScope, buffers: Sequence[ShardedBuffer] = ()) -> None:
        self._scope = scope
        self._buffers = buffers
        self.made_positions: ShardedBuffer | None = None  # those of a model that got whole inputs
        self._scores: set[int] = set()  # numbers of elements of products that may be scores
        self._windows: dict[tuple[ShardedSequence, int], bool] = {}  # whether the sequence's mask is as narrow

    @functools.cached_property
    def _counts(self) -> WeakTensorKeyDictionary:
        """Tensors that count a shard's tokens from 0. Made in eager calls: torch.compile cannot trace its making."""
        return WeakTensorKeyDictionary()

    @functools.cached_property
    def _world_size(self) -> int:
        return transport_of(self._scope.group).world_size

    def before(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Refuses the call, or returns what it must return instead of the function's own result; None: call it."""
        if func in _SOFTMAXES:
            self._check_softmax(*args, **kwargs)
        elif func in _DROPOUTS and self._world_size > 1:
            self._check_dropout(func.__name__, *args, **kwargs)
        elif func is torch.conv1d and self._world_size > 1:
            self._check_convolution(*args, **kwargs)
        elif func is torch.diff and "prepend" in kwargs:
            return self._position_steps(args[0] if args else kwargs["input"])
        elif func in (F.pad, F.cross_entropy) and self._world_size > 1:
            self._check_loss(func, *args, **kwargs)
        elif isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            self._check_kernel(str(func))
        return None

    def after(self, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        """Remembers products that may be scores, those of two activations that have a dim of N keys; and counts."""
        if not isinstance(result, Tensor):
            return
        if func is torch.arange or (self._counts and args and isinstance(args[0], Tensor) and args[0] in self._counts):
            self._follow_count(func, args, result)
        if func not in _PRODUCTS or result.dim() < 3:
            return
        operands = [x for x in args if isinstance(x, Tensor)]
        if any(x.dim() < 3 or isinstance(x, nn.Parameter) for x in operands):
            return
        if any(self._is_of_tokens(result, dim) for dim in range(1, result.dim())):
            self._scores.add(result.numel())

    def _is_of_tokens(self, x: Tensor, dim: int) -> bool:
        """Whether x has N entries in dim; where only calls tell N, as many as in another dim, the queries'."""
        sequence, size = self._scope.sequence, x.size(dim)
        if sequence is None:
            return size > 1 and list(x.shape).count(size) > 1
        return size == sequence.layout.local_len(sequence.rank)

    # ---- attention by other names -------------------------------------------------------------------

    def _check_softmax(self, input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> None:
        if dim is None or input.numel() not in self._scores or not self._is_of_tokens(input, dim):
            return
        raise self._told(
            RefusedError(
                f"softmax of scores {tuple(input.shape)} between this rank's own tokens: attention written as matmul "
                "and softmax (eager attention) hides from the ring; call scaled_dot_product_attention "
                "(attn_implementation='sdpa' in transformers)"
            )
        )

    def _check_kernel(self, name: str) -> None:
        if any(kernel in name for kernel in _KERNELS):
            raise self._told(
                RefusedError(f"{name} attends this rank's tokens only; call nn.functional.scaled_dot_product_attention")
            )

    def _check_convolution(self, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
        """Along this rank's tokens, perhaps padded by up to a width on both sides."""
        sequence, num_tokens, width = self._scope.sequence, input.size(-1), weight.size(-1)
        if sequence is None or width == 1:
            return
        if 0 <= num_tokens - sequence.layout.local_len(sequence.rank) <= 2 * (width - 1):
            raise self._told(
                RefusedError(
                    f"conv1d of width {width} along {num_tokens} tokens of this rank's, whose neighbors on other "
                    "ranks it would not see; call ringtile.causal_conv1d"
                )
            )

    def _check_dropout(
        self, name: str, input: Tensor, p: float = 0.5, training: bool = False, *_: Any, **__: Any
    ) -> None:
        if p > 0 and training:
            raise self._told(
                RefusedError(
                    f"{name} with p {p}: ranks would not draw what one process draws; set its probability to 0"
                )
            )

    def check_window(self, caller: types.FrameType, local_len: int, is_causal: bool) -> None:
        """A window that the function calling attention knows of, and does not pass on as a mask, is in our mask.

        transformers drops a sliding window where it is not shorter than the tokens that it sees.
        """
        while caller.f_code.co_name == "__torch_function__" and caller.f_back is not None:  # of modes inside
            caller = caller.f_back
        window = _window_of(caller)
        sequence = self._scope.sequence
        seq_len = local_len * self._world_size if sequence is None else sequence.seq_len
        if window is None or window >= seq_len:
            return
        if sequence is not None and self._scope.is_masked:
            key = (sequence, window)
            if key not in self._windows:
                mask = sequence.causal.mask if is_causal else sequence.mask
                windowed = mask & IntervalMask.sliding_window(seq_len, window) if mask.key_begin is None else None
                self._windows[key] = (windowed or mask.last_keys(window)) == mask
            if self._windows[key]:
                return
        raise self._told(
            RefusedError(
                f"{caller.f_code.co_name} has a sliding window of {window} tokens, but passes no mask of it for the "
                f"{seq_len} tokens of the sequence; give it to context_parallel(..., "
                f"mask=IntervalMask.sliding_window({seq_len}, {window})), if all layers have it"
            )
        )

    # ---- what transformers' models derive from the local tokens -------------------------------------

    def _position_steps(self, position_ids: Tensor) -> Tensor | None:
        """The steps between positions, by which transformers finds packed documents: of the global sequence.

        Those of a shard jump where its runs meet. Steps of 1 make transformers call attention with is_causal and no
        mask, which is right where the positions go on by 1, or the context's mask keeps the documents apart.
        """
        buffer = self._buffer_of(position_ids) if self._world_size > 1 else None
        if buffer is None or buffer.full.dim() > 2 or buffer.local.size(buffer.seq_dim) != position_ids.size(-1):
            return None
        positions = buffer.full.movedim(buffer.seq_dim, -1)
        scope = self._scope
        documents = IntervalMask.from_position_ids(positions.reshape(-1, positions.size(-1)))
        unpacked = documents.begin.count_nonzero() == 0
        if not unpacked:
            mask = scope.sequence.causal.mask if scope.is_masked and scope.sequence is not None else None
            if mask is None or not _keeps_apart(mask, documents):
                raise self._told(
                    RefusedError(
                        "position_ids of packed documents, which context_parallel must know of: pass it "
                        "mask=IntervalMask.from_position_ids(position_ids)"
                    )
                )
        return torch.ones_like(position_ids)

    @functools.cached_property
    def _counted_len(self) -> int | None:
        """N, if the positions of this rank's tokens are not 0 to N; else, and where only calls tell N, None."""
        sequence = self._scope.sequence
        if sequence is None:
            return None
        positions = sequence.layout.positions(sequence.rank)
        return None if positions.equal(torch.arange(len(positions))) else len(positions)

    def _follow_count(self, func: Callable[..., Any], args: tuple[Any, ...], result: Tensor) -> None:
        """Refuses a count of this rank's tokens that becomes a number of the model: an embedding, or a float.

        As integers they may as well be indices of local tokens. args[0] is a count; of arange, its length.
        """
        if func is torch.arange:
            if args not in ((self._counted_len,), (0, self._counted_len)):
                return
        elif not result.is_floating_point():
            if func in _ADDITIONS:
                is_count = type(args[1]) is int and args[1] == 0
            else:
                is_count = result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
            if not is_count:
                return
        if not result.is_floating_point():
            self._counts[result] = True
            return
        raise self._told(
            InputError(
                f"positions of {self._counted_len} tokens that count from 0 on every rank: the model got no "
                "position_ids, or makes its own; pass position_ids=torch.arange(S)[None], one of the buffers of "
                "context_parallel"
            )
        )

    def _check_loss(self, func: Callable[..., Any], input: Tensor, target: Any = None, *_: Any, **options: Any) -> None:
        """Labels among the buffers are not shifted within a shard, nor averaged over the targets of a shard."""
        labels = input if func is F.pad else target
        buffer = self._buffer_of(labels)
        if buffer is None or labels.is_floating_point() or labels.numel() != buffer.local.numel():
            return
        if func is F.pad:
            got = "are shifted"
        elif options.get("reduction", "mean") != "mean" or self._has_equal_counts(buffer, options):
            return
        else:
            got = "are averaged over targets, of which ranks have different numbers,"
        raise self._told(
            RefusedError(
                f"labels {got} within a shard; expected them shifted before the block (shift_labels of a transformers "
                "model) and among its buffers, and a sum over them, by the number of targets of the whole batch over "
                "the number of ranks that are averaged (num_items_in_batch)"
            )
        )

    def _has_equal_counts(self, labels: ShardedBuffer, options: dict[str, Any]) -> bool:
        """Whether each rank has as many targets as another."""
        sequence = self._scope.sequence
        assert sequence is not None  # there are buffers
        layout = sequence.layout
        is_target = labels.full.movedim(labels.seq_dim, 0) != options.get("ignore_index", -100)
        ranks = range(layout.world_size)
        return len({int(is_target[layout.positions(rank).to(is_target.device)].sum()) for rank in ranks}) == 1

    def _buffer_of(self, x: Any) -> ShardedBuffer | None:
        """The buffer whose shard x is, or a view of it from its beginning."""
        buffers = (*self._buffers, self.made_positions) if isinstance(x, Tensor) else ()
        return next((each for each in buffers if each is not None and each.local.data_ptr() == x.data_ptr()), None)

    def _told(self, error: RefusedError | InputError) -> RefusedError | InputError:
        return self._scope.told(error)


def _keeps_apart(mask: IntervalMask, documents: IntervalMask) -> bool:
    """Whether no query of a mask attends another document; of a tree, the token before the restart of its positions."""
    if mask.key_begin is None or mask.key_end is None:
        return (mask & documents) == mask
    before = torch.arange(-1, mask.seq_len - 1)  # of each query, the key before it
    restarts = documents.begin == before + 1
    attends = (mask.begin <= before) & (before < mask.end) & (mask.key_end.roll(1, 1) > before + 1)
    return not bool((restarts & attends)[:, 1:].any())


def _window_of(caller: types.FrameType) -> int | None:
    """The sliding window among the arguments of the calling function, or of the module it belongs to."""
    variables = caller.f_locals
    for arguments in (variables, variables.get("kwargs")):
        if isinstance(arguments, dict) and "sliding_window" in arguments:
            window = arguments["sliding_window"]
            return window if isinstance(window, int) else None
    for name in ("module", "self"):
        window = getattr(variables.get(name), "sliding_window", None)
        if isinstance(window, int):
            return window
    return None
