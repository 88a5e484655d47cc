"""Launches the fused kernel on the current stream.

What a call's shapes, strides, dtypes and alignments decide is worked out once, in :class:`Launch`;
a further call of that kind makes two allocations and one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from moe_fusion.buffers import Workspace
from moe_fusion.contract import TailArguments
from moe_fusion.kernels.fused import fused_kernel
from moe_fusion.kernels.launch import (
    SEGMENT_WARPS,
    LaunchParameters,
    backend,
    dense,
    launch_parameters,
    op_tensors,
    unit_row,
)

NANOSECONDS_PER_SECOND = 1_000_000_000
PROGRAMMATIC_LAUNCH_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class Launch:
    """A call of one kind, ready to be made.

    Attributes:
        run: takes the kernel's arguments, the op's tensors as ``passed`` has them, and launches it.
        direct: the operands can be read as they are; else rows are copied first.
        passed: copies of the op's tensors as the kernel takes them.
        before_scalars: the kernel's arguments from ``state`` to ``timeout_ns``.
        after_scalars: those from ``peer_0`` on.
        outputs: makes both.
    """

    run: Callable[..., None]
    direct: bool
    passed: Callable[[tuple[Tensor | None, ...]], Sequence[Tensor | int | None]]
    before_scalars: tuple[Any, ...]
    after_scalars: tuple[Any, ...]
    outputs: Callable[[], tuple[Tensor, Tensor]]

    def __call__(
        self,
        tensors: tuple[Tensor | None, ...],
        addresses: Sequence[int | None],
        scalars: tuple[float, ...],
    ) -> tuple[Tensor, Tensor]:
        """Launch on the current stream.

        Args:
            tensors: the op's, in its order.
            addresses: theirs.
            scalars: eps, weight bias, routed scaling factor and output scale.
        """
        norm_out, residual_out = self.outputs()
        before, after = self.before_scalars, self.after_scalars
        if self.direct:
            self.run(norm_out, residual_out, *addresses, *before, *scalars, *after)
        else:
            copies = _readable(tensors)
            self.run(norm_out, residual_out, *self.passed(copies), *before, *scalars, *after)
        return norm_out, residual_out


def addresses_of(tensors: Sequence[Tensor | None]) -> list[int | None]:
    """Where tensors begin, None for those that are absent."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def _readable(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The tensors, copied where rows do not begin at 16-byte boundaries or have gaps in them."""
    routed, weights, permutation, *addends, scale = dense(tensors)
    return (unit_row(routed), weights, permutation, *map(unit_row, addends), scale)


def _allocator(args: TailArguments) -> Callable[[], tuple[Tensor, Tensor]]:
    """Makes both outputs, on CUDA as compiled code makes its own: 8 us sooner than new_empty."""
    shape, strides = (args.num_tokens, args.hidden_dim), (args.hidden_dim, 1)
    dtypes = args.routed.dtype, args.residual_dtype
    device = args.routed.device
    if device.type != "cuda":
        like = torch.empty(0, device=device)
        return lambda: (
            like.new_empty(shape, dtype=dtypes[0]),
            like.new_empty(shape, dtype=dtypes[1]),
        )
    guards: Any = torch._C._dynamo.guards  # not in torch's stubs
    empty = guards._empty_strided_cuda
    return lambda: (empty(shape, strides, dtypes[0]), empty(shape, strides, dtypes[1]))


def _constants(
    args: TailArguments, workspace: Workspace, chosen: LaunchParameters
) -> dict[str, Any]:
    """What the kernel is compiled for."""
    kind = backend(fused_kernel)
    device = args.routed.device
    pdl = (
        kind == "ptx" and torch.cuda.get_device_capability(device) >= PROGRAMMATIC_LAUNCH_CAPABILITY
    )
    return {
        "TOP_K": args.top_k or 1,
        "UNROLL": chosen.unroll,
        "H": args.hidden_dim,
        "W": workspace.world_size,
        "ONCE": chosen.once,
        "TWO_SHOT": chosen.two_shot,
        "PDL": pdl,
        "BACKEND": kind,
    }


