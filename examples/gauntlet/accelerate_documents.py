"""The hooks that accelerate attaches to a model with cp_size let packed documents attend each other. One process.

A change of the first document must leave the second as it is. accelerate 1.15, transformers 5.17, torch 2.13.
"""

import torch
from accelerate.big_modeling import _attach_context_parallel_hooks
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 96}
model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
positions = torch.cat([torch.arange(8), torch.arange(8)])[None]  # two documents of 8 tokens
ids = torch.randint(96, (1, 16))
other = ids.clone()
other[0, 0] = (ids[0, 0] + 1) % 96


def changed() -> int:
    logits = [model(input_ids=x, position_ids=positions, use_cache=False).logits for x in (ids, other)]
    return int((logits[0] != logits[1]).any(-1)[0, 8:].sum())


with torch.no_grad():
    print(f"without the hooks: {changed()} of 8 tokens of the second document change")
    _attach_context_parallel_hooks(model)
    print(f"with the hooks: {changed()}; 0 must")
