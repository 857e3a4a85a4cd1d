"""Dropout in a Trainer: one process and several ranks drop the same features, so that all numbers agree."""

import functools
import zlib

import numpy as np
import pytest
import ringtile
import torch
from cells import Cell, Refusal, check, params, table
from hf_models import tiny_model, with_lora
from hf_training import GROUP_OF_ONE, enabled, make_trainer, packed, train
from losses import LastThird
from oracle import kept
from pool import run_ranks
from ringtile import AttentionDropout
from ringtile.sequence.layout import CHUNKS_PER_RANK, PADDED_LIKE
from test_dropout import random_word
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

LAYOUTS = (*CHUNKS_PER_RANK, *PADDED_LIKE)
BATCH, STEP = 2, 2  # rows of a batch, batches of a step: make_trainer's


def _gpt2(rate: float = 0.1):
    """Dropout on the embeddings, in and after attention, after the MLP, and in the adapters."""
    from peft import LoraConfig, get_peft_model

    model = tiny_model("gpt2", resid_pdrop=rate, embd_pdrop=rate, attn_pdrop=rate)
    torch.manual_seed(1)
    targets = ["c_attn", "c_fc"]
    config = LoraConfig(
        r=4, target_modules=targets, init_lora_weights=False, lora_dropout=rate / 2, fan_in_fan_out=True
    )
    return get_peft_model(model, config).train()


def _llama():
    return with_lora(tiny_model(attention_dropout=0.1), dropout=0.05).train()


def _phi(**settings):
    """One dropout of each layer runs twice in it: after attention and after the MLP."""
    model = tiny_model("phi", resid_pdrop=0.1, attention_dropout=0.1, **settings)
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):  # its gradient is 0 but for rounding, which a weight of 0 would show
            parameter.data += 1
    return model.train()


def _train(config, make_model=_gpt2, **options):
    return train(config, model=make_model(), evaluate=False, **{"max_steps": 2, **options})


# ---- the same as one process --------------------------------------------------------------------


class Oracle(nn.Module):
    """Dropout by the definition of docs/design/dropout.md, in one process, called once a forward pass."""

    def __init__(self, name, p):
        super().__init__()
        self.name, self.p, self.calls = name, p, 0

    def forward(self, x):
        first_row, step = self.calls % STEP * BATCH, self.calls // STEP
        self.calls += 1
        rows, positions = torch.arange(first_row, first_row + x.size(0)), torch.arange(x.size(1))
        places = torch.stack(torch.meshgrid(rows, positions, indexing="ij"), dim=-1).flatten(0, 1)
        ones = torch.ones(places.size(0), x.size(2))
        mask = ringtile.ops.dropout(ones, places, self.p, 42, step, zlib.crc32(self.name.encode()))
        return x * mask.view_as(x)  # autograd's gradient, not the op's


class AttentionOracle:
    """The same of the weights of attention: (B, H, S, D) to (B, S, H, D)."""

    def __init__(self, model):
        self.names = {module: name for name, module in model.named_modules()}
        self.calls = {}

    def __call__(self, module, query, key, value, mask, dropout, scaling=None, **options):
        call = self.calls[module] = self.calls.get(module, -1) + 1
        first_row, step = call % STEP * BATCH, call // STEP
        stream = zlib.crc32(self.names[module].encode())
        drop = AttentionDropout(dropout, torch.arange(first_row, first_row + query.size(0)), 42, step, stream)
        factors = kept(drop, query.size(1), query.size(2)).to(query.dtype) / (1 - dropout)
        weights = (query @ key.mT * query.size(3) ** -0.5 + mask).softmax(-1)
        return (weights * factors @ value).transpose(1, 2), None


def _oracle():
    model = _gpt2()
    base = model.get_base_model()
    AttentionInterface.register("oracle", AttentionOracle(base))
    AttentionMaskInterface.register("oracle", eager_mask)
    base.set_attn_implementation("oracle")
    for name, module in list(base.named_modules()):
        if isinstance(module, nn.Dropout) and module.p > 0 and not name.endswith("attn_dropout"):
            parent, _, child = name.rpartition(".")
            base.get_submodule(parent)._modules[child] = Oracle(name, module.p)
    return model


