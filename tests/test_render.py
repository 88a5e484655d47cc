"""A graph as text: dtypes, floats, names of targets, symbols, and a selection of nodes."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from moe_fusion.passes.render import render, target_name

aten = torch.ops.aten


def graph_of(function, *args, mode="fake"):
    return make_fx(function, tracing_mode=mode)(*args).graph


def test_one_node_a_line_with_dtype_and_shape():
    def function(x, index):
        return torch.ops.prims.convert_element_type(x[index], torch.float32) * 2

    x, index = torch.zeros(8, 16, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64)
    assert render(graph_of(function, x, index)) == (
        "x_1: bf16[8, 16] = placeholder\n"
        "index_1: i64[3] = placeholder\n"
        "index: bf16[3, 16] = index.Tensor(x_1, [index_1])\n"
        "convert_element_type: f32[3, 16] = cvt(index, torch.float32)\n"
        "mul: f32[3, 16] = mul.Tensor(convert_element_type, 2)\n"
        "return mul"
    )


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "bf16"),
        (torch.float16, "f16"),
        (torch.float32, "f32"),
        (torch.float64, "f64"),
        (torch.int32, "i32"),
        (torch.int64, "i64"),
        (torch.bool, "b8"),
        (torch.uint8, "torch.uint8"),
    ],
)
def test_dtypes(dtype, name):
    graph = graph_of(lambda x: x.clone(), torch.zeros(2, 3, dtype=dtype))
    assert render(graph).splitlines()[0] == f"x_1: {name}[2, 3] = placeholder"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-6, "1e-06"),
        (1e-5, "1e-05"),
        (0.1 + 0.2, "0.3"),
        (1.0, "1"),
        (2.5, "2.5"),
        (1 / 3, "0.333333"),
        (1234567.0, "1.23457e+06"),
        (-0.0, "-0"),
        (float("inf"), "inf"),
        (3, "3"),
        (True, "True"),
        (None, "None"),
    ],
)
def test_arguments(value, text):
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(aten.mul.Tensor, (x, value)))
    assert (
        render(graph) == f"x = placeholder\nmul_tensor = mul.Tensor(x, {text})\nreturn mul_tensor"
    )


def test_keywords_and_nested_arguments():
    graph = Graph()
    x = graph.placeholder("x")
    total = graph.call_function(aten.sum.dim_IntList, (x, [-1, 0], True), {"dtype": torch.float32})
    graph.output((total, (x, 0.1 + 0.2)))
    assert render(graph) == (
        "x = placeholder\n"
        "sum_dim_int_list = sum.dim_IntList(x, [-1, 0], True, dtype=torch.float32)\n"
        "return [sum_dim_int_list, [x, 0.3]]"
    )


def test_values_that_are_not_tensors():
    graph = Graph()
    x = graph.placeholder("x")
    pair = graph.call_function(aten.max.dim, (x, 1))
    pair.meta["val"] = (torch.zeros(2), torch.zeros(2, dtype=torch.int64))
    size = graph.call_function(aten.sym_size.int, (x, 0))
    size.meta["val"] = 2
    graph.output(graph.call_function(operator.getitem, (pair, 1)))
    assert render(graph).splitlines()[1:4] == [
        "max_dim: (f32[2], i64[2]) = max.dim(x, 1)",
        "sym_size_int: 2 = sym_size.int(x, 0)",
        "getitem = getitem(max_dim, 1)",
    ]


@pytest.mark.usefixtures("fake_group")
def test_namespaces_are_short_and_default_overloads_unnamed():
    def function(x):
        return funcol.wait_tensor(funcol.all_reduce(x, "sum", "0")).view(-1)

    graph = graph_of(function, torch.zeros(2, 8))
    names = {target_name(node) for node in graph.nodes if node.op == "call_function"}
    assert names == {"c10d.all_reduce", "c10d.wait_tensor", "view"}
    assert "all_reduce: f32[2, 8] = c10d.all_reduce(x_1, sum, 0)" in render(graph)


def test_only_the_aten_prefix_is_dropped():
    graph = Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.prims.convert_element_type.default, (x, torch.float32))
    assert target_name(node) == "cvt"
    assert target_name(graph.call_function(operator.add, (x, x))) == "add"
    assert target_name(graph.call_function(torch.ops.prims.mul.default, (x, x))) == "prims.mul"


def symbolic(first, second):
    """A graph over symbolic sizes, whose names in the shape environment vary from run to run."""

    def function(x, y):
        return torch.cat([x, y]), x

    graph = graph_of(function, torch.zeros(first, 4), torch.zeros(second, 4), mode="symbolic")
    return render(graph)


def test_symbols_are_renumbered_in_order_of_appearance():
    text = symbolic(5, 7)
    assert text.splitlines()[:2] == [
        "x_1: f32[s0, s1] = placeholder",
        "y_1: f32[s2, s1] = placeholder",
    ]
    assert "cat: f32[s2 + s0, s1] = cat([x_1, y_1])" in text
    assert symbolic(5, 7) == text
    assert symbolic(9, 11) == text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("s77", "u12", "zf3"), "s0 = placeholder\ns1 = placeholder\ns2 = placeholder"),
        (("s7", "s77", "s7_1"), "s0 = placeholder\ns1 = placeholder\ns7_1 = placeholder"),
        (("sum_1", "us3", "s"), "sum_1 = placeholder\nus3 = placeholder\ns = placeholder"),
    ],
)
def test_whole_symbols_only(names, text):
    graph = Graph()
    for name in names:
        graph.placeholder(name)
    assert render(graph) == text


def test_a_selection_keeps_the_graphs_order():
    graph = graph_of(lambda x: (x.sin() + 1) * 2, torch.zeros(2, 8))
    sin, add, mul = (node for node in graph.nodes if node.op == "call_function")
    assert render(graph, [mul, sin]) == (
        "sin: f32[2, 8] = sin(x_1)\nmul: f32[2, 8] = mul.Tensor(add, 2)"
    )
    assert render(graph, iter([add])) == "add: f32[2, 8] = add.Tensor(sin, 1)"
    assert render(graph, []) == ""


def test_symbols_of_a_selection_are_numbered_within_it():
    graph = Graph()
    for name in ("s5", "s9"):
        graph.placeholder(name)
    first, second = graph.nodes
    assert render(graph, [second]) == "s0 = placeholder"
    assert render(graph, [first, second]) == "s0 = placeholder\ns1 = placeholder"


def test_rendering_changes_nothing():
    graph = graph_of(lambda x: x.sin(), torch.zeros(2, 8))
    before = str(graph)
    assert render(graph) == render(graph)
    assert str(graph) == before
