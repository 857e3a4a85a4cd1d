"""Malformed configurations: `ringtile train` refuses each with one line and status 2, or begins to train.

Each trial is a process, forked after the imports, that ends where the training would begin. A file that must be
refused, as one with a key given twice, counts as silent if its training begins.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import pathlib
import random
import re
import resource
import signal
import sys
import tempfile
import time
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import yaml

from faults.counts import Counts

TRIALS = 500
BEGAN = 77  # the status of a process that would train now
CPU_SECONDS = 10  # of one trial; a machine may be busy, so that no wall clock counts
WALL_SECONDS = 120
MAX_STDERR = 20_000  # bytes, with the warnings of other libraries
CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
TEXT = "Every rank holds a part of the sequence; the ring brings the keys. " * 8
TINY: dict[str, Any] = {
    "tiled_loss": True,
    "model": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "data": {"files": "text.txt", "seq_len": 64, "packing": True},
    "training": {
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "optim": "sgd",
        "learning_rate": 0.1,
        "save_strategy": "no",
        "disable_tqdm": True,
    },
}
VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "no", "1e-3", " ", "\n", "a\nb", "x" * 10_000, "\u00e9\u4e16", "\x7f", "/dev/null/x"),
    *(0, 1, -1, 2, 3, 7, 0.5, -0.5, 2.0, 1e-320, 1e308, -1e308, 2**31, 2**32, 2**63, -(2**63), 10**26),
    *([], {}, [1, 2], ["x"], {"a": 1}, {"": None}, {1: 2}, [[[[]]]], [None], {"a": {"b": {"c": []}}}),
)
# YAML that a value is replaced with.
RAW = (
    *("!!int x", "!!float x", "!!bool x", "!!timestamp x", "!!binary 0", "!!set {a}", "!!omap [a: 1]", "!!null x"),
    *("!!python/object:os.system {}", "!local x", "2001-13-45", "2001-01-01", "1:30", "0x10", "0b2", "1_000", ".inf"),
    *(
        "-.inf",
        ".nan",
        ".NaN",
        "9" * 5000,
        "0x" + "f" * 5000,
        "1e400",
        "*a",
        "&a [*a]",
        "&a",
        "- a",
        "a: b: c",
        "'",
        '"',
    ),
    *("[" * 1200, "{" * 500, "[" * 60 + "]" * 60, "? a", "|", ">", "%", "@x", "`x`", "\t", "{a: 1, a: 2}", '"\\ud800"'),
    *(
        '"\\0"',
        "<<: x",
        "{<<: [1]}",
        "{[1]: 2}",
        "{? {a: 1} : 2}",
        "=",
        "~",
        "yes",
        "on",
        "0777",
        "1e3",
        "+1",
        "--",
        "!",
    ),
)
REFUSED_RAW = (".nan", ".NaN", "!!int x", "9" * 5000, '"\\0"', "{a: 1, a: 2}", '"\\ud800"', "[" * 60 + "]" * 60)
MARK = "RAWVALUE"
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))

_TINY = yaml.safe_dump(TINY)
ODD = {
    "alias bomb": BOMB + _TINY,
    "alias bomb as a value": BOMB + _TINY.replace("text.txt", "*a39"),
    "alias bomb in training": _TINY + "  run_name:\n" + "".join(f"    {line}\n" for line in BOMB.splitlines()),
    "deep": "a: " * 3000,
    "deep lists": "- " * 5000,
    "deep flow": "a: " + "[" * 1_200,
    "two documents": _TINY + "---\n" + _TINY,
    "directive": "%YAML 9.9\n---\n" + _TINY,
    "UTF-16": "\ufeff" + _TINY,
    "large": _TINY + "# " + "x" * 2**21,
    "many keys": "".join(f"k{i}: 1\n" for i in range(2_000)),
    "a list": "- 1\n- 2\n",
    "null": "~\n",
    "recursive": "&a\nmodel: *a\n",
    "merge": "<<: {model: 1}\n" + _TINY,
}
READ = ("UTF-16", "merge", "directive")  # of these, what may be read


class Trial(NamedTuple):
    """A file, and whether it must be refused; label: for the notes."""

    label: str
    content: bytes
    must_refuse: bool = False


def campaign(trials: int | None, seed: int) -> Counts:
    """Mutates files that are valid, and counts what `ringtile train` does with them."""
    prepare()
    draw = random.Random(seed)
    left = [Trial("the file itself", yaml.safe_dump(TINY).encode())]
    left += [KINDS[number % len(KINDS)](draw) for number in range(trials or TRIALS)]
    return trials_in_processes(left, train)


def trials_in_processes(
    left: list[Trial], run: Callable[[Trial, pathlib.Path], int], cpu_seconds: int = CPU_SECONDS
) -> Counts:
    """Counts how trials end, each in a process, and as many at a time as there are CPUs.

    run: returns the exit status of a trial in an empty folder; BEGAN where it was right.
    """
    counts = Counts()
    with tempfile.TemporaryDirectory() as folder:
        running: dict[int, tuple[Trial, pathlib.Path, float]] = {}
        for number, trial in enumerate(left):
            place = pathlib.Path(folder, str(number))
            place.mkdir()
            running[start(trial, place, run, cpu_seconds)] = (trial, place, time.monotonic() + WALL_SECONDS)
            while len(running) >= (os.cpu_count() or 1):
                reap(running, counts)
        while running:
            reap(running, counts)
    return counts


def prepare() -> None:
    """Imports what a training needs, so that each trial takes a fraction of a second."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import ringtile.cli.report
    import ringtile.cli.training
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.nn.Linear(2, 2)(torch.zeros(1, 2))
    transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**TINY["model"], vocab_size=8))
    assert ringtile.cli.training
    assert ringtile.cli.report


