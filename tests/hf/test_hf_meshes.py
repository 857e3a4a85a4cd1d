"""Models that transformers shards while it loads them: FSDP2, HSDP, tensor parallelism.

transformers' mesh is (replicas, shards, tensor). Ranks share sequences along the first two.
"""

import dataclasses

import pytest
import ringtile
import torch
from hf_engines import engine
from hf_models import tiny_model, with_lora
from hf_training import _train, assert_equal_training, enter_world, failure_of, make_trainer, packed, train
from peft import LoraConfig, get_peft_model
from pool import run_ranks
from ringtile.hf.features import balancing_loss
from ringtile.hf.group import ContextParallelGroup
from transformers import AutoModelForCausalLM
from transformers.distributed.expert_parallel import AllToAllEP

CP2 = {"context_parallel_size": 2}
TP2 = {"tp_size": 2, "fsdp_size": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder by family, with a tiny model."""

    def save(family, **sizes):
        folder = tmp_path_factory.mktemp(family)
        tiny_model(family, **sizes).save_pretrained(folder)
        return str(folder)

    return save


def _load(folder, mesh=None, targets=None):
    enter_world()
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=mesh).train()
    if targets is None:
        return model
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


def _train_on(folder, mesh, config, options, targets=None):
    with engine("mesh") as arguments:
        run, trainer = _train(config, model=_load(folder, mesh, targets), **arguments, **options)
    assert trainer.model_wrapped is trainer.model  # nothing has wrapped it a second time
    return run


def _assert_equals_one_process(folder, mesh, config, rows=2, targets=None, **options):
    expected = train(None, model=_load(folder, targets=targets), per_device_train_batch_size=rows, **options)
    ranks = mesh.get("dp_replicate_size", 1) * mesh.get("fsdp_size", 1) * mesh.get("tp_size", 1)
    for run in run_ranks(ranks, _train_on, folder, mesh, {**CP2, **config}, options, targets):
        assert_equal_training(run, expected)
        if rows == 2:  # else one process pads other rows together
            assert (run.num_input_tokens, run.total_flos) == (expected.num_input_tokens, expected.total_flos)
        if run.predictions is not None:
            assert run.eval_loss == pytest.approx(expected.eval_loss, rel=1e-6)
            assert (run.predictions - expected.predictions).abs().max() <= 1e-6
    return expected


def test_tensor_times_context_parallelism_equals_one_process(saved):
    """2 x 2 ranks: losses, norms, weights, counts, an evaluation and predictions; the first batch is proved. One layer:
    DTensors take most of the time, and the models of `test_families_on_2_x_2_ranks` have two."""
    config = {"tiled_mlp": True, "tiled_loss": True, "tile_tokens": 4, "first_batch_check": True}
    steps = {"max_steps": 1, "gradient_accumulation_steps": 1, "per_device_eval_batch_size": 4}
    _assert_equals_one_process(saved("llama", num_hidden_layers=1), TP2, config, **steps)


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


# ---- experts over ranks -------------------------------------------------------------------------

EP2 = {"fsdp_size": 2, "ep_size": 2}
EXPERTS = {
    # whose balancing loss is one for each batch
    **{
        "qwen3-moe": {"output_router_logits": False},
        "deepseek-v3": {},
        "glm4-moe": {},
        "mixtral": {"num_local_experts": 4},
    },
    "gpt-oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
MESHES = {
    "2 of 4 ranks hold all experts": {"fsdp_size": 4, "ep_size": 2},
    "4 ranks hold all experts": {"fsdp_size": 4, "ep_size": 4},
    "2 of 2 x 2 ranks hold all experts": {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2},
}


def test_ranks_that_share_a_sequence_share_experts(saved):
    """Each dispatches its own tokens; the balancing loss is of all. The first batch is proved."""
    options = {"max_steps": 2, "evaluate": False, "gradient_checkpointing": True}
    _assert_equals_one_process(saved("qwen3-moe"), EP2, {"first_batch_check": "require"}, **options)


def test_adapters_beside_experts_that_ranks_share(saved):
    options = {"targets": ["q_b_proj", "o_proj"], "max_steps": 1}
    _assert_equals_one_process(saved("deepseek-v3"), EP2, {}, **options)


def _train_on_meshes(folders, options):
    return {
        (family, name): _train_on(folder, mesh, CP2, options)
        for family, folder in folders.items()
        for name, mesh in MESHES.items()
    }


@pytest.mark.long
def test_two_groups_share_experts(saved):
    """Two batches, each on 2 of 4 ranks; gradients are accumulated."""
    folders = {family: saved(family, **sizes) for family, sizes in EXPERTS.items()}
    options = {"max_steps": 1, "evaluate": False}
    expected = {
        family: train(None, model=_load(folder), per_device_train_batch_size=4, **options)
        for family, folder in folders.items()
    }
    for runs in run_ranks(4, _train_on_meshes, folders, options):
        for (family, _), run in runs.items():
            assert_equal_training(run, expected[family])


def _dispatch_drops(patch):
    """The last tokens that a rank gets for its experts are lost, as beyond a capacity."""
    combine = AllToAllEP._combine_tokens

    def dropped(self, output, state):
        return combine(self, output * (torch.arange(len(output)) < 16)[:, None], state)

    patch.setattr(AllToAllEP, "_combine_tokens", dropped)


def _loss_counts_twice(patch):
    sums = balancing_loss._sums
    patch.setattr(balancing_loss, "_sums", lambda *args: tuple(2 * each for each in sums(*args)[:2]) + sums(*args)[2:])


def _router_counts_padding(patch):
    sums = balancing_loss._sums
    patch.setattr(balancing_loss, "_sums", lambda logits, experts, top_k, weights: sums(logits, experts, top_k, None))


BROKEN = {_dispatch_drops: "mlp (Qwen3MoeSparseMoeBlock)", _router_counts_padding: "the loss"}
LONG = pytest.param({_loss_counts_twice: "the loss"}, marks=pytest.mark.long)


def _refusals_of_broken(folder, broken):
    model, messages = _load(folder, EP2), []
    for breaks in broken:
        with engine("mesh") as arguments, pytest.MonkeyPatch.context() as patch:
            breaks(patch)
            messages.append(failure_of(make_trainer(model=model, **arguments)))
    return messages


@pytest.mark.parametrize("broken", [BROKEN, LONG], ids=["dispatch, padding", "loss"])
def test_experts_whose_dispatch_or_loss_is_broken_are_named_before_the_first_step(saved, broken):
    for messages in run_ranks(2, _refusals_of_broken, saved("qwen3-moe"), broken):
        for message, place in zip(messages, broken.values(), strict=True):
            assert message.startswith("RefusedError: 2 ranks do not compute what one process computes")
            assert place in message


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

    def __call__(self, model):
        mesh = model.config.distributed_config
        mesh.ep_size, mesh.tp_size, mesh.ep_implementation = 2, self.tp_size, self.ep_implementation
        return model


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (CP2, _same, "context_parallel_size is 2 but there are 2 ranks, 1 along the data-parallel dimension"),
        (CP2, _with_pipeline, "uses pp_size in distributed_config; unset it"),
        (CP2, _WithExperts(), "ep_size is 2, beside tp_size 2"),
        (CP2, _WithExperts(1, "all_reduce"), "beside ep_implementation 'all_reduce'"),
        (CP2, _WithExperts(1, "deepgemm_megamoe"), "beside ep_implementation 'deepgemm_megamoe'"),
        (CP2, with_lora, "uses adapters under tensor parallelism"),
    ],
)
def test_what_a_mesh_cannot_have_is_named(saved, config, change, words):
    for message in run_ranks(2, _refusal_on, saved("llama"), {"tp_size": 2}, config, change):
        assert words in message


def _with_adapted_experts(model):
    return get_peft_model(model, LoraConfig(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (CP2, _with_adapted_experts, "beside adapters on base_model.model.model.layers.0.mlp.experts;"),
        ({"tiled_mlp": True}, _same, "tiled MLP: experts sends tokens to experts of other ranks"),
        ({"stream": True}, _same, "mlp.experts sends tokens to experts of other ranks"),
    ],
)
def test_what_experts_over_ranks_cannot_have_is_named(saved, config, change, words):
    for message in run_ranks(2, _refusal_on, saved("qwen3-moe"), EP2, config, change):
        assert words in message
