"""Ways to train, one row each: on ranks, and equal to one process. test_hf_matrix.py crosses the usual ones."""

import functools
import math
import tempfile
from typing import Any

import datasets
import pytest
import torch
from accelerate import ParallelismConfig
from cells import Cell, check, params, table
from hf_models import SIZES, tiny_model, with_lora
from hf_training import Padded, make_pairs, make_rows, packed
from losses import (
    Counting,
    Drawing,
    HiddenStates,
    MeanPerBatch,
    OwnLoss,
    PositionalCall,
    Scaled,
    ScalingTrainer,
    SumOverItems,
    TwiceTheLoss,
    Unscaled,
    UnscaledLastThird,
    ZLoss,
    mean_of_logits,
    squared,
)
from transformers import (
    BartConfig,
    BartForCausalLM,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForSequenceClassification,
)

TILED = {"tiled_mlp": True, "tiled_norm": True, "tiled_loss": True, "tile_tokens": 5}
ALONE = {"context_parallel_size": 1}
LOSS_IN_TILES = {"tiled_loss": True, "tile_tokens": 5}
OWN_AVERAGE = {"average_tokens_across_devices": False}
EVERY_NUMBER = {"evaluate": True}  # evaluation and prediction too
# The last of an epoch holds 2 rows.
LAST_BATCHES = {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 4}

# ---- rows, padding, positions, counts -----------------------------------------------------------


