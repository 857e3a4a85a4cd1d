"""Models that transformers shards while it loads them: FSDP2, HSDP, tensor parallelism.

transformers' mesh is (replicas, shards, tensor). Ranks share sequences along the first two.
"""

import dataclasses

import pytest
import ringtile
import torch
from hf_engines import engine
from hf_models import tiny_model, with_lora
from hf_training import _train, assert_equal_training, enter_world, make_trainer, packed, train
from pool import run_ranks
from ringtile.hf.group import ContextParallelGroup
from transformers import AutoModelForCausalLM

CP2 = {"context_parallel_size": 2}
TP2 = {"tp_size": 2, "fsdp_size": 2}
EXPERTS = ("mixtral", "gpt-oss", "deepseek-v3", "glm4-moe")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder by family, with a tiny model."""

    def save(family):
        folder = tmp_path_factory.mktemp(family)
        tiny_model(family).save_pretrained(folder)
        return str(folder)

    return save


def _load(folder, mesh=None):
    enter_world()
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=mesh).train()


def _train_on(folder, mesh, config, options):
    with engine("mesh") as arguments:
        run, trainer = _train(config, model=_load(folder, mesh), **arguments, **options)
    assert trainer.model_wrapped is trainer.model  # nothing has wrapped it a second time
    return run


def _assert_equals_one_process(folder, mesh, config, rows=2, **options):
    expected = train(None, model=_load(folder), per_device_train_batch_size=rows, **options)
    ranks = mesh.get("dp_replicate_size", 1) * mesh.get("fsdp_size", 1) * mesh.get("tp_size", 1)
    for run in run_ranks(ranks, _train_on, folder, mesh, {**CP2, **config}, options):
        assert_equal_training(run, expected)
        if rows == 2:  # else one process pads other rows together
            assert (run.num_input_tokens, run.total_flos) == (expected.num_input_tokens, expected.total_flos)
        if run.predictions is not None:
            assert run.eval_loss == pytest.approx(expected.eval_loss, rel=1e-6)
            assert (run.predictions - expected.predictions).abs().max() <= 1e-6
    return expected


def test_tensor_times_context_parallelism_equals_one_process(saved):
    """2 x 2 ranks: losses, norms, weights, counts, an evaluation and predictions; the first batch is proved."""
    config = {"tiled_mlp": True, "tiled_loss": True, "tile_tokens": 4, "first_batch_check": True}
    steps = {"max_steps": 1, "gradient_accumulation_steps": 1, "per_device_eval_batch_size": 4}
    _assert_equals_one_process(saved("llama"), TP2, config, **steps)


@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt-oss", "mixtral", "mistral-sliding"])
def test_families_on_2_x_2_ranks(saved, family):
    """Not Qwen3: under transformers' tensor parallelism alone, without ringtile, its gradients are 1.3e-5 off."""
    _assert_equals_one_process(saved(family), TP2, {}, max_steps=2, evaluate=False, collator=packed)


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh",
    [{"tp_size": 2, "fsdp_size": 4}, {"tp_size": 2, "fsdp_size": 2, "dp_replicate_size": 2}],
    ids=["data-context-tensor", "replicas-context-tensor"],
)
def test_2_x_2_x_2_ranks(saved, mesh):
    """Two different batches, each on 2 x 2 ranks."""
    _assert_equals_one_process(saved("llama"), mesh, {}, rows=4, max_steps=2, evaluate=False)


FSDP2 = pytest.param({"fsdp_size": 2}, marks=pytest.mark.long)  # test_hf_engines.py has it in every run


@pytest.mark.parametrize("mesh", [FSDP2, {"dp_replicate_size": 2}], ids=["FSDP2", "HSDP"])
def test_a_model_sharded_while_it_was_loaded(saved, mesh):
    options = {"gradient_checkpointing": True, "max_steps": 2, "evaluate": False}
    _assert_equals_one_process(saved("llama"), mesh, {"context_parallel_scheme": "ulysses"}, **options)


@pytest.mark.parametrize("family", ["qwen3-moe", *(pytest.param(x, marks=pytest.mark.long) for x in EXPERTS)])
def test_ranks_that_share_a_sequence_share_experts(saved, family):
    """Each dispatches its own tokens; the balancing loss is of all. The first batch is proved."""
    config = {"first_batch_check": "require"} if family == "qwen3-moe" else {}
    mesh = {"fsdp_size": 2, "ep_size": 2}
    _assert_equals_one_process(saved(family), mesh, config, max_steps=2, evaluate=False, gradient_checkpointing=True)


@pytest.mark.long
def test_two_groups_share_experts(saved):
    """2 x 2 ranks, of which those of a group share all experts, or the four do."""
    for size in (2, 4):
        mesh = {"fsdp_size": 4, "ep_size": size}
        _assert_equals_one_process(saved("deepseek-v3"), mesh, {}, rows=4, max_steps=2, evaluate=False)


# ---- groups and refusals ------------------------------------------------------------------------


def _places():
    group = ContextParallelGroup(2, 600.0, torch.device("cpu"), tp_size=2)
    return group.rank, group.data_index, [group.world_rank(rank) for rank in range(group.size)]


def test_ranks_share_a_sequence_along_the_data_dimension():
    assert run_ranks(4, _places) == [(0, 0, [0, 2]), (0, 0, [1, 3]), (1, 0, [0, 2]), (1, 0, [1, 3])]


def _refusal_on(folder, mesh, config, change):
    with engine("mesh") as arguments:
        trainer = make_trainer(model=change(_load(folder, mesh)), **arguments)
        with pytest.raises(ringtile.RingtileError) as raised:
            ringtile.enable(trainer, config)
    return str(raised.value)


def _same(model):
    return model


def _with_pipeline(model):
    model.config.distributed_config.pp_size = 2
    return model


@dataclasses.dataclass(frozen=True)
class _WithExperts:
    """Changes the configuration of the mesh of a model."""

    tp_size: int = 2
    ep_implementation: str = "auto"
    adapters: bool = False

    def __call__(self, model):
        mesh = model.config.distributed_config
        mesh.ep_size, mesh.tp_size, mesh.ep_implementation = 2, self.tp_size, self.ep_implementation
        return with_lora(model) if self.adapters else model


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (CP2, _same, "context_parallel_size is 2 but there are 2 ranks, 1 along the data-parallel dimension"),
        (CP2, _with_pipeline, "uses pp_size in distributed_config; unset it"),
        (CP2, _WithExperts(), "ep_size is 2, beside tp_size 2"),
        (CP2, _WithExperts(ep_implementation="all_reduce"), "beside ep_implementation 'all_reduce'"),
        (CP2, _WithExperts(tp_size=1, adapters=True), "beside adapters"),
        ({"tiled_mlp": True, "stream": True}, _WithExperts(tp_size=1), "beside tiled_mlp and stream"),
        (CP2, with_lora, "uses adapters under tensor parallelism"),
    ],
)
def test_what_a_mesh_cannot_have_is_named(saved, config, change, words):
    for message in run_ranks(2, _refusal_on, saved("llama"), {"tp_size": 2}, config, change):
        assert words in message
