"""Sharding a batch: every token goes to one rank, and the mask is transformers' own."""

import itertools

import pytest
import ringtile
import torch
from ringtile.hf.families import CACHES
from ringtile.hf.layers import LayerMask
from ringtile.hf.masks import mask_of_batch
from ringtile.hf.shard import Reading, shard_batch
from ringtile.sequence.layout import CHUNKS_PER_RANK, Layout
from ringtile.transport.loopback import LoopbackWorld
from torch.nn import functional
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

RIGHT = torch.tensor([[1] * 12, [1] * 7 + [0] * 5])


def _ids(batch_size, seq_len):
    return torch.arange(batch_size * seq_len).reshape(batch_size, seq_len) + 1


def _positions(*lengths):
    return torch.cat([torch.arange(length) for length in lengths])[None]


def _shard(inputs, layout="zigzag", world_size=2, **reading):
    """[(local batch, ShardedBatch)] of every rank."""
    return LoopbackWorld(world_size).run(
        lambda group: shard_batch(inputs, Reading(**reading), layout=layout, group=group)
    )


def _dense(mask):
    """(B or 1, S, S) bool, [query, key], True = attends."""
    keys = torch.arange(mask.seq_len)
    return (mask.begin[..., None] <= keys) & (keys < mask.end[..., None])


def _unshard(shards, name):
    """The global padded tensor from the shards of all ranks."""
    layout = shards[0][1].sequence.layout
    positions = torch.cat([layout.positions(rank) for rank in range(layout.world_size)])
    return torch.cat([local[name] for local, _ in shards], dim=1)[:, positions.argsort()]


@pytest.mark.parametrize(("layout", "world_size"), list(itertools.product(CHUNKS_PER_RANK, (2, 3))))
@pytest.mark.parametrize("seq_len", [12, 13, 3, 1])
def test_shards_are_a_partition_of_the_global_batch(layout, world_size, seq_len):
    inputs = {"input_ids": _ids(2, seq_len), "labels": _ids(2, seq_len)}
    shards = _shard(inputs, layout, world_size)
    padding = shards[0][1].sequence.seq_len - seq_len
    assert padding == max(0, Layout.multiple(layout, world_size) - seq_len)  # only where a rank had no token
    last = inputs["input_ids"][:, -1:].expand(-1, padding)
    assert torch.equal(_unshard(shards, "input_ids"), torch.cat([inputs["input_ids"], last], dim=1))
    positions = torch.arange(seq_len + padding).clamp(max=seq_len - 1).expand(2, -1)
    assert torch.equal(_unshard(shards, "position_ids"), positions)
    # Next-token labels, shifted before they are sharded: no rank loses the target of its last token.
    shifted = functional.pad(inputs["labels"][:, 1:], (0, padding + 1), value=-100)
    assert torch.equal(_unshard(shards, "shift_labels"), shifted)
    assert torch.equal(_unshard(shards, "labels"), shifted)
    sizes = [local["input_ids"].size(1) for local, _ in shards]
    assert max(sizes) - min(sizes) <= (2 if layout == "zigzag" else 1)
    assert all(batch.num_targets == 2 * (seq_len - 1) for _, batch in shards)


def test_sharding_leaves_the_batch_as_it_was():
    inputs = {"input_ids": _ids(1, 8), "labels": _ids(1, 8)}
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    _shard(inputs)
    assert inputs.keys() == before.keys()
    assert all(torch.equal(inputs[name], before[name]) for name in before)


def test_given_shift_labels_win():
    inputs = {"input_ids": _ids(1, 8), "labels": _ids(1, 8), "shift_labels": _ids(1, 8) + 50}
    assert torch.equal(_unshard(_shard(inputs), "shift_labels"), inputs["shift_labels"])


def test_embeddings_are_sharded_like_ids():
    inputs = {"inputs_embeds": torch.randn(2, 9, 4)}
    assert torch.equal(_unshard(_shard(inputs), "inputs_embeds")[:, :9], inputs["inputs_embeds"])


def test_position_ids_of_one_row_serve_all():
    shards = _shard({"input_ids": _ids(3, 8), "position_ids": torch.arange(8)[None] + 5})
    assert torch.equal(_unshard(shards, "position_ids"), (torch.arange(8) + 5).expand(3, -1))
    assert shards[0][1].max_position == 12


