"""Errors show names: no message quotes an address, whatever a caller passed."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_models import tiny_model
from ringtile import (
    Config,
    IntervalMask,
    Layout,
    RingtileError,
    ShardedSequence,
    arguments,
    errors,
    ring_attention,
    tile_mlps,
    tiled_linear_cross_entropy,
)
from ringtile.hf.features.loss import install_tiled_loss
from ringtile.hf.patches import Patches
from ringtile.scheme import Scheme
from ringtile.transport.groups import transport_of


def own_loss(logits: Any, labels: Any) -> None:
    """A loss function of the user's."""


STRANGE = {
    "own_loss": own_loss,
    "Layer.forward": functools.partial(own_loss, 1),
    "object": object(),
    "method": SimpleNamespace(call=own_loss.__repr__).call,
}


def with_loss(strange: Any) -> None:
    model = tiny_model()
    model.loss_function = strange
    install_tiled_loss(model, Config(tiled_loss=True), Patches())


def with_forward(strange: Any) -> None:
    model = tiny_model()
    model.model.layers[0].mlp.forward = strange
    tile_mlps(model)


X = torch.zeros(1, 4, 2, 8)
SEQUENCE = ShardedSequence(IntervalMask.causal(4), Layout.contiguous(4, 1), None)
REFUSING: dict[str, Callable[[Any], Any]] = {
    "loss_function": with_loss,
    "forward": with_forward,
    "attention_kernel": lambda strange: ring_attention(X, X, X, SEQUENCE, attention_kernel=strange),
    "scale": lambda strange: ring_attention(X, X, X, SEQUENCE, scale=strange),
    "layout": lambda strange: Layout.named(strange, 8, 2),
    "group": transport_of,
    "scheme": Scheme.parse,
    "reduction": lambda strange: tiled_linear_cross_entropy(
        X[0, 0], torch.zeros(3, 8), torch.zeros(2, dtype=torch.int64), reduction=strange
    ),
    "key": lambda strange: Config(layout=strange),
    "list": lambda strange: Config(tile_tokens=[strange]),
}


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize("name", REFUSING)
def test_refusal_shows_no_address(name: str, strange: str) -> None:
    with pytest.raises(RingtileError) as refused:
        REFUSING[name](STRANGE[strange])
    assert " at 0x" not in str(refused.value)


def test_refused_function_is_named() -> None:
    with pytest.raises(RingtileError, match="computes its loss with own_loss, expected ForCausalLMLoss"):
        with_loss(own_loss)
    with pytest.raises(RingtileError, match=r"was replaced by own_loss; expected its own method"):
        with_forward(own_loss)
    assert errors.shown([torch.nn.Linear, "x", 3]) == "[Linear, 'x', 3]"


def test_refusal_reads_no_tensor() -> None:
    """torch dies where it prints one whose memory was freed."""
    x = torch.zeros(3)
    x.untyped_storage().resize_(0)
    assert errors.shown([x]) == "[<torch.float32 tensor>]"
    with pytest.raises(errors.InputError, match="scale needs 12 bytes but its storage has 0"):
        arguments.check_number("scale", x)


@pytest.mark.parametrize(
    "error", [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, RingtileError)]
)
def test_every_error_drops_addresses_and_is_pickled(error: type[RingtileError]) -> None:
    """Addresses go from texts that others wrote, too."""
    raised = error(f"torch: {object()!r} of {own_loss!r}")
    assert str(raised) == "torch: <object object> of <function own_loss>"
    assert pickle.loads(pickle.dumps(raised)).args == raised.args
