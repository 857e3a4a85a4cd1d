"""Every kind of attention layer in training: sinks, chunks, temperature, two head dims, windows and RoPE by layer."""

import functools
import logging

import pytest
import ringtile
from hf_models import tiny_model
from hf_training import TOLERANCE, make_trainer, packed, train
from pool import run_ranks
from ringtile.cli import tiny_models
from ringtile.hf.packing import positions_separate
from test_hf_trainer import packed_for_flash

OPTIONS = {"collator": packed, "max_steps": 5, "gradient_accumulation_steps": 1, "evaluate": False}
# Some of these models are steep at their random weights (Gemma 4 has gradients of 15): with large steps, they would
# multiply the rounding of the first by ten in each of the others.
OPTIONS |= {"learning_rate": 0.01}
# Of these, the other cells of this file are combinations; test_hf_attention compares the logits of all of them.
ALWAYS = {"gpt-oss": {}, "llama4": {"gradient_checkpointing": True}}
FAMILIES = (
    *("gpt-oss", "llama4", "gemma2", "gemma3", "gemma4", "deepseek-v3", "mixtral-balanced", "qwen3-moe", "glm4-moe"),
    *("olmoe", "granite-swa", "phi3-sliding", "cohere2", "mistral-sliding", "mimo-v2", "qwen2-moe-sliding"),
)


@functools.cache
def _reference(family, **options):
    return train(None, family=family, **OPTIONS, **options)


@pytest.mark.parametrize(("family", "options"), ALWAYS.items())
def test_two_ranks_train_as_one_process(family, options):
    """Five steps on packed rows."""
    expected = _reference(family, **options)
    for run in run_ranks(2, train, {"context_parallel_size": 2}, family=family, **OPTIONS, **options):
        _assert_equal(run, expected)


def _assert_equal(run, expected):
    assert run.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert run.grad_norms == pytest.approx(expected.grad_norms, rel=10 * TOLERANCE)
    for name, weight in expected.weights.items():
        assert (run.weights[name] - weight).abs().max() <= 10 * TOLERANCE * weight.abs().max(), name


def _train_all(config, **options):
    return [train(config, family=family, **{**OPTIONS, **options}) for family in FAMILIES]


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 4])
def test_families_train_as_one_process_for_each_group(world_size):
    """Five steps on packed rows. Of two groups, each row has a balancing loss of its own, as on two ranks without."""
    if world_size == 2:
        expected, num_rows = _train_all(None), 22
    else:
        num_rows = 40
        expected = run_ranks(2, _train_all, None, num_rows=num_rows, timeout=300.0)[0]
    config = {"context_parallel_size": 2}
    for runs in run_ranks(world_size, _train_all, config, num_rows=num_rows, timeout=600.0):
        for family, run, wanted in zip(FAMILIES, runs, expected, strict=True):
            assert run.losses == pytest.approx(wanted.losses, rel=TOLERANCE), family
            _assert_equal(run, wanted)


def test_models_whose_masks_know_no_positions_are_known():
    """In one process their packed documents attend each other, unless flash attention looks at the position ids."""
    assert positions_separate(tiny_model("llama"))
    gpt_oss = tiny_model("gpt-oss")
    assert not positions_separate(gpt_oss)
    gpt_oss.config._attn_implementation_internal = "flash_attention_2"
    assert positions_separate(gpt_oss)
    # A tower's mask says nothing of text; one model raises ValueError for the positions that its mask needs.
    assert positions_separate(tiny_models.tiny_model(tiny_models.tiny_config("deepseek_ocr2")))
    assert not positions_separate(tiny_models.tiny_model(tiny_models.tiny_config("hunyuan_vl")))


class _Messages(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


WARNED = (("gpt-oss", packed), ("gpt-oss", packed_for_flash), ("llama", packed))


def _warnings():
    """What an evaluation of three batches, twice, warns of: in each of the cases."""
    return [_warnings_of(family, collator) for family, collator in WARNED]


def _warnings_of(family, collator):
    trainer = make_trainer(family, collator=collator)
    messages = _Messages()
    logging.getLogger("ringtile").addHandler(messages)
    try:
        ringtile.enable(trainer, {"context_parallel_size": 2})
        trainer.evaluate()
        trainer.evaluate()
    finally:
        ringtile.restore(trainer)
        logging.getLogger("ringtile").removeHandler(messages)
    return messages.texts


def test_packed_documents_that_attend_each_other_are_told_once():
    (first, *others), second = run_ranks(2, _warnings)
    assert len(first) == 1
    assert "the documents of a packed row attend each other" in first[0]
    assert "GptOssForCausalLM" in first[0]
    assert "cu_seq_lens_q" in first[0]
    assert [*others, *second] == [[]] * 5
