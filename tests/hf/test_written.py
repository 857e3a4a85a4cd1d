"""Counts of tokens that hooks keep in buffers, and callbacks use: as one process counts, or the training ends."""

from types import SimpleNamespace

import pytest
import ringtile
import torch
import torch.distributed as dist
from hf_models import tiny_model
from hf_training import make_trainer
from pool import run_ranks
from ringtile.first_batch.compare import Comparison, compare_written
from transformers import TrainerCallback


class Balance(TrainerCallback):
    """Moves a bias by what a hook has counted in the step."""

    def __init__(self, embed, reduces):
        self.embed, self.reduces = embed, reduces

    def on_step_end(self, args, state, control, **kwargs):
        if self.reduces and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.embed.seen)
        self.embed.bias.add_(self.embed.seen)
        self.embed.seen.zero_()


def _counted(how, length, on_ranks=True):
    """The bias after two steps; or the refusal."""

    def collator(rows):
        ids = torch.tensor([(row["input_ids"] * 3)[:length] for row in rows])
        return {"input_ids": ids, "labels": ids.clone()}

    model = tiny_model().train()
    embed = model.model.embed_tokens
    embed.register_buffer("seen", torch.zeros(2))
    embed.register_buffer("bias", torch.zeros(2))

    def count(module, args, output):
        ids = args[0][:, ringtile.real_tokens()] if how == "asks" else args[0]
        module.seen.add_(torch.stack([(ids % 2 == 0).sum(), torch.tensor(ids.numel())]))

    embed.register_forward_hook(count)
    callbacks = [Balance(embed, reduces=how != "alone")]
    options = {"max_steps": 2, "gradient_accumulation_steps": 1}
    trainer = make_trainer(model=model, collator=collator, trainer_arguments={"callbacks": callbacks}, **options)
    if on_ranks:
        ringtile.enable(trainer, {"context_parallel_size": 2})
    try:
        trainer.train()
        return embed.bias.tolist()
    except ringtile.RefusedError as error:
        return str(error)
    finally:
        ringtile.restore(trainer)


def test_counts_of_a_shard_are_refused_before_they_are_used_again():
    for said in run_ranks(2, _counted, "alone", 23):
        assert said.startswith("ranks 0 and 1 share a sequence, and differ in the buffers that were written between")
        assert "model.embed_tokens.bias" in said


@pytest.mark.parametrize(("how", "length"), [("sums", 23), ("asks", 3)])
def test_counts_that_are_summed_are_those_of_one_process(how, length):
    alone = _counted(how, length, on_ranks=False)
    assert alone[1] == 2 * 2 * length
    assert run_ranks(2, _counted, how, length) == [alone, alone]


def test_counts_of_padding_are_refused():
    for said in run_ranks(2, _counted, "sums", 3):
        assert "written beside padding: model.embed_tokens.seen" in said
        assert "ringtile.real_tokens()" in said


@pytest.mark.parametrize(("alone", "name"), [((4, 6), "sum"), ((2, 3), "mean"), ((3, 5), "largest"), ((3, 3), "")])
def test_what_one_process_writes_is_known_from_what_ranks_write(alone, name):
    whole = SimpleNamespace(written={name: torch.tensor(alone, dtype=torch.float64)})
    found, of_ranks = Comparison(), torch.tensor([[3, 1], [1, 5]], dtype=torch.float64)
    compare_written(found, whole, whole, {name: of_ranks})
    assert (found.parts, bool(found.difference)) == (((name,), False) if name else ((), True))
