"""Stands in for liger-kernel 0.8.5 where it is not installed: its names and signatures, in torch operations.

What matters to others is as in the real one: what it replaces, on an instance and in the model's file; that rotations
and gradients overwrite what they were given; that the fused loss makes its gradients in the forward pass.
"""
