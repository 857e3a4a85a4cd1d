"""The verbs, their options and how they end; `ringtile plan`: the numbers of plan_attention from the command line."""

from __future__ import annotations

import argparse
import importlib
import json
import mmap
import pathlib

import pytest
import torch
import transformers
from ringtile.cli import VERBS, main, refuse
from ringtile.cli.output import progress
from ringtile.errors import ConfigError, PeerLostError
from ringtile.hf.layers import LayerMask, layer_masks

from tools.peak_memory import peak_bytes, reset_peak_bytes

SMALL = ["plan", "--seq-len", "16", "--world-size", "2", "--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "8"]


def plan_json(tmp_path: pathlib.Path, *options: str) -> dict[str, object]:
    assert main([*SMALL, *options, "--json", str(tmp_path / "plan.json")]) == 0
    report: dict[str, object] = json.loads((tmp_path / "plan.json").read_text())
    return report


@pytest.mark.parametrize("name", ["plan.foo", "plan"])
def test_a_picture_of_no_format_is_refused_before_the_work(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main([*SMALL, "--plot", str(tmp_path / name)]) == 2
    assert f"{name} names no picture; expected a path that ends in ." in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_command_line_is_what_users_script_against() -> None:
    """A changed or dropped option breaks scripts: change this test only on purpose."""
    options = {}
    for verb in VERBS:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"ringtile.cli.{verb}").add_arguments(parser)
        options[verb] = {action.option_strings[0] for action in parser._actions if action.option_strings} - {"-h"}
    assert options == {
        "train": {"--compare", "--set"},
        "verify": {"--bits", "--set"},
        "doctor": set(),
        "config": {"--schema"},
        "plan": {
            "--seq-len",
            "--set",
            "--world-size",
            "--layout",
            "--mask",
            "--num-heads",
            "--num-kv-heads",
            "--head-dim",
            "--v-head-dim",
            "--dtype",
            "--scheme",
            "--recurrent",
            "--ranks-per-host",
            "--expert-parallel-size",
            "--device",
            "--rates",
            "--plot",
            "--batch",
            "--model",
            "--devices",
            "--memory",
            "--engine",
            "--context-parallel-size",
            "--gradient-checkpointing",
            "--activation-offloading",
            "--tiled-mlp",
            "--tiled-norm",
            "--tiled-loss",
            "--stream",
            "--tile-tokens",
            "--bf16",
            "--lora-rank",
            "--load-in-4bit",
            "--optimizer",
            "--offload-optimizer",
            "--completion-tokens",
            "--generation-rows",
            "--reference-model",
            "--images",
            "--image-size",
            "--no-switches",
        },
    }


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConfigError("bad key"), "bad key\n"),
        (PeerLostError("rank 2 died"), "rank 2 died\n"),
        (ModuleNotFoundError("no", name="datasets"), "datasets is not installed; install it: pip install "),
    ],
)
def test_refusal_is_one_line_with_the_rank(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*unused: object, **also_unused: object) -> None:
        raise error

    monkeypatch.setattr("ringtile.cli.plan.plan_attention", refuse)
    for rank in ("", "rank 1: "):
        if rank:
            monkeypatch.setenv("RANK", "1")
        assert main(SMALL) == 2
        printed = capsys.readouterr().err
        assert printed.startswith(f"ringtile: error: {rank}{words}")
        assert printed.count("\n") == 1


def test_a_verb_that_is_near_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tarin", "run.yaml"]) == 2
    assert capsys.readouterr().err == "ringtile: error: unknown verb tarin: did you mean train?\n"


def test_set_without_a_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--set", "tile_tokens=1"]) == 2
    assert "--set changes a key of a file; expected it too" in capsys.readouterr().err


def test_json_goes_to_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["seq_len"] == 16
    assert "One attention layer" in printed.err


