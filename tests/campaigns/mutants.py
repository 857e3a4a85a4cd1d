"""`make mutants`: breaks the product code in one line at a time and shows that a test goes red.

Each mutant names the line, its broken form, and the test that must fail. The breaks are made in a git worktree of HEAD
(build/mutants), one after another; the checkout itself is never touched. `python tests/campaigns/mutants.py WORD ...`
runs the mutants whose names contain one of the words.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "mutants"
PYTHON = ROOT / ".venv" / "bin" / "python"


class Mutant(NamedTuple):
    name: str
    file: str
    line: str  # stands once in the file
    broken: str
    test: str  # a pytest selection, or "c PROGRAM", or "emulator PROGRAM"


MUTANTS = [
    # ---- kernels on the CPU
    Mutant(
        "attention: running sum not rescaled",
        "csrc/attn/forward.h",
        "vec_store(sum + j * LANES, vec_load(sum + j * LANES) * factor);",
        "vec_store(sum + j * LANES, vec_load(sum + j * LANES));",
        "c test_attn",
    ),
    Mutant(
        "attention: partly masked tiles not masked",
        "csrc/attn/forward.h",
        "if (!full) mask_panel(&s->ranges, panel, begin, end, -(real)INFINITY, s->weights);",
        "(void)full;",
        "c test_attn",
    ),
    Mutant(
        "attention: dq without its scale",
        "csrc/attn/backward.h",
        "dq[j] += (real)p->scale * s->dq[row * d + j];",
        "dq[j] += s->dq[row * d + j];",
        "c test_attn",
    ),
    Mutant(
        "GLU: gradient of up from the slope",
        "csrc/glu/glu_kernel.h",
        "vec_store(up + i, dy * act.value);",
        "vec_store(up + i, dy * act.slope);",
        "c test_glu",
    ),
    Mutant(
        "cross entropy: label smoothing missing in the gradient",
        "csrc/loss/cross_entropy_kernel.h",
        "if (label >= col && label < col + count) x[label - col] -= (real)(1 - smoothing);",
        "if (label >= col && label < col + count) x[label - col] -= 1;",
        "c test_cross_entropy",
    ),
    Mutant(
        "selective scan: state of the document before",
        "csrc/scan/selective_kernel.h",
        "if (before == RT_STATE_ZERO) load_state(p, &s, batch, before);",
        "",
        "c test_selective",
    ),
    Mutant(
        "selective scan: dB and dC of the last channels alone",
        "csrc/scan/selective_kernel.h",
        "row[i] = add ? row[i] + x : x;",
        "row[i] = add ? x : x;",
        "c test_selective",
    ),
    Mutant(
        "selective scan: gradient of dt without its decay",
        "csrc/scan/selective_kernel.h",
        "ddt += moved * vec_load(s->A + of_state);",
        "",
        "c test_selective",
    ),
    Mutant(
        "selective scan: no decay between stretches in torch operations",
        "python/ringtile/recurrent/torch_path.py",
        "moved = moved + decay * before",
        "moved = moved + before",
        "tests/recurrent/test_recurrent_ranks.py -k torch_operations",
    ),
    # ---- self-test in a child process
    Mutant(
        "self-test: processes test beside each other",
        "python/ringtile/self_test/child_process.py",
        "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "tests/attn/test_self_test_child.py -k at_once",
    ),
    Mutant(
        "self-test: verdicts of another driver are believed",
        "python/ringtile/self_test/child_process.py",
        'if kept["environment"] == at and',
        "if",
        "tests/attn/test_self_test_child.py -k believed",
    ),
    Mutant(
        "self-test: a child that hangs is left alone",
        "python/ringtile/self_test/child_process.py",
        "os.killpg(process.pid, signal.SIGKILL)",
        "pass",
        "tests/attn/test_self_test_child.py -k hang",
    ),
    # ---- torch operations instead of kernels
    Mutant(
        "torch operations: a shard without its stride",
        "python/ringtile/torch_ops.py",
        "every = tokens[(slice(None),) * dim + (slice(None, None, stride),)]",
        "every = tokens[(slice(None),) * dim + (slice(None, length),)]",
        "tests/attn/test_torch_ops.py -k bounds",
    ),
    Mutant(
        "torch operations: GLU rounded twice",
        "python/ringtile/torch_ops.py",
        "value = act(g)",
        "value = act(g).to(gate.dtype)",
        "tests/attn/test_torch_ops.py -k bounds",
    ),
    Mutant(
        "torch operations: an unknown class has loss 0",
        "python/ringtile/torch_ops.py",
        "masked_fill(~(usable | ignored), torch.nan)",
        "masked_fill(~(usable | ignored), 0.0)",
        "tests/attn/test_torch_ops.py -k unknown",
    ),
    Mutant(
        "torch operations: kernels are asked that are not there",
        "python/ringtile/ops.py",
        "    if why_no_kernels(device):\n        return True\n",
        "",
        "tests/attn/test_cuda.py",
    ),
    Mutant(
        "mamba_ssm: documents go on from one another",
        "python/ringtile/recurrent/mamba.py",
        "dt_ = dt_.index_fill(0, s.resets, _RESET)",
        "dt_ = dt_.index_fill(0, s.resets, 0.0)",
        "tests/recurrent/test_libraries.py -k states_and_documents",
    ),
    Mutant(
        "hybrid models: packed rows left to transformers",
        "python/ringtile/hf/recurrent.py",
        "attends & (mask.begin > 0)",
        "attends & (mask.begin > mask.seq_len)",
        "tests/hf/test_hf_hybrid.py -k one_document",
    ),
    # ---- kernels on a GPU, on the emulator
    Mutant(
        "CUDA: key at the end of the interval attended",
        "cuda/attn/softmax.cuh",
        "if (key < keys.lo || key >= keys.hi) scores",
        "if (key < keys.lo || key > keys.hi) scores",
        "emulator test_attn_fwd",
    ),
    Mutant(
        "CUDA: running sum not rescaled",
        "cuda/attn/softmax.cuh",
        "rows.sum[r] *= rescale[r];",
        "rows.sum[r] *= 1;",
        "emulator test_attn_fwd",
    ),
    Mutant(
        "CUDA: max lags behind",
        "cuda/attn/softmax.cuh",
        "top = fmaxf(top, rows.top[r]);",
        "if (!(top > rows.top[r] + 8)) top = rows.top[r];",
        "emulator test_attn_fwd",
    ),
    Mutant(
        "CUDA: delta not subtracted",
        "cuda/attn/bwd_parts.cuh",
        "dweights[0][i / 4][i % 4] -= delta_of_lane(i / 4).of[i % 2];",
        "dweights[0][i / 4][i % 4] -= 0;",
        "emulator test_attn_bwd_sm90",
    ),
    # ---- dropout
    Mutant(
        "dropout: features of a chunk share their words",
        "csrc/dropout/dropout_kernel.h",
        "word[0][i] = first_counter + (uint32_t)i, word[1][i] = (uint32_t)place[1];",
        "word[0][i] = first_counter, word[1][i] = (uint32_t)place[1];",
        "c test_dropout",
    ),
    Mutant(
        "dropout: no weight dropped in the forward",
        "csrc/attn/forward.h",
        "multiply_panel(n, s->factors, s->weights);",
        "(void)multiply_panel;",
        "c test_attn",
    ),
    Mutant(
        "dropout: dP as if no weight were dropped",
        "csrc/attn/backward.h",
        "multiply_panel(n, s->factors, s->dscores);",
        "(void)n;",
        "c test_attn",
    ),
    Mutant(
        "dropout: dv as if no weight were dropped",
        "csrc/attn/backward.h",
        "if (drops(p)) multiply_panel(n, s->factors, s->weights);",
        "",
        "c test_attn",
    ),
    Mutant(
        "dropout: all keys of a tile share a counter",
        "csrc/attn/weight_dropout.h",
        "if (position / 4 != counter) {",
        "if (counter < 0) {",
        "c test_attn",
    ),
    Mutant(
        "dropout: all heads share a mask",
        "csrc/dropout/philox.h",
        "return (uint32_t)row + ((uint32_t)head << 20);",
        "return (uint32_t)row + (uint32_t)(head * 0);",
        "c test_attn",
    ),
    Mutant(
        "dropout: queries at their local places",
        "python/ringtile/sequence/sharded.py",
        "return self.ring.layout.positions(self.ring.plan.rank)",
        "return torch.arange(self.ring.layout.local_len(self.ring.plan.rank))",
        "tests/attn/test_attention_dropout.py -k masks_are_those",
    ),
    Mutant(
        "dropout: ranks do not compare the step",
        "python/ringtile/attn/ulysses.py",
        "step = drop.step  #",
        "step = 0  #",
        "tests/attn/test_attention_dropout.py -k told",
    ),
    Mutant(
        "dropout: rows may be written to before the backward",
        "python/ringtile/attn/attention.py",
        "ctx.save_for_backward(sinks, rows, *(x for stage in stages for x in stage))",
        "ctx.save_for_backward(sinks, None, *(x for stage in stages for x in stage))",
        "tests/attn/test_attention_dropout.py -k written_to",
    ),
    Mutant(
        "dropout: data-parallel ranks drop the same rows",
        "python/ringtile/hf/dropout.py",
        "first = self._num_rows * self._data_size + self._data_index * num_rows",
        "first = self._num_rows * self._data_size",
        "tests/hf/test_hf_dropout.py -k data-parallel",
    ),
    Mutant(
        "dropout: attention of all layers shares a stream",
        "python/ringtile/hf/dropout.py",
        "return zlib.crc32(name.encode() if call == 0",
        "return zlib.crc32(name[:13].encode() if call == 0",
        "tests/hf/test_hf_dropout.py -k definition",
    ),
    Mutant(
        "dropout: NEFTune by the length of a shard",
        "python/ringtile/hf/dropout.py",
        "num_tokens if batch is None else batch.seq_len",
        "num_tokens",
        "tests/hf/test_hf_dropout.py -k neftune",
    ),
    Mutant(
        "CUDA: dS as if no weight were dropped",
        "cuda/attn/plain.cuh",
        "weight * (factor * dweight - of.delta) * (args",
        "weight * (dweight - of.delta) * (args",
        "emulator test_attn_bwd",
    ),
    # ---- plan
    Mutant(
        "plan: last attended key left out",
        "csrc/seq/plan.c",
        "attended[last]--;",
        "attended[last - 1]--;",
        "c test_plan",
    ),
    Mutant(
        "scheme: every rank's heads begin at the first",
        "python/ringtile/attn/ulysses.py",
        "return x[:, :, heads.start : heads.stop]",
        "return x[:, :, : len(heads)]",
        "tests/attn/test_schemes.py -k one_rank",
    ),
    Mutant(
        "plan: received keys at the rows of their owner",
        "python/ringtile/sequence/plan.py",
        "k_runs=torch.cat(runs).contiguous() if in_place else block,",
        "k_runs=torch.cat(runs).contiguous(),",
        "tests/attn/test_ring.py -k world_size",
    ),
    Mutant(
        "plan: bytes of the values forgotten",
        "python/ringtile/sequence/plan.py",
        "key, value = shape.batch * shape.head_dim, shape.batch * shape.v_head_dim",
        "key, value = shape.batch * shape.head_dim, shape.batch * shape.head_dim",
        "tests/sequence/test_plan.py",
    ),
    # ---- masks, layouts, the sequence
    Mutant(
        "mask: window one key too wide",
        "python/ringtile/sequence/mask.py",
        "return cls((positions - window + 1).clamp(min=0), end)",
        "return cls((positions - window).clamp(min=0), end)",
        "tests/sequence/test_mask.py",
    ),
    Mutant(
        "mask: a restart of position ids is no document",
        "python/ringtile/sequence/mask.py",
        "starts = position_ids.cpu().long().diff(dim=1) != 1",
        "starts = position_ids.cpu().long().diff(dim=1) > 1",
        "tests/sequence/test_mask.py",
    ),
    Mutant(
        "sequence: written tensors taken for what they were",
        "python/ringtile/sequence/sharded.py",
        "same = sequence.begin is tensors[0] or self.versions == tuple(map(_version, tensors))",
        "same = True",
        "tests/sequence/test_sharded.py",
    ),
    Mutant(
        "sequence: a window that is not remembered as its own",
        "python/ringtile/sequence/sharded.py",
        "self._windows[window, causal] = self & IntervalMask.sliding_window(self.seq_len, window, causal=causal)",
        "self._windows[window, causal] = self & IntervalMask.causal(self.seq_len)",
        "tests/sequence/test_sharded.py",
    ),
    # ---- masks with two sides
    Mutant(
        "two sides: keys end nowhere",
        "csrc/attn/key_ranges.h",
        "vec_store(at, vec_select((first <= position) & (position < after), vec_load(at), vec_set(masked)));",
        "vec_store(at, vec_select((first <= position) & (position <= after), vec_load(at), vec_set(masked)));",
        "c test_attn",
    ),
    Mutant(
        "two sides: keys that some rows attend are skipped",
        "csrc/attn/key_ranges.h",
        "ranges->key_end[key] > ranges->first_position[panel];",
        "ranges->key_end[key] > ranges->last_position[panel];",
        "c test_attn",
    ),
    Mutant(
        "two sides: tiles that no query meets are masked",
        "csrc/attn/key_ranges.h",
        "if (!live || ranges->key_begin == NULL) return live;",
        "if (true) return live;",
        "c test_attn_limits",
    ),
    Mutant(
        "two sides: a panel is full by its first query",
        "csrc/attn/key_ranges.h",
        "ranges->key_end[key] > ranges->last_position[panel];",
        "ranges->key_end[key] > ranges->first_position[panel];",
        "c test_attn",
    ),
    Mutant(
        "two sides: infinite values of masked keys",
        "csrc/attn/forward.h",
        "if (!key_meets_row(ranges, panel * PANEL + row, key)) continue;",
        "(void)0;",
        "c test_attn_limits",
    ),
    Mutant(
        "two sides: infinite gradients of masked keys",
        "csrc/attn/backward.h",
        "if (!key_meets_row(&s->ranges, row, part->begin + key)) continue;",
        "(void)0;",
        "c test_attn_limits",
    ),
    Mutant(
        "two sides: a position beyond int32 wraps",
        "csrc/attn/key_ranges.h",
        "if (position < INT32_MIN || position > INT32_MAX) {",
        "if (position < INT32_MIN) {",
        "c test_attn",
    ),
    Mutant(
        "two sides: the last key of a hull left out",
        "csrc/seq/meetings.c",
        "tree_find(tree, y.num, before + counts[j] - 1)) + 1 : 0;",
        "tree_find(tree, y.num, before + counts[j] - 1)) : 0;",
        "c test_plan",
    ),
    Mutant(
        "two sides: CUDA keys end nowhere",
        "cuda/attn/plain.cuh",
        "return ld_global(p.key_begin + at) <= position && position < ld_global(p.key_end + at);",
        "return ld_global(p.key_begin + at) <= position;",
        "emulator test_attn_bwd",
    ),
    Mutant(
        "two sides: pieces of queries that a stretch of keys does not meet",
        "python/ringtile/attn/pieces.py",
        "some = meets & (low < high)",
        "some = low < high",
        "tests/attn/test_attention_kernel.py -k pieces",
    ),
    Mutant(
        "two sides: bounds of keys are loose where they bind",
        "python/ringtile/sequence/mask.py",
        "return torch.where(self.key_begin == first, 0, self.key_begin), loose_end",
        "return torch.zeros_like(self.key_begin), loose_end",
        "tests/sequence/test_token_trees.py",
    ),
    Mutant(
        "two sides: intervals of local keys for those that travelled",
        "python/ringtile/sequence/plan.py",
        "positions if in_place else _positions(block)",
        "positions[: len(_positions(block))]",
        "tests/attn/test_ring.py -k world_size",
    ),
    Mutant(
        "two sides: intervals of round 0 in every round",
        "python/ringtile/sequence/sharded.py",
        "self._tensors_on(device)[2 * i + 2 : 2 * i + 4]",
        "self._tensors_on(device)[2:4]",
        "tests/attn/test_ring.py -k world_size",
    ),
    Mutant(
        "two sides: intersection of one side",
        "python/ringtile/sequence/mask.py",
        "key_begin, key_end = torch.maximum(key_begin, begin), torch.minimum(key_end, end)",
        "key_begin, key_end = torch.maximum(key_begin, begin), key_end",
        "tests/sequence/test_token_trees.py",
    ),
    Mutant(
        "two sides: a sequence that knows one",
        "python/ringtile/sequence/sharded.py",
        "(self.begin, self.end), self.layout_tensor = mask.bounds, layout.tensor",
        "self.begin, self.end, self.layout_tensor = mask.begin, mask.end, layout.tensor",
        "tests/attn/test_tree_attention.py -k notice",
    ),
    Mutant(
        "two sides: a window of rows on a tree",
        "python/ringtile/sequence/sharded.py",
        "self._windows[window, causal] = self & self.causal.mask.last_keys(window)",
        "self._windows[window, causal] = self & IntervalMask.sliding_window(self.seq_len, window)",
        "tests/sequence/test_token_trees.py",
    ),
    Mutant(
        "two sides: position ids that restart anywhere",
        "python/ringtile/torch_context_parallel/noticing.py",
        "return not bool((restarts & attends)[:, 1:].any())",
        "return True",
        "tests/torch_cp/test_torch_cp_noticed.py -k refused",
    ),
    Mutant(
        "two sides: work of the hulls",
        "python/ringtile/sequence/balance.py",
        "pairs = mask.num_keys.sum(0)",
        "pairs = (end - begin).long().sum(0)",
        "tests/attn/test_tree_attention.py -k balanced",
    ),
    Mutant(
        "tree: a subtree ends with its node",
        "python/ringtile/sequence/tree.py",
        "return [node._replace(subtree_end=end) for node, end in zip(found, ends, strict=True)]",
        "return [node._replace(subtree_end=node.end) for node, end in zip(found, ends, strict=True)]",
        "tests/sequence/test_token_trees.py",
    ),
    # ---- ring
    Mutant(
        "ring: returned gradients replace instead of adding",
        "python/ringtile/attn/exchange.py",
        "x[:, row : row + length].add_(partial[:, packed : packed + length])",
        "x[:, row : row + length].copy_(partial[:, packed : packed + length])",
        "tests/attn/test_ring.py -k world_size",
    ),
    Mutant(
        "ring: messages behind an idle round start too early",
        "python/ringtile/attn/exchange.py",
        "if after == i + 1:",
        "if after is not None:",
        "tests/attn/test_ring.py -k equals_the_definition",
    ),
    Mutant(
        "ring: gradient of lse dropped",
        "python/ringtile/attn/backend.py",
        "torch.zeros_like(self.lse) if self.dlse is None else self.dlse.contiguous()",
        "torch.zeros_like(self.lse)",
        "tests/attn/test_ring.py",
    ),
    Mutant(
        "ring: outputs taken as initialized",
        "python/ringtile/attn/ring.py",
        "fresh=block.i == 0 and call.sinks is None,",
        "fresh=False,",
        "tests/attn/test_ring.py",
    ),
    Mutant(
        "ring: scale not agreed on",
        "python/ringtile/attn/ulysses.py",
        '"scale": call.scale,',
        '"scale": 1.0,',
        "tests/attn/test_ring_failures.py -k disagreement",
    ),
    # ---- transport
    Mutant(
        "transport: headers of agreed calls not compared",
        "python/ringtile/transport/transport.py",
        "        self._behind = True\n",
        "        self._behind = agreed is None\n",
        "tests/transport/test_transport.py -k agreed",
    ),
    Mutant(
        "transport: a difference is not passed on",
        "python/ringtile/transport/agreement.py",
        "self._differ(sent, whose, text)",
        "self._differ(sent, self._rank, sent.text)",
        "tests/transport/test_tree.py",
    ),
    Mutant(
        "transport: messages of gloo lose their tensors after a mismatch",
        "python/ringtile/transport/process_group.py",
        "self._never_waited_for += [",
        "_ = [",
        "tests/transport/test_tree.py -k gloo",
    ),
    Mutant(
        "transport: payloads of all calls share a tag",
        "python/ringtile/transport/transport.py",
        "self._payload_tag = terms.payload_tag(self.num_calls)",
        "self._payload_tag = FIRST_PAYLOAD_TAG",
        "tests/transport/test_transport.py -k agreed",
    ),
    Mutant(
        "transport: a backward does not say whose",
        "python/ringtile/attn/ulysses.py",
        "return transport.agree(op, fields, qkv[0].device, forward_call=forward_call, data=data, step=step)",
        "return transport.agree(op, fields, qkv[0].device, data=data)",
        "tests/attn/test_ring_failures.py -k backwards",
    ),
    Mutant(
        "transport: data of a call not compared",
        "python/ringtile/attn/ulysses.py",
        "return transport.agree(op, fields, qkv[0].device, forward_call=forward_call, data=data, step=step)",
        "with transport.agree(op, fields, qkv[0].device, forward_call=forward_call, step=step):",
        "tests/attn/test_ring_failures.py -k repeated",
    ),
    Mutant(
        "transport: refusals kept to oneself",
        "python/ringtile/transport/transport.py",
        "with contextlib.suppress(RingtileError), self._numbered(said):",
        "if False:",
        "tests/attn/test_ring_failures.py -k refused",
    ),
    Mutant(
        "collectives: gradient of unshard not summed",
        "python/ringtile/transport/collectives.py",
        "total += shards.get(rank, own)",
        "total = own",
        "tests/sequence/test_layout.py",
    ),
    # ---- recurrences over ranks
    Mutant(
        "recurrences: gradients of shared keys from one rank",
        "python/ringtile/recurrent/heads.py",
        "operands[i].of(result[i], EVERY_TOKEN, share).add_(x)",
        "operands[i].of(result[i], EVERY_TOKEN, share).copy_(x)",
        "tests/recurrent/test_recurrent_heads.py -k one_process",
    ),
    Mutant(
        "recurrences: every rank's heads begin at the first",
        "python/ringtile/recurrent/recurrence.py",
        "x.narrow(self.heads, begin * group, (end - begin) * group)",
        "x.narrow(self.heads, 0, (end - begin) * group)",
        "tests/recurrent/test_recurrent_heads.py -k one_process",
    ),
    Mutant(
        "recurrences: a state stops at a rank's edge",
        "python/ringtile/recurrent/documents.py",
        "if position < self.parents.size(1) and self._goes_on[row, position]:",
        "if position < 0:",
        "tests/recurrent/test_recurrent_ranks.py -k each_document_alone",
    ),
    Mutant(
        "recurrences: documents run into each other",
        "python/ringtile/recurrent/documents.py",
        "masked_fill(starts, _FIRST)",
        "masked_fill(starts & (positions == 0), _FIRST)",
        "tests/recurrent/test_recurrent_heads.py -k reach_each_other",
    ),
    Mutant(
        "recurrences: the gradient of a state is not handed back",
        "python/ringtile/recurrent/state_passing.py",
        "torch.zeros_like(received) if dreceived is None else dreceived)",
        "torch.zeros_like(received))",
        "tests/recurrent/test_recurrent_ranks.py -k gradcheck",
    ),
    Mutant(
        "recurrences of trees: a branch goes on from the branch before",
        "python/ringtile/recurrent/documents.py",
        "parents[first] = path[-1][0] if path else _FIRST",
        "parents[first] = first - 1 if path else _FIRST",
        "tests/recurrent/test_recurrent_trees.py -k each_path_alone",
    ),
    Mutant(
        "recurrences of trees: a mask that is no tree is taken for one",
        "python/ringtile/recurrent/documents.py",
        "if path and subtree_end > path[-1][1]:",
        "if path and subtree_end < path[-1][1] < 0:",
        "tests/recurrent/test_recurrent_trees.py -k refused",
    ),
    Mutant(
        "recurrences of trees: a state that other branches need goes no further than the next rank",
        "python/ringtile/recurrent/documents.py",
        "tokens = {token for token, last in forks.items() if token < position <= last}",
        "tokens = {token for token, last in forks.items() if position - 20 <= token < position <= last}",
        "tests/recurrent/test_recurrent_trees.py -k deep_and_wide",
    ),
    Mutant(
        "recurrences of trees: states go out in the wrong order",
        "python/ringtile/recurrent/documents.py",
        "passed_on = tuple(numbers[token] for token in sent[row])",
        "passed_on = tuple(numbers[token] for token in reversed(sent[row]))",
        "tests/recurrent/test_recurrent_trees.py -k states_compute",
    ),
    Mutant(
        "recurrences of trees: a convolution's window ends at the rank's edge",
        "python/ringtile/recurrent/documents.py",
        "if 0 <= token < begin:",
        "if 0 <= token < begin and not places:",
        "tests/recurrent/test_recurrent_trees.py -k states_compute",
    ),
    Mutant(
        "recurrences of trees: gradients of inputs before the rank's own are lost",
        "python/ringtile/recurrent/state_passing.py",
        "if self.earlier is not None and dhalo is not None:",
        "if self.earlier is None and dhalo is not None:",
        "tests/recurrent/test_recurrent_trees.py -k states_compute",
    ),
    Mutant(
        "recurrences of trees: a parameter's gradient is rounded for each branch",
        "python/ringtile/recurrent/recurrence.py",
        "(x if tokens else x.to(ops.state_dtype(x.dtype)), tokens) for",
        "(x, tokens) for",
        "tests/recurrent/test_recurrent_trees.py -k narrow",
    ),
    Mutant(
        "recurrences of trees: the state of each leaf is kept",
        "python/ringtile/recurrent/recurrence.py",
        "if last_use.get(number, -1) > i}",
        "if last_use.get(number, -1) > -2}",
        "tests/recurrent/test_recurrent_trees.py -k let_go",
    ),
    Mutant(
        "recurrences: a block's mask is not narrowed to its causal part",
        "python/ringtile/torch_context_parallel/recurrences.py",
        "return scope.sequence.causal",
        "return scope.sequence",
        "tests/torch_cp/test_torch_cp_recurrent.py -k in_a_block",
    ),
    # ---- labels and the scale of the loss
    Mutant(
        "labels: not shifted before sharding",
        "python/ringtile/hf/inputs.py",
        'functional.pad(inputs["labels"], (0, 1), value=IGNORE_INDEX)[:, 1:]',
        'inputs["labels"]',
        "tests/hf/test_hf_inputs.py",
    ),
    Mutant(
        "labels: padding counted as targets",
        "python/ringtile/hf/inputs.py",
        '"shift_labels": IGNORE_INDEX,',
        '"shift_labels": 0,',
        "tests/hf/test_hf_inputs.py",
    ),
    Mutant(
        "rollouts: advantages of another process",
        "python/ringtile/hf/one_process.py",
        "return int(self._group.data_index)",
        "return int(self._accelerator.process_index)",
        "tests/hf/test_rollouts.py -k everything",
    ),
    Mutant(
        "rollouts: every copy of a row counted",
        "python/ringtile/hf/data.py",
        "[:, 0].flatten(0, 1)",
        ".flatten(0, 2)",
        "tests/hf/test_rollouts.py -k everything",
    ),
    Mutant(
        "rollouts: ranks sample alike",
        "python/ringtile/hf/rollouts.py",
        "of_rank = (*shared.values(), self.trainer.state.global_step, self.base.training, group.rank)",
        "of_rank = (*shared.values(), self.trainer.state.global_step, self.base.training)",
        "tests/hf/test_generation.py -k other_completions",
    ),
    Mutant(
        "loss: targets counted once per rank",
        "python/ringtile/hf/loss_on_shards.py",
        "return None if num_items is None else num_items / self.group.size",
        "return num_items",
        "tests/hf/test_hf_exact.py -k padding",
    ),
    Mutant(
        "loss: gradient not divided by the number of items",
        "python/ringtile/tiled/loss.py",
        "factor = (dtotal * (ctx.job.logit_scale / (ctx.denominator or 1.0))).view(1)",
        "factor = (dtotal * ctx.job.logit_scale).view(1)",
        "tests/tiled/test_tiled_loss.py",
    ),
    Mutant(
        "log-probs: gradient of the entropy without its mean",
        "python/ringtile/tiled/log_probs.py",
        "gradient = y.add_(mean).mul_(-of_entropy).add_(of_loss).mul_(p)",
        "gradient = y.mul_(-of_entropy).add_(of_loss).mul_(p)",
        "tests/tiled/test_log_probs.py",
    ),
    Mutant(
        "log-probs: first token of a row predicted by padding",
        "python/ringtile/rl.py",
        "predicted = (mask.begin[:, 1:] <= before) & (before < mask.end[:, 1:])",
        "predicted = before < mask.end[:, 1:]",
        "tests/torch_cp/test_sequence_log_probs.py -k one_process",
    ),
    # ---- tiles
    Mutant(
        "tiles: softmax over one rank's classes",
        "python/ringtile/tiled/vocab_parallel.py",
        "lse, (label_logit, total) = gathered[:, 0].logsumexp(0), gathered[:, 1:].sum(0)",
        "lse, (label_logit, total) = gathered[0, 0], gathered[:, 1:].sum(0)",
        "tests/tiled/test_vocab_parallel.py",
    ),
    Mutant(
        "tiles: gradient of the bias from one tile",
        "python/ringtile/tiled/glu.py",
        "add_linear_grads_(down_sum, down_bias_sum, dout_tile, prod)",
        "add_linear_grads_(down_sum, None, dout_tile, prod)",
        "tests/tiled/test_tiled_mlp.py",
    ),
    Mutant(
        "tiles: random state of the recomputation not restored",
        "python/ringtile/tiled/mlp.py",
        "torch.set_rng_state(self.cpu_random_state)",
        "pass",
        "tests/tiled/test_tiled_mlp.py",
    ),
]


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], cwd=TREE, text=True, capture_output=True, env={**os.environ, **environment}
    )


def passes(test: str) -> tuple[bool, str]:
    """Whether a test passes in the worktree, and the end of what it printed."""
    kind, _, program = test.partition(" ")
    if kind in ("c", "emulator"):
        out = TREE / "build" / {"c": "ctest/tests/c", "emulator": "emulator"}[kind] / program
        built = run("make", "-C", f"tests/{kind}", str(out))
        if built.returncode:
            return False, "DOES NOT COMPILE: " + built.stderr[-500:]
        done = run(out)
    else:
        done = run(PYTHON, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *test.split(), PYTHONPATH="python")
    return done.returncode == 0, (done.stdout + done.stderr)[-1000:]


def prepare() -> None:
    """A clean worktree of HEAD with this checkout's compiled ops."""
    if not TREE.exists():
        subprocess.run(["git", "worktree", "add", "--detach", str(TREE)], cwd=ROOT, check=True, capture_output=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, text=True, capture_output=True).stdout
    for command in (
        ["git", "checkout", "--force", "--detach", head.strip()],
        ["git", "clean", "-fdq", "python", "tests"],
    ):
        subprocess.run(command, cwd=TREE, check=True, capture_output=True)
    for binary in (ROOT / "python" / "ringtile").glob("*.so"):
        (TREE / "python" / "ringtile" / binary.name).write_bytes(binary.read_bytes())


def main() -> int:
    words = sys.argv[1:]
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    prepare()
    for test in sorted({mutant.test for mutant in chosen}):  # a test that is red anyway shows nothing
        ok, said = passes(test)
        if not ok:
            print(f"red without a mutant: {test}\n{said}")
            return 2
    num_red = 0
    for mutant in chosen:
        path = TREE / mutant.file
        text = path.read_text()
        if text.count(mutant.line) != 1:
            print(f"STALE  {mutant.name}: {mutant.file} has {text.count(mutant.line)} times {mutant.line!r}")
            continue
        began = time.monotonic()
        path.write_text(text.replace(mutant.line, mutant.broken))
        try:
            ok, said = passes(mutant.test)
        finally:
            path.write_text(text)
        red = not ok and "DOES NOT COMPILE" not in said
        num_red += red
        colour = "red" if red else "GREEN" if ok else "BROKEN"
        print(f"{colour}  {mutant.name}: {mutant.test} ({time.monotonic() - began:.0f} s)")
        if not red:
            print(said)
    print(f"{num_red} of {len(chosen)} red")
    return 0 if num_red == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
