"""A model under context parallelism: its parts, what it attends, and what of it is refused before anything changes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import accelerate
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification

from ringtile.errors import PAGES, RefusedError
from ringtile.hf import attention
from ringtile.hf.batch import active_batch
from ringtile.hf.families import SAMPLING, WHOLE_SEQUENCES
from ringtile.hf.layers import RECURRENT_TYPES, known_types, mixers, refuse_indexers
from ringtile.hf.patches import Patches

_HEADS_OF_ROWS = ("ForSequenceClassification", "ForQuestionAnswering")  # how names of models end that have one
_NOT_TEXT = ("vision", "image", "video", "audio", "speech")  # in the names of a tower's configuration

_CROSS_ATTENTION = ("encoder_attn", "crossattention")  # of decoders; without an encoder's output they do not run
_TYPES_BY_TOKEN = frozenset({"mlp", "moe"})  # of hybrid models' layers: each token by itself

# Of each switched model, the names of its attention before.
_own_attention: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, Any]] = weakref.WeakKeyDictionary()


def instead(model: PreTrainedModel) -> str:
    """Return what to do about a model that no setting makes run on shards, which ends a message."""
    from ringtile.hf.features.loss import not_plain
    from ringtile.hf.features.mlp import find_mlps
    from ringtile.hf.features.norm import find_norms

    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    takes = {
        "tiled_mlp": find_mlps(model),
        "tiled_norm": find_norms(model),
        "tiled_loss": head is not None and model.loss_function is ForCausalLMLoss and not not_plain(head),
        "activation_offloading": model.supports_gradient_checkpointing,
    }
    keys = ", ".join(key for key, is_taken in takes.items() if is_taken) or "none of ringtile's keys"
    return (
        f"train it with context_parallel_size: 1, where it takes {keys}, or choose a type that "
        f"{PAGES}docs/guide/models.md lists as exact"
    )


def base_model(model: nn.Module | None) -> PreTrainedModel:
    """The transformers model inside PEFT's adapters. Raises RefusedError when there is none."""
    get_base_model = getattr(model, "get_base_model", None)
    base = get_base_model() if callable(get_base_model) else model
    if not isinstance(base, PreTrainedModel):
        raise RefusedError(f"the model is a {type(base).__name__}; expected a transformers PreTrainedModel")
    return base


def receiver(model: nn.Module) -> nn.Module:
    """The module whose inputs are whole sequences: the model, or the one inside it, if the model puts tokens of its own
    before each sequence (prompt tuning, p-tuning, CPT)."""
    return model.get_submodule("base_model") if adds_tokens(model) else model


def adds_tokens(model: nn.Module | None) -> bool:
    return any(config.is_prompt_learning for config in adapters_of(model))


def adapters_of(model: nn.Module | None) -> list[Any]:
    configs = getattr(model, "peft_config", None)
    return list(configs.values()) if isinstance(configs, dict) else []


def reads_rows(base: PreTrainedModel) -> bool:
    """Whether the head of a model of transformers reads whole rows: it classifies them, or spans of them."""
    return base.base_model is not base and type(base).__name__.endswith(_HEADS_OF_ROWS)


def shifts_labels(model: PreTrainedModel) -> bool:
    """Whether a token is to predict the next label, and not its own."""
    # transformers' own rule: without a loss_type (GPT-2) the loss is the causal one.
    loss = LOSS_MAPPING.get(getattr(model, "loss_type", None) or "ForCausalLM")
    return loss not in (ForMaskedLMLoss, ForTokenClassification)


def drops_attention(base: PreTrainedModel) -> bool:
    """Whether the configuration of the text model has a rate of attention dropout above 0."""
    return any(rate > 0 for rate in _attention_rates(base.config.get_text_config().to_dict()))


def _attention_rates(config: Mapping[str, Any]) -> Iterator[float]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _attention_rates(value)
        elif isinstance(value, int | float) and "att" in name and "drop" in name:
            yield value


def dropping(base: PreTrainedModel) -> str:
    """The first module of the text model that drops, or "attention"; "" if nothing does."""
    rates = (path for path, module in text_modules(base) if isinstance(module, nn.Dropout) and module.p > 0)
    return next(rates, "attention" * drops_attention(base))


