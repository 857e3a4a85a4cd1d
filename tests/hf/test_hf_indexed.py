"""Learned sparse attention of transformers' models on ranks: the same keys as in one process, and equal trainings."""

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from cells import Cell, Refusal, check, check_enable, params, table
from hf_training import Padded, packed
from ringtile import IntervalMask, Layout, RefusedError, ShardedSequence
from ringtile.hf import attention, model
from ringtile.hf.batch import active
from ringtile.hf.features import indexed
from ringtile.hf.layers import indexers
from ringtile.hf.masks import mask_of_batch
from ringtile.hf.patches import Patches
from ringtile.hf.shard import Reading, shard_batch
from ringtile.transport.loopback import LoopbackWorld
from strategies import dense
from torch import Tensor

from tools.models import tiny_models

# An indexer in each layer; in some, whose choice others share; sinks. AXK2, Dots 3 and Mistral Large 4 are in the table
# of docs/guide/models.md.
TYPES = ("deepseek_v32", "glm_moe_dsa", "hy_v4")
SEQ_LEN = 27
IDS = torch.randint(3, 64, (2, SEQ_LEN), generator=torch.Generator().manual_seed(7))
BATCHES = {
    "left": {"input_ids": IDS, "attention_mask": torch.tensor([[0] * 4 + [1] * 23, [1] * SEQ_LEN])},
    "packed": {
        "input_ids": IDS,
        "position_ids": torch.cat([torch.arange(11), torch.arange(9), torch.arange(7)]).expand(2, -1),
    },
}


def sparse(name: str, **changes: Any) -> Any:
    """A tiny model of a type. It has 16 heads in the indexer: of few, many scores are 0, and torch.topk, which one
    process asks, says nothing of equal ones."""
    config = tiny_models.tiny_config(name)
    for key, value in changes.items():
        setattr(config, key, value)
    return tiny_models.tiny_model(config)


def watched(own: Any) -> list[Tensor]:
    """What its indexers return, from now on."""
    chosen: list[Tensor] = []
    for indexer in indexers(own.named_modules()).values():
        indexer.register_forward_hook(lambda module, args, output: chosen.append(output))
    return chosen


def sets_of(chosen: Tensor, attend: Tensor) -> Tensor:
    """int32 (B, S, I) -> bool (B, S, S): the keys that are chosen and may be attended."""
    kept = chosen.long().masked_fill((chosen < 0) | (chosen >= SEQ_LEN), SEQ_LEN)
    return torch.zeros(2, SEQ_LEN, SEQ_LEN + 1, dtype=torch.bool).scatter(-1, kept, value=True)[..., :-1] & attend


def on_ranks(switched: Any, batch: dict[str, Tensor], world_size: int, layout: str) -> tuple[Tensor, list[Tensor]]:
    """Logits (B, S, V), and what each indexer has chosen."""

    def run(group: Any) -> tuple[Tensor, list[Tensor]]:
        own = copy.deepcopy(switched)
        chosen = watched(own)
        local, sharded = shard_batch(batch, Reading(positions_separate=True), layout=layout, group=group)
        model.pin_rope_length(own, Patches())
        with torch.no_grad(), active(sharded):
            return sharded.unshard(own(**local).logits), [sharded.unshard(each) for each in chosen]

    return LoopbackWorld(world_size).run(run)[0]


def switched(whole: Any) -> Any:
    own = copy.deepcopy(whole)
    model.switch_attention(own, Patches())
    indexed.install(own, Patches())
    return own


