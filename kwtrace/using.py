"""Pattern sets at work: in ``torch.compile`` by options or for the whole process, or on one graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kwtrace.errors import KwtraceError
from kwtrace.reports import Recorder, Report

if TYPE_CHECKING:
    from torch import fx

_process = Recorder()
_installed: list[tuple[Any, Any]] = []
"""Each pass that was installed, and the setting that it took the place of."""


def options(patterns: Any, **inductor_options: Any) -> dict[str, Any]:
    """Return ``options`` for ``torch.compile`` that rewrite with ``patterns``; nothing global is changed.

    Args:
        patterns: a generated package or its module, or a `PatternSet`.
        inductor_options: further options of Inductor. A pass given or configured for the joint graph runs first.

    """
    from kwtrace import inductor

    given = inductor_options.get(inductor.KEY)
    before = inductor.configured() if given is None else inductor.as_passes(given)
    return {**inductor_options, inductor.KEY: inductor.KwtracePass(patterns, before, _process)}


def install(patterns: Any) -> None:
    """Rewrite with ``patterns`` in every ``torch.compile`` of the process, after the passes configured already."""
    from kwtrace import inductor

    made = inductor.KwtracePass(patterns, inductor.configured(), _process)
    _installed.append((made, inductor.setting()))
    inductor.configure(made)


def uninstall(patterns: Any) -> None:
    """Undo the last `install` of ``patterns``.

    Raises:
        KwtraceError: if they are not installed, or another pass was configured in their place since.

    """
    from kwtrace import inductor

    place = next((i for i in reversed(range(len(_installed))) if _installed[i][0].patterns is patterns), None)
    if place is None:
        msg = f"Expected installed patterns to uninstall, found {patterns!r}, which aren't."
        raise KwtraceError(msg)
    made, setting = _installed[place]
    if inductor.setting() is made:
        inductor.configure(setting)
    elif place + 1 < len(_installed) and made in _installed[place + 1][0].before:
        later = _installed[place + 1][0]
        later.before = made.before
        _installed[place + 1] = (later, setting)
    else:
        msg = (
            f"Expected the pass of {patterns!r} in Inductor's configuration, found {inductor.setting()!r} in its place."
        )
        raise KwtraceError(msg)
    del _installed[place]


@contextmanager
def installed(patterns: Any) -> Iterator[None]:
    """Install ``patterns`` for the time of a ``with`` block."""
    install(patterns)
    try:
        yield
    finally:
        uninstall(patterns)


def apply(gm: fx.GraphModule, patterns: Any) -> Report:
    """Rewrite any ATen graph, from ``make_fx`` or ``torch.export``, in place; return what fired."""
    from kwtrace.engine import Engine
    from kwtrace.loading import as_pattern_set

    recorder = Recorder()
    recorder.add(Engine(as_pattern_set(patterns)).run(gm.graph))
    gm.recompile()
    return recorder.report()


def stats(*, reset: bool = False) -> Report:
    """Return what fired in ``torch.compile`` since the last reset, over the whole process."""
    report = _process.report()
    if reset:
        _process.reset()
    return report
