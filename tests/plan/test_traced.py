"""Models of no family that is written down are traced. test_forward.py compares their peaks with measured ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.api.planning import plan
from finetune.errors import RequestError
from finetune.measure import fitting, tracing
from finetune.plan import unknown
from finetune.plan.families import FAMILIES
from finetune.plan.families.parts import CAUSAL, SEQ2SEQ
from finetune.plan.forward.parts import terms
from finetune.plan.job import DEEPSPEED, FSDP, TRAINER, Job, tape_of
from finetune.plan.machine import find_machine
from finetune.plan.memory import plan_memory
from finetune.plan.model import model_of, with_lora
from finetune.plan.seconds import plan_seconds
from finetune.plan.values import Lora
from finetune.plan.zero import Zero

H100 = find_machine("H100")
ROTARY = {"hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
          "intermediate_size": 688, "vocab_size": 2000, "max_position_embeddings": 2048}  # fmt: skip
WINDOW = 1024
KNOWN: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **ROTARY},
    "mistral": {"model_type": "mistral", **ROTARY, "sliding_window": WINDOW},
    "qwen3": {"model_type": "qwen3", **ROTARY, "head_dim": 64},
    "gpt2": {"model_type": "gpt2", "n_embd": 256, "n_layer": 12, "n_head": 4, "vocab_size": 2000, "n_positions": 2048},
}  # fmt: skip
OPT = {"model_type": "opt", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128,
       "vocab_size": 500, "max_position_embeddings": 512, "word_embed_proj_dim": 64, "dropout": 0.0}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a tracer in this process."""

    def traced(config: dict[str, Any], head: str, attention: str, where: str) -> dict[str, Any]:
        try:
            return tracing.traced(config, head, attention)
        except Exception as error:
            raise RequestError(f"{where}: cannot be traced") from error

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(unknown, "_traced", traced)
    return tmp_path


@pytest.mark.parametrize("head", [CAUSAL, SEQ2SEQ])
def test_a_size_is_fitted_exactly(head: str) -> None:
    points = fitting.points(head)
    each = (5, 7, 11, 13, 2, 3, 17, 19, 23, 29, 31, 37)[: len(points)]
    found = [sum(one * term for one, term in zip(each, terms(head, point), strict=True)) for point in points]
    assert fitting.fitted(found, head) == list(each)


@pytest.mark.parametrize(
    ("engine", "precision"), [(DEEPSPEED, "bf16"), (DEEPSPEED, "fp32"), (TRAINER, "bf16"), (FSDP, "bf16")]
)
@pytest.mark.parametrize("name", KNOWN)
def test_a_traced_model_is_planned_as_its_family_is(here: Path, name: str, engine: str, precision: str) -> None:
    """On a GPU, at lengths, batches and a depth at which it was not traced."""
    config = KNOWN[name]
    written, (model, _) = model_of(config), unknown.traced_model(config, CAUSAL, name)
    assert {(one.name, one.shape, one.layer) for one in model.tensors} == {
        (one.name, one.shape, one.layer) for one in written.tensors
    }
    assert set(model.buffers) == set(written.buffers)
    for tokens in (512, 2048):
        for interval in (0, 2):
            one = Job(written, engine, Zero(stage=0 if engine == TRAINER else 3), 1 if engine == TRAINER else 8,
                      micro_batch=4, tokens=tokens, precision=precision, checkpoint_interval=interval)  # fmt: skip
            other = replace(one, model=model)
            peaks = [plan_memory(job, H100).peak.bytes for job in (one, other)]
            assert peaks[1] == pytest.approx(peaks[0], rel=0.005)
            flops = [plan_seconds(job, H100).model_flops for job in (one, other)]
            assert flops[1] == pytest.approx(flops[0], rel=1e-6)
            assert len([part for part in tape_of(other).segments if part.recomputed]) == (6 if interval else 0)


