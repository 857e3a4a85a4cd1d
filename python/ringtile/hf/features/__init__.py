"""What a model, a Trainer or a key may ask for beyond sharding a batch of text, a file each; none needs another.

Each has a `FEATURE` (hf/feature.py), or a class that the Trainer's strategy keeps (dropout, rollouts, trees).
"""
