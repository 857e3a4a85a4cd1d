"""`ringtile plan RUN.yaml` and `--model`: a rank's memory by part, the longest sequence, what switches save, time."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import logging
import os
import re
from collections.abc import Iterator
from typing import Any

import torch

from ringtile.cli import Outcome, plan_run
from ringtile.cli.output import check_output, progress, write_output
from ringtile.errors import PAGES, ConfigError, refusing
from ringtile.hf.config import MAX_KEY, Config, nearest_key
from ringtile.planner.optimizers import OPTIMIZERS
from ringtile.planner.sizes import bytes_text, parse_bytes, parse_rates, parse_tokens, tokens_text
from ringtile.scheme import Scheme

ENGINES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
OF_A_LAYER = ("world_size", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "recurrent")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a model's training; names as in the YAML of ringtile train")
    group.add_argument(
        "--model",
        metavar="FOLDER|NAME|TYPE",
        help="a folder with a config.json, a hub name such as Qwen/Qwen3-8B, or a type of transformers",
    )
    group.add_argument("--devices", type=int, metavar="COUNT", help="ranks of the training (1)")
    group.add_argument(
        "--memory", metavar="BYTES", help="of a device: 80GiB, that of a run; then also the longest sequence"
    )
    group.add_argument("--engine", choices=ENGINES, default="ddp", help="who shards weights and their state (ddp)")
    group.add_argument("--context-parallel-size", type=int, metavar="W", help="ranks that share a sequence (--devices)")
    group.add_argument(
        "--expert-parallel-size",
        type=int,
        default=1,
        metavar="E",
        help="as ep_size of transformers' DistributedConfig, with fsdp2: ranks that hold all experts together (1)",
    )
    group.add_argument("--gradient-checkpointing", action="store_true", help="as training.gradient_checkpointing")
    group.add_argument("--stream", action="store_true", help="layers on chunks of tokens")
    group.add_argument("--activation-offloading", "--offload", action="store_true", help="saved inputs on the host")
    group.add_argument("--tiled-mlp", action="store_true", help="the MLP in tiles")
    group.add_argument("--tiled-norm", action="store_true", help="RMSNorms in tiles")
    group.add_argument("--tiled-loss", action="store_true", help="the loss in tiles")
    group.add_argument("--tile-tokens", type=int, metavar="TOKENS", help="tokens per tile or chunk (16384)")
    group.add_argument("--bf16", action="store_true", help="mixed precision, as training.bf16")
    group.add_argument(
        "--lora-rank", type=int, default=0, metavar="R", help="of PEFT's adapters on all linear layers; 0: none (0)"
    )
    group.add_argument(
        "--load-in-4bit",
        action="store_true",
        help="QLoRA, with --lora-rank: frozen linear layers as bitsandbytes' nf4 with double quantization",
    )
    group.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="whose state is held (adamw)")
    group.add_argument("--offload-optimizer", action="store_true", help="as DeepSpeed's offload_optimizer: on the host")
    group.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="whose memory it is (cuda)")
    group.add_argument(
        "--completion-tokens", metavar="C", help="a GRPO step of TRL: so many of a row's tokens are generated"
    )
    group.add_argument(
        "--generation-rows",
        type=int,
        metavar="ROWS",
        help="of a GRPO step: rows that the ranks of a group generate together, --batch times steps_per_generation "
        "(--batch); 0: they are generated elsewhere",
    )
    group.add_argument("--reference-model", action="store_true", help="a GRPO step has one (beta > 0)")
    group.add_argument("--images", type=int, metavar="COUNT", help="images per row")
    group.add_argument(
        "--image-size", metavar="HEIGHTxWIDTH", help="of each image in pixels; not where a model takes one size only"
    )
    group.add_argument("--no-switches", action="store_true", help="leave out what each switch saves")


def run(args: argparse.Namespace) -> Outcome:
    """Prints the plan. Raises ConfigError, RefusedError."""
    from ringtile.cli.plan import parse_masks
    from ringtile.planner.advice import longest, padded, step_seconds, switches
    from ringtile.planner.step import TrainingStep

    given = [name for name in OF_A_LAYER if getattr(args, name) not in (None, [])]
    if given:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} is of one attention layer; expected it without --model, whose "
            f"configuration says it, with --devices for the ranks"
        )
    if args.mask and args.rates is None:
        raise ConfigError("--mask of a model changes its seconds alone, which need --rates; expected both or neither")
    if args.lora_rank < 0:
        raise ConfigError(f"--lora-rank is {args.lora_rank}; expected a rank, as 16, or 0 for no adapters")
    if args.load_in_4bit and not args.lora_rank:
        raise ConfigError("--load-in-4bit freezes the weights; expected --lora-rank too, of the adapters that train")
    if args.plot:
        check_output(args.plot, "--plot")
        importlib.import_module("ringtile.cli.plan_plot").check_format(args.plot)
    if args.run is not None:
        setup, seq_len = plan_run.setup_of(args)
        name, memory_text = str(args.run), args.memory or plan_run.MEMORY_OF_A_RUN
    else:
        seq_len = parse_tokens(args.seq_len)
        setup = setup_of(args, grpo_of(args, seq_len))
        is_known = os.path.isdir(args.model) or "/" in args.model
        name = args.model if is_known else f"{args.model} (its default configuration)"
        memory_text = args.memory
    memory = None if memory_text is None else parse_bytes(memory_text)
    hosts, rates = hosts_of(args, setup.devices), None if args.rates is None else parse_rates(args.rates)
    mask = parse_masks(args.mask, padded(setup, seq_len)) if args.mask else None
    with _told_as_ours():
        progress("building the model without weights")
        with TrainingStep(setup) as step:
            progress(f"planning a step of {tokens_text(seq_len)} tokens")
            num_parameters, at_peak = step.num_parameters, step.run(seq_len)
            of_images = _tokens_of_images(setup, at_peak)
            if of_images > seq_len:
                raise ConfigError(
                    f"--seq-len is {seq_len}, and --images {setup.images.count} are {of_images} tokens; expected at "
                    f"least as many"
                )
            progress("looking for the longest sequence, and for what each switch saves")
            fits = None if memory is None else longest(step, memory, at_peak)
        found = [] if args.no_switches else switches(setup, seq_len, memory is None or at_peak.total <= memory)
    print(
        f"{name}: {num_parameters / 1e9:.3f} G parameters in {_name_of(setup.dtype)}"
        f"{', linear layers in 4 bits' if setup.load_in_4bit else ''}"
        f"{f', of which adapters of rank {setup.lora_rank} are trained' if setup.lora_rank else ''}"
        f"{', bf16 mixed precision' if setup.bf16 else ''}; {tokens_text(seq_len)} tokens ({seq_len}) x {setup.batch} "
        f"rows; {setup.devices} ranks, {setup.engine}, {setup.ringtile.context_parallel_size} share a sequence"
        f"{f', {setup.expert_parallel_size} share experts' if setup.expert_parallel_size > 1 else ''}"
    )
    if setup.grpo is not None:
        print(
            f"GRPO: {tokens_text(setup.grpo.completion_tokens)} tokens of a row are generated, "
            f"{setup.grpo.generation_rows} rows at once by the ranks that share a sequence, "
            f"{'a' if setup.grpo.has_reference else 'no'} reference model"
        )
    if at_peak.tower is not None:
        print(_tower_text(setup, at_peak.tower))
    print()
    print(_table(at_peak))
    if at_peak.host_bytes:
        print(f"and on the host {bytes_text(at_peak.host_bytes)} of offloaded hidden states")
    if at_peak.optimizer_host_bytes:
        print(f"and on the host {bytes_text(at_peak.optimizer_host_bytes)} of the optimizer's and of gradients")
    report: dict[str, Any] = {"setup": _json_of(setup), "parameters": num_parameters, "seq_len": seq_len}
    report |= {
        "phases": at_peak.phases,
        "parts": at_peak.parts,
        "total": at_peak.total,
        "host_bytes": at_peak.host_bytes,
        "tower": at_peak.tower and dataclasses.asdict(at_peak.tower),
        "optimizer_host_bytes": at_peak.optimizer_host_bytes,
    }
    if memory is not None and fits is not None:
        verdict = "fits" if at_peak.total <= memory else "does NOT fit"
        more = "" if fits.is_planned else ", by a line through shorter ones"
        print(f"\n{bytes_text(at_peak.total)} of {bytes_text(memory)}: {tokens_text(seq_len)} tokens: {verdict}")
        if fits.seq_len >= max(of_images, 1):
            print(f"longest sequence that fits: {fits.seq_len} tokens{more}")
        else:
            part, held = max(at_peak.parts.items(), key=lambda item: item[1])
            shortest = "that holds the images" if of_images else "however short"
            print(f"no sequence fits, {shortest}; the largest part here: {bytes_text(held)} of {part}")
        report |= {"memory": memory, "fits": at_peak.total <= memory, "longest": fits.seq_len}
    if not args.no_switches:
        report["switches"] = [switch._asdict() for switch in found]
        print("\nWith one more switch:" if found else "\nNo switch is left.")
        width = max((28, *(len(switch.key) for switch in found)))
        for switch in found:
            told = f"refused: {switch.refused}"
            if switch.total is not None:
                saved = at_peak.total - switch.total
                told = f"{bytes_text(switch.total)}, {'saves' if saved >= 0 else 'needs'} {bytes_text(abs(saved))}"
                told += "" if saved >= 0 else " more"
            print(f"  {switch.key:{width}} {told}")
    if rates is not None:
        seconds = step_seconds(setup, at_peak, rates, hosts, mask)
        print(
            f"\nA batch takes the busiest rank {seconds.computing:.3g} s of matrix products and attention (the mean "
            f"{seconds.mean:.3g} s), and {seconds.sending:.3g} s of attention's messages, of which "
            f"{seconds.exposed:.3g} s are not hidden: {seconds.together:.3g} s together. Not counted: what the engine "
            f"sends, the optimizer, other kernels."
        )
        names = ("computing", "mean", "sending", "exposed", "together")
        report["seconds"] = {name: getattr(seconds, name) for name in names}
    if args.plot:
        plot_memory = importlib.import_module("ringtile.cli.plan_plot").plot_memory
        bars = at_peak.phases if setup.grpo else {"this plan": at_peak.parts}
        write_output(args.plot, lambda file: plot_memory(file, bars, memory))
    return Outcome(0, report)


@contextlib.contextmanager
def _told_as_ours() -> Iterator[None]:
    """Raise a ConfigError for what the code of a model raises, without the traceback that torch logs before it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        with refusing("model"):
            yield
    finally:
        logger.disabled = before


