"""What hf/families.py declares of transformers' models is what the installed release has; else the class is named."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from ringtile.errors import RefusedError
from ringtile.hf import families
from ringtile.hf.layers import refuse_indexers
from ringtile.hf.masks import CHUNKS_FOLLOW_POSITIONS
from ringtile.hf.model import check_model, instead
from ringtile.hf.patches import Patches
from ringtile.hf.reading import BatchReader, positions_separate

from tools.models import tiny_models

FILES = pathlib.Path(transformers.__file__).parent / "models"
# The arguments of the functions that ringtile replaces. One more of them may change what a recurrence computes.
ARGUMENTS = {
    "causal_conv1d_fn": "hidden_states weight bias activation",
    "torch_chunk_gated_delta_rule": "query key value g beta chunk_size initial_state output_final_state "
    "use_qk_l2norm_in_kernel",
    "chunk_kimi_delta_attention": "query key value g beta chunk_size initial_state output_final_state "
    "use_qk_l2norm_in_kernel",
    "mamba_selective_scan": "hidden_states dt A B C D z delta_bias delta_softplus return_last_state "
    "use_mambapy use_associative_scan",
    "mamba2_chunk_scan": "hidden_states dt A B C chunk_size D dt_bias dt_softplus dt_limit return_final_states "
    "initial_states z",
}
NEW = {"Lfm3ShortConv", "LaraMiniGatedDeltaNet", "BailingHybridDeltaAttention"}  # in releases after 5.17
MIX_NOTHING = {
    "apply_mask_to_padding_states",
    # Of one token, with a cache.
    *("causal_conv1d_update", "mamba_selective_state_update", "mamba2_selective_state_update"),
    *("torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention"),
}


@functools.cache
def sources() -> dict[str, str]:
    """The text of each file with models, by name."""
    return {path.stem: path.read_text() for path in sorted(FILES.glob("*/modeling_*.py"))}


@functools.cache
def trees() -> dict[str, tuple[str, ast.Module]]:
    """The source and the syntax of each file that has a class of the tables, by name."""
    tables = (families.MIXERS, families.UNKNOWN_RECURRENCES, families.WHOLE_SEQUENCES, families.SAMPLING)
    wanted = re.compile("|".join(rf"class {name}\b" for table in tables for name in table))
    return {name: (text, ast.parse(text)) for name, text in sources().items() if wanted.search(text)}


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """All classes, with the names of their files; xLSTM's lie in a branch."""
    for file, (_, tree) in trees().items():
        nodes = [node for part in tree.body for node in (part.orelse if isinstance(part, ast.If) else [part])]
        yield from ((file, node) for node in nodes if isinstance(node, ast.ClassDef))


def functions(file: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in trees()[file][1].body if isinstance(node, ast.FunctionDef)}


def forward_of(cls: ast.ClassDef) -> ast.FunctionDef | None:
    return next((node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "forward"), None)


def calls_of(node: ast.AST) -> list[tuple[str, ast.Call]]:
    """The calls of functions by name."""
    calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
    return [(call.func.id, call) for call in calls if isinstance(call.func, ast.Name)]


@pytest.mark.long
def test_mixers_call_the_functions_that_are_replaced() -> None:
    found = {cls.name: (file, cls) for file, cls in classes() if cls.name in families.MIXERS}
    for name, replaced in families.MIXERS.items():
        if name in NEW and not CHUNKS_FOLLOW_POSITIONS:
            continue
        assert name in found, f"{name} is gone"
        file, forward = found[name][0], forward_of(found[name][1])
        assert forward is not None
        called = {function for function, _ in calls_of(forward)}
        assert replaced <= called, f"{name} does not call {replaced - called}"
        # Any other function of its file that it calls in training mixes no tokens.
        others = called & functions(file).keys() - replaced
        assert others <= MIX_NOTHING, f"{name} calls {others} too"
        for function in replaced - families.SHORT_CUTS:
            arguments = functions(file)[function].args
            others = {each.arg for each in [*arguments.args, *arguments.kwonlyargs]} - set(ARGUMENTS[function].split())
            assert not others, f"{function} of {name} takes {others} too"


# ---- what is read in the source of a class, against what the model does -----------------------------

TYPES = ("llama", "gemma3_text", "llama4_text", "gpt_oss", "opt", "bloom", "falcon", "afmoe", "xglm", "mpt", "biogpt")


def leaks(model: torch.nn.Module) -> bool:
    """Whether the first document of a packed row changes what the second becomes, by transformers' own masks."""
    ids, positions = torch.arange(3, 19)[None], torch.cat([torch.arange(7), torch.arange(9)])[None]
    others = ids.clone()
    others[:, :7] += 20
    with torch.no_grad():
        one, other = (model(input_ids=x, position_ids=positions, use_cache=False).logits for x in (ids, others))
    return not torch.equal(one[:, 7:], other[:, 7:])


@pytest.mark.parametrize("name", TYPES)
def test_documents_join_where_it_is_read(name: str) -> None:
    """Which types these are changes: Falcon and Bloom got position ids between 5.17 and 5.24."""
    model = tiny_models.tiny_model(tiny_models.tiny_config(name)).eval()
    assert positions_separate(model) is not leaks(model)


