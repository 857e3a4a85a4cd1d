"""Models, one row each: their attention, recurrent layers, heads, documents and labels, on ranks as in one process."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cells import Cell, check, params, table
from hf_models import NUM_LABELS, SIZES, hybrid, tiny_encoder, tiny_model, with_lora
from hf_training import GROUP_OF_ONE, TOLERANCE, Padded, packed, packed_for_flash, train
from ringtile.hf.batch import CHECKPOINTING
from ringtile.sequence.layout import CHUNKS_PER_RANK, PADDED_LIKE
from transformers import AutoConfig, AutoModelForCausalLM

from tools.models import tiny_models

STEPS = {"gradient_accumulation_steps": 1, "num_rows": 24}

# ---- attention layers: sinks, chunks, temperature, two head dims, windows and RoPE by layer ------

# Some of these models are steep at their random weights (Gemma 4 has gradients of 15): with large steps, they would
# multiply the rounding of the first by ten in each of the others.
STEEP = {"norms": 10 * TOLERANCE, "weights": 10 * TOLERANCE}
FAMILIES = (
    *("gpt-oss", "llama4", "gemma2", "gemma3", "gemma4", "deepseek-v3", "mixtral-balanced", "qwen3-moe", "glm4-moe"),
    *("olmoe", "granite-swa", "phi3-sliding", "cohere2", "mistral-sliding", "mimo-v2", "qwen2-moe-sliding"),
)
JOINED = "the documents of a packed row attend each other"


def family(name: str, groups: int = 1, long: bool = True, **options: Any) -> Cell:
    """On packed rows. Of two groups, each row has a balancing loss of its own, as on two ranks without."""
    return Cell(
        f"{name}, {groups} group{'s' * (groups > 1)}",
        {**STEPS, "family": name, "collator": packed, "learning_rate": 0.01, **options},
        world=2 * groups,
        processes=groups,
        long=long,
        says=(JOINED,) if name == "gpt-oss" else (),
        **STEEP,
    )


def asking(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """For the routers' logits, which the model's config does not ask for."""
    return {**Padded()(rows), "output_router_logits": True}


def unasked() -> dict[str, Any]:
    return {"model": tiny_model("mixtral-balanced", output_router_logits=False).train()}


def skipping_layers() -> dict[str, Any]:
    return {"model": tiny_model("opt", layerdrop=0.3).train()}


LAYERS = [
    family("gpt-oss", long=False),
    Cell("layers that are left out, on all ranks alike", STEPS, made=skipping_layers, **STEEP),
    Cell("a balancing loss that the batch asks for", {**STEPS, "collator": asking}, made=unasked, **STEEP),
    family("llama4", long=False, gradient_checkpointing=True),
    # Of these, the two above are combinations; test_hf_attention.py compares the logits of all of them.
    *(family(name) for name in FAMILIES[2:]),
    *(family(name, groups=2) for name in FAMILIES),
    # transformers 5.23 can leave layers out of checkpointing.
    *[
        Cell(
            "llama, every second layer checkpointed",
            {**STEPS, CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"every_n_layers": 2}},
        )
    ]
    * (CHECKPOINTING == "activation_checkpointing"),
    # Masks that know no positions: documents are apart where cu_seq_lens names them, and nothing is warned of.
    Cell(
        "gpt-oss, documents named",
        {**STEPS, "family": "gpt-oss"},
        ranks={"collator": packed_for_flash},
        alone={"collator": Padded()},
        **STEEP,
    ),
]

# ---- heads that no number of ranks divides -------------------------------------------------------


def three_heads(kv_heads: int = 3, attention: str = "sdpa") -> dict[str, Any]:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 3, "num_key_value_heads": kv_heads, "head_dim": 8, "hidden_size": 24}
    config = AutoConfig.for_model("llama", **{**SIZES, **heads})
    return {"model": AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()}


@functools.cache
def heads_of(kv_heads: int) -> Callable[[], dict[str, Any]]:
    return functools.partial(three_heads, kv_heads)


def heads(ranks: int, scheme: str, kv_heads: int) -> Cell:
    return Cell(
        f"{kv_heads} of 3 heads on {ranks} ranks, {scheme}",
        {**STEPS, "collator": packed},
        {"context_parallel_size": ranks, "context_parallel_scheme": scheme},
        made=heads_of(kv_heads),
        world=ranks,
        long=True,
    )


FLEX = functools.partial(three_heads, attention="flex_attention")
SCHEMES = {2: ("ring", "all_gather", "ulysses"), 3: ("ulysses",), 4: ("ulysses", "usp:2")}
HEADS = [  # tests/attn/test_attention_table.py tries all in every run, without a Trainer
    *(
        heads(ranks, scheme, kv_heads)
        for ranks, schemes in SCHEMES.items()
        for scheme in schemes
        for kv_heads in (3, 1)
    ),
    Cell("loaded with flex attention", {**STEPS, "collator": packed}, made=FLEX, made_alone=heads_of(3)),
    Cell("loaded with flex attention, padded", STEPS, made=FLEX, made_alone=heads_of(3), long=True),
]

# ---- hybrids: attention and recurrent layers -----------------------------------------------------

# One process, without ringtile, trains on the documents as rows of their own, padded on the right, where nothing
# reaches a document from before; transformers' own packed rows leak through convolutions and states.
MECHANISMS = {
    "convolution": ("lfm2", "lfm2_moe"),
    "gated delta rule": ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"),
    "Mamba-2": ("bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2", "mamba2"),
    "Kimi delta attention": ("kimi_linear",),
    "Mamba": ("jamba", "mamba", "falcon_mamba", "zamba"),
    "lightning attention": ("minimax",),
}
ALL = [name for names in MECHANISMS.values() for name in names]
WRAPPED = {  # the layers that FSDP2 must be told of: a text model has no vision blocks, and a shared layer no group
    "qwen3_5_text": "Qwen3_5DecoderLayer",
    "qwen3_5_moe_text": "Qwen3_5MoeDecoderLayer",
    "zamba": "ZambaMambaDecoderLayer",
    "zamba2": "Zamba2MambaDecoderLayer",
}


def made_hybrid(name: str) -> dict[str, Any]:
    return {"model": hybrid(name)}


MADE = {name: functools.partial(made_hybrid, name) for name in ALL}
SLOWLY = {**STEPS, "learning_rate": 0.01}


JOINED = "go on from one document of a packed row to the next"


def recurrent(name: str, what: str, config: dict[str, Any], long: bool = True, **more: Any) -> Cell:
    """On packed rows, as each document does alone."""
    more.setdefault("ranks", {"collator": packed})
    if config is GROUP_OF_ONE:  # enable sees a configuration that asks for nothing, and says what it leaves
        more["says"] = (JOINED,)
    config = {"layout": "zigzag", **config}
    return Cell(f"{name} {what}", SLOWLY, config, alone={"collator": Padded()}, made=MADE[name], long=long, **more)


def under(name: str, engine: str, long: bool = True) -> Cell:
    """A convolution's weight is read without calling its module, whose hooks would gather it."""
    ranks = {"collator": packed, "engine": engine}
    if engine == "FSDP2" and name in WRAPPED:
        ranks["fsdp_config"] = {"version": 2, "transformer_layer_cls_to_wrap": [WRAPPED[name]]}
    return recurrent(name, f"under {engine}", {}, long, ranks=ranks)


