"""``python -m kwtrace.gen``: what it writes, prints and returns."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from modules_for_tests import DOUBLE, FAILING, NEGATE, run_python, snapshot, write_module

from kwtrace import gen
from kwtrace.digests import torch_version

Run = Callable[..., int]
VERSION = f"torch_{torch_version().replace('.', '_')}"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on ``sys.path`` for modules of rules, whose imports leave no compiled files."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


@pytest.fixture
def out(home: Path) -> Path:
    """Return the folder of the package to generate."""
    return home / "patterns"


def run(module: str, out: Path, *arguments: str) -> int:
    """Run the command in this process, with one job, and return its exit code."""
    return gen.main([module, "--out", str(out), "--jobs", "1", *arguments])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a package made from ``rules_for_tests``, which tests copy before they change it."""
    package = tmp_path_factory.mktemp("made") / "package"
    assert run("rules_for_tests", package) == 0
    return package


@pytest.fixture
def package(made: Path, tmp_path: Path) -> Path:
    """Return a copy of the package made from ``rules_for_tests``."""
    return Path(shutil.copytree(made, tmp_path / "package"))


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run the command with arguments that argparse refuses; return the exit code and what it said."""
    with pytest.raises(SystemExit) as caught:
        gen.main(list(arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code, capsys.readouterr().err


def test_writes_a_module_per_rule_a_manifest_and_two_inits(home: Path, out: Path) -> None:
    """A package holds, under the torch version, a module per rule, the index and the manifest, and nothing else."""
    write_module(home, "gen_layout", DOUBLE, NEGATE)
    assert run("gen_layout", out) == 0
    assert set(snapshot(out)) == {
        "__init__.py",
        f"{VERSION}/__init__.py",
        f"{VERSION}/double.py",
        f"{VERSION}/manifest.json",
        f"{VERSION}/negate.py",
    }


def test_prints_a_table_with_a_line_per_rule(home: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table says per rule how many variants, rows and families there are, and what was rejected."""
    write_module(home, "gen_table", DOUBLE, NEGATE)
    run("gen_table", out)
    head, first, second, *rest = capsys.readouterr().out.splitlines()
    assert head.split() == ["rule", "status", "variants", "rows", "families", "merged", "rejected", "seconds"]
    assert first.split()[:7] == ["double", "traced", "2", "2", "1", "0", "0"]
    assert second.split()[:7] == ["negate", "traced", "1", "1", "1", "0", "0"]
    assert rest == []


