"""Declaring a rule: what is searched for, what takes its place, and the domain of every argument."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, overload

from kwtrace.errors import RuleError

if TYPE_CHECKING:
    import torch

Function = Callable[..., Any]
At = Literal["generate", "match"]


class Shape:
    """The shape of a tensor parameter, with named dims as in einops.

    A dim is a name, a literal (``1``), a name that may also be 1 (``h?``), a name that is never 1 (``d>1``, which saves
    the proof for that size), or a product of names (``g*n``). Several strings are alternatives: each is a variant of
    its own.
    """

    __slots__ = ("alternatives",)

    def __init__(self, *alternatives: str) -> None:
        """Take one string per alternative; ``Shape("")`` is a 0-d tensor."""
        self.alternatives = tuple(" ".join(text.split()) for text in alternatives)

    def __repr__(self) -> str:
        """Return the constructor call."""
        return f"Shape({', '.join(map(repr, self.alternatives))})"


class DTypes:
    """A dtype variable: every parameter annotated with it has the same dtype, one of ``dtypes``."""

    __slots__ = ("dtypes", "name")

    def __init__(self, name: str, *dtypes: torch.dtype) -> None:
        """Take the variable's name, which is the name of its axis, and the dtypes it ranges over."""
        self.name = name
        self.dtypes = dtypes

    def __repr__(self) -> str:
        """Return the constructor call."""
        return f"DTypes({', '.join([repr(self.name), *map(repr, self.dtypes)])})"


class OneOf:
    """The values of an axis: constants, Enum members, operators and functions at the top level of a module."""

    __slots__ = ("values",)

    def __init__(self, *values: Any) -> None:
        """Take the values, in the order in which variants are made."""
        self.values = values

    def __repr__(self) -> str:
        """Return the constructor call."""
        return f"OneOf({', '.join(map(repr, self.values))})"


class Captured:
    """A parameter bound to whatever number the graph holds.

    ``example`` is a value for tracing; it must not be neutral (1, 0), or its place in the graph can't be found. Each
    value in ``special`` gets a variant of its own, for values that change the traced graph.
    """

    __slots__ = ("example", "special")

    def __init__(self, example: Any = None, *, special: Sequence[Any] = ()) -> None:
        """Take an example, or None for kwtrace's own, and the special values."""
        self.example = example
        self.special = tuple(special)

    def __repr__(self) -> str:
        """Return the constructor call."""
        return f"Captured({self.example!r}, special={self.special!r})"


@dataclass(frozen=True, slots=True)
class Replacement:
    """A replacement function and when it is traced."""

    function: Function
    at: At


@dataclass(eq=False, slots=True)
class Rule:
    """A fusion rule; made by `rule`."""

    function: Function
    name: str
    stage: str
    modes: tuple[str, ...]
    devices: tuple[str, ...]
    where: Callable[..., bool] | None
    priority: int
    unused: tuple[str, ...]
    commutative: bool
    replacements: dict[str, Replacement] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """Return the name of the module that declares the rule."""
        return self.function.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the search function: the reference that the fused form must equal."""
        return self.function(*args, **kwargs)

    @overload
    def replacement(self, function: Function, /) -> Function: ...
    @overload
    def replacement(
        self, /, *, at: At = "generate", devices: Sequence[str] | None = None
    ) -> Callable[[Function], Function]: ...
    def replacement(
        self, function: Function | None = None, /, *, at: At = "generate", devices: Sequence[str] | None = None
    ) -> Any:
        """Declare what takes the place of the search function, for all devices or for some.

        With ``at="match"`` the function is traced at the match with the match's own fake tensors: for graphs that
        depend on hardware that the generating machine may not have.

        Raises:
            RuleError: for a device that the rule doesn't have, or a second replacement for one device.

        """
        if at not in ("generate", "match"):
            msg = f"Rule {self.name}: expected at='generate' or at='match' for a replacement, found at={at!r}."
            raise RuleError(msg)

        def declare(replacement: Function) -> Function:
            if not inspect.isfunction(replacement):
                msg = f"Rule {self.name}: expected a function as replacement, found {replacement!r}; wrap it in a def."
                raise RuleError(msg)
            for device in self.devices if devices is None else devices:
                self._add(device, Replacement(replacement, at))
            return replacement

        return declare if function is None else declare(function)

    def _add(self, device: str, replacement: Replacement) -> None:
        if device not in self.devices:
            msg = f"Rule {self.name}: expected a replacement for one of {self.devices}, found device {device!r}."
            raise RuleError(msg)
        if device in self.replacements:
            msg = f"Rule {self.name}: expected one replacement for device {device!r}, found a second; remove one."
            raise RuleError(msg)
        self.replacements[device] = replacement


@overload
def rule(function: Function, /) -> Rule: ...
@overload
def rule(
    *,
    name: str | None = None,
    stage: str = "joint",
    modes: Sequence[str] = ("inference",),
    devices: Sequence[str] = ("cpu", "cuda"),
    where: Callable[..., bool] | None = None,
    priority: int = 0,
    unused: Sequence[str] = (),
    commutative: bool = False,
) -> Callable[[Function], Rule]: ...
def rule(
    function: Function | None = None,
    /,
    *,
    name: str | None = None,
    stage: str = "joint",
    modes: Sequence[str] = ("inference",),
    devices: Sequence[str] = ("cpu", "cuda"),
    where: Callable[..., bool] | None = None,
    priority: int = 0,
    unused: Sequence[str] = (),
    commutative: bool = False,
) -> Any:
    """Declare a fusion rule: the decorated function is what is searched for.

    Args:
        function: the search function, when the decorator is used without arguments.
        name: the rule's name; the function's by default.
        stage: where in the compilation the rule applies; ``"joint"`` is the only stage so far.
        modes: which graphs the rule is traced for; ``("inference",)`` is the only choice so far.
        devices: device types; each is traced, with no need to have one.
        where: gets the axes by keyword and says which variants exist.
        priority: of two matches of equal size, the one with the higher priority wins.
        unused: parameters that a replacement may leave out.
        commutative: search for every order of the two tensors of each sum, product, maximum, minimum, ``==``, ``!=``,
            logical or bitwise and, or, xor; such an order is no axis. There may be six of these operators in a variant.

    Raises:
        RuleError: naming the rule and what is wrong.

    """

    def declare(search: Function) -> Rule:
        if not inspect.isfunction(search):
            msg = f"Expected a function to search for, found {search!r}; wrap it in a def."
            raise RuleError(msg)
        own = search.__name__ if name is None else name
        _check(own, stage, modes, devices)
        return Rule(search, own, stage, tuple(modes), tuple(devices), where, priority, tuple(unused), commutative)

    return declare if function is None else declare(function)


def _check(name: str, stage: str, modes: Sequence[str], devices: Sequence[str]) -> None:
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("__"):
        msg = f"Expected an identifier that is no keyword or dunder as rule name, found {name!r}; pass name=."
        raise RuleError(msg)
    if stage != "joint":
        msg = f"Rule {name}: expected stage='joint', found stage={stage!r}."
        raise RuleError(msg)
    if tuple(modes) != ("inference",):
        msg = f"Rule {name}: expected modes=('inference',), found modes={tuple(modes)!r}."
        raise RuleError(msg)
    if isinstance(devices, str) or not devices or len(set(devices)) != len(devices):
        msg = f"Rule {name}: expected a tuple of distinct device types, found devices={devices!r}."
        raise RuleError(msg)
