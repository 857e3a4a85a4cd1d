"""Every kernel on the GPU against float64, on random and on adversarial inputs.

Shape letters: B batch, S tokens, H query heads, G kv heads, D head dim, Dv value head dim, T tokens, F, V columns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import ringtile
import torch
import torch.nn.functional as F
from accuracy import assert_not_less_exact, assert_tensor_within_ulp
from device import DEVICE, ON_GPU, attention
from oracle import dense_gradients
from ringtile import IntervalMask, Layout, RefusedError, ops
from strategies import dense
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(DEVICE, dtype)


def assert_near(got: Tensor, expected: Tensor, bound: Tensor) -> None:
    """|got - expected| <= bound, number by number; equal infinities pass."""
    error = torch.where(got.double() == expected, 0.0, (got.double() - expected).abs())
    assert bool((error <= bound).all()), float((error - bound).max())


# ---- sharding -----------------------------------------------------------------------------------


@pytest.mark.in_torch_too
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_small_shard_and_unshard_are_index_select(dtype: torch.dtype, dim: int) -> None:
    runs = [(1, 2, 3, 4), (20, 1, 0, 3)]  # positions 20, 21, 22, 1, 3, 5, 7
    index = torch.tensor([20, 21, 22, 1, 3, 5, 7], device=DEVICE)
    for shape in ((23, 23, 23), (23, 23, 32)):
        x = normal(*shape).to(dtype)
        for view in (x, x.transpose(0, 1), x[..., 1:] if dim < 2 else x[1:]):
            if view.size(dim) != 23:
                continue
            local = ops.shard_seq(view, runs, dim)
            assert torch.equal(local, view.index_select(dim, index))
            full = torch.zeros_like(view)
            ops.rows_unpack_([full], ops.runs_tensor(runs), dim, [local])
            expected = torch.zeros_like(view).index_copy_(dim, index, local)
            assert torch.equal(full, expected)


# ---- GLU ----------------------------------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@pytest.mark.in_torch_too
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("num_cols", "scale"), [(1001, 1.0), (1024, 30.0)])
def test_small_glu_is_the_formula(kind: str, dtype: torch.dtype, num_cols: int, scale: float) -> None:
    """Bound: one rounding to dtype, some 30 roundings of arithmetic in the terms of act and act', which are at most
    1 + |x|, and x^2 times the error of an exponent."""
    gate, up, dprod = (normal(7, num_cols, dtype=dtype, scale=scale if i == 0 else 1.0, seed=i) for i in range(3))
    x = gate.double().requires_grad_()
    act = ACTIVATIONS[kind](x)
    (slope,) = torch.autograd.grad(act.sum(), x)
    act, u, dy, x = act.detach(), up.double(), dprod.double(), x.detach()
    prod = ops.glu_fwd(gate, up, ops.GLU_KINDS[kind])
    ops.glu_bwd_(gate, up, dprod, ops.GLU_KINDS[kind])
    rounding, eps = torch.finfo(dtype).eps / 2, torch.finfo(ops.state_dtype(dtype)).eps
    for got, want, factor in (
        (prod, act * u, u),
        (dprod, act * u, u),
        (up, act * dy, dy),
        (gate, slope * dy * u, dy * u),
    ):
        size = 1 + x.abs() + torch.where(x.abs() < 12, x * x, 0.0)
        assert_near(got, want, rounding * want.abs() + 30 * eps * size * factor.abs() + torch.finfo(dtype).tiny)


# ---- cross entropy ------------------------------------------------------------------------------


@pytest.mark.in_torch_too
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("vocab_size", [97, 32000])
@pytest.mark.parametrize("options", [(0.0, 0.0, 0.0), (0.1, 30.0, 1e-3)])
def test_small_cross_entropy_is_the_formula(
    dtype: torch.dtype, vocab_size: int, options: tuple[float, float, float]
) -> None:
    """Bound: fewer than 200 roundings: of x' (|x'| <= 60), of an exp and a quotient, and of sums of 8 numbers."""
    smoothing, softcap, z_loss = options
    logits = normal(6, vocab_size, dtype=dtype, scale=8.0)
    logits[1, 5] = 50.0  # has nearly all of the probability
    logits[2, 7:] = -torch.inf
    labels = torch.tensor([3, 5, 2, -100, 96, 0], device=DEVICE)
    x = logits.double().requires_grad_()
    capped = softcap * torch.tanh(x / softcap) if softcap else x
    lse = capped.logsumexp(-1)
    keep = labels != -100
    picked = capped.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    want = (1 - smoothing) * (lse - picked) + z_loss * lse**2
    if smoothing:
        want = want + smoothing * (lse - capped.mean(-1))
    (gradient,) = torch.autograd.grad(want[keep].sum(), x)
    gradient = gradient.nan_to_num()  # a logit of -inf has probability 0
    state = ops.state_dtype(dtype)
    loss, got_lse = (torch.full((6,), 7.0, dtype=state, device=DEVICE) for _ in range(2))
    ops.cross_entropy_fwd_bwd_(logits, labels, loss, got_lse, -100, smoothing, softcap, z_loss, True)
    error = 200 * torch.finfo(state).eps
    zero = torch.zeros((), dtype=torch.float64, device=DEVICE)
    assert_near(loss, torch.where(keep, want.detach(), zero), error * (1 + want.detach().abs()))
    assert_near(got_lse, torch.where(keep, lse.detach(), zero), error * (1 + lse.detach().abs()))
    is_label = F.one_hot(labels.clamp(min=0), vocab_size)  # there a probability near 1 cancels with 1
    bound = torch.finfo(dtype).eps / 2 * gradient.abs() + error * (gradient.abs() + 1 / vocab_size + is_label)
    assert_near(logits, torch.where(keep[:, None], gradient, zero), bound + torch.finfo(dtype).tiny)


@pytest.mark.in_torch_too
def test_small_bad_label_is_nan_on_a_gpu_and_refused_on_a_cpu() -> None:
    logits, labels = normal(2, 8), torch.tensor([8, 0], device=DEVICE)
    loss, lse = torch.zeros(2, device=DEVICE), torch.zeros(2, device=DEVICE)
    if DEVICE.type == "cpu":
        with pytest.raises(RuntimeError, match="label"):
            ops.cross_entropy_fwd_bwd_(logits, labels, loss, lse, -100, 0.0, 0.0, 0.0, True)
        return
    ops.cross_entropy_fwd_bwd_(logits, labels, loss, lse, -100, 0.0, 0.0, 0.0, True)
    assert torch.equal(loss.isnan().cpu(), torch.tensor([True, False]))
    assert torch.equal(logits.isnan().all(1).cpu(), torch.tensor([True, False]))


# ---- attention ----------------------------------------------------------------------------------


class Problem(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def problem(
    dtype: torch.dtype, head_dim: int, v_head_dim: int, num_kv_heads: int = 4, seq_len: int = 256, scale: float = 1.0
) -> Problem:
    """B 2, H 4. scale multiplies q, and so the scores."""
    sizes = ((4, head_dim, scale), (num_kv_heads, head_dim, 1.0), (num_kv_heads, v_head_dim, 1.0), (4, v_head_dim, 1.0))
    return Problem(
        *(normal(2, seq_len, heads, dim, dtype=dtype, scale=s, seed=i) for i, (heads, dim, s) in enumerate(sizes))
    )


RESULTS = ("out", "dq", "dk", "dv")


def ours(p: Problem, mask: IntervalMask) -> list[Tensor]:
    """RESULTS of ringtile."""
    leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
    out = attention(*leaves, mask=mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, p.dout)]


def torchs(p: Problem, mask: IntervalMask) -> list[Tensor]:
    """RESULTS of torch, of contiguous copies: cuDNN, which it prefers on sm_90, is not to be handed unaligned rows.

    Nor head dims with a mask for which it has no plan, and raises: where each query head has keys of its own, another
    kernel of torch's has them all.
    """
    leaves = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in (p.q, p.k, p.v)]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    attend = dense(mask).to(DEVICE)[:, None]
    gqa = q.size(1) != k.size(1)
    masked = sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if DEVICE.type == "cuda" and not gqa else nullcontext()
    try:
        with masked:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=attend, enable_gqa=gqa).transpose(1, 2)
            return [out.detach(), *torch.autograd.grad(out, leaves, p.dout.contiguous())]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        pytest.skip(f"torch has nothing to compare with: {error}")


def assert_not_less_exact_than_torch(
    p: Problem, mask: IntervalMask, results: list[Tensor], factor: float = 1.0
) -> None:
    """Check the accuracy rule (tests/accuracy.py) of RESULTS. factor: of the mean square error."""
    exact = dense_gradients(p.q, p.k, p.v, dense(mask).to(DEVICE), p.dout)
    for name, mine, theirs in zip(RESULTS, results, torchs(p, mask), strict=True):
        assert_not_less_exact(mine, theirs, getattr(exact, name), name, factor)


S = 256
MASKS = {
    "full": IntervalMask.full(S),
    "causal": IntervalMask.causal(S),
    "documents": IntervalMask.documents([100, 1, 90, 65]),
    "window": IntervalMask.sliding_window(S, 70),
    "prefix": IntervalMask.prefix_lm(S, 33),
    "tree": IntervalMask.tree([-1, 0, 1, 1, 0, -1], [70, 40, 20, 40, 66, 20]),
}
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", DIMS if DEVICE.type == "cuda" else [(64, 64)])
def test_attention_obeys_the_accuracy_rule(dtype: torch.dtype, mask: str, dims: tuple[int, int]) -> None:
    p = problem(dtype, *dims)
    assert_not_less_exact_than_torch(p, MASKS[mask], ours(p, MASKS[mask]))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_attention_with_few_kv_heads_obeys_it(dtype: torch.dtype, num_kv_heads: int) -> None:
    p = problem(dtype, 128, 128, num_kv_heads)
    assert_not_less_exact_than_torch(p, MASKS["causal"], ours(p, MASKS["causal"]))


@pytest.mark.parametrize("dtype", FLOATS[1:])
@pytest.mark.parametrize("mask", ["causal", "window", "tree"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_over_many_tiles_obeys_it(dtype: torch.dtype, mask: str, head_dim: int) -> None:
    """More tiles of keys than any kernel has stages, and a partial last tile. On a CPU it is shorter."""
    seq_len = 1090 if DEVICE.type == "cuda" else 190
    p = problem(dtype, head_dim, head_dim, num_kv_heads=2, seq_len=seq_len)
    branch = 2 * seq_len // 7  # a branch hides whole tiles from the next one
    masks = {
        "causal": IntervalMask.causal(seq_len),
        "window": IntervalMask.sliding_window(seq_len, 7 * seq_len // 11),
        "tree": IntervalMask.shared_prefix(seq_len - 3 * branch, [branch] * 3),
    }
    assert_not_less_exact_than_torch(p, masks[mask], ours(p, masks[mask]))


@pytest.mark.parametrize("dtype", FLOATS[1:])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 40)])
def test_attention_of_unaligned_rows_obeys_it(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    """On sm_90 the sm_80 kernel takes unaligned rows and, backward, head dims above 128; the sm_90a kernel the rest."""
    p = problem(dtype, *dims)
    odd = Problem(*(F.pad(x, (0, 1))[..., : x.size(-1)] for x in p))
    assert_not_less_exact_than_torch(odd, MASKS["causal"], ours(odd, MASKS["causal"]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_attention_with_large_scores_is_finite_and_right(dtype: torch.dtype) -> None:
    """Scores in the hundreds: nearly all weight on one key, exponentials that underflow."""
    p, mask = problem(dtype, 64, 64, scale=30.0), MASKS["causal"]
    results = ours(p, mask)
    assert all(bool(mine.isfinite().all()) for mine in results)
    assert_not_less_exact_than_torch(p, mask, results)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seq_len", [1, 63, 65, 130])
def test_small_attention_of_any_length(dtype: torch.dtype, seq_len: int) -> None:
    """Partial tiles. Bound: a hundred roundings of numbers below 10 to the dtype of the weights."""
    p, mask = problem(dtype, 64, 64, seq_len=seq_len), IntervalMask.causal(seq_len)
    exact = dense_gradients(p.q, p.k, p.v, dense(mask).to(DEVICE), p.dout)
    for mine, right in zip(ours(p, mask), (exact.out, *exact[2:]), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=0, atol=10 * 100**0.5 * torch.finfo(dtype).eps)


# In the 16-bit GPU kernels a non-finite number spoils rows of a partly masked tile (docs/design/cuda.md).
SILENCING = torch.float32 if DEVICE.type == "cuda" else torch.bfloat16


def test_small_poison_stays_in_its_document() -> None:
    p, mask = problem(SILENCING, 64, 64, seq_len=130), IntervalMask.documents([50, 40, 40])
    clean = ours(p, mask)
    others = torch.tensor([*range(50), *range(90, 130)], device=DEVICE)
    for poison in (torch.nan, torch.inf):
        bad = Problem(*(x.clone() for x in p))
        for x in bad:
            x[:, 60, :, 3] = poison
        for name, mine, before in zip(RESULTS, ours(bad, mask), clean, strict=True):
            whole = before[:, others] if name == "out" else before
            assert_tensor_within_ulp(name, mine[:, others], before[:, others], 3, SILENCING, whole)
            assert not bool(mine[:, 60].isfinite().all())


def test_small_queries_without_keys_give_zeros() -> None:
    p, mask = (
        problem(SILENCING, 64, 64, seq_len=70),
        IntervalMask.from_padding(torch.tensor([[0] * 9 + [1] * 61] * 2)),
    )
    for x in p:
        x[:, :9] = torch.nan
    for mine in ours(p, mask):
        assert bool((mine[:, :9] == 0).all())
        assert bool(mine.isfinite().all())


@pytest.mark.in_torch_too
@pytest.mark.parametrize("dtype", [torch.float64, *FLOATS])
@pytest.mark.parametrize("v_head_dim", [17, 64, 100, 128, 256])
def test_small_delta_is_the_formula(dtype: torch.dtype, v_head_dim: int) -> None:
    """Bound: one rounding per product, and two of the result."""
    dout, out = (normal(2, 70, 3, v_head_dim, dtype=dtype, seed=i) for i in range(2))
    dlse = normal(2, 3, 70, dtype=torch.float64, seed=2)
    for gradient in (dout, dout[:, :, :1].expand_as(dout), F.pad(dout, (1, 0))[..., 1:]):
        terms = (gradient.double() * out.double()).transpose(1, 2)
        exact = terms.sum(-1) - dlse
        error = torch.finfo(ops.state_dtype(dtype)).eps * (v_head_dim * terms.abs().sum(-1) + 2 * exact.abs())
        assert_near(ops.attn_delta(gradient, out, dlse), exact, error)


@pytest.mark.in_torch_too
@pytest.mark.parametrize("dtype", [torch.float64, *FLOATS])
@pytest.mark.parametrize("v_head_dim", [17, 64, 128])
def test_small_merge_is_the_formula(dtype: torch.dtype, v_head_dim: int) -> None:
    """Bound: three roundings of numbers as large as both, and one to the dtype."""
    part, out = normal(2, 70, 3, v_head_dim, dtype=dtype), normal(2, 99, 3, v_head_dim, dtype=torch.float64, seed=1)
    part_lse, lse = (normal(2, 3, n, dtype=torch.float64, seed=2) for n in (70, 99))
    state = ops.state_dtype(dtype)
    out, part_lse = out.to(state), part_lse.to(state)
    merged, merged_lse, rounded = out.clone(), lse.clone(), torch.zeros_like(out, dtype=dtype)
    ops.attn_merge_(part, part_lse, merged, lse.clone(), False, 20)
    ops.attn_merge_(part, part_lse, out.clone(), merged_lse, False, 20, None, rounded)
    share = torch.sigmoid(part_lse.double() - lse[:, :, 20:90]).mT[..., None]
    exact = out[:, 20:90].double().lerp(part.double(), share)
    error = 3 * torch.finfo(state).eps * (part.double().abs() + out[:, 20:90].double().abs())
    assert_near(merged[:, 20:90], exact, error)
    assert_near(rounded[:, 20:90], exact, error + torch.finfo(dtype).eps / 2 * exact.abs())
    assert torch.equal(merged[:, :20], out[:, :20])
    torch.testing.assert_close(merged_lse[:, :, 20:90], torch.logaddexp(part_lse.double(), lse[:, :, 20:90]))


# ---- recurrences --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["causal_conv1d", "gated_delta_rule", "ssd"])
def test_small_recurrences_are_those_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    """On a GPU flash-linear-attention computes them, or nobody. Compares norms with the CPU's in float64."""
    shapes = {
        "causal_conv1d": ((1, 130, 24), (24, 4)),  # x, weight
        "gated_delta_rule": (*[(1, 130, 2, 16)] * 3, (1, 130, 2), (1, 130, 2)),  # q, k, v, g, beta
        "ssd": ((1, 130, 2, 16), (1, 130, 2), (2,), *[(1, 130, 1, 16)] * 2),  # x, dt, A, B, C
    }[name]
    given = [normal(*shape, dtype=dtype, scale=0.25, seed=i) for i, shape in enumerate(shapes)]
    for i in {"gated_delta_rule": (3,), "ssd": (2,)}.get(name, ()):
        given[i] = -given[i].abs()  # logs of decays
    mask, layout = IntervalMask.documents([50, 80]), Layout.contiguous(130, 1)
    results = []
    for tensors in ([x.cpu().double() for x in given], given):
        leaves = [x.requires_grad_() for x in tensors]
        try:
            out = getattr(ringtile, name)(*leaves, mask=mask, layout=layout)
        except RefusedError as error:
            pytest.skip(str(error))
        results.append([out.detach(), *torch.autograd.grad(out.double().square().sum(), leaves)])
    bound = 100 * torch.finfo(torch.float32).eps + 2 * torch.finfo(dtype).eps
    for expected, got in zip(*results, strict=True):
        assert (got.cpu().double() - expected).norm() <= bound * expected.norm()


