"""Interval masks against bool matrices written from the definition, query by query and key by key."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ringtile.errors import InputError, MaskNotExpressibleError
from ringtile.sequence.mask import IntervalMask
from strategies import dense, document_lengths, masks
from torch import Tensor

SIZES = st.integers(1, 24)


def written_out(seq_len: int, attends: Callable[[int, int], bool]) -> Tensor:
    """bool (1, S, S) of a rule on (query, key)."""
    return torch.tensor([[[attends(q, k) for k in range(seq_len)] for q in range(seq_len)]])


def by_document(document: Tensor, causal: bool) -> Tensor:
    """bool (B, S, S) for document (B, S): same nonzero number, and the key not after the query if causal."""
    same = (document[:, :, None] == document[:, None, :]) & (document > 0)[:, :, None]
    return same.tril() if causal else same


def first_row_with_a_hole(attend: Tensor) -> tuple[int, int] | None:
    for row, of_row in enumerate(attend.tolist()):
        for query, keys in enumerate(of_row):
            text = "".join("x" if key else " " for key in keys).strip()
            if " " in text:
                return row, query
    return None


@given(SIZES, st.data())
def test_numbers_say_what_their_rule_says(seq_len: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(1, seq_len + 3))
    prefix = data.draw(st.integers(0, seq_len))
    cases = [
        (IntervalMask.full(seq_len), lambda q, k: True),
        (IntervalMask.causal(seq_len), lambda q, k: k <= q),
        (IntervalMask.sliding_window(seq_len, number), lambda q, k: q - number < k <= q),
        (IntervalMask.sliding_window(seq_len, number, causal=False), lambda q, k: abs(q - k) < number),
        (IntervalMask.prefix_lm(seq_len, prefix), lambda q, k: k <= q or (q < prefix and k < prefix)),
        (IntervalMask.chunked(seq_len, number), lambda q, k: k <= q and k // number == q // number),
        (
            IntervalMask.chunked(seq_len, number, counted=torch.arange(seq_len)[None] - 2),
            lambda q, k: k <= q and (k - 2) // number == (q - 2) // number,
        ),
    ]
    for mask, rule in cases:
        assert torch.equal(dense(mask), written_out(seq_len, rule))


@given(SIZES, st.booleans(), st.data())
def test_documents_keep_to_themselves(seq_len: int, causal: bool, data: st.DataObject) -> None:
    rows = data.draw(st.lists(document_lengths(seq_len), min_size=1, max_size=3))
    document = torch.tensor([[i + 1 for i, length in enumerate(row) for _ in range(length)] for row in rows])
    expected = by_document(document, causal)

    assert torch.equal(dense(IntervalMask.documents(rows, causal)), expected)
    assert IntervalMask.documents(rows[0], causal) == IntervalMask.documents(rows[:1], causal)
    bounds = torch.tensor([0, *rows[0]], dtype=torch.int32).cumsum(0).int()
    assert torch.equal(dense(IntervalMask.from_cu_seqlens(bounds, causal)), expected[:1])
    position_ids = torch.tensor([[i for length in row for i in range(length)] for row in rows])
    if all(length > 0 for row in rows for length in row):
        assert torch.equal(dense(IntervalMask.from_position_ids(position_ids, causal)), expected)


def test_chunks_may_be_of_any_length_and_counted_from_anywhere() -> None:
    assert IntervalMask.chunked(4, 10**30) == IntervalMask.causal(4)
    counted = torch.arange(4)[None] + 2**41 - 2  # a chunk begins at the third token
    assert torch.equal(IntervalMask.chunked(4, 2**41, counted=counted).begin, torch.tensor([[0, 0, 2, 2]]).int())


def test_documents_may_be_empty() -> None:
    assert IntervalMask.documents([0, 2, 0, 3, 0]) == IntervalMask.documents([2, 3])
    assert IntervalMask.from_cu_seqlens(torch.tensor([0, 2, 2, 5])) == IntervalMask.documents([2, 3])


def test_position_ids_may_start_anywhere() -> None:
    """A row cut out of a longer one does not start at 0; a document may resume later than the last one ended."""
    mask = IntervalMask.from_position_ids(torch.tensor([[7, 8, 9, 0, 1, 5, 6], [0, 1, 2, 3, 4, 5, 6]]))
    assert mask == IntervalMask.documents([[3, 2, 2], [7]])


@given(st.integers(1, 3), st.integers(1, 10), st.booleans(), st.integers(0, 2**31))
def test_padding_is_exact_or_refused(batch: int, seq_len: int, causal: bool, seed: int) -> None:
    """Any numbers at all: equal to the definition when that is one interval per query, else the first one is named."""
    document = torch.randint(0, 3, (batch, seq_len), generator=torch.Generator().manual_seed(seed))
    expected = by_document(document, causal)
    hole = first_row_with_a_hole(expected)
    if hole is None:
        assert torch.equal(dense(IntervalMask.from_padding(document, causal)), expected)
    else:
        with pytest.raises(MaskNotExpressibleError, match=f"row {hole[0]}, query {hole[1]} needs the keys"):
            IntervalMask.from_padding(document, causal)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_padding_left_and_right(dtype: torch.dtype) -> None:
    attention_mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]).to(dtype)
    mask = IntervalMask.from_padding(attention_mask)
    assert mask.begin.tolist() == [[0, 0, 2, 2, 2], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert mask.end.tolist() == [[0, 0, 3, 4, 5], [1, 2, 3, 0, 0], [0, 0, 0, 0, 0]]


def test_hole_in_the_padding_names_the_keys() -> None:
    with pytest.raises(MaskNotExpressibleError, match=r"row 1, query 3 needs the keys \[0, 2\), \[3, 4\): 2 intervals"):
        IntervalMask.from_padding(torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 1, 1]]))
    with pytest.raises(MaskNotExpressibleError, match=r"row 0, query 1 needs the keys \[1, 2\), \[3, 5\): 2 intervals"):
        IntervalMask.from_padding(torch.tensor([[2, 1, 0, 1, 1]]), causal=False)


def test_bool_of_any_shape() -> None:
    attend = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(1)) < 2
    mask = IntervalMask.from_bool(attend.tril())
    assert IntervalMask.from_bool(attend.tril()[:, None]) == mask
    assert (
        IntervalMask.from_bool(attend.tril()[0]) == IntervalMask.from_bool(attend.tril()[:1]) == IntervalMask.causal(4)
    )


@given(st.integers(1, 3), SIZES, st.data())
def test_bool_of_any_mask_is_that_mask(batch: int, seq_len: int, data: st.DataObject) -> None:
    mask = data.draw(masks(batch, seq_len))
    assert IntervalMask.from_bool(dense(mask)) == mask


def test_bool_with_many_holes_shows_a_few() -> None:
    attend = torch.zeros(20, 20, dtype=torch.bool)
    attend[3, ::2] = attend[[2, 4]] = True
    attend[2, 3] = attend[4, 7] = False
    with pytest.raises(MaskNotExpressibleError, match=r"\[6, 7\), \.\.\.: 10 intervals"):
        IntervalMask.from_bool(attend)


@given(st.integers(1, 3), SIZES, st.data())
def test_intersection_is_and(batch: int, seq_len: int, data: st.DataObject) -> None:
    a, b = data.draw(masks(batch, seq_len)), data.draw(masks(batch, seq_len))
    assert torch.equal(dense(a & b), dense(a) & dense(b))
    assert a & b == b & a
    assert a & a == a


def test_equality_does_not_see_how_nothing_is_written() -> None:
    nothing = IntervalMask(
        torch.tensor([[3, 1]], dtype=torch.int32)[:, :2] * 0 + 2, torch.ones(1, 2, dtype=torch.int32)
    )
    assert nothing == IntervalMask(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32))
    assert nothing != IntervalMask.causal(2)
    assert IntervalMask.causal(2) != IntervalMask.causal(3)
    assert IntervalMask.causal(2) != "causal"


def test_mask_does_not_change_with_the_tensors_it_was_made_of() -> None:
    begin, end = torch.zeros(1, 4, dtype=torch.int32), torch.full((1, 4), 4, dtype=torch.int32)
    mask = IntervalMask(begin, end)
    end.zero_()
    assert mask == IntervalMask.full(4)
    with pytest.raises(AttributeError):
        mask.begin = begin  # type: ignore[misc]


ROW = torch.zeros(1, 4, dtype=torch.int32)
REFUSALS = {
    "begin missing": (lambda: IntervalMask(None, ROW), "begin is a NoneType; expected a tensor"),
    "end missing": (lambda: IntervalMask(ROW, None, ROW, ROW), "end is a NoneType; expected a tensor"),
    "begin dtype": (lambda: IntervalMask(ROW.long(), ROW), "begin is torch.int64 .* expected int32"),
    "end shape": (lambda: IntervalMask(ROW, ROW[0]), r"end is torch.int32 \(4,\) .* expected int32 \(B or 1, S\)"),
    "begin empty": (lambda: IntervalMask(ROW[:, :0], ROW[:, :0]), "not empty"),
    "shapes differ": (lambda: IntervalMask(ROW, ROW[:, :3]), "must agree"),
    "begin negative": (lambda: IntervalMask(ROW - 1, ROW), r"begin goes down to -1 .* 0\.\.4"),
    "end too far": (lambda: IntervalMask(ROW, ROW + 5), r"end up to 5; expected global positions in 0\.\.4"),
    "no tokens": (lambda: IntervalMask.causal(0), "seq_len is 0; expected 1.."),
    "too many tokens": (lambda: IntervalMask.full(2**31), "seq_len is 2147483648; expected 1..2147483647"),
    "window": (lambda: IntervalMask.sliding_window(4, 0), "window is 0; expected at least 1"),
    "chunk": (lambda: IntervalMask.chunked(4, 0), "chunk is 0; expected at least 1"),
    "counted": (
        lambda: IntervalMask.chunked(4, 2, counted=torch.arange(3)[None]),
        r"counted is \(1, 3\); expected \(B or 1, 4\)",
    ),
    "prefix": (lambda: IntervalMask.prefix_lm(4, 5), r"prefix_len is 5; expected 0\.\.4"),
    "uneven rows": (lambda: IntervalMask.documents([[2, 2], [3]]), r"rows of \[4, 3\] tokens; expected .* every row"),
    "negative length": (lambda: IntervalMask.documents([3, -1]), "expected lengths >= 0"),
    "fraction": (lambda: IntervalMask.documents([1.5, 2.5]), "expected integers"),
    "numbers and lists": (lambda: IntervalMask.documents([2, [1, 1]]), "expected integers"),
    "no documents": (lambda: IntervalMask.documents([]), "seq_len is 0"),
    "cu_seqlens start": (
        lambda: IntervalMask.from_cu_seqlens(torch.tensor([1, 3])),
        r"\[1, 3\]; expected 0, \.\.\., S",
    ),
    "cu_seqlens falls": (lambda: IntervalMask.from_cu_seqlens(torch.tensor([0, 3, 2])), "rising"),
    "position_ids shape": (
        lambda: IntervalMask.from_position_ids(torch.arange(4)),
        r"torch.int64 \(4,\); expected int",
    ),
    "position_ids float": (lambda: IntervalMask.from_position_ids(torch.zeros(1, 4)), "torch.float32 .* integers"),
    "padding negative": (lambda: IntervalMask.from_padding(torch.tensor([[1, -1]])), "holds -1; expected 0"),
    "padding 4-D": (lambda: IntervalMask.from_padding(ROW.view(1, 1, 2, 2)), "integers of 2 dimension"),
    "bool dtype": (lambda: IntervalMask.from_bool(torch.ones(4, 4)), "attend is torch.float32 .* expected bool"),
    "bool heads": (lambda: IntervalMask.from_bool(torch.ones(1, 2, 4, 4) > 0), r"\(1, 2, 4, 4\); expected bool"),
    "bool oblong": (lambda: IntervalMask.from_bool(torch.ones(4, 5) > 0), r"\(4, 5\); expected bool"),
    "and, length": (lambda: IntervalMask.full(4) & IntervalMask.full(5), "masks of 4 and 5 tokens"),
    "and, rows": (
        lambda: IntervalMask(ROW.repeat(2, 1), ROW.repeat(2, 1)) & IntervalMask(ROW.repeat(3, 1), ROW.repeat(3, 1)),
        "masks of 2 and 3 rows",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_refused_by_name(case: str) -> None:
    call, message = REFUSALS[case]
    with pytest.raises(InputError, match=message):
        call()