def test_an_adapter_on_a_traced_model_is_planned_as_its_family_s_is(here: Path) -> None:
    """A trace holds what a layer reads to the end of its adapter, as the arguments of its call do."""
    config, lora = KNOWN["llama"], Lora(8, ("q_proj", "down_proj"), dropout=0.1)
    models = model_of(config), unknown.traced_model(config, CAUSAL, "llama")[0]
    jobs = [Job(with_lora(one, lora), TRAINER, micro_batch=4, tokens=1024, precision="bf16", dtype="bfloat16",
                loss_chunk_tokens=256) for one in models]  # fmt: skip
    peaks = [plan_memory(job, H100).peak.bytes for job in jobs]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)


def test_middle_layers_of_a_deep_traced_model_are_played_once(here: Path) -> None:
    model, _ = unknown.traced_model(KNOWN["llama"], CAUSAL, "llama")
    segments = tape_of(Job(model, DEEPSPEED, Zero(stage=3), 8, micro_batch=4, tokens=512, precision="bf16")).segments
    assert sum(segment.like is None for segment in segments) == 6  # both ends, three first layers, the last


@pytest.mark.parametrize(
    "config",
    [
        OPT,
        {"model_type": "gpt_neox", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 128, "vocab_size": 500, "max_position_embeddings": 512},
        {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500},
        {"model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 4, "intermediate_size": 128, "moe_intermediate_size": 32, "n_routed_experts": 8,
         "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "vocab_size": 500,
         "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
         "max_position_embeddings": 512},
    ],
    ids=lambda config: config["model_type"],
)  # fmt: skip
def test_weights_of_a_family_that_is_not_written_down_are_those_that_transformers_builds(
    here: Path, config: dict[str, Any]
) -> None:
    assert config["model_type"] not in FAMILIES
    folder = here / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    found = plan(str(folder), gpu="H100-80GB", deepspeed="zero2", block_size=256, search=False)
    states = sum(weight.numel() for weight in built.parameters())
    traced, seconds = unknown.traced_model(config, CAUSAL, "kept")
    assert traced.parameters == states
    assert seconds is None
    assert "is not a known family" in str(found)
    assert "traced in" in str(found)


@pytest.mark.parametrize(("recipe", "also"), [("causal_lm", set[str]()), ("seq_cls", {"score.weight"})])
def test_an_adapter_of_a_family_that_is_not_written_down_is_planned(here: Path, recipe: str, also: set[str]) -> None:
    (here / "config.json").write_text(json.dumps(OPT))
    length: dict[str, Any] = {"block_size": 256} if recipe == "causal_lm" else {"max_seq_length": 256}
    found = plan(str(here), gpu="H100-80GB", recipe=recipe, use_peft=True, search=False, **length)
    trained = {tensor.name for tensor in found.plan.job.model.tensors if tensor.trains}
    layers, linear_layers, sides = 2, 6, 2
    assert len({name for name in trained if ".lora_" in name}) == layers * linear_layers * sides
    assert {name for name in trained if ".lora_" not in name} == also


def test_a_process_of_its_own_traces_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    traced, seconds = unknown.traced_model(OPT, CAUSAL, "opt")
    assert seconds is not None
    assert traced.trace is not None
    again, none = unknown.traced_model(OPT, CAUSAL, "opt")
    assert none is None
    assert again.tensors == traced.tensors


@pytest.mark.nightly
@pytest.mark.parametrize("more", [{"num_attention_heads": 5}, {"model_type": "vit"}], ids=["heads", "no language"])
def test_what_cannot_be_traced_is_refused_with_what_the_process_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps({**OPT, **more}))
    with pytest.raises(RequestError, match=r"cannot be traced: \w+Error: .*Give --params_per_layer N"):
        plan(str(tmp_path), gpu="H100-80GB", recipe="causal_lm", block_size=256)


@pytest.mark.parametrize("kind", ["nothing_at_all", ["a"], None])
def test_what_transformers_has_not_is_refused_at_once_with_what_can_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.setattr(unknown, "_traced", lambda *_: pytest.fail("a process was started"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "hidden_size": 64}))
    with pytest.raises(RequestError, match=r"which transformers \S+ lacks\. Give --params_per_layer N"):
        plan(str(tmp_path), gpu="H100-80GB", block_size=256)
