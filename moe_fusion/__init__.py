"""moe-fusion: the tail of a tensor-parallel MoE layer, fused by a torch.compile pass."""
