"""`ringtile plan`: one attention layer (which keys travel, bytes, flops, what each scheme would take), or a model.

Runs nothing. A model's plan is in plan_model.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import itertools
import operator
import pathlib
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import torch

from ringtile.cli import SET, Outcome, plan_model
from ringtile.cli.output import check_output, table, write_output
from ringtile.errors import ConfigError, RingtileError
from ringtile.hf.config import Config
from ringtile.planner.layer import pairs_of, plan_attention, plan_of, shortened
from ringtile.planner.recurrent_layer import KINDS, scheme_costs
from ringtile.planner.recurrent_layer import table as recurrent_table
from ringtile.planner.simulate import simulate
from ringtile.planner.sizes import Rates, parse_rates, parse_tokens
from ringtile.scheme import EXPECTED, Scheme, usp_of_hosts
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.plan import Counts, cheapest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
LAYOUTS = get_args(get_type_hints(Config)["layout"])

USAGE = """ringtile plan RUN.yaml [--set KEY=VALUE] [--devices N] [--memory BYTES] ...
       ringtile plan --model FOLDER|NAME|TYPE --seq-len S [options of a model's training]
       ringtile plan --seq-len S --world-size W --num-heads H --head-dim D [options of one layer]"""
_SECONDS = ("computing", "sending", "exposed", "together")

# --mask NAME or NAME:NUMBERS -> a mask of seq_len tokens.
MASKS: dict[str, Callable[[int, list[int]], IntervalMask]] = {
    "causal": lambda seq_len, none: IntervalMask.causal(seq_len, *none),
    "full": lambda seq_len, none: IntervalMask.full(seq_len, *none),
    "documents": lambda seq_len, lengths: IntervalMask.documents(lengths),
    "packed": lambda seq_len, lengths: IntervalMask.documents(filled(lengths, seq_len)),
    "window": lambda seq_len, window: IntervalMask.sliding_window(seq_len, *window),
    "prefix": lambda seq_len, prefix: IntervalMask.prefix_lm(seq_len, *prefix),
    "chunked": lambda seq_len, chunk: IntervalMask.chunked(seq_len, *chunk),
    "shared_prefix": lambda seq_len, lengths: IntervalMask.tree([-1, *[0] * (len(lengths) - 1)], lengths),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", metavar="RUN.yaml", type=pathlib.Path, help="a training, as `ringtile train` reads it"
    )
    parser.usage = USAGE
    parser.add_argument("--set", **SET)
    parser.add_argument(
        "--seq-len", metavar="S", help="tokens of a row: 4096, 32K or 1M (1K is 1024); RUN.yaml has its own"
    )
    plan_model.add_arguments(parser)
    parser.add_argument("--world-size", type=int, metavar="W", help="of one layer: ranks that share the sequence")
    parser.add_argument("--layout", choices=LAYOUTS, default="auto", help="which tokens a rank holds (auto)")
    parser.add_argument(
        "--mask",
        action="append",
        metavar="MASK",
        help="causal (the default), full, documents:LENGTH,LENGTH,..., packed:LENGTH,LENGTH,... (again and again until "
        "they fill the sequence), window:TOKENS, prefix:TOKENS, chunked:TOKENS, shared_prefix:PROMPT,COMPLETION,...; "
        "given again: the intersection; of a model: for its seconds, beside those of its layers",
    )
    parser.add_argument("--num-heads", type=int, metavar="H", help="of one layer: query heads")
    parser.add_argument("--num-kv-heads", type=int, metavar="G", help="key and value heads (H)")
    parser.add_argument("--head-dim", type=int, metavar="D", help="of one layer: size of a query and key head")
    parser.add_argument("--v-head-dim", type=int, metavar="DV", help="size of a value head (D)")
    parser.add_argument("--dtype", choices=DTYPES, help="of queries, keys and values (bfloat16); of a model (its own)")
    parser.add_argument("--scheme", default="ring", metavar="SCHEME", help=f"{EXPECTED} (ring)")
    parser.add_argument(
        "--recurrent",
        action="append",
        default=[],
        metavar="LAYER",
        help="also a recurrent layer, in each of its schemes: gated_delta, kda or ssd:HEADS,HEADS OF Q AND K (B AND "
        "C),KEY DIM,VALUE DIM, selective:CHANNELS,STATE DIM, or conv:CHANNELS,WIDTH; given again: another one",
    )
    parser.add_argument("--ranks-per-host", type=int, metavar="COUNT", help="neighboring ranks that share a host (W)")
    parser.add_argument(
        "--rates",
        metavar="FLOPS,WITHIN[,BETWEEN]",
        help="flops per second of a device, bytes per second of a rank within a host and between hosts: for seconds",
    )
    parser.add_argument("--plot", metavar="FILE", type=pathlib.Path, help="draw work and messages, or parts of memory")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences in a batch (1)")


def run(args: argparse.Namespace) -> Outcome:
    """Prints the tables of the plan and of all schemes; with RUN.yaml or --model, those of a training."""
    if args.set and args.run is None:
        raise ConfigError("--set changes a key of a file; expected it too: ringtile plan RUN.yaml --set KEY=VALUE")
    if args.run is None and args.seq_len is None:
        raise ConfigError(
            "--seq-len is missing; expected tokens, as 128K, or the file of a run: ringtile plan RUN.yaml"
        )
    if args.model is not None or args.run is not None:
        return plan_model.run(args)
    _check_layer(args)
    args.seq_len, args.dtype = parse_tokens(args.seq_len), args.dtype or "bfloat16"
    mask = parse_masks(args.mask or ["causal"], args.seq_len)
    layout = Layout.of_mask(args.layout, mask, args.world_size)
    if args.plot:
        check_output(args.plot, "--plot")
        importlib.import_module("ringtile.cli.plan_plot").check_format(args.plot)
    layers = [parse_layer(text) for text in args.recurrent]
    hosts = plan_model.hosts_of(args, args.world_size)
    rates = None if args.rates is None else parse_rates(args.rates)
    scheme = args.scheme
    if scheme == "usp":
        scheme = usp_of_hosts(hosts)
    plan = plan_attention(
        mask,
        layout,
        num_heads=args.num_heads,
        num_kv_heads=args.num_heads if args.num_kv_heads is None else args.num_kv_heads,
        head_dim=args.head_dim,
        v_head_dim=args.v_head_dim,
        dtype=DTYPES[args.dtype],
        batch=args.batch,
        scheme="ring" if scheme == "auto" else scheme,
    )
    shape = plan.shape
    if scheme == "auto":
        scheme = cheapest(mask, layout, shape, hosts)
        plan = plan_of(mask, layout, shape, scheme)
    print(f"One attention layer (for a whole model: --model, or the file of a run):\n\n{plan}")
    print("\nThis layer, forward and backward, by scheme:")
    names = dict.fromkeys([*_candidates(args.world_size), scheme])
    schemes = [_facts(Counts(mask, layout, shape, Scheme.parse(name)), hosts, rates) for name in names]
    print(_table(schemes, scheme))
    if rates is not None:
        rounds = next(facts["rounds"] for facts in schemes if facts["scheme"] == scheme)
        lines = [(str(i), *(f"{ms * 1e3:.3f}" for ms in each.values())) for i, each in enumerate(rounds)]
        header = ("round", "ms computing", "mean", "ms sending", "ms waiting for keys")
        print(table(f"\nRounds of {scheme}, forward and backward:", shortened(lines), header, right=True).rstrip())
    costs = [cost for layer in layers for cost in scheme_costs(*layer, mask, layout, shape.dtype, args.batch)]
    if costs:
        print(f"\nRecurrent layers, by scheme:\n{recurrent_table(costs)}")
    if args.plot:
        plot_plan = importlib.import_module("ringtile.cli.plan_plot").plot_plan
        sent = sum(plan.sent_bytes)
        write_output(args.plot, lambda file: plot_plan(file, plan, sent))
    totals = ("forward_bytes", "backward_bytes", "forward_flops", "backward_flops", "imbalance")
    numbers: dict[str, Any] = {name: getattr(plan, name) for name in totals}
    recurrent = [cost._asdict() for cost in costs]
    numbers |= {"seq_len": plan.seq_len, "scheme": plan.scheme, "ranks": [*map(dataclasses.asdict, plan.ranks)]}
    return Outcome(0, numbers | {"schemes": schemes, "recurrent": recurrent})


def _check_layer(args: argparse.Namespace) -> None:
    """ConfigError: sizes of the layer are missing, or options of a model are given."""
    needed = ("world_size", "num_heads", "head_dim")
    if any(getattr(args, name) is None for name in needed):
        raise ConfigError(
            "neither a model nor a layer is given; expected --model FOLDER|TYPE for a whole training, or --world-size, "
            "--num-heads and --head-dim for one attention layer"
        )
    parser = argparse.ArgumentParser()
    plan_model.add_arguments(parser)
    for action in parser._actions[1:]:
        if getattr(args, action.dest) != action.default:
            raise ConfigError(f"{action.option_strings[0]} is of a model's training; expected --model FOLDER|TYPE too")


def parse_layer(text: str) -> tuple[str, list[int]]:
    """Return a recurrent layer from KIND:NUMBER,NUMBER,...; ConfigError for text without such numbers."""
    kind, _, numbers = text.partition(":")
    try:
        return kind, [int(number) for number in numbers.split(",") if number]
    except ValueError:
        raise ConfigError(
            f"--recurrent is {text!r}; expected {', '.join(KINDS)} and numbers, as in gated_delta:32,16,128,128"
        ) from None


def _candidates(world_size: int) -> list[str]:
    """Return the schemes to compare."""
    sizes = [size for size in range(2, world_size) if world_size % size == 0]
    return ["ring", "all_gather", *(f"usp:{size}" for size in sizes), "ulysses"]


def _facts(counts: Counts, hosts: tuple[int, ...], rates: Rates | None) -> dict[str, Any]:
    forward, backward = counts.sent_bytes()
    sent, host, pairs = forward + backward, torch.tensor(hosts), pairs_of(counts)
    between = int(sent[host[:, None] != host].sum())
    facts: dict[str, Any] = {
        "scheme": counts.scheme.text,
        "bytes_within": int(sent.sum()) - between,
        "bytes_between": between,
        "imbalance": int(pairs.max()) * len(pairs) / max(int(pairs.sum()), 1) or 1.0,
    }
    if rates is None:
        return facts
    seconds = simulate(counts, rates, hosts)
    facts |= {f"{name}_s": getattr(seconds, name) for name in _SECONDS}
    return facts | {"rounds": [each._asdict() for each in seconds.rounds]}


def _table(schemes: list[dict[str, Any]], chosen: str) -> str:
    header = ["", "scheme", "MB within hosts", "MB between", "busiest / mean"]
    rows = [
        [
            "*" if facts["scheme"] == chosen else "",
            facts["scheme"],
            f"{facts['bytes_within'] / 1e6:.3f}",
            f"{facts['bytes_between'] / 1e6:.3f}",
            f"{facts['imbalance']:.2f}",
            *(f"{facts[f'{name}_s'] * 1e3:.3f}" for name in _SECONDS if "rounds" in facts),
        ]
        for facts in schemes
    ]
    rows.insert(0, [*header, *(f"ms {name}" for name in _SECONDS)][: len(rows[0])])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def filled(lengths: list[int], seq_len: int) -> list[int]:
    """Return the lengths again and again until they add up to seq_len, the last one cut. ValueError: they never do."""
    if min(lengths) < 1:
        raise ValueError
    times, rest = divmod(seq_len, sum(lengths))
    ends = [min(end, rest) for end in itertools.accumulate(lengths, initial=0)]
    return lengths * times + [end - begin for begin, end in itertools.pairwise(ends) if end > begin]


def parse_masks(texts: list[str], seq_len: int) -> IntervalMask:
    """Return the intersection of masks. ConfigError: they are of another length; as `parse_mask`."""
    mask = functools.reduce(operator.and_, [parse_mask(text, seq_len) for text in texts])
    if mask.seq_len != seq_len:
        raise ConfigError(f"--mask is of {mask.seq_len} tokens, and the sequence has {seq_len}; expected as many")
    return mask


def parse_mask(text: str, seq_len: int) -> IntervalMask:
    """Return a mask from NAME or NAME:NUMBER,NUMBER,.... ConfigError: any other text. MaskNotExpressibleError,
    InputError."""
    name, _, numbers = text.partition(":")
    try:
        return MASKS[name](seq_len, [int(number) for number in numbers.split(",") if number])
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, RingtileError):
            raise
        raise ConfigError(
            f"--mask is {text!r}; expected causal, full, documents:LENGTH,LENGTH,..., packed:LENGTH,LENGTH,..., "
            "window:TOKENS, prefix:TOKENS, chunked:TOKENS or shared_prefix:PROMPT,COMPLETION,..."
        ) from error
