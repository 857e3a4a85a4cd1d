"""PyTorch's own context-parallel interface, over the ring: for loops without a Trainer."""
