"""``python -m kwtrace.gen``: generate the patterns of rules ahead of time, or check that they are up to date.

Exit codes: 0 all is well, 1 stale or failed, 2 usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

import kwtrace.library
from kwtrace.domains import enumerate_variants, read_domain
from kwtrace.errors import KwtraceError
from kwtrace.generating import check, generate
from kwtrace.generation import find_module
from kwtrace.rules import Rule

_SHIPPED = "kwtrace.library"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.modules and options.out is None:
        parser.error("expected --out with modules of your own, found none; name the package's folder")
    try:
        rules = _collect(options.modules or [_SHIPPED])
        chosen = [rule for rule in rules if fnmatch.fnmatch(rule.name, options.only)]
        if not chosen:
            parser.error(f"expected --only to match one of {', '.join(r.name for r in rules)}, found {options.only!r}")
        return _run(options, chosen, everything=len(chosen) == len(rules))
    except KwtraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def shipped_folder() -> Path:
    """Return the folder of the package that kwtrace ships."""
    import patterns_gen

    return Path(next(iter(patterns_gen.__path__)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kwtrace.gen", description="Generate fusion patterns ahead of time."
    )
    parser.add_argument("modules", nargs="*", help="modules that declare rules; without any, those that kwtrace ships")
    parser.add_argument("--out", type=Path, help="the folder of the generated package")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 and say what differs if the package is stale"
    )
    parser.add_argument("--list", action="store_true", help="write nothing; list the rules and their variants")
    parser.add_argument("--only", default="*", metavar="GLOB", help="only the rules whose name matches")
    parser.add_argument("--jobs", type=_positive, metavar="N", help="processes to trace with; one per core by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to a file as well")
    return parser


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        msg = f"expected a positive number, found {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return number


def _collect(modules: Sequence[str]) -> list[Rule]:
    found: dict[int, Rule] = {}
    for name in modules:
        rules = [value for value in vars(find_module(name)).values() if isinstance(value, Rule)]
        if not rules:
            msg = f"Expected the module {name} to declare a rule with @kwtrace.rule, found none."
            raise KwtraceError(msg)
        found.update({id(rule): rule for rule in rules})
    return list(found.values())


def _run(options: argparse.Namespace, rules: list[Rule], *, everything: bool) -> int:
    if options.list:
        return _list(options, rules)
    out = options.out or _default_folder()
    if options.check:
        return _check(options, rules, out, everything=everything)
    report = generate(rules, out, jobs=options.jobs, keep_others=not everything, bar=_bar)
    print(report)
    rows = [{**dataclasses.asdict(rule), "failed": [list(pair) for pair in rule.failed]} for rule in report.rules]
    _write_json(options.json, {"torch": report.torch, "ok": report.ok, "changed": report.changed, "rules": rows})
    return 0 if report.ok else 1


def _default_folder() -> Path:
    try:
        return shipped_folder()
    except ModuleNotFoundError:
        return Path(kwtrace.library.__file__).parents[2] / "patterns_gen"


def _list(options: argparse.Namespace, rules: list[Rule]) -> int:
    listed = {rule.name: [str(v) for v in enumerate_variants(rule, read_domain(rule))] for rule in rules}
    for name, variants in listed.items():
        print(f"{name}: {len(variants)} variants")
        print("".join(f"  {variant}\n" for variant in variants), end="")
    _write_json(options.json, listed)
    return 0


def _check(options: argparse.Namespace, rules: list[Rule], out: Path, *, everything: bool) -> int:
    found = check(rules, out, jobs=options.jobs)
    if not everything:
        found = [difference for difference in found if difference.rule in {rule.name for rule in rules}]
    for difference in found:
        print(difference)
    if not found:
        print(f"{out} is up to date")
    _write_json(options.json, [dataclasses.asdict(difference) for difference in found])
    return 1 if found else 0


def _write_json(path: Path | None, content: object) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        msg = f"Expected to be able to write --json {path}, found: {error}."
        raise KwtraceError(msg) from error


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int], object]]:
    with tqdm(total=total, unit="variant", disable=None) as bar:
        yield bar.update


if __name__ == "__main__":
    sys.exit(main())
