"""Law 10: caches stay right, since a pass's ``uuid`` covers everything that its rewriting depends on."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from toys import bounded_rule, patterns, scaled_add_rule, scaled_rule

import kwtrace as kt
import patterns_gen
from kwtrace import inductor
from kwtrace.reports import Recorder

ROOT = Path(kt.__file__).parent.parent


class Earlier(CustomGraphPass):  # type: ignore[misc] - torch's class is untyped
    """A pass that someone else configured."""

    def __init__(self, name: Any) -> None:
        """Take what its uuid is."""
        self.name = name

    def __call__(self, graph: fx.Graph) -> None:
        """Do nothing."""

    def uuid(self) -> Any:
        """Return the name."""
        return self.name


def made(patterns: Any, *before: Any) -> inductor.KwtracePass:
    """Return a pass that counts for itself."""
    return inductor.KwtracePass(patterns, before, Recorder())


def test_the_uuid_tells_contents_apart(shipped: kt.PatternSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other patterns, versions, earlier passes or switches are another uuid; the same content is the same."""
    monkeypatch.delenv("KWTRACE_DISABLE", raising=False)
    one = shipped.select("mm_act", negate=True)
    passes = [
        made(shipped),
        made(one),
        made(shipped.select("mm_act", negate=False)),
        made(kt.PatternSet()),
        made(patterns(scaled_rule)),
        made(one, Earlier("a")),
        made(one, Earlier("b")),
        made(one, Earlier("a"), Earlier("b")),
        made(one, Earlier("b"), Earlier("a")),
    ]
    found = [each.uuid() for each in passes]
    assert None not in found
    assert len(set(map(repr, found))) == len(found)
    assert made(shipped.select("mm_act", negate=True)).uuid() == passes[1].uuid()
    assert made(patterns_gen).uuid() == passes[0].uuid()
    for name, value in (("KWTRACE_DISABLE", "mm_act"), ("KWTRACE_DISABLE", "1")):
        monkeypatch.setenv(name, value)
        found.append(passes[0].uuid())
    monkeypatch.delenv("KWTRACE_DISABLE")
    monkeypatch.setattr(kt, "__version__", "another")
    found.append(passes[0].uuid())
    monkeypatch.setattr(torch, "__version__", "2.13.99")
    found.append(passes[0].uuid())
    assert len(set(map(repr, found))) == len(found)


def test_the_uuid_covers_captured_constants_by_type() -> None:
    """Two sets that differ only in a constant's type or sign are two contents."""
    (family,) = patterns(scaled_rule).families
    uuids = []
    for value in (1, 1.0, True, 0.0, -0.0, "1"):
        axes = (*family.skeleton.axes, ("x", value))
        uuids.append(made(kt.PatternSet((replace(family, skeleton=replace(family.skeleton, axes=axes)),))).uuid())
    assert len(set(map(repr, uuids))) == len(uuids)


def test_the_uuid_covers_the_code_of_a_replacement_traced_at_the_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the replacement isn't in the generated content, its source is part of the uuid."""
    before = made(patterns(bounded_rule)).uuid()
    assert made(patterns(bounded_rule)).uuid() == before
    other = replace(bounded_rule.replacements["cpu"], function=lambda x, *, alpha: torch.tanh(x) * alpha)
    monkeypatch.setitem(bounded_rule.replacements, "cpu", other)
    assert made(patterns(bounded_rule)).uuid() != before


@pytest.mark.parametrize("earlier", [lambda graph: None, Earlier(None)], ids=["a function", "a pass without uuid"])
def test_an_earlier_pass_without_a_uuid_turns_caching_off(shipped: kt.PatternSet, earlier: Any) -> None:
    """What can't be identified can't be cached: the uuid is None, which tells Inductor not to."""
    assert made(shipped, earlier).uuid() is None
    assert made(shipped, Earlier("a"), made(shipped, earlier)).uuid() is None


def test_every_leaf_of_the_content_is_part_of_the_uuid() -> None:
    """One constant, argument, size, condition, row or name changed is another uuid."""
    whole = patterns(scaled_rule) | patterns(scaled_add_rule)
    (first, second) = whole.families
    skeleton = first.skeleton
    changed = [
        replace(skeleton, rule="other"),
        replace(skeleton, module="other"),
        replace(skeleton, device="cuda"),
        replace(skeleton, priority=1),
        replace(skeleton, conditions=("m > 5",)),
        replace(skeleton, dims=(replace(skeleton.dims[0], low=1), *skeleton.dims[1:])),
        replace(skeleton, inputs=(replace(skeleton.inputs[0], dtype=torch.float64),)),
        replace(skeleton, outputs=(replace(skeleton.outputs[0], dtype=torch.float64),)),
        replace(skeleton, search=skeleton.search[:-1]),
        replace(skeleton, replacement=second.skeleton.replacement),
    ]
    sets = [kt.PatternSet((replace(first, skeleton=each), second)) for each in changed]
    sets += [whole, kt.PatternSet((first,)), kt.PatternSet((replace(first, rows=()), second))]
    uuids = {repr(made(each).uuid()) for each in sets}
    assert len(uuids) == len(sets)
    assert made(kt.PatternSet((second, first))).uuid() == made(whole).uuid()


PRINT = """
import sys
import toys
import kwtrace as kt
from kwtrace import inductor
from kwtrace.reports import Recorder

rules = [getattr(toys, name) for name in sys.argv[1:]]
print(repr(inductor.KwtracePass(kt.trace(*rules), (), Recorder()).uuid()))
"""


def uuid_elsewhere(seed: str, *names: str) -> str:
    """Return the uuid of toy rules traced in another process, whose strings hash otherwise."""
    env = {
        **os.environ,
        "PYTHONHASHSEED": seed,
        "KWTRACE_DISABLE": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    done = subprocess.run([sys.executable, "-c", PRINT, *names], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.slow
def test_equal_content_has_one_uuid_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The uuid is the content's: the same in a process of its own, in another order, whatever strings hash to."""
    monkeypatch.delenv("KWTRACE_DISABLE", raising=False)
    here = repr(made(patterns(scaled_rule) | patterns(bounded_rule)).uuid())
    assert uuid_elsewhere("1", "scaled_rule", "bounded_rule") == here
    assert uuid_elsewhere("2", "bounded_rule", "scaled_rule") == here
