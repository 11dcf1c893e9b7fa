r"""Four predictions of outputs, for players that were trained alone and in complementary coalitions.

Complementary coalitions ("halves") are two coalitions of n // 2 players and all others. With them each player is
trained equally often, so that no prediction favors some players. For a coalition S with members' shares w_S, let q_S be
the mean of its members' probabilities over all samples and members, weighted by w_S, and

.. math:: l_S = \log(0.99\, q_S + 0.01 / M)

the logarithm of the frequencies of M classes that S is expected to know, minus its mean.

- *transported interpolation*: capped logits minus :math:`l_T` of their own coalition T are interpolated, and
  :math:`l_S` is added.
- *blocks*: S is cut into as few disjoint trained coalitions as possible. Their probabilities are averaged by weight,
  and over all such cuts.
- *combiner*: a weighted sum of four logits that need no coalition of several players. Its four coefficients are fitted
  to the trained coalitions' outputs.
- *kriged combiner*: the combiner plus the interpolation of its residuals in the trained coalitions.

Only two are defined for regressions: the interpolation, and blocks of outputs. These are flsv's own methods.
``docs/results/predicted.md`` compares the values with those of retrained coalitions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flsv.functional.shapley.mixtures import (
    MIN_PROBABILITY,
    Prediction,
    TrainedOutputs,
    cap_logits,
    center_logits,
    coalition_shares,
    ensemble,
    interpolation,
    interpolation_weights,
    mixer,
)

#: The part of uniform frequencies in the classes that a coalition is expected to know.
UNIFORM_PART = 0.01
#: The total weight of all single players in the combiner's loss. A coalition of several players has weight 1.
WEIGHT_OF_SINGLES = 0.2
#: The penalty on the combiner's distance from the mean of the members' probabilities, and its steps of L-BFGS.
COMBINER_PENALTY = 0.01
COMBINER_STEPS = 25


def halving_predictions(trained: TrainedOutputs) -> list[Prediction]:
    """Return the four predictions, or the two that are defined for regressions."""
    if not trained.logits:
        return [interpolation(trained), blocks(trained)]
    combination = combiner(trained)
    return [
        transported_interpolation(trained),
        blocks(trained),
        combination,
        with_kriged_residuals(trained, combination),
    ]


def expected_classes(trained: TrainedOutputs) -> Prediction:
    """Return the centered logarithm l_S of the class frequencies that coalitions are expected to know, ``[c, 1, ...,
    M]``.
    """
    single_outputs = trained.outputs[trained.single_positions]
    probabilities = single_outputs.softmax(-1)
    num_classes = probabilities.shape[-1]
    num_players = len(probabilities)
    probabilities_by_player = probabilities.double().view(num_players, -1, num_classes)
    player_frequencies = probabilities_by_player.mean(1)  # [n, M], over all samples
    sample_axes = [1] * (probabilities.ndim - 2)  # over which the logits broadcast

    def predict(masks: Tensor) -> Tensor:
        shares = coalition_shares(masks, trained.weights)
        frequencies = shares @ player_frequencies.cpu()  # q_S [c, M]
        uniform = UNIFORM_PART / num_classes
        smoothed = (1 - UNIFORM_PART) * frequencies + uniform
        logits = center_logits(smoothed.log())
        return logits.to(probabilities).view(-1, *sample_axes, num_classes)

    return predict


def transported_interpolation(trained: TrainedOutputs) -> Prediction:
    """Return the interpolation of capped logits minus those of the classes that their coalition is expected to know."""
    class_logits = expected_classes(trained)
    capped_outputs = cap_logits(trained.outputs, is_single=trained.is_single)
    mix = mixer(trained.ordered(capped_outputs - class_logits(trained.masks)))

    def predict(masks: Tensor) -> Tensor:
        mixing_weights = interpolation_weights(masks, trained.masks, trained.weights)
        return mix(mixing_weights) + class_logits(masks)

    return predict


def blocks(trained: TrainedOutputs) -> Prediction:
    """Return the mean outputs (probabilities for classifiers) of the fewest disjoint trained coalitions."""
    outputs = trained.outputs
    if trained.logits:
        outputs = outputs.softmax(-1)
    mix = mixer(trained.ordered(outputs))

    def predict(masks: Tensor) -> Tensor:
        mean = mix(block_weights(masks, trained.masks, trained.weights))
        if trained.logits:
            return mean.clamp_min(MIN_PROBABILITY).log()
        return mean

    return predict


def block_weights(
    masks: Tensor,
    trained: Tensor,
    weights: Tensor,
) -> Tensor:
    """Compute the weights ``[K, T]`` of trained coalitions in other coalitions, each cut into the fewest disjoint
    trained ones. A trained coalition is weighted by its members' weights, and averaged over all such cuts.

    Args:
        masks: bool ``[K, n]``, coalitions with members.
        trained: bool ``[T, n]``, each player alone among them.
        weights: ``[n]``, the players' weights.
    """
    weights = weights.double().cpu()
    # A cut is given by its blocks of several players. Players in none of them are alone.
    cuts = _disjoint_coalitions(trained)  # bool [C, T]
    is_in_block = (cuts.double() @ trained.double()) > 0  # [C, n]
    cut_weights = _weights_of_cuts(masks, cuts, is_in_block)  # [K, C]

    # The parts of all cuts in which a block occurs, and in which a player is alone.
    parts_with_block = cut_weights @ cuts.double()  # [K, T]
    parts_alone = cut_weights @ (~is_in_block).double()  # [K, n]
    block_totals = trained.double() @ weights
    totals = masks.double() @ weights
    mixing_weights = parts_with_block * block_totals / totals[:, None]

    single_weights = parts_alone * coalition_shares(masks, weights)  # [K, n]
    is_single = trained.sum(1) == 1
    single_players = trained[is_single].int().argmax(1)
    mixing_weights[:, is_single] += single_weights[:, single_players]
    return mixing_weights


def _weights_of_cuts(
    masks: Tensor,
    cuts: Tensor,
    is_in_block: Tensor,
) -> Tensor:
    """Return equal weights ``[K, C]`` of all cuts of a coalition into the fewest blocks. Other cuts have 0."""
    # A block of m members replaces m blocks of one player.
    num_saved = is_in_block.sum(1) - cuts.sum(1)
    num_outside = (~masks).double() @ is_in_block.double().T  # [K, C]
    saved = num_saved.masked_fill(num_outside > 0, -1)
    is_fewest = saved == saved.amax(1, keepdim=True)
    num_cuts = is_fewest.sum(1, keepdim=True)
    return is_fewest.double() / num_cuts


def _disjoint_coalitions(trained: Tensor) -> Tensor:
    """List the families of disjoint trained coalitions of several players, bool ``[C, T]``, the empty one first."""
    num_trained, num_players = trained.shape
    families = torch.zeros(1, num_trained, dtype=torch.bool)  # a row for each family
    unions = torch.zeros(1, num_players, dtype=torch.bool)  # the players of its coalitions
    has_several_players = trained.sum(1) > 1
    for position in has_several_players.nonzero().flatten().tolist():
        coalition = trained[position]
        is_disjoint = ~(unions & coalition).any(1)
        # Each family of coalitions that are disjoint from this one is added again with it.
        larger_families = families[is_disjoint]
        larger_families[:, position] = True
        larger_unions = unions[is_disjoint] | coalition
        families = torch.cat([families, larger_families])
        unions = torch.cat([unions, larger_unions])
    return families


def combiner(trained: TrainedOutputs) -> Prediction:
    """Return the weighted sum of four logits: those of the weighted and of the unweighted mean of the members'
    probabilities, of the classes that they are expected to know, and the weighted mean of their capped logits.
    """
    features = _combiner_features(trained)
    coefficients = _fit_combiner(trained, features)

    def predict(masks: Tensor) -> Tensor:
        member_features = features(masks)
        return member_features @ coefficients.to(member_features)

    return predict


def _combiner_features(trained: TrainedOutputs) -> Callable[[Tensor], Tensor]:
    """Return the function from masks ``[c, n]`` to the combiner's four logits, ``[c, V, ..., M, 4]``."""
    single_outputs = trained.ordered(trained.outputs[trained.single_positions])
    are_single = torch.ones(len(single_outputs), dtype=torch.bool)
    weighted_mean = ensemble(trained)
    mix_capped_logits = mixer(cap_logits(single_outputs, is_single=are_single))
    mix_probabilities = mixer(single_outputs.softmax(-1))
    class_logits_of = expected_classes(trained)

    def features(masks: Tensor) -> Tensor:
        weighted_logits = center_logits(weighted_mean(masks))
        shares = coalition_shares(masks, trained.weights)
        capped_logits = mix_capped_logits(shares)
        sizes = masks.sum(1, keepdim=True)
        unweighted_mean = mix_probabilities(masks.double() / sizes)
        unweighted_logits = unweighted_mean.clamp_min(MIN_PROBABILITY).log()
        logits = [
            weighted_logits,
            capped_logits,
            center_logits(unweighted_logits),
            class_logits_of(masks).expand_as(weighted_logits),
        ]
        return torch.stack(logits, -1)

    return features


