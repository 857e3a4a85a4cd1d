"""Streamed layers against the same model unstreamed, in float64."""

import copy
import gc
import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest
import ringtile
import torch
import torch.distributed as dist
from counting import Alive, Counting, relative_error
from fake_device import LateTransfer, alive
from hf_models import FAMILIES, SIZES, tiny_encoder, tiny_model, with_lora
from pool import run_ranks
from ringtile import InputError, RefusedError
from ringtile.hf.batch import active
from ringtile.hf.config import Config
from ringtile.hf.features import stream
from ringtile.hf.features.loss import install_tiled_loss
from ringtile.hf.features.offload import offload_activations
from ringtile.hf.model import switch_attention
from ringtile.hf.patches import Patches
from ringtile.hf.shard import Reading, shard_batch
from ringtile.planner.setup import Setup
from ringtile.planner.step import TrainingStep
from ringtile.tiled.host import HostTensor
from ringtile.transport.loopback import LoopbackGroup, LoopbackWorld
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

TOKENS, CHUNK = 43, 8
# Hybrids, and what drops or draws: tested apart.
STREAMED = sorted(FAMILIES.keys() - {"lfm2", "doge", "seed-oss", "phimoe"})
KINDS = ("plain", "left padding", "right padding", "packed")
SHORT = {(name, "packed") for name in ("gemma4", "deepseek-v3", "gpt-oss", "llama4")}
SHORT |= {*itertools.product(("llama",), KINDS), ("gemma2", "left padding"), ("mixtral-balanced", "right padding")}


@pytest.fixture(autouse=True)
def no_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models cast to float32 on the way: not here."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def model_of(family: str = "llama", **overrides: object) -> PreTrainedModel:
    if family in ("gpt-oss", "granite-swa", "mimo-v2"):
        overrides["attn_implementation"] = "eager"  # sdpa leaves out sinks
    model = tiny_model(family, **overrides).double().train()
    model.set_experts_implementation("eager")  # the default has no float64
    return model