def grpo_of(args: argparse.Namespace, seq_len: int) -> Any:
    """Return the planner's Grpo, or None without --completion-tokens. ConfigError names the option."""
    from ringtile.planner.grpo import Grpo

    if args.completion_tokens is None:
        for name in ("generation_rows", "reference_model"):
            if getattr(args, name):
                raise ConfigError(
                    f"--{name.replace('_', '-')} is of a GRPO step; expected --completion-tokens too: how many of a "
                    f"row's tokens are generated"
                )
        return None
    completion_tokens = parse_tokens(args.completion_tokens, "--completion-tokens")
    if completion_tokens >= seq_len:
        raise ConfigError(
            f"--completion-tokens is {completion_tokens}, and --seq-len, of a prompt and its completion, {seq_len}; "
            f"expected fewer: at least one token is the prompt's"
        )
    rows = args.batch if args.generation_rows is None else args.generation_rows
    if rows < 0 or rows % max(args.batch, 1):
        raise ConfigError(
            f"--generation-rows is {rows} and --batch {args.batch}; expected a multiple of it, since rows are "
            f"generated for whole batches, or 0, where they are generated elsewhere"
        )
    if args.rates is not None:
        raise ConfigError("--rates gives no seconds of a GRPO step, most of which generate; expected none")
    return Grpo(completion_tokens, rows, args.reference_model)


