"""Annotations → parameters and variants, and every error that a declaration can have."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, Optional, Union

import ops_for_tests as ops
import pytest
import torch
from rules_for_tests import Mode, Vector
from torch import Tensor

import kwtrace as kt
from kwtrace.domains import AxisParameter, enumerate_variants, read_domain, samples
from kwtrace.rules import Rule
from kwtrace.values import same

T = kt.DTypes("T", torch.float32, torch.bfloat16)
Other = kt.DTypes("T", torch.float16)
Matrix = Annotated[Tensor, kt.Shape("m k"), T]


class Level(IntEnum):
    """An Enum whose members are ints."""

    LOW = 1
    HIGH = 2


class Empty(Enum):
    """An Enum without members."""


def rule_of(function: Callable[..., Any], **options: Any) -> Rule:
    """Return a rule for the CPU."""
    return kt.rule(devices=("cpu",), **options)(function)


def axes_of(function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """Return the axes of a rule for the CPU, the device aside."""
    axes = dict(read_domain(rule_of(function)).axes)
    assert axes.pop("device") == ("cpu",)
    return axes


def points_of(rule: Rule) -> list[dict[str, Any]]:
    """Return the axes of every variant, the device aside."""
    variants = enumerate_variants(rule, read_domain(rule))
    return [{name: value for name, value in variant.axes if name != "device"} for variant in variants]


def error_of(function: Callable[..., Any], **options: Any) -> str:
    """Return what reading a rule's signature and enumerating its variants complains about."""
    with pytest.raises(kt.RuleError) as caught:
        points_of(rule_of(function, **options))
    return str(caught.value)


def test_axes_are_inferred_from_annotations() -> None:
    """bool, Literal, Enum and OneOf are axes with the values that they name, in that order, exact in type."""

    def search(
        x: Vector,
        *,
        flag: bool,
        word: Literal["none", "tanh"],
        mode: Mode,
        level: Level,
        dtype: Annotated[torch.dtype | None, kt.OneOf(None, torch.float32)],
        number: Annotated[float, kt.OneOf(0.0, -0.0, math.nan, math.inf)],
        pair: Annotated[tuple[int, int], kt.OneOf((1, 2), (2, 1))],
    ) -> None: ...

    axes = axes_of(search)
    assert list(axes) == ["flag", "word", "mode", "level", "dtype", "number", "pair"]
    assert axes["flag"] == (False, True)
    assert axes["word"] == ("none", "tanh")
    assert axes["mode"] == (Mode.NONE, Mode.TWICE)
    assert axes["level"] == (Level.LOW, Level.HIGH)
    assert axes["dtype"] == (None, torch.float32)
    assert same(axes["number"], (0.0, -0.0, math.nan, math.inf))
    assert axes["pair"] == ((1, 2), (2, 1))


def doubled(x: Tensor) -> Tensor:
    """Be a function that an axis may have as a value."""
    return x * 2


Form = Annotated[Callable[..., Tensor] | None, kt.OneOf(None, ops.act, doubled, torch.ops.aten.relu.default)]
DOUBLED = kt.Named(f"{__name__}:doubled", "doubled")


def test_callables_stand_in_variants_by_name() -> None:
    """Operators and functions are values of an axis among others; variants hold names, in the order given."""

    def search(x: Vector, *, form: Form) -> None: ...

    names = (None, kt.Named("kwtrace_toys.act.default"), DOUBLED, kt.Named("aten.relu.default"))
    assert axes_of(search) == {"form": names}
    domain = read_domain(rule_of(search))
    assert domain.callables == (ops.act, doubled, torch.ops.aten.relu.default)
    assert [str(variant) for variant in enumerate_variants(rule_of(search), domain)] == [
        "search[form=None, device='cpu']",
        "search[form=kwtrace_toys.act.default, device='cpu']",
        "search[form=doubled, device='cpu']",
        "search[form=aten.relu.default, device='cpu']",
    ]


def test_functions_get_the_callables_themselves() -> None:
    """``given`` turns a name into the callable, short or not, and leaves other values of axes alone."""

    def search(x: Vector, *, form: Form, flag: bool) -> None: ...

    domain = read_domain(rule_of(search))
    assert domain.given({"form": DOUBLED, "flag": True, "device": "cpu"}) == {
        "form": doubled,
        "flag": True,
        "device": "cpu",
    }
    assert domain.given({"form": kt.Named(DOUBLED.name)}) == {"form": doubled}
    assert domain.given({"form": None}) == {"form": None}


