"""The verdicts of `finetune check`, compared with those of DeepSpeed, the Trainer and accelerate on the same files.

    python benchmarks/check_truth.py                  # 400 generated configs; writes docs/results/check_truth.*
    python benchmarks/check_truth.py FOLDER           # prints the verdicts on every *.json in a folder

Upstream's own code reads, fills and builds each file: `DeepSpeedConfig`, the Trainer's `HfTrainerDeepSpeedConfig` with
`TrainingArguments`, accelerate's `DeepSpeedPlugin`, and the engine's checks of optimizer and schedule. No model is
trained, so faults that only a step would reveal are not seen here (benchmarks/check.py trains).
"""

import argparse
import collections
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from check_cases import ARGUMENTS, run_of
from check_configs import configs

OUT = Path(__file__).resolve().parents[1] / "docs" / "results"
ENGINES = ("recipe", "trainer", "accelerate", "deepspeed")
SEED, COUNT, STEPS = 17, 400, ARGUMENTS["max_steps"]
# Errors about what upstream accepts, only to do something else than the file or the flags say; see docs/check.md.
SILENT = {
    "DS004": "uses the last of two values",
    "DS101": "ignores a misspelled key",
    "DS105": "trains in fp32, because the old name is not read",
    "DS104": "reads a quoted number in some places and not in others",
    "DS204": "takes the text auto as a value",
    "DS208": "updates after each micro-batch, regardless of the flag",
    "DS206": "clips at a different norm than the flag says",
    "DS301": "ignores optimizer parameters without a type",
    "DS304": "fails, or is slow, at the first step",
    "DS309": "drops to a learning rate of 0 after warm-up",
    "DS312": "trains uphill, to NaN, or with a learning rate that falls where it should rise",
    "DS407": "never lowers the loss scale",
    "DS408": "trains in fp32",
    "DS405": "the engine refuses it",
    "DS501": "saves shards that nothing can open",
    "DS507": "the engine refuses it, but only after the model is built",
    "DS601": "offloads nothing",
    "DS602": "offloads nothing",
    "DS609": "offloads nothing",
    "DS701": "the engine refuses it",
    "DS702": "does nothing",
    "DS904": "accepts a secret in the file",
    "DS906": "fails at the first step",
    "DS905": "would leave a recipe's output folder without a model",
}


def libraries():
    """Import the upstream libraries in one process, on a CPU."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    import logging

    import deepspeed
    import torch
    from accelerate import DeepSpeedPlugin
    from deepspeed.ops.op_builder import builder
    from deepspeed.ops.op_builder.cpu import builder as cpu_builder
    from deepspeed.ops.op_builder.cpu import no_impl
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    logging.disable(logging.WARNING)
    # A process group of one, without the backend whose first use compiles an op.
    group = mock.MagicMock(**{"get_rank.return_value": 0, "get_world_size.return_value": 1})
    deepspeed.comm.comm.cdb = group
    nothing = mock.MagicMock()
    for kind in (builder.OpBuilder, cpu_builder.CPUOpBuilder, no_impl.NotImplementedBuilder):
        kind.load = lambda self, verbose=True: nothing  # run constructors without compiling anything

    class Engine(deepspeed.DeepSpeedEngine):
        """An engine without a model, for its checks of the config's sections."""

        def __init__(self, config) -> None:
            torch.nn.Module.__init__(self)
            self._config, self.client_optimizer, self.client_lr_scheduler = config, None, None
            self.pipeline_parallelism, self.has_moe_layers, self.zenflow, self.global_rank = False, False, False, 1

        def __del__(self) -> None:
            pass

    arguments = TrainingArguments(output_dir=tempfile.mkdtemp(), use_cpu=True, report_to=[], **ARGUMENTS)
    return SimpleNamespace(torch=torch, deepspeed=deepspeed, Plugin=DeepSpeedPlugin, arguments=arguments,
                           HfConfig=HfTrainerDeepSpeedConfig, Engine=Engine)  # fmt: skip


