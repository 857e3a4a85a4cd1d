"""Short trainings of TRL's trainers that generate, on completions that are given, in one process or on ranks."""

from __future__ import annotations

import functools
import importlib
import math
import random
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import datasets
import torch
import torch.distributed as dist
from counting import Alive
from hf_engines import engine as engine_arguments
from hf_engines import full_weights
from hf_models import hybrid, tiny_model, tiny_tokenizer, with_lora
from hf_training import Run, enabled, enter_world
from transformers import Trainer

from tools.models.tiny_images import LAST_WORD

EOS = 2
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "max_completion_length": 14,
    "temperature": 0.9,
    "max_steps": 3,
    "learning_rate": 0.3,
    "optim": "sgd",
    "max_grad_norm": 1e9,  # clips nothing: clipping would hide a wrong scale of the loss
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "save_strategy": "no",
    "gradient_checkpointing": False,
}
OF_REWARDS: dict[str, Any] = {"num_generations": 4, "epsilon": 0.001}  # so small that ratios are clipped
HYBRIDS = {"qwen3_next", "bamba"}
TIMES = {"train_runtime", "train_tokens_per_second", "step_time", "eval_runtime", "eval_samples_per_second"}
TIMES |= {"eval_steps_per_second", "train_samples_per_second", "train_steps_per_second"}


class Given:
    """A rollout_func that gives each row of a generation its completion: 1 to 14 tokens, some without an end."""

    def __init__(self, group: int) -> None:
        self.group, self.calls = group, [0]  # ranks that share a sequence; rows of each call

    def __call__(self, prompts: list[str], trainer: Trainer) -> dict[str, Any]:
        self.calls.append(len(prompts))
        rank, args = dist.get_rank() if dist.is_initialized() else 0, trainer.args
        steps = getattr(args, "steps_per_generation", args.gradient_accumulation_steps)
        rows = args.per_device_train_batch_size * steps if trainer.model.training else args.per_device_eval_batch_size
        shares = [rows // self.group + (r < rows % self.group) for r in range(self.group)]
        first = rank // self.group * rows + sum(shares[: rank % self.group])
        step, processor = trainer.state.global_step, trainer.processing_class
        completions = [completion_of(words, row, step) for row, words in enumerate(map(_words, prompts), first)]
        if hasattr(processor, "tokenizer"):  # of images, of which no completion holds a token
            completions = [[min(token, LAST_WORD) for token in ids] for ids in completions]
        if isinstance(prompts[0], str):
            prompt_ids = getattr(processor, "tokenizer", processor)(prompts)["input_ids"]
        else:
            prompt_ids = trainer._tokenize_prompts(prompts)[0]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completions,
            "logprobs": None,
            "row": list(range(len(prompts))),
        }


def _words(prompt: str | list[dict[str, Any]]) -> str:
    """Of a prompt that may hold images."""
    if isinstance(prompt, str):
        return prompt
    return " ".join(part["text"] for message in prompt for part in message["content"] if part["type"] == "text")


def completion_of(prompt: str, row: int, step: int) -> list[int]:
    draw = random.Random(f"{prompt} {row} {step}")
    tokens = [draw.randrange(3, 96) for _ in range(draw.choice([1, 2, 5, 9, 13]))]
    return tokens + [EOS] * (draw.random() < 0.7)


def length_reward(completion_ids: list[list[int]], log_metric: Any, log_extra: Any, **columns: Any) -> list[float]:
    log_metric("longest", max(map(len, completion_ids)))
    log_extra("length", [len(ids) for ids in completion_ids])
    return [math.sin(len(ids)) for ids in completion_ids]


