"""Streamed hybrids, whose recurrences go on from chunk to chunk, against the same layers whole, in float64."""

import copy

import pytest
import ringtile
import torch
from ringtile.errors import RefusedError
from ringtile.hf.batch import active
from ringtile.hf.config import Config
from ringtile.hf.features import recurrent, stream
from ringtile.hf.model import switch_attention
from ringtile.hf.patches import Patches
from ringtile.hf.shard import Reading, shard_batch
from ringtile.planner.setup import Setup
from ringtile.planner.step import TrainingStep
from ringtile.recurrent.carried import Carried, running_on
from ringtile.recurrent.functions import causal_conv1d
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence
from ringtile.transport.loopback import LoopbackGroup, LoopbackWorld
from test_stream_layers import CHUNK, KINDS, TOKENS, assert_equal, batch_of, cells, no_float32, run
from torch import Tensor
from transformers import PreTrainedModel

from tools.models.tiny_models import tiny_config, tiny_model

__all__ = ["no_float32"]  # a fixture
EVERY_RUN = ("qwen3_next", "jamba", "falcon_h1", "lfm2")
FAMILIES = (*EVERY_RUN, "bamba", "granitemoehybrid", "mamba2", "mamba", "falcon_mamba", "kimi_linear", "bailing_hybrid")
FAMILIES += ("lara_mini", "minimax", "olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text", "lfm2_moe", "zamba", "zamba2")


def model_of(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = tiny_config(model_type)
    config.output_router_logits = False  # a balancing loss over shards is another matter
    model = tiny_model(config).double().train()
    model.set_experts_implementation("eager")
    return model


def run_on_one_rank(model: PreTrainedModel, kind: str, chunk: int = 0) -> dict[str, Tensor]:
    """As a Trainer does; chunk: of streamed layers, or 0."""

    def rank(group: object) -> dict[str, Tensor]:
        patches = Patches()
        switch_attention(model, patches)
        recurrent.install(model, patches)
        if chunk:
            stream.install(model, chunk, patches, recurs=True)
        local, batch = shard_batch(batch_of(kind), Reading(), layout="contiguous", group=group)
        try:
            with active(batch):
                return run(model, local)
        finally:
            patches.restore()

    return LoopbackWorld(1).run(rank)[0]


SHORT_ALONE = {(name, "packed") for name in EVERY_RUN} | {("qwen3_next", "plain")}
SHORT_ALONE |= {("qwen3_next", "left padding"), ("falcon_h1", "left padding"), ("jamba", "right padding")}


@pytest.mark.parametrize(("model_type", "kind"), cells(SHORT_ALONE, FAMILIES, KINDS))
def test_streamed_equals_whole(model_type: str, kind: str) -> None:
    model = model_of(model_type)
    expected = run_on_one_rank(model, kind)
    assert_equal(run_on_one_rank(model, kind, CHUNK), expected)
    if kind == "plain" and model_type == "qwen3_next":  # and what transformers computes, whose gradient of A_log errs
        assert_equal(run(model, batch_of()), expected, 1e-11)


def run_on_ranks(model: PreTrainedModel, kind: str, world: int, layout: str, scheme: str = "ring") -> dict[str, Tensor]:
    """A loss of all logits, and its gradients, of streamed layers over ranks; of one rank: whole ones."""
    weights = torch.randn(2, 2 * TOKENS, model.config.vocab_size, generator=torch.Generator().manual_seed(7))
    batch = {name: x for name, x in batch_of(kind).items() if name != "labels"}
    weights[:, :TOKENS][batch.get("attention_mask", torch.ones(2, TOKENS)) == 0] = 0
    weights[:, TOKENS:] = 0
    models, patches = [copy.deepcopy(model) for _ in range(world)], Patches()
    for each in models:
        switch_attention(each, patches)
        recurrent.install(each, patches)
        if world > 1:
            stream.install(each, CHUNK, patches, recurs=True)

    def rank(group: LoopbackGroup) -> dict[str, Tensor]:
        own = models[group.transport.rank]
        local, of_batch = shard_batch(batch, Reading(), layout=layout, group=group, scheme=scheme)
        with active(of_batch):
            logits = own(**local).logits
            loss = (logits * weights[:, of_batch.places]).sum()
            loss.backward()
        return {"loss": loss.detach(), **{name: p.grad for name, p in own.named_parameters() if p.grad is not None}}

    try:
        ranks = LoopbackWorld(world).run(rank)
    finally:
        patches.restore()
    return {name: sum(each[name] for each in ranks) for name in ranks[0]}


SHORT = {("qwen3_next", "packed", 2), ("qwen3_next", "left padding", 3), ("bamba", "plain", 3), ("jamba", "packed", 2)}
SHORT |= {("falcon_h1", "right padding", 2)}  # attends beside its recurrence


@pytest.mark.parametrize(("model_type", "kind", "world"), cells(SHORT, FAMILIES, KINDS, (2, 3)))
def test_streamed_over_ranks_equals_whole(model_type: str, kind: str, world: int) -> None:
    layout, scheme = ("contiguous", "ring") if world == 2 else ("zigzag", "ulysses")
    model = model_of(model_type)
    found = run_on_ranks(model, kind, world, layout, scheme)
    assert_equal(found, run_on_ranks(model, kind, 1, "contiguous"))


@pytest.mark.parametrize("chunk", [2, 50, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 3, TOKENS))])
def test_chunks_shorter_than_a_convolution_and_one_of_all_tokens(chunk: int) -> None:
    model = model_of("qwen3_next")
    assert_equal(run_on_one_rank(model, "packed", chunk), run_on_one_rank(model, "packed"))


def test_what_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"layers\.0\.linear_attn is a Qwen3NextGatedDeltaNet, whose state goes on"):
        ringtile.stream_layers(model_of("qwen3_next"))  # transformers' recurrences know no documents
    with pytest.raises(RefusedError, match=r"layers\.1 attends 0 times through transformers' AttentionInterface"):
        run_on_one_rank(model_of("nemotron_h"), "plain", CHUNK)
    with pytest.raises(RefusedError, match="expected runs of neighboring tokens"):
        run_on_ranks(model_of("qwen3_next"), "plain", 2, "striped")


def test_a_tree_is_refused() -> None:
    tree = ShardedSequence.of(IntervalMask.tree([-1, 0, 0], [4, 3, 3]), Layout.contiguous(10, 1))
    x = torch.randn(1, 5, 4)
    with (
        running_on(Carried(slice(0, 5), [])),
        pytest.raises(RefusedError, match="in a tree of tokens; expected one rank"),
    ):
        causal_conv1d(x, torch.randn(4, 3), tree)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_planner_streams_hybrids(ranks: int) -> None:
    """A layer's keys and values, and a state and W - 1 inputs of each recurrent layer for each chunk; on two ranks what
    one layer's recurrence takes and gives."""
    config = tiny_config("qwen3_next")
    keys = {"context_parallel_size": ranks, "tiled_loss": True, "tile_tokens": 32, "keep_attention": False}
    slopes = {}
    for streams in (False, True):
        with TrainingStep(Setup(config, devices=ranks, ringtile=Config(**keys, stream=streams))) as step:
            shorter, longer = (step.run(tokens).total for tokens in (64, 128))
        slopes[streams] = (longer - shorter) / 64
    assert slopes[True] < slopes[False] / 3
