"""Checks of tensors and numbers whose errors say what was expected and what was got.

Each takes the name that the error gives the value. Wrong kinds and dtypes are ``TypeError``, wrong
shapes and devices ``ValueError``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fusion.limits import DTYPES


def sizes(tensor: Tensor) -> str:
    """The shape as errors show it."""
    return f"[{', '.join(str(size) for size in tensor.shape)}]"


def tensor(name: str, value: object) -> None:
    """``value`` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")


def number(name: str, value: object) -> None:
    """``value`` is a number, or what converts to one as a 0-d tensor does."""
    if isinstance(value, (int, float)):  # a symbol too, of which Dynamo cannot tell its methods
        return
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}: expected a float, got {type(value).__name__}")


def floating(name: str, value: Tensor) -> None:
    """The dtype is one that the op takes."""
    if value.dtype not in DTYPES:
        raise TypeError(f"{name}: expected dtype in {DTYPES}, got {value.dtype}")


def dtype(name: str, value: Tensor, wanted: torch.dtype) -> None:
    """The dtype is ``wanted``."""
    if value.dtype != wanted:
        raise TypeError(f"{name}: expected dtype {wanted}, got {value.dtype}")


def rank(name: str, value: Tensor, legend: str) -> None:
    """There are as many dimensions as ``legend``, such as ``"[T, H]"``, has names."""
    if value.dim() != legend.count(",") + 1:
        raise ValueError(f"{name}: expected shape {legend}, got {sizes(value)}")


def shape(name: str, value: Tensor, legend: str, *wanted: int | torch.SymInt) -> None:
    """The sizes are ``wanted``, one for each name of ``legend``."""
    rank(name, value, legend)
    if any(got != want for got, want in zip(value.shape, wanted, strict=True)):
        listed = ", ".join(str(size) for size in wanted)
        raise ValueError(f"{name}: expected shape {legend} = [{listed}], got {sizes(value)}")


def device(name: str, value: Tensor, wanted: torch.device) -> None:
    """The tensor is where the rows are."""
    if value.device != wanted:
        raise ValueError(f"{name}: expected device {wanted} (that of the rows), got {value.device}")
