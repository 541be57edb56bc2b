"""Mixtures of experts train with the loss, the gradient norm and the weights of one process that sees each global batch
at once, also if ranks hold different experts; experts that no token reaches hold nothing up."""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAUNCHERS, REPO, Finished, engine, gate_has, launch, run_to_its_end
from conftest import flags as command_line
from durability_runs import different_weights
from exact_runs import GLOBAL_BATCH, ONE_A_BLOCK, PACKED, RECIPE, SHORT
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from finetune.export.source import read_source
from finetune.training.checkpoints.manifest import problems

sys.path.append(str(REPO / "tests/generation"))
from tiny_models import GROUPED, tokenizer

pytestmark = pytest.mark.usefixtures("built_ops")

ROUTED = {
    **SHORT,
    "adam_epsilon": 1e-4,  # the usual 1e-8 would turn rounding in tiny gradients into whole steps
    "router_aux_loss_coef": 0.5,
}
COMMON = {**GROUPED, "num_hidden_layers": 2, "num_experts_per_tok": 2, "head_dim": 8, "initializer_range": 0.1}
DEEPSEEK = {
    **{name: value for name, value in COMMON.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: MixtralConfig(**COMMON, num_local_experts=8, sliding_window=None),
    "qwen3_moe": lambda: Qwen3MoeConfig(**COMMON, num_experts=8, moe_intermediate_size=16, norm_topk_prob=True),
    "deepseek_v3": lambda: DeepseekV3Config(**DEEPSEEK),
    "gpt_oss": lambda: GptOssConfig(**COMMON, num_local_experts=8, sliding_window=32),
}
NO_LOSS = {"router_aux_loss_coef": None}  # DeepSeek-V3 has none in transformers


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts, which are not learnt, and answers of 1 to 9 words; and rows of one letter each."""
    folder = tmp_path_factory.mktemp("mixtures")
    draw = random.Random(0)
    words = "the cat sat on a mat and saw two birds in tall grass".split()
    rows = [(draw.choices(words, k=draw.choice([1, 4])), draw.choices(words, k=draw.choice([1, 9]))) for _ in range(90)]
    lines = [json.dumps({"prompt": " ".join(asked), "completion": f" {' '.join(said)}"}) for asked, said in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    config = json.loads((REPO / "ds_configs/zero2_offload.json").read_text())
    config["zero_optimization"]["stage"] = 1
    (folder / "zero1_offload.json").write_text(json.dumps(config))
    letters = [json.dumps({"text": draw.choice("ab") * draw.choice([5, 30])}) for _ in range(90)]
    (folder / "letters.jsonl").write_text("\n".join(letters))
    return folder


def saved(folder: Path, kind: str, change: Callable[[Any], None] = lambda model: None) -> Path:
    if not folder.exists():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(CONFIGS[kind]())
        change(model)
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(home: Path) -> Callable[..., Finished]:
    made: dict[str, Finished] = {}

    def train(ranks: int = 1, model: str = "mixtral", folder: Path | None = None, **values: Any) -> Finished:
        key = repr((ranks, model, folder, sorted(values.items())))
        if key not in made:
            flags = {"train_file": home / "rows.jsonl", "model_name_or_path": saved(home / model, model), **values}
            if (own := home / f"{values['deepspeed']}.json").is_file():
                flags["deepspeed"] = own
            launcher = "python" if ranks == 1 else "torchrun"
            place = folder or Path(tempfile.mkdtemp(dir=home)) / "run"
            made[key] = launch(launcher, place, {**ROUTED, **flags}, ranks=ranks, recipe=RECIPE)
        return made[key]

    return train


def assert_same(run: Finished, truth: Finished, has_loss: bool = True) -> None:
    assert len(run.steps) == len(truth.steps) == ROUTED["max_steps"]
    for name in ("loss", "expert_load_max", "experts_idle", *(["router_loss"] if has_loss else [])):
        assert run.column(name) == pytest.approx(truth.column(name), rel=1e-6), name
    assert run.column("grad_norm") == pytest.approx(truth.column("grad_norm"), rel=2e-6)
    assert run.json("experts.json") == truth.json("experts.json")
    weights, expected = (load_file(one.folder / "model.safetensors") for one in (run, truth))
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert torch.allclose(weight, expected[name], rtol=1e-6, atol=1e-6), name


CASES = [
    # model, ranks, engine, accumulation, rows
    ("mixtral", 2, "zero3", 2, ONE_A_BLOCK),
    ("qwen3_moe", 2, "none", 1, ONE_A_BLOCK),
    ("mixtral", 1, "none", 2, ONE_A_BLOCK),
    ("mixtral", 2, "none", 1, ONE_A_BLOCK),
    ("mixtral", 2, "none", 2, PACKED),
    ("mixtral", 2, "zero0", 2, PACKED),
    ("mixtral", 2, "zero1", 1, ONE_A_BLOCK),
    ("mixtral", 2, "zero2", 1, PACKED),
    ("mixtral", 2, "zero2", 2, ONE_A_BLOCK),
    ("mixtral", 2, "zero3", 1, ONE_A_BLOCK),
    ("qwen3_moe", 2, "zero3", 2, PACKED),
    ("gpt_oss", 2, "zero3", 2, ONE_A_BLOCK),
    ("gpt_oss", 2, "none", 2, ONE_A_BLOCK),
    ("deepseek_v3", 2, "zero3", 1, ONE_A_BLOCK),
    ("deepseek_v3", 2, "zero2", 2, ONE_A_BLOCK),
]


@pytest.mark.parametrize(("model", "ranks", "config", "steps", "rows"), gate_has(CASES[:1], CASES))
def test_a_mixture_trains_as_one_process_does(
    model: str, ranks: int, config: str, steps: int, rows: Any, trained: Callable[..., Finished]
) -> None:
    more = {**rows, **(NO_LOSS if model == "deepseek_v3" else {})}
    truth = trained(model=model, deepspeed="none", per_device_train_batch_size=GLOBAL_BATCH, **more)
    micro = GLOBAL_BATCH // (ranks * steps)
    layout = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": steps, **engine(config)}
    run = trained(ranks, model=model, **layout, **more)
    assert_same(run, truth, has_loss=model != "deepseek_v3")


EXTRAS = {
    "checkpointing": {"activation_checkpointing": True},
    "a loss in chunks": {"loss_chunk_tokens": 16},
    "FSDP": {"fsdp": True, "deepspeed": None},
}


@pytest.mark.nightly
@pytest.mark.parametrize("extra", EXTRAS)
def test_it_goes_with(extra: str, trained: Callable[..., Finished]) -> None:
    truth = trained(deepspeed="none", per_device_train_batch_size=GLOBAL_BATCH, **ONE_A_BLOCK)
    flags = {"deepspeed": "zero3", "gradient_accumulation_steps": 2, **ONE_A_BLOCK, **EXTRAS[extra]}
    assert_same(trained(2, per_device_train_batch_size=1, **flags), truth)


def by_letter(model: Any) -> None:
    """Each letter has an expert of its own, and others get no token at all."""
    for layer in model.model.layers:
        layer.mlp.router.weight.data.zero_()
        layer.mlp.router.bias.data[4:] = -50.0
    model.model.embed_tokens.weight.data.mul_(10)
    a, b = (model.model.embed_tokens.weight.data[ord(letter)] for letter in "ab")
    for layer in model.model.layers:
        layer.mlp.router.weight.data[:2], layer.mlp.router.weight.data[2:4] = a - b, b - a


@pytest.mark.nightly
@pytest.mark.parametrize("config", ["zero2", "zero3"])
def test_a_rank_whose_tokens_reach_other_experts_trains_on(
    config: str, home: Path, trained: Callable[..., Finished]
) -> None:
    model = saved(home / "by_letter", "gpt_oss", by_letter)
    flags = {"model_name_or_path": model, "train_file": home / "letters.jsonl", "text_column_name": "text"}
    truth = trained(deepspeed="none", per_device_train_batch_size=2, **flags, **ONE_A_BLOCK)
    run = trained(2, deepspeed=config, per_device_train_batch_size=1, **flags, **ONE_A_BLOCK)
    assert_same(run, truth)
    assert min(run.column("experts_idle")) >= 0.5


def test_a_tiny_mixture_from_scratch_trains_saves_and_resumes(tmp_path: Path) -> None:
    flags = {**ROUTED, "model_size": "moe-tiny", "router_aux_loss_coef": None, "deepspeed": "none", "save_steps": 2}
    flags |= {"save_strategy": "steps", "max_train_samples": 3, "do_eval": True, "eval_strategy": "no"}
    flags |= {"max_eval_samples": 3, "config_overrides": "num_hidden_layers=2", "per_device_train_batch_size": 2}
    run = launch("python", tmp_path / "run", flags, recipe=RECIPE)
    assert "8 experts in each of 2 layers, 2 per token; router loss of the global batch x 0.01" in run.output
    assert "experts.png" in (run.folder / "README.md").read_text()
    found = run.json("experts.json")
    assert (found["step"], len(found["layers"]), len(found["tokens"][0])) == (3, 2, 8)
    assert all(0.9 < loss < 4 for loss in run.column("router_loss"))  # 2 if all experts are equally busy
    assert "expert_load_max" not in run.json("train_results.json")
    model = AutoModelForCausalLM.from_pretrained(run.folder)
    assert (model.config.model_type, model.config.output_router_logits) == ("qwen3_moe", True)
    again = launch("python", tmp_path / "run", {**flags, "max_steps": 4, "resume": "auto"}, recipe=RECIPE)
    assert len(again.steps) == 4


CLIPPED, BY_GRADIENT = {"max_grad_norm": 0.1}, {"optim": "sgd", "learning_rate": 0.1, "adam_epsilon": None}
PARALLEL = [
    # model, ranks, ranks that hold all experts, engine, accumulation, more
    ("qwen3_moe", 4, 2, "zero2", 1, {**ONE_A_BLOCK, **CLIPPED}),
    ("mixtral", 2, 2, "zero1", 2, PACKED),
    ("mixtral", 2, 2, "zero2", 2, {**ONE_A_BLOCK, **BY_GRADIENT}),
    ("mixtral", 4, 2, "zero1", 1, {**ONE_A_BLOCK, **BY_GRADIENT}),
    ("qwen3_moe", 4, 4, "zero1", 1, {**ONE_A_BLOCK, **BY_GRADIENT}),
    ("mixtral", 2, 2, "zero2", 2, {**PACKED, **CLIPPED, **EXTRAS["checkpointing"]}),
    ("qwen3_moe", 2, 2, "zero2", 1, {**ONE_A_BLOCK, **EXTRAS["a loss in chunks"]}),
    ("mixtral", 2, 2, "zero2_offload", 2, {**PACKED, **CLIPPED}),
    ("qwen3_moe", 4, 2, "zero2_offload", 1, ONE_A_BLOCK),
    ("mixtral", 4, 4, "zero1_offload", 1, ONE_A_BLOCK),
]


@pytest.mark.parametrize(("model", "ranks", "size", "config", "steps", "more"), gate_has(PARALLEL[:1], PARALLEL))
def test_ranks_that_hold_different_experts_train_as_one_process_does(
    model: str, ranks: int, size: int, config: str, steps: int, more: Any, trained: Callable[..., Finished]
) -> None:
    truth = trained(model=model, deepspeed="none", per_device_train_batch_size=GLOBAL_BATCH, **more)
    layout = {"gradient_accumulation_steps": steps, "deepspeed": config, "expert_parallel_size": size}
    run = trained(ranks, model=model, per_device_train_batch_size=GLOBAL_BATCH // (ranks * steps), **layout, **more)
    assert f"{ranks} rank(s), each group of {size} holds all experts" in run.output
    assert_same(run, truth)


SHARED = [
    # model, ranks, ranks that share a text, engine, accumulation, more
    ("mixtral", 2, 2, "zero3", 2, ONE_A_BLOCK),
    ("mixtral", 2, 2, "zero2", 4, {**ONE_A_BLOCK, **NO_LOSS}),
    ("qwen3_moe", 4, 2, "zero2", 1, PACKED),
    ("qwen3_moe", 4, 2, "zero2", 1, {**PACKED, "expert_parallel_size": 2}),
    ("mixtral", 4, 2, "zero1", 2, {**ONE_A_BLOCK, "expert_parallel_size": 4}),
    ("qwen3_moe", 2, 2, "zero2_offload", 2, {**PACKED, **CLIPPED, "expert_parallel_size": 2}),
]


@pytest.mark.parametrize(("model", "ranks", "size", "config", "steps", "more"), gate_has(SHARED[:1], SHARED))
def test_ranks_that_share_texts_train_a_mixture_as_one_process_does(
    model: str, ranks: int, size: int, config: str, steps: int, more: Any, trained: Callable[..., Finished]
) -> None:
    whole = {name: value for name, value in more.items() if name != "expert_parallel_size"}
    truth = trained(model=model, deepspeed="none", per_device_train_batch_size=GLOBAL_BATCH, **whole)
    layout = {"gradient_accumulation_steps": steps, "deepspeed": config, "sequence_parallel_size": size}
    micro = GLOBAL_BATCH * size // (ranks * steps)
    run = trained(ranks, model=model, per_device_train_batch_size=micro, **layout, **more)
    assert_same(run, truth, has_loss=more.get("router_aux_loss_coef", 1) is not None)


def for_the_first(model: Any) -> None:
    """Every token chooses experts 0 and 1, which are on rank 0."""
    model.model.embed_tokens.weight.data[:, 0] = 5.0
    for layer in model.model.layers:
        layer.mlp.gate.weight.data.zero_()[:, 0] = 8.0 - torch.arange(8)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "config", "more"),
    [(2, "zero1", BY_GRADIENT), (2, "zero2", BY_GRADIENT), (4, "zero2", BY_GRADIENT), (2, "zero2_offload", {})],
)
def test_ranks_whose_experts_get_no_token_train_and_go_on(
    ranks: int, config: str, more: Any, home: Path, trained: Callable[..., Finished], tmp_path: Path
) -> None:
    """SGD's weights show each gradient."""
    flags = {"model_name_or_path": saved(home / "for_the_first", "mixtral", for_the_first), **ONE_A_BLOCK, **more}
    flags |= {"save_strategy": "steps", "save_steps": 2}
    layout = {"deepspeed": config, "expert_parallel_size": ranks, "per_device_train_batch_size": GLOBAL_BATCH // ranks}
    truth, run = trained(**ALONE, **flags), trained(ranks, **layout, **flags)
    folder = shutil.copytree(run.folder, tmp_path / "again")
    shutil.rmtree(folder / "checkpoint-3")
    again = trained(ranks, folder=folder, resume="auto", **layout, **flags)
    assert "going on from checkpoint-2" in again.output
    for one in (run, again):
        assert_same(one, truth)
        tokens = torch.tensor(one.json("experts.json")["tokens"])
        assert tokens[:, :2].all()
        assert not tokens[:, 2:].any()
        assert one.column("experts_idle") == [0.75] * 3
    assert different_weights(again.folder, run.folder) == []


def ending(model: Any) -> None:
    """One in four of its tokens ends an answer."""
    model.generation_config.eos_token_id = list(range(64))


@pytest.mark.nightly
def test_a_rank_whose_chat_sample_ends_earlier_does_not_hold_up_the_others(home: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on a mat"}]
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 40))
    flags = {**ROUTED, "train_file": tmp_path / "chats.jsonl", "chat_template": "chatml", "sample_tokens": 40}
    flags |= {
        "model_name_or_path": saved(home / "ending", "mixtral", ending),
        "do_eval": True,
        "eval_strategy": "steps",
    }
    flags |= {"eval_steps": 1, "expert_parallel_size": 2, "deepspeed": "zero2", "output_dir": tmp_path / "run"}
    words = ["tests/runs/own_draws.py", RECIPE, *command_line(flags)]
    status, output = run_to_its_end([*LAUNCHERS["torchrun"](2), *words], {"HF_HUB_OFFLINE": "1"})
    assert status == 0, output[-4000:]
    assert "assistant:" in (tmp_path / "run/samples.md").read_text()


def not_opened(final: Path, checkpoint: Path) -> list[str]:
    """Weights of a final model, whose file names each expert, that do not open as they are in a checkpoint."""
    model, found = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    assert (set(found["missing_keys"]), set(found["unexpected_keys"])) == (set(), set())
    there = load_file(checkpoint / "model.safetensors")
    return [name for name, weight in model.state_dict().items() if not torch.equal(weight, there[name])]


OVER_TWO = {"expert_parallel_size": 2, "deepspeed": "zero2", "per_device_train_batch_size": 2}
SHARDED = {"deepspeed": "zero3", "per_device_train_batch_size": 2}
ALONE = {"deepspeed": "none", "per_device_train_batch_size": GLOBAL_BATCH}


@pytest.mark.nightly
@pytest.mark.parametrize("config", ["zero1", "zero2", "zero2_offload", "zero1_offload"])
def test_expert_parallelism_goes_on_bit_equal_and_at_another_layout(
    config: str, trained: Callable[..., Finished], tmp_path: Path
) -> None:
    """The evaluation at the end, too, is that of one process."""
    saves = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "do_eval": True, "eval_strategy": "no"}
    divided = {**OVER_TWO, "deepspeed": config}
    truth, whole = trained(**ALONE, **PACKED, **saves), trained(2, **divided, **PACKED, **saves)
    assert whole.json("eval_results.json")["eval_loss"] == pytest.approx(
        truth.json("eval_results.json")["eval_loss"], rel=1e-5
    )
    exported, there = (
        read_source(whole.folder / "checkpoint-2"),
        load_file(whole.folder / "checkpoint-2/model.safetensors"),
    )
    assert exported.notes == []
    assert {name: one.read().equal(there[name]) for name, one in exported.weights.items()} == dict.fromkeys(there, True)
    layouts = {"again": (whole, 2, divided), "alone": (whole, 1, ALONE), "divided": (truth, 2, divided)}
    layouts["sharded"] = (whole, 2, SHARDED)
    layouts["undivided"] = (whole, 2, {"deepspeed": config, "per_device_train_batch_size": 2})
    for name, (first, ranks, values) in layouts.items():
        folder = shutil.copytree(first.folder, tmp_path / name)
        shutil.rmtree(folder / "checkpoint-4")
        run = trained(ranks, folder=folder, resume="auto", **PACKED, **saves, **values)
        assert "going on from checkpoint-2" in run.output
        for figure in ("loss", "grad_norm", "router_loss"):
            assert run.column(figure)[-2:] == pytest.approx(truth.column(figure)[-2:], rel=1e-5), (name, figure)
        if name == "again":
            assert different_weights(run.folder, whole.folder) == []
    assert problems(whole.folder / "checkpoint-2", hashes=True) == []
    assert not_opened(whole.folder, whole.folder / "checkpoint-4") == []


