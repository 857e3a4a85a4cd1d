"""Activation offload: same bits, which tensors it moves and when, and that nothing is left behind."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import ringtile
import torch
from fake_device import LateTransfer, alive
from hf_models import SIZES, tiny_model
from hf_training import make_trainer
from pool import run_ranks
from ringtile.errors import ConfigError, RefusedError
from ringtile.hf.batch import CHECKPOINTING
from ringtile.hf.features.callbacks import collect
from ringtile.hf.features.offload import OffloadActivations, offload_activations
from ringtile.hf.offload import ON_DEVICE, ActivationOffload
from ringtile.tiled.host import PinnedCopies
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

LAYERS, TOKENS, E = 6, 5, 4
NBYTES = TOKENS * E * 4


class Stack(nn.Module):
    """Checkpointed layers that append to `log` when they run."""

    def __init__(self, wrap: Callable[..., Any], reentrant: bool, log: list[tuple[str, object]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(E, E) for _ in range(LAYERS))
        self.checkpoint = wrap(functools.partial(checkpoint, use_reentrant=reentrant))
        self.log = log

    def run(self, index: int, hidden: Tensor, shared: Tensor) -> Tensor:
        self.log.append(("run", index))
        return torch.tanh(self.layers[index](hidden)) * shared

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        hidden = x * 2
        for index in range(LAYERS):
            hidden = self.checkpoint(functools.partial(self.run, index), hidden, shared)
        return hidden.sum()


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(TOKENS, E, generator=generator).requires_grad_(), torch.randn(TOKENS, E, generator=generator)


def gradients(stack: Stack, x: Tensor, loss: Tensor, **options: Any) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [x, *stack.parameters()], **options))


def unchanged(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    return wrapped


@pytest.fixture
def transfer() -> LateTransfer:
    return LateTransfer()


@pytest.mark.parametrize("reentrant", [False, True])
def test_offload_changes_no_bit_and_leaves_nothing(reentrant: bool, transfer: LateTransfer) -> None:
    x, shared = inputs()
    plain = Stack(unchanged, reentrant, [])
    offloaded = Stack(ActivationOffload(transfer).wrap, reentrant, transfer.log)
    results = []
    for stack in (plain, offloaded, offloaded):
        x.grad = None
        stack.zero_grad()
        stack(x, shared).backward()  # reentrant checkpoints do not support torch.autograd.grad
        results.append([x.grad, *(weight.grad for weight in stack.parameters())])
        assert alive(transfer.hosts) == alive(transfer.devices) == 0
    for theirs, *ours in zip(*results, strict=True):
        assert all(torch.equal(each, theirs) for each in ours)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inputs_do_leave_the_device(reentrant: bool, transfer: LateTransfer) -> None:
    """After the forward the memory of ON_DEVICE layer inputs is left, whoever else could hold a tensor on it."""
    x, shared = inputs()
    stack = Stack(ActivationOffload(transfer).wrap, reentrant, transfer.log)
    freed: list[int] = []

    def watch(index: int, hidden: Tensor, shared: Tensor, run: Callable[..., Tensor] = stack.run) -> Tensor:
        weakref.finalize(hidden.untyped_storage(), freed.append, index)
        return run(index, hidden, shared)

    stack.run = watch  # type: ignore[method-assign, assignment]
    loss = stack(x, shared)
    assert sorted(freed) == list(range(LAYERS - ON_DEVICE))
    loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_inputs_leave_while_layers_run_and_return_ahead_of_theirs(reentrant: bool, transfer: LateTransfer) -> None:
    """Each layer's input is copied to the host, `shared` is not; all but the last two return, one layer ahead."""
    x, shared = inputs()
    stack = Stack(ActivationOffload(transfer).wrap, reentrant, transfer.log)
    loss = stack(x, shared)
    pairs = [
        [("to host", NBYTES), ("run", index)] for index in range(LAYERS)
    ]  # a reentrant checkpoint saves after its run
    assert transfer.log == [entry for pair in pairs for entry in (reversed(pair) if reentrant else pair)]
    assert alive(transfer.devices) == ON_DEVICE
    assert alive(transfer.hosts) == LAYERS
    transfer.log.clear()
    loss.backward()
    expected: list[tuple[str, object]] = []
    for index in reversed(range(LAYERS)):
        if 0 < index < LAYERS - ON_DEVICE + 1:
            expected.append(("to device", NBYTES))  # the input of layer index - 1
        expected.append(("run", index))
    assert transfer.log == expected


