"""The ops of other libraries that the pass is told about: all_reduces and RMSNorms.

The pass knows what a registered op computes from its registration alone: it never calls it. What is
registered here is found in a graph by :mod:`moe_fusion.passes.collectives` and
:mod:`moe_fusion.passes.norms`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node

from moe_fusion.passes.op_calls import called_op

Op = OpOverload | OpOverloadPacket


@dataclass(frozen=True)
class AllReduceOp:
    """What an op that sums over a group calls its arguments.

    Attributes:
        input: this rank's partial.
        group: the group.
        reduce_op: the reduction, which must then be ``"sum"``; None where the op has but one.
        group_names: what the op's names of groups are in torch.distributed, where they differ.
        resolver: the module and name of ``resolve``, the same in every process.
        resolve: finds torch.distributed's name of a group that ``group_names`` does not list.
    """

    input: str
    group: str
    reduce_op: str | None
    group_names: tuple[tuple[str, str], ...]
    resolver: str
    resolve: Callable[[str], str] = field(repr=False)

    def group_name(self, name: str) -> str:
        """torch.distributed's name of the group that the op calls ``name``.

        Raises:
            LookupError: the resolver knows no such group, or returns something else than a name.
        """
        listed = dict(self.group_names)
        found = listed[name] if name in listed else self.resolve(name)
        if isinstance(found, str):
            return found
        raise LookupError(f"expected {self.resolver} to return a name, got {found!r}")


@dataclass(frozen=True)
class NormOp:
    """What an RMSNorm op calls its arguments, and where its results are.

    A result is a position among what the op returns, or the name of an argument that it overwrites.

    Attributes:
        input: what is normalised, or added to the residual first.
        residual: the residual, or None for an op that adds none.
        weight: the weight, or None for an op without.
        eps: epsilon.
        weight_bias: added to the weight.
        norm_result: the normalised rows.
        sum_result: the residual sum, or None for an op that adds no residual.
        requires: the arguments without which it is no such norm, and what each has to be.
    """

    input: str
    residual: str | None
    weight: str | None
    eps: str
    weight_bias: float
    norm_result: int | str
    sum_result: int | str | None
    requires: tuple[tuple[str, Any], ...]


_Known = TypeVar("_Known", AllReduceOp, NormOp)
_registered: dict[OpOverload, AllReduceOp | NormOp] = {}


def register_all_reduce(
    op: Op,
    *,
    input_arg: int | str = 0,
    group_arg: int | str,
    reduce_op_arg: int | str | None = None,
    group_names: Mapping[str, str] | None = None,
    group_resolver: Callable[[str], str] | None = None,
) -> None:
    """Tell the pass that ``op`` returns the sum of a tensor over a group, complete.

    Register before compiling. The same registration again changes nothing.

    Args:
        op: the op, with its overload or meaning the default one. It mutates nothing and returns one
            tensor, in the shape and dtype of its input.
        input_arg: the summed argument, by name or position.
        group_arg: the argument that holds the group's name, or the group.
        reduce_op_arg: the argument that holds the reduction, for an op that has several; a call is
            a sum where it is ``"sum"``.
        group_names: torch.distributed's name of each group that the op calls by another.
        group_resolver: finds that name at compile time, for groups that ``group_names`` does not
            list: a function of a module, from the op's name of a group. It raises ``LookupError``
            for a group that it does not know; such an all_reduce is left alone.

    Raises:
        TypeError: ``op`` is not an op, an argument neither a name nor a position, ``group_names``
            no mapping of names, or ``group_resolver`` not a function of a module.
        ValueError: the op has no such argument, does not fit the description, or is registered as
            something else.
    """
    overload = _overload(op)
    _expect_results(overload, 1, mutated=())
    reduce_op = _optional_argument(overload, "reduce_op_arg", reduce_op_arg)
    known = AllReduceOp(
        _tensor_argument(overload, "input_arg", input_arg),
        _argument(overload, "group_arg", group_arg),
        reduce_op,
        _names("group_names", group_names),
        _resolver_name(group_resolver),
        group_resolver or _own_name,
    )
    _register(overload, known)


def _own_name(group: str) -> str:
    """The name of a group in torch.distributed where the op uses the same."""
    return group


def _resolver_name(resolver: Any) -> str:
    """What identifies ``resolver`` in the compile cache's key, in any process."""
    if resolver is None:
        return ""
    name = getattr(resolver, "__qualname__", "")
    if not callable(resolver) or not name or "<" in name:
        raise TypeError(f"group_resolver: expected a function of a module, got {resolver!r}")
    return f"{resolver.__module__}.{name}"


