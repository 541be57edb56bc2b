"""Every command of the README and of four guides is run, shortened; every file that the README names is there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, TINY, flags, free_port, launch, run_to_its_end
from PIL import Image

README = (REPO / "README.md").read_text()
GUIDES = [(REPO / "docs" / f"{name}.md").read_text() for name in ("quickstart", "coming_from", "seq_cls", "causal_lm")]
# What the tests themselves are started by; the whole gate, .ci/run, begins with it.
INSTALLS = re.compile(r"install\.sh|pytest|ruff")


def commands(text: str) -> list[str]:
    """The lines of the bash blocks, continued lines joined, activation left out; and what fills a cell of a table."""
    cells = re.findall(r"\| `((?:python|deepspeed) [^`]+)` \|", text)
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [*(line.strip() for line in lines if line.strip()), *cells]


def to_run() -> list[str]:
    found = [command for page in (README, *GUIDES) for command in commands(page) if not INSTALLS.search(command)]
    return [*dict.fromkeys(found), main_job()]


def main_job() -> str:
    """What the line that installs goes on with; the tests' own environment has the launcher elsewhere."""
    (line,) = (command for command in commands(README) if command.startswith("bash install.sh && "))
    return line.removeprefix("bash install.sh && ").replace(".venv/bin/", "")


def test_the_readme_has_commands_for_every_launcher() -> None:
    found = to_run()
    assert len(found) >= 11
    assert {command.split()[0] for command in found} >= {"python", "deepspeed", "torchrun", "accelerate", "finetune"}


def test_commands_of_lora_do_not_train_at_the_rate_of_full_fine_tuning() -> None:
    of_lora = [command for command in to_run() if "causal_lm.py" in command and "--use_peft" in command]
    assert of_lora
    assert all("--learning_rate" in command for command in of_lora)


def run(command: str, cwd: Path = REPO) -> tuple[int, str]:
    return run_to_its_end(["bash", "-c", command], {"HF_HUB_OFFLINE": "1"}, cwd)


def write_files(folder: Path) -> None:
    """Small files under the names that the README gives."""
    for name in ("reviews.csv", "train.csv", "dev.csv", "test.csv", "train.tsv", "dev.tsv", "test.tsv"):
        separator = "\t" if name.endswith("tsv") else ","
        rows = [f"row number {i} of many{separator}{'good' if i % 2 else 'bad'}\n" for i in range(60)]
        (folder / name).write_text(f"text{separator}label\n" + "".join(rows))
    (folder / "input.txt").write_text("A line of text to learn by heart.\n" * 100)
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": f"text number {i} " * 20}) + "\n" for i in range(40))
    )
    (folder / "reported").mkdir()
    (folder / "reported" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    for index in range(40):
        place = folder / "photos" / ("dark" if index % 2 else "bright")
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (index, index, index) if index % 2 else (255 - index,) * 3).save(
            place / f"{index}.png"
        )
    (folder / "train.conll").write_text("Ada B-person\nwrites O\n\nIn O\nParis B-place\n\n" * 20)
    context = "Ada Lovelace wrote it in London. " * 4
    asked = [
        {"id": f"{i}", "question": "Who wrote it?", "answers": [{"text": "Ada", "answer_start": 0}]} for i in range(9)
    ]
    paragraphs = [{"context": f"{context}{i}", "qas": asked} for i in range(9)]
    (folder / "train-v1.1.json").write_text(json.dumps({"data": [{"title": "Ada", "paragraphs": paragraphs}]}))
    pairs = [{"document": f"A long text, number {i}.", "summary": f"Text {i}."} for i in range(40)]
    for name in ("summaries.jsonl", "articles.jsonl"):
        (folder / name).write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    answers = [{"prompt": f"Add {i} and 1.", "chosen": f"{i + 1}", "rejected": f"{i + 2}"} for i in range(40)]
    (folder / "preferences.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    pairs = [{"anchor": f"What is {i} and 1?", "positive": f"It is {i + 1}."} for i in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (folder / "prompts.jsonl").write_text('{"prompt": "Say it"}\n{"prompt": "Say something else"}\n')
    turns = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "Yes."}]
    (folder / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)


@pytest.fixture(scope="module")
def causal_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from finetune.data.tokenizer import train_text_tokenizer
    from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM

    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_text_tokenizer("byte", [], 0, 2048, with_end=True)
    config = GPTLiteConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, max_position_embeddings=2048)
    GPTLiteForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text_to_text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    saving = {"max_steps": 1, "max_train_samples": 64, "bf16": False, "eval_strategy": "no", "model_size": "tiny"}
    return launch("python", tmp_path_factory.mktemp("t5") / "run", saving, recipe="recipes/seq2seq.py").folder


