"""Real models: every attention layer of them is fused, and the numbers get no worse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "models.py"


@pytest.mark.models
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_attention_layer_of_the_models_is_fused(dtype: str, tmp_path: Path) -> None:
    """Ten models, static and dynamic sizes: all layers fused, grouped heads by the grouped rule, Gemma 2 left alone."""
    pytest.importorskip("transformers")
    out = tmp_path / "rows.json"
    arguments = ["--dtypes", dtype, "--batches", "2", "--seqs", "32", "--layers", "1", "--json", str(out)]
    done = subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(out.read_text())["rows"]) == 20


@pytest.mark.models
@pytest.mark.slow
def test_batch_and_sequence_of_one_are_fused(tmp_path: Path) -> None:
    """A batch of 1 and a sequence of 1 are sizes of their own while tracing; they are fused like any other."""
    pytest.importorskip("transformers")
    out = tmp_path / "rows.json"
    arguments = ["--models", "llama,bert,t5", "--dtypes", "bfloat16", "--batches", "1", "--seqs", "1,32", "--layers", "1"]
    done = subprocess.run(
        [sys.executable, str(TOOL), *arguments, "--json", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(out.read_text())["rows"]) == 12