@pytest.mark.nightly
def test_ranks_that_share_texts_and_experts_go_on_bit_equal_and_at_another_layout(
    trained: Callable[..., Finished], tmp_path: Path
) -> None:
    saves = {**PACKED, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    texts = {"sequence_parallel_size": 2, "deepspeed": "zero2", "per_device_train_batch_size": GLOBAL_BATCH}
    both = {**texts, "expert_parallel_size": 2}
    truth, whole = trained(**ALONE, **saves), trained(2, **both, **saves)
    layouts = {"again": (whole, 2, both), "alone": (whole, 1, ALONE), "both": (truth, 2, both)}
    layouts |= {"texts": (whole, 2, texts), "experts": (whole, 2, OVER_TWO)}
    for name, (first, ranks, values) in layouts.items():
        folder = shutil.copytree(first.folder, tmp_path / name)
        shutil.rmtree(folder / "checkpoint-4")
        run = trained(ranks, folder=folder, resume="auto", **saves, **values)
        assert "going on from checkpoint-2" in run.output
        for figure in ("loss", "grad_norm", "router_loss"):
            assert run.column(figure)[-2:] == pytest.approx(truth.column(figure)[-2:], rel=1e-5), (name, figure)
        if name == "again":
            assert different_weights(run.folder, whole.folder) == []


SPREAD: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, ALONE),
    "two": (2, OVER_TWO),
    "four": (4, {**OVER_TWO, "per_device_train_batch_size": 1}),
    "two that accumulate": (2, {**SHARDED, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}),
    "two that share texts": (2, {**SHARDED, "per_device_train_batch_size": 4, "sequence_parallel_size": 2}),
}


