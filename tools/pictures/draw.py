"""Draws docs/pictures/*.svg: python tools/pictures/draw.py. A test compares them with what this draws.

SVG as text, without a plotting library, so that every machine draws the same bytes.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

import torch
from ringtile import IntervalMask, Layout
from torch import Tensor

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"
# Distinct for the color-blind; white text is readable on all but DARK_TEXT.
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#774411")
DARK_TEXT = ("#ccbb44", "#66ccee", "#bbbbbb")
# Paper, ink and grays, on white and, where a reader prefers it, on dark; COLORS stay.
ON_DARK = {
    'rect[fill="white"]': "fill: #1e1e1e",
    'rect[fill="#dddddd"]': "fill: #444444",
    'rect[fill="#eef3fa"]': "fill: #26303c",
    'rect[fill="#f4f4f4"]': "fill: #2a2a2a",
    "text": "fill: #dddddd",
    'text[fill="#555555"]': "fill: #aaaaaa",
    'text[fill="white"]': "fill: white",
    'text[fill="black"]': "fill: black",
    '[stroke="black"]': "stroke: #dddddd",
    '[stroke="#555555"]': "stroke: #aaaaaa",
    '[stroke="#cccccc"]': "stroke: #444444",
    '[stroke="#e4e4e4"]': "stroke: #3a3a3a",
}
GIB = 2**30


class Picture:
    """Shapes on paper."""

    def __init__(self, width: int, height: int, title: str) -> None:
        size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">'
        rules = " ".join(f"{where} {{ {look} }}" for where, look in ON_DARK.items())
        style = f"<style>@media (prefers-color-scheme: dark) {{ {rules} }}</style>"
        self.lines = [head, f"<title>{escape(title)}</title>", style]
        self.rect(0, 0, width, height, "white")

    def rect(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "") -> None:
        edge = f' stroke="{stroke}"' if stroke else ""
        self.lines.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{edge}/>')

    def text(self, x: float, y: float, text: str, anchor: str = "start", fill: str = "", size: int = 13) -> None:
        look = f' text-anchor="{anchor}"' * (anchor != "start") + f' fill="{fill}"' * bool(fill)
        look += f' font-size="{size}"' * (size != 13)
        self.lines.append(f'<text x="{x:g}" y="{y:g}"{look}>{escape(text)}</text>')

    def line(self, points: Sequence[tuple[float, float]], stroke: str, width: float = 1, dash: str = "") -> None:
        path = " ".join(f"{x:.4g},{y:.4g}" for x, y in points)
        look = f' stroke-dasharray="{dash}"' * bool(dash)
        self.lines.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}"{look}/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.line([(x, y), (to_x, to_y)], "#555555", 1.5)
        angle = math.atan2(to_y - y, to_x - x)
        tips = [(to_x - 7 * math.cos(angle + turn), to_y - 7 * math.sin(angle + turn)) for turn in (0.4, -0.4)]
        self.line([tips[0], (to_x, to_y), tips[1]], "#555555", 1.5)

    def svg(self) -> str:
        return "\n".join([*self.lines, "</svg>", ""])


def squares(picture: Picture, x: float, y: float, cell: float, fills: Sequence[Sequence[str]]) -> None:
    """Square (row, column) in its color; "" is white. Equal neighbors of a row are one rectangle."""
    for i, row in enumerate(fills):
        begin = 0
        for j in range(1, len(row) + 1):
            if j == len(row) or row[j] != row[begin]:
                if row[begin]:
                    picture.rect(
                        round(x + begin * cell, 1),
                        round(y + i * cell, 1),
                        round((j - begin) * cell, 1),
                        cell,
                        row[begin],
                    )
                begin = j
    size = cell * len(fills)
    places = [round(i * cell, 1) for i in range(len(fills) + 1)]
    path = "".join(f"M{x + at:g} {y:g}v{size:g}M{x:g} {y + at:g}h{size:g}" for at in places)
    picture.lines.append(f'<path d="{path}" stroke="#cccccc" stroke-width="0.5"/>')


def dense(mask: IntervalMask) -> Tensor:
    """Of the first row, which query (row) attends which key (column)."""
    begin, end, *of_keys = (x[0][:, None] for x in mask.tensors)
    numbers = torch.arange(mask.seq_len)
    attends = (begin <= numbers) & (numbers < end)
    if of_keys:
        key_begin, key_end = (x.T for x in of_keys)
        attends &= (key_begin <= numbers[:, None]) & (numbers[:, None] < key_end)
    return attends


def masks() -> str:
    """The masks of docs/guide/masks.md over eight tokens."""
    shown = {
        "causal": IntervalMask.causal(8),
        "full": IntervalMask.full(8),
        "documents [3, 5]": IntervalMask.documents([3, 5]),
        "sliding_window 3": IntervalMask.sliding_window(8, 3),
        "prefix_lm 3": IntervalMask.prefix_lm(8, 3),
        "chunked 3": IntervalMask.chunked(8, 3),
        "padding, 2 documents": IntervalMask.from_padding(torch.tensor([[0, 1, 1, 1, 2, 2, 2, 0]])),
        "documents & window": IntervalMask.documents([3, 5]) & IntervalMask.sliding_window(8, 2),
        "shared_prefix 3, [2, 3]": IntervalMask.shared_prefix(3, [2, 3]),
        "block_diffusion 4, 2": IntervalMask.block_diffusion(4, 2),
        "tree": IntervalMask.tree([-1, 0, 1, 1, 0], [2, 2, 1, 1, 2]),
        "last_keys 2, first 1": IntervalMask.causal(8).last_keys(2, first=1),
    }
    picture = Picture(1020, 400, "Masks: a row is a query, a column a key, and a filled square is attended")
    for n, (name, mask) in enumerate(shown.items()):
        x, y = 20 + n % 6 * 168, 34 + n // 6 * 186
        picture.text(x, y - 8, name)
        squares(picture, x, y, 17, [[COLORS[0] if one else "" for one in row] for row in dense(mask).tolist()])
    picture.text(20, 393, "A row is a query, a column a key; filled: the query attends the key.", fill="#555555")
    return picture.svg()


def layouts() -> str:
    """How layouts deal the rows of a causal mask, and of packed documents, to four ranks."""
    size, ranks, lengths = 32, 4, [20, 4, 8]
    causal, documents = IntervalMask.causal(size), IntervalMask.documents(lengths)
    picture = Picture(900, 540, "Which rank computes which part of the attention")
    for row, (mask, name) in enumerate(((causal, "causal"), (documents, f"documents {lengths}"))):
        picture.text(20, 24 + row * 250, f"{name}: share of the work of each rank", fill="#555555")
        for n, kind in enumerate(("contiguous", "zigzag", "striped", "balanced" if row else "")):
            if not kind:
                continue
            layout = Layout.balanced(mask, ranks, chunk=1) if kind == "balanced" else Layout.named(kind, size, ranks)
            owner = [0] * size
            for rank in range(ranks):
                for position in layout.positions(rank).tolist():
                    owner[position] = rank
            attends = dense(mask)
            fills = [[COLORS[owner[i]] if one else "" for one in line] for i, line in enumerate(attends.tolist())]
            x, y = 20 + n * 220, 54 + row * 250
            picture.text(x, y - 8, kind)
            squares(picture, x, y, 5.6, fills)
            work = [int(attends[[i for i in range(size) if owner[i] == rank]].sum()) for rank in range(ranks)]
            for rank in range(ranks):
                share = f"{work[rank] / sum(work):.0%}"
                picture.rect(x + rank * 45, y + 186, 8, 8, COLORS[rank])
                picture.text(x + rank * 45 + 11, y + 194, share, size=11)
    said = "A row is a query, a column a key. A color is a rank, rank 0 first; below, its share of the work."
    picture.text(20, 532, said, fill="#555555")
    return picture.svg()


def schemes() -> str:
    """Who computes what, and what travels meanwhile, over four ranks, two on each host. Not to scale of any machine."""
    picture = Picture(900, 352, "Schemes as timelines of one rank")
    rows: list[tuple[str, list[tuple[float, float, int, str]], list[tuple[float, float, str]]]] = [
        (
            "ring",
            [(0, 2, 0, "own keys"), (2, 4, 1, "keys of 3"), (4, 6, 2, "keys of 2"), (6, 8, 3, "keys of 1")],
            [(0, 1.6, "keys of 3"), (2, 3.6, "keys of 2"), (4, 5.6, "keys of 1")],
        ),
        ("all_gather", [(2.2, 10.2, 0, "all keys, one kernel call")], [(0, 2.2, "all keys")]),
        (
            "ulysses",
            [(1.8, 9.8, 0, "all tokens, a quarter of the heads")],
            [(0, 1.8, "q, k, v to heads"), (9.8, 10.6, "out back")],
        ),
        (
            "usp:2",
            [(0.8, 4.8, 0, "half of the heads: keys of this host"), (4.8, 8.8, 2, "keys of the other host")],
            [(0, 0.8, "to heads"), (0.8, 3.6, "keys of the other host"), (8.8, 9.2, "")],
        ),
    ]
    for n, (name, computes, sends) in enumerate(rows):
        y = 30 + n * 78
        picture.text(20, y + 20, name)
        for begin, end, color, text in computes:
            picture.rect(110 + begin * 72, y, (end - begin) * 72 - 1, 28, COLORS[color])
            picture.text(
                116 + begin * 72, y + 19, text, fill="black" if COLORS[color] in DARK_TEXT else "white", size=12
            )
        for begin, end, text in sends:
            picture.rect(110 + begin * 72, y + 32, (end - begin) * 72 - 1, 16, "#dddddd")
            picture.text(113 + begin * 72, y + 44, text, size=10)
    said = "Colored: a rank computes. Gray: messages. Time goes right; not to scale (see ringtile plan)."
    picture.text(20, 344, said, fill="#555555")
    return picture.svg()


def mesh() -> str:
    """16 ranks on two hosts, groups of 4."""
    picture = Picture(760, 250, "Two hosts of 8 GPUs, context_parallel_size 4: four groups")
    for host in range(2):
        y = 20 + host * 105
        picture.rect(15, y, 730, 92, "#f4f4f4", "#999999")
        picture.text(25, y + 18, f"host {host}")
        for group in range(2):
            x = 30 + group * 360
            picture.rect(x, y + 26, 340, 58, "white", COLORS[host * 2 + group])
            picture.text(x + 8, y + 42, f"group {host * 2 + group}: one sequence, a ring", size=12)
            for n in range(4):
                picture.rect(x + 8 + n * 82, y + 50, 74, 26, COLORS[host * 2 + group])
                color = "black" if COLORS[host * 2 + group] in DARK_TEXT else "white"
                picture.text(x + 45 + n * 82, y + 68, f"rank {host * 8 + group * 4 + n}", "middle", color, 12)
    said = (
        "Keys travel within a group. Gradients are averaged over all 16 ranks, which share the weights (FSDP2, ZeRO)."
    )
    picture.text(15, 243, said, fill="#555555", size=12)
    return picture.svg()


def first_batch() -> str:
    """What the check of the first batch compares with what. A sketch: no length in it was measured."""
    picture = Picture(900, 300, "The check of the first batch")
    picture.rect(15, 110, 130, 50, "#eef3fa", COLORS[0])
    picture.text(80, 132, "a cut of your", "middle")
    picture.text(80, 149, "first batch", "middle")
    runs = [
        ("one process", "", COLORS[2]),
        ("one process,", "rounded otherwise", COLORS[6]),
        ("all ranks,", "each with its shard", COLORS[0]),
    ]
    for n, (first, second, color) in enumerate(runs):
        y, ink = 25 + n * 85, "black" if color in DARK_TEXT else "white"
        picture.arrow(145, 135, 190, y + 25)
        picture.rect(192, y, 160, 50, color)
        for at, line in enumerate(filter(None, (first, second))):
            picture.text(272, y + (22 if second else 30) + 17 * at, line, "middle", ink)
    picture.text(440, 24, "of each module: rounding (gray), and what the ranks differ by")
    noise, found = (34, 42, 50, 55), (28, 47, 44, 330)
    for n, module in enumerate(("layers.0.self_attn", "layers.0.mlp", "layers.1.self_attn", "layers.1.mlp")):
        y = 42 + n * 46
        picture.text(560, y + 22, module, "end", size=12)
        picture.rect(575, y, noise[n], 12, COLORS[6])
        picture.rect(575, y + 16, min(found[n], 240), 12, COLORS[1] if n == 3 else COLORS[0])
        picture.line([(575 + 2.5 * noise[n], y - 2), (575 + 2.5 * noise[n], y + 32)], "black", 1, "3,3")
    picture.text(
        550,
        263,
        "beyond the limit (dashed: 16 times rounding, not to scale), training stops and names layers.1.mlp",
        "middle",
        size=12,
    )
    said = "Outputs, loss and gradients are compared, before weights change. A sketch: lengths show no measurement."
    picture.text(15, 285, said, fill="#555555", size=11)
    return picture.svg()


def memory() -> str:
    """Planned memory of Qwen3-8B on 8 GPUs: against the length, and by part at 128K."""
    figures = json.loads((pathlib.Path(__file__).parent / "memory.json").read_text())
    picture = Picture(920, 440, "Qwen3-8B on 8 GPUs under FSDP2, planned")
    left, bottom, width, height, low, high = 60, 340, 330, 300, 4.0, 12.0
    lengths = [int(length) for length in next(iter(figures.values()))]
    step = width / (len(lengths) - 1)

    def place(gib: float) -> float:
        return bottom - (min(max(math.log2(gib), low), high) - low) / (high - low) * height

    for power in range(int(low), int(high) + 1):
        picture.line([(left, place(2**power)), (left + width, place(2**power))], "#e4e4e4")
        picture.text(left - 6, place(2**power) + 4, str(2**power), "end", size=11)
    picture.text(left, 24, "GiB of a GPU at its peak, by tokens of a row")
    for n, length in enumerate(lengths):
        label = f"{length >> 10}K" if length < 2**20 else "1M"
        picture.text(left + n * step, bottom + 18, label, "middle", size=11)
    picture.line([(left, place(80)), (left + width, place(80))], "black", 1, "5,4")
    picture.text(left + width, place(80) - 5, "80 GiB", "end", size=11)
    names = ["checkpointing alone", *(f"+ {name}" for name in list(figures)[1:])]
    for n, of_lengths in enumerate(figures.values()):
        totals = [sum(count for part, count in parts.items() if part != "host") / GIB for parts in of_lengths.values()]
        picture.line([(left + i * step, place(total)) for i, total in enumerate(totals)], COLORS[n], 2.5)
        picture.rect(left + n % 2 * 180, 374 + n // 2 * 14 - 9, 10, 10, COLORS[n])
        picture.text(left + n % 2 * 180 + 14, 374 + n // 2 * 14, names[n], size=11)
    elsewhere = "host", "reference", "tower", "kv cache"
    parts = [part for part in next(iter(figures.values()))["131072"] if part not in elsewhere]
    top = max(sum(of["131072"][part] for part in parts) for of in figures.values()) / GIB
    picture.text(480, 24, "By part, 128K tokens (GiB); dashed: 80")
    for n, (name, of_lengths) in enumerate(zip(names, figures.values(), strict=True)):
        y, x = 40 + n * 45, 480.0
        picture.text(480, y + 8, name, size=11)
        for color, part in enumerate(parts):
            share = of_lengths["131072"][part] / GIB / top * 380
            if share >= 0.5:
                picture.rect(round(x, 1), y + 13, round(share, 1), 18, COLORS[color])
            x += share
        limit = round(480 + 80 / top * 380, 1)
        picture.line([(limit, y + 13), (limit, y + 35)], "black", 1, "5,4")
        total = sum(of_lengths["131072"][part] for part in parts) / GIB
        picture.text(max(round(x, 1), limit if abs(x - limit) < 25 else 0) + 5, y + 27, f"{total:.0f}", size=11)
    for color, part in enumerate(parts):
        picture.rect(480 + color % 4 * 108, 366 + color // 4 * 18, 10, 10, COLORS[color])
        picture.text(494 + color % 4 * 108, 375 + color // 4 * 18, part, size=11)
    said = "Planned (keep_attention: false). Each key is added; stream replaces checkpoints, MLP, norm."
    picture.text(60, 434, said, fill="#555555", size=11)
    return picture.svg()


def scale() -> str:
    """Simulated steps of Qwen3-8B, 16K tokens a GPU: seconds, and in what share of them the mean rank computes."""
    figures = json.loads((pathlib.Path(__file__).parent / "scale.json").read_text())["seconds"]
    picture = Picture(900, 420, "Qwen3-8B on 8 to 1,024 GPUs, simulated")
    ranks = [int(count) for count in next(iter(figures.values()))]
    top = max(of["together"] for cases in figures.values() for of in cases.values())
    highest = math.ceil(math.log2(top))
    panels: list[tuple[float, str, Callable[[dict[str, float]], float], list[tuple[float, str]]]] = [
        (
            60,
            "Seconds of a step",
            lambda of: math.log2(of["together"] / 2) / (highest - 1),
            [(power / (highest - 1), str(2 << power)) for power in range(highest)],
        ),
        (
            510,
            "Share of them in which the mean rank computes",
            lambda of: of["mean"] / of["together"],
            [(tenths / 10, f"0.{tenths}" if tenths < 10 else "1") for tenths in range(0, 11, 2)],
        ),
    ]
    for left, title, height, marks in panels:
        picture.text(left, 24, title)
        for at, mark in marks:
            y = round(300 - 250 * at, 1)
            picture.line([(left, y), (left + 350, y)], "#e4e4e4")
            picture.text(left - 6, y + 4, mark, "end", size=11)
        places = {count: round(left + 50 * math.log2(count / 8), 1) for count in ranks}
        for count, x in places.items():
            picture.text(x, 318, f"{count:,}", "middle", size=11)
        for color, cases in enumerate(figures.values()):
            points = [(places[int(count)], round(300 - 250 * height(of), 1)) for count, of in cases.items()]
            picture.line(points, COLORS[color], 2.5)
    for n, name in enumerate(figures):
        x, y = 60 + n % 2 * 450, 346 + n // 2 * 16
        picture.rect(x, y - 9, 10, 10, COLORS[n])
        picture.text(x + 14, y, name, size=11)
    said = "GPUs, 16K tokens each, 8 a host. Simulated: 4e14 flops per second, 2e11 bytes within a host, 2.5e10"
    picture.text(60, 414, f"{said} between.", fill="#555555", size=11)
    return picture.svg()


def speeds() -> str:
    """Bars of the table of an H200 in docs/guide/performance.md: TFLOP/s, of others by the ratio of their time."""
    table = (ROOT / "docs" / "guide" / "performance.md").read_text().split("## Attention on an H200")[1]
    number = r"([\d.]+)"
    pairs = r" \| ".join([f"{number}, {number}"] * 4)
    found = re.findall(rf"^\| (\w+ [\d ]+) \| {pairs} \|$", table, re.MULTILINE)
    height, peak, left, wide = 44, 786, 200, 300
    bottom = 60 + height * len(found)
    picture = Picture(900, bottom + 50, "Attention on an H200: TFLOP/s of three kernels")
    kernels = ("ringtile", "torch's flash attention", "cuDNN")
    for n, kernel in enumerate(kernels):
        picture.rect(left + n * 180, 12, 10, 10, COLORS[n])
        picture.text(left + 14 + n * 180, 21, kernel, size=12)
    for number_of_pass, name in enumerate(("forward", "backward")):
        x = left + number_of_pass * (wide + 50)
        picture.text(x, 46, f"{name}, TFLOP/s", size=12)
        picture.line([(x + wide, 52), (x + wide, bottom)], "#555555", 1, "3,3")
        for n, (case, *numbers) in enumerate(found):
            y, ours = 56 + n * height, float(numbers[number_of_pass])
            if number_of_pass == 0:
                picture.text(15, y + 22, case, size=12)
            for kernel, ratio in enumerate(
                (1.0, float(numbers[4 + number_of_pass]), float(numbers[6 + number_of_pass]))
            ):
                length = round(ours / ratio / peak * wide, 1)
                picture.rect(x, y + kernel * 12, length, 11, COLORS[kernel])
                picture.text(x + length + 4, y + 9 + kernel * 12, f"{ours / ratio:.0f}", size=10)
    said = "bf16, one row. Case: mask, tokens, heads, kv heads, head dim. Dashed: 786, torch's product of two matrices."
    picture.text(15, bottom + 18, said, fill="#555555", size=11)
    picture.text(15, bottom + 34, "One H200, nine minutes on 2026-11-27; raw data not kept.", fill="#555555", size=11)
    return picture.svg()


def step() -> str:
    """One training step of two ranks that share a sequence, from the batch to the engine."""
    picture = Picture(900, 520, "A training step on two ranks")
    for rank in range(2):
        picture.text(90 + rank * 470, 24, f"rank {rank}")
    stages: list[tuple[str, str]] = [
        ("batch (B, S): the same on both ranks, checksums compared", "#eef3fa"),
        ("labels shifted, positions and mask made; sharded: (B, N)", COLORS[0]),
        ("embeddings, norms, projections of local tokens", COLORS[2]),
        ("ring attention: local queries, one block of keys after the other", COLORS[5]),
        ("tiled MLP: one tile of local tokens at a time", COLORS[2]),
        ("tiled loss: sum over local targets / targets of all ranks", COLORS[2]),
        ("backward: the same rounds; dk, dv go back to their owner", COLORS[5]),
    ]
    for n, (text, color) in enumerate(stages):
        y = 36 + n * 58
        for rank in range(2):
            x = 15 + rank * 470
            picture.rect(x, y, 400, 34, color, COLORS[0])
            picture.text(x + 200, y + 21, text, "middle", "" if n == 0 else "white", 11)
            if n + 1 < len(stages):
                picture.arrow(x + 200, y + 34, x + 200, y + 57)
        if color == COLORS[5]:
            picture.arrow(417, y + 12, 483, y + 12)
            picture.arrow(483, y + 24, 417, y + 24)
            picture.text(450, y - 4, "k, v" if n == 3 else "k, v, dk, dv", "middle", size=11)
    picture.rect(15, 446, 870, 34, "#444444")
    said = "engine (DDP, FSDP2, ZeRO): averages the gradients of the weights over all ranks; the step of one process"
    picture.text(450, 467, said, "middle", "white", 12)
    for rank in range(2):
        picture.arrow(215 + rank * 470, 418, 215 + rank * 470, 445)
    said = "Blue: once per batch. Green: nothing travels. Purple: keys, values and gradients travel meanwhile."
    picture.text(15, 508, said, fill="#555555", size=12)
    return picture.svg()


def layer() -> str:
    """Draw where the time of one layer on two ranks goes, as time_layer.py measured it."""
    ranks = json.loads((pathlib.Path(__file__).parent / "layer.json").read_text())
    picture = Picture(900, 250, "One layer on two ranks, measured: computation, messages and waits")
    passes = [max(end for spans in ranks for _, of, _, end in spans if of == turn) for turn in (False, True)]
    left, gap = 70, 30
    scale = (900 - left - gap - 15) / sum(passes)
    starts = (left, left + passes[0] * scale + gap)
    for turn, name in enumerate(("forward", "backward")):
        picture.text(starts[turn], 20, f"{name}, {passes[turn]:.1f} s", size=12)

    def bar(turn: bool, y: float, begin: float, end: float, height: float, color: str) -> None:
        width = max(round((end - begin) * scale, 1), 0.5)
        picture.rect(round(starts[turn] + begin * scale, 1), y, width, height, color)

    for rank, spans in enumerate(ranks):
        y, blocks = 32 + rank * 88, 0
        picture.text(15, y + 21, f"rank {rank}")
        picture.text(15, y + 48, "messages", size=10)
        for name, turn, begin, end in spans:
            if name in ("forward", "backward"):  # first: the others lie on it
                bar(turn, y, begin, end, 32, COLORS[2])
        for name, turn, begin, end in spans:
            if name == "keys":
                bar(turn, y, begin, end, 32, COLORS[0] if blocks % 2 == 0 else COLORS[5])
                blocks += 1
            elif name.startswith("wait"):
                bar(turn, y, begin, end, 32, COLORS[1])
            elif name.startswith("message"):
                bar(turn, y + 36, begin, end, 14, "#dddddd")
    parts = [(2, "norms, projections, MLP"), (0, "attention: own keys"), (5, "the other rank's keys"), (1, "waits")]
    for n, (color, name) in enumerate(parts):
        picture.rect(left + n * 195, 207, 10, 10, COLORS[color])
        picture.text(left + 14 + n * 195, 216, name, size=12)
    said = "8,192 causal tokens, hidden size 1,024, float32, one core a rank, 250 Mbit/s between them; a busy machine."
    picture.text(left, 239, said, fill="#555555", size=11)
    return picture.svg()


def loss() -> str:
    """Losses of packed rows in three ways (train_packed.py), each point the mean of a pass over the four rows."""
    losses = json.loads((pathlib.Path(__file__).parent / "loss.json").read_text())
    passes = {name: [sum(steps[n : n + 4]) / 4 for n in range(0, len(steps), 4)] for name, steps in losses.items()}
    one, *others = passes.values()
    picture = Picture(760, 432, "Training on packed rows: one process, ringtile on two ranks, accelerate's cp_size 2")
    left, width = 70, 660
    places = [left + n * width / (len(one) - 1) for n in range(len(one))]
    looks = ((COLORS[4], 6), (COLORS[0], 1.5), (COLORS[1], 2.5))

    def place(value: float) -> float:
        return 230 - value / 5 * 190

    picture.text(15, 20, "loss")
    for n, (name, (color, _)) in enumerate(zip(passes, looks, strict=True)):
        picture.rect(left + n * 220, 11, 10, 10, color)
        picture.text(left + 14 + n * 220, 20, name, size=12)
    for value in range(6):
        picture.line([(left, place(value)), (left + width, place(value))], "#e4e4e4")
        picture.text(left - 8, place(value) + 4, str(value), "end", size=11)
    for curve, (color, wide) in zip(passes.values(), looks, strict=True):
        picture.line([*zip(places, map(place, curve), strict=True)], color, wide)
    picture.text(15, 262, "relative difference to one process")

    def below(difference: float) -> float:
        return 370 - (math.log10(max(difference, 1e-8)) + 8) / 9 * 90

    for power in (-8, -6, -4, -2, 0):
        picture.line([(left, below(10**power)), (left + width, below(10**power))], "#e4e4e4")
        picture.text(left - 8, below(10**power) + 4, f"1e{power}" if power else "1", "end", size=11)
    for curve, (color, _) in zip(others, looks[1:], strict=True):
        differences = [abs(a - b) / b for a, b in zip(curve, one, strict=True)]
        picture.line([*zip(places, map(below, differences), strict=True)], color, 2)
    for step in (4, 52, 100, 152, 200):
        picture.text(places[step // 4 - 1], 388, f"step {step}", "middle" if step < 200 else "end", size=11)
    said = "Each point is the mean of four steps, a pass over the rows of the gauntlet's case packed. Rounding grows"
    picture.text(15, 408, said, fill="#555555", size=11)
    said = "with the steps; the difference of documents that attend each other is there from the first step on."
    picture.text(15, 424, said, fill="#555555", size=11)
    return picture.svg()


PICTURES: dict[str, Callable[[], str]] = {
    one.__name__: one for one in (masks, layouts, schemes, mesh, step, first_batch, memory, scale, speeds, loss, layer)
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="ascii")
