"""`ringtile plan`: one attention layer (which keys travel, bytes, flops, what each scheme would take), or a model.

Runs nothing. A model's plan is in plan_model.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import operator
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ringtile.cli import Outcome, plan_model
from ringtile.cli.output import check_output, write_output
from ringtile.errors import ConfigError, RingtileError
from ringtile.planner.sizes import parse_tokens
from ringtile.recurrent.plan import KINDS, scheme_costs
from ringtile.recurrent.plan import table as recurrent_table
from ringtile.scheme import EXPECTED, Scheme
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.plan import Plan
from ringtile.sequence.plan import plan as make_plan
from ringtile.sequence.price import Price, Prices, Shape, candidates, usp_of_hosts
from ringtile.transport.rates import ASSUMED, cache_path, known_rates

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
LAYOUTS = ("contiguous", "zigzag", "striped")

# --mask NAME or NAME:NUMBERS -> a mask of seq_len tokens.
MASKS: dict[str, Callable[[int, list[int]], IntervalMask]] = {
    "causal": lambda seq_len, none: IntervalMask.causal(seq_len, *none),
    "full": lambda seq_len, none: IntervalMask.full(seq_len, *none),
    "documents": lambda seq_len, lengths: IntervalMask.documents(lengths),
    "window": lambda seq_len, window: IntervalMask.sliding_window(seq_len, *window),
    "prefix": lambda seq_len, prefix: IntervalMask.prefix_lm(seq_len, *prefix),
    "chunked": lambda seq_len, chunk: IntervalMask.chunked(seq_len, *chunk),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seq-len", required=True, metavar="S", help="tokens: 4096, 32K or 1M (binary: 1K is 1024)")
    plan_model.add_arguments(parser)
    parser.add_argument("--world-size", type=int, metavar="W", help="of one layer: ranks that share the sequence")
    parser.add_argument("--layout", choices=LAYOUTS, default="zigzag", help="which tokens a rank holds (zigzag)")
    parser.add_argument(
        "--mask",
        action="append",
        metavar="MASK",
        help="causal (the default), full, documents:LENGTH,LENGTH,..., window:TOKENS, prefix:TOKENS, chunked:TOKENS; "
        "given again: the intersection",
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
    parser.add_argument("--ranks-per-host", type=int, metavar="COUNT", help="neighbouring ranks that share a host (W)")
    parser.add_argument("--device", choices=tuple(ASSUMED), help="whose rates count (cuda if there is one, else cpu)")
    parser.add_argument("--rates", metavar="FILE", help="as `ringtile bench transport` writes (that of this machine)")
    parser.add_argument("--plot", metavar="FILE", type=pathlib.Path, help="draw the scheme's messages and kernels")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences in a batch (1)")


def run(args: argparse.Namespace) -> Outcome:
    """Prints the tables of the plan and of all schemes; with --model, those of a training."""
    if args.model is not None:
        return plan_model.run(args)
    _check_layer(args)
    args.seq_len, args.dtype = parse_tokens(args.seq_len), args.dtype or "bfloat16"
    masks = [parse_mask(text, args.seq_len) for text in args.mask or ["causal"]]
    mask, layout = functools.reduce(operator.and_, masks), Layout.named(args.layout, args.seq_len, args.world_size)
    if args.plot:
        check_output(args.plot, "--plot")
    layers = [parse_layer(text) for text in args.recurrent]
    prices, said = _prices(args, mask, layout)
    shape = Shape(
        args.batch,
        args.num_heads,
        args.num_heads if args.num_kv_heads is None else args.num_kv_heads,
        args.head_dim,
        args.head_dim if args.v_head_dim is None else args.v_head_dim,
        DTYPES[args.dtype],
    )

    def plan_of(scheme: str) -> Plan:
        return make_plan(
            mask,
            layout,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            v_head_dim=shape.v_head_dim,
            dtype=shape.dtype,
            batch=shape.batch,
            scheme=scheme,
        )

    scheme = args.scheme
    plan = plan_of("ring" if Scheme.parse(scheme).is_open else scheme)
    if Scheme.parse(scheme).is_open:
        scheme = usp_of_hosts(prices.hosts) if scheme == "usp" else prices.cheapest(shape, whole=False)
        plan = plan_of(scheme)
    print(f"One attention layer, of no model (a whole training: --model):\n\n{plan}")
    print(f"\nThis layer, forward and backward, by scheme; {said}:")
    names = dict.fromkeys([*candidates(args.world_size, args.num_heads), scheme])
    schemes = [_facts(prices.of(name, shape), prices.hosts) for name in names]
    print(_table(schemes, scheme))
    costs = [cost for layer in layers for cost in scheme_costs(*layer, mask, layout, shape.dtype, args.batch)]
    if costs:
        print(f"\nRecurrent layers, by scheme:\n{recurrent_table(costs)}")
    if args.plot:
        plot_plan = importlib.import_module("ringtile.cli.plan_plot").plot_plan
        price = prices.of(scheme, shape, events=True)
        write_output(args.plot, lambda file: plot_plan(file, price))
    totals = ("forward_bytes", "backward_bytes", "forward_flops", "backward_flops", "imbalance")
    numbers = {name: getattr(plan, name) for name in totals}
    recurrent = [cost._asdict() for cost in costs]
    return Outcome(0, dataclasses.asdict(plan) | numbers | {"schemes": schemes, "recurrent": recurrent})


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
    """A recurrent layer from KIND:NUMBER,NUMBER,...; ConfigError for text without such numbers."""
    kind, _, numbers = text.partition(":")
    try:
        return kind, [int(number) for number in numbers.split(",") if number]
    except ValueError:
        raise ConfigError(
            f"--recurrent is {text!r}; expected {', '.join(KINDS)} and numbers, as in gated_delta:32,16,128,128"
        ) from None


def _prices(args: argparse.Namespace, mask: IntervalMask, layout: Layout) -> tuple[Prices, str]:
    """And where their rates come from."""
    per_host = args.world_size if args.ranks_per_host is None else args.ranks_per_host
    if per_host < 1:
        raise ConfigError(f"--ranks-per-host is {per_host}; expected at least 1")
    hosts = tuple(rank // per_host for rank in range(args.world_size))
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rates = known_rates(device, args.rates, len(set(hosts)))
    path = args.rates or (cache_path(device) if cache_path(device).exists() else "no file")
    said = f"{per_host} ranks a host, rates of {path}"
    return Prices(mask, layout, hosts, rates), "; ".join([said, *(str(each.message) for each in caught)])


def _facts(price: Price, hosts: tuple[int, ...]) -> dict[str, Any]:
    of = torch.tensor(hosts)
    between = int(price.num_bytes[of[:, None] != of].sum())
    return {
        "scheme": price.scheme,
        "bytes_within": int(price.num_bytes.sum()) - between,
        "bytes_between": between,
        "steps": price.num_steps,
        "imbalance": price.imbalance,
        "memory_bytes": price.memory,
        "seconds": price.seconds,
    }


def _table(schemes: list[dict[str, Any]], chosen: str) -> str:
    header = ("", "scheme", "MB within hosts", "MB between", "steps", "busiest / mean", "MB held", "ms predicted")
    rows = [
        (
            "*" if facts["scheme"] == chosen else "",
            facts["scheme"],
            f"{facts['bytes_within'] / 1e6:.3f}",
            f"{facts['bytes_between'] / 1e6:.3f}",
            str(facts["steps"]),
            f"{facts['imbalance']:.2f}",
            f"{facts['memory_bytes'] / 1e6:.3f}",
            f"{facts['seconds'] * 1e3:.3f}",
        )
        for facts in schemes
    ]
    rows.insert(0, header)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def parse_mask(text: str, seq_len: int) -> IntervalMask:
    """A mask from NAME or NAME:NUMBER,NUMBER,...; ConfigError for any other text, MaskNotExpressible, InputError."""
    name, _, numbers = text.partition(":")
    try:
        return MASKS[name](seq_len, [int(number) for number in numbers.split(",") if number])
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, RingtileError):
            raise
        raise ConfigError(
            f"--mask is {text!r}; expected causal, full, documents:LENGTH,LENGTH,..., window:TOKENS, prefix:TOKENS "
            "or chunked:TOKENS"
        ) from error
