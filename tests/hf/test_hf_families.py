"""What hf/families.py declares of transformers' models is what the installed release has; else the class is named."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import types
from collections.abc import Iterator

import pytest
import transformers
from ringtile.hf import families
from ringtile.hf.patches import Patches

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
MIX_NOTHING = {
    "apply_mask_to_padding_states",
    # Of one token, with a cache.
    *("causal_conv1d_update", "mamba_selective_state_update", "mamba2_selective_state_update"),
    *("torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention"),
}
READS_TEXT_ROW = "position_ids.shape[0] == 4"  # in a forward that tells documents apart by the first row of (4, B, S)
MAKES_TEXT_ROW = "expand(4, position_ids"  # in one that also makes that row, of position_ids (B, S)


@functools.cache
def sources() -> dict[str, str]:
    """The text of each file with models, by name."""
    return {path.stem: path.read_text() for path in sorted(FILES.glob("*/modeling_*.py"))}


@functools.cache
def trees() -> dict[str, tuple[str, ast.Module]]:
    """The source and the syntax of each file that makes causal masks or has a class of the tables, by name."""
    tables = (families.MIXERS, families.UNKNOWN_RECURRENCES, families.WHOLE_SEQUENCES, families.SAMPLING)
    wanted = re.compile(
        "|".join(["causal_mask", "mask_function", *(rf"class {name}\b" for table in tables for name in table)])
    )
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


def hands_positions(forward: ast.FunctionDef) -> bool:
    """Whether every causal mask that a forward makes is made from position ids."""
    knows = {  # mask_kwargs = {..., "position_ids": position_ids}
        name.id: any(isinstance(key, ast.Constant) and key.value == "position_ids" for key in node.value.keys)
        for node in ast.walk(forward)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for name in node.targets
        if isinstance(name, ast.Name)
    }
    return all(
        any(
            keyword.arg == "position_ids"
            or (keyword.arg is None and isinstance(keyword.value, ast.Name) and knows.get(keyword.value.id, True))
            for keyword in call.keywords
        )
        for name, call in calls_of(forward)
        if name.endswith("causal_mask") or name == "mask_function"
    )


@pytest.mark.long
def test_masks_that_know_no_positions_are_declared() -> None:
    joining = {"HunYuanVLTextModel"}
    for _, cls in classes():
        forward = forward_of(cls)
        if forward is not None and not hands_positions(forward):
            joining.add(cls.name)
    assert joining ^ families.JOIN_DOCUMENTS == set()


@pytest.mark.long
def test_models_that_read_a_row_of_text_are_declared() -> None:
    rows = {}
    for file, cls in classes():
        forward = forward_of(cls) if READS_TEXT_ROW in trees()[file][0] else None
        source = "" if forward is None else ast.unparse(forward)
        if READS_TEXT_ROW in source:
            rows[cls.name] = MAKES_TEXT_ROW in source
    assert rows == families.TEXT_ROWS


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
