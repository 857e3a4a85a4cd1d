"""The MLP and the loss in tiles of tokens, and the offload of checkpointed hidden states to host memory."""
