"""Rules → a generated package: what is stale is traced again, the rest is kept."""

from __future__ import annotations

import difflib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kwtrace
from kwtrace import packages
from kwtrace.digests import describe_axes, source_digest, torch_version
from kwtrace.domains import enumerate_variants, read_domain
from kwtrace.errors import KwtraceError, RuleError
from kwtrace.generation import RuleReference, RuleResult, generate_rule
from kwtrace.operators import schema_of
from kwtrace.packages import Entry, Manifest
from kwtrace.patterns import PatternSet
from kwtrace.rules import Rule

Bar = Callable[[int], AbstractContextManager[Callable[[int], object]]]
_CONTEXT_LINES = 2
_DIFF_LINES = 40


@dataclass(frozen=True, slots=True)
class RuleReport:
    """What a run did with one rule; ``status`` is ``traced``, ``unchanged`` or ``failed``."""

    rule: str
    status: str
    variants: int
    rows: int
    families: int
    merged: int
    failed: tuple[tuple[str, str], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """What a run of `generate` did."""

    rules: tuple[RuleReport, ...]
    out: Path
    torch: str

    @property
    def ok(self) -> bool:
        """Tell whether every variant was generated."""
        return not any(rule.failed for rule in self.rules)

    @property
    def changed(self) -> bool:
        """Tell whether anything was traced again."""
        return any(rule.status != "unchanged" for rule in self.rules)

    def __str__(self) -> str:
        """Return the table: a line per rule, then what failed and why."""
        head = ("rule", "status", "variants", "rows", "families", "merged", "rejected", "seconds")
        cells = [head] + [
            (r.rule, r.status, *map(str, (r.variants, r.rows, r.families, r.merged, len(r.failed))), f"{r.seconds:.1f}")
            for r in self.rules
        ]
        widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
        lines = [_aligned(row, widths) for row in cells]
        failures = [f"rejected: {reason}" for rule in self.rules for _, reason in rule.failed]
        note = [] if self.changed else [f"nothing changed in {self.out} for torch {self.torch}"]
        return "\n".join([*lines, *failures, *note])


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line of a table whose first two columns are words and whose others are numbers."""
    words = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
    numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
    return "  ".join([*words, *numbers]).rstrip()


@dataclass(frozen=True, slots=True)
class Difference:
    """A rule, or ``package`` for the package's own files, and in words how it differs from what would be generated."""

    rule: str
    text: str

    def __str__(self) -> str:
        """Return the rule's name and the difference."""
        return f"{self.rule}: {self.text}"


def generate(
    rules: Sequence[Rule],
    out: str | Path,
    *,
    jobs: int | None = None,
    executor: Executor | None = None,
    keep_others: bool = False,
    bar: Bar | None = None,
) -> GenerationReport:
    """Write the patterns of ``rules`` for the running torch version into the package folder ``out``.

    Rules that nothing changed for are not traced again. A variant that can't be traced is reported, and the others are
    written all the same; a rule whose declaration is wrong keeps what was generated for it before.

    Args:
        rules: the rules; their names must be distinct.
        out: the package's folder; sets for other torch versions in it are left alone.
        jobs: processes to trace with; one per core by default.
        executor: where to trace instead; the rules must then be importable by module and name.
        keep_others: keep the rules in the package that are not among ``rules``.
        bar: makes a progress bar for a number of variants.

    Raises:
        RuleError: if two rules have one name.
        KwtraceError: if the folder can't be written.

    """
    out = Path(out)
    _check_names(rules)
    version = torch_version()
    packages.recover(out, version)
    folder = packages.version_folder(out, version)
    old = packages.read_manifest(folder)
    entries: dict[str, Entry] = {}
    texts: dict[str, str] = {}
    if old is not None:
        names = {rule.name for rule in rules}
        kept = {name: entry for name, entry in old.rules.items() if keep_others or name in names}
        texts = {name: text for name in kept if (text := _read(folder / f"{name}.py")) is not None}
        entries = {name: entry for name, entry in kept.items() if name in texts}
    stale = [rule for rule in rules if not _is_fresh(rule, entries, texts)]
    reports: dict[str, RuleReport] = {}
    with _pool(stale, jobs, executor) as pool, _counting(stale, bar) as tick:
        for rule in stale:
            report, result = _trace(rule, pool, tick)
            reports[rule.name] = report
            if result is not None:
                texts[rule.name] = packages.render_rule(result, version)
                entries[rule.name] = packages.make_entry(
                    result, texts[rule.name], rule.module, source_digest(rule), describe_axes(rule)
                )
    manifest = Manifest(version, kwtrace.__version__, dict(sorted(entries.items())))
    if _differences_on_disk(out, folder, manifest, texts):
        packages.write_package(out, manifest, texts)
    ordered = tuple(reports.get(rule.name) or _unchanged(rule.name, entries[rule.name]) for rule in rules)
    return GenerationReport(ordered, out, version)


def trace(*rules: Rule) -> PatternSet:
    """Return the patterns of ``rules``, traced here and now, with no files: for trying a rule out.

    Raises:
        RuleError: if a declaration is wrong.
        TraceError: if a variant can't be traced, or the replacement ignores what tells two variants apart.
        ConflictError: if two variants contradict each other.

    """
    _check_names(rules)
    found = PatternSet()
    for rule in rules:
        result = generate_rule(rule)
        if result.failed:
            raise result.failed[0][1]
        found = found | PatternSet(result.families)
    return found


def check(rules: Sequence[Rule], out: str | Path, *, jobs: int | None = None) -> list[Difference]:
    """Return how a package on disk differs from what would be generated; an empty list if it is up to date.

    Only rules that differ are traced again.
    """
    out = Path(out)
    version = torch_version()
    folder = packages.version_folder(out, version)
    old = packages.read_manifest(folder)
    if old is None:
        return [
            Difference(
                "package",
                f"expected a set for torch {version} in {folder}, found none to read; run python -m kwtrace.gen",
            )
        ]
    found: list[Difference] = []
    if old.kwtrace != kwtrace.__version__:
        found.append(Difference("package", f"expected kwtrace {kwtrace.__version__}, found kwtrace {old.kwtrace}"))
    names = {rule.name for rule in rules}
    found += [Difference(name, "is in the package, but is no rule any more") for name in old.rules if name not in names]
    for rule in rules:
        found += _check_rule(rule, folder, old.rules.get(rule.name), jobs)
    if not found:
        found += [Difference("package", text) for text in _differences_on_disk(out, folder, old, _texts(folder, old))]
    return found


def _check_rule(rule: Rule, folder: Path, entry: Entry | None, jobs: int | None) -> list[Difference]:
    if entry is None:
        return [Difference(rule.name, "expected it in the package, found it missing; run python -m kwtrace.gen")]
    text = _read(folder / f"{rule.name}.py")
    if text is None:
        return [Difference(rule.name, f"expected {rule.name}.py, found it missing; run python -m kwtrace.gen")]
    words = packages.entry_axes_difference(entry.axes, describe_axes(rule))
    words += _changed_operators(entry)
    if entry.source != source_digest(rule) and not words:
        words.append("the rule's source, kwtrace's tracer or torch changed since it was generated")
    words += [f"rejected: {reason}" for _, reason in entry.failed]
    if packages.checksum(text) != entry.sha256:
        words += [f"{rule.name}.py was changed by hand", *_difference_from_traced(rule, text, jobs)]
    return [Difference(rule.name, "\n".join(words))] if words else []


def _difference_from_traced(rule: Rule, text: str, jobs: int | None) -> list[str]:
    with _pool([rule], jobs, None) as pool:
        _, result = _trace(rule, pool, None)
    if result is None:
        return ["the rule can't be traced"]
    expected = packages.render_rule(result, torch_version())
    lines = difflib.unified_diff(
        expected.splitlines(), text.splitlines(), "generated", "found", lineterm="", n=_CONTEXT_LINES
    )
    return list(lines)[:_DIFF_LINES]


def _changed_operators(entry: Entry) -> list[str]:
    words = []
    for name, schema in entry.operators.items():
        try:
            now = schema_of(name)
        except (AttributeError, RuntimeError):
            now = "missing"
        if now != schema:
            words.append(f"operator {name}: {schema} -> {now}")
    return words


def _differences_on_disk(out: Path, folder: Path, manifest: Manifest, texts: dict[str, str]) -> list[str]:
    """Return which files are not what the manifest makes of them."""
    roots = {**packages.read_manifests(out), folder.name: manifest}
    expected = {folder / f"{name}.py": text for name, text in texts.items()}
    expected |= {
        folder / packages.MANIFEST: packages.render_manifest(manifest),
        folder / "__init__.py": packages.render_index(manifest),
        out / "__init__.py": packages.render_root(roots),
    }
    words = [
        f"{path.relative_to(out)} is not what was generated" for path, text in expected.items() if _read(path) != text
    ]
    present = set(folder.glob("*.py")) | set(folder.glob("*.json"))
    return words + [f"{path.relative_to(out)} was not generated" for path in sorted(present - expected.keys())]


def _texts(folder: Path, manifest: Manifest) -> dict[str, str]:
    return {name: _read(folder / f"{name}.py") or "" for name in manifest.rules}


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _is_fresh(rule: Rule, entries: dict[str, Entry], texts: dict[str, str]) -> bool:
    entry = entries.get(rule.name)
    if entry is None or entry.failed or entry.module != rule.module:
        return False
    try:
        same_source = entry.source == source_digest(rule)
    except RuleError:
        return False
    return same_source and packages.checksum(texts[rule.name]) == entry.sha256 and not _changed_operators(entry)


def _trace(
    rule: Rule, pool: Executor | None, tick: Callable[[int], object] | None
) -> tuple[RuleReport, RuleResult | None]:
    start = time.perf_counter()
    try:
        result = generate_rule(rule, pool, tick)
        packages.render_rule(result, torch_version())
    except BrokenProcessPool as error:
        msg = (
            "Expected the processes that trace to start, found that they ended at once; put the call under "
            "`if __name__ == '__main__':`, or pass jobs=1."
        )
        raise KwtraceError(msg) from error
    except KwtraceError as error:
        return RuleReport(
            rule.name, "failed", 0, 0, 0, 0, ((rule.name, str(error)),), time.perf_counter() - start
        ), None
    rows = sum(len(family.rows) for family in result.families)
    status = "traced" if result.families else "failed"
    report = RuleReport(
        rule.name,
        status,
        result.variants,
        rows,
        len(result.families),
        len(result.merged),
        tuple((variant, str(error)) for variant, error in result.failed),
        time.perf_counter() - start,
    )
    return report, result if result.families else None


def _unchanged(name: str, entry: Entry) -> RuleReport:
    return RuleReport(name, "unchanged", entry.variants, entry.rows, entry.families, len(entry.merged), (), 0.0)


def _check_names(rules: Sequence[Rule]) -> None:
    seen: dict[str, Rule] = {}
    for rule in rules:
        other = seen.setdefault(rule.name, rule)
        if other is not rule:
            places = f"{other.module} and {rule.module}"
            msg = f"Expected distinct rule names, found {rule.name} in {places}; pass name= to one."
            raise RuleError(msg)


@contextmanager
def _pool(stale: Sequence[Rule], jobs: int | None, executor: Executor | None) -> Iterator[Executor | None]:
    count = jobs or os.cpu_count() or 1
    if executor is not None or count == 1 or not stale or not all(_is_importable(rule) for rule in stale):
        yield executor
        return
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def _is_importable(rule: Rule) -> bool:
    if rule.module == "__main__" or rule.module not in sys.modules:
        return False
    try:
        return RuleReference(rule.module, rule.name).load() is rule
    except KwtraceError:
        return False


def _counting(stale: Sequence[Rule], bar: Bar | None) -> Any:
    if bar is None or not stale:
        return nullcontext()
    return bar(sum(_count(rule) for rule in stale))


def _count(rule: Rule) -> int:
    try:
        return len(enumerate_variants(rule, read_domain(rule)))
    except RuleError:
        return 0
