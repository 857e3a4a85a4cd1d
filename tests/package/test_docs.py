"""The documentation tells the truth: code runs, YAML loads, commands exist, links lead somewhere. Needs no mkdocs."""

import argparse
import ast
import dataclasses
import fnmatch
import functools
import html
import importlib.util
import inspect
import json
import pathlib
import re
import shlex
import textwrap
from types import ModuleType
from unittest import mock

import pytest
import ringtile
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from docs_examples import EXAMPLES, run_page
from pool import run_ranks
from ringtile.cli import VERBS, verb_module
from ringtile.cli.recipe import Recipe
from ringtile.hf.config import Config
from test_hf_axolotl import plugin_module, registered
from torch.distributed.run import get_args_parser

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "ringtile"
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "configs").rglob("*.md")]
)
SITE = [page for page in PAGES if page.startswith("docs/")]


@functools.cache
def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="ascii")


def blocks(page: str, language: str) -> list[str]:
    """Code in a language, also indented, as in a tab."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", read(page), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(code) for _, code in found]


def prose(page: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^( *)```.*?^\1```$", "", read(page), flags=re.DOTALL | re.MULTILINE)


def code_spans(page: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


# ---- Python -------------------------------------------------------------------------------------

SNIPPETS = {
    f"{page} {i}": code for page in PAGES for i, code in enumerate(blocks(page, "python")) if not code.startswith(">>>")
}


def test_every_snippet_has_an_example() -> None:
    assert sorted(SNIPPETS) == EXAMPLES


def test_every_public_function_has_an_example() -> None:
    """In a snippet that runs or a session that is compared."""
    elsewhere = {"real_tokens", "token_positions"}
    functions = [name for name in ringtile.__all__ if inspect.isfunction(getattr(ringtile, name))]
    shown = "\n".join(code for page in PAGES for code in blocks(page, "python"))
    assert {name for name in functions if not re.search(rf"\b{name}\b", shown)} == elsewhere


# Its trainings are those of trainer.md and trl.md, under FSDP.
STORY = pytest.param("docs/guide/qwen3_8b_128k.md", marks=pytest.mark.long)
OF_SNIPPETS = sorted({name.rpartition(" ")[0] for name in EXAMPLES} - set(STORY.values))


@pytest.mark.parametrize("page", [*OF_SNIPPETS, STORY])
def test_snippets_of_a_page_run_in_order_on_two_ranks(page: str, tmp_path: pathlib.Path) -> None:
    if page in ("docs/guide/trl.md", "docs/guide/rl.md", "docs/guide/qwen3_8b_128k.md"):
        pytest.importorskip("trl")
    if page == "docs/guide/one_gpu_1m.md":
        pytest.importorskip("bitsandbytes")
    run_ranks(2, run_page, page, SNIPPETS, str(tmp_path))


# ---- YAML ---------------------------------------------------------------------------------------

CONFIGURATIONS = [
    *((f"{page} {i}", text) for page in PAGES for i, text in enumerate(blocks(page, "yaml"))),
    *((path.name, path.read_text()) for path in sorted((ROOT / "configs" / "axolotl").glob("*.yaml"))),
]
NAMES = [name for name, _ in CONFIGURATIONS]


@pytest.mark.parametrize("text", [text for _, text in CONFIGURATIONS], ids=NAMES)
def test_configuration_is_valid(text: str, tmp_path: pathlib.Path) -> None:
    given = yaml.safe_load(text)
    if "plugins" in given or "ringtile" in given:
        cfg = registered(**given)
        assert plugin_module()._split(cfg["ringtile"])[0].context_parallel_size == 8
        assert not cfg.keys() & set(Config.names())
    else:
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump({"model": {"model_type": "llama"}} | given))
        Recipe.load(path, default_data={"files": ["*.txt"], "seq_len": 8})


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "accelerate").glob("*.yaml")), ids=lambda path: path.name)
def test_accelerate_reads_its_configuration(path: pathlib.Path) -> None:
    config = load_config_from_file(str(path))
    assert config.fsdp_config["fsdp_version"] == 2
    sizes = config.parallelism_config or {}
    assert sizes.get("parallelism_config_cp_size", 1) in (1, 4)
    assert config.num_processes == 8


# ---- commands -----------------------------------------------------------------------------------


def commands(page: str) -> list[list[str]]:
    """The words of every command line in shell blocks, without comments and environment variables."""
    lines = (line for block in blocks(page, "sh") for line in block.splitlines())
    words = [shlex.split(line, comments=True) for line in lines if "$(" not in line]
    return [[word for word in line if not re.match(r"[A-Z_]+=", word)] for line in words if line]


def verb_parser(verb: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--json")
    verb_module(verb).add_arguments(parser)
    return parser


def check_command(line: list[str]) -> None:
    """Raises unless every option of a command of ours, or of a launcher, exists."""
    tool, *words = line
    if line[:2] == ["srun", "torchrun"] or tool == "torchrun":
        at = line.index("torchrun") + 1
        known = get_args_parser().parse_args(line[at:])
        if known.module:
            assert known.training_script == "ringtile"
            check_command(["ringtile", *known.training_script_args])
    elif line[:2] == ["accelerate", "launch"]:
        known = launch_command_parser().parse_args(words[1:])
        assert known.config_file is None or (ROOT / known.config_file).exists()
    elif line[:3] == ["python", "-m", "ringtile"]:
        check_command(["ringtile", *words[2:]])
    elif tool == "ringtile":
        verb_parser(words[0]).parse_args(words[1:])
    elif tool == "make":
        is_known = re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert is_known, f"make {words[0]}"
    elif tool.endswith("python"):
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    with mock.patch.object(argparse.ArgumentParser, "error", side_effect=AssertionError):
        for line in commands(page):
            check_command(line)
    for span in code_spans(page):
        words = span.split()
        if words[0] == "ringtile" and len(words) > 1 and words[1].isalpha():
            assert words[1] in VERBS, span
            options = verb_parser(words[1]).format_help()
            assert all(f"{word} " in options or f"{word}\n" in options for word in words if word.startswith("--")), span
        if words[0] == "make" and len(words) == 2:
            check_command(words)


def test_workflow_runs_what_exists() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    ran = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    targets = re.findall(r"^make ([\w-]+)", ran, re.MULTILINE)
    assert targets
    for target in targets:
        check_command(["make", target])
    assert set(jobs["release"]["needs"]) == jobs.keys() - {"release"}


# ---- links, paths, names ------------------------------------------------------------------------


def slug(heading: str) -> str:
    """The anchor of a heading, on the site and on GitHub."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


