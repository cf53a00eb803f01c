"""Families ⇄ Python text."""

from __future__ import annotations

import ast
import keyword
import sys
import types
from dataclasses import replace
from enum import Enum
from typing import Any

import pytest
import torch
from constants_for_tests import MEMBERS, exact, nested, patterns, plain_constants, related
from hypothesis import given

from kwtrace.errors import RuleError
from kwtrace.families import factor
from kwtrace.patterns import (
    Call,
    Capture,
    Dim,
    Family,
    Graph,
    Hole,
    In,
    Input,
    Named,
    Op,
    Output,
    Pattern,
    PatternSet,
    Ref,
    Size,
)
from kwtrace.source import render_module, render_value


def read_back(text: str) -> tuple[Family, ...]:
    """Run the text of a generated module and return its families."""
    module = types.ModuleType("generated")
    exec(compile(text, "generated.py", "exec"), module.__dict__)  # noqa: S102 - a generated module is Python
    families = module.__dict__["FAMILIES"]
    assert isinstance(families, tuple)
    return families


def pattern(**changes: Any) -> Pattern:
    """Return a small pattern."""
    base = Pattern(
        rule="rule",
        module="module",
        device="cpu",
        inputs=(Input("x", torch.float32, ("n",)),),
        dims=(Dim("n"),),
        conditions=(),
        captures=(),
        search=(Op("relu", "aten.relu.default", (("self", In("x")),)),),
        outputs=(Output(Ref("relu"), torch.float32, (Size("n"),)),),
        replacement=Graph((Call("relu", "aten.relu.default", (In("x"),)),), (Ref("relu"),)),
        axes=(),
    )
    return replace(base, **changes)


def with_argument(name: str, value: Any) -> Pattern:
    """Return a pattern whose search op has arguments before and after the given one."""
    return pattern(search=(Op("op", "toy.op.default", (("first", 1), (name, value), ("last", 2))),))


@given(plain_constants)
def test_a_constant_in_a_graph_reads_back_identical(value: Any) -> None:
    """Whatever constant stands in a graph, the text gives the identical one: type, sign, NaN, quotes and all."""
    families = factor([with_argument("value", value)])
    (family,) = read_back(render_module("rule", families, "2.13"))
    assert exact(dict(family.skeleton.search[0].args)["value"]) == exact(value)


@given(nested)
def test_a_value_of_an_axis_reads_back_identical(value: Any) -> None:
    """Whatever the value of an axis, Enum members and nested tuples included, the text gives the identical one."""
    families = factor([pattern(axes=(("axis", value),))])
    (family,) = read_back(render_module("rule", families, "2.13"))
    assert exact(dict(family.skeleton.axes)["axis"]) == exact(value)


@given(related())
def test_families_read_back_equal(made: list[Pattern]) -> None:
    """Families of any patterns read back equal, exactly, and have the same digest."""
    families = factor(made)
    back = read_back(render_module("rule", families, "2.13"))
    assert exact(back) == exact(families)
    assert PatternSet(back).digest == PatternSet(families).digest


@given(related())
def test_text_is_deterministic(made: list[Pattern]) -> None:
    """What was read back is written as the same bytes again."""
    text = render_module("rule", factor(made), "2.13")
    assert render_module("rule", read_back(text), "2.13") == text


@given(patterns())
def test_text_imports_what_it_uses_and_nothing_else(made: Pattern) -> None:
    """Every imported name is used, and every name is imported."""
    tree = ast.parse(render_module("rule", factor([made]), "2.13"))
    imported = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    modules = {alias.name.split(".")[0] for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {"FAMILIES", "complex"}
    assert used == imported | modules


@pytest.mark.parametrize("name", keyword.kwlist)
def test_an_argument_named_like_a_keyword_keeps_its_name_and_place(name: str) -> None:
    """Schemas have arguments called ``from`` and the like: they read back, in place."""
    families = factor([with_argument(name, 7)])
    (family,) = read_back(render_module("rule", families, "2.13"))
    assert family.skeleton.search[0].args == (("first", 1), (name, 7), ("last", 2))


def test_fields_before_a_given_one_keep_their_defaults() -> None:
    """A dataclass whose middle field has its default reads back equal."""
    families = factor([with_argument("value", Hole("x", "same", 2.0))])
    assert exact(read_back(render_module("rule", families, "2.13"))) == exact(families)


def test_a_module_is_readable() -> None:
    """A module says what it is, by whom and for which torch, and has one line per row within the line length."""
    families = factor([pattern(axes=(("axis", i),)) for i in range(3)])
    text = render_module("rule", families, "2.13")
    assert text.startswith('"""Rule rule: 3 rows in 1 families, for torch 2.13')
    assert "not to be edited" in text
    assert text.endswith(")\n")
    assert max(map(len, text.splitlines())) <= 120
    assert not any(line.endswith(" ") for line in text.splitlines())


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_an_enum_member_is_written_by_its_name(member: Enum) -> None:
    """A member is written as an attribute of its class, or, where it has no name of its own, as a call of the class."""
    text = render_value(member)
    assert text.startswith(f"{type(member).__module__}.{type(member).__qualname__}")
    module = type(member).__module__
    assert eval(text, {module: sys.modules[module]}) is member  # noqa: S307 - text of our own


def test_an_enum_in_a_function_is_an_error() -> None:
    """An Enum that no import reaches is refused with what to do."""

    class Local(Enum):
        X = 1

    with pytest.raises(
        RuleError, match=r"Expected an Enum at the top level of its module, found .*Local; move it there"
    ):
        render_value(Local.X)


@pytest.mark.parametrize("value", [object(), {1: 2}, len, torch.zeros(1)], ids=["object", "dict", "function", "tensor"])
def test_a_value_that_no_text_gives_back_is_an_error(value: Any) -> None:
    """What isn't a constant is refused and shown."""
    with pytest.raises(RuleError, match="Expected a value that can be written as Python text, found "):
        render_value(value)


def test_callables_are_written_by_name() -> None:
    """A callable in the axes reads back equal, and nothing is imported for it but its `Named`."""
    known = (Named("aten.relu.default"), Named("some.module:function", "function"), None, "function")
    families = factor([replace(with_argument("v", i), axes=(("form", value),)) for i, value in enumerate(known)])
    text = render_module("rule", families, "2.13")
    assert exact(read_back(text)) == exact(families)
    assert [dict(v.axes)["form"] for v in PatternSet(read_back(text)).variants] == list(known)
    assert "import some" not in text
    assert "Named('some.module:function', 'function')" in text


def test_captures_and_conditions_are_written() -> None:
    """A pattern with every optional part reads back equal."""
    made = pattern(
        captures=(Capture("alpha", "float"),), conditions=("n <= 8",), priority=-2, dims=(Dim("n", 1), Dim("m"))
    )
    assert read_back(render_module("rule", factor([made]), "2.13")) == factor([made])
