"""What a model does inside a RingMode that the ring does not see: noticed by the functions it calls, and refused.

Attention must come as scaled_dot_product_attention or flex_attention to run as a ring. Other ways to it would silently
attend this rank's tokens only. Noticed are: softmax of scores that a product of two activations gave (eager attention),
PyTorch's fused kernels by their own names, convolutions along the tokens, dropout, positions that count a shard's
tokens from 0, labels that are shifted or averaged within a shard, and a window or chunk that the calling function knows
of and attention does not; this alone is read from its frame. Nothing is noticed in a compiled graph.

Shape letters: B batch, S global tokens, N local tokens, W ranks.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringtile.attn.attention import is_plain
from ringtile.errors import InputError, RefusedError
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence
from ringtile.torch_context_parallel.scope import AttentionScope
from ringtile.transport.groups import transport_of

_PRODUCTS = frozenset(
    (torch.matmul, torch.bmm, torch.baddbmm, torch.einsum, Tensor.matmul, Tensor.__matmul__, Tensor.bmm, Tensor.baddbmm)
)
_JOINS = frozenset((torch.cat, torch.concat, torch.concatenate))
_SOFTMAXES = frozenset((F.softmax, torch.softmax, torch.special.softmax, Tensor.softmax))
_DROPOUTS = frozenset(
    (F.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout, torch.dropout)
)
_SHIFTS = frozenset((F.pad, torch.roll, Tensor.roll))
_SLICES = frozenset((Tensor.__getitem__, Tensor.narrow, torch.narrow))
_KERNELS = ("scaled_dot_product_", "flash_att", "_efficient_attention", "_cudnn_attention", "varlen_attn")


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
        self._scores: set[tuple[int, int]] = set()  # elements and keys of tensors that may be scores
        self._windows: dict[tuple[ShardedSequence, str, int], bool] = {}  # whether the sequence's mask is as narrow

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
        elif func in _SHIFTS and self._world_size > 1:
            self._check_shift(*args, **kwargs)
        elif func in (F.cross_entropy, F.nll_loss) and self._world_size > 1:
            self._check_mean(*args, **kwargs)
        elif isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            self._check_kernel(str(func))
        return None

    def after(self, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        """Remembers what may be scores: products of two activations that have a dim of N keys, and what is joined to
        them, such as sinks. Refuses a slice that shifts labels, and positions that become numbers of the model."""
        if not isinstance(result, Tensor):
            return
        if self._world_size > 1 and args:
            if func is torch.arange and result.is_floating_point() and is_plain(result):
                self._check_positions(result)
            elif func in _SLICES and _is_integer(args[0]):
                self._check_slice(args[0], result)
            elif result.is_floating_point() and _is_integer(args[0]):
                self._check_positions(args[0])
        if func in _JOINS and args and any((x.numel(), x.size(-1)) in self._scores for x in args[0]):
            self._scores.add((result.numel(), result.size(-1)))
        if func not in _PRODUCTS or result.dim() < 3:
            return
        operands = [x for x in args if isinstance(x, Tensor)]
        if any(x.dim() < 3 or isinstance(x, nn.Parameter) for x in operands):
            return
        sizes = result.shape[1:]
        self._scores.update((result.numel(), size) for size in sizes if self._is_of_tokens(size, result))

    def _is_of_tokens(self, size: int, x: Tensor) -> bool:
        """Whether it is N; where only calls tell N, whether another dim of x, that of the queries, is as long."""
        sequence = self._scope.sequence
        if sequence is None:
            return size > 1 and list(x.shape).count(size) > 1
        return size == sequence.layout.local_len(sequence.rank)

    # ---- attention by other names -------------------------------------------------------------------

    def _check_softmax(self, input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> None:
        if dim is None or (input.numel(), input.size(dim)) not in self._scores:
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

        transformers drops a sliding window, or chunks, that are not shorter than the tokens that it sees.
        """
        while caller.f_code.co_name == "__torch_function__" and caller.f_back is not None:  # of modes inside
            caller = caller.f_back
        kind, window = _window_of(caller)
        sequence = self._scope.sequence
        seq_len = local_len * self._world_size if sequence is None else sequence.seq_len
        if window is None or window >= seq_len:
            return
        if sequence is not None and self._scope.is_masked:
            key = (sequence, kind, window)
            if key not in self._windows:
                mask = sequence.causal.mask if is_causal else sequence.mask
                is_way = kind == "sliding_window" and mask.key_begin is not None  # a window along the ways of a tree
                narrow = mask.last_keys(window) if is_way else mask & getattr(IntervalMask, kind)(seq_len, window)
                self._windows[key] = narrow == mask
            if self._windows[key]:
                return
        words = "chunk" if kind == "chunked" else "sliding window"
        raise self._told(
            RefusedError(
                f"{caller.f_code.co_name} has a {words} of {window} tokens, but passes no mask of it "
                f"for the {seq_len} tokens of the sequence; give it to context_parallel(..., "
                f"mask=IntervalMask.{kind}({seq_len}, {window})), if all layers have it"
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
    def _positions(self) -> Tensor | None:
        """Those of this rank's tokens; None where only calls tell N."""
        sequence = self._scope.sequence
        return None if sequence is None else sequence.layout.positions(sequence.rank)

    def _check_positions(self, counts: Tensor) -> None:
        """Refuses a count of this rank's tokens that becomes a number of the model: an embedding, or a float.

        As integers they may as well be indices of local tokens. Three tokens may count by chance.
        """
        positions, counts = self._positions, counts.squeeze()
        if positions is None or len(positions) <= 3 or counts.dim() == 0 or counts.size(-1) != len(positions):
            return
        if self._buffer_of(counts) is not None or not _rises(counts):
            return
        right = [positions, *(b.local for b in self._buffers if _is_integer(b.local) and b.local.size(-1) > 1)]
        if any(_rises(x) and int(counts.min()) >= int(x.min()) for x in right):  # perhaps with a padding's offset
            return
        raise self._told(
            InputError(
                f"positions of {len(positions)} tokens that count from {int(counts.min())} on every rank: the model "
                "got no position_ids, or makes its own; pass position_ids=torch.arange(S)[None], one of the buffers of "
                "context_parallel"
            )
        )

    # ---- labels among the buffers -------------------------------------------------------------------

    def _check_shift(self, input: Tensor, *_: Any, **__: Any) -> None:
        buffer = self._buffer_of(input)
        if buffer is not None and _is_integer(input) and input.numel() == buffer.local.numel():
            raise self._told(_of_labels("are shifted"))

    def _check_slice(self, x: Tensor, part: Tensor) -> None:
        """A slice of integers, not a selection, from the second of this rank's tokens on."""
        buffer, is_view = self._buffer_of(x), part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        if buffer is None or not is_view or part.data_ptr() == x.data_ptr():
            return
        if part.numel() == x.numel() - x.numel() // buffer.local.size(buffer.seq_dim):
            raise self._told(_of_labels("are shifted"))

    def _check_mean(self, input: Tensor, target: Tensor, *_: Any, **options: Any) -> None:
        """Labels are not averaged over the targets of a shard where ranks have different numbers of them.

        Where the target is made of a buffer, this is the buffer that has as many targets here.
        """
        if options.get("reduction", "mean") != "mean" or target.is_floating_point():
            return
        ignored, sequence = options.get("ignore_index", -100), self._scope.sequence
        buffer = self._buffer_of(target)
        is_known = buffer is not None and buffer.local.numel() == target.numel()
        for full, seq_dim in [(b.full, b.seq_dim) for b in self._buffers if b is buffer or not is_known]:
            if full.is_floating_point() or sequence is None:
                continue
            is_target = full.movedim(seq_dim, 0) != ignored
            of_ranks = [sequence.layout.positions(rank).to(full.device) for rank in range(self._world_size)]
            counts = torch.stack([is_target[positions].sum() for positions in of_ranks]).tolist()
            if len(set(counts)) > 1 and (is_known or counts[sequence.rank] == int((target != ignored).sum())):
                raise self._told(_of_labels("are averaged over targets, of which ranks have different numbers,"))

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


def _is_integer(x: Any) -> TypeGuard[Tensor]:
    """Whether it is a tensor of integers whose numbers can be read."""
    is_integer = isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    return is_integer and is_plain(x)


def _rises(x: Tensor) -> bool:
    return bool((x.diff() == 1).all())


def _of_labels(got: str) -> RefusedError:
    return RefusedError(
        f"labels {got} within a shard; expected them shifted before the block (shift_labels of a transformers model) "
        "and among its buffers, and a sum over them, by the number of targets of the whole batch over the number of "
        "ranks that are averaged (num_items_in_batch)"
    )


def _window_of(caller: types.FrameType) -> tuple[str, int | None]:
    """The sliding window among the arguments of the calling function, or of the module it belongs to; or its chunk.

    Named as the IntervalMask that it needs.
    """
    variables = caller.f_locals
    modules = [variables.get(name) for name in ("module", "self")]
    for module in modules:
        config: Any = getattr(module, "config", None)
        kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
        if kinds and layer in range(len(kinds)) and kinds[layer] == "chunked_attention":
            return "chunked", config.attention_chunk_size
    for arguments in (variables, variables.get("kwargs")):
        if isinstance(arguments, dict) and "sliding_window" in arguments:
            window = arguments["sliding_window"]
            return "sliding_window", window if isinstance(window, int) else None
    windows = [getattr(module, "sliding_window", None) for module in modules]
    return "sliding_window", next((window for window in windows if isinstance(window, int)), None)
