"""BOS in front of documents and prompts: where the tokenizer writes one, in training as in what the model is asked."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_documents import prepared
from tokenizers import processors

from finetune.data import documents, token_stream
from finetune.data.packing import IGNORED
from finetune.data.tokenizer import beginning_of, train_text_tokenizer
from finetune.errors import RequestError
from finetune.generation.encode import encode
from finetune.generation.prompts import Prompt
from finetune.run.flags.language import SampleArguments
from finetune.training import same_run
from finetune.training.checkpoints.identity import Identity
from finetune.training.course import Course
from finetune.training.samples import _tokens

BOS, EOS = "<s>", "<|endoftext|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokenizer_of(kind: str) -> Any:
    """Of bytes. Llama's and BERT's write tokens about a text, GPT-2's has a BOS and does not write it."""
    made = train_text_tokenizer("byte", [], 0, 512, with_end=True)
    made.add_special_tokens({"bos_token": BOS})
    ids = [(BOS, made.bos_token_id), (EOS, made.eos_token_id)]
    forms = {"llama": f"{BOS} $A", "both": f"{BOS} $A {EOS}", "end": f"$A {EOS}"}
    if kind in forms:
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(single=forms[kind], special_tokens=ids)
    return made


def asked(tokenizer: Any, content: Any) -> list[int]:
    return encode(tokenizer, [Prompt("a.jsonl:1", content)], len(tokenizer))[0]


def rows(path: Path, *some: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in some * 4))
    return str(path)


def first_of(data: Any) -> Any:
    """The tokens of the first training document."""
    tokens = data.splits["train"].tokens
    return tokens.ids[: tokens.starts[1]].tolist()


KINDS = ["llama", "both", "end", "gpt2"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_in_front_is_found_by_what_the_tokenizer_does(kind: str) -> None:
    made = tokenizer_of(kind)
    assert made.bos_token == BOS
    assert beginning_of(made) == ([made.bos_token_id] if kind in ("llama", "both") else [])
    assert asked(made, "Is it?")[: len(beginning_of(made))] == beginning_of(made)
    assert beginning_of(train_text_tokenizer("char", ["0123"], 0, 64, with_end=True)) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begins", ["", BOS])
def test_a_model_is_trained_on_what_it_is_asked_with(kind: str, begins: str, tmp_path: Path) -> None:
    made = tokenizer_of(kind)
    some = {
        "text": ({"text": f"{begins}Is it?"}, [f"{begins}Is it?"]),
        "completion": ({"prompt": f"{begins}Is it?", "completion": " Yes."}, [f"{begins}Is it?", " Yes."]),
    }
    for name, (row, words) in some.items():
        data = prepared(
            made, blocks={"packing": "none"}, block_size=64, train_file=rows(tmp_path / f"{name}.jsonl", row)
        )
        ids = first_of(data)
        prompt = asked(made, words[0])
        assert ids == [*prompt, *[i for word in words[1:] for i in made(word, add_special_tokens=False)["input_ids"]],
                       made.eos_token_id]  # fmt: skip
        assert ids.count(made.bos_token_id) == (1 if begins or kind in ("llama", "both") else 0), "never twice"
        assert _tokens(made, SampleArguments(sample_prompt=words[0]), is_chat=False) == prompt
        labels = data.splits["train"][0]["shift_labels"]
        assert made.bos_token_id not in labels[labels != IGNORED].tolist(), "it is read, and not learnt"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace("{{ bos_token }}", "")])
def test_a_chat_begins_as_its_template_writes_it(kind: str, template: str, tmp_path: Path) -> None:
    made = tokenizer_of(kind)
    made.chat_template = template
    turns = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}]
    data = prepared(
        made, blocks={"packing": "none"}, block_size=64, train_file=rows(tmp_path / "c.jsonl", {"messages": turns})
    )
    prompt = asked(made, turns[:1])
    assert first_of(data)[: len(prompt)] == prompt
    assert prompt.count(made.bos_token_id) == ("bos_token" in template)
    assert prompt == _tokens(made, SampleArguments(sample_prompt="Is it?"), is_chat=True)
    theirs = made.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
    assert prompt == theirs, "as transformers' own pipelines ask"
    assert not data.beginning


