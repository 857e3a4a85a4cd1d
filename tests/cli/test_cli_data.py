"""The data of `ringtile train`: files to documents to rows to batches, and every refusal."""

from __future__ import annotations

import pathlib

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from ringtile.cli.data import (
    IGNORE_INDEX,
    ByteEncoder,
    DataConfig,
    PackedRows,
    PretrainedEncoder,
    digest_files,
    find_files,
    load_documents,
    make_collator,
    make_rows,
)
from ringtile.errors import ConfigError

TEXTS = ["first document\n\nof two paragraphs", "second", "caf\u00e9 \u4e16"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


def tokenized(lengths: list[int]) -> datasets.Dataset:
    """Documents whose tokens are 0, 1, 2, ... through all of them."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    ids = [list(range(end - length, end)) for length, end in zip(lengths, ends, strict=True)]
    return datasets.Dataset.from_dict({"input_ids": ids, "length": lengths})


# ---- files ----------------------------------------------------------------------------------------


def test_find_files_expands_globs_once_each_in_order(tmp_path: pathlib.Path) -> None:
    for name in ("b.txt", "a.txt", "deep/er/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    patterns = [f"{tmp_path}/b.txt", f"{tmp_path}/**/*.txt"]
    names = [pathlib.Path(file).name for file in find_files(patterns, "data.files")]
    assert names == ["b.txt", "a.txt", "c.txt"]


def test_find_files_names_the_pattern_that_matches_nothing(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"data.eval_files: .*missing\*\.txt names no file; expected"):
        find_files([f"{tmp_path}/missing*.txt"], "data.eval_files")
    with pytest.raises(ConfigError, match="names no file"):  # a folder is not a file
        find_files([str(tmp_path)], "data.files")


def test_digest_changes_when_a_file_is_written(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("abc")
    before = digest_files([str(file)])
    assert digest_files([str(file)]) == before
    file.write_text("abcd")
    assert digest_files([str(file)]) != before


def test_text_jsonl_and_parquet_hold_the_same_documents(tmp_path: pathlib.Path) -> None:
    for index, text in enumerate(TEXTS):
        (tmp_path / f"{index}.txt").write_text(text, encoding="utf-8")
    table = pyarrow.table({"id": [0, 1, 2], "body": TEXTS})
    pyarrow.parquet.write_table(table, tmp_path / "all.parquet")
    datasets.Dataset(table).to_json(tmp_path / "all.jsonl")
    from_text = load_documents([str(tmp_path / f"{index}.txt") for index in range(3)], "text", "data.files")
    assert from_text["text"][:] == TEXTS
    for name in ("all.parquet", "all.jsonl"):
        assert load_documents([str(tmp_path / name)], "body", "data.files")["text"][:] == TEXTS


def test_formats_mix_and_empty_documents_are_left_out(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "b.jsonl").write_text('{"text": "record"}\n{"text": ""}\n{"text": null}\n')
    files = [str(tmp_path / name) for name in ("a.txt", "empty.txt", "b.jsonl")]
    assert sorted(load_documents(files, "text", "data.files")["text"]) == ["plain", "record"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "data.files: no text in empty.txt; expected at least one document"),
        ("empty.jsonl", b"", "data.files: no text in empty.jsonl"),
        ("blank.jsonl", b'{"text": ""}\n', "data.files: no text in blank.jsonl"),
        ("latin.txt", b"first\ncaf\xe9", r"data.files: .*latin.txt, line 2: no UTF-8 \(byte 0xe9\); expected UTF-8"),
        ("broken.parquet", b"no parquet", "data.files: cannot read broken.parquet as parquet"),
        ("null.json", b"null", "data.files: .*null.json, line 1: None, which is no object"),
        ("array.json", b'[{"text": "a"}, 1]', "data.files: .*array.json, line 1: 1, which is no object"),
        ("pretty.json", b'{\n"text": \n}', r"data.files: .*pretty.json, line 3: no JSON \(Expecting value"),
    ],
)
def test_unusable_file_is_refused_by_name(tmp_path: pathlib.Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match="^" + message):
        load_documents([str(tmp_path / name)], "text", "data.files")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": oops}', r"no JSON \(Expecting value at column 10\); expected JSON"),
        (b'{"text": ', r"no JSON \(Expecting value at column 9\)"),
        (b'{"text": "\xff\xfe"}', r"no UTF-8 \(byte 0xff\); expected UTF-8"),
        (b'{"text": 3}', "3 in data.text_column 'text'; expected an object whose 'text' is a string or null"),
        (b'{"text": ["a"]}', r"\['a'\] in data.text_column 'text'; expected"),
        (b'{"text": NaN}', "nan in data.text_column 'text'; expected"),
        (b"[1, 2]", r"\[1, 2\], which is no object; expected"),
        (b'{"body": "x"}', r"a record without data.text_column 'text' \(it has 'body'\); expected"),
        (b'{"text": "\\ud800"}', "half of a character"),
        (b"[" * 5000, "no JSON that Python reads"),
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "no JSON that Python reads"),
    ],
)
def test_bad_line_is_named(tmp_path: pathlib.Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "good"}\n')
    with pytest.raises(ConfigError, match=r"^data.files: .*a.jsonl, line 3: " + message):
        load_documents([str(tmp_path / "a.jsonl")], "text", "data.files")


def test_texts_are_taken_as_they_are(tmp_path: pathlib.Path) -> None:
    """Not as dates, nor with an eye on other columns."""
    lines = ['{"text": "2026-01-01", "n": 1}', '{"n": "one", "text": "2026-01-02T00:00:00"}']
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    (tmp_path / "b.json").write_text('[{"text": "x"}, {"text": "y"}]')
    (tmp_path / "c.json").write_text('{\n "text": "z"\n}')
    (tmp_path / "d.txt").write_bytes(b"a\r\nb")
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.json", "c.json", "d.txt")]
    texts = load_documents(files, "text", "data.files")["text"][:]
    assert texts == ["2026-01-01", "2026-01-02T00:00:00", "x", "y", "z", "a\nb"]


def test_changed_file_is_read_again(tmp_path: pathlib.Path) -> None:
    for text in ("one", "another"):
        (tmp_path / "a.jsonl").write_text(f'{{"text": "{text}"}}')
        assert load_documents([str(tmp_path / "a.jsonl")], "text", "data.files")["text"][:] == [text]


# ---- tokens ---------------------------------------------------------------------------------------


def test_byte_encoder_loses_nothing() -> None:
    for text in TEXTS:
        tokens = ByteEncoder().encode(text)
        assert bytes(tokens[:-1]).decode() == text
        assert tokens[-1] == 256 == ByteEncoder.vocab_size - 1


def save_tokenizer(folder: pathlib.Path, **special: str) -> str:
    vocabulary = {"<end>": 0, "a": 1, "b": 2, "<pad>": 3}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, **special).save_pretrained(folder)
    return str(folder)


def test_pretrained_encoder_ends_documents_and_pads(tmp_path: pathlib.Path) -> None:
    encoder = PretrainedEncoder(save_tokenizer(tmp_path / "both", eos_token="<end>", pad_token="<pad>"))
    assert (encoder.encode("a b"), encoder.pad_id, encoder.vocab_size) == ([1, 2, 0], 3, 4)
    assert PretrainedEncoder(save_tokenizer(tmp_path / "end", eos_token="<end>")).pad_id == 0


def test_tokenizer_that_cannot_serve_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="has no eos_token"):
        PretrainedEncoder(save_tokenizer(tmp_path / "none"))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigError, match=r"data.tokenizer '.*nothing' cannot be loaded .* expected a folder"):
        PretrainedEncoder(str(tmp_path / "nothing"))


# ---- rows -----------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), seq_len=st.integers(2, 50))
def test_packed_rows_hold_every_token_once_in_order(lengths: list[int], seq_len: int) -> None:
    rows = PackedRows(tokenized(lengths), seq_len)
    assert len(rows) == sum(lengths) // seq_len
    begins = {sum(lengths[:index]) for index in range(len(lengths))}
    for index in range(len(rows)):
        row = rows[index]
        expected = range(index * seq_len, (index + 1) * seq_len)
        assert row["input_ids"].tolist() == list(expected)
        position = -1
        for token, got in zip(expected, row["position_ids"].tolist(), strict=True):
            position = 0 if token in begins or token == expected[0] else position + 1
            assert got == position


def test_nothing_predicts_the_first_token_of_a_document() -> None:
    batch = make_collator(pad_id=9)([PackedRows(tokenized([3, 2, 7]), 6)[index] for index in range(2)])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    ignored = IGNORE_INDEX
    assert batch["labels"].tolist() == [[ignored, 1, 2, ignored, 4, ignored], [ignored, 7, 8, 9, 10, 11]]
    assert "attention_mask" not in batch  # transformers sees documents in position_ids only without one


def test_padded_rows_are_cut_and_padded_on_the_right() -> None:
    documents = datasets.Dataset.from_dict({"text": ["abcdef", "g"]})
    rows = make_rows(documents, DataConfig(files=["x"], seq_len=4, packing=False), ByteEncoder(), "data.files")
    batch = make_collator(pad_id=256)([rows[0], rows[1]])
    assert batch["input_ids"].tolist() == [[97, 98, 99, 100], [103, 256, 256, 256]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[97, 98, 99, 100], [103, 256, IGNORE_INDEX, IGNORE_INDEX]]


def test_too_little_text_to_pack_one_row_is_refused() -> None:
    documents = datasets.Dataset.from_dict({"text": ["abc"]})
    with pytest.raises(ConfigError, match=r"data.files: got 4 tokens, expected at least data.seq_len = 5"):
        make_rows(documents, DataConfig(files=["x"], seq_len=5), ByteEncoder(), "data.files")
