"""Trains a causal language model in a plain PyTorch loop under DDP. README.md has the commands."""

import os
import pathlib
import sys

import ringtile
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = ""  # a folder or a hub name, such as "Qwen/Qwen3-0.6B"; empty: the tiny one of ../tiny_model.py
TEXT = pathlib.Path(__file__).read_text()  # what to train on: your own text here
SEQ_LEN = 256  # tokens of a row, before the ranks share it
ROWS = 2  # of a batch of one rank, shared by the ranks that share a sequence
STEPS = 5


class Loss(nn.Module):
    """The sum of the token losses of a batch, so that DDP sees one module with one output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.model.get_decoder()(input_ids=input_ids, position_ids=position_ids, use_cache=False)[0]
        weight = self.model.get_output_embeddings().weight
        return ringtile.tiled_linear_cross_entropy(hidden, weight, labels, reduction="sum")


folder = pathlib.Path(__file__).resolve().parent
config = ringtile.Config.load(folder / "ringtile.yaml")
kind = "cuda" if torch.cuda.is_available() else "cpu"
device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
world_size, cp = int(os.environ["WORLD_SIZE"]), config.context_parallel_size
mesh = init_device_mesh(kind, (world_size // cp, cp), mesh_dim_names=("dp", "cp"))

if MODEL:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
else:
    sys.path.append(str(folder.parent))
    from tiny_model import tiny_model, tiny_tokenizer

    model, tokenizer = tiny_model(), tiny_tokenizer()
tokens = torch.tensor(tokenizer(TEXT).input_ids)
model.to(device)
if config.tiled_mlp:
    ringtile.tile_mlps(model, tile_tokens=config.tile_tokens)
if config.tiled_norm:
    ringtile.tile_norms(model, tile_tokens=config.tile_tokens)
loss_of = nn.parallel.DistributedDataParallel(Loss(model))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = tokens[: len(tokens) // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN)

losses = []
for step in range(STEPS):
    batch = step * (world_size // cp) + mesh["dp"].get_local_rank()  # the ranks of a cp group take the same rows
    input_ids = rows[torch.arange(batch * ROWS, (batch + 1) * ROWS) % len(rows)].to(device)
    labels = nn.functional.pad(input_ids[:, 1:], (0, 1), value=-100)  # shifted before they are sharded
    position_ids = torch.arange(SEQ_LEN, device=device).repeat(ROWS, 1)
    buffers = [input_ids, position_ids, labels]
    num_labels = ROWS * (SEQ_LEN - 1) * (world_size // cp)  # of all ranks
    with ringtile.context_parallel(
        mesh["cp"],
        buffers=buffers,
        buffer_seq_dims=[1, 1, 1],
        no_restore_buffers=set(buffers),
        layout=config.layout,
        scheme=config.context_parallel_scheme,
    ):
        loss = loss_of(*buffers) / num_labels
        (loss * world_size).backward()  # DDP averages gradients; we need their sum
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    losses.append(total.item())
    if dist.get_rank() == 0:
        print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)
