"""What an older torch than the one that CI pins does otherwise."""

import pytest
import torch

# torch 2.11: Inductor takes addcmul apart and drops a conversion there and back, and a group that
# is an operand of a collective is its name.
OLD_TORCH = torch.__version__ < "2.13"
NEW_TORCH_ONLY = pytest.mark.skipif(OLD_TORCH, reason="graphs of torch 2.11 do not have this")
