"""The configuration: errors name an unknown key and its closest match, or a wrong value and the expected ones."""

import copy
import dataclasses
import json
import pathlib
import pickle
import re

import pytest
import ringtile
from ringtile.cli import main
from ringtile.hf.config import Config
from ringtile.hf.yaml_file import read_yaml


def test_defaults_change_nothing():
    config = Config()
    assert config.context_parallel_size == 1
    assert not config.tiled_mlp
    assert not config.tiled_loss


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"context_paralel_size": 2}, ["context_paralel_size", "did you mean context_parallel_size?"]),
        ({"ring_degree": 2}, ["ring_degree", "did you mean context_parallel_size?"]),
        ({"activation_offload": True}, ["activation_offload", "did you mean activation_offloading?"]),
        ({"load_balancer": "zigzag"}, ["load_balancer", "did you mean layout?"]),
        ({"zebra": 2}, ["zebra", "expected one of activation_offloading"]),
        ({"context_parallel_size": 0}, ["context_parallel_size", "0", "expected an integer of at least 1"]),
        ({"context_parallel_size": True}, ["context_parallel_size", "True", "integer"]),
        ({"context_parallel_size": "2"}, ["context_parallel_size", "'2'", "integer"]),
        (
            {"layout": "zigzak"},
            ["layout", "'zigzak'", "'striped', 'per_document', 'balanced' or 'whole_documents'"],
        ),
        ({"tile_tokens": -1}, ["tile_tokens", "-1"]),
        ({"timeout_seconds": 60.0}, ["unknown key timeout_seconds: set ddp_timeout in TrainingArguments"]),
        ({"attention_kernel": "aten"}, ["attention_kernel: set the environment variable RINGTILE_ATTENTION_KERNEL"]),
        ({"log_metrics": True}, ["log_metrics", "examples/metrics.py"]),
        ({"gc_steps": 5}, ["gc_steps", "ringtile.CollectGarbageCallback"]),
        ({"tiled_mlp_num_shards": 4}, ["tiled_mlp_num_shards", "tile_tokens"]),
        ({"layout": "zag", "tile_tokens": "x"}, ["layout is 'zag'", "; tile_tokens is 'x'"]),
        ({"context_parallel_size": 10**5000}, ["context_parallel_size is an int of more than 4000 digits"]),
        # Settings without effect.
        ({"tile_tokens": 5}, ["tile_tokens is 5 but nothing is tiled"]),
        ({"loss_tile_tokens": 5, "tiled_loss": True}, ["unknown key loss_tile_tokens: set tile_tokens, the most"]),
        ({"stream_tokens": 5, "stream": True}, ["unknown key stream_tokens: set tile_tokens, which the chunks"]),
    ],
)
def test_bad_key_or_value_is_named(values, words):
    for construct in (lambda: Config(**values), lambda: Config.load(values)):
        with pytest.raises(ringtile.ConfigError) as error:
            construct()
        assert "\n" not in str(error.value)
        for word in words:
            assert word in str(error.value)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"cp_size": 2}, {"context_parallel_size": 2}),
        ({"context_parallel_degree": 2, "layout": "striped"}, {"context_parallel_size": 2, "layout": "striped"}),
        ({"sequence_parallel_size": 4, "context_parallel_size": 4}, {"context_parallel_size": 4}),
        (
            {"ulysses_sequence_parallel_size": 2},
            {"context_parallel_size": 2, "context_parallel_scheme": "ulysses"},
        ),
        ({"offload_activations": True}, {"activation_offloading": True}),
    ],
)
def test_other_libraries_names_are_taken_and_said(given, taken, caplog):
    with caplog.at_level("WARNING", logger="ringtile"):
        config = Config.load(given)
    assert config == Config(**taken)
    name = next(iter(given))
    words = ", ".join(f"{key}: {value!r}" for key, value in taken.items() if key != "layout")
    assert [record.getMessage() for record in caplog.records] == [f"the key {name} is taken as {words}"]
    with pytest.raises(ringtile.ConfigError, match=f"unknown key {name}: did you mean {next(iter(taken))}"):
        Config(**given)  # a keyword of ours alone


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cp_size": 2, "context_parallel_size": 4}, "cp_size is 2, which means context_parallel_size: 2, and context"),
        ({"cp_size": 2, "sp_size": 4}, "sp_size is 4, which means context_parallel_size: 4, and context_parallel_size"),
        ({"cp_size": 2, "context_parallel": {"size": 4}}, "context_parallel.size is 4 and context_parallel_size is 2"),
        (
            {"ulysses_sequence_parallel_size": 2, "context_parallel_scheme": "ring"},
            "ulysses_sequence_parallel_size is 2, which means context_parallel_scheme: 'ulysses', and context_",
        ),
        ({"cp_size": "2"}, "context_parallel_size is '2'"),
        ({"offload_activations": "disk"}, "activation_offloading is 'disk'"),
    ],
)
def test_a_name_of_another_library_that_contradicts_is_refused(given, words):
    with pytest.raises(ringtile.ConfigError, match=words):
        Config.load(given)


