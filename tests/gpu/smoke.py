"""One tiny forward and backward with the attention kernels of each instruction set: python tests/gpu/smoke.py FILE

One process, oldest instruction set first. Before each one FILE says that it has started, and after it how it went: a
kernel that hangs, or takes the process along, is found there. Exits with 1 if one failed.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys

import torch
from ringtile import ops
from torch import Tensor

SEQ_LEN, NUM_HEADS, NUM_KV_HEADS = 300, 4, 2  # several tiles, the last of them partial


def isas() -> list[str]:
    """Of this GPU; without one, the CPU's."""
    if not torch.cuda.is_available():
        return ["the CPU's"]
    return ["sm_80", "sm_90a"] if torch.cuda.get_device_capability() == (9, 0) else ["sm_80"]


def errors(head_dim: int) -> dict[str, float]:
    """The norm of the error of each result over its norm, of causal attention in bfloat16."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(head_dim)
    q, k, v, dout = (
        torch.randn(1, SEQ_LEN, heads, head_dim, generator=generator).to(device, torch.bfloat16)
        for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
    )
    end = torch.arange(1, SEQ_LEN + 1, dtype=torch.int32, device=device)[None]
    begin, runs, scale = torch.zeros_like(end), ops.runs_tensor([(0, 1, 0, SEQ_LEN)]), head_dim**-0.5
    out = torch.full_like(q, torch.nan, dtype=torch.float32)
    lse = torch.full((1, NUM_HEADS, SEQ_LEN), torch.nan, dtype=torch.float64, device=device)
    ops.attn_fwd_(q, k, v, begin, end, runs, out, lse, scale, 0.0, fresh=True)
    delta = ops.attn_delta(dout, out.to(q.dtype), torch.zeros_like(lse))
    dq = torch.zeros_like(q, dtype=torch.float32)
    dk, dv = (torch.full_like(x, torch.nan, dtype=torch.float32) for x in (k, v))
    ops.attn_bwd_(q, k, v, begin, end, runs, dout, lse, delta, dq, dk, dv, scale, 0.0, fresh=True)

    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    heads = [x.transpose(1, 2).repeat_interleave(NUM_HEADS // x.size(2), dim=1) for x in leaves]
    scores = scale * heads[0] @ heads[1].transpose(2, 3)
    later = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool, device=device).triu(1)
    expected = (scores.masked_fill(later, -torch.inf).softmax(-1) @ heads[2]).transpose(1, 2)
    gradients: tuple[Tensor, ...] = torch.autograd.grad(expected, leaves, dout.float())
    results = {"out": (out, expected.detach()), "dq": (dq, gradients[0]), "dk": (dk, gradients[1])}
    results["dv"] = (dv, gradients[2])
    return {name: float((got - right).norm() / right.norm()) for name, (got, right) in results.items()}


def try_isa(isa: str) -> str:
    """What is wrong, or ok. Bound: half an eps of bfloat16 each for weights, dS and the delta's out, and some room."""
    if isa.startswith("sm_"):
        os.environ["RINGTILE_CUDA_ISA"] = isa
    bound = 2.5 * torch.finfo(torch.bfloat16).eps
    for head_dim in (64, 128):
        try:
            found = errors(head_dim)
        except RuntimeError as error:
            return f"head dim {head_dim}: {' '.join(str(error).split())}"
        if wrong := [
            f"{name} is off by {error:.1e} of its norm" for name, error in found.items() if not error <= bound
        ]:
            return f"head dim {head_dim}: {', '.join(wrong)}, expected at most {bound:.1e}"
    return "ok"


def main(file: pathlib.Path) -> int:
    said: dict[str, str] = {}
    for isa in isas():
        said[isa] = "started, and did not end"
        file.write_text(json.dumps(said))
        said[isa] = try_isa(isa)
        file.write_text(json.dumps(said))
        print(f"{isa} kernels: {said[isa]}", flush=True)
    return int(any(each != "ok" for each in said.values()))


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
