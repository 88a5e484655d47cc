"""Runs the fused kernel under Triton's interpreter, over memory that the ranks' processes share.

Imported in processes that were started with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch
from tail_cases import Case

from moe_fusion import reference
from moe_fusion.buffers import STATE_WORDS, Workspace, peer_addresses, slots_bytes, square_sum_words
from moe_fusion.contract import TailArguments
from moe_fusion.errors import PeerTimeoutError

_workspaces: dict[str, Workspace] = {}
_plain_new_empty = torch.Tensor.new_empty


def _poisoned_empty(*size, **options):
    tensor = _plain_new_empty(*size, **options)
    return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor


def open_workspace(rank, world_size, folder, options) -> None:
    """Map every rank's slots from ``folder``, where the test made one file for each rank."""
    words = slots_bytes(world_size, options["capacity"]) // 4
    maps = [
        torch.from_file(str(Path(folder) / str(r)), shared=True, size=words, dtype=torch.int32)
        for r in range(world_size)
    ]
    torch.Tensor.new_empty = _poisoned_empty
    _workspaces[folder] = Workspace(
        rank=rank,
        world_size=world_size,
        dtype=options["dtype"],
        capacity_bytes=options["capacity"],
        peers=peer_addresses(rank, [m.data_ptr() for m in maps]),
        state=torch.zeros(STATE_WORDS, dtype=torch.int64),
        square_sums=torch.full((square_sum_words(options["capacity"], 0),), -1),
        multiprocessors=1,
        error_word=torch.zeros(1, dtype=torch.int32),
        peer_timeout_s=options["timeout_s"],
        global_ranks=tuple(range(world_size)),
        memory=maps,
    )


def launch(args: TailArguments, workspace: Workspace, *, two_shot: bool | None = None):
    """One call; ``two_shot`` instead of the launch table's choice."""
    from cooperative_blocks import install

    from moe_fusion.kernels.fused_launch import fused
    from moe_fusion.kernels.launch import launch_parameters

    install()
    chosen = launch_parameters(
        args.num_tokens,
        args.hidden_dim,
        args.routed.dtype,
        workspace.world_size,
        top_k=args.top_k,
        multiprocessors=workspace.multiprocessors,
    )
    if two_shot is not None:
        chosen = replace(chosen, two_shot=two_shot)
    return fused(args, workspace, chosen)


def run_cases(rank, world_size, folder, cases, delays=None):
    """The outputs of one call for each case, in order."""
    inputs: dict[Case, TailArguments] = {}
    outputs = []
    for i, case in enumerate(cases):
        if delays and delays[i] and delays[i][0] == rank:
            time.sleep(delays[i][1])
        if case not in inputs:
            inputs[case] = case.rank(rank)
        outputs.append(launch(inputs[case], _workspaces[folder]))
    return outputs


def run_composite(rank, world_size, cases):
    """The composite path's kernels around no reduction, and the reference, for each case."""
    from moe_fusion.kernels.composite import add_rms_norm, finalize

    pairs = []
    for case in cases:
        args = case.rank(rank)
        want = reference.partial(args).to(case.dtype)
        pairs.append(((finalize(args),), (want,)))
        pairs.append((add_rms_norm(want, args), reference.finish(want, args)))
    return pairs


def _bf16(*shape, value=1.0):
    return torch.full(shape, value, dtype=torch.bfloat16)


def _sum_of_256_and_halves(rank):
    rows = torch.cat([_bf16(1, 64, value=256.0), _bf16(7, 64, value=0.5)])
    if rank:  # the other ranks add nothing
        return TailArguments(_bf16(1, 64, value=0.0), residual=_bf16(1, 64, value=0.0))
    return TailArguments(
        rows,
        torch.ones(1, 8, dtype=torch.bfloat16),
        torch.arange(8, dtype=torch.int32).view(1, 8),
        shared_output=_bf16(1, 64, value=0.5),
    )


def _no_experts(rank):
    rows = _bf16(4, 64, value=torch.nan if rank else torch.inf)
    return TailArguments(rows, torch.ones(2, 3), torch.full((2, 3), -1, dtype=torch.int32))


def _zero_times_infinity(rank):
    rows = torch.stack([_bf16(64, value=torch.inf), _bf16(64, value=2.0)])
    permutation = torch.tensor([[0], [1]], dtype=torch.int32)
    return TailArguments(rows, torch.tensor([[0.0], [1.0]]), permutation)


def _gemma_bias(rank):
    # Three of 1.5 to five of 0.5: the mean square is 1, so 1.5 is the normalised value as well.
    row = torch.tensor([[1.5] * 6 + [0.5] * 10], dtype=torch.bfloat16)
    return TailArguments(
        row if rank == 0 else torch.zeros_like(row),
        norm_weight=_bf16(16, value=0.005859375),
        weight_bias=1.0,
        eps=0.0,
    )