def test_attention_mask_is_sharded_for_code_that_counts_tokens():
    shards = _shard({"input_ids": _ids(2, 9), "attention_mask": RIGHT[:, :9]})
    assert torch.equal(_unshard(shards, "attention_mask"), RIGHT[:, :9])
    shards = _shard({"input_ids": _ids(2, 3), "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])})
    assert _unshard(shards, "attention_mask").tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]
    assert _unshard(shards, "input_ids")[0, 3] == _ids(2, 3)[0, 1]  # that of the last token, not of padding
    assert sum(local["attention_mask"].sum() for local, _ in _shard({"input_ids": _ids(2, 9)})) == 18
    assert sum(local["attention_mask"].sum() for local, _ in _shard({"input_ids": _ids(2, 3)})) == 6  # one is padding
    assert shards[0][0]["use_cache"] is False


# ---- the mask is that of transformers -----------------------------------------------------------

LEFT = torch.tensor([[0] * 3 + [1] * 9, [1] * 12])
BOTH = torch.tensor([[0] * 3 + [1] * 5 + [0] * 4, [0] * 12])
PACKED = torch.cat([_positions(5, 3, 4), _positions(12)])


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    "batch",
    [
        {},
        {"attention_mask": RIGHT},
        {"attention_mask": LEFT},
        {"attention_mask": BOTH},
        {"position_ids": PACKED},
        {"position_ids": torch.arange(12).expand(2, -1) + 3},
        {"attention_mask": LEFT, "position_ids": (LEFT.cumsum(1) - 1).clamp(min=0)},
    ],
    ids=["plain", "right", "left", "both", "packed", "offset", "left-positions"],
)
def test_mask_is_that_of_transformers(batch, window):
    config = LlamaConfig(attn_implementation="sdpa", sliding_window=window)
    create = create_causal_mask if window is None else create_sliding_window_causal_mask
    positions = batch.get("position_ids", torch.arange(12)[None])
    expected = create(config, torch.zeros(2, 12, 4), batch.get("attention_mask"), None, positions)
    if expected is None:  # plain causal, which transformers leaves to the kernel
        expected = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    layer = LayerMask(window=window)
    _, sharded = _shard({"input_ids": _ids(2, 12), **batch}, layers=[layer])[0]
    dense = _dense(sharded.narrowed(layer).mask)
    assert torch.equal(dense.expand(2, -1, -1), expected[:, 0].expand(2, -1, -1))


def test_padding_to_the_layout_neither_sees_nor_is_seen():
    _, batch = _shard({"input_ids": _ids(2, 3), "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}, world_size=3)[
        0
    ]
    dense = _dense(batch.sequence.mask)
    assert dense.shape == (2, 6, 6)
    assert not dense[:, 3:, :3].any()
    assert not dense[:, :3, 3:].any()
    assert dense[:, 3:, 3:].equal(torch.ones(2, 3, 3, dtype=torch.bool).tril())


def test_equal_rows_of_a_mask_become_one():
    _, batch = _shard({"input_ids": _ids(4, 12), "attention_mask": torch.ones(4, 12)})[0]
    assert batch.sequence.mask == ringtile.IntervalMask.causal(12)


DOCUMENTS = ringtile.IntervalMask.documents([5, 3, 4])
SAYING_DOCUMENTS = {
    "position_ids": _positions(5, 3, 4),
    "cu_seq_lens_q": torch.tensor([0, 5, 8, 12], dtype=torch.int32),
    "cu_seq_lens_k": torch.tensor([0, 5, 8, 12], dtype=torch.int32),
    "seq_idx": torch.tensor([[0] * 5 + [1] * 3 + [2] * 4], dtype=torch.int32),
    "attention_mask": torch.tensor([[1] * 5 + [2] * 3 + [3] * 4]),
}


@pytest.mark.parametrize("names", [*((name,) for name in SAYING_DOCUMENTS), tuple(SAYING_DOCUMENTS)])
def test_every_way_to_say_documents_gives_the_documents(names):
    inputs = {"input_ids": _ids(1, 12), **{name: SAYING_DOCUMENTS[name] for name in names}}
    (local, batch), _ = _shard(inputs)
    assert batch.sequence.mask == DOCUMENTS
    assert not {"cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"} & local.keys()


def test_document_ids_may_end_in_padding():
    batch = {"input_ids": _ids(1, 12), "attention_mask": torch.tensor([[1] * 5 + [2] * 3 + [0] * 4])}
    dense = _dense(_shard(batch)[0][1].sequence.mask)
    expected = _dense(DOCUMENTS).clone()
    expected[:, 8:] = torch.arange(12) < 8  # as in one process, where only padding before all tokens attends nothing
    assert torch.equal(dense, expected)


# ---- what is refused ----------------------------------------------------------------------------


def test_tensors_of_the_user_are_padded_as_what_they_are():
    own = {"states": torch.randn(2, 3, 4, 5), "step_labels": _ids(2, 3), "tasks": torch.arange(2)}
    names = {"per_token": frozenset(["states", "step_labels"]), "per_row": frozenset(["tasks"])}
    shards = _shard({"input_ids": _ids(2, 3), **own}, **names)
    assert torch.equal(_unshard(shards, "states"), torch.cat([own["states"], own["states"][:, -1:]], 1))
    assert _unshard(shards, "step_labels")[:, 3].tolist() == [-100, -100]
    assert all(torch.equal(local["tasks"], own["tasks"]) for local, _ in shards)


@pytest.mark.parametrize(
    ("extra", "error", "words"),
    [
        ({"attention_mask": torch.ones(2, 1, 8, 8)}, ringtile.RefusedError, "attention_mask is 4-D"),
        ({"attention_mask": torch.ones(2, 7)}, ringtile.InputError, "attention_mask is (2, 7); expected (2, 8)"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]] * 2)}, ringtile.MaskNotExpressibleError, "row 0"),
        (
            {"attention_mask": torch.ones(2, 8), "position_ids": _positions(4, 4).expand(2, -1)},
            ringtile.RefusedError,
            "Remove attention_mask",
        ),
        ({"position_ids": torch.zeros(3, 2, 8, dtype=torch.long)}, ringtile.InputError, "position_ids"),
        ({"position_ids": torch.zeros(2, 9, dtype=torch.long)}, ringtile.InputError, "position_ids"),
        ({"labels": torch.zeros(2, 9, dtype=torch.long)}, ringtile.InputError, "labels is (2, 9)"),
        ({"pixel_values": torch.zeros(2, 3, 4, 4)}, ringtile.RefusedError, "leave it out in your data collator"),
        ({"packing": {"cu_seqlens": torch.tensor([0, 3, 8])}}, ringtile.RefusedError, "the batch holds packing (dict)"),
        ({"token_type_ids": torch.zeros(2, 8)}, ringtile.RefusedError, "token_type_ids"),
        ({"cu_seq_lens_q": torch.tensor([0, 8])}, ringtile.InputError, "one row"),
        ({"logits_to_keep": 1}, ringtile.RefusedError, "logits_to_keep"),
        *(({name: object()}, ringtile.RefusedError, f"the batch sets {name}") for name in CACHES),
    ],
)
def test_batch_that_cannot_be_sharded_is_named(extra, error, words):
    with pytest.raises(error) as raised:
        _shard({"input_ids": _ids(2, 8), **extra})
    assert words in str(raised.value)