@functools.cache
def anchors(page: str) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (ROOT / page).parent.joinpath(path).resolve() if path else ROOT / page
        assert linked.is_file(), target
        name = str(linked.relative_to(ROOT))
        is_site = name in SITE or name.startswith("docs/pictures/")
        assert is_site or not page.startswith("docs/"), f"{target} is not a page of the site"
        assert not anchor or anchor in anchors(name), target


@pytest.mark.parametrize("page", PAGES)
def test_files_that_pages_name_exist(page: str) -> None:
    for span in code_spans(page):
        if re.fullmatch(r"(csrc|cuda|benchmarks|tests|configs|examples|docs|python)/[\w./-]*", span):
            assert (ROOT / span).exists(), span
        elif re.fullmatch(r"(hf|sequence|transport|ring|tiled|cli)/\w+\.py", span):
            assert (PACKAGE / span).exists(), span


def test_pages_that_the_code_names_exist() -> None:
    folders = ("benchmarks", "configs", "csrc", "cuda", "python", "tests")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.*")):
        if re.fullmatch(r"\.(py|c|h|inc|cpp|cuh?|yaml)", path.suffix) and path != pathlib.Path(__file__):
            for page in re.findall(r"\bdocs/[\w/]+\.md", path.read_text()):
                assert page in SITE, f"{path.relative_to(ROOT)} names {page}"


def test_navigation_has_every_page() -> None:
    def leaves(entry: object) -> list[str]:
        children = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ()
        return [entry] if isinstance(entry, str) else [leaf for child in children for leaf in leaves(child)]

    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(f"docs/{page}" for page in leaves(site["nav"])) == SITE


def test_reference_has_every_public_name() -> None:
    targets = [name for page in SITE for name in re.findall(r"^::: (\S+)$", read(page), re.MULTILINE)]
    for target in targets:
        owner, _, name = target.rpartition(".")
        source = ROOT / "python" / (owner.replace(".", "/") + ".py")
        module = ROOT / "python" / (target.replace(".", "/") + ".py")
        assert module.exists() or re.search(rf"^(class|def) {name}\b", source.read_text(), re.MULTILINE), target
    errors = {name for name in ringtile.__all__ if name in vars(importlib.import_module("ringtile.errors"))}
    assert set(ringtile.__all__) - errors <= {target.rpartition(".")[2] for target in targets}


