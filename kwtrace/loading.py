"""Generated packages → pattern sets, for the torch version that runs."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kwtrace.errors import KwtraceError, LoadError, StaleError
from kwtrace.patterns import PatternSet

log = logging.getLogger("kwtrace")


class Package:
    """A generated package; importing it reads nothing, its first use reads the set for the running torch."""

    def __init__(self, name: str, rules: Mapping[str, str]) -> None:
        """Take the package's name, and the module of each rule for torch versions that it has no set for."""
        self.name = name
        self.rules = dict(rules)
        self._loaded: PatternSet | None = None

    def load(self) -> PatternSet:
        """Return the patterns for the running torch version.

        Without a set for it, the rules are traced once and kept in the user's cache folder.

        Raises:
            LoadError: if a generated module can't be imported.
            StaleError: if a generated module isn't the one that the package's index names.

        """
        if self._loaded is None:
            folder = f"torch_{'_'.join(torch.__version__.split('.')[:2])}"
            found = _import(f"{self.name}.{folder}")
            self._loaded = self._trace(folder) if found is None else _read(found)
        return self._loaded

    def _trace(self, folder: str) -> PatternSet:
        from kwtrace.generating import generate
        from kwtrace.generation import RuleReference

        name = f"{self.name.replace('.', '_')}_{'_'.join(sorted(self.rules))}"
        out = cache_folder() / name
        log.warning(
            "%s: expected a set for torch %s, found none; its rules are traced once and kept in %s",
            self.name,
            folder,
            out,
        )
        rules = [RuleReference(module, rule).load() for rule, module in sorted(self.rules.items())]
        generate(rules, out, jobs=1)  # a pool would run the user's script again in each process
        return read_folder(out / folder)


def cache_folder() -> Path:
    """Return the folder for sets that were traced because a package had none: ``KWTRACE_CACHE`` or the user's cache."""
    chosen = os.environ.get("KWTRACE_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kwtrace"


def as_pattern_set(patterns: Any) -> PatternSet:
    """Return the pattern set that ``patterns`` stands for: itself, a generated package, or its module.

    One that holds no patterns is warned of, since nothing that it is used for can happen.

    Raises:
        LoadError: if it is none of these.

    """
    package = getattr(patterns, "PATTERNS", patterns)
    if isinstance(package, PatternSet | Package):
        found, name = (package.load(), package.name) if isinstance(package, Package) else (package, "a pattern set")
        if not found.families:
            _warn_of_nothing(name)
        return found
    msg = f"Expected a PatternSet or a package made by kwtrace.gen, found {patterns!r}."
    raise LoadError(msg)


@functools.cache  # once per process and package
def _warn_of_nothing(name: str) -> None:
    log.warning("%s: expected patterns to rewrite with, found no pattern in it; nothing will be rewritten", name)


def read_folder(folder: Path) -> PatternSet:
    """Read a version's folder by path, whatever it is called.

    Raises:
        LoadError: if it can't be imported.

    """
    name = f"_kwtrace_{abs(hash(str(folder)))}"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        msg = f"Expected a generated set in {folder}, found none; run python -m kwtrace.gen."
        raise LoadError(msg)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        return _read(module)
    except OSError as error:
        msg = f"Expected a generated set in {folder}, found: {error}; run python -m kwtrace.gen."
        raise LoadError(msg) from error
    finally:
        for loaded in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
            del sys.modules[loaded]


def _read(index: ModuleType) -> PatternSet:
    families: list[Any] = []
    for rule in _content(index, "RULES"):
        module = _import(f"{index.__name__}.{rule}")
        if module is None:
            msg = f"Expected the generated module {index.__name__}.{rule}, found none; run python -m kwtrace.gen."
            raise StaleError(msg)
        families += _content(module, "FAMILIES")
    return PatternSet(tuple(families))


def _content(module: ModuleType, name: str) -> Any:
    if not hasattr(module, name):
        msg = f"Expected {name} in the generated module {module.__name__}, found none; run python -m kwtrace.gen."
        raise LoadError(msg)
    return getattr(module, name)


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return None
        raise LoadError(_unreadable(name, error)) from error
    except KwtraceError:
        raise
    except Exception as error:
        raise LoadError(_unreadable(name, error)) from error


def _unreadable(name: str, error: Exception) -> str:
    found = f"{type(error).__name__}: {error}"
    return f"Expected the generated module {name} to import, found {found}; run python -m kwtrace.gen."
