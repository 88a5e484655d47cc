"""The kernels compile for every target without a device; registers, spills and PTX are checked."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
import torch  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from moe_fusion.kernels.composite import add_rms_norm_kernel, finalize_kernel  # noqa: E402
from moe_fusion.kernels.launch import launch_parameters  # noqa: E402
from moe_fusion.kernels.one_shot import one_shot_kernel  # noqa: E402

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
    "peers": "*i64",
    "state": "*i64",
    "error_word": "*i32",
    "permutation": "*i32",
    "expert_weights": "*fp32",
    "output_scale_tensor": "*fp32",
}


def compile_for(
    target, kernel=one_shot_kernel, hidden_dim=7168, dtype=torch.bfloat16, top_k=8, **options
):
    """Compile with the launch parameters of (H, dtype), all optional arguments given by default."""
    world_size, absent = options.get("world_size", 8), options.get("absent", ())
    chosen = launch_parameters(hidden_dim, dtype)
    constants = {
        "TOP_K": top_k,
        "UNROLL": min(chosen.unroll, top_k),
        "H": hidden_dim,
        "N": chosen.block_elements,
        "CLEAR_UNITS": chosen.clear_units,
        "PREFETCH": chosen.prefetch,
        "W": world_size,
        "BACKEND": "ptx" if target.backend == "cuda" else "amd",
    } | dict.fromkeys(absent)
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[i,] = "constexpr", constants[name]
        elif name in FLOATS:
            signature[name] = "fp32"
        elif name == "timeout_ns":
            signature[name] = "i64"
        elif name in {"rank", "num_tokens"} or name.endswith(("_stride", "_bytes")):
            signature[name] = "i32"
        else:
            signature[name] = POINTERS.get(name, f"*{NAMES[dtype]}")
            attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    settings = {"num_warps": chosen.num_warps, "enable_fp_fusion": False}
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
@pytest.mark.parametrize("kernel", [one_shot_kernel, finalize_kernel, add_rms_norm_kernel])
def test_every_kernel_compiles_for_every_target(name, kernel):
    compiled = compile_for(TARGETS[name], kernel)
    assert "hsaco" in compiled.asm if name == "gfx942" else "cubin" in compiled.asm


@pytest.mark.parametrize("absent", [OPTIONAL, ("permutation",), ("residual",), ("replicated",)])
@pytest.mark.parametrize("name", ["sm_90", "gfx942"])
def test_optional_operands_may_be_absent(name, absent):
    compile_for(TARGETS[name], absent=absent, hidden_dim=64)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize(
    ("hidden_dim", "top_k", "world_size"),
    [(8192, 8, 8), (8192, 32, 8), (7168, 8, 4), (4096, 8, 8), (2880, 4, 2), (16, 1, 2)],
)
def test_nothing_spills_on_sm_90_up_to_8192_elements(
    tmp_path, dtype, hidden_dim, top_k, world_size
):
    compiled = compile_for(
        SM_90, hidden_dim=hidden_dim, dtype=dtype, top_k=top_k, world_size=world_size
    )
    used = resources(compiled, tmp_path)
    assert used["stack_bytes"] == 0, used
    assert used["local_bytes"] == 0, used
    threads = launch_parameters(hidden_dim, dtype).num_warps * 32
    assert used["registers"] * threads <= 65536, used  # one block fits a multiprocessor


@pytest.fixture(scope="module")
def ptx():
    return compile_for(SM_90).asm["ptx"]


def test_rows_are_exchanged_by_16_byte_volatile_accesses(ptx):
    """Volatile is relaxed at system scope: device scope would not reach a peer's device."""
    chosen = launch_parameters(7168, torch.bfloat16)
    units = chosen.block_elements * 2 // 16 // (chosen.num_warps * 32)
    assert ptx.count("ld.volatile.global.v4.b32") == 8 * units
    assert ptx.count("st.volatile.global.v4.b32") >= 8 * units
    assert "%globaltimer" in ptx


def test_the_hosts_error_word_is_written_at_system_scope(ptx):
    assert re.search(r"(atom|red)\.global\.sys\.relaxed\.or\.b32", ptx)


def test_words_are_compared_as_bits_not_as_numbers(ptx):
    """As floats a NaN sentinel would equal nothing, and -0.0 would equal 0.0."""
    waits = ptx.split("poll:")[1:]
    assert waits
    for wait in waits:
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