@pytest.mark.parametrize("streaming", [False, True])
def test_a_text_in_pieces_begins_once(streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 50)
    monkeypatch.setattr(token_stream, "BATCH_ROWS", 2)
    monkeypatch.setattr(token_stream, "WINDOW_TOKENS", 300)
    text = "".join(f"line {i} of the text\n" for i in range(100))
    (tmp_path / "a.txt").write_text(text)
    made = tokenizer_of("llama")
    flags: dict[str, Any] = {
        "train_file": str(tmp_path / "a.txt"),
        "validation_file": str(tmp_path / "a.txt"),
        "streaming": streaming,
    }
    data = prepared(made, block_size=32, **flags)
    whole = [made.bos_token_id, *made(text, add_special_tokens=False)["input_ids"], made.eos_token_id]
    assert data.splits["validation"].tokens.ids.tolist() == whole
    train = data.splits["train"]
    for _ in range(2):  # each epoch of a stream begins anew
        blocks = list(train.blocks(0)) if streaming else [train[i] for i in range(len(train))]
        found = sorted(block["input_ids"].tolist() for block in blocks)
        assert found == sorted(whole[i : i + 32] for i in range(0, (len(whole) - 1) // 32 * 32, 32))


@pytest.mark.parametrize("packing", ["wrapped", "bfd", "none"])
@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
def test_blocks_have_a_bos_for_each_document_and_it_is_learnt_after_another_document_alone(
    packing: str, document_mask: bool, streaming: bool, tmp_path: Path
) -> None:
    made = tokenizer_of("llama")
    file = rows(tmp_path / "a.jsonl", *({"text": f"document {i} " * (i + 1)} for i in range(5)))
    blocks = {"packing": packing, "document_mask": document_mask}
    flags = {"train_file": file, "validation_file": file, "streaming": streaming}
    data = prepared(made, block_size=24, blocks=blocks, **flags)
    train, count = data.splits["train"], 20
    items = list(train.blocks(0)) if streaming else [train[i] for i in range(len(train))]
    read, learn = "input_ids", "shift_labels"
    inputs, labels = (np.concatenate([np.asarray(item[name]) for item in items]) for name in (read, learn))
    assert (inputs == made.bos_token_id).sum() == count
    follows = packing == "wrapped" and not document_mask
    assert (labels == made.bos_token_id).sum() == (count - 1 if follows else 0)
    if document_mask:
        places = np.concatenate([np.asarray(item["position_ids"]) for item in items])
        assert not places[inputs == made.bos_token_id].any()
    if not streaming and not follows:
        held_out = data.splits["validation"]  # whose last block may be a short one
        learnt = sum(int((held_out[i]["shift_labels"] != IGNORED).sum()) for i in range(len(held_out)))
        assert data.account.learnt["validation"] == learnt, "bits per byte are of what is predicted"


def test_only_what_a_tokenizer_with_a_bos_makes_is_prepared_anew(tmp_path: Path) -> None:
    from finetune.data.tokenizer import identity, identity_for_texts

    for kind in KINDS:
        made = tokenizer_of(kind)
        before = [*identity(made), made.chat_template]
        assert (identity_for_texts(made) == before) == (kind in ("end", "gpt2"))


def test_a_checkpoint_that_was_trained_without_the_bos_is_refused_or_said(capsys: pytest.CaptureFixture[str]) -> None:
    facts: dict[str, Any] = {"model": {}, "engine": {same_run.ARITHMETIC: {}}, "base": {}, "teacher": {}, "mixture": {}}
    now = {**facts, "rows": {"train": "a"}, "files": {}, "tokenizer": {"hash": "t", "beginning": BOS}}
    before = {**facts, "rows": {"train": "b"}, "files": {}, "tokenizer": {"hash": "t"}}
    of_before = Course("r", {}, "checkpoint-5", 5, Identity("r", {}, before, {}, ()))
    assert of_before.before is not None
    flags = {"resume_changed": "refuse"}
    run: Any = SimpleNamespace(value=flags.get)
    with pytest.raises(RequestError, match="each document now begins with <s>, as its tokenizer has it"):
        same_run._compare(run, of_before, of_before.before, now)
    flags["resume_changed"] = "allow"
    assert same_run._compare(run, of_before, of_before.before, now) == {"train rows": ("b", "a")}
    assert "from step 6 on the train rows are not those of checkpoint-5 (each document now" in capsys.readouterr().out


def test_a_date_in_the_chat_template_is_named_as_the_cause() -> None:
    facts: dict[str, Any] = {"model": {}, "engine": {same_run.ARITHMETIC: {}}, "base": {}, "teacher": {}, "mixture": {}}
    now = {**facts, "rows": {"train": "a"}, "files": {}, "tokenizer": {"hash": "t", same_run.DATED: True}}
    before = {**now, "rows": {"train": "b"}}
    course = Course("r", {}, "checkpoint-5", 5, Identity("r", {}, before, {}, ()))
    assert course.before is not None
    run: Any = SimpleNamespace(value={"resume_changed": "refuse"}.get)
    with pytest.raises(RequestError, match="the chat template writes today's date: freeze it"):
        same_run._compare(run, course, course.before, now)
