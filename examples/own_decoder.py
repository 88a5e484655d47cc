"""A decoder of our own: grouped_mm experts, and one layer for prompts and single tokens alike.

torchrun --nproc-per-node 2 examples/own_decoder.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import moe_fusion
from moe_fusion.producers import grouped_mm_experts

HIDDEN, HEADS, HEAD, EXPERTS, TOP_K, INNER, VOCAB, LENGTH, LAYERS = 64, 4, 16, 8, 2, 32, 128, 32, 2


def shard(weight, dim, rank, world_size):
    """This rank's slice; every rank draws the same random weights."""
    return nn.Parameter(weight.chunk(world_size, dim)[rank].contiguous(), requires_grad=False)


class Layer(nn.Module):
    """Each method returns this rank's partial; the norms reduce it."""

    def __init__(self, rank, world_size):
        super().__init__()
        where = (rank, world_size)
        self.qkv = shard(0.2 * torch.randn(HEADS, 3 * HEAD, HIDDEN), 0, *where)
        self.out = shard(0.2 * torch.randn(HEADS, HEAD, HIDDEN), 0, *where)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        w13 = shard(0.2 * torch.randn(EXPERTS, 2, INNER, HIDDEN), 2, *where)
        self.w13 = nn.Parameter(w13.flatten(1, 2), requires_grad=False)
        self.w2 = shard(0.2 * torch.randn(EXPERTS, HIDDEN, INNER), 2, *where)
        self.after_attention = moe_fusion.MoETailRMSNorm(HIDDEN)
        self.after_experts = moe_fusion.MoETailRMSNorm(HIDDEN)
        self.register_buffer("cache", torch.zeros(2, HEADS // world_size, LENGTH, HEAD))

    def forward(self, hidden, residual, positions):
        """[T, H] and [T, H] in, the same out."""
        hidden, residual = self.after_attention(self.attention(hidden, positions), residual)
        weights, ids = self.router(hidden).softmax(-1).topk(TOP_K)
        experts = grouped_mm_experts(hidden, ids, weights, self.w13, self.w2)
        return self.after_experts(experts, residual)

    def attention(self, hidden, positions):
        query, key, value = torch.einsum("th,ndh->ntd", hidden, self.qkv).chunk(3, -1)
        self.cache[:, :, positions] = torch.stack([key, value])
        seen = torch.arange(LENGTH) <= positions[:, None]
        rows = functional.scaled_dot_product_attention(query, *self.cache, attn_mask=seen)
        return torch.einsum("ntd,ndh->th", rows, self.out)


class Decoder(nn.Module):
    def __init__(self, rank=0, world_size=1):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.output = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.layers = nn.ModuleList(Layer(rank, world_size) for _ in range(LAYERS))

    def forward(self, tokens, positions):
        residual = self.embedding(tokens)
        hidden = self.norm(residual)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, positions)
        return self.output(hidden[-1]).argmax()


@torch.no_grad()
def generate(model, decode, prompt, count=8):
    tokens, positions = model(prompt, torch.arange(len(prompt)))[None], torch.tensor([len(prompt)])
    chosen = [tokens.item()]
    for _ in range(count - 1):
        tokens = decode(tokens, positions)[None]
        positions = positions + 1
        chosen.append(tokens.item())
    return chosen


def main():
    prompt = torch.randint(VOCAB, (12,), generator=torch.Generator().manual_seed(1))
    whole_model = Decoder()  # no group yet: this process alone, nothing is reduced
    whole = generate(whole_model, whole_model, prompt)
    dist.init_process_group("gloo")
    model = Decoder(dist.get_rank(), dist.get_world_size())
    # The producer finalizes the prompt's 12 tokens, and leaves one token to the fused tail.
    with moe_fusion.fusing(moe_fusion.FusionConfig(token_ceiling=4)) as report:
        eager = generate(model, model, prompt)
        compiled = generate(model, torch.compile(model, fullgraph=True), prompt)
    if dist.get_rank() == 0:
        print("one process:", whole)
        print("tensor-parallel:", eager)
        print("compiled:", compiled)
        print(report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
