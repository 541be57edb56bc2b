"""Preference losses as in their papers: from an answer's log-probabilities under policy and reference to a loss and a
reward. docs/preference.md says when to use which.

`beta` scales rewards: how far the policy may move from the reference, or for ORPO the weight of the preference relative
to the likelihood of the chosen answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class Settings:
    """The values of the flags with these names."""

    loss: str
    beta: float
    label_smoothing: float = 0.0
    length_normalization: bool = False
    target_margin: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


class Pairs(NamedTuple):
    """The chosen and rejected answers of B pairs: log-probabilities (B,) summed over tokens, the numbers of `tokens`
    (B,), the reference's log-probabilities (zeros without one), and the margins between rewards."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    chosen_reference: Tensor
    rejected_reference: Tensor
    margin: Tensor


class Judged(NamedTuple):
    """Losses and rewards of both answers, (B,) each."""

    losses: Tensor
    chosen: Tensor
    rejected: Tensor


def _ratios(pairs: Pairs, of: Settings) -> tuple[Tensor, Tensor]:
    """log(policy / reference) of both answers; with length normalization, the mean over an answer's tokens."""
    chosen, rejected = pairs.chosen - pairs.chosen_reference, pairs.rejected - pairs.rejected_reference
    if of.length_normalization:
        return chosen / pairs.chosen_tokens, rejected / pairs.rejected_tokens
    return chosen, rejected


def squared_log_ratio(pairs: Pairs) -> Tensor:
    """The mean over both answers of log(policy / reference)^2 / 2, for B pairs (B,), in nats per answer.

    Schulman's k2 (http://joschu.net/blog/kl-approx.html). Over answers that the policy generated, it estimates
    KL(policy || reference) with a bias of third order in the log ratios. Here the answers come from the data, so it is
    only a proxy: never below 0, 0 only if both models give all answers the same probability, and close to the KL on
    such answers while the policy is near its reference. His unbiased k1 and k3 do not work on such answers: k1 is then
    no divergence (it is negative if both answers become less likely, as they do in DPO), and k3 has an exponential of
    the log ratio, which a single rejected answer can dominate.
    """
    ratios = pairs.chosen - pairs.chosen_reference, pairs.rejected - pairs.rejected_reference
    return (ratios[0].detach() ** 2 + ratios[1].detach() ** 2) / 4


def _preferred(logits: Tensor, smoothing: float) -> Tensor:
    """Cross entropy of "the chosen answer is better", assumed wrong for a share `smoothing` of the pairs."""
    return -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)


def dpo(pairs: Pairs, of: Settings) -> Judged:
    """Rafailov et al., arXiv 2305.18290, equation 7; smoothed as by Mitchell, "A note on DPO with noisy preferences",
    equation 3."""
    chosen, rejected = (of.beta * ratio for ratio in _ratios(pairs, of))
    return Judged(_preferred(chosen - rejected, of.label_smoothing), chosen, rejected)


def ipo(pairs: Pairs, of: Settings) -> Judged:
    """Azar et al., arXiv 2310.12036, equation 17, with beta for its tau."""
    chosen, rejected = _ratios(pairs, of)
    return Judged((chosen - rejected - 1 / (2 * of.beta)) ** 2, of.beta * chosen, of.beta * rejected)


def simpo(pairs: Pairs, of: Settings) -> Judged:
    """Meng et al., arXiv 2405.14734, equation 6: its gamma is the target margin."""
    chosen, rejected = of.beta * pairs.chosen / pairs.chosen_tokens, of.beta * pairs.rejected / pairs.rejected_tokens
    return Judged(_preferred(chosen - rejected - of.target_margin, of.label_smoothing), chosen, rejected)


def orpo(pairs: Pairs, of: Settings) -> Judged:
    """Hong et al., arXiv 2403.07691, equations 6 and 7, with beta for its lambda: the chosen answer's negative
    log-likelihood per token, and the odds ratio. Both are averaged over pairs, like the paper's expectation."""
    chosen, rejected = pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
    odds = (chosen - _log_of_rest(chosen)) - (rejected - _log_of_rest(rejected))
    return Judged(-chosen + of.beta * _preferred(odds, 0.0), of.beta * chosen, of.beta * rejected)


def _log_of_rest(logp: Tensor) -> Tensor:
    """log(1 - p) from log p. p is kept below 1, because an answer with p = 1 has infinite odds."""
    return torch.log(-torch.expm1(logp.clamp(max=-1e-7)))


def reward(pairs: Pairs, of: Settings) -> Judged:
    """The Bradley-Terry model of scores (in `chosen` and `rejected`), with margins as in Touvron et al., arXiv
    2307.09288, equation 2."""
    return Judged(_preferred(pairs.chosen - pairs.rejected - pairs.margin, 0.0), pairs.chosen, pairs.rejected)


def kto(ratios: Tensor, desirable: Tensor, baseline: Tensor, of: Settings) -> tuple[Tensor, Tensor]:
    """Ethayarajh et al., arXiv 2402.01306, equation 8: losses and rewards (B,) of single answers, some of them
    `desirable`. `ratios` are log(policy / reference). `baseline` is z_0 of equation 7, the divergence from the
    reference on answers to other prompts; no gradient flows through it."""
    rewards, z = of.beta * ratios, of.beta * baseline
    values = torch.where(
        desirable,
        of.desirable_weight * (1 - torch.sigmoid(rewards - z)),
        of.undesirable_weight * (1 - torch.sigmoid(z - rewards)),
    )
    return values, rewards


LOSSES: dict[str, Callable[[Pairs, Settings], Judged]] = {
    "dpo": dpo,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
    "reward": reward,
}
