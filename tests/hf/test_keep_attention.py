"""`keep_attention`: a checkpointed layer communicates in two passes, not three, and its gradients keep their bits."""

import copy
import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_models import hybrid, tiny_model
from ringtile import IntervalMask, Layout, LoopbackWorld, ShardedSequence, ring_attention
from ringtile import keep as keeping
from ringtile.hf import model
from ringtile.hf.batch import _Keeping, active, keep_in_checkpoints
from ringtile.hf.features import recurrent
from ringtile.hf.patches import Patches
from ringtile.hf.shard import Reading, shard_batch
from ringtile.transport.loopback import LoopbackGroup
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.utils.checkpoint import checkpoint

CHECKPOINTS = {kind: functools.partial(checkpoint, use_reentrant=kind == "reentrant") for kind in ("reentrant", "not")}
GRADIENTS = tuple[list[Tensor], int]


# ---- models -------------------------------------------------------------------------------------


def of_transformers(own: nn.Module) -> None:
    own.gradient_checkpointing_enable({"use_reentrant": False})


def reentrant(own: nn.Module) -> None:
    own.gradient_checkpointing_enable({"use_reentrant": True})


def of_torch(own: nn.Module, implementation: wrappers.CheckpointImpl = wrappers.CheckpointImpl.NO_REENTRANT) -> None:
    """As accelerate does for fsdp_config's activation_checkpointing."""
    layers = own.model.layers
    for i, layer in enumerate(layers):
        layers[i] = wrappers.checkpoint_wrapper(layer, checkpoint_impl=implementation, preserve_rng_state=False)


def gradients_of_model(
    whole: nn.Module, enable: Callable[[nn.Module], None], scheme: str, num_bytes: float, world_size: int = 2
) -> list[GRADIENTS]:
    """Of each rank, by its part of a packed row, with the calls on its group."""
    ids = torch.arange(3, 39)[None]
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.cat([torch.arange(11), torch.arange(25)])[None]}

    def run(group: LoopbackGroup) -> GRADIENTS:
        own = copy.deepcopy(whole)
        enable(own)
        local, sharded = shard_batch(batch, Reading(), layout="zigzag", group=group, scheme=scheme)
        sharded.budget = keeping.CheckpointBudget(num_bytes) if num_bytes else None
        keep_in_checkpoints(own)
        with active(sharded):
            loss = own(**local, num_items_in_batch=sharded.num_targets).loss
        loss.backward()
        return [x.grad for x in own.parameters()], group.transport.num_calls

    return LoopbackWorld(world_size).run(run)


MODELS: list[tuple[str, Callable[[nn.Module], None], str]] = [
    ("qwen3-sliding", of_transformers, "ring"),
    ("qwen3-sliding", reentrant, "ring"),
    ("qwen3-sliding", of_torch, "ring"),
    ("qwen3-sliding", functools.partial(of_torch, implementation=wrappers.CheckpointImpl.REENTRANT), "ring"),
    ("qwen3-sliding", of_transformers, "ulysses"),
    ("gpt-oss", reentrant, "ulysses"),  # sinks
    ("gpt-oss", of_transformers, "usp:2"),
    ("qwen3_next", of_transformers, "ring"),
    ("qwen3_next", reentrant, "all_gather"),
    ("qwen3_next", of_transformers, "ulysses"),
    ("mamba", of_transformers, "ring"),
    ("mamba", reentrant, "ulysses"),
]


