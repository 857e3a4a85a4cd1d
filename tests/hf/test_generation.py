"""What trainers that generate do once for a group of ranks: sampling, requests to a server, rewards."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest import mock

import pytest
import ringtile
import torch
import torch.distributed as dist
from hf_engines import engine as engine_arguments
from hf_models import SIZES, tiny_tokenizer
from hf_rollouts import SETTINGS, Given, completion_of, log_prob_bytes, make_rollouts, train_rollouts, without_times
from hf_training import PROOF, Run, failure_of
from pool import run_ranks
from ringtile.hf.trainer import enable_every_trainer
from test_rollouts import BRIEF, assert_equal, assert_same
from transformers import GenerationMixin, LlamaConfig, LlamaForSequenceClassification, PreTrainedModel
from trl.generation import vllm_generation

CONFIG = {"context_parallel_size": 2}
CONTINUOUS: dict[str, Any] = {"use_transformers_continuous_batching": True}
# Without sizes each rank would take a part of the machine's memory, which may be too little.
CONTINUOUS["transformers_continuous_batching_config"] = {"num_blocks": 64, "max_batch_tokens": 256}
ROWS = SETTINGS["per_device_train_batch_size"] * SETTINGS["gradient_accumulation_steps"]  # of a generation


# ---- sampling -----------------------------------------------------------------------------------


@contextlib.contextmanager
def counted_rows() -> Iterator[list[int]]:
    """How many rows each call of generate() got, and that all of them are those of a whole model."""
    rows: list[int] = []
    original = GenerationMixin.generate

    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(kwargs["input_ids"].size(0))
        return original(model, *args, **kwargs)

    with mock.patch.object(GenerationMixin, "generate", generate):
        yield rows


def sample(
    engine: str = "DDP", config: dict[str, Any] | None = None, **options: Any
) -> tuple[list[int], list[str], dict[str, Any]]:
    with engine_arguments(engine) as arguments, counted_rows() as rows:
        trainer = make_rollouts(given=False, **{**arguments, **options})
        ringtile.enable(trainer, PROOF | {"context_parallel_size": options["group"], **(config or {})})
        trainer.train()
        completions = list(trainer._logs["completion"])
        ringtile.restore(trainer)
    return rows, completions, trainer.state.log_history[0]


@pytest.mark.parametrize(
    ("world", "options", "shares"),
    [
        (3, {"config": {"tiled_loss": True, "tiled_mlp": True}}, (3, 3, 2)),
        pytest.param(2, {"kind": "RLOO"}, (4, 4), marks=pytest.mark.long),
        pytest.param(2, {"kind": "Distillation"}, (4, 4), marks=pytest.mark.long),
        pytest.param(2, CONTINUOUS, (), marks=pytest.mark.long),
        pytest.param(2, {"engine": "FSDP2"}, (4, 4), marks=pytest.mark.long),
        pytest.param(2, {"engine": "ZeRO-3"}, (4, 4), marks=pytest.mark.long),
        # The third rank has no row, and helps to gather the weights.
        pytest.param(
            3,
            {
                "engine": "ZeRO-3",
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": 2,
                "num_generations": 2,
            },
            (1, 1, 1),
            marks=pytest.mark.long,
        ),
    ],
)
def test_each_row_is_generated_once(world: int, options: dict[str, Any], shares: tuple[int, ...]) -> None:
    runs = run_ranks(world, sample, group=world, max_steps=1, log_completions=True, **options)
    if shares:
        assert tuple(rows[0] for rows, _, _ in runs) == shares
        assert all(len(rows) == 1 for rows, _, _ in runs)
    _, completions, metrics = runs[0]
    assert len(set(completions)) > 1
    for _, others, theirs in runs:
        assert others == completions
        assert_same(
            {name: theirs[name] for name in ("loss", "grad_norm")},
            {name: metrics[name] for name in ("loss", "grad_norm")},
            "",
        )


def test_ranks_sample_other_completions_of_one_prompt() -> None:
    """With the numbers of one generator, each rank would sample what another does."""
    runs = run_ranks(2, sample, group=2, max_steps=1)
    completions = runs[0][1]
    assert len(completions) == ROWS
    assert len(set(completions)) == ROWS


def _disagreeing() -> str:
    trainer = make_rollouts(group=2)
    if dist.get_rank() == 1:
        trainer.train_dataset = trainer.train_dataset.map(lambda row: {"prompt": row["prompt"] + " w5"})
    return failure_of(trainer, PROOF)


def test_ranks_that_disagree_are_named() -> None:
    for message in run_ranks(2, _disagreeing):
        assert message.startswith("RingMismatchError: ranks disagree on fingerprint of the data in call"), message


# ---- completions of a server --------------------------------------------------------------------


class Server:
    """In place of TRL's client of a vLLM server, and of the server: what the trainers ask it, without weights."""

    prompts: ClassVar[list[list[int]]] = []  # of all requests

    def __init__(self, **options: Any) -> None:
        pass

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def generate(self, prompts: list[list[int]], n: int, **sampling: Any) -> dict[str, Any]:
        self.prompts.extend(prompts)
        completions = [completion_of(str(prompt), row, 0) for prompt in prompts for row in range(n)]
        logprobs = [[[-4.5 + row % n / 100]] * len(ids) for row, ids in enumerate(completions)]
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}

    def __getattr__(self, name: str) -> Any:
        return mock.Mock()  # init_communicator, update_named_params, reset_prefix_cache


