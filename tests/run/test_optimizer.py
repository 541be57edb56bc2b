"""What an optimizer takes in --optim_args, by the functions of transformers that make it."""

from __future__ import annotations

import importlib.metadata
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from transformers import trainer_optimizer

from finetune.errors import RequestError
from finetune.run.launch import Launch
from finetune.run.optimizer import TAKES_ANY
from finetune.run.recipes.seq_cls import SEQ_CLS
from finetune.run.resolve import resolve
from finetune.run.snapshot import snapshot

EVERY = sorted(str(one.value) for one in trainer_optimizer._OPTIMIZER_HANDLERS)  # type: ignore[attr-defined]
# Of optimizers, some of which are for machines that nobody has here: what is asked of --optim_args is asked before.
PACKAGES = (
    *("torchdistx", "torchdistx.optimizers", "torch_xla", "torch_xla.amp", "torch_xla.amp.syncfree", "torch_npu"),
    *("torch_npu.optim", "galore_torch", "apollo_torch", "lomo_optim", "grokadamw", "torchao", "torchao.optim"),
    *("schedulefree", "optimi", "bitsandbytes", "bitsandbytes.optim"),
)


class Asked(dict[str, str]):
    """Has every name, and remembers which were asked for."""

    def __init__(self) -> None:
        super().__init__(any="1")
        self.names: set[str] = set()

    def get(self, name: str, usual: Any = None) -> Any:
        self.names.add(name)
        return "1" if usual is None else usual

    pop = get  # type: ignore[assignment]

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return True

    def __getitem__(self, name: str) -> str:
        self.names.add(name)
        return "1"


@pytest.fixture
def with_every_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, MagicMock())
    for name in (name for name in vars(trainer_optimizer) if name.startswith("is_") and name.endswith("_available")):
        monkeypatch.setattr(trainer_optimizer, name, lambda *version: True)
    monkeypatch.setattr(trainer_optimizer, "_setup_low_rank_optimizer", lambda *given, **named: (None, {}))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.0")


@pytest.mark.parametrize("name", [name for name in EVERY if not name.startswith(TAKES_ANY)])
def test_the_names_written_down_are_those_that_transformers_looks_up(name: str, with_every_package: None) -> None:
    asked = Asked()
    args = MagicMock(optim=trainer_optimizer.OptimizerNames(name), adam_beta1=0.9, adam_beta2=0.9, adam_epsilon=1e-8)
    context: Any = SimpleNamespace(args=args, model=MagicMock(), optimizer_kwargs={}, adam_kwargs={}, optim_args=asked)
    trainer_optimizer._OPTIMIZER_HANDLERS[args.optim](context)
    assert sorted(asked.names) == snapshot()["optim_args"].get(name, [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--optim sgd --optim_args mom=1", "which takes only dampening, momentum, nesterov, weight_decay"),
        ("--optim sgd --optim_args momentum", "momentum has no value"),
        ("--optim sgd --optim_args momentum=much", "momentum is 'much', but must be a number"),
        ("--optim sgd --optim_args nesterov=maybe", "nesterov is 'maybe', but must be True or False"),
        ("--optim sgd --optim_args nesterov=on", "nesterov is 'on', but must be True or False"),
        ("--optim sgd --optim_args momentum=0.9,", "one comma too many"),
        ("--optim stable_adamw --optim_args kahan_sum=False", "reads any word as True"),
    ],
)
def test_what_an_optimizer_does_not_take_is_refused(words: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        resolve(SEQ_CLS, words.split(), Launch(), is_here=False)


@pytest.mark.parametrize("words", ["--optim_args foo=1", "--optim adamw_8bit --optim_args beta3=1"])
def test_of_an_optimizer_that_takes_none_it_is_said_once(words: str) -> None:
    with pytest.raises(RequestError, match=r"which does nothing: --optim is .*It takes none") as met:
        resolve(SEQ_CLS, words.split(), Launch(), is_here=False)
    assert str(met.value).count("--optim_args") == 1


def test_what_an_optimizer_takes_is_taken() -> None:
    resolve(SEQ_CLS, ["--optim", "sgd", "--optim_args", "momentum=0.9, nesterov=True"], Launch(), is_here=False)
