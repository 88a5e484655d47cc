"""What the ranks' processes run on a GPU; several may share one, with a gloo group.

Imported in processes that were started with ``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1``.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from interpreted_ranks import special_rows

import moe_fusion
import moe_fusion.op  # registers the op
from moe_fusion.config import FusionConfig, set_active_config
from moe_fusion.contract import TailArguments
from moe_fusion.errors import NotPreparedError, PeerTimeoutError

OP = torch.ops.moe_fusion.finalize_allreduce_rms_norm


def join(rank, world_size, folder, name, config):
    """Make the world over gloo, whose store is a file, and the configuration the active one."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    set_active_config(FusionConfig(**config))
    store = dist.FileStore(str(Path(folder) / name), world_size)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)


def leave(rank, world_size):
    """Destroy the world."""
    torch.cuda.synchronize()
    dist.destroy_process_group()


def prepare(rank, world_size, hidden_dim, dtype):
    """The reason why the composite path will be used, or None."""
    refusal = moe_fusion.prepare(dist.group.WORLD, hidden_dim, dtype)
    return None if refusal is None else refusal.reason


def call(args: TailArguments):
    """The op with this rank's arguments."""
    *values, output_scale_tensor = (getattr(args, field.name) for field in fields(args))
    return OP(*values, dist.group.WORLD.group_name, output_scale_tensor)


def _on_cpu(outputs):
    torch.cuda.synchronize()
    moe_fusion.check()
    return [tuple(tensor.cpu() for tensor in pair) for pair in outputs]


def run_cases(rank, world_size, cases):
    """The outputs of one call for each case."""
    return _on_cpu([call(case.rank(rank, "cuda")) for case in cases])


def run_random_rounds(rank, world_size, kinds, rounds, seed):
    """Calls of random kinds, a random rank late at times: whether each repeats its first result.

    Returns:
        The first outputs of every kind, by its number, and how many later ones were not bit-equal.
    """
    generator = random.Random(seed)
    inputs = [case.rank(rank, "cuda") for case in kinds]
    first, differing = {}, torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(rounds):
        kind, late, delay = (
            generator.randrange(len(kinds)),
            generator.randrange(world_size),
            generator.choice((0.0, 0.0, 0.001, 0.004)),
        )
        if late == rank and delay:
            time.sleep(delay)
        outputs = call(inputs[kind])
        if kind not in first:
            first[kind] = outputs
        for one, two in zip(first[kind], outputs, strict=True):
            differing += (one.view(torch.uint8) != two.view(torch.uint8)).any()
    kept = list(first.items())
    return dict(zip(first, _on_cpu([o for _, o in kept]), strict=True)), int(differing)


def run_two_streams(rank, world_size, kinds, rounds):
    """Calls that change the stream each time, with work queued on it before: all outputs."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    inputs = [case.rank(rank, "cuda") for case in kinds]
    torch.cuda.synchronize()
    outputs = []
    for number in range(rounds):
        with torch.cuda.stream(streams[number % 2]):
            torch.cuda._sleep(200_000 * (1 + (number + rank) % 3))
            outputs.append(call(inputs[number % len(kinds)]))
    torch.cuda.synchronize()
    return _on_cpu(outputs)


def run_special(rank, world_size, dtype, calls):
    """residual_out of each call on special values; it is the sum itself."""
    rows = [special_rows(dtype, c, rank).cuda() for c in range(calls)]
    return [pair[1] for pair in _on_cpu([call(TailArguments(r)) for r in rows])]


def run_batches(rank, world_size, case, batches):
    """One token's outputs as the last of each batch."""
    token = replace(case, num_tokens=1, seed=60).rank(rank, "cuda")
    rows = []
    for batch in batches:
        others = replace(case, num_tokens=batch - 1, seed=61).rank(rank, "cuda")
        names = ("routed", "expert_weights", "shared_output", "residual")
        joined = {n: torch.cat([getattr(others, n), getattr(token, n)]) for n in names}
        rows.append(tuple(tensor[-1] for tensor in call(replace(token, **joined))))
    return _on_cpu(rows)


def _copy_into(target: TailArguments, source: TailArguments) -> None:
    for field in fields(target):
        tensor = getattr(target, field.name)
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(getattr(source, field.name))


def run_graph(rank, world_size, case, seeds, other):
    """Capture once, replay with new inputs copied in place, eager calls of ``other`` in between."""
    static = replace(case, seed=0).rank(rank, "cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(static)
        call(other.rank(rank, "cuda"))
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = call(static)
    outputs = []
    with torch.cuda.stream(stream):
        for seed in seeds:
            _copy_into(static, replace(case, seed=seed).rank(rank, "cuda"))
            graph.replay()
            replayed = tuple(tensor.clone() for tensor in captured)
            eager = call(replace(other, seed=seed).rank(rank, "cuda"))
            outputs += [replayed, eager]
    return _on_cpu(outputs)


def capture_first(rank, world_size, case):
    """The message of a first call inside a capture."""
    args = case.rank(rank, "cuda")
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call(args)
    except NotPreparedError as error:
        return str(error)
    return None


def run_compiled(rank, world_size, case, seeds):
    """The op under ``torch.compile(mode="reduce-overhead")``, with new inputs each time."""
    first = case.rank(rank, "cuda")
    names = [f.name for f in fields(first) if isinstance(getattr(first, f.name), torch.Tensor)]

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def tail(*tensors):
        norm_out, residual_out = call(replace(first, **dict(zip(names, tensors, strict=True))))
        return norm_out * 1.0, residual_out * 1.0

    outputs = []
    for seed in seeds:
        args = replace(case, seed=seed).rank(rank, "cuda")
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            got = tail(*(getattr(args, name) for name in names))
        outputs.append(tuple(tensor.clone() for tensor in got))
    return _on_cpu(outputs)


def die(rank, world_size, victim):
    """End one rank's process without a word."""
    if rank == victim:
        os._exit(1)


def miss_a_peer(rank, world_size, case):
    """Two calls that a dead peer does not join: seconds, NaN or not, the errors, still usable."""
    args = case.rank(rank, "cuda")
    begun = time.monotonic()
    outputs = call(args)
    torch.cuda.synchronize()
    seconds = time.monotonic() - begun
    poisoned = all(bool(tensor.isnan().all()) for tensor in outputs)
    errors = []
    for attempt in (moe_fusion.check, lambda: call(args)):
        try:
            attempt()
        except PeerTimeoutError as error:
            errors.append((error.rank, error.missing))
    return seconds, poisoned, errors, float(torch.ones(8, device="cuda").sum())


def count_allocations(rank, world_size, case):
    """Allocations of one call, which must not synchronize either."""
    args = case.rank(rank, "cuda")
    call(args)
    torch.cuda.synchronize()
    key = "allocation.all.allocated"
    before = torch.cuda.memory_stats()[key]
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = call(args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    made = torch.cuda.memory_stats()[key] - before
    return made, len(outputs)