def register_rms_norm(
    op: Op,
    *,
    input: int | str,  # noqa: A002 - what such ops call it themselves
    weight: int | str | None,
    eps: int | str,
    weight_bias: float = 0.0,
    mutates: Mapping[str, str] | None = None,
    requires: Mapping[str, Any] | None = None,
) -> None:
    """Tell the pass that ``op`` is an RMSNorm over the last dimension.

    It computes ``input * rsqrt(mean(input ** 2) + eps) * (weight_bias + weight)``, whatever its
    other arguments are, but for those in ``requires``. Register before compiling. The same
    registration again changes nothing.

    Args:
        op: the op, with its overload or meaning the default one.
        input: the argument that is normalised, by name or position.
        weight: the weight, one row; None for an op without. A call may pass None too.
        eps: epsilon.
        weight_bias: added to the weight: 1.0 for Gemma's norm.
        mutates: for an op that overwrites an argument and returns nothing, that argument's name:
            ``{"result": "norm"}``. Otherwise it returns the normalised tensor.
        requires: what other arguments have to be for a call to be this norm, by name.

    Raises:
        TypeError: ``op`` is not an op, or an argument neither a name nor a position.
        ValueError: the op has no such argument, does not fit the description, or is registered as
            something else.
    """
    overload = _overload(op)
    places = _places(overload, ("norm",), ("norm",), mutates)
    arguments = (input, None, weight, eps)
    _register(overload, _norm_op(overload, arguments, weight_bias, places, requires))


def register_add_rms_norm(
    op: Op,
    *,
    input: int | str,  # noqa: A002 - what such ops call it themselves
    residual: int | str,
    weight: int | str | None,
    eps: int | str,
    weight_bias: float = 0.0,
    returns: Sequence[str] = ("norm", "residual"),
    mutates: Mapping[str, str] | None = None,
    requires: Mapping[str, Any] | None = None,
) -> None:
    """Tell the pass that ``op`` adds a residual and is an RMSNorm of the sum.

    It computes ``total = input + residual``, rounded to its result's dtype, and normalises that as
    ``register_rms_norm`` says. Register before compiling. The same registration again changes
    nothing.

    Args:
        op: the op, with its overload or meaning the default one.
        input: one addend, by name or position.
        residual: the other, of the same shape.
        weight: the weight, one row; None for an op without. A call may pass None too.
        eps: epsilon.
        weight_bias: added to the weight: 1.0 for Gemma's norm.
        returns: what an op that mutates nothing returns, in order: ``"norm"`` is the normalised
            rows, ``"residual"`` the sum.
        mutates: for an op that overwrites its arguments and returns nothing, what each holds
            afterwards: ``{"input": "norm", "residual": "residual"}``.
        requires: what other arguments have to be for a call to be this norm, by name.

    Raises:
        TypeError: ``op`` is not an op, or an argument neither a name nor a position.
        ValueError: the op has no such argument, does not fit the description, or is registered as
            something else.
    """
    overload = _overload(op)
    places = _places(overload, ("norm", "residual"), tuple(returns), mutates)
    arguments = (input, residual, weight, eps)
    _register(overload, _norm_op(overload, arguments, weight_bias, places, requires))


def _norm_op(
    overload: OpOverload,
    arguments: tuple[int | str, int | str | None, int | str | None, int | str],
    weight_bias: float,
    places: dict[str, int | str],
    requires: Mapping[str, Any] | None,
) -> NormOp:
    """The checked description, of (input, residual, weight, eps) and where the results are."""
    input_, residual, weight, eps = arguments
    return NormOp(
        _tensor_argument(overload, "input", input_),
        None if residual is None else _tensor_argument(overload, "residual", residual),
        None if weight is None else _tensor_argument(overload, "weight", weight),
        _argument(overload, "eps", eps),
        _number("weight_bias", weight_bias),
        places["norm"],
        places.get("residual"),
        tuple(
            sorted((_argument(overload, "requires", k), v) for k, v in _items("requires", requires))
        ),
    )


def unregister_op(op: Op) -> None:
    """Forget what ``op`` was registered as; nothing happens where it was not.

    Raises:
        TypeError: ``op`` is not an op.
    """
    _registered.pop(_overload(op), None)


def all_reduce_op(node: object) -> AllReduceOp | None:
    """What the op that ``node`` calls is registered as, if that is an all_reduce."""
    return _known(node, AllReduceOp)


