"""What block.py makes, and the tensors of a MoE layer of 8 experts with an intermediate size."""

import torch
from conftest import make_fake_group
from factories import rms_norm

make_fake_group(2)
model, (tokens,) = rms_norm()
hidden_dim = 64
hidden, residual = torch.randn(2, 6, hidden_dim)
w13, w2 = torch.randn(8, 64, hidden_dim), torch.randn(8, hidden_dim, 32)
expert_weights, expert_ids = torch.randn(6, 8).softmax(-1).topk(2)
