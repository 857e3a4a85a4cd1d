"""The compiled recurrences and their convolution against their definitions, token by token in float64.

Every dtype, tail and kind on every instruction set is in tests/c/test_scan.c.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import ringtile
import scan_oracle
import torch
from ringtile import InputError, IntervalMask, Layout, RefusedError, self_test
from ringtile.recurrent import kernels
from scan_oracle import KINDS, Layer, Tensors, layer, problem
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

B, N, G, H, K, V, CHANNELS = 2, 70, 1, 2, 5, 3, 6


def layer_of(kind: str, dim: int = K) -> Layer:
    return layer(kind, H, G, dim, V, CHANNELS, scale=0.7)


def tensors_of(
    kind: str, dtype: torch.dtype = torch.float64, num_tokens: int = N, batch: int = B, dim: int = K, decay: float = 0.5
) -> Tensors:
    """Every floating input of a kind, by name."""
    found, state = problem(layer_of(kind, dim), batch, num_tokens, decay), layer_of(kind, dim).state
    found["initial_state"] = torch.randn(batch, *state, generator=torch.Generator().manual_seed(1)).double()
    return {name: x.to(dtype).requires_grad_() for name, x in found.items()}


def call(module: object, kind: str, tensors: Tensors, seq_idx: Tensor) -> tuple[Tensor, Tensor]:
    return layer_of(kind).alone(module, tensors, seq_idx)


def results(module: object, kind: str, tensors: Tensors, seq_idx: Tensor) -> Tensors:
    return scan_oracle.results(layer_of(kind), module, tensors, seq_idx)


seq_idx_of = functools.partial(scan_oracle.seq_idx_of, num_tokens=N)
PLACES = {
    "one document": seq_idx_of((set(), set())),
    "documents at every kind of place": seq_idx_of(({0, 1, 30, 64, 69}, set())),
    "rows that differ": seq_idx_of(({7}, set()), (set(), set())),
    "every token": seq_idx_of((set(range(N)), set())),
    "padding left, inside and right": seq_idx_of(({1, 40}, {0, 1, 5, 41, 69}), (set(), {68, 69})),
    "padding only": seq_idx_of((set(), set(range(N)))),
}


def assert_same_sums(got: Tensors, want: Tensors, num_tokens: int = N) -> None:
    """In float64. A result takes a step for each token, and a step sums over the dims of a state or the channels. Of
    each of these terms a few operations (4) are rounded, by half an ulp of what is summed: at most 1, an input, or the
    largest of all results, states and gradients among them."""
    largest = max([float(x.abs().nan_to_num(0.0).max()) for x in want.values() if x.numel()], default=0.0)
    bound = 4 * (num_tokens + K + V + CHANNELS) * 2.0**-53 * (1 + largest)
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=0, atol=bound, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_are_their_definitions_in_float64(kind: str, places: str) -> None:
    tensors = tensors_of(kind)
    assert_same_sums(*(results(module, kind, tensors, PLACES[places]) for module in (kernels, scan_oracle)))


@pytest.mark.parametrize("num_tokens", [0, 1, 64, 65, *(pytest.param(n, marks=pytest.mark.long) for n in (63, 129))])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_take_any_number_of_tokens(kind: str, num_tokens: int) -> None:
    tensors, seq_idx = tensors_of(kind, num_tokens=num_tokens), seq_idx_of((set(), set()), num_tokens=num_tokens)
    assert_same_sums(*(results(module, kind, tensors, seq_idx) for module in (kernels, scan_oracle)), num_tokens)


STRENGTHS = {"strong": -1e4, "none": 0.0, "mild": -0.05, "all at once": float("-inf")}


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("kind", ["delta", "kda"])
def test_any_decay_is_exact(kind: str, strength: str) -> None:
    """Every third token forgets by that much; beta 2 makes each step a reflection, so that nothing fades by itself."""
    tensors = tensors_of(kind)
    with torch.no_grad():
        tensors["g"][:, ::3] = STRENGTHS[strength]
        tensors["beta"].fill_(2.0)
    got, want = (results(module, kind, tensors, PLACES["one document"]) for module in (kernels, scan_oracle))
    assert got["g"].isfinite().all()
    if strength == "all at once":
        del got["g"], want["g"]  # autograd's exp has 0 * inf there; ours is 0
    assert_same_sums(got, want)


def distance(got: Tensors, want: Tensors, name: str) -> float:
    return float((got[name].double() - want[name]).norm() / want[name].norm())


@pytest.mark.parametrize("kind", ["delta", "kda"])
@pytest.mark.parametrize("decay", [0.05, 3.0])
def test_float32_is_no_further_from_float64_than_transformers(kind: str, decay: float) -> None:
    """Ours may be off by twice transformers' error, or by the 8 ulp below which both are chance."""
    tensors = tensors_of(kind, torch.float32, num_tokens=150, dim=16, decay=decay)
    del tensors["initial_state"]
    seq_idx = seq_idx_of((set(), set()), num_tokens=150)
    theirs = chunk_kimi_delta_attention if kind == "kda" else torch_chunk_gated_delta_rule

    class Transformers:
        @staticmethod
        def gated_delta_rule(
            q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, **of_documents: object
        ) -> tuple[Tensor, Tensor]:
            q, k = (x.repeat_interleave(H, dim=2) for x in (q, k))
            out, final = theirs(q * (scale * q.size(3) ** 0.5), k, v, g, beta, output_final_state=True)
            return out, final

    exact = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    want = results(scan_oracle, kind, exact, seq_idx)
    ours, reference = (results(module, kind, tensors, seq_idx) for module in (kernels, Transformers))
    for name in want:
        assert distance(ours, want, name) <= max(2 * distance(reference, want, name), 8 * 2**-23), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_16_bit_inputs_are_rounded_once(kind: str, dtype: torch.dtype) -> None:
    """States and sums are float32: only outputs and gradients are rounded to dtype, by half an ulp of each number."""
    half = tensors_of(kind, dtype, decay=0.5)
    half = {name: x if name in ("q", "k", "v", "x", "B", "C") else x.float() for name, x in half.items()}
    half = {name: x.detach().requires_grad_() for name, x in half.items()}
    wide = {name: x.detach().float().requires_grad_() for name, x in half.items()}
    got, want = (results(kernels, kind, x, PLACES["rows that differ"]) for x in (half, wide))
    for name, x in want.items():
        own = torch.finfo(dtype).eps / 2 if got[name].dtype == dtype else 0.0
        torch.testing.assert_close(got[name].float(), x, rtol=own + 1e-6, atol=torch.finfo(dtype).tiny)


