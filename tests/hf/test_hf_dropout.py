"""Dropout in a Trainer: each rank draws what its own tokens drop, and the ranks agree on what attention drops."""

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from cells import Cell, check, params, table
from hf_models import tiny_model, with_lora
from hf_training import PROOF, enabled, make_trainer, train
from oracle import kept
from pool import run_ranks
from ringtile import AttentionDropout, RefusedError
from ringtile.first_batch.random_states import random_digest
from ringtile.hf.features.dropout import Draws
from torch._dynamo.utils import counters
from transformers import AttentionInterface, AttentionMaskInterface, TrainerCallback
from transformers.masking_utils import eager_mask

BATCH, STEP = 2, 2  # rows of a batch, batches of a step: make_trainer's
CP2 = {"context_parallel_size": 2}


def _gpt2(**rates):
    """Dropout on the embeddings and after attention and the MLP."""
    return tiny_model("gpt2", **{"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0, **rates}).train()


# ---- of hidden states ---------------------------------------------------------------------------


def _dropped(config):
    """What the embeddings keep in each forward pass, on this rank, and the generators after the training."""
    trainer, masks = make_trainer(model=_gpt2(), max_steps=2), []
    drop = trainer.model.transformer.drop
    drop.register_forward_hook(lambda module, args, out: masks.append((out != 0).flatten().cpu()))
    with enabled(trainer, config):
        trainer.train()
    masks = [kept for kept in masks if not kept.all()]  # but for the passes of the proof
    return torch.cat(masks), masks, random_digest()


def test_ranks_and_passes_drop_others_and_move_no_generator():
    found = run_ranks(2, _dropped, PROOF | CP2)
    (first, passes, digest), (second, others, other) = found
    assert digest == other  # what decides a token of the data is drawn alike afterwards
    assert not any(torch.equal(x[: len(y)], y[: len(x)]) for x, y in zip(passes, others, strict=True))
    assert not torch.equal(passes[0][: passes[1].numel()], passes[1][: passes[0].numel()])
    for kept_here in (first, second):  # 0.9, within five standard deviations
        share, number = kept_here.double().mean(), kept_here.numel()
        assert abs(share - 0.9) < 5 * math.sqrt(0.09 / number), (share, number)


def _train(config, model=_gpt2, **options):
    return train(config, model=model(), evaluate=False, **{"max_steps": 2, **options})


def _recomputed(config):
    again = {"gradient_checkpointing": True, "ddp_find_unused_parameters": False}
    return _train(config), _train(config, **again), _train(config, lambda: _gpt2(resid_pdrop=0.0, embd_pdrop=0.0))


def test_checkpointed_layers_drop_the_same_again():
    for plain, again, without in run_ranks(2, _recomputed, CP2):
        assert again.losses == pytest.approx(plain.losses, rel=1e-6)
        assert again.grad_norms == pytest.approx(plain.grad_norms, rel=1e-5)
        assert plain.losses != pytest.approx(without.losses, rel=1e-4)  # it drops


def _resumed(config, folder):
    whole = _train(config, folder=folder, save_strategy="steps", save_steps=2, max_steps=4)
    again = _train(config, folder=folder, max_steps=4, resume=f"{folder}/checkpoint-2")
    return whole, again


def test_a_resumed_run_drops_the_same_bit_for_bit(tmp_path):
    for whole, again in run_ranks(2, _resumed, CP2, str(tmp_path)):
        assert again.losses == whole.losses
        assert all(torch.equal(again.weights[name], weight) for name, weight in whole.weights.items())


def test_a_model_that_a_loss_checkpoints_as_a_whole_is_refused():
    """The backward could not tell of which forward pass it is."""
    trainer = make_trainer(model=_gpt2())
    draws = Draws(trainer, trainer.model, SimpleNamespace(size=1, device=torch.device("cpu")))
    with (
        mock.patch.object(torch._C, "_current_graph_task_id", return_value=1),
        pytest.raises(RefusedError, match="has checkpointed it as a whole"),
        draws.of(SimpleNamespace(), trainer.model),
    ):
        pass


# ---- of attention, by counters ------------------------------------------------------------------


class AttentionOracle:
    """The definition of docs/design/dropout.md, in one process: (B, H, S, D) to (B, S, H, D)."""

    def __init__(self):
        self.calls = {}

    def __call__(self, module, query, key, value, mask, dropout, scaling=None, **options):
        call = self.calls[module] = self.calls.get(module, -1) + 1
        first_row, step = call % STEP * BATCH, call // STEP
        rows = torch.arange(first_row, first_row + query.size(0))
        drop = AttentionDropout(dropout, rows, 42, step, module.layer_idx)
        factors = kept(drop, query.size(1), query.size(2)).to(query.dtype) / (1 - dropout)
        weights = (query @ key.mT * query.size(3) ** -0.5 + mask).softmax(-1)
        return (weights * factors @ value).transpose(1, 2), None


def _attention_drops():
    return {"model": _gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.1)}


def _oracle():
    model = _attention_drops()["model"]
    AttentionInterface.register("oracle", AttentionOracle())
    AttentionMaskInterface.register("oracle", eager_mask)
    model.set_attn_implementation("oracle")
    return {"model": model}


CELLS = table(
    Cell("attention, two ranks", {}, PROOF, made=_attention_drops, made_alone=_oracle),
    Cell(
        "attention, checkpoints, FSDP2",
        *({}, {}, {"gradient_checkpointing": True, "engine": "FSDP2"}),
        made=_attention_drops,
        made_alone=_oracle,
        long=True,
    ),
)


@pytest.mark.parametrize("cell", params(CELLS))
def test_attention_drops_by_the_definition(cell):
    check(__name__, cell)
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop("oracle", None)


# ---- NEFTune ------------------------------------------------------------------------------------


class Noise(TrainerCallback):
    """The largest noise on an embedding, times the root that it was divided by; how often it is there."""

    def __init__(self):
        self.largest = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        embeddings = model.get_input_embeddings()

        def watch(module, inputs, output):
            noise = (output - module.weight[inputs[0]]).abs().max()
            self.largest.append(float(noise) * math.sqrt(output.size(1) * self.ranks * output.size(2)))

        embeddings.register_forward_hook(watch)


def _noise():
    noise = Noise()
    noise.ranks = 2
    rows = [{"input_ids": [*range(1, 33)], "labels": [*range(1, 33)]} for _ in range(8)]
    arguments = {"callbacks": [noise], "train_dataset": rows}
    trainer = make_trainer(
        model=tiny_model().train(), max_steps=2, neftune_noise_alpha=5.0, trainer_arguments=arguments
    )
    with enabled(trainer, PROOF | CP2):
        trainer.train()
    return noise.largest


def test_neftune_adds_the_noise_of_whole_rows():
    for largest in run_ranks(2, _noise):
        assert largest
        # The first batch is proved without noise. Of 32 tokens and 32 features, the largest is close to alpha.
        assert all(4.5 < each <= 5.0 + 1e-3 for each in largest if each > 0), largest
        assert sum(each > 0 for each in largest) == 2 * STEP


# ---- torch.compile ------------------------------------------------------------------------------


def _breaks(rate):
    """How often the graph of a compiled Llama with LoRA breaks, by reason."""
    torch._dynamo.reset()
    counters.clear()
    model = with_lora(tiny_model(attention_dropout=0.0, num_hidden_layers=1), dropout=rate).train()
    options = {"torch_compile": True, "torch_compile_backend": "eager", "gradient_accumulation_steps": 1}
    rows = [{"input_ids": [*range(1, 33)], "labels": [*range(1, 33)]}] * 8  # one length, compiled once
    trainer = make_trainer(model=model, max_steps=1, trainer_arguments={"train_dataset": rows}, **options)
    with enabled(trainer, CP2 | {"first_batch_check": False}):
        trainer.train()
    return dict(counters["graph_break"])


def _breaks_of_both():
    return _breaks(0.1), _breaks(0.0)


def test_dropout_breaks_no_graph():
    for dropping, without in run_ranks(2, _breaks_of_both):
        assert dropping == without
