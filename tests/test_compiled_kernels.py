"""The kernels compile for every target without a device; registers, spills and PTX are checked."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
import torch  # noqa: E402
from torch.torch_version import TorchVersion  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from moe_fusion.kernels.composite import add_rms_norm_kernel, finalize_kernel  # noqa: E402
from moe_fusion.kernels.fused import fused_kernel  # noqa: E402
from moe_fusion.kernels.launch import (  # noqa: E402
    RESIDENCY,
    SEGMENT_THREADS,
    SEGMENT_WARPS,
    launch_parameters,
    row_parameters,
)

SM_90 = GPUTarget("cuda", 90, 32)
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": SM_90,
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
OPTIONAL = (
    "expert_weights",
    "permutation",
    "shared",
    "replicated",
    "residual",
    "norm_weight",
    "output_scale_tensor",
)
FLOATS = ("eps", "weight_bias", "routed_scale", "output_scale")
POINTERS = {
    "state": "*i64",
    "square_sums": "*i64",
    "error_word": "*i32",
    "permutation": "*i32",
    "expert_weights": "*fp32",
    "output_scale_tensor": "*fp32",
}


REGISTERS = 65536  # of a multiprocessor
# Once a row, which is no matter beside what a row moves.
STACK_BYTES_OF_MANY_ROWS = 8 if TorchVersion(triton.__version__) >= "3.7" else 16
SHARED_BYTES = 100 << 10  # of one of the smallest that is supported, compute capability 8.6
REGISTER_GRANULARITY = 8  # a thread's are allocated by so many


def constants_of(kernel, target, hidden_dim, dtype, top_k, world_size, once, two_shot):
    """What a kernel is compiled for, and its options."""
    options = {"num_warps": SEGMENT_WARPS, "enable_fp_fusion": False}
    if kernel is not fused_kernel:
        chosen = row_parameters(hidden_dim, dtype)
        options["num_warps"] = chosen.num_warps
        return {"UNROLL": min(chosen.unroll, top_k), "N": chosen.block_elements}, options
    chosen = launch_parameters(1, hidden_dim, dtype, world_size, top_k=top_k, multiprocessors=132)
    pdl = target.backend == "cuda" and target.arch >= 90
    if target.backend == "cuda":
        options |= {"maxnreg": RESIDENCY[world_size, once].registers, "launch_pdl": pdl}
    variant = {"W": world_size, "ONCE": once, "TWO_SHOT": two_shot, "PDL": pdl}
    return {"UNROLL": chosen.unroll, **variant}, options


def compile_for(
    target, kernel=fused_kernel, hidden_dim=7168, dtype=torch.bfloat16, top_k=8, world_size=8,
    *, once=True, two_shot=False, absent=(),
):  # fmt: skip
    """Compile as it is launched, all optional arguments given by default."""
    constants, settings = constants_of(
        kernel, target, hidden_dim, dtype, top_k, world_size, once, two_shot
    )
    constants |= {
        "TOP_K": top_k,
        "H": hidden_dim,
        "BACKEND": "ptx" if target.backend == "cuda" else "amd",
    } | dict.fromkeys(absent)
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[i,] = "constexpr", constants[name]
        elif name in FLOATS:
            signature[name] = "fp32"
        elif name == "timeout_ns" or name.startswith("peer_"):
            signature[name] = "i64"
        elif name in {"rank", "num_tokens"} or name.endswith(("_stride", "_bytes")):
            signature[name] = "i32"
        else:
            signature[name] = POINTERS.get(name, f"*{NAMES[dtype]}")
            attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=target, options=settings)


def resources(compiled, folder: Path) -> dict[str, int]:
    """Registers a thread, and bytes of stack: spills, since these kernels have no local arrays."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [str(tool), "--dump-resource-usage", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    assert found, text
    names = ("registers", "stack_bytes", "shared_bytes", "local_bytes")
    return dict(zip(names, map(int, found.groups()), strict=True))


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("kernel", [fused_kernel, finalize_kernel, add_rms_norm_kernel])
def test_every_kernel_compiles_for_every_target(name, kernel):
    compiled = compile_for(TARGETS[name], kernel)
    assert "hsaco" in compiled.asm if name == "gfx942" else "cubin" in compiled.asm


