"""Flags that contradict each other are all named, with what to do, before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from conftest import REPO

from finetune.entry.main import resolve_here
from finetune.errors import RequestError
from finetune.run.conflicts import ATTENTIONS
from finetune.run.launch import Launch
from finetune.run.output_dir import check_output_dir
from finetune.run.paths import missing_inputs
from finetune.run.recipe import Recipe
from finetune.run.recipes.causal_lm import CAUSAL_LM
from finetune.run.recipes.causal_lm_pipeline import CAUSAL_LM_PIPELINE
from finetune.run.recipes.image_cls import IMAGE_CLS
from finetune.run.recipes.preference import PREFERENCE
from finetune.run.recipes.seq_cls import SEQ_CLS
from finetune.run.recipes.token_cls import TOKEN_CLS
from finetune.run.resolve import resolve

EVERY_4 = "--save_strategy steps --eval_strategy steps --eval_steps 4"


@pytest.mark.parametrize(
    ("recipe", "words", "said"),
    [
        (
            SEQ_CLS,
            "--dataset_name a/b --test_file t.csv",
            "--dataset_name is 'a/b'.*--test_file is 't.csv'",
        ),
        (SEQ_CLS, "--label_column_name a --label_column_names b c", "--label_column_names is .*Keep one"),
        (SEQ_CLS, "--bf16 True --fp16 True", "Keep one"),
        (SEQ_CLS, "--prediction_loss_only True", "--prediction_loss_only is True .*Drop it"),
        (TOKEN_CLS, "--eval_do_concat_batches False", "--eval_do_concat_batches is False .*Drop it"),
        (IMAGE_CLS, "--fp16_full_eval True", "--fp16_full_eval is True .*Drop it"),
        (IMAGE_CLS, "--batch_eval_metrics True", "--batch_eval_metrics is True .*Drop it"),
        (
            SEQ_CLS,
            "--early_stopping_patience 2 --eval_strategy no --load_best_model_at_end False",
            "Give --eval_strategy",
        ),
        (CAUSAL_LM, "--eval_use_gather_object True", "--eval_use_gather_object is True .*Drop it"),
        (TOKEN_CLS, "--include_for_metrics inputs", r"--include_for_metrics is \['inputs'\] .*Drop it"),
        (SEQ_CLS, "--label_names start end", r"--label_names is \['start', 'end'\] .*Drop it"),
        (PREFERENCE, "--preprocessing_num_workers 2", "which does nothing: one process tokenizes preferences"),
        (SEQ_CLS, "--enable_jit_checkpoint True", "--enable_jit_checkpoint is True .*on SIGTERM .*Drop it"),
        (SEQ_CLS, "--length_column_name size", "--length_column_name is 'size' .*--group_by_length"),
        (CAUSAL_LM_PIPELINE, "--batch_eval_metrics True", "--batch_eval_metrics is True .*Drop it"),
        (SEQ_CLS, "--torch_compile_mode fast", "--torch_compile_mode is 'fast' .*one of default"),
        (SEQ_CLS, "--torch_compile_backend nvfuser", "one of eager, aot_eager, inductor"),
        (CAUSAL_LM, "--attn_implementation flash", "--attn_implementation is 'flash' .*one of eager, sdpa"),
        (SEQ_CLS, "--hub_model_id me/it", "Add --push_to_hub True"),
        (SEQ_CLS, "--max_seq_length -4", "--max_seq_length is -4 .*8 or more"),
        (SEQ_CLS, "--seed=-5", "--seed is -5 .*0 or more"),
        (SEQ_CLS, "--warmup_steps=-1", "--warmup_steps is -1.0 .*0 or more"),
        (SEQ_CLS, "--validation_fraction 7", "--validation_fraction is 7.0 .*less than 1"),
        (SEQ_CLS, "--resume /nowhere/checkpoint-4", "--resume is '/nowhere/checkpoint-4' .*trainer_state.json"),
        (SEQ_CLS, "--resume auto --output_dir /nowhere/run", "holds no checkpoint.*--resume allow starts"),
        (
            SEQ_CLS,
            "--load_best_model_at_end --save_strategy steps",
            "--save_strategy is 'steps'.*--eval_strategy is 'epoch'",
        ),
        (SEQ_CLS, f"--load_best_model_at_end {EVERY_4} --save_steps 6", "--save_steps is 6.0 .*--eval_steps is 4.0"),
        (SEQ_CLS, f"--load_best_model_at_end {EVERY_4} --save_steps 0.5", "--save_steps is 0.5 .*--eval_steps is 4.0"),
        (SEQ_CLS, "--load_best_model_at_end --eval_strategy no --save_strategy no", "--eval_strategy is 'no'"),
        (SEQ_CLS, "--save_strategy best --eval_strategy no", "--eval_strategy is 'no'"),
        (SEQ_CLS, "--lr_scheduler_type reduce_lr_on_plateau --eval_strategy no", "--eval_strategy is 'no'"),
        (SEQ_CLS, "--early_stopping_patience 2 --save_strategy no", "follows from --early_stopping_patience"),
        (SEQ_CLS, "--save_steps 10.5", "--save_steps is 10.5 .*a whole number"),
        (SEQ_CLS, "--do_train False", "Give --model_name_or_path"),
        (SEQ_CLS, "--bf16_full_eval --fp16_full_eval", "Keep one"),
        (IMAGE_CLS, "--train_dir a --cifar_dir b", "--cifar_dir is 'b' .*--train_dir is 'a' .*Keep one"),
        (IMAGE_CLS, "--cifar_dir b --dataset_name c/d", "--dataset_name is 'c/d' .*--cifar_dir is 'b' .*Keep one"),
        (IMAGE_CLS, "--validation_dir a --dataset_name c/d", "--validation_dir is 'a' .*Keep one"),
        (IMAGE_CLS, "--model_type vgg", "one of resnet, alexnet"),
        (IMAGE_CLS, "--model_size original", "--model_size is 'original' .*--model_type is 'resnet' .*resnet18"),
        (IMAGE_CLS, "--norm layer", "one of batch, group"),
        (IMAGE_CLS, "--norm group --model_type alexnet", "for resnets, but --model_type is 'alexnet'"),
        (IMAGE_CLS, "--dropout 0.1", "for alexnets, but --model_type is 'resnet'"),
        (IMAGE_CLS, "--freeze_batch_norm", "has no statistics to keep"),
        (IMAGE_CLS, "--freeze_batch_norm --sync_batch_norm --model_name_or_path m", "collects new ones"),
        (IMAGE_CLS, "--pipeline_parallel_size 1", "--model_type is 'resnet' .*not a list of layers"),
        (IMAGE_CLS, "--group_by_length", "does nothing: all images have one size"),
        (IMAGE_CLS, "--label_column_name y --train_dir a", "does nothing: folders name their classes"),
        (IMAGE_CLS, "--image_column_name y --train_dir a", "does nothing: --dataset_name is None"),
        (CAUSAL_LM, "--group_by_length", "does nothing: --packing is 'wrapped'"),
        (CAUSAL_LM, "--document_mask --packing none", "does nothing: --packing is 'none'"),
        (SEQ_CLS, "--train_file a --streaming --group_by_length", "does nothing: --streaming is True"),
        (SEQ_CLS, "--train_file a --streaming --dataloader_num_workers 2", "a stream is read by one process"),
        (CAUSAL_LM, "--streaming --max_steps 3 --dataloader_num_workers 2", "a stream is read by one process"),
        (SEQ_CLS, "--run_name x", "does nothing: --report_to is"),
        (SEQ_CLS, "--save_strategy no --save_total_limit 3", "does nothing: --save_strategy is 'no'"),
        (SEQ_CLS, "--encoding cp1252", "does nothing: --train_file is None"),
        (CAUSAL_LM, "--resize_embeddings", "does nothing: --model_name_or_path is None"),
        (IMAGE_CLS, "--do_predict", "needs a test split.*--test_dir"),
        (TOKEN_CLS, "--dataset_name a/b --train_file t", "Keep one"),
        (CAUSAL_LM, "--dataset_name a/b --train_file t", "Keep one"),
        (PREFERENCE, "--loss simpo --metric_for_best_model eval_kl", "'simpo' .*which has no reference"),
        (PREFERENCE, "--loss reward --metric_for_best_model logp_chosen", "a reward model has no log-probabilities"),
        (CAUSAL_LM, "--metric_for_best_model f1", "--metric_for_best_model is 'f1' .*perplexity"),
        (SEQ_CLS, "--metric_for_best_model acuracy", "the evaluations of this recipe report loss, accuracy"),
        (TOKEN_CLS, "--metric_for_best_model eval_matthews", "report loss, precision"),
        (SEQ_CLS, "--max_steps 3 --seed 1 --max_steps 4", "--max_steps is '3' and '4'"),
        (SEQ_CLS, "--no_group_by_length --group_by_length True", "--group_by_length is 'False' and 'True'"),
        (SEQ_CLS, "--model_name_or_path=", "--model_name_or_path is '' .*is blank"),
        (SEQ_CLS, "--output_dir=", "--output_dir is '' .*is blank"),
        (SEQ_CLS, f"--config {REPO}", "--config is .*that is a folder"),
        (SEQ_CLS, f"--config {REPO}/recipes/configs/bench_laptop.yaml", "is a grid for `finetune bench"),
        (SEQ_CLS, f"--config {REPO}/recipes/launch/accelerate_zero3.yaml", "is a config of accelerate, not a recipe's"),
        (CAUSAL_LM, "--packing tight", "one of wrapped, bfd, none"),
        (CAUSAL_LM, "--tokenizer word", "one of char, byte, bpe"),
        (CAUSAL_LM, "--streaming --max_steps 3 --train_file a --teacher t --teacher_top_k 4", "is not read ahead"),
        (CAUSAL_LM, "--streaming --max_steps 3 --train_file a", "--tokenizer is 'char' .*Give --tokenizer byte"),
        (CAUSAL_LM, "--use_peft True", "Give --model_name_or_path"),
        (CAUSAL_LM, "--use_lora True", r"Did you mean --use_peft\?"),
        (CAUSAL_LM, "--max_seq_length 512", r"Did you mean --block_size\?"),
        (CAUSAL_LM, "--cutoff_len 512", r"Did you mean --block_size\?"),
        (CAUSAL_LM, "--merge_adapter True", "Add --use_peft True"),
        (CAUSAL_LM, "--use_peft True --model_name_or_path m --lora_r 0", "--lora_r is 0 .*1 or more"),
        (CAUSAL_LM, "--use_peft True --model_name_or_path m --resize_embeddings True", "Drop one of them"),
        (CAUSAL_LM, "--dtype half", "one of auto, bfloat16, float16, float32"),
        (CAUSAL_LM, "--ddp_comm_hook powersgd --ddp_find_unused_parameters False", "only if that is True"),
        (CAUSAL_LM, "--do_train False --do_eval False", "there is nothing to do"),
        (CAUSAL_LM, "--do_train False", "Give --model_name_or_path"),
        (CAUSAL_LM, "--label_smoothing_factor 0.1", "shift labels that are already shifted"),
        (CAUSAL_LM, "--streaming True --train_file a.jsonl", "Give --max_steps"),
        (CAUSAL_LM, "--streaming True --max_steps 3", "there is nothing to stream"),
        (CAUSAL_LM, "--streaming True --train_file a.jsonl --max_steps 3 --save_strategy epoch", "with --save_steps"),
        (CAUSAL_LM, "--validation_file a.txt", "--validation_file is 'a.txt' .*no --train_file"),
        (CAUSAL_LM, "--do_predict True", "`finetune generate` answers a file of prompts"),
        (CAUSAL_LM, "--predict_with_generate True", "built-in data is plain text, which has no answers"),
        (
            CAUSAL_LM,
            "--predict_with_generate True --train_file a.jsonl --train_on all",
            "the start of an answer is then unknown",
        ),
    ],
)
def test_a_conflict_is_refused_with_its_mend(recipe: Recipe, words: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        resolve(recipe, words.split(), Launch())


@pytest.mark.parametrize(
    "words",
    [
        f"--load_best_model_at_end {EVERY_4} --save_steps 8",
        "--load_best_model_at_end --eval_strategy steps --eval_steps 0.1 --save_strategy steps --save_steps 0.3",
        "--load_best_model_at_end --save_strategy best",
        "--load_best_model_at_end",
    ],
)
def test_saves_that_go_with_evaluations_are_taken(words: str) -> None:
    assert resolve(SEQ_CLS, words.split(), Launch()).value("load_best_model_at_end")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--disable_check ds501 --deepspeed zero2", "--disable_check is .* but ds501 is not a code such as DS902"),
        ("--disable_check DS501,DS502 --deepspeed zero2", "but DS501,DS502 is not a code"),
        ("--disable_check DS501", "is for DeepSpeed, but this run is without DeepSpeed. Add --deepspeed"),
        ("--nvme_path disk", "--nvme_path is .* is for DeepSpeed, but"),
        ("--text_column_names a", "--text_column_names is .* Built-in data has its own columns"),
        ("--label_column_name a", "--label_column_name is 'a' .* Give --train_file"),
        ("--optim_args a=1", "--optim_args is 'a=1' .* which does nothing: --optim is "),
    ],
)
def test_what_a_run_on_this_machine_would_pass_over_is_refused(words: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=said):
        resolve_here(SEQ_CLS, [*words.split(), "--output_dir", str(tmp_path / "out")], Launch())


@pytest.mark.parametrize("recipe", [SEQ_CLS, TOKEN_CLS], ids=lambda recipe: recipe.name)
def test_an_encoder_from_scratch_reads_as_many_tokens_as_are_asked_for(recipe: Recipe, tmp_path: Path) -> None:
    words = ["--max_seq_length", "1024", "--output_dir", str(tmp_path / "out")]
    assert resolve_here(recipe, words, Launch()).value("max_seq_length") == 1024


def test_a_static_graph_is_for_steps_of_one_micro_batch() -> None:
    words = "--ddp_static_graph True --gradient_accumulation_steps 2".split()
    assert resolve(SEQ_CLS, words, Launch()).value("ddp_static_graph")
    assert resolve(SEQ_CLS, words[:2], Launch(world_size=2)).value("ddp_static_graph")
    with pytest.raises(RequestError, match="first step without accumulation"):
        resolve(SEQ_CLS, words, Launch(world_size=2))


def test_a_yaml_of_more_lines_than_any_recipe_has_flags_is_refused_at_once(tmp_path: Path) -> None:
    """Each unknown flag is compared with all: 25,000 of them took minutes."""
    (tmp_path / "a.yaml").write_text("".join(f"k{i}: 1\n" for i in range(1_001)))
    with pytest.raises(RequestError, match=r"has 1,001 lines; at most 1,000 are read"):
        resolve(SEQ_CLS, ["--config", str(tmp_path / "a.yaml")], Launch())


def test_a_yaml_may_name_thousands_of_columns_as_a_runs_record_does(tmp_path: Path) -> None:
    names = [f"label_{i}" for i in range(5_000)]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"train_file": "a.csv", "label_column_names": names}))
    run = resolve(SEQ_CLS, ["--config", str(tmp_path / "recipe.yaml")], Launch(), is_here=False)
    assert run.value("label_column_names") == names


@pytest.mark.parametrize("line", ["metrics: {}", "train_file: {}"])
def test_of_thousands_of_values_that_are_wrong_the_first_are_said(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(line.format([f"m{i}" for i in range(20_000)]))
    with pytest.raises(RequestError, match=r"\.\.\. \(|names 20,000 files; at most 10,000") as met:
        resolve_here(SEQ_CLS if "metrics" in line else CAUSAL_LM, ["--config", str(tmp_path / "a.yaml")], Launch())
    assert len(str(met.value)) < 20_000


def test_several_are_said_at_once() -> None:
    with pytest.raises(RequestError) as met:
        resolve(
            CAUSAL_LM, "--use_peft True --lora_r 0 --do_predict True --label_smoothing_factor 0.1".split(), Launch()
        )
    assert str(met.value).count("\n") >= 3


def test_a_config_that_is_not_there_is_named_with_its_flag_and_source(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("deepspeed: zerro2\n")
    words = ["--config", str(tmp_path / "c.yaml"), "--output_dir", str(tmp_path / "run")]
    with pytest.raises(RequestError, match=r"--deepspeed is 'zerro2' \(.*c\.yaml line 1\).*Did you mean zero2\?"):
        resolve_here(SEQ_CLS, words, Launch())


@pytest.mark.parametrize(("given", "meant"), [("nope", "Give one"), ("acuracy", "accuracy"), ("no.py", "Give one")])
def test_a_metric_that_is_none_is_refused_before_anything_is_imported(given: str, meant: str) -> None:
    with pytest.raises(
        RequestError, match=rf"--metrics is \['f1', '{given}'\] .*{given} is neither a shipped metric.* {meant}"
    ):
        resolve_here(SEQ_CLS, ["--metrics", "f1", given], Launch())


def test_what_is_said_twice_and_alike_is_taken() -> None:
    words = "--local_rank=0 --max_steps 3 --max-steps 3 --local_rank=1"
    assert resolve(SEQ_CLS, words.split(), Launch()).value("max_steps") == 3


def test_a_yaml_may_have_dashes_but_not_both(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("max-steps: 3\n")
    assert resolve(SEQ_CLS, ["--config", str(tmp_path / "c.yaml")], Launch()).value("max_steps") == 3
    (tmp_path / "c.yaml").write_text("max-steps: 3\nseed: 1\nmax_steps: 3\n")
    with pytest.raises(RequestError, match=r"--max_steps \(.*c\.yaml line 3\) is given twice, .*c\.yaml line 1"):
        resolve(SEQ_CLS, ["--config", str(tmp_path / "c.yaml")], Launch())


def test_a_folder_in_use_hides_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "note.txt").touch()
    (tmp_path / "d.json").write_text('{"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": false}}')
    words = ["--output_dir", str(tmp_path), "--deepspeed", str(tmp_path / "d.json"), "--bf16", "True"]
    with pytest.raises(RequestError, match="bf16"):
        resolve_here(SEQ_CLS, words, Launch())


@pytest.mark.parametrize(
    ("entries", "mend"),
    [
        (["note.txt"], "files or folders. Give another folder."),
        (["checkpoint-2"], "files or folders. Continue it with --resume auto, or give another folder."),
        (["recipe.yaml"], "It has no checkpoint: start it again with --resume allow, delete it with"),
        (["recipe.yaml", "checkpoint-2"], "Continue it with --resume auto, delete it with --overwrite_output_dir True"),
    ],
    ids=["foreign files", "a checkpoint alone", "a run without a checkpoint", "a run"],
)
def test_a_folder_is_told_only_what_it_is_then_taken_with(entries: list[str], mend: str, tmp_path: Path) -> None:
    for name in entries:
        (tmp_path / name).mkdir()
    words = ["--output_dir", str(tmp_path)]
    with pytest.raises(RequestError) as refused:
        check_output_dir(resolve(SEQ_CLS, words, Launch()))
    assert mend in str(refused.value)
    deleting = resolve(SEQ_CLS, [*words, "--overwrite_output_dir", "True"], Launch())
    if "delete it" in mend:
        check_output_dir(deleting)
        return
    with pytest.raises(RequestError, match="it is not deleted"):
        check_output_dir(deleting)


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


def test_every_attention_of_transformers_is_known() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = {name.removeprefix("paged|") for name in ALL_ATTENTION_FUNCTIONS.valid_keys()} | {"eager"}
    assert known - {"sdpa_if_long"} == set(ATTENTIONS), "which models/short_attention.py registers"


def test_a_package_that_a_flag_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"--use_liger_kernel is True .*pip install liger-kernel"):
        resolve_here(CAUSAL_LM, ["--use_liger_kernel", "True"], Launch())


@pytest.mark.parametrize("name", ["lora_24bg", "lora_24bg.yaml", "recipes/configs/lora24gb.yaml"])
def test_a_mistyped_name_of_a_shipped_config_gets_the_nearest(name: str) -> None:
    with pytest.raises(RequestError, match=r"no such file\). Did you mean lora_24gb\? Give the path"):
        resolve(CAUSAL_LM, ["--config", name], Launch())


def test_a_name_of_no_shipped_config_gets_those_that_there_are() -> None:
    with pytest.raises(RequestError, match=r"no such file\). Shipped ones: embedding_retrieval, .* Give the"):
        resolve(CAUSAL_LM, ["--config", "nosuch"], Launch())


@pytest.mark.parametrize("name", ["lora_24gb", "lora_24gb.yaml", "recipes/configs/lora_24gb.yaml"])
def test_a_shipped_yaml_is_taken_by_its_name_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = resolve(CAUSAL_LM, ["--config", name, "--model_name_or_path", "gpt2"], Launch())
    assert run.value("activation_checkpoint_interval") == 1
    assert list(missing_inputs(run)) == []


def test_files_and_weights_in_one_word_are_told_apart_from_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [f"{index}.jsonl" for index in range(10)]
    for name in names:
        (tmp_path / name).touch()
    for recipe, given, said in (
        (CAUSAL_LM, "1.jsonl,2.jsonl", "it is several files. Separate them by spaces."),
        (SEQ_CLS, "1.jsonl,2.jsonl", "it is several files. This recipe takes one."),
        (CAUSAL_LM, "1.jsonl:abc", "'abc' after the colon is not a weight. Give a number, as in 1.jsonl:0.7"),
        (CAUSAL_LM, "other.csv", f"there is no such file. ./ holds {', '.join(names[:8])} and 2 more."),
    ):
        (fault,) = missing_inputs(resolve(recipe, ["--train_file", given], Launch()))
        assert said in fault


def test_a_mistyped_path_is_told_what_is_like_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "small").mkdir(parents=True)
    (tmp_path / "train.jsonl").touch()
    for flag, given, meant in (
        ("model_name_or_path", "./modles/small", "Did you mean models?"),
        ("model_name_or_path", "./models/smal", "Did you mean models/small?"),
        ("train_file", "trian.jsonl", "Did you mean train.jsonl?"),
    ):
        (fault,) = missing_inputs(resolve(CAUSAL_LM, [f"--{flag}", given], Launch()))
        assert meant in fault


def test_the_suffix_alone_makes_no_two_names_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "twotext.csv").touch()
    (fault,) = missing_inputs(resolve(SEQ_CLS, ["--train_file", "nope.csv"], Launch()))
    assert "Did you mean" not in fault
    assert "holds twotext.csv" in fault
