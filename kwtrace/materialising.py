"""Size expressions → nodes, for the sizes that a graph leaves symbolic."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from kwtrace import derived
from kwtrace.sizes import evaluator

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from kwtrace.matches import Match
    from kwtrace.patterns import Hole

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
_CALLS: dict[str, Callable[..., Any]] = {"max": torch.sym_max, "min": torch.sym_min, "sym_float": torch.sym_float}


class Materialiser:
    """Writes symbolic sizes of one match into its graph; plain ones stay ints."""

    def __init__(self, match: Match, mode: FakeTensorMode, new: list[fx.Node]) -> None:
        """Append each node that is made to ``new``."""
        self.match, self.mode, self.new = match, mode, new
        self.dims: dict[str, Any] = {}

    def write(self, expression: str) -> Any:
        """Return the value of a size expression: an int, or a node that yields it."""
        value = evaluator(expression)(self.match.dims)
        if not isinstance(value, torch.SymInt | torch.SymFloat):
            return value
        if not value.node.expr.free_symbols:
            return int(value) if isinstance(value, torch.SymInt) else float(value)
        return self._build(ast.parse(expression, mode="eval").body)

    def derive(self, hole: Hole, captured: fx.Node) -> Any:
        """Return the number that a hole stands for, where the captured one is symbolic."""
        if hole.function == "same":
            return captured
        proxy = fx.Proxy(captured, fx.proxy.GraphAppendingTracer(self.match.graph))
        result = derived.evaluate(hole, proxy).node
        result.meta["val"] = derived.evaluate(hole, captured.meta["val"])
        self.new.append(result)
        return result

    def _build(self, tree: ast.AST) -> Any:
        if isinstance(tree, ast.Constant):
            return tree.value
        if isinstance(tree, ast.Name):
            return self._dim(tree.id)
        if isinstance(tree, ast.BinOp):
            return self._call(_OPERATORS[type(tree.op)], self._build(tree.left), self._build(tree.right))
        if isinstance(tree, ast.UnaryOp):
            return self._call(_OPERATORS[type(tree.op)], self._build(tree.operand))
        assert isinstance(tree, ast.Call)
        name = tree.func.attr if isinstance(tree.func, ast.Attribute) else getattr(tree.func, "id", "")
        function = _CALLS.get(name) or getattr(torch, name)
        return self._call(function, *(self._build(argument) for argument in tree.args))

    def _dim(self, name: str) -> Any:
        if name not in self.dims:
            value = self.match.dims[name]
            self.dims[name] = self._find(name) if isinstance(value, torch.SymInt) else value
        return self.dims[name]

    def _find(self, name: str) -> Any:
        for declared in self.match.family.skeleton.inputs:
            if name in declared.dims:
                return self._call(
                    torch.ops.aten.sym_size.int, self.match.inputs[declared.name], declared.dims.index(name)
                )
        return self._solve(name)

    def _solve(self, name: str) -> Any:
        for declared in self.match.family.skeleton.inputs:
            for place, text in enumerate(declared.dims):
                factors = text.split("*")
                if name in factors:
                    whole = self._call(torch.ops.aten.sym_size.int, self.match.inputs[declared.name], place)
                    factors.remove(name)
                    rest = self._build(ast.parse("*".join(factors), mode="eval").body)
                    return self._call(operator.floordiv, whole, rest)
        msg = f"no input has the dim {name}"
        raise LookupError(msg)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        if not any(isinstance(argument, fx.Node) for argument in args):
            return function(*args)
        node = self.match.graph.call_function(function, args)
        node.meta["val"] = function(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
        self.new.append(node)
        return node
