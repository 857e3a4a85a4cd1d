"""Rows that begin alike are computed as a tree: numbers are those of the rows, and no token is computed twice."""

from __future__ import annotations

import itertools
import math
from typing import Any

import datasets
import pytest
import ringtile
import torch
from accuracy import assert_same_steps
from hf_models import SIZES, hybrid, tiny_model
from hf_rollouts import make_rollouts, train_rollouts
from hf_training import PROOF, TOLERANCE, make_pairs, make_trainer, train
from pool import run_ranks
from ringtile import IntervalMask
from ringtile.first_batch.proof import record
from ringtile.first_batch.trace import TIMES
from ringtile.hf.features.trees import share, unfold
from ringtile.hf.layers import LayerMask
from ringtile.hf.shard import Reading, shard_batch
from ringtile.hf.trainer import first_batch_of
from test_rollouts import ALL, BRIEF, SLOWLY, assert_equal, assert_same
from transformers import LlamaConfig, LlamaForSequenceClassification

ALONE = {"context_parallel_size": 1, "shared_prefix": True}


# ---- the tree -----------------------------------------------------------------------------------


def _rows(seed: int, num_rows: int = 6, seq_len: int = 17) -> dict[str, torch.Tensor]:
    """Rows of two words, so that many begin alike, with padding at both ends and targets in the second half."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 5, (num_rows, seq_len), generator=generator)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row in range(num_rows):
        first, length = (int(torch.randint(low, 9, (), generator=generator)) for low in (0, 0))
        mask[row, first : first + length] = 1
        labels[row, first + length // 2 : first + length] = ids[row, first + length // 2 : first + length]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _paths(batch: dict[str, torch.Tensor], positions: torch.Tensor) -> list[list[tuple[int, int, int]]]:
    """Of each row, what tells its tokens apart."""
    targets = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    columns = torch.stack([batch["input_ids"], targets, positions.expand_as(targets)], dim=-1)
    return [
        [tuple(x) for x in row[held.bool()].tolist()]
        for row, held in zip(columns, batch["attention_mask"], strict=True)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_holds_each_beginning_once(seed: int) -> None:
    batch = _rows(seed)
    positions = batch["attention_mask"].cumsum(1) - 1
    tree, shared = share(batch, positions)
    paths = _paths(batch, positions)
    beginnings = {tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)}
    num_tokens = tree["input_ids"].size(1)
    assert num_tokens == len(beginnings)
    assert int(shared.num_rows.sum()) == sum(map(len, paths))
    tokens = torch.stack([tree[name][0] for name in ("input_ids", "shift_labels", "position_ids")], dim=-1)
    held = batch["attention_mask"].bool()
    of_rows = [places[row_held].tolist() for places, row_held in zip(shared.places, held, strict=True)]
    for path, places in zip(paths, of_rows, strict=True):
        assert [tuple(tokens[place].tolist()) for place in places] == path
    assert (shared.places[~held] == -1).all()
    for window in (None, 1, 3):
        attends = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
        for places in of_rows:
            for i, query in enumerate(places):
                attends[query, places[0 if window is None else max(0, i - window + 1) : i + 1]] = True
        mask = shared.mask if window is None else shared.mask.last_keys(window)
        assert mask == IntervalMask.from_bool(attends)


def test_gradients_of_a_shared_token_add_up() -> None:
    tree, shared = share({"input_ids": torch.tensor([[3, 4, 5], [3, 4, 6]])}, None)
    assert tree["input_ids"].tolist() == [[3, 4, 5, 6]]
    values = torch.arange(4.0)[None].requires_grad_()
    shared.unshared(values).sum().backward()
    assert values.grad.tolist() == [[2.0, 2.0, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 2, 3])}, "the batch holds cu_seq_lens_q"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "row 0 has padding between its tokens"),
        ({"position_ids": torch.tensor([[0, 1, 0]])}, "position_ids start again in a row"),
    ],
)
def test_refuses_what_is_no_row(more: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(ringtile.RefusedError, match=words):
        share({"input_ids": torch.tensor([[3, 4, 5]]), **more}, more.get("position_ids"))


def test_refuses_chunks() -> None:
    tree, rows = share({"input_ids": torch.tensor([[3, 4, 5], [3, 4, 6]])}, None)
    _, batch = shard_batch(tree, Reading(), layout="zigzag", group=None, rows=rows)
    with pytest.raises(ringtile.RefusedError, match="a layer attends in chunks"):
        batch.narrowed(LayerMask(chunk=2))


# ---- trainings ----------------------------------------------------------------------------------

ROWS = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
OFTEN = ALL | {"per_device_train_batch_size": 4}


def cell(what: str, size: int = 2, long: bool = True, **options: Any) -> Any:
    return pytest.param(size, options, id=f"{what} on {size}", marks=[pytest.mark.long] * long)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        cell("grpo", long=False, **BRIEF | {"per_device_train_batch_size": 4, "max_steps": 2}),
        cell("grpo", 1, **OFTEN),
        cell("grpo", 3, loss_type="grpo", **OFTEN),
        cell("cispo with LoRA", lora=True, loss_type="cispo", **OFTEN),
        cell("experts", family="qwen3-moe", router_aux_loss_coef=0.1, **ROWS),
        cell("sliding windows", family="mistral-sliding", **OFTEN),
        cell("RLOO", kind="RLOO", learning_rate=0.01, **ROWS),
        *(cell(family, family=family, **OFTEN | SLOWLY) for family in ("qwen3_next", "bamba")),
        cell("qwen3_next", 1, family="qwen3_next", **OFTEN | SLOWLY),
        cell("checkpointing", gradient_checkpointing=True, **OFTEN),
        cell("two groups of two", 4, config={"context_parallel_size": 2}, **OFTEN),
    ],
)
def test_rollouts_equal_rows_apart(size: int, options: dict[str, Any]) -> None:
    config = ALONE | {"context_parallel_size": size} | options.pop("config", {})
    groups = size // config["context_parallel_size"]
    expected = train_rollouts(None, **options) if groups == 1 else run_ranks(groups, train_rollouts, None, **options)[0]
    more = options | {"group": config["context_parallel_size"]}
    runs = [train_rollouts(config, **more)] if size == 1 else run_ranks(size, train_rollouts, config, **more)
    # RLOO's ratio is exp of a difference of sums, 14 log-probs of 4.5, whose last place is worth 3.8e-6.
    tolerance = 4e-6 if options.get("kind") == "RLOO" else TOLERANCE
    for run in runs:
        assert_equal(run, expected, tolerance)


def _train_pairs(config: dict[str, Any] | None, name: str) -> Any:
    """Prompts of 3 to 9 tokens, each with two completions; KTO's rows have one each, and are one batch."""
    more: dict[str, Any] = {} if name == "Reward" else {"ref_model": tiny_model(seed=3)}
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)).double() if name == "Reward" else None
    options: dict[str, Any] = {"trainer_class": f"trl.{name}Trainer", "trainer_arguments": more, "model": model}
    if name == "KTO":
        rows = [
            {"prompt": pair["prompt"], "completion": pair[which], "label": which == "chosen"}
            for pair in make_pairs(4)
            for which in ("chosen", "rejected")
        ]
        more["train_dataset"] = datasets.Dataset.from_list(rows)
        options |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    return train(config, evaluate=False, max_steps=2, **options)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("DPO", 2),
        *(
            pytest.param(name, size, marks=pytest.mark.long)
            for name, size in [("DPO", 1), ("KTO", 2), ("KTO", 1), ("Reward", 2), ("Reward", 1)]
        ),
    ],
)
def test_pairs_equal_rows_apart(name: str, size: int) -> None:
    expected = _train_pairs(None, name)
    config = ALONE | {"context_parallel_size": size}
    for run in [_train_pairs(config, name)] if size == 1 else run_ranks(size, _train_pairs, config, name):
        assert_same(run.metrics, expected.metrics, "metrics")
        assert_same(run.losses, expected.losses, "losses")
        for key, weight in expected.weights.items():
            assert (run.weights[key] - weight).abs().max() <= 2 * TOLERANCE * weight.abs().max(), key  # of 2 steps