def ask_server(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout_func that asks TRL's client, as TRL itself does."""
    answer = trainer.vllm_generation.generate(trainer.processing_class(prompts)["input_ids"], None, 4)
    logprobs = [[x[0] for x in row] for row in answer[2]]
    return {"prompt_ids": answer[0], "completion_ids": answer[1], "logprobs": logprobs}


def train_with_server(config: dict[str, Any] | None, **options: Any) -> tuple[Run, list[list[int]]]:
    Server.prompts = []
    available = mock.patch.object(vllm_generation, "is_vllm_available", return_value=True)
    with available, mock.patch.object(vllm_generation, "VLLMClient", Server):
        run = train_rollouts(config, given=False, use_vllm=True, vllm_mode="server", **options)
    return run, Server.prompts


@pytest.mark.parametrize("more", [{}, pytest.param({"rollout_func": ask_server}, marks=pytest.mark.long)])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_one_rank_asks_the_server_once(world: int, more: dict[str, Any]) -> None:
    """Two ranks, or two groups of two, and the correction for what the server samples from."""
    options = {"max_steps": 1, "beta": 0.1, "vllm_importance_sampling_mode": "token_truncate", "more": more}
    alone = train_with_server(None, **options) if world == 2 else run_ranks(2, train_with_server, None, **options)[0]
    runs = run_ranks(world, train_with_server, CONFIG, group=2, **options)
    assert runs[0][1] == alone[1]
    assert not any(prompts for _, prompts in runs[1:])
    for run, _ in runs:
        assert_equal(run, alone[0])


def test_refuses_to_ask_the_server_for_more_rows_on_one_rank() -> None:
    options = {"more": {"rollout_func": ask_server}, "group": 3}
    with pytest.raises(ringtile.RefusedError, match="8 rows for 3 ranks, which ask vLLM together"):
        run_ranks(3, train_with_server, {"context_parallel_size": 3}, **options)


# ---- rewards ------------------------------------------------------------------------------------


calls: list[str] = []


def counted_reward(completions: list[str], **columns: Any) -> list[float]:
    calls.append("now")
    return [float(len(text)) for text in completions]


class Later:
    async def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        await asyncio.sleep(0.01)
        calls.append("later")
        return [float(text.count("w5")) for text in completions]


def reward_model() -> PreTrainedModel:
    torch.manual_seed(7)
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES | {"num_labels": 1, "pad_token_id": 0})).eval()
    model.config._name_or_path = "tiny-reward"
    return model


