"""examples/KIND: their files are whole, and each trains on two ranks as on one."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import runpy
import shutil
import socket
import subprocess
import sys
from unittest import mock

import pytest
import ringtile
import torch
import torch.distributed as dist
import yaml
from hf_engines import engine
from hf_training import TOLERANCE, enter_world
from pool import run_ranks
from ringtile.hf.config import Config
from test_hf_axolotl import needs_axolotl, plugin_module, registered, validated

from examples.tiny_model import tiny_model, tiny_tokenizer

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
KINDS = ("trainer", "sft", "vlm", "grpo", "axolotl", "torch")
ENGINES = {"zero3": "ZeRO-3", "fsdp2": "FSDP2"}  # by the settings of `trainer`


def copy(kind: str, folder: pathlib.Path) -> pathlib.Path:
    """An example, which a test may change, where the tests of others see nothing of it."""
    for name in (kind, "launch"):
        shutil.copytree(EXAMPLES / name, folder / name)
    shutil.copy(EXAMPLES / "tiny_model.py", folder)
    return folder / kind


# ---- the files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_example_is_whole(kind: str) -> None:
    folder = EXAMPLES / kind
    readme = (folder / "README.md").read_text()
    assert len(readme.splitlines()) <= 14
    for path in folder.iterdir():
        for line in path.read_text(encoding="ascii").splitlines() if path.suffix == ".yaml" else ():
            code = line.partition("#")[0].rstrip()
            assert not code or code.endswith(":") or "#" in line or line.lstrip().startswith("- "), line
    for name in re.findall(r"`(\w+\.(?:py|yaml))`|\s(\w+\.py|[\w/.]+\.(?:sh|sbatch))\b", readme):
        assert (folder / "".join(name)).is_file(), name


def test_axolotls_file_is_read_by_theplugin_module() -> None:
    cfg = registered(**yaml.safe_load((EXAMPLES / "axolotl" / "axolotl.yaml").read_text()))
    config, _ = plugin_module()._split(cfg["ringtile"])
    assert config == Config.load(EXAMPLES / "trainer" / "ringtile.yaml")
    assert not cfg.keys() & set(Config.names())


@needs_axolotl
def test_axolotl_itself_reads_its_file() -> None:
    assert validated((EXAMPLES / "axolotl" / "axolotl.yaml").read_text()).ringtile["context_parallel_size"] == 2


# ---- every example trains as one process ----------------------------------------------------------


def run_script(
    folder: pathlib.Path, settings: str = "training.yaml", name: str = "DDP", alone: bool = False, key: str = "loss"
) -> list[float]:
    """What an example's train.py logs, run in this process, which may be a rank. alone: without ringtile."""
    enter_world()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "path", [str(folder), *sys.path]))
        stack.enter_context(mock.patch.object(sys, "argv", ["train.py", settings]))
        stack.enter_context(mock.patch.object(dist, "destroy_process_group"))  # the pool's
        for module in ("tiny_model", "tiny_vlm"):
            stack.callback(sys.modules.pop, module, None)
        stack.callback(enter_world)
        stack.enter_context(engine(name))
        enable = (lambda *unused: None) if alone else ringtile.enable
        enabling = stack.enter_context(mock.patch.object(ringtile, "enable", side_effect=enable))
        names = runpy.run_path(str(folder / "train.py"), run_name="__main__")
    if "losses" in names:
        return names["losses"]
    (enabled,) = enabling.call_args_list  # the script lets go of its Trainer
    return [log[key] for log in enabled.args[0].state.log_history if key in log]


def plain_losses(folder: pathlib.Path) -> list[float]:
    """The example `torch` without ringtile, ranks and tiles."""
    model = tiny_model()
    tokens = torch.tensor(tiny_tokenizer()((folder / "train.py").read_text()).input_ids)
    rows = tokens[: len(tokens) // 256 * 256].view(-1, 256)
    losses = []
    for step in range(5):
        batch = rows[torch.arange(2 * step, 2 * step + 2) % len(rows)]
        logits = model(input_ids=batch).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return losses


def without_clipping(folder: pathlib.Path) -> None:
    """Clipping would hide a wrong scale of the loss."""
    for settings in folder.glob("training*.yaml"):
        with settings.open("a") as file:
            file.write("\nmax_grad_norm: 1.0e+9\ndisable_tqdm: true\n")


def replace(path: pathlib.Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    "kind",
    ["trainer", "torch", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("sft", "vlm", "zero3", "fsdp2"))],
)
def test_example_on_two_ranks_equals_one_process(kind: str, tmp_path: pathlib.Path) -> None:
    for package in {"sft": ["trl"], "vlm": ["trl", "PIL"], "zero3": ["deepspeed"]}.get(kind, []):
        pytest.importorskip(package)
    folder = copy("trainer" if kind in ENGINES else kind, tmp_path)
    without_clipping(folder)
    if kind in ENGINES:  # the CPU stands for an accelerator
        replace(folder / "train.py", "use_cpu=not torch.accelerator.is_available()", "use_cpu=False")
    if kind == "zero3":  # which draws other random weights: the one line that a user changes
        subprocess.run([sys.executable, "../tiny_model.py"], cwd=folder, check=True)
        replace(folder / "train.py", 'MODEL = ""', f'MODEL = "{folder / "tiny"}"')
    settings = [f"training_{kind}.yaml", ENGINES[kind]] if kind in ENGINES else []
    runs = run_ranks(2, run_script, folder, *settings)
    expected = plain_losses(folder) if kind == "torch" else run_script(folder, alone=True)
    assert len(expected) == 5
    assert expected[-1] < 0.95 * expected[0]
    for losses in runs:
        assert losses == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("generations", [2, pytest.param(10, marks=pytest.mark.long)])
