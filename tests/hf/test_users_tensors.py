"""Tensors of the user's own along tokens or rows: as in one process, in float64, or refused with what to declare."""

from dataclasses import dataclass
from typing import Any

import pytest
import ringtile
import test_images
import torch
from hf_models import SIZES
from hf_training import TOLERANCE, failure_of, make_trainer
from losses import OwnMean, of_tokens
from pool import run_ranks
from torch import nn
from torch.nn import functional
from transformers import (
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

HIDDEN, VOCAB, EXPERTS, HEADS, TASKS = SIZES["hidden_size"], SIZES["vocab_size"], 4, 3, 200
ROW = 15 * 21  # numbers of a row: more than a cut has tokens


def drawn(rows: torch.Tensor, *shape: int, high: int = 0) -> torch.Tensor:
    """Numbers (B, S, ...) that follow from the ids (B, S), as stored beside them; integers below high."""
    generator = torch.Generator().manual_seed(int(rows.sum()))
    if high:
        return torch.randint(0, high, (*rows.shape, *shape), generator=generator)
    return torch.randn(*rows.shape, *shape, generator=generator, dtype=torch.float64)


@dataclass
class Outputs(CausalLMOutputWithPast):
    medusa_logits: torch.Tensor | None = None
    task_states: torch.Tensor | None = None


class Replaying(MixtralForCausalLM):
    """Routes each token to the experts that it was routed to before, with its own weights of them."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.gate.register_forward_hook(self._replay)
            layer.mlp.gate.reads_table = False

    @staticmethod
    def _replay(gate: Any, args: Any, output: Any) -> Any:
        chosen = gate.chosen
        if gate.reads_table:  # of all tokens
            chosen = chosen[:, ringtile.token_positions(len(output[0]) // len(chosen))]
        logits, chosen = output[0], chosen.flatten(0, 1)
        return logits, logits.softmax(-1).gather(-1, chosen), chosen

    def forward(self, input_ids=None, routed_experts=None, **kwargs):  # (B, S, layers, experts of a token)
        if routed_experts is not None:
            for i, layer in enumerate(self.model.layers):
                layer.mlp.gate.chosen = routed_experts[:, :, i]
        return super().forward(input_ids=input_ids, **kwargs)


class DraftBase(LlamaModel):
    """Predicts from the embedding of a token and hidden states of a larger model, as EAGLE-3 does."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.joined = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)

    def forward(self, input_ids=None, target_states=None, **kwargs):  # target_states (B, S, 2, E)
        embeddings = torch.cat([self.embed_tokens(input_ids), target_states.flatten(2)], dim=-1)
        return super().forward(**kwargs | {"inputs_embeds": self.joined(embeddings)})


class Draft(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = DraftBase(config)


class Medusa(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.heads = nn.ModuleList(nn.Linear(HIDDEN, VOCAB, bias=False) for _ in range(HEADS))

    def forward(self, input_ids=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        found = torch.stack([head(hidden) for head in self.heads])  # (heads, B, S, V)
        return Outputs(logits=self.lm_head(hidden), medusa_logits=found)


class Judge(LlamaForCausalLM):
    """Judges the steps of an answer at their last tokens, and computes the loss itself."""

    shifts = 0

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.judge = nn.Linear(HIDDEN, 1)

    def forward(self, input_ids=None, step_labels=None, num_items_in_batch=None, labels=None, **kwargs):
        kwargs.pop("shift_labels", None)
        scores = self.judge(self.model(input_ids=input_ids, **kwargs).last_hidden_state)[..., 0]
        step_labels = step_labels.roll(self.shifts, 1)
        is_step = step_labels != -100
        loss = functional.binary_cross_entropy_with_logits(
            scores[is_step], step_labels[is_step].double(), reduction="sum"
        )
        return {"loss": loss / num_items_in_batch, "scores": scores}


class Tasks(LlamaForCausalLM):
    """Adds what it learns of a task to the embeddings of all tokens of its rows."""

    pools = False

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.tasks = nn.Embedding(TASKS, HIDDEN)
        self.weights = nn.Parameter(torch.rand(ROW))

    def forward(self, input_ids=None, task_ids=None, **kwargs):  # task_ids (B, ROW)
        task = self.weights @ self.tasks(task_ids) / ROW
        embeddings = self.model.embed_tokens(input_ids) + task[:, None]
        logits = super().forward(inputs_embeds=embeddings, **kwargs).logits
        return Outputs(logits=logits, task_states=logits.mean(1) if self.pools else task)


class MedusaLoss(OwnMean):
    def after(self, loss, outputs):
        ahead = [of_tokens(x.roll(1, 1), self.ids, "mean") for x in outputs.medusa_logits]
        return loss + sum(ahead)

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.ids = inputs["input_ids"]
        return super().compute_loss(model, inputs, *args, **kwargs)


class TaskLoss(OwnMean):
    def after(self, loss, outputs):
        return loss + outputs.task_states.square().mean()


def collated(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([(row["input_ids"] * 3)[:21] for row in rows])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def with_experts(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = collated(rows)
    order = drawn(batch["input_ids"], 2, EXPERTS).argsort(-1)
    return batch | {"routed_experts": order[..., :2]}


def with_states(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = collated(rows)
    return batch | {"target_states": drawn(batch["input_ids"], 2, HIDDEN)}


def with_steps(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = collated(rows)
    labels = drawn(batch["input_ids"], high=8)
    return batch | {"step_labels": torch.where(labels < 2, labels, -100)}


def with_tasks(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = collated(rows)
    return batch | {"task_ids": batch["input_ids"].repeat(1, ROW // 21) % TASKS}


KINDS = {
    "replay": (Replaying, OwnMean, with_experts, {"per_token": ["routed_experts"]}),
    "draft": (Draft, OwnMean, with_states, {"per_token": ["target_states"]}),
    "medusa": (Medusa, MedusaLoss, collated, {"per_token": ["medusa_logits"]}),
    "steps": (Judge, Trainer, with_steps, {"per_token": ["step_labels", "scores"]}),
    "tasks": (Tasks, TaskLoss, with_tasks, {"per_row": ["task_ids", "task_states"]}),
}


def _model(cls: type) -> Any:
    torch.manual_seed(0)
    settings = {**SIZES, "num_local_experts": EXPERTS, "use_cache": False}
    config = (MixtralConfig if cls is Replaying else LlamaConfig)(**settings)
    config._experts_implementation = "eager"  # the default has no float64
    return cls(config).double().train()


def _trainer(kind: str, **options: Any) -> Trainer:
    cls, trainer_class, collator, _ = KINDS[kind]
    settings = {"max_steps": 2, "gradient_accumulation_steps": 1, "remove_unused_columns": False}
    settings |= {"collator": collator, "model": _model(cls), "trainer_class": trainer_class}
    return make_trainer(**settings | options)


def _trained(kind: str, size: int, config: dict[str, Any] | None = None, **options: Any) -> dict[str, torch.Tensor]:
    """The weights after two steps, and predictions."""
    trainer = _trainer(kind, **options)
    if size > 1:
        keys = {"context_parallel_size": size, "first_batch_check": "require"}
        ringtile.enable(trainer, keys | KINDS[kind][3] | (config or {}))
    trainer.train()
    evaluated = trainer.predict(trainer.eval_dataset).predictions if kind in ("medusa", "steps") else ()
    ringtile.restore(trainer)
    evaluated = evaluated if isinstance(evaluated, tuple) else (evaluated,)
    return trainer.model.state_dict() | {str(i): torch.as_tensor(x) for i, x in enumerate(evaluated)}


# The rounding of float64, 1e-16, in some 1e4 sums; one of float32, in a norm or a rotary embedding, is the same on both
# sides. A lost token, or another expert, shows above 1e-4.
FLOAT64 = 1e-10
WORLDS = [(kind, 2) for kind in KINDS] + [("draft", 4)]


def _assert_one_process(
    kind: str, size: int, config: dict[str, Any] | None = None, tolerance: float = FLOAT64, **options: Any
) -> None:
    expected = _trained(kind, 1, **options)
    for weights in run_ranks(size, _trained, kind, size, config, **options):
        assert weights.keys() == expected.keys()
        for name, weight in expected.items():
            assert (weights[name] - weight).abs().max() <= tolerance * weight.abs().max(), name


@pytest.mark.parametrize(("kind", "size"), WORLDS)
def test_tensors_of_the_user_are_those_of_one_process(kind: str, size: int) -> None:
    _assert_one_process(kind, size)


@pytest.mark.parametrize("kind", ["draft", "medusa"])
def test_streamed_layers_take_tensors_of_the_user(kind: str) -> None:
    _assert_one_process(kind, 2, {"stream": True, "tile_tokens": 4})


def test_trl_takes_tensors_of_the_user() -> None:
    """SFTTrainer, whose loss is of shards, and which calls the model below the head."""
    collator = {"trainer_arguments": {"data_collator": with_states}}
    _assert_one_process("draft", 2, tolerance=TOLERANCE, trainer_class="trl.SFTTrainer", **collator)


class Illustrated(Gemma3ForConditionalGeneration):
    """Adds hidden states of a larger model to its embeddings."""

    def forward(self, input_ids=None, target_states=None, **kwargs):  # target_states (B, S, E)
        with self.get_input_embeddings().register_forward_hook(lambda module, args, out: out + target_states):
            return super().forward(input_ids=input_ids, **kwargs)


def _with_images(size: int) -> dict[str, torch.Tensor]:
    """The weights after two steps on rows with images."""
    options = test_images.made("gemma3", dtype=torch.float64)
    model, padded = options["model"], options["trainer_arguments"]["data_collator"]
    model.__class__ = Illustrated
    width = model.config.get_text_config().hidden_size

    def collator(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = padded(rows)
        return batch | {"target_states": drawn(batch["input_ids"], width)}

    options["trainer_arguments"]["data_collator"] = collator
    trainer = make_trainer(**test_images.STEPS, **options)
    if size > 1:
        keys = {"context_parallel_size": size, "first_batch_check": "require"}
        ringtile.enable(trainer, keys | {"per_token": ["target_states"]})
    trainer.train()
    ringtile.restore(trainer)
    return trainer.model.state_dict()


def test_a_model_of_images_takes_tensors_of_the_user() -> None:
    expected = _with_images(1)
    for weights in run_ranks(2, _with_images, 2):
        for name, weight in expected.items():  # gradients of Gemma's norms are sums of float32
            tolerance = TOLERANCE if "norm" in name else FLOAT64
            assert (weights[name] - weight).abs().max() <= tolerance * weight.abs().max(), name


class Tabled(OwnMean):
    """Keeps the experts of a batch in the routers, where hooks take those of their tokens."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        for i, layer in enumerate(self.accelerator.unwrap_model(model).model.layers):
            layer.mlp.gate.chosen, layer.mlp.gate.reads_table = inputs["routed_experts"][:, :, i], True
        inputs.pop("routed_experts")
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_hooks_ask_for_the_places_of_their_tokens() -> None:
    """Checkpointed: they ask in the backward, too."""
    _assert_one_process("replay", 2, trainer_class=Tabled, gradient_checkpointing=True)
    assert ringtile.token_positions(3).tolist() == [0, 1, 2]


# ---- refused ------------------------------------------------------------------------------------


def _pooling(model: Any) -> None:
    model.pools = True


def _shifting(model: Any) -> None:
    model.shifts = 1


ADVICE = "name it in per_token or per_row"
REFUSED = {
    "an input": ("draft", {}, None, f"the batch holds target_states (2, 21, 2, 32).*{ADVICE}"),
    "an output": ("medusa", {}, None, f"returns medusa_logits (3, 2, .*{ADVICE}"),
    "a row for a token": ("tasks", {"per_token": ["task_ids"]}, None, "InputError: task_ids is (2, "),
    "a known key": ("tasks", {"per_row": ["labels"]}, None, "ConfigError: per_token or per_row names labels"),
    "a mean over a shard": (
        "tasks",
        KINDS["tasks"][3],
        _pooling,
        "task_states, which (2, 96) differs between the ranks",
    ),
    "labels shifted on a shard": ("steps", KINDS["steps"][3], _shifting, "ranks do not compute what one process"),
}


def _failure(case: str) -> str:
    kind, keys, change, _ = REFUSED[case]
    trainer = _trainer(kind)
    if change is not None:
        change(trainer.model)
    try:
        return failure_of(trainer, keys)
    except ringtile.ConfigError as error:
        return f"ConfigError: {error}"


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_undeclared_or_of_a_shard_is_refused(case: str) -> None:
    for message in run_ranks(2, _failure, case):
        for part in REFUSED[case][3].split(".*"):
            assert part in message
