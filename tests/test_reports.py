"""What a report says."""

from __future__ import annotations

from kwtrace.patterns import Variant
from kwtrace.reports import Recorder

ONE = Variant("mm_act", (("negate", True),))
OTHER = Variant("mm_act", (("negate", False),))
ATTENTION = Variant("attention", (("device", "cpu"),))


def test_no_graph_is_not_no_match() -> None:
    """Having seen no graph, as when the code came from a cache, reads differently from having found nothing."""
    recorder = Recorder()
    assert "came from a cache" in str(recorder.report())
    recorder.add([])
    assert str(recorder.report()) == "kwtrace rewrote nothing in 1 graph(s); kwtrace.explain says why."


def test_counts_are_per_rule_and_variant() -> None:
    """A report counts graphs, and rewrites by rule and by variant, in one order whatever came first."""
    recorder = Recorder()
    recorder.add([ONE, OTHER, ONE])
    recorder.add([ATTENTION])
    report = recorder.report()
    assert report.graphs == 2
    assert report.count == 4
    assert report.fired == {"mm_act": {str(ONE): 2, str(OTHER): 1}, "attention": {str(ATTENTION): 1}}
    assert str(report).splitlines() == [
        "kwtrace rewrote 4 place(s) in 2 graph(s):",
        "      1 x attention[device='cpu']",
        "      1 x mm_act[negate=False]",
        "      2 x mm_act[negate=True]",
    ]


def test_a_report_stays_as_it_was() -> None:
    """What is counted later, or reset, doesn't change a report that was taken."""
    recorder = Recorder()
    recorder.add([ONE])
    report = recorder.report()
    recorder.add([ONE])
    assert report.count == 1
    recorder.reset()
    assert report.count == 1
    assert recorder.report().graphs == recorder.report().count == 0