def test_names_on_the_page_of_migrating_exist() -> None:
    rows = read("docs/guide/migrating.md").splitlines()
    ours = " ".join(row.split(" | ")[-1] for row in rows if row.startswith("|") and "---" not in row)
    keys = set(re.findall(r"`([a-z_]+): ", ours)) - {"train_batch_size", "plugins"}
    assert keys
    assert keys <= set(Config.names())
    for owner, name in re.findall(r"(IntervalMask|Layout|seq)\.(\w+)\(", ours):
        assert hasattr(getattr(ringtile, owner.replace("seq", "ShardedSequence")), name), name


def test_private_names_of_pytorch_on_the_page_of_migrating_exist() -> None:
    names = re.findall(r"`(_\w+)`", read("docs/guide/migrating.md"))
    assert names
    for name in names:
        assert hasattr(
            importlib.import_module("torch.distributed.tensor.experimental._context_parallel._attention"), name
        )


def test_window_of_the_page_of_migrating_is_ring_flash_attns() -> None:
    """window_size=(w - 1, 0) there is w keys here, the query's own among them."""
    mask = ringtile.IntervalMask.causal(6) & ringtile.IntervalMask.sliding_window(6, 3)
    assert torch.equal(mask.end - mask.begin, torch.tensor([[1, 2, 3, 3, 3, 3]], dtype=torch.int32))


# ---- prose ----------------------------------------------------------------------------------------

# Riddles of this project's own dialect, and what to write instead.
RIDDLES = {
    r"\bof which\b": "whose, or a second sentence",
    r"\bas it is\b": "unchanged",
    r"\b(?:is|are) (?:told|dealt)\b|\bdearest\b": "is reported, is distributed, most expensive",
    r"\btells? \w* ?apart\b": "separate, distinguish",
    r"\bby name\b": "refused",
    r"(?:^|[.] )Who\b": "whoever, or you",
    r"\bone's own\b": "your own",
    r"\bnobody\b": "no one, or what is not checked",
    r"\bgoes? on from\b": "continues from",
    r"\b(?:believed|forgotten)\b": "ignored",
    r"\bthose that\b": "name them",
    r"\bwhat travels\b": "messages",
    r"\bby turns\b": "alternately",
}
BRITISH = "|".join(
    (
        r"\b\w*(?:neighb|behavi|col|fav|hon|lab)our\w*",
        r"\b\w*(?:organ|initial|recogn|normal|optim|serial|synchron)is(?:e|ing)\w*",
        r"\b(?:label|model|travel|cancel|signal)l(?:ed|ing)\b",
        r"\b(?:grey|centre)\b",
    )
)


@pytest.mark.parametrize("page", PAGES)
def test_prose_is_plain_american_english(page: str) -> None:
    text = re.sub(r"<!-- begin.*?<!-- end -->|`[^`\n]*`|\]\([^)]*\)", "", prose(page), flags=re.DOTALL)
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", text)  # a paragraph is a line
    for riddle, instead in RIDDLES.items():
        assert not (found := re.search(riddle, text, re.MULTILINE)), f"{found and found[0]}: write {instead}"
    assert not (found := re.search(BRITISH, text, re.IGNORECASE)), found and found[0]


@pytest.mark.parametrize("top", ["benchmarks", "examples", "python", "tests", "tools"])
def test_python_is_american_english(top: str) -> None:
    for path in {*(ROOT / top).rglob("*.py")} - {pathlib.Path(__file__)}:
        assert not (found := re.search(BRITISH, path.read_text(), re.IGNORECASE)), f"{path}: {found and found[0]}"


