"""`train` and `load_run`: a recipe in this process or in several, which leaves the process as it was."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import TINY
from page_reader import is_plain
from peft import TaskType
from transformers import T5Config, T5ForConditionalGeneration

from finetune import load_run, train
from finetune.api.training import _why
from finetune.api.words import words_of
from finetune.entry.main import resolve_here
from finetune.errors import InterruptedRunError, RequestError, RunError
from finetune.models import dropout
from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM, GPTLiteForSequenceClassification
from finetune.run.choose import recipes
from finetune.run.launch import Launch
from finetune.training import chapters, kept_memory

SMALL = {**TINY, "max_steps": 2, "max_train_samples": 64}


@pytest.fixture
def own_csv(tmp_path: Path) -> Path:
    path = tmp_path / "reviews.csv"
    rows = [f"row number {i} is {word},{word}" for i in range(60) for word in ("good", "bad")]
    path.write_text("\n".join(["text,label", *rows]) + "\n")
    return path


def state() -> dict[str, Any]:
    """What a run could change of its process."""
    import finetune.api.process  # noqa: F401  (libraries set variables and filters when they are imported)

    return {
        "environment": dict(os.environ),
        "handlers": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)],
        "argv": list(sys.argv),
        "filters": list(warnings.filters),
        "level": logging.getLogger("transformers").level,
        "threads": torch.get_num_threads(),
        "random": (random.getstate(), torch.get_rng_state().tolist()),
        "own threads": {one.name for one in threading.enumerate() if "tqdm" not in one.name.lower()
                        and type(one).__name__ != "TMonitor"},
    }  # fmt: skip


def test_a_run_in_this_process_can_be_repeated_and_leaves_the_process_as_it_was(
    own_csv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("seq_cls", train_file=own_csv, output_dir=tmp_path / "zeroth", **{**SMALL, "max_steps": 1})
    before = state()
    first = train("seq_cls", train_file=own_csv, output_dir=tmp_path / "first", **SMALL)
    assert state() == before
    assert "{'loss': 0.6" in capsys.readouterr().out  # a number, not a text
    second = train("seq_cls", train_file=[str(own_csv)], output_dir=tmp_path / "second", model_size=None, **SMALL)
    assert [row["loss"] for row in first.history if "loss" in row] == [
        row["loss"] for row in second.history if "loss" in row
    ]
    assert first.metrics["eval_loss"] == second.metrics["eval_loss"]
    assert first.finished
    assert first.folder == tmp_path / "first"
    assert (first.folder / "recipe.yaml").read_text().startswith("bf16: false")


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_run_on_a_cpu_keeps_freed_memory_and_draws_masks_itself_where_torch_is_slow(
    is_slow: bool, own_csv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: Counter[str] = Counter()
    draw = dropout.mask_like
    monkeypatch.setattr(dropout, "mask_like", lambda x, p: called.update([f"masks of {p}"]) or draw(x, p))
    for module in (dropout, chapters):
        monkeypatch.setattr(module, "draws_slowly", lambda: is_slow)
    monkeypatch.setattr(kept_memory, "keep_freed_memory", lambda: called.update(["memory"]))
    monkeypatch.setattr(kept_memory, "stop_keeping_freed_memory", lambda: called.update(["memory back"]))
    values = {**SMALL, "dropout": 0.2, "max_steps": 1}
    train("seq_cls", train_file=own_csv, output_dir=tmp_path / "run", **values)
    assert called["memory"] == called["memory back"] == 1
    assert (called["masks of 0.2"] > 0) == is_slow


def test_a_failed_run_raises_and_leaves_the_process_as_it_was(own_csv: Path, tmp_path: Path) -> None:
    before, folder = state(), tmp_path / "failed"
    with pytest.raises(RunError, match="is not finite"):
        train("seq_cls", train_file=own_csv, output_dir=folder, **{**SMALL, "max_steps": 8, "learning_rate": 1e30})
    assert state() == before
    again = train("seq_cls", train_file=own_csv, output_dir=folder, overwrite_output_dir=True, **SMALL)
    assert again.finished  # the folder's lock has been given up


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_mistyped_flag_is_an_exception_with_the_nearest_name(ranks: int | None, tmp_path: Path) -> None:
    before = state()
    with pytest.raises(RequestError, match=r"num_train_epoch .*Did you mean --num_train_epochs\?"):
        train("seq_cls", ranks=ranks, num_train_epoch=1, output_dir=tmp_path / "run")
    assert state() == before
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "ranks", "said"),
    [
        ("seqcls", None, "Did you mean seq_cls"),
        ("generate", None, "not a recipe that trains"),
        ("seq_cls", 0, "must be 1 or more"),
    ],
)
def test_what_cannot_be_trained_is_refused(name: str, ranks: int | None, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        train(name, ranks=ranks)


def test_a_process_of_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RequestError, match="plain Python"):
        train("seq_cls")


def test_the_model_opens_and_the_run_shows_itself(own_csv: Path, tmp_path: Path) -> None:
    train("seq_cls", train_file=own_csv, output_dir=tmp_path / "<b>run", **SMALL)
    run = load_run(tmp_path / "<b>run")
    assert type(run.model).__name__ == "DistilBertForSequenceClassification"
    assert run.model is run.model
    assert not run.model.training
    assert run.model(**run.tokenizer("row number 1", return_tensors="pt")).logits.shape == (1, 2)
    page = run._repr_html_()
    assert len(page) < 3000
    assert "<b>" not in page
    assert "accuracy" in page
    assert is_plain(page)
    run.plot().save(tmp_path / "loss.svg")
    assert (tmp_path / "loss.svg").read_text().startswith("<svg")
    assert run.plot()._repr_html_().startswith("<img alt=")


@pytest.mark.nightly
@pytest.mark.usefixtures("built_ops")
def test_several_ranks_train_in_processes_of_their_own(
    own_csv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = state()
    run = train("seq_cls", ranks=2, train_file=own_csv, output_dir=tmp_path / "two", **SMALL)
    assert len(run.metrics["peak_memory_gib_per_rank"]) == 2
    assert "DeepSpeed zero2" in capsys.readouterr().out
    with pytest.raises(RunError, match="is not finite"):
        train("seq_cls", ranks=2, train_file=own_csv, output_dir=tmp_path / "bad", **{**SMALL, "max_steps": 8,
              "learning_rate": 1e30})  # fmt: skip
    assert state() == before


def test_deepspeed_is_not_started_in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[Any] = []
    monkeypatch.setattr("finetune.api.training._in_processes", lambda *words: started.append(words))
    with pytest.raises(RequestError):  # nothing has been written there
        train("seq_cls", deepspeed="zero2", output_dir=tmp_path / "run")
    ((recipe, ranks, words),) = started
    assert (recipe.name, ranks, words[:2]) == ("seq_cls", 1, ["--deepspeed", "zero2"])


def test_what_a_rank_has_said_is_the_exception() -> None:
    said = ["[launch] hello\n", "\n", "error: this is wrong.\n", "That is, too.\n", "[2026] Killing subprocess\n"]
    assert _why(said, 1) == "this is wrong.\nThat is, too."
    assert _why(["Traceback\n", "KeyError: 3\n"], 1) == "the run ended with status 1:\nTraceback\nKeyError: 3\n"
    assert _why(["stopped by SIGTERM after step 3. Saved.\n"], InterruptedRunError.exit_status).startswith("stopped by")


def test_a_strangers_folder_is_read_and_nothing_of_it_runs(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\nnot json\n')
    (tmp_path / "recipe.yaml").write_text("recipe: seq_cls\noutput_dir: '<script>alert(1)</script>'\n")
    (tmp_path / "config.json").write_text('{"model_type": "bert", "auto_map": {"AutoConfig": "evil.Config"}}')
    (tmp_path / "README.md").write_text("# <script>alert(1)</script>\n")
    run = load_run(tmp_path)
    assert not run.finished
    assert "<script" not in run._repr_html_()
    assert [row["loss"] for row in run.history] == [2.0, 1.0]
    with pytest.raises(RequestError, match="its weights cannot be loaded"):
        _ = run.model


def test_a_value_that_begins_as_a_flag_does_is_a_value() -> None:
    words = words_of({"source_prefix": "--sum: ", "metrics": ["chrf", "ter"], "bf16": False, "model_size": None})
    run = resolve_here(recipes()["seq2seq"], [*words, "--output_dir", "unused"], Launch())
    assert run.value("source_prefix") == "--sum: "
    assert words[1:] == ["--metrics", "chrf", "ter", "--bf16", "False"]


def test_every_task_has_a_class_of_transformers_and_a_type_of_adapter_that_peft_knows() -> None:
    for recipe in recipes().values():
        for task in (recipe.task, *recipe.tasks.values()):
            assert hasattr(transformers, task.auto)
            assert bool(task.adapter) == ("use_peft" in recipe.flags or recipe.name == "causal_lm_pipeline")
            assert not task.adapter or task.adapter in {one.value for one in TaskType}


@pytest.mark.parametrize(("recipe", "kind"), [("recipe: seq2seq\n", T5ForConditionalGeneration),
                         ("recipe: preference\nloss: reward\n", GPTLiteForSequenceClassification),
                         ("recipe: preference\nloss: dpo\n", GPTLiteForCausalLM)])  # fmt: skip
def test_a_model_opens_by_what_its_run_was_for(recipe: str, kind: Any, tmp_path: Path) -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 1}
    if kind is T5ForConditionalGeneration:
        config: Any = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    else:
        config = GPTLiteConfig(vocab_size=32, **shape)
    kind(config).save_pretrained(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert type(load_run(tmp_path).model) is kind


@pytest.mark.parametrize(("recipe", "said"), [("recipe: nonsense\n", "names none of"), ("", "names none of")])
def test_a_folder_that_does_not_say_its_recipe_opens_no_model(recipe: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / "recipe.yaml").write_text(recipe)
    with pytest.raises(RequestError, match=said):
        _ = load_run(tmp_path).model


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="holds neither a run"):
        load_run(tmp_path)
    (tmp_path / "all_results.json").write_text("{}")
    with pytest.raises(RequestError, match="nothing to plot"):
        load_run(tmp_path).plot()
