"""`finetune report` over run folders: what is on the page, what is said of what is missing, torn or hostile."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_reader import PageReader
from report_folders import HOSTILE, run_folder

from finetune.cli import main
from finetune.errors import RequestError
from finetune.report.curves import SECONDS, STEP, TOKENS, Curve, Panel, draw, envelope, smoothed
from finetune.report.run_curves import curves_of, places
from finetune.report.run_folder import read_run
from finetune.report.run_sections import MEASURED_ON_CPU, MEASURED_ON_GPU, has_one_length, plan_of_run, run_sections
from finetune.report.shapes import Dot, shortly
from finetune.report.text import as_number, cell, count_words, number, seconds_words
from finetune.report.write import write


def page_of(folders: list[Path], tmp_path: Path, command: str = "") -> tuple[PageReader, str, list[str]]:
    notes = write(folders, html=tmp_path / "report.html", command=command)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    return PageReader(text), text, notes


def png(colour: int = 0) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = chunk(b"IHDR", bytes([0, 0, 0, 1, 0, 0, 0, 1, 8, 0, 0, 0, 0]))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes([0, colour]))) + chunk(b"IEND", b"")


def test_a_run_s_page_has_its_figures_curves_labels_samples_and_command(tmp_path: Path) -> None:
    page, _, notes = page_of([run_folder(tmp_path / "run")], tmp_path, "finetune report run")
    assert notes == []
    for words in ("Done: 30 steps in 1.8 s on 2 ranks.", "0.83", "61,000", "Loss", "Accuracy of the evaluation",
                  "Learning rate", "Gradient norm", "Tokens per second, all ranks", "123 of 137 are correct",
                  "email predicted as asyncio: 1, 2%",
                  "The interpreter reads <stdin> & more", "deepspeed --num_gpus 2 recipes/seq_cls.py --max_steps 30",
                  "torch 2.13.0, deepspeed 0.19.8", "finetune report run", "Planned against measured"):  # fmt: skip
        assert words in page.text, words


def test_every_picture_says_in_words_what_it_shows(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "confusion_matrix.json").unlink()
    (folder / "confusion_matrix.png").write_bytes(png())
    page, text, _ = page_of([folder], tmp_path)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    pictures = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(pictures) > 10
    for attributes in pictures:
        labels = set(str(attributes["aria-labelledby"]).split())
        assert attributes["role"] == "img"
        assert len(labels) == 2
        assert labels <= set(ids)
    (image,) = [attributes for tag, attributes in page.tags if tag == "img"]
    assert image["alt"] == "True against predicted labels, run"
    assert str(image["src"]) == "data:image/png;base64," + base64.b64encode(png()).decode()
    assert "Loss over optimizer step. training: from" in text


def test_the_page_asks_for_nothing_and_lets_only_its_own_script_run(tmp_path: Path) -> None:
    page, text, _ = page_of([run_folder(tmp_path / "run")], tmp_path)
    assert not {tag for tag, _ in page.tags} & {"link", "iframe", "object", "embed", "base", "form", "image", "use"}
    (policy,) = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert str(policy).startswith("default-src 'none'; ")
    (script,) = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    import hashlib

    assert f"script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in str(policy)
    assert not re.search(r"url\(|@import|src=\"(?!data:)|href=\"(?!#|https?:)", text)


def test_ten_thousand_steps_are_a_small_page_that_keeps_every_peak(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", steps=10_000)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[7001]["grad_norm"] = 1234.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, text, _ = page_of([folder], tmp_path)
    assert len(text.encode()) < 300_000
    assert "highest 1,234" in text or "highest 1,235" in text


def test_what_stands_for_many_points_keeps_the_ends_and_the_extremes() -> None:
    points = [(float(i), math.sin(i / 50)) for i in range(10_000)]
    points[777], points[888] = (777.0, 9.0), (888.0, -9.0)
    lowest, highest = envelope(points, 200)
    assert len(lowest) == len(highest) == 200
    assert (lowest[0][0], lowest[-1][0]) == (0, 9999)
    assert [x for x, _ in lowest] == [x for x, _ in highest] == sorted(x for x, _ in lowest)
    assert max(highest, key=lambda point: point[1]) == (pytest.approx(777, abs=50), 9.0)
    assert min(lowest, key=lambda point: point[1]) == (pytest.approx(888, abs=50), -9.0)
    assert [len(smoothed(points[:count], 50)) for count in (10, 50, 5000)] == [10, 50, 50]
    assert smoothed([(0.0, 1.0), (2.0, 3.0)], 1) == [(1.0, 2.0)]


def test_tokens_and_seconds_of_training_add_up_over_rows_of_several_steps() -> None:
    rows = [
        {"step": 10, "loss": 3.0, "step_seconds": 0.5, "real_tokens_per_second": 100.0, "time": 5.0},
        {"step": 10, "eval_loss": 2.9, "time": 65.0},  # a minute of evaluation is no training
        {"step": 15, "loss": 2.0, "step_seconds": 1.0, "real_tokens_per_second": 200.0, "time": 70.0},
        {"step": 15, "train_runtime": 70.0, "train_loss": 2.5},
    ]
    found = places(rows)
    assert [one[STEP] for one in found] == [10, 10, 15, 15]
    assert [one[SECONDS] for one in found] == [5, 5, 10, 10]
    assert [one[TOKENS] for one in found] == [500, 500, 1500, 1500]


def test_a_run_without_step_times_is_placed_by_its_clock() -> None:
    found = places([{"step": 1, "loss": 3.0, "time": 100.0}, {"step": 2, "loss": 2.0, "time": 104.0}])
    assert [one[SECONDS] for one in found] == [0, 4]
    assert TOKENS not in found[0]


def test_several_runs_lie_over_each_other_and_what_differs_is_told(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / name / "run", seed=seed) for seed, name in enumerate("ab")]
    page, _, _ = page_of(folders, tmp_path)
    assert "Side by side" in page.text
    differing = page.text.partition("Flags that differ")[2].partition("All flags")[0]
    assert "seed 0 1" in differing
    assert "learning_rate" not in differing
    assert {"a/run", "b/run"} <= set(page.texts)  # the folders have one name
    curves = curves_of([read_run(folder, name) for folder, name in zip(folders, "ab", strict=True)])
    assert curves is not None
    assert curves.axes == ("step", "tokens", "time")
    assert [curve.name for curve in curves.panels[0].curves] == ["a", "a, evaluation", "b", "b, evaluation"]


def test_an_unfinished_run_with_a_torn_last_line_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", finished=False)
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text + '{"step": 31, "lo')
    page, _, notes = page_of([folder], tmp_path)
    assert "Not finished, at step 30." in page.text
    assert notes == [
        f"{folder}: metrics.jsonl: skipped 1 line, incomplete or not an object.",
        f"{folder}: It is unfinished, or ended early: it has no results.",
    ]
    assert all(note.partition(": ")[2] in page.text for note in notes)
    assert "Learning rate" in page.text


MARKED = ("metrics.jsonl", "all_results.json", "environment.json", "recipe.yaml", "schedule.json",
          "confusion_matrix.json", "ds_config.json", "experts.json", "profile/summary.json")  # fmt: skip


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[1, 2]", '{"a": NaN}', "\udcff", "[" * 3_000, "1e999"])
def test_any_file_may_be_broken(content: str, tmp_path: Path) -> None:
    for broken in MARKED:
        folder = run_folder(tmp_path / broken.partition(".")[0].replace("/", "-"))
        (folder / "profile").mkdir()
        (folder / broken).write_bytes(content.encode("utf-8", "surrogateescape"))
        page, _, _ = page_of([folder], tmp_path)
        assert "The run" in page.text


BEYOND = {  # what a file can hold and no page can show
    "nested": '{"a": ' + "[" * 600 + "]" * 600 + "}",
    "an alias of itself": "a: &x [*x]",
    "ten aliases of ten": "a0: &a0 [1, 2]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 10}]\n" for i in range(1, 6)),
    "a tag over nothing": 'a: !!int ""',
    "a key that is a date": "a: !!omap [{2026-11-22: {2026-11-22: 1}}]",
    "an integer of 6,000 digits": "a: 0x" + "f" * 5_000,
}


@pytest.mark.parametrize("content", BEYOND.values(), ids=BEYOND)
def test_what_is_too_deep_or_too_large_to_be_shown_is_left_out(content: str, tmp_path: Path) -> None:
    for file in ("recipe.yaml", "environment.json", "ds_config.json", "metrics.jsonl", "all_results.json"):
        folder = run_folder(tmp_path / file)
        (folder / file).write_text(content + "\n")
        page, text, _ = page_of([folder], tmp_path)
        assert "The run" in page.text
        assert len(text) < 300_000


@pytest.mark.parametrize("recipe", ["an alias of itself", "ten aliases of ten"])
def test_of_a_file_that_is_left_out_the_note_says_why(recipe: str, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "recipe.yaml").write_text(BEYOND[recipe])
    (folder / "environment.json").write_text(BEYOND["nested"])
    environment, yaml = read_run(folder, "run").notes
    assert environment == "environment.json: skipped, it is nested deeper than 50 levels."
    assert yaml.startswith("recipe.yaml: skipped, it ")
    assert "alias" in yaml


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"model_type": "distilbert", "dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 128, "vocab_size": 300,
          "max_position_embeddings": 64, "architectures": ["DistilBertForSequenceClassification"]}, "distilbert"),
        ({"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1],
          "layer_type": "basic", "num_channels": 3, "architectures": ["ResNetForImageClassification"]}, "resnet"),
    ],
    ids=["text", "pictures"],
)  # fmt: skip
def test_planned_is_the_model_that_the_run_has_kept(config: dict[str, Any], family: str, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    if family == "resnet":
        (folder / "recipe.yaml").write_text("recipe: image_cls\nmax_steps: 30\n")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 32, "width": 32}}))
    run = read_run(folder, "run")
    made = plan_of_run(run)
    assert made is not None, run.notes
    assert made.job.model.family == family
    assert made.job.image_size == 32 or family != "resnet"


def with_gpus(folder: Path, *names: str, ranks: int = 2) -> Path:
    for file, changes in (("environment.json", {"gpus": names}),
                          ("all_results.json", {"peak_memory_gib_per_rank": [1.5] * ranks})):  # fmt: skip
        content = json.loads((folder / file).read_text()) | changes
        (folder / file).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(("gpus", "ranks", "per_node"), [(2, 2, 2), (8, 16, 8), (1, 8, 8)])
def test_planned_are_as_many_nodes_as_the_gpus_of_the_first_one_say(
    gpus: int, ranks: int, per_node: int, tmp_path: Path
) -> None:
    """One GPU may be all that a launcher lets each rank see."""
    made = plan_of_run(read_run(with_gpus(run_folder(tmp_path / "run"), *["NVIDIA A100"] * gpus, ranks=ranks), "run"))
    assert made is not None
    assert (made.job.world_size, made.job.ranks_per_node) == (ranks, per_node)


def test_a_killed_run_whose_ranks_are_not_known_has_no_plan(tmp_path: Path) -> None:
    assert plan_of_run(read_run(run_folder(tmp_path / "run", finished=False), "run")) is None


def test_a_gpu_of_a_strangers_run_names_no_file_to_read(tmp_path: Path) -> None:
    run = read_run(with_gpus(run_folder(tmp_path / "run"), str(tmp_path / "mine.json")), "run")
    (tmp_path / "mine.json").write_text('{"name": "secret"}')
    assert plan_of_run(run) is None
    assert "there is no such machine" in run.notes[-1]


def test_memory_is_said_to_be_measured_where_it_was(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / "here"), with_gpus(run_folder(tmp_path / "there"), "NVIDIA A100-SXM4-80GB")]
    sections = run_sections([read_run(folder, folder.name) for folder in folders])
    blocks = [block for section in sections if section.title == "Speed and memory" for block in section.blocks]
    said = {block.more: block.value[0].alt for block in blocks if block.more.startswith("Measured on")}
    assert said == {MEASURED_ON_GPU: "there: 1.50, 1.50 GiB", MEASURED_ON_CPU: "here: 1.25, 1.22 GiB"}
    alone = run_sections([read_run(with_gpus(folders[0]), "here")])
    assert MEASURED_ON_GPU not in {block.more for section in alone for block in section.blocks}


PEAK_WITH_RATIO = r"peak of a rank, GiB\s+[\d.,]+\s+1\.25\s+[\d.]+x"


@pytest.mark.parametrize("gpus", [[], ["NVIDIA A100-SXM4-80GB"]], ids=["cpu", "gpu"])
def test_a_plan_is_set_beside_texts_as_long_as_they_were(gpus: list[str], tmp_path: Path) -> None:
    """200 real tokens a second and a fifth of padding at 10 texts a second: 25 tokens a text."""
    folder = run_folder(tmp_path / "run")
    results = json.loads((folder / "all_results.json").read_text())
    environment = json.loads((folder / "environment.json").read_text()) | {"gpus": gpus}
    (folder / "environment.json").write_text(json.dumps(environment))
    whole = plan_of_run(read_run(folder, "run"))
    measured = {"samples_per_second": 10.0, "real_tokens_per_second": 200.0, "padding_share": 0.2}
    (folder / "all_results.json").write_text(json.dumps(results | measured))
    run = read_run(folder, "run")
    made = plan_of_run(run)
    assert whole is not None
    assert made is not None
    assert (made.job.tokens, whole.job.tokens) == (25, 128)
    assert made.seconds.forward < whole.seconds.forward
    assert any("25 tokens" in note for note in run.notes)
    assert not has_one_length(run)
    # The peak is that of the longest batch, which the run has not written down: it is not divided by.
    assert not re.search(PEAK_WITH_RATIO, page_of([folder], tmp_path)[0].text)
    (folder / "all_results.json").write_text(json.dumps(results))
    assert bool(re.search(PEAK_WITH_RATIO, page_of([folder], tmp_path)[0].text)) == bool(gpus)


@pytest.mark.parametrize("content", ["[]", "{", "[" * 600, '{"model_type": [1]}'])
def test_a_broken_model_config_leaves_the_run_without_a_plan(content: str, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "config.json").write_text(content)
    page, _, notes = page_of([folder], tmp_path)
    assert "Planned against measured" not in page.text
    assert any("There is no plan beside it" in note for note in notes)


def test_a_schedule_with_an_unknown_kind_of_work_is_drawn_without_it(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    events = [{"stage": 0, "micro_batch": 0, "start": 0, "end": 1, "kind": kind} for kind in ("forward", "sleep")]
    (folder / "schedule.json").write_text(json.dumps({"measured": {"events": events}}))
    page, _, _ = page_of([folder], tmp_path)
    assert "stage 0: forward of micro-batch 0" in page.text
    assert "sleep" not in page.text


def test_bytes_that_a_comm_hook_sends_are_a_curve(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row | {"comm_bytes_per_step": 4e6 / row["step"], "comm_share_of_fp32": 1 / row["step"]} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curves = curves_of([read_run(folder, "run")])
    assert curves is not None
    titles = [panel.title for panel in curves.panels]
    assert "Bytes that rank 0 sends for gradients, per step" in titles
    assert not [title for title in titles if "fp32" in title]


def test_the_files_of_a_mixture_have_a_table_and_their_losses_a_common_panel(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    of_files = {"loss_chats": 2.5, "learnt_tokens_chats": 300, "loss_code": 1.25, "learnt_tokens_code": 100}
    of_files |= {"loss_kl": 1.0, "learnt_tokens_kl": 50}  # a file named like a metric
    rows = [row | of_files | {"loss_scale": 8.0, "kl": 0.5} if "loss" in row else row for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = json.loads((folder / "all_results.json").read_text())
    sources = {"chats": {"blocks": 70, "documents": 210, "tokens": 6000, "loss": 1.75, "learnt_tokens": 5000},
               "code": {"blocks": 30, "documents": 40, "tokens": 2000}}  # fmt: skip
    (folder / "all_results.json").write_text(json.dumps({**results, "sources": sources, "eval_chats_loss": 1.875}))
    curves = curves_of([read_run(folder, "run")])
    assert curves is not None
    (panel,) = (one for one in curves.panels if one.title == "Training loss by file")
    assert [(curve.name, curve.points["step"][0]) for curve in panel.curves] == [
        ("chats", (1, 2.5)),
        ("code", (1, 1.25)),
        ("kl", (1, 1.0)),
    ]
    others = [one.title for one in curves.panels if one is not panel]
    assert {"Loss scale", "KL"} <= set(others)
    assert not [title for title in others if "chats" in title or "tokens code" in title]
    page, _, _ = page_of([folder], tmp_path)
    for words in ("Training files", "75.0%", "1.75", "1.875", "6,000"):
        assert words in page.text, words
    both = curves_of([read_run(folder, "one"), read_run(folder, "other")])
    assert both is not None
    assert {"Loss chats", "Loss code"} <= {panel.title for panel in both.panels}


def test_files_beyond_the_most_that_a_run_logs_are_not_drawn(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    of_files = {f"{word}_{n}": 1.0 for n in range(30_000) for word in ("loss", "learnt_tokens")}
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "loss": 1.0} | of_files) + "\n" for step in (1, 2))
    )
    curves = curves_of([read_run(folder, "run")])
    assert curves is not None
    (panel,) = (one for one in curves.panels if one.title == "Training loss by file")
    assert len(panel.curves) == 20


def test_a_run_that_logged_only_losses_of_evaluation_shows_them_dashed(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "metrics.jsonl").write_text('{"step": 2, "eval_loss": 1.5}\n{"step": 4, "eval_loss": 1.2}\n')
    curves = curves_of([read_run(folder, "run")])
    assert curves is not None
    (panel,) = curves.panels
    assert [(curve.name, curve.dashed, curve.points["step"]) for curve in panel.curves] == [
        ("evaluation", True, [(2, 1.5), (4, 1.2)])
    ]
    page, _, _ = page_of([folder], tmp_path)
    assert "Loss" in page.text


def test_any_file_may_be_missing(tmp_path: Path) -> None:
    for gone in MARKED[:4]:
        folder = run_folder(tmp_path / gone.partition(".")[0])
        (folder / gone).unlink()
        page_of([folder], tmp_path)
    only = tmp_path / "only"
    only.mkdir()
    (only / "recipe.yaml").write_text("learning_rate: 0.5\n")
    page, _, notes = page_of([only], tmp_path)
    assert "Nothing has been logged yet." in page.text
    assert any("It has no results." in note for note in notes)


def test_a_folder_that_is_neither_and_one_that_is_not_there_are_said(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="it holds neither a run"):
        write([tmp_path], html=tmp_path / "x.html")
    (tmp_path / "README.md").write_text("# Not a run")
    with pytest.raises(RequestError, match=r"README\.md: is a file, and its folder .* holds neither a run"):
        write([tmp_path / "README.md"], html=tmp_path / "x.html")
    with pytest.raises(RequestError, match="there is no such folder"):
        write([tmp_path / "gone"], html=tmp_path / "x.html")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(RequestError, match="fifo: is neither a folder nor a regular file"):
        write([tmp_path / "fifo"], html=tmp_path / "x.html")


def test_the_command_writes_where_it_is_told_and_beside_the_run_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = run_folder(tmp_path / "run"), run_folder(tmp_path / "other", seed=1)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "run"]) == 0
    assert (folder / "report.html").is_file()
    assert main(["report", "run", str(other)]) == 0
    assert (tmp_path / "report.html").is_file()
    assert main(["report", "run", "--html", "a.html", "--markdown", "card.md"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "wrote run/report.html", "wrote report.html", "wrote a.html", "wrote card.md"
    ]  # fmt: skip
    assert main(["report", "run", "--html", "nowhere/a.html"]) == 2
    assert "there is no folder nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["{}"], ["~nobody-of-that-name/run"], ["run", "--html", "{}"], ["run", "--markdown", "{}"]]
)
@pytest.mark.parametrize("command", ["report", "bench"])
def test_a_path_that_cannot_be_is_refused(
    command: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path / "run")
    if command == "bench":
        words = ["run", "--compare", *words[-1:]]
    assert main([command, *(word.format("a" * 300) for word in words)]) == 2
    assert "is not a usable path" in capsys.readouterr().err


def test_a_file_where_the_pictures_of_markdown_go_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "card_files").write_text("mine")
    with pytest.raises(RequestError, match=r"card_files/01.*cannot be written.*File exists"):
        write([run_folder(tmp_path / "run")], markdown=tmp_path / "card.md")
    assert (tmp_path / "card_files").read_text() == "mine"


def test_markdown_has_its_pictures_beside_it(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "confusion_matrix.json").unlink()
    (folder / "confusion_matrix.png").write_bytes(png())
    write([folder], markdown=tmp_path / "card.md")
    text = (tmp_path / "card.md").read_text()
    linked = re.findall(r"^!\[[^\n]*\]\(([\w./-]+)\)$", text, re.MULTILINE)
    assert len(linked) > 5
    assert sorted(linked) == sorted(f"card_files/{path.name}" for path in (tmp_path / "card_files").iterdir())
    assert (tmp_path / next(name for name in linked if name.endswith("png"))).read_bytes() == png()
    for name in linked:
        if name.endswith("svg"):
            drawn = PageReader((tmp_path / name).read_text())
            assert drawn.tags[0] == ("svg", {**drawn.tags[0][1], "xmlns": "http://www.w3.org/2000/svg"})
    assert "| what | value |" in text
    assert "| median step, s |" in text


SECRET = "hf_" + "A1b2C3d4" * 4


def test_what_looks_secret_is_not_shown(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "recipe.yaml").write_text(f"hub_token: abcdefgh1234\nlearning_rate: 0.1\nnote: {SECRET}\n")
    (folder / "ds_config.json").write_text(json.dumps({"comet": {"api_key": "zyxw98765432", "enabled": True}}))
    found = json.loads((folder / "environment.json").read_text()) | {"command": f"python x.py --note {SECRET}"}
    (folder / "environment.json").write_text(json.dumps(found))
    (folder / "samples.md").write_text(f"it wrote {SECRET}")
    write([folder], html=tmp_path / "a.html", markdown=tmp_path / "a.md")
    for text in ((tmp_path / "a.html").read_text(), (tmp_path / "a.md").read_text()):
        assert "***" in text
        for secret in (SECRET, "abcdefgh1234", "zyxw98765432"):
            assert secret not in text


def hostile_run(folder: Path, bad: str) -> Path:
    """With `bad` wherever a run has text."""
    run_folder(folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row[bad] = 1.5 * row["step"]
        row["eval_" + bad] = 2.5 * row["step"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    results: dict[str, Any] = json.loads((folder / "all_results.json").read_text())
    (folder / "all_results.json").write_text(json.dumps({**results, bad: 3}))
    (folder / "recipe.yaml").write_text(json.dumps({bad: bad, "model_name_or_path": bad, "list": [bad]}))
    (folder / "environment.json").write_text(json.dumps({
        "command": bad, "machine": bad, "gpus": [bad], "packages": {bad: bad}, "started": bad,
    }))  # fmt: skip
    (folder / "confusion_matrix.json").write_text(json.dumps({"labels": [bad, "b"], "counts": [[1, 2], [3, 4]]}))
    (folder / "ds_config.json").write_text(json.dumps({bad: [bad]}))
    (folder / "samples.md").write_text(f"## Step 3\n\n```\n{bad}\n```\n\n")
    (folder / "README.md").write_text(f"# {bad}\n")
    (folder / "profile").mkdir(exist_ok=True)
    (folder / "profile" / "summary.json").write_text(
        json.dumps(
            {"steps": [bad], "ranks": [{"rank": bad, "steps": [{"parts_nanoseconds": {bad: 1e6, "forward": 2e6}}]}]}
        )
    )
    return folder


def assert_harmless(text: str) -> PageReader:
    page = PageReader(text)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 1
    assert "img" not in tags
    assert not [attributes for _, attributes in page.tags if any(name.startswith("on") for name in attributes)]
    assert all(str(a["href"]).startswith(("http://", "https://", "#")) for tag, a in page.tags if tag == "a")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)
    return page


def test_hostile_text_stays_text_wherever_it_stands(tmp_path: Path) -> None:
    name = HOSTILE.replace("/", "")[:60].replace("\x1b", "")
    folders = [hostile_run(tmp_path / (name + end), HOSTILE) for end in "ab"]
    _, text, _ = page_of(folders, tmp_path, command=HOSTILE)
    page = assert_harmless(text)
    assert page.text.count("<script>alert(1)</script>") > 20
    write(folders, markdown=tmp_path / "card.md", command=HOSTILE)
    outside = re.sub(r"^(`{3,}).*?^\1$", "", (tmp_path / "card.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    assert "<script" not in outside.replace("\\<script", "")
    assert "<img" not in outside.replace("\\<img", "")
    for picture in (tmp_path / "card_files").glob("*.svg"):
        assert not {"script", "img"} & {tag for tag, _ in PageReader(picture.read_text()).tags}


@settings(max_examples=15, deadline=None)
@given(bad=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40))
def test_any_text_at_all_leaves_the_page_whole(bad: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    tmp_path = tmp_path_factory.mktemp("any")
    folder = hostile_run(tmp_path / "run", bad + "</script><img src=x onerror=alert(1)>")
    _, text, _ = page_of([folder], tmp_path, command=bad)
    assert_harmless(text)


def test_a_profile_is_a_table_by_part_and_rank(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "profile").mkdir()
    steps = [{"parts_nanoseconds": {"forward": 2e6 * step, "communication": 1e6}} for step in (1, 3)]
    ranks = [{"rank": rank, "steps": steps} for rank in range(2)]
    record = {"steps": [4, 5], "untraced_step_seconds": 0.25, "ranks": ranks}
    (folder / "profile" / "summary.json").write_text(json.dumps(record))
    page, _, _ = page_of([folder], tmp_path)
    table = page.text.partition("Where a step's time goes")[2].partition("Samples")[0]
    assert "forward 4 80.0% 4 4 4 communication 1 20.0% 1 1 1 step 5 100.0% 5 5 5" in table
    assert "Means over 2 traced steps. An untraced step takes 250 ms." in table
    assert "rank 1, communication: 1 ms" in page.texts


@pytest.mark.parametrize("value", [True, "3", None, [1], math.nan, math.inf, -math.inf, -1e101, 10**400])
def test_what_is_no_number_is_not_drawn(value: Any) -> None:
    assert as_number(value) is None


@pytest.mark.parametrize("large", [1e308, -1e308, 1e100])
def test_numbers_that_are_too_large_to_add_do_not_break_a_report(large: float, tmp_path: Path) -> None:
    """A sum or a product of them is infinite, of which no axis can be made."""
    rows = [{"step": step, "loss": loss, "step_seconds": abs(loss), "real_tokens_per_second": abs(loss)}
            for step, loss in ((1, large), (2, -large), (3, 1.0))]  # fmt: skip
    folder = run_folder(tmp_path / "run")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    event = {"stage": 0, "micro_batch": math.inf, "start": 0, "end": 1, "kind": "forward"}
    (folder / "schedule.json").write_text(json.dumps({"measured": {"events": [event]}}))
    page, _, _ = page_of([folder], tmp_path)
    assert "The run" in page.text


def test_numbers_too_small_to_divide_do_not_break_a_report(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    rows = [{"step": step, "loss": 2.0, "step_seconds": 5e-324, "samples_per_second": 5e-324} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "The run" in page_of([folder], tmp_path)[0].text


@pytest.mark.parametrize("place", [0.0, 7.0, -7.0, 1e99, -1e99])
def test_an_axis_of_a_single_place_is_drawn(place: float) -> None:
    """Rows that a run has logged at the same step, or whose tokens somebody has changed."""
    picture = draw(Panel("Loss", (Curve("a", "s1", {STEP: [(place, 2.0)]}),)), STEP)
    (dot,) = (shape for shape in picture.shapes if isinstance(shape, Dot))
    assert 0 <= dot.x <= picture.width


@pytest.mark.parametrize(
    ("words", "value", "said"),
    [
        (seconds_words, 0.0, "0 s"),
        (seconds_words, 0.0009996, "999.6 us"),
        (seconds_words, 0.00099999, "1 ms"),
        (seconds_words, 0.99999, "1 s"),
        (seconds_words, 12345.6, "12,346 s"),
        (count_words, 999_999_999, "1 billion"),
        (count_words, 12_345_678, "12.35 million"),
        (shortly, 9_999.99, "10k"),
        (shortly, 999_999.0, "1M"),
        (number, 999.99, "1,000"),
    ],
)
def test_the_rounded_number_decides_on_its_unit(words: Callable[[Any], str], value: float, said: str) -> None:
    assert words(value) == said


def test_a_cell_of_markdown_has_no_control_characters() -> None:
    assert cell("\x1b[31mred\x9b2J\x00 \t| n\u00e4hme") == "\\[31mred2J \\| n\u00e4hme"


def test_it_is_there_without_matplotlib_or_torch() -> None:
    look = (
        "import sys, finetune.report.write\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_negative_number_is_written_like_its_positive() -> None:
    for value in (12345.0, 2e6, 3.5):
        assert number(-value) == f"-{number(value)}"
        assert shortly(-value) == f"-{shortly(value)}"