def _computed_tokens(config: dict[str, Any] | None) -> tuple[int, dict[str, torch.Tensor]]:
    trainer: Any = make_rollouts(max_steps=1, **ROWS)
    tokens: list[int] = []
    embedding = trainer.model.model.embed_tokens
    embedding.register_forward_hook(lambda module, args, output: tokens.append(output[..., 0].numel()))
    if config is not None:
        ringtile.enable(trainer, PROOF | config)
    trainer.train()
    ringtile.restore(trainer)
    return sum(tokens), trainer._buffered_inputs[0]


def test_a_shared_token_is_computed_once() -> None:
    """Two prompts with four completions each: each prompt but for its last token once, instead of four times."""
    (alone, batch), (shared, _) = (_computed_tokens(config) for config in (None, ALONE))
    ids, mask = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], dim=1) for name in ("ids", "mask"))
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, : batch["prompt_ids"].size(1)] = -100
    rows = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    paths = _paths(rows, torch.arange(ids.size(1)))
    beginnings = len({tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)})
    assert shared == beginnings  # balanced pads to one token a rank, and ALONE has one
    assert shared < 0.8 * sum(map(len, paths))
    assert sum(map(len, paths)) < alone == ids.numel()


# ---- refusals -----------------------------------------------------------------------------------


