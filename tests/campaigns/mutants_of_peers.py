"""Bugs that other stacks had in public, put into ringtile: a test must catch each, and the gauntlet too.

`python tests/campaigns/mutants_of_peers.py` writes their table into README.md.
"""

from __future__ import annotations

from pathlib import Path

from mutant import Mutant

PAGE = Path(__file__).with_name("README.md")
BEGIN = "<!-- begin: python tests/campaigns/mutants_of_peers.py -->\n"

MUTANTS = [
    Mutant(
        "peers: a ring's backward reads the keys of another round",
        "python/ringtile/attn/ring.py",
        "add(call, round, q, block_k, block_v, final, grads)",
        "add(call, round, q, block_k, block_k if round.index else block_v, final, grads)",
        "tests/attn/test_attention_table.py -k cells",
        source="huggingface/diffusers#14265",
        case="causal",
    ),
    Mutant(
        "peers: gradients of keys replace those of another rank",
        "python/ringtile/attn/ring.py",
        "ops.rows_add_((dk, dv)",
        "ops.rows_unpack_((dk, dv)",
        "tests/attn/test_attention_table.py -k cells",
        source="NVIDIA/Megatron-LM#1464",
        case="grouped heads",
    ),
    Mutant(
        "peers: bidirectional attention is causal",
        "python/ringtile/sequence/mask.py",
        "        return cls._of(begin, torch.full_like(begin, seq_len))\n",
        "        return cls.causal(seq_len)\n",
        "tests/sequence/test_mask.py",
        source="pytorch/pytorch#141429",
        case="bidirectional",
    ),
    Mutant(
        "peers: a kv head that two ranks share gets the gradient of one",
        "python/ringtile/attn/ulysses.py",
        "        adds = sum(len(share.kv_heads) for share in heads.shares) > num_kv_heads\n",
        "        adds = False\n",
        "tests/attn/test_attention_table.py -k cells",
        source="pytorch/torchtitan#1283",
        case="ringtile-ulysses: one kv head",
    ),
    Mutant(
        "peers: sinks are swallowed",
        "python/ringtile/hf/attention.py",
        '        sinks=options.get("s_aux"),\n        dropout=dropout,\n        attention_kernel',
        "        sinks=None,\n        dropout=dropout,\n        attention_kernel",
        "tests/hf/test_hf_attention.py",
        source="PrimeIntellect-ai/prime-rl#3397",
        case="sinks",
    ),
    Mutant(
        "peers: softcap is swallowed",
        "python/ringtile/hf/attention.py",
        '        softcap=options.get("softcap") or 0.0,\n',
        "        softcap=0.0,\n",
        "tests/hf/test_hf_attention.py",
        source="PrimeIntellect-ai/prime-rl#3397",
        case="softcap",
    ),
    Mutant(
        "peers: the gradient of sinks lacks a rank's queries",
        "python/ringtile/attn/ring.py",
        "    return -(weights.masked_fill(unseen[:, None], 0) * delta).sum((0, 2)).to(sinks.dtype)",
        "    return -(weights.masked_fill(unseen[:, None], 0) * delta)[:, :, 1:].sum((0, 2)).to(sinks.dtype)",
        "tests/attn/test_attention_table.py -k cells",
        source="PrimeIntellect-ai/prime-rl#3397",
        case="sinks",
    ),
    Mutant(
        "peers: a window becomes full causal attention",
        "python/ringtile/hf/attention.py",
        "        return batch.narrowed(mask_of_layer(module, options))\n",
        "        return batch.sequence\n",
        "tests/hf/test_hf_attention.py",
        source="huggingface/accelerate#4177",
        case="packed window",
    ),
    Mutant(
        "peers: packing is ignored",
        "python/ringtile/hf/masks.py",
        "    elif position_ids is not None and positions_separate:\n",
        "    elif position_ids is None and positions_separate:\n",
        "tests/hf/test_hf_inputs.py",
        source="axolotl-ai-cloud/axolotl#3608",
        case="packed",
    ),
    Mutant(
        "peers: masks of padding are dropped",
        "python/ringtile/hf/masks.py",
        "        masks.append(_of_attention_mask(attention_mask, position_ids, batch_size, seq_len, causal))\n",
        "        _of_attention_mask(attention_mask, position_ids, batch_size, seq_len, causal)\n",
        "tests/hf/test_hf_inputs.py",
        source="NVIDIA-NeMo/Automodel#2622",
        case="padding left",
    ),
    Mutant(
        "peers: labels are shifted on each shard",
        "python/ringtile/hf/reading.py",
        'functional.pad(inputs["labels"], (0, 1), value=IGNORE_INDEX)[:, 1:]',
        'inputs["labels"]',
        "tests/hf/test_hf_inputs.py",
        source="verl-project/verl#4250",
        case="token mean",
    ),
    Mutant(
        "peers: labels are shifted twice",
        "python/ringtile/hf/loss_on_shards.py",
        "shifts = active_batch() is None and self.sharding.reading.shifts_labels",
        "shifts = self.sharding.reading.shifts_labels",
        "tests/hf/test_hf_exact.py -k smoothing",
        source="NVIDIA-NeMo/Automodel#3544",
        case="label smoothing",
    ),
    Mutant(
        "peers: targets are counted once per rank",
        "python/ringtile/hf/one_process.py",
        "return self.in_one_process(original, batch_samples, *args, **kwargs)",
        "return original(batch_samples, *args, **kwargs)",
        "tests/hf/test_hf_exact.py -k padding",
        source="NVIDIA/Megatron-LM#673",
        case="token mean",
    ),
    Mutant(
        "peers: each rank takes the mean over its own targets",
        "python/ringtile/hf/loss_on_shards.py",
        "                batch.mean_share = 1 / of_ranks if self.trainer.model_accepts_loss_kwargs else 1.0\n",
        "                batch.mean_share = 1 / of_ranks if self.trainer.model_accepts_loss_kwargs else 1.0\n"
        '                num_items_in_batch = local["shift_labels"].ne(-100).sum().clamp_min(1)\n'
        "                num_items_in_batch = self._items_of_all(num_items_in_batch, ways) * ways\n",
        "tests/hf/test_hf_exact.py -k smoothing",
        source="NVIDIA/Megatron-LM#7452",
        case="token mean",
    ),
    Mutant(
        "peers: eval loss multiplied by the number of ranks",
        "python/ringtile/hf/loss_on_shards.py",
        "exchanged(loss, self.group.mean,",
        "exchanged(loss, self.group.sum,",
        "tests/hf/test_hf_exact.py -k learned",
        source="huggingface/transformers#48167",
        case="evaluation",
    ),
    Mutant(
        "peers: eval loss of one shard",
        "python/ringtile/hf/loss_on_shards.py",
        "exchanged(loss, self.group.mean,",
        "exchanged(loss, torch.clone,",
        "tests/hf/test_hf_exact.py -k learned",
        source="axolotl-ai-cloud/axolotl#3371",
        case="evaluation",
    ),
    Mutant(
        "peers: a balancing loss of each shard",
        "python/ringtile/hf/features/balancing_loss.py",
        "    counts, total = sums[:num_experts], sums[-1]\n",
        "    sums[:num_experts] = counts * batch.group.size\n    counts, total = sums[:num_experts], sums[-1]\n",
        "tests/hf/test_hf_exact.py -k balancing",
        source="NVIDIA/Megatron-LM#3768",
        case="balancing loss",
    ),
    Mutant(
        "peers: recurrent states run through documents",
        "python/ringtile/recurrent/documents.py",
        "masked_fill(starts, _FIRST)",
        "masked_fill(starts & (positions == 0), _FIRST)",
        "tests/recurrent/test_recurrent_heads.py -k reach_each_other",
        source="hiyouga/LlamaFactory#10787",
        case="recurrent packed",
    ),
    Mutant(
        "peers: recurrent states stop at a rank's edge",
        "python/ringtile/recurrent/documents.py",
        "if position < self.parents.size(1) and self._goes_on[row, position]:",
        "if position < 0:",
        "tests/recurrent/test_recurrent_ranks.py -k each_document_alone",
        source="NVIDIA-NeMo/Automodel#3243",
        case="recurrent packed",
    ),
    Mutant(
        "peers: the loss of tiles lacks its scale in a weight's gradient",
        "python/ringtile/tiled/loss.py",
        "factor = (dtotal * (ctx.job.logit_scale / (ctx.denominator or 1.0))).view(1)",
        "factor = (dtotal * ctx.job.logit_scale).view(1)",
        "tests/tiled/test_tiled_loss.py",
        source="deepspeedai/DeepSpeed#8587",
        case="tiled",
    ),
    Mutant(
        "peers: attention stays on a rank's own keys",
        "python/ringtile/attn/ring.py",
        "        merge(call, round, q, block_k, block_v, state)\n",
        "        if round is rounds[0]:\n            merge(call, round, q, block_k, block_v, state)\n",
        "tests/attn/test_attention_table.py -k cells",
        source="axolotl-ai-cloud/axolotl#3928",
        case="causal",
    ),
    Mutant(
        "peers: shards are contiguous, and read as zigzag",
        "python/ringtile/hf/shard.py",
        "        local[name] = sequence.shard(tensor, dim=dim)\n",
        "        contiguous = Layout.contiguous(sequence.seq_len, sequence.world_size)\n"
        "        local[name] = contiguous.shard(tensor, dim, sequence.rank)\n",
        "tests/hf/test_hf_inputs.py",
        source="THUDM/slime#1871",
        case="token mean",
    ),
    Mutant(
        "peers: the size is 1 without a word",
        "python/ringtile/hf/trainer.py",
        "    if config.attends and",
        "    if config.shared_prefix and",
        "tests/hf/test_hf_exact.py -k smoothing",
        source="modelscope/ms-swift#10061",
        case="token mean",
    ),
    Mutant(
        "peers: recurrent layers run on each shard alone",
        "python/ringtile/hf/features/recurrent.py",
        "    return (original if recurrent_batch() is None else of_batch)(*args, **kwargs)\n",
        "    return original(*args, **kwargs)\n",
        "tests/hf/test_hf_exact_models.py -k lfm2",
        source="hiyouga/LlamaFactory#10727",
        case="recurrent packed",
    ),
    Mutant(
        "peers: no gradient comes back to what images become",
        "python/ringtile/hf/features/seam.py",
        "        return (), given\n",
        '        return (), {**given, "inputs_embeds": given["inputs_embeds"].detach()}\n',
        "tests/hf/test_images.py -k gemma3",
        source="NVIDIA-NeMo/Automodel#3414",
    ),
    Mutant(
        "peers: a scheme sends nothing",
        "python/ringtile/sequence/heads.py",
        "        exchange = transport.exchange(sends, receives, what)\n        whole = ",
        "        for received in receives.values():\n            received.zero_()\n"
        "        exchange = transport.exchange({}, {}, what)\n        whole = ",
        "tests/attn/test_attention_table.py -k cells",
        source="NVIDIA-NeMo/Megatron-Bridge#2667",
        case="ringtile-ulysses: causal",
    ),
    Mutant(
        "peers: heads and tails of documents are cut document after document",
        "python/ringtile/sequence/layout.py",
        "(torch.minimum(chunk, num_chunks - 1 - chunk) + document[:, None]) % world_size",
        "((lengths.cumsum(0) - lengths)[:, None] * world_size + torch.minimum(chunk, num_chunks - 1 - chunk) "
        "* lengths[:, None]) // lengths.sum() + 0 * document[:, None]",
        "tests/sequence/test_balance.py -k equal_work",
        source="pytorch/pytorch#189902",
    ),
    Mutant(
        "peers: the loss is multiplied by the number of ranks",
        "python/ringtile/hf/loss_on_shards.py",
        "            found = original(model, local, return_outputs=return_outputs, num_items_in_batch="
        "num_items_in_batch)\n",
        "            found = self.group.size * original(model, local, num_items_in_batch=num_items_in_batch)\n",
        "tests/hf/test_hf_exact.py -k smoothing",
        source="NVIDIA/Megatron-LM#906",
        case="token mean",
    ),
]


def table() -> str:
    """A row for each bug: its source, and what finds it."""
    rows = ["| bug | published as | found by the case | and by |", "| --- | --- | --- | --- |"]
    for mutant in MUTANTS:
        repository, _, number = mutant.source.partition("#")
        source = f"[{repository.partition('/')[2]}#{number}](https://github.com/{repository}/issues/{number})"
        test = mutant.test.partition(" ")[0]
        case = f"`{mutant.case}`" if mutant.case else "none"
        rows.append(f"| {mutant.name.removeprefix('peers: ')} | {source} | {case} | `{test}` |")
    return "\n".join([*rows, ""])


if __name__ == "__main__":
    from tools.models.__main__ import replace_table

    replace_table(PAGE, table(), BEGIN)
