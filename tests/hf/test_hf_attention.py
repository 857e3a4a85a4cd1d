"""Attention and mask functions under transformers: equal to the whole model on one rank, or refused."""

import copy
import itertools

import pytest
import ringtile
import torch
from hf_models import tiny_encoder, tiny_model
from ringtile.hf import attention, layers, model, reading
from ringtile.hf.batch import active, active_batch, forget_checkpoints, keep_in_checkpoints
from ringtile.hf.patches import Patches
from ringtile.hf.shard import Reading, shard_batch
from ringtile.transport.loopback import LoopbackWorld
from torch._dynamo.utils import counters

from tools.models import tiny_models

BATCH, SEQ_LEN = 2, 27
LEFT_PADDED = torch.tensor([[0] * 5 + [1] * 22, [1] * 27])
RIGHT_PADDED = torch.tensor([[1] * 27, [1] * 15 + [0] * 12])
PACKED = torch.cat([torch.arange(11), torch.arange(9), torch.arange(7)])[None]


def _two_kinds_of_rows():
    """Position ids of a packed row, and of one document that begins at 5."""
    return torch.cat([PACKED, torch.arange(5, 32)[None]])


def _ids():
    return torch.randint(3, 96, (BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(7))


def _tolerance(logits):
    """fp32 rounding of two layers: each logit is a sum of H = 32 products that was reached by other additions, at most
    one rounding per addition, 2^-24 of the largest logit each. A wrong mask or position is off by 1e-3 and more."""
    return 32 * 2.0**-24 * logits.abs().max().item()


def _on_ringtile(whole):
    """A copy of the model that attends through ringtile, and the undoing of it."""
    switched, patches = copy.deepcopy(whole), Patches()
    model.switch_attention(switched, patches)
    return switched, patches


def _ring_logits(switched, batch, world_size=2, layout="zigzag"):
    """The logits of the whole batch (B, S, V), computed by `world_size` ranks in threads."""

    separate = reading.positions_separate(switched)

    def run(group):
        own = copy.deepcopy(switched)  # a rank of its own: rotary embeddings remember the longest sequence
        local, sharded = shard_batch(batch, Reading(positions_separate=separate), layout=layout, group=group)
        model.pin_rope_length(own, Patches())
        with torch.no_grad(), active(sharded):
            return sharded.unshard(own(**local).logits)

    return LoopbackWorld(world_size).run(run)[0]


FAMILIES_OF_ALL_KINDS = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3-sliding",
    "mistral-sliding",
    "gemma2",
    "gemma3",
    "olmo2",
    "smollm3",
    "gpt2",
    "llama-dynamic",
    "phi3-longrope",
]
# Sinks; chunks and temperature; head dims by layer; two head dims; windows that the mask alone applies.
OTHER_FAMILIES = ["gpt-oss", "granite-swa", "mimo-v2", "llama4", "gemma4", "deepseek-v3", "glm4-moe", "cohere2"]
WINDOWS_IN_MASKS = ["phimoe-sliding", "qwen2-moe-sliding"]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *itertools.product(FAMILIES_OF_ALL_KINDS, ["left", "packed"]),
        *(
            pytest.param(family, kind, marks=[pytest.mark.long] * (family != FAMILIES_OF_ALL_KINDS[0]))
            for family, kind in itertools.product(FAMILIES_OF_ALL_KINDS, ["plain", "right"])
        ),
        *itertools.product(OTHER_FAMILIES, ["left", "packed"]),
        *((family, "packed") for family in WINDOWS_IN_MASKS),
    ],
)
def test_logits_of_two_ranks_equal_the_whole_model(family, kind):
    whole = tiny_model(family)
    batch = {"input_ids": _ids()}
    if kind in ("left", "right"):
        batch["attention_mask"] = LEFT_PADDED if kind == "left" else RIGHT_PADDED
    if kind == "packed":
        batch["position_ids"] = PACKED.expand(BATCH, -1)
    elif family == "gpt2":
        batch["position_ids"] = torch.arange(SEQ_LEN)[None]
    switched, _ = _on_ringtile(whole)
    logits = _ring_logits(switched, batch)
    whole.set_attn_implementation("eager")  # knows softcap, which sdpa leaves out
    with torch.no_grad():
        expected = whole(**batch, use_cache=False).logits  # as a Trainer does; a cache would hide packed documents
    if "attention_mask" in batch:  # eager lets a query without keys attend everything; nobody reads its logits
        seen = batch["attention_mask"].bool()
        logits, expected = logits[seen], expected[seen]
    assert (logits - expected).abs().max() <= _tolerance(expected)