def test_refuses_trainers_and_models_that_it_does_not_fit() -> None:
    for name in ("SFTTrainer", "experimental.orpo.ORPOTrainer"):
        with pytest.raises(ringtile.ConfigError, match="Trainer may use more of its rows than log-prob"):
            train(ALONE, trainer_class=f"trl.{name}", max_steps=1)
    with pytest.raises(ringtile.RefusedError, match="shared_prefix: the model drops"):
        ringtile.enable(make_rollouts(model_dropout=0.1), ALONE)


# ---- the first batch ----------------------------------------------------------------------------


def _prove(config: dict[str, Any], family: str, averages: bool = False) -> tuple[str, Any, list[int]]:
    """What ends a training, or what its first batch proves; and how many tokens the model got in each of its runs."""
    trainer: Any = make_rollouts(family=family, max_steps=1, **ROWS)
    model, tokens = trainer.model, list[int]()
    if averages:
        mlp = model.model.layers[1].mlp
        forward = mlp.forward
        mlp.forward = lambda x: (y := forward(x)) + y.mean(1, keepdim=True)  # a hook would not run in the proof

    def recorded(*args: Any, **kwargs: Any) -> Any:
        trace = record(*args, **kwargs)
        tokens.append(math.prod(trace.calls[0].shape))
        return trace

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ringtile.first_batch.proof.record", recorded)
        ringtile.enable(trainer, config | {"first_batch_check": "require"})  # else it goes on without shared_prefix
        try:
            trainer.train()
        except ringtile.RefusedError as error:
            return str(error), trainer.state.global_step, tokens
    proof = first_batch_of(trainer)
    ringtile.restore(trainer)
    return "", proof, tokens


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("qwen3-moe", 1),
        *(pytest.param(name, 2, marks=pytest.mark.long) for name in ("llama", "qwen3-moe", "qwen3_next")),
    ],
)
def test_the_first_batch_proves_the_tree(family: str, size: int) -> None:
    config = ALONE | {"context_parallel_size": size}
    for said, proof, tokens in [_prove(config, family)] if size == 1 else run_ranks(size, _prove, config, family):
        assert said == ""
        assert proof.num_modules > 20
        assert 0.0 < proof.largest < TIMES
        whole, rounded, sharded = tokens
        assert whole == rounded > size * sharded


def test_the_first_batch_names_what_mixes_tokens_of_a_tree() -> None:
    said, step, _ = _prove(ALONE, "llama", averages=True)
    assert "shared_prefix does not compute what one rank computes without it" in said
    assert "model.layers.1.mlp" in said
    assert step == 0


