"""The documentation's site: it builds strictly, has every page, and asks nothing of other hosts."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
import sys
import threading

import pytest
from browser import PHONE, WIDE, Visit, opened_browser
from snippets import ROOT

import moe_fusion

PAGES = sorted(page.relative_to(ROOT / "docs") for page in ROOT.glob("docs/**/*.md"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=120, check=False
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_each_page_is_built_and_in_the_navigation(site):
    navigation = (site / "index.html").read_text()
    for page in PAGES:
        address = page.with_suffix(".html").as_posix()
        assert (site / address).is_file(), page
        assert f'href="{address}"' in navigation, page


def test_the_reference_holds_every_public_name(site):
    text = (site / "api.html").read_text()
    described = set(re.findall(r'<h3 id="moe_fusion\.[\w.]*?(\w+)"', text))
    errors = set(re.findall(r'<h4 id="moe_fusion\.errors\.(\w+)"', text))
    assert set(moe_fusion.__all__) <= described | errors
    # the reference is Markdown, where a role of reStructuredText would be read as it stands
    assert re.findall(r":(?:class|func|mod|meth|data):<[^>]*>[^<]*", text) == []


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """The requests are looked at in the browser."""


@pytest.fixture(scope="module")
def address(site):
    handler = functools.partial(Quiet, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser():
    with opened_browser() as opened:
        yield opened


@pytest.mark.parametrize(
    ("name", "width"),
    [("index.html", PHONE), ("api.html", WIDE), ("adr/0001-eps-as-a-tensor.html", WIDE)],
)
def test_a_browser_opens_it_and_asks_this_host_alone(browser, address, name, width):
    visit = Visit(browser, f"{address}/{name}", width=width)
    visit.page.wait_for_load_state("networkidle")
    assert visit.complaints == []
    others = [url for url in visit.requests if not url.startswith((address, "data:", "blob:"))]
    assert others == []
    assert visit.fits()


def test_the_search_finds_a_name(browser, address):
    visit = Visit(browser, f"{address}/index.html?q=NotPreparedError")
    found = visit.page.locator(".md-search-result__link").first
    found.wait_for(state="attached", timeout=20_000)
    assert "/api.html" in found.get_attribute("href")
    assert not [url for url in visit.requests if not url.startswith(address)]


def test_files_that_the_architecture_names_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    tree = re.search(r"```text\n(moe_fusion/\n.*?)```", page, re.DOTALL)[1]
    folder, named = ROOT, 0
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = ROOT / name
        assert (folder / name if line.startswith(" ") else folder).exists(), line
        named += 1
    assert named > 20
