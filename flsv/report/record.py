"""``run.json``: the record of a run, written when it begins.

``contributions.csv`` holds numbers; here are the names of clients and classes, the settings, what the metrics are, and
the hashes by which a second run can be told to be the same. A killed run has it too.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import lightning as L
import torch
from torchmetrics import Metric

from flsv.data import FederatedDataModule
from flsv.metrics import ContributionMetric
from flsv.metrics.guide import what_it_is
from flsv.participants.artifacts import client_folders
from flsv.report.names import VERSION


def record_of(
    trainer: L.Trainer,
    data: FederatedDataModule,
    metrics: Mapping[str, Metric],
    algorithm: Mapping[str, Any],
    settings: Mapping[str, Any],
    fingerprint: Mapping[str, Mapping[str, str]],
    first_round: int,
    version: str,
) -> dict[str, Any]:
    """What ``run.json`` says of a fit that begins.

    Args:
        trainer: of the fit.
        data: dealt out.
        metrics: of the loop, bound.
        algorithm: role (such as ``"aggregator"``) to the object that has it.
        settings: as the loggers are given them.
        fingerprint: what must be the same in a run that resumes this one, see ``flsv.server.fingerprint``.
        first_round: 0, or where a resumed run goes on.
        version: of flsv.
    """
    counts = data.known_class_counts
    return {
        "version": VERSION,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "first_round": first_round,
        "packages": {
            "flsv": version,
            "torch": str(torch.__version__),
            "lightning": L.__version__,
            "python": platform.python_version(),
        },
        "module": type(trainer.lightning_module).__name__,
        "algorithm": {role: type(made).__name__ for role, made in algorithm.items() if made is not None},
        "rounds": trainer.max_epochs,
        "clients": list(data.client_names),
        "folders": client_folders(data.client_names),
        "classes": None if data.no_classes is not None else _class_names(data),
        "samples": data.num_samples.tolist(),
        "class_counts": None if counts is None or data.no_classes is not None else counts.tolist(),
        "metrics": {name: _described(metric) for name, metric in metrics.items()},
        "settings": dict(settings),
        "hashes": fingerprint["samples"],
        "fingerprint": fingerprint["settings"],
    }


def ended(trainer: L.Trainer, rounds: int) -> dict[str, Any]:
    """What is added when the fit has come to its end: after how many rounds, and what the module has logged."""
    logged = {name: value.item() for name, value in trainer.callback_metrics.items() if value.numel() == 1}
    own = ("contribution/", "weight/", "client_accuracy/")
    return {
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rounds_done": rounds,
        "logged": {name: value for name, value in logged.items() if "/" not in name and not name.startswith(own)},
    }


def _class_names(data: FederatedDataModule) -> list[str]:
    return [str(name) for name in data.class_names or range(data.num_classes)]


def _described(metric: Metric) -> dict[str, Any]:
    columns = metric.columns() if isinstance(metric, ContributionMetric) else None
    return {
        "class": type(metric).__name__,
        "about": _plain_words(what_it_is(metric)),
        "guide": metric.guide().lines() if isinstance(metric, ContributionMetric) else {},
        "per_class": bool(getattr(metric, "per_class", False)) and columns is None,
        "columns": columns,
        "higher_is_better": metric.higher_is_better,
    }


def _plain_words(text: str) -> str:
    """Without markup.

    Example:
        >>> _plain_words("See :class:`~flsv.metrics.CGSV`, ``[n]``.")
        'See flsv.metrics.CGSV, [n].'
    """
    return re.sub(r":\w+:`~?([^`]*)`", r"\1", text).replace("``", "")
