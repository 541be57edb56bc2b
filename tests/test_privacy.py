"""What looks like a secret is hidden: by the way that services write their tokens, and by the name of its key."""

from __future__ import annotations

import pytest

from finetune.privacy import HIDDEN, hidden, is_secret, names_a_secret

LETTERS = "abCD01efGH23ijKL45mnOP67"
TOKENS = {
    "Hugging Face": ("hf_", 20),
    **{f"GitHub {kind}": (f"gh{kind}_", 20) for kind in "pousr"},
    "Weights & Biases": ("wandb_v1_", 20),
    "OpenAI": ("sk-", 20),
    **{f"Slack {kind}": (f"xox{kind}-", 10) for kind in "bap"},
}
EVERY = [
    *(pytest.param(head, LETTERS[:least], id=name) for name, (head, least) in TOKENS.items()),
    pytest.param("AKIA", "ABCD0123EFGH", id="AWS"),
    pytest.param("sk-", "proj-" + LETTERS, id="OpenAI, of a project"),
    pytest.param("xoxb-", "12345-67890-" + LETTERS, id="Slack, in parts"),
]


@pytest.mark.parametrize(("head", "rest"), EVERY)
def test_a_token_is_hidden_wherever_it_stands(head: str, rest: str) -> None:
    token = head + rest
    assert is_secret("note", token)
    for before, after in (("", ""), ("at https://user:", "@host/x"), ('{"note": "', '"}'), ("--x=", " --y 1")):
        said = hidden(f"{before}{token}{after}")
        assert rest not in said
        assert HIDDEN in said
    assert not is_secret("note", token[:-1]) or "in parts" in token or len(rest) > 20, "one letter less is another word"
    assert not is_secret("note", f"x{token}"), "nor is a part of a word"


def test_the_end_of_a_longer_token_is_hidden_too() -> None:
    assert hidden("hf_" + LETTERS * 3 + " and more") == f"{HIDDEN} and more"


KEYS = [
    "api_key", "apikey", "access_key", "secret_key", "auth_key", "private_key", "hf_key", "hub_key", "wandb_key",
    "comet_key", "token", "hub_token", "tokens", "password", "passwd", "secret", "client_secret", "credential",
    "credentials", "API_KEY", "WandB_API_Key",
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_what_a_key_says_is_secret_is_hidden(key: str) -> None:
    assert is_secret(key, "12345678")
    assert not is_secret(key, "1234567"), "too short for one"
    assert not is_secret(key, "auto")
    for text in (f'{{"{key}": "abc 45678", "b": 1}}', f"{{'{key}': 'abc 45678'}}", f"{key}: abcdefghi, b: 1"):
        assert HIDDEN in hidden(text)
        assert "45678" not in hidden(text)
        assert "abcdefghi" not in hidden(text)
        assert ("b" in hidden(text)) == ("b" in text.replace("abc", "").replace("abcdefghi", ""))


@pytest.mark.parametrize(
    "text",
    [
        '{"tokenizer": "a/long-name", "max_tokens_of": 4096000000, "keyword": "something"}',
        '{"eos_token": "</s>", "key": "value-of-it"}',
        '{"weight_key_name": "encoder.layer"}',
        "half_of_it hf_short ghp_short AKIAabc sk-short xoxb-a",
        "--learning_rate 0.0001 --seed 42",
    ],
)
def test_what_is_no_secret_is_shown(text: str) -> None:
    assert hidden(text) == text


@pytest.mark.parametrize(
    ("flag", "secret"),
    [
        ("hub_token", True),
        ("--hub-token", True),
        ("API_KEY", True),
        ("db_password", True),
        ("the_secret_of", True),
        ("tokenizer_name", False),
        ("keywords", False),
        ("max_tokens", False),
    ],
)
def test_a_flag_is_secret_by_a_word_of_its_name(flag: str, secret: bool) -> None:
    assert names_a_secret(flag) is secret
