"""Multi-head latent attention under the Trainer: latents travel, trained as in one process; where heads do instead."""

from __future__ import annotations

import functools
import inspect
from typing import Any
from unittest import mock

import pytest
import ringtile
import torch
from cells import Cell, check, params, table
from hf_models import hybrid, tiny_model
from hf_training import Padded, enter_world, make_trainer, packed
from peft import LoraConfig, get_peft_model
from pool import run_ranks
from ringtile.hf import attention
from ringtile.hf.features import latents
from test_hf_families import sources
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from tools.models import tiny_models

STEPS = {"gradient_accumulation_steps": 1, "num_rows": 24}


def made(name: str) -> dict[str, Any]:
    """A model whose latents are fewer numbers than its heads, and which forgets slowly if it is a hybrid."""
    if name == "kimi_linear":
        return {"model": hybrid(name)}
    return {"model": tiny_models.tiny_model(tiny_models.tiny_config(name)).train()}


def with_adapters() -> dict[str, Any]:
    """On the up-projection too."""
    torch.manual_seed(1)
    targets = ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    return {"model": get_peft_model(tiny_model("deepseek-v3").train(), config)}


def cell(
    name: str, ranks: int, what: str, long: bool = True, config: dict[str, Any] | None = None, **more: Any
) -> Cell:
    """A hybrid's documents are rows of their own in one process, where transformers' packed rows leak."""
    collator = packed if what == "packed" else Padded("left" if what == "padded left" else "right")
    alone = Padded() if name == "kimi_linear" and what == "packed" else collator
    return Cell(
        f"{name} on {ranks} ranks, {what}",
        {**STEPS, "learning_rate": 0.01},
        {"context_parallel_size": ranks, "layout": "zigzag", **(config or {})},
        ranks={"collator": collator, **more},
        alone={"collator": alone},
        made=functools.partial(made, name),
        world=ranks,
        long=long,
    )


MODELS = ("deepseek_v3", "kimi_linear", "glm4_moe_lite")
KEPT = {"gradient_checkpointing": True}
TINY = functools.partial(made, "deepseek_v3")


def of_one(
    what: str, long: bool = True, made: Any = TINY, config: dict[str, Any] | None = None, **options: Any
) -> Cell:
    """Of DeepSeek-V3 on two ranks, packed."""
    given = {**STEPS, "learning_rate": 0.01, "collator": packed}
    return Cell(what, given, config or {}, ranks=options, made=made, long=long)


CELLS = table(
    *(
        cell(name, ranks, what, (name, ranks, what) != ("deepseek_v3", 3, "packed"))
        for name in MODELS
        for ranks in (2, 3, 4)
        for what in ("packed", "padded")
    ),
    cell("glm4_moe_lite", 2, "padded left", long=False),
    *(
        of_one(f"{scheme}, {layout}", config={"context_parallel_scheme": scheme, "layout": layout})
        for scheme in ("all_gather", "ulysses", "auto")
        for layout in ("contiguous", "balanced")
    ),
    of_one("checkpointed, attention kept", **KEPT),
    of_one("checkpointed, attention run again", config={"keep_attention": False}, **KEPT),
    of_one("FSDP2", engine="FSDP2"),
    of_one("ZeRO-2", engine="ZeRO-2"),
    of_one("ZeRO-3, with heads", engine="ZeRO-3"),
    of_one("LoRA on the up-projection", long=False, made=with_adapters),
    of_one("tiled", config={"tiled_mlp": True, "tiled_norm": True, "tiled_loss": True}),
    of_one("compiled, with heads", torch_compile=True, torch_compile_backend="eager"),
)


@pytest.mark.parametrize("cell", params(CELLS))
def test_ranks_train_as_one_process(cell: Cell) -> None:
    check(__name__, cell)


# ---- what travels ---------------------------------------------------------------------------------


def _tokens(rows: list[Any]) -> dict[str, torch.Tensor]:
    ids = torch.arange(3, 35).view(1, 32)
    return {"input_ids": ids, "labels": ids.clone()}


def _sent(case: str) -> tuple[int, int]:
    """The bytes that this rank sends in a forward and backward of 32 tokens; and what latents would be.

    Causal, contiguous, of two ranks: the second one needs the 16 keys of the first, and sends their gradients back.
    """
    enter_world()
    given = with_adapters() if case == "adapters" else TINY()
    trainer = make_trainer(**given, **STEPS, max_steps=1, collator=_tokens)
    model: Any = trainer.model
    layers: list[Any] = [module for module in model.modules() if hasattr(type(module), "expand_kv")]
    layer, num_layers = layers[0], len(layers)
    for each in layers if case == "a hook" else ():
        each.kv_b_proj.register_forward_hook(lambda module, args, output: output)
    keys = {"layout": "contiguous", "first_batch_check": False, "latents": case != "latents: false"}
    ringtile.enable(trainer, {"context_parallel_size": 2, **keys})
    attend, seen = attention.ring_attention, []

    def watched(q: Any, k: Any, v: Any, sequence: Any, **options: Any) -> Any:
        seen.append((sequence.transport, sequence.transport.bytes_sent))
        return attend(q, k, v, sequence, **options)

    with mock.patch.object(attention, "ring_attention", watched):
        trainer.train()
    transport, before = seen[0]
    sent, rank = transport.bytes_sent - before, torch.distributed.get_rank()
    ringtile.restore(trainer)
    assert "expand_kv" not in vars(layer)
    of_layer = 16 * 4 * (layer.kv_lora_rank + layer.qk_rope_head_dim)
    return sent, num_layers * of_layer * (1 if rank else 2)


