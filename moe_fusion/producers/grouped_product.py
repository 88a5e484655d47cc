"""``moe_fusion::grouped_mm``: torch's grouped matrix product for every activation dtype.

torch's own op is traced in bf16 only, so fp16 and fp32 go through an op that the compiler does not
look into. It computes the same: rows ``ends[e - 1] : ends[e]`` times ``weights[e]``. Rows from
``ends[-1]`` on are not computed and hold whatever the memory held.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm as torch_grouped_mm

from moe_fusion.errors import InferenceOnlyError

_library = torch.library.Library("moe_fusion", "FRAGMENT")
_library.define(
    "grouped_mm("
    "Tensor rows, "  # [R, in], last dim contiguous
    "Tensor weights, "  # [E, in, out], usually the transposed view of [E, out, in]
    "Tensor ends"  # [E] int32, where each expert's rows end
    ") -> Tensor",  # [R, out]
    tags=(torch.Tag.pt2_compliant_tag,),
)
OP = torch.ops.moe_fusion.grouped_mm.default


def _kernel(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return torch_grouped_mm(rows, weights, offs=ends)


def _fake(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:  # noqa: ARG001 - the op's schema
    return rows.new_empty((rows.shape[0], weights.shape[2]))


def _backward(*_: object) -> None:
    raise InferenceOnlyError("grouped_mm")


_library.impl("grouped_mm", _kernel, "CPU")
_library.impl("grouped_mm", _kernel, "CUDA")
torch.library.register_fake("moe_fusion::grouped_mm", _fake, lib=_library)
torch.library.register_autograd("moe_fusion::grouped_mm", _backward, lib=_library)


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows times their expert's matrix: [R, out].

    Args:
        rows: [R, in], sorted by expert.
        weights: [E, out, in], read in place.
        ends: [E] int32, where each expert's rows end.
    """
    weights = weights.transpose(1, 2)
    if rows.dtype == torch.bfloat16:
        return torch_grouped_mm(rows, weights, offs=ends)
    product: Tensor = OP(rows, weights, ends)
    return product
