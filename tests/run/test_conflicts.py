"""Flags that contradict each other are all named, with what to do, before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.errors import RequestError
from finetune.run.launch import Launch
from finetune.run.recipe import Recipe
from finetune.run.recipes.causal_lm import CAUSAL_LM
from finetune.run.recipes.seq_cls import SEQ_CLS
from finetune.run.resolve import resolve, resolve_here


@pytest.mark.parametrize(
    ("recipe", "words", "said"),
    [
        (SEQ_CLS, "--dataset_name a/b --test_file t.csv", "--dataset_name and --test_file are both given"),
        (SEQ_CLS, "--label_column_name a --label_column_names b c", "--label_column_names are both given"),
        (SEQ_CLS, "--bf16 True --fp16 True", "Keep one"),
        (SEQ_CLS, "--hub_model_id me/it", "Add --push_to_hub True"),
        (SEQ_CLS, "--max_seq_length -4", "--max_seq_length is -4 .*1 or more"),
        (SEQ_CLS, "--seed=-5", "--seed is -5 .*0 or more"),
        (SEQ_CLS, "--warmup_steps=-1", "--warmup_steps is -1.0 .*0 or more"),
        (SEQ_CLS, "--validation_fraction 7", "--validation_fraction is 7.0 .*less than 1"),
        (SEQ_CLS, "--resume /nowhere/checkpoint-4", "--resume is '/nowhere/checkpoint-4' .*trainer_state.json"),
        (SEQ_CLS, "--resume auto --output_dir /nowhere/run", "holds no checkpoint.*--overwrite_output_dir True"),
        (CAUSAL_LM, "--use_peft True", "Give --model_name_or_path"),
        (CAUSAL_LM, "--merge_adapter True", "Add --use_peft True"),
        (CAUSAL_LM, "--use_peft True --model_name_or_path m --lora_r 0", "a rank of 1 or more"),
        (CAUSAL_LM, "--use_peft True --model_name_or_path m --resize_embeddings True", "Drop one of them"),
        (CAUSAL_LM, "--do_train False --do_eval False", "there is nothing to do"),
        (CAUSAL_LM, "--do_train False", "Give --model_name_or_path"),
        (CAUSAL_LM, "--label_smoothing_factor 0.1", "shifts labels that are shifted here"),
        (CAUSAL_LM, "--streaming True --train_file a.jsonl", "by --max_steps"),
        (CAUSAL_LM, "--streaming True --max_steps 3", "there is nothing to stream"),
        (CAUSAL_LM, "--streaming True --train_file a.jsonl --max_steps 3 --save_strategy epoch", "with --save_steps"),
        (CAUSAL_LM, "--validation_file a.txt", "--validation_file without --train_file"),
        (CAUSAL_LM, "--do_predict True", "writes samples instead"),
    ],
)
def test_a_conflict_is_refused_with_its_mend(recipe: Recipe, words: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        resolve(recipe, words.split(), Launch())


def test_several_are_said_at_once() -> None:
    with pytest.raises(RequestError) as met:
        resolve(
            CAUSAL_LM, "--use_peft True --lora_r 0 --do_predict True --label_smoothing_factor 0.1".split(), Launch()
        )
    assert str(met.value).count("\n") >= 3


def test_a_config_that_is_not_there_is_named_with_its_flag_and_source(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("deepspeed: zerro2\n")
    words = ["--config", str(tmp_path / "c.yaml"), "--output_dir", str(tmp_path / "run")]
    with pytest.raises(RequestError, match=r"--deepspeed is 'zerro2' \(.*c\.yaml line 1\).*zero2"):
        resolve_here(SEQ_CLS, words, Launch())


def test_a_yaml_merge_is_refused_by_line(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("seed: 1\n<<: {max_steps: 3, bf16: true}\n")
    with pytest.raises(RequestError, match=r"c\.yaml:2:1: .*merge"):
        resolve(SEQ_CLS, ["--config", str(tmp_path / "c.yaml")], Launch())


def test_numbers_that_are_too_large_or_none_are_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("learning_rate: 1" + "0" * 400 + "\n")
    with pytest.raises(RequestError, match=r"--learning_rate is .* must be a number"):
        resolve(SEQ_CLS, ["--config", str(tmp_path / "c.yaml")], Launch())
    with pytest.raises(RequestError, match=r"must be a whole number"):
        resolve(SEQ_CLS, ["--max_steps", "+-5"], Launch())
    assert resolve(SEQ_CLS, ["--max_grad_norm", "inf"], Launch()).value("max_grad_norm") == float("inf")