ON_TWO = ("lfm2", "kimi_linear", "jamba", "minimax")  # one of each mechanism, with the two that follow
GROUPS = {"per_device_train_batch_size": 1, "gradient_checkpointing": True}
LEFT = {"collator": Padded("left")}
HYBRIDS = [
    *(recurrent(name, "on two ranks", {}, name not in ON_TWO) for name in ALL),
    *(under(name, "FSDP2", name != "qwen3_next") for name in ALL),
    recurrent("granitemoehybrid", "in one process", GROUP_OF_ONE, False, world=1, ranks={"collator": packed_for_flash}),
    *(recurrent(name, "on three ranks", {"context_parallel_size": 3, "layout": "contiguous"}, world=3) for name in ALL),
    *(recurrent(name, "on four ranks", {"context_parallel_size": 4}, world=4) for name in ALL),
    *(recurrent(name, "by heads", {"context_parallel_scheme": "ulysses"}) for name in ALL),
    *(recurrent(name, "in one process", GROUP_OF_ONE, world=1) for name in ALL if name != "granitemoehybrid"),
    *(
        recurrent(name, "in two groups", {}, ranks={**GROUPS, **(LEFT if name == "qwen3_next" else {})}, world=4)
        for name in ALL
    ),
    *(under(name, "ZeRO-3") for name in ALL),
    # Granite hands no position ids to its masks: ringtile's attention knows padding of all kinds.
    Cell(
        "granitemoehybrid padded left, one process",
        {**SLOWLY, **LEFT},
        GROUP_OF_ONE,
        made=MADE["granitemoehybrid"],
        world=1,
        says=(JOINED,),
        long=True,
    ),
    # Losses of one forward, to a unit of bfloat16: products are rounded alike, and states are in float32.
    *(
        Cell(
            f"{names[0]} under autocast",
            {**SLOWLY, "max_steps": 1, "bf16": True, "collator": packed},
            made=MADE[names[0]],
            alone_config=GROUP_OF_ONE,
            **{"losses": 2.0**-8, "norms": math.inf, "weights": math.inf},
            long=True,
        )
        for names in MECHANISMS.values()
    ),
]

