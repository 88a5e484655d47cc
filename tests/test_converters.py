"""flashinfer's and vLLM's outputs as a ``MoEOutput``: their layouts and shapes, without either."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, make_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_fusion import UnfinalizedMoEOutput
from moe_fusion.producers import from_flashinfer, from_vllm

T, K, H, EXPERTS, TILE = 6, 4, 64, 16, 8
BF16 = torch.bfloat16
MAP = "expanded_idx_to_permuted_idx"
TRIPLE = f"[gemm2_output, expert_weights, {MAP}]"


@dataclass
class Kernel:
    """What a kernel that tiles its rows by expert leaves, and what its own finalize would give."""

    rows: Tensor
    weights: Tensor
    index: Tensor
    exact: Tensor  # fp64

    @property
    def finalized(self):
        return self.exact.to(BF16)


def kernel(*, tokens=T, width=H, weights=BF16, local=EXPERTS):
    """Each expert's rows begin a tile of 8; of the others, and of padding columns, all is NaN."""
    g = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:K] for _ in range(tokens)])
    values = torch.randn(tokens, K, H, generator=g).to(BF16)
    routing = torch.rand(tokens, K, generator=g).to(weights)
    padded = tokens * K + EXPERTS * (TILE - 1)
    rows = torch.full((-(-padded // TILE) * TILE, width), torch.nan, dtype=BF16)
    index = torch.full((tokens * K,), -1, dtype=torch.int32)
    start = 0
    for expert in range(local):
        chosen = (ids.flatten() == expert).nonzero().flatten()
        index[chosen] = torch.arange(start, start + len(chosen), dtype=torch.int32)
        rows[start : start + len(chosen), :H] = values.view(-1, H)[chosen]
        start += -(-len(chosen) // TILE) * TILE
    present = (ids < local).unsqueeze(-1)
    total = torch.where(present, values.double(), 0.0) * routing.double().unsqueeze(-1)
    return Kernel(rows, routing, index, total.sum(1))


def assert_partial(output, want):
    torch.testing.assert_close(output.finalize(), want, rtol=2**-7, atol=1e-6)


CASES = {
    "tensor-parallel": {},
    "expert-parallel": {"local": EXPERTS // 2},
    "no local expert": {"local": 0},
    "fp32 routing weights": {"weights": torch.float32},
    "padded columns": {"width": 128},
    "one token": {"tokens": 1},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("flat_weights", [False, True])
def test_flashinfers_triple(case, flat_weights):
    """The map is flat; views only, so the kernel's memory is what is read."""
    made = kernel(**CASES[case])
    weights = made.weights.flatten() if flat_weights else made.weights
    output = from_flashinfer(
        [made.rows, weights, made.index],
        do_finalize=False,
        hidden_dim=H,
        top_k=K if flat_weights else None,
    )
    routed = output.routed
    assert isinstance(routed, UnfinalizedMoEOutput)
    assert routed.gemm2_permuted.shape == (made.rows.shape[0], H)
    assert routed.expanded_idx_to_permuted_idx.shape == routed.expert_weights.shape
    assert routed.expert_weights.dtype == made.weights.dtype
    for view, memory in (
        (routed.gemm2_permuted, made.rows),
        (routed.expert_weights, made.weights),
        (routed.expanded_idx_to_permuted_idx, made.index),
    ):
        assert view.data_ptr() == memory.data_ptr()
    assert_partial(output, made.finalized)


def test_flashinfers_triple_of_no_tokens():
    triple = [
        torch.empty(0, H, dtype=BF16),
        torch.empty(0, K, dtype=BF16),
        torch.empty(0, dtype=torch.int32),
    ]
    output = from_flashinfer(triple, do_finalize=False, hidden_dim=H)
    assert output.finalize().shape == (0, H)


@pytest.mark.parametrize("layout", [lambda x: x, lambda x: [x], lambda x: (x,)])
def test_flashinfers_finalized_layouts(layout):
    finalized = kernel().finalized
    output = from_flashinfer(layout(finalized), do_finalize=True, hidden_dim=H)
    assert output.routed.data_ptr() == finalized.data_ptr()
    assert torch.equal(output.finalize(), finalized)


@pytest.mark.parametrize("do_finalize", [False, True])
def test_what_flashinfer_does_not_know_of(do_finalize):
    made = kernel()
    shared = torch.full((T, H), 0.5, dtype=BF16)
    routed = made.finalized if do_finalize else made.exact
    returned = [made.finalized] if do_finalize else [made.rows, made.weights, made.index]
    output = from_flashinfer(
        returned,
        do_finalize=do_finalize,
        hidden_dim=H,
        shared_output=shared,
        routed_scaling_factor=2.0,
    )
    assert_partial(output, (2.0 * routed.double() + 0.5).to(BF16))


def triple(**changed):
    made = kernel()
    parts = {"rows": made.rows, "weights": made.weights, "index": made.index, **changed}
    return list(parts.values())


LORA = "with a LoRA delta the second product is still to be added, which a MoEOutput cannot hold"
FLASHINFER_ERRORS = {
    "a tensor for a triple": (
        lambda: from_flashinfer(torch.zeros(T, H), do_finalize=False, hidden_dim=H),
        TypeError,
        f"returned: expected {TRIPLE} (do_finalize=False), got one tensor [{T}, {H}]",
    ),
    "one element for a triple": (
        lambda: from_flashinfer([torch.zeros(T, H)], do_finalize=False, hidden_dim=H),
        ValueError,
        f"returned: expected {TRIPLE} (do_finalize=False), got 1 elements",
    ),
    "a triple for an output": (
        lambda: from_flashinfer(triple(), do_finalize=True, hidden_dim=H),
        ValueError,
        f"returned: expected output or [output] (do_finalize=True), got 3 elements ({LORA})",
    ),
    "a LoRA quadruple": (
        lambda: from_flashinfer([*triple(), torch.zeros(9, 8)], do_finalize=False, hidden_dim=H),
        ValueError,
        f"returned: expected {TRIPLE} (do_finalize=False), got 4 elements ({LORA})",
    ),
    "nothing": (
        lambda: from_flashinfer(None, do_finalize=True, hidden_dim=H),
        TypeError,
        "returned: expected output or [output] (do_finalize=True), got NoneType",
    ),
    "narrow rows": (
        lambda: from_flashinfer(triple(), do_finalize=False, hidden_dim=2 * H),
        ValueError,
        f"gemm2_output: expected rows of at least H = {2 * H} elements, got [136, {H}]",
    ),
    "no weights, as of packed routing": (
        lambda: from_flashinfer(triple(weights=None), do_finalize=False, hidden_dim=H),
        TypeError,
        "expert_weights: expected a torch.Tensor, got NoneType",
    ),
    "flat weights without K": (
        lambda: from_flashinfer(triple(weights=torch.ones(T * K)), do_finalize=False, hidden_dim=H),
        ValueError,
        f"expert_weights: expected shape [T, K], got [{T * K}]",
    ),
    "weights of another K": (
        lambda: from_flashinfer(triple(), do_finalize=False, hidden_dim=H, top_k=8),
        ValueError,
        f"expert_weights: expected [T, K] or [T * K] with K = 8, got [{T}, {K}]",
    ),
    "a map of other tokens": (
        lambda: from_flashinfer(
            triple(index=torch.zeros(T, dtype=torch.int32)), do_finalize=False, hidden_dim=H
        ),
        ValueError,
        f"{MAP}: expected T * K = {T * K} entries, as expert_weights [{T}, {K}], got [{T}]",
    ),
    "an int64 map": (
        lambda: from_flashinfer(
            triple(index=torch.zeros(T * K, dtype=torch.int64)), do_finalize=False, hidden_dim=H
        ),
        TypeError,
        f"{MAP}: expected dtype torch.int32, got torch.int64",
    ),
    "quantized rows": (
        lambda: from_flashinfer(
            triple(rows=torch.zeros(99, H, dtype=torch.uint8)), do_finalize=False, hidden_dim=H
        ),
        TypeError,
        (
            "gemm2_permuted: expected dtype in (torch.bfloat16, torch.float16, torch.float32), "
            "got torch.uint8"
        ),
    ),
}


@pytest.mark.parametrize("case", FLASHINFER_ERRORS)
def test_flashinfers_errors(case):
    call, kind, message = FLASHINFER_ERRORS[case]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


@dataclass
class VllmUnfinalized:
    """The fields of ``vllm.model_executor.layers.fused_moe.moe_output.UnfinalizedMoEOutput``."""

    gemm2_permuted: Tensor
    expert_weights: Tensor
    expanded_idx_to_permuted_idx: Tensor


@dataclass
class VllmOutput:
    """The fields of ``MoEOutput`` in the same module."""

    routed: Any
    shared_output: Tensor | None = None
    routed_scaling_factor: float = 1.0
    max_num_tokens: int = 0


def vllm_unfinalized(**case):
    made = kernel(**case)
    index = made.index.view(made.weights.shape)
    return made, VllmUnfinalized(made.rows, made.weights, index)


@pytest.mark.parametrize("case", [name for name in CASES if name != "padded columns"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_vllms_unfinalized_output(case, wrapped):
    made, unfinalized = vllm_unfinalized(**CASES[case])
    output = from_vllm(VllmOutput(unfinalized, max_num_tokens=128) if wrapped else unfinalized)
    assert isinstance(output.routed, UnfinalizedMoEOutput)
    assert output.routed.gemm2_permuted is made.rows
    assert output.routed.expert_weights is made.weights
    assert_partial(output, made.finalized)


@pytest.mark.parametrize("unfinalized", [True, False])
def test_vllms_shared_output_and_scale(unfinalized):
    made, rows = vllm_unfinalized()
    shared = torch.full((T, H), 0.5, dtype=BF16)
    output = from_vllm(VllmOutput(rows if unfinalized else made.finalized, shared, 2.0, 64))
    assert output.shared_output is shared
    routed = made.exact if unfinalized else made.finalized
    assert_partial(output, (2.0 * routed.double() + 0.5).to(BF16))


def test_vllms_plain_output():
    finalized = kernel().finalized
    assert from_vllm(finalized).routed is finalized


def test_a_version_of_vllm_without_the_workspaces_size():
    older = make_dataclass("MoEOutput", ["routed", "shared_output", "routed_scaling_factor"])
    made = kernel()
    assert torch.equal(from_vllm(older(made.finalized, None, 1.0)).finalize(), made.finalized)


OUTPUT_FIELDS = "('routed', 'shared_output', 'routed_scaling_factor', 'max_num_tokens')"
ROWS_FIELDS = f"('gemm2_permuted', 'expert_weights', '{MAP}')"
Newer = make_dataclass("MoEOutput", [*VllmOutput.__dataclass_fields__, "gate"])
VLLM_ERRORS = {
    "a field of a later version": (
        lambda: Newer(torch.zeros(T, H), None, 1.0, 0, None),
        TypeError,
        (
            f"output: expected a tensor or a dataclass with the fields {OUTPUT_FIELDS} or "
            f"{ROWS_FIELDS}, got MoEOutput with the fields {OUTPUT_FIELDS[:-1]}, 'gate')"
        ),
    ),
    "a tuple": (
        lambda: (torch.zeros(T, H), None),
        TypeError,
        (
            f"output: expected a tensor or a dataclass with the fields {OUTPUT_FIELDS} or "
            f"{ROWS_FIELDS}, got tuple"
        ),
    ),
    "no routed part": (
        lambda: VllmOutput(None),
        TypeError,
        f"routed: expected a tensor or a dataclass with the fields {ROWS_FIELDS}, got NoneType",
    ),
    "a flat map": (
        lambda: VllmUnfinalized(torch.zeros(99, H), torch.ones(T, K), torch.zeros(T * K).int()),
        ValueError,
        f"{MAP}: expected shape [T, K], got [{T * K}]",
    ),
    "shared output of another dtype": (
        lambda: VllmOutput(torch.zeros(T, H), torch.zeros(T, H, dtype=BF16)),
        TypeError,
        "shared_output: expected dtype torch.float32, got torch.bfloat16",
    ),
}


@pytest.mark.parametrize("case", VLLM_ERRORS)
def test_vllms_errors(case):
    make, kind, message = VLLM_ERRORS[case]
    with pytest.raises(kind) as caught:
        from_vllm(make())
    assert str(caught.value) == message


def test_both_are_traced_without_a_graph_break():
    made, unfinalized = vllm_unfinalized()

    def function(rows, weights, index):
        ours = from_flashinfer([rows, weights, index], do_finalize=False, hidden_dim=H)
        theirs = VllmOutput(VllmUnfinalized(rows, weights, index.view(-1, K)))
        return ours.finalize(), from_vllm(theirs).finalize()

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    for got in compiled(made.rows, made.weights, made.index):
        torch.testing.assert_close(got, made.finalized, rtol=2**-7, atol=1e-6)
    assert unfinalized.gemm2_permuted is made.rows


def test_torch_alone_is_imported():
    code = (
        "import sys, torch, moe_fusion.producers as p\n"
        "heavy = ('triton', 'sympy', 'torch._dynamo', 'moe_fusion.op', 'moe_fusion.passes')\n"
        "print([name for name in heavy if name in sys.modules])\n"
        "p.from_flashinfer(torch.zeros(2, 16), do_finalize=True, hidden_dim=16)\n"
        "p.from_vllm(torch.zeros(2, 16))\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('flashinfer', 'vllm', 'triton')])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["[]", "[]"], done.stderr