def test_a_name_that_no_callable_has_is_an_error() -> None:
    """A name from a package that the rule has left behind is refused, with the names there are."""

    def search(x: Vector, *, form: Form) -> None: ...

    message = (
        r"Parameter form: expected one of its callables \(kwtrace_toys.act.default, test_domains:doubled, "
        r"aten.relu.default\), found module:gone; regenerate."
    )
    with pytest.raises(kt.LoadError, match=message):
        read_domain(rule_of(search)).given({"form": kt.Named("module:gone")})
    with pytest.raises(kt.LoadError, match=r"Parameter flag: expected one of its callables \(none\), found gone"):
        AxisParameter("flag", (False, True)).given(kt.Named("gone"))


def test_where_gets_callables_themselves() -> None:
    """``where=`` decides on the callable, not on its name."""

    def search(x: Vector, *, form: Form) -> None: ...

    rule = rule_of(search, where=lambda form: form is doubled or form is ops.act)
    assert points_of(rule) == [{"form": kt.Named("kwtrace_toys.act.default")}, {"form": DOUBLED}]


def test_callables_without_a_domain_are_an_error() -> None:
    """A plain ``Callable`` has no values to enumerate."""

    def search(x: Vector, *, form: Callable[..., Tensor]) -> None: ...

    assert error_of(search).startswith("Rule search, parameter form: expected a domain, found plain Callable; write ")


def test_a_callable_without_a_stable_name_is_an_error() -> None:
    """The error names rule and parameter."""

    def search(x: Vector, *, form: Annotated[Callable[..., Tensor], kt.OneOf(doubled, lambda x: x)]) -> None: ...

    message = error_of(search)
    assert message.startswith("Rule search, parameter form: expected callables with a stable name in its domain")


def test_an_optional_axis_has_none_as_its_last_value() -> None:
    """``| None`` adds None to an inferred domain, however it is spelled, and once."""

    def search(
        x: Vector,
        *,
        a: bool | None,
        b: Optional[Literal["a"]],  # noqa: UP045 - this spelling is what is tested
        c: Union[Mode, None],  # noqa: UP007 - this spelling is what is tested
        d: Literal["a", None],  # noqa: PYI061 - this spelling is what is tested
    ) -> None: ...

    assert axes_of(search) == {
        "a": (False, True, None),
        "b": ("a", None),
        "c": (Mode.NONE, Mode.TWICE, None),
        "d": ("a", None),
    }


def test_values_that_only_compare_equal_are_distinct() -> None:
    """True, 1 and 1.0 are three values of an axis."""

    def search(x: Vector, *, value: Annotated[Any, kt.OneOf(True, 1, 1.0)]) -> None: ...

    assert [type(value) for value in axes_of(search)["value"]] == [bool, int, float]


def test_a_dtype_variable_is_one_axis() -> None:
    """Tensors and a dtype parameter tied to one variable share an axis named after it."""

    def search(a: Matrix, b: Matrix, *, dtype: Annotated[torch.dtype, T]) -> None: ...

    assert axes_of(search) == {"T": (torch.float32, torch.bfloat16)}


def test_presence_and_alternatives_are_axes() -> None:
    """An optional tensor and several shapes are axes; the shape of an absent tensor makes no variants."""

    def search(x: Vector, bias: Annotated[Tensor | None, kt.Shape("n", "1"), torch.float32]) -> None: ...

    assert axes_of(search) == {"bias": (False, True), "bias_shape": ("n", "1")}
    assert points_of(rule_of(search)) == [
        {"bias": False, "bias_shape": "n"},
        {"bias": True, "bias_shape": "n"},
        {"bias": True, "bias_shape": "1"},
    ]


def test_a_variable_of_absent_tensors_makes_no_variants() -> None:
    """A dtype variable that no present tensor has is fixed at its first dtype."""

    def search(x: Vector, mask: Annotated[Tensor | None, kt.Shape("n"), T]) -> None: ...

    assert points_of(rule_of(search)) == [
        {"T": torch.float32, "mask": False},
        {"T": torch.float32, "mask": True},
        {"T": torch.bfloat16, "mask": True},
    ]


def test_variants_are_the_product_in_order_with_the_device_last() -> None:
    """Every combination is a variant, the last axis fastest, and the device is an axis."""

    def search(x: Vector, *, a: bool, b: Literal["u", "v"]) -> None: ...

    rule = kt.rule(search)
    assert [str(v) for v in enumerate_variants(rule, read_domain(rule))][:3] == [
        "search[a=False, b='u', device='cpu']",
        "search[a=False, b='u', device='cuda']",
        "search[a=False, b='v', device='cpu']",
    ]
    assert len(enumerate_variants(rule, read_domain(rule))) == 8