def drawing_collator(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    torch.rand(())
    return Padded()(rows)


def without_some_targets(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows of an even number of tokens were cut before their answer."""
    return Padded()([row if len(row["labels"]) % 2 else {**row, "labels": [-100] * len(row["labels"])} for row in rows])


def packed_with_seq_idx(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Documents in one row, named by cu_seq_lens and seq_idx beside their position ids."""
    batch: dict[str, Any] = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(rows)
    return batch


def with_jumps(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padded rows whose positions jump forward once, each a document still (PoSE, arXiv:2309.10400)."""
    batch = Padded()(rows)
    places = torch.arange(batch["input_ids"].size(1))
    return {**batch, "position_ids": (places + 40 * (places >= 5)).repeat(len(rows), 1)}


def of_full_masks() -> dict[str, Any]:
    return {"model": tiny_model(is_causal=False).train()}


def in_float64() -> dict[str, Any]:
    """Muon rounds gradients to bfloat16, so that one of float32 that differs in its last bit may move a weight by 2^-8
    of the step, on one process too."""
    model = tiny_model().double().train()
    matrices = [weight for weight in model.parameters() if weight.requires_grad_(weight.dim() == 2).requires_grad]
    return {"model": model, "trainer_arguments": {"optimizers": (torch.optim.Muon(matrices, lr=0.02), None)}}


def stream() -> dict[str, Any]:
    rows = datasets.Dataset.from_list(make_rows(22))
    shuffled = rows.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=8)
    return {"trainer_arguments": {"train_dataset": shuffled}}


REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
WITHOUT_TARGETS = {
    "collator": without_some_targets,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_steps": 5,
}
TRAINER = [
    Cell("padding on the right, every number", EVERY_NUMBER),
    Cell("size one is the trainer itself", config=ALONE, world=1, losses=0, norms=0, weights=0),
    Cell(
        "padding on the left, a rank without targets",
        {"collator": Padded("left"), "late_targets": True},
        {"layout": "contiguous"},
    ),
    Cell("steps without targets, tiled", WITHOUT_TARGETS, LOSS_IN_TILES),
    Cell("steps without targets, tiled, one rank", WITHOUT_TARGETS, ALONE | LOSS_IN_TILES, world=1, long=True),
    Cell("learned positions", {"family": "opt", "collator": Padded("left"), "evaluate": True}),
    Cell("keywords dropped in checkpoints", {"family": "stablelm", "gradient_checkpointing": True}),
    Cell("documents named for flash attention", {"collator": packed_with_seq_idx}, {"layout": "per_document"}),
    Cell("positions that jump", {"collator": with_jumps}),
    Cell("a decoder with full masks", made=of_full_masks),
    Cell("a decoder with full masks, loss of sequences", {"trainer_class": ZLoss}, made=of_full_masks, long=True),
    Cell("tiles, packed", {"collator": packed, "evaluate": True}, TILED),
    # test_hf_attention.py has logits of windows and of layouts.
    Cell(
        "windows over packed rows, striped",
        {"collator": packed, "family": "qwen3-sliding"},
        {"layout": "striped"},
        long=True,
    ),
    Cell("two groups, every number", EVERY_NUMBER, world=4, processes=2, long=True),  # test_hf_logged.py has it of SFT
    Cell("an optimizer of matrices", made=in_float64, long=True),
    Cell("reentrant checkpoints", REENTRANT),
    Cell(
        "label smoothing, lengths grouped, padding not counted",
        {"train_sampling_strategy": "group_by_length", "include_num_input_tokens_seen": "non_padding"}
        | {"label_smoothing_factor": 0.1},
    ),
    Cell(
        "an epoch's last batch, clipping, cosine", {**LAST_BATCHES, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine"}
    ),
    Cell("a stream of datasets", made=stream, long=True),  # the next row has it too
    Cell("a stream that rank 0 would deal out", {"accelerator_config": {"dispatch_batches": True}}, made=stream),
    Cell(
        "a collator that draws, evaluated first",
        {"collator": drawing_collator, "evaluate_first": True, "eval_on_start": True},
    ),
    Cell("tiles in one process", {}, TILED | ALONE, world=1),
    Cell("own token average, balanced", OWN_AVERAGE, {"layout": "balanced"}, long=True),
    Cell("RoPE that grows", {"family": "llama-dynamic", **EVERY_NUMBER}, long=True),  # test_hf_attention has logits
    Cell("a torch stream", {"stream": True, "gradient_accumulation_steps": 1, "evaluate_first": True}),
]

# ---- engines ------------------------------------------------------------------------------------


def on_mesh(**sizes: int) -> dict[str, Any]:
    return {"parallelism_config": ParallelismConfig(**sizes)}


on_mesh_of_two = functools.partial(on_mesh, cp_size=2)


def tiled_loss(engine: str, long: bool = True) -> Cell:
    """The output projection's weight is cut over the ranks; two rows a rank, with and without tiles."""
    config = ALONE | {"tiled_loss": True, "tile_tokens": 7}
    return Cell(f"tiled loss under {engine}", {"num_rows": 48}, config, {"engine": engine}, processes=2, long=long)


def mesh(world: int, long: bool, family: str = "llama", **sizes: int) -> Cell:
    """Rows enough for no last batch to be filled with copies; one process takes those of all groups at once."""
    return Cell(
        f"{family} under FSDP2 on {world} ranks with {sizes}",
        {"num_rows": 32, "family": family},
        {} if "cp_size" not in sizes else {"context_parallel_size": sizes["cp_size"]},
        {"engine": "FSDP2"},
        {"per_device_train_batch_size": world},
        functools.partial(on_mesh, **sizes),
        dict,
        world=world,
        long=long,
    )


CHECKPOINTING = {"version": 2, "activation_checkpointing": True, "reshard_after_forward": False}
ENGINES = [
    Cell("FSDP2, every number", EVERY_NUMBER, ranks={"engine": "FSDP2"}),
    # Under ZeRO all else is that of test_hf_matrix.py.
    Cell("ZeRO-1, every number", EVERY_NUMBER, ranks={"engine": "ZeRO-1"}, long=True),
    Cell("ZeRO-3, every number", EVERY_NUMBER, ranks={"engine": "ZeRO-3"}, long=True),
    mesh(4, True, dp_replicate_size=2, dp_shard_size=2),  # test_hf_meshes.py has HSDP in every run
    mesh(4, True, dp_shard_size=2, cp_size=2),
    mesh(2, True, dp_shard_size=2),
    *(
        Cell(
            f"{what} on accelerate's mesh",
            {**more, "evaluate": True},
            {},
            {"engine": "FSDP2"},
            {},
            on_mesh_of_two,
            dict,
            long=True,
        )
        for what, more in {"own counts": {"trainer_class": Counting}, "own token average": OWN_AVERAGE}.items()
    ),
    # transformers says of it that it supports no context parallelism.
    mesh(4, True, "mistral-sliding", dp_shard_size=2, cp_size=2),
    mesh(8, True, dp_replicate_size=2, dp_shard_size=2, cp_size=2),
    *(
        tiled_loss(engine, long=engine != "ZeRO-3")  # test_hf_loss_engines.py has every way of FSDP2
        for engine in ("DDP", "FSDP2", "ZeRO-1", "ZeRO-2", "ZeRO-3")
    ),
    Cell("checkpointing of FSDP2", ranks={"engine": "FSDP2", "fsdp_config": CHECKPOINTING}, long=True),
]

# ---- precision ----------------------------------------------------------------------------------

# Under autocast activations have 8 or 11 significant bits: a sum of rounded terms is off by 2^-9 or 2^-12 of them, on
# one rank and on two. The weights and their gradients stay float32.
ROUNDED_8 = {"losses": 2**-8, "norms": 2**-6, "weights": math.inf}
ROUNDED_11 = {"losses": 2**-11, "norms": 2**-9, "weights": math.inf}
SCALING = {"trainer_class": ScalingTrainer, "max_steps": 3}
PRECISION = [
    Cell("bfloat16 is close to float32", ranks={"bf16": True}, **ROUNDED_8),
    Cell("bfloat16 of one process is as close", ranks={"bf16": True}, world=1, config=ALONE, **ROUNDED_8, long=True),
    # logits of size 1, rounded to bfloat16 after sums in another order: one ulp, 2^-8, of each token's loss
    Cell("bfloat16 through tiles", {"bf16": True, "max_steps": 1}, TILED | ALONE, world=1, **ROUNDED_8),
    Cell(
        "a scale of float16, a step skipped on all ranks",
        SCALING,
        TILED,
        made=lambda: {"trainer_arguments": {"autocast": False, "spoilt": 3}},
    ),
    Cell(
        "float16 is close to float32",
        SCALING,
        TILED,
        long=True,
        **ROUNDED_11,
        made=lambda: {"trainer_arguments": {"autocast": True}},
        made_alone=lambda: {"trainer_arguments": {"autocast": False}},
    ),
]

# ---- losses -------------------------------------------------------------------------------------


def bart() -> dict[str, Any]:
    """Would shift labels itself."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "decoder_ffn_dim": 48, "decoder_layers": 2, "decoder_attention_heads": 4, "vocab_size": 96}
    settings = {"dropout": 0.0, "is_decoder": True, "is_encoder_decoder": False, "max_position_embeddings": 64}
    model = BartForCausalLM(BartConfig(**sizes, **settings, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    for parameter in model.parameters():  # the bias of a key has no gradient: at 0, only rounding could be compared
        parameter.data += 0.1 * torch.randn_like(parameter)
    return {"model": model.train(), "trainer_arguments": {"compute_loss_func": squared}}


# Squares have gradients of norm 12; at the usual learning rate of 0.3 each step would amplify rounding.
SQUARED = {"trainer_arguments": {"compute_loss_func": squared}, "learning_rate": 0.01}
LOSSES = [
    Cell("a loss that no shard can compute", {"trainer_class": Drawing, **EVERY_NUMBER}),  # and that draws
    Cell("a term in compute_loss", {"trainer_class": ZLoss}),
    Cell("a loss that says that it is scaled", {"trainer_class": Scaled}, long=True),
    Cell("a loss that says that it is not scaled", {"trainer_class": Unscaled}),
    Cell("a loss of its own that says that it is not scaled", {"trainer_class": UnscaledLastThird}, long=True),
    Cell("a model called with positional arguments", {"trainer_class": PositionalCall}),
    Cell("a mean of means", {"trainer_class": MeanPerBatch, "evaluate": True}),
    Cell("a loss function", SQUARED),
    Cell("a loss function, two groups", SQUARED, world=4, processes=2, long=True),
    Cell("twice the loss", {"trainer_class": TwiceTheLoss, **EVERY_NUMBER}, long=True),
    Cell("a sum over items that is not averaged", {"trainer_class": SumOverItems, **EVERY_NUMBER}, long=True),
    Cell("a mean of smoothed means", {"trainer_class": MeanPerBatch, "label_smoothing_factor": 0.1}, long=True),
    Cell(
        "a mean of means, own token average",
        {"trainer_class": MeanPerBatch, **OWN_AVERAGE, "family": "mixtral-balanced"},
        long=True,
    ),
    Cell("a mean of means, two groups", {"trainer_class": MeanPerBatch}, world=4, processes=2, long=True),
    Cell("a loss function, own token average", {**SQUARED, **OWN_AVERAGE}, long=True),
    Cell(
        "a loss function of one batch",
        {**SQUARED, "trainer_arguments": {"compute_loss_func": mean_of_logits}},
        long=True,
    ),
    Cell("a loss function for a model that would shift labels", {"learning_rate": 0.01}, made=bart, long=True),
    Cell("hidden states", {"trainer_class": HiddenStates, "learning_rate": 0.01}, long=True),
]

# ---- TRL: test_hf_logged.py compares the logs of more of it --------------------------------------

SFT, DPO, REWARD = ({"trainer_class": f"trl.{name}Trainer", "num_rows": 16} for name in ("SFT", "DPO", "Reward"))


def of_rows(rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"trainer_arguments": {"train_dataset": datasets.Dataset.from_list(rows)}, **more}


def completions() -> dict[str, Any]:
    return of_rows([{"prompt": row["prompt"], "completion": row["chosen"]} for row in make_pairs(16)])


def last_targets() -> dict[str, Any]:
    rows = [{**row, "labels": [-100] * (len(row["labels"]) - 1) + row["labels"][-1:]} for row in make_rows(9)]
    return of_rows(rows, **{**WITHOUT_TARGETS, **OWN_AVERAGE, "learning_rate": 0.01})


def with_reference(**more: Any) -> dict[str, Any]:
    return {"trainer_arguments": {"ref_model": tiny_model(seed=3)}, **more}


def reward_model() -> dict[str, Any]:
    """In float64: a reward is one number per sequence, small and of either sign, and its gradient a difference of two
    sequences', so that rounding in float32 is not small against the weights."""
    torch.manual_seed(0)
    return {"model": LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)).double()}


def rewards_with_margins() -> dict[str, Any]:
    return of_rows([{**row, "margin": 0.1 * i} for i, row in enumerate(make_pairs(16))], **reward_model())


def dpo(what: str, long: bool = True, **options: Any) -> Cell:
    return Cell(f"DPO {what}", {**DPO, **options}, made=with_reference, long=long)


TRL = [
    Cell("SFT without padding", {**SFT, "padding_free": True, "max_length": None}, long=True),
    Cell(
        "SFT, documents split", {**SFT, "packing": True, "packing_strategy": "bfd_split", "max_length": 16}, long=True
    ),
    Cell(
        "SFT, documents wrapped", {**SFT, "packing": True, "packing_strategy": "wrapped", "max_length": 32}, long=True
    ),
    Cell("SFT, padded to a multiple", {**SFT, "pad_to_multiple_of": 8}, long=True),
    Cell("SFT of one target a step, own token average", {**SFT, "evaluate_first": True}, made=last_targets),
    Cell("SFT on completions", SFT, made=completions, long=True),
    dpo("of two losses", loss_type=["ipo", "sft"], loss_weights=[0.7, 0.3]),
    dpo("sigmoid", loss_type=["sigmoid"]),
    dpo("sigmoid_norm", loss_type=["sigmoid_norm"], ld_alpha=0.5),
    dpo("robust", loss_type=["robust"], label_smoothing=0.1, use_weighting=True),
    dpo("aot", loss_type=["aot"], f_divergence_type="reverse_kl"),
    # With adapters, the reference model is the model without them.
    Cell("DPO with LoRA", {**DPO, "lora": True}),
    Cell("DPO with LoRA, FSDP2", {**DPO, "lora": True}, ranks={"engine": "FSDP2"}, long=True),
    Cell("DPO with LoRA, ZeRO-2", {**DPO, "lora": True}, ranks={"engine": "ZeRO-2"}, long=True),
    Cell(
        "ORPO with LoRA",
        {"trainer_class": "trl.experimental.orpo.ORPOTrainer", "num_rows": 16, "lora": True},
        long=True,  # pairs in one batch, as DPO's
    ),
    Cell("reward model", REWARD, made=reward_model),
    Cell("reward model, FSDP2", REWARD, ranks={"engine": "FSDP2"}, made=reward_model, long=True),
    Cell("centered rewards", {**REWARD, "center_rewards_coefficient": 0.1}, made=reward_model, long=True),
    Cell("rewards with margins", REWARD, made=rewards_with_margins, long=True),
]

# ---- PEFT, and weights of 4 bits ----------------------------------------------------------------

LAYERS = {"target_modules": ["q_proj", "v_proj", "up_proj"], "task_type": "CAUSAL_LM"}
TOKENS = {"num_virtual_tokens": 5, "task_type": "CAUSAL_LM"}
ADAPTERS = {
    "PromptTuning": TOKENS,
    "CPT": {
        **{"cpt_token_ids": [5, 6, 7, 8], "cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1, 2, 3, 4]},
        "task_type": "CAUSAL_LM",
    },
    "PromptEncoder": {**TOKENS, "encoder_hidden_size": 16},
    "LoHa": {"r": 4, **LAYERS},
    "LoKr": {"r": 4, **LAYERS},
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "OFT": {"r": 0, "oft_block_size": 8, **LAYERS},
    "Vera": {"r": 4, **LAYERS},
    "AdaptionPrompt": {"adapter_len": 4, "adapter_layers": 2, "task_type": "CAUSAL_LM"},
    "TrainableTokens": {"token_indices": list(range(3, 20)), "target_modules": ["embed_tokens"]},
}
IN_EVERY_RUN = ("PromptTuning",)  # added tokens, as of CPT; the others are linear maps


def adapted(adapter: str) -> dict[str, Any]:
    """No factor starts at 0, so that all have gradients."""
    import peft

    torch.manual_seed(1)
    model = peft.get_peft_model(tiny_model().train(), getattr(peft, f"{adapter}Config")(**ADAPTERS[adapter]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.02 * torch.randn_like(parameter)
    return {"model": model.train()}


def adapter(name: str, what: str = "adapter", **options: Any) -> Cell:
    more = {"learning_rate": 0.02, "evaluate": True, **options.pop("options", {})}
    return Cell(f"{what} {name}", more, made=functools.partial(adapted, name), needs=("peft",), **options)


def in_4_bits(storage: torch.dtype = torch.uint8) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=storage,
    )
    with tempfile.TemporaryDirectory() as folder:
        tiny_model().save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=torch.float32)
    assert {type(part).__name__ for part in model.model.layers[0].mlp.children()} == {"Linear4bit", "SiLUActivation"}
    return {"model": with_lora(model.train())}


def qlora(engine: str, tiles: dict[str, Any], long: bool = True) -> Cell:
    """The quantized weights are the same bits; an engine may keep them in pieces, or as another dtype."""
    storage = torch.float32 if engine == "FSDP2" else torch.uint8  # it shards floating point only
    return Cell(
        f"QLoRA under {engine}{', tiled' * bool(tiles)}",
        config=tiles,
        ranks={"engine": engine},
        made=functools.partial(in_4_bits, storage),
        made_alone=in_4_bits,
        needs=("bitsandbytes", "peft"),
        trained="lora",
        long=long,
    )


# DPO's rewards begin at 0: at a large rate they are more than rounding after a step.
OF_DPO = {**DPO, "learning_rate": 300.0, "evaluate": False}
PEFT = [
    *(adapter(name, long=name not in IN_EVERY_RUN) for name in ADAPTERS),
    adapter("PromptTuning", "two groups:", world=4, processes=2, long=True),
    adapter("PromptTuning", "SFT with", options={**SFT, "evaluate": False}, long=True),
    adapter("PromptTuning", "DPO with", options=OF_DPO, long=True),
    qlora("DDP", TILED, long=False),
    qlora("FSDP2", TILED, long=False),
    qlora("DDP", {}),
    qlora("ZeRO-2", TILED),
    qlora("ZeRO-3", TILED),
]

# ---- experts: the balancing loss is that of the whole sequence -----------------------------------

BALANCED = {"family": "mixtral-balanced"}
BATCHES = {**BALANCED, "num_rows": 32, "gradient_accumulation_steps": 1}  # each has a balancing loss of its own


def balanced_dpo() -> dict[str, Any]:
    model, reference = tiny_model("mixtral-balanced").train(), tiny_model("mixtral-balanced", seed=3)
    return {"model": model, "trainer_arguments": {"ref_model": reference}}


def with_balancing_loss(outputs, labels, num_items_in_batch=None):
    losses = torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    return losses / num_items_in_batch + outputs.aux_loss


EXPERTS = [
    # The mask takes the padding out; an evaluation before any training has not set how many batches are accumulated.
    Cell("balancing loss of padded rows, evaluated first", {**BALANCED, "evaluate_first": True}),
    # No mask: every token counts, but not the layout's padding.
    Cell("balancing loss of packed rows", {**BALANCED, "collator": packed}, long=True),
    Cell("balancing loss of full sequences", {**BALANCED, "trainer_class": OwnLoss}),
    Cell(
        "balancing loss of two groups",
        {**BATCHES, "eval_strategy": "steps", "eval_steps": 2},
        world=4,
        processes=2,
        long=True,
    ),
    Cell("balancing loss that SFT logs", {**SFT, **BALANCED, "evaluate_first": True}, long=True),
    # test_hf_logged.py has its log on two groups.
    Cell("SFT of qwen3-moe, whose head is TRL's", {**SFT, "family": "qwen3-moe"}, long=True),
    Cell("balancing loss, own token average", {**BATCHES, **OWN_AVERAGE}, world=4, processes=2, long=True),
    Cell(
        "balancing loss of full sequences, two groups",
        {**BATCHES, "trainer_class": OwnLoss},
        world=4,
        processes=2,
        long=True,
    ),
    Cell(
        "balancing loss in a loss function",
        {**BATCHES, "trainer_arguments": {"compute_loss_func": with_balancing_loss}},
        world=4,
        processes=2,
        long=True,
    ),
    Cell("balancing loss of DPO", DPO, made=balanced_dpo, long=True),
]

CELLS = table(*TRAINER, *ENGINES, *PRECISION, *LOSSES, *TRL, *PEFT, *EXPERTS)


@pytest.mark.parametrize("cell", params(CELLS))
def test_ranks_train_as_one_process(cell: Cell) -> None:
    check(__name__, cell)