class NoisyOracle(nn.Module):
    """NEFTune's noise by its definition in Python integers, in one process."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.calls = weight, 0

    def forward(self, ids):
        x, first_row, step = self.weight[ids], self.calls % STEP * BATCH, self.calls // STEP
        self.calls += 1
        stream = zlib.crc32(b"model.embed_tokens:neftune")
        noise = torch.empty(x.shape)
        for (row, position, feature), _ in np.ndenumerate(noise.numpy()):
            word = random_word(first_row + row, position, feature, 42, step, stream)
            noise[row, position, feature] = (word * 2.0**-31 - 1) * 5 / (x.size(1) * x.size(2)) ** 0.5
        return x + noise


def _noisy_oracle():
    model = tiny_model().train()
    model.set_input_embeddings(NoisyOracle(model.get_input_embeddings().weight))
    return model


def _made(make_model):
    return lambda: {"model": make_model()}


TILES = {"tiled_mlp": True, "tile_tokens": 5}
LARGER = {"per_device_train_batch_size": STEP * BATCH, "gradient_accumulation_steps": 1}


def _definition(what, config=None, ranks=None, **more):
    """As the definition says: with and without checkpointing and tiles, of accumulated or larger batches."""
    return Cell(f"definition, {what}", {}, config or {}, ranks or {}, made=MADE[_gpt2], made_alone=ORACLE, **more)


def _neftune(what, **more):
    noise = {"neftune_noise_alpha": 5.0}
    return Cell(f"neftune, {what}", ranks=noise, made=_made(lambda: tiny_model().train()), made_alone=NOISY, **more)


def _same(what, make_model=_gpt2, options=None, config=None, long=True, **more):
    """As in one process that is a group."""
    made = MADE[make_model]
    return Cell(what, options or {}, config or {}, made=made, alone_config=GROUP_OF_ONE, long=long, **more)


def _again(make_model, tiles, reentrant, world):
    """What is computed again drops the same; of phi, each call of a layer's dropout what that call dropped."""
    ranks = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    ranks["ddp_find_unused_parameters"] = False  # which DDP cannot do together with reentrant checkpoints
    what = f"again: {make_model.__name__}, {reentrant=}, {world} ranks{', tiles' * tiles}"
    config = (GROUP_OF_ONE if world == 1 else {}) | (TILES if tiles else {})
    long = (make_model, tiles, reentrant, world) != (_phi, False, False, 2)
    return _same(what, make_model, config=config, ranks=ranks, world=world, long=long)


