"""A group of two of which this is one rank, and a MoE layer's un-reduced output in bf16."""

import torch
import torch.distributed as dist
from conftest import make_fake_group

make_fake_group(2)
group = dist.group.WORLD
_tokens, _top_k, _hidden = 6, 2, 64
rows = torch.randn(_tokens * _top_k, _hidden, dtype=torch.bfloat16)
expert_weights = torch.rand(_tokens, _top_k)
index = torch.randperm(_tokens * _top_k).view(_tokens, _top_k).int()
index[0, 0] = -1
shared, residual = torch.randn(2, _tokens, _hidden, dtype=torch.bfloat16)
norm_weight = torch.rand(_hidden, dtype=torch.bfloat16)
