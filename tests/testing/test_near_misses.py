"""Near misses as a whole: what is made, what is claimed, what is judged wrong, and how it is counted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import rules_for_laws as laws
import toys
from torch import fx

import kwtrace as kt
from kwtrace import testing
from kwtrace.testing import (
    Instance,
    Judge,
    Neighbour,
    Tally,
    check,
    check_rows,
    instances,
    near_misses,
    other_spellings,
)
from kwtrace.testing.oracle import difference

PATTERNS = toys.patterns(toys.scaled_rule)
RULES = {"scaled": toys.scaled_rule}


def first_instance(rule: kt.Rule = toys.scaled_rule) -> Instance:
    """Return one graph that a rule matches."""
    family = toys.patterns(rule).families[0]
    return next(instances(family, family.rows[0], rule))


def test_the_public_names_are_there() -> None:
    """``kwtrace.testing`` exports what a rule's author needs."""
    assert set(testing.__all__) == {
        "Instance", "Judge", "Neighbour", "Tally", "check", "check_rows", "instances", "near_misses", "other_spellings",
    }  # fmt: skip
    assert all(hasattr(testing, name) for name in testing.__all__)
    assert callable(testing.near_misses)


def test_importing_kwtrace_imports_no_tests() -> None:
    """A user's compile doesn't pay for the near misses."""
    root = str(Path(kt.__file__).parent.parent)
    code = "import sys, kwtrace, kwtrace.using; print([name for name in sys.modules if 'kwtrace.testing' in name])"
    env = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == "[]"


def test_neighbours_are_graphs_of_their_own() -> None:
    """Making all neighbours leaves the instance as it was; each is valid, and has its words."""
    instance = first_instance()
    before, values = str(instance.graph), [node.meta.get("val") for node in instance.graph.nodes]
    made = [*near_misses(instance), *other_spellings(instance)]
    assert str(instance.graph) == before
    assert all(node.meta.get("val") is value for node, value in zip(instance.graph.nodes, values, strict=True))
    assert len({id(neighbour.graph) for neighbour in made}) == len(made)
    assert instance.graph not in [neighbour.graph for neighbour in made]
    for neighbour in made:
        neighbour.graph.lint()
        assert neighbour.words


def test_every_kind_of_near_miss_is_made() -> None:
    """A graph with constants, operands, inputs and two calls has a neighbour of each kind."""
    kinds = Counter(neighbour.kind for neighbour in near_misses(first_instance(toys.topk_rule)))
    kinds += Counter(neighbour.kind for neighbour in near_misses(first_instance(laws.rounded_rule)))
    assert {
        "constant", "type", "operand", "operator", "detour", "dtype", "device", "rank", "size", "user", "mutation",
        "stream", "strides",
    } <= kinds.keys()  # fmt: skip
    spelled = Counter(neighbour.kind for neighbour in other_spellings(first_instance()))
    assert {"identity", "arguments", "dead node", "strides", "result"} <= spelled.keys()


def test_parts_are_the_whole() -> None:
    """Three parts of three have every neighbour once."""
    whole = Counter(n.words for n in near_misses(first_instance()))
    parts = [Counter(n.words for n in near_misses(first_instance(), part=slice(i, None, 3))) for i in range(3)]
    assert sum(parts, Counter()) == whole
    assert all(parts)


def test_strings_of_the_rule_are_tried() -> None:
    """A string argument becomes the other strings of the rule's axes."""
    tried = [n.words for n in near_misses(first_instance(laws.moded_rule), ("none", "twice"))]
    assert any("'none' → 'twice'" in words for words in tried)


def test_a_right_matcher_is_judged_right_and_the_tallies_add_up() -> None:
    """Shares of the changes add up to all of them; what is claimed was tried; nothing is wrong with other spellings."""
    shares = [check(PATTERNS, RULES, (i, 4))["scaled"] for i in range(4)]
    whole = Tally()
    for share in shares:
        whole.add(share)
    all_at_once = check(PATTERNS, RULES)["scaled"]
    assert whole.tried == all_at_once.tried
    assert whole.claimed == all_at_once.claimed
    assert whole.spelled - all_at_once.spelled == Counter(none=9)  # each share tries the graphs unchanged
    assert sorted(whole.wrong) == sorted(all_at_once.wrong)
    assert all_at_once.instances == 3
    assert all_at_once.claimed <= all_at_once.tried
    made = Counter(
        n.kind for f in PATTERNS.families for i in instances(f, f.rows[0], toys.scaled_rule) for n in near_misses(i)
    )
    assert all_at_once.tried == made
    assert all_at_once.wrong == []


