"""Keys and values that each rank makes of latents: gradients as in one process, bytes as planned, what is refused.

The oracle expands all tokens at once in float64 and attends with a dense mask; autograd does the rest.

Shape letters: B batch, S global tokens, H heads, C numbers of a latent, R of them with positions, D head dim, Dv value
head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from attention_calls import FLOAT64_TOLERANCE, MASKS, each_with_a_layout, layout_of
from oracle import dense_attention
from ringtile import (
    InputError,
    IntervalMask,
    Latents,
    Layout,
    LoopbackWorld,
    RingMismatchError,
    RingtileError,
    ShardedSequence,
    plan_attention,
    ring_attention,
)
from ringtile.transport.loopback import LoopbackGroup
from strategies import dense
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

H, C, R, NOPE, DV = 4, 8, 4, 12, 10
D = NOPE + R


class Expand(nn.Module):
    """MLA's: keys of all heads from a latent, beside positions that they share; values from the same latent."""

    def __init__(self, dtype: torch.dtype, heads: int = H, sizes: tuple[int, int, int] = (C, NOPE, DV)) -> None:
        super().__init__()
        self.heads, (latent, self.nope, v_dim) = heads, sizes
        self.up = nn.Linear(latent, heads * (self.nope + v_dim), bias=False).to(dtype)
        numbers = torch.randn(self.up.weight.shape, generator=torch.Generator().manual_seed(1))  # ranks are threads
        self.up.weight.data.copy_(numbers)

    def forward(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        made = self.up(latent).view(*latent.shape[:2], self.heads, -1)  # as transformers does: fails on no tokens
        return torch.cat([made[..., : self.nope], rope.expand(-1, -1, self.heads, -1)], -1), made[..., self.nope :]


class Problem(NamedTuple):
    q: Tensor
    latent: Tensor
    rope: Tensor
    dout: Tensor


def problem(dtype: torch.dtype = torch.float64, batch: int = 2, seq_len: int = 48) -> Problem:
    generator = torch.Generator().manual_seed(0)
    shapes = (H, D), (1, C), (1, R), (H, DV)
    return Problem(*(torch.randn((batch, seq_len, *shape), generator=generator).to(dtype) for shape in shapes))


def exact(p: Problem, attend: Tensor) -> list[Tensor]:
    """out, dq, dlatent, drope and the gradient of the weight, in float64. attend: bool (B or 1, S, S)."""
    expand = Expand(p.q.dtype).double()
    leaves = [x.double().clone().requires_grad_() for x in p[:3]]
    out, _ = dense_attention(leaves[0], *expand(*leaves[1:]), attend)
    return [out.detach(), *torch.autograd.grad(out, [*leaves, expand.up.weight], p.dout.double())]


Use = Callable[..., Tensor]


def attend(
    q: Tensor, latent: Tensor, rope: Tensor, sequence: ShardedSequence, module: Expand, **options: Tensor
) -> Tensor:
    out: Tensor = ring_attention(q, latent, rope, sequence, expand=Latents(module, H, DV), **options)
    return out


def attend_heads(q: Tensor, latent: Tensor, rope: Tensor, sequence: ShardedSequence, module: Expand) -> Tensor:
    """Which travel."""
    out: Tensor = ring_attention(q, *module(latent, rope), sequence)
    return out


def run(
    p: Problem, mask: IntervalMask, layout: Layout, scheme: str = "ring", use: Use = attend, made: type[Expand] = Expand
) -> list[Tensor]:
    """As `exact`, on ranks; the gradient of the weight is the sum of theirs."""

    def on_rank(group: LoopbackGroup) -> list[Tensor]:
        sequence = ShardedSequence(mask, layout, group, scheme=scheme)
        module, local = made(p.q.dtype), [sequence.shard(x, 1) for x in p]
        leaves = [x.clone().requires_grad_() for x in local[:3]]
        out = use(*leaves, sequence, module)
        out.backward(local[3])
        of_tokens = [sequence.unshard(x.detach(), 1) for x in (out, *(leaf.grad for leaf in leaves))]
        return [*of_tokens, module.up.weight.grad]

    of_ranks = LoopbackWorld(layout.world_size).run(on_rank)
    return [*of_ranks[0][:4], torch.stack([x[4] for x in of_ranks]).sum(0)]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=tolerance * max(1.0, float(y.abs().max())))