def train_rewarded(config: dict[str, Any] | None, **options: Any) -> tuple[Any, list[str], list[int]]:
    calls.clear()
    rows: list[int] = []
    model = reward_model()
    model.model.register_forward_pre_hook(
        lambda module, args, kw: rows.append((*args, kw.get("input_ids"))[0].size(0)), with_kwargs=True
    )
    more = {"reward_processing_classes": [None, None, tiny_tokenizer()]}
    run = train_rollouts(config, rewards=[counted_reward, functools.partial(Later()), model], more=more, **options)
    return run, list(calls), rows


def test_rewards_are_computed_once() -> None:
    """Functions on one rank; a model on each, which scores the rows that it was dealt."""
    expected, theirs, _ = train_rewarded(None, max_steps=1)
    runs = run_ranks(3, train_rewarded, {"context_parallel_size": 3}, group=3, max_steps=1)
    assert runs[0][1] == theirs
    assert not any(made for _, made, _ in runs[1:])
    assert [rows[0] for _, _, rows in runs] == [3, 3, 2]
    for run, _, _ in runs:
        assert_equal(run, expected)


def drawing_reward(completions: list[str], **columns: Any) -> list[float]:
    """As functions that print a sample now and then."""
    return [random.random() + float(torch.rand(())) for _ in completions]


def test_rewards_may_draw() -> None:
    """The first rank alone draws for them; batches are shuffled after it as in one process."""
    expected = train_rollouts(None, rewards=[drawing_reward], max_steps=2)
    for run in run_ranks(2, train_rollouts, CONFIG, group=2, rewards=[drawing_reward], max_steps=2):
        assert_equal(run, expected)


# ---- a run's life -------------------------------------------------------------------------------


def _resumed(config: dict[str, Any] | None, folder: str, **options: Any) -> Any:
    if dist.is_initialized():
        folder = f"{folder}/{dist.get_world_size()}"
    settings = {"save_strategy": "steps", "save_steps": 1, "folder": folder, **BRIEF, **options}
    train_rollouts(config, **settings | {"max_steps": 1})
    return train_rollouts(config, **settings | {"max_steps": 2}, resume=f"{folder}/run/checkpoint-1")


def test_resumes_in_the_middle(tmp_path: Any) -> None:
    expected = _resumed(None, str(tmp_path))
    for run in run_ranks(2, _resumed, CONFIG, str(tmp_path), group=2):
        assert_equal(run, expected)


BRIEFLY: dict[str, Any] = {"beta": 0.1, "max_steps": 1}  # with a reference model


def _by_import(path: str) -> list[dict[str, float]]:
    with mock.patch.dict(os.environ, {"RINGTILE_CONFIG": path}):
        patches = enable_every_trainer()
    try:
        trainer = make_rollouts(group=2, **BRIEFLY)
        trainer.train()
        assert trainer._ringtile_session.config.context_parallel_size == 2
        ringtile.restore(trainer)
        assert {"train", "evaluate", "predict"}.isdisjoint(vars(trainer))
    finally:
        patches.restore()
    return [without_times(entry) for entry in trainer.state.log_history]


def test_an_import_enables_a_trainer_that_is_whole(tmp_path: Any) -> None:
    """TRL's reference model, seeds and logs are made after transformers' Trainer is."""
    path = tmp_path / "ringtile.yaml"
    path.write_text("context_parallel_size: 2\nfirst_batch_check: false\n")
    expected = train_rollouts(None, **BRIEFLY).metrics[:-1]  # without that of the evaluation
    for metrics in run_ranks(2, _by_import, str(path)):
        assert_same(metrics, expected, "metrics")


