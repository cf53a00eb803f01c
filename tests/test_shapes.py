"""Shape strings: names, literals, ``h?``, ``d>1`` and products."""

from __future__ import annotations

import pytest

from kwtrace.errors import RuleError
from kwtrace.shapes import DimSpec, parse_shape


@pytest.mark.parametrize(
    ("text", "dims"),
    [
        ("", ()),
        ("m", (DimSpec(("m",)),)),
        ("m k", (DimSpec(("m",)), DimSpec(("k",)))),
        ("1 3", (DimSpec((1,)), DimSpec((3,)))),
        ("h?", (DimSpec(("h",), optional=True),)),
        ("d>1", (DimSpec(("d",), above_one=frozenset({"d"})),)),
        ("g*n", (DimSpec(("g", "n")),)),
        ("2*n", (DimSpec((2, "n")),)),
        ("g*n?", (DimSpec(("g", "n"), optional=True),)),
        ("g*n>1", (DimSpec(("g", "n"), above_one=frozenset({"n"})),)),
        ("g>1*n>1", (DimSpec(("g", "n"), above_one=frozenset({"g", "n"})),)),
        ("h>1?", (DimSpec(("h",), optional=True, above_one=frozenset({"h"})),)),
        ("  b   s ", (DimSpec(("b",)), DimSpec(("s",)))),
        ("größe", (DimSpec(("größe",)),)),
    ],
)
def test_every_form_is_parsed(text: str, dims: tuple[DimSpec, ...]) -> None:
    """Each form of a dim is read as factors and marks."""
    assert parse_shape(text, "here") == dims


@pytest.mark.parametrize(
    "word", ["0", "-1", "1.5", "a+b", "a-", "?", "*", "a**b", "a*", "1?", "3>1", ">1", "a>2", "a b!", "(a)", "a??"]
)
def test_anything_else_names_where_and_what(word: str) -> None:
    """A dim of another form is a RuleError that names rule and parameter and quotes the dim."""
    with pytest.raises(RuleError) as caught:
        parse_shape(f"m {word}", "Rule r, parameter x")
    assert str(caught.value).startswith("Rule r, parameter x: expected ")
    assert f"{word.rsplit(maxsplit=1)[-1]!r}" in str(caught.value)


def test_a_dim_knows_its_names_and_its_text() -> None:
    """``names`` are the factors that are no literals, ``text`` is the expression without marks."""
    (dim,) = parse_shape("2*g*n>1?", "here")
    assert (dim.names, dim.text) == (("g", "n"), "2*g*n")
