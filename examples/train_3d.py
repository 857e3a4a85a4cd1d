"""Data x context x tensor parallelism in a plain PyTorch loop: a tiny Llama on packed sequences, on GPUs or a laptop.

    torchrun --nproc-per-node 8 examples/train_3d.py                            # 2 x 2 x 2 ranks: NCCL, or gloo
    torchrun --nproc-per-node 8 examples/train_3d.py --steps 5 --save out/ckpt  # stop half way
    torchrun --nproc-per-node 4 examples/train_3d.py --dp 1 --cp 4 --tp 1 --load out/ckpt  # continue on another mesh

Parameters are sharded over tp, and over dp and cp together (FSDP2). The ranks of a cp group share rows: each holds some
of their tokens. Any mesh computes the losses of one process. ringtile adds one `with` block.

Shape letters: B batch, S global tokens, N local tokens, H query heads, G kv heads, D head dim, E hidden size.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from ringtile import IntervalMask, context_parallel
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

IGNORE = -100


@dataclass
class Config:
    """One run, on dp * cp * tp ranks; `batch` counts the rows of all dp groups."""

    dp: int = 2
    cp: int = 2
    tp: int = 2
    steps: int = 10
    batch: int = 4
    seq_len: int = 256
    layout: str = "zigzag"
    learning_rate: float = 1e-2
    save: str = ""
    load: str = ""
    vocab: int = 256
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    layers: int = 2


# ---- the model: written for one device ----------------------------------------------------------


def rotate(x: Tensor, position_ids: Tensor) -> Tensor:
    """Rotary embedding (arXiv:2104.09864) of (B, N, heads, D) at position_ids (B, N)."""
    frequencies = 10000.0 ** (-torch.arange(0, x.size(-1), 2, device=x.device) / x.size(-1))
    angles = (position_ids[..., None] * frequencies)[:, :, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.hidden // config.heads
        kv_size = config.kv_heads * self.head_dim
        self.q, self.o = (nn.Linear(config.hidden, config.hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(config.hidden, kv_size, bias=False) for _ in range(2))

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        # Under tensor parallelism a rank has only some heads; the width of its projections tells how many.
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        q, k = rotate(q, position_ids), rotate(k, position_ids)
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.gate, self.up = (nn.Linear(config.hidden, 2 * config.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * config.hidden, config.hidden, bias=False)
        self.norm_1, self.norm_2 = nn.RMSNorm(config.hidden), nn.RMSNorm(config.hidden)

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), position_ids)
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, position_ids)
        return self.head(self.norm(x))


# ---- the data: rows of packed documents ---------------------------------------------------------


@dataclass
class Batch:
    """(B, S) each; the labels are the next token of the same document, IGNORE at its end."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    lengths: list[list[int]]  # of the documents of each row


def make_batch(config: Config, step: int) -> Batch:
    """The batch of all dp groups, the same on every rank: noisy counting, which a model can learn."""
    generator = torch.Generator().manual_seed(step)
    lengths = []
    for _ in range(config.batch):
        cuts = torch.randperm(config.seq_len - 1, generator=generator)[:5].sort().values + 1
        lengths.append(torch.cat((torch.tensor([0]), cuts, torch.tensor([config.seq_len]))).diff().tolist())
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    noise = torch.randint(0, 8, position_ids.shape, generator=generator)
    input_ids = (position_ids * 3 + noise) % config.vocab
    labels = F.pad(input_ids[:, 1:], (0, 1), value=IGNORE)
    labels[F.pad(position_ids[:, 1:], (0, 1)) == 0] = IGNORE
    return Batch(input_ids, labels, position_ids, lengths)


# ---- the parallelism ----------------------------------------------------------------------------


def parallelize(model: Llama, mesh: DeviceMesh) -> DeviceMesh:
    """Tensor parallelism inside every block, then FSDP2 over dp and cp, whose mesh is returned.

    Attention is context-parallel in `train`.
    """
    if mesh["tp"].size() > 1:
        split = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "gate", "up")}
        for block in model.blocks:
            parallelize_module(
                block, mesh["tp"], {**split, "attention.o": RowwiseParallel(), "down": RowwiseParallel()}
            )
        # The logits are then a view from DTensor.to_local. FSDP2 warns about writes to it; there are none here.
        parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(output_layouts=Replicate())})
    data_mesh = mesh["dp", "cp"]._flatten("dp_cp")
    for block in model.blocks:
        fully_shard(block, mesh=data_mesh)
    fully_shard(model, mesh=data_mesh)
    return data_mesh


def train(config: Config) -> list[float]:
    """The loss of every step, on every rank. The process group has dp * cp * tp ranks."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (config.dp, config.cp, config.tp), mesh_dim_names=("dp", "cp", "tp"))
    torch.manual_seed(0)
    model = Llama(config).to(kind)
    data_group = parallelize(model, mesh).get_group()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, foreach=False)
    first = load(config.load, model, optimizer) if config.load else 0
    losses = []
    for step in range(first, config.steps):
        batch = make_batch(config, step)
        num_labels = int((batch.labels != IGNORE).sum())  # of all dp groups
        rows = slice(mesh["dp"].get_local_rank(), None, config.dp)
        of_batch = (batch.input_ids, batch.labels, batch.position_ids)
        buffers = input_ids, labels, position_ids = [x[rows].to(kind, copy=True) for x in of_batch]
        with context_parallel(
            mesh["cp"],
            buffers=buffers,
            buffer_seq_dims=[1, 1, 1],
            no_restore_buffers=set(buffers),
            layout=config.layout,
            mask=IntervalMask.documents(batch.lengths[rows]),
        ):
            logits = model(input_ids, position_ids)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
            loss = loss / num_labels
            (loss * data_group.size()).backward()  # FSDP2 averages gradients; we need their sum
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=data_group)
        losses.append(total.item())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.6f}", flush=True)
    if config.save:
        save(config.save, model, optimizer, config.steps)
    return losses


# ---- checkpoints: written by one mesh, read by any ----------------------------------------------


def save(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(step)}, checkpoint_id=folder)


def load(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step to continue with."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["step"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny Llama on a dp x cp x tp mesh.")
    for name, value in vars(Config()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    config = Config(**vars(parser.parse_args()))
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        train(config)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
