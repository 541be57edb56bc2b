"""Prompts as token ids: through the chat template if the model has one, else as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from finetune.data.chat.conversation import rendered
from finetune.data.chat.templates import each_rendered, read_template
from finetune.data.encoding import refuse_unknown_characters
from finetune.data.tokenizer import beginning_of, begun, letters_of
from finetune.errors import RequestError, first_line, plain
from finetune.generation.prompts import Prompt

NO_TEMPLATE = "none"  # a value of --chat_template: prompts as plain text


def settle_template(tokenizer: Any, asked: str | None) -> str:
    """Give `tokenizer` the template that is `asked` for, and return which one it has, in words. Raises RequestError."""
    if asked == NO_TEMPLATE:
        tokenizer.chat_template = None
    elif asked:
        tokenizer.chat_template = read_template(asked)
    if not tokenizer.chat_template:
        return "as plain text"
    return f"by the chat template {asked}" if asked else "by the model's chat template"


def encode(tokenizer: Any, prompts: Sequence[Prompt], embedded: int) -> list[list[int]]:
    """Token ids of all prompts. Raises RequestError, naming the line, for an id that is not below `embedded`."""
    is_chat = bool(tokenizer.chat_template)
    texts = _rendered(tokenizer, prompts) if is_chat else [_plain(prompt) for prompt in prompts]
    letters = letters_of(tokenizer)
    for prompt, text in zip(prompts, texts, strict=True):
        refuse_unknown_characters(letters, text, prompt.place)
    plain: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    beginning = [] if is_chat else beginning_of(tokenizer)  # a chat template writes its own
    found = [begun(ids, beginning) for ids in plain]
    begins: Any = next((i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None), None)
    for number, ids in enumerate(found):
        if not ids and begins is None:
            raise RequestError(f"{prompts[number].place}: is empty, and the tokenizer has no beginning-of-text token.")
        if not ids:
            ids.append(begins)
        if max(ids) >= embedded:
            raise RequestError(
                f"{prompts[number].place}: has the token {tokenizer.decode([max(ids)])!r} with id {max(ids):,}, but "
                f"the model embeds {embedded:,}. Remove it, or give the folder of a model with its own tokenizer."
            )
    return found


def fit(ids: list[list[int]], prompts: Sequence[Prompt], positions: int, most_new: int, truncates: bool) -> int:
    """Cut off the beginnings of prompts too long for the model's `positions`, so that each leaves room for `most_new`
    tokens or half the model's positions. Returns how many were cut. Without `truncates`, raises RequestError."""
    long = [number for number, one in enumerate(ids) if len(one) >= positions]
    if long and not truncates:
        first = long[0]
        others = f", and {len(long) - 1:,} more are too long" if len(long) > 1 else ""
        raise RequestError(
            f"{prompts[first].place}: has {len(ids[first]):,} tokens, but the model reads {positions:,} with its answer"
            f"{others}. Shorten it, or cut off the beginning with --truncate_prompts."
        )
    for number in long:
        del ids[number][: -max(positions - most_new, positions // 2)]
    return len(long)


def _plain(prompt: Prompt) -> str:
    if isinstance(prompt.content, str):
        return prompt.content
    raise RequestError(
        f"{prompt.place}: has `messages`, but the model has no chat template. Give one with --chat_template (chatml, "
        "llama3, ...), or texts in `prompt`."
    )


def _rendered(tokenizer: Any, prompts: Sequence[Prompt]) -> list[str]:
    def render(prompt: Prompt) -> str:
        content = prompt.content
        turns = [{"role": "user", "content": content}] if isinstance(content, str) else content
        try:
            return rendered(tokenizer, turns, prompt.tools, prompt=True)
        except (TemplateError, TypeError) as error:
            raise RequestError(
                f"{prompt.place}: the chat template rejects this conversation ({plain(first_line(error))}). Fix it, "
                "or give another template with --chat_template."
            ) from error

    return each_rendered(render, prompts, tokenizer.chat_template)
