"""A GPT-lite with experts trains as a pipeline as it does with the Trainer in one process: the routers' loss of the
global batch, the load of each expert, gradients and weights."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Finished, gate_has, launch
from test_pipeline import GLOBAL_BATCH, SHAPE, TINY, TRAINER, pipe, train, weights

from finetune.models.gptlite import GPTLiteForCausalLM
from finetune.report.run_pictures import load_picture
from finetune.report.shapes import WIDE

pytestmark = pytest.mark.usefixtures("built_ops")

STEPS = 3
ROUTED = {
    "config_overrides": f"{SHAPE},num_experts=4,initializer_range=0.1",
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-4,  # the usual 1e-8 would turn rounding in tiny gradients into whole steps
    "max_grad_norm": "inf",
    "router_aux_loss_coef": 0.5,
    "do_eval": False,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 5 to 30 letters."""
    folder = tmp_path_factory.mktemp("mixtures")
    draw = random.Random(0)
    rows = [json.dumps({"text": "".join(draw.choices("abcdefgh", k=draw.randint(5, 30)))}) for _ in range(90)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture(scope="module")
def truth(home: Path) -> Any:
    """What one process does with the Trainer, once for each set of flags."""
    made: dict[str, Finished] = {}

    def trained(**values: Any) -> Finished:
        key = repr(sorted(values.items()))
        if key not in made:
            made[key] = train(home / f"truth{len(made)}", {**ROUTED, **values})
        return made[key]

    return trained


def assert_same(run: Finished, expected: Finished, has_loss: bool = True) -> None:
    assert len(run.steps) == len(expected.steps) == STEPS
    for name in ("loss", "expert_load_max", "experts_idle", *(["router_loss"] if has_loss else [])):
        assert run.column(name) == pytest.approx(expected.column(name), rel=1e-6), name
    assert run.column("grad_norm") == pytest.approx(expected.column("grad_norm"), rel=2e-6)
    assert run.json("experts.json") == expected.json("experts.json")
    ours, theirs = weights(run.folder), weights(expected.folder)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.allclose(weight, theirs[name], rtol=1e-6, atol=1e-6), name


BLOCKS: dict[str, Any] = {}
CASES = [
    # stages, pipelines, accumulation, more flags; None stands for rows of different lengths
    (2, 1, 2, None),
    (2, 1, 4, {"activation_checkpoint_interval": 1}),
    (2, 2, 2, None),
    (1, 2, 1, BLOCKS),
    (4, 1, 1, BLOCKS),
    (2, 1, 2, {"config_overrides": f"{ROUTED['config_overrides']},num_experts_per_tok=1,tie_word_embeddings=True"}),
    (2, 1, 2, {"loss_chunk_tokens": 16}),
    (2, 1, 2, {"router_aux_loss_coef": 0}),
]


@pytest.mark.parametrize(("stages", "pipelines", "accumulation", "more"), gate_has(CASES[:1], CASES))
def test_a_mixture_in_stages_trains_as_one_process_does(
    stages: int, pipelines: int, accumulation: int, more: dict[str, Any] | None, home: Path, truth: Any, tmp_path: Path
) -> None:
    if more is None:
        more = {"train_file": home / "rows.jsonl", "packing": "none", "block_size": 32, "max_train_samples": None}
        more["activation_checkpoint_interval"] = 1
    plain = {name: value for name, value in more.items() if name != "activation_checkpoint_interval"}
    expected = truth(**plain, **({"activation_checkpointing": True} if plain != more else {}))
    run = pipe(tmp_path / "run", {**ROUTED, **more}, stages, pipelines, accumulation)
    assert_same(run, expected, has_loss=more.get("router_aux_loss_coef") != 0)
    assert load_picture(run.json("experts.json"), WIDE) is not None
    assert (run.folder / "experts.png").is_file()


@pytest.mark.nightly
def test_a_mixture_goes_on_bitwise_in_its_stages_and_up_to_rounding_in_others(truth: Any, tmp_path: Path) -> None:
    saving = {**ROUTED, "save_strategy": "steps", "save_steps": 1, "save_total_limit": STEPS}
    whole = pipe(tmp_path / "whole", saving, stages=2)
    opened = GPTLiteForCausalLM.from_pretrained(whole.folder / "checkpoint-1")
    assert opened.config.num_experts == 4
    assert_same(whole, truth())
    for stages, apart in ((2, 0.0), (4, 1e-6), (1, 1e-6)):
        folder = tmp_path / f"in{stages}"
        shutil.copytree(whole.folder, folder)
        for step in (2, 3):
            shutil.rmtree(folder / f"checkpoint-{step}")
        run = pipe(folder, {**saving, "resume": "auto"}, stages)
        assert "checkpoint-1, after step 1" in run.output
        ours, theirs = weights(run.folder), weights(whole.folder)
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[name], theirs[name], rtol=apart, atol=apart) for name in theirs), stages
        assert run.column("router_loss") == pytest.approx(whole.column("router_loss"), rel=1e-6)


MOVES = ["two ranks to two stages", "two stages to two ranks", "two stages to one rank", "one rank to two stages"]


@pytest.mark.parametrize("move", gate_has(MOVES[0], MOVES))
def test_a_log_spans_a_move_between_engines_as_if_there_had_been_none(move: str, truth: Any, tmp_path: Path) -> None:
    """One log, of all steps; the checkpoint is between them."""
    flags = {"logging_steps": STEPS, "lr_scheduler_type": "constant"}
    long = {**ROUTED, **flags, "save_strategy": "steps", "save_steps": 2}

    def run(engine: str, folder: Path, **more: Any) -> Finished:
        if engine == "two stages":
            return pipe(folder, {**long, **more}, stages=2)
        ranks = 2 if engine == "two ranks" else 1
        layout = {"per_device_train_batch_size": GLOBAL_BATCH // ranks, "deepspeed": "none"}
        launcher = "torchrun" if ranks > 1 else "python"
        return launch(launcher, folder, {**TINY, **layout, **long, **more}, ranks=ranks, recipe=TRAINER)

    before, after = move.split(" to ")
    first = run(before, tmp_path / "first", max_steps=2)
    shutil.copytree(first.folder / "checkpoint-2", tmp_path / "then" / "checkpoint-2")
    shutil.copy(first.folder / "recipe.yaml", tmp_path / "then")
    then, expected = run(after, tmp_path / "then", resume="auto"), truth(**flags)
    (row,), (whole,) = then.steps, expected.steps
    for name in ("step", "loss", "router_loss", "expert_load_max", "experts_idle"):
        assert row[name] == pytest.approx(whole[name], rel=1e-5), name
    assert then.json("experts.json") == expected.json("experts.json")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"config_overrides": f"{SHAPE},num_experts=4,dropout=0.1"}, "a router loss, and dropout 0.1"),
        ({"config_overrides": SHAPE}, "but the model has no experts"),
    ],
)
def test_what_a_router_loss_in_stages_does_not_go_with_is_refused(more: Any, said: str, tmp_path: Path) -> None:
    run = pipe(tmp_path / "run", {**ROUTED, **more}, stages=2, check=False)
    assert run.status != 0
    assert [said in error for error in run.errors] == [True]
