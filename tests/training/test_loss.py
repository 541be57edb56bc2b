"""Whether a loss honours `num_items_in_batch` is found by asking the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    DistilBertConfig,
    FunnelConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled
from transformers.modeling_outputs import SequenceClassifierOutput

from finetune.data.columns import MULTI_LABEL, TOKENS
from finetune.errors import RequestError
from finetune.training.loss import (
    class_weights,
    honours_num_items_in_batch,
    loss_for,
    positive_weights,
    settle_loss_scaling,
    settle_trainer,
)

SMALL = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
DISTIL = DistilBertConfig(n_layers=1, dim=16, n_heads=2, hidden_dim=32, vocab_size=50)
GPT2 = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, pad_token_id=0)


class HonestConfig(PretrainedConfig):
    model_type = "honest-for-this-test"


class HonestClassifier(PreTrainedModel):
    """A classifier nobody has heard of, which does divide by the count: no list of names could know."""

    config_class = HonestConfig

    def __init__(self, config: HonestConfig) -> None:
        super().__init__(config)
        self.embed, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 2)
        self.post_init()

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> SequenceClassifierOutput:
        logits = self.head(self.embed(input_ids).mean(1))
        total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        return SequenceClassifierOutput(loss=total / kwargs.get("num_items_in_batch", len(labels)), logits=logits)


class LyingClassifier(HonestClassifier):
    """The same, but it takes the count and leaves it."""

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> SequenceClassifierOutput:
        return super().forward(input_ids, labels)


@pytest.mark.parametrize(
    ("model", "per_token", "expected"),
    [
        pytest.param(lambda: AutoModelForSequenceClassification.from_config(DISTIL), False, False, id="DistilBERT"),
        pytest.param(
            lambda: AutoModelForSequenceClassification.from_config(BertConfig(**SMALL)), False, False, id="BERT"
        ),
        pytest.param(lambda: AutoModelForSequenceClassification.from_config(GPT2), False, False, id="looks at values"),
        *(
            pytest.param(
                lambda config=config: AutoModelForTokenClassification.from_config(config), True, False, id=name
            )
            for name, config in (("DistilBERT tags", DISTIL), ("Llama tags", LlamaConfig(**SMALL)))
        ),
        pytest.param(lambda: AutoModelForCausalLM.from_config(GPT2), True, True, id="GPT-2 language model"),
        pytest.param(lambda: AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)), True, True, id="Llama"),
        pytest.param(lambda: HonestClassifier(HonestConfig()), False, True, id="unknown and honest"),
        pytest.param(lambda: LyingClassifier(HonestConfig()), False, False, id="unknown and lying"),
    ],
)
def test_the_model_is_asked(model: Any, per_token: bool, expected: bool) -> None:
    built = model()
    state = torch.get_rng_state()
    assert honours_num_items_in_batch(built, label_per_token=per_token) is expected
    assert torch.equal(torch.get_rng_state(), state), "asking must not move the random numbers of the run"


def test_the_parts_of_a_composite_model_are_not_sharded_when_it_is_asked() -> None:
    text = {"model_type": "llama", **SMALL}
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    model = AutoModelForImageTextToText.from_config(LlavaConfig(text_config=text, vision_config=vision))
    zero3 = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})  # transformers looks at it while it exists
    assert is_deepspeed_zero3_enabled()
    assert honours_num_items_in_batch(model, label_per_token=True) is True
    del zero3


class SilentClassifier(HonestClassifier):
    """One that cannot be asked: it fails on the smallest inputs, though it would have used the count."""

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> SequenceClassifierOutput:
        if input_ids.shape[-1] < 16:
            raise ValueError("too short")
        return super().forward(input_ids, labels, **kwargs)


class ClosedClassifier(HonestClassifier):
    def forward(self, input_ids: Any, labels: Any = None) -> SequenceClassifierOutput:
        return super().forward(input_ids, labels)


class RefusingClassifier(HonestClassifier):
    """It takes other words, and passes them on to what does not."""

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> SequenceClassifierOutput:
        return ClosedClassifier.forward(self, input_ids, labels, **kwargs)  # type: ignore[arg-type]


def stock_trainer(model: Any, **changes: Any) -> Any:
    told = {"model": model, "compute_loss_func": None, "model_accepts_loss_kwargs": True}
    return SimpleNamespace(**told | changes)


def test_a_model_that_cannot_be_asked_is_taken_not_to_honour_the_count() -> None:
    model = SilentClassifier(HonestConfig())
    assert honours_num_items_in_batch(model) is None
    assert settle_loss_scaling(model) is False
    assert model.accepts_loss_kwargs is False
    trainer = stock_trainer(SilentClassifier(HonestConfig()))
    settle_trainer(trainer)
    assert trainer.model_accepts_loss_kwargs is False


def test_a_model_whose_depth_cannot_be_set_is_not_asked_with_one_layer() -> None:
    config = FunnelConfig(vocab_size=50, d_model=16, n_head=2, d_head=8, d_inner=16, block_sizes=[1, 1])
    assert settle_loss_scaling(AutoModelForTokenClassification.from_config(config), label_per_token=True) is False


@pytest.mark.parametrize("kind", [ClosedClassifier, RefusingClassifier])
def test_a_model_that_does_not_take_the_count_does_not_honour_it(kind: Any) -> None:
    assert honours_num_items_in_batch(kind(HonestConfig())) is False


def test_a_stock_trainer_is_told_of_a_model_that_nobody_has_settled() -> None:
    for kind, honours in ((HonestClassifier, True), (LyingClassifier, False)):
        trainer = stock_trainer(kind(HonestConfig()))
        settle_trainer(trainer)
        assert trainer.model_accepts_loss_kwargs is honours
    settled = LyingClassifier(HonestConfig())
    settled.accepts_loss_kwargs = True  # somebody knows better
    for trainer in (
        stock_trainer(settled),
        stock_trainer(LyingClassifier(HonestConfig()), compute_loss_func=len),
        stock_trainer(torch.nn.Linear(2, 2)),
    ):
        settle_trainer(trainer)
        assert trainer.model_accepts_loss_kwargs is True
    without = stock_trainer(HonestClassifier(HonestConfig()), model_accepts_loss_kwargs=False)
    settle_trainer(without)
    assert without.model_accepts_loss_kwargs is False
    inner = LyingClassifier(HonestConfig())
    adapted = stock_trainer(SimpleNamespace(get_base_model=lambda: inner, config=inner.config))
    settle_trainer(adapted)
    assert adapted.model_accepts_loss_kwargs is False


def test_the_trainer_is_told() -> None:
    model = AutoModelForSequenceClassification.from_config(DISTIL)
    settle_loss_scaling(model)
    assert model.accepts_loss_kwargs is False
    assert settle_loss_scaling(HonestClassifier(HonestConfig())) is True, "labels are classes unless told"


def test_a_stock_trainer_asks_a_model_with_a_label_a_token_too() -> None:
    trainer = stock_trainer(AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)))
    settle_trainer(trainer)
    assert trainer.model_accepts_loss_kwargs is True


def test_class_weights_are_those_of_scikit_learn() -> None:
    import numpy as np
    from sklearn.utils.class_weight import compute_class_weight

    labels = np.array([0] * 90 + [1] * 9 + [2])
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    assert class_weights([90, 9, 1]) == pytest.approx(expected.tolist())
    assert class_weights([3, 0, 1])[1] == 0.0, "of a class without rows"


def test_a_label_weighs_as_many_times_more_as_rows_without_it_are_more() -> None:
    assert positive_weights([3, 6, 0], rows=9) == [2.0, 0.5, 1.0], "1 for a label that no row has"


def test_the_weighted_loss_of_parts_adds_up_to_that_of_the_whole() -> None:
    """Over two ranks with unlike labels: what a mean of weighted means gets wrong."""
    torch.manual_seed(0)
    compute = loss_for("balanced", 0.1, "classification", [30, 10])
    logits, labels = torch.randn(8, 2), torch.tensor([0, 0, 0, 0, 0, 0, 1, 1])
    whole = compute({"logits": logits}, labels, num_items_in_batch=8)
    parts = [compute({"logits": logits[part]}, labels[part], 8) for part in (slice(0, 4), slice(4, 8))]
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-6)


def test_a_regression_has_no_classes_to_weigh() -> None:
    compute = loss_for("none", 0.0, "regression", [])
    loss = compute({"logits": torch.tensor([[1.0], [3.0]], dtype=torch.bfloat16)}, torch.tensor([1234.0, 0.0]), 2)
    assert float(loss) == pytest.approx((1233.0**2 + 9) / 2)
    for kind, smoothing in (("balanced", 0.0), ("none", 0.1)):
        with pytest.raises(RequestError, match="is for classes"):
            loss_for(kind, smoothing, "regression", [])


@pytest.mark.parametrize("kind", ["none", "balanced"])
def test_the_loss_of_several_labels_a_row_adds_up_over_ranks(kind: str) -> None:
    """The Trainer counts every cell as an item: `labels.ne(-100).sum()`."""
    torch.manual_seed(0)
    compute = loss_for(kind, 0.0, MULTI_LABEL, [10, 5, 1], 40)
    logits, labels = torch.randn(7, 3), (torch.rand(7, 3) < 0.4).float()
    whole = compute({"logits": logits}, labels, num_items_in_batch=21)
    parts = [compute({"logits": logits[part]}, labels[part], 21) for part in (slice(0, 2), slice(2, 7))]
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-6)
    weights = torch.tensor([3.0, 7.0, 39.0]) if kind == "balanced" else None
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, pos_weight=weights)
    assert float(whole) == pytest.approx(float(expected), rel=1e-6)
    with pytest.raises(RequestError, match="--label_smoothing_factor is for rows with one label"):
        loss_for(kind, 0.1, MULTI_LABEL, [10, 5, 1], 40)


@pytest.mark.parametrize(("kind", "smoothing"), [("none", 0.0), ("none", 0.1), ("balanced", 0.0), ("balanced", 0.1)])
def test_the_loss_of_tags_adds_up_over_ranks_with_unlike_numbers_of_words(kind: str, smoothing: float) -> None:
    torch.manual_seed(0)
    compute = loss_for(kind, smoothing, TOKENS, [30, 10, 5])
    logits, labels = torch.randn(4, 6, 3), torch.randint(0, 3, (4, 6))
    labels[0, 1:], labels[3, :] = -100, -100  # one rank has a single word, and one row has none
    judged = int((labels != -100).sum())
    whole = compute({"logits": logits}, labels, num_items_in_batch=judged)
    parts = [compute({"logits": logits[part]}, labels[part], judged) for part in (slice(0, 1), slice(1, 4))]
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-6)
    assert float(compute({"logits": logits}, labels)) == pytest.approx(float(whole), rel=1e-6)
    weights = torch.tensor(class_weights([30, 10, 5])) if kind == "balanced" else torch.ones(3)
    each = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), labels, label_smoothing=smoothing, reduction="none"
    )
    assert float(whole) == pytest.approx(float((each * weights[labels.clamp_min(0)]).sum() / judged), rel=1e-6)
