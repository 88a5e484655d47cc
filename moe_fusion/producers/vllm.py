"""vLLM's un-reduced MoE output as a ``MoEOutput``; vLLM is not imported.

Its dataclasses are known by their fields, which have the names of ``moe_fusion.contract``::

    UnfinalizedMoEOutput   gemm2_permuted, expert_weights, expanded_idx_to_permuted_idx
    MoEOutput              routed, shared_output, routed_scaling_factor, max_num_tokens

``max_num_tokens`` sizes a workspace of vLLM's; here the token ceiling does, so it is not read.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from torch import Tensor

from moe_fusion.contract import MoEOutput, UnfinalizedMoEOutput

_UNFINALIZED = ("gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx")
_OUTPUT = ("routed", "shared_output", "routed_scaling_factor", "max_num_tokens")
_OUTPUT_MAY_LACK = "max_num_tokens"


def from_vllm(output: object) -> MoEOutput:
    """A ``MoEOutput`` over the tensors that ``output`` holds; nothing is copied.

    Args:
        output: vLLM's ``MoEOutput`` or ``UnfinalizedMoEOutput``, or a finalized [T, H] tensor. A
            field that this version does not know is an error, since it could change the meaning.

    Raises:
        TypeError: ``output`` is neither, or a field's kind or dtype is wrong.
        ValueError: a shape, stride or device is wrong.
    """
    names = _field_names(output)
    if isinstance(output, Tensor) or set(names) == set(_UNFINALIZED):
        return MoEOutput(_routed(output))
    if {*names, _OUTPUT_MAY_LACK} == set(_OUTPUT):
        return MoEOutput(
            _routed(output.routed),
            output.shared_output,
            output.routed_scaling_factor,
        )
    raise TypeError(
        f"output: expected a tensor or a dataclass with the fields {_OUTPUT} or {_UNFINALIZED}, "
        f"got {_described(output, names)}"
    )


def _routed(routed: object) -> Tensor | UnfinalizedMoEOutput:
    if isinstance(routed, Tensor):
        return routed
    names = _field_names(routed)
    if set(names) != set(_UNFINALIZED):
        raise TypeError(
            f"routed: expected a tensor or a dataclass with the fields {_UNFINALIZED}, "
            f"got {_described(routed, names)}"
        )
    return UnfinalizedMoEOutput(*(getattr(routed, name) for name in _UNFINALIZED))


def _field_names(value: object) -> tuple[str, ...]:
    if not is_dataclass(value):
        return ()
    return tuple(field.name for field in fields(value))


def _described(value: object, names: tuple[str, ...]) -> str:
    return f"{type(value).__name__} with the fields {names}" if names else type(value).__name__
