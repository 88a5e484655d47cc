"""Producers: where a ``MoEOutput`` comes from.

:func:`grouped_mm_experts` computes the routed experts itself; :func:`from_flashinfer` and
:func:`from_vllm` take what those libraries return, and import neither.
"""

from moe_fusion.producers.flashinfer import from_flashinfer
from moe_fusion.producers.grouped_mm import grouped_mm_experts
from moe_fusion.producers.vllm import from_vllm

__all__ = ["from_flashinfer", "from_vllm", "grouped_mm_experts"]