def test_a_second_run_says_that_nothing_changed_and_traces_nothing(
    package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing changed no rule is traced, no file is written, and the run says so."""

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("something was traced")

    before = snapshot(package)
    monkeypatch.setattr("kwtrace.generation.draft", refuse)
    monkeypatch.setattr("kwtrace.tracing.make_fx", refuse)
    monkeypatch.setattr("kwtrace.packages.write_package", refuse)
    assert run("rules_for_tests", package) == 0
    printed = capsys.readouterr().out
    assert f"nothing changed in {package}" in printed
    assert [line.split()[1] for line in printed.splitlines()[1:4]] == ["unchanged"] * 3
    assert snapshot(package) == before


def test_check_of_a_fresh_package_exits_0(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--check says that the package is up to date, and touches nothing."""
    before = snapshot(package)
    assert run("rules_for_tests", package, "--check") == 0
    assert "is up to date" in capsys.readouterr().out
    assert snapshot(package) == before


def swap_character(path: Path, at: str) -> None:
    """Change one character, the one after the first ``at`` in a file, to another one."""
    text = path.read_text(encoding="utf-8")
    place = text.index(at) + len(at)
    path.write_text(f"{text[:place]}{'1' if text[place] != '1' else '2'}{text[place + 1 :]}", encoding="utf-8")


@pytest.mark.parametrize(
    ("file", "at", "named"),
    [
        ("relu_act.py", "aten.relu.default", "relu_act: relu_act.py was changed by hand"),
        ("relu_act.py", "not to be edited", "relu_act: relu_act.py was changed by hand"),
        ("__init__.py", "'relu_act': '", f"package: {VERSION}/__init__.py is not what was generated"),
        ("__init__.py", "not to be edited", f"package: {VERSION}/__init__.py is not what was generated"),
        ("../__init__.py", "'relu_act': '", "package: __init__.py is not what was generated"),
        ("../__init__.py", "not to be edited", "package: __init__.py is not what was generated"),
        ("manifest.json", '"source": "', "relu_act: "),
        ("manifest.json", '"sha256": "', "relu_act: "),
        ("manifest.json", '"digest": "', "package: "),
        ("manifest.json", '"module": "', ""),
        ("manifest.json", '"negate": [\n     "', "relu_act: axis negate: "),
        ("manifest.json", "aten::relu(", "relu_act: operator aten.relu.default"),
        ("manifest.json", '"variants": ', "package: "),
        ("manifest.json", '"rows": ', "package: "),
        ("manifest.json", '"verified": [\n    "', "package: "),
        ("manifest.json", '"merge', "package: "),
        ("manifest.json", '"torch": "', "package: "),
        ("manifest.json", '"kwtrace": "', ""),
    ],
)
def test_check_finds_one_changed_character(
    package: Path, capsys: pytest.CaptureFixture[str], file: str, at: str, named: str
) -> None:
    """--check exits 1 after one character of any file was changed, and names the rule, or the file, that differs."""
    swap_character((package / VERSION / file).resolve(), at)
    assert run("rules_for_tests", package, "--check") == 1
    assert named in capsys.readouterr().out


def test_check_shows_how_a_module_differs(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--check prints the difference of a changed module from what would be generated."""
    path = package / VERSION / "relu_act.py"
    path.write_text(path.read_text(encoding="utf-8").replace("'twice'", "'thrice'"), encoding="utf-8")
    assert run("rules_for_tests", package, "--check") == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("-") and "'twice'" in line for line in lines)
    assert any(line.startswith("+") and "'thrice'" in line for line in lines)


@pytest.mark.parametrize("file", ["relu_act.py", "manifest.json", "__init__.py", "../__init__.py"])
def test_check_finds_a_missing_file(package: Path, capsys: pytest.CaptureFixture[str], file: str) -> None:
    """--check exits 1 when a generated file is missing."""
    (package / VERSION / file).resolve().unlink()
    assert run("rules_for_tests", package, "--check") == 1
    assert "up to date" not in capsys.readouterr().out


def test_check_finds_a_file_that_was_not_generated(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--check exits 1 when a module lies in the package that no rule made."""
    (package / VERSION / "stray.py").write_text("", encoding="utf-8")
    assert run("rules_for_tests", package, "--check") == 1
    assert f"{VERSION}/stray.py was not generated" in capsys.readouterr().out


def test_generate_repairs_a_changed_package(package: Path) -> None:
    """A run after a file was changed, whichever, brings the same bytes back."""
    before = snapshot(package)
    swap_character(package / VERSION / "relu_scale.py", "aten.relu.default")
    (package / VERSION / "stray.py").write_text("", encoding="utf-8")
    (package / "__init__.py").unlink()
    assert run("rules_for_tests", package) == 0
    assert snapshot(package) == before


def test_check_names_the_axis_whose_domain_changed(home: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After one value of a domain was changed --check exits 1 and names rule, axis and both domains."""
    write_module(home, "gen_domain", DOUBLE, NEGATE)
    run("gen_domain", out)
    write_module(home, "gen_domain", DOUBLE.replace('OneOf("none", "twice")', 'OneOf("none", "never")'), NEGATE)
    capsys.readouterr()
    assert run("gen_domain", out, "--check") == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("double: axis mode: ")
    assert "twice" in line
    assert "never" in line


def test_check_notices_a_changed_function(home: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After the body of a replacement was changed --check exits 1 and names the rule, and that rule only."""
    write_module(home, "gen_body", DOUBLE, NEGATE)
    run("gen_body", out)
    write_module(
        home, "gen_body", DOUBLE, NEGATE.replace("relu_act(x, negate=True)", "relu_act(x, negate=True, mode='twice')")
    )
    capsys.readouterr()
    assert run("gen_body", out, "--check") == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("negate: ")


def test_check_without_a_package_exits_1(home: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--check of a folder that holds nothing exits 1, says what to run, and makes no folder."""
    assert run("rules_for_tests", out, "--check") == 1
    assert "run python -m kwtrace.gen" in capsys.readouterr().out
    assert not out.exists()


def test_a_changed_rule_alone_is_traced_again(home: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two rules, the one that changed is traced again, and the other's module keeps its bytes."""
    write_module(home, "gen_partial", DOUBLE, NEGATE)
    run("gen_partial", out)
    before = snapshot(out)[f"{VERSION}/negate.py"]
    write_module(home, "gen_partial", DOUBLE.replace('OneOf("none", "twice")', 'OneOf("none", "never")'), NEGATE)
    capsys.readouterr()
    assert run("gen_partial", out) == 0
    statuses = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]]
    assert statuses == [["double", "traced"], ["negate", "unchanged"]]
    assert snapshot(out)[f"{VERSION}/negate.py"] == before


def test_only_keeps_the_other_rules(home: Path, out: Path) -> None:
    """--only traces the rules whose names match, and leaves the others in the package as they are."""
    write_module(home, "gen_only", DOUBLE, NEGATE)
    run("gen_only", out)
    before = snapshot(out)
    write_module(
        home, "gen_only", DOUBLE.replace('"none", "twice"', '"none"'), NEGATE.replace("relu(x), n", "relu(x),  n")
    )
    assert run("gen_only", out, "--only", "dou*") == 0
    after = snapshot(out)
    assert after[f"{VERSION}/negate.py"] == before[f"{VERSION}/negate.py"]
    assert after[f"{VERSION}/double.py"] != before[f"{VERSION}/double.py"]
    assert set(after) == set(before)


def test_check_with_only_looks_at_the_chosen_rules(home: Path, out: Path) -> None:
    """--check --only exits 0 though another rule is stale, and 1 if a chosen one is."""
    write_module(home, "gen_check_only", DOUBLE, NEGATE)
    run("gen_check_only", out)
    write_module(home, "gen_check_only", DOUBLE.replace('"none", "twice"', '"none"'), NEGATE)
    assert run("gen_check_only", out, "--check", "--only", "negate") == 0
    assert run("gen_check_only", out, "--check", "--only", "double") == 1


def test_only_that_matches_nothing_is_a_usage_error(home: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--only without a matching rule exits 2 and names the rules there are."""
    write_module(home, "gen_none", DOUBLE, NEGATE)
    code, said = fails(capsys, "gen_none", "--out", str(out), "--only", "zzz*")
    assert code == 2
    assert "zzz*" in said
    assert "double" in said
    assert "negate" in said
    assert not out.exists()


def test_a_removed_rule_leaves_the_package(home: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rule that is declared no more is stale for --check, and the next run drops it everywhere."""
    write_module(home, "gen_removed", DOUBLE, NEGATE)
    run("gen_removed", out)
    write_module(home, "gen_removed", DOUBLE)
    assert run("gen_removed", out, "--check") == 1
    assert "negate: is in the package, but is no rule any more" in capsys.readouterr().out
    assert run("gen_removed", out) == 0
    files = snapshot(out)
    assert f"{VERSION}/negate.py" not in files
    assert all(b"negate'" not in content for name, content in files.items() if name.endswith("__init__.py"))
    assert list(json.loads(files[f"{VERSION}/manifest.json"])["rules"]) == ["double"]


def test_a_variant_that_raises_is_reported_and_the_others_are_written(
    home: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One variant that fails: exit code 1, table and manifest say which and why, the others are generated."""
    write_module(home, "gen_failing", FAILING, NEGATE)
    assert run("gen_failing", out) == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[1].split()[:7] == ["failing", "traced", "2", "1", "1", "0", "1"]
    (reason,) = [line for line in printed.splitlines() if line.startswith("rejected: ")]
    assert "failing[mode='twice', device='cpu']" in reason
    assert "ValueError: no twice today" in reason
    entry = json.loads(snapshot(out)[f"{VERSION}/manifest.json"])["rules"]["failing"]
    assert (entry["variants"], entry["rows"]) == (2, 1)
    ((variant, why),) = entry["failed"]
    assert variant == "failing[mode='twice', device='cpu']"
    assert "no twice today" in why
    assert b"'none'" in snapshot(out)[f"{VERSION}/failing.py"]
    assert b"'twice'" not in snapshot(out)[f"{VERSION}/failing.py"]


def test_check_of_a_package_with_failed_variants_exits_1(
    home: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--check doesn't call a package good that its own generation called failed."""
    write_module(home, "gen_failed_check", FAILING)
    run("gen_failed_check", out)
    capsys.readouterr()
    assert run("gen_failed_check", out, "--check") == 1
    assert "no twice today" in capsys.readouterr().out


def test_a_failed_variant_is_tried_again(home: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rule with failed variants isn't called unchanged: the next run traces it again, and fails again."""
    write_module(home, "gen_again", FAILING)
    run("gen_again", out)
    capsys.readouterr()
    assert run("gen_again", out) == 1
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["failing", "traced"]


def test_a_rule_that_is_declared_wrongly_fails_alone(home: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong declaration fails its rule with the reason, exit code 1; the other rules are generated."""
    write_module(
        home, "gen_wrong", DOUBLE.replace("Annotated[str, kt.OneOf(", "str, other: Annotated[str, kt.OneOf("), NEGATE
    )
    assert run("gen_wrong", out) == 1
    printed = capsys.readouterr().out
    assert "Rule double, parameter mode: expected a domain, found plain str" in printed
    assert set(json.loads(snapshot(out)[f"{VERSION}/manifest.json"])["rules"]) == {"negate"}


def test_an_output_folder_that_cannot_be_made_is_one_sentence(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file where the folder should be: exit code 1, one line that names the path and --out, the file unharmed."""
    write_module(home, "gen_unwritable", NEGATE)
    path = home / "file"
    path.write_text("mine", encoding="utf-8")
    for out in (path, path / "below"):
        assert run("gen_unwritable", out) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: Expected to be able to write the package ")
        assert str(out) in line
        assert "--out" in line
    assert path.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
        ("def broken(:", "SyntaxError"),
        ("raise RuntimeError('not today')", "RuntimeError: not today"),
    ],
)
def test_a_module_that_does_not_import_is_one_sentence(
    home: Path, out: Path, capsys: pytest.CaptureFixture[str], text: str, found: str
) -> None:
    """A module that fails to import: exit code 1 and one line that names module and reason."""
    (home / "gen_broken.py").write_text(text, encoding="utf-8")
    sys.modules.pop("gen_broken", None)
    assert run("gen_broken", out) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: Expected the module gen_broken to import, found ")
    assert found in line
    assert not out.exists()


def test_a_module_that_does_not_exist_is_one_sentence(
    home: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A module that isn't there: exit code 1 and one line that names it."""
    assert run("gen_no_such_module", out) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "Expected the module gen_no_such_module to import" in line


def test_a_module_without_rules_is_one_sentence(home: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A module that declares no rule: exit code 1 and one line that says how to declare one."""
    write_module(home, "gen_empty")
    assert run("gen_empty", out) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "Expected the module gen_empty to declare a rule with @kwtrace.rule, found none" in line


def test_two_rules_of_one_name_are_one_sentence(home: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two rules of one name in two modules: exit code 1 and one line that names both modules."""
    write_module(home, "gen_first", DOUBLE)
    write_module(home, "gen_second", DOUBLE)
    assert gen.main(["gen_first", "gen_second", "--out", str(out), "--jobs", "1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "Expected distinct rule names, found double in gen_first and " in line
    assert "gen_second" in line


def test_a_rule_imported_into_two_modules_is_one_rule(home: Path, out: Path) -> None:
    """A rule that a second module imports is the same rule, no clash of names."""
    write_module(home, "gen_origin", NEGATE)
    (home / "gen_importer.py").write_text("from gen_origin import negate\n", encoding="utf-8")
    sys.modules.pop("gen_importer", None)
    assert gen.main(["gen_origin", "gen_importer", "--out", str(out), "--jobs", "1"]) == 0


def test_modules_of_your_own_need_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A module without --out is a usage error that says to name the folder."""
    code, said = fails(capsys, "rules_for_tests")
    assert code == 2
    assert "--out" in said


@pytest.mark.parametrize("jobs", ["0", "-1", "two", "1.5"])
def test_jobs_that_are_no_positive_number_are_a_usage_error(capsys: pytest.CaptureFixture[str], jobs: str) -> None:
    """--jobs takes a positive number; anything else exits 2 and is quoted."""
    code, said = fails(capsys, "rules_for_tests", "--out", "unused", f"--jobs={jobs}")
    assert code == 2
    assert repr(jobs) in said


def test_an_unknown_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """An option that doesn't exist exits 2."""
    assert fails(capsys, "--chekc")[0] == 2


def test_list_names_every_variant_and_writes_nothing(home: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--list prints rules and variants without tracing or writing."""
    write_module(home, "gen_list", DOUBLE, NEGATE)
    assert run("gen_list", out, "--list") == 0
    assert capsys.readouterr().out.splitlines() == [
        "double: 2 variants",
        "  double[mode='none', device='cpu']",
        "  double[mode='twice', device='cpu']",
        "negate: 1 variants",
        "  negate[device='cpu']",
    ]
    assert not out.exists()


def test_json_holds_what_the_table_says(home: Path, out: Path) -> None:
    """--json writes versions, outcome and a record per rule, failures and all, next to the table."""
    write_module(home, "gen_json", FAILING, NEGATE)
    assert run("gen_json", out, "--json", str(home / "report.json")) == 1
    report = json.loads((home / "report.json").read_text(encoding="utf-8"))
    assert (report["torch"], report["ok"], report["changed"]) == (torch_version(), False, True)
    failing, negate = report["rules"]
    assert (failing["rule"], failing["variants"], failing["rows"]) == ("failing", 2, 1)
    assert "no twice today" in failing["failed"][0][1]
    assert (negate["rule"], negate["status"], negate["failed"]) == ("negate", "traced", [])


def test_json_of_list_and_check(home: Path, out: Path) -> None:
    """--json goes with --list (variants per rule) and with --check (differences)."""
    write_module(home, "gen_json_more", DOUBLE)
    path = home / "report.json"
    run("gen_json_more", out, "--list", "--json", str(path))
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "double": ["double[mode='none', device='cpu']", "double[mode='twice', device='cpu']"]
    }
    assert run("gen_json_more", out, "--check", "--json", str(path)) == 1
    (difference,) = json.loads(path.read_text(encoding="utf-8"))
    assert difference["rule"] == "package"
    assert "found none" in difference["text"]


def test_json_that_cannot_be_written_is_one_sentence(home: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unwritable --json file: exit code 1 and one line that names it."""
    write_module(home, "gen_json_file", NEGATE)
    assert run("gen_json_file", out, "--list", "--json", str(home)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "--json" in line
    assert str(home) in line


@pytest.mark.slow
def test_text_is_the_same_whatever_the_hash_seed_and_the_number_of_jobs(tmp_path: Path) -> None:
    """Another process, with another hash seed and two workers, writes the bytes that this one does."""
    first, second = tmp_path / "a", tmp_path / "b"
    assert run("rules_for_tests", first, "--only", "relu_*") == 0
    arguments = ["rules_for_tests", "--only", "relu_*", "--out", str(second), "--jobs", "2"]
    done = run_python("-m", "kwtrace.gen", *arguments, PYTHONHASHSEED="2")
    assert done.returncode == 0, done.stderr
    assert snapshot(first) == snapshot(second)
    assert run("rules_for_tests", second, "--check") == 0
