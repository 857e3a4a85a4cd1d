"""Ring attention: the op, and who computes a block of keys."""
