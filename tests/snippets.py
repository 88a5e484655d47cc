"""The code blocks of the pages, and a run of each page's.

A page's blocks share one folder. Blocks with a ``title="..."`` are files of that name. Then Python
blocks run in one process, one after the other, after the page's setup in ``snippet_setup/``, which
makes what they take for granted. Then come ``bash`` blocks and the commands of ``console`` blocks,
whose output must be as shown (``...`` stands for anything).

A comment before a block changes that: ``<!-- not run: REASON -->`` or ``<!-- exits 1 -->``.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent
SETUP_FOLDER = Path(__file__).parent / "snippet_setup"
SETUPS = {
    "README.md": "own_layer.py",
    "docs/contract.md": "moe_output.py",
    "docs/explain.md": "block.py",
    "docs/index.md": "block.py",
    "docs/integrations.md": "checkpoint.py",
    "docs/matching.md": "other_ops.py",
}
DATA = ("json", "text")
CODE = ("python", "bash", "console")
TIME_LIMIT_S = 240


@dataclass(frozen=True)
class Snippet:
    """One code block; ``line`` is that of its first line of code, from 1."""

    page: Path
    line: int
    language: str
    source: str
    title: str | None = None
    not_run: str | None = None
    exits: int = 0

    def __str__(self):
        return f"{self.page.name}:{self.line}"

    @property
    def is_file(self):
        return self.title is not None


def pages():
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]


def snippets_of(page):
    found, comment = [], ""
    for token in MarkdownIt("commonmark").parse(page.read_text()):
        if token.type in ("fence", "code_block"):
            first = token.map[0] + (2 if token.type == "fence" else 1)
            found.append(_snippet(page, first, token.info, token.content, comment))
        comment = token.content if token.type == "html_block" else ""
    return found


def _snippet(page, line, info, source, comment):
    language, _, rest = info.partition(" ")
    title = re.search(r'title="([^"]+)"', rest)
    not_run = re.search(r"<!-- not run: (.+?) -->", comment)
    exits = re.search(r"<!-- exits (\d+) -->", comment)
    return Snippet(
        page,
        line,
        language,
        source,
        title=title and title[1],
        not_run=not_run and not_run[1],
        exits=int(exits[1]) if exits else 0,
    )


def run_page(page, folder):
    """Run every block of the page that is not excused; an AssertionError names what failed."""
    snippets = [s for s in snippets_of(page) if s.not_run is None]
    for snippet in snippets:
        if snippet.is_file:
            (folder / snippet.title).write_text(snippet.source)
    if any(s.language == "python" and not s.is_file for s in snippets):
        _expect_exit(page.name, _run([sys.executable, __file__, str(page)], folder), 0)
    for snippet in snippets:
        if snippet.language == "bash" and not snippet.is_file:
            command = ["bash", "-euo", "pipefail", "-c", snippet.source]
            _expect_exit(snippet, _run(command, folder), snippet.exits)
        elif snippet.language == "console":
            _check_session(snippet, folder)


def _check_session(snippet, folder):
    _, *parts = re.split(r"^\$ ", snippet.source, flags=re.MULTILINE)
    assert parts, f"{snippet}: expected a line that starts with '$ '"
    for part in parts:
        command, _, shown = part.partition("\n")
        done = _run(["bash", "-euo", "pipefail", "-c", command], folder)
        _expect_exit(snippet, done, snippet.exits)
        matches = doctest.OutputChecker().check_output(shown, done.stdout, doctest.ELLIPSIS)
        assert matches, f"{snippet}: {command}\nexpected\n{shown}\ngot\n{done.stdout}"


def _run(command, folder):
    own = {name: value for name, value in os.environ.items() if not name.startswith("MOE_FUSION_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{own['PATH']}"
    threads = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        command,
        cwd=folder,
        env=own | threads | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )


def _expect_exit(what, done, code):
    said = f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    assert done.returncode == code, (
        f"{what}: expected exit code {code}, got {done.returncode}\n{said}"
    )


def name_of(page):
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


def _run_python(page):
    """In a process of its own: the setup, then the page's Python blocks, in one namespace."""
    names = {"__name__": "__main__"}
    if name_of(page) in SETUPS:
        setup = SETUP_FOLDER / SETUPS[name_of(page)]
        exec(compile(setup.read_text(), str(setup), "exec"), names)
    for snippet in snippets_of(page):
        if snippet.language == "python" and not snippet.is_file and snippet.not_run is None:
            # its lines are those of the page, in tracebacks too
            source = "\n" * (snippet.line - 1) + snippet.source
            exec(compile(source, str(page), "exec"), names)


if __name__ == "__main__":
    sys.path.insert(0, "")
    _run_python(Path(sys.argv[1]))
