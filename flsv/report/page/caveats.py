"""What a contribution metric does not say, for the participants who are measured by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from flsv.report.page.blocks import percent

#: By the metric's class.
CAVEATS: Mapping[str, Sequence[str]] = yaml.safe_load(
    (Path(__file__).parent / "templates" / "caveats.yaml").read_text(encoding="utf-8")
)
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
