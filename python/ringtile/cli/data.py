"""The section `data`: files -> documents -> rows of tokens -> batches, by `datasets`.

.jsonl, .json and .parquet give a document a record, any other file is one document. Packed rows hold documents laid end
to end: position_ids restart at 0 where one starts or continues from the row before; the label there is -100, because no
token of the row predicts it. Padded rows hold one document each.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import datasets  # type: ignore[import-untyped]
import numpy as np
import torch
from transformers import AutoTokenizer

from ringtile.cli.recipe import Recipe
from ringtile.errors import ConfigError, refusing

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # by suffix; every other file is text
PADDING = {"labels": -100, "attention_mask": 0}


class Encoder(NamedTuple):
    encode: Callable[[str], list[int]]  # the tokens of a document, the last of which is `end`
    vocab_size: int = 257
    end: int = 256


def make_encoder(recipe: Recipe) -> Encoder:
    """Return the tokenizer of data.tokenizer; without one, a pretrained model's own, or bytes for random weights."""
    name = recipe.data.tokenizer or recipe.model.get("name", "bytes")
    if name == "bytes":
        return Encoder(lambda text: [*text.encode(), 256])
    with refusing(f"{'data.tokenizer' if recipe.data.tokenizer else 'model'} {name!r} cannot be loaded"):
        tokenizer: Any = AutoTokenizer.from_pretrained(name)
    if (end := tokenizer.eos_token_id) is None:
        raise ConfigError(f"data.tokenizer {name!r} has no eos_token, which must end every document; set one")

    def encode(text: str) -> list[int]:
        tokens = tokenizer(text)["input_ids"]
        return tokens if tokens[-1:] == [end] else [*tokens, end]

    return Encoder(encode, len(tokenizer), end)


def load_documents(patterns: list[str], text_column: str, key: str) -> datasets.Dataset:
    """Return the texts in the files that paths and globs (also `**`) name; documents without text are left out."""
    files: dict[str, dict[str, None]] = {}
    for pattern in patterns:
        found = [path for path in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(path)]
        if not found:
            raise ConfigError(f"{key}: {pattern} names no file; expected a path or glob, from the YAML file's folder")
        for path in map(os.path.realpath, found):
            files.setdefault(FORMATS.get(os.path.splitext(path)[1], "text"), {})[glob.escape(path)] = None
    parts = []
    for name, paths in files.items():
        column, options = ("text", {"sample_by": "document"}) if name == "text" else (text_column, {})
        with refusing(key):
            part = datasets.load_dataset(name, data_files=[*paths], split="train", **options)
        if (kind := getattr(part.features.get(column), "dtype", "missing")) not in ("string", "large_string"):
            columns = ", ".join(part.column_names)
            raise ConfigError(f"data.text_column {column!r} is {kind}; expected a column of strings ({columns})")
        part = part.select_columns([column]).rename_columns({column: "text"})
        parts.append(part.cast(datasets.Features(text=datasets.Value("string"))).filter(bool, input_columns="text"))
    return datasets.concatenate_datasets(parts)


def make_rows(documents: datasets.Dataset, recipe: Recipe, encoder: Encoder, key: str) -> datasets.Dataset:
    """Return the rows for a Trainer, in tensors. Packing drops what a batch of 1,000 documents leaves over."""
    seq_len = recipe.data.seq_len

    def padded(texts: list[str]) -> dict[str, Any]:
        rows = [encoder.encode(text)[:seq_len] for text in texts]
        return {"input_ids": rows, "labels": rows, "attention_mask": [[1] * len(row) for row in rows]}

    def packed(texts: list[str]) -> dict[str, Any]:
        tokens = [np.array(encoder.encode(text)) for text in texts]
        starts = np.concatenate([np.arange(len(each)) == 0 for each in tokens])
        rows, places = len(starts) // seq_len, np.arange(seq_len)
        ids, starts = (x[: rows * seq_len].reshape(rows, seq_len) for x in (np.concatenate(tokens), starts))
        starts[:, :1] = True
        positions = places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)
        return {"input_ids": ids, "position_ids": positions, "labels": np.where(starts, -100, ids)}

    make = packed if recipe.data.packing else padded
    rows = documents.map(make, batched=True, input_columns="text", remove_columns="text").with_format("torch")
    if not len(rows):
        raise ConfigError(f"{key}: got less than one row of data.seq_len = {seq_len} tokens; expected more text")
    return rows


def make_collator(end: int) -> Callable[[list[dict[str, torch.Tensor]]], dict[str, torch.Tensor]]:
    """Return a collator to int64 (B, S), which pads rows on the right."""
    pad = torch.nn.utils.rnn.pad_sequence
    return lambda rows: {key: pad([row[key] for row in rows], True, PADDING.get(key, end)) for key in rows[0]}
