"""Whether a resumed run has the rows, the tokenizer and the model of its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.data import digests
from finetune.data.tokenizer import identity as tokenizer_identity
from finetune.errors import RequestError
from finetune.run.accelerate_plugin import config_of_fields
from finetune.run.conflicts import BY_METRIC
from finetune.run.engine import deepspeed_by_accelerate
from finetune.run.files import IDENTITY, SETTLED
from finetune.run.on_resume import ROWS, named
from finetune.run.on_resume_deepspeed import arithmetic_of, changed_arithmetic
from finetune.run.run import Run
from finetune.safe_read import read_json_object
from finetune.training.checkpoints.given_files import of_given_files
from finetune.training.checkpoints.identity import Identity, run_record, shown
from finetune.training.checkpoints.writing import by_first, leads
from finetune.training.course import Course
from finetune.training.run_folder import write_json
from finetune.training.start import Session
from finetune.versions import versions

# Keys of a model's config that affect neither its weights nor what it computes with them.
NO_SHAPE = (
    """_name_or_path transformers_version dtype torch_dtype use_cache architectures
    _commit_hash _attn_implementation gradient_checkpointing label2id output_attentions output_hidden_states
    return_dict""".split()
    + [*SETTLED]
)
LONGEST = 200  # characters; longer values are stored as a digest
# In a DeepSpeed config's optimizer and scheduler: keys that flags also set (transformers 5.23, integrations/
# deepspeed.py, trainer_config_process, fills them or requires equality), and types equivalent to having no section.
OF_FLAGS = "lr betas eps weight_decay torch_adam warmup_max_lr warmup_num_steps total_num_steps".split()
LIKE_FLAGS = {"optimizer": ("Adam", "AdamW"), "scheduler": ("WarmupDecayLR",)}
ARITHMETIC = "arithmetic"  # other keys of it that affect results
DATED = "dated"  # the chat template writes today's date
BEGINNING = "beginning"  # what the tokenizer puts at the start of each document, if anything
LIKE_NONE = {"adam_w_mode": True, "warmup_min_lr": 0, "warmup_type": "linear"}


def settle_identity(session: Session, config: Any, data: Any) -> Identity:
    """The identity that this run's checkpoints record. All ranks must call it, before the trainer is built. Raises
    RequestError if rows, tokenizer or model differ from those of the checkpoint."""
    course, run = session.course, session.run
    facts = by_first(lambda: _facts(session, config, data))
    changed = dict(course.changed)
    if course.before is not None:
        changed |= _compare(run, course, course.before, facts)
    elif course.checkpoint is not None:
        _compare_old(course.checkpoint, facts["model"])
    lineage = course.lineage(changed)
    return Identity(course.run, course.flags, facts, versions(), lineage)


def write_run_record(folder: Path, identity: Identity) -> None:
    """Write the record into the run folder. Only rank 0."""
    write_json(folder / IDENTITY, run_record(identity.run, identity.lineage))


def _facts(session: Session, config: Any, data: Any) -> dict[str, dict[str, Any]]:
    run, training = session.run, session.training
    beginning = {BEGINNING: text} if (text := getattr(data, BEGINNING, "")) else {}
    rows: dict[str, Any] = {split: digests.of_rows(data.splits.get(split)) for split in ("train", "validation")}
    streams = data.splits.get("train") is not None and rows["train"] is None
    files = of_given_files(run, streams)
    if streams:
        # A stream has not been read yet: the flags that select it represent it, and the rows held out of it.
        asked = {name: files.get(name, run.value(name)) for name in named(run.recipe.flags, (ROWS,))} | beginning
        held_out = None if run.value("validation_file") else rows["validation"]
        rows["train"] = digests.of_text([asked, held_out, training.seed])
    processor = data.processor
    known = tokenizer_identity if hasattr(processor, "get_vocab") else getattr(type(processor), "to_dict", None)
    tokenizer: dict[str, Any] = {"hash": digests.of_text(known(processor)) if known else None} | beginning
    tokenizer |= {DATED: True} if "strftime_now" in str(getattr(processor, "chat_template", "")) else {}
    model = {} if config is None else _shape(json.loads(config.to_json_string(use_diff=False)))
    base = (run.value("model_name_or_path"), run.value("model_revision"), bool(run.value("use_peft")))
    config_of_engine = session.ds_config or (config_of_fields() if deepspeed_by_accelerate(run) else {})
    engine = _of_engine(config_of_engine) | {ARITHMETIC: arithmetic_of(config_of_engine, training.max_grad_norm)}
    weights = getattr(data.splits.get("train"), "weights", None)
    mixture = {"weights": [str(share) for share in weights]} if weights else {}
    facts = {"rows": rows, "files": files, "mixture": mixture, "tokenizer": tokenizer, "model": model, "engine": engine}
    return facts | {"base": digests.of_base(*base), "teacher": digests.of_base(run.value("teacher"), "main", True)}


def _of_engine(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer and scheduler of a DeepSpeed config, if they differ from those of the flags."""
    found = {}
    for section, kinds in LIKE_FLAGS.items():
        kind = (ds_config.get(section) or {}).get("type")
        if section == "optimizer" and kind:  # DeepSpeed ignores case (runtime/config.py)
            kind = next((one for one in kinds if one.lower() == kind.lower()), kind)
        default = {"warmup_type": "log"} if section == "scheduler" else {}  # DeepSpeed's (runtime/lr_schedules.py)
        params = default | ((ds_config.get(section) or {}).get("params") or {})
        own = {name: v for name, v in params.items() if name not in OF_FLAGS}
        others = {name: v for name, v in own.items() if v not in ("auto", LIKE_NONE.get(name))}
        if kind is not None and (kind not in kinds or others):
            found[section] = {"type": kind, **others}
    return found


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in config.items():
        if name not in NO_SHAPE and value is not None:
            text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            found[name] = text if len(text) <= LONGEST else digests.of_text(text)
    return found


