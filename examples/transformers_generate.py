"""An unmodified transformers model generates: the prompt's tails stay as they are, a token's fuse.

torchrun --nproc-per-node 2 examples/transformers_generate.py
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import moe_fusion

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
    "initializer_range": 0.1,
}


def load():
    """A small random Mixtral, saved by rank 0 and loaded with transformers' tensor parallelism."""
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        if dist.get_rank() == 0:
            torch.manual_seed(0)
            config = AutoConfig.for_model("mixtral", **SIZES)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        dist.barrier()
        plan = DistributedConfig(tp_plan="auto")
        model = AutoModelForCausalLM.from_pretrained(shared[0], distributed_config=plan)
        dist.barrier()
    return model


def generate(model, prompt):
    """Greedy, with a static cache; the graphs are ours to compile."""
    tokens = model.generate(
        prompt,
        max_new_tokens=8,
        do_sample=False,
        cache_implementation="static",
        disable_compile=True,
        pad_token_id=0,
    )
    return tokens[0, prompt.shape[1] :].tolist()


def main():
    dist.init_process_group("gloo")
    model = load()
    prompt = torch.randint(128, (1, 12), generator=torch.Generator().manual_seed(1))
    unfused = generate(model, prompt)
    with moe_fusion.fusing(moe_fusion.FusionConfig(token_ceiling=4)) as report:
        model.forward = torch.compile(model.forward, fullgraph=True, dynamic=False)
        fused = generate(model, prompt)
    if dist.get_rank() == 0:
        print("unfused:", unfused)
        print("fused:", fused)
        print(report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