def norm_op(node: object) -> NormOp | None:
    """What the op that ``node`` calls is registered as, if that is an RMSNorm."""
    return _known(node, NormOp)


def _known(node: object, kind: type[_Known]) -> _Known | None:
    overload = called_op(node) if isinstance(node, Node) and _registered else None
    known = None if overload is None else _registered.get(overload)
    return known if isinstance(known, kind) else None


def registrations() -> list[str]:
    """Every registration as text, sorted: graphs compiled under other ones may differ."""
    return sorted(f"{op._schema}: {known}" for op, known in _registered.items())


def _register(op: OpOverload, known: AllReduceOp | NormOp) -> None:
    before = _registered.setdefault(op, known)
    if before != known:
        raise ValueError(f"{op}: expected one registration, {before}, got another, {known}")


def _overload(op: Any) -> OpOverload:
    if isinstance(op, OpOverload):
        return op
    if not isinstance(op, OpOverloadPacket):
        raise TypeError(f"op: expected an OpOverload or OpOverloadPacket, got {type(op).__name__}")
    if "default" not in op.overloads():
        raise ValueError(
            f"op: expected {op} to have a default overload or one of its own, {op.overloads()}, "
            "to be given, got neither"
        )
    default = op.default
    assert isinstance(default, OpOverload)
    return default


def _argument(op: OpOverload, parameter: str, argument: Any) -> str:
    """The name of ``argument``, given by name or position."""
    names = [each.name for each in op._schema.arguments]
    if isinstance(argument, int) and not isinstance(argument, bool):
        if 0 <= argument < len(names):
            return names[argument]
        raise ValueError(f"{parameter}: expected a position below {len(names)}, got {argument}")
    if not isinstance(argument, str):
        kind = type(argument).__name__
        raise TypeError(f"{parameter}: expected an argument's name or position, got {kind}")
    if argument not in names:
        raise ValueError(f"{parameter}: expected one of {op}'s {names}, got {argument!r}")
    return argument


def _optional_argument(op: OpOverload, parameter: str, argument: Any) -> str | None:
    return None if argument is None else _argument(op, parameter, argument)


def _tensor_argument(op: OpOverload, parameter: str, argument: Any) -> str:
    name = _argument(op, parameter, argument)
    (kind,) = (str(each.type) for each in op._schema.arguments if each.name == name)
    if kind not in ("Tensor", "Optional[Tensor]"):
        raise ValueError(f"{parameter}: expected a Tensor argument, got {name!r} of type {kind}")
    return name


def _items(parameter: str, given: Any) -> list[tuple[Any, Any]]:
    """Of a mapping that may be left out."""
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise TypeError(f"{parameter}: expected a mapping, got {type(given).__name__}")
    return list(given.items())


def _names(parameter: str, given: Any) -> tuple[tuple[str, str], ...]:
    """The pairs of a mapping of names, sorted."""
    pairs = _items(parameter, given)
    for name in (name for pair in pairs for name in pair):
        if not isinstance(name, str):
            raise TypeError(f"{parameter}: expected names of groups, got {name!r}")
    return tuple(sorted(pairs))


def _number(parameter: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{parameter}: expected a number, got {type(value).__name__}")
    return float(value)


def _places(
    op: OpOverload,
    expected: tuple[str, ...],
    returns: tuple[str, ...],
    mutates: Mapping[str, str] | None,
) -> dict[str, int | str]:
    """Where each of the ``expected`` results is: a returned position or a mutated argument."""
    places: list[tuple[str, int | str]]
    if mutates is None:
        parameter, places = "returns", [(role, index) for index, role in enumerate(returns)]
    else:
        parameter, places = "mutates", [(role, name) for name, role in mutates.items()]
    roles = [role for role, _ in places]
    if sorted(roles) != sorted(expected):
        raise ValueError(f"{parameter}: expected each of {expected} once, got {roles}")
    _expect_results(op, 0 if mutates else len(roles), tuple(mutates or ()))
    return dict(places)


def _expect_results(op: OpOverload, returned: int, mutated: tuple[str, ...]) -> None:
    """Check how many tensors ``op`` returns and which of its arguments it overwrites."""
    schema = op._schema
    kinds = [str(each.type) for each in schema.returns]
    if kinds != ["Tensor"] * returned:
        raise ValueError(f"op: expected {op} to return {returned} tensors, got {kinds}")
    written = [each.name for each in schema.arguments if each.is_write]
    if sorted(written) != sorted(mutated):
        raise ValueError(f"op: expected {op} to mutate {sorted(mutated)}, got {written}")
