"""What `finetune check` reports on a hundred faults, compared with DeepSpeed, accelerate and the Trainer, and when.

    python benchmarks/check.py                   # writes docs/results/check.json; pages.py makes the page
    python benchmarks/check.py --only "stage 4"  # prints the faults whose names contain these words

A fault that has already run unchanged with these releases is not run again; all of them take about 20 minutes on two
cores. `finetune check` itself runs on every fault each time.

Each of the three really runs each fault of check_cases.py: a tiny model, two steps, one process. Every run has its own
process, forked from one that has imported the libraries. The import time is added to its seconds, because a user would
wait for it.
"""

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from check_cases import A_RUN, FAULTS, GOOD, Fault, run_of
from releases import in_words, this_machine, versions

REPO = Path(__file__).resolve().parents[1]
OUT = REPO / "docs" / "results"
LIMIT_SECONDS = 120
ENGINES = ("deepspeed", "accelerate", "trainer")
NOT_HERE = {"versions": "needs other releases", "gpu_capability": "needs an old GPU"}
ABOUT_AUTO = ("DS204", "DS205", "DS807")


def found_by_us(fault: Fault) -> str | None:
    """The message, if the fault is reported with the right code, severity and wording."""
    from finetune.dsconfig.check import check

    for placed in check(fault.text, run_of(**fault.run)).found:
        finding = placed.finding
        if (finding.code, finding.severity) == (fault.code, fault.severity) and re.search(fault.says, finding.message):
            return finding.message
    return None


def why_not_here(run: dict) -> str:
    if run.get("world_size", 1) > 2:
        return f"needs {run['world_size']} ranks"
    return next((reason for name, reason in NOT_HERE.items() if run.get(name)), "")


def for_deepspeed(fault: Fault) -> str:
    """The same fault with numbers instead of "auto", for an engine that resolves none."""
    if isinstance(fault.config, str) or fault.code in ABOUT_AUTO or fault.run.get("engine") == "deepspeed":
        return fault.text

    def filled(node):
        return (
            {key: filled(value) for key, value in node.items() if value != "auto"} if isinstance(node, dict) else node
        )

    numbers = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
    autos = {key: number for key, number in numbers.items() if fault.config.get(key) == "auto"}
    return json.dumps({**autos, **filled(fault.config)}, indent=2)


# What a forked process runs. Each function returns the engine that DeepSpeed built.


def by_deepspeed(config: Path, arguments: dict, pipeline: bool):
    import deepspeed
    import torch

    deepspeed.init_distributed("gloo", verbose=False)
    layers = [torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)]
    if pipeline:
        from deepspeed.pipe import PipelineModule

        model = PipelineModule(layers, num_stages=1, loss_fn=torch.nn.functional.cross_entropy)
    else:
        model = torch.nn.Sequential(*layers)
    try:
        has_optimizer = "optimizer" in json.loads(config.read_text())
    except json.JSONDecodeError:
        has_optimizer = False
    optimizer = None if has_optimizer else torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), optimizer=optimizer, config=str(config)
    )
    x, y = torch.randn(8, 32), torch.randint(4, (8,))
    if pipeline:
        engine.train_batch(iter([(x, y)] * 1000))
        return engine
    for _ in range(2):
        dtype = next(engine.module.parameters()).dtype
        engine.backward(torch.nn.functional.cross_entropy(engine(x.to(dtype)).float(), y))
        engine.step()
    return engine


