"""Tiny models of every type of transformers, and how exactly they train on two ranks."""
