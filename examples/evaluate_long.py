"""Evaluates a causal language model on one long row that all ranks share, and trains nothing.

    torchrun --standalone --nproc-per-node 8 examples/evaluate_long.py Qwen/Qwen3-0.6B --tokens 1048576 --text book.txt

Prints the loss by position, the loss by length of document for the same row cut into some, and for needles at several
depths how well the row's end recalls them: the log-probability of the answer with the needle and without, and the share
of its tokens that have more than half of the probability, so that greedy decoding finds them. Without a model it takes
the tiny one of tiny_model.py, which recalls nothing.
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Iterator

import ringtile
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer

NEEDLE, QUESTION, ANSWER = "\nThe number of the red door is 48213.\n", "\nThe number of the red door is", " 48213"
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # where the needle is, as a share of the row


def row_of(text: list[int], needle: list[int], end: list[int], num_tokens: int, depth: float) -> torch.Tensor:
    """Return a row (1, num_tokens) of the text, repeated as often as needed, with a needle in it and an end behind."""
    room = num_tokens - len(needle) - len(end)
    filler = (text * (room // len(text) + 1))[:room]
    place = int(room * depth)
    return torch.tensor([[*filler[:place], *needle, *filler[place:], *end]])


def buckets(num_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of positions, each as long as all before it, the first of 256."""
    begin, end = 0, 256
    while begin < num_tokens:
        yield begin, min(end, num_tokens)
        begin, end = end, 2 * end


def main() -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder or a hub name")
    parser.add_argument("--tokens", type=int, default=1024, help="of a row, before the ranks share it")
    parser.add_argument("--text", type=pathlib.Path, default=pathlib.Path(__file__))
    given = parser.parse_args()

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("cp",))
    if given.model:
        dtype = torch.bfloat16 if kind == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(given.model)
    else:
        sys.path.append(str(pathlib.Path(__file__).resolve().parent))
        from tiny_model import tiny_model, tiny_tokenizer

        model, tokenizer = tiny_model(), tiny_tokenizer()
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    model.to(device).eval()
    text, needle, question, answer = (
        tokenizer(part, add_special_tokens=False).input_ids
        for part in (given.text.read_text(), NEEDLE, QUESTION, ANSWER)
    )

    def log_probs(row: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
        with torch.no_grad():
            return ringtile.sequence_log_probs(model, row.to(device), mesh, attention_mask=documents)[0]

    numbers, say = [], print if mesh.get_rank() == 0 else lambda *_: None
    row = row_of(text, [], [], given.tokens, 0.0)
    losses = -log_probs(row)
    for begin, end in buckets(len(losses)):
        numbers.append(float(losses[begin:end].mean()))
        say(f"positions {begin:>8} to {end:>8}: loss {numbers[-1]:.4f}")
    cuts = list(buckets(given.tokens))
    documents = torch.cat([torch.full((1, end - begin), i) for i, (begin, end) in enumerate(cuts, start=1)], dim=1)
    losses = -log_probs(row, documents.to(device))
    for begin, end in cuts:
        numbers.append(float(losses[begin : end - 1].mean()))  # the last token of a document predicts nothing
        say(f"a document of {end - begin:>8} tokens: loss {numbers[-1]:.4f}")
    without = float(log_probs(row_of(text, [], question + answer, given.tokens, 0.0))[-len(answer) :].sum())
    for depth in DEPTHS:
        found = log_probs(row_of(text, needle, question + answer, given.tokens, depth))[-len(answer) :]
        numbers.append(float(found.sum()))
        sure = float((found.exp() > 0.5).float().mean())
        say(f"needle at {depth:4.0%}: log-probability {numbers[-1]:8.3f}, {without:8.3f} without; {sure:4.0%} recalled")
    return numbers


if __name__ == "__main__":
    main()
