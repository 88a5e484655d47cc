"""What ``moe-fusion bench`` shows of known figures: table, JSON, suggestions and plot."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

import pytest
from bench_figures import ENVIRONMENT, NAN, refused, result, timing, tuned

from moe_fusion.cli import bench, bench_plot
from moe_fusion.cli.bench_results import (
    Ceiling,
    Run,
    ceilings,
    ceilings_text,
    header,
    read_run,
    row,
    two_shot_table,
)
from moe_fusion.cli.main import main
from moe_fusion.errors import BenchError


@pytest.mark.parametrize("error", [4e-3, NAN, math.inf])
def test_a_case_over_the_bound_shows_no_figure(capsys, error):
    wrong = result(tokens=4, fused=timing(123.25, 234.5, error), inductor=345.75)
    run = Run(ENVIRONMENT, [result(fused=2.0, inductor=3.0), wrong])
    line = row(wrong, run.variants)
    entry = json.loads(run.as_json())["cases"][1]["timings"]["fused"]
    assert wrong.figure_us("fused") is wrong.over_floor("fused") is None
    for text in (line, json.dumps(entry)):
        assert "wrong: error" in text
        assert "123" not in text
        assert "234" not in text
    assert "345.75" in line
    assert bench.exit_code(run) == 1
    assert bench.exit_code(replace(run, results=run.results[:1])) == 0


def test_the_table():
    one = result(fused=timing(4.25, 6.5, 3.2e-3), inductor=timing(5.0), inductor_alone=4.0)
    other = result(8, 128, launch=2.0, moved=3.0, fused=10.0, inductor=20.0, inductor_alone=8.0)
    head = header(list(one.timings)).split()
    assert " ".join(head) == (
        "W T H K dtype fused cold inductor cold inductor_alone cold floor x floor error"
    )
    lines = [row(each, list(one.timings)) for each in (one, other)]
    assert " ".join(lines[0].split()) == (
        "2 1 7168 8 bf16 4.25 6.50 5.00 - 4.00 - 2.00 2.12 3.2e-03"
    )
    assert " ".join(lines[1].split()) == (
        "8 128 7168 8 bf16 10.00 - 20.00 - 8.00 - 5.00 2.00 1.0e-03"
    )
    assert len(lines[0]) == len(lines[1]) == len(header(list(one.timings)))


def test_json_has_every_figure_and_reads_back():
    results = [result(fused=timing(4.0, 6.0), inductor=5.0), result(4, fused=timing(3.0, 1.0, NAN))]
    run = Run(ENVIRONMENT, results)
    text = run.as_json()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))
    assert found["environment"] == ENVIRONMENT
    assert found["cases"][0] == {
        "world_size": 2, "num_tokens": 1, "hidden_dim": 7168, "top_k": 8, "dtype": "bf16",
        "two_shot": False, "launch_us": 1.0, "byte_us": 1.0, "floor_us": 2.0,
        "timings": {
            "fused": {
                "error": 1e-3, "bound": 3.5e-3, "us": 4.0, "cold_us": 6.0, "over_floor": 2.0
            },
            "inductor": {
                "error": 1e-3, "bound": 3.5e-3, "us": 5.0, "cold_us": None, "over_floor": 2.5
            },
        },
    }  # fmt: skip
    assert found["ceilings"][0]["tokens"] == 1
    again = read_run(text, "here")
    assert again.results[0] == results[0]
    assert again.as_json() == text


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"environment": {}, "cases": [{}]}', '{"environment": {}, "cases": 3}'],
)
def test_a_file_of_another_kind_is_refused(text):
    expected = r"here: expected what moe-fusion bench --json wrote, got \w+: "
    with pytest.raises(BenchError, match=expected):
        read_run(text, "here")


def test_the_launch_table_is_python_with_the_smallest_t_from_which_two_shot_wins():
    results = [
        *(tuned(2, t, 1.0, 2.0) for t in (1, 8, 64)),
        tuned(4, 1, 3.0, 2.0),  # wins, but not at every larger T
        tuned(4, 8, 1.0, 2.0),
        tuned(4, 16, 3.0, 2.0),
        tuned(4, 64, 3.0, 2.0),
        tuned(8, 64, 3.0, 2.0),
        tuned(8, 1, 3.0, 2.0),
    ]
    text = two_shot_table(reversed(results))
    assert text == "TWO_SHOT_FROM_TOKENS = {2: 1 << 30, 4: 16, 8: 1}"
    narrow = tuned(8, 1, 1.0, 2.0, hidden_dim=2048)  # one width where it loses
    assert two_shot_table([*results, narrow]).endswith("8: 64}")
    names = {}
    exec(text, names)
    from moe_fusion.kernels.launch import TWO_SHOT_FROM_TOKENS

    assert names["TWO_SHOT_FROM_TOKENS"].keys() == TWO_SHOT_FROM_TOKENS.keys()
    assert names["TWO_SHOT_FROM_TOKENS"][2] == TWO_SHOT_FROM_TOKENS[2]


def test_a_wrong_variant_takes_no_part_in_the_launch_table():
    results = [tuned(2, 1, 3.0, 2.0), tuned(2, 8, 3.0, timing(2.0, error=NAN))]
    assert two_shot_table(results) == "TWO_SHOT_FROM_TOKENS = {2: 1}"


def test_the_ceiling_ends_where_the_best_alternative_first_wins():
    def at(tokens, fused, nccl, symm_mem, **options):
        return result(4, tokens, fused=fused, nccl=nccl, symm_mem=symm_mem, **options)

    results = [at(32, 1, 2, 2), at(64, 9, 8, 10), at(128, 1, 2, 2), at(1, 1, 3, 2)]
    assert ceilings(results) == [Ceiling(4, 7168, "bf16", 32, open_end=False)]
    assert ceilings(results[::2]) == [Ceiling(4, 7168, "bf16", 128, open_end=True)]
    assert ceilings([at(1, 2, 1, 3)]) == [Ceiling(4, 7168, "bf16", 0, open_end=False)]
    few = at(32, 5, 4, 5, top_k=2)  # one K where it loses
    assert ceilings([*results, few])[0].tokens == 1
    wrong = at(16, timing(1.0, error=NAN), 2, 2)
    assert ceilings([*results, wrong])[0].tokens == 1
    assert "W 4, H 7168, bf16: 32" in ceilings_text(ceilings(results))
    assert "128 or more: the largest measured" in ceilings_text(ceilings(results[::2]))


def test_one_rank_alone_is_no_alternative_and_without_one_there_is_no_ceiling():
    results = [result(fused=4.0, inductor=5.0, inductor_alone=3.0)]
    assert ceilings(results) == [Ceiling(2, 7168, "bf16", 1, open_end=True)]
    assert ceilings([result(fused=4.0, inductor_alone=3.0)]) == []
    assert ceilings([result(fused=4.0, inductor=timing(9.0, error=NAN))]) == []


def drawn():
    results = [
        result(w, t, fused=4.0 * t, inductor=6.0 * t, launch=1.0, moved=1.0)
        for w in (2, 4)
        for t in (16, 1, 4)
    ]
    results[0] = result(2, 16, fused=timing(64.0, error=NAN), inductor=96.0)
    return Run(ENVIRONMENT, results)


def test_the_figure_has_a_line_for_each_variant_and_a_bar_for_each_right_case():
    pytest.importorskip("matplotlib")
    figure = bench_plot.draw(drawn())
    lines, bars = figure.axes
    assert (lines.get_xscale(), lines.get_yscale()) == ("log", "log")
    data = {line.get_label(): line.get_xydata().tolist() for line in lines.lines}
    assert data == {
        "fused, W 2": [[1, 4], [4, 16]],
        "inductor, W 2": [[1, 6], [4, 24], [16, 96]],
        "fused, W 4": [[1, 4], [4, 16], [16, 64]],
        "inductor, W 4": [[1, 6], [4, 24], [16, 96]],
    }
    heights = [[bar.get_height() for bar in group] for group in bars.containers]
    assert heights == [[2, 8], [2, 8, 32]]
    places = [bar.get_x() for group in bars.containers for bar in group]
    assert len(set(places)) == 5
    assert [label.get_text() for label in bars.get_xticklabels()] == ["1", "4", "16"]


def test_a_saved_run_is_shown_and_drawn_without_a_gpu(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    saved, image = tmp_path / "results.json", tmp_path / "out.png"
    saved.write_text(drawn().as_json())
    assert main(["bench", "--from", str(saved), "--plot", str(image)]) == 1  # one case is wrong
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == header(["fused", "inductor"])
    assert len(printed) == 1 + 6 + 1 + 3
    assert printed[-1] == "  W 4, H 7168, bf16: 16 or more: the largest measured"
    assert image.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def without_figures(tmp_path):
    saved = tmp_path / "results.json"
    saved.write_text(Run(ENVIRONMENT, [result(fused=timing(1.0, error=NAN))]).as_json())
    return str(saved)


def test_a_plot_without_matplotlib_is_an_error(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = refused(capsys, "--from", without_figures(tmp_path), "--plot", "out.png")
    assert error == (
        "moe-fusion: expected the package 'matplotlib' to draw the plot, got an environment "
        'without it: pip install "moe-fusion[bench]"\n'
    )


def test_a_plot_of_nothing_or_into_nowhere_is_an_error(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    image = tmp_path / "out.png"
    assert main(["bench", "--from", without_figures(tmp_path), "--plot", str(image)]) == 1
    assert "expected at least one case with a figure, got none" in capsys.readouterr().err
    assert not image.exists()
    saved = tmp_path / "drawn.json"
    saved.write_text(drawn().as_json())
    for name, message in (
        ("no/out.png", "--plot: expected a file in a folder that exists, got "),
        ("out.nothing", "expected a file that can be written, got "),
    ):
        assert main(["bench", "--from", str(saved), "--plot", str(tmp_path / name)]) == 1
        assert message in capsys.readouterr().err
