"""The torch operations that stand in for kernels: within the kernels' bounds, block by block, without a wait; and who
uses them. (Tests marked in_torch_too repeat the kernels' own tests.)"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attention_calls import problem
from counting import Counting
from kernels_off import WHY, kernels_off
from ringtile import IntervalMask, Layout, RefusedError, ops, ring_attention, self_test, torch_ops
from torch import Tensor

CPU = torch.device("cpu")


@pytest.fixture
def fresh() -> Iterator[None]:
    self_test.forget()
    yield
    self_test.forget()


@pytest.mark.parametrize("dtype", [*ops.FLOAT_DTYPES, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_they_keep_the_kernels_bounds(fresh: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """In each dtype, against themselves in float64, which the tests' own oracles check."""
    monkeypatch.setattr(ops, "_ops", torch_ops)
    for name in ops.KERNELS if dtype in ops.FLOAT_DTYPES else ["rows"]:
        assert ops.why_not_kernel(name, CPU, dtype) == "", name


def test_they_keep_the_bounds_of_a_run_with_a_stride() -> None:
    x, y = torch.arange(24.0).view(2, 12), torch.empty(2, 4)
    torch_ops.rows_pack_([x], torch.tensor([[1, 3, 0, 4]]), 1, [y])
    assert torch.equal(y, x[:, 1::3])


def labels_of(num_tokens: int, vocab_size: int) -> Tensor:
    """Every third one is ignored, -100."""
    return (torch.arange(num_tokens) * 7 % vocab_size).masked_fill(torch.arange(num_tokens) % 3 == 1, -100)


def cross_entropy(logits: Tensor, labels: Tensor, want_grad: bool = True, softcap: float = 5.0) -> list[Tensor]:
    logits, state = logits.clone(), ops.state_dtype(logits.dtype)
    loss, lse = (torch.full(labels.shape, 7.0, dtype=state) for _ in "12")
    ops.cross_entropy_fwd_bwd_(logits, labels, loss, lse, -100, 0.1, softcap, 0.01, want_grad)
    return [logits, loss, lse]


def glu_backward(x: Tensor) -> list[Tensor]:
    arrays = [x.clone(), x.roll(1).clone(), x.roll(2).clone()]
    ops.glu_bwd_(*arrays, 2)
    return arrays


OUT, LSE = torch.ones(2, 15, 2, 50), torch.zeros(2, 2, 15, dtype=torch.float64)


def merge(part: Tensor) -> list[Tensor]:
    ops.attn_merge_(part, ONES.float(), OUT, LSE, True)
    return [OUT.bfloat16(), LSE.clone()]