def by_deepspeed(lib, config) -> None:
    """`config` is a path, or a filled config."""
    from deepspeed.runtime.zero.utils import is_zero_supported_optimizer

    built = lib.deepspeed.DeepSpeedConfig(config)
    built.zero_config.model_dump()
    engine = lib.Engine(built)
    clip = built.gradient_clipping > 0  # the first step compares  # noqa: F841
    engine._assert_valid_mixed_precision_config()
    weight = lib.torch.nn.Parameter(lib.torch.zeros(4, 4))
    weight.use_muon = True
    optimizer = lib.torch.optim.AdamW([weight])
    if engine.optimizer_name() is not None:
        name = engine.optimizer_name()
        assert engine._is_supported_optimizer(name), f"{name} is not a supported DeepSpeed Optimizer"
        if "muon" not in name and not name.startswith("mu"):
            optimizer = engine._configure_basic_optimizer([weight])
    if built.zero_enabled and not is_zero_supported_optimizer(optimizer):
        assert built.zero_allow_untested_optimizer, "You are using an untested ZeRO Optimizer"
    engine.get_data_types()
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] if isinstance(group["lr"], float) else 1e-3
    engine._scheduler_from_config(optimizer)


BY_HIDDEN_SIZE = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def filled_by_accelerate(plugin, micro, accumulation, config) -> dict:
    """What Accelerator._prepare_deepspeed does for a model with a hidden size (accelerate 1.15, accelerator.py)."""
    values = {"gradient_clipping": 1.0, "zero_optimization.stage3_gather_16bit_weights_on_model_save": False}
    values |= dict.fromkeys((f"zero_optimization.{name}" for name in BY_HIDDEN_SIZE), 640)
    plugin.fill_match("gradient_accumulation_steps", must_match=False, gradient_accumulation_steps=accumulation)
    if micro is not None:
        steps = plugin.get_value("gradient_accumulation_steps")
        values |= {"train_micro_batch_size_per_gpu": micro, "train_batch_size": micro * steps}
    if "optimizer" in config:
        values |= {"optimizer.params.lr": 1e-3, "optimizer.params.weight_decay": 0.0}
    if "scheduler" in config:
        values |= {"scheduler.params.warmup_min_lr": 0, "scheduler.params.warmup_max_lr": 1e-3}
        values |= {"scheduler.params.warmup_num_steps": 10, "scheduler.params.total_num_steps": STEPS}
    plugin.deepspeed_config_process(must_match=False, **values)
    return plugin.deepspeed_config


def by_accelerate(lib, path) -> None:
    plugin = lib.Plugin(hf_ds_config=str(path))
    plugin.set_mixed_precision("no")
    auto = plugin.is_auto("train_micro_batch_size_per_gpu")
    total = plugin.get_value("train_batch_size")
    steps = plugin.get_value("gradient_accumulation_steps")
    fits = total // (steps if isinstance(steps, int) and steps else 1) if isinstance(total, int) and total else 8
    # "auto" takes the script's value, which may fit.
    micro = fits if auto else plugin.get_value("train_micro_batch_size_per_gpu")
    accumulation = total // micro if isinstance(total, int) and isinstance(micro, int) and micro else 2
    config = filled_by_accelerate(plugin, micro, accumulation, plugin.deepspeed_config)
    if "optimizer" not in config:
        config["zero_allow_untested_optimizer"] = True
    by_deepspeed(lib, config)


def by_trainer(lib, source) -> None:
    """`source` is a path, or a config as a recipe hands it over."""
    config = lib.HfConfig(str(source) if isinstance(source, Path) else source)
    config.trainer_config_process(lib.arguments)
    plugin = lib.Plugin(hf_ds_config=config)
    plugin.set_mixed_precision("no")
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
    config.trainer_config_finalize(lib.arguments, model, STEPS)
    micro = plugin.get_value("train_micro_batch_size_per_gpu")
    filled = filled_by_accelerate(plugin, micro, 2, plugin.deepspeed_config)
    if "optimizer" not in filled:
        filled["zero_allow_untested_optimizer"] = True
    by_deepspeed(lib, filled)