@pytest.mark.parametrize(("family", "enable", "scheme"), MODELS)
def test_two_passes_and_the_same_bits(family: str, enable: Callable[[nn.Module], None], scheme: str) -> None:
    whole, patches = (hybrid if family in ("qwen3_next", "mamba") else tiny_model)(family).train(), Patches()
    model.switch_attention(whole, patches)
    recurrent.install(whole, patches)
    world_size = 4 if scheme == "usp:2" else 2
    kept, again = (gradients_of_model(whole, enable, scheme, room, world_size) for room in (math.inf, 0))
    patches.restore()
    for (got, calls), (wanted, calls_without) in zip(kept, again, strict=True):
        assert (calls, calls_without) == (2 * calls // 2, 3 * calls // 2)
        assert all(a is b is None or a.equal(b) for a, b in zip(got, wanted, strict=True))


def test_auto_keeps_as_many_layers_as_have_room() -> None:
    whole, patches = tiny_model().train(), Patches()
    model.switch_attention(whole, patches)
    layers = whole.config.num_hidden_layers
    of_layer = 36 // 2 * whole.config.num_attention_heads * (4 * whole.config.head_dim + 8)
    for num_layers, num_bytes in ((0, of_layer - 1), (1, 2 * of_layer - 1), (layers, layers * of_layer)):
        for _, calls in gradients_of_model(whole, of_transformers, "ring", num_bytes):
            assert calls == 3 * layers - num_layers
    assert keeping.checkpoint_budget("auto", 1000).num_bytes == 100
    assert keeping.checkpoint_budget(True, 1000).num_bytes == math.inf
    assert keeping.checkpoint_budget(False, 1000) is None


# ---- functions that a checkpoint may meet -------------------------------------------------------


class Calls:
    """Attention of two modules, in a checkpointed function that counts how often it has run."""

    def __init__(self, group: LoopbackGroup) -> None:
        self.sequence = ShardedSequence(IntervalMask.causal(12), Layout.zigzag(12, 2), group)
        self.runs = 0

    def attend(self, x: Tensor, module: str, scale: float = 1.0) -> Tensor:
        keeping.called_by(module)
        q = x.view(1, -1, 2, 4)
        out: Tensor = ring_attention(q, q.sin(), q.cos(), self.sequence, scale=scale)
        return out.view_as(x)

    def one(self, x: Tensor) -> Tensor:
        return self.attend(x, "a").sin()

    def twice(self, x: Tensor) -> Tensor:
        return self.attend(self.attend(x, "a") + 1, "a").sin()

    def written_to(self, x: Tensor) -> Tensor:
        """The first run writes to the output, which autograd does not see."""
        self.runs += 1
        out = self.attend(x, "a")
        if self.runs == 1:
            out.detach().mul_(2)
        return out.sin()

    def in_another_order(self, x: Tensor) -> Tensor:
        """One pair of modules, whose inputs differ: the second run calls b first."""
        self.runs += 1
        order = "ab" if self.runs % 2 else "ba"
        found = {module: self.attend(x + ord(module), module) for module in order}
        return (found["a"] - 3 * found["b"]).sin()

    def otherwise(self, x: Tensor) -> Tensor:
        """The same numbers by another scale: no kept result fits."""
        self.runs += 1
        return self.attend(x if self.runs % 2 else 2 * x, "a", 4.0 if self.runs % 2 else 1.0).sin()


def run(
    name: str, kind: str, keep: bool, use: Callable[[Callable[[Tensor], Tensor], Tensor], list[Tensor]]
) -> list[GRADIENTS]:
    """What `use` of the checkpointed function gives, and the calls on the group."""

    def of_rank(group: LoopbackGroup) -> GRADIENTS:
        calls = Calls(group)
        generator = torch.Generator().manual_seed(group.transport.rank)
        x = torch.randn(6, 8, dtype=torch.float64, generator=generator).requires_grad_()
        batch: Any = SimpleNamespace(
            budget=keeping.CheckpointBudget(math.inf) if keep else None, before_language_model=False
        )
        keeper = _Keeping(CHECKPOINTS[kind])
        with active(batch):
            found = use(lambda y: keeper(getattr(calls, name), y), x)
        return found, group.transport.num_calls

    return LoopbackWorld(2).run(of_rank)


def backward(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    out = function(x)
    out.sum().backward()
    return [out.detach(), x.grad]


def two_in_flight(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Micro-batches of a pipeline, whose backwards come in their order."""
    first, second = function(x), function(2 * x)
    first.sum().backward()
    second.sum().backward()
    return [x.grad]


def twice_back(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    loss = function(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [x.grad]


def nested(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    outer = _Keeping(CHECKPOINTS["not"])
    return backward(lambda y: outer(lambda z: function(z).cos(), y), x)


def after_an_error(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """A layer fails after its attention, and runs anew."""
    with pytest.raises(ZeroDivisionError):
        function(x).sum().mul(1 // 0)
    return backward(function, x)


def evaluated(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [function(x), x.detach()]


CASES = [  # a function, its checkpoint, what is done with it; calls with and without
    ("one", "not", backward, 2, 3),
    ("one", "reentrant", backward, 2, 3),
    ("twice", "not", backward, 6, 6),
    ("twice", "reentrant", backward, 6, 6),
    ("written_to", "not", backward, 3, 3),
    ("written_to", "reentrant", backward, 3, 3),
    ("in_another_order", "reentrant", backward, 4, 6),
    ("otherwise", "reentrant", backward, 3, 3),
    ("one", "not", two_in_flight, 4, 6),
    ("one", "reentrant", two_in_flight, 4, 6),
    ("one", "not", twice_back, 4, 5),
    ("one", "not", nested, 3, 4),
    ("one", "reentrant", nested, 3, 4),
    ("one", "not", after_an_error, 3, 4),
    ("one", "not", evaluated, 1, 1),
]


@pytest.mark.parametrize(("name", "kind", "use", "calls", "without"), CASES)
def test_only_what_is_surely_the_same_is_taken(name: str, kind: str, use: Any, calls: int, without: int) -> None:
    for (got, counted), (wanted, again) in zip(run(name, kind, True, use), run(name, kind, False, use), strict=True):
        assert (counted, again) == (calls, without)
        assert all(a.equal(b) for a, b in zip(got, wanted, strict=True))