def setup_of(args: argparse.Namespace, grpo: Any) -> Any:
    """Return the planner's Setup. ConfigError names the option."""
    from ringtile.planner.setup import Setup

    devices = 1 if args.devices is None else args.devices
    if devices < 1:
        raise ConfigError(f"--devices is {devices}; expected at least 1")
    size = devices if args.context_parallel_size is None else args.context_parallel_size
    if size < 1 or devices % size:
        raise ConfigError(f"--context-parallel-size is {size}; expected a number that divides --devices, {devices}")
    experts = args.expert_parallel_size
    if experts < 1 or devices % experts:
        raise ConfigError(f"--expert-parallel-size is {experts}; expected a number that divides --devices, {devices}")
    if args.batch < 1:
        raise ConfigError(f"--batch is {args.batch}; expected at least 1")
    if args.offload_optimizer and not args.engine.startswith("zero"):
        raise ConfigError(
            f"--offload-optimizer is DeepSpeed's, and --engine is {args.engine}; expected zero1, zero2 or zero3"
        )
    if args.activation_offloading and not (args.gradient_checkpointing or args.stream):
        raise ConfigError(
            "--activation-offloading moves only the inputs of checkpointed or streamed layers; set "
            "--gradient-checkpointing or --stream too"
        )
    if not Scheme.parse(args.scheme).is_resolved:
        raise ConfigError(f"--scheme is {args.scheme}, which ranks resolve when they run; expected one by name")
    keys: dict[str, Any] = {"context_parallel_size": size, "layout": args.layout}
    keys |= {"context_parallel_scheme": args.scheme, "tiled_mlp": args.tiled_mlp, "tiled_loss": args.tiled_loss}
    keys |= {name: getattr(args, name) for name in ("tiled_norm", "activation_offloading", "stream")}
    keys |= {} if args.tile_tokens is None else {"tile_tokens": args.tile_tokens}
    images = images_of(args, grpo)
    config = model_config(args.model, images is not None)
    dtype = getattr(config, "dtype", None) or torch.float32
    if args.dtype is not None:
        if args.dtype not in _DTYPES:
            raise ConfigError(f"--dtype is {args.dtype}; expected one of {', '.join(_DTYPES)} for a model")
        dtype = _DTYPES[args.dtype]
    return Setup(
        config,
        devices=devices,
        engine=args.engine,
        expert_parallel_size=experts,
        ringtile=Config(**keys),
        batch=args.batch,
        gradient_checkpointing=args.gradient_checkpointing,
        dtype=dtype,
        bf16=args.bf16,
        on_gpu=args.device != "cpu",
        memory_bytes=parse_bytes(args.memory or plan_run.MEMORY_OF_A_RUN),
        lora_rank=args.lora_rank,
        load_in_4bit=args.load_in_4bit,
        optimizer=args.optimizer,
        offload_optimizer=args.offload_optimizer,
        grpo=grpo,
        images=images,
    )


