"""Every code block of README.md, CONTRIBUTING.md and docs/ runs, or says why it does not."""

from __future__ import annotations

from collections import Counter

import pytest
from snippets import CODE, DATA, SETUP_FOLDER, SETUPS, name_of, pages, run_page, snippets_of

# Blocks that are not run, by page. One more is one more claim that nothing checks.
NOT_RUN = {
    "CONTRIBUTING.md": 1,
    "README.md": 4,
    "docs/benchmarks.md": 7,
    "docs/index.md": 1,
    "docs/vllm.md": 2,
}


def code(page):
    return [s for s in snippets_of(page) if s.language not in DATA]


@pytest.mark.parametrize("page", [p for p in pages() if code(p)], ids=name_of)
def test_the_snippets_of(page, tmp_path):
    run_page(page, tmp_path)
    files = {s.title for s in snippets_of(page) if s.is_file}
    assert files <= {path.name for path in tmp_path.iterdir()}


def test_each_block_has_a_language_or_a_reason():
    for page in pages():
        for snippet in snippets_of(page):
            known = snippet.language in (*CODE, *DATA)
            assert known or snippet.not_run, f"{snippet}: expected a language of {(*CODE, *DATA)}"


def test_what_is_not_run_is_counted():
    found = Counter()
    for page in pages():
        found[name_of(page)] += sum(bool(s.not_run) for s in snippets_of(page))
    assert dict(+found) == NOT_RUN


def test_each_setup_has_a_page():
    assert set(SETUPS) <= {name_of(page) for page in pages() if code(page)}
    assert set(SETUPS.values()) == {setup.name for setup in SETUP_FOLDER.glob("*.py")}


FENCE = "```"


def page_of(tmp_path, *blocks):
    page = tmp_path / "page.md"
    page.write_text("\n\n".join(f"{head}\n{body}\n{FENCE}" for head, body in blocks))
    return page


@pytest.mark.parametrize(
    ("head", "body", "message"),
    [
        (f"{FENCE}python", "x = 1\nassert x == 2", r'page.md", line 3'),
        (f"{FENCE}bash", "false\ntrue", "expected exit code 0, got 1"),
        (f"{FENCE}bash", "false | true", "expected exit code 0, got 1"),
        (f"<!-- exits 1 -->\n{FENCE}bash", "true", "expected exit code 1, got 0"),
        (f"{FENCE}console", "$ echo one\ntwo", "expected\ntwo\n\ngot\none"),
        (f"{FENCE}console", "$ echo one\none\n$ false", "expected exit code 0, got 1"),
        (f"{FENCE}console", "echo one", r"expected a line that starts with '\$ '"),
    ],
)
def test_a_wrong_block_fails(tmp_path, head, body, message):
    with pytest.raises(AssertionError, match=message):
        run_page(page_of(tmp_path, (head, body)), tmp_path)


def test_blocks_share_a_folder_and_python_a_namespace(tmp_path):
    page = page_of(
        tmp_path,
        (f"{FENCE}python", "value = 2"),
        (f'{FENCE}python title="made.py"', "number = 3"),
        (f"{FENCE}python", "from made import number\nopen('sum', 'w').write(str(value + number))"),
        (f"{FENCE}console", "$ cat sum; echo; echo a b c\n5\na ... c\n$ echo two\ntwo"),
        (f"<!-- not run: it would fail -->\n{FENCE}bash", "false"),
        (f"{FENCE}text", "nothing"),
    )
    run_page(page, tmp_path)
    assert (tmp_path / "sum").read_text() == "5"
    assert [s.line for s in snippets_of(page)] == [2, 6, 10, 15, 24, 28]
    assert [s.not_run for s in snippets_of(page)][4] == "it would fail"