def test_another_variant_may_claim_a_neighbour() -> None:
    """A neighbour that is exactly what another variant searches for is claimed, not wrong."""
    patterns = toys.patterns(laws.moded_rule)
    (family,) = patterns.families
    tally = check_rows(patterns, {"moded": laws.moded_rule}, [(family, family.rows[0])], (0, 2))
    other = check_rows(patterns, {"moded": laws.moded_rule}, [(family, family.rows[0])], (1, 2))
    tally.add(other)
    assert tally.claimed["constant"] >= 1
    assert not [words for words in tally.wrong if ", constant, " in words]


class Blind(Judge):
    """A judge whose matcher finds nothing."""

    def find(self, graph: fx.Graph) -> list[kt.Match]:
        """Find nothing."""
        return []


class Raising(Judge):
    """A judge whose matcher raises."""

    def find(self, graph: fx.Graph) -> list[kt.Match]:
        """Raise."""
        raise IndexError(graph.__class__.__name__)


@pytest.mark.parametrize(("judge", "words"), [(Blind, "expected a match, found []"), (Raising, "raised IndexError")])
def test_a_matcher_that_finds_nothing_or_raises_is_wrong(judge: Any, words: str) -> None:
    """Every spelling that must match is reported, and so is whatever makes the matcher raise."""
    (family,) = PATTERNS.families
    tally = check_rows(PATTERNS, RULES, [(family, family.rows[0])], (0, 8), judge(PATTERNS, RULES))
    spelled, tried = sum(tally.spelled.values()), sum(tally.tried.values())
    assert len(tally.wrong) == (spelled if judge is Blind else spelled + tried)
    assert all(words in line for line in tally.wrong)
    assert not tally.claimed


def test_a_rule_that_another_shadows_is_reported() -> None:
    """Where two rules search for one graph, the one that never wins isn't found where it should be."""
    patterns = toys.patterns(LOW, HIGH)
    rules = {"a": LOW, "b": HIGH}
    tallies = {name: tally.wrong for name, tally in check(patterns, rules, (0, 16)).items()}
    assert tallies["a"] == []
    assert any('expected a match, found ["a[' in words for words in tallies["b"])


LOW, HIGH = toys.rival("a", "low"), toys.rival("b", "high")


def test_a_problem_says_where_it_is() -> None:
    """What is wrong names the variant, the sizes, the kind and the change."""
    (family,) = PATTERNS.families
    tally = check_rows(PATTERNS, RULES, [(family, family.rows[0])], (0, 8), Blind(PATTERNS, RULES))
    assert tally.wrong[0].startswith("scaled[device='cpu'] at {'m': 3, 'n': 4}, none, unchanged: ")


def test_a_replacement_that_cannot_be_put_in_place_is_wrong_only_where_it_must() -> None:
    """A match that is refused when rewriting is fine for a near miss, and a fault for what must be rewritten."""
    instance = first_instance()
    judge = Judge(PATTERNS, RULES)
    found = judge.find(instance.graph)
    judge.engine.run = lambda graph: []  # type: ignore[method-assign] - a rewriting that always refuses
    assert judge.problem(instance.graph, found, instance) is None
    problem = judge.problem(instance.graph, found, instance, must_fire=True)
    assert problem is not None
    assert "found it refused" in problem


def test_a_neighbour_and_an_instance_say_what_they_are() -> None:
    """Both are plain data."""
    instance = first_instance()
    assert str(instance) == "scaled[device='cpu'] at {'m': 3, 'n': 4}"
    assert Neighbour("none", "unchanged", instance.graph).graph is instance.graph
    assert difference(instance.graph, instance.graph) is None
