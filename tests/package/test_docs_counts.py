"""Numbers that the pages state, against the tables and the code that they are of."""

from __future__ import annotations

import json
import pathlib
import re
import typing

import pytest
from ringtile.hf.config import Config
from ringtile.sequence.layout import CHUNKS_PER_RANK, PADDED_LIKE
from ringtile.transport.failures import MAX_NEIGHBORS

from tools.gauntlet import attention_cases, training_cases

LENGTHS = [str(length << 10) for length in (128, 512, 1024)]  # of the tables
ROOT = pathlib.Path(__file__).parents[2]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="ascii")


def types_of_models() -> tuple[int, int, int]:
    """Of the table of models: types that train on a task at least, all types, and exact pairs of type and task."""
    table = read("docs/guide/models_table.md").split("<!-- begin")[1].split("<!-- end")[0].split("untried.")[1]
    exact, rest = table.split("| refused |")
    pairs = re.findall(r"`([^`]+)`", exact)
    firsts = "".join(re.findall(r"^\| (`.*?`) \|", rest, re.MULTILINE))
    trained = {pair.split(":")[0] for pair in pairs}
    return len(trained), len(trained | {name.split(":")[0] for name in re.findall(r"`([^`]+)`", firsts)}), len(pairs)


def test_counts_of_models_are_the_tables() -> None:
    trained, types, exact = types_of_models()
    assert f"{trained} of {types} model types" in " ".join(read("README.md").split())
    assert f"{trained} of {types} model types" in " ".join(read("docs/guide/models.md").split())
    assert f"{exact} pairs of type and task" in " ".join(read("docs/design/first_batch.md").split())


def test_errors_of_planned_memory_are_the_tables() -> None:
    rows = re.findall(
        r"^\| `[^`]+/[^`]+` \| (\d+) \| (\d+) \| ([\d.]+) \|$", read("tests/campaigns/README.md"), re.MULTILINE
    )
    ratios = [float(ratio) for _, _, ratio in rows]
    for planned, measured, ratio in rows:
        assert abs(int(planned) / int(measured) - float(ratio)) <= 1 / int(measured) + 0.001
    near = sum(abs(int(planned) / int(measured) - 1) <= 0.025 for planned, measured, _ in rows)
    pages = {name: " ".join(read(f"docs/{name}.md").split()) for name in ("guide/memory", "design/evidence")}
    page = pages["guide/memory"]
    assert f"{len(rows)} trainings" in pages["design/evidence"]
    assert f"{near} are within 2.5 %" in pages["design/evidence"]
    assert f"[{len(rows)} trainings" in page
    assert f"{near} are within 2.5 %" in page
    assert f"was planned {1 - min(ratios):.0%}".replace("%", " %") in page
    assert 1 - min(ratios) > max(ratios) - 1


def test_memory_of_the_readme_is_the_planners() -> None:
    planned = json.loads((ROOT / "tools/pictures/memory.json").read_text()).values()
    rows = re.findall(r"^\| (?:checkpointing|and) [^|]*\| (\d+) \| (\d+) \| (\d+) \|$", read("README.md"), re.MULTILINE)
    of_keys = [
        [sum(size for part, size in of_length[length].items() if part != "host") / 2**30 for length in LENGTHS]
        for of_length in planned
    ]
    assert [[int(gib) for gib in row] for row in rows] == [[round(gib) for gib in of_keys[n]] for n in (0, 3, 4)]


