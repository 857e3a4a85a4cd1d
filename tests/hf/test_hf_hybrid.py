"""Hybrid models: what of them is left alone, and which batches and mixers are refused. test_hf_exact_models.py trains
them."""

import functools
from typing import Any
from unittest import mock

import pytest
import ringtile
import torch
from hf_models import hybrid
from hf_training import make_trainer, packed
from ringtile.errors import RefusedError
from ringtile.hf import recurrent
from ringtile.hf.families import CACHES
from ringtile.recurrent import functions, kernels
from torch import nn
from torch.utils.checkpoint import checkpoint

ALONE = {"context_parallel_size": 1}


def loss_of(model: nn.Module, **inputs: Any) -> float:
    ids = torch.arange(3, 19)[None]
    return float(model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss)


RESTARTING = torch.cat([torch.arange(6), torch.arange(10)])[None]


def test_other_models_and_restored_ones_are_as_they_were() -> None:
    model, other = hybrid("qwen3_next"), hybrid("qwen3_next")
    leaking = loss_of(model, position_ids=RESTARTING)
    trainer = make_trainer(model=model)
    ringtile.enable(trainer, ALONE)
    assert loss_of(model, position_ids=RESTARTING) != leaking
    assert loss_of(other, position_ids=RESTARTING) == leaking
    ringtile.restore(trainer)
    assert loss_of(model, position_ids=RESTARTING) == leaking
    assert not any("forward" in vars(module) for module in model.modules())


ONES = torch.ones(1, 16, dtype=torch.int64)
LEFT_ALONE = {
    "one document": {},
    "one document, by its ids": {"position_ids": torch.arange(16)[None]},
    "padding behind": {"attention_mask": ONES.clone().index_fill_(1, torch.arange(12, 16), 0)},
}
KEPT = {
    "packed": {"position_ids": RESTARTING},
    "padding before": {"attention_mask": ONES.clone().index_fill_(1, torch.arange(4), 0)},
}


@pytest.mark.parametrize("name", [*LEFT_ALONE, *KEPT])
def test_rows_of_one_document_are_left_to_mixers_that_are_fast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with flash-linear-attention; with checkpoints too, whose layers run again in the backward."""
    calls: set[str] = set()

    def counted(function: str, compute: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.add(function)
            return compute(*args, **kwargs)

        return call

    for function, compute in list(recurrent._FUNCTIONS.items()):
        monkeypatch.setitem(recurrent._FUNCTIONS, function, counted(function, compute))
    monkeypatch.setattr(recurrent, "is_fast_alone", lambda functions, device: True)
    model = hybrid("qwen3_next")
    inputs = LEFT_ALONE.get(name, KEPT.get(name, {}))
    expected = loss_of(model, **inputs)
    trainer = make_trainer(model=model)
    ringtile.enable(trainer, ALONE)
    model.gradient_checkpointing_enable()
    ids = torch.arange(3, 19)[None]
    loss = trainer.model(input_ids=ids, labels=ids, **inputs).loss
    loss.backward()
    if name in LEFT_ALONE:
        assert not calls
        assert float(loss) == expected
    else:
        assert calls == {"causal_conv1d_fn", "torch_chunk_gated_delta_rule"}
    ringtile.restore(trainer)


def test_mixers_are_fast_where_their_packages_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: transformers' torch loops, and its CPU, are left for ringtile's functions."""
    mixers = {family: next(iter(recurrent.mixers(hybrid(family).named_modules()).values())) for family in PACKAGES}
    slow = {family: recurrent._slow_functions(mixer) for family, mixer in mixers.items()}
    for family, package in PACKAGES.items():
        for there in ("fla", "mamba_ssm", "causal_conv1d"):
            monkeypatch.setattr(recurrent, "_can_import", lambda name, there=there: name == there)
            assert recurrent.is_fast_alone(slow[family], torch.device("cuda")) == (there == package), family
            assert not recurrent.is_fast_alone(slow[family], torch.device("cpu"))


PACKAGES = {"qwen3_next": "fla", "mamba": "mamba_ssm", "bamba": "mamba_ssm", "lfm2": "causal_conv1d", "minimax": ""}


