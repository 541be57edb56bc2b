"""Each recipe under each true launcher, once: all other tests take warm ranks for these.

The gate has each launcher with a recipe of its own; the other pairs are nightly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, gate_has, launch

pytestmark = pytest.mark.usefixtures("built_ops")

CAUSAL = {
    "config_overrides": "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,max_position_embeddings=64",
    "max_train_samples": 60,
    "sample_tokens": 0,
}
RECIPES: dict[str, dict[str, Any]] = {
    "seq_cls": TINY,
    "causal_lm": CAUSAL,
    "causal_lm_pipeline": {**CAUSAL, "gradient_accumulation_steps": 2},
    "image_cls": {"max_train_samples": 64},
    "token_cls": TINY,
    "question_answering": TINY,
    "seq2seq": {"max_train_samples": 64, "dropout": 0.0, "max_source_length": 16, "max_target_length": 8},
    "embedding": TINY,
    "preference": {"config_overrides": CAUSAL["config_overrides"], "max_train_samples": 64, "block_size": 64},
}
STAGES = {"python": 1, "deepspeed": 2, "torchrun": 2, "accelerate": 2}
PAIRS = [(launcher, recipe) for launcher in STAGES for recipe in RECIPES]
IN_GATE = [
    ("python", "seq_cls"),
    ("deepspeed", "causal_lm_pipeline"),
    ("torchrun", "causal_lm"),
    ("accelerate", "token_cls"),
]


@pytest.mark.parametrize(("launcher", "recipe"), gate_has(IN_GATE, PAIRS))
def test_each_recipe_starts_under_each_true_launcher_as_it_does_warm(
    launcher: str, recipe: str, tmp_path: Path
) -> None:
    ranks = STAGES[launcher]
    values = {**RECIPES[recipe], "max_steps": 2, "logging_steps": 1, "save_strategy": "no", "eval_strategy": "no"}
    values |= {"bf16": False, "max_eval_samples": 16}
    if recipe == "causal_lm_pipeline":
        values["pipeline_parallel_size"] = ranks
    how: dict[str, Any] = {"ranks": ranks, "recipe": f"recipes/{recipe}.py"}
    cold = launch(launcher, tmp_path / "cold", values, cold=True, **how)
    warm = launch(launcher, tmp_path / "warm", values, **how)
    assert len(cold.steps) == 2
    assert cold.column("loss") == pytest.approx(warm.column("loss"), rel=1e-6)
    assert list(cold.folder.glob("*model*.safetensors"))
