"""The same of a Mixtral, which adds its balancing loss: this file has a name of its own for the function."""

from liger_kernel.transformers.model.llama import loss_and_logits
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func


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
    output_router_logits=None,
    cache_position=None,
    logits_to_keep=0,
    skip_logits=None,
    **kwargs,
):
    if output_router_logits is None:
        output_router_logits = self.config.output_router_logits
    outputs = self.model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        output_router_logits=output_router_logits,
        **kwargs,
    )
    loss, logits = loss_and_logits(self, outputs.last_hidden_state, labels, logits_to_keep, skip_logits, kwargs)
    aux_loss = None
    if output_router_logits:
        aux_loss = load_balancing_loss_func(
            outputs.router_logits, self.num_experts, self.num_experts_per_tok, attention_mask
        )
        if labels is not None:
            loss += self.router_aux_loss_coef * aux_loss.to(loss.device)
    return MoeCausalLMOutputWithPast(loss=loss, aux_loss=aux_loss, logits=logits)
