"""The model card: what the model is, what it was trained on, how well it does, how to make it again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, StrictUndefined

# Autoescape is for HTML; Markdown cells are made safe by `cell` below, and front matter by JSON, which YAML contains.
TEMPLATE = """---
library_name: transformers
pipeline_tag: text-classification
{%- if base_model %}
base_model: {{ base_model | json }}
{%- endif %}
tags: [finetune, deepspeed]
---
# {{ title | cell }}

{{ task }} with {{ model | cell }}, trained by `{{ recipe }}` of the finetune toolkit.

## Results

| metric | value |
|---|---|
{% for name, value in metrics -%}
| {{ name }} | {{ value }} |
{% endfor %}
{%- for picture, alt in pictures %}
![{{ alt }}]({{ picture }})
{% endfor %}
## Data

{{ source | cell }}

| split | rows | left out | cut to {{ max_seq_length }} tokens |
|---|---|---|---|
{% for split, rows, skipped, truncated in splits -%}
| {{ split }} | {{ rows }} | {{ skipped }} | {{ truncated }} |
{% endfor %}
Text column{{ "s" if text_columns | length > 1 }}: {{ text_columns | join(", ") | cell }}.
{%- if labels %} Labels: {{ labels }}.{% endif %}

## Use

```python
from transformers import pipeline

classify = pipeline("text-classification", "path/to/this/folder")
print(classify("Some text."))
```

## Make it again

```
{{ command }}
```

`recipe.yaml` holds the flags (`--config recipe.yaml`), `ds_config.json` the DeepSpeed configuration as it ran,
`environment.json` the machine and versions: {{ versions }}.
"""


def model_card(
    *,
    account: Any,
    metrics: dict[str, Any],
    environment: dict[str, Any],
    recipe: str,
    task: str,
    model: str,
    base_model: str | None,
    pictures: Sequence[tuple[str, str]],
) -> str:
    """Markdown with the hub's front matter. Names and paths from data are escaped."""
    engine = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    engine.filters |= {"cell": _cell, "json": json.dumps}
    shown = [(name, _number(value)) for name, value in metrics.items() if isinstance(value, int | float)]
    return engine.from_string(TEMPLATE).render(
        base_model=base_model,
        title=f"{task} on {account.source}",
        task=task,
        model=model,
        recipe=recipe,
        metrics=shown,
        pictures=pictures,
        source=account.source,
        splits=[(s, n, account.skipped.get(s, 0), account.truncated.get(s, 0)) for s, n in account.rows.items()],
        max_seq_length=account.max_seq_length,
        text_columns=account.columns.text,
        labels=", ".join(f"{_cell(name)} ({count:,})" for name, count in list(account.label_counts.items())[:50]),
        command=environment["command"].replace("`", "'"),
        versions=", ".join(f"{name} {version}" for name, version in environment["packages"].items()),
    )


def _cell(text: Any) -> str:
    """One line that neither ends a table cell nor starts markup."""
    line = " ".join(str(text).split())
    for character in "\\|<>`*_[]#!":
        line = line.replace(character, "\\" + character)
    return line


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
