"""What a stranger's folder asks for and does not get: code from elsewhere, endless rendering, files outside it, and a
word of its own in a spreadsheet or on a terminal."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from conftest import REPO

from finetune.cli import main
from finetune.data.columns import Labels
from finetune.data.encoding import Encoder
from finetune.data.files import open_file, open_hub
from finetune.data.formats import Format
from finetune.data.tokenizer import train_text_tokenizer
from finetune.errors import RequestError
from finetune.privacy import shown
from finetune.report.text import cell, fenced
from finetune.safe_read import bounded
from finetune.safe_read.bounded import SECONDS_EACH, each_bounded
from finetune.safe_read.folders import check_data_folder, check_model_folder
from finetune.training.results import write_predictions

ASKS: dict[str, dict[str, Any]] = {
    "a kernel as attention": {"attn_implementation": "evil/kern"},
    "a kernel by the inner name": {"_attn_implementation": "evil/kern@v1:f"},
    "a paged kernel": {"attn_implementation": "paged|evil/kern"},
    "a kernel for a part": {"attn_implementation": {"text_config": "evil/kern"}},
    "a kernel in a part's own config": {"text_config": {"backbone": {"_attn_implementation": "evil/kern"}}},
    "a kernel for experts": {"experts_implementation": "evil/moe"},
    "a number as attention": {"attn_implementation": 3},
    "kernels": {"use_kernels": True},
    "a quantizer that fetches kernels": {"quantization_config": {"quant_method": "mxfp4"}},
    "a quantizer without a name": {"quantization_config": {"bits": 4}},
    "a module by name": {"auto_mapping": {"parent_library": "os", "base_model_class": "system"}},
    "pickled weights by name": {"transformers_weights": "adapter_model.bin"},
    "weights elsewhere": {"transformers_weights": "../x.safetensors"},
    "code to generate by": {"custom_generate": "evil/generate"},
}


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "adapter_config.json", "tokenizer_config.json"]
)
@pytest.mark.parametrize("asks", ASKS)
def test_a_config_is_refused_that_asks_for(asks: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps({"model_type": "gpt2", **ASKS[asks]}))
    with pytest.raises(RequestError, match=r"--trust_remote_code|said: .*json names"):
        check_model_folder(tmp_path, "said")
    check_model_folder(tmp_path, "said", trusts_code=True)


def test_what_models_have_is_taken(tmp_path: Path) -> None:
    config = {"attn_implementation": "sdpa", "_attn_implementation": None, "quantization_config": None,
              "text_config": {"experts_implementation": "grouped_mm", "layers": [{"a": [1, None]}]}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"auto_mapping": None, "megatron_config": None}))
    four = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "generation_config.json").write_text(json.dumps(four))
    check_model_folder(tmp_path, "said")


def test_a_snapshot_of_the_hubs_cache_is_taken_and_a_link_out_of_it_is_not(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "1").write_text('{"model_type": "gpt2"}')
    (snapshot / "config.json").symlink_to("../../blobs/1")
    check_model_folder(snapshot, "said")
    (tmp_path / "key").write_text("{}")
    (blobs / "2").symlink_to(tmp_path / "key")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/2")
    with pytest.raises(RequestError, match="leads out of"):
        check_model_folder(snapshot, "said")


TEMPLATES = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "one call that takes minutes": "{{ ([[1]] * 1000000) | sum(start=[]) }}",
    "a text that doubles": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x * 2 %}{% endfor %}",
    "a long text": "{{ 'a' * 10**10 }}",
    "a long range": "{{ range(10**9) | list }}",
    "a wide number": "{{ '%0999999999d' % 1 }}",
    "a macro in itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "another file": "{% include '/etc/passwd' %}",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_is_stopped_that_has(template: str) -> None:
    tokenizer = train_text_tokenizer("byte", [], 0, 512, with_end=True)
    tokenizer.chat_template = TEMPLATES[template]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(RequestError, match="chat template"):
        Encoder(tokenizer, Format("messages", "messages", ("messages",)))({"messages": [turns]})


def test_what_a_child_gives_is_in_order_and_its_refusals_are_ours() -> None:
    assert each_bounded(lambda n: [n, str(n)], range(300), "it") == [[n, str(n)] for n in range(300)]

    def refuse(number: int) -> int:
        if number == 2:
            raise RequestError("two is none")
        return number

    with pytest.raises(RequestError, match=r"^two is none$"):
        each_bounded(refuse, range(4), "it")
    with pytest.raises(RequestError, match="it fails: ZeroDivisionError"):
        each_bounded(lambda n: 1 // n, [1, 0], "it")
    with pytest.raises(RequestError, match=f"more than {SECONDS_EACH} s .* at 7"):
        each_bounded(lambda n: os.abort() if n == 7 else n, [6, 7], "it")


def test_a_child_that_waits_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "WAITS_SECONDS", 1)
    with pytest.raises(RequestError, match=r"1 s of wall clock .* at 3"):
        each_bounded(lambda n: Event().wait() if n == 3 else n, [2, 3], "it")


@pytest.mark.parametrize("place", ["../secret.csv", "OUT/secret.csv", "link.csv"])
def test_a_folder_of_data_does_not_name_files_outside(place: str, tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text("text,label\nnobody may see this,1\n")
    folder = tmp_path / "data"
    folder.mkdir()
    named = place.replace("OUT", str(tmp_path))
    if place == "link.csv":
        (folder / place).symlink_to(tmp_path / "secret.csv")
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {named}\n---\n")
    with pytest.raises(RequestError, match="leads out of"):
        open_hub(str(folder), None, "train")


def test_folders_in_each_other_are_read_to_a_bounded_depth(tmp_path: Path) -> None:
    """Python 3.11 calls itself for each level, and some thousand end it."""
    (tmp_path / "/".join("d" * 50)).mkdir(parents=True)
    check_data_folder(tmp_path, "x")
    (tmp_path / "/".join("d" * 51)).mkdir()
    with pytest.raises(RequestError, match="deeper than 50 levels"):
        check_data_folder(tmp_path, "x")


def test_a_packed_table_is_not_unpacked(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "a.csv").write_bytes(gzip.compress(b"text,label\n" + b"a,1\n" * 1000))
    with pytest.raises(RequestError, match=r"is compressed \(gzip\)"):
        open_file("train_file", str(tmp_path / "a.csv"))


def test_a_report_is_not_written_through_a_link(tmp_path: Path) -> None:
    run, mine = tmp_path / "run", tmp_path / "profile"
    run.mkdir()
    mine.write_text("mine")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n')
    (run / "report.html").symlink_to(mine)
    assert main(["report", str(run)]) == 2
    assert mine.read_text() == "mine"


FORMULAS = ("=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1")


def test_predictions_hold_no_formula_and_numbers_stay_numbers(tmp_path: Path) -> None:
    names = (*FORMULAS, "-1", "+1", "plain")
    path = tmp_path / "predictions.csv"
    write_predictions(path, np.eye(len(names)), Labels("classification", names), None, [f"={n}.png" for n in names])
    with path.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    assert [row[1] for row in rows] == [*(f"'{name}" for name in FORMULAS), "-1", "+1", "plain"]
    assert all(row[0].startswith("'=") for row in rows)
    write_predictions(path, np.array([[-0.5], [2.0]]), Labels("regression", ()), [-1.5, 2.0], [0, 1])
    assert path.read_text().splitlines()[1:] == ["0,-0.5,-1.5", "1,2.0,2.0"]


@pytest.mark.parametrize("letter", ["\u202e", "\u2066", "\u200f", "\u061c", "\x1b", "\x07", "\x9b", "\u2028"])
def test_neither_cards_nor_terminals_get(letter: str) -> None:
    text = f"a{letter}b\nc"
    assert letter not in cell(text) + fenced(text) + shown(text)
    assert shown(text).endswith("\nc")


def test_words_keep_their_joiners() -> None:
    assert shown("می‌خواهم") == "می‌خواهم"


def test_a_bug_report_of_doctor_does_not_name_the_home_folder(tmp_path: Path) -> None:
    home = tmp_path / "ann"
    (home / "runs").mkdir(parents=True)
    words = ["doctor", "--json", "--output_dir", str(home / "runs"), "--hostfile", str(home / "hosts")]
    environment = {**os.environ, "HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, "-m", "finetune.cli", *words], capture_output=True, text=True, env=environment, cwd=home,
        check=False,
    )  # fmt: skip
    assert "~/runs" in done.stdout
    assert str(home) not in done.stdout + done.stderr
    assert json.loads(done.stdout)["results"]
