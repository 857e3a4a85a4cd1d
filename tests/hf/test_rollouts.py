"""Trainers that generate: weights, metrics and logs of ranks that share sequences equal those of one process, or of as
many processes as there are groups."""

from __future__ import annotations

import datetime
import math
from typing import Any

import pytest
import ringtile
import torch
import torch.distributed as dist
from hf_rollouts import make_rollouts, train_rollouts
from hf_training import TOLERANCE, Run, run_new_ranks
from pool import run_ranks
from ringtile.first_batch.random_states import random_digest

# Old log-probs, from the second update on; clipping; a reference model; fewer tokens than there are; truncated ones.
ALL = {
    "num_iterations": 2,
    "beta": 0.1,
    "top_entropy_quantile": 0.2,
    "mask_truncated_completions": True,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "max_steps": 5,
}
TWICE = {name: ALL[name] for name in ("num_iterations", "gradient_accumulation_steps", "steps_per_generation")}
BRIEF = ALL | {"steps_per_generation": 2, "max_steps": 3}  # the third step is of a second generation
# At a rate of 0.3 rounding grows: two paddings of RLOO in one process differ by 2e-6 after 4 steps.
SLOWLY = {"learning_rate": 0.05}
RLOO = {name: value for name, value in ALL.items() if name != "top_entropy_quantile"} | SLOWLY
QWEN3_MOE = {"family": "qwen3-moe", "router_aux_loss_coef": 0.1}


