"""Does the loss count all of the assistant's tokens and no others? Tests the templates of 25 model families, rebuilt
from what is publicly known about them, on several kinds of conversations whose contents are hard for templates.

    python benchmarks/chat_templates.py     # writes docs/results/chat_templates.json

benchmarks/pages.py makes the page.

A conversation is exact if the learned tokens decode to what the family's model has to say, with its end-of-turn token.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = ROOT / "tests" / "data" / "chat_templates"
DATA = ROOT / "docs" / "results" / "chat_templates.json"
FORMATS = ("single", "multi", "system", "reasoning", "tools")
ROWS = 40  # conversations of each cell
BLANK_ROWS = 4  # of these, with whitespace around the contents


class Family(NamedTuple):
    """What the model writes in a turn: `words` has {words}, `thought` has {words} and {thought}, `call` has {name} and
    {arguments}. None if the template supports no such turn. `final` is the last turn, if it differs from the others."""

    words: str | None
    thought: str | None = None
    call: str | None = None
    final: str | None = None
    system: bool = True
    trims: bool = False


THOUGHT = "<think>\n{thought}\n</think>\n\n"
CHATML, HERMES = (
    "{words}<|im_end|>",
    '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call><|im_end|>',
)
LLAMA_CALL = '{{"name": "{name}", "parameters": {arguments}}}<|eot_id|>'
R1_CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
R1_CALL += "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
MISTRAL_CALL = '[TOOL_CALLS] [{{"name": "{name}", "arguments": {arguments}, "id": "abcdef123"}}]</s>'
COMMAND_CALL = '<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "{name}", "parameters": {arguments}}}\n]'
COMMAND_CALL += "<|END_ACTION|><|END_OF_TURN_TOKEN|>"
HARMONY = "<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{words}<|return|>"
FAMILIES = {
    "chatml_without_prompt": Family(CHATML),
    "command_r": Family("{words}<|END_OF_TURN_TOKEN|>", trims=True),
    "command_r7b": Family("<|START_RESPONSE|>{words}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", call=COMMAND_CALL),
    "deepseek_r1": Family("{words}<｜end▁of▁sentence｜>", thought="{words}<｜end▁of▁sentence｜>", call=R1_CALL),
    "gemma2": Family("{words}<end_of_turn>", system=False, trims=True),
    "gemma3": Family("{words}<end_of_turn>", trims=True),
    "glm4": Family("{words}"),
    "gpt_oss": Family(
        "<|channel|>final<|message|>{words}<|end|>",
        thought=HARMONY,
        call=" to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>",
        final="<|channel|>final<|message|>{words}<|return|>",
    ),
    "granite3": Family("{words}<|end_of_text|>"),
    "llama2": Family(" {words} </s>", trims=True),
    "llama3": Family("{words}<|eot_id|>", trims=True),
    "llama3_1": Family("{words}<|eot_id|>", call=LLAMA_CALL, trims=True),
    "mistral_tekken": Family("{words}</s>"),
    "mistral_v1": Family(" {words}</s>", system=False),
    "mistral_v3": Family(" {words}</s>", call=MISTRAL_CALL, trims=True),
    "olmo2": Family("{words}</s>"),
    "phi3": Family("{words}<|end|>"),
    "phi4": Family(CHATML),
    "qwen2_5": Family(CHATML, call=HERMES),
    "qwen3": Family(
        CHATML,
        thought=THOUGHT + CHATML,
        call=HERMES,
        final=THOUGHT.format(thought="") + CHATML,
    ),
    "qwq": Family(CHATML, thought=CHATML),
    "smollm2": Family(CHATML),
    "smollm3": Family(
        CHATML + "\n", call='<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call><|im_end|>\n'
    ),
    "vicuna": Family(" {words}</s>", trims=True),
    "zephyr": Family("{words}</s>"),
}
# Words, and contents that would mislead a text search for the answers.
WORDS = "Two and two are four . assistant user [x] {y} é 日本 </b> 7 19 \\n \" ' # * 1907 model : INST".split()
SPECIAL = """
<|im_start|> <|im_end|> <|im_sep|> <|start_header_id|> <|end_header_id|> <|eot_id|> <start_of_turn>
<end_of_turn> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS]
[/TOOL_RESULTS] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] <|user|> <|assistant|> <|system|> <|end|> <｜User｜>
<｜Assistant｜> <｜end▁of▁sentence｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜>
<｜tool▁call▁end｜> <｜tool▁sep｜> <|start|> <|message|> <|channel|> <|return|> <|call|>
<|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|CHATBOT_TOKEN|> <|USER_TOKEN|> <|SYSTEM_TOKEN|>
<|START_RESPONSE|> <|END_RESPONSE|> <|START_ACTION|> <|END_ACTION|> <|start_of_role|>
<|end_of_role|> <|end_of_text|>
""".split()
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}, "most": {"type": "integer"}}},
    },
}


def tokenizer_of(name: str, has_marks: bool = True) -> Any:
    """A byte tokenizer, with the special tokens of all families as tokens, or as plain text."""
    from finetune.data.tokenizer import train_text_tokenizer

    made = train_text_tokenizer("byte", [], 0, 8192, with_end=True)
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    if has_marks:
        made.add_special_tokens({"additional_special_tokens": SPECIAL})
        made.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    made.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return made


def conversations(format_: str, family: Family, seed: int = 0) -> Iterator[tuple[list[dict[str, Any]], Any, str]]:
    """Turns, tools, and the text to be learned from all of them, joined."""
    draw = random.Random(f"{format_} {seed}")

    def text(blanks: bool = False) -> str:
        words = " ".join(draw.choices(WORDS, k=draw.randint(1, 12)))
        return f"\n {words}\n\n" if blanks else words

    for row in range(ROWS):
        blanks = row < BLANK_ROWS and format_ in ("single", "multi") and family.trims
        turns = [{"role": "system", "content": text()}] if format_ == "system" else []
        wanted = []
        for number in range(last := draw.randint(2, 4) if format_ != "single" else 1):
            turns.append({"role": "user", "content": text(blanks)})
            is_last = number == last - 1
            if format_ == "tools" and is_last:
                arguments = {"word": text(), "most": draw.randint(0, 9)}
                call = {"id": "abcdef123", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
                said = {"name": "look_up", "arguments": json.dumps(arguments, ensure_ascii=False)}
                wanted.append(str(family.call).format(**said))
                turns.append({"role": "assistant", "tool_calls": [call]})
                turns.append({"role": "tool", "name": "look_up", "tool_call_id": "abcdef123", "content": text()})
            words, thought = text(blanks), text()
            as_words = (family.final or family.words) if is_last else family.words
            if format_ == "reasoning":
                shape = family.thought if is_last else family.words
                # Half of the rows have the thought in its own field, as gpt-oss requires.
                if row % 2 or family.thought == HARMONY:
                    answer = {"role": "assistant", "reasoning_content": thought, "content": words}
                else:
                    answer = {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{words}"}
                    if shape == "{words}<｜end▁of▁sentence｜>":
                        words = f"\n\n{words}"  # R1 keeps the text after </think> unchanged
                turns.append(answer)
                wanted.append(str(shape).format(words=words, thought=thought))
            else:
                turns.append({"role": "assistant", "content": words})
                wanted.append(str(as_words).format(words=words.strip() if family.trims else words))
        yield turns, [TOOL] if format_ == "tools" else None, "".join(wanted)


def takes(family: Family, format_: str) -> bool:
    """Whether the family's template supports conversations of this kind."""
    known = {"system": family.system, "reasoning": family.thought, "tools": family.call}
    return bool(known.get(format_, True))


