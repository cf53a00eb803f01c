"""Modules of rules that a test writes, imports, changes and imports again; and interpreters of its own."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).parent
PATHS = (str(TESTS), str(TESTS.parent))

HEAD = '''"""Rules that a test wrote."""

from enum import Enum
from typing import Annotated, Literal

import ops_for_tests as ops
import torch
from torch import Tensor

import kwtrace as kt

Vector = Annotated[Tensor, kt.Shape("n>1"), torch.float32]
'''

DOUBLE = """
@kt.rule(devices=("cpu",))
def double(x: Vector, *, mode: Annotated[str, kt.OneOf("none", "twice")]) -> Tensor:
    return ops.act(torch.relu(x), mode=mode)


@double.replacement
def _(x, *, mode):
    return ops.relu_act(x, mode=mode)
"""

NEGATE = """
@kt.rule(devices=("cpu",))
def negate(x: Vector) -> Tensor:
    return ops.act(torch.relu(x), negate=True)


@negate.replacement
def _(x):
    return ops.relu_act(x, negate=True)
"""

FAILING = """
@kt.rule(devices=("cpu",))
def failing(x: Vector, *, mode: Annotated[str, kt.OneOf("none", "twice")]) -> Tensor:
    if mode == "twice":
        raise ValueError("no twice today")
    return ops.act(torch.relu(x), mode=mode)


@failing.replacement
def _(x, *, mode):
    return ops.relu_act(x, mode=mode)
"""


def write_module(folder: Path, name: str, *parts: str) -> Path:
    """Write a module of rules that `HEAD` begins, and forget what was imported under its name."""
    path = folder / f"{name}.py"
    path.write_text("\n".join((HEAD, *parts)), encoding="utf-8")
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return path


def import_module(folder: Path, name: str, *parts: str) -> ModuleType:
    """Write a module of rules and import it; its folder must be on ``sys.path``."""
    write_module(folder, name, *parts)
    return importlib.import_module(name)


def run_python(*arguments: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter that finds kwtrace, the tests' modules and those in ``folder``."""
    paths = (*PATHS, *([str(folder)] if folder else []))
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning:kwtrace", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1", **variables},
        cwd=folder or TESTS,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return every file under ``folder`` with its content, compiled ones aside."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