@pytest.mark.parametrize("wrong", ["positions", "branches"])
def test_the_first_batch_proves_how_rows_are_shared(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def share_wrongly(*given: Any) -> Any:
        tree, rows = share(*given)
        if wrong == "positions":
            tree["position_ids"] = torch.arange(rows.num_tokens)[None]
        else:
            rows.parents = [*range(-1, len(rows.parents) - 1)]
        return tree, rows

    monkeypatch.setattr("ringtile.hf.shard.share", share_wrongly)
    said, step, _ = _prove(ALONE, "llama")
    assert ("rotary_emb" if wrong == "positions" else "model.layers.0.self_attn") in said
    assert step == 0


# ---- trees that the batch says ------------------------------------------------------------------

PARENTS, LENGTHS = [-1, 0, 0, 2, 2, -1, 5], [5, 4, 1, 3, 6, 2, 3]


def _tree(rows: Any = None) -> dict[str, torch.Tensor]:
    """Two trees in a row with padding at its end; some tokens, and the first of each tree, are no targets."""
    ids = 7 * torch.arange(sum(LENGTHS)) % 93 + 3
    labels = ids.masked_fill(torch.arange(len(ids)) % 5 == 0, -100)
    labels[sum(LENGTHS[:5])] = -100
    batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    padded = {name: torch.nn.functional.pad(x, (0, 2), value=fill[name])[None] for name, x in batch.items()}
    return padded | {"tree_parents": torch.tensor([PARENTS]), "tree_lengths": torch.tensor([LENGTHS])}


def _train_tree(config: dict[str, Any], family: str, tree: Any = _tree) -> Any:
    model = (tiny_model(family) if family == "llama" else hybrid(family)).double().train()
    return train(config, model=model, collator=tree, gradient_accumulation_steps=1, evaluate=False, max_steps=2)


def _ways() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tokens and targets of each way from a root; a token is the target of one."""
    ids, labels = (_tree()[name][0] for name in ("input_ids", "labels"))
    begins = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    ways, seen = [], set[int]()
    for leaf in range(len(PARENTS)):
        way, node = list[int](), leaf
        while node >= 0:
            way = [*range(begins[node], begins[node] + LENGTHS[node]), *way]
            node = PARENTS[node]
        new = torch.tensor([token not in seen for token in way[1:]])
        targets = labels[way[1:]].where(new, -100)
        ways.append((ids[way], torch.nn.functional.pad(targets, (0, 1), value=-100)))
        seen |= set(way)
    return ways


def _train_ways(
    family: str, ways: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same steps on the ways from the roots, row by row."""
    model = (tiny_model(family) if family == "llama" else hybrid(family)).double().train()
    losses = []
    for rate in (0.3, 0.15):
        loss = sum(
            torch.nn.functional.cross_entropy(model(ids[None]).logits[0], targets, reduction="sum")
            for ids, targets in ways
        ) / sum(int(targets.ne(-100).sum()) for _, targets in ways)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
        losses.append(loss.item())
    return losses, {name: x.detach() for name, x in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "size"), [("llama", 2), *(pytest.param("llama", size, marks=pytest.mark.long) for size in (3, 4))]
)
def test_a_trainer_trains_on_a_tree(family: str, size: int) -> None:
    losses, weights = _train_ways(family, _ways())
    for run in run_ranks(size, _train_tree, {"context_parallel_size": size}, family):
        assert_same_steps(run.losses, losses, TOLERANCE)
        for name, weight in weights.items():
            assert (run.weights[name] - weight).abs().max() <= len(losses) * TOLERANCE * weight.abs().max(), name


@pytest.mark.parametrize(
    "family", ["llama", "bamba", *(pytest.param(n, marks=pytest.mark.long) for n in ("lfm2", "qwen3_5_text"))]
)
def test_a_trainer_trains_on_a_tree_where_nothing_is_sharded(family: str) -> None:
    losses, weights = _train_ways(family, _ways())
    run = _train_tree(ALONE, family)
    assert_same_steps(run.losses, losses, TOLERANCE)
    for name, weight in weights.items():
        assert (run.weights[name] - weight).abs().max() <= len(losses) * TOLERANCE * weight.abs().max(), name


def _train_and_evaluate_on_a_rank(config: dict[str, Any]) -> tuple[list[float], float]:
    trainer = make_trainer(collator=_tree, max_steps=2, learning_rate=0.0)
    ringtile.enable(trainer, PROOF | config)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    ringtile.restore(trainer)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], before


def test_evaluates_trees_on_one_rank_as_on_two() -> None:
    alone = _train_and_evaluate_on_a_rank(ALONE)
    on_two = run_ranks(2, _train_and_evaluate_on_a_rank, {"context_parallel_size": 2})
    assert on_two[0] == on_two[1]
    assert alone[0] == pytest.approx(on_two[0][0], rel=1e-6)
    assert alone[1] == pytest.approx(on_two[0][1], rel=1e-6)


