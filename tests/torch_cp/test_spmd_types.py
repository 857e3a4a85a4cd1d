"""spmd_types follows a step on 512 ranks: what each tensor is to the ranks of each axis (the same, varying, a part of a
sum), and whether each operation and collective may take it. One rank exists; messages of the others are zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import ringtile
import torch
import torch.distributed as dist
from pool import run_program
from ringtile import IntervalMask, context_parallel
from ringtile.attn.attention import RingAttention
from ringtile.transport import groups
from ringtile.transport.groups import ProcessGroupTransport
from ringtile.transport.transport import Messages, Works
from test_examples import example
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

DP, CP, RANK = 8, 64, 3


class _SilentPeers(ProcessGroupTransport):
    """Nobody is there to agree with, and what arrives is zeros."""

    def _post(self, messages: Messages, what: str) -> Works:
        for _, x, outgoing in messages:
            if not outgoing:
                x.zero_()
        return super()._post(messages, what)

    def _send_header(self, op: str, header: bytes, **options: bool) -> None:
        pass

    def compare_headers(self, *, wait: bool = True) -> None:
        self._behind = False


def _typed_ring(cp: dist.ProcessGroup) -> Callable[..., None]:
    import spmd_types as spmd

    def check(outputs: Any, *, q: Any, k: Any, v: Any, sinks: Any, call: Any) -> None:
        """Each rank has tokens of its own, and what it computes of them is whole."""
        if any(spmd.get_axis_local_type(x, cp) is not spmd.V for x in (q, k, v)):
            raise spmd.SpmdTypeError("a ring over ranks that hold the same tokens")
        spmd.rules.einsum("bnhd,bkgd,bkgv->bnhv", q, k, v, out=outputs[0])
        spmd.rules.einsum("bnhd,bkgd->bhn", q, k, out=outputs[1])

    return check


def plain_step(break_it: str = "") -> None:
    """A step of examples/train_3d.py's model, forward and backward, with parameters that each rank holds whole."""
    import spmd_types as spmd
    from spmd_types import P, R, V

    dist.init_process_group("fake", rank=RANK, world_size=DP * CP)
    mesh = init_device_mesh("cpu", (DP, CP), mesh_dim_names=("dp", "cp"))
    axes = dp, cp = mesh.get_group("dp"), mesh.get_group("cp")
    groups._transports[cp] = _SilentPeers(cp)

    RingAttention.spmd_typecheck = staticmethod(_typed_ring(cp))  # type: ignore[attr-defined]
    module = example("train_3d")
    config = module.Config(dp=DP, cp=CP, tp=1, batch=DP, seq_len=512)
    model, batch = module.Llama(config), module.make_batch(config, 0)
    rows = slice(mesh["dp"].get_local_rank(), None, DP)
    buffers = ids, labels, positions = [x[rows].clone() for x in (batch.input_ids, batch.labels, batch.position_ids)]
    mask = IntervalMask.documents(batch.lengths[rows])
    with spmd.set_current_mesh(mesh), spmd.checker.typecheck(strict_mode="strict"):
        for parameter in model.parameters():
            spmd.assert_type(parameter, {dp: R, cp: R})
        with spmd.no_typecheck():
            sharding = context_parallel(
                mesh["cp"], buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers), mask=mask
            )
            sharding.__enter__()
        for x in buffers:
            spmd.assert_type(x, {dp: V, cp: R if break_it == "tokens" else V})
        logits = model(ids, positions)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        for axis in axes[: 1 if break_it == "loss" else 2]:
            loss = spmd.reinterpret(loss, axis, src=V, dst=P)  # of which the sum over ranks is meant
        with spmd.no_typecheck():
            sharding.__exit__(None, None, None)
        loss.backward()
        total = loss.detach()
        for axis in axes:
            total = spmd.all_reduce(total, axis, src=P, dst=R)


def trainer_step() -> None:
    """A step of the Trainer with a model of transformers, whose forward, loss included, is followed.

    Not strictly: what ringtile compares of a batch between ranks has no type.
    """
    import spmd_types as spmd
    from hf_models import tiny_model
    from hf_training import PROOF, make_trainer
    from ringtile.hf import loss

    dist.init_process_group("fake", rank=RANK, world_size=DP * CP)
    nobody = mock.MagicMock()
    with (
        mock.patch.object(groups, "ProcessGroupTransport", _SilentPeers),
        mock.patch.object(loss, "check_training_model", nobody),  # no engine averages gradients here
    ):
        trained = make_trainer(model=tiny_model("llama"))
        ringtile.enable(trained, PROOF | {"context_parallel_size": CP, "first_batch_check": False})
        cp = next(group for group in dist.distributed_c10d._world.pg_map if group.size() == CP and group.rank() >= 0)
        RingAttention.spmd_typecheck = staticmethod(_typed_ring(cp))  # type: ignore[attr-defined]
        model = trained.model
        original = model.forward

        def forward(**inputs: Any) -> Any:
            for x in (*model.parameters(), *model.buffers(), inputs["num_items_in_batch"]):
                spmd.assert_type(x, {cp: spmd.R})
            for name in ("input_ids", "position_ids", "shift_labels"):
                assert inputs[name].shape == (2, 4)
                spmd.assert_type(inputs[name], {cp: spmd.V})
            with spmd.set_current_mesh([cp]), spmd.checker.typecheck(strict_mode="permissive"):
                outputs = original(**inputs)
            assert spmd.get_axis_local_type(outputs.loss, cp) is spmd.V
            return outputs

        model.forward = forward
        ids = torch.arange(4 * CP).expand(2, -1) % 90 + 3
        batch = {"input_ids": ids, "labels": ids.clone()}
        trained.training_step(model, batch, trained.get_batch_samples(iter([batch]), 1, trained.args.device)[1])


@pytest.mark.long
def test_types_of_a_step_of_the_trainer_on_512_ranks() -> None:
    pytest.importorskip("spmd_types")
    done = run_program("import spmd_types.checker, test_spmd_types; test_spmd_types.trainer_step()")
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("break_it", "finding"),
    [("", ""), ("loss", "backward() on a Varying loss"), ("tokens", "a ring over ranks that hold the same tokens")],
)
def test_types_of_a_step_on_512_ranks(break_it: str, finding: str) -> None:
    pytest.importorskip("spmd_types")
    done = run_program(f"import spmd_types.checker, test_spmd_types; test_spmd_types.plain_step({break_it!r})")
    assert (done.returncode == 0) == (not finding), done.stderr
    assert finding in done.stderr
