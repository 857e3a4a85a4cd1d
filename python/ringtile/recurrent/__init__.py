"""Recurrent layers over a sharded sequence: causal convolution, gated delta rule, Mamba-2."""
