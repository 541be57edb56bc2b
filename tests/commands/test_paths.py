"""A path that cannot be: every command names the flag or argument, and ends with a usage error."""

from __future__ import annotations

import pytest

from finetune.cli import main


@pytest.mark.parametrize("path", ["a" * 300, "~nobody_of_this_name/x"])
@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("check PATH", "FILE"),
        ("check zero2 --config PATH", "--config"),
        ("check zero2 --model PATH", "--model"),
        ("checkpoint ls PATH", "RUN_FOLDER"),
        ("checkpoint verify PATH", "FOLDER_OR_CHECKPOINT"),
        ("doctor --output_dir PATH", "--output_dir"),
        ("doctor --nvme_path PATH", "--nvme_path"),
        ("doctor --hostfile PATH", "--hostfile"),
        ("launch --hostfile PATH seq_cls", "--hostfile"),
        ("export PATH out", "CHECKPOINT"),
        ("export runs/x PATH", "OUT"),
        ("export runs/x out --base_model PATH", "--base_model"),
        ("report PATH", "RUN_OR_BENCH"),
        ("bench grid.yaml --output_dir PATH", "--output_dir"),
        ("plan gpt2 --html PATH", "--html"),
    ],
)
def test_a_path_that_cannot_be_is_a_usage_error_that_names_its_place(
    command: str, named: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main([path if word == "PATH" else word for word in command.split()])
    assert status == 2
    assert f"argument {named}: {path} is not a usable path" in capsys.readouterr().err
