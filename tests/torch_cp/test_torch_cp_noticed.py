"""What a model does inside `context_parallel` besides calling attention: right, or refused by name.

Shape letters: B batch, S global tokens, N local tokens, H heads, D head dim, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hf_models import tiny_model
from pool import run_ranks
from ringtile import (
    ContextParallel,
    InputError,
    IntervalMask,
    Layout,
    LoopbackWorld,
    RefusedError,
    context_parallel,
    tree_position_ids,
)
from ringtile.transport.loopback import LoopbackGroup
from strategies import dense
from test_torch_cp_context import assert_equal, expected, inputs
from test_torch_cp_flex import styled
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint


def in_block(function: Callable[[list[Tensor]], Any], world_size: int = 2, seq_len: int = 16, **arguments: Any) -> None:
    """function([q, k, v]) on local tokens (2, 4, N, 16), inside `context_parallel`."""
    x = inputs(seq_len)

    def on_rank(group: LoopbackGroup) -> None:
        tensors = [t.clone() for t in x[:3]]
        with context_parallel(group, buffers=tensors, buffer_seq_dims=[2] * 3, **arguments):
            function(tensors)

    LoopbackWorld(world_size).run(on_rank)


# ---- attention that the ring does not see -------------------------------------------------------


def by_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(-1, -2) * 0.25, dim=-1, dtype=torch.float32).to(v.dtype) @ v


def by_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(2, 4, q.size(2), k.size(2))
    return (scores + 1).softmax(-1) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.Softmax(-1)(torch.einsum("bhqd,bhkd->bhqk", q, k)) @ v


def by_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([torch.softmax(torch.matmul(part, k.mT), -1) @ v for part in q.split(3, 2)], 2)


def with_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.cat([q @ k.mT, q.new_zeros(*q.shape[:3], 1)], dim=-1)
    return F.softmax(scores - scores.amax(-1, True), dim=-1)[..., :-1] @ v


@pytest.mark.parametrize("attend", [by_matmul, by_bmm, by_einsum, by_chunks, with_sinks])
def test_eager_attention_is_refused(attend: Any) -> None:
    with pytest.raises(RefusedError, match=r"softmax of scores \(2, 4, [38], [89]\).*attn_implementation='sdpa'"):
        in_block(lambda qkv: attend(*qkv))
    with pytest.raises(RefusedError, match=r"softmax of scores"):  # the block's mask would be ignored
        in_block(lambda qkv: attend(*qkv), world_size=1, mask=IntervalMask.causal(16))


@pytest.mark.parametrize("name", ["_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention"])
def test_fused_kernels_by_their_own_names_are_refused(name: str) -> None:
    """The second is what torch.export keeps."""
    with pytest.raises(RefusedError, match=f"{name} attends this rank's tokens only"):
        in_block(lambda qkv: getattr(torch.ops.aten, name)(*qkv))


def test_other_softmaxes_are_not_attention() -> None:
    """There are as many experts, classes and features as local tokens."""
    weight = nn.Parameter(torch.ones(8, 8, dtype=torch.float64))

    def route(qkv: list[Tensor]) -> None:
        x = qkv[0][:, 0, :, :8]  # (B, N, 8)
        for logits in (x @ weight, F.linear(x, weight), x.flatten(0, 1) @ weight, x * x):
            F.softmax(logits, dim=-1)
        rotation = torch.ones(2, 4, 1) @ torch.ones(2, 1, 8)  # as rotary embeddings are made: (B, D / 2, N)
        F.softmax(x * rotation[:, :1].mT, dim=-1)
        encoder = torch.ones(2, 4, 5, 16, dtype=torch.float64)  # cross attention to 5 tokens that every rank has
        F.softmax(qkv[0] @ encoder.mT, dim=-1)

    in_block(route)


class Windowed(nn.Module):
    """Passes no mask, as transformers does where the window is not shorter than the tokens that it sees."""

    sliding_window = 9

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, is_causal=True)


class Chunked(Windowed):
    """A layer of Llama 4."""

    config, layer_idx = SimpleNamespace(layer_types=["chunked_attention"], attention_chunk_size=10), 0


def test_a_window_that_attention_is_not_told_of_is_refused() -> None:
    def attend(qkv: list[Tensor]) -> None:
        Windowed()(*qkv)

    window = IntervalMask.sliding_window(16, 9)
    with pytest.raises(RefusedError, match=r"forward has a sliding window of 9 tokens.*sliding_window\(16, 9\)"):
        in_block(attend)
    with pytest.raises(RefusedError, match="sliding window of 9 tokens"):
        in_block(attend, mask=IntervalMask.documents([10, 6]))
    in_block(attend, mask=window)
    in_block(attend, mask=window & IntervalMask.documents([10, 6]))
    in_block(attend, mask=IntervalMask.documents([9, 7]))  # never longer than the window
    in_block(attend, seq_len=9)
    in_block(attend, world_size=1)
    for mask in (None, IntervalMask.sliding_window(16, 10)):
        with pytest.raises(RefusedError, match=r"forward has a chunk of 10 tokens.*IntervalMask\.chunked\(16, 10\)"):
            in_block(lambda qkv: Chunked()(*qkv), mask=mask)
    in_block(lambda qkv: Chunked()(*qkv), mask=IntervalMask.chunked(16, 10))


# ---- positions that a model makes ---------------------------------------------------------------

WEIGHT = torch.ones(18, 4)
MADE: dict[str, Callable[[Tensor], Any]] = {
    "embedded": lambda x: F.embedding(torch.arange(0, x.size(2)), WEIGHT),
    "rotated": lambda x: (
        (torch.arange(x.size(2), device=x.device) + 0).unsqueeze(0)[:, None, :].expand(2, 1, -1).float()
    ),
    "multiplied": lambda x: torch.outer(torch.arange(x.size(2)), WEIGHT[0]),
    "floats": lambda x: torch.arange(x.size(2), dtype=x.dtype),
    "after padding": lambda x: F.embedding(torch.arange(x.size(2))[None] + 2, WEIGHT),  # as in BART
    "of a mask": lambda x: F.embedding(torch.ones(2, x.size(2), dtype=torch.long).cumsum(1), WEIGHT),  # as in OPT
    "of a table": lambda x: F.embedding(torch.arange(64)[None, : x.size(2)], WEIGHT),  # as in BERT
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_positions_that_count_a_shard_from_0_are_refused(made: Callable[[Tensor], Any], layout: str) -> None:
    with pytest.raises(InputError, match=r"positions of 8 tokens that count from [012] on every.*pass position_ids"):
        in_block(lambda qkv: made(qkv[0]), layout=layout)
    in_block(lambda qkv: made(qkv[0]), world_size=1, mask=IntervalMask.causal(16))


def test_other_counts_are_not_positions() -> None:
    def count(group: LoopbackGroup) -> None:
        rank, tokens, positions = group.transport.rank, torch.zeros(16, 4), torch.arange(16) % 8  # of two documents
        with context_parallel(group, buffers=[tokens], buffer_seq_dims=[0], layout="contiguous"):
            F.embedding(torch.arange(8) + 8 * rank, WEIGHT)  # of this rank's tokens
            tokens[torch.arange(8).unsqueeze(1).expand(-1, 2).reshape(-1)].float()  # indices: experts of each token
            torch.arange(0, 16, 2).float()  # frequencies
        with context_parallel(group, buffers=[positions], buffer_seq_dims=[0], layout="contiguous"):
            F.embedding(positions + 2, WEIGHT)

    LoopbackWorld(2).run(count)


# ---- random numbers -----------------------------------------------------------------------------


def test_dropout_is_refused_where_it_is_called() -> None:
    layer = nn.Dropout(0.1)
    with pytest.raises(RefusedError, match=r"dropout with p 0\.1"):
        in_block(lambda qkv: layer(qkv[0]))
    in_block(lambda qkv: layer.eval()(qkv[0]))
    in_block(lambda qkv: F.dropout(qkv[0], 0.0))


def draw(x: list[Tensor]) -> None:
    torch.randn_like(x[0])


def draw_and_fail(x: list[Tensor]) -> None:
    draw(x)
    raise KeyError


def test_draws_from_the_default_generator_are_refused_when_the_block_ends() -> None:
    with pytest.raises(RefusedError, match="drawn from the default generator of cpu inside context_parallel"):
        in_block(draw)
    in_block(lambda qkv: qkv[0].uniform_(generator=torch.Generator().manual_seed(0)))
    in_block(draw, world_size=1, mask=IntervalMask.causal(16))
    with pytest.raises(KeyError):  # another error is not hidden
        in_block(draw_and_fail)


# ---- checkpoints whose backward runs outside ----------------------------------------------------


def nested_checkpoint(function: Any, *qkv: Tensor, use_reentrant: bool) -> Any:
    return checkpoint(
        lambda *args: checkpoint(function, *args, use_reentrant=use_reentrant), *qkv, use_reentrant=use_reentrant
    )


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("how", [checkpoint, nested_checkpoint])
@pytest.mark.parametrize("style", [False, True])
@pytest.mark.parametrize("seq_len", [16, 8])  # 8: as many local tokens as heads, so that no shape tells the difference
def test_a_backward_outside_recomputes_in_the_ring(use_reentrant: bool, how: Any, style: bool, seq_len: int) -> None:
    x, mask = inputs(seq_len), IntervalMask.documents([5, seq_len - 5])

    def gradients(group: LoopbackGroup) -> list[Tensor | None]:
        tensors = [t.clone() for t in x]
        module: Any = styled(ContextParallel(2), sdpa, group) if style else sdpa
        with context_parallel(group, buffers=tensors, buffer_seq_dims=[2] * 4, layout="contiguous", mask=mask):
            leaves = [t.detach().clone().requires_grad_() for t in tensors[:3]]
            dout = tensors[3].clone()
            out = how(lambda *qkv: module(*(t.sin() for t in qkv)).sin(), *leaves, use_reentrant=use_reentrant)
        out.backward(dout)
        return [leaf.grad for leaf in leaves]

    leaves = [t.clone().requires_grad_() for t in x[:3]]
    wanted = torch.autograd.grad(sdpa(*(t.sin() for t in leaves), attn_mask=dense(mask)[:, None]).sin(), leaves, x.dout)
    ranks = LoopbackWorld(2).run(gradients)
    assert_equal([torch.cat(shards, 2) for shards in zip(*ranks, strict=True)], list(wanted))


def test_a_checkpoint_that_enters_the_block_itself() -> None:
    x = inputs(16)

    def gradients(group: LoopbackGroup) -> list[Tensor | None]:
        layout = Layout.contiguous(16, 2)
        leaves = [layout.shard(t, 2, group.transport.rank).requires_grad_() for t in x[:3]]

        def attend(*qkv: Tensor) -> Tensor:
            with context_parallel(group, layout=layout):
                return sdpa(*qkv)

        out = checkpoint(attend, *leaves, use_reentrant=True)
        out.backward(layout.shard(x.dout, 2, group.transport.rank))
        return [leaf.grad for leaf in leaves]

    ranks = LoopbackWorld(2).run(gradients)
    assert_equal([torch.cat(shards, 2) for shards in zip(*ranks, strict=True)], expected(x)[1:])


# ---- transformers' models -----------------------------------------------------------------------

LENGTHS = [7, 19, 6]


def batch(packed: bool) -> list[Tensor]:
    """input_ids, labels and position_ids."""
    ids = torch.randint(3, 90, (2, 32), generator=torch.Generator().manual_seed(0))
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    positions = torch.cat([torch.arange(n) for n in LENGTHS]) if packed else torch.arange(32)
    return [ids, labels, positions[None]]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def differences_in_block(
    model: Any, tensors: list[Tensor], single: Tensor, mask: IntervalMask | None, layout: str
) -> list[float]:
    """Return how far loss and gradients of input_ids, labels and position_ids in the page's loop are from `single`, the
    loss of one process, and its gradients; relative to the largest."""
    wanted = [single.detach(), *torch.autograd.grad(single, list(model.parameters()))]
    input_ids, labels, position_ids = tensors
    with context_parallel(
        dist.group.WORLD,
        buffers=tensors,
        buffer_seq_dims=[1, 1, 1],
        no_restore_buffers={input_ids, labels},
        mask=mask,
        layout=layout,
    ):
        loss = loss_of(model(input_ids, position_ids=position_ids).logits, labels)
        loss.backward()
    found = []
    for got, exact in zip([loss.detach(), *(p.grad for p in model.parameters())], wanted, strict=True):
        dist.all_reduce(got)
        found.append(((got - exact).abs().max() / exact.abs().max().clamp(min=1)).item())
    return found


def differences(
    family: str, packed: bool, use_cache: bool, mask: IntervalMask | None = None, layout: str = "zigzag"
) -> list[float]:
    model: Any = tiny_model(family).double().train()
    model.config.use_cache = use_cache
    input_ids, labels, position_ids = tensors = batch(packed)
    single = loss_of(model(input_ids, position_ids=position_ids).logits, labels)
    return differences_in_block(model, tensors, single, mask, layout)


PACKED = IntervalMask.documents(LENGTHS)
RIGHT = [
    ("llama", False, True, None, "zigzag"),
    ("llama", False, False, None, "striped"),
    ("llama", True, False, PACKED, "contiguous"),
    ("llama", True, False, PACKED, "zigzag"),
]


def all_differences() -> list[list[float]]:
    return [differences(*arguments) for arguments in RIGHT]


def test_a_transformers_model_as_the_page_calls_it() -> None:
    """float64: sums of a few hundred terms, through two layers."""
    for rank in run_ranks(2, all_differences):
        assert max(map(max, rank)) <= 1e-12


TREE = [-1, 0, 1, 1, 0], [9, 6, 5, 8, 4]
WAYS = [[0, 1, 2], [0, 1, 3], [0, 4]]  # the nodes on the way to each leaf


def differences_on_a_tree() -> list[float]:
    """Compare with each way as a row of its own, where the loss of a shared token counts in the first."""
    model: Any = tiny_model("llama").double().train()
    generator = torch.Generator().manual_seed(0)
    input_ids, labels = (torch.randint(3, 90, (2, 32), generator=generator) for _ in range(2))
    nodes = torch.arange(32).split(TREE[1])
    single, counted = torch.zeros((), dtype=torch.float64), torch.zeros(32, dtype=torch.bool)
    for way in (torch.cat([nodes[node] for node in nodes_of_way]) for nodes_of_way in WAYS):
        targets = labels[:, way].masked_fill(counted[way], -100)
        single = single + loss_of(model(input_ids[:, way]).logits, targets)
        counted[way] = True
    tensors = [input_ids, labels, tree_position_ids(*TREE)]
    return differences_in_block(model, tensors, single, IntervalMask.tree(*TREE), "zigzag")


def test_a_transformers_model_on_a_tree() -> None:
    """float64: the prompt once, and its branches as if each had its own. The gradient of a shared token goes through
    the model's norms as a sum here, and branch by branch there; all 5 compute in float32, and round it twice each."""
    for loss, *gradients in run_ranks(2, differences_on_a_tree):
        assert loss <= 1e-12
        assert max(gradients) <= 10 * 2**-24


