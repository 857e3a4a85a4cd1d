"""Layers of a model that run on chunks of tokens: forward, and again in the backward."""