def by_recipe(lib, path) -> None:
    from finetune.dsconfig.load import resolve

    with path.open(encoding="utf-8") as file:
        by_trainer(lib, resolve(json.load(file), run_of()))


READERS = {"recipe": by_recipe, "trainer": by_trainer, "accelerate": by_accelerate, "deepspeed": by_deepspeed}


def upstream(lib, engine: str, path: Path) -> str:
    """Why upstream refuses the file; "" if it accepts it."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    try:
        READERS[engine](lib, str(path) if engine == "deepspeed" else path)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
    return ""


def compared(lib, path: Path) -> list[dict]:
    from finetune.dsconfig.check import check, read

    rows = []
    for engine in ENGINES:
        arguments = {} if engine in ("accelerate", "deepspeed") else ARGUMENTS
        run = run_of(engine=engine, has_cuda=None, arguments=arguments)
        codes = sorted({placed.finding.code for placed in check(read(path), run).errors})
        why = upstream(lib, engine, path)
        if bool(why) == bool(codes):
            verdict = "refused by both" if why else "taken by both"
        elif why:
            verdict = "missed"
        else:
            verdict = "silent fault" if {*codes} <= {*SILENT} else "false error"
        rows.append({"file": path.name, "engine": engine, "verdict": verdict, "codes": codes, "upstream": why})
    return rows


def render(rows: list[dict]) -> str:
    verdicts = ("taken by both", "refused by both", "silent fault", "missed", "false error")
    count = collections.Counter((row["engine"], row["verdict"]) for row in rows)
    silent = collections.Counter(code for row in rows if row["verdict"] == "silent fault" for code in row["codes"])
    lines = [
        "# `finetune check` compared with upstream's own config readers",
        "",
        f"`python benchmarks/check_truth.py`; {len({row['file'] for row in rows})} configs, generated by "
        f"check_configs.py with seed {SEED}. The code of DeepSpeed, of the Trainer and of accelerate reads, fills and "
        "builds each config. `finetune check` judges it for each engine.",
        "",
        "- accepted by both, refused by both: upstream and `finetune check` agree.",
        "- silent fault: upstream accepts the config but does not do what it says; `finetune check` refuses it.",
        "- missed: upstream refuses the config; `finetune check` accepts it.",
        "- false error: `finetune check` refuses a config that upstream accepts and reads as written.",
        "",
        "| engine | " + " | ".join(verdicts).replace("taken", "accepted") + " |",
        "|---|" + "---|" * len(verdicts),
        *(
            f"| {engine} | " + " | ".join(str(count[engine, verdict]) for verdict in verdicts) + " |"
            for engine in ENGINES
        ),
        "",
        "Silent faults by the code of the finding:",
        "",
        "| code | configs x engines | what upstream does |",
        "|---|---|---|",
        *(f"| {code} | {many} | {SILENT[code]} |" for code, many in sorted(silent.items())),
        "",
        "We generated the configs from a seed, and fixed the rules with them in view. The figures show what remains of "
        "these faults, not how many faults real-world configs have.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """The exit status: 1 if a verdict of ours differs from upstream's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--show", default="missed,false error", help="the verdicts to print")
    asked = parser.parse_args()
    lib = libraries()
    with tempfile.TemporaryDirectory() as made:
        folder = asked.folder or Path(made)
        if not asked.folder:
            for name, text in configs(asked.count, asked.seed).items():
                (folder / name).write_text(text)
        rows = [row for path in sorted(folder.glob("*.json")) for row in compared(lib, path)]
        for row in rows:
            if row["verdict"] in asked.show.split(","):
                print(*row.values(), sep="  ")
    print(*sorted(collections.Counter((row["engine"], row["verdict"]) for row in rows).items()), sep="\n")
    if not asked.folder and (asked.seed, asked.count) == (SEED, COUNT):
        (OUT / "check_truth.json").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
        (OUT / "check_truth.md").write_text(render(rows))
    return int(any(row["verdict"] in ("missed", "false error") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