# ---- determinism, streams, graphs ---------------------------------------------------------------


def test_the_same_inputs_give_the_same_bits() -> None:
    p = problem(torch.bfloat16, 128, 128, num_kv_heads=1)
    first = ours(p, MASKS["causal"])
    for _ in range(5):
        assert all(torch.equal(x, y) for x, y in zip(ours(p, MASKS["causal"]), first, strict=True))


@ON_GPU
@pytest.mark.parametrize(
    "mask", [IntervalMask.causal(4096), IntervalMask.full(4096), IntervalMask.sliding_window(4096, 500)]
)
@pytest.mark.parametrize("dims", DIMS)
def test_semaphores_give_the_same_bits_however_busy_the_device_is(dims: tuple[int, int], mask: IntervalMask) -> None:
    """64 tiles of keys add to each dq while matrix products on another stream occupy multiprocessors."""
    p, other = problem(torch.bfloat16, *dims, num_kv_heads=2, seq_len=4096), torch.cuda.Stream()
    first, x = ours(p, mask), normal(2048, 2048, dtype=torch.bfloat16)
    for _ in range(5):
        with torch.cuda.stream(other):
            for _ in range(20):
                x @ x
        assert all(torch.equal(x, y) for x, y in zip(ours(p, mask), first, strict=True))


