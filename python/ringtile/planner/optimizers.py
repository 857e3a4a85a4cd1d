"""Bytes that optimizers keep on a device for each number that is trained."""

from __future__ import annotations

# adamw is torch's, which is run: its state has the weights' dtype. The 8-bit ones are bitsandbytes', with a float32
# maximum for each block of 256 numbers; its paged state may leave the device.
OPTIMIZERS = {
    **{"adamw": 8.0, "sgd": 0.0, "lion_32bit": 4.0},
    **{"adamw_8bit": 2 + 2 * 4 / 256, "lion_8bit": 1 + 4 / 256},
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw_8bit", "paged_lion_32bit", "paged_lion_8bit"), 0.0),
}
OF_EMBEDDINGS = {"adamw_8bit": "adamw", "lion_8bit": "lion_32bit"}  # which transformers keeps in 32 bits
