"""Callables by name: which ones have a name, and how it is shown."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from typing import Any

import ops_for_commuting
import ops_for_tests as ops
import pytest
import torch
from modules_for_tests import HEAD

from kwtrace.callables import by_name, is_callable
from kwtrace.errors import RuleError
from kwtrace.patterns import Named

WHERE = "Rule r, parameter form"


def written_out(x: torch.Tensor) -> torch.Tensor:
    """Be a function at the top level of a module."""
    return x


class Holder:
    """A class whose functions are found by the class's name."""

    @staticmethod
    def written_out(x: torch.Tensor) -> torch.Tensor:
        """Be called like another function."""
        return x

    def method(self) -> None:
        """Be bound."""

    def __call__(self) -> None:
        """Be called."""


class Kind(Enum):
    """An Enum whose members can be called."""

    ONE = 1

    def __call__(self) -> None:
        """Do nothing."""


def nested() -> Callable[..., Any]:
    """Return a function that no import reaches."""

    def inner() -> None: ...

    return inner


def test_what_is_called_what() -> None:
    """Operators are known by namespace, name and overload, functions by module and qualified name, all in order."""
    found = by_name((written_out, torch.ops.aten.relu.default, torch.ops.aten.relu, ops.act, Holder.written_out), WHERE)
    assert found == {
        Named("test_callables:written_out", "written_out"): written_out,
        Named("aten.relu.default"): torch.ops.aten.relu.default,
        Named("aten.relu"): torch.ops.aten.relu,
        Named("kwtrace_toys.act.default"): ops.act,
        Named("test_callables:Holder.written_out", "Holder.written_out"): Holder.written_out,
    }
    assert next(iter(found.values())) is written_out
    assert by_name((), WHERE) == {}


def test_functions_of_one_name_are_shown_with_their_modules() -> None:
    """A short name is one that no other callable of the axis has."""
    found = by_name((written_out, ops_for_commuting.written_out, torch.nn.functional.silu), WHERE)
    assert [str(named) for named in found] == [
        "test_callables:written_out",
        "ops_for_commuting:written_out",
        "silu",
    ]


@pytest.mark.parametrize(
    "function",
    [lambda x: x, nested(), functools.partial(written_out), Holder().method, Holder(), Holder, torch.sigmoid, len],
    ids=["lambda", "nested", "partial", "bound method", "object", "class", "built-in of torch", "built-in"],
)
def test_a_callable_without_a_stable_name_is_an_error(function: Any) -> None:
    """What a fresh process wouldn't find under the same name is refused, with what to do."""
    message = (
        f"{WHERE}: expected callables with a stable name in its domain, which are operators and functions at the top "
        f"level of a module, found {function!r}; write it as such a function."
    )
    with pytest.raises(RuleError) as caught:
        by_name((written_out, function), WHERE)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("functions", "name"),
    [
        ((written_out, written_out), "test_callables:written_out"),
        ((ops.act, torch.ops.kwtrace_toys.act.default), "kwtrace_toys.act.default"),
    ],
    ids=["one twice", "an operator and its object"],
)
def test_two_callables_of_one_name_are_an_error(functions: tuple[Any, ...], name: str) -> None:
    """A name stands for one callable."""
    message = f"{WHERE}: expected callables with distinct names in its domain, found two called {name}; rename one."
    with pytest.raises(RuleError) as caught:
        by_name(functions, WHERE)
    assert str(caught.value) == message


def test_redefined_functions_are_two_of_one_name() -> None:
    """A function that took the place of another one has its name, and isn't it."""
    first: dict[str, Any] = {"__name__": "redefined"}
    second: dict[str, Any] = {"__name__": "redefined"}
    for module in (first, second):
        exec(f"{HEAD}\ndef form(x): ...", module)  # noqa: S102 - a module of our own, twice
    with pytest.raises(RuleError, match="found two called redefined:form; rename one"):
        by_name((first["form"], second["form"]), WHERE)


def test_constants_that_can_be_called_are_constants() -> None:
    """A member of an Enum is known by its class and name, whether or not it can be called."""
    assert not is_callable(Kind.ONE)
    assert not any(map(is_callable, (None, 1, "relu", torch.float32, torch.strided, (1, 2))))
    assert all(map(is_callable, (written_out, ops.act, torch.ops.aten.relu, Holder())))
