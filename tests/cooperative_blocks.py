"""Lets Triton's interpreter run the blocks of a launch by turns, as a GPU runs resident blocks.

By itself the interpreter runs them one after the other, and a block that waits for another of its
launch would wait for ever. Here each block is a greenlet, and a block that looks at the clock, as
waiting ones do, gives way to the next.
"""

from __future__ import annotations

import inspect
import os
import time

from greenlet import getcurrent, greenlet
from triton.runtime import interpreter

from moe_fusion.kernels import exchange


class _Collector:
    """Stands for a kernel: collects the blocks of one launch, and the last one starts them all."""

    def __init__(self, function, blocks: int) -> None:
        self.function, self.blocks, self.waiting = function, blocks, []
        self.__name__ = function.__name__
        self.__globals__ = function.__globals__  # where the interpreter puts its language
        self.__signature__ = inspect.signature(function)

    def __call__(self, **arguments) -> None:
        index = interpreter.interpreter_builder.grid_idx
        self.waiting.append((index, greenlet(self.function)))
        if len(self.waiting) == self.blocks:
            _take_turns(self.waiting, arguments)


class _Turns(interpreter.GridExecutor):
    def __call__(self, *args, **kwargs):
        self.fn = _Collector(self.fn, self.grid[0])
        super().__call__(*args, **kwargs)


def _take_turns(waiting, arguments) -> None:
    """Run every block until it looks at the clock, then the next, until all have ended."""
    started = set()
    while waiting:
        for index, block in list(waiting):
            interpreter.interpreter_builder.set_grid_idx(*index)
            if block in started:
                block.switch()
            else:
                started.add(block)
                block.switch(**arguments)
        os.sched_yield()  # peers may wait for this very core
        waiting[:] = [(index, block) for index, block in waiting if not block.dead]


def _clock_ns() -> int:
    getcurrent().parent.switch()
    return time.monotonic_ns()


def install() -> None:
    """Replace the interpreter's order of blocks in this process."""
    vars(_clock_ns)["__triton_builtin__"] = True
    exchange._host_clock_ns = _clock_ns
    interpreter.GridExecutor = _Turns
