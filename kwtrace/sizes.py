"""Size expressions at match time: solved for the dims, evaluated on ints and SymInts, never adding a guard."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kwtrace.normal import known, known_equal

Evaluator = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One size of one input: what to do with it.

    ``kind`` is ``bind`` (it gives the dim ``target``), ``solve`` (``target`` is it divided by ``expression``),
    ``check`` (it equals ``expression``) or ``optional`` (it is 1 or equals ``expression``).
    """

    kind: str
    place: tuple[str, int]
    expression: str
    target: str = ""


def plan(shapes: Iterable[tuple[str, Sequence[str]]]) -> tuple[Step, ...] | None:
    """Return the order in which to solve the shapes of the inputs for their dims; None if that is impossible."""
    pending = [((name, i), text) for name, dims in shapes for i, text in enumerate(dims)]
    steps: list[Step] = []
    bound: set[str] = set()
    while pending:
        ready = next((item for item in pending if _step(*item, bound) is not None), None)
        if ready is None:
            return None
        step = _step(*ready, bound)
        assert step is not None
        pending.remove(ready)
        steps.append(step)
        bound |= {step.target} - {""}
    return tuple(steps)


def solve(steps: Iterable[Step], size_of: Callable[[str, int], Any]) -> dict[str, Any] | str:
    """Return the dims, or in words which size couldn't be proved."""
    dims: dict[str, Any] = {}
    for step in steps:
        size = size_of(*step.place)
        if step.kind == "bind":
            dims[step.target] = size
            continue
        value = evaluator(step.expression)(dims)
        if step.kind == "solve":
            if not known(value > 0) or not known(size % value == 0):
                return (
                    f"size {step.place[1]} of {step.place[0]}: expected a multiple of {step.expression}, found {size}"
                )
            dims[step.target] = size // value
        elif not known_equal(size, value) and not (step.kind == "optional" and known_equal(size, 1)):
            return f"size {step.place[1]} of {step.place[0]}: expected {step.expression} = {value}, found {size}"
    return dims


@functools.cache
def evaluator(expression: str) -> Evaluator:
    """Compile a size expression into a function of the dims."""
    if expression.isidentifier():
        return operator.itemgetter(expression)
    code = compile(expression, "<size>", "eval")
    return functools.partial(_evaluate, code)


@functools.cache
def condition(expression: str) -> Evaluator:
    """Compile a condition into a function of the dims that is True only where it provably holds."""
    tree = _Prove().visit(ast.parse(expression, mode="eval"))
    code = compile(ast.fix_missing_locations(tree), "<condition>", "eval")
    return functools.partial(_evaluate, code)


class _Prove(ast.NodeTransformer):
    """Wraps each comparison, so that ``and`` and ``or`` see what is proved and never ask a SymBool."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        return ast.Call(ast.Name("known", ast.Load()), [node], [])


_NAMES = {"__builtins__": {}, "torch": torch, "max": torch.sym_max, "min": torch.sym_min, "known": known, "True": True}


def _evaluate(code: Any, dims: Mapping[str, Any]) -> Any:
    return eval(code, _NAMES, dict(dims))  # noqa: S307 - code of the generated package, with no builtins


def _step(place: tuple[str, int], text: str, bound: set[str]) -> Step | None:
    expression = text.removesuffix("?")
    factors = [factor for factor in expression.split("*") if not factor.isdecimal()]
    unknown = [factor for factor in factors if factor not in bound]
    if text.endswith("?"):
        return None if unknown else Step("optional", place, expression)
    if not unknown:
        return Step("check", place, expression or "1")
    if len(unknown) > 1:
        return None
    if expression == unknown[0]:
        return Step("bind", place, expression, unknown[0])
    rest = expression.split("*")
    rest.remove(unknown[0])
    return Step("solve", place, "*".join(rest), unknown[0])
