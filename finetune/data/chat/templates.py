"""The shipped chat templates, and --chat_template: the name of one of them, or a jinja file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.errors import RequestError, first_line, plain
from finetune.safe_read.files import open_plain

FOLDER = Path(__file__).parent / "templates"
MOST_BYTES = 1 << 20
# Used if a tokenizer has no template: marks are plain words, so that no token must be added, and the end of text is
# written after each assistant turn, so that the model learns to stop.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
INVENTED = (
    "the tokenizer has no chat template, so turns are marked in words: <|user|> and <|assistant|> before them and "
    "{end} after the assistant's (--chat_template sets another)"
)


def shipped() -> dict[str, str]:
    """The text of each template by name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}


def read_template(given: str) -> str:
    """The template that --chat_template names. Raises RequestError if there is none."""
    if given in (known := shipped()):
        return known[given]
    path, name = Path(given).expanduser(), f"--chat_template {given}"
    if not path.is_file():
        raise RequestError(f"{name}: there is no such file, and the shipped templates are {', '.join(known)}.")
    with open_plain(path, name=name) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise RequestError(f"{name}: the file has more than {MOST_BYTES:,} bytes, which no template needs.")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: is not UTF-8 text ({plain(first_line(error))}). Give a jinja file.") from error


def is_ours(template: Any) -> bool:
    """Whether a template is trusted and needs no child process: it does not come from outside."""
    return template is None or template == DEFAULT_TEMPLATE or template in shipped().values()
