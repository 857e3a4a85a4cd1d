"""The surroundings of every Python snippet of the documentation: names that it uses but does not define."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import ringtile
import torch
import torch.distributed as dist
from hf_engines import engine
from hf_models import tiny_model, tiny_tokenizer
from hf_training import Padded, enter_world, make_rows
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from examples.tiny_model import tiny_tokenizer as byte_tokenizer

B, S, W, H, D, VOCAB = 1, 24, 2, 2, 8, 32
Names = dict[str, Any]


class _Attention(nn.Module):
    """Causal attention over x (B, H, N, D)."""

    def forward(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x, x, x, is_causal=True)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"inner": _Attention()})

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (H, D)).transpose(1, 2)
        return x + self.attention["inner"](heads).transpose(1, 2).flatten(2)


class _Model(nn.Module):
    """Logits (B, N, VOCAB) of input_ids (B, N)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, H * D), nn.Linear(H * D, VOCAB)
        self.layers = nn.ModuleList([_Layer()])

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + position_ids[..., None] / S
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _tensor(num_tokens: int) -> Tensor:
    return torch.randn(B, num_tokens, H, D)


def _sequence(num_tokens: int) -> Names:
    """q, k, v of that many tokens, and the words for the sequence they belong to."""
    return {
        "seq_len": S,
        "world_size": W,
        "group": dist.group.WORLD,
        "lengths": [[10, S - 10]],
        "mask": ringtile.IntervalMask.causal(S),
        "layout": ringtile.Layout.zigzag(S, W),
        "x": _tensor(S),
        **{name: _tensor(num_tokens) for name in "qkv"},
    }


def _loop() -> Names:
    """A plain training loop on a mesh."""
    tokens, mesh = torch.arange(S)[None] % VOCAB, init_device_mesh("cpu", (W,), mesh_dim_names=("cp",))
    return _sequence(S // W) | {
        "B": B,
        "mesh": mesh,
        "plan": ringtile.ContextParallelPlan(mesh["cp"], ringtile.IntervalMask.causal(S)),
        "model": _Model(),
        "input_ids": tokens.clone(),
        "labels": tokens.clone(),
        "position_ids": torch.arange(S)[None],
        "loss_of": lambda logits, labels: cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"),
        "parallelize_module": torch.distributed.tensor.parallel.parallelize_module,
        "mask_mod": lambda batch, head, query, key: query >= key,
    }


def _training() -> Names:
    """A model, its copy, and two batches for each group of ranks that share rows."""
    torch.manual_seed(0)
    model, batches = _Model().double(), [torch.randint(VOCAB, (2, S)) for _ in range(2)]
    copies = {"alone": copy.deepcopy(model), "whole": [batch.clone() for batch in batches]}
    return {"model": model, "batches": batches, "dp_size": 1, "cp_size": W, **copies}


