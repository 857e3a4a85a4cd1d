"""Every setting of float32's precision, by torch's old and new interface and transformers' own, trains with a check."""

import pytest
import torch
from hf_models import tiny_model
from hf_training import make_trainer, run_new_ranks
from ringtile.hf.trainer import enable, first_batch_of
from ringtile.precision import float32_rounding
from transformers.utils.import_utils import enable_tf32

NONE, TF32, BF16 = 0.0, 2.0**-11, 2.0**-8


def _legacy(name):
    return lambda: torch.set_float32_matmul_precision(name)


def _new(**settings):
    def choose():
        for module, value in settings.items():
            backend = torch.backends if module == "all" else getattr(torch.backends, module).matmul
            backend.fp32_precision = value

    return choose


# One after another in one process, so that the two interfaces are mixed, as in a program that uses libraries.
SETTINGS = [
    (lambda: None, NONE),
    (lambda: enable_tf32(True), TF32),  # what TrainingArguments(tf32=True) does, and torch_compile=True on an Ampere
    (lambda: enable_tf32(False), NONE),
    (_legacy("high"), TF32),
    (_legacy("medium"), BF16),
    (_legacy("highest"), NONE),
    (_new(all="tf32", mkldnn="none", cuda="none"), TF32),
    (_new(all="tf32", mkldnn="ieee", cuda="ieee"), NONE),
    (lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True), NONE),  # nothing to a CPU
    (_new(mkldnn="bf16"), BF16),
]


def _trainings(trained, compiled_too):
    found = []
    for i, (choose, unit) in enumerate(SETTINGS):
        choose()
        assert float32_rounding(torch.device("cpu")) == unit
        if i not in trained:
            continue
        compiles = {"torch_compile": True, "torch_compile_backend": "eager"} if i in compiled_too else {}
        model = tiny_model(num_hidden_layers=1).train()  # and one batch: compiling takes longer than all else
        trainer = make_trainer(model=model, max_steps=1, gradient_accumulation_steps=1, **compiles)
        enable(trainer, {"context_parallel_size": 2, "first_batch_check": True})
        trainer.train()
        found.append((trainer.state.log_history[0]["loss"], first_batch_of(trainer).noise, unit))
    return found


# In every run one training of each unit, and of each again when both interfaces have been used. The last of TF32 is
# compiled: what torch.compile reads of both may raise then.
OF_TF32 = [i for i, (_, unit) in enumerate(SETTINGS) if unit == TF32]
IN_EVERY_RUN, ALL = (0, 1, 4, 6, 8, 9), range(len(SETTINGS))


@pytest.mark.parametrize(
    ("trained", "compiled_too"),
    [(IN_EVERY_RUN, OF_TF32[-1:]), pytest.param(ALL, OF_TF32, marks=pytest.mark.long)],
    ids=len,
)
def test_no_setting_of_precision_stops_a_training(trained, compiled_too):
    for found in run_new_ranks(2, _trainings, trained, compiled_too):
        expected, exact, _ = found[0]
        for loss, noise, unit in found:
            # A CPU that has such products makes them, others do not.
            assert loss == pytest.approx(expected, rel=max(1e-6, unit))
            assert noise >= 0.5 * exact * max(unit / torch.finfo(torch.float32).eps, 1.0)
