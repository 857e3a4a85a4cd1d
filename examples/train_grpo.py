"""GRPO (arXiv:2402.03300) in a plain PyTorch loop: the ranks of a group share each row. On a laptop.

    torchrun --nproc-per-node 2 examples/train_grpo.py           # two ranks share each row
    torchrun --nproc-per-node 4 examples/train_grpo.py --cp 2    # two groups, each with prompts of its own
    python examples/train_grpo.py                                # one process computes the same as the first

A tiny model, made here, is to write even numbers. Rank 0 of a group samples the completions and sends them to the
others; from there on every rank of the group computes the same loss of the same whole rows, and DDP averages gradients.

Shape letters: P prompts, B rows (completions of all prompts), C tokens of a completion.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ringtile import sequence_log_probs
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, PROMPT, COMPLETION, END = 32, 6, 10, 0  # END also pads
PROMPTS, GROUP = 4, 8  # prompts of a step, in all groups of ranks together; completions of a prompt
INNER_STEPS, EPSILON, BETA = 2, 0.2, 0.02


def reward_of(completions: Tensor, mask: Tensor) -> Tensor:
    """(B, C) -> (B): the share of even numbers among the tokens up to END."""
    return ((completions % 2 == 0) * mask).sum(1) / mask.sum(1)


def sample(model: LlamaForCausalLM, prompts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """prompts (P, PROMPT) -> rows (P GROUP, PROMPT + COMPLETION), the same on every rank of the group."""
    rows = torch.full((len(prompts) * GROUP, PROMPT + COMPLETION), END)
    if group.rank() == 0:
        given = prompts.repeat_interleave(GROUP, 0)
        done = model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=True, max_new_tokens=COMPLETION, pad_token_id=END
        )
        rows[:, : done.size(1)] = done
    dist.broadcast(rows, group_src=0, group=group)
    return rows


def train(cp: int, steps: int = 12, learning_rate: float = 3e-3) -> list[tuple[float, float]]:
    """Loss and mean reward of every step, of all groups together."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // cp, cp), mesh_dim_names=("dp", "cp"))
    dp, group = mesh["dp"].get_local_rank(), mesh.get_group("cp")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=64, bos_token_id=None, eos_token_id=END, **sizes)
    model, reference = LlamaForCausalLM(config), LlamaForCausalLM(config)
    reference.load_state_dict(model.state_dict())
    policy = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.0)
    logged = []
    for step in range(steps):
        torch.manual_seed(1 + step)  # the prompts of all groups, then this group's own samples
        prompts = torch.randint(1, VOCAB, (PROMPTS, PROMPT)).chunk(mesh["dp"].size())[dp]
        torch.manual_seed(1000 * step + dp)
        rows = sample(model, prompts, group)
        is_end = (rows[:, PROMPT:] == END).int()
        is_written = is_end.cumsum(1) - is_end == 0  # (B, C): up to the first END, which counts
        completion_mask = F.pad(is_written, (PROMPT, 0), value=False)
        attention_mask = F.pad(is_written, (PROMPT, 0), value=True)
        rewards = reward_of(rows[:, PROMPT:], is_written).view(-1, GROUP)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        given = {"attention_mask": attention_mask, "completion_mask": completion_mask}
        with torch.no_grad():
            old = sequence_log_probs(policy, rows, mesh["cp"], **given)
            of_reference = sequence_log_probs(reference, rows, mesh["cp"], **given)
        mask = completion_mask[:, 1:]
        num_tokens = mask.sum()
        dist.all_reduce(num_tokens, group=mesh.get_group("dp"))  # of all groups: the mean is over tokens
        for _ in range(INNER_STEPS):
            new = sequence_log_probs(policy, rows, mesh["cp"], **given)
            ratio, behind = (new - old).exp(), of_reference - new
            gain = torch.minimum(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)
            per_token = BETA * (behind.exp() - behind - 1) - gain
            loss = (per_token * mask).sum() / num_tokens * mesh["dp"].size()  # DDP takes the mean over the groups
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        mean = torch.stack([loss.detach(), rewards.mean()])
        dist.all_reduce(mean)
        logged.append(tuple((mean / dist.get_world_size()).tolist()))
    return logged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, default=None, help="ranks that share a row; default: all")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29511")):
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    logged = train(options.cp or dist.get_world_size(), options.steps)
    if dist.get_rank() == 0:
        for step, (loss, reward) in enumerate(logged, 1):
            print(f"step {step}: loss {loss:.4f}, reward {reward:.3f}")


if __name__ == "__main__":
    main()
