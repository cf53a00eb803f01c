"""A traced graph → the operators of a search graph in normal form, or the calls of a replacement graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from kwtrace import operators
from kwtrace.drafts import to_expression
from kwtrace.errors import TraceError
from kwtrace.normal import View, is_tensor, nodes_in, number
from kwtrace.patterns import Call, Graph, In, MatchDevice, Op, Output, Ref
from kwtrace.tracing import Trace


def unique_name(target: str, taken: set[str]) -> str:
    """Return a name for a call of ``target`` that isn't ``taken`` yet, and take it: ``mul``, ``mul_2``, ..."""
    base = target.split(".")[1]
    found, count = base, 1
    while found in taken:
        count += 1
        found = f"{base}_{count}"
    taken.add(found)
    return found


class Lowering:
    """One traced graph, read into `Op` or `Call`."""

    def __init__(self, traced: Trace, device: str, where: str) -> None:
        self.traced, self.device, self.where = traced, device, where
        self.view = View(traced.graph)
        placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
        self.inputs = dict(zip(placeholders, traced.inputs, strict=True))
        self.returned = next(node for node in traced.graph.nodes if node.op == "output").args[0]
        self.names: dict[fx.Node, str] = {}
        self.taken: set[str] = set()
        self.outputs: tuple[Output, ...] = ()

    def search(self) -> tuple[tuple[Op, ...], tuple[Output, ...]]:
        """Return the graph as a search graph: identities looked through, every argument bound.

        Raises:
            TraceError: if an output is an input, an op mutates or has no output, or a tensor comes from elsewhere.

        """
        ops: list[Op] = []
        outputs = []
        for node in self.returned:
            value = self._visit(self.view.strip(node), ops)
            if isinstance(value, In):
                msg = f"{self.where}: expected outputs that are computed, found that one is the input {value.name}."
                raise TraceError(msg)
            outputs.append(self._output(value, node))
        self._check_lost()
        self.outputs = tuple(outputs)
        return tuple(ops), self.outputs

    def replacement(self) -> Graph:
        """Return the graph as a replacement: call for call, as far as an output needs it.

        Raises:
            TraceError: if an op mutates or has no output, or a tensor comes from elsewhere.

        """
        wanted = self._reachable()
        for node in wanted - self.inputs.keys():
            self._check_call(node)
        nodes = [n for n in self.traced.graph.nodes if n.op == "call_function" and n in wanted and is_tensor(n)]
        calls = [self._call(node) for node in nodes]
        self._check_lost()
        values = tuple(self._value(node, lambda n: n) for node in self.returned)
        self.outputs = tuple(self._output(value, node) for value, node in zip(values, self.returned, strict=True))
        return Graph(tuple(calls), values)

    def _visit(self, node: fx.Node, ops: list[Op]) -> In | Ref:
        """Add the ops that ``node`` needs, operands first, without recursion over deep graphs."""
        pending = [node]
        while pending:
            current = pending[-1]
            if current in self.inputs or current in self.names:
                pending.pop()
                continue
            self._check_call(current)
            operands = [
                self.view.strip(n)
                for value in self.view.args(current).values()
                for n in nodes_in(value)
                if is_tensor(n)
            ]
            missing = [n for n in operands if n not in self.inputs and n not in self.names]
            if missing:
                pending.extend(reversed(missing))
                continue
            ops.append(self._op(pending.pop()))
        return self._reference(node)

    def _op(self, node: fx.Node) -> Op:
        args = tuple((name, self._value(value, self.view.strip)) for name, value in self.view.args(node).items())
        return Op(self._name(node), operators.name_of(node.target), args)

    def _call(self, node: fx.Node) -> Call:
        self._check_call(node)
        bound = operators.bind(node.target, node.args, node.kwargs)
        keywords = operators.keywords_of(node.target)
        args = tuple(self._value(value, lambda n: n) for name, value in bound.items() if name not in keywords)
        kwargs = tuple((name, self._value(value, lambda n: n)) for name, value in bound.items() if name in keywords)
        return Call(self._name(node), operators.describe(node.target).name, args, kwargs)

    def _check_call(self, node: fx.Node) -> None:
        if node.op != "call_function":
            msg = (
                f"{self.where}: expected tensors to come from the inputs, found {node.op} {node.target}; make "
                "constants with torch.full or pass them in."
            )
            raise TraceError(msg)
        if operators.is_boundary(node.target):
            msg = f"{self.where}: expected ops that don't mutate, found {node.target}."
            raise TraceError(msg)

    def _value(self, value: Any, strip: Callable[[fx.Node], fx.Node]) -> Any:
        if isinstance(value, tuple):
            return tuple(self._value(item, strip) for item in value)
        if isinstance(value, fx.Node) and is_tensor(value):
            return self._reference(strip(value))
        value = number(value)
        if isinstance(value, torch.device):
            return MatchDevice() if value.type == self.device else value
        return to_expression(self.traced.expression(value))

    def _reference(self, node: fx.Node) -> In | Ref:
        return In(self.inputs[node]) if node in self.inputs else Ref(self.names[node])

    def _name(self, node: fx.Node) -> str:
        self.names[node] = unique_name(operators.name_of(node.target), self.taken)
        return self.names[node]

    def _output(self, value: Any, node: fx.Node) -> Output:
        result = node.meta["val"]
        if result.device.type != self.device:
            msg = f"{self.where}: expected outputs on {self.device}, found one on {result.device}."
            raise TraceError(msg)
        dims = tuple(to_expression(self.traced.expression(size)) for size in result.shape)
        return Output(value, result.dtype, dims)

    def _reachable(self) -> set[fx.Node]:
        seen: set[fx.Node] = set()
        pending = list(self.returned)
        while pending:
            node = pending.pop()
            if node not in seen:
                seen.add(node)
                pending.extend(node.all_input_nodes)
        return seen

    def _check_lost(self) -> None:
        calls = [n.target for n in self.traced.graph.nodes if n.op == "call_function"]
        lost = [str(target) for target in calls if operators.is_boundary(target) or not operators.has_results(target)]
        if lost:
            msg = f"{self.where}: expected every op to reach an output, found ops that don't: {', '.join(lost)}."
            raise TraceError(msg)