@pytest.mark.parametrize("positions", [PACKED, PACKED + 3, torch.arange(5, 32)[None], _two_kinds_of_rows()])
def test_chunks_count_as_in_the_whole_model(positions):
    """Documents that begin at any position; a row that is no packed one, alone and beside one that is."""
    whole = tiny_model("llama4")
    batch = {"input_ids": _ids(), "position_ids": positions}
    switched, _ = _on_ringtile(whole)
    with torch.no_grad():
        expected = whole(**batch, use_cache=False).logits
    assert (_ring_logits(switched, batch) - expected).abs().max() <= _tolerance(expected)


@pytest.mark.parametrize(("layout", "world_size"), [("contiguous", 2), ("striped", 3), ("zigzag", 3)])
def test_logits_in_every_layout_equal_the_whole_model(layout, world_size):
    whole = tiny_model("mistral-sliding")
    batch = {"input_ids": _ids(), "attention_mask": LEFT_PADDED}
    switched, _ = _on_ringtile(whole)
    with torch.no_grad():
        expected = whole(**batch, use_cache=False).logits  # as a Trainer does; a cache would hide packed documents
    # sdpa gives queries of padding zeros, as we do: these logits are equal everywhere.
    logits = _ring_logits(switched, batch, world_size, layout)
    assert (logits - expected).abs().max() <= _tolerance(expected)


def test_batches_of_one_shape_share_a_compiled_model():
    """A batch's masks are inputs of the graph: no guard on their content or identity."""
    switched, _ = _on_ringtile(tiny_model("mistral-sliding", num_hidden_layers=1))
    windows = {layers.LayerMask(window=6)}
    assert windows == set(layers.layer_masks(switched.config))
    torch._dynamo.reset()
    counters.clear()
    compiled, compilations = torch.compile(switched, backend="eager"), set()
    for row in range(BATCH):
        batch = {"input_ids": _ids(), "attention_mask": LEFT_PADDED.roll(row, dims=0)}
        logits = []
        for whole in (switched, compiled):
            local, _ = shard_batch(batch, Reading(layers=windows), layout="zigzag", group=None)
            logits.append(whole(**local).logits)
        assert torch.equal(*logits)
        compilations.add(counters["frames"]["ok"])
    assert len(compilations) == 1
    assert not counters["graph_break"]


def test_window_of_a_layer_is_the_one_made_before():
    """torch.compile cannot make the masks of the layers: they are made of the config, before the forward pass."""
    encoder = tiny_encoder()
    made = [
        layers.mask_of_layer(layer.attn, {"sliding_window": layer.attn.sliding_window})
        for layer in encoder.model.layers
    ]
    assert made == layers.layer_masks(encoder.config, causal=False)
    assert {layer.window for layer in made} == {None, 4}


def test_models_whose_masks_know_no_positions_are_known():
    """In one process their packed documents attend each other, unless flash attention looks at the position ids."""
    assert reading.positions_separate(tiny_model("llama"))
    gpt_oss = tiny_model("gpt-oss")
    assert not reading.positions_separate(gpt_oss)
    gpt_oss.config._attn_implementation_internal = "flash_attention_2"
    assert reading.positions_separate(gpt_oss)


@pytest.mark.long  # slow to make
def test_masks_of_towers_say_nothing_of_text():
    """And one model raises ValueError for the positions that its mask needs."""
    assert reading.positions_separate(tiny_models.tiny_model(tiny_models.tiny_config("deepseek_ocr2")))
    assert not reading.positions_separate(tiny_models.tiny_model(tiny_models.tiny_config("hunyuan_vl")))


# ---- a batch that is not sharded: transformers' own functions run ---------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma2", "gpt-oss", "granite-swa", "llama4"])
@pytest.mark.parametrize("padded", [False, True])
def test_unsharded_batch_is_handed_to_transformers(family, padded):
    whole = tiny_model(family)
    switched, _ = _on_ringtile(whole)
    whole.set_attn_implementation("eager" if family in ("gemma2", "gpt-oss", "granite-swa") else "sdpa")
    batch = {"input_ids": _ids()} | ({"attention_mask": LEFT_PADDED} if padded else {})
    with torch.no_grad():
        assert torch.equal(switched(**batch).logits, whole(**batch).logits)


def test_generation_is_unchanged():
    whole = tiny_model()
    switched, _ = _on_ringtile(whole)
    batch = {"input_ids": _ids(), "attention_mask": LEFT_PADDED}
    expected = whole.generate(**batch, max_new_tokens=5, do_sample=False)
    assert torch.equal(switched.generate(**batch, max_new_tokens=5, do_sample=False), expected)


def test_switching_is_undone():
    switched, patches = _on_ringtile(tiny_model())
    assert switched.config._attn_implementation == "ringtile"
    patches.restore()
    assert switched.config._attn_implementation == "sdpa"


# ---- refusals -----------------------------------------------------------------------------------