# ---- documents that transformers alone joins stay apart --------------------------------------------

TEXT_ROW = ("qwen2_vl", "glm4v", "qwen2_5_vl", "ernie4_5_vl_moe")  # of the positions, for M-RoPE: one is for text
JOINING = ["internvl", "llava", "kimi_k25", "aya_vision", "cohere2_vision", "qwen2_vl", "glm4v"]


@dataclass(frozen=True)
class PackedIn:
    """Documents in one row, with position ids (B, S) or (count, B, S)."""

    count: int | None

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = packed(rows)
        shape = (-1, -1) if self.count is None else (self.count, -1, -1)
        return {**batch, "position_ids": batch["position_ids"].expand(*shape)}


def image_text(name: str) -> dict[str, Any]:
    return {"model": tiny_models.tiny_model(tiny_models.tiny_config(name))}


def without_cache(name: str) -> dict[str, Any]:
    """Under which, and with a row of positions for text where masks need one, transformers keeps them apart itself."""
    made = image_text(name)
    made["model"].config.get_text_config().use_cache = False
    return made


def documents(name: str, ranks: int, count: int | None = None, long: bool = True) -> Cell:
    return Cell(
        f"{name} documents, {count or 'no'} rows of positions, {ranks} ranks",
        {**STEPS, "learning_rate": 0.01},
        {"context_parallel_size": ranks},
        ranks={"collator": PackedIn(count)},
        alone={"collator": PackedIn(4 if name in TEXT_ROW else None)},
        made=functools.partial(image_text, name),
        made_alone=functools.partial(without_cache, name),
        world=ranks,
        long=long,
    )


DOCUMENTS = [
    *(documents(name, 2, long=name not in ("llava", "qwen2_vl")) for name in JOINING),
    *(documents(name, 2, 3) for name in TEXT_ROW),
    *(documents(name, 2, 4) for name in TEXT_ROW),
    Cell(
        "documents of an evaluation, in recurrent layers",
        {**STEPS, "evaluate_first": True, "per_device_eval_batch_size": 5},
        GROUP_OF_ONE,
        {"collator": packed},
        {"collator": Padded()},
        functools.partial(image_text, "lfm2_vl"),
        world=1,
        says=(JOINED,),
    ),
]

# ---- encoders and classifiers of tokens: labels that are not shifted, masks that are not causal ---


@dataclass(frozen=True)
class Labeled:
    """Labels of the tokens themselves: some words to be guessed, or a class for every token that had a label."""

    collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]
    classes: bool = False
    types: bool = False  # with token_type_ids

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = dict(self.collator([{**row, "labels": self._labels(row)} for row in rows]))
        if self.types:
            batch["token_type_ids"] = batch["input_ids"] % 2
        return batch

    def _labels(self, row: dict[str, Any]) -> list[int]:
        if self.classes:
            # None for the first token: DataCollatorWithFlattening removes it.
            return [-100, *(label if label < 0 else label % NUM_LABELS for label in row["labels"][1:])]
        return [token if i % 3 == 1 else -100 for i, token in enumerate(row["input_ids"])]


