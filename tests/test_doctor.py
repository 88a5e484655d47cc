"""``moe-fusion doctor`` with and without a group, on any machine."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from moe_fusion.cli import doctor

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine lacks")


def run(*arguments):
    parser = argparse.ArgumentParser()
    doctor.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["doctor", *arguments])
    return parsed.run(parsed)


@NO_GPU
def test_without_a_gpu_every_world_size_has_its_reason(capsys):
    assert run() == 0
    text = capsys.readouterr().out
    assert "no CUDA device" in text
    for world_size in (2, 4, 8):
        line = next(line for line in text.splitlines() if f"{world_size} ranks" in line)
        assert "composite path: device: expected CUDA compute capability (8, 0) or later" in line


def test_json_is_one_object_with_the_same_facts(capsys):
    assert run("--json", "--hidden-dim", "100", "--dtype", "float16") == 0
    report = json.loads(capsys.readouterr().out)
    assert torch.__version__.startswith(report["versions"]["torch"].partition("+")[0])
    assert report["dtype"] == "float16"
    assert report["config"]["peer_timeout_s"] == 30.0
    assert report["group"] is None
    for entry in report["world_sizes"].values():
        assert not entry["fused"]
        assert entry["reason"]
        assert entry["token_ceiling"] == 0


def test_a_wrong_configuration_is_one_line_on_stderr(capsys, monkeypatch):
    monkeypatch.setenv("MOE_FUSION_PEER_TIMEOUT_S", "soon")
    assert run() == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    expected = "MOE_FUSION_PEER_TIMEOUT_S: expected a number of seconds, got 'soon'\n"
    assert captured.err == expected


@NO_GPU
def test_under_a_launcher_the_group_reports_what_it_agreed():
    """Two ranks without a GPU agree on the composite path; only rank 0 prints."""
    code = (
        "import argparse; from moe_fusion.cli import doctor; parser = argparse.ArgumentParser();"
        "doctor.add_parser(parser.add_subparsers());"
        "args = parser.parse_args(['doctor', '--json']); raise SystemExit(args.run(args))"
    )
    # As torchrun does: the launcher's own store, whose port nobody else can take meanwhile.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launcher = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | launcher | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    texts, errors = zip(*(process.communicate(timeout=120) for process in processes), strict=True)
    assert [process.returncode for process in processes] == [1, 1]
    assert texts[0], "\n".join(errors)
    group = json.loads(texts[0])["group"]
    assert group["world_size"] == 2
    assert not group["fused"]
    assert group["reason"].startswith("device: expected CUDA compute capability")
    assert texts[1] == ""
