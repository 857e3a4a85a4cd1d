"""One tiny forward and backward with the attention kernels of each instruction set: python tests/gpu/smoke.py FILE

One process, oldest instruction set first. Before each kernel FILE says that it has started, and at the end how it went:
a kernel that hangs, or takes the process along, is found there by its name. Where a result is wrong, the log has a map
of the errors, and the result is saved beside FILE. Exits with 1 if one failed.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Callable

import torch
from ringtile import ops
from torch import Tensor

SEQ_LEN, NUM_HEADS, NUM_KV_HEADS = 300, 4, 2  # several tiles, the last of them partial
TILE_ROWS, TILE_COLS = 16, 16  # of a map of errors


def isas() -> list[str]:
    """Of this GPU; without one, the CPU's."""
    if not torch.cuda.is_available():
        return ["the CPU's"]
    return ["sm_80", "sm_90a"] if torch.cuda.get_device_capability() == (9, 0) else ["sm_80"]


def results(head_dim: int, say: Callable[[str], None]) -> dict[str, tuple[Tensor, Tensor]]:
    """Of causal attention in bfloat16: each result, and what it should be.

    Rounded results should be the others, rounded: any error of theirs is of their epilogue alone. say: is told which
    kernel starts.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(head_dim)
    q, k, v, dout = (
        torch.randn(1, SEQ_LEN, heads, head_dim, generator=generator).to(device, torch.bfloat16)
        for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
    )
    end = torch.arange(1, SEQ_LEN + 1, dtype=torch.int32, device=device)[None]
    begin, runs, scale = torch.zeros_like(end), ops.runs_tensor([(0, 1, 0, SEQ_LEN)]), head_dim**-0.5
    block, numbers = (q, k, v, begin, end, runs), (scale, 0.0, True)
    out, rounded_out = (torch.full_like(q, torch.nan, dtype=dtype) for dtype in (torch.float32, q.dtype))
    lse = torch.full((1, NUM_HEADS, SEQ_LEN), torch.nan, dtype=torch.float64, device=device)
    dq, keys = torch.zeros_like(q, dtype=torch.float32), (k, v)
    dk, dv = (torch.full_like(x, torch.nan, dtype=torch.float32) for x in keys)
    rounded = {"rounded_dk": torch.full_like(k, torch.nan), "rounded_dv": torch.full_like(v, torch.nan)}

    def attend(name: str, kernel: Callable[..., None], *arguments: Tensor | float | bool, **rounded: Tensor) -> None:
        say(f"{name}, head dim {head_dim}")
        kernel(*block, *arguments, **rounded)
        if device.type == "cuda":
            torch.cuda.synchronize()

    attend("forward", ops.attn_fwd_, out, lse, *numbers)
    attend("forward with rounded out", ops.attn_fwd_, out.clone(), lse.clone(), *numbers, rounded_out=rounded_out)
    delta = ops.attn_delta(dout, out.to(q.dtype))
    attend("backward", ops.attn_bwd_, dout, lse, delta, dq, dk, dv, *numbers)
    unused = [x.clone() for x in (dq, dk, dv)]
    attend("backward with rounded dk and dv", ops.attn_bwd_, dout, lse, delta, *unused, *numbers, **rounded)

    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    heads = [x.transpose(1, 2).repeat_interleave(NUM_HEADS // x.size(2), dim=1) for x in leaves]
    scores = scale * heads[0] @ heads[1].transpose(2, 3)
    later = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool, device=device).triu(1)
    expected = (scores.masked_fill(later, -torch.inf).softmax(-1) @ heads[2]).transpose(1, 2)
    gradients: tuple[Tensor, ...] = torch.autograd.grad(expected, leaves, dout.float())
    found = {
        "out": (out, expected.detach()),
        "dq": (dq, gradients[0]),
        "dk": (dk, gradients[1]),
        "dv": (dv, gradients[2]),
    }
    for name, got in zip(("out", "dk", "dv"), (rounded_out, *rounded.values()), strict=True):
        found[f"rounded {name}"] = got.float(), found[name][0].to(got.dtype).float()
    return found


def error_map(got: Tensor, right: Tensor) -> str:
    """Of the first head: a line for each tile of rows, a sign for each of columns: . right, x wrong, N not a number."""
    lines = []
    off, size = (got - right)[0, :, 0], right[0, :, 0]
    for row in range(0, off.size(0), TILE_ROWS):
        line = ""
        for col in range(0, off.size(1), TILE_COLS):
            part = (slice(row, row + TILE_ROWS), slice(col, col + TILE_COLS))
            ratio = float(off[part].norm() / size[part].norm())
            line += "N" if ratio != ratio else "x" if ratio > 0.05 else "."
        lines.append(f"rows {row:3}..: {line}")
    return "\n".join(lines)


def try_isa(isa: str, folder: pathlib.Path, say: Callable[[str], None]) -> str:
    """What is wrong, or ok. Bound: half an eps of bfloat16 each for weights, dS and the delta's out, and some room;
    none for the bits of rounded results."""
    if isa.startswith("sm_"):
        os.environ["RINGTILE_CUDA_ISA"] = isa
    bound = 2.5 * torch.finfo(torch.bfloat16).eps
    for head_dim in (64, 128):
        try:
            found = results(head_dim, say)
        except RuntimeError as error:
            return f"head dim {head_dim}: {' '.join(str(error).split())}"
        wrong = []
        for name, (got, right) in found.items():
            error = float((got - right).norm() / right.norm())
            if error <= (0 if name.startswith("rounded") else bound):
                continue
            wrong.append(f"{name} is off by {error:.1e} of its norm")
            print(f"{isa}, head dim {head_dim}, {name}, columns in groups of {TILE_COLS}:\n{error_map(got, right)}")
            torch.save(got.cpu(), folder / f"smoke_{isa.replace(' ', '_')}_{head_dim}_{name.replace(' ', '_')}.pt")
        if wrong:
            return f"head dim {head_dim}: {', '.join(wrong)}, expected at most {bound:.1e}"
    return "ok"


def main(file: pathlib.Path) -> int:
    said: dict[str, str] = {}
    for isa in isas():

        def say(kernel: str, isa: str = isa) -> None:
            said[isa] = f"started the {kernel}, and did not end"
            file.write_text(json.dumps(said))

        # The first question about a device loads the CUDA kernels.
        reason = ops.why_not_on(0) if torch.cuda.is_available() else ""
        said[isa] = reason or try_isa(isa, file.parent, say)
        file.write_text(json.dumps(said))
        print(f"{isa} kernels: {said[isa]}", flush=True)
    return int(any(each != "ok" for each in said.values()))


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