def _run_shard(switched, batch=None):
    """Calls a model that refuses before anything is sent on the local batch of rank 0 of 2."""
    inputs, group = batch or {"input_ids": _ids()}, LoopbackWorld(2).groups[0]
    local, sharded = shard_batch(inputs, Reading(), layout="zigzag", group=group)
    with active(sharded):
        return switched(**local)


def test_layer_that_is_computed_again_without_its_batch_is_refused():
    """A checkpoint that ringtile has not seen, since it was set inside the forward pass."""
    switched, _ = _on_ringtile(tiny_model())
    local, sharded = shard_batch({"input_ids": _ids()}, Reading(), layout="zigzag", group=None)
    layer, checkpoint = switched.model.layers[1], torch.utils.checkpoint.checkpoint
    original = layer.forward
    layer.forward = lambda *args, **kwargs: checkpoint(original, *args, use_reentrant=False, **kwargs)
    with active(sharded):
        loss = switched.train()(**local).logits.sum()
    with pytest.raises(
        ringtile.RefusedError, match="got a shard of a sequence outside of the forward pass of its batch"
    ):
        loss.backward()
    assert active_batch() is None


def test_checkpoint_functions_of_other_libraries_find_the_layer():
    """axolotl's, which moves what it saves to the host, looks for the layer in the partial that transformers makes: in
    5.17 of the layer's bound method, later with the layer as its first argument."""
    found, whole = [], tiny_model()

    def checkpoint(call, *args):
        found.append(getattr(call.func, "__self__", None) or call.args[0])
        return call(*args)

    for layer in whole.train().model.layers:
        layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, checkpoint
    keep_in_checkpoints(whole)
    whole(_ids())
    assert found == [*whole.model.layers]
    forget_checkpoints(whole)
    assert {layer._gradient_checkpointing_func for layer in whole.model.layers} == {checkpoint}


def test_attention_dropout_is_refused_in_training_only():
    switched, _ = _on_ringtile(tiny_model("llama", attention_dropout=0.1))
    with pytest.raises(ringtile.RefusedError, match=r"dropout 0\.1"):
        _run_shard(switched.train())


def test_sinks_that_transformers_would_leave_out_are_refused():
    """A batch that is not sharded, of a model whose own eager function is not known to have sinks."""
    module, x = tiny_model().model.layers[0].self_attn, torch.zeros(1, 4, 6, 8)
    with pytest.raises(ringtile.RefusedError, match="attention sinks"):
        attention.attention_forward(module, x, x[:, :2], x[:, :2], None, s_aux=torch.zeros(4))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("key_scale", 2.0, "hands its attention key_scale, which may change what it computes"),
        ("block_indices", 2, "hands its attention block_indices"),
    ],
)
def test_what_attention_may_not_ignore_is_refused(name, value, reason):
    """Llama hands its attention every argument that it does not know."""
    switched, _ = _on_ringtile(tiny_model())
    with pytest.raises(ringtile.RefusedError, match=reason):
        _run_shard(switched, {"input_ids": _ids(), name: value})
    _ring_logits(switched, {"input_ids": _ids(), name: None, "num_items_in_batch": 3})


def test_mask_of_a_shard_is_refused():
    switched, patches = _on_ringtile(tiny_model())
    patches.restore()  # takes the hook off that hides the mask, and sets the attention back
    switched.set_attn_implementation("ringtile")
    with pytest.raises(ringtile.RefusedError, match="attention mask of shape"):
        _run_shard(switched, {"input_ids": _ids(), "attention_mask": LEFT_PADDED})


# ---- gradients, under activation checkpointing too ------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_gradients_equal_the_whole_model(use_reentrant):
    whole = tiny_model("qwen3-sliding").train()
    batch = {"input_ids": _ids(), "labels": _ids(), "attention_mask": RIGHT_PADDED}
    switched, _ = _on_ringtile(whole)
    whole(**batch).loss.backward()

    def run(group):
        own = copy.deepcopy(switched)
        if use_reentrant is not None:
            own.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        local, sharded = shard_batch(batch, Reading(), layout="zigzag", group=group)
        keep_in_checkpoints(own)
        with active(sharded):
            loss = own(**local, num_items_in_batch=sharded.num_targets).loss
        loss.backward()
        return [parameter.grad for parameter in own.parameters()]

    gradients = [sum(ranks) for ranks in zip(*LoopbackWorld(2).run(run), strict=True)]
    for (name, parameter), gradient in zip(whole.named_parameters(), gradients, strict=True):
        # B * S = 54 tokens are summed in another order, at most one rounding each
        tolerance = 54 * 2.0**-24 * parameter.grad.abs().max().item()
        assert (gradient - parameter.grad).abs().max() <= tolerance, name
