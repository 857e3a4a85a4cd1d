"""`axolotl train` itself, where it is installed: its long-context recipe on two ranks equals one process without it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import yaml
from hf_training import TOLERANCE
from safetensors.torch import load_file
from test_hf_axolotl import needs_axolotl

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
PROGRAM = pathlib.Path(__file__).parent / "axolotl_train.py"
# What both runs have. Rows come in their own order, whatever an engine draws before.
RUN = """
base_model: tiny
datasets: [{path: text.jsonl, ds_type: json, type: completion, field: text}]
dataset_prepared_path: prepared
dataset_num_proc: 1
val_set_size: 0.0
sequence_len: 512
sample_packing: true
curriculum_sampling: true
attn_implementation: sdpa
bf16: false
gradient_checkpointing: true
micro_batch_size: 1
gradient_accumulation_steps: 2
max_steps: 3
save_steps: 3
warmup_steps: 2
optimizer: sgd
lr_scheduler: cosine
learning_rate: 0.1
logging_steps: 1
"""
# axolotl's recipe for long contexts (ALST), in its own words; then ringtile's plugin.
RECIPE = """
tiled_mlp: true
activation_offloading: legacy
plugins:
  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin
  - ringtile.hf.axolotl.RingtilePlugin
"""
ZERO = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},  # float32 here
}
ENGINES = {
    "DDP": {"context_parallel_size": 2},
    "ZeRO-3": {"sequence_parallel_degree": 2, "deepspeed": "zero3.json"},
    "FSDP2": {
        "context_parallel_size": 2,
        "fsdp_version": 2,
        "fsdp_config": {
            "state_dict_type": "FULL_STATE_DICT",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            "reshard_after_forward": True,
        },
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model, a tokenizer, and texts to train on, of 60 to 300 tokens."""
    folder = tmp_path_factory.mktemp("axolotl")
    subprocess.run([sys.executable, str(EXAMPLES / "tiny_model.py")], cwd=folder, check=True)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(60, 300, (40,), generator=generator).tolist()
    texts = ["".join(map(chr, torch.randint(97, 107, (length,), generator=generator).tolist())) for length in lengths]
    folder.joinpath("text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    folder.joinpath("zero3.json").write_text(json.dumps(ZERO))
    return folder


def run(folder, name, ranks, text, **keys):
    """The log of each step, and the weights, of `axolotl train` on that many ranks."""
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(text), **keys, "output_dir": f"out_{name}"}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launch, str(PROGRAM), file.name],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    state = json.loads((folder / f"out_{name}" / "checkpoint-3" / "trainer_state.json").read_text())
    steps = [entry for entry in state["log_history"] if "loss" in entry]
    files = (folder / f"out_{name}").glob("model*.safetensors")
    return steps, {key: weight for file in files for key, weight in load_file(file).items()}


@pytest.fixture(scope="module")
def one_process(folder):
    return run(folder, "one", 1, RUN)


@needs_axolotl
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ENGINES)
def test_axolotls_recipe_on_two_ranks_equals_one_process(engine, folder, one_process):
    if engine == "ZeRO-3":
        pytest.importorskip("deepspeed")
    steps, weights = run(folder, engine, 2, RUN + RECIPE, **ENGINES[engine])
    expected_steps, expected_weights = one_process
    assert len(steps) == len(expected_steps) == 3
    for step, expected in zip(steps, expected_steps, strict=True):
        for key in ("loss", "grad_norm", "learning_rate", "epoch"):
            assert step[key] == pytest.approx(expected[key], rel=10 * TOLERANCE), key
    assert weights.keys() == expected_weights.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(weight, expected_weights[key], rtol=0, atol=1e-5)