@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "mamba"])
def test_libraries_get_numbers_of_the_models_dtype(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their products would round wider ones; decays and steps stay in float32."""
    seen: dict[str, torch.dtype] = {}

    def spy(op: str) -> Any:
        def compute(**given: Any) -> Any:
            seen.update({f"{op} {name}": x.dtype for name, x in given.items() if torch.is_tensor(x)})
            return getattr(kernels, op)(**given)

        return compute

    monkeypatch.setattr(recurrent, "uses_libraries", lambda device: True)
    monkeypatch.setattr(
        functions, "function_for", lambda op, *rest: kernels.causal_conv1d if op == "causal_conv1d" else spy(op)
    )
    trainer = make_trainer(model=hybrid(family).to(torch.bfloat16))
    ringtile.enable(trainer, ALONE)
    loss_of(trainer.model)
    ringtile.restore(trainer)
    for name, dtype in seen.items():
        if not name.endswith("seq_idx"):
            multiplied = name.split()[1] in ("q", "k", "v", "x", "B", "C") and not name.startswith("selective")
            assert dtype == (torch.bfloat16 if multiplied else torch.float32), name
    assert seen


def test_generation_with_a_cache_is_left_to_transformers() -> None:
    model = hybrid("lfm2").eval()
    ids, options = torch.arange(3, 9)[None], {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **options)
    trainer = make_trainer(model=model)
    ringtile.enable(trainer, ALONE)
    assert torch.equal(model.generate(ids, **options), expected)
    ringtile.restore(trainer)


def test_models_that_take_a_short_cut_in_training_evaluate_too() -> None:
    trainer = make_trainer(model=hybrid("bamba"))
    ringtile.enable(trainer, ALONE)
    training = loss_of(trainer.model)
    assert loss_of(trainer.model.eval()) == training
    ringtile.restore(trainer)


REFUSED_BATCHES = {
    "seq_idx": {"seq_idx": torch.tensor([[0] * 6 + [1] * 10])},
    "numbers in attention_mask": {"attention_mask": torch.tensor([[1] * 6 + [2] * 10])},
}


@pytest.mark.parametrize("name", REFUSED_BATCHES)
def test_documents_that_attention_would_not_tell_apart_are_refused(name: str) -> None:
    trainer = make_trainer(model=hybrid("lfm2"))
    ringtile.enable(trainer, ALONE)
    with pytest.raises(
        RefusedError, match="documents are told apart by seq_idx, cu_seq_lens or numbers in attention_mask"
    ):
        loss_of(trainer.model, **REFUSED_BATCHES[name])
    ringtile.restore(trainer)


def test_a_mixer_that_would_miss_the_batch_is_refused() -> None:
    """A checkpoint that ringtile has not seen, a cache, a mixer that goes another way."""
    trainer = make_trainer(model=hybrid("lfm2"))
    layer, ids = trainer.model.model.layers[0], torch.arange(3, 19)[None]
    ringtile.enable(trainer, ALONE)
    again = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    with mock.patch.object(layer, "forward", again):
        loss = trainer.model(input_ids=ids, labels=ids).loss
    with pytest.raises(RefusedError, match=r"model.layers.0.conv \(Lfm2ShortConv\) is computed again in the backward"):
        loss.backward()
    with pytest.raises(RefusedError, match=r"model.layers.0.conv \(Lfm2ShortConv\) got a cache; expected none"):
        trainer.model.train(False)(torch.ones(1, 4).long(), use_cache=False, **_filled(trainer.model))
    ringtile.restore(trainer)
    ringtile.enable(trainer, ALONE)
    with (
        mock.patch.object(layer.conv, "forward", lambda hidden_states, **kwargs: hidden_states),
        pytest.raises(RefusedError, match=r"\(Lfm2ShortConv\) called none of the functions that mix its tokens"),
    ):
        loss_of(trainer.model)
    ringtile.restore(trainer)


def test_what_a_recurrence_may_not_ignore_is_refused() -> None:
    """Qwen3-Next hands its recurrence every argument that it does not know."""
    trainer = make_trainer(model=hybrid("qwen3_next"))
    ringtile.enable(trainer, ALONE)
    expected = loss_of(trainer.model, position_ids=RESTARTING)
    with pytest.raises(RefusedError, match="got decay_mask, which may change what it computes"):
        loss_of(trainer.model, position_ids=RESTARTING, decay_mask=torch.ones(1, 16))
    assert loss_of(trainer.model, position_ids=RESTARTING, decay_mask=None, num_items_in_batch=15) == expected
    ringtile.restore(trainer)


def _filled(model: nn.Module) -> dict[str, Any]:
    """A cache that holds three tokens, under the name by which the model returns and takes it."""
    outputs = model.train(False)(torch.ones(1, 3).long(), use_cache=True)
    return {name: outputs[name] for name in CACHES if name in outputs}


def test_an_unknown_recurrence_on_packed_rows_is_refused() -> None:
    trainer = make_trainer(model=hybrid("recurrent_gemma"), collator=packed)
    ringtile.enable(trainer, ALONE)
    with pytest.raises(RefusedError, match="carry its state from each document of a packed row into the next"):
        trainer.train()