def test_where_prunes() -> None:
    """``where=`` keeps the variants that it answers True for; it may take some axes or all."""

    def search(x: Vector, *, a: bool, b: Literal["u", "v"]) -> None: ...

    assert points_of(rule_of(search, where=lambda a, b: a or b == "u")) == [
        {"a": False, "b": "u"},
        {"a": True, "b": "u"},
        {"a": True, "b": "v"},
    ]
    assert len(points_of(rule_of(search, where=lambda b: b == "u"))) == 2
    seen: list[dict[str, Any]] = []
    points_of(rule_of(search, where=lambda **axes: not seen.append(axes)))
    assert seen[0] == {"a": False, "b": "u", "device": "cpu"}


def test_special_values_are_variants_of_their_own() -> None:
    """Special values have a variant each, and any other value has one, which names no value."""

    def search(x: Vector, *, scale: Annotated[float, kt.Captured(special=(1.0, 0.0))]) -> None: ...

    assert points_of(rule_of(search)) == [{}, {"scale": 1.0}, {"scale": 0.0}]


def test_samples_differ_in_every_captured_value() -> None:
    """Tracing sees two sets of values, all different, none neutral, exact in type; a special value is in both."""

    def search(
        x: Vector, *, i: int, j: int, f: float, g: float, z: complex, s: Annotated[float, kt.Captured(special=(1.0,))]
    ) -> None: ...

    rule = rule_of(search)
    domain = read_domain(rule)
    ordinary, special = enumerate_variants(rule, domain)
    for variant in (ordinary, special):
        first, second = samples(domain, variant)
        free = ["i", "j", "f", "g", "z"] + (["s"] if variant is ordinary else [])
        values = [given[name] for given in (first, second) for name in free]
        assert len(set(values)) == len(values)
        assert not {0, 1, -1} & set(values)
        for name, kind in (("i", int), ("f", float), ("z", complex)):
            assert type(first[name]) is type(second[name]) is kind
    first, second = samples(domain, special)
    assert (first["s"], second["s"]) == (1.0, 1.0)


def test_an_example_is_used_for_tracing() -> None:
    """``Captured(example)`` is the first value that is traced with."""

    def search(x: Vector, *, eps: Annotated[float, kt.Captured(1e-5)]) -> None: ...

    rule = rule_of(search)
    domain = read_domain(rule)
    (variant,) = enumerate_variants(rule, domain)
    assert samples(domain, variant)[0]["eps"] == 1e-5


def test_a_rule_that_captures_nothing_has_one_sample() -> None:
    """Without captured parameters one trace is enough."""

    def search(x: Vector) -> None: ...

    rule = rule_of(search)
    (variant,) = enumerate_variants(rule, read_domain(rule))
    assert samples(read_domain(rule), variant) == ({},)


def test_a_str_without_a_domain_is_an_error() -> None:
    """A plain str parameter is refused with the annotations that would do."""

    def search(x: Vector, *, word: str) -> None: ...

    message = error_of(search)
    assert message.startswith("Rule search, parameter word: expected a domain, found plain str")
    for way in ("OneOf", "Literal", "Enum"):
        assert way in message


def test_a_dtype_without_a_domain_is_an_error() -> None:
    """A plain torch.dtype parameter is refused like a str."""

    def search(x: Vector, *, dtype: torch.dtype) -> None: ...

    assert error_of(search).startswith("Rule search, parameter dtype: expected a domain, found plain dtype")


@pytest.mark.parametrize(
    "annotation", [Annotated[str, kt.OneOf()], Empty, Annotated[Tensor, kt.Shape("n"), kt.DTypes("E")]], ids=repr
)
def test_an_empty_domain_is_an_error(annotation: Any) -> None:
    """OneOf without values, an Enum without members and a variable without dtypes are refused, naming the parameter."""

    def search(x: Vector, *, y) -> None: ...  # type: ignore[no-untyped-def] # noqa: ANN001 - set below

    search.__annotations__["y"] = annotation
    message = error_of(search)
    assert message.startswith("Rule search, parameter y")
    assert "expected at least one value in its domain, found none" in message


@pytest.mark.parametrize(
    "annotation",
    [
        Annotated[str, kt.OneOf("a", "b", "a")],
        Annotated[float, kt.OneOf(math.nan, math.nan)],
        Annotated[float, kt.Captured(special=(1.0, 1.0))],
        Annotated[Tensor, kt.Shape("n", "n"), torch.float32],
        Annotated[Tensor, kt.Shape("n"), kt.DTypes("D", torch.float32, torch.float32)],
    ],
    ids=repr,
)
def test_duplicate_values_are_an_error(annotation: Any) -> None:
    """One value twice in a domain, in special values, alternatives or dtypes, is refused, naming the parameter."""

    def search(x: Vector, *, y) -> None: ...  # type: ignore[no-untyped-def] # noqa: ANN001 - set below

    search.__annotations__["y"] = annotation
    message = error_of(search)
    assert message.startswith("Rule search, parameter y")
    assert "expected distinct values" in message


