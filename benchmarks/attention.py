"""`python -m benchmarks attention`: ringtile's kernels against torch's attention functions, in one process.

Shape letters: B batch, S tokens, H query heads, G kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from ringtile.attn.attention import ring_attention
from ringtile.attn.call import AttentionKernel
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases import (
    Attend,
    Case,
    Inputs,
    Workload,
    attention_cost,
    check_kernel,
    flops_of,
    make_case,
)
from benchmarks.cases import make_inputs as make_inputs  # a subject's module has it, see measure_each
from benchmarks.compare import Candidate, measure_each, results
from benchmarks.rows import DEVICES, Comparison, Cost, Grid, check_device

MAX_ERROR_SEQ_LEN = 1024  # the float64 result is computed up to this length
WARM_UP_SEQ_LEN = 64


def ringtile_attend(kernel: AttentionKernel, case: Case, device: str = "cpu") -> Attend | None:
    """By ringtile's kernels, or by whom "auto" takes, which on a CPU are the same."""
    if kernel == "auto" and device == "cpu":
        return None
    layout = Layout.contiguous(case.mask.seq_len, 1)
    return lambda q, k, v: ring_attention(q, k, v, mask=case.mask, layout=layout, attention_kernel=kernel)


def torch_attend(case: Case, device: str = "cpu") -> Attend | None:
    """SDPA with is_causal for a mask."""
    is_causal = case.is_causal
    return None if is_causal is None else lambda q, k, v: sdpa(q, k, v, is_causal=is_causal)


def torch_backend_attend(backend: SDPBackend, case: Case, device: str = "cpu") -> Attend | None:
    """SDPA restricted to one of its kernels; CUDA only."""
    plain = torch_attend(case, device)
    if plain is None or device == "cpu":
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return plain(q, k, v)

    return attend


def torch_mask_attend(case: Case, device: str = "cpu") -> Attend:
    """SDPA with a boolean mask, built once and not timed."""
    attend = bool_mask(case.mask).to(device)
    return lambda q, k, v: sdpa(q, k, v, attn_mask=attend)


def torch_per_document_attend(case: Case, device: str = "cpu") -> Attend | None:
    """One causal SDPA per document."""
    documents = case.documents
    if documents is None:
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = []
        for row in range(q.size(0)):
            spans = [slice(begin, end) for of_row, begin, end in documents if of_row == row]
            out = [sdpa(*(x[row : row + 1, span] for x in (q, k, v)), is_causal=True) for span in spans]
            rows.append(F.pad(torch.cat(out, dim=1), (0, 0, 0, 0, 0, q.size(1) - spans[-1].stop)))
        return torch.cat(rows)

    return attend


def flex_attend(case: Case, device: str = "cpu") -> Attend:
    """flex_attention, compiled for this mask and shape; its block mask is built once and not timed."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # slow to import

    begin, end = (x.expand(case.mask.begin.size(0), -1).to(device) for x in (case.mask.begin, case.mask.end))

    def attends(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= begin[row, query]) & (key < end[row, query])

    seq_len = case.mask.seq_len
    block_mask = create_block_mask(attends, begin.size(0), None, seq_len, seq_len, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = compiled(q, k, v, block_mask=block_mask, enable_gqa=q.size(1) != k.size(1))
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    return attend


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """torch's scaled_dot_product_attention on (B, S, H, D) tensors. attn_mask: bool (B or 1, 1, S, S)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.size(1) != k.size(1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, enable_gqa=gqa)
    return out.transpose(1, 2)


def bool_mask(mask: IntervalMask) -> Tensor:
    """bool (B or 1, 1, S, S), [query, key], True = attend."""
    positions = torch.arange(mask.seq_len)
    attend = (positions >= mask.begin[:, :, None]) & (positions < mask.end[:, :, None])
    if mask.key_begin is not None and mask.key_end is not None:
        queries = positions[:, None]
        attend &= (queries >= mask.key_begin[:, None]) & (queries < mask.key_end[:, None])
    return attend[:, None]


class Backend(NamedTuple):
    """A way to compute attention. make(case, device) returns None if it does not support the case there."""

    make: Callable[..., Attend | None]
    backward_on: tuple[str, ...] = DEVICES


BACKENDS = {
    "ringtile": Backend(partial(ringtile_attend, "ringtile")),
    "ringtile_auto": Backend(partial(ringtile_attend, "auto")),
    "torch": Backend(torch_attend),
    "torch_flash": Backend(partial(torch_backend_attend, SDPBackend.FLASH_ATTENTION)),
    "torch_cudnn": Backend(partial(torch_backend_attend, SDPBackend.CUDNN_ATTENTION)),
    "torch_mask": Backend(torch_mask_attend),
    "torch_per_document": Backend(torch_per_document_attend),
    "flex": Backend(flex_attend, backward_on=("cuda",)),
}