def images_of(args: argparse.Namespace, grpo: Any) -> Any:
    """Return the planner's ImageRows, or None without --images. ConfigError names the option."""
    from ringtile.planner.images import ImageRows

    if args.images is None:
        if args.image_size is not None:
            raise ConfigError("--image-size is of the images of a row; expected --images too, their number")
        return None
    if args.images < 1:
        raise ConfigError(f"--images is {args.images}; expected at least 1, or none of the option for text alone")
    if grpo is not None:
        raise ConfigError("--images and --completion-tokens are given; expected one: a GRPO step is planned of text")
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})", args.image_size or "1x1")
    if found is None or not all(map(int, found.groups())):
        raise ConfigError(f"--image-size is {args.image_size!r:.40}; expected pixels, HEIGHTxWIDTH: 1024x768")
    return ImageRows(args.images, None if args.image_size is None else (int(found[1]), int(found[2])))


def model_config(name: str, has_images: bool) -> Any:
    """Return the configuration in a folder, or the default one of a type. ConfigError names what is near."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    from ringtile.cli.model_config import check_model_config, pretrained_config, read_config

    types, kind = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "causal language model"
    if has_images:
        types, kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, "model of images and text"
    with refusing("model"):
        if os.path.isdir(name):
            config: Any = read_config(name)
        elif "/" in name:
            config = pretrained_config({"name": name})
        elif name in types or name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            config = CONFIG_MAPPING[name]()
        else:
            near = nearest_key(name, list(types))
            raise ConfigError(f"--model is {name[:MAX_KEY]!r}, which is no folder and no type of {kind}: {near}")
        if config.model_type not in types:
            more = "" if config.model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else ", or --images too"
            raise ConfigError(
                f"--model is of type {config.model_type}; expected a {kind}{more}: "
                f"{PAGES}docs/guide/models.md lists them"
            )
        check_model_config(config)
    return config


def hosts_of(args: argparse.Namespace, num_ranks: int) -> tuple[int, ...]:
    """Return the host of each rank. ConfigError."""
    per_host = num_ranks if args.ranks_per_host is None else args.ranks_per_host
    if per_host < 1:
        raise ConfigError(f"--ranks-per-host is {per_host}; expected at least 1")
    return tuple(rank // per_host for rank in range(num_ranks))


def _tokens_of_images(setup: Any, memory: Any) -> int:
    """Return the tokens of a row's images."""
    return 0 if memory.tower is None else int(setup.images.count * memory.tower.tokens)