def by_accelerate(config: Path, arguments: dict, pipeline: bool):
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim, DummyScheduler
    from transformers import BertConfig, BertForSequenceClassification

    settle()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=str(config)))
    plugin = accelerator.state.deepspeed_plugin
    model = BertForSequenceClassification(BertConfig(**TINY_BERT))
    optimizer = (
        DummyOptim(model.parameters(), lr=1e-3)
        if "optimizer" in plugin.deepspeed_config
        else torch.optim.AdamW(model.parameters(), lr=1e-3)
    )
    parts = [model, optimizer]
    if "scheduler" in plugin.deepspeed_config:
        parts.append(DummyScheduler(optimizer, total_num_steps=100, warmup_num_steps=10))
    rows = [{"input_ids": torch.ones(8, dtype=torch.long), "labels": torch.tensor(i % 2)} for i in range(32)]
    engine, optimizer, loader, *_ = accelerator.prepare(*parts[:2], torch.utils.data.DataLoader(rows, 8), *parts[2:])
    for batch in loader:
        accelerator.backward(engine(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    return engine


def by_trainer(config: Path, arguments: dict, pipeline: bool):
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    settle()
    known = {name: value for name, value in arguments.items() if value is not None and name != "report_to"}
    training = TrainingArguments(
        output_dir=str(config.parent / "out"),
        deepspeed=str(config),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="steps" if known.get("save_only_model") else "no",
        **({"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2} if known.get("load_best_model_at_end") else {}),
        accelerator_config={"use_configured_state": True},
        **{**known, "max_steps": 4 if known.get("save_only_model") else 2},
    )
    rows = [{"input_ids": torch.ones(8, dtype=torch.long), "labels": torch.tensor(i % 2)} for i in range(64)]
    model = BertForSequenceClassification(BertConfig(**TINY_BERT))
    trainer = Trainer(model=model, args=training, train_dataset=rows, eval_dataset=rows[:8])
    trainer.train()
    return trainer.model_wrapped


def settle() -> None:
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")


TINY_BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
}
RUNNERS = {"deepspeed": by_deepspeed, "accelerate": by_accelerate, "trainer": by_trainer}


def child(answer, runner: str, text: str, arguments: dict, pipeline: bool, shows: str) -> None:
    """Run, and send (status, message, seconds). The libraries' output is discarded."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        port = str(20000 + os.getpid() % 20000)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "LOCAL_RANK": "0"}
        os.environ |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        config = Path(folder) / "ds.json"
        config.write_text(text)
        start = time.perf_counter()
        try:
            engine = RUNNERS[runner](config, arguments, pipeline)
            said = f"{shows} = {eval(shows, {'engine': engine})!r}" if shows else ""  # noqa: S307 (our own table)
            answer.send(("runs", said, time.perf_counter() - start))
        except BaseException as error:
            words = " ".join(" ".join(str(error).split("\n")[:3]).split())
            answer.send(("refuses", f"{type(error).__name__}: {words}"[:300], time.perf_counter() - start))
    os._exit(0)


def tried(fork, runner: str, text: str, run: dict, shows: str = "") -> tuple[str, str, float]:
    arguments = run.get("arguments", A_RUN["arguments"])
    if runner == "trainer":
        arguments = arguments or A_RUN["arguments"]
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=child, args=(theirs, runner, text, arguments, "pipeline_parallel_size" in run, shows))
    process.start()
    theirs.close()
    answer = ("ends", "without a word", float(LIMIT_SECONDS))
    if ours.poll(LIMIT_SECONDS):
        with contextlib.suppress(EOFError):
            answer = ours.recv()
    else:
        answer = ("hangs", f"nothing after {LIMIT_SECONDS} s", float(LIMIT_SECONDS))
    process.kill()
    process.join()
    return answer


def key_of(fault: Fault) -> str:
    """A hash of everything that the libraries' answer depends on."""
    return hashlib.sha256(repr((fault.text, fault.run, fault.shows, in_words(versions()))).encode()).hexdigest()[:16]


def measure(only: str, known: dict[str, dict]) -> dict:
    start = time.perf_counter()
    import accelerate  # noqa: F401
    import deepspeed  # noqa: F401
    import torch
    import transformers  # noqa: F401
    from transformers import BertForSequenceClassification, Trainer  # noqa: F401

    from finetune.doctor.ops import ON_DISK, compile_ops

    imports = time.perf_counter() - start
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    compiling = fork.Process(target=compile_ops, args=(ON_DISK,))  # once per machine, outside all measured times
    compiling.start()
    compiling.join()
    rows = []
    for fault in FAULTS:
        if only not in fault.name:
            continue
        row = {"name": fault.name, "code": fault.code, "severity": fault.severity, "ours": found_by_us(fault)}
        row["key"] = key_of(fault)
        pipeline = "pipeline_parallel_size" in fault.run
        absent = why_not_here(fault.run)
        for runner in ENGINES:
            if row["key"] in known:
                row[runner] = known[row["key"]][runner]
                continue
            if absent or (pipeline and runner != "deepspeed"):
                row[runner] = (absent or "has no pipelines", "", 0.0)
                continue
            text = for_deepspeed(fault) if runner == "deepspeed" else fault.text
            status, said, seconds = tried(fork, runner, text, fault.run, fault.shows)
            row[runner] = (status, said, round(seconds + imports, 1))
        rows.append(row)
        print(fault.name, *(f"\n    {name}: {row[name]}" for name in ENGINES), flush=True)
    return {"imports": round(imports, 1), "faults": rows, "good": [] if only else good_ones(fork)}


def good_ones(fork) -> list[dict]:
    from finetune.dsconfig.check import check

    rows = []
    for good in GOOD:
        report = check(json.dumps(good.config), run_of(**good.run))
        row = {"name": good.name, "errors": len(report.errors), "warnings": len(report.found) - len(report.errors)}
        engine = good.run.get("engine")  # None is one of our recipes, which fills in more before it starts
        half = good.config.get("fp16", {}).get("enabled") is True or "zero_quantized" in json.dumps(good.config)
        if engine and good.run.get("world_size", 1) == 1 and not half:
            row["runs"] = tried(fork, engine, json.dumps(good.config), good.run)[:2]
        rows.append(row)
        print(good.name, row, flush=True)
    return rows


def cold_seconds() -> list[float]:
    """Seconds of `finetune check` on all shipped configs, each time in a new process."""
    files = [str(path) for path in sorted((REPO / "ds_configs").glob("zero*.json"))]
    command = [str(Path(sys.executable).with_name("finetune")), "check", *files, "--world_size", "16", "--gpu"]
    times = []
    for _ in range(7):
        start = time.perf_counter()
        subprocess.run([*command, "--ranks_per_node", "8"], check=True, capture_output=True)
        times.append(round(time.perf_counter() - start, 3))
    return times


def render(result: dict) -> str:
    rows, good = result["faults"], result["good"]
    named = [row for row in rows if row["ours"]]
    run_here = [row for row in rows if row["deepspeed"][0] in ("runs", "refuses", "ends", "hangs")]
    lines = [
        "# `finetune check` compared with DeepSpeed, accelerate and the Trainer",
        "",
        f"`python benchmarks/check.py`; {result['machine']}.",
        "",
        f"- Faults reported with the right code and message: **{len(named)} of {len(rows)}** "
        f"({100 * len(named) / len(rows):.0f}%). The rules were written with these faults in view. The figure shows "
        "that none of them is missed, not that there are no other faults.",
        f"- Errors reported on valid configs: **{sum(row['errors'] for row in good)}** on {len(good)} configs of "
        f"`check_cases.py` ({sum(row.get('runs', [''])[0] == 'runs' for row in good)} of them were trained here for "
        "two steps) and on the 9 shipped configs (a test checks this).",
        "- `finetune check` on the 8 shipped ZeRO configs, each time in a new process: median "
        f"**{statistics.median(result['cold_seconds']):.2f} s** ({min(result['cold_seconds'])} to "
        f"{max(result['cold_seconds'])}), without torch.",
        f"- Importing torch, transformers, accelerate and DeepSpeed took {result['imports']} s in the latest run. None "
        "of them can report anything before that, so all times below include an import. For a user, loading a real "
        "model adds to them.",
        "",
    ]
    for engine, title in (("deepspeed", "DeepSpeed alone"), ("accelerate", "accelerate"), ("trainer", "Trainer")):
        quiet = sum(row[engine][0] == "runs" for row in rows)
        stop = [row[engine][2] for row in rows if row[engine][0] == "refuses"]
        lines.append(
            f"- {title}: of the {sum(row[engine][0] in ('runs', 'refuses', 'ends', 'hangs') for row in rows)} faults "
            f"that can be run here, it trains with {quiet} without an error and refuses {len(stop)}"
            + (f" (median: after {statistics.median(stop):.0f} s)." if stop else ".")
        )
    lines += [
        "",
        "## Each fault",
        "",
        "The column `finetune check` has the code of the finding. The others have the seconds until an error, and the "
        'error. "trains" means two steps without an error, followed by the value that the engine used, where it can '
        "be read. Each config is run as it is. Not every fault concerns all three: a Trainer flag means nothing to "
        "DeepSpeed alone, and each of them also refuses configs for its own reasons.",
        "",
        "| fault | `finetune check` | DeepSpeed alone | accelerate | Trainer |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [_cell(*row[engine]) for engine in ENGINES]
        lines.append(f"| {row['name']} | {row['code'] if row['ours'] else '**missed**'} | " + " | ".join(cells) + " |")
    lines += ["", f"{len(run_here)} of the {len(rows)} faults could be run on this machine."]
    return "\n".join(lines) + "\n"


def _cell(status: str, said: str, seconds: float) -> str:
    said = re.sub(r"(/[\w.-]+)+/", "", said).replace("|", "/").replace("`", "'")
    said = said if len(said) <= 110 else f"{said[:107]}..."
    words = {"runs": "trains:" if said else "trains", "refuses": f"{seconds:.0f} s:", "hangs": "hangs", "ends": "ends"}
    return f"{words[status]} {said}".strip() if status in words else status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only faults whose names contain these words; writes nothing")
    only = parser.parse_args().only
    os.environ |= {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    path = OUT / "check.json"
    known = {row["key"]: row for row in json.loads(path.read_text())["faults"]} if path.is_file() and not only else {}
    seconds = [] if only else cold_seconds()
    result = {"cold_seconds": seconds, **measure(only, known)}
    if only:
        return
    result["machine"] = f"{this_machine()}; {in_words(versions())}"
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
