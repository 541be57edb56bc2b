"""Known architectures: what `finetune.measure.tracing` would record of a model of any size, without torch.

    found = known_trace(config, "causal_lm", "sdpa", "path/to/model")

benchmarks/make_traces.py writes traces/. A file there has one program for each head, and for each choice of the config
that changes operators. Its sizes are sums of products of the model's own; layers and what lies between them are parts,
which number values and storages from their own beginning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, cycle, islice
from pathlib import Path
from typing import Any

from finetune.plan.families.parts import Sizes

TRACES = Path(__file__).resolve().parent / "traces"
# Configs have either; a mixture without dense layers need not say how wide these would be.
ALSO = {"num_experts": "num_local_experts", "num_local_experts": "num_experts", "n_routed_experts": "num_local_experts",
        "intermediate_size": "moe_intermediate_size"}  # fmt: skip
EMPTY: tuple[Any, ...] = ([], 0, [], [], None)  # what an operator of a file lacks at its end
KNOWN = tuple(sorted(file.stem for file in TRACES.glob("*.json")))


@lru_cache(maxsize=4)
def file_of(kind: str) -> Mapping[str, Any]:
    """The file of an architecture in `KNOWN`."""
    return dict(json.loads((TRACES / f"{kind}.json").read_text(encoding="utf-8")))


def sizes_of(kind: str, sizes: Sizes) -> dict[str, int]:
    """All sizes of a model by their names in its config. Raises RequestError if one is missing or invalid."""
    found = dict[str, int]()
    for name, usual in file_of(kind)["sizes"].items():
        default = round(_sum(usual, found)) if isinstance(usual, list) else usual
        found[name] = sizes.labels if name == "num_labels" else sizes(name, ALSO.get(name, name), default=default)
    if prefix := file_of(kind).get("prefix"):
        found[prefix] = 0 if sizes.config.get(prefix) == 0 else sizes(prefix)
    sizes.refuse_depth(sum(found[name] for name in file_of(kind)["depths"]))
    return found


def known_trace(config: Mapping[str, Any], head: str, attention: str, where: str) -> dict[str, Any] | None:
    """As `finetune.measure.tracing.traced`. None if no program is known for this config. Raises RequestError."""
    kind = str(config.get("model_type"))
    if kind not in KNOWN:
        return None
    data, given = file_of(kind), Sizes(dict(config), where)
    sizes = sizes_of(kind, given)
    program = _program(data, config, sizes, head, attention)
    if program is None:
        return None
    made = _Made(data, sizes)
    return {
        "trace": made.trace(program["body"], program["kept"], program["result"]),
        "beyond": made.trace(**program["beyond"]) if program["beyond"] else None,
        "window": given("sliding_window", default=data["choices"]["sliding_window"]) if program["beyond"] else None,
        "layers": sum(sizes[part["depth"]] for part in program["body"] if isinstance(part, dict)),
        "tensors": made.tensors(program["body"]),
        "buffers": made.buffers(program),
        "hidden_size": made.side(program["hidden_size"]),
        "vocab_size": made.side(program["vocab_size"]),
        "head_modules": program["head_modules"],
    }


def _program(
    data: Mapping[str, Any], config: Mapping[str, Any], sizes: dict[str, int], head: str, attention: str
) -> Any:
    """The one for this head and these settings; None if there is none. Some architectures have only eager attention."""
    first, least = sizes.get(data.get("prefix", ""), 1), data["period"] + sizes.get(data.get("prefix", ""), 0)
    if not first or min(sizes[name] for name in data["depths"]) < least:
        return None
    if not all(_repeats(config.get(name), unit) for name, unit in data["lists"].items()):
        return None
    pairs, heads = (sizes.get(name) for name in ("num_key_value_heads", "num_attention_heads"))
    said = {**data["choices"], **config, "grouped": pairs != heads}
    way = attention if any(one["attention"] == attention for one in data["programs"]) else "eager"
    fits = (one for one in data["programs"] if (one["head"], one["attention"]) == (head, way))
    return next((one for one in fits if _holds(one["when"], said)), None)


def _holds(when: Mapping[str, Any], said: Mapping[str, Any]) -> bool:
    """True and False stand for whether a key is set."""
    return all((bool(said[name]) if isinstance(one, bool) else said[name]) == one for name, one in when.items())


def _repeats(listed: Any, unit: list[Any]) -> bool:
    """Whether a list by layers repeats a unit; if there is none, it is made so."""
    each = listed if isinstance(listed, list) else [listed] * (listed is not None)
    return all(one == unit[at % len(unit)] for at, one in enumerate(each))


def _sum(products: list[Any], sizes: Mapping[str, int]) -> float:
    return sum(
        float(factor) * math.prod(sizes[name] for name in above) / math.prod(sizes[name] for name in below)
        for factor, above, below in products
    )


def _repeated(parts: Sequence[int], many: int, period: int) -> list[int]:
    """So many parts, of which the last `period` repeat."""
    return list(islice(chain(parts, cycle(parts[-period:])), many))


class _Made:
    def __init__(self, data: Mapping[str, Any], sizes: dict[str, int]) -> None:
        self.parts, self.period, self.sizes, self.fitted = data["parts"], data["period"], sizes, list[list[float]]()
        self.prefix = sizes.get(data.get("prefix", ""), 0)
        for size in data["size"]:
            self.fitted.append([0.0] * data["terms"])
            for term, *one in size:
                self.fitted[-1][term] += _sum([one], sizes)

    def side(self, size: int) -> int:
        return round(self.fitted[size][0])

    def shape(self, sizes: list[int]) -> list[int]:
        return [*map(self.side, sizes)]

    def laid(self, body: list[Any]) -> tuple[list[tuple[Any, str]], list[int]]:
        """All parts in order, with the names of layers, and the place where each entry of `body` begins."""
        laid, begins = list[tuple[Any, str]](), list[int]()
        for entry in body:
            begins.append(len(laid))
            if isinstance(entry, int):
                laid.append((self.parts[entry], ""))
                continue
            rest = self.sizes[entry["depth"]] - self.prefix
            numbers = [
                *_repeated(entry.get("first", ()), self.prefix, 1),
                *_repeated(entry["parts"], rest, self.period),
            ]
            laid += [(self.parts[number], f"{entry['name']}.{at}") for at, number in enumerate(numbers)]
        return laid, begins

    def tensors(self, body: list[Any]) -> list[Any]:
        found, layers = list[Any](), 0
        for part, name in self.laid(body)[0]:
            found += [[f"{name}{one}", self.shape(shape), layers if name else None] for one, shape in part["tensors"]]
            layers += bool(name)
        return found

    def buffers(self, program: Mapping[str, Any]) -> list[Any]:
        laid = [*self.laid(program["body"])[0], (program, "")]  # modules register those of layers first
        return [
            [f"{name}{one}", self.shape(shape), each]
            for part, name in laid
            for one, shape, each in part.get("buffers", ())
        ]

    def trace(self, body: list[Any], kept: list[Any], result: Any) -> dict[str, Any]:
        laid, begins = self.laid(body)
        counts = ([len(part["values"]) for part, _ in laid], [part["storages"] for part, _ in laid],
                  [len(part["ops"]) for part, _ in laid])  # fmt: skip
        firsts = [list(accumulate(count, initial=0)) for count in counts]

        def place(number: Any, at: int, side: int) -> int:
            if isinstance(number, int):
                return int(firsts[side][at] + number)
            return int(firsts[side][begins[number[0]]] + number[1])

        values, ops, last, layers = list[Any](), list[Any](), [0] * firsts[1][-1], 0
        for at, (part, name) in enumerate(laid):
            segment = 2 * layers + bool(name)
            layers += bool(name)
            values += [[self.fitted[size], each, place(one, at, 1), grad] for size, each, one, grad in part["values"]]
            for short in part["ops"]:
                whole: list[Any] = [*short, *EMPTY[len(short) - 3 :]]
                called, inputs, outputs, saved, flags, weights, gemms, heads = whole
                op = {"name": called, "in": [place(one, at, 0) for one in inputs],
                      "out": [place(one, at, 0) for one in outputs], "saved": [place(one, at, 1) for one in saved],
                      "weights": [f"{name}{one}" if one.startswith(".") else one for one in weights],
                      "gemms": [[self.fitted[size] for size in gemm] for gemm in gemms], "segment": segment,
                      "part": bool(flags & 1), "inside": bool(flags & 2)}  # fmt: skip
                ops.append({**op, "heads": heads} if heads else op)
            for number, offset, *entry in part["dies"]:
                where = at if not entry else begins[entry[0]] if entry[0] >= 0 else begins[-entry[0]] - 1
                last[place(number, at, 1)] = firsts[2][where] + offset
        final = len(laid) - 1
        return {"values": values, "ops": ops, "last": last, "kept": [place(one, final, 0) for one in kept],
                "result": place(result, final, 0)}  # fmt: skip
