"""The shipped chat templates, and --chat_template: the name of one of them, or a jinja file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from finetune.errors import RequestError, first_line, plain
from finetune.safe_read.bounded import each_bounded
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
            _environment().compile(text)
        except TemplateSyntaxError as fault:
            raise RequestError(
                f"{name}: line {fault.lineno} is not valid jinja: {plain(first_line(fault))} Fix the file."
            ) from fault

    each_bounded(compile_template, [template], name)
    return template


class _Generation(Extension):
    """Accepts the marks {% generation %}, as transformers does."""

    tags = {"generation"}  # noqa: RUF012  (as the base class has it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Like transformers' (utils/chat_template_utils.py, _cached_compile_jinja_template), for compiling alone."""
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])


def is_ours(template: Any) -> bool:
    """Whether a template is trusted and needs no child process: it does not come from outside."""
    return template is None or template == DEFAULT_TEMPLATE or template in shipped().values()
