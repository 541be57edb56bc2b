"""Conversations as tokens, and which of them are learnt: the assistant's turns, or the completion, alone."""

from __future__ import annotations

from typing import Any

from jinja2.exceptions import TemplateError

from finetune.errors import RequestError

QUOTED_CHARACTERS = 200
# Used where a tokenizer brings no template of its own: marks in words, so that no token must be added, and the end of
# text after each of the assistant's turns, so that the model learns to stop.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def conversation(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation and, for each, whether it is learnt. Raises RequestError, quoting it.

    A template that marks the assistant's words ({% generation %}) is asked; with any other, the conversation up to each
    of the assistant's turns is rendered without and with that turn, and what the turn adds is learnt.
    """
    quoted = repr(messages)[:QUOTED_CHARACTERS]
    if not messages or any(not isinstance(m, dict) or not {"role", "content"} <= set(m) for m in messages):
        raise RequestError(f"`messages` must be a list of turns with `role` and `content`, but one is {quoted}.")
    try:
        return _conversation(tokenizer, messages)
    except (TemplateError, TypeError) as error:  # as for a content of None, which some templates know what to do with
        raise RequestError(f"the tokenizer's chat template takes no such conversation ({error}): {quoted}.") from error


def _conversation(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
    template = tokenizer.chat_template or DEFAULT_TEMPLATE
    if "{% generation %}" in template or "{%- generation %}" in template:
        made = tokenizer.apply_chat_template(
            messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(made["input_ids"]), [bool(mark) for mark in made["assistant_masks"]]
    whole = _render(tokenizer, template, messages, False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _render(tokenizer, template, messages[:i], True)
            after = _render(tokenizer, template, messages[: i + 1], False)
            if not (after.startswith(before) and whole.startswith(after)):
                raise RequestError(
                    "this tokenizer's chat template renders a turn otherwise once others follow, so the assistant's "
                    "words cannot be told apart. Give it a template with {% generation %} marks."
                )
            spans.append((len(before), len(after)))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    learnt = [any(a < end and b > begin for begin, end in spans) for a, b in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), learnt


def _render(tokenizer: Any, template: str, messages: list[dict[str, str]], prompt: bool) -> str:
    if not messages and not prompt:
        return ""
    return str(
        tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=prompt)
    )


def completion(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], list[bool]]:
    """Token ids of a prompt and its completion, of which the completion and the end of text are learnt. Raises
    RequestError."""
    if not isinstance(prompt, str) or not isinstance(answer, str):
        quoted = repr([prompt, answer])[:QUOTED_CHARACTERS]
        raise RequestError(
            f"`prompt` and `completion` must be texts, but one row is {quoted}. Turns go into one column `messages`."
        )
    first = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    second = tokenizer(answer, add_special_tokens=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [*first, *second, *end], [False] * len(first) + [True] * (len(second) + len(end))
