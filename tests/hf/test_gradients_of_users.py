"""Gradients that users' code takes or changes itself are those of whole sequences, or refused by name."""

import pytest
import torch
from hf_engines import engine as engine_arguments
from hf_models import tiny_model
from hf_training import assert_equal_training, failure_of, make_trainer, train
from losses import OwnLoss
from pool import run_ranks
from ringtile.hf.weights import refuse_compression
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from transformers import Trainer, TrainerCallback

CONFIG = {"context_parallel_size": 2}


# ---- inside the loss ----------------------------------------------------------------------------


class Norm(Trainer):
    """Divides by the norm of a weight's gradient, as GradNorm and VQGAN's adaptive weight do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        (gradient,) = torch.autograd.grad(loss, self.weight(self.accelerator.unwrap_model(model)), retain_graph=True)
        return loss / (1 + gradient.norm().detach())

    def weight(self, model):
        return model.lm_head.weight


class NormOfAdapter(Norm):
    def weight(self, model):
        return next(weight for weight in model.parameters() if weight.requires_grad)


class NormOfHiddenStates(Norm):
    """By a hook that keeps what a layer returns."""

    def compute_loss(self, model, *args, **kwargs):
        kept = []
        layer = self.accelerator.unwrap_model(model).model.layers[0]
        handle = layer.register_forward_hook(lambda module, args, output: kept.append(output))
        self.weight = lambda model: kept[-1]
        try:
            return super().compute_loss(model, *args, **kwargs)
        finally:
            handle.remove()


class Hessian(Norm):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        (gradient,) = torch.autograd.grad(loss, model.module.lm_head.weight, create_graph=True)
        return loss + gradient.square().sum()


class Penalty(Trainer):
    """Of the gradient of embeddings, whose own gradient must reach the weights."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        embed = self.accelerator.unwrap_model(model).get_input_embeddings()
        embeddings = embed(inputs.pop("input_ids")).detach().requires_grad_()
        loss = model(inputs_embeds=embeddings, **inputs).loss
        (gradient,) = torch.autograd.grad(loss, embeddings, create_graph=True)
        return loss + gradient.square().sum()


class Backward(Trainer):
    """One of two terms has its backward inside the loss, as gradient caches do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.accelerator.backward(0.5 * model(**inputs).loss)
        return 0.5 * model(**inputs).loss


REFUSED = {
    Norm: "the loss takes a gradient of its own inside of the model",
    NormOfHiddenStates: "the loss takes a gradient of its own inside of the model",
    Hessian: "the loss takes a gradient of its own inside of the model",
    NormOfAdapter: "the loss takes a gradient of its own inside of the model",
    Penalty: "were differentiated again",
}


def _failures():
    return [
        failure_of(
            make_trainer(
                trainer_class=cls,
                model=tiny_model("llama", attn_implementation="eager").train(),
                lora=cls is NormOfAdapter,
            ),
            {"first_batch_check": cls is Penalty},
        )
        for cls in REFUSED
    ]


def test_gradients_taken_inside_the_loss_are_refused_by_name():
    for messages in run_ranks(2, _failures):
        for words, message in zip(REFUSED.values(), messages, strict=True):
            assert words in message


def _failure_under(engine):
    with engine_arguments(engine) as arguments:
        return failure_of(make_trainer(trainer_class=NormOfHiddenStates, **arguments), {"first_batch_check": False})


@pytest.mark.parametrize("engine", ["FSDP2", pytest.param("ZeRO-3", marks=pytest.mark.long)])
def test_gradients_of_hidden_states_are_refused_where_weights_are_gathered(engine):
    for message in run_ranks(2, _failure_under, engine):
        assert REFUSED[NormOfHiddenStates] in message


def _backward_inside(config, engine="DDP"):
    return train(config, engine=engine, trainer_class=Backward, gradient_accumulation_steps=1, evaluate=False)


@pytest.mark.parametrize("engine", [pytest.param("DDP", marks=pytest.mark.long), "FSDP2"])
def test_backward_inside_the_loss_is_the_engines(engine):
    expected = _backward_inside(None)
    for run in run_ranks(2, _backward_inside, CONFIG, engine):
        assert_equal_training(run, expected)


# ---- hooks on the gradients of weights ----------------------------------------------------------


def clamp(gradient):
    return gradient.clamp(-0.01, 0.01)


def normalize(gradient):
    return gradient / gradient.norm()


def _by_hook(function):
    def hooked(model):
        for weight in model.parameters():
            weight.register_hook(function)

    return hooked


def _after_accumulating(model):
    def quantize(weight):
        weight.grad.copy_((weight.grad * 64).round() / 64)

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(quantize)


class Late(TrainerCallback):
    """Hooks that come when two steps are over."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            _by_hook(clamp)(model)


HOOKS = {"clamp": _by_hook(clamp), "normalize": _by_hook(normalize), "quantize": _after_accumulating, "late": None}
TRAINERS = {"the model's": Trainer, "one's own": OwnLoss}


def _trainings(config, loss, hooks):
    runs = []
    for hook in hooks:
        model, prepare = tiny_model().train(), HOOKS[hook]
        if prepare is not None:
            prepare(model)
        callbacks = [] if prepare is not None else [Late()]
        options = {"trainer_arguments": {"callbacks": callbacks}, "gradient_accumulation_steps": 1}
        options["max_steps"] = 3 if prepare is None else 2
        runs.append(train(config, model=model, trainer_class=TRAINERS[loss], evaluate=False, **options))
    return runs


@pytest.mark.parametrize(
    ("loss", "hooks"),
    [
        ("the model's", ["clamp", "normalize", "quantize", "late"]),
        ("one's own", ["normalize"]),
        pytest.param("one's own", ["clamp", "quantize", "late"], marks=pytest.mark.long),
    ],
)
def test_hooks_see_gradients_of_whole_sequences(loss, hooks):
    expected = _trainings(None, loss, hooks)
    for runs in run_ranks(2, _trainings, CONFIG | {"first_batch_check": False}, loss, hooks):
        for run, one in zip(runs, expected, strict=True):
            assert_equal_training(run, one, losses=1e-5, norms=1e-5, weights=1e-5)


class _Engine:
    def __init__(self, *hooks, optimizer=None):
        self._comm_hooks, self.optimizer = [(hook, None) for hook in hooks], optimizer


def test_compressed_gradients_are_refused():
    refuse_compression(_Engine(default_hooks.fp16_compress_hook))
    with pytest.raises(Exception, match="powerSGD_hook compresses"):
        refuse_compression(_Engine(powerSGD_hook.powerSGD_hook))
    with pytest.raises(Exception, match="OnebitAdam compresses"):
        refuse_compression(_Engine(optimizer=type("OnebitAdam", (), {})()))