def _load(
    blocks: int, arguments: tuple[Any, ...], constants: dict[str, Any], registers: int
) -> Callable[..., None]:
    """Compile and load the kernel without launching it; what launches it.

    A rank that loads a module while its peer's kernel spins can wait for ever where both share a
    GPU, since loading may need the device to be idle.
    """
    options: dict[str, Any] = {"num_warps": SEGMENT_WARPS, "enable_fp_fusion": False}
    if constants["BACKEND"] == "interpreter":
        return fused_kernel[blocks,]  # type: ignore[no-any-return]
    if constants["BACKEND"] == "ptx":
        options |= {"maxnreg": registers, "launch_pdl": constants["PDL"]}
    compiled = fused_kernel.warmup(*arguments, *constants.values(), grid=(blocks,), **options)
    return _launcher(compiled, blocks, arguments[0].device.index)


def _launcher(compiled: CompiledKernel, blocks: int, device: int) -> Callable[..., None]:
    """As ``compiled[grid]``, without its lookups, which take the host longer than the launch."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    hooked = compiled[blocks, 1, 1]
    hooks = triton.knobs.runtime

    def launch(norm_out: Tensor, residual_out: Tensor, *rest: Any) -> None:
        outputs = norm_out.data_ptr(), residual_out.data_ptr()
        if _is_set(hooks.launch_enter_hook) or _is_set(hooks.launch_exit_hook):
            hooked(*outputs, *rest)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(blocks, 1, 1, stream, function, metadata, None, None, None, *outputs, *rest)

    return launch


def _is_set(hook: Any) -> bool:
    """Whether a profiler has hooked into launches."""
    return bool(getattr(hook, "calls", hook))


def plan_launch(
    args: TailArguments, workspace: Workspace, parameters: LaunchParameters | None = None
) -> Launch:
    """Get ready for calls of the kind of ``args``.

    Args:
        args: this rank's arguments, checked; T at least 1.
        workspace: of this group and dtype, with room for T rows.
        parameters: ``None`` for those of the launch table; the same on every rank.
    """
    shape = (args.num_tokens, args.hidden_dim)
    chosen = parameters or launch_parameters(
        *shape,
        args.routed.dtype,
        workspace.world_size,
        top_k=args.top_k,
        multiprocessors=workspace.multiprocessors,
    )
    tensors = _readable(op_tensors(args))
    routed, _, _, shared, replicated, residual, *_ = tensors
    strides = [0 if t is None else t.stride(0) for t in (routed, shared, replicated, residual)]
    before_scalars = (
        workspace.state,
        workspace.error_word,
        workspace.square_sums,
        workspace.rank,
        args.num_tokens,
        *strides,
        workspace.capacity_bytes,
        int(workspace.peer_timeout_s * NANOSECONDS_PER_SECOND),
    )
    outputs = _allocator(args)
    scalars = (1.0, 1.0, 1.0, 1.0)
    arguments = (*outputs(), *tensors, *before_scalars, *scalars, *workspace.peers)
    constants = _constants(args, workspace, chosen)
    interpreted = constants["BACKEND"] == "interpreter"  # which takes tensors only
    if not interpreted:
        before_scalars = tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in before_scalars)
    as_given = all(one is two for one, two in zip(tensors, op_tensors(args), strict=True))
    return Launch(
        run=_load(chosen.blocks, arguments, constants, chosen.registers),
        direct=as_given and not interpreted,
        passed=list if interpreted else addresses_of,
        before_scalars=before_scalars,
        after_scalars=(*workspace.peers, *constants.values()),
        outputs=outputs,
    )


def fused(
    args: TailArguments, workspace: Workspace, parameters: LaunchParameters | None = None
) -> tuple[Tensor, Tensor]:
    """Launch the fused kernel on the current stream.

    Args:
        args: this rank's arguments, checked; T at least 1.
        workspace: of this group and dtype, with room for T rows.
        parameters: ``None`` for those of the launch table; the same on every rank.

    Returns:
        ``norm_out`` and ``residual_out``, [T, H] each.
    """
    scalars = (args.eps, args.weight_bias, args.routed_scaling_factor, args.output_scale)
    tensors = op_tensors(args)
    return plan_launch(args, workspace, parameters)(tensors, addresses_of(tensors), scalars)
