"""Reads untrusted input: files, JSON and YAML (`values`, without torch), pickles (`pickles`, with torch), folders of
models and data (`folders`), and untrusted code such as a chat template's (`bounded`). Each returns a value or raises
RequestError, in bounded time and memory."""

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
