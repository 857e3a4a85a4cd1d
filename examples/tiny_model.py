"""A tiny Llama with random weights, and a tokenizer whose tokens are bytes: something to train without a download.

`python ../tiny_model.py` writes both into the folder tiny here, and examples to train on into data.jsonl.
"""

import json
import pathlib

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed


def tiny_tokenizer():
    characters = {character: i for i, character in enumerate(["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(characters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def tiny_model():
    set_seed(0)  # the same weights on every rank
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=257, **sizes))


if __name__ == "__main__":
    folder = pathlib.Path.cwd()
    tiny_model().save_pretrained(folder / "tiny")
    tiny_tokenizer().save_pretrained(folder / "tiny")
    rows = [{"instruction": f"What is {i} + {i}?", "input": "", "output": str(i + i)} for i in range(200)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
