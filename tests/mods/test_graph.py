"""Nodes: equal expressions are one, post-order visits each node once, and equal digests have equal code."""

from __future__ import annotations

import gc

import numpy as np
from expressions import K, Q, of_floats
from workers import run_python

from cuflash.mods.graph.graph import MAX_INDEX, CapturedArray, digest, post_order, variable
from cuflash.mods.graph.operations import Type
from cuflash.mods.graph.simplify import build, constant


def captured(dtype: str = "float32", shape: tuple[int, ...] = (5,)) -> CapturedArray:
    return CapturedArray(np.zeros(shape, np.float32), dtype, shape, Type.FLOAT32)


def test_equal_expressions_are_one_object() -> None:
    assert variable("q_idx") is Q
    assert build("add", Q, K) is build("add", K, Q)
    assert build("subtract", Q, K) is not build("subtract", K, Q)


def test_floats_differ_by_their_bits() -> None:
    assert constant(0.0) is not constant(-0.0)
    assert constant(float("nan")) is constant(float("nan"))
    assert constant(0.1) is constant(float(np.float32(0.1)))
    assert constant(1) is not constant(1.0)
    assert constant(1) is not constant(True)


def test_a_node_has_its_inputs_and_its_range() -> None:
    node = build("add", build("multiply", Q, Q), constant(1))
    assert node.inputs == {"q_idx"}
    assert of_floats(node).inputs == {"q_idx"}
    assert Q.bounds == (0, MAX_INDEX)
    assert variable("score").range is None


def test_the_walk_visits_each_node_once_and_after_its_arguments() -> None:
    node = variable("score")
    for _ in range(200):
        node = build("add", node, node)
    order = post_order([node, Q])
    assert len(order) == len(set(order)) == 202
    assert all(order.index(each) < place for place, x in enumerate(order) for each in x.arguments)


def test_nodes_without_references_are_gone() -> None:
    from cuflash.mods.graph import graph

    gc.collect()
    count = len(graph._nodes)
    node = build("multiply", build("add", Q, constant(123457)), constant(7654321))
    assert len(graph._nodes) > count
    del node
    gc.collect()
    assert len(graph._nodes) == count


def test_a_digest_is_of_operations_types_constants_dtypes_and_ranks() -> None:
    root = build("multiply", of_floats(Q), constant(0.5))
    assert digest([root], [captured()]) == digest([root], [captured(shape=(7,))]), "lengths are no part of the code"
    digests = [
        digest([root], [captured()]),
        digest([build("multiply", of_floats(Q), constant(0.25))], [captured()]),
        digest([build("multiply", of_floats(K), constant(0.5))], [captured()]),
        digest([root], [captured("bfloat16")]),
        digest([root], [captured(shape=(5, 1))]),
        digest([root, root], [captured()]),
    ]
    assert len(set(digests)) == len(digests)


def test_digests_and_the_order_of_arguments_are_the_same_in_every_process() -> None:
    code = """
from cuflash.mods.graph.simplify import build, constant
from cuflash.mods.graph.graph import digest, variable
for name in {first}:
    build("add", variable(name), constant(3))
print(digest([build("add", build("add", variable("q_idx"), constant(3)), variable("k_idx"))], []))
"""
    texts = {run_python("-c", code.format(first=first)) for first in (["q_idx", "k_idx"], ["k_idx", "h", "q_idx"], [])}
    assert len(texts) == 1
