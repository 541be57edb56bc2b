"""Models of no family that is written down are traced: planned as known ones are, and as transformers builds them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.api.planning import plan
from finetune.errors import RequestError
from finetune.measure import tracing
from finetune.plan import unknown
from finetune.plan.families import FAMILIES
from finetune.plan.families.parts import CAUSAL
from finetune.plan.job import DEEPSPEED, FSDP, TRAINER, Job, tape_of
from finetune.plan.machine import find_machine
from finetune.plan.memory import plan_memory
from finetune.plan.model import model_of
from finetune.plan.seconds import plan_seconds
from finetune.plan.zero import Zero

H100 = find_machine("H100")
ROTARY = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
          "intermediate_size": 688, "vocab_size": 2000, "max_position_embeddings": 2048}  # fmt: skip
KNOWN: dict[str, tuple[float, dict[str, Any]]] = {
    "llama": (0.01, {"model_type": "llama", **ROTARY}),
    "qwen2": (0.01, {"model_type": "qwen2", **ROTARY}),
    "qwen3": (0.01, {"model_type": "qwen3", **ROTARY, "head_dim": 64}),
    "gpt2": (0.025, {"model_type": "gpt2", "n_embd": 256, "n_layer": 3, "n_head": 4, "vocab_size": 2000,
                     "n_positions": 2048, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}),
}  # fmt: skip
OPT = {"model_type": "opt", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128,
       "vocab_size": 500, "max_position_embeddings": 512, "word_embed_proj_dim": 64, "dropout": 0.0}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a tracer in this process."""

    def traced(config: dict[str, Any], head: str, where: str) -> dict[str, Any]:
        try:
            return tracing.traced(config, head)
        except Exception as error:
            raise RequestError(f"{where}: cannot be traced") from error

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(unknown, "_traced", traced)
    return tmp_path


def test_a_size_is_fitted_exactly() -> None:
    terms = (5, 7, 11, 13, 2)
    found = [5 + 7 * t + 11 * b + 13 * b * t + 2 * b * t * t for b, t in tracing.POINTS]
    assert tracing.fitted(found) == list(terms)


@pytest.mark.parametrize("name", KNOWN)
def test_a_traced_model_is_planned_as_its_family_is(here: Path, name: str) -> None:
    """At lengths and batches at which it was not traced."""
    within, config = KNOWN[name]
    written = model_of(config)
    traced, _ = unknown.traced_model(config, CAUSAL, name)
    assert {(one.name, one.shape) for one in traced.tensors} == {(one.name, one.shape) for one in written.tensors}
    for stage in (2, 3):
        for interval in (0, 1):
            one = Job(written, DEEPSPEED, Zero(stage=stage), 8, micro_batch=4, tokens=1024, precision="bf16",
                      checkpoint_interval=interval)  # fmt: skip
            other = replace(one, model=traced)
            peaks = [plan_memory(job, H100).peak.bytes for job in (one, other)]
            assert peaks[1] == pytest.approx(peaks[0], rel=within)
            flops = [plan_seconds(job, H100).model_flops for job in (one, other)]
            assert flops[1] == pytest.approx(flops[0], rel=1e-6)
            assert len([part for part in tape_of(other).segments if part.recomputed]) == 3 * interval


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize(
    ("engine", "precision", "within"),
    [(DEEPSPEED, "fp32", 0.025), (TRAINER, "fp32", 0.14), (TRAINER, "bf16", 0.14), (FSDP, "bf16", 0.14)],
)
def test_a_traced_model_is_planned_nearly_as_its_family_is_in_fp32_and_without_deepspeed(
    here: Path, name: str, engine: str, precision: str, within: float
) -> None:
    """Grouped heads in fp32 have no fused attention: scores of all pairs of tokens are there. Beside activations these
    models weigh nothing: the error is theirs."""
    config = KNOWN[name][1]
    written, (traced, _) = model_of(config), unknown.traced_model(config, CAUSAL, name)
    for tokens in (512, 2048):
        for interval in (0, 1):
            one = Job(written, engine, Zero(stage=0 if engine == TRAINER else 3), 1 if engine == TRAINER else 8,
                      micro_batch=4, tokens=tokens, precision=precision, checkpoint_interval=interval)  # fmt: skip
            peaks = [plan_memory(job, H100).peak.bytes for job in (one, replace(one, model=traced))]
            assert peaks[1] == pytest.approx(peaks[0], rel=within)


def test_eager_attention_of_a_traced_model_has_its_scores(here: Path) -> None:
    config = KNOWN["llama"][1]
    one = Job(model_of(config), DEEPSPEED, Zero(stage=3), 8, micro_batch=4, tokens=2048, precision="bf16",
              attention="eager")  # fmt: skip
    other = replace(one, model=unknown.traced_model(config, CAUSAL, "llama")[0])
    peaks = [plan_memory(job, H100).peak.bytes for job in (one, other)]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)


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


def test_an_adapter_on_a_traced_model_is_refused(here: Path) -> None:
    (here / "config.json").write_text(json.dumps(OPT))
    with pytest.raises(RequestError, match="adapters are planned on bert"):
        plan(str(here), gpu="H100-80GB", recipe="causal_lm", use_peft=True, block_size=256)


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