def test_a_graph_without_a_backward_is_freed_at_once(transfer: LateTransfer) -> None:
    """Even with copies in flight: an evaluation without no_grad, an abandoned batch."""
    x, shared = inputs()
    stack = Stack(ActivationOffload(transfer).wrap, False, transfer.log)
    gc.collect()
    gc.disable()
    try:
        loss = stack(x, shared)
        assert alive(transfer.hosts) == LAYERS
        del loss
        assert alive(transfer.hosts) == alive(transfer.devices) == 0
    finally:
        gc.enable()
    stack(x, shared).backward()


def test_a_backward_that_ends_early_leaves_no_copy_unwaited(transfer: LateTransfer) -> None:
    """Gradients of the last layers' weights only, so the prefetch for the layer before is never used."""
    x, shared = inputs()
    stack = Stack(ActivationOffload(transfer).wrap, False, transfer.log)
    loss = stack(x, shared)
    weights = [layer.weight for layer in stack.layers[3:]]
    torch.autograd.grad(loss, weights)
    del loss
    assert not transfer.queue
    assert alive(transfer.hosts) == alive(transfer.devices) == 0


def test_two_graphs_and_retained_ones(transfer: LateTransfer) -> None:
    x, shared = inputs()
    plain, stack = Stack(unchanged, False, []), Stack(ActivationOffload(transfer).wrap, False, transfer.log)
    expected = [gradients(plain, x, plain(x, shared)), gradients(plain, x, plain(x, shared * 3))]
    one, two = stack(x, shared), stack(x, shared * 3)
    got = [gradients(stack, x, one, retain_graph=True), gradients(stack, x, two), gradients(stack, x, one)]
    for ours, theirs in zip(got, [expected[0], expected[1], expected[0]], strict=True):
        assert all(torch.equal(mine, right) for mine, right in zip(ours, theirs, strict=True))


