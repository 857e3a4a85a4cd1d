"""`ringtile plan`: shows which keys travel between ranks, the bytes and the flops, without running it."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import operator
from collections.abc import Callable

import torch

from ringtile.cli import Outcome
from ringtile.errors import ConfigError, RingtileError
from ringtile.recurrent.plan import KINDS, scheme_costs, table
from ringtile.scheme import EXPECTED
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.plan import plan as make_plan

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
    parser.add_argument("--seq-len", type=int, required=True, metavar="S", help="tokens in the global sequence")
    parser.add_argument("--world-size", type=int, required=True, metavar="W", help="ranks that share the sequence")
    parser.add_argument("--layout", choices=LAYOUTS, default="zigzag", help="which tokens a rank holds (zigzag)")
    parser.add_argument(
        "--mask",
        action="append",
        metavar="MASK",
        help="causal (the default), full, documents:LENGTH,LENGTH,..., window:TOKENS, prefix:TOKENS, chunked:TOKENS; "
        "given again: the intersection",
    )
    parser.add_argument("--num-heads", type=int, required=True, metavar="H", help="query heads")
    parser.add_argument("--num-kv-heads", type=int, metavar="G", help="key and value heads (H)")
    parser.add_argument("--head-dim", type=int, required=True, metavar="D", help="size of a query and key head")
    parser.add_argument("--v-head-dim", type=int, metavar="DV", help="size of a value head (D)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of queries, keys and values (bfloat16)")
    parser.add_argument("--scheme", default="ring", metavar="SCHEME", help=f"{EXPECTED} (ring)")
    parser.add_argument(
        "--recurrent",
        action="append",
        default=[],
        metavar="LAYER",
        help="also a recurrent layer, in each of its schemes: gated_delta, kda or ssd:HEADS,HEADS OF Q AND K (B AND "
        "C),KEY DIM,VALUE DIM, or conv:CHANNELS,WIDTH; given again: another one",
    )
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences in a batch (1)")


def run(args: argparse.Namespace) -> Outcome:
    """Prints the table of the plan."""
    masks = [parse_mask(text, args.seq_len) for text in args.mask or ["causal"]]
    mask = functools.reduce(operator.and_, masks)
    layout, dtype = Layout.named(args.layout, args.seq_len, args.world_size), DTYPES[args.dtype]
    plan = make_plan(
        mask,
        layout,
        num_heads=args.num_heads,
        num_kv_heads=args.num_heads if args.num_kv_heads is None else args.num_kv_heads,
        head_dim=args.head_dim,
        v_head_dim=args.v_head_dim,
        dtype=dtype,
        batch=args.batch,
        scheme=args.scheme,
    )
    layers = [parse_layer(text) for text in args.recurrent]
    costs = [cost for layer in layers for cost in scheme_costs(*layer, mask, layout, dtype, args.batch)]
    print(plan)
    if costs:
        print(table(costs))
    recurrent = {"recurrent": [cost._asdict() for cost in costs]}
    totals = ("forward_bytes", "backward_bytes", "forward_flops", "backward_flops", "imbalance")
    return Outcome(0, dataclasses.asdict(plan) | {name: getattr(plan, name) for name in totals} | recurrent)


def parse_layer(text: str) -> tuple[str, list[int]]:
    """A recurrent layer from KIND:NUMBER,NUMBER,...; ConfigError for text without such numbers."""
    kind, _, numbers = text.partition(":")
    try:
        return kind, [int(number) for number in numbers.split(",") if number]
    except ValueError:
        raise ConfigError(
            f"--recurrent is {text!r}; expected {', '.join(KINDS)} and numbers, as in gated_delta:32,16,128,128"
        ) from None


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
