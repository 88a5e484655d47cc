"""``moe-fusion bench``: cases, floors, tables and plots from known figures, and one real run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import bench_ranks
import pytest
import torch
from bench_figures import ENVIRONMENT, NAN, refused, result, timing, tuned
from rank_pool import interpreting_pool

from moe_fusion import reference
from moe_fusion.cli import bench, bench_flashinfer, bench_graphs, bench_real
from moe_fusion.cli.bench_cases import (
    Case,
    byte_floor_us,
    copies_past_cache,
    copy_of,
    every_case,
    exchanged_bytes,
    moved_bytes,
)
from moe_fusion.cli.bench_results import (
    Result,
    Run,
)
from moe_fusion.cli.bench_unfused import Unfused, compiled
from moe_fusion.cli.main import main
from moe_fusion.errors import BenchError

SMALL = Case(2, 3, 16, 2, "bf16")
DECODE = Case(8, 1, 7168, 8, "bf16")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine lacks")


# what is measured


def test_cases_are_the_cross_product_with_tokens_fastest():
    cases = every_case([2, 4], [1, 16], [64], [4, 8], ["bf16", "fp32"])
    assert len(cases) == len(set(cases)) == 16
    assert cases[:3] == [Case(2, 1, 64, 4, "bf16"), Case(2, 16, 64, 4, "bf16"),
                         Case(4, 1, 64, 4, "bf16")]  # fmt: skip
    assert cases[-1] == Case(4, 16, 64, 8, "fp32")


def test_inputs_are_the_same_in_every_process_and_differ_by_rank():
    one, again, other = SMALL.inputs(0, "cpu"), SMALL.inputs(0, "cpu"), SMALL.inputs(1, "cpu")
    assert torch.equal(one.routed, again.routed)
    assert not torch.equal(one.routed, other.routed)
    assert not torch.equal(one.shared_output, other.shared_output)
    assert torch.equal(one.residual, other.residual)
    assert torch.equal(one.norm_weight, other.norm_weight)
    assert sorted(one.expanded_idx_to_permuted_idx.flatten().tolist()) == list(range(6))
    one.check()


def test_copies_have_the_numbers_in_other_memory():
    args = SMALL.inputs(0, "cpu")
    copied = copy_of(args)
    for name in ("routed", "expert_weights", "shared_output", "residual", "norm_weight"):
        old, new = getattr(args, name), getattr(copied, name)
        assert torch.equal(old, new)
        assert old.data_ptr() != new.data_ptr()


@pytest.mark.parametrize(
    ("case", "read", "one_shot", "two_shot"),
    [
        # rows 6, shared 3 and residual 3 of 32 bytes, 6 routing entries of 8, norm weight of 32
        (SMALL, 12 * 32 + 48 + 32, 2 * 1 * 96, 4 * 96 // 2),
        # 10 rows of 14,336 bytes, 8 routing entries of 8, the norm weight
        (DECODE, 10 * 14336 + 64 + 14336, 2 * 7 * 14336, 4 * 7 * 14336 // 8),
        (Case(4, 2, 16, 1, "fp32"), 3 * 128 + 16 + 64, 2 * 3 * 128, 4 * 3 * 128 // 4),
    ],
)
def test_bytes_and_floors_by_hand(case, read, one_shot, two_shot):
    args = case.inputs(0, "cpu")
    tensors = (getattr(args, name) for name in args.__dataclass_fields__)
    sizes = [t.numel() * t.element_size() for t in tensors if torch.is_tensor(t)]
    assert case.input_bytes == read == sum(sizes)
    assert exchanged_bytes(case, two_shot=False) == one_shot
    assert exchanged_bytes(case, two_shot=True) == two_shot
    outputs = 2 * case.partial_bytes
    assert moved_bytes(case, two_shot=False) == read + outputs + one_shot
    floor = byte_floor_us(case, two_shot=True, ranks=3, terabytes_per_s=2.0)
    assert floor == pytest.approx(3 * (read + outputs + two_shot) / 2e12 * 1e6)


def test_the_floor_of_a_known_case():
    # 8 ranks x (157,760 read + 28,672 written + 200,704 exchanged) bytes at 4.3 TB/s
    floor = byte_floor_us(DECODE, two_shot=False, ranks=8, terabytes_per_s=4.3)
    assert floor == pytest.approx(0.72025, rel=1e-4)


def test_copies_are_twice_the_cache_or_one_where_one_call_reads_as_much():
    cache = 50 << 20
    for ranks in (1, 8):
        count = copies_past_cache(DECODE, ranks, cache)
        assert (count - 1) * ranks * DECODE.input_bytes < 2 * cache
        assert count * ranks * DECODE.input_bytes >= 2 * cache
    assert copies_past_cache(replace(DECODE, num_tokens=512), 8, cache) == 1


def test_every_copy_is_called_as_often_as_the_others():
    seen = []
    calls = bench_graphs.calls_in_turn(lambda rank, args: seen.append((rank, args)), 1, "abc", 7)
    for call in calls:
        call()
    assert seen == [(1, letter) for letter in "abcabcabc"]


# whether it was right


def run_on_cpu(monkeypatch):
    """Calls run once in order instead of in a graph; each takes three microseconds."""

    def time_calls(ranks, settings):
        return 3.0, [[call() for call in calls][-1] for calls in ranks]

    monkeypatch.setattr(bench_graphs, "time_calls", time_calls)
    properties = type("Properties", (), {"L2_cache_size": 4 * SMALL.input_bytes})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def time_one(path, *, cold=True):
    inputs = [SMALL.inputs(rank, "cpu") for rank in range(2)]
    exact = [reference.tail([args], torch.float64)[0] for args in inputs]
    settings = bench_graphs.Settings(2, 50, cold=cold)
    return bench_graphs.time_path(path, SMALL, inputs, exact, settings)


def test_a_right_path_has_its_figures_and_the_error_of_every_rank(monkeypatch):
    run_on_cpu(monkeypatch)
    places = set()

    def path(rank, args):
        places.add(args.routed.data_ptr())
        return Unfused()(args)

    got = time_one(path)
    assert len(places) == 2 * 4  # copies of two ranks' inputs, twice the cache
    assert (got.us, got.cold_us, got.wrong) == (3.0, 3.0, None)
    assert 0.0 < got.error <= got.bound == SMALL.bound == 7e-3
    assert time_one(path, cold=False).cold_us is None


@pytest.mark.parametrize("spoil", ["rank", "residual", "nan", "cold"])
def test_one_wrong_output_of_one_rank_makes_the_case_wrong(monkeypatch, spoil):
    run_on_cpu(monkeypatch)
    calls = []

    def path(rank, args):
        norm_out, residual_out = Unfused()(args)
        calls.append(rank)
        if spoil == "rank" and rank == 1:
            norm_out = norm_out * 1.02
        if spoil == "residual" and rank == 0:
            residual_out = residual_out * 0.98
        if spoil == "nan":
            norm_out[-1, -1] = NAN
        if spoil == "cold" and len(calls) > 4:
            norm_out = torch.zeros_like(norm_out)
        return norm_out, residual_out

    got = time_one(path)
    assert got.wrong.startswith("wrong: error ")
    assert got.wrong.endswith("expected at most 7.00e-03")
    assert math.isnan(got.error) == (spoil == "nan")


def test_plain_torch_is_within_the_bound_and_compiles_as_whole_graphs(monkeypatch):
    args = SMALL.inputs(0, "cpu")
    exact = [reference.tail([args], torch.float64)[0]]
    options = []

    def compile_eager(function, **given):
        options.append(given)
        return real_compile(function, backend="eager", **given)

    real_compile = torch.compile
    monkeypatch.setattr(torch, "compile", compile_eager)
    for dynamic in (False, True):
        unfused = compiled(dynamic=dynamic)
        assert bench_graphs.largest_error([unfused(args)], exact) <= SMALL.bound
    assert [(o["dynamic"], o["fullgraph"]) for o in options] == [(False, True)] * 2 + [
        (True, True)
    ] * 2


def test_real_ranks_paths_match_the_oracle(tmp_path):
    case = Case(2, 5, 64, 3, "bf16")
    pool = interpreting_pool().first(2)
    for errors, without, worst, spoiled in pool.run(
        bench_ranks.compare_paths, str(tmp_path), case, timeout_s=60.0
    ):
        assert set(errors) == {"fused", "gloo"}
        assert errors["fused"][1] == case.bound
        assert errors["gloo"][1] == 2 * case.bound
        for error, bound in errors.values():
            assert 0.0 < error <= bound
        assert without > 10 * case.bound
        assert worst == [1.0, 0.0]
        assert math.isnan(spoiled[0])


@pytest.mark.parametrize("kernel", [bench_ranks.old_kernel, bench_ranks.new_kernel])
def test_flashinfers_kernel_is_compared_where_it_is_installed(tmp_path, kernel):
    case = Case(2, 5, 64, 3, "bf16")
    pool = interpreting_pool().first(2)
    answers = pool.run(bench_ranks.beside_flashinfer, str(tmp_path), case, kernel, timeout_s=60.0)
    for rank, (errors, made, destroyed) in enumerate(answers):
        assert set(errors) == {"fused", "gloo", "flashinfer"}
        error, bound = errors["flashinfer"]
        assert errors["fused"][0] < error <= bound == 2 * case.bound  # its weights are bf16
        assert made == [(rank, 2, 5, 64)]
        assert destroyed == ["handles"]


@pytest.mark.parametrize(("dtype", "taken"), [("bf16", True), ("fp16", True), ("fp32", False)])
def test_flashinfers_kernel_takes_16_bit_rows_only(dtype, taken):
    assert bench_flashinfer.takes(replace(SMALL, dtype=dtype)) == taken


def test_a_package_that_is_absent_has_no_version(monkeypatch):
    monkeypatch.setattr(bench_flashinfer, "FLASHINFER", "no_such_package")
    assert bench_flashinfer.version() is None


# the command


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "1,x"], "expected numbers from 1 to 512, separated by commas, got '1,x'"),
        (["--tokens", ""], "expected numbers from 1 to 512, separated by commas, got ''"),
        (["--tokens", "513"], "expected numbers from 1 to 512, separated by commas, got '513'"),
        (["--hidden-dims", "8"], "expected numbers from 16 to 16384"),
        (["--hidden-dims", "100"], "expected multiples of 8, got '100'"),
        (["--top-ks", "0"], "expected numbers from 1 to 32"),
        (["--world-sizes", "2,3"], "expected some of 2, 4, 8, separated by commas, got '2,3'"),
        (["--dtypes", "int8"], "expected some of fp32, bf16, fp16, separated by commas"),
        (["--repeats", "49"], "expected numbers from 50 to 10000"),
        (["--calls", "1,2"], "expected one number, got '1,2'"),
        (["--bandwidth", "fast"], "invalid float value: 'fast'"),
    ],
)
def test_wrong_usage_says_what_was_expected(capsys, options, message):
    with pytest.raises(SystemExit) as caught:
        main(["bench", *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@NO_GPU
def test_without_a_gpu_there_is_one_error(capsys):
    assert refused(capsys) == "moe-fusion: bench: expected a CUDA GPU, got none\n"


def test_files_that_cannot_be_read_or_written_are_errors(capsys, tmp_path):
    missing, nowhere = str(tmp_path / "missing"), str(tmp_path / "no" / "out.json")
    assert f"expected a readable file, got {missing}" in refused(capsys, "--from", missing)
    saved = tmp_path / "results.json"
    saved.write_text(Run(ENVIRONMENT, [result(fused=1.0)]).as_json())
    expected = f"--json: expected a file in a folder that exists, got {nowhere}"
    assert expected in refused(capsys, "--from", str(saved), "--json", nowhere)
    assert main(["bench", "--from", str(saved), "--json", str(tmp_path)]) == 1
    assert "--json: expected a file to write, got " in capsys.readouterr().err
    assert "--bandwidth: expected a number above 0, got nan" in refused(
        capsys, "--bandwidth", "nan"
    )


def launched(monkeypatch, world_size, rank=0):
    values = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def fake_gpu(monkeypatch, measured, *, mode="_virtual"):
    """Cases come out as ``measured`` says; the options with which they were asked for."""
    seen = []

    @contextmanager
    def opened(arguments):
        seen.append(arguments)
        yield measured

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, mode, opened)
    monkeypatch.setattr(bench, "environment", lambda *_, real: {"mode": "real" if real else ""})
    return seen


def by_tokens(case):
    return Result(case, False, 1.0, 1.0, {"fused": timing(2.0), "inductor": timing(3.0)})


def test_the_command_prints_rows_and_suggestions_and_saves_them(capsys, monkeypatch, tmp_path):
    seen = fake_gpu(monkeypatch, by_tokens)
    saved = tmp_path / "results.json"
    options = ["--tokens", "4,1,4", "--world-sizes", "4,2", "--json", str(saved)]
    assert main(["bench", *options]) == 0
    captured = capsys.readouterr()
    rows = [line.split()[:4] for line in captured.out.splitlines()[1:5]]
    assert rows == [[w, t, "7168", "8"] for w in "42" for t in "14"]
    assert "W 2, H 7168, bf16: 4 or more" in captured.out
    assert "Measuring W 2, T 4, H 7168 (4 of 4) ..." in captured.err.splitlines()
    assert (seen[0].calls, seen[0].repeats, seen[0].baseline) == (50, 50, "static")
    cases = json.loads(saved.read_text())["cases"]
    assert [case["timings"]["fused"]["us"] for case in cases] == [2.0] * 4


def test_json_on_stdout_is_all_of_it_and_a_wrong_case_is_exit_code_1(capsys, monkeypatch):
    def spoiled(case):
        return replace(by_tokens(case), timings={"fused": timing(2.0, error=1.0)})

    fake_gpu(monkeypatch, spoiled)
    assert main(["bench", "--tokens", "1", "--world-sizes", "8", "--json", "-"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["cases"][0]["timings"]["fused"]["error"] == 1.0
    assert "fused: wrong: error 1.00e+00, expected at most 3.50e-03" in captured.err


def test_tune_prints_the_launch_table(capsys, monkeypatch):
    def measured(case):
        two_shot = 1.0 if case.num_tokens >= 16 else 3.0
        return tuned(case.world_size, case.num_tokens, 2.0, two_shot)

    fake_gpu(monkeypatch, measured)
    assert main(["bench", "--tune", "--tokens", "1,16,32"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "TWO_SHOT_FROM_TOKENS = {2: 16, 4: 16, 8: 16}"


def test_under_a_launcher_ranks_are_real_and_only_rank_0_prints(capsys, monkeypatch):
    launched(monkeypatch, 4)
    fake_gpu(monkeypatch, by_tokens, mode="_real")
    assert main(["bench", "--tokens", "1"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:2]] == ["W", "4"]
    launched(monkeypatch, 4, rank=3)
    assert main(["bench", "--tokens", "1"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("world_size", "options", "message"),
    [
        (3, [], "ranks: expected one of (2, 4, 8), got 3"),
        (4, ["--world-sizes", "2"], "--world-sizes: expected torchrun's 4, got 2"),
        (4, ["--tune"], "--tune: expected virtual ranks, got torchrun; add --virtual"),
        (4, ["--virtual"], "--virtual: expected one process, got 4 ranks"),
    ],
)
def test_what_a_launcher_does_not_allow(capsys, monkeypatch, world_size, options, message):
    launched(monkeypatch, world_size)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert message in refused(capsys, *options)


def test_real_ranks_need_a_gpu_each(monkeypatch):
    launched(monkeypatch, 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    expected = "real ranks: expected a GPU for each of 4 ranks, got 2"
    with pytest.raises(BenchError, match=expected), bench_real.world():
        pass
    assert not torch.distributed.is_initialized()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("tune", [False, True])
def test_a_run_on_a_gpu_is_right_and_above_the_floor(tune):
    command = [sys.executable, "-m", "moe_fusion.cli.main", "bench", "--virtual", "--json", "-"]
    options = ["--tokens", "1,4", "--world-sizes", "2", *(["--tune"] if tune else [])]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [case["num_tokens"] for case in found["cases"]] == [1, 4]
    names = {"one_shot", "two_shot"} if tune else {"fused", "inductor", "inductor_alone"}
    for case in found["cases"]:
        assert set(case["timings"]) == names
        for name, timed in case["timings"].items():
            assert 0.0 < timed["error"] <= timed["bound"]
            least = case["launch_us"] if name.startswith("inductor") else case["floor_us"]
            assert 0.0 < least < timed["us"] < 1000.0
            assert least < timed["cold_us"] < 1000.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_hosts_part_has_a_figure_for_each_way_to_call(tmp_path):
    saved = tmp_path / "host_cost.json"
    script = Path(__file__).parents[1] / "benchmarks" / "host_cost.py"
    command = [sys.executable, str(script), "--repeats", "5", "--json", str(saved)]
    subprocess.run(command, check=True, timeout=240)
    us = json.loads(saved.read_text())["us"]
    assert list(us) == ["launch", "empty op", "op", "empty op, compiled", "op, compiled"]
    assert 0.0 < us["launch"] < us["empty op"] < us["op"] < 1000.0
    assert 0.0 < us["empty op, compiled"] < us["op, compiled"] < 1000.0