@pytest.mark.parametrize("values", [([1, 2], [2, 3]), ({}, {1: 2}), (object(),), (torch.zeros(1),)])
def test_values_that_no_text_gives_back_are_an_error(values: tuple[Any, ...]) -> None:
    """Lists, dicts, objects and tensors can't be axis values: refused when declared, naming the parameter."""

    def search(x: Vector, *, y) -> None: ...  # type: ignore[no-untyped-def] # noqa: ANN001 - set below

    search.__annotations__["y"] = Annotated[Any, kt.OneOf(*values)]
    assert error_of(search).startswith("Rule search, parameter y: expected ")


def test_a_tensor_without_shape_is_an_error() -> None:
    """A tensor parameter needs a Shape; the error shows one."""

    def bare(x: Tensor) -> None: ...

    def no_shape(x: Annotated[Tensor, torch.float32]) -> None: ...

    def no_alternative(x: Annotated[Tensor, kt.Shape(), torch.float32]) -> None: ...

    for function in (bare, no_shape, no_alternative):
        message = error_of(function)
        assert message.startswith(f"Rule {function.__name__}, parameter x: expected a Shape")
        assert "Annotated[Tensor, Shape(" in message


def test_a_tensor_without_dtype_is_an_error() -> None:
    """A tensor parameter needs a dtype or a dtype variable."""

    def search(x: Annotated[Tensor, kt.Shape("n")]) -> None: ...

    assert error_of(search).startswith("Rule search, parameter x: expected a dtype or a DTypes variable")


def test_a_variable_of_what_is_no_dtype_is_an_error() -> None:
    """DTypes takes dtypes only."""

    def search(x: Annotated[Tensor, kt.Shape("n"), kt.DTypes("D", 1)]) -> None: ...  # type: ignore[arg-type]

    message = error_of(search)
    assert message.startswith("Rule search, parameter x, variable D: ")
    assert message.endswith("found 1.")


def test_a_wrong_shape_string_is_an_error() -> None:
    """An error in a shape string names rule and parameter."""

    def search(x: Annotated[Tensor, kt.Shape("m k-1"), torch.float32]) -> None: ...

    assert error_of(search).startswith("Rule search, parameter x: expected a dim like ")


def test_variadic_parameters_are_an_error() -> None:
    """``*args`` and ``**kwargs`` have no domain."""

    def keywords(x: Vector, **kwargs: Any) -> None: ...

    def positional(x: Vector, *args: Any) -> None: ...

    assert error_of(keywords).startswith("Rule keywords, parameter kwargs: expected a named parameter")
    assert error_of(positional).startswith("Rule positional, parameter args: expected a named parameter")


def test_a_missing_annotation_is_an_error() -> None:
    """Each parameter needs an annotation."""

    def search(x: Vector, scale) -> None: ...  # type: ignore[no-untyped-def] # noqa: ANN001 - what is tested

    assert error_of(search).startswith("Rule search, parameter scale: expected an annotation, found none")


def test_an_annotation_that_cannot_be_evaluated_is_an_error() -> None:
    """A name that the module doesn't have is shown, with the module."""

    def search(x: Vector, *, mode: NoSuchName) -> None: ...  # type: ignore[name-defined] # noqa: F821 - what is tested

    message = error_of(search)
    assert message.startswith("Rule search: expected annotations that can be evaluated in module")
    assert "NoSuchName" in message


def test_a_rule_without_a_tensor_is_an_error() -> None:
    """Without a tensor parameter there is nothing to match on."""

    def search(*, flag: bool) -> None: ...

    assert error_of(search).startswith("Rule search: expected at least one tensor parameter")


def test_two_markers_of_a_kind_are_an_error() -> None:
    """Two Shapes, or two dtypes, on one parameter contradict each other."""

    def search(x: Annotated[Tensor, kt.Shape("n"), kt.Shape("m"), torch.float32]) -> None: ...

    assert error_of(search) == "Rule search, parameter x: expected one Shape, found two."


def test_a_dtype_and_a_variable_are_an_error() -> None:
    """A parameter with both a dtype and a dtype variable is refused, since one of them would be ignored."""

    def search(x: Annotated[Tensor, kt.Shape("n"), T, torch.float64]) -> None: ...

    assert error_of(search).startswith("Rule search, parameter x: expected ")


