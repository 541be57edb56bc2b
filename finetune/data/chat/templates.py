"""The shipped chat templates, and --chat_template: the name of one of them, or a jinja file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from finetune.errors import RequestError, first_line, plain
from finetune.safe_read.bounded import each_bounded
from finetune.safe_read.files import open_plain

FOLDER = Path(__file__).parent / "templates"
MOST_BYTES = 1 << 20
AT_A_TIME = 1024  # conversations per child process
# Used if a tokenizer has no template: marks are plain words, so that no token must be added, and the end of text is
# written after each assistant turn, so that the model learns to stop.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
UNTEMPLATED = "the model has a chat template, but {rows} are trained as plain text, without it ({mend} trains with it)"
INVENTED = (
    "the tokenizer has no chat template, so turns are marked in words: <|user|> and <|assistant|> before them and "
    "{end} after the assistant's (--chat_template sets another)"
)


def shipped() -> dict[str, str]:
    """The text of each template by name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}


def read_template(given: str) -> str:
    """The template that --chat_template names. Raises RequestError if there is none, or if it is not valid jinja."""
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
        template = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: is not UTF-8 text ({plain(first_line(error))}). Give a jinja file.") from error

    def compile_template(text: str) -> None:
        try:
            render_jinja_template(conversations=[[]], chat_template=text)
        except TemplateSyntaxError as fault:
            raise RequestError(
                f"{name}: line {fault.lineno} is not valid jinja: {plain(first_line(fault))} Fix the file."
            ) from fault
        except Exception:  # it runs, too, on no turns, which a template need not allow
            return

    each_bounded(compile_template, [template], name)
    return template


def each_rendered(do: Callable[[Any], Any], items: Sequence[Any], template: str | None) -> list[Any]:
    """Apply `do` to each item, in which it may run `template`. One from outside is not trusted: it runs in child
    processes, from which results come back as JSON. Raises RequestError."""
    if template is None or template == DEFAULT_TEMPLATE or template in shipped().values():
        return list(map(do, items))
    parts = (items[start : start + AT_A_TIME] for start in range(0, len(items), AT_A_TIME))
    return [one for part in parts for one in each_bounded(do, part, "the chat template")]