SCHEMES = [(1, "ring"), (2, "all_gather"), (2, "ulysses"), (3, "ring"), (4, "usp:2"), (4, "auto")]


@pytest.mark.parametrize(("name", "layout"), each_with_a_layout(MASKS))
def test_expanded_blocks_are_what_one_process_expands(name: str, layout: str) -> None:
    mask, p = MASKS[name], problem()
    expected = exact(p, dense(mask))
    for world_size, scheme in SCHEMES:
        found = run(p, mask, layout_of(layout, mask, world_size), scheme)
        assert_close(found, expected, FLOAT64_TOLERANCE)


def test_float32_is_as_one_process_to_its_rounding() -> None:
    """1e-6 of the largest: sums of at most 96 tokens and 4 heads, in another order."""
    mask, p = MASKS["documents"], problem(torch.float32)
    assert_close(run(p, mask, Layout.zigzag(48, 4)), exact(p, dense(mask)), 1e-6)


def test_the_gradient_of_the_weight_is_rounded_once() -> None:
    """To half a unit in the last place of bfloat16, beside the rounding of float32 sums; eight blocks' shares, each
    rounded, would be further off in most elements."""
    module = Expand(torch.bfloat16)
    again, exact_sum = Latents(module, H, DV).again([module.up.weight]), torch.zeros_like(module.up.weight).double()
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        latent, rope = (torch.randn(1, 6, 1, size, generator=generator).bfloat16().requires_grad_() for size in (C, R))
        keys = again(latent, rope)
        douts = [torch.randn(x.shape, generator=generator).bfloat16() for x in keys]
        again.differentiate(keys, douts, (latent, rope))
        of_up = torch.cat([douts[0][..., :NOPE], douts[1]], -1).flatten(0, 1).flatten(1)
        exact_sum += of_up.double().T @ latent.detach().view(-1, C).double()
    (found,) = again.weight_gradients()
    assert ((found.double() - exact_sum).abs() <= 2.0**-8 * exact_sum.abs() + 2.0**-18).all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_expands_again(reentrant: bool) -> None:
    mask, p = MASKS["causal"], problem()

    def use(*args: Any) -> Tensor:
        out: Tensor = checkpoint(attend, *args, use_reentrant=reentrant)
        return out

    assert_close(run(p, mask, Layout.zigzag(48, 2), use=use), exact(p, dense(mask)), FLOAT64_TOLERANCE)