def cell(
    what: str,
    world: int = 2,
    size: int = 2,
    long: bool = True,
    ranks: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """ranks: options of the ranks alone. config: more of ringtile's."""
    marks = [pytest.mark.long] * long
    config = {"context_parallel_size": size, **(config or {})}
    return pytest.param(
        world, config, options, ranks or {}, id=f"{what}, {world} ranks in groups of {size}", marks=marks
    )


CELLS = [
    cell("grpo"),  # "experts" is the same with a router
    # The first rank draws the completions that it prints.
    cell("everything", 4, long=False, log_completions=True, num_completions_to_print=1, **BRIEF),
    *(cell(f"{loss} with everything", 2, loss_type=loss, **ALL) for loss in ("grpo", "bnpo", "dr_grpo", "dapo")),
    *(cell(f"{loss} with everything", 3, 3, loss_type=loss, **ALL) for loss in ("cispo", "sapo", "vespo", "luspo")),
    cell("importance of sequences", loss_type="grpo", importance_sampling_level="sequence", **ALL),
    cell("luspo of sequences", 4, 4, loss_type="luspo", importance_sampling_level="sequence", **ALL),
    cell("AdamW", optim="adamw_torch", learning_rate=1e-3, adam_epsilon=1e-3, **ALL),
    cell("LoRA", lora=True, **ALL),
    cell("LoRA", 4, lora=True, loss_type="cispo", **ALL),
    cell("scaled by the batch", 4, scale_rewards="batch"),
    cell("not scaled", scale_rewards="none"),
    cell("normalized, then summed", 4, multi_objective_aggregation="normalize_then_sum", reward_weights=[0.3, 1.5]),
    cell("adaptive entropy", 4, use_adaptive_entropy=True, entropy_coef=0.01, entropy_target=4.5, **TWICE),
    cell("two-sided clipping", delta=1.0005, off_policy_mask_threshold=1e-7, **TWICE),
    cell("unbiased KL", use_bias_correction_kl=True, **ALL),
    *(cell("a module's own collectives", n, long=n > 2, own_class="own_rewards", max_steps=1) for n in (2, 4)),
    cell("experts", long=False, max_steps=1, **QWEN3_MOE),
    cell("experts", 4, **QWEN3_MOE, **ALL),
    cell("checkpointing", gradient_checkpointing=True, **ALL),
    cell("one row for two ranks", 2, per_device_train_batch_size=1, gradient_accumulation_steps=4),
    cell("few rows", 4, 4, per_device_train_batch_size=1, gradient_accumulation_steps=2, num_generations=2),
    *(cell(f"a hybrid, {family}", family=family, **ALL | SLOWLY) for family in ("qwen3_next", "bamba")),
    cell("RLOO", 3, 3, kind="RLOO", **RLOO),
    cell("RLOO, clipped", 4, kind="RLOO", normalize_advantages=True, reward_clip_range=[-0.5, 0.5], **RLOO),
    cell("RLOO with LoRA", kind="RLOO", lora=True, long=False, **RLOO | {"steps_per_generation": 2, "max_steps": 1}),
    cell("distillation", kind="Distillation", long=False, max_steps=1),
    *(cell(f"distillation with beta {beta}", 4, kind="Distillation", beta=beta) for beta in (0.0, 0.5, 1.0)),
    cell("distillation with LoRA", 3, 3, kind="Distillation", lora=True),
    cell("tiles", config={"tiled_mlp": True, "tiled_loss": True, "tile_tokens": 4}, **ALL),
    cell("heads first, striped", 4, 4, config={"context_parallel_scheme": "usp:2", "layout": "striped"}, **ALL),
    cell("nothing shared", 2, 1, **ALL),
    cell("grpo under FSDP2", ranks={"engine": "FSDP2"}, **ALL),
    cell("grpo with LoRA under ZeRO-3", ranks={"engine": "ZeRO-3"}, lora=True, **ALL),
    cell("grpo under ZeRO-2", 4, ranks={"engine": "ZeRO-2"}, **ALL),
    cell("distillation under FSDP2", kind="Distillation", ranks={"engine": "FSDP2"}),
]


@pytest.mark.parametrize(("world", "config", "options", "ranks"), CELLS)
def test_equals_one_process(world: int, config: dict[str, Any], options: dict[str, Any], ranks: dict[str, Any]) -> None:
    size = config["context_parallel_size"]
    groups = world // size
    expected = train_rollouts(None, **options) if groups == 1 else run_ranks(groups, train_rollouts, None, **options)[0]
    for run in run_ranks(world, train_rollouts, config, group=size, **options, **ranks):
        assert_equal(run, expected)


def random_numbers_before_and_after() -> list[str]:
    trainer = make_rollouts(group=2)
    digests = [random_digest()]
    for draws in (False, True):
        ringtile.enable(trainer, {"context_parallel_size": 2})
        digests.append(random_digest())
        if draws:
            torch.rand(1)
            digests.append(random_digest())
        ringtile.restore(trainer)
        digests.append(random_digest())
    return digests


def test_restore_puts_back_the_random_numbers_unless_some_were_drawn() -> None:
    for rank, digests in enumerate(run_ranks(2, random_numbers_before_and_after)):
        before, enabled, after, again, drawn, at_last = digests
        assert before == after
        assert (enabled == before) == (rank == 0)  # TRL seeds each process with its index, which is that of the group
        assert again == enabled
        assert at_last == drawn


def gathering_reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The same shape as what TRL gathers."""
    mine = torch.tensor([[float(len(ids))] for ids in completion_ids])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine, async_op=True).wait(datetime.timedelta(seconds=6))  # else for the group's timeout
    return [float(x) for x in parts[0]]


def failing_reward(**columns: Any) -> list[float]:
    raise ValueError("no reward")


def error_of_rewards(name: str) -> str:
    trainer = make_rollouts(group=2, rewards=[globals()[name]], max_steps=1, ddp_timeout=3)
    ringtile.enable(trainer, {"context_parallel_size": 2})
    with pytest.raises((ringtile.RingtileError, RuntimeError, ValueError)) as raised:
        trainer.train()
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_reward_function_with_a_collective_is_named_in_time() -> None:
    """By the rank that waits for the rewards, after ddp_timeout; by the one that calls the function when its collective
    ends, which torch.distributed alone can end."""
    first, second = run_new_ranks(2, error_of_rewards, "gathering_reward")
    named = "gathering_reward, which the first rank of a group alone calls, without collectives"
    assert first.startswith(f"RefusedError: a collective of torch.distributed failed in {named}")
    assert second.startswith("PeerLostError: rank 0 was lost in ")
    assert named in second


def test_a_reward_function_that_fails_is_heard_by_the_ranks_that_do_not_call_it() -> None:
    first, second = run_new_ranks(2, error_of_rewards, "failing_reward")
    assert first == "ValueError: no reward"
    assert second.startswith("RingMismatchError: ")
    assert "no reward" in second


def assert_equal(run: Run, expected: Run, tolerance: float = TOLERANCE) -> None:
    """tolerance: of one step."""
    assert run.global_step == expected.global_step
    tolerance *= run.global_step
    assert run.num_input_tokens == expected.num_input_tokens
    assert_same(run.metrics, expected.metrics, "metrics", tolerance)
    assert_same(run.logs, expected.logs, "logs", tolerance)
    assert run.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert (run.weights[name] - weight).abs().max() <= tolerance * weight.abs().max(), name


def assert_same(got: Any, expected: Any, what: str, tolerance: float = TOLERANCE) -> None:
    """Numbers of order 1, sums of some of either sign: differences are bounded absolutely."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), what
        for key in expected:
            assert_same(got[key], expected[key], f"{what}: {key}", tolerance)
    elif isinstance(expected, list):
        assert len(got) == len(expected), what
        for index, pair in enumerate(zip(got, expected, strict=True)):
            assert_same(*pair, f"{what}[{index}]", tolerance)
    elif isinstance(expected, float) and isinstance(got, float):
        same = (math.isnan(got) and math.isnan(expected)) or abs(got - expected) <= tolerance * max(1, abs(expected))
        assert same, f"{what}: {got} is not {expected}"
    else:
        assert got == expected, what
