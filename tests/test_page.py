"""``explain --html``: its counts, what it says of each all_reduce, and how a browser takes it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

import pytest
from browser import PHONE, WIDE, Visit, opened_browser

from moe_fusion.cli.html import page
from moe_fusion.cli.main import main
from moe_fusion.cli.outcome import Outcome
from moe_fusion.passes.render import NodeText
from moe_fusion.passes.report import FusionReport, Left, Site

COUNTS = ("world_size", "fused", "all_reduces_before", "all_reduces_after", "graphs")
HOSTILE = "</pre></style><script>document.title='taken'</script><img src=x onerror=alert(1)>&\"'"


@pytest.fixture(scope="module")
def browser():
    with opened_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    """Pages that the command wrote, each with the JSON of the same run."""
    import contextlib
    import io

    written = {}
    for name, options in {
        "one left": ["--factory", "factories:rms_norm"],
        "two graphs": ["--factory", "factories:graph_break"],
        "none fused": ["--factory", "factories:layer_norm"],
        "experts": ["--factory", "factories:experts", "--tp", "4"],
    }.items():
        path = tmp_path_factory.mktemp("page") / "report.html"
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            assert main(["explain", "--json", "--html", str(path), *options]) == 0
        written[name] = path, json.loads(output.getvalue())
    return written


@pytest.mark.parametrize("name", ["one left", "two graphs", "none fused", "experts"])
def test_the_counts_are_those_of_the_json(browser, explained, name):
    path, found = explained[name]
    visit = Visit(browser, path.as_uri())
    assert visit.complaints == []
    assert visit.requests == [path.as_uri()]
    for count in COUNTS:
        assert visit.texts(f"[data-count={count}]") == [str(found[count])], count
    left = sum(found["refusals"].values())
    assert visit.texts("[data-count=left]") == [str(left)]
    assert visit.page.locator(".tail.fused").count() == found["fused"]
    assert visit.page.locator(".tail.left").count() == left
    rows = visit.page.locator("[data-reason]")
    table = {
        row.get_attribute("data-reason"): row.locator("td").all_text_contents()
        for row in rows.all()
    }
    assert table == {reason: [str(n), reason] for reason, n in found["refusals"].items()}


def test_each_tail_is_drawn_before_and_after(browser, explained):
    path, found = explained["experts"]
    visit = Visit(browser, path.as_uri())
    tails = visit.page.locator(".tail").all()
    assert [tail.get_attribute("data-anchor") for tail in tails] == [
        tail["anchor"] for tail in found["tails"]
    ]
    for tail, facts in zip(tails, found["tails"], strict=True):
        before, after = tail.locator("figure").all()
        assert before.locator("figcaption").text_content() == "Before"
        assert before.locator("g.collective").count() >= 2  # all_reduce and wait_tensor
        assert before.locator("g.op").count() == 0
        assert after.locator("g.collective").count() == 0
        assert after.locator("g.op").count() == 1
        said = tail.locator("dl").text_content()
        assert facts["source"] in said
        assert str(facts["hidden_dim"]) in said
    title = tails[-1].locator("summary .where").text_content()
    assert title.split() == ["1.experts", "\N{RIGHTWARDS ARROW}", "1.norm"]
    # its shared expert's all_reduce is in the drawing too, with the line that each node has as text
    assert tails[-1].locator("figure").first.locator("g.collective").count() == 4
    lines = tails[-1].locator("pre").first.text_content().splitlines()
    drawn = tails[-1].locator("figure").first.locator("g:not(.input) > title").all_text_contents()
    assert lines == drawn
    assert sum("f32[6, 64] = c10d.all_reduce(" in line for line in lines) == 2


def test_what_was_left_says_why_where_and_shows_the_graph_around_it(browser, explained):
    path, _ = explained["one left"]
    left = Visit(browser, path.as_uri()).page.locator(".tail.left")
    assert "the reduction is 'max': expected 'sum'" in left.locator("summary").first.text_content()
    assert re.search(r"factories\.py:\d+", left.locator("dl").text_content())
    (stop,) = left.locator("g.stop > title").all_text_contents()
    assert stop.startswith("all_reduce_1: f32[6, 64] = c10d.all_reduce(")


def test_boxes_lie_in_the_drawing_and_apart(browser, explained):
    visit = Visit(browser, explained["experts"][0].as_uri())
    drawings = visit.page.evaluate(
        """() => [...document.querySelectorAll("svg")].map((svg) => ({
          size: [svg.width.baseVal.value, svg.height.baseVal.value],
          boxes: [...svg.querySelectorAll("rect")].map((r) =>
            ["x", "y", "width", "height"].map((key) => r[key].baseVal.value)),
        }))"""
    )
    assert len(drawings) == 4
    for drawing in drawings:
        width, height = drawing["size"]
        boxes = drawing["boxes"]
        assert all(x >= 0 and y >= 0 for x, y, _, _ in boxes)
        assert all(x + w <= width and y + h <= height for x, y, w, h in boxes)
        for i, (x, y, w, h) in enumerate(boxes):
            for other_x, other_y, other_w, other_h in boxes[i + 1 :]:
                apart_x = x + w <= other_x or other_x + other_w <= x
                assert apart_x or y + h <= other_y or other_y + other_h <= y


def test_labels_fit_into_their_boxes(browser, explained):
    visit = Visit(browser, explained["experts"][0].as_uri())
    visit.page.click("text=Open all")
    over = visit.page.evaluate(
        """() => [...document.querySelectorAll("svg g")].flatMap((g) =>
          [...g.querySelectorAll("text")].map((t) =>
            t.getComputedTextLength() - g.querySelector("rect").width.baseVal.value))"""
    )
    assert len(over) > 80
    assert max(over) < 0


@pytest.mark.parametrize(("scheme", "width"), [("light", WIDE), ("dark", PHONE)])
def test_people_can_read_it(browser, explained, scheme, width):
    path, _ = explained["one left"]
    visit = Visit(browser, path.as_uri(), width=width, scheme=scheme)
    visit.page.click("text=Open all")
    assert visit.fits()
    assert visit.violations() == []
    ground = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 28)"}[scheme]


def test_the_keyboard_opens_tails_and_scrolls_drawings(browser, explained):
    visit = Visit(browser, explained["one left"][0].as_uri())
    press = visit.page.keyboard.press
    for _ in range(3):  # the choice of what to show, then the two buttons
        press("Tab")
    press("Enter")
    opened = "[...document.querySelectorAll('.tail')].map((tail) => tail.open)"
    assert visit.page.evaluate(opened) == [False, False]
    press("Tab")
    press("Enter")
    assert visit.page.evaluate(opened) == [True, False]
    press("Tab")
    assert visit.page.evaluate("document.activeElement.className") == "scroll"


def test_the_choice_of_what_to_show(browser, explained):
    visit = Visit(browser, explained["one left"][0].as_uri())
    shown = {
        choice: (visit.page.check(f"#show-{choice}"), visible(visit.page))[1]
        for choice in ("fused", "left", "all")
    }
    assert shown == {"fused": [True, False], "left": [False, True], "all": [True, True]}


def visible(page):
    return [tail.is_visible() for tail in page.locator(".tail").all()]


def test_paper_shows_every_tail(browser, explained):
    visit = Visit(browser, explained["experts"][0].as_uri())
    assert sum(svg.is_visible() for svg in visit.page.locator("svg").all()) == 2
    visit.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    visit.page.emulate_media(media="print")
    assert all(svg.is_visible() for svg in visit.page.locator("svg").all())
    assert not visit.page.locator(".controls").is_visible()
    assert visit.fits()
    visit.page.emulate_media(media="screen")
    visit.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert sum(svg.is_visible() for svg in visit.page.locator("svg").all()) == 2


def hostile_outcome():
    node = NodeText(HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    words = ("dtype", "finalize", "shared", "norm", "residual", "group", "source")
    facts = dict.fromkeys((*words, "module", "norm_module", "num_tokens", "anchor"), HOSTILE)
    report = FusionReport(graphs=1, all_reduces_before=2, all_reduces_after=1)
    report.sites.append(
        Site(
            graph=0,
            hidden_dim=8,
            top_k=None,
            world_size=2,
            order=0,
            nodes_before=(node,),
            nodes_after=(node,),
            **facts,
        )
    )
    left = dict.fromkeys(("anchor", "reason", "node", "source", "module"), HOSTILE)
    report.left.append(Left(graph=0, order=1, nodes=(node,), **left))
    return Outcome(HOSTILE, 2, report.as_dict(), str(report), {})


def test_what_comes_from_the_model_is_text(browser, tmp_path):
    path = tmp_path / "hostile.html"
    path.write_text(page(hostile_outcome()))
    visit = Visit(browser, path.as_uri())
    assert visit.complaints == []
    assert visit.requests == [path.as_uri()]
    assert visit.page.title() == f"moe-fusion: {HOSTILE}"
    assert visit.page.locator("script").count() == visit.page.locator("style").count() == 1
    assert visit.page.locator("img").count() == 0
    assert visit.texts("h1") == [HOSTILE]
    assert visit.texts("pre") == [HOSTILE] * 3
    assert visit.texts(".source dd") == [HOSTILE] * 3
    assert visit.page.locator("[data-reason]").get_attribute("data-reason") == HOSTILE
    assert visit.page.locator(".tail.left").get_attribute("data-anchor") == HOSTILE


def test_a_script_that_got_in_would_not_run(browser, tmp_path):
    path = tmp_path / "injected.html"
    text = page(hostile_outcome())
    path.write_text(text.replace("</body>", "<script>document.title = 'taken'</script></body>"))
    visit = Visit(browser, path.as_uri())
    assert visit.page.title() != "taken"
    assert len(visit.complaints) == 1
    assert "Content Security Policy" in visit.complaints[0]


def test_a_model_without_an_all_reduce(browser, tmp_path):
    path = tmp_path / "none.html"
    path.write_text(page(Outcome("plain", 2, FusionReport().as_dict(), "", {})))
    visit = Visit(browser, path.as_uri())
    assert visit.complaints == []
    assert visit.texts("[data-count=fused]") == ["0"]
    assert "No all_reduce reached the pass" in visit.texts("main")[0]


def test_a_page_that_cannot_be_written(capsys, tmp_path, monkeypatch):
    for path in (tmp_path, tmp_path / "no folder" / "report.html"):
        assert main(["explain", "--factory", "factories:rms_norm", "--html", str(path)]) == 1
        captured = capsys.readouterr()
        expected = f"moe-fusion: --html: expected a file name in an existing folder, got {path}\n"
        assert (captured.out, captured.err) == ("", expected)
    monkeypatch.setattr("moe_fusion.cli.html.check_path", lambda _: None)
    monkeypatch.setattr("moe_fusion.cli.explain.check_path", lambda _: None)
    assert main(["explain", "--factory", "factories:rms_norm", "--html", str(tmp_path)]) == 1
    assert "moe-fusion: --html: expected a writable file, got " in capsys.readouterr().err


def test_nodes_are_kept_only_for_the_page():
    """Without it a report stays as small as its counts."""
    report = FusionReport()
    left = Left("all_reduce", 0, "reason", "", "", 0, "")
    report.left.append(left)
    assert asdict(left)["nodes"] == ()
    assert report.as_dict()["left"] == [asdict(left)]
