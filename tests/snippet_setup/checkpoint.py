"""A small checkpoint in ``folder``, and two ranks of which there is but this one."""

import os
import tempfile

import torch
import transformers
from conftest import make_fake_group

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
folder = tempfile.mkdtemp(dir=".")
_config = transformers.AutoConfig.for_model(
    "mixtral",
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    vocab_size=64,
    num_local_experts=4,
)
transformers.AutoModelForCausalLM.from_config(_config).save_pretrained(folder)
os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
make_fake_group(2)
ids = torch.arange(8).unsqueeze(0)