def judge(name: str, format_: str, has_marks: bool = True) -> dict[str, int]:
    """How many conversations are exact, how many are not, and the first that is not."""
    from finetune.data.chat.conversation import conversation

    tokenizer = tokenizer_of(name, has_marks)
    counts = {"exact": 0, "other": 0}
    for turns, tools, wanted in conversations(format_, FAMILIES[name]):
        made = conversation(tokenizer, turns, tools)
        said = tokenizer.decode([i for i, used in zip(made.ids, made.learnt, strict=True) if used])
        counts["exact" if said == wanted else "other"] += 1
        if said != wanted:
            counts.setdefault("first", f"expected {wanted!r}, but {said!r} is learned")  # type: ignore[arg-type]
    return counts


def render(rows: list[dict[str, Any]]) -> str:
    """Render the page."""
    cells = {(row["template"], row["format"]): row for row in rows}
    exact, every = (sum(row[name] for row in rows) for name in ("exact", "conversations"))
    lines = [
        "# Chat templates: which tokens are learned",
        "",
        f"Of {every:,} conversations under {len({row['template'] for row in rows})} templates, {exact:,} are exact:",
        "the tokens that the loss counts decode to the assistant's words, tool calls and thoughts as the template",
        "writes them, with each end-of-turn token, and to nothing else. The templates are rebuilt from public",
        "information about the models (`tests/data/chat_templates/`). `glm4` writes no end-of-turn token, and",
        "`deepseek_r1` and `qwq` drop thoughts; a run says so.",
        "",
        "The columns are kinds of conversations: one user turn, several, several with a system message, with thoughts,",
        "and with tool calls. A dash means that the template does not support this kind.",
        "",
        "Made by `python benchmarks/chat_templates.py`.",
        "",
        "| template | " + " | ".join(FORMATS) + " |",
        "|---|" + "---|" * len(FORMATS),
    ]
    for name in FAMILIES:
        found = [cells.get((name, format_)) for format_ in FORMATS]
        shown = [f"{cell['exact']} of {cell['conversations']}" if cell else "-" for cell in found]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    rows = []
    for name, family in FAMILIES.items():
        for format_ in FORMATS:
            if takes(family, format_):
                counts = judge(name, format_)
                rows.append({"template": name, "format": format_, "exact": counts["exact"], "conversations": ROWS})
                if counts["other"]:
                    print(f"{name}, {format_}: {counts['first']}")
    DATA.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(render(rows))


if __name__ == "__main__":
    main()
