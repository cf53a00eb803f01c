"""Shape strings: ``"b g*n s d"`` → dims, each a product of factors that may also be 1."""

from __future__ import annotations

from dataclasses import dataclass

from kwtrace.errors import RuleError


@dataclass(frozen=True, slots=True)
class DimSpec:
    """One dim of a shape: its factors (names or a literal), whether it may be 1 instead, and which names never are."""

    factors: tuple[str | int, ...]
    optional: bool = False
    above_one: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the named factors."""
        return tuple(factor for factor in self.factors if isinstance(factor, str))

    @property
    def text(self) -> str:
        """Return the size expression, without the marks."""
        return "*".join(map(str, self.factors))


def parse_shape(text: str, where: str) -> tuple[DimSpec, ...]:
    """Parse a shape string; ``where`` names rule and parameter in errors.

    Raises:
        RuleError: if a dim is neither a name, a positive literal, nor a product of them.

    """
    return tuple(_parse_dim(word, where) for word in text.split())


def _parse_dim(word: str, where: str) -> DimSpec:
    optional = word.endswith("?")
    words = word.removesuffix("?").split("*")
    factors = tuple(_parse_factor(factor.removesuffix(">1"), word, where) for factor in words)
    names = [factor for factor in factors if isinstance(factor, str)]
    above_one = frozenset(factor.removesuffix(">1") for factor in words if factor.endswith(">1"))
    if (optional and not names) or not above_one <= set(names):
        msg = f"{where}: expected a name before '?' or '>1', found the dim {word!r}."
        raise RuleError(msg)
    return DimSpec(factors, optional, above_one)


def _parse_factor(factor: str, word: str, where: str) -> str | int:
    if factor.isdecimal() and int(factor) > 0:
        return int(factor)
    if factor.isidentifier():
        return factor
    msg = f"{where}: expected a dim like 'b', '1', 'h?', 'd>1' or 'g*n', found {word!r}."
    raise RuleError(msg)
