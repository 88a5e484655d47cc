"""The commands, as a user calls them."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import pytest
import torch

from moe_fusion.cli import demo, models
from moe_fusion.cli.main import main
from moe_fusion.cli.outcome import Outcome
from moe_fusion.errors import RanksDisagreeError

KEYS = {
    "world_size",
    "model",
    "all_reduces_before",
    "all_reduces_after",
    "tails",
    "fused",
    "left",
    "called",
    "refusals",
    "graphs",
    "max_abs_diff",
    "seconds",
}


def test_the_version_is_the_installed_packages(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    found = importlib.metadata.version("moe-fusion")
    assert capsys.readouterr().out == f"moe-fusion {found}\n"


def explain(capsys, *options):
    assert main(["explain", "--json", *options]) == 0
    output = json.loads(capsys.readouterr().out)
    assert set(output) == KEYS
    assert output["max_abs_diff"] is None
    assert set(output["seconds"]) == {"build", "trace"}
    assert output["fused"] == len(output["tails"])
    assert not torch.distributed.is_initialized()
    return output


def refused(capsys, *options):
    assert main(list(options)) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    ("family", "fused", "all_reduces", "shared"),
    [
        ("mixtral", 5, 5, "none"),
        ("qwen3_moe", 5, 5, "none"),
        ("qwen2_moe", 5, 5, "after the all_reduce"),
        ("deepseek_v3", 3, 4, "its own all_reduce"),
    ],
)
def test_explain_counts_the_tails_of_each_family(capsys, family, fused, all_reduces, shared):
    output = explain(capsys, "--model", family, "--tp", "4", "--tokens", "24", "--dtype", "bf16")
    assert (output["model"], output["world_size"], output["graphs"]) == (family, 4, 1)
    assert (output["all_reduces_before"], output["all_reduces_after"]) == (all_reduces, 0)
    assert output["fused"] == fused
    assert output["refusals"] == {}
    last = output["tails"][-1]
    assert (last["num_tokens"], last["hidden_dim"], last["top_k"]) == ("24", 128, 2)
    assert (last["dtype"], last["world_size"], last["shared"]) == ("bfloat16", 4, shared)
    assert "nodes_before" not in last


def test_explain_reads_a_config_file(capsys, tmp_path):
    path = tmp_path / "config.json"
    fields = {"model_type": "mixtral", "dtype": "bfloat16", "num_hidden_layers": 1}
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    path.write_text(json.dumps(fields | sizes | quantized))
    output = explain(capsys, "--config", str(path), "--tp", "8", "--dynamic")
    assert (output["model"], output["fused"], output["all_reduces_after"]) == (str(path), 3, 0)
    tail = output["tails"][-1]
    assert (tail["hidden_dim"], tail["dtype"], tail["world_size"]) == (4096, "bfloat16", 8)
    assert not tail["num_tokens"].isdigit()


def test_explain_takes_tied_weights(capsys, tmp_path):
    path = tmp_path / "config.json"
    fields = {"model_type": "qwen3_moe", "tie_word_embeddings": True, "num_hidden_layers": 1}
    path.write_text(json.dumps(fields | {"hidden_size": 256, "intermediate_size": 128}))
    output = explain(capsys, "--config", str(path))
    assert (output["fused"], output["all_reduces_after"]) == (3, 0)


def test_explain_says_why_an_all_reduce_stays(capsys):
    output = explain(capsys, "--factory", "factories:rms_norm")
    assert (output["fused"], output["all_reduces_before"], output["all_reduces_after"]) == (1, 2, 1)
    (left,) = output["left"]
    assert output["refusals"] == {left["reason"]: 1}
    assert "max" in left["reason"]
    assert (left["anchor"], left["graph"], left["order"]) == ("all_reduce_1", 0, 1)
    assert "factories.py:" in left["source"]
    assert "nodes" not in left
    assert output["called"] == 0


def test_explain_refuses_every_tail_above_the_token_ceiling(capsys, monkeypatch):
    monkeypatch.setenv("MOE_FUSION_TOKEN_CEILING", "4")
    output = explain(capsys, "--factory", "factories:rms_norm")
    assert output["fused"] == 0
    assert any("expected at most 4 tokens, got 6" in reason for reason in output["refusals"])
    assert sum(output["refusals"].values()) == output["all_reduces_after"] == 2


def test_explain_counts_graphs_and_goes_on_after_a_break(capsys):
    output = explain(capsys, "--factory", "factories:graph_break")
    assert (output["graphs"], output["fused"], output["all_reduces_before"]) == (2, 1, 2)


def test_explain_as_text_shows_the_graph_and_the_reasons(capsys):
    assert main(["explain", "--factory", "factories:rms_norm"]) == 0
    captured = capsys.readouterr()
    for part in (
        "2 ranks",
        "fused 1 tail in 1 graph",
        "left all_reduce_1: ",
        "before:",
        "After:",
        "trace: ",
    ):
        assert part in captured.out
    assert "moe_fusion.finalize_allreduce_rms_norm(" in captured.out
    assert captured.err.splitlines()[-1] == "Tracing factories:rms_norm ..."


@pytest.mark.parametrize("module", ["transformers", "accelerate"])
@pytest.mark.parametrize("command", ["demo", "explain"])
def test_missing_models_extra_says_how_to_install(capsys, monkeypatch, command, module):
    monkeypatch.setitem(sys.modules, module, None)
    error = refused(capsys, command)
    assert error.splitlines()[-1] == (
        f"moe-fusion: expected the package '{module}' to build the model, got an environment "
        'without it: pip install "moe-fusion[models]"'
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "nowhere.json"], "expected a readable config.json, got nowhere.json"),
        (["--factory", "factories"], "expected package.module:function, got 'factories'"),
        (["--factory", "factories:nothing"], "expected an importable 'factories:nothing'"),
        (["--factory", "factories:no_inputs"], "expected (model, example_inputs), got Tail"),
        (["--factory", "factories:not_a_model"], "expected a torch.nn.Module, got function"),
        (["--tokens", "0"], "num_tokens: expected at least 1, got 0"),
        (["--tp", "0"], "world size: expected a divisor of 8 for the small models, got 0"),
        (["--tp", "3"], "world size: expected a divisor of 8 for the small models, got 3"),
        (["--factory", "factories:wrong_shapes"], "expected one that can be traced over 2 ranks"),
    ],
)
def test_explain_says_what_it_expected(capsys, options, message):
    assert message in refused(capsys, "explain", *options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected a JSON object"),
        ("[]", "expected a JSON object"),
        ('{"model_type": "no_such_model"}', "got 'no_such_model'"),
        ("{}", "got None"),
        ('{"model_type": "clip_vision_model"}', "expected a causal language model"),
    ],
)
def test_explain_says_what_is_wrong_with_a_config(capsys, tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert message in refused(capsys, "explain", "--config", str(path))


def test_explain_leaves_an_existing_group_alone(fake_group):
    with pytest.raises(ValueError, match="expected a process without a default process group"):
        main(["explain"])
    assert torch.distributed.get_world_size() == fake_group


def test_wrong_usage_is_exit_code_2():
    for options in (
        [],
        ["demo", "--model", "gpt2"],
        ["explain", "--model", "mixtral", "--config", "x"],
    ):
        with pytest.raises(SystemExit) as caught:
            main(options)
        assert caught.value.code == 2


def test_demo_prints_one_json_object():
    command = [sys.executable, "-m", "moe_fusion.cli.main", "demo", "--json", "--tokens", "8"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    output = json.loads(run.stdout)
    assert set(output) == KEYS
    assert (output["model"], output["world_size"]) == ("mixtral", 2)
    assert (output["all_reduces_before"], output["all_reduces_after"]) == (5, 0)
    assert output["fused"] == len(output["tails"]) == 5
    assert output["refusals"] == {}
    assert [tail["num_tokens"] for tail in output["tails"]] == ["8"] * 5
    assert 0.0 <= output["max_abs_diff"] <= 1e-5
    for name in ("unfused", "fused"):
        assert set(output["seconds"][name]) == {"compile", "step"}
        assert all(value > 0 for value in output["seconds"][name].values())
    assert "Compiling mixtral with the pass ..." in run.stderr.splitlines()


def test_demo_reports_a_rank_that_does_not_finish(capsys):
    error = refused(capsys, "demo", "--time-limit", "1")
    assert "expected every rank to finish within 1 s, got none from [0, 1]" in error


def test_demo_checks_the_world_size_before_it_starts_ranks(capsys):
    assert "expected a divisor of 8" in refused(capsys, "demo", "--world-size", "5")


def test_demo_needs_the_ranks_to_agree():
    report = {"fused": 1, "all_reduces_before": 1, "all_reduces_after": 0, "refusals": {}}
    outcomes = [Outcome("mixtral", 2, {**report, "fused": fused}, "", {}, 0.0) for fused in (1, 0)]
    with pytest.raises(RanksDisagreeError, match=r"agree on fused, got \[1, 0\] by rank"):
        demo.agreed(outcomes)


def test_a_wrong_result_is_an_error(capsys, monkeypatch):
    report = {"fused": 0, "all_reduces_before": 0, "all_reduces_after": 0, "refusals": {}}
    wrong = [Outcome("mixtral", 1, report, "", {}, float("nan"))]
    monkeypatch.setattr(demo, "run_ranks", lambda *_, **__: wrong)
    assert "expected a difference of at most 0.0001, got nan" in refused(capsys, "demo")


@pytest.mark.parametrize("field", ["family", "dtype", "experts"])
def test_a_model_spec_says_what_it_expected(field):
    with pytest.raises(models.ModelError, match=rf"{field}: expected one of .*, got 'x'"):
        models.ModelSpec(**{field: "x"})


def test_importing_the_package_imports_no_extra():
    code = (
        "import sys, moe_fusion, moe_fusion.cli.main; "
        "print(sorted({'transformers', 'triton', 'accelerate', 'matplotlib'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