def test_grpo_example_learns_its_reward_on_two_ranks(generations: int, tmp_path: pathlib.Path) -> None:
    """Completions of random bytes turn into letters, and both ranks see the same ones.

    From 32 seeds the first rewards were 0.21 to 0.26, the last ones 0.62 to 0.85.
    """
    pytest.importorskip("trl")
    folder = copy("grpo", tmp_path)
    replace(folder / "training.yaml", "max_steps: 40", f"max_steps: {4 * generations}")  # of 4 steps each
    first, second = run_ranks(2, run_script, folder, key="reward")
    assert first == second
    assert len(first) == generations
    assert first[0] < 0.4
    assert max(first[-2:]) > 0.5 or generations < 10


def test_settings_of_a_vllm_server_are_trls() -> None:
    keys = yaml.safe_load((EXAMPLES / "grpo" / "training_vllm.yaml").read_text())
    args = pytest.importorskip("trl").GRPOConfig(**keys | {"use_cpu": True, "bf16": False})
    assert (args.vllm_mode, args.generation_batch_size) == ("server", args.num_generations)  # those of one prompt


@pytest.mark.long
@pytest.mark.parametrize("kind", ["trainer", "torch"])
def test_example_ends_cleanly_under_torchrun(kind: str, tmp_path: pathlib.Path) -> None:
    """Nothing in the script destroys its groups."""
    folder = copy(kind, tmp_path)
    assert "destroy" not in (folder / "train.py").read_text()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


def refusal(folder: pathlib.Path) -> str:
    with pytest.raises(SystemExit) as ended:
        run_script(folder, "training_fsdp2.yaml")
    return str(ended.value)


def test_fsdp_that_would_be_ignored_is_refused(tmp_path: pathlib.Path) -> None:
    """accelerate trains with DDP where it sees no accelerator, and says nothing."""
    first, second = run_ranks(2, refusal, copy("trainer", tmp_path))
    assert first == second
    assert first.startswith("accelerate shards no weights on a CPU: run this on GPUs")


# ---- evaluation at length -------------------------------------------------------------------------


def _evaluated(folder: pathlib.Path) -> list[float]:
    enter_world()
    with mock.patch.object(sys, "path", [*sys.path]), mock.patch.object(sys, "argv", ["evaluate_long.py"]):
        numbers: list[float] = runpy.run_path(str(folder / "evaluate_long.py"))["main"]()
    sys.modules.pop("tiny_model", None)
    return numbers


def _evaluated_plainly(folder: pathlib.Path) -> list[float]:
    """The same numbers from whole logits in float64, on one rank."""
    names = runpy.run_path(str(folder / "evaluate_long.py"))
    model, tokenizer = tiny_model().double(), tiny_tokenizer()
    texts = ((folder / "evaluate_long.py").read_text(), names["NEEDLE"], names["QUESTION"], names["ANSWER"])
    text, needle, question, answer = (tokenizer(part).input_ids for part in texts)

    def log_probs(row: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = model(input_ids=row).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]

    def end_of(depth: float) -> float:
        row = names["row_of"](text, needle, question + answer, 1024, depth)
        assert tokenizer.decode(row[0]).count(names["NEEDLE"]) == 1 + texts[0].count(names["NEEDLE"])
        return float(log_probs(row)[-len(answer) :].sum())

    row = names["row_of"](text, [], [], 1024, 0.0)
    losses = -log_probs(row)
    means = [float(losses[begin:end].mean()) for begin, end in ((0, 256), (256, 512), (512, 1023))]
    alone = [-float(log_probs(row[:, begin:end]).mean()) for begin, end in ((0, 256), (256, 512), (512, 1024))]
    return [*means, *alone, *map(end_of, names["DEPTHS"])]


def test_evaluation_over_two_ranks_has_the_numbers_of_whole_logits(tmp_path: pathlib.Path) -> None:
    for name in ("evaluate_long.py", "tiny_model.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    expected = _evaluated_plainly(tmp_path)
    for numbers in run_ranks(2, _evaluated, tmp_path):
        assert numbers == pytest.approx(expected, rel=TOLERANCE)


# ---- the launch files -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["slurm.sbatch", "torchrun_two_nodes.sh"])
def test_launch_file_is_a_shell_script(name: str) -> None:
    subprocess.run(["bash", "-n", str(EXAMPLES / "launch" / name)], check=True)


def test_launch_without_a_program_is_refused() -> None:
    script = EXAMPLES / "launch" / "torchrun_two_nodes.sh"
    done = subprocess.run(["bash", script, "0", "HEAD"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "NODE is 0 or 1, HEAD the name or address" in done.stderr


@pytest.mark.long
def test_two_torchruns_train_as_one_process(tmp_path: pathlib.Path) -> None:
    """Two "nodes" of one rank each, which meet on the loopback; the losses are read from the checkpoint."""
    folder = copy("trainer", tmp_path)
    without_clipping(folder)
    expected = run_script(folder, alone=True)
    replace(folder / "training.yaml", 'save_strategy: "no"', "save_strategy: steps")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    started = [
        subprocess.Popen(
            ["bash", "../launch/torchrun_two_nodes.sh", str(node), "127.0.0.1", "train.py"],
            cwd=folder,
            env=os.environ | {"PATH": path, "PROCESSES": "1", "PORT": port, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    printed = [each.communicate(timeout=200)[0] for each in started]
    assert [each.returncode for each in started] == [0, 0], "\n".join(printed)
    (state,) = (folder / "out").rglob("trainer_state.json")
    losses = [log["loss"] for log in json.loads(state.read_text())["log_history"] if "loss" in log]
    assert losses == pytest.approx(expected, rel=TOLERANCE)
