"""Data-loading workers end with their rank: they hold its connections."""

import itertools
import multiprocessing
import os
import signal

import ringtile
from hf_training import make_trainer
from pool import run_ranks
from ringtile.hf.workers import end_with_rank
from torch.utils.data import DataLoader, get_worker_info

SECONDS = 3.0  # torch's workers look for their parent every 5 s


def _first(worker):
    get_worker_info().dataset[0] = 7


def _rank(connection, begun):
    """Holds the connection, as do its workers, until it is killed."""
    loader = DataLoader([1, 2], num_workers=2, worker_init_fn=_first, persistent_workers=True)
    end_with_rank(loader)
    end_with_rank(loader)  # of another Trainer
    assert sorted(batch.item() for batch in loader) == [2, 7]  # the loader's own function is called too
    begun.send(os.getpid())
    signal.pause()


def test_connections_of_a_killed_rank_end_with_it():
    context = multiprocessing.get_context("fork")
    (ours, theirs), (hears, begun) = context.Pipe(), context.Pipe()
    rank = context.Process(target=_rank, args=(theirs, begun))
    rank.start()
    theirs.close()
    try:
        hears.recv()
        assert not ours.poll(0.0)
        rank.kill()
        assert ours.poll(SECONDS), "a worker still holds the connection"
    finally:
        rank.kill()
        rank.join()


def _worker_functions(config):
    trainer = make_trainer(dataloader_num_workers=1, per_device_eval_batch_size=1)
    for enabled in (False, True):
        if enabled:
            ringtile.enable(trainer, config)
        loaders = trainer.get_train_dataloader(), trainer.get_eval_dataloader()
        yield [type(loader.worker_init_fn).__name__ for loader in loaders]
    ringtile.restore(trainer)


def _functions(config):
    return list(itertools.chain(*_worker_functions(config)))


def test_loaders_of_an_enabled_trainer_have_such_workers():
    for config in ({"context_parallel_size": 2}, {"tiled_mlp": True}):
        for found in run_ranks(2, _functions, config):
            assert found == ["partial", "NoneType", "_EndWithParent", "_EndWithParent"]
