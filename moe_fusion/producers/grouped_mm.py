"""Routed experts on torch's grouped matrix product, up to and with GEMM2.

T num_tokens, K top_k, H hidden_dim, E experts on this rank, I an expert's intermediate size on this
rank, R = T * K rows. The rows are sorted by expert on the device; nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moe_fusion import expect
from moe_fusion.admission import admits
from moe_fusion.contract import MoEOutput, UnfinalizedMoEOutput
from moe_fusion.producers.grouped_product import grouped_product
from moe_fusion.topology import reducing_group

ROW_ALIGNMENT_BYTES = 16
# Source: torch's grouped_mm refuses operands whose rows start elsewhere.

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


def grouped_mm_experts(
    hidden_states: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    activation: str | Callable[[Tensor], Tensor] = "silu",
    local_expert_offset: int = 0,
    shared_expert: Callable[[Tensor], Tensor] | None = None,
    routed_scaling_factor: float = 1.0,
    group: str | dist.ProcessGroup | None = None,
) -> MoEOutput:
    """This rank's addend of a MoE layer, unfinalized where a fused consumer takes it.

    Tensor-parallel ranks hold a slice of I of every expert. Expert-parallel ranks hold the experts
    ``local_expert_offset .. local_expert_offset + E - 1`` whole: a token's other experts map to -1,
    and neither matrix product computes a row for them. The weights are read where they are.

    Args:
        hidden_states: [T, H] bf16, fp16 or fp32; T may be 0.
        expert_ids: [T, K] int32 or int64, the router's choice; an id of no local expert is another
            rank's.
        expert_weights: [T, K] bf16, fp16 or fp32, the router's weights.
        w13: [E, 2 * I, H], gate above up; for a callable ``activation`` [E, N, H] with any N.
        w2: [E, H, I].
        activation: ``act(gate) * up`` with act one of "silu", "gelu", "gelu_tanh", "relu"; or a
            function from [R, N] to [R, I], such as a clamped or an ungated activation.
        local_expert_offset: the id of this rank's first expert.
        shared_expert: called with ``hidden_states``, gives this rank's partial [T, H].
        routed_scaling_factor: multiplies the routed experts only.
        group: the tensor-parallel group or its name; None is the default group, and without one
            this process alone.

    Returns:
        A ``MoEOutput``. Where ``moe_fusion.admits`` says yes its rows are unfinalized; else
        ``routed`` is the finished partial [T, H], with the scale and the shared expert in it.

    Raises:
        TypeError: an argument has a wrong kind or dtype.
        ValueError: a shape, device, alignment or group is wrong, or the activation is unknown.
    """
    if local_expert_offset < 0:
        raise ValueError(f"local_expert_offset: expected an id >= 0, got {local_expert_offset}")
    if not (shared_expert is None or callable(shared_expert)):
        got = type(shared_expert).__name__
        raise TypeError(f"shared_expert: expected a function of hidden_states, got {got}")
    _check_tokens(hidden_states, expert_ids, expert_weights)
    _check_weights(hidden_states, w13, w2, gated=not callable(activation))
    order, ends, index = _sort_by_expert(expert_ids, local_expert_offset, w13.shape[0])
    rows = hidden_states[order // expert_ids.shape[1]]
    rows = _experts(rows, ends, w13, w2, _activation(activation))
    output = MoEOutput(
        UnfinalizedMoEOutput(rows, expert_weights, index),
        None if shared_expert is None else shared_expert(hidden_states),
        routed_scaling_factor,
    )
    reducing = reducing_group(group)
    if reducing is not None and admits(
        output.num_tokens, output.hidden_dim, output.dtype, reducing
    ):
        return output
    return MoEOutput(output.finalize())


def _activation(activation: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    if callable(activation):
        return activation
    if activation not in GATES:
        raise ValueError(
            f"activation: expected one of {tuple(GATES)} or a function, got {activation!r}"
        )
    gate_function = GATES[activation]

    def gated(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate_function(gate) * up

    return gated


def _experts(
    rows: Tensor,
    ends: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """GEMM1, activation and GEMM2 of rows [R, H] that are sorted by expert: [R, H]."""
    # Not at the head of the file: it imports sympy.
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    if guard_or_false(rows.shape[0] == 0):
        return rows
    inner = activation(grouped_product(rows, w13, ends))
    expect.tensor("activation's result", inner)
    expect.dtype("activation's result", inner, rows.dtype)
    expect.shape("activation's result", inner, "[R, I]", rows.shape[0], w2.shape[2])
    return grouped_product(inner.contiguous(), w2, ends)


def _sort_by_expert(
    expert_ids: Tensor, local_expert_offset: int, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The choices in the order of their experts, other ranks' last.

    Example: ids [[1, 0], [5, 1]] of 2 experts are flat [1, 0, 5, 1]; sorted they are the choices
    [1, 0, 3, 2], of which expert 0 has 1 and expert 1 has 2: ends [1, 3]. The map is
    [[1, 0], [-1, 2]].

    Returns:
        The choice in each row [R], where each expert's rows end [E] int32, the map [T, K] int32.
    """
    local = expert_ids.reshape(-1).long() - local_expert_offset
    present = (local >= 0) & (local < num_experts)
    experts, order = torch.where(present, local, num_experts).sort(stable=True)
    each = torch.arange(num_experts, device=expert_ids.device)
    ends = torch.searchsorted(experts, each, right=True, out_int32=True)
    row = torch.arange(order.shape[0], device=order.device)
    index = torch.zeros_like(order).scatter(0, order, row)
    index = torch.where(present, index, -1).int()
    return order, ends, index.view(expert_ids.shape)


