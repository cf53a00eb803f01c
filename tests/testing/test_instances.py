"""Graphs to start from: traced anew at concrete sizes, each of which the row's variant matches."""

from __future__ import annotations

import pytest
import rules_for_laws as laws
import torch
import toys
from graphs import targets
from torch import fx

import kwtrace as kt
from kwtrace.engine import Engine
from kwtrace.testing import instances
from kwtrace.testing.oracle import random_inputs

RULES = [toys.scaled_rule, toys.scaled_add_rule, toys.topk_rule, laws.total_rule, laws.joined_rule, laws.moded_rule]


def shapes(graph: fx.Graph) -> list[tuple[int, ...]]:
    """Return the shapes of a graph's inputs."""
    return [tuple(node.meta["val"].shape) for node in graph.nodes if node.op == "placeholder"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_instance_is_matched_by_its_variant(rule: kt.Rule) -> None:
    """Each row has instances; a graph and its numbers run, and the row's own variant is what fires in it."""
    patterns = toys.patterns(rule)
    for family in patterns.families:
        for row in family.rows:
            made = list(instances(family, row, rule))
            assert len(made) == 3
            for instance in made:
                fx.Interpreter(torch.nn.Module(), graph=instance.graph).run(*random_inputs(instance.graph, 0))
                (match,) = Engine(patterns).find(instance.graph)
                assert match.variant == instance.variant == family.variant(row)
                assert kt.apply(fx.GraphModule({}, instance.graph), patterns).count == 1


def test_sizes_are_distinct_then_equal_then_reversed_in_memory() -> None:
    """The three instances: no two dims alike, all alike, and inputs that lie in memory in reverse."""
    (family,) = toys.patterns(toys.scaled_add_rule).families
    distinct, equal, reverse = instances(family, family.rows[0], toys.scaled_add_rule)
    assert shapes(distinct.graph) == [(3, 4), (3, 4)]
    assert shapes(equal.graph) == [(4, 4), (4, 4)]
    assert shapes(reverse.graph) == [(3, 4), (3, 4)]
    first = next(iter(reverse.graph.nodes)).meta["val"]
    assert first.stride() == (1, 3)


def test_instances_hold_no_dead_code() -> None:
    """A graph has what its variant searches for, and nothing else."""
    (family,) = toys.patterns(toys.scaled_rule).families
    for instance in instances(family, family.rows[0], toys.scaled_rule):
        assert targets(instance.graph) == ["aten.exp.default", "aten.mul.Tensor"]


def test_sizes_that_a_condition_rules_out_are_left_out() -> None:
    """Where a pattern's condition doesn't hold for a table of sizes there is no instance of it."""
    from dataclasses import replace  # noqa: PLC0415 - this test alone needs it

    (family,) = toys.patterns(toys.scaled_rule).families
    unequal = replace(family, skeleton=replace(family.skeleton, conditions=("m < n",)))
    assert [i.sizes for i in instances(unequal, family.rows[0], toys.scaled_rule)] == [{"m": 3, "n": 4}] * 2
