"""What others made: files, JSON and YAML (`values`, light), pickles (`pickles`, by torch), folders of models
and data (`folders`), and code that is theirs, as a chat template's (`bounded`). Each gives a value or an error of ours,
in bounded time and memory."""

from finetune.safe_read.files import is_plain_file, read_bounded, read_bytes, refuse_outside
from finetune.safe_read.values import (
    DEEPEST,
    SAFE_LOADER,
    TOKEN,
    YAML_ERRORS,
    parse_json,
    read_json_lines,
    read_json_object,
    read_yaml,
)

__all__ = [
    "DEEPEST", "SAFE_LOADER", "TOKEN", "YAML_ERRORS", "is_plain_file", "parse_json", "read_bounded", "read_bytes",
    "read_json_lines", "read_json_object", "read_yaml", "refuse_outside",
]  # fmt: skip