X = torch.randn(60, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
ONES = torch.ones(2, 2, 15, dtype=torch.float64)
CALLS: dict[str, Callable[[], list[Tensor]]] = {
    "glu_fwd": lambda: [ops.glu_fwd(X, X.roll(1), 1)],
    "glu_bwd_": lambda: glu_backward(X),
    "cross_entropy_fwd_bwd_": lambda: cross_entropy(X, labels_of(60, 50)),
    "cross_entropy_fwd_bwd_ without gradients": lambda: cross_entropy(X, labels_of(60, 50), want_grad=False),
    "attn_merge_": lambda: merge(X.view(2, 15, 2, 50)),
    "attn_delta": lambda: [ops.attn_delta(*(x.view(2, 15, 2, 50) for x in (X, X.roll(1))), ONES)],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_few_rows_are_copied_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And give the same bits. Results have 60 x 50 elements, also as bytes."""
    with kernels_off():
        whole = CALLS[name]()
        monkeypatch.setattr(torch_ops, "BLOCK_NUMBERS", 160)
        with Counting() as count, WideTensors() as wide:
            parts = CALLS[name]()
    assert all(torch.equal(x, y) for x, y in zip(whole, parts, strict=True))
    assert 0 < wide.largest <= 4 * 160
    assert count.largest <= X.numel()


class WideTensors(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements of 4 bytes and more of a tensor made inside."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_made = isinstance(result, Tensor) and result._base is None and not func._schema.is_mutable
        if is_made and result.itemsize >= 4:
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_what_is_not_finite_is_as_in_the_kernel(softcap: float) -> None:
    """A masked class, a row of nothing else, a token that counts not, and an infinite logit.

    Where both are finite, three sums of 50 terms in float32 are off by at most 150 2^-24 = 9e-6 of a result.
    """
    logits = torch.randn(5, 50)
    logits[0, 7:] = logits[1] = -torch.inf
    logits[2], logits[3, 4] = torch.nan, torch.inf
    labels = torch.tensor([3, 3, -100, 3, 3])
    kernel = cross_entropy(logits, labels, softcap=softcap)
    with kernels_off():
        got = cross_entropy(logits, labels, softcap=softcap)
    torch.testing.assert_close(got, kernel, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_a_token_of_an_unknown_class_becomes_nan_where_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the CUDA kernel. On a CPU it is refused before."""
    monkeypatch.setattr(torch, "_assert_async", lambda holds, text: None)
    with kernels_off():
        for result in cross_entropy(torch.randn(4, 50), torch.tensor([50, 0, -1, -100])):
            assert result.isnan().view(4, -1).all(1).tolist() == [True, False, True, False]


M = torch.zeros(3, 5)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "shapes": (lambda: ops.glu_fwd(M, M[:1], 0), r"glu_fwd: up has shape \(1, 5\), expected \(3, 5\)"),
    "dtypes": (lambda: ops.glu_bwd_(M, M, M.half(), 0), "glu_bwd_: dprod has dtype torch.float16, expected"),
    "dims": (lambda: ops.glu_fwd(M[0], M[0], 0), "gate has shape .*, expected 2 dimensions"),
    "no tensor": (lambda: ops.glu_fwd(M, 1.0, 0), "glu_fwd: up is a float, expected a tensor"),
    "an output": (lambda: ops.glu_bwd_(M, M, M[:1].expand(3, 5), 0), "an output must not overlap itself"),
    "labels": (lambda: cross_entropy(M, torch.zeros(3)), "labels has dtype torch.float32, expected torch.int64"),
    "no floats": (lambda: ops.attn_delta(*[M.int().view(1, 1, 3, 5)] * 2, M), "dtype torch.int32 is not supported"),
    "dlse": (lambda: ops.attn_delta(*[M.view(1, 1, 3, 5)] * 2, M), "dlse has dtype torch.float32, expected"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(what: str) -> None:
    call, message = REFUSED[what]
    with kernels_off(), pytest.raises(RuntimeError, match=message):
        call()


# ---- attention without ringtile's kernels -------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_kernel": "ringtile"}, f"{WHY}; set attention_kernel to auto or aten"),
        ({"softcap": 2.0}, f"{WHY}; aten's flash attention has no softcap, which is 2.0; change what both lack"),
    ],
)
def test_attention_that_only_a_missing_kernel_computes_is_refused(options: dict[str, Any], message: str) -> None:
    q, k, v, *_ = problem(v_head_dim=16)
    with (
        kernels_off(),
        pytest.raises(RefusedError, match="ringtile's attention is not in use here: not built") as refused,
    ):
        ring_attention(q, k, v, mask=IntervalMask.documents([21, 27]), layout=Layout.contiguous(48, 1), **options)
    assert str(refused.value).endswith(message)


def test_rows_of_tensors_that_do_not_fit_write_nothing() -> None:
    runs, ys = ops.runs_tensor([(0, 1, 0, 2)]), [torch.zeros(2, 3), torch.zeros(2, 4)]
    with pytest.raises(RuntimeError, match="local tensor"):
        torch_ops.rows_pack_([torch.ones(2, 3)] * 2, runs, 0, ys)
    assert not ys[0].any()
