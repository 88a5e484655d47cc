"""What the grouped_mm producer refuses: each error says what was expected and what was got."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from moe_layers import INNER, E, H, K, Layer, T, layer

from moe_fusion.producers import grouped_mm_experts


def changed(**names):
    return {**{f.name: getattr(layer(), f.name) for f in dataclasses.fields(Layer)}, **names}


ERRORS = {
    "hidden_states' rank": (
        {"x": torch.zeros(1, T, H)},
        ValueError,
        f"hidden_states: expected shape [T, H], got [1, {T}, {H}]",
    ),
    "hidden_states' dtype": (
        {"x": torch.zeros(T, H, dtype=torch.float64)},
        TypeError,
        (
            "hidden_states: expected dtype in (torch.bfloat16, torch.float16, torch.float32), "
            "got torch.float64"
        ),
    ),
    "ids' dtype": (
        {"ids": torch.zeros(T, K)},
        TypeError,
        "expert_ids: expected dtype int32 or int64, got torch.float32",
    ),
    "no choices": (
        {"ids": torch.zeros(T, 0, dtype=torch.int32), "weights": torch.zeros(T, 0)},
        ValueError,
        f"expert_ids: expected shape [T, K] with K >= 1, got [{T}, 0]",
    ),
    "ids of other tokens": (
        {"ids": torch.zeros(T + 1, K, dtype=torch.int32)},
        ValueError,
        f"expert_ids: expected shape [T, K] = [{T}, {K}], got [{T + 1}, {K}]",
    ),
    "weights of another top-k": (
        {"weights": torch.zeros(T, K + 1)},
        ValueError,
        f"expert_weights: expected shape [T, K] = [{T}, {K}], got [{T}, {K + 1}]",
    ),
    "weights' dtype": (
        {"w13": torch.zeros(E, 2 * INNER, H, dtype=torch.bfloat16)},
        TypeError,
        "w13: expected dtype torch.float32, got torch.bfloat16",
    ),
    "w13 without its up half": (
        {"w13": torch.zeros(E, INNER, H)},
        ValueError,
        f"w13: expected shape [E, 2 * I, H] = [{E}, {2 * INNER}, {H}], got [{E}, {INNER}, {H}]",
    ),
    "w2 of other experts": (
        {"w2": torch.zeros(E + 1, H, INNER)},
        ValueError,
        f"w2: expected shape [E, H, I] = [{E}, {H}, {INNER}], got [{E + 1}, {H}, {INNER}]",
    ),
    "w2 transposed": (
        {"w2": torch.zeros(E, INNER, H)},
        ValueError,
        f"w2: expected shape [E, H, I] = [{E}, {H}, {H}], got [{E}, {INNER}, {H}]",
    ),
    "one matrix for all experts": (
        {"w2": torch.zeros(H, INNER)},
        ValueError,
        f"w2: expected shape [E, H, I], got [{H}, {INNER}]",
    ),
    "an intermediate size of 6": (
        {"w13": torch.zeros(E, 12, H), "w2": torch.zeros(E, H, 6)},
        ValueError,
        (
            "w2: expected a last dim of a multiple of 4 elements (16 bytes of torch.float32), "
            f"got [{E}, {H}, 6]"
        ),
    ),
    "rows that start anywhere": (
        {"w2": torch.zeros(E, H, INNER + 1)[..., :INNER]},
        ValueError,
        (
            "w2: expected matrices with one stride of 1 and the other a multiple of 4 elements "
            f"(16 bytes), got strides ({H * (INNER + 1)}, {INNER + 1}, 1)"
        ),
    ),
    "no contiguous dim": (
        {"w2": torch.zeros(E, H, 2 * INNER)[..., ::2]},
        ValueError,
        (
            "w2: expected matrices with one stride of 1 and the other a multiple of 4 elements "
            f"(16 bytes), got strides ({2 * H * INNER}, {2 * INNER}, 2)"
        ),
    ),
    "no tensor": (
        {"weights": None},
        TypeError,
        "expert_weights: expected a torch.Tensor, got NoneType",
    ),
    "another device": (
        {"w2": torch.zeros(E, H, INNER, device="meta")},
        ValueError,
        "w2: expected device cpu (that of the rows), got meta",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    arguments, kind, message = ERRORS[case]
    with pytest.raises(kind) as caught:
        grouped_mm_experts(*changed(**arguments).values())
    assert str(caught.value) == message


@pytest.mark.usefixtures("fake_group")
def test_errors_of_keywords():
    args = layer().args()
    with pytest.raises(ValueError, match="activation") as caught:
        grouped_mm_experts(*args, activation="swish")
    assert str(caught.value) == (
        "activation: expected one of ('silu', 'gelu', 'gelu_tanh', 'relu') or a function, "
        "got 'swish'"
    )
    with pytest.raises(ValueError, match="activation's result") as caught:
        grouped_mm_experts(*args, activation=torch.relu)
    assert str(caught.value) == (
        f"activation's result: expected shape [R, I] = [{T * K}, {INNER}], "
        f"got [{T * K}, {2 * INNER}]"
    )
    with pytest.raises(ValueError, match=r"one of \['0'\], got 'tp'"):
        grouped_mm_experts(*args, group="tp")
    with pytest.raises(ValueError, match=r"shared_output: expected shape \[T, H\]"):
        grouped_mm_experts(*args, shared_expert=lambda x: x[:, :8])
    with pytest.raises(TypeError, match="shared_expert: expected a function of hidden_states, got"):
        grouped_mm_experts(*args, shared_expert=args[0])
    with pytest.raises(ValueError, match="local_expert_offset: expected an id >= 0, got -1"):
        grouped_mm_experts(*args, local_expert_offset=-1)