@pytest.mark.parametrize(
    "named",
    [
        {"cu_seq_lens_q": torch.tensor([0, 5, 12])},
        {"seq_idx": torch.tensor([[0] * 5 + [1] * 7])},
        {"attention_mask": torch.tensor([[1] * 5 + [2] * 7])},
    ],
    ids=lambda named: next(iter(named)),
)
def test_positions_are_free_beside_what_names_documents(named):
    jumps = torch.tensor([[0, 1, 50, 51, 2, 9, 10, 3, 4, 4, 70, 71]])
    shards = _shard({"input_ids": _ids(1, 12), "position_ids": jumps, **named})
    assert shards[0][1].sequence.mask == ringtile.IntervalMask.documents([5, 7])
    assert torch.equal(_unshard(shards, "position_ids"), jumps)


def test_cu_seq_lens_of_queries_and_keys_must_agree():
    batch = {"input_ids": _ids(1, 8), "cu_seq_lens_q": torch.tensor([0, 8]), "cu_seq_lens_k": torch.tensor([0, 3, 8])}
    with pytest.raises(ringtile.InputError, match="differ"):
        _shard(batch)


def test_batch_without_tokens_is_named():
    with pytest.raises(ringtile.InputError, match="expected input_ids"):
        _shard({"labels": _ids(1, 8)})


def test_batches_of_one_length_share_a_sequence():
    """With what it remembers: rows of one document, whether a mask of ones says so or nothing does. Others do not."""
    ids, ones = _ids(2, 12), torch.ones(2, 12)
    whole, own = ringtile.IntervalMask.whole(12, True), ringtile.IntervalMask.documents([5, 7])
    assert mask_of_batch({}, 2, 12) is mask_of_batch({"attention_mask": ones}, 2, 12) is whole
    assert mask_of_batch({"attention_mask": ones, "interval_mask": own}, 2, 12) == own
    masks = {"none": None, "ones": ones, "padded": RIGHT, "two": torch.arange(12).expand(2, 12) // 6 + 1}

    def on_rank(group):
        found = {}
        for name, mask in masks.items():
            inputs = {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})
            found[name] = shard_batch(inputs, Reading(), layout="zigzag", group=group)[1].sequence
        return found

    for found in LoopbackWorld(2).run(on_rank):
        assert found["none"] is found["ones"]
        assert len({id(sequence) for sequence in found.values()}) == 3
        for name, mask in masks.items():
            same = torch.ones(2, 12, 12) if mask is None else (mask[:, None] == mask[:, :, None]) & (mask[:, None] > 0)
            expected, got = same.bool().tril(), _dense(found[name].mask).expand(2, -1, -1)
            rows = torch.ones(2, 12).bool() if mask is None else mask > 0
            assert torch.equal(got[rows], expected[rows])
