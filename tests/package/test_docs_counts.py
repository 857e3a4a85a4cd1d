"""Numbers that the pages state, against the tables and the code that they are of."""

from __future__ import annotations

import pathlib
import re
import typing

from ringtile.config import Config
from ringtile.sequence.layout import CHUNKS_PER_RANK, PADDED_LIKE
from ringtile.transport.failures import MAX_NEIGHBOURS

ROOT = pathlib.Path(__file__).parents[2]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="ascii")


def types_of_models() -> tuple[int, int, int]:
    """Of the table of models: types that train on a task at least, all types, and exact pairs of type and task."""
    table = read("docs/guide/models.md").split("<!-- begin")[1].split("<!-- end")[0].split("untried.")[1]
    exact, rest = table.split("| refused |")
    pairs = re.findall(r"`([^`]+)`", exact)
    firsts = "".join(re.findall(r"^\| (`.*?`) \|", rest, re.MULTILINE))
    trained = {pair.split(":")[0] for pair in pairs}
    return len(trained), len(trained | {name.split(":")[0] for name in re.findall(r"`([^`]+)`", firsts)}), len(pairs)


def test_counts_of_models_are_the_tables() -> None:
    trained, types, exact = types_of_models()
    assert f"{trained} of {types} model types" in read("README.md")
    assert f"{trained} of {types} model types" in read("docs/guide/models.md")
    assert f"{exact} tiny models" in read("docs/design/first_batch.md")


def test_errors_of_planned_memory_are_the_tables() -> None:
    rows = re.findall(
        r"^\| `[^`]+/[^`]+` \| (\d+) \| (\d+) \| ([\d.]+) \|$", read("docs/design/evidence.md"), re.MULTILINE
    )
    ratios = [float(ratio) for _, _, ratio in rows]
    for planned, measured, ratio in rows:
        assert abs(int(planned) / int(measured) - float(ratio)) < 0.003
    near = sum(abs(int(planned) / int(measured) - 1) <= 0.025 for planned, measured, _ in rows)
    page = " ".join(read("docs/guide/memory.md").split())
    assert f"[{len(rows)} trainings" in page
    assert f"{near} are within 2.5 %" in page
    assert f"was planned {1 - min(ratios):.0%}".replace("%", " %") in page
    assert 1 - min(ratios) > max(ratios) - 1


def test_layouts_are_one_list() -> None:
    assert {*CHUNKS_PER_RANK, *PADDED_LIKE} == {*typing.get_args(Config.model_fields["layout"].annotation)}


def test_sockets_of_a_rank_are_the_codes() -> None:
    most = MAX_NEIGHBOURS + 3  # and those of the tree
    assert f"at most {most} sockets" in " ".join(read("docs/design/ring.md").split())
