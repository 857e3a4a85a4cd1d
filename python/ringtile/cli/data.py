"""Files -> documents -> rows of tokens -> batches, for `ringtile train`.

.jsonl, .json and .parquet give one document a record, any other file is one document of UTF-8 text. `datasets` keeps
them on disk. A document is its tokens and one end-of-document token. Rows are either

  packed   exactly seq_len tokens of the concatenated documents. position_ids restart at 0 where a document starts or
           continues from the row before; the label there is -100, because no token of the row predicts it.
  padded   one document a row, truncated to seq_len, padded on the right to the longest row of its batch.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import datasets  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import pydantic
import torch

from ringtile.config import Section
from ringtile.errors import ConfigError, shown

IGNORE_INDEX = -100  # label that cross_entropy ignores by default
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # by suffix; every other file is text
SHOWN_FILES = 5  # in an error
BOM = b"\xef\xbb\xbf"  # some editors begin a file with it


class DataConfig(Section):
    """The `data:` section of a training file; docs/guide/train.md says what each key means."""

    prefix = "data."

    files: list[str] = pydantic.Field(min_length=1)
    eval_files: list[str] = pydantic.Field(default_factory=list)
    seq_len: int = pydantic.Field(ge=2, le=2**31 - 1)
    packing: bool = True
    text_column: str = "text"
    tokenizer: str | None = None


class Encoder(Protocol):
    """Turns the text of one document into token ids that end in the end-of-document token."""

    vocab_size: int
    pad_id: int

    def encode(self, text: str) -> list[int]: ...


class ByteEncoder:
    """Tokens are the bytes of the UTF-8 text, 0..255, and 256 ends a document (and pads)."""

    vocab_size = 257
    pad_id = 256

    def encode(self, text: str) -> list[int]:
        return [*text.encode(), self.pad_id]


class PretrainedEncoder:
    """A transformers tokenizer, by folder or hub name. key: of the file, that gives the name."""

    def __init__(self, name: str, key: str = "data.tokenizer") -> None:
        from transformers import AutoTokenizer

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(name)
        except Exception as error:  # tokenizers raises nothing more precise for a damaged file
            raise ConfigError(
                f"{key} {name!r} cannot be loaded ({first_line(error)}); expected a "
                "folder with tokenizer files, a hub name, or 'bytes'"
            ) from error
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(f"data.tokenizer {name!r} has no eos_token, which must end every document; set one")
        self.vocab_size = len(self.tokenizer)
        pad_id = self.tokenizer.pad_token_id
        self.pad_id = self.tokenizer.eos_token_id if pad_id is None else pad_id

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer(text)["input_ids"]
        end = self.tokenizer.eos_token_id
        return tokens if tokens[-1:] == [end] else [*tokens, end]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def find_files(patterns: Sequence[str], key: str) -> list[str]:
    """The files that paths and globs (also `**`) name: sorted within a pattern, no file twice."""
    files: dict[str, None] = {}
    for pattern in patterns:
        found = sorted(path for path in glob.glob(pattern, recursive=True) if pathlib.Path(path).is_file())
        if not found:
            raise ConfigError(
                f"{key}: {pattern} names no file; expected a path or glob of text, .jsonl, .json or .parquet files, "
                "relative to the folder of the configuration file"
            )
        files |= dict.fromkeys(str(pathlib.Path(path).resolve()) for path in found)
    return list(files)


def digest_files(files: Sequence[str]) -> str:
    """A digest of names, sizes and modification times: it changes when a file is written to. Reads no file."""
    stats = [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


def load_documents(files: Sequence[str], text_column: str, key: str) -> datasets.Dataset:
    """One row a document, with the single column `text`; empty documents are dropped."""
    by_format: dict[str, list[str]] = {}
    for file in files:
        by_format.setdefault(FORMATS.get(pathlib.Path(file).suffix, "text"), []).append(file)
    parts = [
        read_parquet(members, text_column, key) if name == "parquet" else read_texts(name, members, text_column, key)
        for name, members in by_format.items()
    ]
    if parts := [part for part in parts if part is not None and len(part)]:
        return datasets.concatenate_datasets(parts)
    raise ConfigError(f"{key}: no text in {shown_files(files)}; expected at least one document that is not empty")


def shown_files(files: Sequence[str]) -> str:
    """The names of a few files, for an error."""
    names = [pathlib.Path(file).name for file in files]
    more = f" and {len(names) - SHOWN_FILES} more files" if len(names) > SHOWN_FILES else ""
    return ", ".join(names[:SHOWN_FILES]) + more


def read_parquet(files: list[str], text_column: str, key: str) -> datasets.Dataset | None:
    """Reads parquet files into a dataset with the single column `text`; None if they have no rows."""
    if not (files := [file for file in files if os.path.getsize(file)]):
        return None
    try:
        part = datasets.load_dataset("parquet", data_files=files, split="train")
    except Exception as error:  # pyarrow raises its own and Python's
        reason = first_line(error.__cause__ or error)
        raise ConfigError(f"{key}: cannot read {shown_files(files)} as parquet ({reason})") from error
    if text_column not in part.column_names:
        raise ConfigError(
            f"data.text_column is {text_column!r}; expected a column of the files: {', '.join(part.column_names)}"
        )
    kind = getattr(part.features[text_column], "dtype", "nested values")
    if kind not in ("string", "large_string"):
        raise ConfigError(f"data.text_column {text_column!r} holds {kind}, expected strings")
    part = part.select_columns([text_column])
    part = part if text_column == "text" else part.rename_column(text_column, "text")
    return part.cast(datasets.Features(text=datasets.Value("string"))).filter(bool, input_columns="text")


def read_texts(name: str, files: list[str], text_column: str, key: str) -> datasets.Dataset | None:
    """Reads files of text or JSON into a dataset with the single column `text`; None if it would have no rows.

    Not with the readers of `datasets`: they drop a record without text, take a text that looks like a date for one,
    cannot say which line is wrong, and crash on some.
    """
    arguments: dict[str, Any] = {
        "name": name,
        "files": files,
        "text_column": text_column,
        "key": key,
        "stamp": digest_files(files),
    }
    if next(documents_of(**arguments), None) is None:
        return None
    try:
        return datasets.Dataset.from_generator(
            documents_of, gen_kwargs=arguments, features=datasets.Features(text=datasets.Value("string"))
        )
    except datasets.exceptions.DatasetsError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        reason = first_line(error.__cause__ or error)
        raise ConfigError(f"{key}: cannot read {shown_files(files)} ({reason}); expected valid UTF-8 {name}") from error


def documents_of(name: str, files: list[str], text_column: str, key: str, stamp: str) -> Iterator[dict[str, str]]:
    """The documents of text or JSON files that are not empty. ConfigError names the file and the line.

    stamp: changes with the files, so that `datasets` does not take a copy that it keeps of others.
    """
    for file in files:
        for line, document in read_text(file, key) if name == "text" else read_json(file, text_column, key):
            try:
                document.encode()
            except UnicodeEncodeError as error:
                raise bad_line(key, file, line, f"half of a character, {error.object[error.start]!r}", "text") from None
            if document:
                yield {"text": document}


def read_text(file: str, key: str) -> Iterator[tuple[int, str]]:
    """The whole file, with newlines as Python's text mode has them."""
    content = pathlib.Path(file).read_bytes()
    yield 1, decoded(content, key, file, 1).replace("\r\n", "\n").replace("\r", "\n")