def forward(model: Any, *, positions: bool) -> None:
    input_ids, _, position_ids = batch(False)
    with context_parallel(dist.group.WORLD, buffers=[input_ids, position_ids], buffer_seq_dims=[1, 1]):
        model(input_ids, **({"position_ids": position_ids} if positions else {}))


REFUSED: dict[str, Callable[[], Any]] = {
    "position_ids of packed documents, which context_parallel": lambda: differences(
        "llama", True, False, IntervalMask.tree([-1, 0, 0], [7, 20, 5])
    ),
    "positions of 16 tokens that count from 0 on every rank: the model got no position_ids": lambda: forward(
        tiny_model(), positions=False
    ),
    "position_ids of packed documents": lambda: differences("llama", True, False),
    "mask=IntervalMask.from_position_ids(position_ids)": lambda: differences(
        "llama", True, False, IntervalMask.documents([16, 16])
    ),
    "transformers makes such a mask of local tokens": lambda: differences("mistral-sliding", False, False),
    "sdpa_attention_forward has a sliding window of 20 tokens": lambda: forward(
        tiny_model("mistral-sliding", sliding_window=20), positions=True
    ),
    "hides from the ring": lambda: forward(tiny_model(attn_implementation="eager"), positions=True),
}


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (InputError, RefusedError) as error:
        return str(error)
    return "nothing"


