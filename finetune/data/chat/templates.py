"""The templates that are shipped, and --chat_template: one of them by name, or a jinja file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.errors import RequestError, first_line, plain
from finetune.safe_read.files import open_plain

FOLDER = Path(__file__).parent / "templates"
MOST_BYTES = 1 << 20
# Used where a tokenizer brings no template of its own: marks in words, so that no token must be added, and the end of
# text after each of the assistant's turns, so that the model learns to stop.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
INVENTED = (
    "the tokenizer brings no chat template, and turns get one in words, <|user|> and <|assistant|> before them and "
    "{end} after the assistant's (--chat_template takes another)"
)


def shipped() -> dict[str, str]:
    """The texts of the templates by their names."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}


def read_template(given: str) -> str:
    """What --chat_template says. Raises RequestError for what is no template."""
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
        raise RequestError(f"{name}: is no text in UTF-8 ({plain(first_line(error))}). Give a jinja file.") from error


def is_ours(template: Any) -> bool:
    """Whether a template needs no child process: it is none of a stranger's."""
    return template is None or template == DEFAULT_TEMPLATE or template in shipped().values()
