"""The PyTorch-native way in: the ring behind PyTorch's own attention functions, for loops without a Trainer."""