@pytest.mark.parametrize("case", ["plain", "adapters"])
def test_latents_travel(case: str) -> None:
    """The first rank sends its latents twice, for both passes; the second one their gradients, in float32 too."""
    for sent, of_latents in run_ranks(2, _sent, case):
        assert sent == of_latents


@pytest.mark.parametrize("case", ["a hook", "latents: false"])
def test_heads_travel_where_blocks_might_differ_or_a_user_wants_them(case: str) -> None:
    for sent, of_latents in run_ranks(2, _sent, case):
        assert sent == 4 * of_latents  # heads of 80 numbers in place of 20


def _made_latents() -> float:
    """How many for each layer a training of two steps makes, in each of which it runs twice; also where another weight
    is trained, and under autocast."""
    enter_world()
    trainer = make_trainer(**TINY(), **STEPS, **KEPT, max_steps=2, collator=_tokens)
    ringtile.enable(trainer, {"context_parallel_size": 2, "first_batch_check": False})
    with mock.patch.object(latents, "Latents", wraps=latents.Latents) as made_of_layers:
        trainer.train()
        trained = made_of_layers.call_count / trainer.model.config.num_hidden_layers
        model: Any = trainer.model
        layer = next(module for module in model.modules() if isinstance(module, DeepseekV3Attention))
        before = latents._latents_of(layer, layer.expand_kv)
        assert latents._latents_of(layer, layer.expand_kv) is before
        layer.kv_b_proj.requires_grad_(requires_grad=False)
        frozen = latents._latents_of(layer, layer.expand_kv)
        assert (len(before.weights), len(frozen.weights)) == (1, 0)
        with torch.autocast("cpu", torch.bfloat16):
            assert latents._latents_of(layer, layer.expand_kv)._replay.autocast["enabled"]
    ringtile.restore(trainer)
    return trained


def test_a_layer_makes_its_latents_once() -> None:
    assert run_ranks(2, _made_latents) == [1, 1]


# ---- every family ---------------------------------------------------------------------------------

FAMILIES = [name.removeprefix("modeling_") for name, text in sources().items() if "def expand_kv" in text]


# Layers of learned sparse attention, of which not every family has a tiny model.
CHOOSING = {"axk2", "deepseek_v32", "dots3_note", "glm5_next", "glm_moe_dsa", "hy_v4", "hy_v4_vl", "mistral_large4"}


def test_all_families_are_looked_at() -> None:
    assert len(FAMILIES) in (14, 18)  # transformers 5.17, 5.24


@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_with_latents_is_known(name: str) -> None:
    """Another one would attend with heads, without a word. And none changes what `expand_kv` returns."""
    text = sources()[f"modeling_{name}"]
    called = text.partition("= self.expand_kv(")[2].partition("attention_interface(")
    assert "key_states =" not in called[0]
    assert "value_states =" not in called[0]
    assert "query_states, key_states, value_states," in " ".join(called[2].split())[:100]
    if name in CHOOSING:
        assert inspect.getsource(DeepseekV3Attention.expand_kv) in text
        return
    model = tiny_models.tiny_model(tiny_models.tiny_config(name))
    layers = [module for module in model.modules() if hasattr(type(module), "expand_kv")]
    assert layers
    for layer in layers:
        assert latents.expands_alone(layer)
        assert latents.is_known(layer.kv_b_proj)


# ---- what is refused ------------------------------------------------------------------------------


def test_keys_that_a_layer_changes_are_refused() -> None:
    key, value = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 0)
    setattr(value, attention.LATENTS, (key, torch.zeros(1, 1, 4, 2), None))
    assert attention.latents_of(nn.Identity(), key, value)[0] is key
    with pytest.raises(ringtile.RefusedError, match="change them inside of expand_kv"):
        attention.latents_of(nn.Identity(), key * 2, value)


def test_an_expand_kv_of_a_users_own_keeps_its_heads() -> None:
    layer = next(module for module in tiny_model("deepseek-v3").modules() if isinstance(module, DeepseekV3Attention))
    assert latents.expands_alone(layer)

    class Own(DeepseekV3Attention):
        def expand_kv(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> Any:
            key, value = super().expand_kv(kv_nope, k_rot)
            return key * self.scaling, value

    layer.__class__ = Own
    assert not latents.expands_alone(layer)
    layer.__class__ = DeepseekV3Attention
    layer.expand_kv = lambda kv_nope, k_rot: None
    assert not latents.expands_alone(layer)
