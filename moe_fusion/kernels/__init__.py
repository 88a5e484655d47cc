"""Triton kernels of the op, imported at the first launch and never by ``import moe_fusion``."""
