"""What is drawn depends on the seed and on the prompt, and not on who else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import answerer, asked, model_of

from finetune.generation.batches import Batch
from finetune.generation.sampling import Decoding, Noise, settle_decoding

IDS = [[1, 2, 3], [4, 5], [1, 2, 3], [7] * 9]
DRAWN = Decoding(temperature=0.9, top_p=0.95, seed=5)


def said(decoding: Decoding, numbers: list[int]) -> list[str]:
    rows = answerer(decoding=decoding).answer([IDS[number] for number in numbers], Batch(numbers, 20))
    return [row["text"] for row in rows]


def test_a_draw_does_not_depend_on_the_batch() -> None:
    together = said(DRAWN, [0, 1, 2, 3])
    assert together == [said(DRAWN, [number])[0] for number in range(4)]
    assert together[::-1] == said(DRAWN, [3, 2, 1, 0])
    assert together[0] != together[2], "two prompts alike are drawn for each by itself"
    assert together != said(Decoding(temperature=0.9, top_p=0.95, seed=6), [0, 1, 2, 3])


def test_what_is_drawn_is_distributed_as_the_softmax() -> None:
    scores = torch.tensor([2.0, 1.0, 0.0, float("-inf")])
    rows = 10_000
    drawn = Noise(1, range(rows), torch.device("cpu"))(torch.zeros(rows, 1), scores.expand(rows, 4)).argmax(-1)
    shares = torch.bincount(drawn, minlength=4) / rows
    assert shares[3] == 0
    assert torch.allclose(shares, scores.softmax(-1), atol=0.02)  # four standard errors


def test_a_low_temperature_and_a_small_share_are_greedy() -> None:
    greedy = said(Decoding(), [0, 1, 2, 3])
    assert said(Decoding(temperature=1e-4), [0, 1, 2, 3]) == greedy
    assert said(Decoding(temperature=1.0, top_p=1e-6), [0, 1, 2, 3]) == greedy
    assert said(Decoding(temperature=1.0, top_k=1), [0, 1, 2, 3]) == greedy
    assert said(DRAWN, [0, 1, 2, 3]) != greedy


FOLDER = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}


@pytest.mark.parametrize(
    ("words", "folder", "wanted"),
    [
        ("", {}, Decoding()),
        ("", {"temperature": 0.6}, Decoding()),
        ("", FOLDER, Decoding(0.6, 20, 0.9, None, 42)),
        ("--temperature 0", FOLDER, Decoding()),
        ("--temperature 0.2 --seed 1", FOLDER, Decoding(0.2, 20, 0.9, None, 1)),
        ("--temperature 0.2", {"top_p": 0.9}, Decoding(0.2, None, None, None, 42)),
        ("--top_p 0.5", {}, Decoding(1.0, None, 0.5, None, 42)),
        (
            "",
            {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3},
            Decoding(repetition_penalty=1.1, no_repeat_ngram_size=3),
        ),
        (
            "",
            {"repetition_penalty": 1.0, "return_dict_in_generate": True, "num_beams": 4, "max_time": 1e-9},
            Decoding(),
        ),
    ],
)
def test_flags_come_before_what_the_folder_says(words: str, folder: dict[str, Any], wanted: Decoding) -> None:
    model = model_of("gptlite")
    model.generation_config.update(**folder)
    assert settle_decoding(asked(*words.split()), model) == wanted
    left = model.generation_config
    assert not left.do_sample
    others = (left.num_beams, left.return_dict_in_generate, left.max_time, left.repetition_penalty)
    assert set(others) <= {None, 1, False}


def test_an_answer_ends_before_a_stop_text() -> None:
    (free,) = answerer().answer([IDS[0]], Batch([0], 30))
    text = free["text"]
    places = [i for i in range(3, len(text) - 2) if "\ufffd" not in text[i : i + 2] and text.find(text[i : i + 2]) == i]
    stop = text[places[0] : places[0] + 2]
    rows = answerer(stop=("never said", stop)).answer([IDS[0], IDS[1]], Batch([0, 1], 30))
    assert (rows[0]["finish_reason"], rows[0]["text"]) == ("stop", text[: places[0]])
    assert rows[0]["tokens"] < 30
    assert rows[1]["finish_reason"] == "length" or stop not in rows[1]["text"]