def test_refuses_a_tree_outside_of_a_step() -> None:
    trainer = make_trainer(collator=_tree, max_steps=1)
    ringtile.enable(trainer, ALONE)
    with pytest.raises(ringtile.RefusedError, match="the batch holds tree_parents, and its model is called outside"):
        trainer.model(**_tree())


def test_refuses_a_tree_that_is_not_the_row() -> None:
    batch = _tree()
    with pytest.raises(ringtile.InputError, match="the tree is of 23 tokens"):
        unfold(batch | {"tree_lengths": torch.tensor([[4, *LENGTHS[1:]]])}, None)
    with pytest.raises(ringtile.InputError, match="depth-first order"):
        unfold(batch | {"tree_parents": torch.tensor([[-1, 0, 0, 1, 2, -1, 5]])}, None)
    with pytest.raises(ringtile.RefusedError, match="the batch holds seq_idx"):
        unfold(batch | {"seq_idx": batch["input_ids"]}, None)


# ---- trees that TRL makes -----------------------------------------------------------------------


def _samples(seed: int) -> list[dict[str, Any]]:
    """Of two words, so that many begin alike; some are equal, or begin others."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(int(torch.randint(1, 9, (), generator=generator))):
        length = int(torch.randint(1, 12, (), generator=generator))
        ids = torch.randint(3, 5, (length,), generator=generator)
        mask = torch.rand(length, generator=generator) < 0.7
        numbers = {"old_log_probs": torch.zeros(length), "advantage": 1.0, "group_id": i}
        samples.append({"input_ids": ids, "completion_mask": mask.long(), **numbers})
    return samples


def _tree_of_trl(seed: int) -> dict[str, torch.Tensor]:
    """The row as TRL packs and pads it, without the numbers of its loss."""
    packing = pytest.importorskip("trl.experimental.async_grpo.packing")
    row = packing.TreeRow()
    for sample in _samples(seed):
        row.add(sample)
    of_loss = ("token_index", "old_log_probs", "advantages", "segment_id")
    batch = {name: x[None] for name, x in row.pack().items() if name not in of_loss}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    paddings = {"shift_labels": -100, "tree_kv_index": -1, "tree_cu_seqlens_q": -1, "tree_cu_seqlens_k": -1}
    for name in batch.keys() - {"tree_max_seqlens"}:
        batch[name] = torch.nn.functional.pad(batch[name], (0, 3), value=paddings.get(name, 0))
    return batch


@pytest.mark.parametrize("seed", range(30))
def test_a_tree_of_trl_attends_as_in_trl(seed: int) -> None:
    """Queries of a segment attend the keys of its way, causally and bottom-right aligned, as by tree_attention."""
    batch = _tree_of_trl(seed)
    keys, of_queries, of_keys = (
        batch[f"tree_{name}"][0, :-3].tolist() for name in ("kv_index", "cu_seqlens_q", "cu_seqlens_k")
    )
    attends = torch.zeros(of_queries[-1], of_queries[-1], dtype=torch.bool)
    for i, (begin, end) in enumerate(itertools.pairwise(of_queries)):
        for query in range(begin, end):
            attends[query, keys[of_keys[i] : of_keys[i + 1] - (end - 1 - query)]] = True
    row, shared = unfold(batch, batch["position_ids"])
    assert shared.mask == IntervalMask.from_bool(attends)
    for name in ("input_ids", "position_ids", "shift_labels"):
        assert torch.equal(row[name], batch[name][:, :-3])
    assert row.keys() == {"input_ids", "position_ids", "shift_labels"}


def _ways_of_trl(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The samples; a token counts once in those that agree up to the next one, if one of them trains on that."""
    samples = [(sample["input_ids"], sample["completion_mask"].tolist()) for sample in _samples(seed)]
    trained = {tuple(ids[: i + 1].tolist()) for ids, mask in samples for i in range(1, len(ids)) if mask[i]}
    ways = []
    for ids, _ in samples:
        targets = torch.full_like(ids, -100)
        for i in range(1, len(ids)):
            if tuple(ids[: i + 1].tolist()) in trained:
                trained.remove(tuple(ids[: i + 1].tolist()))
                targets[i - 1] = ids[i]
        ways.append((ids, targets))
    return ways