def read_json(file: str, column: str, key: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each record: of JSON lines, or of a file that is one array or object."""
    with open(file, "rb") as lines:
        if is_one_value(file):
            value = parsed(lines.read(), key, file, 1)
            for record in value if isinstance(value, list) else [value]:
                yield 1, text_of(record, column, key, file, 1)
            return
        for number, line in enumerate(lines, 1):
            if line.strip().removeprefix(BOM):
                yield number, text_of(parsed(line, key, file, number), column, key, file, number)


def is_one_value(file: str) -> bool:
    """Whether a .json file, which often holds JSON lines, is an array or an object over several lines."""
    if not file.endswith(".json"):
        return False
    with open(file, "rb") as lines:
        first = next((line for line in lines if line.strip().removeprefix(BOM)), b"")
    try:
        return isinstance(json.loads(first.removeprefix(BOM)), list)
    except (ValueError, RecursionError):
        return True


def parsed(content: bytes, key: str, file: str, line: int) -> Any:
    """JSON from some lines of a file, the first of which is `line`."""
    text = decoded(content.removeprefix(BOM), key, file, line).rstrip()  # an error at the end is on the last line
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        found = f"no JSON ({error.msg} at column {error.colno})"
        raise bad_line(key, file, line + error.lineno - 1, found, "JSON") from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, 2000 brackets
        raise bad_line(key, file, line, f"no JSON that Python reads ({first_line(error)})", "JSON") from None


def decoded(content: bytes, key: str, file: str, line: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
        raise bad_line(key, file, line, f"no UTF-8 (byte 0x{content[error.start]:02x})", "UTF-8") from None


def text_of(record: Any, column: str, key: str, file: str, line: int) -> str:
    """The text of a record; "" for null."""
    expected = f"an object whose {column!r} is a string or null"
    if not isinstance(record, dict):
        raise bad_line(key, file, line, f"{shown(record)}, which is no object", expected)
    if column not in record:
        names = ", ".join(shown(name) for name in list(record)[:SHOWN_FILES]) or "none"
        raise bad_line(key, file, line, f"a record without data.text_column {column!r} (it has {names})", expected)
    text = record[column]
    if text is not None and not isinstance(text, str):
        raise bad_line(key, file, line, f"{shown(text)} in data.text_column {column!r}", expected)
    return text or ""


def bad_line(key: str, file: str, line: int, found: str, expected: str) -> ConfigError:
    return ConfigError(f"{key}: {file}, line {line}: {found}; expected {expected}")


class PackedRows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Row i is tokens [i * seq_len, (i + 1) * seq_len) of all documents laid end to end; the remainder is dropped.

    documents: columns input_ids and length, one row a document.
    """

    def __init__(self, documents: datasets.Dataset, seq_len: int) -> None:
        self.documents = documents.select_columns(["input_ids"]).with_format("numpy")
        self.seq_len = seq_len
        self.ends: npt.NDArray[np.int64] = np.cumsum(np.asarray(documents["length"], dtype=np.int64))

    def __len__(self) -> int:
        return int(self.ends[-1]) // self.seq_len

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begin = index * self.seq_len
        end = begin + self.seq_len
        tokens, positions = [], []
        document = int(np.searchsorted(self.ends, begin, side="right"))  # the first one that ends after `begin`
        while begin < end:
            ids = self.documents[document]["input_ids"]
            document_begin = int(self.ends[document]) - len(ids)
            piece = ids[begin - document_begin : end - document_begin]
            tokens.append(piece)
            positions.append(np.arange(len(piece)))
            begin += len(piece)
            document += 1
        return {
            "input_ids": torch.from_numpy(np.concatenate(tokens).astype(np.int64)),
            "position_ids": torch.from_numpy(np.concatenate(positions)),
        }


def make_rows(documents: datasets.Dataset, config: DataConfig, encoder: Encoder, key: str) -> Any:
    """The rows for a Trainer: PackedRows, or a dataset with the single column input_ids of at most seq_len tokens."""
    limit = None if config.packing else config.seq_len

    def tokenize(text: str) -> dict[str, Any]:
        tokens = encoder.encode(text)[:limit]
        return {"input_ids": tokens, "length": len(tokens)}

    tokens = documents.map(tokenize, input_columns="text", remove_columns="text")
    if not config.packing:
        return tokens.select_columns(["input_ids"])
    rows = PackedRows(tokens, config.seq_len)
    if not len(rows):
        raise ConfigError(
            f"{key}: got {int(rows.ends[-1])} tokens, expected at least data.seq_len = {config.seq_len} to pack one "
            "row; give more text, lower data.seq_len, or set data.packing: false"
        )
    return rows


def make_collator(pad_id: int) -> Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]:
    """A collator to int64 (B, S): packed rows are stacked; others are padded on the right, with an attention_mask."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if "position_ids" in rows[0]:
            input_ids = torch.stack([row["input_ids"] for row in rows])
            position_ids = torch.stack([row["position_ids"] for row in rows])
            labels = input_ids.masked_fill(position_ids == 0, IGNORE_INDEX)
            return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}
        ids = [torch.as_tensor(row["input_ids"], device="cpu") for row in rows]
        input_ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=pad_id)
        lengths = torch.tensor([len(row) for row in ids], device="cpu")
        attends = torch.arange(input_ids.shape[1], device="cpu") < lengths[:, None]
        labels = input_ids.masked_fill(~attends, IGNORE_INDEX)
        return {"input_ids": input_ids, "attention_mask": attends.long(), "labels": labels}

    return collate
