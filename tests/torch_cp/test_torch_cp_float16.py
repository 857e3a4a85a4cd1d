"""A loop in plain PyTorch with a GradScaler: a step with an inf is skipped on all ranks."""

import contextlib
import math

import pytest
import ringtile
import torch
import torch.distributed as dist
from accuracy import assert_same_steps
from pool import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

SCALE = 2.0**12


def _loop(autocast, spoilt=None, num_steps=4):
    """Losses, scales and weights of attention between projections, with a GradScaler, on all ranks of the world or in
    one process. spoilt: the step whose loss overflows on rank 0."""
    torch.manual_seed(0)
    project, join = nn.Linear(32, 96), nn.Linear(32, 32)
    parameters = [*project.parameters(), *join.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    hidden, wanted = torch.randn(2, 45, 32), torch.randn(2, 45, 32)
    alone, numel = not dist.is_initialized(), wanted.numel()
    mesh = None if alone else init_device_mesh("cpu", (dist.get_world_size(),))
    losses, scales = [], []
    for step in range(num_steps):
        shards = ringtile.context_parallel(mesh, buffers=[hidden, wanted], buffer_seq_dims=[1, 1])
        with contextlib.nullcontext() if alone else shards:
            with torch.autocast("cpu", torch.float16, enabled=autocast):
                heads = project(hidden).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
                mixed = scaled_dot_product_attention(*heads, is_causal=True)
                outputs = join(mixed.transpose(1, 2).flatten(2))
            loss = (outputs.float() - wanted).square().sum() / numel
            scaler.scale(loss * math.inf if step == spoilt and (alone or dist.get_rank() == 0) else loss).backward()
        loss = loss.detach()
        if not alone:
            for tensor in [loss, *(parameter.grad for parameter in parameters)]:
                dist.all_reduce(tensor)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss))
        scales.append(scaler.get_scale())
    return losses, scales, [parameter.detach() for parameter in parameters]


def test_plain_loop_with_an_inf_equals_one_process():
    """In float32: losses are means of squares of 1, weights 0.2, each a sum of some 100 terms."""
    losses, scales, weights = _loop(False, spoilt=1)
    assert scales == [SCALE, SCALE / 2, SCALE / 2, SCALE / 2]
    assert losses[1] == losses[2]  # the step was skipped
    for got in run_ranks(2, _loop, False, spoilt=1):
        assert_same_steps(got[0], losses, 1e-6)
        assert got[1] == scales
        for weight, expected in zip(got[2], weights, strict=True):
            assert (weight - expected).abs().max() <= len(losses) * 1e-6 * expected.abs().max()


def test_plain_loop_in_float16_is_as_close_to_float32_as_one_process():
    """Activations have 11 significant bits: a sum of rounded terms is off by 2^-12 of them, on one rank and on two."""
    single, expected = _loop(True), _loop(False)
    assert single[0] != expected[0]
    for got in [single, *run_ranks(2, _loop, True)]:
        assert got[0] == pytest.approx(expected[0], rel=2**-11)
        assert got[1] == [SCALE] * 4