def refusals() -> list[str]:
    """Return what each of them says; the group goes on."""
    return [message_of(call) for call in REFUSED.values()]


def test_transformers_habits_that_depend_on_the_local_length_are_refused() -> None:
    for rank in run_ranks(2, refusals):
        for part, message in zip(REFUSED, rank, strict=True):
            assert part in message


# ---- a loss of transformers' own ----------------------------------------------------------------


def _labeled(given: str, targets: Tensor) -> list[float]:
    """The loss that a model returns inside the block, on each rank."""
    ids, _, positions = batch(packed=False)
    model: Any = tiny_model().double()

    def on_rank(group: LoopbackGroup) -> float:
        tensors = [ids.clone(), targets.clone(), positions.clone()]
        with context_parallel(group, buffers=tensors, buffer_seq_dims=[1] * 3):
            more: dict[str, Any] = {"labels": tensors[1]}
            if given != "labels":
                more["shift_labels"] = tensors[1]
            if given == "count":
                more["num_items_in_batch"] = targets.ne(-100).sum() / 2
            return float(model(input_ids=tensors[0], position_ids=tensors[2], **more).loss)

    return LoopbackWorld(2).run(on_rank)


@pytest.mark.parametrize(("given", "ignored"), [("shift_labels", [0, 8, 9, 31]), ("count", [*range(20), 31])])
def test_labels_inside_the_block_are_exact_with_a_count(given: str, ignored: list[int]) -> None:
    """As many targets on both ranks, or their number."""
    ids, targets, positions = batch(packed=False)
    targets[:, ignored] = -100
    logits = tiny_model().double()(input_ids=ids, position_ids=positions).logits
    expected = float(F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()))
    assert sum(_labeled(given, targets)) / 2 == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("given", ["labels", "shift_labels"])
