"""Generated packages on disk: written whole or not at all, recovered, and read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import rules_for_tests
from modules_for_tests import snapshot

from kwtrace import packages
from kwtrace.digests import torch_version
from kwtrace.errors import KwtraceError
from kwtrace.generating import generate
from kwtrace.packages import Entry, Manifest

RULES = [rules_for_tests.relu_scale]
VERSION = f"torch_{torch_version().replace('.', '_')}"


def entry(**changes: object) -> Entry:
    """Return a manifest's entry."""
    base = {
        "module": "m",
        "source": "s",
        "axes": {"a": ["1"]},
        "variants": 1,
        "rows": 1,
        "families": 1,
        "digest": "d",
        "sha256": "h",
    }
    return Entry(**{**base, **changes})  # type: ignore[arg-type]


def manifest(torch: str = "2.13", **rules: Entry) -> Manifest:
    """Return a manifest."""
    return Manifest(torch, "0.1.0", rules)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a package of one rule."""
    out = tmp_path / "package"
    assert generate(RULES, out, jobs=1).ok
    return out


def test_a_manifest_reads_back_equal(tmp_path: Path) -> None:
    """What is written as a manifest is read as the same, whatever text is in it."""
    made = manifest(rule=entry(failed=[["v", 'a "quoted"\nläne']]), other=entry(operators={"a.b": "schema"}))
    (tmp_path / packages.MANIFEST).write_text(packages.render_manifest(made), encoding="utf-8")
    assert packages.read_manifest(tmp_path) == made


def test_a_manifest_is_sorted_json() -> None:
    """The order of rules doesn't change the text, which ends with a newline."""
    text = packages.render_manifest(manifest(b=entry(), a=entry()))
    assert text == packages.render_manifest(manifest(a=entry(), b=entry()))
    assert list(json.loads(text)["rules"]) == ["a", "b"]
    assert text.endswith("}\n")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"torch": "2.13"}', '{"torch": "2.13", "kwtrace": "0", "rules": {"a": {"odd": 1}}}']
)
def test_a_manifest_that_is_no_manifest_is_none(tmp_path: Path, text: str) -> None:
    """Broken JSON, or JSON of another form, is no manifest, and no error."""
    (tmp_path / packages.MANIFEST).write_text(text, encoding="utf-8")
    assert packages.read_manifest(tmp_path) is None
    assert packages.read_manifest(tmp_path / "nowhere") is None


def test_the_manifest_records_what_was_made(package: Path) -> None:
    """A rule's entry has its module, digests, axes, counts, the schemas of its operators, and what was verified."""
    found = packages.read_manifest(package / VERSION)
    assert found is not None
    assert (found.torch, list(found.rules)) == (torch_version(), ["relu_scale"])
    made = found.rules["relu_scale"]
    assert (made.module, made.variants, made.rows, made.families) == ("rules_for_tests", 1, 1, 1)
    assert made.axes == {"device": ["'cpu'"]}
    assert made.sha256 == packages.checksum((package / VERSION / "relu_scale.py").read_text(encoding="utf-8"))
    assert set(made.operators) == {"aten.relu.default", "aten.mul.Tensor", "kwtrace_toys.scaled.default"}
    assert made.operators["kwtrace_toys.scaled.default"] == "kwtrace_toys::scaled(Tensor x, *, float scale) -> Tensor"
    assert made.verified


def test_the_root_names_the_rules_of_all_versions(tmp_path: Path) -> None:
    """A package's ``__init__`` knows the module of every rule, of whichever torch version."""
    text = packages.render_root(
        {"torch_2_13": manifest(a=entry(module="m.a")), "torch_2_15": manifest("2.15", b=entry(module="m.b"))}
    )
    made: dict[str, object] = {"__name__": "somewhere"}
    exec(text, made)  # noqa: S102 - a generated module is Python
    assert getattr(made["PATTERNS"], "name", None) == "somewhere"
    assert getattr(made["PATTERNS"], "rules", None) == {"a": "m.a", "b": "m.b"}


def test_a_version_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """The folder is named after torch's minor version."""
    assert packages.version_folder(tmp_path, "2.13") == tmp_path / "torch_2_13"


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["disk full", "interrupt"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_interrupted_write_leaves_the_old_package_whole(
    package: Path, monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException
) -> None:
    """A write that fails at any file leaves every byte of the old package and nothing beside it."""
    before = snapshot(package)
    written = 0
    write = Path.write_text

    def failing(path: Path, text: str, **options: str) -> int:
        nonlocal written
        if package in path.parents:
            if written == after:
                write(path, text[: len(text) // 2], **options)
                raise error
            written += 1
        return write(path, text, **options)

    monkeypatch.setattr(Path, "write_text", failing)
    expected = KwtraceError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        generate([rules_for_tests.relu_act], package, jobs=1)
    assert snapshot(package) == before
    assert sorted(path.name for path in package.iterdir()) == ["__init__.py", VERSION]


def interrupt_between_renames(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a generation that is killed after the old folder was renamed and before the new one took its place."""
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if Path(target).name == VERSION:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            generate([rules_for_tests.relu_act], package, jobs=1)


def test_a_write_that_was_killed_between_two_renames_is_recovered(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window between the two renames that swap the folders: the old set is back after the next run or recovery."""
    before = snapshot(package)
    interrupt_between_renames(package, monkeypatch)
    packages.recover(package, torch_version())
    assert snapshot(package) == before
    interrupt_between_renames(package, monkeypatch)
    report = generate(RULES, package, jobs=1)
    assert [rule.status for rule in report.rules] == ["unchanged"]
    assert snapshot(package) == before


def test_recovery_leaves_a_whole_package_alone(package: Path) -> None:
    """Where nothing was interrupted recovery changes nothing."""
    before = snapshot(package)
    packages.recover(package, torch_version())
    packages.recover(package / "nowhere", torch_version())
    assert snapshot(package) == before


def test_sets_of_other_versions_are_kept(package: Path) -> None:
    """Generating touches no other version's folder, and the root names that set's rules too."""
    other = package / "torch_1_0"
    other.mkdir()
    kept = {"old": entry(module="rules.of.old")}
    (other / packages.MANIFEST).write_text(packages.render_manifest(manifest("1.0", **kept)), encoding="utf-8")
    (other / "old.py").write_text("FAMILIES = ()\n", encoding="utf-8")
    before = snapshot(other)
    assert generate([rules_for_tests.relu_act], package, jobs=1).ok
    assert snapshot(other) == before
    root = (package / "__init__.py").read_text(encoding="utf-8")
    assert "'old': 'rules.of.old'" in root
    assert "'relu_act': 'rules_for_tests'" in root
    assert "relu_scale" not in root


def test_files_are_readable_by_all(package: Path) -> None:
    """What a package is written through, temporary files, leaves no private permissions behind."""
    for path in (*package.rglob("*.py"), package / VERSION):
        assert path.stat().st_mode & 0o444 == 0o444


def test_differences_of_axes_are_words() -> None:
    """A changed, a new and a removed axis are named with their values."""
    old, new = {"a": ["1"], "b": ["1"], "c": ["2"]}, {"a": ["5"], "b": ["1"], "d": ["3"]}
    changed, removed, added = packages.entry_axes_difference(old, new)
    assert changed.startswith("axis a: ")
    assert changed.index("1") < changed.index(" -> ") < changed.index("5")
    assert removed.startswith("axis c: ")
    assert removed.endswith(" -> absent")
    assert added.startswith("axis d: absent -> ")
