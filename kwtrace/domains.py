"""Annotations → parameters, and the product of their domains → variants."""

from __future__ import annotations

import enum
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import torch

from kwtrace.callables import by_name, is_callable
from kwtrace.errors import LoadError, RuleError
from kwtrace.patterns import Named, Variant
from kwtrace.rules import Captured, DTypes, OneOf, Shape
from kwtrace.shapes import DimSpec, parse_shape
from kwtrace.values import exact_key, is_constant

if TYPE_CHECKING:
    from kwtrace.rules import Rule

MARKERS = (Shape, DTypes, OneOf, Captured)
NUMBERS = (int, float, complex)
EXAMPLES: dict[type, Any] = {int: 29, float: 0.37, complex: 0.37 + 0.23j}
"""A value of each captured type: not neutral, and no likely literal of a graph."""
NEUTRAL = (0, 1, -1)


@dataclass(frozen=True, slots=True)
class TensorParameter:
    """A tensor input: its alternatives of shape, its dtype, and whether it may be absent."""

    name: str
    shapes: tuple[tuple[DimSpec, ...], ...]
    texts: tuple[str, ...]
    dtype: DTypes | torch.dtype
    optional: bool


@dataclass(frozen=True, slots=True)
class AxisParameter:
    """A parameter with a finite domain; ``callables`` holds those among its values, which are known by name."""

    name: str
    values: tuple[Any, ...]
    callables: tuple[tuple[Named, Callable[..., Any]], ...] = field(default=(), repr=False)

    def given(self, value: Any) -> Any:
        """Return what functions get for a value: a callable for its name, and others as they are.

        Raises:
            LoadError: if no callable has that name.

        """
        if not isinstance(value, Named):
            return value
        for named, function in self.callables:
            if named.name == value.name:
                return function
        known = ", ".join(named.name for named, _ in self.callables) or "none"
        msg = f"Parameter {self.name}: expected one of its callables ({known}), found {value.name}; regenerate."
        raise LoadError(msg)


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A dtype parameter that follows a dtype variable."""

    name: str
    variable: DTypes


@dataclass(frozen=True, slots=True)
class CapturedParameter:
    """A number bound at match time; ``example`` is what it is traced with first."""

    name: str
    kind: type
    example: Any
    special: tuple[Any, ...]


Parameter: TypeAlias = TensorParameter | AxisParameter | TiedParameter | CapturedParameter


@dataclass(frozen=True, slots=True)
class Domain:
    """What a rule's signature says: its parameters, and its axes in order."""

    parameters: tuple[Parameter, ...]
    axes: tuple[tuple[str, tuple[Any, ...]], ...]

    @property
    def tensors(self) -> tuple[TensorParameter, ...]:
        """Return the tensor parameters, in order."""
        return tuple(p for p in self.parameters if isinstance(p, TensorParameter))

    @property
    def captured(self) -> tuple[CapturedParameter, ...]:
        """Return the captured parameters, in order."""
        return tuple(p for p in self.parameters if isinstance(p, CapturedParameter))

    @property
    def callables(self) -> tuple[Callable[..., Any], ...]:
        """Return the callables that are values of axes, in order."""
        return tuple(f for p in self.parameters if isinstance(p, AxisParameter) for _, f in p.callables)

    def given(self, axes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of axes as functions get them: callables instead of their names."""
        known = {p.name: p for p in self.parameters if isinstance(p, AxisParameter)}
        return {name: known[name].given(value) if name in known else value for name, value in axes.items()}


def read_domain(rule: Rule) -> Domain:
    """Read a rule's signature.

    Raises:
        RuleError: naming rule and parameter, where an annotation is missing, contradictory or has an empty domain.

    """
    hints = _hints(rule)
    parameters = tuple(_read(rule, p, hints) for p in inspect.signature(rule.function).parameters.values())
    if not any(isinstance(p, TensorParameter) for p in parameters):
        msg = f"Rule {rule.name}: expected at least one tensor parameter, found none; there is nothing to match on."
        raise RuleError(msg)
    axes = _axes(rule, parameters)
    _check_names(rule, parameters)
    return Domain(parameters, axes)


def samples(domain: Domain, variant: Variant) -> tuple[dict[str, Any], ...]:
    """Return the values to trace the captured parameters with: two sets in which every value is another one.

    Parameters that the variant fixes at a special value have that value in both. With nothing captured there is one
    set.
    """
    fixed = dict(variant.axes)
    free = [p for p in domain.captured if p.name not in fixed]
    special = {p.name: fixed[p.name] for p in domain.captured if p.name in fixed}
    if not free:
        return (special,)
    first = {p.name: _apart(p, p.example + (2 * i if p.kind is int else 0.01 * i)) for i, p in enumerate(free)}
    steps = {p.name: 35 + 4 * i if p.kind is int else 0.24 + 0.03 * i for i, p in enumerate(free)}
    second = {p.name: _apart(p, first[p.name] + steps[p.name]) for p in free}
    return ({**special, **first}, {**special, **second})


def _apart(parameter: CapturedParameter, value: Any) -> Any:
    """Return ``value``, or the next number that is none of the parameter's special values."""
    while value in parameter.special:
        value += 2 if parameter.kind is int else 0.01
    return value


def enumerate_variants(rule: Rule, domain: Domain) -> tuple[Variant, ...]:
    """Return the rule's variants: the product of its axes, less what ``where`` refuses.

    Raises:
        RuleError: if none is left, or if ``where`` fails.

    """
    names = [name for name, _ in domain.axes]
    found = []
    for point in itertools.product(*(values for _, values in domain.axes)):
        axes = dict(zip(names, point, strict=True))
        if _is_redundant(axes, domain) or not _accepts(rule, domain.given(axes)):
            continue
        found.append(Variant(rule.name, tuple((k, v) for k, v in axes.items() if v is not ANY)))
    if not found:
        msg = f"Rule {rule.name}: expected at least one variant, found none left by where=; widen it or a domain."
        raise RuleError(msg)
    return tuple(found)


class _Any(enum.Enum):
    ANY = "any"

    def __repr__(self) -> str:
        return "ANY"


ANY = _Any.ANY
"""The axis value of a captured parameter that is none of its special values."""


def _hints(rule: Rule) -> dict[str, Any]:
    try:
        return get_type_hints(rule.function, include_extras=True)
    except (NameError, TypeError) as error:
        msg = f"Rule {rule.name}: expected annotations that can be evaluated in module {rule.module}, found: {error}."
        raise RuleError(msg) from error


def _read(rule: Rule, parameter: inspect.Parameter, hints: Mapping[str, Any]) -> Parameter:
    where = f"Rule {rule.name}, parameter {parameter.name}"
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        msg = f"{where}: expected a named parameter, found {parameter}; name each argument."
        raise RuleError(msg)
    if parameter.name not in hints:
        msg = f"{where}: expected an annotation, found none; see the table of annotations in the README."
        raise RuleError(msg)
    hint, markers = _split(hints[parameter.name])
    by_kind = _by_kind(markers, where)
    base, optional = _without_none(hint)
    if isinstance(base, type) and issubclass(base, torch.Tensor):
        _check_markers(by_kind, {Shape, DTypes, torch.dtype}, where)
        return _read_tensor(parameter.name, by_kind, optional=optional, where=where)
    _check_markers(by_kind, {DTypes} if base is torch.dtype else {Captured} if base in NUMBERS else set(), where)
    if OneOf in by_kind:
        return _read_axis(parameter.name, by_kind[OneOf].values, where)
    if base is torch.dtype and DTypes in by_kind:
        _check_dtypes(by_kind[DTypes], where)
        return TiedParameter(parameter.name, by_kind[DTypes])
    if base in NUMBERS and not optional:
        return _read_captured(parameter.name, base, by_kind.get(Captured, Captured()), where)
    return _read_inferred(parameter.name, base, optional=optional, where=where)


def _split(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    if get_origin(hint) is not Annotated:
        return hint, ()
    base, *markers = get_args(hint)
    return base, tuple(markers)


def _by_kind(markers: tuple[Any, ...], where: str) -> dict[type, Any]:
    found: dict[type, Any] = {}
    for marker in markers:
        kind = torch.dtype if isinstance(marker, torch.dtype) else type(marker)
        if kind not in (*MARKERS, torch.dtype):
            continue
        if kind in found:
            msg = f"{where}: expected one {kind.__name__}, found two."
            raise RuleError(msg)
        found[kind] = marker
    return found


def _check_markers(by_kind: dict[type, Any], fitting: set[type], where: str) -> None:
    """Refuse markers that say nothing about a parameter of its type, and two that contradict each other."""
    known = fitting or {OneOf}
    surplus = [kind.__name__ for kind in by_kind if kind not in known | {OneOf}]
    tensor = Shape in fitting
    if surplus or (OneOf in by_kind and (tensor or len(by_kind) > 1)) or {DTypes, torch.dtype} <= by_kind.keys():
        found = ", ".join(kind.__name__ for kind in by_kind)
        msg = f"{where}: expected markers that fit its type and each other, found {found}."
        raise RuleError(msg)


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    members = [member for member in get_args(hint) if member is not type(None)]
    optional = len(members) < len(get_args(hint))
    return (members[0] if len(members) == 1 else hint), optional


def _read_axis(name: str, values: tuple[Any, ...], where: str) -> AxisParameter:
    callables = by_name([value for value in values if is_callable(value)], where)
    names = iter(callables)
    known = tuple(next(names) if is_callable(value) else value for value in values)
    return AxisParameter(name, _checked_values(known, where), tuple(callables.items()))


def _read_tensor(name: str, by_kind: dict[type, Any], *, optional: bool, where: str) -> TensorParameter:
    shape, dtype = by_kind.get(Shape), by_kind.get(DTypes, by_kind.get(torch.dtype))
    if shape is None or not shape.alternatives:
        msg = f"{where}: expected a Shape in its annotation, found none; write Annotated[Tensor, Shape('m k'), T]."
        raise RuleError(msg)
    if dtype is None:
        msg = (
            f"{where}: expected a dtype or a DTypes variable in its annotation, found neither; list the dtypes it may "
            "have."
        )
        raise RuleError(msg)
    if isinstance(dtype, DTypes):
        _check_dtypes(dtype, where)
    _checked_values(shape.alternatives, f"{where}, Shape")
    shapes = tuple(parse_shape(text, where) for text in shape.alternatives)
    return TensorParameter(name, shapes, shape.alternatives, dtype, optional)


def _check_dtypes(variable: DTypes, where: str) -> None:
    for dtype in _checked_values(variable.dtypes, f"{where}, variable {variable.name}"):
        if not isinstance(dtype, torch.dtype):
            msg = f"{where}, variable {variable.name}: expected dtypes, found {dtype!r}."
            raise RuleError(msg)


def _read_captured(name: str, kind: type, marker: Captured, where: str) -> CapturedParameter:
    example = marker.example
    if example is not None and type(example) is not kind:
        msg = f"{where}: expected a {kind.__name__} as example, found {example!r}."
        raise RuleError(msg)
    if example is None or example in NEUTRAL:
        example = EXAMPLES[kind]
    for value in marker.special:
        if type(value) is not kind:
            msg = f"{where}: expected special values of type {kind.__name__}, found {value!r}."
            raise RuleError(msg)
    if marker.special:
        _checked_values(marker.special, f"{where}, special")
    return CapturedParameter(name, kind, example, marker.special)


def _read_inferred(name: str, base: Any, *, optional: bool, where: str) -> AxisParameter:
    ending = (None,) if optional else ()
    if base is bool:
        return AxisParameter(name, (False, True, *ending))
    if get_origin(base) is Literal:
        return AxisParameter(name, _checked_values((*get_args(base), *ending), where))
    if isinstance(base, type) and issubclass(base, enum.Enum):
        return AxisParameter(name, _checked_values((*base, *ending), where))
    shown = getattr(base, "__name__", str(base))
    msg = (
        f"{where}: expected a domain, found plain {shown}; write Annotated[{shown}, OneOf(...)], a Literal or an Enum, "
        "or a captured int, float or complex."
    )
    raise RuleError(msg)


def _checked_values(values: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not values:
        msg = f"{where}: expected at least one value in its domain, found none."
        raise RuleError(msg)
    for value in values:
        if not is_constant(value) and not isinstance(value, Named):
            msg = f"{where}: expected constants, enum members or tuples of them in its domain, found {value!r}."
            raise RuleError(msg)
    keys = [exact_key(value) for value in values]
    if len(set(keys)) < len(keys):
        msg = f"{where}: expected distinct values in its domain, found {values!r}."
        raise RuleError(msg)
    return values


def _axes(rule: Rule, parameters: tuple[Parameter, ...]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    axes: dict[str, tuple[Any, ...]] = {}
    variables: dict[str, DTypes] = {}
    for name, values, variable in itertools.chain.from_iterable(_axes_of(p) for p in parameters):
        if name in axes and (variable is None or name not in variables):
            msg = f"Rule {rule.name}: expected distinct names of axes, found {name} twice; rename one."
            raise RuleError(msg)
        if variable is not None and variables.setdefault(name, variable).dtypes != variable.dtypes:
            msg = f"Rule {rule.name}: expected one set of dtypes for variable {name}, found two."
            raise RuleError(msg)
        axes[name] = values
    if "device" in axes:
        msg = f"Rule {rule.name}: expected no parameter called device, found one; that is the name of the device axis."
        raise RuleError(msg)
    axes["device"] = rule.devices
    return tuple(axes.items())


def _axes_of(parameter: Parameter) -> Iterator[tuple[str, tuple[Any, ...], DTypes | None]]:
    if isinstance(parameter, TensorParameter):
        if isinstance(parameter.dtype, DTypes):
            yield parameter.dtype.name, parameter.dtype.dtypes, parameter.dtype
        if parameter.optional:
            yield parameter.name, (False, True), None
        if len(parameter.texts) > 1:
            yield f"{parameter.name}_shape", parameter.texts, None
    elif isinstance(parameter, TiedParameter):
        yield parameter.variable.name, parameter.variable.dtypes, parameter.variable
    elif isinstance(parameter, AxisParameter):
        yield parameter.name, parameter.values, None
    elif parameter.special:
        yield parameter.name, (ANY, *parameter.special), None


def _check_names(rule: Rule, parameters: tuple[Parameter, ...]) -> None:
    names = {parameter.name for parameter in parameters}
    for name in rule.unused:
        if name not in names:
            msg = f"Rule {rule.name}: expected unused= to name parameters, found {name!r}."
            raise RuleError(msg)


def _is_redundant(axes: Mapping[str, Any], domain: Domain) -> bool:
    """Tell whether the point differs from another only in the shape of an absent tensor or in an unused variable."""
    for p in domain.tensors:
        absent = p.optional and not axes[p.name]
        if absent and len(p.texts) > 1 and axes[f"{p.name}_shape"] != p.texts[0]:
            return True
    return any(axes[v.name] is not v.dtypes[0] for v in _variables(domain) if not _is_present(v, axes, domain))


def _variables(domain: Domain) -> list[DTypes]:
    return [p.dtype for p in domain.tensors if isinstance(p.dtype, DTypes)]


def _is_present(variable: DTypes, axes: Mapping[str, Any], domain: Domain) -> bool:
    for p in domain.parameters:
        if isinstance(p, TiedParameter) and p.variable.name == variable.name:
            return True
        if not isinstance(p, TensorParameter) or not isinstance(p.dtype, DTypes) or p.dtype.name != variable.name:
            continue
        if not p.optional or axes[p.name]:
            return True
    return False


def _accepts(rule: Rule, axes: Mapping[str, Any]) -> bool:
    if rule.where is None:
        return True
    parameters = inspect.signature(rule.where).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        unknown = [name for name in parameters if name not in axes]
        if unknown:
            msg = f"Rule {rule.name}: expected where= to take axes of {sorted(axes)}, found {unknown[0]!r}."
            raise RuleError(msg)
        axes = {name: axes[name] for name in parameters}
    try:
        answer = rule.where(**axes)
    except Exception as error:
        msg = f"Rule {rule.name}: expected where= to return a bool for {axes}, found {type(error).__name__}: {error}."
        raise RuleError(msg) from error
    if not isinstance(answer, bool):
        msg = f"Rule {rule.name}: expected where= to return a bool for {axes}, found {answer!r}."
        raise RuleError(msg)
    return answer