# Sentences about what did not run, which become stale; docs/state.md has them all.
NOT_RUN = re.compile(
    r"no GPU (?:has|a)|no \w+ machine has run|never run|not (?:yet )?measured|has run on GPUs|which ran nowhere",
    re.IGNORECASE,
)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/state.md"])
def test_what_has_not_run_links_to_the_state(page: str) -> None:
    text = re.sub(r"<!-- begin.*?<!-- end -->", "", prose(page), flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n|\n(?=[|-])", text):
        if found := NOT_RUN.search(" ".join(paragraph.split())):
            assert "state.md" in paragraph, found[0]


NO_VERB = ("Of", "Those", "What", "As", "Whether", "That", "Which", "How", "The", "A", "An", "All", "None")


@pytest.mark.parametrize("folder", ["attn", "sequence", "transport", "recurrent", "tiled", "stream", "cli", ""])
def test_docstrings_of_functions_begin_with_a_verb(folder: str) -> None:
    for path in (PACKAGE / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                assert text.split()[0] not in NO_VERB, f"{path.name}: {node.name}: {text.splitlines()[0]}"


# ---- what the pages say about the code ----------------------------------------------------------


def messages() -> list[str]:
    """Every string of the package, the build and the core; "..." stands for what is filled in."""
    found = []
    for path in [*PACKAGE.rglob("*.py"), ROOT / "setup.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(x.value if isinstance(x, ast.Constant) else "..." for x in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return [*found, (ROOT / "csrc" / "ringtile" / "base.h").read_text()]


def test_messages_of_troubleshooting_exist() -> None:
    """A first column quotes an error; "..." may stand for any value. Backquoted words alone are its fields."""
    texts = messages()
    rows = re.findall(r"^\| (`.*?`) \|", read("docs/troubleshooting.md"), re.MULTILINE)
    quoted = [span for row in rows for span in re.findall(r"`([^`]+)`", row) if " " in span]
    assert len(quoted) > 20
    for quote in quoted:
        quote = re.sub(r"^ranks disagree on [\w ]+ in call", "ranks disagree on ... in call", quote)
        pattern = "*" + re.sub(r"([\[\]*?])", r"[\1]", quote).replace("...", "*") + "*"
        assert any(fnmatch.fnmatchcase(text, pattern) for text in texts), quote


def test_imports_point_down() -> None:
    """The drawing of the layers in docs/design/architecture.md, from the top line down, against every import."""
    drawing = read("docs/design/architecture.md").split("imports only point down:")[1].split("Packages on one line")[0]
    lines = [line.strip() for line in drawing.splitlines() if line.strip() not in ("", "|", "v")]
    level = {
        name: depth for depth, line in enumerate(lines) for name in re.split("  +", line.rsplit("    ", 1)[0].strip())
    }
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__", "auto"}
    assert folders | files <= level.keys()
    core = [name for name in level if level[name] > level["first_batch"]]
    assert not {"cli", "planner", "torch_context_parallel", "hf"} & set(core)
    for path in PACKAGE.rglob("*.py"):
        home = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if home not in level:  # those three are above all layers
            continue
        for name in imported(ast.parse(path.read_text())) & level.keys() - {home}:
            assert level[name] > level[home], f"{path.relative_to(PACKAGE)} imports {name}"


def imported(tree: ast.Module) -> set[str]:
    """The modules and folders directly under ringtile that a file imports, also within functions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "ringtile":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ringtile."):
            names.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("ringtile.")}
    return names


# ---- pictures and tables that are made -----------------------------------------------------------


@functools.cache
def module_of(path: str) -> ModuleType:
    """A script of the tree that is no part of the package."""
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, ROOT / path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "pictures").iterdir()), ids=lambda path: path.stem)
def test_picture_is_what_the_script_draws(path: pathlib.Path) -> None:
    """Else: python tools/pictures/draw.py."""
    assert module_of("tools/pictures/draw.py").PICTURES[path.stem]() == path.read_text()


def boxes(svg: str) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """Of a picture, (left, top, right, bottom) of each rectangle but the paper, and of each text, in a wide font."""
    rects, texts = [], []
    for x, y, width, height in re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', svg)[
        1:
    ]:
        rects.append((float(x), float(y), float(x) + float(width), float(y) + float(height)))
    for x, y, look, said in re.findall(r'<text x="([\d.]+)" y="([\d.]+)"([^>]*)>([^<]*)</text>', svg):
        size = float((re.search(r'font-size="(\d+)"', look) or re.match("(13)", "13"))[1])  # type: ignore[index]
        width, left = 0.56 * size * len(html.unescape(said)), float(x)
        left -= width if '"end"' in look else width / 2 if '"middle"' in look else 0
        texts.append((left, float(y) - 0.75 * size, left + width, float(y) + 0.2 * size))
    return rects, texts


def meet(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "pictures").iterdir()), ids=lambda path: path.stem)
def test_no_text_of_a_picture_crosses_a_bar_or_another_text(path: pathlib.Path) -> None:
    svg = path.read_text()
    width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())  # type: ignore[union-attr]
    rects, texts = boxes(svg)
    for n, text in enumerate(texts):
        assert min(text) >= 0, text
        assert text[2] <= width, text
        assert text[3] <= height, text
        assert not any(meet(text, other) for other in texts[:n]), text
        for rect in rects:
            inside = rect[0] <= text[0] and rect[1] <= text[1] and text[2] <= rect[2] and text[3] <= rect[3]
            assert inside or not meet(text, rect), (text, rect)


def luminance(color: str) -> float:
    """Of a color of sRGB, 0 to 1, by WCAG."""
    hexed = {"white": "#ffffff", "black": "#000000"}.get(color, color)
    parts = [int(hexed[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "pictures").iterdir()), ids=lambda path: path.stem)
def test_text_of_a_picture_is_readable_on_light_and_on_dark(path: pathlib.Path, is_dark: bool) -> None:
    """3 is WCAG's contrast of large and of graphical parts; white on the lightest color of COLORS has 3.1."""
    rules = module_of("tools/pictures/draw.py").ON_DARK if is_dark else {}

    def shown(tag: str, fill: str) -> str:
        rule = rules.get(f'{tag}[fill="{fill}"]' if fill else tag, f"fill: {fill or 'black'}")
        return str(rule.removeprefix("fill: "))

    svg = path.read_text()
    fills = [shown("rect", fill) for fill in re.findall(r'<rect [^>]*fill="([^"]+)"', svg)]
    looks = re.findall(r"<text ([^>]*)>", svg)
    inks = [shown("text", "".join(re.findall(r'fill="([^"]+)"', look))) for look in looks]
    rects, texts = boxes(svg)
    for text, ink in zip(texts, inks, strict=True):
        under = [fill for rect, fill in zip(rects, fills[1:], strict=True) if meet(text, rect)]
        light, dark = sorted((luminance(ink), luminance([fills[0], *under][-1])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3, (text, ink, under)


@pytest.mark.long  # 36 layers; tests/planner compares the planner with trainings
def test_figures_of_memory_are_the_planners() -> None:
    planned = module_of("tools/pictures/plan_memory.py")
    figures = json.loads(planned.FIGURES.read_text())["context_parallel_size: 8"]
    assert planned.parts_of(planned.VARIANTS["context_parallel_size: 8"], [2**17]) == {"131072": figures["131072"]}


def test_table_of_keys_is_the_configuration() -> None:
    """Every key of Config with its default."""
    page = read("docs/reference/config.md")
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| \w+ \| `?([^`|]*)`? \|", page, re.MULTILINE))
    assert rows.keys() == set(Config.names())
    for field in dataclasses.fields(Config):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        assert rows[field.name] == yaml.safe_dump(default).split()[0], field.name


def test_matrix_of_how_we_know_is_the_tests() -> None:
    from test_hf_matrix import CHOICES

    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \|$", read("docs/design/evidence.md").split("## The Trainer")[0], re.MULTILINE
    )
    said = {name: tuple(values.split(", ")) for name, values in rows[2:]}
    assert said == {name: tuple(values) for name, values in CHOICES.items()}


# ---- the glossary -------------------------------------------------------------------------------


def classes() -> dict[str, list[str]]:
    """The files in which each class, or another name of a type, is defined."""
    found: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            for name in names:
                if re.fullmatch(r"[A-Z][a-z]\w*", name):
                    found.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    return found


def test_a_word_of_the_glossary_names_one_class() -> None:
    """A class that the glossary names exists, and a class that is named like a word has that meaning alone."""
    defined = classes()
    rows = [line.split("|")[1] for line in (ROOT / "docs/design/glossary.md").read_text().splitlines() if "|" in line]
    for row in rows[2:]:
        for name in re.findall(r"`([A-Z]\w*)`", row):
            assert len(defined.get(name, [])) == 1, f"{name}: {defined.get(name)}"
        word = re.sub(r"[`,].*", "", row).strip()
        name = "".join(part.capitalize() for part in re.split("[ -]", word))
        assert len(defined.get(name, [])) <= 1, f"{word}: {defined[name]}"
