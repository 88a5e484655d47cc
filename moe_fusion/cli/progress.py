"""A line on stderr that says what a command is doing: a spinner on a terminal, else plain lines."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from types import TracebackType
from typing import Self, TextIO

INTERVAL_SECONDS = 0.1
FRAMES = "|/-\\"
CLEAR_LINE = "\r\x1b[2K"


class Progress:
    """Shows one step at a time until the block is left.

    On a terminal the step is one line that is redrawn with a spinner and the seconds spent, and the
    last one is wiped at the end. Elsewhere (a log, a pipe) each step is printed once, when it
    starts. Everything goes to stderr, so that stdout stays the command's result.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._animated = self._stream.isatty()
        self._text = ""
        self._started = time.monotonic()
        self._stop = threading.Event()
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None

    def step(self, text: str) -> None:
        """Show ``text`` as what happens now; the same text again changes nothing."""
        if text == self._text:
            return
        self._text, self._started = text, time.monotonic()
        if not self._animated:
            print(f"{text} ...", file=self._stream, flush=True)

    def result(self, text: str) -> None:
        """Print a part of the command's result on stdout, on lines of its own."""
        with self._writing:
            if self._animated:
                self._stream.write(CLEAR_LINE)
                self._stream.flush()
            print(text, flush=True)

    def _spin(self) -> None:
        for frame in itertools.cycle(FRAMES):
            if self._stop.wait(INTERVAL_SECONDS):
                return
            if self._text:
                seconds = time.monotonic() - self._started
                with self._writing:
                    self._stream.write(f"{CLEAR_LINE}{frame} {self._text} ({seconds:.0f} s)")
                    self._stream.flush()

    def __enter__(self) -> Self:
        """Start the spinner, on a terminal."""
        if self._animated:
            self._thread = threading.Thread(target=self._spin, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the spinner and wipe its line."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._stream.write(CLEAR_LINE)
            self._stream.flush()
