"""What flashinfer's TRTLLM-gen MoE functions return, as a ``MoEOutput``, without importing it.

T num_tokens, K top_k (routed and fused shared experts together), H hidden_dim, R padded rows::

    do_finalize=True    output [T, H], or [output]
    do_finalize=False   [gemm2_output [R, H or wider], expert_weights [T, K],
                         expanded_idx_to_permuted_idx [T * K] int32]
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_fusion import expect
from moe_fusion.contract import MoEOutput, UnfinalizedMoEOutput

_TRIPLE = "[gemm2_output, expert_weights, expanded_idx_to_permuted_idx]"
_LORA = "with a LoRA delta the second product is still to be added, which a MoEOutput cannot hold"


def from_flashinfer(
    returned: Tensor | Sequence[Tensor],
    *,
    do_finalize: bool,
    hidden_dim: int,
    top_k: int | None = None,
    shared_output: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> MoEOutput:
    """A ``MoEOutput`` over the memory that flashinfer returned; nothing is copied.

    flashinfer folds the ``routed_scaling_factor`` that it is given into its ``expert_weights``:
    pass it here only if it was not passed there. With fp32 routing logits, versions before 0.6.15
    label bf16 weights as fp32; view them as bf16 first.

    Args:
        returned: what ``trtllm_*_moe(..., do_finalize=...)`` returned.
        do_finalize: what it was called with.
        hidden_dim: H, the model's; columns from there on are the kernel's padding.
        top_k: K, needed where ``expert_weights`` is flat.
        shared_output: [T, H], this rank's partial of a shared expert that is not fused, or None.
        routed_scaling_factor: multiplies the routed experts.

    Raises:
        TypeError: an element is no tensor, or its dtype is wrong.
        ValueError: the layout, a shape or a device is wrong.
    """
    routed: Tensor | UnfinalizedMoEOutput
    if do_finalize:
        routed = _columns("output", _only(returned), hidden_dim)
    else:
        routed = _unfinalized(returned, hidden_dim, top_k)
    return MoEOutput(routed, shared_output, routed_scaling_factor)


def _only(returned: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(returned, Tensor):
        return returned
    _expect_elements(returned, 1, "output or [output] (do_finalize=True)")
    return returned[0]


def _expect_elements(returned: Sequence[Tensor], count: int, layout: str) -> None:
    if not isinstance(returned, (list, tuple)):
        raise TypeError(f"returned: expected {layout}, got {type(returned).__name__}")
    if len(returned) != count:
        raise ValueError(
            f"returned: expected {layout}, got {len(returned)} elements"
            + (f" ({_LORA})" if len(returned) > count else "")
        )


def _unfinalized(
    returned: Tensor | Sequence[Tensor], hidden_dim: int, top_k: int | None
) -> UnfinalizedMoEOutput:
    if isinstance(returned, Tensor):
        raise TypeError(
            f"returned: expected {_TRIPLE} (do_finalize=False), got one tensor "
            f"{expect.sizes(returned)}"
        )
    _expect_elements(returned, 3, f"{_TRIPLE} (do_finalize=False)")
    rows, weights, index = returned
    rows = _columns("gemm2_output", rows, hidden_dim)
    expect.tensor("expert_weights", weights)
    if top_k is not None:
        weights = _by_token("expert_weights", weights, top_k)
    expect.rank("expert_weights", weights, "[T, K]")
    expect.tensor("expanded_idx_to_permuted_idx", index)
    if index.numel() != weights.numel():
        raise ValueError(
            f"expanded_idx_to_permuted_idx: expected T * K = {weights.numel()} entries, "
            f"as expert_weights {expect.sizes(weights)}, got {expect.sizes(index)}"
        )
    return UnfinalizedMoEOutput(rows, weights, index.view(weights.shape))


def _columns(name: str, rows: Tensor, hidden_dim: int) -> Tensor:
    """The first ``hidden_dim`` columns; the rest is padding."""
    expect.tensor(name, rows)
    if rows.dim() != 2 or rows.shape[1] < hidden_dim:
        raise ValueError(
            f"{name}: expected rows of at least H = {hidden_dim} elements, got {expect.sizes(rows)}"
        )
    return rows[:, :hidden_dim]


def _by_token(name: str, values: Tensor, top_k: int) -> Tensor:
    if top_k < 1 or values.numel() % top_k or (values.dim() == 2 and values.shape[1] != top_k):
        raise ValueError(
            f"{name}: expected [T, K] or [T * K] with K = {top_k}, got {expect.sizes(values)}"
        )
    return values.view(-1, top_k)
