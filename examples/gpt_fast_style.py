"""Tensor parallelism by hand, as in gpt-fast: einsum experts, functional all_reduce, a KV cache.

The model knows nothing of moe_fusion. The prompt runs as it is; decoding one token is compiled.

torchrun --nproc-per-node 2 examples/gpt_fast_style.py
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.nn import functional

import moe_fusion

DIM, HEADS, HEAD, EXPERTS, TOP_K, INNER, VOCAB, LENGTH, LAYERS = 64, 4, 32, 8, 2, 32, 128, 32, 2


def all_reduce(partial):
    return funcol.all_reduce(partial, "sum", dist.group.WORLD)


def shard(*sizes, dim):
    """This rank's slice of a random weight that is the same on every rank."""
    return (0.2 * torch.randn(sizes)).chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wqkv = shard(HEADS, 3 * HEAD, DIM, dim=0)
        self.wo = shard(HEADS, HEAD, DIM, dim=0)
        self.cache = torch.zeros(2, len(self.wo), LENGTH, HEAD)

    def forward(self, x, positions):
        query, key, value = torch.einsum("td,nhd->nth", x, self.wqkv).chunk(3, -1)
        self.cache[:, :, positions] = torch.stack([key, value])
        mask = torch.arange(LENGTH) <= positions[:, None]
        y = functional.scaled_dot_product_attention(query, *self.cache, attn_mask=mask)
        return all_reduce(torch.einsum("nth,nhd->td", y, self.wo))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = 0.2 * torch.randn(DIM, EXPERTS)
        self.w1, self.w3 = (shard(EXPERTS, INNER, DIM, dim=1) for _ in range(2))
        self.w2 = shard(EXPERTS, DIM, INNER, dim=2)

    def forward(self, x):
        weights, ids = (x @ self.gate).softmax(-1).topk(TOP_K)
        weights = weights / weights.sum(-1, keepdim=True)
        up = functional.silu(torch.einsum("td,taid->tai", x, self.w1[ids]))
        up = up * torch.einsum("td,taid->tai", x, self.w3[ids])
        rows = torch.einsum("tai,tadi->tad", up, self.w2[ids])
        return all_reduce(torch.einsum("tad,ta->td", rows, weights))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.experts = Attention(), Experts()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM, 1e-5), nn.RMSNorm(DIM, 1e-5)

    def forward(self, x, positions):
        h = x + self.attention(self.attention_norm(x), positions)
        return h + self.experts(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM, 1e-5)
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens, positions):
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return self.output(self.norm(x)[-1]).argmax()


@torch.no_grad()
def generate(model, decode_one_token, prompt, count=8):
    tokens, positions = model(prompt, torch.arange(len(prompt)))[None], torch.tensor([len(prompt)])
    chosen = [tokens.item()]
    for _ in range(count - 1):
        tokens = decode_one_token(tokens, positions)[None]
        positions = positions + 1
        chosen.append(tokens.item())
    return chosen


def main():
    dist.init_process_group("gloo")
    model = Transformer()
    prompt = torch.randint(VOCAB, (12,), generator=torch.Generator().manual_seed(1))
    unfused = generate(model, model, prompt)
    with moe_fusion.fusing() as report:
        fused = generate(model, torch.compile(model, fullgraph=True), prompt)
    if dist.get_rank() == 0:
        print("unfused:", unfused)
        print("fused:", fused)
        print(report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