def _first_ratios(group: int) -> list[float]:
    """How far from 0 log-ratios are in the updates before the first step of the optimizer."""
    trainer = make_rollouts(group=group, steps_per_generation=4, gradient_accumulation_steps=2, max_steps=1)
    ringtile.enable(trainer, PROOF | {"context_parallel_size": group})
    found: list[float] = []
    score = trainer._get_per_token_logps_and_entropies

    def scored(*args: Any, **kwargs: Any) -> Any:
        result = score(*args, **kwargs)
        if torch.is_grad_enabled():
            batch = trainer._buffered_inputs[trainer._step % 4]
            difference = (result[0].detach() - batch["old_per_token_logps"]) * batch["completion_mask"]
            found.append(float(difference.abs().max()))
        return result

    trainer._get_per_token_logps_and_entropies = scored
    trainer.train()
    ringtile.restore(trainer)
    return found


def test_ratio_is_one_before_the_first_step() -> None:
    """New and old log-probs take one path: a row differs by where it lies in its batch, by units in the last place."""
    for found in run_ranks(2, _first_ratios, 2):
        assert len(found) == 2
        assert max(found) <= 4 * torch.finfo(torch.float32).eps * 8  # log-probs of up to 8


@pytest.mark.long
def test_a_rank_holds_its_share_of_a_row() -> None:
    """Of what grows with the row: half of it, and a little for the neighbor's keys and the row's log-probs. What does
    not grow is a tile of logits of TRL's head, 4096 tokens by 32768 words."""
    short, long = 8192, 16384
    alone = log_prob_bytes(None, long) - log_prob_bytes(None, short)
    held = (run_ranks(2, log_prob_bytes, CONFIG, tokens) for tokens in (long, short))
    for more, less in zip(*held, strict=True):
        assert more - less <= 0.6 * alone


def _mixing() -> tuple[str, int]:
    """A shard does not have the mean over the row."""
    trainer = make_rollouts(group=2)
    mlp = trainer.model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: (y := forward(x)) + y.mean(1, keepdim=True)  # a hook would not run in the proof
    return failure_of(trainer), trainer.state.global_step


@pytest.mark.long  # test_shared_prefix.py has the first batch of a GRPO in every run, test_first_batch.py the module
def test_the_first_batch_names_a_module_that_mixes_tokens() -> None:
    for message, step in run_ranks(2, _mixing):
        assert message.startswith("RefusedError: 2 ranks do not compute what one process computes")
        assert "model.layers.1.mlp" in message
        assert step == 0


# ---- refusals -----------------------------------------------------------------------------------


def _failure(options: dict[str, Any]) -> str:
    trainer = make_rollouts(group=2, **options)
    try:
        ringtile.enable(trainer, CONFIG)
    except ringtile.RingtileError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient_accumulation_steps": 3}, "ConfigError: 6 rows are generated at once"),
        ({"per_device_eval_batch_size": 2}, "ConfigError: 2 rows are generated at once"),
    ],
)
def test_refuses_rows_that_are_not_whole_groups_of_completions(options: dict[str, Any], words: str) -> None:
    for message in run_ranks(2, _failure, options):
        assert message.startswith(words)
        assert "num_generations" in message


def test_refuses_tools() -> None:
    trainer = make_rollouts()
    trainer.tools = [len]
    with pytest.raises(ringtile.RefusedError, match="has tools or environments; expected none"):
        ringtile.enable(trainer, CONFIG)


def _uneven(prompts: list[str], trainer: Any) -> dict[str, Any]:
    return Given(2)(prompts, trainer) | {"of_rank": dist.get_rank()}


def test_refuses_answers_that_ranks_do_not_share() -> None:
    for message in run_ranks(2, _uneven_failure):
        assert "a rollout_func returned something else than a list" in message


def _uneven_failure() -> str:
    return failure_of(make_rollouts(given=False, more={"rollout_func": _uneven}), PROOF)