@pytest.fixture(scope="module")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As another toolkit would leave it: a classifier of 32 x 32 pictures and its processor."""
    from transformers import ResNetConfig, ResNetForImageClassification, ViTImageProcessorPil

    folder = tmp_path_factory.mktemp("image_model")
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
    ResNetForImageClassification(ResNetConfig(**sizes)).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of seq_cls that has ended."""
    saving = {**TINY, "save_strategy": "steps", "save_steps": 3}
    return launch("python", tmp_path_factory.mktemp("done") / "run", saving).folder


SHORT: dict[str, dict[str, Any]] = {
    "seq_cls": TINY,
    "token_cls": TINY,
    "question_answering": TINY,
    "seq2seq": {"max_train_samples": 64, "bf16": False},
    "causal_lm": {"sample_tokens": 4, "bf16": False},
    "preference": {"max_train_samples": 32, "max_eval_samples": 8, "bf16": False},
    "embedding": {"max_train_samples": 32, "max_eval_samples": 8, "bf16": False},
    "causal_lm_pipeline": {"sample_tokens": 4, "bf16": False},
    "image_cls": {"bf16": False},
}


@pytest.mark.nightly
@pytest.mark.usefixtures("built_ops")
@pytest.mark.parametrize("command", to_run())
def test_a_command_of_the_readme_works(
    command: str,
    minilm: Path,
    causal_model: Path,
    text_to_text_model: Path,
    image_model: Path,
    done: Path,
    tmp_path: Path,
) -> None:
    write_files(tmp_path)
    for path in tmp_path.iterdir():
        command = re.sub(rf"(?<=[\s\"]){re.escape(path.name)}", str(path), command)
    if "runs/large" in command:  # a teacher of the same labels
        values = {**TINY, "model_name_or_path": minilm, "train_file": tmp_path / "reviews.csv", "max_steps": 1}
        teacher = launch("python", tmp_path / "large", values).folder
        command = command.replace("runs/large", str(teacher))
    command = command.replace("path/to/small", "path/to/model").replace("path/to/large", str(causal_model))
    command = command.replace("path/to/t5", str(text_to_text_model)).replace("--num_gpus 8", "--num_gpus 2")
    command = command.replace("runs/python", str(tmp_path / "run"))
    is_run = None if command.startswith("finetune ") else re.search(r"recipes/(\w+)\.py", command)
    if is_run:
        models = {
            "seq_cls": minilm,
            "token_cls": minilm,
            "question_answering": minilm,
            "embedding": minilm,
            "image_cls": image_model,
        }
        command = command.replace("path/to/model", str(models.get(is_run[1], causal_model)))
        short = {**SHORT[is_run[1]], "max_steps": 2, "output_dir": tmp_path / "run"}
        command = re.sub(rf" --({'|'.join(short)}) \S+", "", command) + " " + " ".join(flags(short))
        port = free_port()
        command = command.replace("deepspeed --num_gpus", f"deepspeed --master_port {port} --num_gpus")
        command = command.replace("torchrun --", f"torchrun --master_port {port} --")
    command = command.replace("path/to/model", str(causal_model)).replace(
        "answers.jsonl", str(tmp_path / "answers.jsonl")
    )
    if command.startswith("finetune bench"):
        command += f" --only wide-ddp --output_dir {tmp_path / 'bench'}"
    command = re.sub(r"runs/\w+ runs/\w+ --html ", f"{tmp_path / 'reported'} --html {tmp_path}/", command)
    command = command.replace("runs/seq_cls", str(done)).replace("runs/exported", str(tmp_path / "exported"))
    status, output = run(command)
    assert status == 0, f"{command}\n{output[-4000:]}"
    if is_run:
        assert list((tmp_path / "run").glob("*model*.safetensors"))
    if is_run and is_run[1] == "seq_cls":
        (opened,) = re.findall(r"`(pipeline\(.*?\))`", README)
        opened = opened.replace("runs/seq_cls", str(tmp_path / "run"))
        code = f"from transformers import pipeline; print({opened}('Return the current event loop.'))"
        used = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert used.returncode == 0, used.stderr[-2000:]
        assert "'score'" in used.stdout


def test_every_file_that_the_readme_names_is_there() -> None:
    named = set(re.findall(r"(?:ds_configs|recipes|docs|benchmarks)/[\w./-]*", README))
    assert {"recipes/seq_cls.py", "recipes/configs/", "ds_configs/README.md", "docs/results/"} <= named
    assert [name for name in named if not (REPO / name).exists()] == []
