"""The cases of training: two steps of a tiny model under transformers' Trainer, and an evaluation, against one process.

Where rows are packed, the process that is the reference gets each document as a row of its own, and knows no packing.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ringtile
import torch
import transformers
from ringtile.cli.proofs import LIMITS, max_rel_diff
from ringtile.hf.batch import CHECKPOINTING
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainingArguments

from tools.gauntlet.backends import backend
from tools.models.tiny_models import VOCABULARY, tiny_config, tiny_model
from tools.models.tiny_training import differences, equal

LENGTHS = ((24, 11), (17, 21), (9, 24), (22, 13))  # of the documents of each batch
EVAL_LENGTHS = ((24, 11), (19,))  # the last batch is smaller
RANKS = 2


@dataclass(frozen=True)
class TrainingCase:
    """A type of model, with what its configuration and TrainingArguments hold besides."""

    name: str
    what: str
    bug: str
    source: str
    type: str = "llama"
    config: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    packed: bool = False  # a batch is one row
    multiple: int = 1  # of which each document of a packed row has the length, padded behind its tokens
    left: bool = False  # padding comes first
    evaluates: bool = False
    ringtile: Mapping[str, Any] = field(default_factory=dict)


CASES = [
    TrainingCase(
        "token mean",
        "ignored labels, more of them on one rank",
        "a mean of the ranks' means",
        "NVIDIA/Megatron-LM/issues/7452",
    ),
    TrainingCase(
        "accumulation",
        "2 batches a step, of other counts",
        "the loss is scaled by batches",
        "verl-project/verl/issues/5993",
        arguments={"gradient_accumulation_steps": 2},
    ),
    TrainingCase(
        "evaluation",
        "eval_loss of 2 batches, the last one smaller",
        "eval loss multiplied by cp",
        "huggingface/transformers/pull/48167",
        evaluates=True,
    ),
    TrainingCase(
        "label smoothing",
        "label_smoothing_factor 0.1",
        "labels shifted twice",
        "verl-project/verl/pull/4250",
        arguments={"label_smoothing_factor": 0.1},
    ),
    TrainingCase(
        "clipping",
        "gradients clipped to a norm of 0.1",
        "the norm of a shard's gradients",
        "NovaSky-AI/SkyRL/pull/1420",
        arguments={"max_grad_norm": 0.1},
    ),
    TrainingCase(
        "padding left",
        "rows padded before their tokens",
        "masks are dropped",
        "NVIDIA-NeMo/Automodel/issues/2622",
        left=True,
    ),
    TrainingCase(
        "packed",
        "positions start again at each document",
        "attention across documents",
        "huggingface/trl/pull/6843",
        packed=True,
    ),
    TrainingCase(
        "packed, padded inside",
        "each document of a row is padded to a multiple of 3",
        "shards of documents that do not divide by 2 W",
        "NVIDIA/TransformerEngine/issues/3331",
        packed=True,
        multiple=3,
    ),
    TrainingCase(
        "packed window",
        "Gemma 3: windows inside documents",
        "a window becomes full causal attention",
        "huggingface/accelerate/pull/4177",
        type="gemma3_text",
        packed=True,
    ),
    TrainingCase(
        "sinks",
        "gpt-oss: sinks and windows",
        "sinks swallowed by **kwargs",
        "PrimeIntellect-ai/prime-rl/issues/3397",
        type="gpt_oss",
    ),
    TrainingCase(
        "softcap",
        "Gemma 2: capped scores and logits",
        "softcap swallowed by **kwargs",
        "PrimeIntellect-ai/prime-rl/issues/3397",
        type="gemma2",
        config={"attn_logit_softcapping": 0.5},
    ),
    TrainingCase(
        "latent attention",
        "DeepSeek-V3: values of another width",
        "values of another width",
        "",
        type="deepseek_v3",
    ),
    TrainingCase(
        "recurrent packed",
        "Qwen3-Next: gated delta rule, packed",
        "states run through documents",
        "hiyouga/LlamaFactory/pull/10787",
        type="qwen3_next",
        packed=True,
    ),
    TrainingCase(
        "state space packed",
        "Bamba: Mamba-2, packed",
        "states run through documents",
        "hiyouga/LlamaFactory/pull/10787",
        type="bamba",
        packed=True,
    ),
    TrainingCase(
        "balancing loss",
        "Mixtral: router_aux_loss",
        "a balancing loss of each shard",
        "NVIDIA/Megatron-LM/pull/3768",
        type="mixtral",
        config={"router_aux_loss_coef": 0.5},
    ),
    TrainingCase(
        "rotary of the length",
        "Llama with dynamic RoPE",
        "the length of a shard scales the positions",
        "",
        config={
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            "max_position_embeddings": 16,
        },
    ),
    TrainingCase(
        "checkpointing",
        "gradient_checkpointing",
        "a layer that is computed again counts twice",
        "NVIDIA/Megatron-LM/issues/1478",
        arguments={CHECKPOINTING: True},
    ),
    TrainingCase(
        "tiled",
        "tiled_mlp and tiled_loss",
        "tiles of unequal counts",
        "deepspeedai/DeepSpeed/pull/8587",
        ringtile={"tiled_mlp": True, "tiled_loss": True, "tile_tokens": 5},
    ),
]


class _Batches(Dataset[dict[str, Tensor]]):
    """Whole batches, the same for ranks and one process but for packing and, where a backend wants them, padding to a
    multiple and position ids."""

    def __init__(
        self, lengths: tuple[tuple[int, ...], ...], packed: bool, left: bool, multiple: int = 1, of_document: int = 1
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = []
        for batch in lengths:
            ids = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in batch]
            labels = [row.clone() for row in ids]
            labels[0][: batch[0] * 3 // 4] = -100  # all targets of the first document lie at its end
            for row in labels:
                row[0] = -100
            if packed:
                ids, labels = (
                    [functional.pad(row, (0, -len(row) % of_document), value=fill) for row in rows]
                    for rows, fill in ((ids, 0), (labels, -100))
                )
            made = self._packed(ids, labels) if packed else self._padded(ids, labels, left)
            if multiple > 1:
                made.setdefault("position_ids", torch.arange(made["labels"].size(1)).expand_as(made["labels"]))
            self.batches.append({name: self._to_multiple(name, x, multiple, left) for name, x in made.items()})

    @staticmethod
    def _packed(ids: list[Tensor], labels: list[Tensor]) -> dict[str, Tensor]:
        positions = torch.cat([torch.arange(len(row)) for row in ids])
        return {"input_ids": torch.cat(ids)[None], "labels": torch.cat(labels)[None], "position_ids": positions[None]}

    @staticmethod
    def _padded(ids: list[Tensor], labels: list[Tensor], left: bool) -> dict[str, Tensor]:
        pad = torch.nn.utils.rnn.pad_sequence
        held = [torch.ones_like(row) for row in ids]
        rows = (("input_ids", ids, 0), ("labels", labels, -100), ("attention_mask", held, 0))
        side = "left" if left else "right"
        return {name: pad(value, True, padding, side) for name, value, padding in rows}

    @staticmethod
    def _to_multiple(name: str, x: Tensor, multiple: int, left: bool) -> Tensor:
        """As pad_to_multiple_of of transformers' collators; in a packed row the padding is a document."""
        padding = torch.full((len(x), -x.size(1) % multiple), -100 if name == "labels" else 0)
        if name == "position_ids":
            padding = padding + torch.arange(padding.size(1))
        return torch.cat([padding, x] if left else [x, padding], dim=1)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        # Copies: torch's context_parallel shards buffers in place, and on a CPU a batch is not copied to a device.
        return {name: x.clone() for name, x in self.batches[i].items()}


