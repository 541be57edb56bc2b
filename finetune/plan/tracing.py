"""What a plan reads of a model's modules: from the programs of known architectures; for any other, a separate process
that imports torch traces them, and the result is cached for later plans.

    found, how = found_of(config, "causal_lm", "sdpa", "path/to/model")
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from finetune.errors import RequestError, listed
from finetune.plan.trace_files import KNOWN, known_trace
from finetune.run.environment import environment_of_child

LISTS = ("auto_mappings.py", "configuration_auto.py")  # of transformers/models/auto: they list all model types
LONGEST = 300  # seconds that tracing a model may take
TRACING = "finetune.measure.tracing"  # it imports torch, and so is never imported here
OURS = Path(__file__).resolve().parents[1]  # nearly every file of the package decides on some trace
REFUSED = 2  # its exit status if what it says is a reason of ours
TRUSTS = "trust_remote_code"  # what the user allows, beside the config; never what a config says
NOT_SHAPES = ("auto_map", "_name_or_path", TRUSTS, "transformers_version", "torch_dtype", "dtype")


def found_of(
    config: Mapping[str, Any], head: str, attention: str, where: str, code: Path | None = None
) -> tuple[Mapping[str, Any], str]:
    """What `finetune.measure.tracing.traced` finds, and how it was found; nothing about the latter for known programs.
    `code`: the model's folder, if its own code is to run. Raises RequestError if transformers has no such architecture,
    or if its modules cannot run without data."""
    if code is None and (known := known_trace(config, head, attention, where)):
        return known, ""
    plain = {name: value for name, value in config.items() if name not in NOT_SHAPES}
    kind = config.get("model_type")
    if code is not None:
        plain |= {"auto_map": config["auto_map"], "_name_or_path": str(code), TRUSTS: True}
    elif kind not in KNOWN and not (isinstance(kind, str) and _is_listed(kind)):
        mend = " --trust_remote_code True runs the code in its folder." if "auto_map" in config else ""
        raise RequestError(
            f"{where}: model_type is {kind!r}, which transformers {version('transformers')} lacks.{mend}"
        )
    file = _cache() / f"{_key(plain, head, attention, code)}.json"
    if file.is_file():
        found, how = dict(json.loads(file.read_text(encoding="utf-8"))), "traced earlier"
    else:
        began = time.monotonic()
        found = _traced(plain, head, attention, where)
        how = f"traced in {time.monotonic() - began:.0f} s"
        _keep(file, found)
    what = f"{kind} with these settings" if kind in KNOWN else str(kind)
    said = f"{what} is not a known architecture: {how}; its attention is counted as fused if it can be"
    if found.get("whole"):
        said += ", and it runs in fp32 or with autocast alone: in half precision its layers mix precisions"
    if without := found.get("without"):
        said += (
            f", its other layers as torch's own operators. With the kernels of {listed(without)}, which transformers "
            "uses where they are installed, it needs less memory and time on a GPU"
        )
    return found, said


def _is_listed(kind: str) -> bool:
    """Searches text, because importing transformers takes seconds. If it lists its architectures elsewhere, the tracing
    process finds out."""
    spec = find_spec("transformers")
    folders = [Path(place, "models", "auto") for place in (spec and spec.submodule_search_locations) or ()]
    files = [folder / name for folder in folders for name in LISTS]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    return not texts or any(f'"{kind}"' in text for text in texts)


def _traced(config: dict[str, Any], head: str, attention: str, where: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder, "config.json"), Path(folder, "trace.json")
        given.write_text(json.dumps(config), encoding="utf-8")
        words = [sys.executable, "-m", TRACING, str(given), head, attention, str(out)]
        # Some models go through a set of words, in an order that depends on the seed of hashes (transformers 5.23,
        # modeling_gemma3.py, position_embeddings). transformers copies a model's own code into its cache.
        env = environment_of_child() | {"PYTHONHASHSEED": "0", "HF_MODULES_CACHE": folder}
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=LONGEST, check=False, env=env)
        except subprocess.TimeoutExpired as error:
            raise RequestError(f"{where}: its modules were not traced within {LONGEST} s.") from error
        if done.returncode or not out.is_file():
            said = "".join((done.stdout.strip() or done.stderr.strip()).splitlines()[-1:])
            if done.returncode == REFUSED:
                raise RequestError(f"{where}: {said}")
            raise RequestError(
                f"{where}: model_type is {config.get('model_type')!r}, and its modules cannot be traced: {said[:200]}."
            )
        return dict(json.loads(out.read_text(encoding="utf-8")))


def _key(config: dict[str, Any], head: str, attention: str, code: Path | None) -> str:
    """A hash of all that a trace depends on."""
    files = [*sorted(OURS.rglob("*.py")), *(sorted(code.glob("*.py")) if code else ())]
    sources = b"".join(file.read_bytes() for file in files)
    made_by = [version("transformers"), version("torch"), hashlib.sha256(sources).hexdigest()]
    return hashlib.sha256(json.dumps([config, head, attention, made_by], sort_keys=True).encode()).hexdigest()


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "finetune" / "traces"


def _keep(file: Path, found: dict[str, Any]) -> None:
    """Writes atomically. If it cannot be written, the next plan traces again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder, file.name)
            made.write_text(json.dumps(found), encoding="utf-8")
            made.replace(file)
    except OSError:
        return
