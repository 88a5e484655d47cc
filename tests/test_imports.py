"""What importing the package does and does not do, each in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import moe_fusion

ROOT = Path(__file__).resolve().parents[1]

HEAVY = (
    "triton",
    "transformers",
    "sympy",
    "torch._inductor",
    "torch._dynamo",
    "moe_fusion.passes",
    "moe_fusion.integrations",
)
EAGER = """
import sys
import moe_fusion
assert "torch" in sys.modules
heavy = HEAVY
print([name for name in sys.modules if any(name == h or name.startswith(h + ".") for h in heavy)])
import torch
print(hasattr(torch.ops.moe_fusion, "finalize_allreduce_rms_norm"))
moe_fusion.FusionConfig()
moe_fusion.MoEOutput(torch.zeros(2, 16)).finalize()
print("moe_fusion.op" in sys.modules)
moe_fusion.MoEFusionPass
print(hasattr(torch.ops.moe_fusion, "finalize_allreduce_rms_norm"))
print("transformers" in sys.modules)
from moe_fusion.op import OP
print(OP is torch.ops.moe_fusion.finalize_allreduce_rms_norm.default)
""".replace("HEAVY", repr(HEAVY))


def run(code, folder=ROOT):
    """Standard output and error of a fresh interpreter in ``folder``."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_importing_the_package_imports_torch_alone():
    """The op is registered, and Inductor imported, when a name of the pass side is first used."""
    code, lines, errors = run(EAGER)
    assert code == 0, errors
    assert lines == ["[]", "False", "False", "True", "False", "True"]


def test_the_pass_side_refuses_its_folders_name():
    code, _, errors = run("import passes")
    assert code == 1
    assert errors.splitlines()[-1] == (
        "ImportError: expected this package to be imported as moe_fusion.passes, got passes: "
        "a top-level module called passes would collide with any other distribution's"
    )


def test_all_is_what_the_module_exposes():
    own = {
        name
        for name, value in vars(moe_fusion).items()
        if getattr(value, "__module__", "").startswith("moe_fusion") and not name.startswith("_")
    }
    assert own | set(moe_fusion._LAZY) == set(moe_fusion.__all__)
    assert moe_fusion.__all__ == sorted(moe_fusion.__all__)
    for name in moe_fusion.__all__:
        assert getattr(moe_fusion, name).__name__ == name


def test_lazy_names_come_from_where_the_table_says():
    for name, module in moe_fusion._LAZY.items():
        assert getattr(moe_fusion, name).__module__ == module


def test_an_unknown_name():
    with pytest.raises(AttributeError) as caught:
        moe_fusion.finalise  # noqa: B018 - the access is what is tested
    assert str(caught.value) == "module 'moe_fusion' has no attribute 'finalise'"
    with pytest.raises(ImportError):
        from moe_fusion import nothing_of_this_name  # noqa: F401


def test_every_public_name_is_documented():
    for name in moe_fusion.__all__:
        assert getattr(moe_fusion, name).__doc__.strip()
