"""Padding, the batch's and the layout's, never makes a gradient that is not finite.

Gemma 3n divides by the norm of its hidden states, whose gradient at zero is not finite; the embedding of its padding is
zero.
"""

import torch
from hf_models import ALTERNATING, SIZES, tiny_model
from hf_training import TOLERANCE, Padded, assert_equal_training, failure_of, make_trainer, train
from pool import run_ranks
from ringtile.first_batch.trace import ModelCall, Trace, runs_whole
from ringtile.hf import shard
from torch import nn
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

CONFIG = {"context_parallel_size": 2, "first_batch_check": True}


def _model():
    torch.manual_seed(0)
    sizes = {"intermediate_size": [48, 48], "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8}
    parts = {
        "num_kv_shared_layers": 0,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 2,
    }
    layers = {"layer_types": ALTERNATING, "sliding_window": 6}
    return Gemma3nForCausalLM(Gemma3nTextConfig(**SIZES | sizes | parts | layers)).train()


def cut_to(length):
    pad = Padded()
    return lambda rows: {name: x[:, :length] for name, x in pad(rows).items()}


def documents(rows):
    """Two documents in a row, then padding, by numbers in the attention mask."""
    parts = [{name: torch.tensor(values) for name, values in row.items()} for row in rows]
    fill = torch.zeros(5, dtype=torch.long)
    numbers = [torch.full_like(part["input_ids"], i + 1) for i, part in enumerate(parts)]
    return {
        "input_ids": torch.cat([*(part["input_ids"] for part in parts), fill])[None],
        "labels": torch.cat([*(part["labels"] for part in parts), fill - 100])[None],
        "attention_mask": torch.cat([*numbers, fill])[None],
    }


COLLATORS = {
    "rows of 15 tokens": cut_to(15),  # half of the ragged ones end in padding
    "rows of 3 tokens, of which zigzag needs 4": cut_to(3),
}
SHORT = {"evaluate": False, "max_steps": 1, "gradient_accumulation_steps": 1}


def _trainings(config):
    return [train(config, model=_model(), collator=collator, **SHORT) for collator in COLLATORS.values()]


def test_gemma3n_trains_as_in_one_process():
    expected = _trainings(None)
    for runs in run_ranks(2, _trainings, CONFIG):
        for run, one in zip(runs, expected, strict=True):
            assert_equal_training(run, one, losses=5 * TOLERANCE, norms=5 * TOLERANCE, weights=5 * TOLERANCE)


def _norms_of_documents():
    return train(CONFIG, model=_model(), collator=documents, **SHORT).grad_norms


def test_padding_behind_numbered_documents_has_a_gradient():
    for norms in run_ranks(2, _norms_of_documents):
        assert torch.tensor(norms).isfinite().all()


def _refusal():
    shard.PADDING["input_ids"], before = 0, shard.PADDING["input_ids"]
    try:
        return failure_of(make_trainer(model=_model(), collator=cut_to(3)))
    finally:
        shard.PADDING["input_ids"] = before


def test_padding_whose_gradient_is_not_finite_is_named():
    messages = run_ranks(2, _refusal)
    assert any(
        "is not finite on a shard, or on its padding" in message for message in messages
    )  # of the rank that holds it
    assert all(message.startswith("RefusedError: 2 ranks do not compute what one") for message in messages)


def test_experts_whose_gradient_is_not_finite_are_noted():
    """Which have no vector for each token, and of whose tokens nothing else is compared."""
    expert = nn.Linear(2, 2, bias=False)
    with Trace({expert: "experts.0"}) as trace:
        trace.begin(ModelCall((1, 4), None, 4))
        expert(torch.zeros(3, 2, requires_grad=True)).norm().backward()
        expert(torch.zeros(3, 2, requires_grad=True)).square().sum().sqrt().backward()
    assert trace.calls[0].values == {}
    assert not bool(trace.finite["experts.0", "gradient"])


class Adding(nn.Module):
    """An MLP that adds nothing, whose scale alone has a gradient that is no number on a shard."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp, self.scale = mlp, nn.Parameter(torch.ones(32))

    def forward(self, x):
        x_of_scale = x.detach() if runs_whole() else torch.zeros_like(x)
        return self.mlp(x) + 0.0 * (self.scale * x_of_scale).square().sum().sqrt()


def _refusal_of_weight():
    model = tiny_model().train()
    model.model.layers[1].mlp = Adding(model.model.layers[1].mlp)
    return failure_of(make_trainer(model=model))


def test_a_weight_whose_gradient_is_no_number_is_named():
    for message in run_ranks(2, _refusal_of_weight):
        assert "the gradient of model.layers.1.mlp.scale is not finite on a shard" in message