def test_a_tensor_saved_twice_is_copied_once(transfer: LateTransfer) -> None:
    """Two parts of one layer, attention and MLP in parallel, checkpointed separately."""
    saving = ActivationOffload(transfer).wrap(functools.partial(checkpoint, use_reentrant=False))
    x, _ = inputs()
    hidden = x * 2
    (saving(torch.exp, hidden) + saving(torch.sin, hidden)).sum().backward()
    assert [entry for entry in transfer.log if entry[0] == "to host"] == [("to host", NBYTES)]
    torch.testing.assert_close(x.grad, 2 * (torch.exp(2 * x) + torch.cos(2 * x)).detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layers_later", range(4))
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_hidden_state_modified_in_place_is_refused_or_was_copied_before(
    reentrant: bool, layers_later: int, transfer: LateTransfer
) -> None:
    """While it is on the device its copy may be in flight; once it has left, it can no longer be modified."""
    saving = ActivationOffload(transfer).wrap(functools.partial(checkpoint, use_reentrant=reentrant))

    def forward(x: Tensor) -> Tensor:
        first = x * 2
        hidden = first
        for index in range(4):
            hidden = saving(torch.sin, hidden)
            if index == layers_later:
                with torch.no_grad():
                    first += 1  # like `hidden += residual`
        return hidden.sum()

    x, _ = inputs()
    if layers_later < ON_DEVICE:
        with pytest.raises(RefusedError, match=r"hidden state \(5, 4\) was modified in place"):
            forward(x).backward()
        return
    forward(x).backward()
    expected = x.detach().clone().requires_grad_()
    torch.sin(torch.sin(torch.sin(torch.sin(expected * 2)))).sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_parameters_and_other_tensors_stay() -> None:
    transfer = LateTransfer()
    saving = ActivationOffload(transfer).wrap(functools.partial(checkpoint, use_reentrant=False))
    weight, (x, _) = nn.Parameter(torch.ones(2, 3)), inputs()
    saving(torch.exp, weight).sum().backward()
    saving(torch.exp, weight[:1]).sum().backward()
    saving(lambda ids, x: x[ids], torch.tensor([1, 2]), x).sum().backward()
    saving(lambda x=None: torch.exp(x), x=x * 2).sum().backward()
    with torch.no_grad():
        saving(torch.exp, x * 2)
    assert transfer.log == []


# ---- models and Trainers ------------------------------------------------------------------------


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, SIZES["vocab_size"], (2, 13), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def model_gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(**batch(), use_cache=False).loss.backward()
    return [weight.grad.clone() for weight in model.parameters()]


@pytest.mark.parametrize(
    ("family", "reentrant", "tiled"),
    [
        ("llama", False, True),
        ("llama", True, False),
        ("gemma3", False, False),
        ("gemma3", True, True),
        ("gpt2", False, False),
        ("gpt2", True, False),
    ],
)
def test_a_model_offloads_one_tensor_a_layer(family: str, reentrant: bool, tiled: bool, transfer: LateTransfer) -> None:
    sizes = {"num_hidden_layers": 4, **({"layer_types": ["full_attention"] * 4} if family == "gemma3" else {})}
    model = tiny_model(family, **sizes).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if tiled:
        ringtile.tile_mlps(model, 7)
    expected = model_gradients(model)
    patches = offload_activations(model, transfer)
    for ours, theirs in zip(model_gradients(model), expected, strict=True):
        assert torch.equal(ours, theirs)
    nbytes = 2 * 13 * SIZES["hidden_size"] * 4
    assert [entry for entry in transfer.log if entry[0] == "to host"] == [("to host", nbytes)] * 4
    assert [entry for entry in transfer.log if entry[0] == "to device"] == [("to device", nbytes)] * (4 - ON_DEVICE)
    assert alive(transfer.hosts) == alive(transfer.devices) == 0
    transfer.log.clear()
    patches.restore()
    model_gradients(model)
    assert transfer.log == []


def sharded_gradients(kind: str) -> tuple[bool, int]:
    """Return whether offload leaves an FSDP2 model's gradients bitwise unchanged, and how many tensors it offloaded."""
    results, transfer = [], LateTransfer()
    for offloads in (False, True):
        model = tiny_model("llama", num_hidden_layers=3).train()
        if kind == "wrapper":  # like accelerate's activation_checkpointing: true
            for index, layer in enumerate(model.model.layers):
                model.model.layers[index] = checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT)
        else:
            model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
        ringtile.tile_mlps(model, 7, use_original_mlp=True)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        if offloads:
            offload_activations(model, transfer)
        model(**batch(), use_cache=False).loss.backward()
        results.append([weight.grad.to_local().clone() for weight in model.parameters()])
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    return same, sum(entry[0] == "to host" for entry in transfer.log)


@pytest.mark.parametrize("kind", ["non-reentrant", "reentrant", "wrapper"])
def test_offload_under_fsdp2_changes_no_bit(kind: str) -> None:
    assert run_ranks(2, sharded_gradients, kind) == [(True, 3)] * 2


def trained(config: dict[str, Any], transfer: LateTransfer | None, **arguments: Any) -> tuple[Any, Any]:
    """The losses and trained weights of a Trainer that offloads to a fake device."""
    trainer = make_trainer(max_steps=2, gradient_checkpointing=True, **arguments)
    patches = ringtile.enable(trainer, config)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, OffloadActivations):
            callback.transfer = transfer
    trainer.train()
    del patches
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = [weight.detach().clone() for weight in trainer.model.parameters()]
    ringtile.restore(trainer)
    assert not any(isinstance(callback, OffloadActivations) for callback in trainer.callback_handler.callbacks)
    return losses, weights