@pytest.mark.parametrize(
    "annotation",
    [Annotated[bool, kt.Shape("n")], Annotated[float, kt.OneOf(1.0), kt.Captured(2.0)], Annotated[int, T]],
    ids=repr,
)
def test_a_marker_that_does_not_apply_is_an_error(annotation: Any) -> None:
    """A marker of kwtrace that a parameter can't have is refused, not ignored."""

    def search(x: Vector, *, y) -> None: ...  # type: ignore[no-untyped-def] # noqa: ANN001 - set below

    search.__annotations__["y"] = annotation
    assert error_of(search).startswith("Rule search, parameter y: expected ")


def test_one_variable_name_with_two_sets_of_dtypes_is_an_error() -> None:
    """Two dtype variables of one name must have the same dtypes."""

    def search(a: Matrix, b: Annotated[Tensor, kt.Shape("k n"), Other]) -> None: ...

    assert error_of(search) == "Rule search: expected one set of dtypes for variable T, found two."


def test_a_variable_named_like_a_parameter_is_an_error() -> None:
    """Axes have distinct names, whether they come from parameters or from variables."""

    def search(x: Vector, *, T: bool, y: Matrix) -> None: ...  # noqa: N803 - the name is what is tested

    def shape(x: Annotated[Tensor, kt.Shape("n", "m n"), torch.float32], *, x_shape: bool) -> None: ...

    assert error_of(search).startswith("Rule search: expected distinct names of axes, found T twice")
    assert error_of(shape).startswith("Rule shape: expected distinct names of axes, found x_shape twice")


def test_a_parameter_called_device_is_an_error() -> None:
    """``device`` is the name of the device axis."""

    def search(x: Vector, *, device: bool) -> None: ...

    assert error_of(search).startswith("Rule search: expected no parameter called device")


@pytest.mark.parametrize(
    ("annotation", "found"),
    [
        (Annotated[float, kt.Captured(1)], "expected a float as example, found 1"),
        (Annotated[int, kt.Captured(0.5)], "expected a int as example, found 0.5"),
        (Annotated[float, kt.Captured(special=(1,))], "expected special values of type float, found 1"),
        (Annotated[int, kt.Captured(special=(True,))], "expected special values of type int, found True"),
    ],
    ids=repr,
)
def test_captured_values_of_another_type_are_an_error(annotation: Any, found: str) -> None:
    """Example and special values have exactly the declared type."""

    def search(x: Vector, *, y) -> None: ...  # type: ignore[no-untyped-def] # noqa: ANN001 - set below

    search.__annotations__["y"] = annotation
    message = error_of(search)
    assert message.startswith("Rule search, parameter y: ")
    assert found in message


def test_where_that_takes_an_unknown_name_is_an_error() -> None:
    """``where=`` may name axes only; the error lists them."""

    def search(x: Vector, *, flag: bool) -> None: ...

    message = error_of(search, where=lambda flag, colour: flag)
    assert message.startswith("Rule search: expected where= to take axes of ")
    assert "'flag'" in message
    assert "found 'colour'" in message


@pytest.mark.parametrize(("answer", "found"), [(1, "found 1"), (None, "found None"), ("yes", "found 'yes'")])
def test_where_that_returns_no_bool_is_an_error(answer: Any, found: str) -> None:
    """``where=`` answers True or False; anything else, truthy or not, is quoted with the axes it was asked for."""

    def search(x: Vector, *, flag: bool) -> None: ...

    message = error_of(search, where=lambda flag: answer)
    assert message.startswith("Rule search: expected where= to return a bool for {'flag': False}")
    assert found in message


def test_where_that_raises_is_an_error() -> None:
    """What ``where=`` raises is quoted with the axes it was asked for."""

    def search(x: Vector, *, flag: bool) -> None: ...

    message = error_of(search, where=lambda flag: 1 // flag == 1)
    assert message.startswith("Rule search: expected where= to return a bool for {'flag': False}")
    assert "ZeroDivisionError" in message


def test_where_that_leaves_no_variant_is_an_error() -> None:
    """A rule without variants is refused."""

    def search(x: Vector, *, flag: bool) -> None: ...

    assert error_of(search, where=lambda flag: False).startswith("Rule search: expected at least one variant")


def test_unused_that_names_no_parameter_is_an_error() -> None:
    """``unused=`` names parameters of the rule."""

    def search(x: Vector) -> None: ...

    assert error_of(search, unused=("y",)) == "Rule search: expected unused= to name parameters, found 'y'."
