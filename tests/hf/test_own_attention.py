"""Attention and mask functions that a user registers with transformers are never replaced in silence."""

import contextlib
import functools
import math

import pytest
import ringtile
import torch
import torch.distributed as dist
from hf_models import tiny_model
from hf_training import assert_equal_training, failure_of, make_trainer, train
from pool import run_ranks
from ringtile.hf.registered_attention import DECLARED
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

CONFIG = {"context_parallel_size": 2}


def _scores(q: Tensor, k: Tensor, scaling: float) -> Tensor:
    """Of causal attention."""
    future = torch.ones(q.size(2), k.size(2), dtype=torch.bool).triu(1)
    return (q @ repeat_kv(k, q.size(1) // k.size(1)).mT * scaling).masked_fill(future, -math.inf)


def _of_scores(scores: Tensor, v: Tensor) -> tuple[Tensor, None]:
    weights = scores.softmax(-1)[..., -v.size(2) :]
    return (weights @ repeat_kv(v, scores.size(1) // v.size(1))).transpose(1, 2), None


def alibi(module, q, k, v, mask, scaling=None, **kwargs):
    distance = torch.arange(k.size(2)) - torch.arange(q.size(2))[:, None]
    return _of_scores(_scores(q, k, scaling) + 0.1 * distance, v)


def ssmax(module, q, k, v, mask, **kwargs):
    return sdpa_attention_forward(module, q * math.log(k.size(2)), k, v, mask, **kwargs)


def other_scale(module, q, k, v, mask, scaling=None, **kwargs):
    return sdpa_attention_forward(module, q, k, v, mask, scaling=2 * scaling, **kwargs)


def gated(module, q, k, v, mask, **kwargs):
    return 0.5 * sdpa_attention_forward(module, q, k, v, mask, **kwargs)[0], None


def softcapped(module, q, k, v, mask, scaling=None, **kwargs):
    return _of_scores(torch.tanh(_scores(q, k, scaling)), v)


def with_sinks(module, q, k, v, mask, scaling=None, **kwargs):
    scores = _scores(q, k, scaling)
    return _of_scores(torch.cat([torch.zeros_like(scores[..., :1]), scores], -1), v)


def windowed(module, q, k, v, mask, scaling=None, **kwargs):
    scores = _scores(q, k, scaling)
    return _of_scores(scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).tril(-4), -math.inf), v)


def logged(module, q, k, v, mask, **kwargs):
    logged.calls += 1
    return sdpa_attention_forward(module, q, k, v, mask, **kwargs)


logged.calls = 0


@functools.wraps(sdpa_attention_forward)  # it says that it is defined in transformers
def cached(module, q, k, v, mask, **kwargs):
    return functools.lru_cache(maxsize=1)(sdpa_attention_forward)(module, q, k, v, mask, **kwargs)


FUNCTIONS = {f.__name__: f for f in (alibi, ssmax, other_scale, gated, softcapped, with_sinks, windowed, logged)}
FUNCTIONS["cached"] = cached


def prefix_mask(mask_function, **kwargs):
    first = lambda batch, head, query, key: key < 3  # noqa: E731
    either = lambda *place: mask_function(*place) | first(*place)  # noqa: E731
    return sdpa_mask(mask_function=either, **{**kwargs, "allow_is_causal_skip": False})


@contextlib.contextmanager
def registered(name: str):
    """A model that attends by a user's function, or by sdpa under a user's mask, or a declared function."""
    function = FUNCTIONS.get(name.removeprefix("declared "), sdpa_attention_forward)
    if name.startswith("declared "):
        setattr(function, DECLARED, True)
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, prefix_mask if name == "prefixed" else sdpa_mask)
    model = tiny_model().train()
    model.set_attn_implementation(name)
    try:
        yield model
    finally:
        del AttentionInterface._global_mapping[name], AttentionMaskInterface._global_mapping[name]
        vars(function).pop(DECLARED, None)


def _refusal(name, config):
    with registered(name) as model:
        trainer = make_trainer(model=model)
        with pytest.raises(ringtile.RefusedError) as raised:
            ringtile.enable(trainer, config)
        assert model.config._attn_implementation == name  # and nothing is left behind
        return str(raised.value)


NAMES = [*FUNCTIONS, "prefixed"]


def _refusals():
    configs = [CONFIG | {"first_batch_check": check} for check in (True, False)]
    return {name: [_refusal(name, config) for config in configs] for name in NAMES}


def test_functions_of_users_are_refused_by_name():
    for refusals in run_ranks(2, _refusals):
        for name, messages in refusals.items():
            for message in messages:
                assert f"has attn_implementation '{name}', whose " in message
                assert DECLARED in message


@pytest.mark.parametrize("name", NAMES)
def test_function_of_a_user_is_refused_where_layers_are_streamed(name):
    assert "attn_implementation" in _refusal(name, {"context_parallel_size": 1, "stream": True})
    with registered(name) as model:
        with pytest.raises(ringtile.RefusedError, match="attn_implementation"):
            ringtile.stream_layers(model)
        assert model.config._attn_implementation == name


def _in_a_block(name):
    ids = torch.randint(3, 96, (1, 16), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(16)[None]
    with registered(name) as model:
        whole = model(ids, position_ids=positions).logits
        sharded, places = ids.clone(), positions.clone()
        with ringtile.context_parallel(dist.group.WORLD, buffers=[sharded, places], buffer_seq_dims=[1, 1]):
            try:
                local = model(sharded, position_ids=places).logits
            except ringtile.RingtileError as error:
                return str(error)
        layout = ringtile.Layout.zigzag(16, 2)
        assert torch.allclose(layout.unshard(local, 1, dist.group.WORLD), whole, atol=1e-5)
        assert torch.equal(model(ids, position_ids=positions).logits, whole)  # outside it is called as ever
        return "exact"


def _in_blocks():
    return {name: _in_a_block(name) for name in (*NAMES, "declared logged", "declared gated")}


def test_function_of_a_user_is_refused_inside_context_parallel():
    for found in run_ranks(2, _in_blocks):
        for name, what in found.items():
            if name.startswith("declared"):
                assert what == "exact"
            elif name == "prefixed":
                assert "attn_mask is" in what  # of local tokens
            else:
                assert f"registered as '{name}', inside context_parallel" in what


def _training(config):
    with registered("declared logged") as model:
        run = train(config, model=model, evaluate=False)
        return run, logged.calls


def test_function_that_is_declared_to_compute_what_sdpa_does_is_replaced():
    expected, calls = _training(None)
    assert calls > 0
    for run, calls in run_ranks(2, _training, CONFIG | {"first_batch_check": True}):
        assert_equal_training(run, expected)
        assert calls > 0  # in the run of one process of the first batch


def _failure(name):
    with registered(f"declared {name}") as model:
        return failure_of(make_trainer(model=model))


@pytest.mark.parametrize("name", ["ssmax", pytest.param("gated", marks=pytest.mark.long)])
def test_first_batch_compares_with_the_declared_function(name):
    for message in run_ranks(2, _failure, name):
        assert message.startswith("RefusedError: 2 ranks do not compute what one process computes")
        assert "model.layers.0.self_attn (LlamaAttention)" in message


def _attend(module, q, k, v, mask, **options):
    return module.attend(q, k, v, **options)


@contextlib.contextmanager
def _other_eager():
    """transformers' own eager function with other code in it, which no name and no module tells."""
    from transformers.models.llama import modeling_llama

    own = modeling_llama.eager_attention_forward
    before = own.__code__, own.__defaults__
    own.__code__, own.__defaults__ = _attend.__code__, None
    try:
        yield
    finally:
        own.__code__, own.__defaults__ = before


def _failure_of_eager():
    with _other_eager():
        model = tiny_model("llama", attn_implementation="eager").train()
        for layer in model.model.layers:
            layer.self_attn.attend = functools.partial(alibi, None, mask=None)
        return failure_of(make_trainer(model=model))


def test_first_batch_compares_with_the_eager_function_of_the_model():
    for message in run_ranks(2, _failure_of_eager):
        assert message.startswith("RefusedError: 2 ranks do not compute what one process computes")