def test_a_latent_that_nothing_reads_has_a_gradient_of_0() -> None:
    """In memory that held nan."""

    class Unrotated(Expand):
        def forward(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(latent, torch.zeros_like(rope))

    torch.use_deterministic_algorithms(True)  # which fills what is empty
    try:
        found = run(problem(), MASKS["causal"], Layout.zigzag(48, 2), made=Unrotated)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not found[3].any()


def test_latents_of_16_bits_round_no_gradient_of_float32_keys() -> None:
    """Heads travel in their place. 1e-6: as above."""
    p = problem(torch.float32)
    p = p._replace(latent=p.latent.bfloat16(), rope=p.rope.bfloat16())

    class Widened(Expand):
        def forward(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(latent.float(), rope.float())

    mask = MASKS["causal"]
    assert_close(run(p, mask, Layout.zigzag(48, 2), made=Widened)[4:], exact(p, dense(mask))[4:], 1e-6)


def test_under_autocast_the_backward_casts_as_the_forward_did() -> None:
    """A float32 weight: the latents and what is made of them are bfloat16, and its gradient is float32."""
    mask, p = MASKS["causal"], problem(torch.bfloat16)

    def use(q: Tensor, latent: Tensor, rope: Tensor, sequence: ShardedSequence, module: Expand) -> Tensor:
        module.float()
        with torch.autocast("cpu", torch.bfloat16):
            return attend(q, latent, rope, sequence, module)

    one, two = (run(p, mask, Layout.zigzag(48, size), use=use) for size in (1, 2))
    assert two[4].dtype == torch.float32
    assert_close(two, [x.double() for x in one], 2.0**-6)


# ---- bytes ----------------------------------------------------------------------------------------


def sent(
    mask: IntervalMask,
    layout: Layout,
    scheme: str,
    heads: int,
    sizes: tuple[int, int, int],
    rope: int,
) -> Any:
    """By rank, the bytes sent forward and backward; and the whole plan."""
    dim, v_dim = sizes[1] + rope, sizes[2]

    def on_rank(group: LoopbackGroup) -> tuple[int, int]:
        sequence = ShardedSequence(mask, layout, group, scheme=scheme)
        tokens, module = (1, sequence.local_len), Expand(torch.float32, heads, sizes)
        leaves = [torch.randn(*tokens, *size) for size in ((heads, dim), (1, sizes[0]), (1, rope))]
        out = ring_attention(*leaves, sequence, expand=Latents(module, heads, v_dim))
        forward = group.transport.bytes_sent
        out.sum().backward()
        return forward, group.transport.bytes_sent - forward

    found = LoopbackWorld(layout.world_size).run(on_rank)
    of_layer = {"num_heads": heads, "num_kv_heads": heads, "head_dim": dim, "v_head_dim": v_dim}
    plans = [
        plan_attention(mask, layout, **of_layer, dtype=torch.float32, scheme=scheme, latent_dim=latent_dim)
        for latent_dim in (sizes[0] + rope, 0)
    ]
    return found, *([(cost.forward_bytes_sent, cost.backward_bytes_sent) for cost in plan.ranks] for plan in plans)


@pytest.mark.parametrize("scheme", ["ring", "all_gather"])
def test_latents_of_a_real_layer_are_a_ninth_of_its_heads(scheme: str) -> None:
    """DeepSeek-V2-Lite's: 576 numbers a token in place of 16 heads of 192 + 128."""
    mask = IntervalMask.documents([13, 20, 15])
    found, planned, of_heads = sent(mask, Layout.zigzag(48, 2), scheme, 16, (512, 128, 128), 64)
    assert found == planned
    assert sum(map(sum, of_heads)) == sum(map(sum, found)) * 5120 / 576 > 0


@pytest.mark.parametrize(
    ("scheme", "sizes"), [("ring", (256, 12, 10)), ("ulysses", (8, 12, 10)), ("usp:2", (8, 12, 10))]
)
def test_heads_travel_where_latents_are_no_less(scheme: str, sizes: tuple[int, int, int]) -> None:
    """A latent longer than its heads; and ranks that share heads."""
    found, planned, of_heads = sent(IntervalMask.causal(48), Layout.zigzag(48, 4), scheme, H, sizes, R)
    assert found == planned == of_heads


@pytest.mark.parametrize(("use", "scheme"), [(attend, "ring"), (attend_heads, "ulysses")])
def test_auto_counts_latents(use: Use, scheme: str) -> None:
    """Heads of 88 numbers a token make it Ulysses; as latents of 12, a ring sends less."""
    used: set[str] = set()

    def and_look(*given: Any) -> Tensor:
        out = use(*given)
        used.update(given[3]._schemes.values())
        return out

    run(problem(), IntervalMask.causal(48), Layout.zigzag(48, 2), "auto", and_look)
    assert used == {scheme}


# ---- what is refused ------------------------------------------------------------------------------


class Wrong(Expand):
    def __init__(self, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__(torch.float64)
        self.change = change

    def forward(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        return self.change(*super().forward(latent, rope))


@pytest.mark.parametrize(
    ("of", "change", "words"),
    [
        ("the module", lambda k, v: (k[:, :-1], v[:, :-1]), "expected of each 4 heads of head dims 16 and 10"),
        ("the module", lambda k, v: (k[:, :, :2], v[:, :, :2]), "expected of each 4 heads"),
        ("the module", lambda k, v: (k, v[..., :3]), "expected of each 4 heads of head dims 16 and 10"),
        ("the module", lambda k, v: (k[..., :3], v), "k has head dim 3 but q has 16"),
        ("the module", lambda k, v: (k.float(), v.float()), "k has dtype torch.float32 but q has torch.float64"),
        ("the module", lambda k, v: (k.mT.contiguous().mT, v), r"expected 1; call .contiguous\(\)"),
        ("the latents", lambda k, v: (k.squeeze(2), v), r"the latents k and v are torch.float64 \(2, 24, 8\)"),
        ("the latents", lambda k, v: (k, v.float()), "of one floating dtype"),
        ("the latents", lambda k, v: (k[:1], v[:1]), "and 2 rows"),
        ("the latents", lambda k, v: (k[:, :-1], v[:, :-1]), "k and v have 23"),
        ("the latents", lambda k, v: (k[..., ::2], v), "stride 1"),
    ],
)
def test_keys_and_values_of_another_shape_are_refused(of: str, change: Any, words: str) -> None:
    def use(q: Tensor, latent: Tensor, rope: Tensor, sequence: ShardedSequence, module: Expand) -> Tensor:
        if of == "the module":
            return attend(q, latent, rope, sequence, Wrong(change))
        return attend(q, *change(latent, rope), sequence, module)

    with pytest.raises(InputError, match=words):
        run(problem(), MASKS["causal"], Layout.zigzag(48, 2), use=use)


def test_ranks_that_disagree_on_what_travels_are_named() -> None:
    def use(q: Tensor, latent: Tensor, rope: Tensor, sequence: ShardedSequence, module: Expand) -> Tensor:
        return (attend_heads if sequence.rank else attend)(q, latent, rope, sequence, module)

    with pytest.raises(RingMismatchError, match="latent_dim"):
        run(problem(), MASKS["causal"], Layout.zigzag(48, 2), use=use)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((lambda k, v: (k, v), 4, 10), "expected a torch.nn.Module: wrap a function in one"),
        ((nn.Linear(2, 2), "4", 10), "num_kv_heads is '4'"),
        ((nn.Linear(2, 2), 4, 1.5), "v_head_dim is 1.5"),
    ],
)
def test_what_makes_no_latents_is_refused(arguments: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Latents(*arguments)


def test_an_expand_that_raises_or_makes_other_shapes_leaves_the_group_usable() -> None:
    """It is tried on a token before any key is sent: every rank hears of it, and goes on."""
    mask, layout = IntervalMask.causal(32), Layout.zigzag(32, 2)

    class Bad(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.weight, self.kind = nn.Parameter(torch.ones(4, 8)), kind

        def forward(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            if self.kind == "raises":
                raise ValueError("of the user's module")
            width = 7 if self.kind == "other shapes" else 8
            keys = (k @ self.weight)[..., :width].expand(-1, -1, 2, -1)
            return keys, keys

    def on_rank(group: LoopbackGroup) -> list[str]:
        sequence, said = ShardedSequence(mask, layout, group), []
        q, latent = torch.randn(1, 16, 2, 8), torch.randn(1, 16, 1, 4)
        for kind in ("raises", "other shapes", "good"):
            expand = Latents(Bad(kind if group.transport.rank == 1 else "good"), 2, 8)
            try:
                ring_attention(q, latent, latent, sequence, expand=expand)
                said.append("right")
            except (ValueError, RingtileError) as error:
                said.append(str(error))
        return said

    first, second = LoopbackWorld(2, timeout_seconds=30).run(on_rank)
    assert second == ["of the user's module", "k has head dim 7 but q has 8; expected the same head dim", "right"]
    assert "rank 1 has ring_attention forward, refused: of the user's module;" in first[0]
    assert "rank 1 has ring_attention forward, refused: k has head dim 7 but q has 8;" in first[1]
    assert first[2] == "right"