def _replicated_and_partial(rank):
    return TailArguments(
        _bf16(2, 64),
        torch.ones(2, 1),
        torch.tensor([[0], [1]], dtype=torch.int32),
        shared_output=_bf16(2, 64, value=3.0),
        replicated_output=_bf16(2, 64, value=5.0),
        routed_scaling_factor=2.0,
        output_scale=0.5,
    )


_NAMED = {
    "sum_of_256_and_halves": _sum_of_256_and_halves,
    "no_experts": _no_experts,
    "zero_times_infinity": _zero_times_infinity,
    "gemma_bias": _gemma_bias,
    "replicated_and_partial": _replicated_and_partial,
}


def run_one(rank, world_size, folder, name):
    """The outputs of one call with the named inputs."""
    return launch(_NAMED[name](rank), _workspaces[folder])


INFINITIES_32 = (0x7F800000, 0xFF800000)
SPECIAL_BITS = {
    torch.bfloat16: (0x8000, 0x8001, 0x0001, 0x7FFF, 0xFFFF, 0xFFC0, 0x7F80, 0xFF80),
    torch.float16: (0x8000, 0x8001, 0x0001, 0x7FFF, 0xFFFF, 0xFE00, 0x7C00, 0xFC00),
    torch.float32: (0x80000000, 0x80000001, 1, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFC00000, *INFINITIES_32),
}


def special_rows(dtype, call, rank):
    """[8, 16]: row i holds special value i, then i + 1 on the next rank and in the next call."""
    bits = SPECIAL_BITS[dtype]
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    width = 32 if dtype == torch.float32 else 16
    chosen = [bits[(i + rank * (call + 1)) % len(bits)] for i in range(len(bits))]
    signed = [b - (1 << width) if b >> (width - 1) else b for b in chosen]
    return torch.tensor(signed, dtype=integer).view(dtype)[:, None].expand(-1, 16).contiguous()


def special_sum(dtype, call, world_size):
    """The reference's sum of the special values of every rank, in rank order."""
    total = special_rows(dtype, call, 0).float()
    for rank in range(1, world_size):
        total = total + special_rows(dtype, call, rank).float()
    return total.to(dtype)


def run_special(rank, world_size, folder, dtype, calls):
    """residual_out of each call; with nothing added it is the sum itself."""
    workspace = _workspaces[folder]
    return [launch(TailArguments(special_rows(dtype, c, rank)), workspace)[1] for c in range(calls)]


def run_batch_around_one_token(rank, world_size, folder, batch):
    """The outputs of one token, which is the last of ``batch``."""
    token = Case(1, 160, top_k=3, routing="token_major", seed=60).rank(rank)
    others = Case(batch - 1, 160, top_k=3, routing="token_major", seed=61).rank(rank)

    def join(name):
        return torch.cat([getattr(others, name), getattr(token, name)])

    names = ("routed", "expert_weights", "shared_output", "residual")
    args = replace(token, **{name: join(name) for name in names})
    norm_out, residual_out = launch(args, _workspaces[folder])
    return norm_out[-1], residual_out[-1]


def overwritten_case(seed):
    """The inputs of one round of :func:`run_overwriting`."""
    return Case(2, 64, top_k=2, seed=seed)


def run_overwriting(rank, world_size, folder, rounds):
    """Overwrite every input with NaN as soon as the call has returned; rank 1 is slow."""
    outputs = []
    for seed in range(rounds):
        args = overwritten_case(seed).rank(rank)
        if rank == 1:
            time.sleep(0.002)
        outputs.append(launch(args, _workspaces[folder]))
        for tensor in (args.routed, args.expert_weights, args.shared_output, args.residual):
            tensor.fill_(torch.nan)
    return outputs


def run_both_ways(rank, world_size, folder, cases):
    """The outputs of each case, one-shot and two-shot."""
    inputs = [case.rank(rank) for case in cases]
    return [
        [launch(args, _workspaces[folder], two_shot=two_shot) for args in inputs]
        for two_shot in (False, True)
    ]


def run_poisoned(rank, world_size, folder, case):
    """One call of rank 0 that has missed a peer before, though the peer's rows are there."""
    workspace = _workspaces[folder]
    if rank == 0:
        time.sleep(1.0)
        workspace.state[2] = 2
    return launch(case.rank(rank), workspace)


def run_without_peer(rank, world_size, folder, case, two_shot):
    """Three calls that a peer does not join: outputs, ranks missing, message, seconds."""
    workspace = _workspaces[folder]
    begun = time.monotonic()
    outputs = [launch(case.rank(rank), workspace, two_shot=two_shot) for _ in range(3)]
    seconds = time.monotonic() - begun
    try:
        workspace.check()
    except PeerTimeoutError as error:
        return outputs, error.missing, str(error), seconds
    return outputs, (), "", seconds