ROWS = {"qwen2_5_vl": (True, False), "qwen3_vl": (True, True), "glm4v": (True, False), "llava": (False, False)}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_text_are_read(name: str) -> None:
    model = tiny_models.tiny_model(tiny_models.tiny_config(name)).eval()
    reader = BatchReader(model, Patches())
    counted = torch.cat([torch.arange(7), torch.arange(9)]).expand(1, 1, 16)
    for rows in (1, 3, 4):
        given = counted.expand(rows, -1, -1) if rows > 1 else counted[0]
        assert (reader.takes_rows, reader.lacks_text_row({"position_ids": given})) == (
            ROWS[name][0],
            ROWS[name][0] and (rows == 3 or (rows == 1 and not ROWS[name][1])),
        )


def test_a_class_of_the_users_that_makes_masks_is_not_known() -> None:
    names: dict[str, Any] = {}
    exec("def forward(self, x): return create_causal_mask(x)\ndef silent(self, x): return x", names)
    unread, silent = (type("Made", (torch.nn.Module,), {"forward": names[name]}) for name in ("forward", "silent"))
    model = tiny_models.tiny_model(tiny_models.tiny_config("llama"))
    model.add_module("made", silent())
    assert positions_separate(model)
    model.add_module("made", unread())
    assert positions_separate(model) is None


def _hands_positions(forward: ast.AST) -> bool:
    """Whether every causal mask that a forward makes is made from position ids."""
    knows = {  # mask_kwargs = {..., "position_ids": position_ids}
        name.id: any(isinstance(key, ast.Constant) and key.value == "position_ids" for key in node.value.keys)
        for node in ast.walk(forward)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for name in node.targets
        if isinstance(name, ast.Name)
    }
    calls = [call for call in ast.walk(forward) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)]
    return all(
        any(
            keyword.arg == "position_ids"
            or (keyword.arg is None and isinstance(keyword.value, ast.Name) and knows.get(keyword.value.id, True))
            for keyword in call.keywords
        )
        for call in calls
        if isinstance(call.func, ast.Name) and (call.func.id.endswith("causal_mask") or call.func.id == "mask_function")
    )


@pytest.mark.long  # it reads all of transformers, which `make matrix` and the nightly run do with each new version
@pytest.mark.skipif(not transformers.__version__.startswith("5.24"), reason="the lists are of 5.24")
def test_classes_that_join_documents_or_take_rows_of_text_are_listed() -> None:
    joins, takes, makes = {"HunYuanVLTextModel"}, set(), set()
    for source in sources().values():
        for cls in ast.walk(ast.parse(source)):
            for method in cls.body if isinstance(cls, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef) and method.name == "forward":
                    text = ast.unparse(method)
                    joins |= {cls.name} if not _hands_positions(method) else set()
                    takes |= {cls.name} if "position_ids.shape[0] == 4" in text else set()
                    makes |= {cls.name} if "expand(4, position_ids" in text else set()
    assert (joins, takes, makes) == (families.JOIN_DOCUMENTS, families.TAKE_TEXT_ROW, families.MAKE_TEXT_ROW)


def test_classes_that_are_refused_exist() -> None:
    found = {name for text in sources().values() for name in re.findall(r"^ *class (\w+)", text, re.MULTILINE)}
    for table in (families.UNKNOWN_RECURRENCES, families.WHOLE_SEQUENCES, families.SAMPLING):
        assert set(table) <= found


def test_trainers_that_share_a_replacement_are_restored_in_any_order() -> None:
    """Another Trainer may compute with it still."""
    module = types.ModuleType("modeling")
    module.mix = original = lambda x: x
    records = [Patches(), Patches()]
    for patches in records:
        patches.share(module, "mix", lambda mix, x: mix(x) + 1)
        assert module.mix(1) == 2
    records[0].restore()
    assert module.mix(1) == 2
    records[1].restore()
    assert module.mix is original


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("bloom", "tiled_loss, activation_offloading"),
        ("llama", "tiled_mlp, tiled_norm, tiled_loss, activation_offloading"),
    ],
)
def test_a_refusal_says_which_keys_the_model_takes(name: str, keys: str) -> None:
    tiny = tiny_models.tiny_model(tiny_models.tiny_config(name))
    assert f"where it takes {keys}, or" in instead(tiny)


# ---- learned sparse attention -------------------------------------------------------------------


def test_every_indexer_of_the_release_is_refused_by_name() -> None:
    """Whatever its file calls it; and no attention function gets `indices` without a word."""
    found = {
        name for text in sources().values() for name in re.findall(r"^class (\w*Indexer\w*)\(", text, re.MULTILINE)
    }
    assert len(found) > 5
    for name in found:
        with pytest.raises(
            RefusedError, match=rf"^Model chooses the keys of each query .*, and no layer.indexer \({name}\): train it$"
        ):
            refuse_indexers("Model", [("layer.indexer", type(name, (torch.nn.Module,), {})())], lambda: "train it")


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_models_that_choose_keys_are_refused_on_ranks(name: str) -> None:
    with pytest.raises(
        RefusedError, match=r"chooses the keys of each query .* and no \S+\.indexer \(\w+Indexer\): train it"
    ):
        check_model(tiny_models.tiny_model(tiny_models.tiny_config(name)))