@pytest.mark.parametrize("kind", KINDS)
def test_documents_and_padding_leak_nothing(kind: str) -> None:
    """Another document's numbers, even NaN, change no bit of a document's results; padding's are never read."""
    seq_idx = seq_idx_of(({20, 45}, {46, 60}))
    per_token = [name for name, x in tensors_of(kind).items() if x.dim() > 1 and x.size(1) == N]

    def changed(tokens: slice | list[int], value: float) -> Tensors:
        tensors = tensors_of(kind, torch.float32)
        with torch.no_grad():
            for name in per_token:
                tensors[name][:, tokens] = value
        return results(kernels, kind, tensors, seq_idx)

    base = changed([46, 60], 0.0)
    spoilt = changed([46, 60], float("nan"))
    for name, x in base.items():
        assert torch.equal(spoilt[name], x), name
    other = changed([*range(20, 45), 46, 60], float("nan"))
    for name in ("out", *per_token):
        for document in (slice(0, 20), slice(45, N)):
            assert torch.equal(other[name][:, document], base[name][:, document]), name
    assert torch.equal(other["final"], base["final"])
    for name in ("out", *per_token):
        assert not base[name][:, [46, 60]].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_cut_in_two_is_one(kind: str) -> None:
    """final_state of a part is initial_state of the next, forward and backward."""
    tensors, cut = tensors_of(kind, num_tokens=150), 77
    seq_idx = seq_idx_of(({90}, set()), num_tokens=150)
    per_token = [name for name, x in tensors.items() if x.dim() > 1 and x.size(1) == 150]

    class Cut:
        def __getattr__(self, name: str) -> Callable[..., tuple[Tensor, Tensor]]:
            return functools.partial(self.twice, getattr(kernels, name))

        def twice(self, function: Callable[..., tuple[Tensor, Tensor]], **given: Any) -> tuple[Tensor, Tensor]:
            outs, number = [], int(given["seq_idx"][0, cut - 1])  # of the document that is cut
            for tokens in (slice(0, cut), slice(cut, None)):
                part = given | {name: given[name][:, tokens] for name in [*per_token, "seq_idx"]}
                part["seq_idx"] = part["seq_idx"] - (number if tokens.start else 0)
                out, given["initial_state"] = function(**part)
                outs.append(out)
            return torch.cat(outs, dim=1), given["initial_state"]

    assert_same_sums(*(results(module, kind, tensors, seq_idx) for module in (Cut(), kernels)), 150)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    tensors, found = tensors_of("delta", torch.float32), []
    for count in (1, 4):
        torch.set_num_threads(count)
        found.append(results(kernels, "delta", tensors, PLACES["rows that differ"]))
    for name, x in found[0].items():
        assert torch.equal(found[1][name], x), name


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_any_strides(kind: str) -> None:
    tensors = tensors_of(kind)
    moved = {name: x.detach().mT.contiguous().mT.requires_grad_() if x.dim() > 1 else x for name, x in tensors.items()}
    got, want = (results(kernels, kind, x, PLACES["one document"]) for x in (moved, tensors))
    for name, x in want.items():
        assert torch.equal(got[name], x), name


