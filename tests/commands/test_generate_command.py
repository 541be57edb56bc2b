"""`finetune generate` and `finetune chat`, in this process: what they write, and what they refuse."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from generation.tiny_models import POSITIONS, saved

from finetune.cli import main, parser
from finetune.data.chat.templates import shipped
from finetune.generation.answers import Answers
from finetune.run.launch import Launch

TEXTS = ["A", "A rather longer line of text", "Some words", "B", "Another line of some length", "C"]
SHORT = "{% for turn in messages %}{{ turn.role[0] }}:{{ turn.content }};{% endfor %}a:"  # leaves room for turns
FIRST = ("--max_new_tokens", "12", "--batch_size", "2")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "prompts.txt").write_text("\n".join(TEXTS))
    return tmp_path / "prompts.txt"


def generate(model: Path, prompts: Path, *words: str, name: str = "answers.jsonl") -> list[dict[str, Any]]:
    output = prompts.with_name(name)
    assert main(["generate", str(model), "--prompts", str(prompts), "--output", str(output), *FIRST, *words]) == 0
    return read(output)


def read(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().removesuffix("\n").split("\n")]


def texts(rows: list[dict[str, Any]]) -> list[str]:
    return [row["text"] for row in rows]


def test_answers_come_in_order_and_do_not_depend_on_the_batch(
    llama: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = generate(llama, prompts)
    said = capsys.readouterr().out
    assert "6 prompts as plain text" in said
    assert "greedy; at most 12 new tokens; 1 rank(s) on CPU, float32" in said
    assert [row["index"] for row in rows] == list(range(6))
    assert [row["prompt_tokens"] for row in rows] == list(map(len, TEXTS))
    assert {(row["finish_reason"], row["tokens"]) for row in rows} == {("length", 12)}
    assert len(set(texts(rows))) == 6
    assert generate(llama, prompts, "--batch_size", "1", name="one.jsonl") == rows
    assert main(["generate", str(llama), "--prompts", str(prompts), "--output", str(prompts.with_name("answers.jsonl")),
                 *FIRST, "--batch_size", "4"]) == 0  # fmt: skip
    assert "all 6 answers are there" in capsys.readouterr().err
    drawn = generate(llama, prompts, "--temperature", "0.9", "--seed", "3", name="drawn.jsonl")
    assert texts(drawn) != texts(rows)
    assert generate(llama, prompts, "--temperature", "0.9", "--seed", "3", "--batch_size", "5", name="b.jsonl") == drawn


def test_a_run_that_is_killed_goes_on_where_it_stopped(
    llama: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uncut = generate(llama, prompts)
    add, calls = Answers.add, []

    def killed(self: Answers, rows: Any) -> None:
        calls.append(len(rows))
        if len(calls) == 3:
            self._file.close()
            raise KeyboardInterrupt
        add(self, rows)

    output = prompts.with_name("cut.jsonl")
    words = ["generate", str(llama), "--prompts", str(prompts), "--output", str(output), *FIRST]
    with monkeypatch.context() as changed:
        changed.setattr(Answers, "add", killed)
        assert main(words) == 130
    assert calls == [2, 2, 2]
    assert not output.exists()
    capsys.readouterr()
    assert main([*words, "--temperature", "0.5"]) == 2
    assert "with another temperature, none, and not 0.5" in capsys.readouterr().err
    calls.clear()
    monkeypatch.setattr(Answers, "add", lambda self, rows: (calls.append(len(rows)), add(self, rows))[1])
    assert main(words) == 0
    assert "4 answers there already" in capsys.readouterr().out
    assert calls == [2]
    assert read(output) == uncut


def test_a_chat_model_is_asked_by_its_template_and_ends_its_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = shipped()["chatml"]
    model = saved(tmp_path / "model", template=template)
    (tmp_path / "a.jsonl").write_text('{"prompt": "Hi", "id": 7}\n{"messages": [{"role": "user", "content": "Hi"}]}\n')
    one, two = generate(model, tmp_path / "a.jsonl")
    assert "2 prompts by the model's chat template" in capsys.readouterr().out
    assert one == {**two, "index": 0, "id": 7}
    asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert one["prompt_tokens"] == len(asked)
    (tmp_path / "b.txt").write_text("Hi")
    assert generate(model, tmp_path / "b.txt", "--chat_template", "none", name="b.jsonl")[0]["prompt_tokens"] == 2
    plain = saved(tmp_path / "plain")
    (row,) = generate(plain, tmp_path / "b.txt", "--chat_template", "chatml", name="c.jsonl")
    assert row["prompt_tokens"] == len(asked)
    # The token that this one would write second ends its answers.
    config = json.loads((model / "generation_config.json").read_text())
    first, second = ends_of(model, asked)
    assert first != second
    (model / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [second]}))
    (row, _) = generate(model, tmp_path / "a.jsonl", name="d.jsonl")
    assert (row["finish_reason"], row["tokens"]) == ("end", 2)


def test_the_tokenizers_end_ends_an_answer_though_the_folder_names_another(tmp_path: Path) -> None:
    from finetune.generation.answering import answerer_of
    from finetune.generation.model import open_writer

    model = saved(tmp_path / "model", end=True)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    flags = parser().parse_args(["generate", str(model), "--prompts", "a", "--output", "b"])
    found = answerer_of(flags, open_writer(flags, Launch()), Launch())
    assert found.ends == {7, 256}
    assert found.model.generation_config.eos_token_id == [7, 256]


def ends_of(model: Path, asked: str) -> list[int]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(asked, return_tensors="pt")["input_ids"]
    made = AutoModelForCausalLM.from_pretrained(model).generate(ids, max_new_tokens=2, pad_token_id=0)
    return list(made[0, ids.shape[1] :].tolist())


def test_an_adapter_answers_with_its_base(llama: Path, prompts: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    )
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "merged" / name).write_bytes((llama / name).read_bytes())
    rows = generate(tmp_path / "adapter", prompts, name="adapter.jsonl")
    assert rows == generate(tmp_path / "merged", prompts, name="merged.jsonl")
    assert texts(rows) != texts(generate(llama, prompts, name="base.jsonl"))


def test_a_prompt_longer_than_the_model_reads_is_refused_or_cut(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "".join(chr(65 + i % 26) for i in range(POSITIONS))
    (tmp_path / "p.txt").write_text(f"short\n{long}\n{long[:-2]}\n")
    words = ["generate", str(llama), "--prompts", str(tmp_path / "p.txt"), "--output", str(tmp_path / "o"), *FIRST]
    assert main(words) == 2
    assert f"p.txt:2: has {POSITIONS} tokens, but the model reads {POSITIONS}" in capsys.readouterr().err
    assert main([*words, "--truncate_prompts"]) == 0
    assert "1 prompt too long: the beginning is cut off" in capsys.readouterr().out
    rows = read(tmp_path / "o")
    assert [(row["prompt_tokens"], row["tokens"]) for row in rows] == [
        (5, 12),
        (POSITIONS - 12, 12),
        (POSITIONS - 2, 2),
    ]
    (tmp_path / "q.txt").write_text(long[12:])
    assert texts(generate(llama, tmp_path / "q.txt")) == [rows[1]["text"]]


def folder_with(place: Path, name: str, content: dict[str, Any]) -> str:
    place.mkdir()
    (place / name).write_text(json.dumps(content))
    return str(place)


def test_what_cannot_be_is_refused_without_torch(tmp_path: Path, prompts: Path) -> None:
    """All in one fresh process, for one takes a while to start."""
    encoder = folder_with(tmp_path / "a", "config.json", {"architectures": ["BertForMaskedLM"]})
    seq2seq = {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
    adapter = folder_with(tmp_path / "c", "adapter_config.json", {"task_type": "SEQ_CLS"})
    (tmp_path / "d" / "checkpoint-7").mkdir(parents=True)
    causal = folder_with(tmp_path / "e", "config.json", {"architectures": ["LlamaForCausalLM"]})
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "theirs.jsonl").write_text("theirs\n")
    cases = [
        ([encoder], "is a BertForMaskedLM, but only a causal language model"),
        ([folder_with(tmp_path / "b", "config.json", seq2seq)], "is a T5ForConditionalGeneration"),
        ([adapter], "is an adapter for SEQ_CLS"),
        ([str(tmp_path / "d")], "has no config.json; it holds checkpoint-7. Give one of them"),
        (["./nowhere"], "./nowhere: there is no such folder"),
        ([causal, "--temperature", "-1"], "--temperature is -1.0, but it must be 0 or more"),
        ([causal, "--top_p", "1.5"], "--top_p is 1.5, but it must be more than 0 and at most 1"),
        ([causal, "--top_p", "0.5", "--temperature", "0"], "--temperature 0 does not sample"),
        ([causal, "--max_new_tokens", "0"], "--max_new_tokens is 0"),
        ([causal, "--stop", ""], "--stop ''"),
        ([causal, "--max_tokens", "3"], "unknown flag --max_tokens for `finetune generate`. Did you mean"),
        ([causal, "--prompts", str(tmp_path / "empty.txt")], "the file has no prompts"),
        ([causal, "--output", str(tmp_path / "theirs.jsonl")], "but not its theirs.jsonl.settings.json"),
        ([causal, "--output", str(tmp_path / "no" / "x")], "there is no folder"),
        ([causal, "--output", str(prompts), "--overwrite"], "is the file with the prompts"),
        ([causal, "--temperature", "nan"], "--temperature is nan"),
    ]
    code = (
        "import sys, json; from finetune.cli import main\n"
        "for words in json.loads(sys.argv[1]):\n    print(main(words), 'torch' in sys.modules, file=sys.stderr)\n"
    )
    words = [["generate", "--prompts", str(prompts), "--output", str(tmp_path / "o"), *case] for case, _ in cases]
    done = subprocess.run([sys.executable, "-c", code, json.dumps(words)], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert lines[1::2] == ["2 False"] * len(cases)
    for line, (case, said) in zip(lines[::2], cases, strict=True):
        assert said in line, case
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--deepspeed", "zero2"], "stages 0 to 2 shard gradients"),
        (["--deepspeed", "zero9"], "there is no such DeepSpeed config"),
        (["--dtype", "float16"], "--dtype float16 is for GPUs"),
        (["--chat_template", "nowhere"], "--chat_template nowhere: there is no such file"),
    ],
)
def test_what_only_the_model_and_the_machine_tell_is_refused(
    llama: Path, prompts: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = prompts.with_name("o")
    assert main(["generate", str(llama), "--prompts", str(prompts), "--output", str(output), *words]) == 2
    assert said in capsys.readouterr().err
    assert list(prompts.parent.iterdir()) == [prompts]


def test_messages_want_a_chat_template(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    words = ["generate", str(llama), "--prompts", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "o")]
    assert main(words) == 2
    assert "a.jsonl:1: has `messages`, but the model has no chat template" in capsys.readouterr().err
    own = "{{ raise_exception('Roles must alternate') }}"
    (tmp_path / "own.jinja").write_text(own)
    assert main([*words, "--chat_template", str(tmp_path / "own.jinja")]) == 2
    assert "a.jsonl:1: the chat template rejects this conversation (Roles must alternate)" in capsys.readouterr().err


def chat(model: Path, typed: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    return main(["chat", str(model), "--max_new_tokens", "6", *words])


def test_a_chat_goes_on_is_reset_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved(tmp_path / "model", template=shipped()["chatml"])
    (tmp_path / "hi.jsonl").write_text(
        json.dumps({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]})
    )
    wanted = generate(model, tmp_path / "hi.jsonl", "--max_new_tokens", "6")[0]["text"]
    capsys.readouterr()
    long = "x" * POSITIONS
    assert chat(model, f"Hi\n\n/reset\nHi\n{long}\nHi\n/quit\nHi\n", monkeypatch, "--system", "S") == 0
    output, errors = capsys.readouterr()
    first, *answers = output.removesuffix("\n").split("\n")
    assert first.startswith("chat: ")
    assert "/reset starts over, /quit ends" in first
    printable = "".join(one if one.isprintable() or one in "\n\t" else "?" for one in wanted)
    assert answers[:2] == [printable] * 2, "a chat that is reset begins anew"
    assert "/reset starts over" in errors  # the long line; and the next, after the answer, is too long as well
    assert chat(model, "Hi", monkeypatch) == 0, "the end of the input ends it"


def test_a_chat_wants_a_template(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(llama, "Hi\n", monkeypatch) == 2
    assert "has no chat template. Give one with --chat_template" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--stop", "cut"]])
def test_a_screen_shows_what_is_kept_and_no_more(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from generation.tiny_models import tokenizer

    from finetune.generation.chat import Screen

    own, text = tokenizer(), "an é, then cu and cut off"
    screen = Screen(own, words[1:])
    screen.put(torch.tensor([[1, 2, 3]]))  # the prompt
    seen = ""
    for token in own(text)["input_ids"]:
        screen.put(torch.tensor([token]))
        seen += capsys.readouterr().out
        assert text.startswith(seen)
        assert not words or "cut" not in seen
    screen.end()
    assert seen + capsys.readouterr().out == ("an é, then cu and " if words else text) + "\n"


def test_ctrl_c_ends_an_answer_and_not_the_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from finetune.generation.answering import Answerer

    model = saved(tmp_path / "model", template=SHORT)
    answer, asked = Answerer.answer, []

    def stopped(self: Answerer, ids: Any, *others: Any) -> Any:
        asked.append(ids[0])
        if len(asked) == 2:
            raise KeyboardInterrupt
        return answer(self, ids, *others)

    monkeypatch.setattr(Answerer, "answer", stopped)
    assert chat(model, "One\nTwo\nTwo\n", monkeypatch) == 0
    assert "(stopped, and forgotten)" in capsys.readouterr().err
    assert asked[1] == asked[2], "what was stopped is not in the conversation"
    assert len(asked[2]) > len(asked[0])


def test_a_chat_strips_thoughts_and_says_which_line_is_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from finetune.generation.answering import Answerer

    model, asked = saved(tmp_path / "model", template=SHORT), []

    def thinks(self: Answerer, ids: Any, *_: Any) -> Any:
        asked.append(self.tokenizer.decode(ids[0]))
        return [{"text": "<think>hm</think>Yes."}]

    monkeypatch.setattr(Answerer, "answer", thinks)
    typed = io.TextIOWrapper(io.BytesIO(b"One\n\xff\xfe\nTwo\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", typed)
    assert main(["chat", str(model), "--reasoning", "strip"]) == 0
    assert "this line is not valid utf-8, and is ignored" in capsys.readouterr().err
    assert len(asked) == 2
    assert "Yes." in asked[1]
    assert "hm" not in asked[1]


def test_a_tokenizer_may_have_tokens_that_the_model_does_not_embed(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    model = saved(tmp_path / "model")
    rows = generate(model, prompts)
    own = AutoTokenizer.from_pretrained(model)
    own.add_special_tokens({"pad_token": "[PAD]"})
    own.save_pretrained(model)
    assert generate(model, prompts, name="padded.jsonl") == rows
    (tmp_path / "own.txt").write_text("fine\nwith [PAD] in it\n")
    words = ["generate", str(model), "--prompts", str(tmp_path / "own.txt"), "--output", str(tmp_path / "o")]
    assert main(words) == 2
    assert "own.txt:2: has the token '[PAD]'" in capsys.readouterr().err


def test_of_several_ranks_one_answers_help_and_a_wrong_flag() -> None:
    import os

    from conftest import REPO

    for rank, words in ((0, "usage: generate.py"), (1, "")):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        script = [sys.executable, "recipes/generate.py"]
        done = subprocess.run([*script, "--help"], capture_output=True, text=True, env=env, cwd=REPO)
        assert done.returncode == 0
        assert done.stdout.startswith(words)
        assert bool(done.stdout) == (rank == 0)
    wrong = subprocess.run([*script, "--promts", "a"], capture_output=True, text=True, cwd=REPO)
    assert wrong.returncode == 2
    assert "error: " in wrong.stderr


def test_launch_prints_its_line_and_asks_for_no_config(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "FOLDER", "--prompts", "a.txt", "--output", "b"]
    assert main(["launch", "--gpus_per_node", "2", *words]) == 0
    line = capsys.readouterr().out
    assert line.startswith("deepspeed --num_gpus 2 ")
    assert line.endswith("recipes/generate.py FOLDER --prompts a.txt --output b\n")
