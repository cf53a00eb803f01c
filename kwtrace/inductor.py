"""The pass that Inductor calls: the one file that imports ``torch._inductor``.

Inductor's configuration names a pass for the joint graph; kwtrace's calls the one that was there before it, then
rewrites.
"""

from __future__ import annotations

import hashlib
import logging
import os
from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import kwtrace
from kwtrace.digests import replacement_digest
from kwtrace.engine import Engine
from kwtrace.errors import KwtraceError
from kwtrace.explaining import explain
from kwtrace.explanations import Explanation
from kwtrace.generation import find_rule
from kwtrace.loading import as_pattern_set
from kwtrace.patterns import AtMatch, PatternSet, Variant
from kwtrace.reports import Recorder

log = logging.getLogger("kwtrace")
KEY = "joint_custom_pre_pass"


class KwtracePass(CustomGraphPass):
    """Rewrites a graph with a pattern set, after the passes that were configured before it."""

    def __init__(self, patterns: Any, before: tuple[Any, ...], recorder: Recorder) -> None:
        """Take a pattern set or package, the passes to call first, and where to count."""
        self.patterns, self.before, self.recorder = patterns, before, recorder
        self._engine: Engine | None = None

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite ``graph``; whatever goes wrong in kwtrace is logged and leaves the graph as it is."""
        for earlier in self.before:
            earlier(graph)
        try:
            fired = self._prepared().run(graph)
            self._hint(graph, fired)
        except Exception:
            log.exception("kwtrace left a graph as it is")
            return
        self.recorder.add(fired)
        for variant in fired:
            log.debug("rewrote %s", variant)

    def uuid(self) -> Any:
        """Return what the rewriting depends on; None, which turns caching off, if an earlier pass has no uuid."""
        earlier = [_uuid(one) for one in self.before]
        if any(one is None for one in earlier):
            return None
        own = "\n".join(
            [_content(self.patterns), kwtrace.__version__, torch.__version__, os.environ.get("KWTRACE_DISABLE", "")]
        )
        return (hashlib.sha256(own.encode()).hexdigest(), *earlier)

    def __eq__(self, other: object) -> bool:
        """Tell whether the other pass does the same, so that equal options don't compile twice."""
        if not isinstance(other, KwtracePass) or self.before != other.before:
            return False
        return self.patterns is other.patterns or _content(self.patterns) == _content(other.patterns)

    def __hash__(self) -> int:
        """Return a hash of the content."""
        return hash(_content(self.patterns))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without what is made from it."""
        return {**self.__dict__, "patterns": _loaded(self.patterns), "_engine": None}

    def _hint(self, graph: fx.Graph, fired: list[Variant]) -> None:
        """Point to `kwtrace.explain` where nothing matched, though all operators of a rule are there."""
        switched_off = bool(os.environ.get("KWTRACE_DISABLE"))
        near = [] if fired or switched_off else self._prepared().rules_in(graph)
        if near:
            log.warning(
                "%s: expected a match in a graph that has all operators, found none; "
                "kwtrace.explain(gm, patterns) and python -m kwtrace.explain say why",
                ", ".join(near),
            )

    def _prepared(self) -> Engine:
        if self._engine is None:
            self._engine = Engine(as_pattern_set(self.patterns))
        return self._engine


class _ExplainingPass(CustomGraphPass):
    """Keeps what `explain` says of every graph that it is given."""

    def __init__(self, patterns: PatternSet) -> None:
        """Take the pattern set."""
        self.patterns = patterns
        self.explanations: list[Explanation] = []

    def __call__(self, graph: fx.Graph) -> None:
        """Explain ``graph``, and leave it as it is."""
        module = fx.GraphModule({}, graph)
        self.explanations.append(explain(module, self.patterns))

    def uuid(self) -> Any:
        """Return None: nothing may come from a cache, or there would be nothing to explain."""
        return None


def explain_compiled(
    function: Any, inputs: tuple[Any, ...], patterns: PatternSet, *, dynamic: bool | None = None
) -> list[Explanation]:
    """Compile ``function`` for ``inputs`` and say what a pattern set does in each graph; nothing is rewritten."""
    explaining = _ExplainingPass(patterns)
    compiled: Any = torch.compile(function, dynamic=dynamic, options={KEY: explaining})
    with torch.no_grad():
        compiled(*inputs)
    return explaining.explanations


def setting() -> Any:
    """Return what Inductor's configuration names now: a pass, several, or None."""
    return getattr(config, KEY)


def configured() -> tuple[Any, ...]:
    """Return the passes that Inductor's configuration names now."""
    return as_passes(setting())


def as_passes(value: Any) -> tuple[Any, ...]:
    """Return a setting, a pass or several or None, as passes."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def configure(value: Any) -> None:
    """Put a pass, several, or None into Inductor's configuration."""
    setattr(config, KEY, value)


def _uuid(one: Any) -> Any:
    return one.uuid() if isinstance(one, CustomGraphPass) else None


def _loaded(patterns: Any) -> PatternSet:
    try:
        return as_pattern_set(patterns)
    except KwtraceError as error:
        log.warning("%s", error)
        return PatternSet()


def _content(patterns: Any) -> str:
    """Return a digest of the patterns and of the code, as it is now, of replacements that are traced at the match."""
    loaded = _loaded(patterns)
    late = (f.skeleton for f in loaded.families if isinstance(f.skeleton.replacement, AtMatch))
    places = {(skeleton.module, skeleton.rule, skeleton.device) for skeleton in late}
    return "\n".join([loaded.digest, *sorted(_source(*place) for place in places)])


def _source(module: str, rule: str, device: Any) -> str:
    try:
        declared = find_rule(module, rule)
        devices = [device] if isinstance(device, str) else list(declared.replacements)
        return " ".join(replacement_digest(declared, one) for one in devices)
    except (KwtraceError, KeyError) as error:
        return f"{rule}: {error}"