# ---- one workload -------------------------------------------------------------------------------


measure = partial(measure_each, "attention")


def cost_of(workload: Workload, inputs: Inputs) -> Cost:
    return attention_cost(workload, make_case(workload.case, workload.seq_len))


def exact_results(workload: Workload, inputs: Inputs) -> tuple[Tensor, ...] | None:
    """out, dq, dk, dv in float64; None beyond MAX_ERROR_SEQ_LEN."""
    if workload.seq_len > MAX_ERROR_SEQ_LEN:
        return None
    case = make_case(workload.case, workload.seq_len)
    return results(attend_candidate(torch_mask_attend(case, workload.device), inputs.double()))


def make_candidate(name: str, workload: Workload, inputs: Inputs) -> Candidate | None:
    """None if the backend does not support the workload."""
    backend = BACKENDS[name]
    attend = backend.make(make_case(workload.case, workload.seq_len), workload.device)
    return None if attend is None else attend_candidate(attend, inputs, workload.device in backend.backward_on)


def attend_candidate(attend: Attend, inputs: Inputs, backward: bool = True) -> Candidate:
    """With a backward, the forward saves what it needs, as in training."""
    q, k, v, dout = inputs if backward else inputs.detached()
    return Candidate(
        lambda: attend(q, k, v), (lambda out: torch.autograd.grad(out, (q, k, v), dout)) if backward else None
    )


def smaller(workload: Workload) -> Workload:
    """A workload that warms a process up."""
    return replace(workload, seq_len=WARM_UP_SEQ_LEN)


# ---- the workloads ------------------------------------------------------------------------------


MEMORY = False  # whether memory is measured by default
GRID: Grid = {
    "case": ("full", "causal", "window-1024", "documents-8", "padding"),
    "dtype": ("float32", "bfloat16"),
    "seq_len": (128, 512, 2048, 4096, 8192),
    "head_dim": (64, 128),
    "num_heads": (8,),
    "num_kv_heads": (8, 2),
    "world_size": (1,),
    "device": ("cpu",),
}


def check(workload: Workload) -> None:
    """ConfigError, InputError: the workload cannot be measured."""
    check_device(workload)
    flops_of(workload, make_case(workload.case, workload.seq_len).mask)
    check_kernel(workload)


def quick_comparisons() -> Iterator[Comparison]:
    """The comparisons quoted in the documentation."""
    for head_dim in (128, 64):
        yield Comparison(Workload("full", "float32", 2048, head_dim), ("ringtile", "torch"))
        yield Comparison(Workload("causal", "float32", 4096, head_dim), ("ringtile", "torch"), memory=head_dim == 128)
    yield Comparison(Workload("causal", "bfloat16", 4096, 128), ("ringtile", "torch"))
    yield Comparison(Workload("causal", "float32", 4096, 128, num_kv_heads=2), ("ringtile", "torch"))
    for dtype in ("float32", "bfloat16"):
        yield Comparison(Workload("causal", dtype, 512, 128), ("ringtile", "torch"))
        for case in ("full", "causal", "documents-2", "padding"):
            yield Comparison(Workload(case, dtype, 128, 128), ("ringtile", "torch", "torch_mask", "torch_per_document"))
    documents = ("ringtile", "torch_mask", "torch_per_document", "flex")
    yield Comparison(Workload("documents-8", "float32", 8192, 128), documents, memory=True)
    yield Comparison(Workload("window-1024", "float32", 8192, 64), ("ringtile", "torch_mask"))
    gpu = partial(Workload, dtype="bfloat16", num_heads=16, num_kv_heads=16, device="cuda")
    on_gpu = ("ringtile", "ringtile_auto", "torch_flash", "torch_cudnn")
    for head_dim in (128, 64):
        for case in ("causal", "full"):
            yield Comparison(gpu(case, seq_len=8192, head_dim=head_dim), on_gpu)
        yield Comparison(gpu("causal", seq_len=1024, head_dim=head_dim), on_gpu)
    yield Comparison(gpu("causal", seq_len=8192, head_dim=128, num_kv_heads=4), on_gpu)
    for case in ("causal", "full"):  # the blocks of a ring of 8 ranks over 131,072 tokens, with the heads of Qwen3-8B
        yield Comparison(gpu(case, seq_len=16384, head_dim=128, num_heads=32, num_kv_heads=8), on_gpu)
    for case in ("documents-8", "window-1024"):
        yield Comparison(
            gpu(case, seq_len=16384, head_dim=128), ("ringtile", "ringtile_auto", "torch_per_document", "flex")
        )