@pytest.mark.parametrize(
    ("given", "size", "scheme"),
    [
        ({"ulysses_size": 2, "ring_size": 4}, 8, "usp:2"),
        ({"context_parallel_size": 8, "ulysses_size": 2}, 8, "usp:2"),
        ({"cp_size": 8, "ring_size": 4}, 8, "usp:2"),
        ({"context_parallel": {"size": 4, "ulysses_size": 4, "ring_size": 1}}, 4, "usp:4"),
        ({"ulysses_size": 2, "context_parallel_scheme": "usp:2"}, None, "usp:2"),  # the size is accelerate's
    ],
)
def test_two_sizes_are_the_scheme_of_them(given, size, scheme):
    taken = {"context_parallel_scheme": scheme} | ({} if size is None else {"context_parallel_size": size})
    assert Config.load(given) == Config(**taken)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ulysses_size": "2"}, "ulysses_size is '2'; expected an integer of at least 1"),
        ({"ulysses_size": True}, "ulysses_size is True; expected an integer"),
        ({"ring_size": 0}, "ring_size is 0; expected an integer of at least 1"),
        ({"ring_size": 2}, "ring_size is 2 and context_parallel_size None; expected a multiple of ring_size"),
        ({"ring_size": 3, "cp_size": 4}, "ring_size is 3 and context_parallel_size 4; expected a multiple"),
        (
            {"ulysses_size": 2, "ring_size": 2, "context_parallel_size": 8},
            "ulysses_size is 2 and ring_size is 2 and context_parallel_size 8; expected ulysses_size x ring_size",
        ),
        (
            {"ulysses_size": 2, "context_parallel_size": 4, "context_parallel_scheme": "ring"},
            "ulysses_size is 2 and context_parallel_scheme 'ring'; expected usp:2, or one of them",
        ),
        ({"ulysses_size": 3, "context_parallel_size": 4}, "the scheme is usp:3, but the group has 4 ranks"),
        (
            {"cp_comm_strategy": "ring"},
            r"cp_comm_strategy is 'ring'; expected allgather \(context_parallel_scheme: all_g",
        ),
        ({"load_balance": ["none"]}, "load_balance is"),
    ],
)
def test_sizes_and_words_that_contradict_are_refused(given, words):
    with pytest.raises(ringtile.ConfigError, match=words):
        Config.load(given)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"cp_size": 2, "cp_comm_strategy": "allgather"}, {"context_parallel_scheme": "all_gather"}),
        ({"cp_size": 2, "rotate_method": "alltoall"}, {"context_parallel_scheme": "ring"}),
        ({"cp_size": 2, "load_balance": "head_tail"}, {"layout": "zigzag"}),
        ({"cp_size": 2, "load_balance": "none"}, {"layout": "contiguous"}),
    ],
)
def test_words_of_other_libraries_for_a_value_are_taken(given, taken):
    assert Config.load(given) == Config(context_parallel_size=2, **taken)


