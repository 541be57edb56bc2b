"""The programs of known architectures are those of the installed transformers and of the toolkit's own models; all
others are traced on the spot. test_forward.py compares their peaks with measured ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from traced_here import IN_A_PROCESS, traced_here  # noqa: F401

from finetune.api.planning import plan
from finetune.errors import RequestError
from finetune.measure import fitting
from finetune.measure.models import build_adapted, samples
from finetune.measure.tracing import KERNELS, main, traced
from finetune.plan import tracing
from finetune.plan.engines.resident import STATES
from finetune.plan.families.parts import CAUSAL, MASKED, SEQ2SEQ, SPANS
from finetune.plan.forward.parts import terms
from finetune.plan.job import DEEPSPEED, FSDP, Job
from finetune.plan.machine import find_machine
from finetune.plan.memory import BUFFERS, plan_memory
from finetune.plan.model import KINDS, heads_of_kind, model_of, with_lora
from finetune.plan.named import find_model_config, model_names
from finetune.plan.trace_files import KNOWN, file_of, known_trace
from finetune.plan.values import Lora
from finetune.plan.zero import Zero

# Of every known architecture, unlike those at which its programs were recorded.
OTHER_SIZES = {
    "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24, "intermediate_size": 80,
    "vocab_size": 51000, "num_labels": 5, "max_position_embeddings": 200, "type_vocab_size": 3, "dim": 96, "n_heads": 6,
    "hidden_dim": 80, "n_embd": 96, "n_head": 6, "n_inner": 112, "n_positions": 200, "num_experts": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "d_model": 96, "num_heads": 6,
    "d_kv": 24, "d_ff": 80, "relative_attention_num_buckets": 16, "n_group": 4, "topk_group": 2, "n_routed_experts": 16,
    "n_shared_experts": 3, "q_lora_rank": 40, "kv_lora_rank": 48, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 20, "shared_expert_intermediate_size": 72, "width": 72,
}  # fmt: skip
DEPTHS, TOKENS = (9, 2, 1, 14), {"pad_token_id": 0, "decoder_start_token_id": 0}
PREFIXES = (2, 1, 4)
OPT = {"model_type": "opt", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128,
       "vocab_size": 500, "max_position_embeddings": 512, "word_embed_proj_dim": 64, "dropout": 0.0}  # fmt: skip

ROUTED = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
          "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "vocab_size": 500,
          "max_position_embeddings": 1024}  # fmt: skip
LLAVA = {"model_type": "llava", "text_config": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 500, "max_position_embeddings": 512},
         "vision_config": {"model_type": "clip_vision_model", "hidden_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32, "patch_size": 8}}  # fmt: skip


@pytest.mark.parametrize("head", [CAUSAL, SEQ2SEQ])
def test_a_size_is_fitted_exactly(head: str) -> None:
    points = fitting.points(head)
    each = (5, 7, 11, 13, 2, 3, 17, 19, 23, 29, 31, 37)[: len(points)]
    found = [sum(one * term for one, term in zip(each, terms(head, point), strict=True)) for point in points]
    assert fitting.fitted(found, head) == list(each)


def given(name: str, when: dict[str, Any]) -> dict[str, Any]:
    """Settings of a config for which `when` holds."""
    off: dict[str, Any] = {"sliding_window": None, "mlp_only_layers": []}
    data, found = file_of(name), dict[str, Any]()
    usual = data["choices"]
    for key, value in when.items():
        if key in data["sizes"] and isinstance(value, bool):
            found |= {} if value else {key: None}
        elif key == "grouped" or isinstance(usual.get(key), bool) or not isinstance(value, bool):
            found[key] = value
        else:
            on = usual[key] or (4096 if key == "sliding_window" else 0.1)
            found[key] = on if value else off.get(key, None if usual[key] is None or "capping" in key else 0.0)
    is_grouped = found.pop("grouped", True) and "num_key_value_heads" in data["sizes"]
    pairs = {} if is_grouped else {"num_key_value_heads": OTHER_SIZES["num_attention_heads"]}
    return {**found, **pairs}


def _known(name: str, head: str) -> Any:
    night = [] if (name, head) in (("llama", CAUSAL), ("distilbert", MASKED)) else [pytest.mark.nightly]
    return pytest.param(name, head, marks=night, id=f"{name}-{head}")


UNORDERED = "gemma3_text"  # its order of operators depends on the seed of hashes


def alike(config: dict[str, Any], head: str, attention: str, folder: Path) -> Any:
    """Traced in a process whose hashes are those of a plan's."""
    (folder / "config.json").write_text(json.dumps(config))
    words = [str(folder / "config.json"), head, attention, str(folder / "out.json")]
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    subprocess.run([sys.executable, "-m", "finetune.measure.tracing", *words], env=env, check=True)
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize(
    ("name", "head"), [_known(name, head) for name in KNOWN for head in dict.fromkeys(heads_of_kind(name))]
)
def test_a_known_program_is_what_the_installed_transformers_records(name: str, head: str, tmp_path: Path) -> None:
    """At sizes, and a depth, at which it was not recorded. `python benchmarks/make_traces.py` records anew."""
    data = file_of(name)
    sizes = {key: size for key, size in OTHER_SIZES.items() if key in data["sizes"]}
    for number, program in enumerate(one for one in data["programs"] if one["head"] == head):
        config = {"model_type": name, **TOKENS, **sizes, **given(name, program["when"])}
        first = PREFIXES[number % len(PREFIXES)] if "prefix" in data else 0
        # A T5 with one layer in each stack frees a few bytes earlier than deeper ones, which its program does not know.
        layers = max(DEPTHS[number % len(DEPTHS)], data["period"], len(data["depths"]))
        config |= dict.fromkeys(data["depths"], first + layers)
        config |= {data["prefix"]: first} if first else {}
        if head == SPANS:
            config["num_labels"] = 2
        given_to = (config, head, program["attention"])
        real = alike(*given_to, tmp_path) if name == UNORDERED else traced(*given_to)
        assert known_trace(*given_to, name) == json.loads(json.dumps(real))


