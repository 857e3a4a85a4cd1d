"""A real Trainer under context parallelism: losses, gradient norms, weights and predictions of one process."""

import functools
from unittest.mock import patch

import pytest
import ringtile
import torch
from hf_models import tiny_model
from hf_training import TOLERANCE, Padded, Run, assert_equal_training, make_trainer, packed, train
from pool import run_ranks
from ringtile.hf import attention
from transformers import DataCollatorWithFlattening


@functools.cache
def _reference(**options) -> Run:
    """The same run without ringtile, in one process."""
    return train(None, **options)


def assert_equal_runs(run: Run, expected: Run) -> None:
    assert_equal_training(run, expected)
    assert run.epoch == expected.epoch
    assert run.num_input_tokens == expected.num_input_tokens
    assert run.total_flos == expected.total_flos
    assert run.eval_loss == pytest.approx(expected.eval_loss, abs=TOLERANCE * expected.eval_loss)
    if expected.predictions is not None:
        assert run.predictions.shape == expected.predictions.shape
        assert (run.predictions - expected.predictions).abs().max() <= TOLERANCE
        assert torch.equal(run.label_ids, expected.label_ids)


def packed_for_flash(rows):
    """Documents in one row, named by cu_seq_lens and seq_idx beside their position ids."""
    return DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(rows)


CASES = {
    "right": ("zigzag", {}),
    "left": ("zigzag", {"collator": Padded("left")}),
    "rank-without-targets": ("contiguous", {"collator": Padded("left"), "late_targets": True}),
    "packed": ("per_document", {"collator": packed}),
    "learned-positions": ("zigzag", {"family": "opt", "collator": Padded("left")}),
    "keywords-dropped": ("balanced", {"family": "stablelm", "gradient_checkpointing": True}),
    "evaluated-first": ("zigzag", {"evaluate_first": True}),
    "flash-kwargs": ("per_document", {"collator": packed_for_flash}),
    "packed-sliding-striped": ("striped", {"collator": packed, "family": "qwen3-sliding"}),
    "own-token-average": ("balanced", {"average_tokens_across_devices": False}),
    "checkpointing": ("zigzag", {"gradient_checkpointing": True, "family": "mistral-sliding"}),
    "iterable": ("zigzag", {"stream": True, "gradient_accumulation_steps": 1}),
    "lengths-padding-counted": (
        "zigzag",
        {"train_sampling_strategy": "group_by_length", "include_num_input_tokens_seen": "non_padding"},
    ),
    "all-counted": ("zigzag", {"include_num_input_tokens_seen": True, "evaluate": False}),
    "dynamic-rope": ("zigzag", {"family": "llama-dynamic"}),
}


# Other cells hold most of what these do: "rank-without-targets" is padded on the left, "flash-kwargs" is packed, all
# tokens are counted in most; `ringtile models` tries RoPE that grows; test_hf_streams.py has iterable data.
LONG = ("left", "packed", "all-counted", "own-token-average", "evaluated-first", "dynamic-rope", "iterable")


@pytest.mark.parametrize(
    ("layout", "options"),
    [pytest.param(*case, id=name, marks=[pytest.mark.long] * (name in LONG)) for name, case in CASES.items()],
)
def test_two_ranks_equal_one_process(layout, options):
    expected = _reference(**options)
    for run in run_ranks(2, train, {"context_parallel_size": 2, "layout": layout}, **options):
        assert_equal_runs(run, expected)


def test_two_ranks_that_share_heads_equal_one_process():
    config = {"context_parallel_size": 2, "layout": "contiguous", "context_parallel_scheme": "ulysses"}
    for run in run_ranks(2, train, config):
        assert_equal_runs(run, _reference())


def test_two_ranks_with_tiles_equal_one_process():
    config = {"context_parallel_size": 2, "tiled_mlp": True, "tiled_loss": True, "tile_tokens": 5}
    for run in run_ranks(2, train, config, collator=packed):
        assert_equal_runs(run, _reference(collator=packed))


def _attention_kernels(config):
    """What the attention layers of a run ask the ring for."""
    asked, ring_attention = set(), attention.ring_attention

    def spy(*arguments, **options):
        asked.add(options["attention_kernel"])
        return ring_attention(*arguments, **options)

    with patch.object(attention, "ring_attention", spy):
        train(config)
    return asked


def test_attention_kernel_of_the_configuration_reaches_the_ring():
    assert run_ranks(2, _attention_kernels, {"context_parallel_size": 2, "attention_kernel": "auto"}) == [{"auto"}] * 2


def test_two_groups_of_two_ranks_equal_two_ranks_without():
    """dp 2 x cp 2 against plain DDP on two ranks: the same batches, the last of them partial."""
    expected = run_ranks(2, train, None)[0]
    for run in run_ranks(4, train, {"context_parallel_size": 2}):
        assert_equal_runs(run, expected)


def test_size_one_is_the_trainer_itself():
    expected = _reference()
    run = train({"context_parallel_size": 1})
    assert run.losses == expected.losses
    assert all(torch.equal(run.weights[name], weight) for name, weight in expected.weights.items())


def _loss_of_one_batch(config, average):
    """(loss without num_items_in_batch, with which TRL evaluates; its mean over the ranks is the batch's mean)."""
    trainer = make_trainer(average_tokens_across_devices=average)
    batch = Padded()(trainer.train_dataset[:4])
    if config is None:
        return trainer.compute_loss(trainer.model, batch).item()
    ringtile.enable(trainer, config)
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model.eval(), batch).item()
    ringtile.restore(trainer)
    return loss


@pytest.mark.parametrize("average", [True, False])
def test_loss_without_a_token_count_is_the_mean_over_the_batch(average):
    expected = _loss_of_one_batch(None, average)
    losses = run_ranks(2, _loss_of_one_batch, {"context_parallel_size": 2}, average)
    assert sum(losses) / 2 == pytest.approx(expected, rel=TOLERANCE)


def _train_with_muon(config) -> Run:
    model = tiny_model("llama").double().train()
    matrices = [weight for weight in model.parameters() if weight.requires_grad_(weight.dim() == 2).requires_grad]
    return train(
        config,
        model=model,
        evaluate=False,
        trainer_arguments={"optimizers": (torch.optim.Muon(matrices, lr=0.02), None)},
    )


def test_muon_trains_as_in_one_process():
    """In float64: Muon rounds gradients to bfloat16, so that one of float32 that differs in its last bit may move a
    weight by 2^-8 of the step, on one process too."""
    expected = _train_with_muon(None)
    for run in run_ranks(2, _train_with_muon, {"context_parallel_size": 2}):
        assert_equal_training(run, expected)