def _trains_as_one_process(names: Names) -> None:
    model, optimizer = names["alone"], torch.optim.SGD(names["alone"].parameters(), lr=0.1)
    for input_ids in names["whole"]:
        logits = model(input_ids, torch.arange(S).repeat(2, 1))
        cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, weight), alone in zip(names["model"].named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(weight.full_tensor(), alone, msg=name)


def _heads_first() -> Names:
    names = _loop()
    return names | {name: names[name].transpose(1, 2) for name in "qkv"}


def _recurrent() -> Names:
    heads, wide = (B, S // W, H), (B, S // W, H, D)
    return _sequence(S // W) | {
        "x": torch.randn(B, S // W, D),
        "weight": torch.randn(D, 4),
        "u": torch.randn(wide),
        **{name: torch.randn(heads).sigmoid() for name in ("beta", "dt")},
        **{name: -torch.rand(size) for name, size in (("g", heads), ("A", (H,)))},
        **{name: torch.randn(wide) for name in "BC"},
        "step": torch.rand(B, S // W, D),
        "rate": -torch.rand(D, 4),
        **{name: torch.randn(B, S // W, 4) for name in "bc"},
    }


def _tiles() -> Names:
    model = tiny_model()
    config = model.config
    labels = torch.arange(6)
    x = torch.randn(6, config.hidden_size)
    return {"module": model.model.layers[0].mlp, "model": model, "x": x, "hidden": x} | {
        "weight": model.lm_head.weight,
        "labels": labels,
    }


def _policy() -> Names:
    """Rows that a model has written, padded on the left."""
    padding, prompt = torch.arange(S) < 3, torch.arange(S) < 9
    return {
        "mesh": init_device_mesh("cpu", (W,), mesh_dim_names=("cp",)),
        "model": tiny_model(),
        "rows": torch.arange(2 * S).view(2, S) % VOCAB,
        "attention_mask": (~padding).expand(2, S),
        "completion_mask": (~prompt).expand(2, S),
        "advantages": torch.tensor([[1.0], [-1.0]]),
    }


def _is_step(names: Names) -> None:
    assert torch.equal(names["new"].detach(), names["old"])
    assert names["entropy"].shape == (2, S - 1)
    assert all(parameter.grad is not None for parameter in names["model"].parameters())


def _run_trainer(code: str, folder: str) -> Names:
    from transformers import Trainer, TrainingArguments

    enter_world()
    args = TrainingArguments(folder, use_cpu=True, max_steps=1, report_to=[], disable_tqdm=True, save_strategy="no")
    names: Names = {"Trainer": functools.partial(Trainer, data_collator=Padded()), "model": tiny_model(), "args": args}
    exec(code, names | {"rows": make_rows(8), "dataset": make_rows(8), "collator": Padded()}, names)
    return names


def _run_trl(code: str, folder: str) -> Names:
    import datasets
    import trl

    enter_world()
    with engine("DDP"):
        arguments = {"use_cpu": True, "max_steps": 1, "report_to": [], "save_strategy": "no", "bf16": False}
        trainer = functools.partial(trl.SFTTrainer, processing_class=tiny_tokenizer())
        names: Names = {
            "model": tiny_model(),
            "rows": datasets.Dataset.from_list(make_rows(8)),
            "prompts": datasets.Dataset.from_list([{"prompt": f"w{n} w9"} for n in range(3, 9)]),
            "tokenizer": tiny_tokenizer(),
            "reward": lambda completion_ids, **columns: [float(len(ids)) for ids in completion_ids],
        }
        with contextlib.ExitStack() as stack:
            for config, more in (("SFTConfig", {}), ("GRPOConfig", {"max_completion_length": 8})):
                made = functools.partial(getattr(trl, config), **arguments, **more)
                stack.enter_context(mock.patch.object(trl, config, made))
            stack.enter_context(mock.patch.object(trl, "SFTTrainer", trainer))
            exec(code.replace('"out"', repr(folder)), names)
    return names


def _tiny_qwen3(folder: pathlib.Path) -> None:
    """What the page of Qwen3-8B has before its scripts run: the model, texts, chats, an adapter."""
    import peft
    import trl
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    templates = pathlib.Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen3.jinja").read_text()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "vocab_size": len(tokenizer)}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    for what in (model, tokenizer):
        what.save_pretrained(folder / "Qwen3-8B")
    peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear")).save_pretrained(folder / "out")
    turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    (folder / "data").mkdir(exist_ok=True)  # an earlier snippet of the page may have made it
    (folder / "data" / "texts.jsonl").write_text(json.dumps({"text": "a text " * 40}) + "\n")
    (folder / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 20)


def _run_story(code: str, folder: str) -> Names:
    """A script of the page of Qwen3-8B as it is, but for lengths, ranks and engine, on a Qwen3 of two tiny layers."""
    import transformers
    import trl

    enter_world()
    home = pathlib.Path(folder)
    if dist.get_rank() == 0:
        _tiny_qwen3(home)
    dist.barrier()
    here = {
        "use_cpu": True,
        "max_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "fsdp": False,
    }
    here |= {"bf16": False, "gradient_accumulation_steps": 1, "fsdp_config": None}
    names: Names = {}
    with contextlib.ExitStack() as stack:
        for module, name in ((transformers, "TrainingArguments"), (trl, "SFTConfig")):
            made = functools.partial(_with_others, getattr(module, name), here)
            stack.enter_context(mock.patch.object(module, name, made))
        stack.callback(os.chdir, os.getcwd())
        os.chdir(home)
        for real, tiny in (("131072", "512"), ("32768", "128"), ('parallel_size": 8', 'parallel_size": 2')):
            code = code.replace(real, tiny)
        if "ringtile.enable" in code or dist.get_rank() == 0:  # what torchrun does not launch is one process's
            exec(code, names)
            assert names["config"].rope_parameters["rope_type"] == "yarn"
        dist.barrier()
    return names


def _with_others(made: Any, others: Names, **given: Any) -> Any:
    return made(**given | others)


def _has_output(names: Names) -> None:
    assert names["out"].isfinite().all()


def _is_unsharded(names: Names) -> None:
    _has_output(names)
    assert names.get("y", names["out"]).shape == (B, S, H, D)


def _has_gradients_of_all(names: Names) -> None:
    assert names["loss"].isfinite()
    assert all(parameter.grad is not None for parameter in names["model"].parameters())


def _is_equal(names: Names) -> None:
    assert names["found"].num_modules > 0


def _is_ring_of_two(names: Names) -> None:
    torch.testing.assert_close(names["out"], names["alone"])


def _latents() -> Names:
    sizes = {"queries": (4, 24), "latent": (1, 16), "rope": (1, 8)}
    return {**_sequence(S), **{name: torch.randn(B, S, *size) for name, size in sizes.items()}}


def _is_ring_of_latents(names: Names) -> None:
    keys = names["up"](names["latent"], names["rope"])
    torch.testing.assert_close(names["out"], ringtile.attention(names["queries"], *keys, mask=names["mask"]))


def _has_logits(names: Names) -> None:
    assert names["logits"].shape == (len(names["input_ids"]), S, VOCAB)


def _has_local_logits(names: Names) -> None:
    assert names["logits"].shape == (len(names["input_ids"]), S // W, VOCAB)


def _has_tiles(names: Names) -> None:
    assert names["y"].shape == names["x"].shape
    assert names["loss"].isfinite()
    names["handle"].restore()


# Page and number of the snippet: the names around it, and what holds afterwards.
_PLAIN: dict[str, tuple[Callable[[], Names], Callable[[Names], None]]] = {
    "docs/design/ring.md 0": (lambda: _sequence(S // W), _has_output),
    "docs/guide/exact.md 0": (dict, _is_equal),
    "docs/guide/hybrid.md 0": (_recurrent, _has_output),
    "docs/guide/memory.md 0": (lambda: {"model": tiny_model()}, lambda names: names["handle"].restore()),
    "docs/guide/pytorch.md 0": (_training, _trains_as_one_process),
    "docs/guide/pytorch.md 1": (_loop, _has_local_logits),
    "docs/guide/pytorch.md 2": (_loop, _has_logits),
    "docs/guide/pytorch.md 3": (_loop, _is_unsharded),
    "docs/guide/pytorch.md 4": (_heads_first, _has_output),
    "docs/guide/rl.md 1": (_policy, _is_step),
    "docs/guide/tiling.md 0": (_tiles, _has_tiles),
    "docs/reference/attention.md 0": (lambda: _sequence(S), _is_ring_of_two),
    "docs/reference/attention.md 1": (_latents, _is_ring_of_latents),
    "docs/reference/tiled.md 0": (
        lambda: {"model": tiny_model(), "input_ids": torch.arange(S)[None] % VOCAB},
        _has_gradients_of_all,
    ),
}
_RUNNERS = {"README.md 0": _run_trainer, "docs/guide/trainer.md 0": _run_trainer}
_RUNNERS |= {f"docs/guide/qwen3_8b_128k.md {n}": _run_story for n in range(3)}
_RUNNERS |= {"docs/guide/one_gpu_1m.md 0": _run_story}
_RUNNERS |= {"docs/guide/trl.md 0": _run_trl, "docs/guide/rl.md 0": _run_trl}
EXAMPLES = sorted([*_PLAIN, *_RUNNERS])
# A page that begins where the last snippet of another ends, with all its names.
BEHIND = {"docs/guide/exact.md": "docs/guide/pytorch.md 0"}


def run_page(page: str, snippets: dict[str, str], folder: str) -> None:
    """Run a page's snippets on a rank of the pool in their order: what one defines, the next ones use."""
    made: Names = {}
    if page in BEHIND:
        _, made = run_example(BEHIND[page], snippets[BEHIND[page]], folder, {})
    for name in (name for name in EXAMPLES if name.rpartition(" ")[0] == page):
        before, after = run_example(name, snippets[name], folder, made)
        made |= {key: value for key, value in after.items() if key not in before or value is not before[key]}


def run_example(name: str, code: str, folder: str, made: Names) -> tuple[Names, Names]:
    """Run a snippet among names that were made before it, and check its result. Return the names before and after."""
    if name in _RUNNERS:
        names = _RUNNERS[name](code, folder)
        if "trainer" in names:
            assert names["trainer"].state.global_step == 1
        else:
            assert (pathlib.Path(folder) / "merged" / "model.safetensors").is_file()
        return {}, {}
    surroundings, check = _PLAIN[name]
    torch.manual_seed(0)
    names = surroundings() | made
    before = dict(names)
    if not re.match("(import|from) ", code):  # else it imports all that it needs
        names |= {"torch": torch, "ringtile": ringtile}
    exec(code, names)
    check(names)
    return before, names
