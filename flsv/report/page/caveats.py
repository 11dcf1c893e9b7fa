"""What a contribution metric does not say, for the participants who are measured by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flsv.report.page.blocks import percent

_GAME = (
    "Contributions are relative to the server's validation set and to who else takes part: another set, or other "
    "participants, give other values."
)
_SHARED_OUT = "It shares out what a model of all is worth; it does not say what a client would have come to alone."
_COPIES = "Two clients with the same data share what one of them would be worth: copying data changes others' values."

#: By the metric's class.
CAVEATS: Mapping[str, tuple[str, ...]] = {
    "ClassSpecificShapley": (
        "It compares the direction of a client's update of the last layer with that of all, class by class. It does "
        "not measure what the model gains by the client, and who agrees with the majority has high values.",
        "A class that a client does not have has a value all the same, of little meaning.",
    ),
    "CoalitionValue": (
        _GAME,
        "Which value of a coalition game it is, and how those of the rounds become one, was chosen for this run.",
        _COPIES,
    ),
    "ContributionEstimation": (
        "It says how different a client is from the others, not how useful: noise, wrong labels and updates of nothing "
        "are different, too, and have high values.",
        "Values are shares: one client's value changes when another's does. Every client judges on its own validation "
        "samples, which nobody else can check.",
    ),
    "CosineGradientShapley": (
        "It compares the direction of a client's update with that of all. It does not measure what the model gains by "
        "the client, and who agrees with the majority has high values.",
        "Values are normalised over the clients: one client's value changes when another's does.",
    ),
    "EverybodyElse": (
        "It rests on the reports of the others, on their own validation samples, which nobody else can check.",
        "Who does nothing shares in what the others gain from each other: values lie close together. A client whose "
        "data are unlike the others' can have a high one because they are rare, or because they are wrong.",
        "Values are summed over the rounds in which a client took part: who was drawn more often can have more.",
    ),
    "FederatedShapley": (_GAME, _SHARED_OUT, _COPIES),
    "PartialFederatedShapley": (_GAME, _SHARED_OUT, _COPIES),
    "SurrogateFederatedShapley": (_GAME, "It is an approximation of the federated Shapley value.", _COPIES),
    "CumulativeShapley": (
        _GAME,
        "Values are summed over the rounds in which a client took part: who was drawn more often can have more.",
        _COPIES,
    ),
    "DecayedShapley": (_GAME, "Earlier rounds count more than later ones, by the decay that was set.", _COPIES),
    "LowerBoundShapley": (
        _GAME,
        "It is what a client is worth a round at least, not what it is worth: few rounds, and values that swing, lower "
        "it.",
        _COPIES,
    ),
    "OneRoundShapley": (_GAME, "It is one game at the end of the run, on sums of updates: models that nobody trained."),
    "GradientAgreement": (
        "One half compares the direction of a client's update with that of all, the other says by how much its updates "
        "lower the server's validation loss, to first order: another validation set gives other values.",
        "Both halves grow with the client's number of samples, as the client itself states it.",
        "Values are shares: one client's value changes when another's does.",
    ),
    "GradientAgreementGame": (
        _GAME,
        "It blends games of the rounds with slopes of the validation loss and directions of updates: a value does not "
        "say how much of it is of which.",
        "What of it is of slopes and directions grows with the client's number of samples, as the client itself states "
        "it.",
        "Values are shares: one client's value changes when another's does.",
    ),
    "GradientShapley": (
        _GAME,
        "It is exact for an expansion of the loss of first or second order, which holds for small updates.",
    ),
    "InRunShapley": (
        _GAME,
        "It is exact for an expansion of the loss of first or second order, which holds for small updates.",
        "Which classes a value comes from is the client's own report. Values are summed over the rounds in which a "
        "client took part: who was drawn more often can have more.",
    ),
    "LeaveOneOut": (
        _GAME,
        "It is what is lost without the client alone: of two clients with the same data neither is missed. It is no "
        "Shapley value and does not sum to what all have gained.",
    ),
    "WassersteinContribution": (
        "It is a distance of data, not of models: it says how alike a client's data are to the target's, and nothing "
        "of what training makes of them.",
        "Shares sum to 1: one client's share changes when another's distance does.",
    ),
    "CalibratedOTGradient": (
        "It is a share of samples that look suspicious. A rare but right sample looks suspicious, too, and a flag is a "
        "reason to look, not a proof.",
    ),
    "DomainRelevance": ("It says how useful clients' models are to each other, not what they are worth to all.",),
    "CommunicationCost": ("It counts what was sent, and says nothing of its worth.",),
    "PrivacyLoss": ("It is a bound on what updates reveal, the lower the better, and no contribution.",),
    "MeanTestAccuracy": ("It is measured on each client's own samples: clients with easy data have high values.",),
}
NO_ERROR = (
    "The values come without standard errors: differences between clients that are small beside those between rounds, "
    "or between two seeds, mean little."
)
AT_CHANCE = (
    "By {} on the validation set the model is not told apart from one that always gives the same answer: it cannot be "
    "said to have learned, and who contributed what to it is chance. Nothing should be paid by these values."
)
NOT_KNOWN = "Whether the model has learned anything is not known"
#: Of the validation set in one class, from which on accuracy says little of who taught the model what.
_MOSTLY = 0.7
_ONE_CLASS = (
    "{} of the validation set is of one class: an answer that is always the same has most of the accuracy that these "
    "values share out, and a client whose data teach nothing is paid nearly like the others. Retrain by --metric "
    "balanced_accuracy or negative_loss."
)
_OTHER_SHAPE = (
    "KernelSHAP of the same trainings is outside of the interval of {}: there the shape that the fit takes the game "
    "for decides. Train more coalitions (--trainings all) before paying by it."
)
ONE_RUN = (
    "This is one run with one seed. Before anything of worth is shared out by it, repeat it with other seeds and see "
    "whether the order of the clients stays."
)


def at_chance(record: Mapping[str, Any]) -> list[str]:
    """By what the model is not told apart from a constant answer, each once."""
    return list({told["by"]: None for told in record.get("paid_in", {}).values() if told["told_apart"] is False})


def retrained_caveats(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Caveats of retraining-based values.

    Args:
        rows: of ``retrained.csv``.
        names: of the same clients.
    """
    outside = [row["kernel_shap"] < row["low"] or row["kernel_shap"] > row["high"] for row in rows]
    others = [name for name, so in zip(names, outside) if so]
    found = [_OTHER_SHAPE.format(", ".join(others))] if others else []
    majority = rows[0]["majority"]
    return [*found, _ONE_CLASS.format(percent(majority))] if majority >= _MOSTLY else found


def caveats(metric: Mapping[str, Any], errors: bool) -> list[str]:
    """Caveats of a run's values.

    Args:
        metric: as ``run.json`` describes it.
        errors: whether there are standard errors or intervals.
    """
    found = list(CAVEATS.get(str(metric.get("class")), ()))
    return found if errors else [*found, NO_ERROR]
