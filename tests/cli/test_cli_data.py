"""The data of `ringtile train`: files to documents to rows to batches, and every refusal."""

from __future__ import annotations

import pathlib
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from ringtile.cli.data import Encoder, load_documents, make_collator, make_encoder, make_rows
from ringtile.cli.recipe import DataConfig, Recipe
from ringtile.errors import ConfigError
from ringtile.hf.config import Config

TEXTS = ["first document\n\nof two paragraphs", "second", "caf\u00e9 \u4e16"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


def recipe(model: dict[str, Any] | None = None, **data: Any) -> Recipe:
    return Recipe(model or {"model_type": "llama"}, DataConfig(**{"files": ["x"], "seq_len": 8} | data), {}, Config())


def texts_of(*files: pathlib.Path, column: str = "text") -> list[str]:
    texts: list[str] = load_documents([str(file) for file in files], column, "data.files")["text"][:]
    return texts


# ---- files ----------------------------------------------------------------------------------------


def test_globs_name_each_file_once_in_order(tmp_path: pathlib.Path) -> None:
    for name in ("b[1].txt", "a.txt", "deep/er/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    assert texts_of(tmp_path / "b[[]1].txt", tmp_path / "**/*.txt") == [
        f"text of {name}" for name in ("b[1].txt", "a.txt", "deep/er/c.txt")
    ]


def test_pattern_that_matches_nothing_is_named(tmp_path: pathlib.Path) -> None:
    for pattern in (tmp_path / "missing*.txt", tmp_path):  # a folder is not a file
        with pytest.raises(ConfigError, match=r"data.files: .* names no file; expected"):
            texts_of(pattern)


def test_text_jsonl_and_parquet_hold_the_same_documents(tmp_path: pathlib.Path) -> None:
    for index, text in enumerate(TEXTS):
        (tmp_path / f"{index}.txt").write_text(text, encoding="utf-8")
    table = pyarrow.table({"id": [0, 1, 2], "body": TEXTS})
    pyarrow.parquet.write_table(table, tmp_path / "all.parquet")
    datasets.Dataset(table).to_json(tmp_path / "all.jsonl")
    assert texts_of(*(tmp_path / f"{index}.txt" for index in range(3))) == TEXTS
    for name in ("all.parquet", "all.jsonl"):
        assert texts_of(tmp_path / name, column="body") == TEXTS


def test_formats_mix_and_documents_without_text_are_left_out(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "b.jsonl").write_text('{"text": "record"}\n{"text": ""}\n{"text": null}\n')
    assert texts_of(*(tmp_path / name for name in ("a.txt", "empty.txt", "b.jsonl"))) == ["plain", "record"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", b"first\ncaf\xe9", "data.files: "),
        ("broken.parquet", b"no parquet", "data.files: "),
        ("broken.jsonl", b'{"text": oops}', "data.files: "),
        ("body.jsonl", b'{"body": "x"}', r"data.text_column 'text' is missing; expected a column of strings \(body\)"),
        ("number.jsonl", b'{"text": 3}', "data.text_column 'text' is int64; expected a column of strings"),
        ("list.jsonl", b'{"text": ["a"]}', "data.text_column 'text' is .*; expected a column of strings"),
        # Which `datasets` would take for a date, and write in another way.
        (
            "date.jsonl",
            b'{"text": "2026-01-01"}',
            "data.text_column 'text' is timestamp.*; expected a column of strings",
        ),
    ],
)
def test_unusable_file_is_refused(tmp_path: pathlib.Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match="^" + message):
        texts_of(tmp_path / name)


def test_changed_file_is_read_again(tmp_path: pathlib.Path) -> None:
    for text in ("one", "another"):
        (tmp_path / "a.jsonl").write_text(f'{{"text": "{text}"}}')
        assert texts_of(tmp_path / "a.jsonl") == [text]


# ---- tokens ---------------------------------------------------------------------------------------


def test_bytes_lose_nothing() -> None:
    encoder = make_encoder(recipe())
    for text in TEXTS:
        tokens = encoder.encode(text)
        assert bytes(tokens[:-1]).decode() == text
        assert tokens[-1] == encoder.end == 256 == encoder.vocab_size - 1


def save_tokenizer(folder: pathlib.Path, **special: str) -> str:
    vocabulary = {"<end>": 0, "a": 1, "b": 2, "<pad>": 3}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, **special).save_pretrained(folder)
    return str(folder)


def test_tokenizer_ends_documents(tmp_path: pathlib.Path) -> None:
    folder = save_tokenizer(tmp_path, eos_token="<end>", pad_token="<pad>")
    for encoder in (make_encoder(recipe(tokenizer=folder)), make_encoder(recipe({"name": folder}))):
        assert (encoder.encode("a b"), encoder.end, encoder.vocab_size) == ([1, 2, 0], 0, 4)


def test_tokenizer_that_cannot_serve_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="has no eos_token"):
        make_encoder(recipe(tokenizer=save_tokenizer(tmp_path / "none")))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigError, match=r"data.tokenizer '.*nothing' cannot be loaded: "):
        make_encoder(recipe(tokenizer=str(tmp_path / "nothing")))


# ---- rows -----------------------------------------------------------------------------------------


def rows_of(lengths: list[int], seq_len: int, **data: Any) -> datasets.Dataset:
    """Rows of documents whose tokens are 0, 1, 2, ... through all of them."""
    ends = np.cumsum(lengths).tolist()
    tokens = {str(end): list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)}
    documents = datasets.Dataset.from_dict({"text": list(tokens)})
    return make_rows(documents, recipe(seq_len=seq_len, **data), Encoder(tokens.__getitem__, 10**6, 9), "data.files")


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), seq_len=st.integers(2, 50))
def test_packed_rows_hold_every_token_once_in_order(lengths: list[int], seq_len: int) -> None:
    if sum(lengths) < seq_len:
        with pytest.raises(ConfigError, match=f"data.files: got less than one row of data.seq_len = {seq_len} tokens"):
            rows_of(lengths, seq_len)
        return
    rows = rows_of(lengths, seq_len)
    assert len(rows) == sum(lengths) // seq_len
    begins = {sum(lengths[:index]) for index in range(len(lengths))}
    for index, row in enumerate(rows):
        expected = range(index * seq_len, (index + 1) * seq_len)
        assert row["input_ids"].tolist() == list(expected)
        position = -1
        for token, got, label in zip(expected, row["position_ids"].tolist(), row["labels"].tolist(), strict=True):
            position = 0 if token in begins or token == expected[0] else position + 1
            assert got == position
            assert label == (token if position else -100)  # nothing predicts the first token


def test_batches_of_packed_rows_have_no_attention_mask() -> None:
    """transformers sees documents in position_ids only without one."""
    rows = rows_of([3, 2, 7], 6)
    batch = make_collator(9)([rows[0], rows[1]])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    assert batch["labels"].tolist() == [[-100, 1, 2, -100, 4, -100], [-100, 7, 8, 9, 10, 11]]
    assert batch.keys() == {"input_ids", "position_ids", "labels"}


def test_padded_rows_are_cut_and_padded_on_the_right() -> None:
    rows = rows_of([6, 2], 4, packing=False)
    batch = make_collator(9)([rows[0], rows[1]])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3], [6, 7, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[0, 1, 2, 3], [6, 7, -100, -100]]
    assert batch["input_ids"].dtype == torch.int64
