"""A reward model that is used as its card says, or as another server uses it, gives the scores of its evaluation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, Finished, launch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from finetune.data.tokenizer import train_text_tokenizer

QUESTION, ANSWERS = "Where is shop {n}?\n", {"chosen": "Shop {n} is here.", "rejected": "I do not know {n}."}
MARKS = ["<|im_start|>", "<|im_end|>"]


def model_folder(folder: Path, *special: str, **names: str) -> Path:
    """A Llama whose tokenizer has the end of text, and `special` tokens beside the marks of chatml."""
    tokenizer = train_text_tokenizer("byte", [], 0, 256, with_end=True)
    tokenizer.pad_token = None
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS, *special]})
    for name, token in names.items():
        setattr(tokenizer, name, token)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, initializer_range=0.2, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rows(numbers: range, as_turns: bool) -> list[dict[str, Any]]:
    """Of UltraFeedback's shape, or as texts."""
    found = []
    for n in numbers:
        row: dict[str, Any] = {"prompt": QUESTION.format(n=n), **{k: text.format(n=n) for k, text in ANSWERS.items()}}
        for name in ANSWERS if as_turns else ():
            row[name] = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[name]}]
        found.append(row)
    return found


def trained(folder: Path, model: Path, as_turns: bool, **more: Any) -> tuple[Finished, list[dict[str, Any]]]:
    """A run, and its held-out rows."""
    held_out, files = rows(range(40, 48), as_turns), {}
    for name, some in (("train_file", rows(range(40), as_turns)), ("validation_file", held_out)):
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(row) + "\n" for row in some))
    own = {name: value for name, value in TINY.items() if name not in ("max_seq_length", "dropout")}
    flags = {**own, **files, "loss": "reward", "model_name_or_path": model, "max_steps": 20, "learning_rate": 3e-3}
    done = launch("python", folder / "run", {**flags, **more}, recipe="recipes/preference.py")
    return done, held_out


def by_card(done: Finished, capsys: pytest.CaptureFixture[str], answered: list[Any]) -> list[float]:
    """The scores of conversations, or of texts, by the card's code, run as it is written but for its folder and what it
    scores."""
    found = re.search(r"```python\n(.*?)```", (done.folder / "README.md").read_text(), re.DOTALL)
    assert found is not None
    program, scores = found[1].replace("path/to/this/folder", str(done.folder)), []
    place = (
        '"A prompt and its answer"' if isinstance(answered[0], str) else re.findall(r"(?m)^turns = (.*)$", program)[0]
    )
    assert program.count(place) == 1
    for one in answered:
        exec(compile(program.replace(place, repr(one)), "card", "exec"), {})  # noqa: S102 - our own
        said = re.search(r"tensor\(\[\[(\S+?)\]\]", capsys.readouterr().out)
        assert said is not None
        scores.append(float(said[1]))
    return scores


def assert_equals_evaluation(done: Finished, chosen: list[float], rejected: list[float]) -> None:
    results = done.json("eval_results.json")
    right = sum(one > other for one, other in zip(chosen, rejected, strict=True)) / len(chosen)
    assert results["eval_preference_accuracy"] == right
    assert results["eval_reward_chosen"] == pytest.approx(sum(chosen) / len(chosen), abs=2e-4)
    assert results["eval_reward_rejected"] == pytest.approx(sum(rejected) / len(rejected), abs=2e-4)
    assert not [name for name in results if "logp" in name]


def test_conversations_rendered_as_usual_get_the_scores_of_the_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chatml writes a line break after the end of a turn."""
    done, held_out = trained(tmp_path, model_folder(tmp_path / "base"), True, chat_template="chatml")
    sides = [by_card(done, capsys, [row[name] for row in held_out]) for name in ANSWERS]
    assert_equals_evaluation(done, *sides)
    tokenizer = AutoTokenizer.from_pretrained(done.folder)
    model = AutoModelForSequenceClassification.from_pretrained(done.folder).eval()
    texts = [tokenizer.apply_chat_template(row["chosen"], tokenize=False) for row in held_out]
    with torch.no_grad():
        scores = [model(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]
    assert scores == pytest.approx(sides[0], abs=2e-4)


def test_the_card_of_a_reward_models_adapter_opens_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done, held_out = trained(tmp_path, model_folder(tmp_path / "base"), True, chat_template="chatml", use_peft=True)
    assert_equals_evaluation(done, *[by_card(done, capsys, [row[name] for row in held_out]) for name in ANSWERS])


def at_last_token(done: Finished, texts: list[str]) -> list[float]:
    """The scores of a server that reads the last token, whatever it is."""
    tokenizer = AutoTokenizer.from_pretrained(done.folder)
    model = AutoModelForSequenceClassification.from_pretrained(done.folder).eval()
    with torch.no_grad():
        states = [model.model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1] for text in texts]
        return [model.score(state).item() for state in states]


@pytest.mark.parametrize("padding", ["<|spare_pad|>", None])
def test_texts_get_the_scores_of_the_evaluation_from_any_server(
    padding: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer names no padding token, and its vocabulary has one or not."""
    done, held_out = trained(tmp_path, model_folder(tmp_path / "base", *([padding] if padding else [])), False)
    tokenizer, config = AutoTokenizer.from_pretrained(done.folder), done.json("config.json")
    assert config["pad_token_id"] == tokenizer.convert_tokens_to_ids(padding or tokenizer.eos_token)
    texts = [[row["prompt"] + row[name] for row in held_out] for name in ANSWERS]
    sides = [by_card(done, capsys, some) for some in texts]
    assert_equals_evaluation(done, *sides)
    end = tokenizer.eos_token if padding else ""
    assert at_last_token(done, [text + end for text in texts[0]]) == pytest.approx(sides[0], abs=2e-4)
    assert ("the score is at the token before" in (done.folder / "README.md").read_text()) == (padding is None)

    flags = {"model_name_or_path": done.folder, "validation_file": tmp_path / "validation_file.jsonl", "loss": "reward"}
    alone = {"do_train": False, "bf16": False}
    again = launch("python", tmp_path / "again", {**flags, **alone}, recipe="recipes/preference.py")
    assert_equals_evaluation(again, *sides)


def test_a_trained_reward_model_keeps_the_padding_by_which_it_is_read(tmp_path: Path) -> None:
    """As one of another library, whose scores are at the token before an end of text that pads."""
    base = model_folder(tmp_path / "base", "<|spare_pad|>", pad_token="<|endoftext|>")
    scores = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    scores.config.pad_token_id = AutoTokenizer.from_pretrained(base).pad_token_id
    scores.save_pretrained(base)
    done, _ = trained(tmp_path, base, False, max_steps=1)
    assert done.json("config.json")["pad_token_id"] == scores.config.pad_token_id
