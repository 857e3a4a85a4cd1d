"""What a training takes on each rank, before it runs: memory by part, the longest sequence, the time of a step.

No formula per model family: a step of the real model, loss, tiles, ring and engine runs on fake tensors, which have
shapes and no numbers, and every storage is counted while it lives.
"""