def word_reward(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    return [None if ids[0] % 7 == 0 else sum(ids) % 11 / 11 for ids in completion_ids]


def make_prompts(count: int, seed: int = 0) -> list[dict[str, str]]:
    draw = random.Random(seed)
    return [
        {"prompt": " ".join(f"w{draw.randrange(3, 96)}" for _ in range(draw.randrange(1, 9)))} for _ in range(count)
    ]


def make_rollouts(
    kind: str = "GRPO",
    group: int = 1,
    *,
    family: str = "llama",
    lora: bool = False,
    given: bool = True,
    folder: str | None = None,
    rewards: Any = None,
    own_class: str = "",
    model_dropout: float = 0.0,
    more: dict[str, Any] | None = None,
    made: Callable[[], dict[str, Any]] = dict,
    **settings: Any,
) -> Trainer:
    """group: the ranks that share a sequence. own_class: a module with a Trainer OwnRewards. more: arguments of the
    Trainer; made: the same, the model too."""
    enter_world()
    warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
    package = importlib.import_module("trl")
    folder = folder or tempfile.mkdtemp(prefix="ringtile-test-")
    more = made() | (more or {})
    model = more.pop("model", None) or (hybrid(family) if family in HYBRIDS else tiny_model(family).train())
    model.config._name_or_path = _saved(model, folder)  # from which a reference model is read
    model = with_lora(model, model_dropout) if lora or model_dropout else model
    config = SETTINGS | (OF_REWARDS if kind != "Distillation" else {}) | settings
    arguments = {
        "processing_class": tiny_tokenizer(),
        "train_dataset": datasets.Dataset.from_list(make_prompts(12)),
        "eval_dataset": datasets.Dataset.from_list(make_prompts(4, seed=1)),
        **more,
    }
    if kind == "Distillation":
        arguments["teacher_model"] = tiny_model(family, seed=3)
    else:
        arguments["reward_funcs"] = rewards or [length_reward, word_reward]
        if given and kind == "GRPO":
            arguments["rollout_func"] = Given(group)
    own = importlib.import_module(own_class).OwnRewards if own_class else None
    trainer: Trainer = (own or getattr(package, f"{kind}Trainer"))(
        model=model,
        args=getattr(package, f"{kind}Config")(f"{folder}/run", **config),
        **arguments,
    )
    if given and kind != "GRPO":
        trainer._generate_single_turn = _generating(trainer, Given(group))
    if getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
        trainer.get_high_entropy_mask = functools.partial(_without_ties, trainer.get_high_entropy_mask)
    return trainer


def _without_ties(masks: Any, entropies: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
    """Rows that begin alike have equal entropies there. Where the quantile falls on these, rounding would choose the
    tokens that count; so those of each row are raised above the row before, by more than rounding (5e-7)."""
    rows = torch.arange(len(entropies), device=entropies.device)
    chosen: torch.Tensor = masks(entropies + 1e-5 * rows[:, None], mask, threshold)
    return chosen


def _saved(model: Any, folder: str) -> str:
    """The first rank saves it, as transformers does it, where all of them see it."""
    if not dist.is_initialized():
        model.save_pretrained(folder)
        return folder
    shared = [folder]
    dist.broadcast_object_list(shared)
    model.save_pretrained(shared[0])
    dist.barrier()
    return shared[0]


def _generating(trainer: Trainer, given: Given) -> Any:
    def generate(prompt_ids: list[list[int]], images: Any, fields: Any, *args: Any) -> Any:
        prompts = trainer.processing_class.batch_decode(prompt_ids)
        return given(prompts, trainer)["completion_ids"]

    return generate


def train_rollouts(
    config: dict[str, Any] | None, *, engine: str = "DDP", resume: str | None = None, **options: Any
) -> Run:
    """Run it on every rank."""
    with engine_arguments(engine) as arguments:
        trainer = make_rollouts(**{**arguments, **options})
        with enabled(trainer, config):
            trainer.train(resume_from_checkpoint=resume)
            run = Run(global_step=trainer.state.global_step, num_input_tokens=trainer.state.num_input_tokens_seen)
            run.metrics = [without_times(entry) for entry in trainer.state.log_history]
            run.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            run.logs = {
                name: {k: list(v) for k, v in log.items()} if isinstance(log, dict) else list(log)
                for name, log in trainer._logs.items()
            }
            run.weights = full_weights(trainer.model)
            run.metrics.append(without_times(trainer.evaluate()))
    return run


def log_prob_bytes(config: dict[str, Any] | None, tokens: int) -> int:
    """The most bytes of tensors that GRPO's log-probs and entropies of a row, and their backward, made at one time."""
    trainer: Any = make_rollouts(per_device_train_batch_size=4)
    ids = torch.randint(3, 96, (1, tokens), generator=torch.Generator().manual_seed(0))
    parts = {"prompt_ids": ids[:, :16], "completion_ids": ids[:, 16:]}
    masks = {name.replace("ids", "mask"): torch.ones_like(part) for name, part in parts.items()}
    batch = {**parts, **masks, "advantages": torch.ones(1), "num_items_in_batch": torch.tensor(tokens - 16)}
    model = trainer.accelerator.prepare_model(trainer.model)
    trainer.current_gradient_accumulation_steps = 1
    with enabled(trainer, config), Alive(at_least=1024) as alive:
        trainer.compute_loss(model, batch).backward()
    return alive.bytes_peak


def without_times(entry: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in entry.items() if key not in TIMES}