def text_modules(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """The modules that run for text, with their paths: without the towers of a model that takes images or sound too."""
    roots = [f"{path}." for path in towers(model)]
    return [(path, m) for path, m in model.named_modules() if not any(f"{path}.".startswith(root) for root in roots)]


def check_model(model: PreTrainedModel) -> None:
    """Raises RefusedError for models that need the full sequence, perhaps on rows longer than the cut which the first
    batch proves."""
    config, name = model.config.get_text_config(), type(model).__name__
    causal, modules = attends_causally(model), text_modules(model)
    refuse_indexers(name, modules, lambda: instead(model))
    layer_types = set(getattr(config, "layer_types", None) or ()) - known_types(causal)
    if causal and mixers(modules):
        layer_types -= RECURRENT_TYPES | _TYPES_BY_TOKEN
    if layer_types:
        raise RefusedError(
            f"{name} has layers of type {', '.join(sorted(layer_types))}; expected only "
            f"{', '.join(sorted(known_types(causal)))}: other layers mix tokens without the ring. Instead, "
            f"{instead(model)}"
        )
    refuse_modules(model, WHOLE_SEQUENCES | SAMPLING)


def attends_causally(model: PreTrainedModel) -> bool:
    """Whether no token attends a later one. RefusedError: a decoder in which one does; layers disagree."""
    config, name, modules = model.config.get_text_config(), type(model).__name__, text_modules(model)
    whole = config if shifts_labels(model) else model.config  # T5Gemma 2 says it there alone
    if getattr(config, "is_encoder_decoder", False) or getattr(whole, "is_encoder_decoder", False):
        raise RefusedError(f"{name} has an encoder and a decoder; expected one of the two: {instead(model)}")
    first: dict[bool, str] = {}  # by is_causal
    for path, module in modules:
        flag = getattr(module, "is_causal", None)
        if isinstance(flag, bool) and not path.endswith(_CROSS_ATTENTION):
            first.setdefault(flag, path)
    # A decoder for which transformers draws full masks; each loss is computed as in one process.
    if True in first and not getattr(config, "is_causal", True):
        return False
    if getattr(config, "use_bidirectional_attention", 0) in (True, "all") and True not in first and not towers(model):
        return False
    # An encoder whose loss is the Trainer's does not shift either, and a loss of rows says nothing.
    has_no_head = model.base_model is model
    if shifts_labels(model) and not reads_rows(model) and not (has_no_head and False in first):
        if False in first:
            raise RefusedError(f"{name} is bidirectional ({first[False]}); expected a causal decoder: {instead(model)}")
        return True
    if len(first) != 1:
        raise RefusedError(
            f"{name} has {'causal and bidirectional layers' if first else 'no layer that says whether it is causal'} "
            f"(is_causal); expected all layers to say the same, as those that attend through transformers' "
            f"AttentionInterface do: {instead(model)}"
        )
    return True in first


def check_training_model(model: nn.Module) -> None:
    """Raises RefusedError for a model whose gradients no engine averages."""
    if not has_engine(model):
        inner = getattr(model, "_orig_mod", model)
        raise RefusedError(
            f"the model in training is a bare {type(inner).__name__}, whose gradients no engine averages over the "
            f"ranks; expected DistributedDataParallel, FSDP2 or DeepSpeed. accelerate {accelerate.__version__} leaves "
            f"a model bare on CPU ranks (set use_cpu=True in TrainingArguments)"
        )


def has_engine(model: nn.Module) -> bool:
    """Whether an engine that averages gradients over the ranks has wrapped the model, or what has adapters in it: the
    Trainer itself averages those of adapters of a model that transformers has sharded."""
    inner = getattr(model, "_orig_mod", model)
    is_sharded = getattr(inner, "is_distributed_loading_by_transformers", False)
    return bool(is_sharded) or isinstance(inner, FSDPModule) or inside_engine(inner) is not inner


def inside_engine(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's, DDP's or DeepSpeed's. FSDP2 wraps none."""
    inner: Any = getattr(model, "_orig_mod", model)
    is_wrapped = isinstance(inner, DistributedDataParallel) or type(inner).__name__ == "DeepSpeedEngine"
    module: nn.Module = inner.module if is_wrapped else inner
    return module


def refuse_modules(model: PreTrainedModel, reasons: dict[str, tuple[str, str]]) -> None:
    """Raises RefusedError for the first module whose class has a reason, with a setting that is on or none."""
    for path, module in text_modules(model):
        switch, reason = reasons.get(type(module).__name__, ("", ""))
        if reason and (not switch or getattr(module, switch, True)):
            raise RefusedError(
                f"{path} ({type(module).__name__}) {reason}; expected tokens that ranks can share: {instead(model)}"
            )


def towers(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """The parts of a model that turn images or sound into embeddings, by path; not those inside another."""
    configs = {type(getattr(model.config, name)) for name in _tower_configs(model)}
    configs -= {type(model.config.get_text_config())}
    found: dict[str, PreTrainedModel] = {}
    for path, module in model.named_modules():
        is_tower = isinstance(module, PreTrainedModel) and type(module.config) in configs
        if path and is_tower and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = module
    return found


def _tower_configs(model: PreTrainedModel) -> set[str]:
    """The names of the configurations of towers."""
    return {name for name in model.config.sub_configs if any(kind in name for kind in _NOT_TEXT)}


def switch_attention(wrapped: nn.Module, patches: Patches) -> None:
    """Makes every layer call ringtile's attention and mask functions. wrapped: the model with its adapters."""
    model = base_model(wrapped)
    if model in _own_attention:
        raise RefusedError("another Trainer is enabled on this model; expected one: call ringtile.restore on the other")
    attention.refuse_own_functions(module for _, module in text_modules(model))
    # On the outermost module: adapters call the inner module's forward, which skips its hooks.
    patches.on_restore(wrapped.register_forward_pre_hook(attention.hide_attention_mask, with_kwargs=True).remove)
    previous = {"": model.config._attn_implementation}
    without = []  # the configs of parts that do not attend: only the attribute takes None back
    for name in model.config.sub_configs:
        sub_config = getattr(model.config, name)
        if sub_config is not None and sub_config._attn_implementation is None:
            without.append(sub_config)
        elif sub_config is not None:
            previous[name] = sub_config._attn_implementation

    def restore() -> None:
        model.set_attn_implementation(previous)
        for config in without:
            config._attn_implementation = None
        _own_attention.pop(model, None)

    patches.on_restore(restore)
    _own_attention[model] = previous
    set_attention(model)
    attention.leave_temperature(model, patches)
    if model.config.get_text_config()._attn_implementation != attention.NAME:
        raise RefusedError(
            f"{type(model).__name__} does not take its attention from transformers' AttentionInterface; expected a "
            f"model that does, since its own attention would see the tokens of one rank only: {instead(model)}"
        )


@contextlib.contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside, a switched model attends as its user said: in the run of one process that a proof compares with, and to
    generate, which may need a function for its cache."""
    attention.check_switched(model)
    model.set_attn_implementation(_own_attention[model])
    try:
        yield
    finally:
        set_attention(model)


def set_attention(model: PreTrainedModel) -> None:
    """Towers keep their own attention: they see whole images."""
    names = dict.fromkeys(model.config.sub_configs, attention.NAME) | {"": attention.NAME}
    previous = _own_attention[model]
    model.set_attn_implementation(names | {name: previous[name] for name in _tower_configs(model) & previous.keys()})


# ---- rotary embeddings that depend on the length of a sequence ----------------------------------


def pin_rope_length(model: PreTrainedModel, patches: Patches) -> None:
    """Shows the largest global position to rotary embeddings whose frequencies depend on the sequence length.

    "dynamic" and "longrope" read the length off their position ids, and the ids of a shard would give each rank other
    frequencies. The largest global position is appended to the ids, and its row dropped from the result.
    """
    for rotary in rotary_embeddings(model):
        if depends_on_length(rotary):
            patches.wrap(rotary, "forward", _with_global_length)


def depends_on_length(rotary: nn.Module) -> bool:
    """Whether the frequencies of a rotary embedding, of all layers or of a type of layers, depend on the length."""
    return any(kind in str(getattr(rotary, "rope_type", "")) for kind in ("dynamic", "longrope"))


def _with_global_length(
    original: Callable[..., Any], x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    if (batch := active_batch()) is not None:
        last = position_ids.new_full((position_ids.size(0), 1), batch.max_position)
        position_ids = torch.cat([position_ids, last], dim=1)
    cos, sin = original(x, position_ids, *args, **kwargs)
    return (cos, sin) if batch is None else (cos[:, :-1], sin[:, :-1])


def rotary_embeddings(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
