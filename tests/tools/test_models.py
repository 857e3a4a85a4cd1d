"""docs/guide/models_table.md says what `python -m tools.models` finds of a model type; nothing is wrong or fails."""

import logging
import pathlib
import re
import warnings

import pytest
import ringtile
from hf_training import enter_world
from pool import run_ranks

from tools.models.__main__ import decide, main, markdown, reason_of, split_page
from tools.models.tiny_models import tiny_config
from tools.models.tiny_training import all_types

PAGE = pathlib.Path(__file__).parents[2] / "docs/guide/models_table.md"
TYPES = all_types()
# Images, an encoder, no attention; refused at enable, refused in the first step.
FEW = ("internvl:images", "roberta", "mamba", "rwkv", "bart")


def _in_world(function, *arguments):
    """Run `function` and undo what it does to warnings and logging."""
    enter_world()
    logger = logging.getLogger("ringtile")
    level = logger.level
    with warnings.catch_warnings():
        try:
            return function(*arguments)
        finally:
            logger.setLevel(level)


def _as_told(error):
    """Do what the processes of `python -m tools.models` do."""
    return RuntimeError(f"{type(error).__name__}: {error}")


class _Ranks:
    def call(self, function, *arguments, seconds):
        try:
            return run_ranks(2, _in_world, function, *arguments, timeout=seconds)
        except Exception as error:
            return [_as_told(error)]


class _Alone:
    def call(self, function, *arguments, seconds):
        try:
            return [_in_world(function, *arguments)]
        except Exception as error:
            return [_as_told(error)]


def _documented():
    """{type: (verdict, reason)} of the committed page."""
    _, _, rest = PAGE.read_text().partition("<!-- begin: python -m tools.models --markdown -->\n")
    found, verdict = {}, ""
    for line in rest.splitlines():
        if line.startswith("`"):
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", line), ("exact", ""))
        elif match := re.match(r"\| (\w+) \| reason \|", line):
            verdict = match[1]
        elif line.startswith("| `"):
            names, reason = line.strip("| ").split(" | ", 1)
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", names), (verdict, reason))
        elif line == "<!-- end -->":
            break
    return found


def _check(name):
    row = decide(name, _Ranks(), _Alone())
    verdict, reason = _documented()[name]
    found = " ".join(reason_of(row).split()) if "reason" in row else ""
    assert (row["verdict"], found) == (verdict, reason), row
    assert row["verdict"] not in ("wrong", "failed")


def test_page_decides_every_type():
    documented = _documented()
    assert sorted(documented) == sorted(TYPES)
    assert {verdict for verdict, _ in documented.values()} <= {"exact", "refused", "untried"}


def test_page_says_why_each_refusal_stays():
    _, _, rest = (PAGE.parent / "models.md").read_text().partition("### Why each refusal stays")
    whys = re.findall(r"^\| ([^|]+) \|", rest.partition("\n## ")[0], re.MULTILINE)[2:]
    reasons = {reason for verdict, reason in _documented().values() if verdict == "refused"}
    assert [reason for reason in reasons if not any(why in reason for why in whys)] == []


@pytest.mark.parametrize("name", FEW)
def test_page_is_right(name):
    _check(name)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(TYPES) - set(FEW)))
def test_page_is_right_for_every_type(name):
    _check(name)


def test_tiny_configuration_keeps_the_kinds_of_layers():
    config = tiny_config("gemma2")
    assert sorted(set(config.layer_types)) == ["full_attention", "sliding_attention"]
    assert all(config.layer_types.count(kind) >= 2 for kind in config.layer_types)
    assert config.attn_logit_softcapping == 50.0
    assert config.sliding_window < 24
    assert tiny_config("llama4_text").num_hidden_layers == 4  # its list of mixtures names layers, not kinds of them


def test_own_configuration_is_tried(tmp_path):
    tiny_config("qwen3").save_pretrained(tmp_path)
    assert decide(str(tmp_path), _Ranks(), _Alone())["verdict"] == "exact"


class _TwoError(Exception):
    def __init__(self, first, second):
        super().__init__(first)


def _fail():
    raise _TwoError("lost", 2)


def test_an_error_that_cannot_be_made_again_is_told():
    with pytest.raises(RuntimeError, match="returned what cannot be pickled, _TwoError"):
        run_ranks(2, _fail)


def test_unknown_name_is_told(capsys):
    assert main(["lama"]) == 2
    assert "NAME is lama; expected a folder with a config.json, or one of afmoe" in capsys.readouterr().err


def test_markdown_groups_the_types(tmp_path):
    rows = [
        {"type": "a", "verdict": "exact"},
        {"type": "a:images", "verdict": "exact"},
        {"type": "b", "verdict": "refused", "class": "BForCausalLM", "reason": "BForCausalLM has none; add one"},
        {"type": "c", "verdict": "refused", "class": "CForCausalLM", "reason": "CForCausalLM has none; add one"},
    ]
    text = markdown(rows)
    assert "4 pairs of type and task" in text
    assert "2 exact, 2 refused" in text
    assert "<summary>Exact: 1 types of images and text, with images</summary>\n\n`a:images`\n" in text
    assert "| `b`, `c` | it has none |" in text
    page = tmp_path / "page.md"
    page.write_text("no table")
    with pytest.raises(ringtile.ConfigError, match="has no table"):
        split_page(page)
