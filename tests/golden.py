"""Hold a redesign of the core to what it gave before: drawn calls of attention and recurrences, bit for bit.

    python tests/golden.py record FILE [--calls 2000]    before the first change
    python tests/golden.py check FILE                    after each: 1 if anything differs

FILE has a line of JSON for each call: the call itself, in numbers, and what each rank got: digests of the bits of its
outputs and gradients, bytes and messages sent, or the text of the refusal. Bits depend on compiler and instruction set,
so that a file is checked where it was made; RINGTILE_CPU_ISA chooses among the sets of one CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ringtile
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from ringtile import AttentionDropout, IntervalMask, Layout, LoopbackWorld, ShardedSequence, ops, ring_attention
from ringtile.transport.loopback import LoopbackGroup, LoopbackTransport
from strategies import any_masks, document_lengths, forests, layouts
from torch import Tensor

Call = dict[str, Any]
DTYPES = {"float64": 4, "float32": 3, "bfloat16": 2, "float16": 1}  # and how often
RECURRENCES = ("causal_conv1d", "gated_delta_rule", "kimi_delta", "ssd", "selective_scan")

# What is wrong with a call of attention: of all ranks, or of the last one alone.
WRONG: dict[str, Callable[[Call], None]] = {
    "heads": lambda call: call.update(num_heads=call["num_heads"] + 1, num_kv_heads=2),
    "head_dim": lambda call: call.update(head_dim=513),
    "no head_dim": lambda call: call.update(head_dim=0),
    "dtype of k": lambda call: call.update(dtype_of_k="int32"),
    "dims of v": lambda call: call.update(drops_a_dim=True),
    "scale": lambda call: call.update(scale=float("nan")),
    "softcap": lambda call: call.update(softcap=-1.0),
    "another scale": lambda call: call.update(scale=0.125),
    "another head_dim": lambda call: call.update(head_dim=call["head_dim"] + 1),
    "probability": lambda call: call.update(dropout=1.5),
    "seed": lambda call: call.update(dropout=0.5, dropout_seed=-1),
    "sinks": lambda call: call.update(sinks=True, num_sinks=call["num_heads"] + 3),
    "tokens": lambda call: call.update(more_tokens=1),
    "batch": lambda call: call.update(batch=3),
    "kernel": lambda call: call.update(kernel="flash"),
    "scheme": lambda call: call.update(scheme="usp:3"),
    "no scheme": lambda call: call.update(scheme="rings"),
    "length of the mask": lambda call: call.update(mask=[[[0] * 3], [[3] * 3]]),
}


@st.composite
def attention_calls(draw: st.DrawFn) -> Call:
    world_size = draw(st.integers(1, 4))
    seq_len, num_kv_heads = draw(st.integers(world_size, 40)), draw(st.integers(1, 4))
    batch, schemes = draw(st.integers(1, 2)), ["ring", "ring", "all_gather", "ulysses", "auto", "usp"]
    schemes += [f"usp:{size}" for size in (1, 2, 4) if world_size % size == 0]
    call = {
        "op": "ring_attention",
        **{"world_size": world_size, "seq_len": seq_len, "batch": batch, "num_kv_heads": num_kv_heads},
        "num_heads": num_kv_heads * draw(st.integers(1, 3)),
        "head_dim": draw(st.sampled_from([1, 8, 16, 24, 64])),
        "v_head_dim": draw(st.sampled_from([1, 8, 16, 40])),
        "dtype": draw(st.sampled_from([name for name, times in DTYPES.items() for _ in range(times)])),
        "mask": [x.tolist() for x in draw(any_masks(batch, seq_len)).tensors if x is not None],
        "layout": runs_of(draw(layouts(seq_len, world_size))),
        "scheme": draw(st.sampled_from(schemes)),
        "scale": draw(st.sampled_from([None, 0.3])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 2.0])),
        "sinks": draw(st.sampled_from([False, False, True])),
        "dropout": draw(st.sampled_from([0.0, 0.0, 0.0, 0.5, 1.0])),
        "return_lse": draw(st.booleans()),
        "kernel": draw(st.sampled_from(["auto", "auto", "auto", "ringtile", "aten"])),
        "transposed": draw(st.booleans()),
        "numbers": draw(st.integers(0, 1000)),
    }
    if call["kernel"] == "aten" and draw(st.integers(0, 7)):  # else refused
        call |= {"softcap": 0.0, "dropout": 0.0, "v_head_dim": call["head_dim"]}
    if draw(st.integers(0, 7)) == 0:
        call["wrong"] = draw(st.sampled_from(sorted(WRONG)))
        call["wrong_on_all"] = draw(st.booleans())
    return call


@st.composite
def recurrent_calls(draw: st.DrawFn) -> Call:
    world_size = draw(st.integers(1, 4))
    seq_len, batch = draw(st.integers(4 * world_size, 64)), draw(st.integers(1, 2))
    if draw(st.integers(0, 3)) == 0:
        rows = [draw(forests(seq_len)) for _ in range(batch)]
        mask = IntervalMask.tree([row[0] for row in rows], [row[1] for row in rows])
    else:
        mask = IntervalMask.documents([draw(document_lengths(seq_len)) for _ in range(batch)])
    groups = draw(st.integers(1, 3))
    layout = draw(layouts(seq_len, world_size))
    if draw(st.integers(0, 7)) and int(layout.tensor[:, 2].max()) > 1:  # which only the scheme "heads" takes
        layout = Layout.contiguous(seq_len, world_size)
    return {
        "op": draw(st.sampled_from(RECURRENCES)),
        **{"world_size": world_size, "seq_len": seq_len, "batch": batch, "groups": groups},
        "heads": groups * draw(st.integers(1, 3)),
        "key_dim": draw(st.sampled_from([1, 4, 16])),
        "value_dim": draw(st.sampled_from([1, 5, 16])),
        "width": draw(st.integers(2, 8)),
        "dtype": draw(st.sampled_from([name for name, times in DTYPES.items() for _ in range(times)])),
        "mask": [x.tolist() for x in mask.tensors if x is not None],
        "layout": runs_of(layout),
        "scheme": draw(st.sampled_from([None, "states", "heads"])),
        "numbers": draw(st.integers(0, 1000)),
    }


def drawn(strategy: st.SearchStrategy[Call], number: int) -> list[Call]:
    """Return so many calls, the same each time for one version of hypothesis."""
    calls: list[Call] = []

    @seed(0)
    @settings(
        max_examples=number,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(call: Call) -> None:
        calls.append(call)

    collect()
    return calls


def runs_of(layout: Layout) -> list[list[list[int]]]:
    runs = layout.tensor.tolist()
    return [[run[1:] for run in runs if run[0] == rank] for rank in range(layout.world_size)]


# ---- one call ------------------------------------------------------------------------------------


def results(call: Call) -> list[dict[str, Any]]:
    """What each rank gets."""
    messages = [0] * call["world_size"]
    start, lock = LoopbackTransport._start, threading.Lock()

    def counted(self: LoopbackTransport, tensor: Tensor, peer: int, *, outgoing: bool) -> Any:
        with lock:
            messages[self.rank] += outgoing
        return start(self, tensor, peer, outgoing=outgoing)

    def on_rank(group: LoopbackGroup) -> dict[str, Any]:
        rank = group.transport.rank
        own = dict(call)
        if "wrong" in call and (call["wrong_on_all"] or rank == call["world_size"] - 1):
            WRONG[call["wrong"]](own)
        try:
            tensors = (attention if call["op"] == "ring_attention" else recurrence)(own, group)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        found = {name: digest(x) for name, x in tensors.items()}
        return {**found, "bytes": group.transport.bytes_sent, "messages": messages[rank]}

    LoopbackTransport._start = counted  # type: ignore[method-assign]
    try:
        return LoopbackWorld(call["world_size"]).run(on_rank)
    finally:
        LoopbackTransport._start = start  # type: ignore[method-assign]


def digest(x: Tensor | None) -> str:
    if x is None:
        return "none"
    kind = f"{x.dtype} {tuple(x.shape)}"
    bits = x.detach().reshape(-1).view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)
    return hashlib.sha256(kind.encode() + bits.numpy().tobytes()).hexdigest()[:16]


def normal(numbers: int, rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(numbers * 16 + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def sequence_of(call: Call, group: LoopbackGroup, scheme: str) -> ShardedSequence:
    mask = IntervalMask(*(torch.tensor(x, dtype=torch.int32) for x in call["mask"]))
    layout = Layout.from_runs([[tuple(run) for run in of_rank] for of_rank in call["layout"]])
    return ShardedSequence(mask, layout, group, scheme=scheme)


def attention(call: Call, group: LoopbackGroup) -> dict[str, Tensor | None]:
    rank, dtype = group.transport.rank, getattr(torch, call["dtype"])
    layout = Layout.from_runs([[tuple(run) for run in of_rank] for of_rank in call["layout"]])
    tokens = layout.local_len(rank) + call.get("more_tokens", 0)
    sizes = [("num_heads", "head_dim"), ("num_kv_heads", "head_dim"), ("num_kv_heads", "v_head_dim")]
    leaves = []
    for i, (heads, dim) in enumerate(sizes):
        shape = call["batch"], call[heads], tokens, call[dim]
        x = normal(call["numbers"] + i, rank, *shape).to(dtype).transpose(1, 2)
        leaves.append((x if call["transposed"] else x.contiguous()).requires_grad_())
    q, k, v = leaves
    if "dtype_of_k" in call:
        k = k.detach().to(getattr(torch, call["dtype_of_k"]))
    if "drops_a_dim" in call:
        v = v[0]
    sinks = dropout = None
    if call["sinks"]:
        sinks = normal(7, 0, call.get("num_sinks", call["num_heads"])).float().requires_grad_()
    if call["dropout"]:
        rows = torch.arange(3, 3 + call["batch"])
        dropout = AttentionDropout(call["dropout"], rows, call.get("dropout_seed", call["numbers"]), 5, 2)
    sequence = sequence_of(call, group, call["scheme"])
    options = {"scale": call["scale"], "softcap": call["softcap"], "sinks": sinks, "dropout": dropout}
    out, lse = (
        ring_attention(q, k, v, sequence, **options, attention_kernel=call["kernel"], return_lse=True)
        if call["return_lse"]
        else (ring_attention(q, k, v, sequence, **options, attention_kernel=call["kernel"]), None)
    )
    outputs = [x for x in (out, lse) if x is not None]
    cotangents = [normal(call["numbers"] + 8, rank, *x.shape).to(x.dtype) for x in outputs]
    given = [x for x in (q, k, v, sinks) if x is not None]
    gradients = torch.autograd.grad(outputs, given, cotangents)
    return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv", "dsinks"), gradients, strict=False))}


def recurrence(call: Call, group: LoopbackGroup) -> dict[str, Tensor | None]:
    rank, dtype = group.transport.rank, getattr(torch, call["dtype"])
    heads, groups, key, value = (call[name] for name in ("heads", "groups", "key_dim", "value_dim"))
    op = {"kimi_delta": "gated_delta_rule"}.get(call["op"], call["op"])
    per_token: dict[str, tuple[int, ...]] = {
        "causal_conv1d": {"x": (heads,)},
        "gated_delta_rule": {
            "q": (groups, key),
            "k": (groups, key),
            "v": (heads, value),
            "g": (heads,),
            "beta": (heads,),
        },
        "kimi_delta": {
            "q": (groups, key),
            "k": (groups, key),
            "v": (heads, value),
            "g": (heads, key),
            "beta": (heads,),
        },
        "ssd": {"x": (heads, value), "dt": (heads,), "B": (groups, key), "C": (groups, key)},
        "selective_scan": {"x": (heads,), "dt": (heads,), "B": (key,), "C": (key,)},
    }[call["op"]]
    shared: dict[str, tuple[int, ...]] = {
        "causal_conv1d": {"weight": (heads, call["width"]), "bias": (heads,)},
        "ssd": {"A": (heads,), "D": (heads,)},
        "selective_scan": {"A": (heads, key), "D": (heads,)},
    }.get(call["op"], {})
    sequence = sequence_of(call, group, "ring")
    tensors = {}
    for i, (name, shape) in enumerate({**per_token, **shared}.items()):
        size = (call["batch"], sequence.local_len, *shape) if name in per_token else shape
        x = normal(call["numbers"] + i, rank if name in per_token else 0, *size)
        if name in ("g", "A"):
            x = -x.abs()
        elif name in ("dt", "beta"):
            x = x.sigmoid()
        elif name == "k":
            x = torch.nn.functional.normalize(x, dim=-1)
        tensors[name] = x.to(dtype).requires_grad_()
    options = {} if op == "causal_conv1d" else {"scheme": call["scheme"]}
    out = getattr(ringtile, op)(sequence=sequence, **tensors, **options)
    gradients = torch.autograd.grad(
        out, list(tensors.values()), normal(call["numbers"] + 8, rank, *out.shape).to(dtype)
    )
    return {"out": out, **{f"d{name}": x for name, x in zip(tensors, gradients, strict=True)}}


# ---- the file ------------------------------------------------------------------------------------


def header() -> dict[str, str]:
    return {"isa": ops.cpu_isa(), "torch": torch.__version__}


def record(path: Path, number: int) -> None:
    calls = drawn(attention_calls(), number * 4 // 5) + drawn(recurrent_calls(), number // 5)
    random.Random(0).shuffle(calls)
    with path.open("w") as file:
        print(json.dumps(header()), file=file)
        for call in calls:
            print(json.dumps({"call": call, "ranks": results(call)}), file=file)
    print(f"{len(calls)} calls on {header()['isa']}")


def differences(path: Path) -> Iterator[str]:
    with path.open() as file:
        made = json.loads(next(file))
        if made != header():
            raise SystemExit(f"{path} was made with {made}; here is {header()}")
        for number, line in enumerate(file):
            expected = json.loads(line)
            for rank, (old, new) in enumerate(zip(expected["ranks"], results(expected["call"]), strict=True)):
                changed = [
                    f"{name} {old.get(name)} -> {new.get(name)}"
                    for name in {**old, **new}
                    if old.get(name) != new.get(name)
                ]
                if changed:
                    yield f"call {number}, rank {rank}: {'; '.join(changed)}; {describe(expected['call'])}"


def describe(call: Call) -> str:
    return ", ".join(f"{name} {value}" for name, value in call.items() if name not in ("mask", "layout"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--calls", type=int, default=2000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "record":
        record(args.file, args.calls)
        return 0
    found = list(differences(args.file))
    for text in found:
        print(text[:600])
    print(f"{len(found)} differences")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
