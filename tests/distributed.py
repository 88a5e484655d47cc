"""``run_ranks(world_size, function, *args)``: a function on gloo ranks, with a time limit.

The function's first parameter is its :class:`moe_fusion.cli.ranks.Rank`. It must be importable by
name in a fresh process, so it stands in a helper module of ``tests/`` and not in a test module.
What it returns is pickled, tensors by value.
"""

from moe_fusion.cli import ranks

TIME_LIMIT_SECONDS = 240.0


def run_ranks(world_size, function, *args, time_limit_seconds=TIME_LIMIT_SECONDS):
    """The results by rank; a rank that raises, dies or hangs fails the test with its traceback."""
    return ranks.run_ranks(function, world_size, *args, time_limit_seconds=time_limit_seconds)
