"""All that flags and names of files show is said at once, and before anything heavy is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

from finetune.entry.main import resolve_here
from finetune.errors import RequestError
from finetune.run.choose import recipes
from finetune.run.launch import Launch

RESOLVE = """
import sys
from finetune.errors import RequestError
from finetune.run.choose import recipes
from finetune.run.launch import Launch
from finetune.entry.main import resolve_here

try:
    resolve_here(recipes()[sys.argv[1]], sys.argv[2:], Launch())
except RequestError as error:
    print(error)
print("heavy:", *sorted({"torch", "transformers", "datasets", "pandas"} & set(sys.modules)))
"""


def refused(recipe: str, *argv: str) -> list[str]:
    with pytest.raises(RequestError) as met:
        resolve_here(recipes()[recipe], argv, Launch())
    return str(met.value).splitlines()


def test_each_mistake_of_each_kind_is_said_once_with_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("finetune.training.hub.get_token", lambda: None)
    Path("c.yaml").write_text("seed: 3\nmax_steps: abc\nseed: 4\nlearning_rte: 3\nlora: 4\nweight_decay: -1\n")
    Path("file").touch()
    words = "--config c.yaml --bf16 True --fp16 True --bathc 3 --metrics foo f1 f1 --num_train_epochs x --deepspeed zer"
    words += " --train_file nope.csv --output_dir file --push_to_hub True --on_nan rollback --save_only_model True"
    found = refused("seq_cls", *words.split())
    begins = [
        "--seed (c.yaml line 3) is given twice",
        "--max_steps is 'abc' (c.yaml line 2)",
        "--learning_rte (c.yaml line 4)",
        "--lora (c.yaml line 5)",
        "--weight_decay is -1.0 (c.yaml line 6)",
        "--bathc (command line)",
        "--num_train_epochs is 'x' (command line)",
        "--bf16 is True (command line), and --fp16 is True (command line)",
        "--on_nan is 'rollback' (command line)",
        "--deepspeed is 'zer' (command line)",
        "--train_file is 'nope.csv' (command line)",
        "--metrics is ['foo', 'f1', 'f1'] (command line), which names f1 twice",
        "--metrics is ['foo', 'f1', 'f1'] (command line), but foo is neither a shipped metric",
        "--push_to_hub is True (command line)",
        "--output_dir is 'file' (command line)",
    ]
    for begin in begins:
        assert len([line for line in found if line.startswith(begin)]) == 1, begin
    assert len(found) == len(begins)


@pytest.mark.parametrize(
    ("recipe", "words", "begin"),
    [
        ("causal_lm", "--train_fil x --streaming True --max_steps 5 --tokenizer byte", "--train_fil (command line)"),
        ("causal_lm", "--streaming True --max_step 5 --dataset_name x --tokenizer byte", "--max_step (command line)"),
        ("seq_cls", "--do_predict True --test_fil x", "--test_fil (command line)"),
        ("seq_cls", "--push_to_hub maybe --hub_model_id x", "--push_to_hub is 'maybe' (command line)"),
        ("seq_cls", "--save_steps 0 --save_strategy steps", "--save_steps is 0.0 (command line)"),
    ],
)
def test_what_follows_from_a_mistake_alone_waits_until_it_is_mended(
    recipe: str, words: str, begin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (found,) = refused(recipe, *words.split())
    assert found.startswith(begin)


def test_a_yaml_that_cannot_be_read_hides_no_typo_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("seed: [1\n")
    found = refused("seq_cls", "--config", str(tmp_path / "c.yaml"), "--learning_rte", "1", "--max_steps", "x")
    assert ["cannot be read as YAML" in found[0], *(line.split()[0] for line in found[1:])] == [
        *(True, "--learning_rte", "--max_steps")
    ]


@pytest.mark.parametrize(
    ("recipe", "words", "said"),
    [
        ("token_cls", "--metrics mse", "mse is not for token classification. Available are entity_f1"),
        ("seq_cls", "--metrics f1 --task regression", "f1 is not for regression. Available are mse, pearson"),
        ("seq_cls", "--metrics f1 f1", "names f1 twice"),
        ("causal_lm", "--streaming True --max_steps 5 --tokenizer byte", "there is nothing to stream"),
        ("causal_lm", "--block_size 4000", "--block_size is 4000 (command line), but the model has 128 positions"),
        ("seq_cls", "--max_seq_length 1", "--max_seq_length is 1 (command line), but it must be 8 or more"),
        ("causal_lm", "--config_overrides foo=1", "--config_overrides (command line) foo=1: a GPT-lite has no such"),
        ("seq_cls", "--train_file a.csv --label_column_name nope", "has no column 'nope'"),
        ("seq_cls", "--train_file a.parquet --text_column_names nope", "has no column 'nope'"),
        ("token_cls", "--train_file a.jsonl --tags_column_name nope", "has no column 'nope'"),
        ("causal_lm", "--train_file a.jsonl --text_column_name nope", "no column with text found"),
        ("causal_lm", "--train_file a.csv --encoding foo", "--encoding is 'foo' (command line), which Python does not"),
        ("causal_lm", "--train_file a.csv --encoding undefined", "which Python does not know"),
        ("causal_lm", "--encoding foo", "--encoding is 'foo' (command line), which does nothing"),
        ("seq_cls", "--push_to_hub", "--push_to_hub is True (command line), but HF_HUB_OFFLINE is set"),
        ("seq_cls", "--report_to wandbb", "--report_to wandbb (command line): transformers has no such tracker"),
    ],
)
def test_it_is_said_once_and_torch_is_not_imported_for_it(recipe: str, words: str, said: str, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "a.csv").write_text("text,label\nx y,1\n")
    (tmp_path / "a.jsonl").write_text('{"tokens": ["a"], "tags": ["O"]}\n')
    parquet.write_table(pyarrow.table({"text": ["x y"], "label": [1]}), tmp_path / "a.parquet")
    env = {"PATH": "", "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", RESOLVE, recipe, *words.split()]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    *found, heavy = done.stdout.splitlines()
    assert (len(found), heavy) == (1, "heavy:")
    assert said in found[0]