@pytest.mark.nightly
def test_a_log_spans_a_change_of_ranks_as_if_there_had_been_none(
    trained: Callable[..., Finished], tmp_path: Path
) -> None:
    """One log, of all steps; the checkpoint is between them."""
    saves = {**PACKED, "max_steps": 4, "logging_steps": 4, "save_strategy": "steps", "save_steps": 2}
    runs = {name: trained(ranks, **{**layout, **saves}) for name, (ranks, layout) in SPREAD.items()}
    (whole,) = runs["one rank"].steps
    for before, after in zip(SPREAD, [*SPREAD][1:] + [*SPREAD][:1], strict=True):
        folder, (ranks, layout) = shutil.copytree(runs[before].folder, tmp_path / before), SPREAD[after]
        shutil.rmtree(folder / "checkpoint-4")
        run = trained(ranks, folder=folder, resume="auto", **{**layout, **saves})
        (row,) = run.steps
        for figure in ("step", "loss", "router_loss", "expert_load_max", "experts_idle"):
            assert row[figure] == pytest.approx(whole[figure], rel=1e-5), (before, after, figure)
        assert run.json("experts.json") == runs["one rank"].json("experts.json"), (before, after)


@pytest.mark.nightly
def test_experts_of_two_ranks_go_on_over_four_and_back(trained: Callable[..., Finished], tmp_path: Path) -> None:
    saves = {**PACKED, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    layouts = {size: {**OVER_TWO, "expert_parallel_size": size} for size in (2, 4)}
    layouts[4]["per_device_train_batch_size"] = 1
    truth, wholes = trained(**ALONE, **saves), {size: trained(size, **layouts[size], **saves) for size in layouts}
    for size, other in ((2, 4), (4, 2)):
        folder = shutil.copytree(wholes[size].folder, tmp_path / str(size))
        shutil.rmtree(folder / "checkpoint-4")
        run = trained(other, folder=folder, resume="auto", **saves, **layouts[other])
        assert "going on from checkpoint-2" in run.output
        for figure in ("loss", "grad_norm", "router_loss"):
            assert run.column(figure)[-2:] == pytest.approx(truth.column(figure)[-2:], rel=1e-5), (size, figure)


@pytest.mark.nightly
@pytest.mark.parametrize("config", ["zero2", "zero2_offload"])
def test_the_best_checkpoint_of_expert_parallelism_is_the_final_model_at_any_layout(
    config: str, trained: Callable[..., Finished], tmp_path: Path
) -> None:
    """The best is the first: the highest loss counts."""
    saves = {**PACKED, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "do_eval": True}
    saves |= {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    saves |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    divided = {**OVER_TWO, "deepspeed": config}
    whole, alone = trained(2, **divided, **saves), trained(**ALONE, **saves)
    layouts = {"again": (whole, 2, divided), "alone": (whole, 1, ALONE), "sharded": (whole, 2, SHARDED)}
    layouts["divided"] = alone, 2, divided
    assert not_opened(whole.folder, whole.folder / "checkpoint-2") == []
    assert not_opened(whole.folder, whole.folder / "checkpoint-4") != []
    for name, (first, ranks, layout) in layouts.items():
        folder = shutil.copytree(first.folder, tmp_path / name)
        shutil.rmtree(folder / "checkpoint-4")
        run = trained(ranks, folder=folder, resume="auto", **saves, **layout)
        assert "going on from checkpoint-2" in run.output
        assert not_opened(run.folder, folder / "checkpoint-2") == [], name


@pytest.mark.nightly
@pytest.mark.parametrize("config", ["zero2", "zero2_offload"])
def test_expert_parallelism_trains_in_bf16_as_whole_experts_do(config: str, trained: Callable[..., Finished]) -> None:
    layout = {"per_device_train_batch_size": 2, "deepspeed": config, "bf16": True}
    whole, divided = (trained(2, **layout, **ONE_A_BLOCK, expert_parallel_size=size) for size in (1, 2))
    for figure in ("loss", "grad_norm", "router_loss"):
        assert divided.column(figure) == pytest.approx(whole.column(figure), rel=0.01), figure


def test_a_run_that_ends_before_its_first_log_shows_the_load_all_the_same(tmp_path: Path) -> None:
    flags = {**ROUTED, "model_size": "moe-tiny", "deepspeed": "none", "logging_steps": 10, "do_eval": False}
    flags |= {"router_aux_loss_coef": None, "config_overrides": "num_hidden_layers=2", "max_train_samples": 3}
    run = launch("python", tmp_path / "run", flags, recipe=RECIPE)
    assert run.json("train_results.json")["expert_load_max"] >= 1
    assert run.json("experts.json")["step"] == 3
    assert (run.folder / "experts.png").is_file()


EXPERTS = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": EXPERTS, "learning_rate": 1e-2, **ONE_A_BLOCK}


@pytest.mark.parametrize("model", gate_has("gpt_oss", ["mixtral", "qwen3_moe", "gpt_oss"]))
def test_adapters_of_experts_train_alike_and_open(model: str, home: Path, trained: Callable[..., Finished]) -> None:
    from peft import AutoPeftModelForCausalLM

    more = {"model": model, "merge_adapter": True, **LORA}
    truth = trained(deepspeed="none", per_device_train_batch_size=GLOBAL_BATCH, **more)
    run = trained(2, deepspeed="zero2", per_device_train_batch_size=1, gradient_accumulation_steps=2, **more)
    weights, expected = (load_file(one.folder / "adapter_model.safetensors") for one in (run, truth))
    assert len([name for name in weights if "experts" in name]) == 2 * 2 * 2  # layers, tensors, A and B
    assert run.column("loss") == pytest.approx(truth.column("loss"), rel=1e-6)
    for name, weight in weights.items():
        assert torch.allclose(weight, expected[name], rtol=1e-5, atol=1e-5), name
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        before = AutoModelForCausalLM.from_pretrained(home / model).eval()(ids).logits
        beside = AutoPeftModelForCausalLM.from_pretrained(truth.folder).eval()(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(truth.folder / "merged").eval()(ids).logits
    assert torch.allclose(beside, merged, atol=1e-4)
    assert not torch.allclose(before, merged, atol=1e-3)


def test_adapters_of_sharded_experts_are_refused(home: Path, tmp_path: Path) -> None:
    flags = {"train_file": home / "rows.jsonl", "model_name_or_path": saved(home / "gpt_oss", "gpt_oss"), **ROUTED}
    run = launch("python", tmp_path / "run", {**flags, **LORA, "deepspeed": "zero3"}, recipe=RECIPE, check=False)
    assert run.status == 2
    assert "an adapter on experts.down_proj, experts.gate_up_proj, but ZeRO-3 and FSDP shard weights" in run.errors[0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"torch_compile": True}, "a compiled model's router loss is untested here"),
        (
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": '{"use_reentrant": true}'},
            "reentrant checkpointing gives the routers' loss no gradient",
        ),
    ],
)
def test_what_the_loss_does_not_go_with_is_refused(
    flags: dict[str, Any], said: str, home: Path, tmp_path: Path
) -> None:
    named = {"train_file": home / "rows.jsonl", "model_name_or_path": saved(home / "mixtral", "mixtral")}
    values = {**ROUTED, **named, **flags, "deepspeed": "none"}
    run = launch("python", tmp_path / "run", values, recipe=RECIPE, check=False)
    assert run.status == 2
    assert said in run.errors[0]
    assert "--router_aux_loss_coef 0" in run.errors[0]


def test_a_config_without_the_loss_is_followed_and_said(home: Path, trained: Callable[..., Finished]) -> None:
    run = trained(deepspeed="none", per_device_train_batch_size=GLOBAL_BATCH, **ONE_A_BLOCK, **NO_LOSS)
    assert "no router loss, as output_router_logits is false in the model's config" in run.output
    assert "--router_aux_loss_coef 0.001 adds it" in run.output
    assert all("router_loss" not in row and row["expert_load_max"] >= 1 for row in run.steps)
