"""Processes that stand for the ranks of a group: started once, given functions to run together."""

from __future__ import annotations

import atexit
import copy
import gc
import multiprocessing
import os
import traceback
from contextlib import contextmanager

import pytest

ANSWER_TIMEOUT_S = 200.0


def collect_seldom() -> None:
    """A seventh of a compile's time goes into collecting garbage, which is mostly still in use."""
    gc.set_threshold(50_000, 20, 20)


def _serve(rank: int, pipe) -> None:
    import torch

    torch.set_num_threads(1)
    collect_seldom()
    while True:
        function, world_size, arguments = pipe.recv()
        try:
            pipe.send((function(rank, world_size, *arguments), None))
        except Exception:  # noqa: BLE001 - every failure belongs to the test that asked
            pipe.send((None, traceback.format_exc()))


@contextmanager
def _environment(variables):
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class RankPool:
    """``world_size`` processes; a function given to :meth:`run` is called in each with its rank.

    Functions and arguments are pickled, so they are module-level functions and plain values.
    """

    def __init__(self, world_size: int, **variables: str) -> None:
        self.world_size = world_size
        self._unanswered = [False]  # shared with the pools that first() gives
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        with _environment(variables):
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
                process.start()
                theirs.close()
                self.pipes.append(ours)
                self.processes.append(process)

    @property
    def broken(self) -> bool:
        """Whether some process still owes an answer, as after a time limit."""
        return self._unanswered[0]

    def first(self, world_size: int) -> RankPool:
        """The first ``world_size`` processes as a pool of their own."""
        pool = copy.copy(self)
        pool.world_size = world_size
        return pool

    def run(self, function, *arguments, timeout_s: float = ANSWER_TIMEOUT_S, ranks=None):
        """The results of all ranks, or of the given ones, in order.

        Raises:
            AssertionError: a rank raised, died, or did not answer in ``timeout_s``.
        """
        chosen = range(self.world_size) if ranks is None else ranks
        self._unanswered[0] = True
        for rank in chosen:
            self.pipes[rank].send((function, self.world_size, arguments))
        answers = []
        for rank in chosen:
            assert self.pipes[rank].poll(timeout_s), f"rank {rank}: no answer in {timeout_s} s"
            answers.append(self.pipes[rank].recv())
        self._unanswered[0] = False
        for rank, (_, error) in zip(chosen, answers, strict=True):
            assert error is None, f"rank {rank} raised:\n{error}"
        return [result for result, _ in answers]

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for process in self.processes:
            process.kill()
            process.join()


_shared: list[RankPool] = []


def interpreting(world_size: int) -> RankPool:
    """New processes under Triton's interpreter."""
    import numpy as np
    import triton
    from torch.torch_version import TorchVersion as Version

    if Version(triton.__version__) < "3.7" and Version(np.__version__) >= "2.4":
        pytest.skip("the interpreter of triton 3.6 cannot count a loop with NumPy 2.4")
    return RankPool(world_size, TRITON_INTERPRET="1")


def interpreting_pool() -> RankPool:
    """Four processes under Triton's interpreter, which all tests of this process share."""
    if not _shared or _shared[-1].broken:
        pool = interpreting(4)
        atexit.register(pool.close)
        _shared.append(pool)
    return _shared[-1]