def offloaded_training(config: dict[str, Any]) -> tuple[bool, int]:
    transfer = LateTransfer()
    losses, weights = trained({**config, "activation_offloading": True}, transfer)
    expected_losses, expected = trained(config, None)
    same = losses == expected_losses and all(torch.equal(*pair) for pair in zip(weights, expected, strict=True))
    return same, sum(entry[0] == "to host" for entry in transfer.log)


def test_trainer_offloads_under_ddp_with_ring_and_tiles() -> None:
    """2 steps of 2 accumulated batches through 2 layers, on 2 ranks that share a sequence."""
    config = {"context_parallel_size": 2, "tiled_mlp": True, "tiled_loss": True, "tile_tokens": 7}
    assert run_ranks(2, offloaded_training, config) == [(True, 8)] * 2


def test_on_a_cpu_nothing_is_offloaded_and_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    trainer, callback = make_trainer(gradient_checkpointing=True), OffloadActivations()
    with caplog.at_level(logging.WARNING, logger="ringtile.hf.features.offload"):
        callback.on_train_begin(trainer.args, None, None, model=trainer.model)
    assert callback.patches.entries == ()
    assert [record.getMessage() for record in caplog.records] == [
        "activation_offloading: the model is on the cpu, so nothing is offloaded: only CUDA devices have memory"
        " apart from the host's"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "LlamaForCausalLM has no checkpointed layer"),
        ({"gradient_checkpointing": True, "torch_compile": True}, "torch_compile is true"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(arguments: dict[str, Any], message: str, transfer: LateTransfer) -> None:
    trainer = make_trainer(**arguments)
    with pytest.raises(RefusedError, match=message):
        OffloadActivations(transfer).on_train_begin(trainer.args, None, None, model=trainer.model)


def test_two_that_offload_are_refused() -> None:
    trainer = make_trainer(**{CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"offload": True}})
    with pytest.raises(
        ConfigError, match=f"activation_offloading is true and {CHECKPOINTING}_kwargs has offload: true"
    ):
        ringtile.enable(trainer, {"activation_offloading": True})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_keeps_two_hidden_states_on_the_device() -> None:
    """16 layers with inputs (1, 65536, 64) float32, 16 MiB each: all 16 stay without offload, 2 or 3 with it."""
    peaks, results = [], []
    for wrap in (unchanged, ActivationOffload(PinnedCopies()).wrap):
        torch.manual_seed(0)
        saving = wrap(functools.partial(checkpoint, use_reentrant=False))
        x = torch.randn(1, 65536, 64, device="cuda", requires_grad=True)
        weights = [torch.randn(64, 64, device="cuda").requires_grad_() for _ in range(16)]
        torch.cuda.reset_peak_memory_stats()
        hidden = x * 2
        for weight in weights:
            hidden = saving(lambda hidden, weight: torch.tanh(hidden @ weight), hidden, weight)
        loss = hidden.sum()
        peaks.append(torch.cuda.max_memory_allocated())
        results.append(torch.autograd.grad(loss, [x, *weights]))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert peaks[1] < peaks[0] - 10 * 16 * 2**20


# ---- garbage ------------------------------------------------------------------------------------


def test_garbage_is_collected_at_train_begin_step_0_and_every_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(max_steps=5)
    steps: list[int] = []
    monkeypatch.setattr("ringtile.hf.features.callbacks.collect", lambda: steps.append(trainer.state.global_step))
    trainer.add_callback(ringtile.CollectGarbageCallback(2))
    trainer.train()
    assert steps == [0, 0, 2, 4]
    for steps_of in (0, True, "2"):
        with pytest.raises(ringtile.InputError, match="expected an integer of at least 1"):
            ringtile.CollectGarbageCallback(steps_of)  # type: ignore[arg-type]


def test_collect_frees_a_cycle() -> None:
    class Node:
        pass

    node = Node()
    node.itself = node
    gone = weakref.ref(node)
    gc.disable()
    try:
        del node
        assert gone() is not None
        collect()
        assert gone() is None
    finally:
        gc.enable()
