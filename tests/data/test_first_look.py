"""A wrong column is found before anything is compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.data.first_look import look_at_columns
from finetune.errors import RequestError
from finetune.run.choose import recipes
from finetune.run.launch import Launch
from finetune.run.resolve import resolve

ROWS = {
    "a.csv": "title,body,label\nx,y z,1\n",
    "a.jsonl": json.dumps({"words": ["a"], "tags": ["O"], "pos": ["N"]}) + "\n",
    "n.jsonl": json.dumps({"tokens": ["a", "b"], "ner_tags": [0, 3]}) + "\n",
    "w.csv": "Sentence #,Word,POS,Tag\nSentence: 1,Ada,NN,B-PER\n,lives,VB,O\n",
    "v.csv": "Word,Tag\nAda,B-PER\nlives,O\n",
    "wide.csv": ",".join(f"c{i}" for i in range(2001)) + "\n" + ",".join("1" * 2001) + "\n",
    "many.csv": ",".join(f"c{i}" for i in range(40)) + "\n" + ",".join("1" * 40) + "\n",
    "b.jsonl": json.dumps({"title": "x", "body": "y z"}) + "\n",
    "c.jsonl": json.dumps({"text": "y z"}) + "\n",
    "d.jsonl": json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n",
    "e.jsonl": json.dumps({"prompt": "a", "completion": "b"}) + "\n",
    "a.txt": "text\n",
    "a.conll": "a O\n",
    "b.conll": "a,O\n",
    "c.conll": "a 1\n",
    "d.conll": "a O\nb\n",
    "b.csv": "nice, really,pos\ngood,pos\nbad,neg\n",
    "c.csv": "text,label\nnice, really,pos\n",
    "d.csv": "title,text,label\na b,c d\ne f,g h,1\n",
    "e.csv": "text,label\n",
}


@pytest.mark.parametrize(
    ("recipe", "words", "said"),
    [
        ("seq_cls", "--train_file a.csv --text_column_names boby", r"no column 'boby' \(--text_column_names\)"),
        ("seq_cls", "--train_file b.jsonl", "cannot tell which column is the label"),
        ("seq_cls", "--train_file a.csv", ""),
        ("seq_cls", "--train_file a.csv --label_column_names label", ""),
        ("seq_cls", "", ""),
        ("token_cls", "--train_file a.jsonl --tags_column_name ner", "no column 'ner'; it has words, tags, pos"),
        ("token_cls", "--train_file a.jsonl", ""),
        ("token_cls", "--train_file n.jsonl", r"'ner_tags' holds no names of tags, but numbers such as \[0, 3\]"),
        ("token_cls", "--train_file n.jsonl", "or name the ids with --tag_names, in their order"),
        ("token_cls", "--train_file n.jsonl --tag_names O B-x I-x B-y", ""),
        (
            "token_cls",
            "--train_file n.jsonl --tag_names O B-x I-x",
            "the tag 3, but --tag_names names the ids from 0 to 2",
        ),
        ("token_cls", "--train_file n.jsonl --tag_names O B-x B-x I-x", "has B-x twice"),
        (
            "token_cls",
            "--train_file a.jsonl --tag_names O B-x",
            "has the tag 'O', but --tag_names is for whole numbers",
        ),
        ("token_cls", "--train_file c.conll --tag_names O B-x", ""),
        ("token_cls", "--train_file w.csv", ""),
        (
            "token_cls",
            "--train_file v.csv",
            "no column 'tokens or words'; .* needs a column .* called sentence_id; or .*CoNLL",
        ),
        ("seq_cls", "--train_file wide.csv", "has 2,001 columns, but a table for a recipe has at most 2,000"),
        ("seq_cls", "--train_file many.csv", r"c29 \(such as '1'\); and 10 more"),
        ("token_cls", "--train_file a.conll", ""),
        ("token_cls", "--train_file b.conll", "columns are separated by ','"),
        ("token_cls", "--train_file c.conll", r"tags are numbers \(1\)"),
        ("token_cls", "--train_file d.conll", "line 2 has 1 columns"),
        ("token_cls", "--train_file a.csv", "no column 'tokens or words'.* Texts with a label each are for .*seq_cls"),
        ("seq_cls", "--train_file b.csv", "line 1 has 3 cells, but there are 2 columns"),
        ("seq_cls", "--train_file c.csv", "line 2 has 3 cells, but there are 2 columns"),
        ("seq_cls", "--train_file d.csv", ""),
        ("seq_cls", "--train_file e.csv", "--train_file e.csv: the file has no rows"),
        ("causal_lm", "--train_file b.jsonl --text_column_name boby", "no column with text found"),
        ("causal_lm", "--train_file b.jsonl", ""),
        ("causal_lm", "--train_file a.txt", ""),
        ("causal_lm", "--train_file a.txt --text_column_name text", ""),
        ("causal_lm", "--train_file a.txt --text_column_name body", "no column with text found .*body.*it has text"),
        ("causal_lm", "--train_file a.txt --train_on last", r"--train_on is 'last' \(command line\).* has text"),
        ("causal_lm", "--train_file b.jsonl --chat_template chatml", "--chat_template is 'chatml' .* data has text"),
        ("causal_lm", "--train_file c.jsonl --train_on last", "--train_on is 'last' .* data has text"),
        ("causal_lm", "--train_file d.jsonl --train_on last --chat_template chatml", ""),
        ("causal_lm", "--train_file e.jsonl --train_on last", ""),
        ("causal_lm", "--train_file e.jsonl --reasoning strip", "--reasoning is 'strip' .* data has completion"),
        ("seq2seq", "--train_file a.csv", "no two columns with known names .*it has title, body, label"),
        ("seq2seq", "--train_file a.csv --source_column_name body --target_column_name title", ""),
        ("seq2seq", "--train_file d.jsonl", "Conversations are for recipes/causal_lm.py"),
        ("seq2seq", "--train_file e.jsonl", ""),
        ("causal_lm_pipeline", "--train_file a.csv --text_column_name boby", "no column with text found"),
        ("image_cls", "", ""),
    ],
)
def test_columns_are_looked_at_as_the_preparation_will(
    recipe: str, words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in ROWS.items():
        Path(name).write_text(text)
    run = resolve(recipes()[recipe], words.split(), Launch(), is_here=False)
    if not said:
        look_at_columns(run)
        return
    with pytest.raises(RequestError, match=said):
        look_at_columns(run)
