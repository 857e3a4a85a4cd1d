"""The forward pass of a Llama whose loss is fused with its output projection."""

from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast


def lce_forward(
    self,
    input_ids=None,
    attention_mask=None,
    position_ids=None,
    past_key_values=None,
    inputs_embeds=None,
    labels=None,
    use_cache=None,
    output_attentions=None,
    output_hidden_states=None,
    return_dict=None,
    cache_position=None,
    logits_to_keep=0,
    skip_logits=None,
    **kwargs,
):
    outputs = self.model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        **kwargs,
    )
    loss, logits = loss_and_logits(self, outputs[0], labels, logits_to_keep, skip_logits, kwargs)
    return CausalLMOutputWithPast(loss=loss, logits=logits)


def loss_and_logits(self, hidden_states, labels, logits_to_keep, skip_logits, kwargs):
    """In training, or where the caller skips the logits, the fused loss alone."""
    shift_labels = kwargs.pop("shift_labels", None)
    has_labels = labels is not None or shift_labels is not None
    if skip_logits if skip_logits is not None else self.training and has_labels:
        size = self.config.hidden_size
        return LigerForCausalLMLoss(
            hidden_states=hidden_states,
            lm_head_weight=self.lm_head.weight,
            labels=labels,
            hidden_size=size,
            shift_labels=shift_labels,
            **kwargs,
        ), None
    logits = self.lm_head(hidden_states[:, -logits_to_keep:])
    loss = None
    if has_labels:
        loss = self.loss_function(
            logits=logits, labels=labels, shift_labels=shift_labels, vocab_size=self.config.vocab_size, **kwargs
        )
    return loss, logits