# ---- the public functions check ------------------------------------------------------------------


def public(kind: str, tensors: Tensors, **options: Any) -> Tensor:
    """On one rank, of one document."""
    given = {name: x for name, x in tensors.items() if name != "initial_state"}
    function: Callable[..., Tensor] = getattr(ringtile, layer_of(kind).function)
    num_tokens = options.pop("num_tokens", N)
    mask, layout = IntervalMask.causal(num_tokens), Layout.contiguous(num_tokens, 1)
    return function(**given, **options, mask=mask, layout=layout)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_and_transforms_are_refused(kind: str) -> None:
    tensors = {name: x for name, x in tensors_of(kind, num_tokens=3).items() if name != "initial_state"}
    first, *others = tensors.values()
    (gradient,) = torch.autograd.grad(public(kind, tensors, num_tokens=3).sum(), first, create_graph=True)
    with pytest.raises(RefusedError, match="differentiated again"):
        torch.autograd.grad(gradient.sum(), others[0])
    name = next(iter(tensors))
    with pytest.raises(RefusedError, match=r"forward-mode|torch\.func"):
        torch.func.jvp(lambda x: public(kind, tensors | {name: x}, num_tokens=3), (first,), (first,))


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_on_meta_give_the_shape(kind: str) -> None:
    tensors = {name: x for name, x in tensors_of(kind, num_tokens=3).items() if name != "initial_state"}
    out = public(kind, {name: x.to("meta") for name, x in tensors.items()}, num_tokens=3)
    assert out.is_meta
    assert out.shape == public(kind, tensors, num_tokens=3).shape


@pytest.mark.parametrize(
    ("kind", "name", "change", "message"),
    [
        ("delta", "q", lambda x: x[0], r"q is \(70, 1, 5\); expected \(2, 70, G, K\)"),
        ("delta", "q", lambda x: x.float(), "q has dtype torch.float32 but v has torch.float64"),
        ("delta", "q", lambda x: x.int(), "q is torch.int32; expected one of"),
        ("delta", "q", lambda x: x.to("meta"), "q is on meta but v is on cpu"),
        ("delta", "q", lambda x: None, "q is a NoneType; expected a tensor"),
        ("delta", "q", lambda x: x.expand(B, N, 3, K), "k is"),
        ("delta", "k", lambda x: x[..., :-1], "k is"),
        ("delta", "v", lambda x: x[:, :-1], r"v is \(2, 69, 2, 3\); expected \(2, 70, 2, 3\)"),
        ("delta", "v", lambda x: x.new_zeros(B, N, H, 513), "V, the last dim of v, is 513; expected 1..512"),
        ("delta", "g", lambda x: x[..., None], r"g is \(2, 70, 2, 1\); expected \(2, 70, 2\) or \(2, 70, 2, 5\)"),
        ("delta", "g", lambda x: x[..., :1], r"g is \(2, 70, 1\); expected \(2, 70, 2\)"),
        ("delta", "beta", lambda x: x[:, :-1], "beta is"),
        ("ssd", "dt", lambda x: x[..., 0], "dt is"),
        ("ssd", "A", lambda x: x[:1], r"A is \(1,\); expected \(2\)"),
        ("ssd", "D", lambda x: x[:1], "D is"),
        ("ssd", "B", lambda x: x[:, :, :, :-1], "C is"),
        ("selective", "x", lambda x: x[0], r"x is \(70, 6\); expected \(B, 70, C\)"),
        ("selective", "x", lambda x: x[..., :0], "dt is .* expected"),
        ("selective", "dt", lambda x: x[..., :1], r"dt is \(2, 70, 1\); expected \(2, 70, 6\)"),
        ("selective", "A", lambda x: x.mT, r"A is \(5, 6\); expected \(6, 5\)"),
        ("selective", "B", lambda x: x.new_zeros(B, N, 513), r"C is \(2, 70, 5\); expected \(2, 70, 513\)"),
        ("selective", "C", lambda x: x.float(), "C has dtype torch.float32 but x has torch.float64"),
        ("selective", "D", lambda x: x[:1], "D is"),
        ("convolution", "x", lambda x: x[0], r"x is \(70, 6\); expected \(B, 70, C\)"),
        ("convolution", "weight", lambda x: x.new_zeros(CHANNELS, 9), "expected a width of 2..8"),
        ("convolution", "weight", lambda x: x[:1], r"weight is \(1, 4\); expected \(6, 4\)"),
        ("convolution", "bias", lambda x: x[:1], "bias is"),
    ],
)
def test_wrong_arguments_are_named(kind: str, name: str, change: Callable[[Tensor], Tensor], message: str) -> None:
    tensors = tensors_of(kind)
    with pytest.raises(InputError, match=message):
        public(kind, tensors | {name: change(tensors[name])})


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        (
            "delta",
            {"v": (N, 0, V), "g": (N, 0), "beta": (N, 0)},
            "v has 0 heads, q and k 1; expected a positive multiple",
        ),
        ("ssd", {"x": (N, 3, V), "dt": (N, 3), "B": (N, 2, K), "C": (N, 2, K)}, "x has 3 heads, B and C 2"),
        ("selective", {"x": (N, 0), "dt": (N, 0)}, "x has 0 channels; expected 1 or more"),
        ("selective", {"B": (N, 513), "C": (N, 513)}, "K, the last dim of B and C, is 513; expected 1..512"),
    ],
)
def test_sizes_that_no_kernel_computes_are_named(kind: str, sizes: dict[str, tuple[int, ...]], message: str) -> None:
    tensors = {name: torch.zeros(1, *sizes.get(name, x.shape[1:])) for name, x in tensors_of(kind, batch=1).items()}
    heads = tensors["v" if kind == "delta" else "x"].size(2)
    if kind != "delta":
        tensors |= {
            "A": torch.zeros(heads, *([tensors["B"].size(2)] if kind == "selective" else [])),
            "D": torch.zeros(heads),
        }
    with pytest.raises(InputError, match=message):
        public(kind, tensors)


