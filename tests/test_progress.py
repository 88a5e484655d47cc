"""The progress display: lines in a log, a wiped spinner on a terminal."""

from __future__ import annotations

import io
import time

from moe_fusion.cli.progress import CLEAR_LINE, INTERVAL_SECONDS, Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_log_gets_each_step_once():
    log = io.StringIO()
    with Progress(log) as progress:
        for text in ("building", "building", "compiling"):
            progress.step(text)
    assert log.getvalue() == "building ...\ncompiling ...\n"


def test_a_terminal_gets_one_line_that_is_wiped():
    terminal = Terminal()
    with Progress(terminal) as progress:
        progress.step("building")
        time.sleep(3 * INTERVAL_SECONDS)
    assert "building (0 s)" in terminal.getvalue()
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().endswith(CLEAR_LINE)


def test_a_result_wipes_the_line_before_it_and_goes_to_stdout(capsys):
    for stream, wiped in ((Terminal(), True), (io.StringIO(), False)):
        progress = Progress(stream)
        progress.step("measuring")
        before = stream.getvalue()
        progress.result("1 2 3")
        assert stream.getvalue() == before + (CLEAR_LINE if wiped else "")
        assert capsys.readouterr().out == "1 2 3\n"
