"""Generated packages → pattern sets: cheap to import, from anywhere, for the torch version that runs."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import logging
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import rules_for_tests
from modules_for_tests import run_python, snapshot

import kwtrace as kt
from kwtrace.digests import torch_version
from kwtrace.generating import generate, trace
from kwtrace.loading import Package, as_pattern_set, cache_folder, read_folder

RULES = [rules_for_tests.relu_act, rules_for_tests.relu_enum, rules_for_tests.relu_scale]
_count = itertools.count()
VERSION = f"torch_{torch_version().replace('.', '_')}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a package that tests copy."""
    out = tmp_path_factory.mktemp("made") / "package"
    assert generate(RULES, out, jobs=1).ok
    return out


@pytest.fixture(scope="module")
def digest() -> str:
    """Return the digest of the rules, traced in memory."""
    return trace(*RULES).digest


@pytest.fixture
def package(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the dotted name of a copy of the package, importable in this test only."""
    name = f"loaded_{next(_count)}"
    shutil.copytree(made, tmp_path / name / "patterns")
    (tmp_path / name / "__init__.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    return f"{name}.patterns"


def folder_of(name: str) -> Path:
    """Return the folder of a package, which needn't be importable."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


def test_importing_kwtrace_and_a_package_imports_nothing_heavy(made: Path) -> None:
    """Importing kwtrace and a generated package imports nothing but their own modules and Python's."""
    code = (
        "import json, sys, torch; before = set(sys.modules); import kwtrace, package; "
        "import kwtrace.loading; after = set(sys.modules); "
        "patterns = package.PATTERNS; print(json.dumps([sorted(after - before), sorted(before)]))"
    )
    done = run_python("-c", code, folder=made.parent)
    assert done.returncode == 0, done.stderr
    new, old = json.loads(done.stdout)
    foreign = {name for name in new if name.split(".")[0] not in ("kwtrace", "package", *sys.stdlib_module_names)}
    assert foreign == set()
    for heavy in (
        "torch._inductor",
        "sympy",
        "torch.fx.experimental.symbolic_shapes",
        "kwtrace.tracing",
        "kwtrace.generating",
    ):
        assert heavy in old or heavy not in new
    assert "kwtrace.inductor" not in new
    assert "package.torch" not in "".join(new)


def test_loading_a_package_traces_and_compiles_nothing(made: Path, digest: str) -> None:
    """Reading the patterns, in a fresh process, imports neither Inductor nor the tracer nor the rules."""
    code = (
        "import json, sys, torch; before = set(sys.modules); import kwtrace, package; "
        "from kwtrace.loading import as_pattern_set; "
        "found = as_pattern_set(package); print(json.dumps([found.digest, sorted(set(sys.modules) - before)]))"
    )
    done = run_python("-c", code, folder=made.parent)
    assert done.returncode == 0, done.stderr
    found, new = json.loads(done.stdout)
    assert found == digest
    for name in (
        "torch._inductor",
        "torch.fx.experimental.proxy_tensor",
        "kwtrace.tracing",
        "kwtrace.generating",
        "kwtrace.domains",
        "tqdm",
    ):
        assert name not in new, name


def test_importing_kwtrace_changes_no_global_state() -> None:
    """Importing kwtrace leaves torch's settings and the logging configuration alone."""
    code = (
        "import logging, torch; state = lambda: (torch.get_default_dtype(), torch.is_grad_enabled(), "
        "logging.root.handlers[:], logging.root.level, logging.getLogger('kwtrace').handlers[:]); "
        "before = state(); import kwtrace; assert state() == before"
    )
    done = run_python("-W", "error", "-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_package_loads_by_dotted_name_once(package: str, digest: str) -> None:
    """A package inside another one loads by its dotted name; the second time gives the same object."""
    module = importlib.import_module(package)
    found = as_pattern_set(module)
    assert found.digest == digest
    assert found.rules == ("relu_act", "relu_enum", "relu_scale")
    assert as_pattern_set(module) is found
    assert as_pattern_set(module.PATTERNS) is found
    assert as_pattern_set(found) is found


def test_members_of_an_enum_are_the_identical_ones(package: str) -> None:
    """What is loaded has the rule's own Enum members and dtypes, so that ``select`` finds them."""
    found = as_pattern_set(importlib.import_module(package))
    mode = rules_for_tests.Mode.TWICE
    variants = found.select("relu_enum", mode=mode).variants
    assert len(variants) == 2
    assert all(dict(variant.axes)["mode"] is mode for variant in variants)


def test_a_package_loads_from_a_zip(made: Path, tmp_path: Path, digest: str) -> None:
    """A package in a zip on ``sys.path`` loads like any other."""
    archive = tmp_path / "packages.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in snapshot(made).items():
            file.writestr(f"zipped_patterns/{name}", content)
    code = (
        f"import sys; sys.path.insert(0, {str(archive)!r}); import zipped_patterns; "
        "from kwtrace.loading import as_pattern_set; print(as_pattern_set(zipped_patterns).digest)"
    )
    done = run_python("-c", code)
    assert done.stdout.strip() == digest, done.stderr


def test_a_package_loads_from_a_read_only_folder(package: str, digest: str) -> None:
    """Loading writes nothing into the package: a read-only one works, and stays as it was."""
    folder = folder_of(package)
    before = snapshot(folder)
    paths = [folder, *folder.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert as_pattern_set(importlib.import_module(package)).digest == digest
        assert snapshot(folder) == before
    finally:
        for path in paths:
            path.chmod(0o755)


def test_a_folder_is_read_by_path(made: Path, digest: str) -> None:
    """A version's folder can be read by path, whatever it is called, and leaves no modules behind."""
    before = set(sys.modules)
    assert read_folder(made / VERSION).digest == digest
    assert {name for name in set(sys.modules) - before if name.startswith("_kwtrace")} == set()


def test_a_folder_without_a_set_is_an_error(tmp_path: Path) -> None:
    """A folder that holds no set is a LoadError that says what to run."""
    with pytest.raises(kt.LoadError, match=r"Expected a generated set in .*run python -m kwtrace\.gen"):
        read_folder(tmp_path)


@pytest.mark.parametrize("value", [None, 3, "patterns_gen", json], ids=["None", "int", "str", "module"])
def test_what_is_no_package_is_an_error(value: object) -> None:
    """Something else than a set or package is a LoadError that shows it."""
    with pytest.raises(kt.LoadError, match=r"Expected a PatternSet or a package made by kwtrace\.gen, found "):
        as_pattern_set(value)


def test_a_module_that_is_missing_is_an_error(package: str) -> None:
    """A rule's module that the index names and that is gone is a StaleError that names it."""
    (folder_of(package) / VERSION / "relu_scale.py").unlink()
    with pytest.raises(
        kt.StaleError, match=rf"Expected the generated module {package}\.{VERSION}\.relu_scale, found none"
    ):
        as_pattern_set(importlib.import_module(package))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("FAMILIES = (", "SyntaxError"),
        ("import no_such_module", "ModuleNotFoundError"),
        ("1 / 0", "ZeroDivisionError"),
        ("", "FAMILIES"),
    ],
)
def test_a_module_that_does_not_import_is_an_error(package: str, text: str, found: str) -> None:
    """A broken generated module is a LoadError that names it, the reason, and what to run."""
    (folder_of(package) / VERSION / "relu_scale.py").write_text(text, encoding="utf-8")
    with pytest.raises(kt.LoadError) as caught:
        as_pattern_set(importlib.import_module(package))
    assert f"{package}.{VERSION}.relu_scale" in str(caught.value)
    assert found in str(caught.value)
    assert "kwtrace.gen" in str(caught.value)


@pytest.mark.slow
def test_equal_content_has_an_equal_digest_anywhere(made: Path, digest: str) -> None:
    """A digest is the same in a process with another hash seed, loaded or traced, in any order of the rules."""
    code = (
        "import package, rules_for_tests as r; from kwtrace.loading import as_pattern_set; import kwtrace as kt; "
        "print(as_pattern_set(package).digest, kt.trace(r.relu_scale, r.relu_enum, r.relu_act).digest)"
    )
    done = run_python("-c", code, folder=made.parent, PYTHONHASHSEED="2")
    assert done.stdout.split() == [digest, digest], done.stderr


def without_this_version(package: str) -> Path:
    """Turn a package into one that has a set for another torch version only; return its folder."""
    folder = folder_of(package)
    (folder / VERSION).rename(folder / "torch_1_0")
    return folder


def test_without_a_set_the_rules_are_traced_once_and_kept(
    package: str, tmp_path: Path, digest: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a set for this torch the rules are traced once into the cache, logged, and read from there later."""
    folder = without_this_version(package)
    before = snapshot(folder)
    cache = tmp_path / "cache"
    monkeypatch.setenv("KWTRACE_CACHE", str(cache))
    rules = {rule.name: rule.module for rule in RULES}
    with caplog.at_level(logging.WARNING, logger="kwtrace"):
        assert as_pattern_set(importlib.import_module(package)).digest == digest
    records = [record for record in caplog.records if record.name == "kwtrace"]
    assert len(records) == 1
    for part in (package, VERSION, str(cache)):
        assert part in records[0].getMessage()
    assert snapshot(folder) == before
    assert any(name.endswith("relu_act.py") for name in snapshot(cache))

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("something was traced")

    monkeypatch.setattr("kwtrace.generation.draft", refuse)
    monkeypatch.setattr("kwtrace.tracing.make_fx", refuse)
    kept = snapshot(cache)
    assert Package(package, rules).load().digest == digest
    assert snapshot(cache) == kept


@pytest.mark.slow
def test_an_unguarded_script_loads_a_package_without_a_set(package: str, tmp_path: Path) -> None:
    """Tracing on loading starts no processes that would run the user's script again."""
    without_this_version(package)
    script = tmp_path / "script.py"
    script.write_text(
        "print('started')\nfrom kwtrace.loading import as_pattern_set\n"
        f"import {package} as p\nprint(len(as_pattern_set(p).variants))\n",
        encoding="utf-8",
    )
    done = run_python(str(script), folder=tmp_path, KWTRACE_CACHE=str(tmp_path / "cache"))
    assert done.stdout.split() == ["started", "9"], done.stderr


def test_a_cache_that_cannot_be_written_is_an_error_with_the_path(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache folder that can't be made is one of kwtrace's own errors, naming the folder."""
    without_this_version(package)
    (tmp_path / "cache").write_text("a file", encoding="utf-8")
    monkeypatch.setenv("KWTRACE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(kt.KwtraceError, match="cache"):
        as_pattern_set(importlib.import_module(package))


def test_rules_that_do_not_import_are_an_error(package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a set and without the rules' module there is nothing to use: a LoadError that names the module."""
    without_this_version(package)
    monkeypatch.setenv("KWTRACE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(kt.LoadError, match="Expected the module no_such_rules to import"):
        Package(package, {"rule": "no_such_rules"}).load()


def test_the_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``KWTRACE_CACHE`` wins; else it is ``kwtrace`` in the user's cache folder."""
    monkeypatch.setenv("KWTRACE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.setenv("KWTRACE_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "kwtrace"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "kwtrace"
