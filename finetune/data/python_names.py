"""Names in the source of Python's standard library, tagged with their role: real text for token classification.

A sentence is a run of whole statements of one module. A name's role depends on its neighbors: `name` is an attribute in
`self.name`, a call in `self.name()`, a parameter in `def f(name)`. Sources are parsed, never imported.
"""

from __future__ import annotations

import ast
import io
import keyword
import sysconfig
import tokenize
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

KINDS = ("attribute", "call", "class", "function", "import", "parameter")
MOST_WORDS = 64  # of a sentence, unless one statement has more
LONGEST_STATEMENT = 200  # words; anything longer is a table of constants
HELD_OUT_OF = 10  # one module in ten, by a hash of its name
SKIPPED = ("test", "this", "antigravity")
QUOTES = '""'  # replaces a string, whose content is not code

Sentence = tuple[list[str], list[str]]
Place = tuple[int, int]  # line, from 1, and byte offset in it, as in `ast`


def name_rows() -> dict[str, dict[str, list[list[str]]]]:
    """Columns `tokens` and `tags` of the splits `train` and `validation`, which share no module and no sentence."""
    library = Path(sysconfig.get_paths()["stdlib"])
    splits: dict[str, dict[tuple[str, ...], list[str]]] = {"train": {}, "validation": {}}
    for path in sorted(library.glob("*.py")):
        if path.stem.startswith(("_", *SKIPPED)):
            continue
        split = "validation" if zlib.crc32(path.stem.encode()) % HELD_OUT_OF == 0 else "train"
        for words, tags in sentences(path):
            splits[split].setdefault(tuple(words), tags)
    for held_out in splits["validation"]:
        splits["train"].pop(held_out, [])
    return {
        split: {"tokens": [list(words) for words in found], "tags": list(found.values())}
        for split, found in splits.items()
    }


def sentences(path: Path) -> Iterator[Sentence]:
    """The words and tags of one source file, a few statements at a time; nothing if it does not parse."""
    try:
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old strings
            names = _names(ast.parse(text))
        statements = list(_statements(text, names))
    except (SyntaxError, UnicodeDecodeError, tokenize.TokenError):
        return
    words: list[str] = []
    tags: list[str] = []
    for more_words, more_tags in statements:
        if len(more_words) > LONGEST_STATEMENT:
            continue
        if words and len(words) + len(more_words) > MOST_WORDS:
            yield words, tags
            words, tags = [], []
        words, tags = words + more_words, tags + more_tags
    if words:
        yield words, tags


def _names(tree: ast.AST) -> dict[Place, str]:
    """The role of each name by position. Definitions are missing, as `ast` does not locate their names: see `_tag`."""
    found: dict[Place, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            found[node.lineno, node.col_offset] = "parameter"
        elif isinstance(node, ast.Attribute):
            found.setdefault(_end_name(node), "attribute")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found[node.func.lineno, node.func.col_offset] = "call"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found[_end_name(node.func)] = "call"
    return found


def _end_name(node: ast.Attribute) -> Place:
    return node.end_lineno or 0, (node.end_col_offset or 0) - len(node.attr.encode())


def _statements(text: str, names: dict[Place, str]) -> Iterator[Sentence]:
    words: list[str] = []
    tags: list[str] = []
    is_import = False
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind, word = tokenize.tok_name[token.type], token.string
        if kind == "NEWLINE":
            if words:
                yield words, tags
            words, tags, is_import, before = [], [], False, ""
            continue
        if kind == "STRING" or kind == "FSTRING_START":
            word = QUOTES
        elif kind not in ("NAME", "OP", "NUMBER"):
            continue
        is_import = is_import or (not words and word in ("import", "from"))
        tags.append(_tag(token, word, before, is_import, tags, names))
        words.append(word)
        before = word


def _tag(
    token: tokenize.TokenInfo, word: str, before: str, is_import: bool, tags: list[str], names: dict[Place, str]
) -> str:
    is_name = token.type == tokenize.NAME and not keyword.iskeyword(word)
    if is_import:  # a dotted name is one entity, without the leading dots of a relative import
        goes_on = bool(tags) and tags[-1] != "O" and (word == "." or before == ".")
        return "I-import" if goes_on else "B-import" if is_name else "O"
    if not is_name:
        return "O"
    if before in ("def", "class"):
        return "B-function" if before == "def" else "B-class"
    line, column = token.start
    kind = names.get((line, len(token.line[:column].encode()) if token.line.count("\n") <= 1 else column))
    return f"B-{kind}" if kind else "O"
