"""`sequence_log_probs(reproducible=True)`: the bits of a row on any number of ranks, beside any rows and padding."""

from __future__ import annotations

import copy
import functools
import re
import sys
from typing import Any

import pytest
import ringtile
import torch
import torch.distributed as dist
import trl.kernels.chunked_logprob
from hf_models import tiny_model
from hf_rollouts import make_rollouts
from hf_training import make_trainer
from pool import run_ranks
from test_sequence_log_probs import ROWS, assert_equal, averaged, loss_of, one_process
from test_stream_layers import cells
from torch import Tensor
from torch.nn import functional

CHUNK = 16
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 16, "num_key_value_heads": 8}
LENGTHS = [161, 38, 16]
OPTIONS: dict[str, Any] = {"scheme": "ulysses", "reproducible": True, "return_entropy": True, "temperature": 0.9}
TRAINED = {"stream": True, "tiled_loss": True, "reproducible": True, "tile_tokens": CHUNK}
Row = tuple[Tensor, Tensor]  # log-probs and entropies of its tokens


def model_of(family: str, dtype: str, checkpointing: bool = False) -> Any:
    model = tiny_model(family, **(SIZES | {"max_position_embeddings": 512})).train().to(getattr(torch, dtype))
    if checkpointing:
        model.gradient_checkpointing_enable()
    ringtile.stream_layers(model, CHUNK)
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(check_rows)
    return model


def check_rows(module: Any, args: tuple[Tensor, ...]) -> None:
    """Products of other numbers of rows have other bits, of some sizes and on some CPUs."""
    assert args[0].shape[:2] == (1, CHUNK)


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 96, (length,), generator=generator) for length in LENGTHS]


def of_batch(model: Any, chosen: list[int], padding: int, before: int = 0, **options: Any) -> list[Row]:
    """Of some rows as one batch, padded to the longest and by so many tokens more, of which some are before."""
    some = [rows()[i] for i in chosen]
    length = max(map(len, some)) + padding + before
    ends = [(before, length - len(row) - before) for row in some]
    ids = torch.stack([functional.pad(row, end) for row, end in zip(some, ends, strict=True)])
    mask = torch.stack([functional.pad(torch.ones_like(row), end) for row, end in zip(some, ends, strict=True)])
    group = dist.group.WORLD if dist.is_initialized() else None
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = ringtile.sequence_log_probs(
        model, ids, group, attention_mask=mask, position_ids=positions, **OPTIONS, **options
    )
    return [
        tuple(x.detach()[i, before : before + len(row) - 1].clone() for x in found)  # type: ignore[misc]
        for i, row in enumerate(some)
    ]


def ways(family: str, dtype: str, layout: str) -> dict[str, list[Row]]:
    """The rows in batches of several shapes, without gradients and in training. Run it on every rank."""
    model, found, options = model_of(family, dtype), {}, {"layout": layout, "check": False}
    with torch.no_grad():
        found["old"] = of_batch(model.eval(), [0, 1], 0, **options)
        found["in another order, padded"] = of_batch(model, [1, 2, 0], 37, 5, **options)[::-2]
    found["new"] = of_batch(model_of(family, dtype, checkpointing=True), [0, 1], 0, **options)
    return found


@functools.cache
def reference(family: str, dtype: str) -> list[Row]:
    """Each row alone, in one process."""
    with torch.no_grad():
        model = model_of(family, dtype)
        return [of_batch(model, [i], 0, layout="contiguous")[0] for i in range(2)]


SHORT = {("llama", "bfloat16", "zigzag", 2), ("mixtral", "float32", "contiguous", 4)}
CHOICES = (("llama", "mixtral"), ("float32", "bfloat16"), ("contiguous", "zigzag"), (1, 2, 4, 8))


@pytest.mark.parametrize(("family", "dtype", "layout", "world"), cells(SHORT, *CHOICES))
def test_ratio_is_exactly_one(family: str, dtype: str, layout: str, world: int) -> None:
    expected = reference(family, dtype)
    for rank in run_ranks(world, ways, family, dtype, layout, timeout=200.0):
        for name, found in rank.items():
            for row, (got, wanted) in enumerate(zip(found, expected, strict=True)):
                assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True)), (name, row)


def streamed_rows_are_exact() -> None:
    reproducible: dict[str, Any] = {"scheme": "ulysses", "reproducible": True}
    rings: dict[str, Any] = {"padding left and right": {"check": True, "scheme": "auto"}}
    for name, options in (rings | dict.fromkeys(("packed documents", "padding alone"), reproducible)).items():
        model, given = tiny_model().double().train(), ROWS[name]()
        oracle, params = one_process(model, given), list(model.parameters())
        loss = loss_of(*oracle)
        exact: Any = [torch.zeros_like(p) for p in params]
        if loss.requires_grad:
            exact = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
        ringtile.stream_layers(model, 8)
        ours = ringtile.sequence_log_probs(
            *(model, given.input_ids, dist.group.WORLD),
            attention_mask=given.attention_mask,
            temperature=0.8,
            return_entropy=True,
            **options,
        )
        assert_equal(list(ours), list(oracle), 1e-5)  # of float32 norms, as in test_sequence_log_probs.py
        loss_of(*ours).backward()
        assert_equal(averaged(model), list(exact), 1e-5)


def test_rows_and_gradients_of_streamed_layers_equal_one_process() -> None:
    for world in (1, 2):
        run_ranks(world, streamed_rows_are_exact)


# ---- TRL ----------------------------------------------------------------------------------------


