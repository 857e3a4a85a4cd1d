"""Tensors that wait in host memory: the same bits as on the device, and which copies are made, and when."""

from __future__ import annotations

import pytest
import torch
from counting import Alive
from fake_device import LateTransfer, alive
from ringtile import tiled_linear_cross_entropy, tiled_log_probs
from ringtile.errors import RefusedError
from ringtile.tiled.host import HostTensor, PinnedCopies, Reader, Writer, in_order, to_host
from torch import Tensor

TOKENS, E, V, TILE = 23, 8, 31, 4


def hidden_of(*shape: int) -> Tensor:
    return torch.randn(*shape, E, generator=torch.Generator().manual_seed(1)).requires_grad_()


LABELS = {
    "all": [],
    "some": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 14, 22],
    "one": [*range(11), *range(12, TOKENS)],
    "none": [*range(TOKENS)],
    "the last": [*range(TOKENS - 1)],
}


@pytest.mark.parametrize("reduction", ["mean", "none", "log_probs"])
@pytest.mark.parametrize("ignored", LABELS)
def test_the_loss_reads_hidden_states_from_the_host(ignored: str, reduction: str) -> None:
    """A tile's rows may be anywhere: their tokens come in chunks of a tile, once, and so goes their gradient."""
    generator, transfer = torch.Generator().manual_seed(2), LateTransfer()
    weight = torch.randn(V, E, generator=generator).requires_grad_()
    labels = torch.randint(V, (1, TOKENS), generator=generator)
    labels[0, LABELS[ignored]] = -100
    factors = torch.randn(1, TOKENS, generator=generator)

    def run(on_host: bool) -> list[Tensor]:
        leaf = hidden_of(1, TOKENS)
        hidden = to_host(leaf * 1, transfer) if on_host else leaf * 1
        if reduction == "log_probs":
            loss = tiled_log_probs(hidden, weight, labels, tile_tokens=TILE)
        else:
            loss = tiled_linear_cross_entropy(hidden, weight, labels, reduction=reduction, tile_tokens=TILE)
        return [loss, *torch.autograd.grad((loss * factors).sum() if loss.dim() else loss * 3, [leaf, weight])]

    for found, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(found, expected) or (ignored == "none" and expected.isnan())
    (size,) = {size for _, size in transfer.log if size > TILE * E * 4}  # of whole ones: from and to the leaf alone
    assert size == TOKENS * E * 4
    assert [entry for entry in transfer.log if entry[1] == size] == [("to host", size), ("to device", size)]
    assert alive(transfer.hosts) == alive(transfer.devices) == 0


def test_the_loss_holds_no_more_than_tiles() -> None:
    weight, labels = torch.randn(V, E).requires_grad_(), torch.randint(V, (1, 4096))
    transfer = LateTransfer()
    hidden = to_host(hidden_of(1, 4096), transfer)
    with Alive(at_least=4096 * 4) as alive_now:
        tiled_linear_cross_entropy(hidden, weight, labels, tile_tokens=64).backward(inputs=[weight])
    assert alive_now.peak == 0


@pytest.mark.parametrize("reverse", [False, True])
def test_one_chunk_is_ahead(reverse: bool) -> None:
    """The next one is asked for when one is taken; what was written goes while the next is made."""
    x, transfer = hidden_of(2, TOKENS).detach(), LateTransfer()
    order = in_order(TOKENS, 8)[:: -1 if reverse else 1]
    there = to_host(x, transfer)
    transfer.log.clear()
    out = HostTensor.empty(x, x.shape, transfer)
    read, write = Reader(there, order), Writer(out)
    for tokens in order:
        chunk = read.take(tokens)
        assert torch.equal(chunk, x[:, tokens])
        transfer.log.append(("use", tokens.start))
        write.put(tokens, chunk * 2)
    assert len(transfer.queue) == 2  # the rows of the last chunk
    assert torch.equal(write.close().whole(), x * 2)
    rows = {tokens.start: (tokens.stop - tokens.start) * E * 4 for tokens in order}
    first, *others = order
    expected: list[tuple[str, object]] = [("to device", rows[first.start])] * 2
    for tokens, following in zip(order, [*others, None], strict=True):
        expected += [("to device", rows[following.start])] * 2 if following else []
        expected += [("use", tokens.start), *[("to host", rows[tokens.start])] * 2]
    assert transfer.log == [*expected, ("to device", x.nbytes)]


def test_any_op_gets_all_of_it() -> None:
    x = hidden_of(2, 5)
    there = to_host(x, PinnedCopies())
    assert (there.shape, there.dtype, there.device, there.requires_grad) == (x.shape, x.dtype, x.device, True)
    assert {type(there.flatten(0, -2)), type(there[:, slice(0, None), :])} == {HostTensor}
    (torch.tanh(there) * there[:, 1:2]).sum().backward()
    expected = hidden_of(2, 5)
    (torch.tanh(expected) * expected[:, 1:2]).sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_a_write_is_refused() -> None:
    there = to_host(hidden_of(2, 5), PinnedCopies())
    with pytest.raises(RefusedError, match=r"hidden states \(2, 5, 8\) between streamed layers.* write x = x \+ y"):
        there += 1
    with torch.no_grad():
        there[:, 0] = 0  # to a view of a copy
    with pytest.raises(RefusedError, match="modified in place"):
        there * 2
    with pytest.raises(RefusedError, match="modified in place"):
        Reader(there, in_order(5, 2))