def made_encoder(name: str, classes: bool, lora: bool, settings: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    model = tiny_encoder(name, classes, **dict(settings))
    return {"model": with_lora(model) if lora else model}


def encoder(what: str, name: str = "modernbert", *, classes: bool = False, collator: Any = None, **more: Any) -> Cell:
    """Where documents are to be apart, one process trains on the same documents, a row each: transformers' masks of
    encoders do not look at position ids."""
    collator = collator or Padded()
    types, lora = more.pop("types", False), more.pop("lora", False)
    rows = {"collator": Labeled(collator, classes, types)}
    apart = {"alone": {"collator": Labeled(Padded(), classes, types)}} if collator is packed_for_flash else {}
    options = {"max_steps": 3, "learning_rate": 0.05, **more.pop("options", {})}
    made = functools.partial(made_encoder, name, classes, lora, tuple(more.pop("settings", {}).items()))
    more |= {"alone": rows} | apart
    # logits up to 5 after steps of which each passes rounding on
    return Cell(f"encoder, {what}", options, ranks=rows, made=made, predictions=10 * TOLERANCE, **more)


WHOLE = {"evaluate": True}
OF_ENCODERS: list[tuple[str, dict[str, Any]]] = [
    ("masked words", {"collator": Padded("left"), "options": WHOLE}),
    ("packed", {"collator": packed_for_flash}),
    ("no shift, a mean", {"name": "bert", "types": True}),
    ("classes", {"classes": True, "options": WHOLE}),
    ("causal classes", {"name": "llama", "classes": True, "collator": packed}),
    ("packed without bounds", {"collator": packed, "says": (JOINED,)}),
    ("eurobert", {"name": "eurobert"}),
    ("eurobert packed", {"name": "eurobert", "collator": packed_for_flash}),
    ("eurobert classes", {"name": "eurobert", "classes": True}),
    ("bert classes", {"name": "bert", "classes": True}),
    ("packed classes", {"classes": True, "collator": packed_for_flash}),
    ("only masked words", {"settings": {"sparse_prediction": True}}),
    ("smoothed words", {"options": {"label_smoothing_factor": 0.1}}),
    ("smoothed mean", {"name": "bert", "options": {"label_smoothing_factor": 0.1}}),
    ("checkpointing", {"options": {"gradient_checkpointing": True}, "classes": True}),
    ("own token average", {"options": {"average_tokens_across_devices": False}, "name": "bert"}),
    ("lora", {"name": "eurobert", "lora": True, "classes": True}),
]
LAYOUTS = [name for name in (*CHUNKS_PER_RANK, *PADDED_LIKE) if name != "zigzag"]  # the default, elsewhere
ENCODERS = [
    *(encoder(what, **settings, long=i >= 3) for i, (what, settings) in enumerate(OF_ENCODERS)),
    *(
        encoder(f"{what}, {layout}", **settings, config={"layout": layout}, long=True)
        for what, settings in OF_ENCODERS[:3]
        for layout in LAYOUTS
    ),
    *(encoder(f"{what}, two groups", **settings, world=4, processes=2, long=True) for what, settings in OF_ENCODERS),
]

CELLS = table(*LAYERS, *HEADS, *HYBRIDS, *DOCUMENTS, *ENCODERS)


@pytest.mark.parametrize("cell", params(CELLS))
def test_ranks_train_as_one_process(cell: Cell) -> None:
    check(__name__, cell)


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
def test_packed_documents_of_a_hybrid_leak_in_transformers(name: str) -> None:
    """So that what is above would see it."""
    leaking, apart = (
        train(None, model=hybrid(name), collator=collator, evaluate=False, max_steps=2, **SLOWLY)
        for collator in (packed, Padded())
    )
    assert max(abs(a / b - 1) for a, b in zip(leaking.grad_norms, apart.grad_norms, strict=True)) > 10 * TOLERANCE


def test_chunks_and_documents_are_not_told_of_rows_without_packing() -> None:
    assert not train(GROUP_OF_ONE, model=tiny_model("llama4").train(), max_steps=1).said
