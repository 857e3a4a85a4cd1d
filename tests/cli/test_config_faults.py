"""Configurations that are broken, hostile, or not the same on every rank: one line that names them, and status 2."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import socket
from typing import Any
from unittest import mock

import datasets
import pytest
import ringtile
import torch.distributed as dist
from faults.configurations import BOMB, ODD, RAW, REFUSED_RAW
from pool import run_command, run_ranks
from ringtile.cli import MAX_LINE, main, world
from ringtile.cli.environment import rank
from ringtile.cli.output import check_output, check_output_folder, write_json, write_output
from ringtile.cli.recipe import Recipe
from ringtile.errors import ConfigError, needs_extra
from ringtile.yaml_file import read_yaml
from test_cli_train import MODEL, TRAINING, write_config
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

REFUSED_ODD = ("alias bomb", "deep", "deep lists", "deep flow", "two documents", "large", "recursive")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


# ---- YAML ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["a value", "a file"])
def test_hostile_yaml_is_read_or_refused_in_one_short_line(tmp_path: pathlib.Path, kind: str) -> None:
    """Every value and file that faults/configurations.py draws from, without what a training does with it."""
    texts = ODD if kind == "a file" else {raw: f"b: 1\na: {raw}\n" for raw in RAW}
    for label, text in texts.items():
        (tmp_path / "a.yaml").write_bytes(text.encode("utf-16" if label == "UTF-16" else "utf-8"))
        said = ""
        try:
            read_yaml(tmp_path / "a.yaml")
        except ConfigError as error:
            said = str(error)
        assert said or label not in (*REFUSED_RAW, *REFUSED_ODD)
        assert len(said) < 300
        assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "message"),  # of docs/troubleshooting.md
    [
        ("b: 1\na: !!timestamp 1", "line 2: the tag .*timestamp'; expected a plain value"),
        ('a: "x\\0"', "a is 'x\\\\x00'; expected text without NUL"),
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' is given twice; expected it once"),
        ("a: " + "[" * 60 + "]" * 60, "line 1: nested too deeply; expected at most 50 levels"),
        (BOMB, "131071 values once aliases are expanded; expected at most 100000"),
        ("a: 1\nb: 010", "line 2: 010 is octal in YAML 1.1; expected a number without a leading 0, or text in quotes"),
        (
            "a: [1:30]",
            "line 1: 1:30 is a number to the base of 60 in YAML 1.1; expected a decimal one, or text in quotes",
        ),
        ("a: 1:30.5", "line 1: 1:30.5 is a number to the base of 60"),
        ("010: 1", "line 1: 010 is octal"),
    ],
)
def test_hostile_yaml_is_named(tmp_path: pathlib.Path, text: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_yaml(tmp_path / "a.yaml")


@pytest.mark.timeout(20)
def test_a_file_that_is_none_is_not_waited_for(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match="is no regular file; expected a readable YAML file"):
        read_yaml(tmp_path / "a.yaml")


def test_plain_yaml_is_read_as_before(tmp_path: pathlib.Path) -> None:
    text = "a: &a {b: 1, c: [x, 1.5, true, null]}\nd: {<<: *a, b: 2}\ne: 2001-13-45\nf: =\ng: .inf\n1: -5\n"
    text += "h: '010'\ni: 0\nj: 0x10\n"
    (tmp_path / "a.yaml").write_text(text)
    a = {"b": 1, "c": ["x", 1.5, True, None]}
    assert read_yaml(tmp_path / "a.yaml") == {
        "a": a,
        "d": a | {"b": 2},
        "e": "2001-13-45",  # a name, not a date
        "f": "=",
        "g": float("inf"),
        1: -5,
        "h": "010",
        "i": 0,
        "j": 16,
    }


# ---- values -------------------------------------------------------------------------------------


def refusal(path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> str:
    """The one line that `ringtile train` prints."""
    capfd.readouterr()
    assert main(["train", str(path)]) == 2
    printed = capfd.readouterr().err
    lines = [line for line in printed.splitlines() if line.startswith("ringtile: error: ")]
    assert len(lines) == 1
    assert "Traceback" not in printed
    assert len(lines[0]) <= MAX_LINE
    return lines[0]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("modell", "x", "unknown key modell: did you mean model?"),
        ("model", None, "model is None; expected a folder, a hub name, or keys"),
        ("model", {"hidden_size": 4}, "expected a folder, a hub name, or keys"),
        ("model.model_type", "lama", "unknown model.model_type lama: did you mean llama?"),
        ("model.hiden_size", 4, "unknown key model.hiden_size: did you mean hidden_size?"),
        ("model.vocab_size", 100, "model.vocab_size is 100; expected at least 257"),
        ("model.max_position_embeddings", 8, "model.max_position_embeddings is 8; expected at least 64"),
        ("model", "/no/such/model", "model '/no/such/model' cannot be loaded"),
        ("data", None, "data is None; expected keys"),
        ("data", {"files": "text.txt"}, "data.seq_len is missing"),
        ("data", {"files": "text.txt", "seq_len": 64, "file": "x"}, "unknown key data.file: did you mean files?"),
        ("data", {"files": "text.txt", "seq_len": "long"}, "data.seq_len is 'long'"),
        ("data", {"files": [], "seq_len": 64}, "data.files is"),
        ("data", {"files": "missing.txt", "seq_len": 64}, "data.files: .*missing.txt names no file"),
        ("data", {"files": "empty.txt", "seq_len": 64}, "data.files: no text in empty.txt"),
        ("data", {"files": "text.txt", "seq_len": 4096}, "data.files: got .* tokens, expected at least"),
        ("training", ["x"], "training is .*; expected keys"),
        ("training", {"lerning_rate": 1}, "unknown key training.lerning_rate: did you mean learning_rate?"),
        ("training.learning_rate", "fast", "training.learning_rate is 'fast'"),
        ("training.optim", "sgdd", "training.optim is 'sgdd': did you mean sgd?"),
        ("context_parallel_size", 2, "context_parallel_size is 2 but there is 1 rank;"),
        *(
            ("model.num_hidden_layers", layers, f"model.num_hidden_layers is {layers}; expected 1 to")
            for layers in (0, -1)
        ),
        ("model.hidden_size", 0, "model.hidden_size is 0; expected 1 to"),
        ("model.vocab_size", -5, "model.vocab_size is -5; expected 1 to"),
        ("model.hidden_size", "wide", "model.hidden_size: .*'hidden_size' expected int, got str"),
        ("model.hidden_act", "silo", "model.hidden_act is 'silo'; expected an activation of transformers: .*silu"),
        ("model.attention_dropout", 2.0, "model.attention_dropout is 2.0; expected a probability, 0 to 1"),
        ("model.num_key_value_heads", 3, "model.num_key_value_heads is 3; expected a divisor of .* 4"),
        ("model.num_hidden_layers", 10**9, "model: 1000000000 layers of hidden_size 32 need at least .* GiB"),
        ("model.model_type", "zzzz", "unknown model.model_type zzzz: the closest are [^,]+, [^,]+, [^,]+$"),
        ("model", {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 0}, "model.n_layer is 0; expected 1 to"),
        *((f"training.{key}", float("nan"), f"training.{key} is NaN") for key in ("learning_rate", "max_grad_norm")),
        ("training.num_train_epochs", float("inf"), "training.num_train_epochs is inf; expected 1e-06 to 2147483647"),
        *(("training.max_steps", steps, f"training.max_steps is {steps}; expected 1 to") for steps in (0, -2, 10**15)),
        ("training.max_steps", True, "training.max_steps is True; expected a number"),
        ("training.save_steps", 0, "training.save_steps is 0.*; expected 1e-06 to 2147483647"),
        *(("training.per_device_train_batch_size", size, f"is {size}; expected 1 to 2147483647") for size in (0, -1)),
        *(
            ("training.gradient_accumulation_steps", steps, f"is {steps}; expected 1 to 2147483647")
            for steps in (0, -1)
        ),
        *(("training.seed", seed, "training.seed is .*; expected 0 to 4294967295") for seed in (-1, 2**32)),
        ("training.dataloader_num_workers", 10**6, "training.dataloader_num_workers is 1000000; expected 0 to 1024"),
        ("training.adam_beta1", 1.0, "training.adam_beta1 is 1.0; expected 0 or more, and less than 1"),
        ("training.save_strategy", False, "training.save_strategy is False; expected: .*without quotes"),
        ("training.lr_scheduler_type", "kosine", "training.lr_scheduler_type is 'kosine': did you mean cosine?"),
        ("training.deepspeed", {}, "training.deepspeed is empty"),
        ("training.optim", "adamw_bnb_8bit", "training: .*bitsandbytes"),
        ("training.eval_strategy", "steps", "training.eval_strategy is steps but there is no data to evaluate"),
        ("training.eval_on_start", True, "training.eval_on_start is true but there is no data to evaluate"),
        ("training.load_best_model_at_end", True, "training.load_best_model_at_end is true but nothing is evaluated"),
        ("training.output_dir", "/dev/null/out", "training.output_dir: cannot write to /dev/null/out .Not a directory"),
        ("training.hub_token", [7], "training.hub_token is '<hub_token>'; expected: Input should be a valid string"),
    ],
)
def test_bad_value_is_one_line(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str], key: str, value: Any, message: str
) -> None:
    """key: of a section, which is otherwise right, or a section."""
    (tmp_path / "empty.txt").write_text("")
    sections = {"model": MODEL, "training": TRAINING | {"output_dir": str(tmp_path / "out")}}
    section, _, name = key.partition(".")
    path = write_config(tmp_path, **(sections | {section: sections[section] | {name: value} if name else value}))
    assert re.search(message.replace("?", r"\?"), line := refusal(path, capfd)), line


def test_any_text_is_the_name_of_a_run(tmp_path: pathlib.Path) -> None:
    name = "\x1b[2J\n" * 300
    assert Recipe.load(write_config(tmp_path, training=TRAINING | {"run_name": name})).training["run_name"] == name


def test_error_of_any_text_is_one_short_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*unused: object, **also_unused: object) -> None:
        raise RuntimeError("one\ntwo\x1b[2J" + "x" * 10_000)

    monkeypatch.setattr("transformers.Trainer.create_optimizer", fail)
    line = refusal(write_config(tmp_path), capfd)
    assert line.startswith(r"ringtile: error: training: RuntimeError: one two\x1b[2Jxxx")
    assert line.endswith("x ...")


# ---- secrets and outputs ------------------------------------------------------------------------


def test_secrets_are_in_no_report(tmp_path: pathlib.Path) -> None:
    training = TRAINING | {"hub_token": "hf_abc", "output_dir": str(tmp_path / "out"), "push_to_hub": False}
    training["lr_scheduler_kwargs"] = {}
    path = write_config(tmp_path, training=training)
    assert main(["train", str(path), "--json", str(tmp_path / "r.json")]) == 0
    text = (tmp_path / "r.json").read_text()
    assert "hf_abc" not in text
    assert json.loads(text)["recipe"]["training"]["hub_token"] == "<hub_token>"
    recipe = Recipe.load(path)
    nested = dataclasses.replace(recipe, training=recipe.training | {"deepspeed": {"comet": [{"api_key": "k1"}]}})
    assert nested.mapping()["training"]["deepspeed"] == {"comet": [{"api_key": "<api_key>"}]}


def test_run_in_one_process_pushes_nothing(tmp_path: pathlib.Path) -> None:
    path = write_config(tmp_path, training=TRAINING | {"push_to_hub": True, "hub_token": "hf_abc"})
    alone = Recipe.load(path).alone(1, "out").mapping()["training"]
    assert alone["push_to_hub"] is False
    assert alone["hub_token"] is None


def test_output_is_whole_or_as_it_was(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "deep" / "a.json"
    check_output(path, "--json")
    assert list(path.parent.iterdir()) == []
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})

    def write_half(beside: pathlib.Path) -> None:
        beside.write_text("{")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_output(path, write_half)
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(path.parent.iterdir()) == [path]


def test_outputs_do_not_leave_their_folder_through_links(tmp_path: pathlib.Path) -> None:
    outside, folder = tmp_path / "outside.json", tmp_path / "out"
    folder.mkdir()
    outside.write_text("precious")
    (folder / "a.json").symlink_to(outside)
    with pytest.raises(ConfigError, match=r"--json: .*a.json is a link to .*outside.json, outside .*; expected"):
        check_output(folder / "a.json", "--json")
    with pytest.raises(ConfigError, match=r"training.output_dir: .*a.json is a link"):
        check_output_folder(folder, "training.output_dir")
    (folder / "a.json").unlink()
    (folder / "b.json").write_text("old")
    (folder / "a.json").symlink_to(folder / "b.json")
    check_output_folder(folder, "training.output_dir")
    check_output(folder / "a.json", "--json")
    write_json(folder / "a.json", {})
    assert json.loads((folder / "b.json").read_text()) == {}
    check_output(pathlib.Path("/dev/null"), "--json")
    write_json(pathlib.Path("/dev/null"), {})
    assert pathlib.Path("/dev/null").is_char_device()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- the world ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "abc"}, "RANK is 'abc'; expected an integer from 0"),
        ({"RANK": "abc", "LOCAL_RANK": "1"}, "RANK is 'abc'"),  # only this rank may have it
        ({"RANK": "-1"}, "RANK is '-1'; expected an integer from 0"),
        ({"RANK": "2"}, "RANK is 2 and WORLD_SIZE 2; expected a smaller rank"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'; expected an integer from 1"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'; expected an integer from 1"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'; expected an integer from 0"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK is not set, but of the launcher's variables RANK"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set, but of the launcher's variables RANK"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000'; expected an integer from 1 to 65535"),
    ],
)
def test_wrong_variables_of_a_launcher_are_named(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    variables: dict[str, str | None],
    message: str,
) -> None:
    world = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in (world | variables).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert message in refusal(write_config(tmp_path), capfd)


class _Said:
    timeout_seconds = 20.0

    def __init__(self, **mapping: Any) -> None:
        self._mapping = mapping

    def mapping(self) -> dict[str, Any]:
        return self._mapping


def _meet(port: int, said: list[dict[str, Any] | None], variables: dict[str, str]) -> tuple[str, bool, bool]:
    """On a rank: the error of `alike`, and whether it prints a line that all ranks have, and one of its own."""
    number = dist.get_rank()
    launcher = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": len(said), "MASTER_ADDR": "127.0.0.1"}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in {**launcher, "MASTER_PORT": port}.items()}):
        os.environ.update(variables if number else {})

        def load() -> _Said:
            if (mapping := said[number]) is None:
                raise ConfigError("run.yaml: broken")
            return _Said(**mapping)

        try:
            world.alike(load)
            error = ""
        except ConfigError as refused:
            error = str(refused)
        prints = world.first_to_say(f"alike, <object at {hex(id(load))}>"), world.first_to_say(f"rank {number}")
        world.leave()
        world._store = None
        return error, *prints


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([{"training": {"seed": 0}}] * 3, ""),
        (
            [{"training": {"seed": seed}} for seed in (0, 0, 1)],
            "training.seed is 0 on rank 0 and 1 on rank 2; expected",
        ),
        ([{"a": 1}, {"a": 1.0}, {"a": 1}], "a is 1 on rank 0 and 1.0 on rank 1; expected the same configuration"),
        ([{"a": 1}, {"a": 1}, {}], "a is 1 on rank 0 and 'not set' on rank 2; expected the same configuration"),
        ([{"model": "a"}, {"model": {"b": 1}}, {}], "model is 'a' on rank 0 and 'not set' on rank 1"),
        ([{}, None, {}], "rank 1: run.yaml: broken"),
        ([None, None, None], "run.yaml: broken"),
    ],
)
def test_ranks_that_differ_refuse_together(said: list[dict[str, Any] | None], message: str) -> None:
    outcomes = run_ranks(3, _meet, free_port(), said, {})
    for error, _, own in outcomes:
        assert bool(error) == bool(message)
        assert error.startswith(message)
        assert own
    assert sum(alike for _, alike, _ in outcomes) == 1


def test_another_number_of_ranks_is_a_difference() -> None:
    outcomes = run_ranks(2, _meet, free_port(), [{}, {}], {"WORLD_SIZE": "3"})
    assert [error.split(";")[0] for error, _, _ in outcomes] == ["WORLD_SIZE is 2 on rank 0 and 3 on rank 1"] * 2


def _another_rate() -> None:
    load = Recipe.load

    def load_another(*args: Any, **kwargs: Any) -> Recipe:
        recipe = load(*args, **kwargs)
        return dataclasses.replace(recipe, training=recipe.training | {"learning_rate": 0.1 * (1 + rank())})

    Recipe.load = load_another


@pytest.mark.parametrize("verb", [pytest.param("train"), pytest.param("verify", marks=pytest.mark.long)])
def test_another_learning_rate_of_a_rank_is_refused(tmp_path: pathlib.Path, verb: str) -> None:
    done = run_command(2, verb, str(write_config(tmp_path)), prepare=_another_rate)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("ringtile: error: ")]
    assert len(lines) == 1
    assert "training.learning_rate is 0.1 on rank 0 and 0.2 on rank 1; expected the same configuration" in lines[0]


def test_torchrun_ends_its_summary_with_the_line(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    line = refusal(write_config(tmp_path, layout="zigzak"), capfd)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    shown = str(ChildFailedError("ringtile", {0: failure}))
    assert shown.splitlines()[-2] == f"  traceback : {line}"


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("from transformers import no_such_name", "another transformers than {} (cannot import name 'no_such_name'"),
        ("import transformers.no_such", "another transformers than {} (No module named 'transformers.no_such')"),
    ],
)
def test_package_of_another_version_is_named(statement: str, message: str) -> None:
    """As transformers 4.57 lacks names that the Trainer layer imports; a name that ringtile lacks is its own bug."""
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ringtile.MissingPackageError) as told, needs_extra("ringtile.enable", "hf"):
        exec(statement)
    expected = "expected the versions of the extra hf: pip install 'transformers>=5.17,<5.25' 'accelerate>=1.15,<1.16'"
    assert message.format(transformers.__version__) in str(told.value)
    assert str(told.value).endswith(expected)
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'") as own, needs_extra("x", "hf"):
        exec("from ringtile import no_such_name")
    assert not isinstance(own.value, ringtile.MissingPackageError)