@pytest.mark.parametrize(
    "more",
    [{"first_k_dense_replace": 0}, {"first_k_dense_replace": 3}, {"hidden_act": "gelu"}, {"norm_topk_prob": False}],
    ids=str,
)
def test_a_mixture_without_dense_layers_or_without_others_has_no_known_program(more: dict[str, Any]) -> None:
    config = {**find_model_config("DeepSeek-V3"), "num_hidden_layers": 3, "first_k_dense_replace": 2}
    known = known_trace(config, CAUSAL, "sdpa", "V3")
    assert known is not None
    assert known["layers"] == 3
    assert known_trace({**config, **more}, CAUSAL, "sdpa", "V3") is None


@pytest.mark.parametrize("name", [name for name in model_names() if find_model_config(name)["model_type"] in KNOWN])
def test_models_known_by_name_are_planned_without_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_traced", lambda *_: pytest.fail("a process was started"))
    assert model_of(find_model_config(name), name).trace is not None


@pytest.mark.parametrize(
    "config",
    [
        OPT,
        {"model_type": "gpt_neox", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 128, "vocab_size": 500, "max_position_embeddings": 512},
        {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500},
        {"model_type": "dots1", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 4, "intermediate_size": 128, "moe_intermediate_size": 32, "n_routed_experts": 8,
         "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "vocab_size": 500,
         "max_position_embeddings": 512, "sliding_window": None},
        LLAVA,
        {"model_type": "mpt", "d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 500, "max_seq_len": 512},
        {"model_type": "afmoe", **ROUTED, "num_experts": 4, "num_dense_layers": 1},  # with a bias that is never trained
        # Parameters of its layers are as large as its window.
        {"model_type": "inkling2_text", **ROUTED, "n_routed_experts": 4, "sliding_window_size": 128},
    ],
    ids=lambda config: config["model_type"],
)  # fmt: skip
def test_weights_of_a_family_that_is_not_known_are_those_that_transformers_builds(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    assert config["model_type"] not in KINDS
    (tmp_path / "config.json").write_text(json.dumps(config))
    built = build_adapted(config, CAUSAL, "eager", "")[1]
    found = plan(str(tmp_path), gpu="H100-80GB", deepspeed="zero2", block_size=256, search=False)
    states = sum(weight.numel() for weight in built.parameters())
    notes = list[str]()
    made = model_of(config, "kept", CAUSAL, notes=notes)
    assert made.parameters == states
    trained = {name for name, weight in built.named_parameters() if weight.requires_grad}
    assert {tensor.name for tensor in made.tensors if tensor.trains} == trained
    assert "traced earlier" in "".join(notes)
    assert "is not a known architecture" in str(found)
    assert "traced in" in str(found)


def test_what_no_text_reaches_is_held_without_gradients_and_without_an_adapter() -> None:
    """In the plan as in the model that is trained: a tower has layers of the same names as the language model."""
    pytest.importorskip("peft", reason="peft is not installed")
    notes = list[str]()
    made = model_of(LLAVA, "llava", CAUSAL, notes=notes)
    aside = {tensor.name for tensor in made.tensors if "vision" in tensor.name or "projector" in tensor.name}
    assert {tensor.name for tensor in made.tensors if not tensor.trains} == aside
    assert f"{sum(one.elements for one in made.tensors if one.name in aside):,} parameters" in notes[-1]
    names = ["q_proj", "v_proj"]
    flags = {"lora_target_modules": names, "lora_r": 4, "dtype": "float32"}
    _, real = build_adapted(LLAVA, CAUSAL, "sdpa", json.dumps(flags))
    trained = {name.removeprefix("base_model.model.") for name, one in real.named_parameters() if one.requires_grad}
    adapted = with_lora(made, Lora(4, tuple(names)))
    assert {tensor.name for tensor in adapted.tensors if tensor.trains} == trained


# A pooler whose output no loss reads, embeddings of entities that no sample has, and attention to tokens that see all.
UNREACHED: dict[str, dict[str, Any]] = {
    "fnet": {"tpu_short_seq_length": 32},
    "luke": {"entity_vocab_size": 500, "entity_emb_size": 32, "num_attention_heads": 4},
    "longformer": {"attention_window": 16, "num_attention_heads": 4},
}


@pytest.mark.parametrize("kind", UNREACHED)
def test_parameters_that_no_gradient_reaches_have_none_and_no_states(kind: str) -> None:
    """Under the Trainer alone and FSDP; DeepSpeed's engines give them zeros."""
    config = {"model_type": kind, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 300,
              "max_position_embeddings": 128, "type_vocab_size": 2, **UNREACHED[kind]}  # fmt: skip
    _, real = build_adapted(config, MASKED, "eager", "")
    real(**{name: one[None] for name, one in samples(config, MASKED, 64).items()}).loss.backward()
    without = {name for name, one in real.named_parameters() if one.grad is None}
    made = model_of(config, kind, MASKED)
    assert {tensor.name for tensor in made.tensors if not tensor.is_reached} == without != set()
    reached = sum(tensor.elements for tensor in made.tensors if tensor.is_reached)
    cpu, alone = find_machine("cpu"), Job(made, tokens=64, device="cpu")
    engines = [replace(alone, engine=DEEPSPEED, zero=Zero(stage=stage)) for stage in range(4)]
    states = [plan_memory(one, cpu).resident[STATES] for one in (alone, replace(alone, engine=FSDP), *engines)]
    assert states == pytest.approx([8 * reached] * 2 + [8 * made.parameters] * len(engines), rel=0.01)


def test_buffers_in_the_model_s_precision_are_planned_in_that_of_the_run() -> None:
    config = {"model_type": "ibert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 96, "vocab_size": 300, "max_position_embeddings": 128}  # fmt: skip
    made, cpu = model_of(config, "ibert", MASKED), find_machine("cpu")
    real = build_adapted(config, MASKED, "eager", "")[1]
    for dtype, job in ((torch.float32, Job(made, device="cpu")), (torch.bfloat16, Job(made, precision="bf16",
                       dtype="bfloat16", device="cpu"))):  # fmt: skip
        held = sum(buffer.nbytes for buffer in real.to(dtype).buffers())
        assert held > 100_000
        assert plan_memory(job, cpu).resident[BUFFERS] == held


@pytest.mark.parametrize(("recipe", "also"), [("causal_lm", set[str]()), ("seq_cls", {"score.weight"})])
def test_an_adapter_of_a_family_that_is_not_known_is_planned(tmp_path: Path, recipe: str, also: set[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OPT))
    length: dict[str, Any] = {"block_size": 256} if recipe == "causal_lm" else {"max_seq_length": 256}
    found = plan(str(tmp_path), gpu="H100-80GB", recipe=recipe, use_peft=True, search=False, **length)
    trained = {tensor.name for tensor in found.plan.job.model.tensors if tensor.trains}
    layers, linear_layers, sides = 2, 6, 2
    assert len({name for name in trained if ".lora_" in name}) == layers * linear_layers * sides
    assert {name for name in trained if ".lora_" not in name} == also


def test_a_cached_trace_is_of_the_code_that_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (tracing.OURS / "measure" / "tracing.py").is_file()
    monkeypatch.setattr(tracing, "OURS", tmp_path)
    source = tmp_path / "plan" / "forward" / "parts.py"
    source.parent.mkdir(parents=True)
    keys = set()
    for text in ("one = 1", "one = 2"):
        source.write_text(text)
        keys.add(tracing._key(OPT, CAUSAL, "sdpa", None))
    assert len(keys) == 2


def test_a_process_of_its_own_traces_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_traced", IN_A_PROCESS)
    monkeypatch.setattr(tracing, "_cache", lambda: tmp_path / "cache")
    first, again = (tracing.found_of(OPT, CAUSAL, "sdpa", "opt") for _ in range(2))
    assert "traced in" in first[1]
    assert "traced earlier" in again[1]
    assert first[0] == again[0]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"num_attention_heads": 5}, r"cannot be traced: \w+Error: .*"),
        ({"model_type": "vit"}, r"that of a vit, for which transformers \S+ has no AutoModelForCausalLM\. "),
    ],
    ids=["heads", "no language"],
)
def test_what_cannot_be_traced_is_refused_with_what_the_process_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr(tracing, "_traced", IN_A_PROCESS)
    (tmp_path / "config.json").write_text(json.dumps({**OPT, **more}))
    with pytest.raises(RequestError, match=f"{why}.*Give --params_per_layer N"):
        plan(str(tmp_path), gpu="H100-80GB", recipe="causal_lm", block_size=256)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "jetmoe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "kv_channels": 16, "intermediate_size": 96, "num_local_experts": 4,
          "vocab_size": 500}, r"^its layers read values out of tensors, such as how many tokens each expert gets"),
        ({"model_type": "mamba2", "hidden_size": 64, "num_heads": 3, "head_dim": 16},
         r"^StrictDataclassClassValidationError: .*: ValueError: Inconsistent configuration: hidden_size"),
    ],
    ids=lambda one: one["model_type"] if isinstance(one, dict) else "",
)  # fmt: skip
def test_why_a_model_cannot_be_traced_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], why: str
) -> None:
    for name in KERNELS:
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "config.json"), CAUSAL, "sdpa", str(tmp_path / "out.json")])
    said = list[str]()
    assert main(said.append)
    assert re.search(why, said[0])
    assert len(said[0].splitlines()) == 1


