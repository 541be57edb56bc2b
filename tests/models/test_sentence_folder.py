"""The folder of an embedding model: read as sentence-transformers writes it, and written as it reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import RequestError
from finetune.models.sentence_folder import MODULE, read_sentence_model, write_sentence_model


def write(folder: Path, **files: Any) -> str:
    (folder / "1_Pooling").mkdir()
    kinds = files.get("kinds", ["Transformer", "Pooling"])
    (folder / "modules.json").write_text(json.dumps([{"type": f"{MODULE}{kind}"} for kind in kinds]))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(files.get("pooling", {})))
    for name in ("sentence_bert_config", "config_sentence_transformers"):
        (folder / f"{name}.json").write_text(json.dumps(files.get(name, {})))
    return str(folder)


@pytest.mark.parametrize("how", ["mean", "cls", "last"])
def test_what_is_written_is_read(how: str, tmp_path: Path) -> None:
    write_sentence_model(tmp_path, how, 32, 77, {"query": "q: ", "document": ""})
    found = read_sentence_model(str(tmp_path), "main", None)
    assert (found.pooling, found.max_seq_length, dict(found.prompts)) == (how, 77, {"query": "q: ", "document": ""})


def test_a_real_folder_is_read(minilm: Path) -> None:
    found = read_sentence_model(str(minilm), "main", None)
    assert (found.pooling, found.max_seq_length) == ("mean", 256)


def test_the_newer_form_is_read_and_passage_is_a_document(tmp_path: Path) -> None:
    settings = {"prompts": {"query": "query: ", "passage": "passage: "}}
    name = write(tmp_path, pooling={"pooling_mode": "lasttoken"}, config_sentence_transformers=settings)
    found = read_sentence_model(name, "main", None)
    assert found.pooling == "last"
    assert found.prompts["document"] == "passage: "


def test_a_folder_that_says_nothing_has_nothing(tmp_path: Path) -> None:
    assert read_sentence_model(str(tmp_path), "main", "cls").pooling == "cls"


def test_the_prompt_that_a_text_gets_by_itself_is_kept(tmp_path: Path) -> None:
    settings = {"prompts": {"query": "q: "}, "default_prompt_name": "query"}
    found = read_sentence_model(write(tmp_path, config_sentence_transformers=settings), "main", "mean")
    write_sentence_model(tmp_path, "mean", 32, 77, found.prompts, found.default_prompt)
    assert read_sentence_model(str(tmp_path), "main", None).default_prompt == "query"


def test_a_module_that_would_be_lost_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"modules\.json has Dense, which would be lost"):
        read_sentence_model(write(tmp_path, kinds=["Transformer", "Pooling", "Dense"]), "main", None)


@pytest.mark.parametrize(
    "pooling", [{"pooling_mode_max_tokens": True}, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}]
)
def test_another_pooling_is_refused_unless_one_is_said(pooling: dict[str, bool], tmp_path: Path) -> None:
    name = write(tmp_path, pooling=pooling)
    with pytest.raises(RequestError, match="choose one with --pooling"):
        read_sentence_model(name, "main", None)
    assert read_sentence_model(name, "main", "mean").pooling == "mean"


@pytest.mark.parametrize("text", ["[[", "3", '{"type": 4}', '["x", null]', '[{"type": []}]'])
def test_modules_of_any_form_end_in_words(text: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(RequestError):
        read_sentence_model(str(tmp_path), "main", None)


def test_a_pipe_and_a_link_out_of_the_folder_are_not_read(tmp_path: Path) -> None:
    for place, make in (
        (tmp_path / "pipe", lambda path: os.mkfifo(path)),
        (tmp_path / "link", lambda path: path.symlink_to(tmp_path / "secret")),
    ):
        place.mkdir()
        (tmp_path / "secret").write_text("[]")
        make(place / "modules.json")
        with pytest.raises(RequestError, match=r"modules\.json"):
            read_sentence_model(str(place), "main", None)


@pytest.mark.parametrize(
    "files", [{"pooling": {"include_prompt": False}}, {"sentence_bert_config": {"do_lower_case": True}}]
)
def test_what_its_folder_does_to_a_text_and_we_do_not_is_refused(files: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="which cannot be trained here"):
        read_sentence_model(write(tmp_path, **files), "main", None)