# ---- one trial ----------------------------------------------------------------------------------


def start(trial: Trial, place: pathlib.Path, run: Callable[[Trial, pathlib.Path], int], cpu_seconds: int) -> int:
    """The process of a trial, whose CPU time and memory are limited."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            limit(place, cpu_seconds)
            status = run(trial, place)
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(status)
    return process


def limit(place: pathlib.Path, cpu_seconds: int) -> None:
    os.setsid()
    os.chdir(place)
    for stream in (1, 2):
        os.dup2(os.open(place / f"{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**32, used + 2**32))


def train(trial: Trial, place: pathlib.Path) -> int:
    """`ringtile train run.yaml`."""
    (place / "run.yaml").write_bytes(trial.content)
    (place / "text.txt").write_text(TEXT)
    import datasets
    from ringtile.cli import main
    from ringtile.cli.meter import Meter

    datasets.config.HF_DATASETS_CACHE = place / "cache"
    Meter.on_train_begin = lambda *unused, **also_unused: os._exit(BEGAN)  # type: ignore[method-assign]
    return main(["train", "run.yaml"])


def reap(running: dict[int, tuple[Trial, pathlib.Path, float]], counts: Counts) -> None:
    """Waits until one process ends, or is too late, and counts it."""
    process, status = os.waitpid(-1, os.WNOHANG)
    if not process:
        late = [each for each, (_, _, deadline) in running.items() if time.monotonic() > deadline]
        for each in late:
            os.killpg(each, signal.SIGXCPU)
        time.sleep(0.01)
        return
    trial, place, _ = running.pop(process)
    error = (place / "2").read_bytes() if (place / "2").exists() else b""
    judge(trial, os.waitstatus_to_exitcode(status), error.decode(errors="replace"), counts)


def judge(trial: Trial, status: int, stderr: str, counts: Counts) -> None:
    said = [line for line in stderr.splitlines() if line.startswith("ringtile: error: ")]
    what = ""
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        counts.hangs += 1
        what = "hangs"
    elif status < 0:
        counts.crashes += 1
        what = f"signal {-status}"
    elif status == BEGAN and trial.must_refuse:
        counts.silent += 1
        what = "trains"
    elif status == BEGAN:
        counts.right += 1
    elif status == 2 and len(said) == 1 and "Traceback" not in stderr and len(stderr) < MAX_STDERR:
        counts.named += 1
    else:
        counts.unnamed += 1
        what = f"status {status}, {len(said)} lines, {len(stderr)} bytes: {stderr[-400:]}"
    if what:
        counts.notes.append(f"{trial.label}: {what}")


# ---- mutants: files that differ from a valid one in one respect -----------------------------------


def wrong_value(draw: random.Random) -> Trial:
    """A value of another type, or extreme, in place of a given one."""
    config = json.loads(json.dumps(TINY))
    path = draw.choice(paths(config))
    value = draw.choice(VALUES)
    put(config, path, value)
    return Trial(f"{'.'.join(path)} = {value!r:.60}", dumped(config))


def other_key(draw: random.Random) -> Trial:
    """One more key, of any section, with a value of any type."""
    from ringtile.cli.recipe import training_fields
    from ringtile.config import Config
    from transformers import LlamaConfig

    keys = {
        "training": sorted(set(training_fields()) - {"output_dir"}),
        "model": sorted(field.name for field in dataclasses.fields(LlamaConfig)),
        "": sorted(Config.model_fields),
    }
    section = draw.choice(["training", "training", "model", ""])
    path = [*([section] if section else []), draw.choice(keys[section])]
    config = json.loads(json.dumps(TINY))
    value = draw.choice(VALUES)
    put(config, path, value)
    return Trial(f"{'.'.join(path)} = {value!r:.60}", dumped(config))


def likely_value(draw: random.Random) -> Trial:
    """A value of the right type for any key: one that transformers might take, alone or with the others."""
    from ringtile.cli.recipe import training_fields
    from transformers import LlamaConfig

    fields = {("training", key): kind for key, kind in training_fields().items() if key != "output_dir"}
    fields |= {("model", field.name): type(field.default) for field in dataclasses.fields(LlamaConfig)}
    path = draw.choice(list(fields))
    kinds = [fields[path], *typing.get_args(fields[path])]
    values: list[Any] = [member.value for kind in kinds if isinstance(kind, enum.EnumMeta) for member in kind] * 3
    values += [0, 1, 2, 3, 5, 16, 1000, 2**31 - 1] if int in kinds else []
    values += [0.0, 1e-9, 0.3, 1.0, 1e9, 1e308] if float in kinds else []
    values += [True, False] if bool in kinds else []
    values += (
        ["no", "steps", "epoch", "best", "missing.json", "text.txt", "none", "all", "auto"] if str in kinds else []
    )
    values += [{}, {"a": 1}, {"version": 2}] if any("dict" in str(kind) for kind in kinds) else []
    config = json.loads(json.dumps(TINY))
    put(config, list(path), value := draw.choice(values or [None]))
    return Trial(f"{'.'.join(path)} = {value!r:.60}", dumped(config))


def raw_value(draw: random.Random) -> Trial:
    """A value that only YAML can write."""
    config = json.loads(json.dumps(TINY))
    path = draw.choice(paths(config))
    raw = draw.choice(RAW)
    put(config, path, MARK)
    return Trial(
        f"{'.'.join(path)} = {raw:.60}", dumped(config).replace(MARK.encode(), raw.encode()), raw in REFUSED_RAW
    )


def repeated_key(draw: random.Random) -> Trial:
    """A line, or a section, given twice."""
    lines = yaml.safe_dump(TINY).splitlines()
    line = draw.choice([line for line in lines if not line.endswith(":")])
    if draw.random() < 0.3:
        key = draw.choice(list(TINY))
        return Trial(f"{key} twice", "\n".join([*lines, f"{key}: {{}}"]).encode(), True)
    lines.insert(lines.index(line), line)
    return Trial(f"{line} twice", "\n".join(lines).encode(), True)


def unknown_key(draw: random.Random) -> Trial:
    """A key with a letter too many, too few, or another."""
    config = json.loads(json.dumps(TINY))
    path = draw.choice([path for path in paths(config) if len(path) > 1])
    name, place = path[-1], draw.randrange(len(path[-1]))
    name = draw.choice([name[:place] + name[place + 1 :], name[:place] + "q" + name[place:], name + "_" * 5000])
    put(config, [*path[:-1], name], 1)
    return Trial(f"{'.'.join(path[:-1])}.{name:.40}", dumped(config), True)


def damaged(draw: random.Random) -> Trial:
    """Bytes flipped, cut off or moved, of the tiny file or of one in configs/."""
    files = [yaml.safe_dump(TINY).encode()] * 3
    files += [path.read_bytes() for path in sorted(CONFIGS.rglob("*.yaml")) if "axolotl" not in path.parts]
    content = bytearray(draw.choice(files))
    how = draw.choice(["flipped", "cut", "swapped", "random"])
    for _ in range(draw.randint(1, 20) if how == "flipped" else 0):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    if how == "cut":
        del content[draw.randrange(len(content)) :]
    elif how == "swapped":
        lines = bytes(content).split(b"\n")
        draw.shuffle(lines)
        content = bytearray(b"\n".join(lines))
    elif how == "random":
        content = bytearray(draw.randbytes(draw.randint(0, 300)))
    return Trial(how, bytes(content))


def odd(draw: random.Random) -> Trial:
    """Files that are hostile as a whole."""
    label = draw.choice(list(ODD))
    return Trial(label, ODD[label].encode("utf-16" if label == "UTF-16" else "utf-8"), label not in READ)


# In turn, so that few trials have some of each.
KINDS = (
    *(wrong_value, other_key, likely_value, raw_value, repeated_key, unknown_key, damaged, odd),
    *(likely_value, wrong_value, likely_value, other_key, likely_value, damaged, raw_value),
    *(likely_value, wrong_value, likely_value, other_key, likely_value, likely_value),
)


def paths(value: Any, before: tuple[Any, ...] = ()) -> list[list[Any]]:
    """The way to every value of mappings and lists, and to those themselves."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, each in pairs:
        found += [[*before, key], *paths(each, (*before, key))]
    return found


def put(config: Any, path: list[Any], value: Any, removed: bool = False) -> None:
    for key in path[:-1]:
        config = config[key]
    if removed and path[-1] in (config if isinstance(config, dict) else range(len(config))):
        del config[path[-1]]
    else:
        config[path[-1]] = value


def dumped(config: dict[str, Any]) -> bytes:
    text = yaml.safe_dump(config, width=10**6)
    return re.sub(rf"['\"]?{MARK}['\"]?", MARK, text).encode()
