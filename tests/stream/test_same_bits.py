"""`reproducible: true`: what one process computes of a batch, any number of ranks computes bit for bit."""

from typing import Any

import pytest
import ringtile
import torch
from hf_models import hybrid, tiny_model
from hf_training import Padded, enter_world, failure_of, make_trainer, packed
from pool import run_ranks
from ringtile.hf.batch import active_batch
from ringtile.hf.config import Config
from ringtile.hf.features import loss
from test_stream_layers import cells
from torch import Tensor, nn

TOKENS, CHUNK = 100, 16  # padded to 112, 128 or 256 tokens
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 16, "num_key_value_heads": 8}
CONFIG = {"stream": True, "tiled_loss": True, "reproducible": True, "tile_tokens": CHUNK}
HYBRIDS = ("qwen3_next",)
HEADS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
FAMILIES = ("llama", "mixtral-balanced", "gpt-oss", *HYBRIDS)


def rows(lengths: list[int]) -> list[dict[str, Any]]:
    generator, found = torch.Generator().manual_seed(5), []
    for length in lengths:
        ids = torch.randint(3, 96, (length,), generator=generator)
        labels = ids.where(torch.rand(length, generator=generator) < 0.7, -100)
        found.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return found


class Recorded:
    """Of a rank: hidden states, log-probs and gradients of its tokens, (B, N, ...), and where these are in the row."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.places = torch.empty(0, dtype=torch.int64)
        self.loss = torch.empty(())
        self.products: set[tuple[int, ...]] = set()  # shapes that a layer's MLP is given

    def keep_loss(self, loss: Tensor) -> Tensor:
        self.loss = loss.detach().clone()
        return loss

    def watch(self, name: str, module: nn.Module) -> None:
        module.register_forward_hook(lambda module, args, output: self._record(name, output))

    def _record(self, name: str, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self.tensors[name], self.places = hidden.detach().clone(), active_batch().places
        ranks = active_batch().sequence.world_size  # by which the engine divides
        hidden.register_hook(lambda grad: self.tensors.__setitem__(f"gradient of {name}", grad / ranks))


def step_of(family: str, dtype: str, kind: str, config: dict[str, Any]) -> Recorded:
    """One step. Run it on every rank."""
    enter_world()
    if family in HYBRIDS:
        model = hybrid(family, **dict.fromkeys(HEADS, 8), max_position_embeddings=512)
    else:
        model = tiny_model(family, **(SIZES | {"max_position_embeddings": 512}))
    model = model.train().to(getattr(torch, dtype))
    lengths = [TOKENS, TOKENS - 9] if kind == "padded" else [40, 37, 23]
    options: dict[str, Any] = {"collator": Padded("left") if kind == "padded" else packed}
    options |= {"trainer_arguments": {"train_dataset": rows(lengths)}, "max_steps": 1, "gradient_accumulation_steps": 1}
    trainer = make_trainer(model=model, per_device_train_batch_size=len(lengths), **options)
    found = Recorded()
    for index, layer in enumerate(model.model.layers):
        found.watch(f"layer {index}", layer)
        layer.mlp.register_forward_pre_hook(lambda module, args: found.products.add(tuple(args[0].shape)))
    found.watch("norm", model.model.norm)
    total = loss._total

    def recording(batch: Any, losses: Tensor) -> Tensor:
        found.tensors["log-probs"] = losses.detach().view(-1, batch.sequence.local_len).clone()
        return total(batch, losses)

    loss._total = recording
    try:
        ringtile.enable(trainer, CONFIG | {"first_batch_check": False} | config)
        compute_loss = trainer.compute_loss
        trainer.compute_loss = lambda *args, **kwargs: found.keep_loss(compute_loss(*args, **kwargs))
        trainer.train()
    finally:
        loss._total = total
        ringtile.restore(trainer)
    return found


def whole(ranks: list[Recorded], num_tokens: int) -> dict[str, Tensor]:
    """Of all ranks, in the order of the sequence and without padding."""
    found = {"loss": ranks[0].loss}
    assert all(torch.equal(each.loss, found["loss"]) for each in ranks)
    # Products of other numbers of rows have other bits, of some sizes and on some CPUs.
    assert {shape[1] for each in ranks for shape in each.products} == {CHUNK}
    places = torch.cat([each.places for each in ranks]).argsort()[:num_tokens]
    for name in ranks[0].tensors:
        found[name] = torch.cat([each.tensors[name] for each in ranks], 1)[:, places]
    return found


_references: dict[tuple[str, ...], dict[str, Tensor]] = {}


def reference(*of: str) -> dict[str, Tensor]:
    if of not in _references:
        torch.set_num_threads(1)  # as the ranks have: torch's products depend on it
        _references[of] = whole([step_of(*of, {"context_parallel_size": 1})], TOKENS)
    return _references[of]


EVERY_RUN = {
    ("llama", "bfloat16", "packed", "contiguous", 2),
    ("llama", "float32", "padded", "zigzag", 4),
    ("qwen3_next", "bfloat16", "packed", "zigzag", 2),
}
CHOICES = (FAMILIES, ("float32", "bfloat16"), ("padded", "packed"), ("contiguous", "zigzag"), (2, 4, 8))


@pytest.mark.parametrize(("family", "dtype", "kind", "layout", "world"), cells(EVERY_RUN, *CHOICES))
def test_same_bits(family: str, dtype: str, kind: str, layout: str, world: int) -> None:
    expected = reference(family, dtype, kind)
    config = {"context_parallel_size": world, "layout": layout}
    found = whole(run_ranks(world, step_of, family, dtype, kind, config, timeout=200.0), TOKENS)
    assert found.keys() == expected.keys() >= {"layer 1", "gradient of layer 0", "norm", "log-probs", "loss"}
    if family == "mixtral-balanced":  # its probabilities are summed over 8 ranks in float32: by 7 * 2^-24 at most
        assert torch.allclose(found.pop("loss"), loss := expected["loss"], rtol=1e-6), loss
    different = [name for name, x in found.items() if not torch.equal(x, expected[name])]
    assert not different


def evaluated(world: int, dtype: str, kind: str, layout: str) -> tuple[float, Any]:
    """The loss of an evaluation, and its logits. On every rank."""
    enter_world()
    model = tiny_model(**(SIZES | {"max_position_embeddings": 512})).to(getattr(torch, dtype))
    collator = Padded("left") if kind == "padded" else packed
    trainer = make_trainer(model=model, collator=collator, per_device_eval_batch_size=2)
    config = {"context_parallel_size": world, "layout": layout, "first_batch_check": False}
    ringtile.enable(trainer, CONFIG | config)
    head, multiply = model.get_output_embeddings(), nn.functional.linear

    def linear(x: Tensor, weight: Tensor, *bias: Any) -> Tensor:
        assert weight is not head.weight or x.size(1) == CHUNK  # as in `whole`
        return multiply(x, weight, *bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", linear)
        found = trainer.predict(rows([TOKENS, TOKENS - 9, 40, 61]))
    ringtile.restore(trainer)
    return found.metrics["test_loss"], found.predictions


@pytest.mark.parametrize(
    ("world", "dtype", "kind", "layout"),
    [
        (2, "bfloat16", "padded", "zigzag"),
        *(
            pytest.param(world, dtype, kind, "contiguous", marks=pytest.mark.long)
            for world in (2, 4, 8)
            for dtype in ("float32", "bfloat16")
            for kind in ("padded", "packed")
        ),
    ],
)
def test_evaluation_has_the_same_bits(world: int, dtype: str, kind: str, layout: str) -> None:
    loss, logits = evaluated(1, dtype, kind, "contiguous")
    for of_rank in run_ranks(world, evaluated, world, dtype, kind, layout, timeout=200.0):
        assert of_rank[0] == loss
        assert (of_rank[1] == logits).all()


# ---- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"stream": False}, "reproducible is true and stream is not; expected stream: true"),
        ({"tiled_loss": False}, "reproducible is true and tiled_loss is not"),
        ({"context_parallel_size": 3}, "context_parallel_size is 3, .* expected a power of two"),
        ({"context_parallel_scheme": "ring"}, "context_parallel_scheme is 'ring', whose bits depend on the number of"),
        ({"context_parallel_scheme": "usp:2", "context_parallel_size": 4}, "'usp:2', whose bits .* expected ulysses"),
        ({"layout": "striped"}, "layout is 'striped', .* expected contiguous or zigzag"),
        ({"shared_prefix": True}, "reproducible and shared_prefix are true, .* expected one of the two"),
        ({"activation_offloading": True}, "reproducible and activation_offloading are true"),
    ],
)
def test_refused_keys(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ringtile.ConfigError, match=reason):
        Config(**CONFIG | config)


def test_auto_becomes_what_has_the_same_bits() -> None:
    for asked in ({}, {"context_parallel_scheme": "auto", "layout": "auto"}):
        config = Config(**CONFIG | asked)
        assert (config.context_parallel_scheme, config.layout) == ("ulysses", "contiguous")


def few_heads() -> str:
    trainer = make_trainer(model=tiny_model(num_key_value_heads=1).train(), max_steps=1)
    return failure_of(trainer, CONFIG | {"context_parallel_size": 2})


def test_more_ranks_than_heads_of_keys_are_refused() -> None:
    for message in run_ranks(2, few_heads):
        assert "has 1 heads of keys, some of which 2 ranks would share" in message
        assert message.startswith("RefusedError")


def shares_heads() -> str:
    return failure_of(make_trainer(model=hybrid("jamba").train(), max_steps=1), CONFIG | {"context_parallel_size": 2})


def test_recurrences_whose_heads_ranks_would_share_are_refused() -> None:
    for message in run_ranks(2, shares_heads):
        assert "reproducible: a recurrence of 1 heads or groups of heads, some of which 2 ranks would share" in message