def _data_parallel(engine):
    """2 x 2: each pair of ranks has one of the two rows that one process has in a batch."""
    ranks = {"engine": engine, "per_device_train_batch_size": BATCH // 2}
    what, long = f"data-parallel ranks drop by the row of the step, {engine}", engine != "DDP"
    return _same(what, _phi, config={"tiled_loss": True}, ranks=ranks, world=4, long=long)


MADE = {make_model: _made(make_model) for make_model in (_gpt2, _llama, _phi)}
ORACLE, NOISY = _made(_oracle), _made(_noisy_oracle)
CELLS = table(
    _definition("two ranks, tiles, checkpoints", TILES, {"gradient_checkpointing": True}),
    _definition("one process", GROUP_OF_ONE, world=1),
    _definition("one process, tiles", GROUP_OF_ONE | TILES, world=1, long=True),
    _definition("one process, larger batches", GROUP_OF_ONE, LARGER, world=1),
    _neftune("two ranks"),
    _neftune("one process", config=GROUP_OF_ONE, world=1, long=True),
    *(_data_parallel(engine) for engine in ("DDP", "FSDP2", "ZeRO-3")),
    _same("a loss of full sequences", options={"trainer_class": LastThird}),
    *(
        _same(
            f"{layout} on {size} ranks",
            options={"collator": packed},
            config={"context_parallel_size": size, "layout": layout},
            world=size,
        )
        for layout in LAYOUTS
        for size in (2, 4)
    ),
    *(
        _again(make_model, tiles, reentrant, world)
        for make_model in MADE
        for tiles in (False, True)
        for reentrant in (False, True)
        for world in (1, 2)
    ),
)


@pytest.mark.parametrize("cell", params(CELLS))
def test_the_same_is_dropped(cell):
    check(__name__, cell)


def test_numbers_that_are_dropped_or_added_are_seen():
    """Above, all would be equal without them too."""
    plain = _train(None, functools.partial(_gpt2, 0.0)).losses
    assert _train(GROUP_OF_ONE).losses != pytest.approx(plain, rel=1e-4)
    plain = _train(None, lambda: tiny_model().train()).losses
    assert _train(None, _noisy_oracle).losses != pytest.approx(plain, rel=1e-4)


def test_each_module_and_each_call_in_a_layer_has_a_stream_of_its_own(monkeypatch):
    used = []
    own = ringtile.ops.dropout
    monkeypatch.setattr(ringtile.ops, "dropout", lambda *args: (used.append(args[-1]), own(*args))[1])
    _train(GROUP_OF_ONE, lambda: _phi(embd_pdrop=0.1), max_steps=1)
    layers = [f"model.layers.{i}.resid_dropout{call}" for i in range(2) for call in ("", ":1")]
    assert used == [zlib.crc32(name.encode()) for name in ("model.embed_dropout", *layers)] * STEP


def _resumed(config, folder):
    whole = _train(config, folder=folder, save_strategy="steps", save_steps=2, max_steps=4)
    again = _train(config, folder=folder, max_steps=4, resume=f"{folder}/checkpoint-2")
    return whole, again


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_resumed_run_drops_the_same_bit_for_bit(size, tmp_path):
    folder = str(tmp_path)
    runs = (
        run_ranks(2, _resumed, {"context_parallel_size": 2}, folder) if size > 1 else [_resumed(GROUP_OF_ONE, folder)]
    )
    for whole, again in runs:
        assert again.losses == whole.losses
        assert all(torch.equal(again.weights[name], weight) for name, weight in whole.weights.items())


# ---- NEFTune ------------------------------------------------------------------------------------


@pytest.mark.long
def test_neftune_outside_of_training_steps_is_transformers():
    trainer = make_trainer(model=tiny_model().train(), neftune_noise_alpha=5.0)
    model, ids = trainer.model, torch.ones(1, 4, dtype=torch.long)
    plain = model(ids).logits
    with enabled(trainer, GROUP_OF_ONE):
        assert not torch.equal(model(ids).logits, plain)
        assert torch.equal(model.eval()(ids).logits, plain)
    assert torch.equal(model.train()(ids).logits, plain)
    assert trainer.neftune_noise_alpha == 5.0


# ---- what is left to torch, and what is refused -------------------------------------------------


def test_outside_of_training_steps_dropout_is_torchs():
    trainer = make_trainer(model=_gpt2())
    model, ids = trainer.model, torch.ones(1, 4, dtype=torch.long)
    dropout = model.get_base_model().transformer.drop
    with enabled(trainer, GROUP_OF_ONE):
        assert "forward" in vars(dropout)
        torch.manual_seed(0)
        drawn = model(ids).logits
        with torch.no_grad():
            assert torch.equal(model.eval()(ids).logits, model(ids).logits)
    assert "forward" not in vars(dropout)
    torch.manual_seed(0)
    assert torch.equal(model.train()(ids).logits, drawn)


def _runs_a_layer_twice(model):
    model.model.layers = nn.ModuleList([model.model.layers[0], model.model.layers[0]])
    return model


def _drops_heads(model):
    """A dropout of (B, H, N, D): no vector for each token."""
    attention = model.model.layers[0].self_attn
    own, attention.q_proj.dropout = attention.q_proj.forward, nn.Dropout(0.1)

    def forward(x):
        return attention.q_proj.dropout(own(x).unflatten(-1, (4, -1)).transpose(1, 2)).transpose(1, 2).flatten(2)

    attention.q_proj.forward = forward
    return model


def _checkpoints_a_part(model):
    """Of a layer whose dropout runs twice, only attention is computed again."""
    attention = model.model.layers[0].self_attn
    dropout = model.model.layers[0].resid_dropout
    own = attention.forward

    def forward(*args, **kwargs):
        out, *rest = own(*args, **kwargs)
        return checkpoint(dropout, out, use_reentrant=False), *rest

    attention.forward = forward
    return model


class TwoPasses(LastThird):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return sum(super(TwoPasses, self).compute_loss(model, inputs, *args, **kwargs) for _ in range(2))


def _attends_with_late_dropout(trainer):
    trainer.model.model.layers[1].self_attn.attention_dropout = 0.1
    trainer.train()


def _refused(words, model=_llama, **more):
    return Refusal(words, words, made=lambda: {"model": model()}, **more)


REFUSED = [  # rows of test_hf_refused.py
    _refused(
        "LlamaAttention uses attention dropout 0.1 where ringtile does not count it",
        lambda: tiny_model().train(),
        use=_attends_with_late_dropout,
    ),
    _refused(
        "model.layers.0.self_attn runs again on the same tokens",
        lambda: _runs_a_layer_twice(tiny_model(attention_dropout=0.1).train()),
    ),
    _refused("what model.layers.0.self_attn", lambda: _drops_heads(tiny_model()).train()),
    _refused("layers.0.self_attn runs again", lambda: _runs_a_layer_twice(_phi())),
    _refused("runs 3 times in a layer, of which the backward computes", lambda: _checkpoints_a_part(_phi())),
    _refused("a loss of 2 forward passes", options={"trainer_class": TwoPasses, "gradient_checkpointing": True}),
]