def test_wrong_options_are_named() -> None:
    with pytest.raises(InputError, match="activation is 'relu'; expected '' or 'silu'"):
        public("convolution", tensors_of("convolution"), activation="relu")
    with pytest.raises(InputError, match=r"scale is inf; expected a finite number of torch\.float64"):
        public("delta", tensors_of("delta"), scale=float("inf"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_ops_refuse_wrong_documents(kind: str) -> None:
    """They are not the callers': only memory is kept safe."""
    tensors = tensors_of(kind)
    for seq_idx in (torch.zeros(1, N), torch.zeros(N, dtype=torch.int32), torch.zeros(3, N, dtype=torch.int32)):
        with pytest.raises(RuntimeError, match=r"seq_idx has|must match the size"):
            call(kernels, kind, tensors, seq_idx)


# ---- self-test ---------------------------------------------------------------------------------


class Wrong:
    """ringtile's ops, of which one spoils the last element of one of its results."""

    def __init__(self, op: str, result: int) -> None:
        self.op, self.result = op, result

    def __getattr__(self, name: str) -> Callable[..., tuple[Tensor, ...]]:
        op = getattr(torch.ops.ringtile, name)

        def spoilt(*given: object) -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = op(*given)
            if name == self.op:
                found[self.result].view(-1)[-1] += 0.25
            return found

        return spoilt


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_kernel_is_found_and_refused(monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype) -> None:
    self_test.forget()
    try:
        assert kernels.why_not_kernel(kind, dtype) == ""
        op = {"convolution": "causal_conv1d", "selective": "selective_scan"}.get(kind, "scan")
        ops = (op, f"{op}_backward")
        # Every gradient of the backward in turn, as the dtypes go.
        results = {torch.float64: (0, 0), torch.float32: (1, 1), torch.bfloat16: (0, 2), torch.float16: (0, 3)}[dtype]
        for op, result in zip(ops, results, strict=True):
            self_test.forget()
            monkeypatch.setattr(kernels, "_ops", Wrong(op, result))
            assert kernels.why_not_kernel(kind, dtype).startswith("gives another ")
        with pytest.raises(
            RefusedError, match=r"kernel cannot be used for .*: it gives another .* RINGTILE_CPU_ISA=generic"
        ):
            call(kernels, kind, tensors_of(kind, dtype, num_tokens=3), seq_idx_of((set(), set()), num_tokens=3))
    finally:
        self_test.forget()