def _compare(
    run: Run, course: Course, before: Identity, facts: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[Any, Any]]:
    """Differences that are allowed, of rows and DeepSpeed's config. Raises RequestError for all others."""
    name = Path(course.checkpoint or "").name
    _refuse_model(name, before.facts.get("model", {}), facts["model"])
    known = before.facts.get("tokenizer", {}).get("hash")
    if known != facts["tokenizer"]["hash"]:
        raise RequestError(
            f"--resume: {name} was trained with another tokenizer than this run's. Its embeddings belong to the tokens "
            f"of {name}/tokenizer.json: give that tokenizer, or another --output_dir for a new run."
        )
    engine = facts["engine"]
    then = before.facts.get("engine", engine)
    for section in (one for one in LIKE_FLAGS if then.get(one) != engine.get(one)):
        raise RequestError(
            f"--resume: {name} was trained with another {section} in DeepSpeed's config: {shown(then.get(section))}, "
            f"here {shown(engine.get(section))} (None: as the flags say). Give the checkpoint's config, or another "
            "--output_dir."
        )
    other = _of_arithmetic(course, name, then, engine)
    if not digests.same_base(before.facts.get("base", facts["base"]), facts["base"]):
        raise RequestError(
            f"--resume: {name} began from other weights than those of --model_name_or_path "
            f"{run.value('model_name_or_path')}. Give the original model, or another --output_dir."
        )
    if not digests.same_base(before.facts.get("teacher", {}), facts["teacher"]):
        raise RequestError(f"--resume: {name} learnt from another --teacher, or none. Give the same one.")
    was, there, now = before.facts.get("files", {}), before.facts.get("rows", {}), facts["rows"]
    rows = {f"{split} rows": (there.get(split), now[split]) for split in now if there.get(split) != now[split]}
    if not rows:
        return other
    changed = [f"--{flag}" for flag, digest in facts["files"].items() if was.get(flag) not in (None, digest)]
    changed += ["a weight in --train_file"] * (before.facts.get("mixture", facts["mixture"]) != facts["mixture"])
    why = f" ({', '.join(changed)} has changed)" if changed else ""
    begins = None if BEGINNING in before.facts.get("tokenizer", {}) else facts["tokenizer"].get(BEGINNING)
    if begins:
        why += f" (each document now begins with {begins}, as its tokenizer has it, which an older version left out)"
    dated = facts["tokenizer"].get(DATED) and not changed
    why += " (the chat template writes today's date: freeze it in a copy, given with --chat_template)" if dated else ""
    line = f"{' and '.join(rows)} are not those of {name}{why}"
    if ("train rows" in rows or _evaluation_decides(run)) and run.value("resume_changed") != "allow":
        others = ": files, or flags that choose, cut or clean them, have changed. Give the original ones,"
        raise RequestError(
            f"--resume: the {line}{'. Start a new run in' if begins else others} another --output_dir, or continue "
            "with the changed data by --resume_changed allow."
        )
    if leads():
        print(f"resume: from step {course.step + 1} on the {line}", flush=True)
    return other | rows


def _of_arithmetic(
    course: Course, name: str, before: Mapping[str, Any], now: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Changed keys of DeepSpeed's config that apply from now on; also prints them."""
    known = before.get(ARITHMETIC) if isinstance(before.get(ARITHMETIC, {}), dict) else {}
    changed = changed_arithmetic(name, known, now[ARITHMETIC])
    for place, (then, value) in changed.items() if leads() else ():
        unsaid = "that of --max_grad_norm" if place == "gradient_clipping" else "DeepSpeed's default"
        here, until = (shown(unsaid if one is None else one) for one in (value, then))
        print(f"resume: DeepSpeed's {place} is {here} from step {course.step + 1} on (until then {until})", flush=True)
    return {f"DeepSpeed's {place}": values for place, values in changed.items()}


def _evaluation_decides(run: Run) -> bool:
    """Whether evaluations affect what is learnt or kept: their metrics must then be comparable with earlier ones."""
    asked = (run.value("load_best_model_at_end"), run.value("early_stopping_patience"))
    return any(asked) or run.value("save_strategy") == "best" or str(run.value("lr_scheduler_type")) in BY_METRIC


def _compare_old(checkpoint: str, model: Mapping[str, Any]) -> None:
    if (path := Path(checkpoint) / "config.json").is_file():
        _refuse_model(Path(checkpoint).name, _shape(read_json_object(path)), model)


def _refuse_model(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    others = [key for key in now if key in before and before[key] != now[key]]
    if others:
        what = "; ".join(f"{key} {shown(before[key])}, here {shown(now[key])}" for key in others[:3])
        raise RequestError(
            f"--resume: {name} has another model than these data and flags make: {what}. Resume with the original "
            "flags and data (recipe.yaml), or give another --output_dir."
        )