def train(case: TrainingCase, name: str) -> dict[str, Any]:
    """losses, grad_norms, weights and eval_loss. name: of the backend that shards the rows
    over RANKS ranks; empty: one process does it."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.getLogger("ringtile").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    config = tiny_config(case.type)
    for option, value in case.config.items():
        setattr(config, option, value)
    one = backend(name) if name else None
    packed, multiple = case.packed and one is not None, 1 if one is None else one.multiple
    model = tiny_model(config)
    if one is None:
        model.set_attn_implementation("eager")  # sdpa, its default, leaves out softcap without a word

    def make(**given: Any) -> Trainer:
        common = {
            "optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant", "max_grad_norm": 1e9,
            "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "max_steps": 2, "logging_steps": 1,
            "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no",
            "remove_unused_columns": False, "output_dir": tempfile.mkdtemp(prefix="ringtile-verify-"),
        }  # fmt: skip
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**{**common, **case.arguments, **given}),
            data_collator=lambda batches: batches[0],
            train_dataset=_Batches(LENGTHS, packed, case.left, multiple, case.multiple),
            eval_dataset=_Batches(EVAL_LENGTHS, packed, case.left, multiple, case.multiple),
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    trainer = make() if one is None or one.trainer is None else one.trainer(case, make)
    try:
        trainer.train()
        eval_loss = trainer.evaluate()["eval_loss"] if case.evaluates else 0.0
    finally:
        ringtile.restore(trainer)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in logs],
        "grad_norms": [float(entry["grad_norm"]) for entry in logs],
        "eval_loss": eval_loss,
        "weights": {name: _whole(weight.detach()) for name, weight in model.named_parameters()},
    }


def _whole(weight: Tensor) -> Any:
    """As an array of numpy. A collective where FSDP2 shards it."""
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return weight.numpy().copy()


def compare(results: list[dict[str, Any]], expected: dict[str, Any]) -> dict[str, Any]:
    """verdict and words of what the ranks computed; all of them must have computed what one process did."""
    for result in results:
        found = differences(result, expected)
        of_eval = max_rel_diff([result["eval_loss"]], [expected["eval_loss"]]) if expected["eval_loss"] else 0.0
        if not equal(found) or not of_eval <= LIMITS["losses"]:
            off = found | ({"eval loss": of_eval} if of_eval else {})
            words = ", ".join(f"{name} by {difference:.1e}" for name, difference in off.items())
            return {"verdict": "wrong", "words": words}
    return {"verdict": "exact", "words": ""}