def batch_of(kind: str = "plain", num_tokens: int = TOKENS, num_rows: int = 2) -> dict[str, Tensor]:
    ids = torch.randint(3, SIZES["vocab_size"], (num_rows, num_tokens), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if "padding" in kind:
        is_token = torch.ones_like(ids)
        is_token[1, slice(9) if kind == "left padding" else slice(-9, None)] = 0
        batch["attention_mask"] = is_token
        batch["labels"][is_token == 0] = -100
        batch["labels"][1, 9] = -100  # which a token of padding would predict
    elif kind == "packed":
        lengths = (11, 20, num_tokens - 31)
        batch["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None].expand(num_rows, -1)
        batch["use_cache"] = False  # with a cache transformers joins documents
    return batch


def run(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The logits of tokens, the loss and the gradients."""
    model.zero_grad()
    out = model(**batch)
    out.loss.backward()
    is_token = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": out.loss.detach(), "logits": out.logits.detach()[is_token], **grads}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    """A gradient is as near as rounding of the largest one lets it: that of a key's bias is 0 but for that."""
    assert found.keys() == expected.keys()
    largest = max(x.abs().max().item() for x in expected.values())
    for name, x in expected.items():
        scale = max(x.abs().max().item(), 1e-3 * largest)
        assert (found[name] - x).abs().max().item() <= tolerance * scale, name


def cells(short: set[Any], *choices: Iterable[Any]) -> list[Any]:
    """All combinations, of which some run every time."""
    return [pytest.param(*x, marks=[] if x in short else [pytest.mark.long]) for x in itertools.product(*choices)]


def compare(model: nn.Module, batch: dict[str, Tensor], chunk: int = CHUNK) -> None:
    expected = run(model, batch)
    patches = ringtile.stream_layers(model, chunk)
    try:
        found = run(model, batch)
    finally:
        patches.restore()
    assert_equal(found, expected)
    assert_equal(run(model, batch), expected)  # restored


# ---- exact --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "kind"), cells(SHORT, STREAMED, KINDS))
def test_streamed_equals_whole(family: str, kind: str) -> None:
    compare(model_of(family), batch_of(kind))


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("family", ["modernbert", "bert"])
def test_two_passes_where_queries_attend_later_chunks(family: str, kind: str) -> None:
    compare(tiny_encoder(family).double(), batch_of(kind))


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt-oss", "mixtral-balanced", "gemma4", "llama4", "bert"])
def test_two_passes_of_causal_layers(family: str, on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on several ranks. With ends in host memory attention's backward takes the queries chunk by chunk."""
    monkeypatch.setattr(stream, "attends_no_later_chunk", lambda *of: False)
    model = tiny_encoder(family).double() if family == "bert" else model_of(family)
    batch = batch_of("left padding" if family == "bert" else "packed")
    transfer, expected = LateTransfer(), run(model, batch)
    ringtile.stream_layers(model, CHUNK)
    if on_host:
        offload_activations(model, transfer)
    assert_equal(run(model, batch), expected)
    assert alive(transfer.hosts) == alive(transfer.devices) == 0


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "chunk"), [(1, 33, 8), (1, 17, 16), (2, 9, 1), (2, 9, 50), (1, 32, 32)]
)
def test_numbers_of_tokens_and_chunks(num_rows: int, num_tokens: int, chunk: int) -> None:
    """Of one token, more than there are, as many tokens as the hidden size, and a last chunk of one token."""
    compare(model_of("mistral-sliding"), batch_of("plain", num_tokens, num_rows), chunk)


def test_documents_of_cu_seq_lens_are_apart() -> None:
    """As flash-attention keeps them; scaled_dot_product_attention reads position ids only."""
    model, batch = model_of(), batch_of("packed", num_rows=1)
    expected = run(model, batch)
    offsets = torch.tensor([0, 11, 31, TOKENS], dtype=torch.int32)
    with_offsets = batch | {"position_ids": torch.arange(TOKENS)[None], "cu_seq_lens_q": offsets}
    model.set_attn_implementation("eager")
    ringtile.stream_layers(model, CHUNK)
    found = run(model, batch | {"cu_seq_lens_q": offsets})
    assert_equal(found, expected)
    assert relative_error(run(model, with_offsets)["logits"][:11], expected["logits"][:11]) < 1e-12


def test_lora() -> None:
    """Frozen weights have no gradient; adapters have those of the whole model."""
    compare(with_lora(model_of()), batch_of())


def test_adapters_that_come_after() -> None:
    expected = run(with_lora(model_of()), batch_of())
    model = model_of()
    ringtile.stream_layers(model, CHUNK)
    assert_equal(run(with_lora(model), batch_of()), expected)


def test_hidden_states_are_recorded() -> None:
    model, batch = model_of(), batch_of()
    expected = model(**batch, output_hidden_states=True).hidden_states
    ringtile.stream_layers(model, CHUNK)
    for found, x in zip(model(**batch, output_hidden_states=True).hidden_states, expected, strict=True):
        assert relative_error(found, x) < 1e-13


def test_gradients_of_four_batches_are_summed_and_each_hook_fires_once() -> None:
    model, batches = model_of("gpt2"), [batch_of("plain", n) for n in (9, 17, 30, 43)]  # gpt2: tied weights

    def grads() -> dict[str, Tensor]:
        model.zero_grad()
        for batch in batches:
            model(**batch).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = grads()
    ringtile.stream_layers(model, CHUNK)
    fired: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    assert_equal(grads(), expected)
    assert sorted(fired) == sorted([name for name, _ in model.named_parameters()] * len(batches))


def test_a_second_backward_through_the_same_graph() -> None:
    model, batch = model_of(), batch_of()
    ringtile.stream_layers(model, CHUNK)
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    loss.backward()
    assert_equal({name: p.grad / 2 for name, p in model.named_parameters()}, once)


def test_without_gradients_and_with_a_cache() -> None:
    model, batch = model_of("gemma2").eval(), batch_of()
    expected = run(model, batch)["logits"]
    prompt = batch["input_ids"][:, :13]
    tokens = model.generate(prompt, max_new_tokens=5, do_sample=False)
    ringtile.stream_layers(model, CHUNK)
    with torch.no_grad():
        for use_cache in (False, True):
            found = model(input_ids=batch["input_ids"], use_cache=use_cache).logits
            assert relative_error(found.flatten(0, 1), expected) < 1e-13
    assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), tokens)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_change_nothing_and_cost_nothing(reentrant: bool) -> None:
    model, batch = model_of(), batch_of()
    ringtile.stream_layers(model, CHUNK)
    with Counting() as without:
        expected = run(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with Counting() as with_checkpoints:
        assert_equal(run(model, batch), expected)
    assert with_checkpoints.flops == without.flops


def test_dropout_is_drawn_again() -> None:
    """One chunk draws what the model draws; in several, a gradient is the difference quotient of the loss."""
    model, batch = model_of("phi3-sliding", resid_pdrop=0.3), batch_of()

    def seeded() -> dict[str, Tensor]:
        torch.manual_seed(5)
        return run(model, batch)

    expected = seeded()
    patches = ringtile.stream_layers(model, TOKENS)
    assert_equal(seeded(), expected)
    patches.restore()
    ringtile.stream_layers(model, CHUNK)
    grad = seeded()["model.layers.0.self_attn.qkv_proj.weight"]
    weight, step = model.model.layers[0].self_attn.qkv_proj.weight, 1e-5 * torch.randn_like(grad)
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * step
        losses.append(seeded()["loss"])
        with torch.no_grad():
            weight -= sign * step
    assert losses[0] - losses[1] == pytest.approx((2 * grad * step).sum().item(), rel=1e-6)


class Twice(nn.Module):
    """Two layers in one: the keys of the second attention come after the first one."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, hidden_states: Tensor, **kwargs: object) -> Tensor:
        return self.second(self.first(hidden_states, **kwargs), **kwargs)


def test_two_attentions_in_a_layer_in_one_pass_and_in_three(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Pair(GradientCheckpointingLayer, Twice):
        forward = Twice.forward

    model, batch = model_of(), batch_of()
    expected = run(model, batch)
    model.model.layers = nn.ModuleList([Pair(*model.model.layers)])
    ringtile.stream_layers(model, CHUNK)
    names = {".0.first.": ".0.", ".0.second.": ".1."}
    for one_pass in (True, False):
        if not one_pass:
            monkeypatch.setattr(stream, "attends_no_later_chunk", lambda *of: False)
        found = run(model, batch)
        for new, old in names.items():
            found = {name.replace(new, old): x for name, x in found.items()}
        assert_equal(found, expected)


def test_draws_before_attention_are_refused_in_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "attends_no_later_chunk", lambda *of: False)
    model = model_of("phi3-sliding", resid_pdrop=0.3)
    ringtile.stream_layers(model, CHUNK)
    assert math.isfinite(run(model, batch_of())["loss"])  # behind attention it may draw
    model.model.layers[0].input_layernorm = nn.Sequential(nn.Dropout(0.1), model.model.layers[0].input_layernorm)
    with pytest.raises(RefusedError, match=r"layers\.0 draws random numbers before its attention"):
        run(model, batch_of())


# ---- precision, memory, work --------------------------------------------------------------------


def test_bfloat16_weight_gradients_are_no_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    batch = batch_of("plain", 600)
    oracle = run(tiny_model().double().train(), batch)
    model = tiny_model().to(torch.bfloat16).train()
    plain = run(model, batch)
    ringtile.stream_layers(model, 64)
    streamed = run(model, batch)
    for name in oracle:
        errors = [(found[name].double() - oracle[name]).norm().item() for found in (streamed, plain)]
        assert errors[0] <= 1.2 * errors[1], name


def peak_of(num_tokens: int, chunk: int | None) -> int:
    """The bytes that a forward and backward of the layers hold at most, in tensors of at least a hundred elements."""
    model = tiny_model(max_position_embeddings=8192).model.train()
    if chunk is not None:
        ringtile.stream_layers(model, chunk)
    embeddings = torch.randn(1, num_tokens, SIZES["hidden_size"], requires_grad=True)
    dout = torch.ones(1, num_tokens, SIZES["hidden_size"])
    with Alive(at_least=100) as alive:
        model(inputs_embeds=embeddings).last_hidden_state.backward(dout)
    gc.collect()
    return alive.bytes_peak


def test_memory_of_a_further_token_is_that_of_ends_keys_and_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """E 32, G D 16, two layers, float32. Ends: of both layers, the final norm's tensors, dout and dx."""
    monkeypatch.undo()
    per_token = {chunk: (peak_of(512, chunk) - peak_of(256, chunk)) / 256 for chunk in (None, 64)}
    hidden, keys = 4 * SIZES["hidden_size"], 4 * 2 * 16
    # The peak is in the final norm, which is not streamed, or in a layer: its input, dout, dx, k, v, dk, dv.
    assert per_token[64] <= 12 * hidden + 2 * keys
    assert per_token[None] > 3 * per_token[64]


def step_on_host(num_tokens: int, chunk: int = 32, **sizes: int) -> tuple[int, LateTransfer]:
    """The peak of a step whose layers have their ends in host memory, as `peak_of`, and its copies."""
    model, transfer = tiny_model(max_position_embeddings=8192, **sizes).train(), LateTransfer()
    ringtile.stream_layers(model, chunk)
    install_tiled_loss(model, Config(tiled_loss=True, tile_tokens=chunk), Patches())
    offload_activations(model, transfer)
    batch = batch_of("plain", num_tokens, 1)
    with Alive(at_least=100) as alive_now:
        model(**batch, use_cache=False).loss.backward()
    gc.collect()
    return alive_now.bytes_peak, transfer


def test_with_ends_on_the_host_memory_of_a_further_token_is_that_of_keys_and_their_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """G D 16, D 8, float32. Beside them cos and sin, position ids, the loss's labels and where they are; the mask."""
    monkeypatch.undo()
    monkeypatch.setattr(HostTensor, "whole", None)  # nothing is ever whole
    (shorter, _), (longer, transfer) = step_on_host(256), step_on_host(512)
    keys, angles = 4 * 4 * 16, 2 * 4 * 8
    assert (longer - shorter) / 256 <= keys + angles + 4 * 8
    assert {nbytes for _, nbytes in transfer.log} == {32 * SIZES["hidden_size"] * 4}


def test_each_chunk_attends_once_more_in_the_backward_and_no_more_keys_than_it_sees(monkeypatch) -> None:
    from ringtile.attn import choose

    seen: list[tuple[int, int]] = []
    forward = choose.forward
    monkeypatch.setattr(
        choose,
        "forward",
        lambda call, round, q, k, v, state: (seen.append((q.size(1), k.size(1))), forward(call, round, q, k, v, state)),
    )
    model = model_of("llama")
    ringtile.stream_layers(model, 16)
    run(model, batch_of("plain", 48, 1))
    chunks = [(16, 16), (16, 32), (16, 48)]
    assert seen == chunks * 2 + chunks[::-1] * 2


def live_bytes(config: PretrainedConfig, num_tokens: int, keys: Config) -> int:
    """What a rank's step holds at most but for weights, as `peak_of`, on ranks that are threads."""
    real = type(tiny_model())(config).train()
    switch_attention(real, Patches())

    def rank(group: LoopbackGroup) -> int:
        model, patches = copy.deepcopy(real), Patches()
        stream.install(model, keys.tile_tokens, patches)
        install_tiled_loss(model, keys, patches)
        if keys.activation_offloading:
            offload_activations(model, LateTransfer())
        with Alive(at_least=100) as alive_now:
            inputs = batch_of("plain", num_tokens, 1)
            local, batch = shard_batch(inputs, Reading(positions_separate=True), layout="zigzag", group=group)
            with active(batch):
                model(**local)["loss"].backward()
        gc.collect()
        return alive_now.bytes_peak

    return max(LoopbackWorld(keys.context_parallel_size).run(rank))


@pytest.mark.parametrize(
    ("ranks", "on_host"),
    [(1, False), (2, True), *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, True), (2, False)))],
)
def test_the_planner_knows_the_peak(ranks: int, on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step but for weights and optimizer: within 5 %. With ends on the host a further token takes k, v, dk, dv of
    one layer (G D 16), and in a ring as many in transit, in float32; cos and sin; lse; ids, labels, masks."""
    monkeypatch.undo()
    config = tiny_model(max_position_embeddings=4096, hidden_size=64, intermediate_size=192).config
    keys: dict[str, Any] = {"stream": True, "tiled_loss": True, "tile_tokens": 32, "activation_offloading": on_host}
    given = Config(**keys, keep_attention=False, context_parallel_size=ranks, layout="zigzag")
    with TrainingStep(Setup(config, devices=ranks, ringtile=given)) as step:
        parts = [step.run(ranks * tokens).parts for tokens in (512, 640)]
    planned = [sum(of.values()) - of["weights"] - of["optimizer"] - of["engine"] for of in parts]
    sent = (ranks - 1) * 2 * 4 * 16  # bytes of a token's k and v, which the loopback transport copies
    measured = [live_bytes(config, ranks * tokens, given) - sent * tokens for tokens in (512, 640)]
    for bytes_planned, most, tokens in zip(planned, measured, (512, 640), strict=True):
        least = most - sent * tokens  # a rank ahead of its peer sends the next block's before the peer took the first
        assert 0.95 * least <= bytes_planned <= 1.05 * most
    if on_host:
        keys_and_gradients = 4 * 4 * 16  # in transit: those of a block, and their half for one of two other ranks
        in_transit = (ranks - 1) * keys_and_gradients * 3 // 2
        ahead = sent * 640  # keys that are sent early, as above, in the longer step alone
        assert (
            measured[1] - ahead - measured[0]
        ) / 128 <= keys_and_gradients + in_transit + 2 * 4 * 8 + 4 * 8 + ranks * 112


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mixtral-balanced", "gemma4"])
def test_ends_of_layers_in_host_memory_change_no_bit(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does anything stay there."""
    monkeypatch.undo()
    model, batch, transfer = tiny_model(family).train(), batch_of("left padding"), LateTransfer()
    ringtile.stream_layers(model, CHUNK)
    expected = run(model, batch)
    patches = offload_activations(model, transfer)
    found = run(model, batch)
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    assert {nbytes for way, nbytes in transfer.log} <= {
        t * SIZES["hidden_size"] * 4 for t in (CHUNK, TOKENS % CHUNK, 2 * TOKENS)
    }
    assert alive(transfer.hosts) == alive(transfer.devices) == 0
    transfer.log.clear()
    patches.restore()
    run(model, batch)
    assert transfer.log == []


# ---- refused ------------------------------------------------------------------------------------


def _refused_in_a_block() -> None:
    model, ids = model_of(), torch.arange(64)[None]
    ringtile.stream_layers(model, CHUNK)
    places = ids.clone()
    block = ringtile.context_parallel(dist.group.WORLD, buffers=[ids, places], buffer_seq_dims=[1, 1])
    with block, pytest.raises(RefusedError, match=r"layers\.0 is streamed inside of ringtile\.context_parallel"):
        model(input_ids=ids, position_ids=places)


def test_streamed_layers_are_refused_in_a_block() -> None:
    """They would attend the tokens of a shard alone."""
    run_ranks(2, _refused_in_a_block)


def test_what_is_refused_before_it_runs() -> None:
    with pytest.raises(InputError, match=r"stream_tokens is 0, expected a whole number of tokens, at least 1"):
        ringtile.stream_layers(model_of(), 0)
    with pytest.raises(RefusedError, match=r"layers\.0\.conv is a Lfm2ShortConv, whose state goes on"):
        ringtile.stream_layers(tiny_model("lfm2"))
    with pytest.raises(RefusedError, match="DogeAttention"):
        ringtile.stream_layers(tiny_model("doge"))
    shared = tiny_model(
        "gemma4", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2
    )
    with pytest.raises(RefusedError, match="shares keys and values between layers"):
        ringtile.stream_layers(shared)
    assert shared.config._attn_implementation != "ringtile_stream"
    model = model_of()
    ringtile.stream_layers(model)
    with pytest.raises(RefusedError, match="is tiled already; restore"):
        ringtile.stream_layers(model)


def test_what_is_refused_in_the_forward() -> None:
    model, batch = model_of(), batch_of()
    ringtile.stream_layers(model, CHUNK)
    with pytest.raises(RefusedError, match=r"got a mask|is given attention_mask"):
        model(**batch, **{"attention_mask": torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.bool).tril()})
    layer = model.model.layers[0]
    hidden = torch.randn(2, TOKENS, SIZES["hidden_size"])
    with pytest.raises(RefusedError, match=r"is given speed \(2, 43\) for 43 tokens; expected tensors of"):
        layer(hidden, speed=torch.ones(2, TOKENS))
    with pytest.raises(RefusedError, match=r"is given hidden states \(4, 2, 43, 32\)"):
        layer(hidden.expand(4, -1, -1, -1))
    dropping = model_of("seed-oss")
    ringtile.stream_layers(dropping, CHUNK)
    with pytest.raises(RefusedError, match=r"uses attention dropout 0\.1"):
        dropping(**batch)


class Silent(nn.Module):
    """Stands in for attention of its own."""

    def forward(self, hidden_states: Tensor, **kwargs: object) -> tuple[Tensor, None]:
        return hidden_states, None


def test_a_layer_that_does_not_attend_through_the_interface() -> None:
    model = model_of()
    model.model.layers[1].self_attn = Silent()
    ringtile.stream_layers(model, CHUNK)
    with pytest.raises(RefusedError, match=r"model\.layers\.1 attends 0 times through transformers"):
        model(**batch_of())