def test_tables_of_scaling_are_the_simulators() -> None:
    page, figures = read("docs/guide/scaling.md"), json.loads((ROOT / "tools/pictures/scale.json").read_text())
    rows = re.findall(r"^\| (one document|source files), (\w+), `([\w:]+)` \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == len(figures["seconds"])
    for data, layout, scheme, cells in rows:
        of_ranks = figures["seconds"][f"{data}, {layout}, {scheme}"].values()
        assert cells.split(" | ") == [f"{of['together']:.1f} ({of['mean'] / of['together']:.2f})" for of in of_ranks]
    published = {name: of for by_source in figures["published"].values() for name, of in by_source.items()}
    found = re.findall(r"^\| [^|]* \| ([^|]*) \| ([\d.]+) \| ([\d.]+) \| ([+-]?\d+) % \|$", page, re.MULTILINE)
    assert {name: [float(one), float(other)] for name, one, other, _ in found} == published
    assert all(int(error) == round((float(other) / float(one) - 1) * 100) for _, one, other, error in found)


def test_the_table_of_attention_is_its_figures() -> None:
    page, figures = read("docs/guide/performance.md"), json.loads((ROOT / "tools/pictures/attention.json").read_text())
    dtypes, found = {"float32": "fp32", "bfloat16": "bf16"}, {}
    for row in figures["rows"]:
        case = f"{row['case']} {dtypes[row['dtype']]} {row['seq_len']} {row['num_kv_heads']} {row['head_dim']}"
        found[case, row["backend"], row["pass"]] = row
    table = page.partition("| case, dtype, S, G, D |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) == 18
    for cells in (line.strip("|").split("|") for line in table):
        name, of_peak, against, *ratios = (cell.strip(" `") for cell in cells)
        case = name or case  # else the row above has it
        ours = [found[case, "ringtile", of] for of in ("forward", "backward", "forward+backward")]
        assert not name or of_peak == ", ".join(f"{row['fraction_of_peak']:.2f}" for row in ours[:2])
        theirs = [found.get((case, against, row["pass"])) for row in ours[::2]]
        for ratio, row, mine in zip(ratios, theirs, ours[::2], strict=True):
            assert (ratio == "") == (row is None)
            assert row is None or float(ratio) == pytest.approx(row["median_s"] / mine["median_s"], rel=6e-3)


def test_the_table_of_one_placement_is_its_figures() -> None:
    page, figures = read("docs/guide/sharing.md"), json.loads((ROOT / "tools/pictures/placement.json").read_text())
    page = page.partition("## One placement")[2].partition("## Schemes")[0]
    rows = re.findall(r"^\| (\d|one placement.*?) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 7
    for way, cells in rows:
        name, found = way.replace("`", ""), []
        if runs := figures["measured"].get(name):
            idle = [share * 100 for run in runs for share in run["idle"]]
            found += [f"{sum(run['seconds'] for run in runs) / len(runs):.2f}", f"{min(idle):.0f} to {max(idle):.0f} %"]
            found += [f"{runs[0]['megabytes']:.1f}"]
        for steps in (of[name] for of in figures["simulated"].values() if name in of):
            seconds, idle, sent = (sum(x[key] for x in steps) / len(steps) for key in ("seconds", "idle", "megabytes"))
            found += [f"{seconds:.1f} ({idle * 100:.0f} %)", f"{sent / 1e3:.1f}"]
        assert [cell for cell in cells.split(" | ") if cell != "-"] == found
    for of in figures["simulated"].values():
        fits, cut, tokens, of_cut = (sum(column) for column in zip(*of["cut"], strict=True))
        assert f"{cut / fits * 100:.1f} %" in page
        assert f"{of_cut / tokens * 100:.0f} %" in " ".join(page.split())


def test_counts_of_the_gauntlet_are_its_tables() -> None:
    page, readme = read("docs/guide/gauntlet_table.md"), read("README.md")
    backends = re.findall(r"^\| `([\w-]+)` \| [\w-]+ [\d.+a-z]+ \|", page, re.MULTILINE)
    others = {name for name in backends if not name.startswith("ringtile")}
    cases = len(attention_cases.CASES) + len(training_cases.CASES)
    assert len(others) == 9
    assert f"nine implementations on {cases} cases" in " ".join(readme.split())
    for name in re.findall(r'--case "?([\w ]+)', readme):
        assert name.strip() in {case.name for case in (*attention_cases.CASES, *training_cases.CASES)}


@pytest.mark.parametrize(
    ("package", "file", "sentence"),
    [
        ("trl", "trainer/sft_trainer.py", "Packing is not compatible with context parallelism"),
        ("trl", "trainer/grpo_config.py", "does not support sequence-dim parallelism"),
        ("trl", "trainer/rloo_config.py", "does not support sequence-dim parallelism"),
        ("accelerate", "big_modeling.py", "Context parallelism does not support attention layers of type"),
        ("accelerate", "state.py", "We need a `fsdp_plugin` to use context parallelism"),
        ("accelerate", "parallelism_config.py", 'valid_sp_backends = ["deepspeed"]'),
    ],
)
def test_hugging_face_refuses_what_the_readme_says(package: str, file: str, sentence: str) -> None:
    """A release that takes one of these changes a row of the table."""
    folder = pathlib.Path(pytest.importorskip(package).__file__).parent
    assert sentence in re.sub(r'"\s*"', "", (folder / file).read_text())


def test_layouts_are_one_list() -> None:
    assert {"auto", *CHUNKS_PER_RANK, *PADDED_LIKE} == {*typing.get_args(typing.get_type_hints(Config)["layout"])}


def test_sockets_of_a_rank_are_the_codes() -> None:
    most = MAX_NEIGHBORS + 3  # and those of the tree
    assert f"at most {most} sockets" in " ".join(read("docs/design/ring.md").split())


def test_pages_stay_below_their_ceiling_of_words() -> None:
    """Without the pages of generated tables; the lines between columns are no words."""
    pages = [path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")) if not path.stem.endswith("_table")]
    words = [word for path in pages for word in path.read_text().split() if any(map(str.isalnum, word))]
    assert len(words) <= 41_050


def test_counts_of_types_with_images_are_the_tests() -> None:
    import test_audio
    import test_images
    import test_videos

    page = read("docs/design/evidence.md")
    alone = {*test_images.EVERY_RUN, *test_images.OTHERS, *test_images.PROMISED}
    assert f"to 1e-6; {len(test_images.PROMISED)} of them for five steps" in page
    assert f"| {len(alone)} types on rows with several images" in page
    assert f"| {len(test_videos.MODELS)} types with videos" in page
    assert f"| {len(test_audio.MODELS)} types with sound" in page
