"""Configurations that are broken, hostile, or not the same on every rank: one line that names them, and status 2."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import datasets
import pytest
import ringtile
import yaml
from ringtile.cli import MAX_LINE, main
from ringtile.cli.output import check_output, write_json, write_output
from ringtile.cli.recipe import Recipe
from ringtile.errors import ConfigError, needs_extra
from ringtile.hf.yaml_file import _Loader, read_yaml
from test_cli_train import MODEL, TRAINING, write_config
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

# 40 mappings, each with the one before nine times; and one of 3000 keys 3000 times.
MERGED_TWICE = b"a0: &a0 {x: 1}\n" + b"".join(
    b"a%d: &a%d {<<: [" % (i, i) + b", ".join([b"*a%d" % (i - 1)] * 9) + b"]}\n" for i in range(1, 40)
)
MANY_ALIASES = b"a: &a {" + b"".join(b"k%d: 1, " % i for i in range(3000)) + b"}\nb: {<<: [" + b"*a, " * 3000 + b"]}"
REFUSED_ODD = ("alias bomb", "deep", "deep lists", "deep flow", "two documents", "large", "recursive")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


# ---- YAML ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nb: {c: 1, c: 2}", "line 2: the key 'c' is given twice; expected"),
        (b"a: 1\nb: 2\na: 3", "the key 'a' is given twice; expected"),
        (b"a: !!timestamp 1", "; expected a readable YAML file"),
        (b"a: !!python/object:os.system {}", "could not determine a constructor for the tag"),
        (b'a: "x\0"', "; expected a readable YAML file"),
        (b"a: " + b"[" * 1500, "recursion"),
        (b"a: 1\n--- b: 2", "; expected a readable YAML file"),
        (b"a: " + b"x" * 2**20, "holds more than 1048576 bytes; expected"),
        (b"a: caf\xe9", "; expected a readable YAML file"),
        (b"{[1]: 2}", "unhashable key"),
        (b"- 1", "holds list; expected a mapping"),
        (b"a: " + b"1" * 101, "line 1: a number of more than 100 digits"),
        (b"a: !!int " + b":".join([b"1"] * 200_000), "line 1: a number of more than 100 digits"),
        (MERGED_TWICE, "`<<` copies more than 10000 keys"),
        (MANY_ALIASES, "line 2: `<<` copies more than 10000 keys"),
        (b"a: &a {<<: *a, b: 1}", "recursion"),
    ],
)
def test_yaml_that_is_no_configuration_is_refused(tmp_path: pathlib.Path, content: bytes, message: str) -> None:
    (tmp_path / "a.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as refused:
        read_yaml(tmp_path / "a.yaml")
    assert "\n" not in str(refused.value)


def test_the_keys_of_a_mapping_are_compared_once_each(tmp_path: pathlib.Path) -> None:
    """A count of each in the list of all takes as many comparisons as keys squared: 16 s at 10,000."""

    class Name(str):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return super().__eq__(other)

        __hash__ = str.__hash__

    compared, mapping = 0, yaml.MappingNode("tag:yaml.org,2002:map", [])
    mapping.value = [(yaml.ScalarNode("tag:yaml.org,2002:str", Name(i)), mapping) for i in range(1000)]
    _Loader("").construct_mapping(mapping)
    assert compared < 5000


def test_a_file_of_another_program_is_one_short_sentence(tmp_path: pathlib.Path) -> None:
    """It was 600 kB at 2500 keys: one for each key, and each with the names of all."""
    (tmp_path / "a.yaml").write_text("".join(f"k{i}: 1\n" for i in range(300)))
    said = r"unknown key k0: .*; unknown key k4: .*; and 295 more such keys$"
    with pytest.raises(ConfigError, match=said) as refused:
        ringtile.Config.load(tmp_path / "a.yaml")
    assert len(str(refused.value)) < 5000


def test_yaml_is_read_as_its_writer_means_it(tmp_path: pathlib.Path) -> None:
    text = "a: &a {b: 1, c: [x, 1.5, true, null]}\nd: {<<: *a, b: 2}\ne: 2001-01-01\ng: .inf\n1: -5\n"
    text += "h: 010\ni: 0\nj: 0x10\nk: 1:30\nl: 1e-3\nm: 5\nn: '1e-3'\no: 2.5e+4\np: .\nq: 1_000\n"
    (tmp_path / "a.yaml").write_text(text)
    a = {"b": 1, "c": ["x", 1.5, True, None]}
    plain = {"a": a, "d": a | {"b": 2}, "e": "2001-01-01", "g": float("inf"), 1: -5, "h": "010", "i": 0, "j": 16}
    read = read_yaml(tmp_path / "a.yaml")
    assert read == plain | {"k": "1:30", "l": 1e-3, "m": 5, "n": "1e-3", "o": 2.5e4, "p": ".", "q": 1000}
    assert isinstance(read["m"], int)


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
        ("model", None, "model is None; expected a mapping of keys"),
        ("model", {"hidden_size": 4}, "expected a name, or keys with model_type"),
        ("model.model_type", "lama", "unknown model.model_type lama: did you mean llama?"),
        ("model.hiden_size", 4, "unknown key model.hiden_size: did you mean hidden_size?"),
        ("model.vocab_size", 100, "model.vocab_size is 100; expected at least 257"),
        ("model.max_position_embeddings", 8, "model.max_position_embeddings is 8; expected at least 64"),
        ("model", "/no/such/model", "model '/no/such/model' cannot be loaded: .*/no/such/model"),
        ("data", None, "data is None; expected a mapping of keys"),
        ("data", {"files": "text.txt"}, "data.seq_len is missing"),
        ("data", {"files": "text.txt", "seq_len": 64, "file": "x"}, "unknown key data.file: did you mean files?"),
        ("data", {"files": "text.txt", "seq_len": "long"}, "data.seq_len is 'long'"),
        ("data", {"files": [], "seq_len": 64}, "data.files is"),
        ("data", {"files": "missing.txt", "seq_len": 64}, "data.files: .*missing.txt names no file"),
        (
            "data",
            {"files": "empty.txt", "seq_len": 64},
            "data.files: got less than one row of data.seq_len = 64 tokens; expected more",
        ),
        (
            "data",
            {"files": "text.txt", "seq_len": 4096},
            "data.files: got less than one row of data.seq_len = 4096 tokens; expected more",
        ),
        ("training", ["x"], "training is .*; expected a mapping of keys"),
        ("training", {"lerning_rate": 1}, "unknown key training.lerning_rate: did you mean learning_rate?"),
        ("training.learning_rate", "fast", "training.learning_rate is 'fast'"),
        ("training.optim", "sgdd", "training: sgdd is not a valid OptimizerNames, please select one of"),
        ("context_parallel_size", 2, "context_parallel_size is 2 but there is 1 rank;"),
        *(
            ("model.num_hidden_layers", layers, f"model.num_hidden_layers is {layers}; expected 1 to")
            for layers in (0, -1)
        ),
        ("model.hidden_size", 0, "model.hidden_size is 0; expected 1 to"),
        ("model.vocab_size", -5, "model.vocab_size is -5; expected 1 to"),
        ("model.hidden_size", "wide", "model: .*'hidden_size' expected int, got str"),
        ("model.hidden_act", "silo", "model.hidden_act is 'silo'; expected an activation of transformers: .*silu"),
        ("model.attention_dropout", 2.0, "model.attention_dropout is 2.0; expected a probability, 0 to 1"),
        ("model.num_key_value_heads", 3, "model.num_key_value_heads is 3; expected a divisor of .* 4"),
        ("model.model_type", "zzzz", "unknown model.model_type zzzz: the closest are [^,]+, [^,]+, [^,]+$"),
        ("model", {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 0}, "model.n_layer is 0; expected 1 to"),
        ("training.learning_rate", float("nan"), "training.learning_rate is nan; expected a finite number"),
        (
            "training.gradient_accumulation_steps",
            0,
            "training.gradient_accumulation_steps is 0; expected an integer of at least 1$",
        ),
        ("training.max_steps", True, "training.max_steps is True; expected an integer .without quotes"),
        ("training.save_strategy", False, "training.save_strategy is False; expected .*without quotes"),
        ("training.lr_scheduler_type", "kosine", "training: kosine is not a valid SchedulerType, please select"),
        ("training.seed", 2**40, r"training.seed: Seed must be between 0 and 2\*\*32 - 1"),
        ("training.lr_scheduler_type", "cosine_with_min_lr", "training.lr_scheduler_kwargs: One of min_lr or"),
        ("training.eval_strategy", "steps", "training: You have set .*but you didn't pass an `eval_dataset`"),
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

    monkeypatch.setattr("transformers.Trainer.__init__", fail)
    line = refusal(write_config(tmp_path), capfd)
    assert line.startswith(r"ringtile: error: training: RuntimeError: one two\x1b[2Jxxx")
    assert line.endswith("x ...")


# ---- secrets and outputs ------------------------------------------------------------------------


def test_tokens_of_a_hub_are_in_no_report(tmp_path: pathlib.Path) -> None:
    recipe = Recipe.load(write_config(tmp_path, training=TRAINING | {"push_to_hub": True, "hub_token": "hf_abc"}))
    assert recipe.training["hub_token"] == "hf_abc"
    assert "hf_abc" not in json.dumps(recipe.mapping())
    assert recipe.alone(1, "out").mapping()["training"]["push_to_hub"] is False


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
    (folder / "a.json").unlink()
    (folder / "b.json").write_text("old")
    (folder / "a.json").symlink_to(folder / "b.json")
    check_output(folder / "a.json", "--json")
    write_json(folder / "a.json", {})
    assert json.loads((folder / "b.json").read_text()) == {}
    check_output(pathlib.Path("/dev/null"), "--json")
    write_json(pathlib.Path("/dev/null"), {})
    assert pathlib.Path("/dev/null").is_char_device()


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
    expected = (
        "expected the versions of the extra hf: pip install 'transformers>=5.17' 'accelerate>=1.15' 'numpy>=1.26'"
    )
    assert message.format(transformers.__version__) in str(told.value)
    assert str(told.value).endswith(expected)
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'") as own, needs_extra("x", "hf"):
        exec("from ringtile import no_such_name")
    assert not isinstance(own.value, ringtile.MissingPackageError)
