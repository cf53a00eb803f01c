"""``python -m kwtrace.explain FILE.py:function RULES``: why rules don't match what torch.compile makes of a function.

As a name in Python, `kwtrace.explain` is a function; this module is its command line, and can't be imported.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import kwtrace as kt

if __name__ != "__main__":
    msg = "kwtrace.explain is a function, and a command; call kwtrace.explain, or run python -m kwtrace.explain"
    raise ImportError(msg)


def main(arguments: list[str] | None = None) -> int:
    """Print what every rule does in each graph of the function; return 2 if function, inputs or rules aren't there."""
    parser = argparse.ArgumentParser(prog="python -m kwtrace.explain", description="Say why rules don't match.")
    parser.add_argument("function", metavar="FILE.py:function", help="what to compile: a function, or a module object")
    parser.add_argument(
        "rules", metavar="RULES", help="a generated package, or a module that declares rules, which are traced first"
    )
    parser.add_argument(
        "--inputs",
        metavar="NAME",
        default="example_inputs",
        help="what FILE.py calls the inputs: a tuple, or a function that returns one (default: %(default)s)",
    )
    parser.add_argument("--dynamic", action="store_true", help="compile with symbolic sizes")
    options = parser.parse_args(arguments)
    try:
        function, inputs = _load_function(options.function, options.inputs)
        patterns = _load_patterns(options.rules)
    except (kt.KwtraceError, OSError) as error:
        print(f"python -m kwtrace.explain: {error}", file=sys.stderr)
        return 2
    explanations = _explain(function, inputs, patterns, dynamic=options.dynamic or None)
    for place, explanation in enumerate(explanations):
        print(f"graph {place}\n{explanation}\n")
    if not explanations:
        print("torch.compile made no graph of this function.")
    return 0


def _load_function(text: str, inputs: str) -> tuple[Any, tuple[Any, ...]]:
    path, _, name = text.rpartition(":")
    if not path:
        msg = f"Expected FILE.py:function, found {text!r}; name a file and a function in it."
        raise kt.LoadError(msg)
    module = _import_file(Path(path))
    given = _attribute(module, inputs, path)
    given = given() if callable(given) else given
    return _attribute(module, name, path), tuple(given) if isinstance(given, list | tuple) else (given,)


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        msg = f"Expected a Python file, found {str(path)!r}."
        raise kt.LoadError(msg)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        msg = f"Expected {path} to import, found {type(error).__name__}: {error}."
        raise kt.LoadError(msg) from error
    return module


def _attribute(module: ModuleType, name: str, path: str) -> Any:
    if not hasattr(module, name):
        msg = f"Expected {path} to define {name}, found no such name; define it, or pass another."
        raise kt.LoadError(msg)
    return getattr(module, name)


def _load_patterns(name: str) -> kt.PatternSet:
    from kwtrace.generation import find_module
    from kwtrace.loading import Package, as_pattern_set

    sys.path.insert(0, str(Path.cwd()))
    module = find_module(name)
    if isinstance(getattr(module, "PATTERNS", None), Package):
        return as_pattern_set(module)
    rules = [value for value in vars(module).values() if isinstance(value, kt.Rule)]
    if not rules:
        msg = f"Expected a generated package or a module that declares rules, found neither in {name}."
        raise kt.LoadError(msg)
    return kt.trace(*rules)


def _explain(function: Any, inputs: tuple[Any, ...], patterns: kt.PatternSet, *, dynamic: bool | None) -> list[Any]:
    from kwtrace.inductor import explain_compiled

    return explain_compiled(function, inputs, patterns, dynamic=dynamic)


if __name__ == "__main__":
    sys.exit(main())
