"""Ops with the signatures of those that the page registers; they are never called."""

import torch

import moe_fusion  # noqa: F401 - the page uses it

_SCHEMAS = {
    "vllm": "all_reduce(Tensor input, str group_name) -> Tensor",
    "lib": "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    "_C": "fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float epsilon)"
    " -> ()",
}
_libraries = [torch.library.Library(namespace, "DEF") for namespace in _SCHEMAS]
for _library, _schema in zip(_libraries, _SCHEMAS.values(), strict=True):
    _library.define(_schema)
name = "0"
