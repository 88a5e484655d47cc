"""The graph side of moe-fusion: what to look for, match, guards, rewrite, report, install.

Imports as ``moe_fusion.passes``.
"""

if __name__ != "moe_fusion.passes":
    raise ImportError(
        f"expected this package to be imported as moe_fusion.passes, got {__name__}: "
        "a top-level module called passes would collide with any other distribution's"
    )