@pytest.mark.parametrize(("is_terminal", "lines"), [(True, 1), (False, 0)])
def test_progress_is_for_terminals(
    is_terminal: bool, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    progress("planning")
    assert capsys.readouterr().err.count("\n") == lines


def test_workers_of_a_torchrun_say_the_same_error_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for rank, words in ((1, "bad key"), (0, "bad key"), (0, "another")):
        monkeypatch.setenv("RANK", str(rank))
        assert refuse(words) == 2
    assert capsys.readouterr().err == "ringtile: error: rank 1: bad key\nringtile: error: rank 0: another\n"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert refuse("bad key") == 2
    assert "rank 0: bad key" in capsys.readouterr().err


def test_causal_zigzag_moves_three_quarters(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks, chunks 0 3 and 1 2 of 4 tokens: rank 0 needs both of rank 1, which needs chunk 0 only: 12 of 16 keys.

    A key and its value are 2 heads x (8 + 8) x 2 bytes = 64 bytes; in the backward the same, and twice that in float32.
    """
    report = plan_json(tmp_path)
    assert report["forward_bytes"] == 12 * 64
    assert report["backward_bytes"] == 12 * 64 * 3
    assert "16 tokens over 2 ranks" in capsys.readouterr().out


def test_masks_intersect_and_every_name_is_understood(tmp_path: pathlib.Path) -> None:
    assert plan_json(tmp_path, "--mask", "documents:8,8", "--layout", "contiguous")["forward_bytes"] == 0
    assert plan_json(tmp_path, "--mask", "full")["forward_bytes"] == 16 * 64
    # A prompt of 4 and completions of 4 and 8: rank 1 has the second completion, and needs the prompt.
    assert plan_json(tmp_path, "--mask", "shared_prefix:4,4,8", "--layout", "contiguous")["forward_bytes"] == 4 * 64
    # Again and again, the last one cut: documents of 6, 4 and 6, of which the second straddles.
    assert plan_json(tmp_path, "--mask", "packed:6,4", "--layout", "contiguous")["forward_bytes"] == 2 * 64
    # Contiguous halves and a window of 3 tokens: queries 8 and 9 see keys 6, 7 and 7 of the other rank.
    window = ["--mask", "causal", "--mask", "window:3", "--layout", "contiguous"]
    assert plan_json(tmp_path, *window)["forward_bytes"] == 2 * 64
    for mask in ("prefix:4", "chunked:4"):
        plan_json(tmp_path, "--mask", mask)


def test_recurrent_layers_are_planned_in_each_scheme(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One cut, 8 tokens a rank, two bytes a number. heads: half of q, k, v, g, beta of 8 tokens there, of v back."""
    layers = ["gated_delta:4,2,3,5", "ssd:1,1,3,5", "conv:7,4"]
    options = [word for layer in layers for word in ("--recurrent", layer)]
    rows = plan_json(tmp_path, "--layout", "contiguous", *options)["recurrent"]
    assert isinstance(rows, list)
    found = {(row["layer"], row["scheme"]): (row["forward_bytes"], row["busiest_backward_bytes"]) for row in rows}
    states, heads, inputs, outputs = 4 * 4 * 3 * 5, 8 * 2, 2 * 3 + 2 * 5 + 4, 2 * 5
    assert found == {
        (layers[0], "states"): (states, states),
        (layers[0], "heads"): (2 * heads * (inputs + outputs), heads * (inputs + outputs)),
        (layers[1], "states"): (4 * 3 * 5, 4 * 3 * 5),
        (layers[1], "heads"): (0, 0),
        (layers[2], "states"): (4 * 3 * 7, 4 * 3 * 7),
    }
    assert "with 1 heads, or groups of heads" in rows[3]["refused"]
    printed = capsys.readouterr().out
    assert printed.count("gated_delta:4,2,3,5  states") == 1
    with_window = ["--mask", "window:3", "--recurrent", "conv:7,4"]
    assert main([*SMALL, *with_window]) == 2
    assert "a recurrence has no window" in capsys.readouterr().err


@pytest.mark.parametrize("mask", ["windw:3", "window", "window:x", "causal:3", "documents", ""])
def test_unknown_mask_is_one_line_and_status_2(mask: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--mask", mask]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ringtile: error: ")
    assert error.count("\n") == 1
    assert "expected" in error


@pytest.mark.parametrize(
    "options",
    [
        ["--seq-len", "3"],
        ["--world-size", "0"],
        ["--num-kv-heads", "3"],
        ["--num-kv-heads", "0"],
        ["--batch", "0"],
        ["--mask", "documents:8,9"],
        ["--mask", "window:0"],
        ["--recurrent", "ssd:4,2,3"],
        ["--recurrent", "ssd:4,3,3,5"],
        ["--recurrent", "ssd:4,4,3,x"],
        ["--recurrent", "gru:4"],
        ["--layout", "zigzack"],
        ["--windows", "3"],
        ["--recurrent", "conv:4,9"],
        ["--json", "/dev/null/plan.json"],
    ],
)
def test_impossible_numbers_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *options]) == 2
    error = capsys.readouterr().err
    assert "expected" in error
    assert error.count("\n") == 1


def test_layouts_that_are_made_for_a_mask_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    documents = ["plan", "--seq-len", "64", "--world-size", "2", "--num-heads", "2", "--head-dim", "8"]
    documents += ["--mask", "documents:40,8,16"]
    for layout in ("zigzag", "balanced", "per_document"):
        assert main([*documents, "--layout", layout]) == 0
        balance = float(capsys.readouterr().out.split("busiest rank ")[1].split()[0])
        assert (balance < 1.1) is (layout != "zigzag"), layout


def test_each_layer_is_planned_with_its_own_window() -> None:
    window = {"sliding_window": 8, "num_hidden_layers": 3}
    assert layer_masks(transformers.MistralConfig(**window)) == [LayerMask(window=8)] * 3
    assert layer_masks(transformers.LlamaConfig(num_hidden_layers=2)) == [LayerMask()] * 2
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    expected = [LayerMask(), LayerMask(window=8), LayerMask()]
    assert layer_masks(transformers.Gemma3TextConfig(**window, layer_types=kinds)) == expected


def _fresh_pages(count: int) -> mmap.mmap:
    """As many bytes, written: not those that the allocator has at hand."""
    pages = mmap.mmap(-1, count)
    pages[:: mmap.PAGESIZE] = b"x" * (count // mmap.PAGESIZE)
    return pages


def test_peak_memory_starts_anew() -> None:
    """The system takes pages of files away at any time, so that only these bounds hold."""
    _fresh_pages(256 << 20).close()
    highest = peak_bytes()
    reset_peak_bytes()
    before = peak_bytes()
    assert before <= highest - (240 << 20)
    held = _fresh_pages(64 << 20)
    status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    resident = int(status["VmRSS"].split()[0]) << 10
    assert resident <= peak_bytes() <= before + len(held) + (8 << 20)
