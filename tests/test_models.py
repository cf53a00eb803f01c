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
@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        pytest.param("--dtypes float32 --batches 2 --seqs 32 --dynamic static", 10, id="all-static"),
        pytest.param(
            "--models llama,bert,t5 --dtypes bfloat16 --batches 2 --seqs 32 --dynamic dynamic", 3, id="dynamic"
        ),
        pytest.param("--models llama,bert,t5 --dtypes bfloat16 --batches 1 --seqs 1 --dynamic static", 3, id="size-1"),
    ],
)
def test_every_attention_layer_of_the_models_is_fused(arguments: str, rows: int, tmp_path: Path) -> None:
    """All layers are fused, grouped heads by the grouped rule; Gemma 2, which has no fused form, is left alone."""
    pytest.importorskip("transformers")
    out = tmp_path / "rows.json"
    command = [sys.executable, str(TOOL), *arguments.split(), "--layers", "1", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(out.read_text())["rows"]) == rows
