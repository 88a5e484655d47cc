"""``moe-fusion``: the command line.

Each command is a module with ``add_parser(subparsers)``, which registers its options and sets
``run``, and ``run(arguments)``, which returns the exit code.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

from moe_fusion.cli import bench, demo, doctor, explain
from moe_fusion.errors import MoEFusionError

COMMANDS = (demo, explain, doctor, bench)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="moe-fusion",
        description="Fuse the tails of tensor-parallel MoE layers, and see what is fused.",
    )
    version = importlib.metadata.version("moe-fusion")
    parser.add_argument("--version", action="version", version=f"moe-fusion {version}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments; None takes those of the process.

    Returns:
        The exit code: 0, 1 for a failure whose reason is on stderr, 2 for wrong usage.
    """
    arguments = build_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except MoEFusionError as error:
        print(f"moe-fusion: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("moe-fusion: interrupted", file=sys.stderr)
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