def _fit_combiner(
    trained: TrainedOutputs,
    features: Callable[[Tensor], Tensor],
) -> Tensor:
    """Fit the combiner's coefficients, float64 ``[4]``, to the trained coalitions' probabilities, without labels."""
    member_features = features(trained.masks).double()
    targets = trained.ordered(trained.outputs).double().softmax(-1)
    weights = _weights_in_loss(trained).to(targets.device)
    # With the first coefficient only, the combiner is the ensemble.
    ensemble_coefficients = torch.eye(4, dtype=torch.float64)[0].to(targets.device)
    coefficients = ensemble_coefficients.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [coefficients], max_iter=COMBINER_STEPS, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        cross_entropies = _cross_entropies(member_features @ coefficients, targets)
        squared_distance = (coefficients - ensemble_coefficients).square().sum()
        total = weights @ cross_entropies + COMBINER_PENALTY * squared_distance
        total.backward()
        return total

    with torch.inference_mode(False), torch.enable_grad():
        optimizer.step(loss)
    return coefficients.detach()


def _weights_in_loss(trained: TrainedOutputs) -> Tensor:
    """Return the weight of each trained coalition in the combiner's loss, float64 ``[T]`` with the sum 1."""
    num_trained, num_players = trained.masks.shape
    weights = torch.ones(num_trained, dtype=torch.float64)
    weights[trained.is_single.cpu()] = WEIGHT_OF_SINGLES / num_players
    return weights / weights.sum()


def _cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropies ``[T]`` over the samples of ``[T, V, ..., M]``."""
    log_probabilities = F.log_softmax(logits, dim=-1)
    cross_entropies = -(targets * log_probabilities).sum(-1)  # [T, V, ...]
    return cross_entropies.flatten(1).mean(1)


def with_kriged_residuals(trained: TrainedOutputs, prediction: Prediction) -> Prediction:
    """Return a prediction plus the interpolation of its residuals in the trained coalitions."""
    predicted_logits = center_logits(prediction(trained.masks))
    mix_residuals = mixer(center_logits(trained.ordered(trained.outputs)) - predicted_logits)

    def corrected_logits(masks: Tensor) -> Tensor:
        mixing_weights = interpolation_weights(masks, trained.masks, trained.weights)
        return center_logits(prediction(masks)) + mix_residuals(mixing_weights)

    return corrected_logits
