"""Streams, which have no length and no sampler: every rank of a group reads the same rows, also after a checkpoint."""

import datasets
import pytest
import torch
from hf_training import TOLERANCE, Run, Stream, assert_equal_training, make_rows, train
from pool import run_ranks

CONFIG = {"context_parallel_size": 2}
# 22 rows in batches of 4: the sixth and last batch has 2 rows.
LIFE = {
    **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 6, "evaluate": False},
    **{"optim": "adamw_torch", "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 4},
}


def _of_torch():
    return Stream(make_rows(22))


def _of_datasets():
    rows = datasets.Dataset.from_list(make_rows(22))
    return rows.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=8)


def _train(config, make_stream, folder, **options) -> Run:
    stream = {"train_dataset": make_stream()}
    return train(config, folder=str(folder), trainer_arguments=stream, **{**LIFE, **options})


@pytest.mark.parametrize("make_stream", [_of_torch, _of_datasets])
def test_stream_equals_one_process(make_stream, tmp_path):
    """SGD, whose weights show every gradient as it is."""
    options = {"optim": "sgd", "learning_rate": 0.3, "save_strategy": "no"}
    expected = _train(None, make_stream, tmp_path, **options)
    for run in run_ranks(2, _train, CONFIG, make_stream, tmp_path, **options):
        assert_equal_training(run, expected)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("make_stream", [_of_torch, _of_datasets])
def test_resumed_stream_is_bitwise_the_uninterrupted_run(make_stream, world_size, tmp_path):
    """Of 2 ranks, and of two groups of 2 ranks, each of which reads its share."""
    options = {"per_device_train_batch_size": 8 // world_size}
    whole = run_ranks(world_size, _train, CONFIG, make_stream, tmp_path, **options)
    checkpoint = str(tmp_path / "checkpoint-4")
    resumed = run_ranks(world_size, _train, CONFIG, make_stream, tmp_path / "b", resume=checkpoint, **options)
    for run, expected in zip(resumed, whole, strict=True):
        assert run.global_step == 6
        assert run.losses == expected.losses  # the state of the Trainer remembers the first four
        assert run.grad_norms == expected.grad_norms
        assert all(torch.equal(run.weights[name], weight) for name, weight in expected.weights.items())


def test_ignore_data_skip_begins_the_stream_again(tmp_path):
    """As in one process."""
    whole = _train(None, _of_torch, tmp_path)
    options = {"resume": str(tmp_path / "checkpoint-4"), "ignore_data_skip": True, "save_strategy": "no"}
    expected = _train(None, _of_torch, tmp_path / "one", **options)
    assert expected.losses[:4] == whole.losses[:4]
    assert expected.losses[4:] != pytest.approx(whole.losses[4:], rel=100 * TOLERANCE)
    for run in run_ranks(2, _train, CONFIG, _of_torch, tmp_path / "ranks", **options):
        assert run.losses == pytest.approx(expected.losses, rel=TOLERANCE)