@ON_GPU
def test_nothing_waits_for_the_device() -> None:
    p = problem(torch.bfloat16, 64, 64)
    first = ours(p, MASKS["causal"])  # the mask is copied to the device once
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = ours(p, MASKS["causal"])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))


@ON_GPU
def test_a_call_can_be_captured_in_a_graph() -> None:
    p = problem(torch.bfloat16, 64, 64)
    expected = ours(p, MASKS["causal"])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ours(p, MASKS["causal"])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = ours(p, MASKS["causal"])
    for _ in range(3):
        for x in captured:
            x.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(captured, expected, strict=True))


@ON_GPU
def test_calls_on_several_streams_give_the_same_bits() -> None:
    p, streams = (
        problem(torch.bfloat16, 128, 128, num_kv_heads=2, seq_len=1090),
        [torch.cuda.Stream() for _ in range(6)],
    )
    mask = IntervalMask.causal(1090)
    expected, found = ours(p, mask), []
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            found.append(ours(p, mask))
    torch.cuda.synchronize()
    for results in found:
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def forget_masks() -> list[Tensor]:
    """Has the sequences of all masks evicted by others, and their memory on the GPU, if it is free, overwritten."""
    p = problem(torch.bfloat16, 64, 64)
    for window in range(1, 40):
        attention(p.q, p.k, p.v, mask=IntervalMask.sliding_window(S, window))
    return [torch.full((1, S), S, dtype=torch.int32, device=DEVICE) for _ in range(400)]


@ON_GPU
def test_a_graph_outlives_the_sequence_that_it_was_captured_with() -> None:
    p, mask, graph = problem(torch.bfloat16, 64, 64), IntervalMask.sliding_window(S, 77), torch.cuda.CUDAGraph()
    expected = attention(p.q, p.k, p.v, mask=mask)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = attention(p.q, p.k, p.v, mask=mask)
    junk = forget_masks()
    for _ in range(3):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, expected)
    assert len(junk) == 400


@ON_GPU
def test_a_mask_may_go_while_another_stream_is_yet_to_read_it() -> None:
    p, mask, other = problem(torch.bfloat16, 64, 64), IntervalMask.sliding_window(S, 78), torch.cuda.Stream()
    expected = ours(p, mask)
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.cuda._sleep(10**9)  # clock cycles
        found = ours(p, mask)
    junk = forget_masks()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert len(junk) == 400


@ON_GPU
def test_a_mask_that_is_first_met_in_a_capture_is_refused_by_name() -> None:
    p, graph = problem(torch.bfloat16, 64, 64), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RefusedError, match="make the same call once before the capture"):
        attention(p.q, p.k, p.v, mask=IntervalMask.sliding_window(S, 79))