WORLDS = list(itertools.product((1, 2, 3, 4), ("contiguous", "zigzag", "balanced")))
IN_EVERY_RUN = [(2, "zigzag"), (3, "balanced")]


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(
    "worlds", [IN_EVERY_RUN, pytest.param(WORLDS, marks=pytest.mark.long)], ids=["two worlds", "all worlds"]
)
def test_every_rank_chooses_the_keys_of_one_process(name: str, kind: str, worlds: list[tuple[int, str]]) -> None:
    """On 1 to 4 ranks, in each layout; and the logits are those of transformers' eager attention, which knows sinks."""
    whole, batch = sparse(name).eval(), BATCHES[kind]
    own, expected_sets = switched(whole), watched(whole)
    seen = batch.get("attention_mask", torch.ones(2, SEQ_LEN)).bool()  # nobody reads the logits of padding
    whole.set_attn_implementation("eager")
    with torch.no_grad():
        expected = whole(**batch, use_cache=False).logits
        if name != "hy_v4":  # nothing is sharded: the mask of transformers' attention is narrowed
            assert torch.allclose(own(**batch, use_cache=False).logits[seen], expected[seen], atol=1e-5)
    attend = dense(mask_of_batch(batch, 2, SEQ_LEN)).expand(2, -1, -1)
    for world_size, layout in worlds:
        logits, chosen = on_ranks(own, batch, world_size, layout)
        assert len(chosen) == len(expected_sets) > 0
        for one, other in zip(chosen, expected_sets, strict=True):
            got, wanted = (sets_of(each, attend)[seen] for each in (one, other))
            assert torch.equal(got, wanted)
            assert 6 == wanted.sum(-1).max() < SEQ_LEN // 3
        # As in test_hf_attention.py, of twice as many layers.
        assert (logits - expected)[seen].abs().max() <= 128 * 2.0**-24 * expected[seen].abs().max()


@pytest.mark.parametrize("name", TYPES)
def test_other_tokens_of_another_document_move_no_bit(name: str) -> None:
    """Without experts, whose products have as many rows as tokens chose them."""
    config = tiny_models.tiny_config(name)
    own = switched(sparse(name, mlp_layer_types=["dense"] * config.num_hidden_layers).eval())
    batch = BATCHES["packed"]
    changed = {**batch, "input_ids": IDS.clone()}
    changed["input_ids"][:, 11:20] = 3 + IDS[:, 11:20] % 60  # the second document
    (one, _), (other, _) = (on_ranks(own, each, 2, "zigzag") for each in (batch, changed))
    others = torch.ones(SEQ_LEN, dtype=torch.bool)
    others[11:20] = False
    assert torch.equal(one[:, others], other[:, others])
    assert not torch.equal(one[:, ~others], other[:, ~others])


# ---- trainings ----------------------------------------------------------------------------------


@functools.cache
def made(name: str, frozen: bool = False) -> Any:
    """frozen: the indexers, as DDP needs it in a checkpointed model."""

    def make() -> dict[str, Any]:
        own = sparse(name, output_router_logits=False)  # predictions are logits alone
        for indexer in indexers(own.named_modules()).values() if frozen else ():
            indexer.requires_grad_(requires_grad=False)
        return {"model": own}

    return make


STEPS = {"gradient_accumulation_steps": 1, "num_rows": 24}
PACKED, PADDED = {**STEPS, "collator": packed}, {**STEPS, "collator": Padded("left")}
KEPT = {**PADDED, "gradient_checkpointing": True}
TILED = {"tiled_mlp": True, "tiled_norm": True, "tiled_loss": True, "tile_tokens": 5}


def training(
    name: str, what: str, options: dict[str, Any], world: int, long: bool = True, engine: str = "DDP", **config: Any
) -> Cell:
    config, made_of = {"context_parallel_size": world, **config}, made(name, "gradient_checkpointing" in options)
    of_ranks = {"ranks": {"engine": engine}, "made": made_of, "world": world, "long": long}
    # Of logits up to 5, each of which is a sum of 32 products (test_hf_attention.py).
    return Cell(f"{name}, {what}", options, config, predictions=5 * 2.0**-19, **of_ranks)


