"""Secrets, which must never be printed, recognized by the name of their key or by the services' token formats."""

from __future__ import annotations

import os
import re
from typing import Any

from finetune.errors import plain

KEY = re.compile(
    r"((api|access|secret|auth|private|hf|hub|wandb|comet)_?key|token|password|passwd|secret|credential)s?\Z", re.I
)
# Hugging Face, GitHub, AWS, Weights & Biases, OpenAI style, Slack.
TOKEN = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{12,}|wandb_v1_\w{20,}|sk-[\w-]{20,}"
    r"|xox[bap]-[\w-]{10,})"
)
MEMBER = re.compile(r"""(["']?(?<!\w)(\w+)["']?\s*:\s*)("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s,}\]]+)""")
LEAST_CHARACTERS = 8
WORDS = ("token", "key", "password", "secret")
HIDDEN = "***"


def is_secret(key: str, value: str) -> bool:
    """Whether the value looks like a secret under this key, or under any key."""
    return bool(TOKEN.search(value)) or (bool(KEY.search(key)) and len(value) >= LEAST_CHARACTERS and value != "auto")


def names_a_secret(flag: str) -> bool:
    """Whether a recipe's flag holds a secret, judged by its name alone."""
    return any(part in WORDS for part in flag.lower().replace("-", "_").split("_"))


def without_home(value: Any) -> Any:
    """Text with "~" in place of the home folder, which contains a person's name; path flags accept "~". In dicts and
    lists, every string is replaced."""
    if isinstance(value, dict):
        return {key: without_home(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_home(one) for one in value) if type(value) in (list, tuple) else value
    if isinstance(value, str):
        home = os.path.expanduser("~").rstrip("/")
        for one in dict.fromkeys((home, os.path.realpath(home) if home else "")):  # on some clusters home is a link
            if one.count("/") >= 1 and one in value:
                value = re.sub(rf"(?<![\w.~/-]){re.escape(one)}(?![\w.-])", "~", value)
    return value


def shown(text: str) -> str:
    """Lines that are safe to print: without the home folder, and without characters that strangers put into names to
    move the cursor, color the screen or change the writing direction."""
    return "\n".join(plain(line) for line in str(without_home(text)).split("\n"))


def hidden(text: str) -> str:
    """The text with every secret in it hidden, whether it is JSON, a fragment of JSON, or a message about it."""

    def member(found: re.Match[str]) -> str:
        before, key, value = found.groups()
        return f'{before}"{HIDDEN}"' if is_secret(key, value.strip("\"'")) else found.group()

    return TOKEN.sub(HIDDEN, MEMBER.sub(member, text))