def test_config_is_frozen_and_compares_by_content():
    config = Config(context_parallel_size=2)
    assert config == Config.load({"context_parallel_size": 2})
    assert Config.load(config) is config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.layout = "striped"
    for again in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert again == config
        assert again.given == {"context_parallel_size": 2}
    assert config.changed(layout="striped") == Config(context_parallel_size=2, layout="striped")
    assert config.given == {"context_parallel_size": 2}


def test_help_lists_every_key(capsys):
    help(ringtile.Config)
    page = capsys.readouterr().out
    for key in Config.names():
        assert f"{key}: " in Config.__doc__.replace(", ", ": ")
        assert key in page


def test_config_lists_every_key_in_words(capsys):
    assert main(["config"]) == 0
    page = capsys.readouterr().out
    for key in Config.names():
        assert re.search(rf"^{key}: .*; default .*\n    \w", page, re.MULTILINE), key
    assert main(["config", "tile_tokens"]) == 0
    assert capsys.readouterr().out.startswith(
        "tile_tokens: an integer of at least 1; default 16384\n    tokens of a tile"
    )
    assert main(["config", "tile_token"]) == 2
    assert "unknown key tile_token: did you mean tile_tokens?" in capsys.readouterr().err


def test_schema_has_what_files_of_this_tree_set(capsys):
    assert main(["config", "--schema"]) == 0
    known = json.loads(capsys.readouterr().out)
    for path in sorted((pathlib.Path(__file__).parents[2] / "configs" / "alst").glob("*.yaml")):
        for key, value in read_yaml(path).items():
            for inner in value if isinstance(value, dict) and key != "model" else ():
                assert inner in known["properties"][key]["properties"], (path, key, inner)
            assert key in known["properties"], (path, key)
    assert known["properties"]["tile_tokens"]["minimum"] == 1
    assert known["properties"]["layout"]["enum"][0] == "auto"
    assert known["additionalProperties"] is False


def test_yaml_file_is_read(tmp_path):
    path = tmp_path / "ringtile.yaml"
    path.write_text("context_parallel_size: 2\nlayout: striped\ntiled_mlp: true\n")
    assert Config.load(path) == Config(context_parallel_size=2, layout="striped", tiled_mlp=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "expected a readable YAML file"),
        ("- 1\n- 2\n", "holds list; expected a mapping"),
        ("", "holds NoneType; expected a mapping"),
        ("layout: [zigzag\n", "not YAML"),
        ("context_parallel_sizes: 2\n", "did you mean context_parallel_size?"),
    ],
)
def test_bad_yaml_file_is_named(tmp_path, text, words):
    path = tmp_path / "ringtile.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ringtile.ConfigError, match=r"ringtile\.yaml") as error:
        Config.load(path)
    assert words in str(error.value)


def test_a_mapping_holds_the_keys_of_context_parallelism():
    nested = Config.load({"context_parallel": {"size": 4, "scheme": "usp:2", "layout": "striped"}, "tiled_loss": True})
    flat = {"context_parallel_size": 4, "context_parallel_scheme": "usp:2", "layout": "striped", "tiled_loss": True}
    assert nested == Config.load(flat)
    assert Config.load({"context_parallel": {"size": 2}, "context_parallel_size": 2}).context_parallel_size == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"context_parallel": 4},
            "context_parallel is 4; expected a mapping with size, scheme, layout, ulysses_size, ring_size",
        ),
        ({"context_parallel": {"sise": 4}}, "unknown key context_parallel.sise: did you mean size?"),
        (
            {"context_parallel": {"size": 4}, "context_parallel_size": 2},
            "context_parallel.size is 4 and context_parallel_",
        ),
        ({"context_parallel": {"size": 0}}, "context_parallel_size is 0"),
    ],
)
def test_a_mapping_that_contradicts_is_named(values, message):
    with pytest.raises(ringtile.ConfigError, match=message):
        Config.load(values)