@pytest.mark.parametrize("absent", [OPTIONAL, ("permutation",), ("residual",), ("replicated",)])
@pytest.mark.parametrize("name", ["sm_90", "gfx942"])
def test_optional_operands_may_be_absent(name, absent):
    compile_for(TARGETS[name], absent=absent, hidden_dim=64)


VARIANTS = [  # those that the launch table chooses where a rank has a device
    (2, True, False),
    (2, False, False),
    (4, True, False),
    (4, True, True),
    (4, False, True),
    (8, True, False),
    (8, True, True),
    (8, False, True),
]


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize(("world_size", "once", "two_shot"), VARIANTS)
def test_the_blocks_of_the_residency_table_fit_without_spills(
    tmp_path, dtype, world_size, once, two_shot
):
    """Of a row of one segment and more; a block that is not resident would be waited for."""
    compiled = compile_for(
        SM_90,
        dtype=dtype,
        world_size=world_size,
        once=once,
        two_shot=two_shot,
        absent=["replicated"],
    )
    used = resources(compiled, tmp_path)
    assert used["local_bytes"] == 0, used
    assert used["stack_bytes"] <= (0 if once else STACK_BYTES_OF_MANY_ROWS), used
    assert_resident(compiled, used, RESIDENCY[world_size, once].blocks)


@pytest.mark.parametrize("world_size", [4, 8])
def test_the_blocks_of_a_shared_device_fit(tmp_path, world_size):
    """There few tokens may be more than fit, so that one-shot has many rows; it may spill."""
    compiled = compile_for(SM_90, world_size=world_size, once=False, two_shot=False)
    used = resources(compiled, tmp_path)
    assert_resident(compiled, used, RESIDENCY[world_size, False].blocks)


def assert_resident(compiled, used, blocks):
    allocated = -(-used["registers"] // REGISTER_GRANULARITY) * REGISTER_GRANULARITY
    assert allocated * SEGMENT_THREADS * blocks <= REGISTERS, used
    shared_bytes = compiled.metadata.shared + used["shared_bytes"]
    assert shared_bytes * blocks <= SHARED_BYTES, compiled.metadata.shared


@pytest.fixture(scope="module")
def ptx():
    return compile_for(SM_90).asm["ptx"]


def test_rows_are_exchanged_by_16_byte_volatile_accesses(ptx):
    """Volatile is relaxed at system scope: device scope would not reach a peer's device."""
    assert ptx.count("ld.volatile.global.v4.b32") == 8
    assert ptx.count("st.volatile.global.v4.b32") == 7 + 8  # to the others; and a clear of each
    assert "%globaltimer" in ptx


def test_a_dependent_launch_waits_before_it_reads_and_lets_go_after_it_was_waited_for(ptx):
    wait, last_poll = ptx.index("griddepcontrol.wait"), ptx.rindex("ld.volatile.global.v4")
    assert wait < ptx.index("ld.global")
    assert last_poll < ptx.index("griddepcontrol.launch_dependents")


def test_nothing_is_launched_dependently_before_sm_90():
    assert "griddepcontrol" not in compile_for(TARGETS["sm_80"]).asm["ptx"]


def test_the_hosts_error_word_is_written_at_system_scope(ptx):
    assert re.search(r"(atom|red)\.global\.sys\.relaxed\.or\.b32", ptx)


def test_words_are_compared_as_bits_not_as_numbers(ptx):
    """As floats a NaN sentinel would equal nothing, and -0.0 would equal 0.0."""
    waits = ptx.split("poll:")[1:]
    assert waits
    for wait in (w for w in waits if "@yes bra sum;" in w):
        condition = wait.split("@yes bra sum;")[0]
        assert "setp.ne.u32" in condition
        assert "f32" not in condition


def test_rows_are_read_and_written_16_bytes_at_a_time(ptx):
    assert "ld.global.b16" not in ptx
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx


def test_offsets_are_64_bit():
    """Row 131071 at H = 16384 begins past 2 ** 31 bytes, in the rows and in the slots."""
    text = compile_for(SM_90, hidden_dim=16384).asm["ttir"]
    for line in text.splitlines():
        if "tt.addptr" in line and "!tt.ptr<bf16>," in line and "tensor" not in line:
            assert line.rstrip().split(", ")[-1].startswith("i64"), line
