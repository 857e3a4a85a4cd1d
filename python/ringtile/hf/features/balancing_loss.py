"""The balancing loss of mixtures of experts (`output_router_logits: true`), over the tokens of all ranks of a group.

transformers' formula, with E experts, weights w_t of the tokens t of all layers (the attention mask, or 1), router
probabilities p_te and c_te = 1 where token t goes to expert e:

    loss = E sum_e (sum_t w_t c_te) (sum_t w_t p_te) / (sum_t w_t)^2

It is linear in the probabilities once the counts and the weights are summed over the group, so each rank computes the
gradients of its own part. Every rank gets the value of the whole, and the size of the group times its own part as the
gradient: the mean over all ranks, which the engine takes, is then the mean over the different batches. A model with
another formula is refused by the first batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.models.mixtral import modeling_mixtral

from ringtile.first_batch.trace import runs_whole
from ringtile.hf.batch import active_batch
from ringtile.hf.feature import Enabled, Feature
from ringtile.hf.patches import Patches

_NAME = "load_balancing_loss_func"  # in the file of each model that has a balancing loss
_Logits = tuple[Tensor, ...]


def _install(run: Enabled, patches: Patches) -> None:
    """Makes the model's balancing loss that of the group's sequence, for batches that are sharded.

    The function is one of the model's file, so other models of that type call the replacement too: without a sharded
    batch it is the original. TRL's fused head calls that of Mixtral's file for every type of model. The hook is on the
    model with its adapters, of which AdaLoRA's calls the inner module's forward, without its hooks.
    """
    model = run.base
    own, files = sys.modules[type(model).__module__], {modeling_mixtral}
    if hasattr(own, _NAME):
        files.add(own)
    elif not hasattr(model.config.get_text_config(), "output_router_logits"):
        return  # a dense model, of which nothing asks for the loss
    forward_file = sys.modules.get(model.forward.__module__)
    if forward_file is not None and hasattr(forward_file, _NAME):  # Liger's forward passes have a name of their own
        files.add(forward_file)

    def without_share(module: Any, args: Any, outputs: Any) -> None:
        """Callers of the model log the balancing loss, or add it to a loss of their own."""
        batch = active_batch()
        if batch is not None and batch.balancing_loss is not None and isinstance(outputs, dict):
            outputs["aux_loss"] = batch.balancing_loss

    for file in files:
        patches.share(file, _NAME, _over_group)
    patches.on_restore(run.wrapped.register_forward_hook(without_share).remove)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _over_group(
    original: Callable[..., Any],
    gate_logits: Any,
    num_experts: int | None = None,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Any:
    batch = active_batch()
    if batch is None or batch.group is None or not isinstance(gate_logits, tuple):
        return original(gate_logits, num_experts, top_k, attention_mask)
    if runs_whole():  # what is proved against the formula of this file
        return original(gate_logits, num_experts, top_k, batch.token_weights)
    assert num_experts is not None
    weights = None if batch.token_weights is None else batch.token_weights.reshape(-1)
    counts, probabilities, total = _sums(gate_logits, num_experts, top_k, weights)
    sums = batch.group.sum(torch.cat([counts, probabilities.detach(), total[None]]))
    counts, total = sums[:num_experts], sums[-1]
    weighted = num_experts / total**2 * counts  # what each expert's sum of probabilities counts
    part = batch.group.size * (weighted * probabilities).sum()
    batch.balancing_loss = part + ((weighted * sums[num_experts:-1]).sum() - part).detach()
    return batch.mean_share * batch.balancing_loss


def _sums(gate_logits: _Logits, num_experts: int, top_k: int, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Over the layers' tokens: weights by expert (E,), weighted probabilities by expert (E,), the weights ()."""
    device = gate_logits[0].device
    counts, probabilities = (torch.zeros(num_experts, device=device) for _ in range(2))
    total = torch.zeros((), device=device)
    for logits in gate_logits:  # (T, E)
        layer = torch.softmax(logits.to(device), dim=-1)
        of_tokens = torch.ones(len(layer), device=device) if weights is None else weights.to(device).float()
        experts = torch.topk(layer, top_k, dim=-1).indices
        counts = counts.scatter_add(0, experts.reshape(-1), of_tokens.repeat_interleave(top_k))
        probabilities = probabilities + (layer.float() * of_tokens[:, None]).sum(dim=0)
        total = total + of_tokens.sum()
    return counts, probabilities, total


FEATURE = Feature(frozenset({_NAME, "_forward_hooks"}), _install)
