"""Starts the ranks of one host, and ends them all when one of them fails or hangs.

gloo on the CPU, nccl where there is a GPU for each rank. The ranks meet through a file in a
temporary directory, so no port can be taken by somebody else.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from moe_fusion.errors import RankFailedError, RankTimeoutError

DEFAULT_TIME_LIMIT_SECONDS = 600.0
STOP_GRACE_SECONDS = 5.0
EXIT_GRACE_SECONDS = 0.5


@dataclass(frozen=True)
class Rank:
    """What a function that runs on every rank is given first.

    Attributes:
        index: this rank, 0..world_size-1.
        world_size: W, ranks of the run, all on this host.
        device: where this rank computes.
        progress: shows a line on the parent's progress display; only rank 0's is shown.
    """

    index: int
    world_size: int
    device: torch.device
    progress: Callable[[str], None]


@dataclass(frozen=True)
class _Start:
    """What a child process needs to become a rank; picklable."""

    index: int
    world_size: int
    device_type: str
    store: Path
    time_limit_seconds: float


@dataclass(frozen=True)
class _Running:
    """A rank as its parent sees it."""

    process: SpawnProcess
    connection: Connection


def device_type_for(world_size: int) -> str:
    """``"cuda"`` where every rank has a GPU of its own, else ``"cpu"``."""
    return "cuda" if torch.cuda.device_count() >= world_size else "cpu"


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: object,
    time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS,
    device_type: str = "cpu",
    on_progress: Callable[[str], None] | None = None,
) -> list[Any]:
    """Run ``function(rank, *arguments)`` in ``world_size`` new processes that form one group.

    Args:
        function: importable by its name in a fresh process; its result is pickled.
        world_size: W, the number of processes.
        *arguments: the same for every rank; picklable.
        time_limit_seconds: for the whole run, start included.
        device_type: ``"cpu"`` (gloo) or ``"cuda"`` (nccl, a GPU for each rank).
        on_progress: called in this process with the lines of rank 0.

    Returns:
        The results, by rank.

    Raises:
        ValueError: ``world_size`` is not a positive number.
        RankFailedError: a rank raised (its traceback is in the message) or died.
        RankTimeoutError: ranks had not finished at the time limit.
    """
    if world_size < 1:
        raise ValueError(f"world_size: expected at least 1, got {world_size}")
    running: list[_Running] = []
    with tempfile.TemporaryDirectory(prefix="moe-fusion-") as directory:
        try:
            for index in range(world_size):
                store = Path(directory, "store")
                start = _Start(index, world_size, device_type, store, time_limit_seconds)
                running.append(_spawn(start, function, arguments))
            return _collect(running, time_limit_seconds, on_progress)
        finally:
            _stop(running)


def _spawn(start: _Start, function: Callable[..., Any], arguments: tuple[object, ...]) -> _Running:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, start, function, arguments), daemon=True)
    process.start()
    # the child holds the only writing end, so that its death ends the pipe
    theirs.close()
    return _Running(process, ours)


def _collect(
    running: list[_Running],
    time_limit_seconds: float,
    on_progress: Callable[[str], None] | None,
) -> list[Any]:
    """The ranks' results, once all have arrived."""
    deadline = time.monotonic() + time_limit_seconds
    results: dict[int, Any] = {}
    while len(results) < len(running):
        waiting = {r.connection: i for i, r in enumerate(running) if i not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankTimeoutError(sorted(waiting.values()), time_limit_seconds)
        for connection in ready:
            index = waiting[connection]  # type: ignore[index]
            kind, payload = _receive(index, running[index])
            if kind == "error":
                raise RankFailedError(index, payload)
            if kind == "result":
                results[index] = payload
            elif on_progress is not None and index == 0:
                on_progress(payload)
    return [results[index] for index in range(len(running))]


def _receive(index: int, rank: _Running) -> tuple[str, Any]:
    try:
        message: tuple[str, Any] = pickle.loads(rank.connection.recv_bytes())  # noqa: S301 - our own child's
    except (EOFError, OSError):
        rank.process.join(STOP_GRACE_SECONDS)
        cause = f"its process died with exit code {rank.process.exitcode}"
        raise RankFailedError(index, cause) from None
    return message


def _stop(running: list[_Running]) -> None:
    """End what still runs: politely first, since a rank may hold a lock of the compiler's cache."""
    for process in (rank.process for rank in running):
        process.join(EXIT_GRACE_SECONDS)
        if process.exitcode is None:
            process.terminate()
    for process in (rank.process for rank in running):
        process.join(STOP_GRACE_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()


def _child(
    connection: Connection,
    start: _Start,
    function: Callable[..., Any],
    arguments: tuple[object, ...],
) -> None:
    """Join the group, run the function, send its result or its traceback, leave the group."""

    def send(kind: str, payload: object) -> None:
        # plain pickle, so that tensors travel by value and outlive this process
        connection.send_bytes(pickle.dumps((kind, payload)))

    try:
        device = _join_group(start)
        rank = Rank(start.index, start.world_size, device, lambda text: send("progress", text))
        result = function(rank, *arguments)
        send("result", result)
    except BaseException:  # noqa: BLE001 - whatever it is, the parent must learn of it
        send("error", traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _join_group(start: _Start) -> torch.device:
    """Initialize the default group and share the host's cores among the ranks."""
    import torch._inductor.config as inductor_config

    cores = max(1, len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
    torch.set_num_threads(max(1, cores // start.world_size))
    inductor_config.compile_threads = max(1, cores // start.world_size)
    if sys.platform == "linux":
        # all ranks are on this host, whose name need not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cpu")
    if start.device_type == "cuda":
        device = torch.device("cuda", start.index)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=start.store.as_uri(),
        rank=start.index,
        world_size=start.world_size,
        timeout=timedelta(seconds=start.time_limit_seconds),
        device_id=device if device.type == "cuda" else None,
    )
    return device
