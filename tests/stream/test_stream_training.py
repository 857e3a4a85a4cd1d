"""Trainings with `stream: true` equal one process that streams nothing; the first batch is proved in each of them."""

from functools import partial
from typing import Any

import pytest
import ringtile
from cells import Cell, check, params, table
from hf_models import hybrid
from hf_training import Padded, make_trainer, packed
from ringtile.tiled.host import HostTensor, PinnedCopies

STREAM = {"stream": True, "tile_tokens": 8}
ALONE = STREAM | {"context_parallel_size": 1}
# The gradients of hybrids are steep.
SLOWLY = {"gradient_accumulation_steps": 1, "num_rows": 24, "learning_rate": 0.01}
HOST = {"activation_offloading": True, "tiled_loss": True, "tiled_norm": True}  # the layers' ends wait in host memory


def recurring(family: str) -> dict[str, Any]:
    return {"model": hybrid(family)}


CELLS = table(
    Cell("one rank", {"evaluate": True}, ALONE, world=1),
    Cell("one rank, packed, with tiles", {"collator": packed}, ALONE | {"tiled_mlp": True, "tile_tokens": 5}, world=1),
    Cell("one rank, left padding", {"collator": Padded("left"), "family": "qwen3-sliding"}, ALONE, world=1, long=True),
    Cell("one rank, LoRA", {"lora": True}, ALONE, world=1, long=True),
    Cell("one rank, a balancing loss", {"family": "mixtral-balanced"}, ALONE, world=1, long=True),
    Cell("one rank, on the host", {"evaluate": True}, ALONE | HOST, world=1, long=True),
    Cell("one rank, on the host, LoRA", {"lora": True, "collator": packed}, ALONE | HOST, world=1),
    Cell("one rank, a hybrid", {"family": "lfm2", "evaluate": True}, ALONE | HOST, world=1),
    Cell("two ranks", {"evaluate": True}, STREAM),
    Cell("two ranks, Ulysses, packed", {"collator": packed}, STREAM | HOST | {"context_parallel_scheme": "ulysses"}),
    Cell("two ranks, windows, striped", {"family": "qwen3-sliding"}, STREAM | {"layout": "striped"}, long=True),
    Cell(
        "two ranks, keys gathered", {"family": "gpt-oss"}, STREAM | {"context_parallel_scheme": "all_gather"}, long=True
    ),
    Cell("two ranks, a hybrid", SLOWLY, STREAM, made=partial(recurring, "qwen3_next")),
    Cell(
        "two ranks, Mamba-2, packed",
        SLOWLY,
        STREAM | HOST | {"layout": "zigzag"},
        ranks={"collator": packed},
        alone={"collator": Padded()},  # transformers' packed rows leak through states
        made=partial(recurring, "bamba"),
    ),
    Cell("two ranks, no attention", SLOWLY, STREAM, made=partial(recurring, "mamba2"), long=True),
    Cell("FSDP2, a hybrid", SLOWLY, STREAM, {"engine": "FSDP2"}, made=partial(recurring, "qwen3_next"), long=True),
    Cell("two groups", {}, ALONE | HOST, world=2, processes=2),
    Cell("FSDP2, checkpointing asked for", {"gradient_checkpointing": True}, STREAM, {"engine": "FSDP2"}, long=True),
    Cell("FSDP2, on the host", {"gradient_checkpointing": True}, STREAM | HOST, {"engine": "FSDP2"}),
    Cell("ZeRO-3", {}, STREAM, {"engine": "ZeRO-3"}, long=True),
    Cell("TRL's SFT", {"trainer_class": "trl.SFTTrainer", "num_rows": 16}, STREAM | HOST, long=True),
    Cell("TRL's DPO", {"trainer_class": "trl.DPOTrainer", "num_rows": 16, "lora": True}, STREAM, long=True),
    Cell("ZeRO-3, on the host", {}, STREAM | HOST, {"engine": "ZeRO-3"}),
    Cell("ZeRO-3, one rank a group", {}, ALONE | HOST, {"engine": "ZeRO-3"}, processes=2, long=True),
)


@pytest.mark.parametrize("cell", params(CELLS))
def test_equal_to_one_process(cell: Cell) -> None:
    check(__name__, cell)


def test_no_hidden_states_are_whole_while_a_trainer_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, whose memory is the host's, too."""
    copied: list[int] = []
    begin = PinnedCopies.begin
    monkeypatch.setattr(PinnedCopies, "begin", lambda *of: (copied.append(of[1].size(0)), begin(*of))[1])
    monkeypatch.setattr(HostTensor, "whole", None)
    trainer = make_trainer()
    ringtile.enable(trainer, ALONE | HOST | {"first_batch_check": False})
    trainer.train()
    assert set(copied) <= {*range(1, 9)}
    assert len(copied) > 0


@pytest.mark.parametrize(
    ("config", "arguments", "reason"),
    [
        ({"tile_tokens": 8}, {}, "tile_tokens is 8 but nothing is tiled"),
        (STREAM, {"torch_compile": True}, "stream is true and Trainer uses torch_compile"),
    ],
)
def test_refused(config: dict[str, Any], arguments: dict[str, Any], reason: str) -> None:
    trainer = make_trainer(**arguments)
    with pytest.raises(ringtile.RingtileError, match=reason):
        ringtile.enable(trainer, config)
    assert not trainer.model.model.layers[0].__dict__.get("forward")
