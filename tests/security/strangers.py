"""Every reader of what strangers made, with a folder that it takes; what they may put in a file's place; and a child
process in which a reader is asked, of bounded time and memory."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from conftest import REPO
from deepspeed.utils.tensor_fragment import fragment_address
from safetensors.torch import save

from finetune.errors import FinetuneError

SECRET = "BEGIN OPENSSH PRIVATE KEY: nobody may see this"
SECONDS, MORE_BYTES = 5, 2**30
PATIENCE = 60.0  # of wall time: a machine with other work; who waits for a pipe waits longer
Files = dict[str, bytes]


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def torch_file(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


WEIGHTS = save({"w": torch.ones(2)})
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 260, "n_positions": 64,
        "architectures": ["GPT2LMHeadModel"]}  # fmt: skip
RUN: Files = {
    "metrics.jsonl": b'{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.25}\n',
    "all_results.json": as_json({"train_runtime": 1.5, "eval_loss": 2.0, "peak_memory_gib_per_rank": [1.0, 2.0]}),
    "environment.json": as_json({"command": "python x", "packages": {"torch": "2"}, "ranks": 2}),
    "recipe.yaml": b"recipe: causal_lm\nmax_steps: 3\n",
    "ds_config.json": as_json({"zero_optimization": {"stage": 2}}),
    "schedule.json": as_json({"stages": 2, "planned": [], "measured": []}),
    "confusion_matrix.json": as_json({"labels": ["a", "b"], "counts": [[1, 0], [0, 1]]}),
    "profile/summary.json": as_json({"steps": [1], "ranks": []}),
    "samples.md": b"## Step 1\n\nsome text\n",
    "README.md": b"# A card\n\ntext\n",
    "curve.png": b"\x89PNG\r\n\x1a\n",
    "config.json": as_json(GPT2),
}
CHECKPOINT: Files = {
    "checkpoint-2/trainer_state.json": as_json({"global_step": 2, "best_model_checkpoint": "x/checkpoint-2"}),
    "checkpoint-2/config.json": as_json(GPT2),
    "checkpoint-2/model.safetensors": WEIGHTS,
    "checkpoint-2/optimizer.pt": torch_file({"state": {0: {"step": torch.ones(1)}}, "param_groups": []}),
    "checkpoint-2/rng_state.pth": torch_file({"numpy": np.random.get_state(), "cpu": torch.get_rng_state()}),
    "checkpoint-2/latest": b"global_step2",
    "checkpoint-2/global_step2/mp_rank_00_model_states.pt": torch_file(
        {"module": {"w": torch.ones(2)}, "buffer_names": [], "param_shapes": [{"w": torch.Size([2])}],
         "global_steps": 2, "skipped_steps": 0, "global_samples": 8, "lr_scheduler": None}
    ),
    "checkpoint-2/global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt": torch_file(
        {"optimizer_state_dict": {"zero_stage": 2, "partition_count": 1,
                                  "base_optimizer_state": {"state": {0: {}}, "param_groups": [{"lr": 0.1}]},
                                  "param_slice_mappings": [{"w": fragment_address(numel=2, start=0)}],
                                  "single_partition_of_fp32_groups": [torch.ones(2)]}}
    ),
    "latest": b"checkpoint-2\n",
}  # fmt: skip
PICKLED: Files = {"config.json": as_json(GPT2), "pytorch_model.bin": torch_file({"w": torch.ones(2)})}
BENCH: Files = {
    "results.jsonl": as_json({"cell": "a", "model": "wide", "layout": "ddp", "outcome": "crashed", "repeat": 0})
    + b"\n",
    "grid.json": as_json({"sha256": "x", "scale": 1.0, "repeats": 1, "cells": ["a", "b"]}),
    "grid.yaml": b"scale: 0.1\nrepeats: 1\n",
}
INDEX = as_json({"metadata": {}, "weight_map": {"w": "model-00001-of-00001.safetensors"}})


def model_files() -> Files:
    """A whole small model with its tokenizer, as transformers writes it."""
    import tempfile

    from transformers import GPT2Config, GPT2LMHeadModel

    from finetune.data.tokenizer import train_text_tokenizer

    with tempfile.TemporaryDirectory() as place:
        tokenizer = train_text_tokenizer("byte", [], 0, 64, with_end=True)
        tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        tokenizer.save_pretrained(place)
        GPT2LMHeadModel(GPT2Config(**{**GPT2, "vocab_size": len(tokenizer)})).save_pretrained(place)
        return {path.name: path.read_bytes() for path in Path(place).iterdir()}


def command(*words: str) -> Callable[[Path], None]:
    """A line of `finetune`, with HERE for the folder; its status must be one of its own."""

    def run(folder: Path) -> None:
        from finetune.cli import main

        status = main([word.replace("HERE", str(folder)) for word in words])
        assert status in (0, 1, 2), status

    return run


def load_model(folder: Path) -> None:
    """As the recipe of causal language models does, with a conversation."""
    from transformers import AutoConfig, AutoTokenizer

    from finetune.data.encoding import Encoder
    from finetune.data.formats import Format
    from finetune.models.causal import build_causal_lm, find_causal_source
    from finetune.models.source import from_pretrained
    from finetune.run.flags.language import CausalModelArguments

    os.environ["HF_HUB_OFFLINE"] = "1"
    asked = CausalModelArguments(model_name_or_path=str(folder))
    for auto in (AutoConfig, AutoTokenizer):
        from_pretrained(auto, "model_name_or_path", str(folder), asked)
    source = find_causal_source(asked, 16)
    Encoder(source.tokenizer, Format("messages", "messages", ("messages",)))(
        {"messages": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]}
    )
    build_causal_lm(asked, source, source.tokenizer, 0)


def opened(flag: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        from finetune.data.files import open_file

        open_file("train_file", str(folder / flag))

    return read


def text_file(folder: Path) -> None:
    from finetune.data.documents import open_corpus
    from finetune.run.flags.language import CorpusArguments

    open_corpus(CorpusArguments(train_file=str(folder / "a.txt")), 0)


def data_folder(folder: Path) -> None:
    from finetune.data.files import open_hub

    os.environ["HF_HUB_OFFLINE"] = "1"
    print(open_hub(str(folder), None, "train")[:])  # type: ignore[index]


def cifar(folder: Path) -> None:
    from finetune.data.cifar import read_cifar

    read_cifar(folder)


def pictures(folder: Path) -> None:
    from finetune.data.image_sources import open_picture

    open_picture(folder / "x.png")


def guard(folder: Path) -> None:
    from finetune.safe_read.checkpoint_files import refuse_unsafe

    for path in sorted(folder.rglob("*")):
        if not path.is_dir():
            refuse_unsafe(path)


def reshard(folder: Path) -> None:
    from finetune.training.checkpoints.tag import named_tag
    from finetune.training.reshard.zero_shards import read_zero

    if (tag := named_tag(folder / "checkpoint-2")) is not None:
        read_zero(tag)


BATCH = pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2]}, 2).replace(b"labels", b"labels")
# The folder's files, those of them that strangers replace, and who reads them.
READERS: dict[str, tuple[Files, Sequence[str], Callable[[Path], None]]] = {
    "report": (RUN, tuple(RUN), command("report", "HERE", "--html", "HERE/out.html", "--markdown", "HERE/out.md")),
    "report of a bench": (BENCH, tuple(BENCH), command("report", "HERE", "--html", "HERE/out.html")),
    "bench": (BENCH, tuple(BENCH), command("bench", "HERE")),
    "checkpoint ls": (CHECKPOINT, tuple(CHECKPOINT), command("checkpoint", "ls", "HERE", "--verify")),
    "checkpoint verify": (CHECKPOINT, tuple(CHECKPOINT), command("checkpoint", "verify", "HERE")),
    "export": (CHECKPOINT, tuple(CHECKPOINT), command("export", "HERE/checkpoint-2", "HERE/out")),
    "export of pickles": (PICKLED, tuple(PICKLED), command("export", "HERE", "HERE/out")),
    "the guard": (CHECKPOINT, tuple(name for name in CHECKPOINT if name.endswith((".pt", ".pth"))), guard),
    "reshard": (CHECKPOINT, tuple(name for name in CHECKPOINT if "global" in name), reshard),
    "a model": ({}, (), load_model),  # its files are made when they are first asked for
    "plan": (RUN, ("config.json",), command("plan", "HERE/config.json")),
    "plan of a YAML": (RUN, ("recipe.yaml",), command("plan", "HERE/recipe.yaml")),
    "plan for a profile": (
        {"m.json": (REPO / "finetune/plan/machines/L4.json").read_bytes()}, ("m.json",),
        command("plan", "gpt2", "--gpu", "HERE/m.json", "--no_search"),
    ),
    "check": (RUN, ("ds_config.json",), command("check", "HERE/ds_config.json")),
    "check of a YAML": (RUN, ("recipe.yaml",), command("check", "--config", "HERE/recipe.yaml")),
    "check with a model": (
        {"config.json": as_json(GPT2), "model.safetensors": WEIGHTS}, ("config.json", "model.safetensors"),
        command("check", "zero3", "--model", "HERE"),
    ),
    "check with an index": (
        {"model.safetensors.index.json": INDEX, "model-00001-of-00001.safetensors": WEIGHTS},
        ("model.safetensors.index.json", "model-00001-of-00001.safetensors"),
        command("check", "zero3", "--model", "HERE"),
    ),
    "a hostfile": (
        {"hosts": b"# ours\nworker-1 slots=8\nworker-2 slots=4\n"}, ("hosts",),
        command("launch", "--hostfile", "HERE/hosts", "recipes/causal_lm.py"),
    ),
    "csv": ({"a.csv": b"text,label\nhello,1\nbye,0\n"}, ("a.csv",), opened("a.csv")),
    "jsonl": ({"a.jsonl": b'{"text": "a"}\n{"text": "b"}\n'}, ("a.jsonl",), opened("a.jsonl")),
    "text": ({"a.txt": b"some text\n" * 30}, ("a.txt",), text_file),
    "a folder of data": (
        {"README.md": b"---\nconfigs:\n- config_name: default\n  data_files: train.csv\n---\n",
         "train.csv": b"text,label\na,1\n"},
        ("README.md", "train.csv"), data_folder,
    ),
    "a picture": ({"x.png": b"\x89PNG\r\n\x1a\n"}, ("x.png",), pictures),
    "CIFAR": (
        dict.fromkeys((*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"), BATCH), ("data_batch_2",), cifar,
    ),
}  # fmt: skip
OWN_FILES = ("csv", "jsonl", "text", "plan for a profile", "a hostfile", "check", "check of a YAML", "plan",
             "plan of a YAML", "a picture", "CIFAR")  # fmt: skip
# which the user names one by one: their links are theirs


def files_of(reader: str) -> tuple[Files, Sequence[str]]:
    files, victims, _ = READERS[reader]
    if reader == "a model" and not files:
        files.update(model_files())
    return files, victims or tuple(files)


# What may lie where a file should: made at a path, with a folder beside it for what it leads to.
def link_to(target: str) -> Callable[[Path, Path], None]:
    return lambda path, beside: path.symlink_to(target.replace("BESIDE", str(beside)))


def hole(path: Path, beside: Path) -> None:
    with path.open("wb") as file:
        file.truncate(8 * 2**40)


def bound_socket(path: Path, beside: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def same_content(content: bytes) -> Callable[[Path, Path], None]:
    return lambda path, beside: path.write_bytes(content) and None


def header(length: int) -> bytes:
    return struct.pack("<Q", length) + b"{}"


PLACED: dict[str, Callable[[Path, Path], None]] = {
    "a link to a key": link_to("BESIDE/key"),
    "a link to /dev/zero": link_to("/dev/zero"),
    "a link to /dev/random": link_to("/dev/random"),
    "a link to a terminal": link_to("/dev/tty"),
    "a link to itself": lambda path, beside: path.symlink_to(path.name),
    "a link to nothing": link_to("BESIDE/nowhere"),
    "a link to a pipe": link_to("BESIDE/pipe"),
    "a pipe": lambda path, beside: os.mkfifo(path),
    "a socket": bound_socket,
    "a folder": lambda path, beside: path.mkdir(),
    "a hole of terabytes": hole,
    "nothing": same_content(b""),
    "NULs": same_content(b"\0" * 5000),
    "no UTF-8": same_content(b"\xff\xfe\xfd" * 100),
    "a mark and no more": same_content(b"\xef\xbb\xbf"),
    "escapes": same_content("\x1b]0;x\x07\x1b[2J\u202eevil\u2066\r\n".encode()),
    "brackets": same_content(b"[" * 200_000),
    "objects in each other": same_content(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "a text without end": same_content(b'{"a": "' + b'\\"' * 300_000),
    "a shorter text without end": same_content(b'{"a": "' + b'\\"' * 45_000),
    "a long word": same_content(b'{"optimizer": {"type": "' + b"a" * 90_000 + b'"}}'),
    "many keys twice": same_content(b"{" + b", ".join(b'"k%d": {"a": 1}' % (i % 2500) for i in range(5000)) + b"}"),
    "a long integer": same_content(b'{"format": ' + b"9" * 200_000 + b"}"),
    "a large number": same_content(b'{"format": 1e999999, "global_step": -1e308, "n_layer": 1' + b"0" * 300 + b"}"),
    "NaN": same_content(b'{"global_step": NaN, "n_layer": Infinity, "format": -Infinity}'),
    "a list": same_content(b"[[], {}, null]"),
    "aliases": same_content(
        b"a: &a [x, x]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (c, c, c - 1, c - 1) for c in b"bcdefgh")
    ),
    "a tag": same_content(b"!!python/object/apply:os.system ['touch canary']"),
    "a long header": same_content(header(2**62)),
    "a header that lies": same_content(header(90_000_000)),
    "a zip that is none": same_content(b"PK\x03\x04" + b"\0" * 100),
    "a pickle with a far memo": same_content(b"\x80\x02]r\xff\xff\xff\xff."),
    "a pickle of tuples": same_content(b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"K\x01s."),
    "a text of a megabyte": same_content(b"a" * 2**20),
    "many lines": same_content(b"".join(b"k%d: 1\n" % i for i in range(20_000))),
}  # fmt: skip
LINKS = tuple(name for name in PLACED if name.startswith("a link"))


def place(folder: Path, reader: str, victim: str, attack: Callable[[Path, Path], None]) -> Path:
    """The reader's folder with `attack` in the place of one file, and a key beside it."""
    files, _ = files_of(reader)
    (folder / "key").write_text(SECRET)
    os.mkfifo(folder / "pipe")
    inside = folder / "in"
    for name, content in files.items():
        (inside / name).parent.mkdir(parents=True, exist_ok=True)
        if name != victim:
            (inside / name).write_bytes(content)
    attack(inside / victim, folder)
    return inside


