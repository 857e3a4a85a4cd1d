"""`context_parallel`: shards buffers, and runs attention as a ring, inside a `with` block."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringtile.errors import InputError, RefusedError
from ringtile.first_batch.compare import Comparison
from ringtile.random_states import drawn_since, random_states
from ringtile.registered_attention import refuse_inside
from ringtile.scheme import Scheme
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence
from ringtile.torch_context_parallel.buffers import as_list, pairs_of, seq_len_of
from ringtile.torch_context_parallel.first_block import FirstBlock, set_content
from ringtile.torch_context_parallel.group_layouts import Mesh, group_of, layout_of, override, unmasked_sequence
from ringtile.torch_context_parallel.mode import RingMode, entered, keep_modes
from ringtile.torch_context_parallel.noticing import ShardedBuffer
from ringtile.torch_context_parallel.scope import AttentionScope
from ringtile.torch_context_parallel.whole_inputs import Model
from ringtile.transport.groups import Group, transport_of


@contextlib.contextmanager
def context_parallel(
    mesh: Mesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[Tensor] | None = None,
    layout: Layout | str = "zigzag",
    mask: IntervalMask | None = None,
    scheme: str = "ring",
    check: tuple[nn.Module, Callable[[], Tensor]] | None = None,
    model: nn.Module | None = None,
) -> Iterator[None]:
    """Inside the block every buffer holds this rank's tokens, and PyTorch's attention functions run as a ring.

    Replaces `torch.distributed.tensor.experimental.context_parallel` and takes its arguments:

    - mesh: a DeviceMesh of one dimension, or a group.
    - buffers: tensors of the whole sequence, the same on every rank, of any dtype, with S tokens in dim
      buffer_seq_dims[i]. They are sharded in place, and restored when the block ends, also by an exception, except for
      those in no_restore_buffers. No buffer requires grad.
    - layout: how to shard the sequence: "zigzag", "contiguous", "striped", or a Layout of S tokens.
    - mask: which keys each query attends, in global positions; it knows nothing of the layout. Without one, is_causal
      decides in each call of scaled_dot_product_attention. With one, is_causal=True narrows it to its causal part.
    - scheme: how the ranks share the work (docs/guide/schemes.md); a block without buffers is a ring.
    - check: a model and a function of no arguments that runs it on the buffers and returns a loss (), whose mean over
      the ranks is that of one process. Before the first block with this model it is computed on a cut of the buffers,
      whole and sharded, as `ringtile.check_first_batch` does.
    - model: a transformers model of images or sound and text, as it is called: it gets whole inputs inside, the same on
      every rank, and is sharded where its language model begins, so that its logits are of local tokens. Buffers are
      then what else reads tokens, such as labels. One thread at a time.

    Run the model's forward and backward inside. Blocks may be nested (the innermost one counts) and entered by several
    threads, each with a group of its own. A group of one rank leaves attention to PyTorch unless there is a mask.
    ringtile's recurrences inside that are given no sequence run over the block's, under the causal part of its mask.

    Raises InputError before any buffer is sharded; LayoutError when the sequence is too short. RefusedError inside for
    attention that the ring cannot serve or see (docs/guide/pytorch.md), and at the end if random numbers were drawn.
    """
    keep_modes()
    group = group_of(mesh)
    transport = transport_of(group)
    with transport.propagate_errors("context_parallel"):
        buffers, buffer_seq_dims = as_list(buffers, "buffers"), as_list(buffer_seq_dims, "buffer_seq_dims")
        kept = as_list(no_restore_buffers, "no_restore_buffers")
        seq_len = _seq_len(buffers, buffer_seq_dims, kept, layout, mask)
        Scheme.parse(scheme).check(transport.world_size)
        _check_types(check)
        if seq_len is None and scheme != "ring":
            raise InputError(f"the scheme is {scheme}, but there are no buffers; expected buffers, a Layout or a mask")
        whole = None if model is None else _whole_inputs(model, seq_len, check)
    if check is not None and transport.world_size > 1 and check[0] not in _checked:
        _checked.add(check[0])
        FirstBlock(context_parallel, group, buffers, buffer_seq_dims, layout, mask, scheme).check(*check, averages=True)
    if transport.world_size == 1 and mask is None:
        with RingMode(AttentionScope(group, layout_name="contiguous"), is_alone=True):
            yield
        return
    if seq_len is None:
        assert isinstance(layout, str)
        with _in_force(group, AttentionScope(group, layout_name=layout), layout):
            yield
        return
    with transport.propagate_errors("context_parallel"):
        layout = layout_of(layout, seq_len, transport.world_size)
        sequence = (
            unmasked_sequence(layout, group, scheme)
            if mask is None
            else ShardedSequence.of(mask, layout, group, scheme=scheme)
        )
    _ = sequence.causal  # made here: a compiled call of attention can read it but not make it
    scope = AttentionScope(group, sequence=sequence, is_masked=mask is not None)
    full = [buffer.detach() for buffer in buffers]
    sharded = [ShardedBuffer(*buffer) for buffer in zip(buffers, full, buffer_seq_dims, strict=True)]
    try:
        for buffer, dim in zip(buffers, buffer_seq_dims, strict=True):
            set_content(buffer, sequence.shard(buffer, dim))
        with (
            _in_force(group, scope, sequence, sharded) as mode,
            contextlib.nullcontext() if whole is None else whole.sharded_inside(mode, sequence),
        ):
            yield
    finally:
        for buffer, content in zip(buffers, full, strict=True):
            if not any(buffer is other for other in kept):
                set_content(buffer, content)


def check_first_batch(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    loss: Callable[[nn.Module, Mapping[str, Tensor]], Tensor],
    mesh: Mesh,
    *,
    seq_dim: int = 1,
    layout: Layout | str = "zigzag",
    mask: IntervalMask | None = None,
    scheme: str = "ring",
    reduction: Literal["mean", "sum"] = "mean",
) -> Comparison:
    """Prove that a loss computed inside `context_parallel` is that of one process, module by module; call it once,
    before the first step, on every rank of the mesh.

    model: its modules are compared; under DDP, FSDP2 or bare. batch: tensors of the whole sequence, the same on every
    rank, with S tokens in seq_dim: the buffers of `context_parallel`, whose other arguments mesh, layout, mask and
    scheme are. loss(model, batch): runs the model on the batch, which is whole or sharded, and returns a loss ().
    reduction: "mean" if the engine averages gradients over the ranks (DDP, FSDP2), "sum" if it adds them.

    A cut of some 512 tokens is computed whole, whole with other rounding, and sharded. Nothing changes: no weight, no
    gradient, no buffer, no generator of random numbers. Returns a `Comparison`: the largest difference over that of
    rounding, and the number of modules.
    Raises RefusedError, naming the first module or gradient that differs; InputError; what `context_parallel` raises.
    """
    if reduction not in ("mean", "sum"):
        raise InputError(f"reduction is {reduction!r}; expected 'mean' or 'sum'")
    tensors = dict(batch)
    dims = [seq_dim] * len(tensors)
    block = FirstBlock(context_parallel, group_of(mesh), list(tensors.values()), dims, layout, mask, scheme)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return block.check(inner, lambda: loss(inner, tensors), averages=reduction == "mean")


_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the models of first blocks that were checked


def _check_types(check: object) -> None:
    if check is not None and not (
        isinstance(check, tuple) and len(check) == 2 and isinstance(check[0], nn.Module) and callable(check[1])
    ):
        raise InputError("check is not a pair; expected (model, function), where function() returns a loss")


def _whole_inputs(model: nn.Module, seq_len: int | None, check: object) -> Model:
    if seq_len is None:
        raise InputError("a model that gets whole inputs, but no buffers; expected labels, a Layout or a mask")
    if check is not None:
        raise InputError("check cuts the buffers, not what a model gets whole; expected no check beside model")
    if entered():
        raise InputError("a model that gets whole inputs in a block inside another; expected it in the outermost block")
    return Model(model)


@contextlib.contextmanager
def _in_force(
    group: Group, scope: AttentionScope, sequence: ShardedSequence | str, buffers: Sequence[ShardedBuffer] = ()
) -> Iterator[RingMode]:
    """Inside, attention runs over the scope, and the sequence, or the layout of that name, holds for ContextParallel.

    RefusedError when the block ends, if random numbers were drawn: no shard draws what the whole sequence would.
    """

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with override(group, sequence), mode:
            yield

    mode = RingMode(scope, buffers, enter)
    refuse_inside(lambda: any(not each.is_alone and not each.is_before for each in entered()))
    before = random_states()
    with enter():
        yield mode
    drawn = drawn_since(before)
    transport = transport_of(group)
    if drawn and transport.world_size > 1:
        with transport.propagate_errors("context_parallel"):
            raise RefusedError(
                f"random numbers were drawn from the default generator of {' and '.join(drawn)} inside "
                "context_parallel: dropout, noise or sampling of local tokens is not what one process draws. Switch it "
                "off, or draw before the block and pass the numbers as buffers"
            )


def _seq_len(
    buffers: list[Tensor], seq_dims: list[int], kept: list[Tensor], layout: Layout | str, mask: IntervalMask | None
) -> int | None:
    """S, from the buffers, the mask or the layout; None if there is neither. Checks the buffers."""
    if not all(any(x is buffer for buffer in buffers) for x in kept):
        raise InputError("no_restore_buffers has a tensor that is not in buffers; expected a subset")
    pairs = pairs_of(buffers, seq_dims) if buffers or seq_dims else {}
    for i, buffer in enumerate(buffers):
        if not isinstance(buffer, Tensor) or buffer.requires_grad:
            raise InputError(f"buffer {i} is a BlockMask or requires grad; use Layout.shard, or detach it")
        if any(buffer is other for other in buffers[:i]):
            raise InputError(f"buffer {i} is given twice; expected every tensor once")
    sizes = [seq_len_of(pairs)] if pairs else []
    if mask is not None:
        if not isinstance(mask, IntervalMask):
            raise InputError(
                f"mask is a {type(mask).__name__}; expected an IntervalMask, such as IntervalMask.causal(S)"
            )
        sizes.append(mask.seq_len)
    if not isinstance(layout, (Layout, str)):
        raise InputError(f"layout is a {type(layout).__name__}; expected a Layout, or the name of one")
    if isinstance(layout, Layout):
        sizes.append(layout.seq_len)
    if len(set(sizes)) > 1:
        raise InputError(f"buffers, mask and layout are of {sizes} tokens; expected one length")
    return sizes[0] if sizes else None
