"""What a Trainer's parts see of context parallelism, beside the trainings of test_hf_exact.py."""

import re
import sys
from typing import Any
from unittest.mock import patch

import pytest
import ringtile
import torch
from hf_models import tiny_model
from hf_training import PROOF, TOLERANCE, Padded, assert_equal_training, enabled, make_trainer, train
from kernels_off import kernels_off
from pool import run_ranks
from ringtile.hf import attention, trainers

CONFIG = PROOF | {"context_parallel_size": 2}


def _attention_kernels(config):
    """What the attention layers of a run ask the ring for."""
    asked, ring_attention = set(), attention.ring_attention

    def spy(*arguments, **options):
        asked.add(options["attention_kernel"])
        return ring_attention(*arguments, **options)

    with patch.object(attention, "ring_attention", spy), patch.object(attention, "_KERNEL", "ringtile"):
        train(config, max_steps=1, evaluate=False)
    return asked


def test_attention_kernel_of_the_environment_reaches_the_ring():
    assert run_ranks(2, _attention_kernels, CONFIG) == [{"ringtile"}] * 2


TILED = {**CONFIG, "tiled_mlp": True, "tiled_loss": True, "tile_tokens": 7}


def _train_without_kernels(config):
    with kernels_off():
        return train(config, max_steps=2, evaluate=False)


def test_without_kernels_ranks_train_as_one_process():
    expected = train(None, max_steps=2, evaluate=False)
    for run in run_ranks(2, _train_without_kernels, TILED):
        assert_equal_training(run, expected)


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
    losses = run_ranks(2, _loss_of_one_batch, CONFIG, average)
    assert sum(losses) / 2 == pytest.approx(expected, rel=TOLERANCE)


def _num_processes():
    """Inside a step, and after one that has failed."""
    counted, trainer = [], make_trainer()

    def fail(*args, **kwargs):
        counted.append(trainer.accelerator.num_processes)
        raise KeyError

    trainer.compute_loss_func = fail
    ringtile.enable(trainer, {**CONFIG, "first_batch_check": False})
    with pytest.raises(KeyError):
        trainer.train()
    ringtile.restore(trainer)
    return [*counted, trainer.accelerator.num_processes]


def test_a_group_counts_as_one_process_inside_a_step():
    assert run_ranks(2, _num_processes) == [[1, 2], [1, 2]]


def _seeds_of_workers():
    """By which index of a process the workers of the training's loader are seeded."""
    trainer = make_trainer(dataloader_num_workers=2)
    with enabled(trainer, CONFIG):
        return trainer.get_train_dataloader().base_dataloader.worker_init_fn.keywords["rank"]


def test_workers_of_a_group_are_seeded_alike():
    """What they draw, such as masks, is the same on ranks that share a sequence."""
    assert run_ranks(4, _seeds_of_workers) == [0, 0, 1, 1]


# ---- rows longer than the model was made for -------------------------------------------------------


def _warnings_of(rope: dict[str, Any], family: str = "llama") -> list[str]:
    """What two steps on rows of up to 40 tokens warn of, with a model made for 16."""
    model = tiny_model(family, max_position_embeddings=16, rope_parameters=rope).train()
    run = train(CONFIG, model=model, max_steps=2, evaluate=False)
    return [line for line in run.said if "max_position_embeddings" in line]


def test_warns_once_of_positions_beyond_those_of_an_unscaled_model() -> None:
    plain: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
    first, second = run_ranks(2, _warnings_of, plain)
    assert (len(first), second) == (1, [])  # rank 0 speaks
    assert re.search(
        r"reaches position \d\d, and LlamaForCausalLM was made for 16 \(max_position_embeddings\)", first[0]
    )
    yarn = plain | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert run_ranks(2, _warnings_of, yarn) == [[], []]
    of_kinds = {"sliding_attention": plain, "full_attention": plain | {"rope_type": "linear", "factor": 4.0}}
    assert run_ranks(2, _warnings_of, of_kinds, "gemma3") == [[], []]


@pytest.mark.parametrize(("version", "times"), [("5.25.0.dev0", 1), ("6.0", 1), ("5.24.9", 0)])
def test_a_release_that_was_not_tried_is_said_once(version, times, caplog, monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    trainers.warn_of_untried.cache_clear()
    with caplog.at_level("WARNING", logger="ringtile"):
        for _ in range(2):
            trainer = make_trainer()
            ringtile.enable(trainer, {"tiled_mlp": True})
            ringtile.restore(trainer)
    trainers.warn_of_untried.cache_clear()
    said = f"transformers {version} is newer than 5.24, the newest release that ringtile was tried with"
    assert sum(said in record.getMessage() for record in caplog.records) == times