TRAININGS = [
    training("deepseek_v32", "packed, tiled", PACKED, 2, long=False, **TILED),
    training("deepseek_v32", "evaluated", {**PADDED, "evaluate": True}, 2),
    training("glm_moe_dsa", "checkpointed", KEPT, 2, False, layout="contiguous"),
    training("hy_v4", "balanced", PACKED, 2, long=False, layout="balanced"),
    training("deepseek_v32", "FSDP2", PACKED, 2, long=False, engine="FSDP2"),
    training("hy_v4", "FSDP2 and checkpointed", KEPT, 2, engine="FSDP2"),
    training("glm_moe_dsa", "ZeRO-3", PACKED, 2, engine="ZeRO-3"),
    training("deepseek_v32", "ZeRO-3 and checkpointed", KEPT, 2, engine="ZeRO-3"),
    training("deepseek_v32", "ZeRO-2", PADDED, 2, engine="ZeRO-2"),
    *(training(name, "packed on four", PACKED, 4, layout="balanced") for name in TYPES),
    *(training(name, "heads exchanged", PADDED, 2, context_parallel_scheme="ulysses") for name in TYPES),
    *(training(name, "zigzag on three", PACKED, 3, layout="zigzag") for name in TYPES),
]
CELLS = table(*TRAININGS)


@pytest.mark.parametrize("cell", params(CELLS))
def test_training_equals_one_process(cell: Cell) -> None:
    check(__name__, cell)


# ---- what is refused ----------------------------------------------------------------------------

DEEPSEEK = made("deepseek_v32")
BESIDE = table(
    Refusal(
        "torch_compile",
        "exact with torch_compile",
        made=DEEPSEEK,
        prepare=lambda x: setattr(x.args, "torch_compile", True),
    ),
    Refusal("shared_prefix", "exact with shared_prefix", made=DEEPSEEK, config={"shared_prefix": True}),
    Refusal("stream", "picks keys by all tokens of the sequence", made=DEEPSEEK, config={"stream": True}),
    Refusal(
        "dropout",
        "exact with attention dropout",
        made=lambda: {"model": sparse("deepseek_v32", attention_dropout=0.1)},
    ),
    Refusal(
        "a loss of its own",
        "Trainer, whose loss needs whole sequences",
        made=DEEPSEEK,
        prepare=lambda x: setattr(x, "compute_loss_func", lambda *given, **options: None),
    ),
)


@pytest.mark.parametrize("refusal", BESIDE.values(), ids=BESIDE)
def test_what_is_not_shown_is_refused(refusal: Refusal) -> None:
    check_enable(refusal)


def scores() -> Any:
    sequence = ShardedSequence(IntervalMask.causal(8), Layout.contiguous(8, 1))
    return indexed._Scores("layer.indexer (Indexer)", sequence).of_keys(torch.ones(1, 8, 4), 0).unsqueeze(1)


QUERIES, WEIGHTS = torch.ones(1, 8, 2, 4), torch.ones(1, 8, 1, 2)
STRANGE = {
    "softmax of products": lambda: torch.matmul(QUERIES, scores()).softmax(-1),
    "gelu of products": lambda: torch.nn.functional.gelu(torch.matmul(QUERIES, scores())),
    "a product with a number of keys": lambda: scores() * 2.0,
    "products times a Tensor": lambda: torch.matmul(QUERIES, scores()) * torch.ones(()),
    "matmul of products": lambda: torch.matmul(WEIGHTS, torch.matmul(QUERIES, scores())),
    "a top-k of products": lambda: torch.matmul(QUERIES, scores()).topk(2, dim=-1),
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_step_that_is_not_known_is_refused(what: str) -> None:
    with pytest.raises(RefusedError, match=rf"layer.indexer \(Indexer\) computes {what}; expected the top-k of scores"):
        STRANGE[what]()


def test_indices_of_a_layer_without_an_indexer_are_refused() -> None:
    with pytest.raises(RefusedError, match="hands its attention indices"):
        attention.refuse_unknown(torch.nn.Linear(1, 1), {"indices": torch.zeros(1, 8, 2, dtype=torch.int32)})
