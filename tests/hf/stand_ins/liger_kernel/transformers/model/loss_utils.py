"""The fused loss: logits and cross entropy of one chunk of tokens after another, with their gradients."""

import torch
from torch.nn import functional

calls = 0  # of the loss in training and evaluation


class FusedLinearCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, target, ignore_index, reduction):
        loss, dhidden, dweight = hidden.new_zeros(()), torch.zeros_like(hidden), torch.zeros_like(weight)
        counted = target != ignore_index
        share = 1.0 if reduction == "sum" else 1 / counted.sum()
        for begin in range(0, len(hidden), 5):
            chunk, some = hidden[begin : begin + 5], counted[begin : begin + 5]
            logits, labels = chunk @ weight.T, target[begin : begin + 5]
            loss += share * functional.nll_loss(logits[some].log_softmax(-1), labels[some], reduction="sum")
            gradient = logits.softmax(-1)
            gradient[some, labels[some]] -= 1
            gradient *= share * some[:, None]
            dhidden[begin : begin + 5] = gradient @ weight
            dweight += gradient.T @ chunk
        ctx.save_for_backward(dhidden, dweight)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        return *(gradient.mul_(dloss) for gradient in ctx.saved_tensors), None, None, None


def LigerForCausalLMLoss(
    hidden_states,
    lm_head_weight,
    labels,
    hidden_size,
    num_items_in_batch=None,
    ignore_index=-100,
    shift_labels=None,
    final_logit_softcapping=None,
    return_token_accuracy=False,
    return_predicted_tokens=False,
    **kwargs,
):
    global calls
    calls += 1
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss = FusedLinearCrossEntropyFunction.apply(
        hidden_states.reshape(-1, hidden_size),
        lm_head_weight,
        shift_labels.reshape(-1),
        ignore_index,
        "mean" if num_items_in_batch is None else "sum",
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch
