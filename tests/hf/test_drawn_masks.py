"""Masks that transformers' functions compose are the intervals that are read off them, or refused."""

import pytest
import ringtile
import torch
from hypothesis import given
from hypothesis import strategies as st
from ringtile.hf.drawn_masks import intervals_of
from ringtile.hf.masks import CHUNKS_FOLLOW_POSITIONS
from transformers import masking_utils as masks

SEQ_LEN = 13
CAUSAL = masks.causal_mask_function


def drawn(function, padding: torch.Tensor) -> torch.Tensor:
    """bool (B, S, S), as transformers draws it."""
    whole = masks.sdpa_mask(
        batch_size=2,
        q_length=SEQ_LEN,
        kv_length=SEQ_LEN,
        mask_function=function,
        attention_mask=padding,
        allow_is_causal_skip=False,
        device=torch.device("cpu"),
    )
    return whole[:, 0]


def read(function, padding: torch.Tensor) -> torch.Tensor:
    mask = intervals_of(function, SEQ_LEN, padding)
    keys = torch.arange(SEQ_LEN)
    return (mask.begin[..., None] <= keys) & (keys < mask.end[..., None]) & padding[:, None]


def runs(draw, first: int) -> torch.Tensor:
    """int64 (2, S): numbers of runs of tokens, from `first` up."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=2 * SEQ_LEN, max_size=2 * SEQ_LEN))
    rows = [
        [number for number, length in enumerate(half, first) for _ in range(length)][:SEQ_LEN]
        for half in (lengths[::2], lengths[1::2])
    ]
    return torch.tensor(rows)


@st.composite
def composed(draw):
    """A mask of a model of images: blocks of images, a window around or inside, packed documents; and padding."""
    blocks = runs(draw, 0)
    is_image = torch.tensor(draw(st.lists(st.booleans(), min_size=2 * SEQ_LEN, max_size=2 * SEQ_LEN)))
    blocks = torch.where(is_image[blocks], blocks, -1)
    function = CAUSAL
    if draw(st.booleans()):
        function = masks.and_masks(function, masks.packed_sequence_mask_function(runs(draw, 0)))
    function = masks.or_masks(function, masks.blockwise_overlay(blocks))
    if draw(st.booleans()):
        function = masks.and_masks(function, masks.sliding_window_overlay(draw(st.integers(1, SEQ_LEN + 1))))
    lengths = draw(st.tuples(st.integers(1, SEQ_LEN), st.integers(1, SEQ_LEN)))
    padding = torch.arange(SEQ_LEN) < torch.tensor(lengths)[:, None]
    return function, padding.flip(1) if draw(st.booleans()) else padding


@given(composed())
def test_composed_masks_are_intervals(case):
    """A token of padding may attend anything: no token attends it."""
    function, padding = case
    assert torch.equal(read(function, padding)[padding], drawn(function, padding)[padding])


FUNCTIONS = {
    "causal": CAUSAL,
    "full": masks.bidirectional_mask_function,
    "window": masks.sliding_window_causal_mask_function(4),
    "window both ways": masks.sliding_window_bidirectional_mask_function(3),
    "chunks": masks.chunked_causal_mask_function(4, torch.tensor([0, 2])),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_each_function_is_known(function):
    padding = torch.ones(2, SEQ_LEN, dtype=torch.bool)
    assert torch.equal(read(function, padding), drawn(function, padding))


# ---- packed rows, whose functions count by position ids ------------------------------------------

needs_positions = pytest.mark.skipif(not CHUNKS_FOLLOW_POSITIONS, reason="this transformers draws masks by places")


def by_position(function, position_ids: torch.Tensor, blocks: torch.Tensor | None = None):
    """As transformers composes it: blocks of images are counted by places, and documents are kept apart last."""
    function = masks.remap_positions_for_packed_sequence(function, position_ids)
    if blocks is not None:
        function = masks.or_masks(function, masks.blockwise_overlay(blocks))
    documents = (position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1) != 1).cumsum(1)
    return masks.and_masks(function, masks.packed_sequence_mask_function(documents))


@needs_positions
@given(st.data())
def test_masks_of_packed_rows_are_intervals(data):
    """Documents may begin at any position id: a row that is cut from a longer one begins inside of a document."""
    documents = runs(data.draw, 0)
    inside = torch.arange(SEQ_LEN) - torch.searchsorted(documents, documents)
    first = torch.tensor(data.draw(st.lists(st.integers(0, 9), min_size=SEQ_LEN, max_size=SEQ_LEN)))
    number = data.draw(st.integers(1, SEQ_LEN))
    causal = data.draw(
        st.sampled_from(
            [
                CAUSAL,
                masks.sliding_window_causal_mask_function(number),
                masks.chunked_causal_mask_function(number, torch.zeros(2, dtype=torch.int64)),
            ]
        )
    )
    blocks = torch.where(torch.tensor(data.draw(st.booleans())), runs(data.draw, 0), -1)
    function = by_position(causal, inside + first[documents], blocks)
    padding = torch.ones(2, SEQ_LEN, dtype=torch.bool)
    assert torch.equal(read(function, padding), drawn(function, padding))


@needs_positions
@given(st.data())
def test_blocks_by_position_ids_are_refused_where_they_are_others(data):
    """Gemma 3's sliding layers read an image's block at the position ids of its tokens: in 5.24, of other tokens."""
    documents = runs(data.draw, 0)
    positions = torch.arange(SEQ_LEN) - torch.searchsorted(documents, documents)
    is_image = torch.tensor(data.draw(st.lists(st.booleans(), min_size=2 * SEQ_LEN, max_size=2 * SEQ_LEN)))
    blocks = runs(data.draw, 0)
    blocks = torch.where(is_image[blocks], blocks, -1)
    moved = by_position(masks.or_masks(CAUSAL, masks.blockwise_overlay(blocks)), positions)
    everything = torch.ones(2, SEQ_LEN, dtype=torch.bool)
    try:
        got = read(moved, everything)
    except ringtile.RefusedError:
        assert not torch.equal(blocks.gather(1, positions), blocks)
    else:
        assert torch.equal(got, drawn(moved, everything))


def test_tokens_of_a_prefix_may_be_parted_by_padding():
    """PaliGemma's types of tokens are 0 for its prefix, and for padding."""
    padding = torch.arange(SEQ_LEN).expand(2, -1) < 9
    blocks = torch.where((torch.arange(SEQ_LEN) < 4) | ~padding, 0, -1)
    function = masks.or_masks(CAUSAL, masks.blockwise_overlay(blocks))
    assert torch.equal(read(function, padding)[padding], drawn(function, padding)[padding])


def test_a_block_in_two_pieces_is_refused():
    blocks = torch.zeros(2, SEQ_LEN, dtype=torch.int64)
    blocks[1, 5] = -1
    function = masks.or_masks(CAUSAL, masks.blockwise_overlay(blocks))
    words = "the block of tokens 0 of row 1 has 12 tokens between 0 and 12; expected them one after another"
    with pytest.raises(ringtile.RefusedError, match=words):
        intervals_of(function, SEQ_LEN, None)


def test_an_unknown_function_is_refused():
    def own(batch_idx, head_idx, q_idx, kv_idx):
        return kv_idx <= q_idx

    words = "the model draws a mask with test_drawn_masks.test_an_unknown_function_is_refused, which ringtile does not"
    with pytest.raises(ringtile.RefusedError, match=words):
        intervals_of(masks.or_masks(CAUSAL, own), SEQ_LEN, None)
