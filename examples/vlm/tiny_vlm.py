"""A tiny Gemma 3 with random weights, which reads images too, and its processor: trained without a download."""

from tiny_model import tiny_tokenizer
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Processor, set_seed
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

SIDE = 32  # pixels of an image
SPECIAL = {"boi_token": "<image>", "eoi_token": "</image>", "image_token": "<part>"}  # before, after and of an image
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endfor %}"
)


def tiny_processor():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL.values()]})
    for name, token in SPECIAL.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=TEMPLATE)


def tiny_vlm():
    set_seed(0)  # the same weights on every rank
    sizes = {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": 260, "hidden_size": 64, "num_key_value_heads": 2, "head_dim": 16, **sizes}
    vision = {"hidden_size": 32, "image_size": SIDE, "patch_size": 8, "vision_use_head": False, **sizes}
    tokens = {"boi_token_index": 257, "eoi_token_index": 258, "image_token_index": 259}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens)
    config.text_config.eos_token_id = config.text_config.pad_token_id = 0
    model = Gemma3ForConditionalGeneration(config)
    model.model.multi_modal_projector.mm_input_projection_weight.data.normal_(std=0.1)  # zeros, until they are loaded
    return model