def trainer_of(kind: str, world: int, model: Any, **options: Any) -> Any:
    options |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 1}
    if kind != "DPO":
        options |= {"num_iterations": 2, "steps_per_generation": 4, "beta": 0.1, "max_grad_norm": 0.0}
        return make_rollouts(kind, world, made=lambda: {"model": model}, **options)
    more = {"ref_model": copy.deepcopy(model)}
    return make_trainer(trainer_class="trl.DPOTrainer", model=model, trainer_arguments=more, **options)


def step(kind: str, world: int, dtype: str) -> dict[str, list[Tensor]]:
    """Of the batches of a step: log-probs and entropies; log-ratios to old log-probs, or for DPO to a reference that is
    the same model; log-probs of the reference; and losses. Run it on every rank."""
    model = tiny_model(**SIZES).train().to(getattr(torch, dtype))
    trainer = trainer_of(kind, world, model)
    ringtile.enable(trainer, TRAINED | {"context_parallel_size": world, "first_batch_check": False})
    assert trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE == CHUNK
    for layer in [*model.model.layers, *trainer.ref_model.model.layers]:
        layer.mlp.register_forward_pre_hook(check_rows)
    found: dict[str, list[Tensor]] = {name: [] for name in ("new", "entropy", "log-ratio", "reference", "loss")}
    outs: list[Any] = []
    model.register_forward_hook(lambda module, args, out: outs.append(out))
    trainer.ref_model.register_forward_hook(lambda module, args, out: found["reference"].append(out.log_probs))
    compute = trainer._compute_loss

    def compute_loss(policy: Any, inputs: dict[str, Tensor], *args: Any) -> Tensor:
        outs.clear()
        loss: Tensor = compute(policy, inputs, *args)
        (out,) = outs
        new = out.log_probs.detach()
        if kind == "DPO":
            ratio = new - found["reference"][-1]
        elif kind == "GRPO":
            ratio = new[:, -inputs["completion_ids"].size(1) :] - inputs["old_per_token_logps"]
        else:
            mask = inputs["completion_mask"]
            ratio = (new[:, -mask.size(1) :] * mask).sum(1) - inputs["old_logps"]
        for name, x in {"new": new, "entropy": out.entropy, "log-ratio": ratio, "loss": loss}.items():
            found[name].append(x.detach())
        return loss

    trainer._compute_loss = compute_loss
    trainer.train()
    ringtile.restore(trainer)
    return found


one_rank = functools.cache(functools.partial(step, world=1))
STEPS = (("GRPO", "RLOO", "DPO"), ("float32", "bfloat16"), (2, 4))


@pytest.mark.parametrize(("kind", "dtype", "world"), cells({("GRPO", "bfloat16", 2)}, *STEPS))
def test_trainers_begin_with_ratios_of_one(kind: str, dtype: str, world: int) -> None:
    expected = one_rank(kind, dtype=dtype)
    assert len(expected["new"]) == 2
    assert all(new.any() and not ratio.any() for new, ratio in zip(expected["new"], expected["log-ratio"], strict=True))
    for rank in run_ranks(world, step, kind, world, dtype, timeout=300.0):
        different = [name for name in expected if not all(map(torch.equal, rank[name], expected[name]))]
        assert not different


# ---- refused ------------------------------------------------------------------------------------


def refused(streamed: bool, **options: Any) -> str:
    model = model_of("llama", "float32") if streamed else tiny_model()
    with pytest.raises(ringtile.RingtileError) as error:
        ringtile.sequence_log_probs(model, rows()[0][None], **{**OPTIONS, **options})
    return str(error.value)


@pytest.mark.parametrize(
    ("streamed", "options", "reason"),
    [
        (False, {}, "the layers are not streamed, .* expected ringtile.stream_layers"),
        (True, {"scheme": "ring"}, "scheme 'ring', whose bits depend on the number of ranks; expected .* ulysses"),
        (True, {"layout": "striped"}, "layout 'striped' .* expected zigzag or contiguous"),
    ],
)
def test_refused(streamed: bool, options: dict[str, Any], reason: str) -> None:
    assert re.search(reason, refused(streamed, **options))


def test_a_reference_that_zero_has_prepared_is_refused() -> None:
    trainer: Any = make_rollouts(beta=0.1)
    next(trainer.ref_model.parameters()).ds_id = 0
    with pytest.raises(ringtile.RefusedError, match=r"ZeRO-3 has prepared a second LlamaForCausalLM .* or adapters"):
        ringtile.enable(trainer, TRAINED)


def test_a_reference_from_before_is_refused() -> None:
    trainer = trainer_of("DPO", 1, tiny_model(), precompute_ref_log_probs=True)
    with pytest.raises(ringtile.RefusedError, match="expected precompute_ref_log_probs=False"):
        ringtile.enable(trainer, TRAINED)


def test_a_head_of_another_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_rollouts()
    monkeypatch.delitem(sys.modules, "trl.kernels.chunked_logprob")
    with pytest.raises(ringtile.RefusedError, match=r"GRPOTrainer has no .* expected trl >= 1.16"):
        ringtile.enable(trainer, TRAINED)


def too_few_heads() -> str:
    model = tiny_model(num_key_value_heads=1)
    ringtile.stream_layers(model, CHUNK)
    with pytest.raises(ringtile.RefusedError) as error:
        ringtile.sequence_log_probs(model, rows()[0][None], dist.group.WORLD, **OPTIONS, check=False)
    return str(error.value)


def test_more_ranks_than_heads_of_keys_are_refused() -> None:
    for message in run_ranks(2, too_few_heads):
        assert "has 1 heads of keys, some of which 2 ranks would share" in message