@pytest.mark.parametrize(
    ("seed", "size"), [(7, 2), *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, 2), (8, 2), (7, 3)))]
)
def test_a_trainer_trains_on_a_tree_of_trl(seed: int, size: int) -> None:
    losses, weights = _train_ways("llama", _ways_of_trl(seed))
    for run in run_ranks(size, _train_trl_tree, {"context_parallel_size": size}, seed):
        assert_same_steps(run.losses, losses, TOLERANCE)
        for name, weight in weights.items():
            assert (run.weights[name] - weight).abs().max() <= len(losses) * TOLERANCE * weight.abs().max(), name


def _train_trl_tree(config: dict[str, Any], seed: int) -> Any:
    batch = _tree_of_trl(seed)
    return _train_tree(config, "llama", lambda rows: batch)


def test_refuses_segments_that_are_no_tree() -> None:
    ids = torch.arange(6)[None]
    tree = {
        "tree_kv_index": torch.tensor([[0, 1, 0, 1, 2, 0, 1, 3, 4, 5]]),
        "tree_cu_seqlens_q": torch.tensor([[0, 2, 3, 5, 6]]),
        "tree_cu_seqlens_k": torch.tensor([[0, 2, 5, 9, 10]]),
    }
    batch = {"input_ids": ids, "shift_labels": ids, **tree}
    _, shared = unfold(batch, None)
    assert (shared.parents, shared.lengths) == ([-1, 0, 0, -1], [2, 1, 2, 1])
    for name, numbers, words in [
        ("tree_kv_index", [0, 1, 0, 1, 2, 0, 1, 4, 3, 5], "segment 2 .* its own tokens"),
        ("tree_kv_index", [0, 1, 0, 1, 2, 1, 0, 3, 4, 5], "segment 2 "),
        ("tree_kv_index", [0, 1, 0, 0, 2, 0, 1, 3, 4, 5], "segment 1 "),
        ("tree_kv_index", [0, 1, 0, 1, 2, 0, 2, 3, 4, 5], "segment 2 "),
        ("tree_kv_index", [0, 1, 0, 1, 2, 0, 5, 3, 4, 5], "segment 2 "),
        ("tree_cu_seqlens_q", [0, 2, 3, 6], "tree_cu_seqlens_q"),
        ("tree_cu_seqlens_q", [0, 2, 2, 5, 6], "tree_cu_seqlens_q"),
        ("tree_cu_seqlens_q", [1, 2, 3, 5, 6], "tree_cu_seqlens_q"),
        ("tree_cu_seqlens_k", [0, 2, 5, 9, 11], "tree_cu_seqlens_k"),
    ]:
        with pytest.raises(ringtile.InputError, match=words):
            unfold(batch | {name: torch.tensor([numbers])}, None)
    with pytest.raises(ringtile.InputError, match="depth-first order"):  # segment 3 goes on from segment 1
        unfold(
            batch
            | {
                "tree_kv_index": torch.tensor([[0, 1, 0, 1, 2, 0, 1, 3, 4, 0, 1, 2, 5]]),
                "tree_cu_seqlens_k": torch.tensor([[0, 2, 5, 9, 13]]),
            },
            None,
        )
    with pytest.raises(ringtile.InputError, match="the tree is of 6 tokens"):
        unfold(batch | {"input_ids": ids[:, :5]}, None)
    with pytest.raises(ringtile.InputError, match="expected one row"):
        unfold(batch | {"input_ids": ids[0]}, None)
    with pytest.raises(ringtile.InputError, match="tree_cu_seqlens_k is missing"):
        unfold({name: x for name, x in batch.items() if name != "tree_cu_seqlens_k"}, None)
    with pytest.raises(ringtile.InputError, match="tree_lengths is missing"):
        unfold({"input_ids": ids, "tree_parents": torch.tensor([[-1]])}, None)
    with pytest.raises(ringtile.RefusedError, match="the batch holds token_index beside tree_kv_index"):
        unfold(batch | {"token_index": ids}, None)
    with pytest.raises(ringtile.RefusedError, match="the batch holds tree_kv_index beside tree_parents"):
        unfold(batch | {"tree_parents": torch.tensor([[-1]]), "tree_lengths": torch.tensor([[6]])}, None)