LINEAR = {"model_type": "qwen3_5_text", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 500,
          "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
          "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip


@pytest.mark.nightly
def test_kernels_of_packages_are_not_called_and_a_note_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("def chunk_gated_delta_rule(**_): raise OSError('called')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tracing, "_traced", IN_A_PROCESS)
    (tmp_path / "config.json").write_text(json.dumps(LINEAR))
    found = plan(str(tmp_path), gpu="H100-80GB", recipe="causal_lm", block_size=256, search=False)
    assert any("With the kernels of causal_conv1d, fla, which transformers uses" in note for note in found.notes)


OWN = """from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def with_code(tmp_path: Path) -> Path:
    """A folder of a model with its own code, which is a small Llama's."""
    config = {"model_type": "own", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 96, "vocab_size": 500, "max_position_embeddings": 512,
              "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


HERE = {"gpu": "H100-80GB", "recipe": "causal_lm", "block_size": 256, "search": False}


def test_a_models_own_code_is_not_run_unless_it_is_trusted(with_code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_traced", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(RequestError, match=r"lacks\. --trust_remote_code True runs the code in its folder\."):
        plan(str(with_code), **HERE)


def test_a_config_cannot_trust_its_own_code(with_code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def traced(plain: dict[str, Any], *_: Any) -> Any:
        given.append(plain)
        raise RequestError("seen")

    monkeypatch.setattr(tracing, "_traced", traced)
    own = json.loads((with_code / "config.json").read_text())
    (with_code / "config.json").write_text(json.dumps({**own, **OPT, "hidden_act": "silu", "trust_remote_code": True}))
    with pytest.raises(RequestError, match="seen"):
        plan(str(with_code), **HERE)
    (plain,) = given
    assert not {"auto_map", "trust_remote_code", "_name_or_path"} & set(plain)


@pytest.mark.nightly
def test_a_models_own_code_is_traced_if_it_is_trusted(with_code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_traced", IN_A_PROCESS)
    found = plan(str(with_code), **HERE, trust_remote_code=True)
    llama = {**json.loads((with_code / "config.json").read_text()), "model_type": "llama"}
    known = model_of(llama, "llama", CAUSAL)
    assert found.plan.job.model.parameters == known.parameters
    assert found.plan.job.model.trace is not None
    assert len(found.plan.job.model.trace.ops) == len(known.trace.ops if known.trace else ())


@pytest.mark.parametrize("kind", ["nothing_at_all", ["a"], None])
def test_what_transformers_has_not_is_refused_at_once_with_what_can_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.setattr(tracing, "_traced", lambda *_: pytest.fail("a process was started"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "hidden_size": 64}))
    with pytest.raises(RequestError, match=r"which transformers \S+ lacks\. Give --params_per_layer N"):
        plan(str(tmp_path), gpu="H100-80GB", block_size=256)