def _check_tokens(hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> None:
    expect.tensor("hidden_states", hidden_states)
    expect.floating("hidden_states", hidden_states)
    expect.rank("hidden_states", hidden_states, "[T, H]")
    expect.tensor("expert_ids", expert_ids)
    if expert_ids.dtype not in {torch.int32, torch.int64}:
        raise TypeError(f"expert_ids: expected dtype int32 or int64, got {expert_ids.dtype}")
    expect.rank("expert_ids", expert_ids, "[T, K]")
    if expert_ids.shape[1] == 0:
        raise ValueError(
            f"expert_ids: expected shape [T, K] with K >= 1, got {expect.sizes(expert_ids)}"
        )
    expect.shape("expert_ids", expert_ids, "[T, K]", hidden_states.shape[0], expert_ids.shape[1])
    expect.device("expert_ids", expert_ids, hidden_states.device)
    expect.tensor("expert_weights", expert_weights)
    expect.floating("expert_weights", expert_weights)
    expect.shape("expert_weights", expert_weights, "[T, K]", *expert_ids.shape)
    expect.device("expert_weights", expert_weights, hidden_states.device)


def _check_weights(hidden_states: Tensor, w13: Tensor, w2: Tensor, *, gated: bool) -> None:
    for name, weights, legend in (("w13", w13, "[E, N, H]"), ("w2", w2, "[E, H, I]")):
        expect.tensor(name, weights)
        expect.dtype(name, weights, hidden_states.dtype)
        expect.rank(name, weights, legend)
        expect.device(name, weights, hidden_states.device)
        _check_alignment(name, weights)
    num_experts, hidden_dim, intermediate = w2.shape
    expect.shape("w2", w2, "[E, H, I]", w13.shape[0], hidden_states.shape[1], intermediate)
    if gated:
        wanted = (num_experts, 2 * intermediate, hidden_dim)
        expect.shape("w13", w13, "[E, 2 * I, H]", *wanted)
    else:
        expect.shape("w13", w13, "[E, N, H]", num_experts, w13.shape[1], hidden_dim)


def _check_alignment(name: str, weights: Tensor) -> None:
    """Each matrix has one contiguous dimension, and a size and stride of whole 16 bytes."""
    elements = ROW_ALIGNMENT_BYTES // weights.element_size()
    if weights.shape[2] % elements:
        raise ValueError(
            f"{name}: expected a last dim of a multiple of {elements} elements "
            f"({ROW_ALIGNMENT_BYTES} bytes of {weights.dtype}), got {expect.sizes(weights)}"
        )
    _, row, column = weights.stride()
    if 1 not in (row, column) or max(row, column) % elements:
        raise ValueError(
            f"{name}: expected matrices with one stride of 1 and the other a multiple of "
            f"{elements} elements ({ROW_ALIGNMENT_BYTES} bytes), got strides {weights.stride()}"
        )
