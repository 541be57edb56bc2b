"""Every seeded fault is named, sound configs are left alone, and mending is safe on any JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from check_cases import ARGUMENTS, FAULTS, GOOD, Fault, Good
from check_cases import run_of as a_run
from conftest import REPO
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.dsconfig.check import OF_INFERENCE, check, difference, mended
from finetune.dsconfig.config import Config
from finetune.dsconfig.context import ENGINES, Context
from finetune.dsconfig.formats import FORMATS, written
from finetune.dsconfig.rules.leftovers import KNOWN
from finetune.dsconfig.shape import schema

ZERO2 = '"zero_optimization": {"stage": 2}'


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_fault_is_named(fault: Fault) -> None:
    found = [placed.finding for placed in check(fault.text, a_run(**fault.run)).found]
    said = [finding.message for finding in found if (finding.code, finding.severity) == (fault.code, fault.severity)]
    assert any(re.search(fault.says, message) for message in said), found


@pytest.mark.parametrize("good", GOOD, ids=lambda good: good.name)
def test_a_sound_config_is_left_alone(good: Good) -> None:
    assert check(json.dumps(good.config), a_run(**good.run)).errors == []


def test_there_are_as_many_cases_as_were_asked_for() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60
    assert len({good.name for good in GOOD}) == len(GOOD) >= 30


def test_a_finding_is_placed_at_its_key() -> None:
    text = '{\n  "zero_optimization": {\n    "stage": 2,\n    "overlap_com": true\n  }\n}'
    (placed,) = check(text, a_run(arguments={})).errors
    assert (placed.line, placed.column) == (4, 5)


def test_a_parameter_that_no_adam_takes_is_named() -> None:
    params = {"lr": "auto", "beta": [0.9, 0.99], "momentum": 0.9, "betas": "auto", "fused": True, "torch_adam": True}
    config = {
        "zero_optimization": {"stage": 2},
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": params},
    }
    found = [placed.finding for placed in check(json.dumps(config), a_run()).errors if placed.finding.code == "DS311"]
    assert [finding.path[-1] for finding in found] == ["beta", "momentum"]
    assert "Did you mean betas?" in found[0].message


@pytest.mark.parametrize(
    ("zero", "says", "mends"),
    [
        ("true", "an older form that the Trainer and accelerate cannot read", {"stage": 1}),
        ('{"stage": 3, "prefetch_bucket_size": 5, "stage3_prefetch_bucket_size": 6}', "two names of one setting",
         {"stage": 3, "stage3_prefetch_bucket_size": 6}),
    ],
)  # fmt: skip
def test_what_deepspeed_has_two_forms_of_is_mended_to_one(zero: str, says: str, mends: dict[str, Any]) -> None:
    text = f'{{"zero_optimization": {zero}, "gradient_clipping": "auto"}}\n'
    checked = check(text, a_run(arguments={}))
    assert [says in placed.finding.message for placed in checked.errors if placed.finding.code == "DS105"] == [True]
    assert json.loads(mended(text, a_run(arguments={})))["zero_optimization"].items() >= mends.items()
    assert "prefetch_bucket_size" not in json.loads(mended(text, a_run(arguments={})))["zero_optimization"]


@pytest.mark.parametrize(
    ("extra", "engine", "severity", "says"),
    [
        ({"comment": "of ours"}, "trainer", "warning", "'comment' is not a key .* Delete it."),
        ({"checkpointing": {"every": 5}}, "trainer", "warning", "checkpointing is not a key .* Delete it."),
        ({"max_grad_norm": 0.5}, "trainer", "error", "Its place is gradient_clipping."),
        ({"bf16": {"enabled": True, "loss_scale": 1}}, "trainer", "error", "It belongs to fp16; .* Delete it."),
        ({"fp16": {"fp16": True}}, "deepspeed", "error", "fp16.fp16 is not a key .* Delete it."),
        ({f"of_ours_{key}": key for key in "abcdef"}, "trainer", "warning", "of_ours_c and 3 more are not keys"),
        ({"bfloat16": {"enabled": True}}, "trainer", "warning", "the run then trains in fp32"),
        ({"bfloat16": {"enabled": True}}, "accelerate", "warning", "the run then trains in fp32"),
        ({"bfloat16": {"enabled": True}}, "deepspeed", "warning", "an old name. Use bf16"),
        ({"sequence_parallel_size": 2}, "accelerate", "error", "which does not divide the run's ranks, 1"),
        ({"aio": {"use_gds": True}}, "deepspeed", "error", "needs an NVIDIA GPU"),
    ],
)  # fmt: skip
def test_what_public_configs_hold_is_told_as_upstream_takes_it(
    extra: dict[str, Any], engine: str, severity: str, says: str
) -> None:
    sound = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
    run = a_run(engine=engine, arguments={})
    assert check(json.dumps({**sound, "gradient_accumulation_steps": 1}), run).found == ()
    found = [placed.finding for placed in check(json.dumps({**sound, **extra}), run).found]
    told = [finding.severity for finding in found if re.search(says.replace("'", "'?"), finding.message)]
    assert told == [severity]
    assert severity == "error" or not [finding for finding in found if finding.severity == "error"]


def test_the_old_name_of_bf16_does_no_harm_where_the_flag_asks_for_it() -> None:
    text = json.dumps({**BF16_BY_ITS_OLD_NAME, "gradient_clipping": 1.0})
    assert check(text, a_run(arguments={"bf16": True})).errors == []
    assert [placed.finding.code for placed in check(text, a_run(arguments={"bf16": False})).errors] == ["DS105"]


def test_all_disagreements_are_named_at_once() -> None:
    config = {
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 2.0,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    assert [placed.finding.code for placed in check(json.dumps(config), a_run()).errors] == ["DS203"] * 3


def test_files_of_another_purpose_get_one_message() -> None:
    lines = "".join(f'  "key_{line}": CONFIG_{line},\n' for line in range(30))
    said = [placed.finding for placed in check(f"{{\n{lines}}}", a_run()).found]
    assert [(finding.code, "30 value" in finding.message) for finding in said] == [("DS009", True)]
    inference = {"replace_with_kernel_inject": True, "tensor_parallel": {"tp_size": 2}, "typo": 1, "max_out_tokens": 5}
    assert [placed.finding.code for placed in check(json.dumps(inference), a_run()).found] == ["DS010"]
    stages = {"zero_optimization": {"stage": [0, 1, 2, 3]}, "autotuning": {"enabled": True}, "num-layers": 12}
    assert [placed.finding.code for placed in check(json.dumps(stages), a_run()).found] == ["DS010"]
    wrapped = {"deepspeed_config": {"zero_optimization": {"stage": 2}}}
    assert [placed.finding.code for placed in check(json.dumps(wrapped), a_run()).found] == ["DS010"]


@pytest.mark.parametrize(
    "text",
    [
        f'{{{ZERO2}, "gradient_clipping": 1.0, "wandb": {{"enabled": false, "group": "$USER", "team": "<us>"}}}}',
        '{"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, "communication_data_type": "FP32"}',
        f'{{{ZERO2}, "gradient_clipping": 1.0, "wandb": {{"enabled": false, "group": "as in: <us>, [TODO]"}}}}',
    ],
    ids=["texts of a monitor", "capitals", "a text with marks in it"],
)
def test_what_only_looks_like_a_placeholder_is_none(text: str) -> None:
    assert check(text, a_run()).found == ()


def test_a_placeholder_in_a_comment_hides_no_other_finding() -> None:
    text = '{"zero_optimization": {"stage": 2}, # before: ${STAGE},\n "gradient_clipping": 1.0}'
    assert [placed.finding.code for placed in check(text, a_run()).found] == ["DS002"]


def test_fields_of_inference_are_those_of_deepspeed_and_of_no_training() -> None:
    from deepspeed.inference.config import DeepSpeedInferenceConfig

    fields = DeepSpeedInferenceConfig.model_fields
    known = {*fields, *(field.alias for field in fields.values())}
    assert {*OF_INFERENCE} <= known
    assert not {*OF_INFERENCE} & {*schema()["properties"]}


def test_a_section_that_no_rule_knows_is_refused_by_name() -> None:
    on = {"enabled": True, "autotp_size": 2, "deepcompile": True}
    sections = [name for name, part in schema()["properties"].items() if "properties" in part or not part]
    refused = [name for name in sections if name not in KNOWN]
    assert {"tensor_parallel", "data_efficiency", "autotuning", "hybrid_engine", "compile"} <= {*refused}
    for name in refused:
        config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, name: on}
        found = [placed.finding for placed in check(json.dumps(config), a_run()).errors]
        assert ("DS905", (name,)) in [(finding.code, finding.path) for finding in found]
        config[name] = {"enabled": False}
        assert "DS905" not in [placed.finding.code for placed in check(json.dumps(config), a_run()).found]


def test_tensor_parallelism_is_refused_with_its_reason_and_what_to_use_in_its_place() -> None:
    config = {"zero_optimization": {"stage": 1}, "gradient_clipping": 1.0, "tensor_parallel": {"autotp_size": 2}}
    (found,) = [placed.finding for placed in check(json.dumps(config), a_run()).errors]
    assert (found.code, found.path) == ("DS905", ("tensor_parallel",))
    for said in ("read the same samples", "without an error", "the same size only", "ZeRO-3", "Delete it."):
        assert said in found.message
    other = check(json.dumps({**config, "tensor_parallel": {"autotp_size": 1}}), a_run())
    assert other.errors == []


def test_what_nobody_reads_is_a_warning_and_a_slip_an_error() -> None:
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, "comms_config": {}, "monitor_config": {}}
    assert [placed.is_error for placed in check(json.dumps(config), a_run()).found] == [False, False]
    assert check(json.dumps({**config, "train_micro_batch_size": 1}), a_run()).errors != []


def test_clipping_that_is_said_in_a_wrong_place_is_not_filled_in_by_another_value() -> None:
    config = {"zero_optimization": {"stage": 2}, "max_grad_norm": 0.5}
    assert [placed.finding.code for placed in check(json.dumps(config), a_run(arguments={})).found] == ["DS101"]
    assert "gradient_clipping" not in json.loads(mended(json.dumps(config), a_run(arguments={})))


def test_clipping_goes_where_deepspeed_reads_it() -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 5e-5, "max_grad_norm": 0.5}}
    config = {"zero_optimization": {"stage": 2}, "optimizer": optimizer}
    for clipping, after in (({}, 0.5), ({"gradient_clipping": 0.5}, 0.5), ({"gradient_clipping": 0.1}, 0.1)):
        new = json.loads(mended(json.dumps(config | clipping), a_run(arguments={})))
        assert new["gradient_clipping"] == after
        assert ("max_grad_norm" in new["optimizer"]["params"]) == (after == 0.1), "two numbers: nobody knows which"


def test_a_share_of_the_steps_is_no_number_of_steps() -> None:
    """The Trainer compares them (transformers 5.23, trainer_config_finalize)."""
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 5e-5, "warmup_num_steps": 10}}
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, "scheduler": schedule}
    for steps, wrong in ((100, False), (1000, True), (-1, True)):
        run = a_run(arguments={**ARGUMENTS, "warmup_steps": 0.1, "max_steps": steps})
        codes = [placed.finding.code for placed in check(json.dumps(config), run).errors]
        assert ("DS203" in codes) == wrong, steps


def test_check_and_plan_count_the_same_buckets() -> None:
    from finetune.plan.advice import bucket_count
    from finetune.plan.job import DEEPSPEED
    from finetune.plan.zero import read_zero

    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8}
    config = {"zero_optimization": zero, "bf16": {"enabled": True}, "gradient_clipping": 1.0}
    found = [placed.finding for placed in check(json.dumps(config), a_run(arguments={})).found]
    (said,) = [finding.message for finding in found if finding.code == "DS504"]
    planned = read_zero(Config(config), 64)
    taken = bucket_count(planned, DEEPSPEED) * planned.reduce_bucket_size * 2 / 2**30
    assert f"takes {taken:.1f} GiB" in said
    assert taken == pytest.approx(1.86, abs=0.01)


@pytest.mark.parametrize("name", ["sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"])
def test_a_size_of_nothing_is_told(name: str) -> None:
    config = {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, name: 0}}
    found = check(json.dumps({**config, "gradient_clipping": 1.0}), a_run(arguments={})).found
    assert [(placed.finding.code, placed.is_error) for placed in found] == [("DS503", False)]


def test_a_code_can_be_switched_off() -> None:
    text = f'{{{ZERO2}, "gradient_clipping": "auto", "wall_clock_breakdown": true,}}'
    assert [placed.finding.code for placed in check(text, a_run()).found] == ["DS902", "DS003"]
    assert check(text, a_run(), disabled=["DS902", "DS003"]).found == ()


def test_every_code_has_an_entry_in_the_documentation_and_a_case() -> None:
    source = "".join(path.read_text() for path in (REPO / "finetune" / "dsconfig").rglob("*.py"))
    codes = set(re.findall(r'"(DS\d{3})"', source))
    assert len(codes) > 40
    page = (REPO / "docs" / "check.md").read_text()
    assert set(re.findall(r"^\| (DS\d{3})", page, re.MULTILINE)) == codes
    # What needs a machine without a compiler, or a raw control character, has its own tests.
    assert codes - {fault.code for fault in FAULTS} == {"DS008", "DS607"}


BF16_BY_ITS_OLD_NAME = {"zero_optimization": {"stage": 2}, "bfloat16": {"enabled": True}}
MENDED = [
    pytest.param(
        f'{{{ZERO2}, "gradient_cliping": 1.0}}',
        f'{{{ZERO2}, "gradient_clipping": 1.0}}',
        id="a misspelt key, before it is missed",
    ),
    pytest.param(
        f'{{\n  // why\n  {ZERO2},\n  "gradient_clipping": "1.0",\n}}\n',
        f'{{\n  {ZERO2},\n  "gradient_clipping": 1.0\n}}\n',
        id="form and value",
    ),
    pytest.param(
        '{"gradient_clipping": "auto", "zero_optimization": {"stage": 2, "cpu_offload": true}}',
        '{"gradient_clipping": "auto", "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
        id="an old name",
    ),
    pytest.param(
        '{\n    "wall_clock_breakdown": true,\n    "zero_optimization": {\n        "stage": 3\n    }\n}\n',
        '{\n    "wall_clock_breakdown": false,\n    "zero_optimization": {\n        "stage": 3,\n'
        '        "stage3_gather_16bit_weights_on_model_save": true\n    },\n    "gradient_clipping": "auto"\n}\n',
        id="order and indentation stay",
    ),
    pytest.param(
        f'{{{ZERO2}, "gradient_clipping": 0.5}}', f'{{{ZERO2}, "gradient_clipping": "auto"}}', id="against the flag"
    ),
    pytest.param('{"a": ', '{"a": ', id="what cannot be read"),
]


@pytest.mark.parametrize(("text", "after"), MENDED)
def test_what_has_one_mend_is_mended(text: str, after: str) -> None:
    assert mended(text, a_run()) == after
    assert mended(after, a_run()) == after


def test_every_mend_of_every_fault_mends_it() -> None:
    mendable = 0
    for fault in FAULTS:
        run = a_run(**fault.run)
        before = check(fault.text, run)
        if any(placed.finding.code == fault.code and placed.finding.mends for placed in before.found):
            mendable += 1
            after = check(mended(fault.text, run), run)
            assert fault.code not in {placed.finding.code for placed in after.found}, fault.name
    assert mendable > 30


KEYS = st.sampled_from([*schema()["properties"], "gradient_cliping", "stage"])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-5, 10**10)
    | st.floats(allow_nan=False)
    | st.sampled_from(["auto", "cpu", "nvme", "none", "2", "true", "AdamW", "WarmupDecayLR", "fp32", "1e5", ""])
    | st.sampled_from([10**400, 3.0, "~nobody/x", "/" + "x" * 300, "a\0b", "\ud800"])
    | st.text(max_size=5)
)


def section(name: str) -> st.SearchStrategy[Any]:
    keys = [*schema()["properties"][name].get("properties", {}), "typo"]
    inner = st.dictionaries(st.sampled_from(["device", "nvme_path", "lr", "max_grad_norm", "warmup_num_steps"]), LEAVES)
    return st.dictionaries(st.sampled_from(keys), LEAVES | inner | st.lists(LEAVES, max_size=2), max_size=5)


CONFIGS = st.dictionaries(KEYS, LEAVES | st.lists(LEAVES, max_size=2), max_size=5).flatmap(
    lambda flat: st.fixed_dictionaries(
        {},
        optional={
            name: section(name) | LEAVES
            for name in ("zero_optimization", "optimizer", "scheduler", "fp16", "bf16", "aio", "pipeline", "data_types")
        },
    ).map(lambda sections: {**flat, **sections})
)
RUNS = st.builds(
    a_run,
    world_size=st.sampled_from([2, 16]),
    ranks_per_node=st.just(2),
    has_cuda=st.booleans(),
    arguments=st.sampled_from([{}, ARGUMENTS]),
    engine=st.sampled_from(ENGINES),
    pipeline_parallel_size=st.sampled_from([None, 2]),
    weights=st.just({"total": 10**7, "largest": 10**6, "hidden_size": 64}),
)


@settings(deadline=None)
@given(CONFIGS, RUNS, st.sampled_from([None, 2]))
def test_any_config_is_checked_and_mended_once_and_for_all(config: Any, run: Context, indent: int | None) -> None:
    text = json.dumps(config, indent=indent)
    before = check(text, run)
    after = mended(text, run)
    assert mended(after, run) == after
    json.loads(after)
    if after != text:
        codes = [placed.finding.code for placed in before.found if placed.finding.mends]
        assert codes, "a text without a finding that has a mend is not touched"


@settings(deadline=None)
@given(st.text(alphabet="{}[]\"':,#/ \n\tatrue1.e-", max_size=60))
def test_any_text_is_checked_and_mended_once_and_for_all(text: str) -> None:
    check(text, a_run())
    after = mended(text, a_run())
    assert mended(after, a_run()) == after


def test_the_difference_names_the_file_and_both_lines() -> None:
    text = difference('{"a": 1}', '{"a": 2}', "ds.json")
    assert text.splitlines() == [
        "--- ds.json (original)",
        "+++ ds.json (fixed)",
        "@@ -1 +1 @@",
        '-{"a": 1}',
        '+{"a": 2}',
    ]


SECRET = "hf_" + "Zz9" * 10
LONG = "0123456789abcdef" * 2
SECRETS = [
    pytest.param(f'{{{ZERO2}, "wandb": {{"team": "{SECRET}"}}, "gradient_clipping": 1.0}}', SECRET, id="known key"),
    pytest.param(f'{{{ZERO2}, "hf_token": "{SECRET}", "gradient_clipping": 1.0}}', SECRET, id="unknown key"),
    pytest.param(f'{{{ZERO2}, "wandb": {{"api_key": "{LONG}"}}, "gradient_clipping": 1.0}}', LONG, id="plain text"),
    pytest.param(f'{{{ZERO2}, "train_batch_size": "{SECRET}", "gradient_clipping": 1.0}}', SECRET, id="wrong kind"),
    pytest.param(f'{{{ZERO2}, "a": {{"api_key": "{LONG}"}}, "a": 1, "gradient_clipping": 1.0}}', LONG, id="duplicate"),
    pytest.param(f'{{{ZERO2}, "api_key": {LONG}, "gradient_clipping": 1.0}}', LONG, id="without quotes"),
]


@pytest.mark.parametrize(("text", "secret"), SECRETS)
def test_a_secret_is_never_shown(text: str, secret: str, request: pytest.FixtureRequest) -> None:
    found = check(text, a_run()).found
    if "duplicate" not in request.node.name:  # where its value counts no more
        assert "DS904" in [placed.finding.code for placed in found]
    for form in FORMATS:
        assert secret not in written([("ds.json", placed) for placed in found], form)
    spread = text.replace(", ", ",\n")
    assert secret not in difference(spread, mended(spread, a_run()), "ds.json")


def test_a_name_that_is_no_secret_is_left_alone() -> None:
    text = f'{{{ZERO2}, "gradient_clipping": 1.0, "comet": {{"enabled": false, "experiment_key": "abcdefgh12345678"}}}}'
    assert check(text, a_run()).found == ()


KEPT = [
    pytest.param('"float16": {"enabled": true}', id="another word for fp16"),
    pytest.param('"train_micro_batch_size": 4, "train_micro_batch_size_per_gpu": 8', id="half of a key"),
    pytest.param('"model_parallel_size": 2', id="a key of Megatron"),
    pytest.param('"_comment": "ZeRO-2"', id="a comment as a key"),
    pytest.param('"offload_optimizer": {"device": "cpu"}', id="a key of a section at the top"),
]


@pytest.mark.parametrize("member", KEPT)
def test_a_key_that_only_looks_like_another_is_left(member: str) -> None:
    text = f'{{{ZERO2}, "gradient_clipping": 1.0, {member}}}'
    assert check(text, a_run()).found != ()
    assert mended(text, a_run()) == text


def test_a_stage_that_is_none_costs_no_section() -> None:
    for stage in ("4", '"auto"'):
        section = f'"zero_optimization": {{"stage": {stage}, "offload_param": {{"device": "cpu"}}}}'
        text = f'{{{section}, "gradient_clipping": 1, "train_batch_size": 16, "gradient_accumulation_steps": 2}}'
        assert mended(text, a_run(engine="accelerate")) == text
        codes = [placed.finding.code for placed in check(text, a_run(engine="trainer")).errors]
        assert codes in (["DS103"], []), codes


def test_a_mend_that_would_break_the_file_is_not_made() -> None:
    text = '{"zero_optimization": {"stage3_max_live_parameters": 1e9 /* c */, "stage": 2}, "gradient_clipping": 1}'
    after = mended(text, a_run(engine="deepspeed"), ["DS002"])
    assert check(after, a_run(engine="deepspeed"), ["DS002"]).value is not None


def test_many_slips_are_mended_at_once() -> None:
    text = "{\n" + "// why\n" * 1000 + f'{ZERO2},\n"gradient_clipping": 1.0\n}}\n'
    assert mended(text, a_run()) == f'{{\n{ZERO2},\n"gradient_clipping": 1.0\n}}\n'


def test_each_format_says_the_same(tmp_path: Path) -> None:
    found = check(f'{{{ZERO2},\n  "gradient_cliping": 1,\n  "wall_clock_breakdown": true\n}}', a_run()).found
    findings = [("a,b.json", placed) for placed in found]
    rows = json.loads(written(findings, "json"))
    assert [(row["line"], row["code"], row["severity"], row["fixable"]) for row in rows] == [
        (1, "DS206", "warning", True),
        (2, "DS101", "error", True),
        (3, "DS902", "warning", True),
    ]
    lines = written(findings, "text").splitlines()
    assert [line.split(": ")[0] for line in lines] == ["a,b.json:1:1", "a,b.json:2:3", "a,b.json:3:3"]
    github = written(findings, "github").splitlines()
    assert github[1].startswith("::error file=a%2Cb.json,line=2,col=3,title=DS101::gradient_cliping is not a key")
    sarif = json.loads(written(findings, "sarif"))
    (run,) = sarif["runs"]
    assert (sarif["version"], run["tool"]["driver"]["name"]) == ("2.1.0", "finetune")
    assert [result["ruleId"] for result in run["results"]] == ["DS206", "DS101", "DS902"]
    place = run["results"][1]["locations"][0]["physicalLocation"]
    assert place["region"] == {"startLine": 2, "startColumn": 3}
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == {"DS206", "DS101", "DS902"}
