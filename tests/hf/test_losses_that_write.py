"""Losses and models of users that write: whatever it is, the check of the first batch leaves it as it was."""

import collections

import numpy as np
import ringtile
import torch
from hf_engines import full_weights
from hf_models import tiny_model
from hf_training import make_trainer
from losses import OwnMean
from pool import run_ranks
from ringtile.hf.trainer import first_batch_of
from torch import nn
from torch.nn import functional

OUTSIDE: list[float] = []
COUNT = 0


# ---- losses that write --------------------------------------------------------------------------


class Meter:
    def __init__(self):
        self.sum, self.count = 1.0, 0


class Center(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(32))

    def forward(self, x):
        loss = (x - self.center).square().mean()
        self.center.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return loss


class Writes(OwnMean):
    """Into whatever a loss can reach: the tensors of its batch, objects, containers and a global, a tensor of the
    Trainer (MoCo's queue of past batches), a buffer of a module, the log, and the states of generators."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels, ids = inputs["labels"], inputs["input_ids"]
        labels[:, 1:] = labels[:, :-1].clone()
        left = (ids > 4).nonzero()[::3]
        ids[left[:, 0], left[:, 1]] = 4
        inputs["output_hidden_states"] = True
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def after(self, loss, outputs):
        if not hasattr(self, "meter"):
            self.meter, self.criterion, self.last = Meter(), Center(), collections.deque(maxlen=3)
            self.array, self.at = np.zeros(2), 0
            self.queue = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
        self.meter.sum = 0.5 * self.meter.sum + 0.5 * float(loss)
        self.meter.count += 1
        self.last.append(float(loss))
        self.array += float(loss)
        OUTSIDE.append(float(loss))
        self.log({"term": float(outputs.logits.square().mean())})
        hidden = outputs.hidden_states[-1]
        found = functional.normalize(hidden.mean(1), dim=-1)
        scores = torch.cat([(found * found.detach()).sum(1, keepdim=True), found @ self.queue.clone().T], 1)
        self.queue[self.at : self.at + len(found)] = found.detach()
        self.at += len(found)
        loss = loss + 0.1 * outputs.logits.square().mean() * self.meter.sum + self.criterion(hidden)
        loss = loss + functional.cross_entropy(scores, torch.zeros(len(found), dtype=torch.long))
        return loss * (1 + float(torch.rand(())) + np.random.rand())  # noqa: NPY002

    def held(self):
        held = [vars(self.meter), list(self.last), self.array.tolist(), list(OUTSIDE)]
        return [*held, self.queue, self.criterion.center]


def _left_behind(trainer, config):
    """Everything that a training leaves behind, and how often its loss was called."""
    global COUNT
    calls, compute_loss = 0, type(trainer).compute_loss

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        return compute_loss(*args, **kwargs)

    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    OUTSIDE.clear()
    COUNT = 0
    type(trainer).compute_loss = counted
    try:
        ringtile.enable(trainer, {"context_parallel_size": 2, **config})
        trainer.train()
        proof = first_batch_of(trainer)
        ringtile.restore(trainer)
    finally:
        type(trainer).compute_loss = compute_loss
    logs = [
        {k: v for k, v in line.items() if "runtime" not in k and "second" not in k}
        for line in trainer.state.log_history
    ]
    drawn = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    return {"logs": logs, "held": trainer.held(), "drawn": drawn, "weights": full_weights(trainer.model)}, calls, proof


def _assert_same_bits(got, expected):
    if isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for name in expected:
            _assert_same_bits(got[name], expected[name])
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for x, y in zip(got, expected, strict=True):
            _assert_same_bits(x, y)
    else:
        assert got == expected


# ---- models that write --------------------------------------------------------------------------

ROOT = {"calls": 0}


def _helper():
    global COUNT
    COUNT += 1
    ROOT["calls"] += 1


def _closure():
    seen = []

    def hook(module, args, output):
        seen.append(len(seen))

    return seen, hook


class Writing(nn.Module):
    """Writes whatever a module can reach."""

    of_class = 0

    def __init__(self, mlp):
        super().__init__()
        self.mlp, self._calls, self.meter, self.seen = mlp, 0, Meter(), [0]
        self.tensor, self.array, self.deep = torch.zeros(2), np.zeros(2), {"a": [{}]}
        self.register_buffer("mean", torch.zeros(()))
        self.generator = np.random.default_rng(0)

    def forward(self, x):
        _helper()
        type(self).of_class += 1
        self._calls += 1
        self.meter.count += 1
        self.seen.append(self._calls)
        self.tensor += 1
        self.array += 1
        self.deep["a"][0][self._calls] = 1
        self.mean.add_(1)
        self.made = self.generator.random() + float(torch.rand(()))
        return self.mlp(x)

    def held(self):
        held = [COUNT, dict(ROOT), Writing.of_class, self._calls, self.meter.count, list(self.seen), self.deep]
        return [*held, self.tensor, self.array.tolist(), self.mean, getattr(self, "made", None)]


def _trained(proved):
    Writing.of_class, ROOT["calls"] = 0, 0
    model = tiny_model().train()
    writing = model.model.layers[0].mlp = Writing(model.model.layers[0].mlp)
    seen, hook = _closure()
    model.model.layers[1].register_forward_hook(hook)
    trainer = make_trainer(
        model=model, trainer_class=Writes, learning_rate=0.1, max_steps=2, gradient_accumulation_steps=1
    )
    left, calls, proof = _left_behind(trainer, {"first_batch_check": proved})
    return left | {"of model": writing.held(), "seen": list(seen)}, calls, proof


def test_what_writes_runs_once_and_trains_as_without_the_check():
    proved, unproved = (run_ranks(2, _trained, proved) for proved in (True, False))
    for (got, calls, proof), (expected, calls_without, _) in zip(proved, unproved, strict=True):
        assert expected["of model"][0] == expected["held"][0]["count"] == 2  # each forward pass and loss writes
        _assert_same_bits(got, expected)
        assert calls == calls_without == 2  # the steps
        assert proof.num_modules > 20