def outcome(reader: Callable[[Path], None], folder: Path, scratch: Path) -> str:
    """ "" where it gave a value, or an error of ours; else what went wrong. What it prints is looked through, too."""
    said = scratch / "said"
    begun = time.monotonic()
    child = os.fork()
    if not child:
        _ask(reader, folder, said)
    while time.monotonic() - begun < PATIENCE:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
        time.sleep(0.005)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "it waits for ever"
    text = said.read_text(errors="replace") if said.exists() else ""
    if os.WIFSIGNALED(status):
        return f"it ended by signal {os.WTERMSIG(status)}"
    if os.WEXITSTATUS(status):
        return text[-1500:]
    return "it shows the key" if shows_secret(scratch, text) else ""


def shows_secret(scratch: Path, text: str) -> bool:
    written = [path for path in scratch.rglob("*") if path.is_file() and not path.is_symlink() and path.name != "key"]
    return SECRET in text or any(
        SECRET.encode() in path.read_bytes() for path in written if path.stat().st_size < 2**24
    )


def _ask(reader: Callable[[Path], None], folder: Path, said: Path) -> NoReturn:
    status = 1
    try:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MORE_BYTES, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + SECONDS,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.setsid()  # no terminal to read from
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        with said.open("w", errors="replace") as out, redirect_stdout(out), redirect_stderr(out):
            try:
                reader(folder)
                status = 0
            except FinetuneError as error:
                print(error)
                status = 0
            except BaseException:
                traceback.print_exc()
    finally:
        os._exit(status)


INTERESTING = (b"\0", b"-1", b"1e400", b"NaN", b"9" * 40, b"null", b"{}", b"[]", b'""', b"\xff", b'"\\ud800"', b"../x",
               b"true", b"[" * 60, b"\x1b[2J", "\u202e".encode())  # fmt: skip


def altered(content: bytes, random_one: random.Random) -> bytes:
    """With one to three pieces cut out, doubled, or replaced by what has broken readers before."""
    for _ in range(random_one.randint(1, 3)):
        a = random_one.randint(0, len(content))
        b = min(len(content), a + random_one.choice((0, 1, 4, 16, 64)))
        kind = random_one.random()
        put = random_one.choice(INTERESTING) if kind < 0.5 else random_one.randbytes(random_one.randint(0, 8))
        if kind > 0.85:
            put = content[a:b] * 2
        if kind > 0.6 and (numbers := [i for i, byte in enumerate(content) if chr(byte).isdigit()]):
            a = random_one.choice(numbers)
            b = a + 1
        content = content[:a] + put + content[b:]
    return content
