"""What a model writes while it trains: text that goes on, or an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import tokenizer_of
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.errors import RequestError
from finetune.run.flags.language import SampleArguments
from finetune.training.language import stop_at
from finetune.training.samples import QUESTION, Samples, check_sample


class Answers(LlamaForCausalLM):
    """Says `says`, token by token, and the last for ever."""

    says: list[int]

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        made = super().forward(input_ids=input_ids, **kwargs)
        self.said = getattr(self, "said", -1) + 1
        self.read = getattr(self, "read", []) + input_ids[0].tolist()
        logits = torch.full_like(made.logits, -100.0)
        logits[..., self.says[min(self.said, len(self.says) - 1)]] = 100.0
        made.logits = logits
        return made


def model(tokenizer: Any, says: str) -> Any:
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    made = Answers(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, eos_token_id=1, **shape))
    made.says = tokenizer(says, add_special_tokens=False)["input_ids"]
    return made


def test_a_model_of_chats_answers_a_turn_until_it_ends_its_own(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen2_5")
    made = model(tokenizer, "I am small.<|im_end|>")
    stop_at(made, [tokenizer.convert_tokens_to_ids("<|im_end|>")])
    assert made.generation_config.eos_token_id == [1, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    samples = Samples(SampleArguments(sample_tokens=50), tmp_path, 0, True)
    assert samples.sample(made, tokenizer, torch.device("cpu")) == f"user: {QUESTION}\nassistant: I am small."
    assert tokenizer.decode(made.read).endswith(
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\nI am small."
    )


def test_a_model_of_text_goes_on_for_as_long_as_is_asked(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen2_5")
    samples = Samples(SampleArguments(sample_tokens=5, sample_prompt="To "), tmp_path, 0)
    assert samples.sample(model(tokenizer, "bb"), tokenizer, torch.device("cpu")) == "To bbbbb"


def test_ends_that_are_known_change_nothing() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    made = model(tokenizer, "a")
    for ends in ([], [1]):
        stop_at(made, ends)
        assert made.generation_config.eos_token_id == 1


def test_a_template_that_takes_no_question_is_said_before_the_training() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(RequestError, match="--sample_tokens 0 leaves samples out"):
        check_sample(tokenizer, SampleArguments(), 512, True)
    check_sample(tokenizer, SampleArguments(sample_tokens=0), 512, True)
    with pytest.raises(RequestError, match="has 113 tokens, but the model has 90 positions"):
        check_sample(tokenizer_of("llama3"), SampleArguments(sample_prompt="a" * 90), 90, True)
