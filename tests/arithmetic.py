"""What people write between the finalize and the norm: scales, signs, quotients, biases.

``y`` is the reduced sum, ``s`` and ``t`` are tensors of one element, ``b`` is a vector of H. Each
form is a function of what it adds and multiplies.
"""

from __future__ import annotations

import torch

SIGNED_BEFORE = {
    "routed / 3": lambda routed, shared: routed / 3.0 + shared,
    "(routed + shared) / 4": lambda routed, shared: (routed + shared) / 4.0,
    "routed - shared": lambda routed, shared: routed - shared,
    "shared - routed": lambda routed, shared: shared - routed,
    "add of shared, alpha": lambda routed, shared: torch.add(routed, shared, alpha=2),
    "add of routed, alpha": lambda routed, shared: torch.add(shared, routed, alpha=-0.5),
    "sub, alpha": lambda routed, shared: torch.sub(shared, routed, alpha=2.5),
    "-routed": lambda routed, shared: shared + -routed,
    "-(routed - shared)": lambda routed, shared: -(routed - shared),
}
SIGNED_AFTER = {
    "y / 4": (lambda y, residual, shared: residual + y / 4.0, True, "none"),
    "residual - y": (lambda y, residual, shared: residual - y, True, "none"),
    "y - residual": (lambda y, residual, shared: y - residual, False, "after the all_reduce"),
    "-y": (lambda y, residual, shared: -y + residual, True, "none"),
    "add of y, alpha": (
        lambda y, residual, shared: torch.add(residual, y, alpha=2),
        True,
        "none",
    ),
    "sub of y, alpha": (
        lambda y, residual, shared: torch.sub(residual, y, alpha=0.5),
        True,
        "none",
    ),
    "add of the residual, alpha": (
        lambda y, residual, shared: torch.add(y, residual, alpha=2),
        False,
        "after the all_reduce",
    ),
    "add of shared to y, alpha": (
        lambda y, residual, shared: residual + torch.add(y, shared, alpha=2),
        True,
        "after the all_reduce",
    ),
    "sub of shared from y, alpha": (
        lambda y, residual, shared: residual + torch.sub(y, shared, alpha=0.5),
        True,
        "after the all_reduce",
    ),
    "y - shared": (
        lambda y, residual, shared: residual + (y - shared),
        True,
        "after the all_reduce",
    ),
    "shared - y": (
        lambda y, residual, shared: residual + (shared - y),
        True,
        "after the all_reduce",
    ),
    "-(residual - (y - shared))": (
        lambda y, residual, shared: -(residual - (y - shared)),
        False,
        "after the all_reduce",
    ),
}

SCALED_AFTER = {
    "y * s": lambda y, residual, shared, s, t: residual + y * s,
    "s * y": lambda y, residual, shared, s, t: s * y + residual,
    "s.float() * y": lambda y, residual, shared, s, t: residual + (s.float() * y),
    "(y.float() * s.float()).to(y.dtype)": lambda y, residual, shared, s, t: (
        residual + (y.float() * s.float()).to(y.dtype)
    ),
    "t * (y * s)": lambda y, residual, shared, s, t: residual + t * (y * s),
    "s * (y * s)": lambda y, residual, shared, s, t: residual + s * (y * s),
    "-0.5 * (s * y)": lambda y, residual, shared, s, t: residual - 0.5 * (s * y),
    "y * s.view(1)": lambda y, residual, shared, s, t: residual + y * s.view(1),
    "s.view(1, 1) * y": lambda y, residual, shared, s, t: s.view(1, 1) * y + residual,
    "y * s.int()": lambda y, residual, shared, s, t: residual + y * (s * 3).int(),
    "(y[None] * s).view(y.shape)": lambda y, residual, shared, s, t: (
        residual + (y[None] * s).view(y.shape)
    ),
    "addcmul(residual, y, s)": lambda y, residual, shared, s, t: torch.addcmul(residual, y, s),
    "addcmul(residual, s, y, value=-0.5)": lambda y, residual, shared, s, t: torch.addcmul(
        residual, s, y, value=-0.5
    ),
}
WITH_ADDEND = {
    "(y + shared) * s": lambda y, residual, shared, s, t: residual + (y + shared) * s,
    "y * s + shared": lambda y, residual, shared, s, t: residual + (shared + y * s),
    "s * y + t * shared": lambda y, residual, shared, s, t: residual + (s * y + t * shared),
    "t * (s * y + shared)": lambda y, residual, shared, s, t: residual + t * (s * y + shared),
    "0.5 * (s * y - shared)": lambda y, residual, shared, s, t: residual + 0.5 * (s * y - shared),
    "addcmul(y, shared, s)": lambda y, residual, shared, s, t: (
        residual + torch.addcmul(y, shared, s)
    ),
}

SCALED_BEFORE = {
    "(routed + shared) * s": lambda routed, shared, s, t: (routed + shared) * s,
    "s * (shared - routed)": lambda routed, shared, s, t: s * (shared - routed),
    "-2 * ((routed + shared) * s)": lambda routed, shared, s, t: -2 * ((routed + shared) * s),
}

BIASED = {
    "residual + (y + b)": lambda y, residual, shared, b: residual + (y + b),
    "(b + y) + residual": lambda y, residual, shared, b: (b + y) + residual,
    "(residual + y) + b": lambda y, residual, shared, b: (residual + y) + b,
    "residual + (y - b)": lambda y, residual, shared, b: residual + (y - b),
    "residual + 0.5 * (b - y)": lambda y, residual, shared, b: residual + 0.5 * (b - y),
    "residual + (y + b[None])": lambda y, residual, shared, b: residual + (y + b[None]),
    "residual + ((y + b) + shared)": lambda y, residual, shared, b: residual + ((y + b) + shared),
    "residual + ((y + b) + 2 * b)": lambda y, residual, shared, b: residual + ((y + b) + 2 * b),
    "residual + b[0] * (y + b)": lambda y, residual, shared, b: residual + b[0] * (y + b),
}