def test_labels_inside_the_block_are_refused(given: str) -> None:
    targets = batch(packed=False)[1]
    targets[:, :20] = -100
    with pytest.raises(RefusedError, match=r"labels are (shifted|averaged over targets).* within a shard"):
        _labeled(given, targets)


@pytest.mark.parametrize("pick", [lambda x, t: x, lambda x, t: x.clone(), lambda x, t: x[t != -100]])
@pytest.mark.parametrize("ignored", [0, 1])
def test_a_mean_in_a_loop_is_that_of_one_process_or_refused(ignored: int, pick: Any) -> None:
    logits, targets = torch.randn(16, 8, dtype=torch.float64), torch.arange(16) % 8
    targets[:ignored] = -100

    def on_rank(group: LoopbackGroup) -> float:
        tensors = [logits.clone(), targets.clone()]
        with context_parallel(group, buffers=tensors, buffer_seq_dims=[0, 0]):
            local, target = (pick(x, tensors[1]) for x in tensors)
            loss, of_log = F.cross_entropy(local, target), F.nll_loss(local.log_softmax(-1), target)
            assert of_log.item() == pytest.approx(loss.item(), rel=1e-12)
            return loss.item()

    if ignored:
        with pytest.raises(RefusedError, match="averaged over targets, of which ranks have different numbers"):
            LoopbackWorld(2).run(on_rank)
    else:
        losses = LoopbackWorld(2).run(on_rank)
        assert sum(losses) / 2 == pytest.approx(float(F.cross_entropy(logits, targets)), rel=1e-12)


SHIFTS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda logits, ids: F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[..., 1:].flatten(), reduction="sum"),
    lambda logits, ids: F.cross_entropy(logits.mT, ids.roll(-1, 1), reduction="sum"),
    lambda logits, ids: logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]),
]


@pytest.mark.parametrize("shift", SHIFTS)
def test_labels_that_a_loop_shifts_inside_are_refused(shift: Callable[[Tensor, Tensor], Any]) -> None:
    def on_rank(group: LoopbackGroup) -> None:
        logits, ids = torch.randn(2, 16, 8), torch.randint(8, (2, 16))
        with context_parallel(group, buffers=[logits, ids], buffer_seq_dims=[1, -1]):
            chunks = zip(*(x[0].split(5) for x in (logits, ids)), strict=True)
            assert all(F.cross_entropy(local, target, reduction="sum") > 0 for local, target in chunks)
            shift(logits, ids)

    with pytest.raises(RefusedError, match="labels are shifted within a shard"):
        LoopbackWorld(2).run(on_rank)
