"""Generated packages on disk: one module per rule under the torch version, a manifest, and an index."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kwtrace.errors import KwtraceError
from kwtrace.generation import RuleResult
from kwtrace.operators import schema_of
from kwtrace.patterns import AtMatch, Family, PatternSet
from kwtrace.source import render_module

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """What a manifest records of a rule."""

    module: str
    source: str
    axes: dict[str, list[str]]
    variants: int
    rows: int
    families: int
    digest: str
    sha256: str
    merged: list[list[str]] = field(default_factory=list)
    failed: list[list[str]] = field(default_factory=list)
    unmatched: list[list[str]] = field(default_factory=list)
    operators: dict[str, str] = field(default_factory=dict)
    verified: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest: versions, and an entry per rule."""

    torch: str
    kwtrace: str
    rules: dict[str, Entry]


def version_folder(out: Path, torch_version: str) -> Path:
    """Return the folder that holds the set for a torch version."""
    return out / f"torch_{torch_version.replace('.', '_')}"


def make_entry(result: RuleResult, text: str, module: str, source: str, axes: dict[str, list[str]]) -> Entry:
    """Return the manifest's entry for a generated rule."""
    return Entry(
        module=module,
        source=source,
        axes=axes,
        variants=result.variants,
        rows=sum(len(family.rows) for family in result.families),
        families=len(result.families),
        digest=PatternSet(result.families).digest,
        sha256=checksum(text),
        merged=[list(pair) for pair in result.merged],
        failed=[[variant, str(error)] for variant, error in result.failed],
        unmatched=[list(pair) for pair in result.unmatched],
        operators={name: schema_of(name) for name in operator_names(result.families)},
        verified=["dtype, size and device of the outputs, symbolically"],
    )


def operator_names(families: tuple[Family, ...]) -> list[str]:
    """Return the names of the operators in search and replacement graphs, sorted."""
    names = {op.target for family in families for op in family.skeleton.search}
    for family in families:
        if not isinstance(family.skeleton.replacement, AtMatch):
            names |= {call.target for call in family.skeleton.replacement.calls}
    return sorted(names)


def checksum(text: str) -> str:
    """Return a checksum of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest in a version's folder, or None if there is none that can be read."""
    try:
        raw = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        rules = {name: Entry(**entry) for name, entry in raw["rules"].items()}
        return Manifest(raw["torch"], raw["kwtrace"], rules)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def render_manifest(manifest: Manifest) -> str:
    """Return the text of a manifest."""
    rules = {name: asdict(entry) for name, entry in sorted(manifest.rules.items())}
    raw = {"torch": manifest.torch, "kwtrace": manifest.kwtrace, "rules": rules}
    return json.dumps(raw, indent=1, ensure_ascii=False) + "\n"


def render_index(manifest: Manifest) -> str:
    """Return the text of a version's ``__init__``."""
    digests = "".join(f"    {name!r}: {entry.digest!r},\n" for name, entry in sorted(manifest.rules.items()))
    head = f'"""Patterns for torch {manifest.torch}; made by kwtrace, not to be edited."""\n'
    return f"{head}\nRULES = {{\n{digests}}}\nMANIFEST = {checksum(render_manifest(manifest))!r}\n"


def render_root(manifests: Mapping[str, Manifest]) -> str:
    """Return the text of a package's ``__init__``, from the manifests of all its torch versions."""
    modules = {name: entry.module for _, m in sorted(manifests.items()) for name, entry in m.rules.items()}
    lines = "".join(f"        {name!r}: {module!r},\n" for name, module in sorted(modules.items()))
    return (
        '"""Patterns made by kwtrace, not to be edited; pass this module to kwtrace.options."""\n\n'
        "from kwtrace.loading import Package\n\n"
        f"PATTERNS = Package(\n    __name__,\n    {{\n{lines}    }},\n)\n"
    )


def render_rule(result: RuleResult, torch_version: str) -> str:
    """Return the text of a rule's module."""
    return render_module(result.rule, result.families, torch_version)


def read_manifests(out: Path) -> dict[str, Manifest]:
    """Return the manifests of a package by folder name."""
    found = {folder.name: read_manifest(folder) for folder in sorted(out.glob("torch_*"))}
    return {name: manifest for name, manifest in found.items() if manifest is not None}


def write_package(out: Path, manifest: Manifest, texts: Mapping[str, str]) -> None:
    """Write a version's set: the folder is made beside the old one and takes its place whole.

    Raises:
        KwtraceError: if the folder can't be written.

    """
    folder = version_folder(out, manifest.torch)
    try:
        out.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".kwtrace-", dir=out))
        try:
            _write(fresh, manifest, texts)
            _swap(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        _replace_file(out / "__init__.py", render_root({**read_manifests(out), folder.name: manifest}))
    except OSError as error:
        msg = f"Expected to be able to write the package {out}, found: {error}; choose another folder with --out."
        raise KwtraceError(msg) from error


def _write(folder: Path, manifest: Manifest, texts: Mapping[str, str]) -> None:
    folder.chmod(0o755)
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    (folder / MANIFEST).write_text(render_manifest(manifest), encoding="utf-8")
    (folder / "__init__.py").write_text(render_index(manifest), encoding="utf-8")


def _swap(fresh: Path, folder: Path) -> None:
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def recover(out: Path, torch_version: str) -> None:
    """Bring back the old folder, if a run was interrupted between the two renames that replace it."""
    folder = version_folder(out, torch_version)
    old = folder.with_name(f".{folder.name}.old")
    if old.exists() and not folder.exists():
        old.rename(folder)


def _replace_file(path: Path, text: str) -> None:
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    handle, name = tempfile.mkstemp(prefix=".kwtrace-", dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    Path(name).chmod(0o644)
    Path(name).replace(path)


def entry_axes_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return in words how a rule's axes changed."""
    lines = [
        f"axis {name}: {old.get(name, 'absent')} -> {new.get(name, 'absent')}"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]
    return [line.replace("'", "") for line in lines]
