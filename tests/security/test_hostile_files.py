"""YAML, JSON, safetensors, names and markup from strangers: nothing runs, and each is refused in a sentence of ours."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import REPO
from poison import PAYLOADS, torch_zip, touching
from safetensors.torch import save_file

from finetune.bench.grid import read_grid
from finetune.cli import main
from finetune.data.cifar import read_cifar
from finetune.data.files import open_file
from finetune.errors import FinetuneError, RequestError
from finetune.hostfile import read_hostfile
from finetune.models.source import from_pretrained, refuse_without_weights
from finetune.plan.machine import read_machine
from finetune.plan.model import model_of, read_config
from finetune.plan.weights import weights_of
from finetune.report.run_folder import read_run
from finetune.report.text import cell
from finetune.run.flat_yaml import read_flat_yaml
from finetune.safe_read import parse_json, read_json_object, read_yaml
from finetune.training.checkpoints.manifest import problems
from finetune.training.model_card import Card, model_card

DEEP = "[" * 100_000
DEEP_OBJECT = '{"a":' * 20_000 + "1" + "}" * 20_000
LONG_INTEGER = '{"a": ' + "9" * 100_000 + "}"
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

YAML: dict[str, Callable[[str], str]] = {
    "python/object/apply": lambda run: f"max_steps: !!python/object/apply:os.system [{run!r}]",
    "python/object/new": lambda run: f"a: !!python/object/new:os.system [{run!r}]",
    "python/name": lambda run: "a: !!python/name:os.system",
    "python/module": lambda run: "a: !!python/module:os",
    "a tag as a key": lambda run: f"!!python/object/apply:os.system [{run!r}]: 1",
    "a tag on the whole file": lambda run: f"!!python/object/apply:os.system [{run!r}]",
    "a billion laughs": lambda run: LAUGHS,
    "an anchor in itself": lambda run: "a: &a [*a]",
    "100,000 brackets": lambda run: "a: " + DEEP,
    "a key that is a list": lambda run: "? [a, b]\n: 1",
    "an integer without digits": lambda run: 'a: !!int ""',
    "a time that is none": lambda run: "a: !!timestamp 9999-99-99",
    "bytes that are no text": lambda run: "a: \x00\x01",
    "a merge of what is no object": lambda run: "a:\n  <<: [1]",
}


@pytest.mark.parametrize("name", YAML)
@pytest.mark.parametrize("reader", ["a recipe's YAML", "a grid", "a plan", "a check", "the shared reader"])
def test_yaml_is_refused_with(name: str, reader: str, tmp_path: Path, capsys: Any) -> None:
    canary, path = tmp_path / "canary", tmp_path / "x.yaml"
    path.write_text(YAML[name](touching(canary)))
    if reader in ("a plan", "a check"):
        words = ["plan", str(path)] if reader == "a plan" else ["check", "--config", str(path)]
        assert main(words) == 2
        assert capsys.readouterr().err.startswith("finetune: ")
    else:
        read: Callable[[str], Any] = {"a grid": read_grid, "a recipe's YAML": read_flat_yaml}.get(
            reader, lambda text: read_yaml(Path(text))
        )
        with pytest.raises(RequestError, match=r"x\.yaml"):
            read(str(path))
    assert not canary.exists()


@pytest.mark.parametrize("name", YAML)
def test_a_report_leaves_out_a_recipe_with(name: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "recipe.yaml").write_text(YAML[name](touching(canary)))
    run = read_run(tmp_path, "x")
    assert not canary.exists()
    assert any("recipe.yaml" in note for note in run.notes)
    assert run.recipe == {}


JSON = {
    "100,000 brackets": DEEP,
    "20,000 objects in each other": DEEP_OBJECT,
    "an integer of 100,000 digits": LONG_INTEGER,
    "half of an object": '{"a": ',
    "bytes": "\x00\x01\x02",
    "a list": "[1]",
    "a text": '"x"',
}


def config(folder: Path) -> None:
    model_of(read_config(folder / "config.json"))


def model_folder(folder: Path) -> None:
    arguments = SimpleNamespace(model_revision="main", trust_remote_code=False)
    from transformers import AutoConfig

    from_pretrained(AutoConfig, "model_name_or_path", str(folder), arguments)


def manifest(folder: Path) -> None:
    if found := problems(folder, hashes=True):
        raise RequestError(" ".join(found))


def command(*words: str) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        if main([word.replace("HERE", str(folder)) for word in words]) == 2:
            raise RequestError("said")

    return run


JSON_READERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a DeepSpeed config": ("ds.json", command("check", "HERE/ds.json")),
    "a config.json for a plan": ("config.json", config),
    "a config.json of a model folder": ("config.json", model_folder),
    "a tokenizer.json of a model folder": ("tokenizer.json", model_folder),
    "a weights index of a model folder": ("model.safetensors.index.json", model_folder),
    "a weights index for check": ("model.safetensors.index.json", lambda folder: print(weights_of(folder))),
    "a machine's profile": ("m.json", lambda folder: print(read_machine(folder / "m.json"))),
    "a checkpoint's manifest": ("manifest.json", manifest),
    "an index for export": ("model.safetensors.index.json", command("export", "HERE", "HERE/out")),
    "the shared reader": ("x.json", lambda folder: print(read_json_object(folder / "x.json"))),
}


@pytest.mark.parametrize("content", JSON)
@pytest.mark.parametrize("reader", JSON_READERS)
def test_json_is_refused(reader: str, content: str, tmp_path: Path) -> None:
    name, read = JSON_READERS[reader]
    if "model folder" in reader and name != "config.json":
        (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / name).write_text(JSON[content])
    with pytest.raises(FinetuneError):
        read(tmp_path)


@pytest.mark.parametrize("content", JSON)
def test_a_report_says_what_it_left_out(content: str, tmp_path: Path) -> None:
    names = ("environment.json", "all_results.json", "ds_config.json", "metrics.jsonl", "schedule.json")
    for name in names:
        (tmp_path / name).write_text(JSON[content])
    notes = " ".join(read_run(tmp_path, "x").notes)
    assert all(name in notes for name in names)


def header(content: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(content) if length is None else length) + content


HEADERS = {
    "2**63 bytes": header(b"{}", 2**63),
    "90 MB that are not there": header(b"{}", 90_000_000),
    "a shape of NaN": header(b'{"w": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}'),
    "a negative shape": header(b'{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}'),
    "a shape of text": header(b'{"w": {"dtype": "F32", "shape": ["4"], "data_offsets": [0, 4]}}'),
    "terabytes of weights in a small file": header(
        b'{"w": {"dtype": "F32", "shape": [1000000, 1000000], "data_offsets": [0, 4000000000000]}}'
    ),
    "a shape beyond its bytes": header(b'{"w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}') + bytes(4),
    "bytes from before the data": header(b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}'),
    "a dtype of no text": header(b'{"w": {"dtype": 7, "shape": [1], "data_offsets": [0, 4]}}') + bytes(4),
    "a cut-off end": header(b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}') + bytes(3),
    "brackets alone": header(DEEP.encode()),
    "no object": header(b"[1, 2]"),
    "no text": header(b"\xff\xfe\xfd"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_safetensors_header_is_refused_that_has(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(HEADERS[name])
    with pytest.raises(RequestError):
        weights_of(tmp_path)
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float8_e4m3fn", "bool", "int64", "complex64"])
def test_sizes_of_every_kind_of_weight_are_read(kind: str, tmp_path: Path) -> None:
    import torch

    tensors = {"w": torch.zeros(3, 5).to(getattr(torch, kind)), "empty": torch.zeros(0, 5), "one": torch.ones(())}
    save_file(tensors, tmp_path / "model.safetensors")
    assert (weights_of(tmp_path).total, weights_of(tmp_path).largest) == (16, 15)


def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    import torch

    save_file({"w": torch.ones(2)}, tmp_path / "secret.safetensors")
    inside = tmp_path / "model"
    inside.mkdir()
    (inside / "config.json").write_text('{"model_type": "gpt2"}')
    for place in ("../secret.safetensors", str(tmp_path / "secret.safetensors")):
        (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": place}}))
        for read in (model_folder, lambda folder: print(weights_of(folder)), command("export", "HERE", "HERE/out")):
            with pytest.raises(RequestError):
                read(inside)


def test_code_in_a_model_folder_does_not_run(tmp_path: Path) -> None:
    """auto_map asks for it; it takes --trust_remote_code."""
    canary = tmp_path / "canary"
    (tmp_path / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass C: ...\n")
    maps = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C", "AutoTokenizer": ["evil.C", None]}
    for kind in ("gpt2", "evil"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "auto_map": maps}))
        if kind == "evil":
            with pytest.raises(RequestError, match="cannot be loaded"):
                model_folder(tmp_path)
        else:
            model_folder(tmp_path)  # transformers' own GPT-2
        assert not canary.exists()


def test_pickled_weights_of_a_model_folder_are_refused(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    canary = tmp_path / "canary"
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "pytorch_model.bin").write_bytes(torch_zip(PAYLOADS["os.system by REDUCE"](touching(canary))))
    save_file({"w": torch.ones(2)}, tmp_path / "model_x.safetensors")  # which nobody looks for
    with pytest.raises(RequestError, match=r"has no model\.safetensors.* Convert"):
        refuse_without_weights(str(tmp_path))
    with pytest.raises(OSError, match=r"model\.safetensors"):  # transformers by itself, as we ask it
        AutoModelForCausalLM.from_pretrained(str(tmp_path), use_safetensors=True)
    assert not canary.exists()


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_batch_of_cifar_is_refused_with(payload: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        (tmp_path / name).write_bytes(PAYLOADS[payload](touching(canary)))
    with pytest.raises(RequestError):
        read_cifar(tmp_path)
    assert not canary.exists()


@pytest.mark.parametrize(
    "line",
    [
        "a; touch CANARY slots=1",
        "$(touch CANARY) slots=1",
        "`touch CANARY` slots=2",
        "a slots=9" + "9" * 5000,
        "a slots=-1",
    ],
)
def test_a_hostfile_is_refused_with(line: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(line.replace("CANARY", str(tmp_path / "canary")))
    with pytest.raises(RequestError):
        read_hostfile(tmp_path / "hosts")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("content", ["100,000 brackets", "20,000 objects in each other", "half of an object"])
def test_lines_of_data_are_refused_with(content: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n' + JSON[content] + "\n")
    with pytest.raises(RequestError):
        open_file("train_file", str(tmp_path / "train.jsonl"))


BARE_TAG = re.compile(r"(?<!\\)<script")  # after a backslash, Markdown shows it as it is


def test_a_model_card_escapes_names_from_data() -> None:
    hostile = "<script>alert(1)</script> | [x](javascript:alert(1)) `touch`\n# Results"
    card = Card(
        task="classification", pipeline_tag="text-classification", model=hostile, base_model="a\nlicense: x",
        recipe="recipes/seq_cls.py", source=hostile, table=[("split", "rows"), (hostile, 3)], facts=[hostile],
        pictures=[], use="pass",
    )  # fmt: skip
    text = model_card(card, {}, {"command": "python x", "packages": {}})
    assert not BARE_TAG.search(text)
    assert "\n# Results" not in text
    assert "\nlicense: x" not in text
    assert not BARE_TAG.search(cell(hostile))
    assert BARE_TAG.search(hostile)


def test_links_in_a_checkpoint_are_no_files_of_it(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").symlink_to("/dev/zero")
    assert problems(tmp_path, hashes=True)
    with pytest.raises(RequestError, match="not a regular file"):
        read_json_object(tmp_path / "manifest.json")
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(RequestError, match="not a regular file"):
        read_json_object(tmp_path / "pipe.json")


def test_a_bracket_in_a_text_is_no_depth() -> None:
    assert parse_json(json.dumps({"a": "[" * 1000, 'b"\\': ["{" * 99]}), "x") == {"a": "[" * 1000, 'b"\\': ["{" * 99]}


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


RUNS_CODE = {"eval", "exec", "compile", "os.system", "os.popen", "pickle.load", "pickle.loads", "yaml.unsafe_load",
             "yaml.full_load", "marshal.loads", "shelve.open", "joblib.load", "__import__",
             "subprocess.getoutput", "subprocess.getstatusoutput"}  # fmt: skip


# What a process reads of memory that its own parent has made for it, and that has no name.
OF_OUR_OWN = {"finetune/training/checkpoints/writer_process.py: pickle.loads"}


def test_the_tree_neither_evaluates_text_nor_gives_it_to_a_shell() -> None:
    files = [*REPO.glob("finetune/**/*.py"), *REPO.glob("recipes/**/*.py")]
    assert len(files) > 200
    found = []
    for path in files:
        for name, call in calls(ast.parse(path.read_text(encoding="utf-8"))):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            wrong = name in RUNS_CODE or given.get("shell") not in (None, "False")
            wrong |= name == "torch.load" and given.get("weights_only") != "True"
            wrong |= name.endswith(("yaml.load", "yaml.load_all")) and len(call.args) + len(given) < 2
            wrong |= given.get("trust_remote_code") == "True"
            wrong |= name.endswith(("extractall", "unpack_archive"))
            if wrong and f"{path.relative_to(REPO)}: {name}" not in OF_OUR_OWN:
                found.append(f"{path.relative_to(REPO)}:{call.lineno}: {name}")
    assert found == []


def test_a_plain_pickle_would_have_run() -> None:
    """Or the payloads that the other tests use would show nothing."""
    assert pickle.loads(b"\x80\x02cbuiltins\nlen\nX\x02\x00\x00\x00ab\x85R.") == 2
