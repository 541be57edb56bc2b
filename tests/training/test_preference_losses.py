"""The losses of preferences against their papers' formulas, written in numpy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from finetune.training.preference import preference_metrics
from finetune.training.preference_losses import LOSSES, Pairs, Settings, kto, squared_log_ratio

RANDOM = np.random.default_rng(0)
CHOSEN, REJECTED, OF_CHOSEN, OF_REJECTED = (-RANDOM.uniform(1, 30, 5) for _ in range(4))
LONG, SHORT = np.array([7.0, 9, 3, 12, 5]), np.array([4.0, 9, 8, 2, 6])
MARGIN = np.array([0.0, 0.5, 1, 0, 2])
PAIRS = Pairs(*map(torch.from_numpy, (CHOSEN, REJECTED, LONG, SHORT, OF_CHOSEN, OF_REJECTED, MARGIN)))


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def judged(loss: str, **more: Any) -> Any:
    return LOSSES[loss](PAIRS, Settings(loss, **{"beta": 0.3, **more}))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_is_equation_7_of_its_paper_smoothed_as_its_author_does(smoothing: float) -> None:
    z = 0.3 * (np.log(np.exp(CHOSEN) / np.exp(OF_CHOSEN)) - np.log(np.exp(REJECTED) / np.exp(OF_REJECTED)))
    expected = -(1 - smoothing) * np.log(sigmoid(z)) - smoothing * np.log(sigmoid(-z))
    found = judged("dpo", label_smoothing=smoothing)
    np.testing.assert_allclose(found.losses, expected, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(found.chosen - found.rejected, z, rtol=1e-10, atol=1e-14)


def test_dpo_by_length_takes_the_mean_over_an_answers_tokens() -> None:
    z = 0.3 * ((CHOSEN - OF_CHOSEN) / LONG - (REJECTED - OF_REJECTED) / SHORT)
    np.testing.assert_allclose(
        judged("dpo", length_normalization=True).losses, -np.log(sigmoid(z)), rtol=1e-10, atol=1e-14
    )


def test_ipo_draws_the_difference_of_the_log_ratios_to_half_of_one_by_tau() -> None:
    h = (CHOSEN - REJECTED) - (OF_CHOSEN - OF_REJECTED)
    np.testing.assert_allclose(judged("ipo").losses, (h - 1 / (2 * 0.3)) ** 2, rtol=1e-10, atol=1e-14)


def test_the_divergence_from_the_reference_is_half_the_mean_square_of_both_answers_log_ratios() -> None:
    """Of answers that a policy near its reference writes, this is KL(policy || reference)."""
    k2 = np.stack([0.5 * (CHOSEN - OF_CHOSEN) ** 2, 0.5 * (REJECTED - OF_REJECTED) ** 2])
    np.testing.assert_allclose(squared_log_ratio(PAIRS), k2.mean(axis=0), rtol=1e-12)

    reference = RANDOM.dirichlet(np.full(8, 20.0))
    policy = reference * np.exp(0.02 * RANDOM.standard_normal(8))
    policy /= policy.sum()
    logs, zeros = torch.from_numpy(np.log(policy)), torch.zeros(8, dtype=torch.float64)
    others = torch.from_numpy(np.log(reference))
    every = squared_log_ratio(Pairs(logs, logs, zeros, zeros, others, others, zeros))
    assert (policy * every.numpy()).sum() == pytest.approx((policy * np.log(policy / reference)).sum(), rel=0.02)


def test_simpo_compares_mean_log_probabilities_by_its_target_margin() -> None:
    z = 2.0 / LONG * CHOSEN - 2.0 / SHORT * REJECTED - 0.7
    np.testing.assert_allclose(
        judged("simpo", beta=2.0, target_margin=0.7).losses, -np.log(sigmoid(z)), rtol=1e-10, atol=1e-14
    )


def test_orpo_adds_the_odds_ratio_to_the_likelihood_of_the_chosen_answer() -> None:
    chosen, rejected = np.exp(CHOSEN / LONG), np.exp(REJECTED / SHORT)
    odds = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
    np.testing.assert_allclose(judged("orpo").losses, -np.log(chosen) - 0.3 * np.log(sigmoid(np.log(odds))), rtol=1e-8)


def test_orpo_is_finite_for_an_answer_that_is_certain() -> None:
    sure = PAIRS._replace(chosen=torch.zeros(5, requires_grad=True))
    losses = LOSSES["orpo"](sure, Settings("orpo", 0.3)).losses
    losses.sum().backward()
    assert losses.isfinite().all()
    assert sure.chosen.grad is not None
    assert sure.chosen.grad.isfinite().all()


def test_rewards_follow_bradley_and_terry_with_a_margin() -> None:
    np.testing.assert_allclose(
        judged("reward").losses, -np.log(sigmoid(CHOSEN - REJECTED - MARGIN)), rtol=1e-10, atol=1e-14
    )


def test_kto_weighs_desirable_and_undesirable_answers_from_its_baseline() -> None:
    good, ratios, z = np.array([True, False, True, True, False]), CHOSEN - OF_CHOSEN, 0.4
    value = np.where(good, 1.5 * sigmoid(0.3 * (ratios - z)), 0.5 * sigmoid(0.3 * (z - ratios)))
    settings = Settings("kto", 0.3, desirable_weight=1.5, undesirable_weight=0.5)
    losses, rewards = kto(torch.from_numpy(ratios), torch.from_numpy(good), torch.tensor(z), settings)
    np.testing.assert_allclose(losses, np.where(good, 1.5, 0.5) - value, rtol=1e-7)
    np.testing.assert_allclose(rewards, 0.3 * ratios, rtol=1e-10, atol=1e-14)


@pytest.mark.filterwarnings("error")
def test_kto_has_no_accuracy_where_held_out_answers_are_all_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune.training.preference.settings_of", lambda session: Settings("kto", 0.1))
    measure: Any = preference_metrics(None)  # type: ignore[arg-type]
    good, bad = [0.5, 0.2, np.nan, -1.0, np.nan, 0.1], [0.5, np.nan, -0.2, np.nan, -3.0, 0.1]
    found = {name: measure(SimpleNamespace(predictions=np.array(rows))) for name, rows in
             {"good": [good, good], "bad": [bad], "both": [good, bad]}.items()}  # fmt: skip
    accuracies = {name: one["preference_accuracy"] for name, one in found.items()}
    assert accuracies == pytest.approx({"good": np.nan, "bad": np.nan, "both": 1.0}, nan_ok=True)
    assert found["good"]["logp_chosen"] == found["both"]["logp_chosen"] == -1.0
    assert np.isnan(found["good"]["logp_rejected"])


def test_a_reward_model_reports_rewards_and_no_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.array([[0.5, 2.0, -1.0, 2.0, -1.0, 0.0], [0.5, 0.0, 1.0, 0.0, 1.0, 0.0]])
    found = {}
    for loss in ("reward", "dpo"):
        monkeypatch.setattr("finetune.training.preference.settings_of", lambda session, loss=loss: Settings(loss, 1.0))
        measure: Any = preference_metrics(None)  # type: ignore[arg-type]
        found[loss] = measure(SimpleNamespace(predictions=rows))
    rewards = {"reward_chosen": 1.0, "reward_rejected": 0.0, "reward_margin": 1.0}
    assert found["reward"] == {"loss": 0.5, "preference_accuracy": 0.5, **rewards}
    assert found["dpo"].keys() - found["reward"].keys() == {"logp_chosen", "logp_rejected", "kl"}