def _tower_text(setup: Any, tower: Any) -> str:
    size = "" if setup.images.size is None else " of {} x {} pixels".format(*setup.images.size)
    return (
        f"{setup.images.count} images{size} a row, {tower.tokens} tokens each; a tower of "
        f"{tower.parameters / 1e9:.3f} G parameters: a rank computes {tower.own} of {tower.images} images, "
        f"{tower.flops / 1e12:.3g} TFLOP forward, and sends {bytes_text(tower.sent_bytes)}: features and gradients"
    )


def _table(memory: Any) -> str:
    """Return the table of the parts of a step; of a GRPO step, of each phase."""
    phases, total = memory.phases, memory.total
    names = [name for name in memory.parts if any(parts[name] for parts in phases.values())]
    if len(phases) == 1:
        lines = [f"{'a rank at its peak':20} {'GiB':>10} {'share':>7}"]
        lines += [f"{name:20} {memory.parts[name] / 2**30:10.3f} {memory.parts[name] / total:7.1%}" for name in names]
        return "\n".join([*lines, f"{'together':20} {total / 2**30:10.3f}"])
    lines = [f"{'a rank at its peak':20}" + "".join(f" {phase:>10}" for phase in phases) + " GiB"]
    rows = {name: [parts[name] for parts in phases.values()] for name in names}
    rows["together"] = [sum(parts.values()) for parts in phases.values()]
    lines += [f"{name:20}" + "".join(f" {x / 2**30:10.3f}" for x in numbers) for name, numbers in rows.items()]
    return "\n".join([*lines, f"largest: {memory.phase}, {total / 2**30:.3f} GiB"])


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _json_of(setup: Any) -> dict[str, Any]:
    fields = {field.name: getattr(setup, field.name) for field in dataclasses.fields(setup)}
    fields |= {"model": setup.model.model_type, "dtype": _name_of(setup.dtype)}
    fields |= {name: fields[name] and dataclasses.asdict(fields[name]) for name in ("grpo", "images")}
    return fields | {"ringtile": setup.ringtile.given}
