"""``run.json``: the record of a run, written when the run begins.

It holds the names of clients and classes, the settings, descriptions of the metrics, and hashes by which a second run
is recognized as the same experiment. The numbers are in ``contributions.csv``.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import nn
from torchmetrics import Metric

from flsv.data import FederatedDataModule
from flsv.metrics import ContributionMetric
from flsv.metrics.guide import what_it_is
from flsv.results.folder import CASE_VALUES, RECORD
from flsv.results.round_result import Event, RoundResult, RunResult, Sink
from flsv.utilities.atomic_files import replacing
from flsv.utilities.display import plain
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.formats import check_format

if TYPE_CHECKING:
    from flsv.functional.joint_shares import CaseValues

#: Version of the layout of ``run.json``.
RECORD_VERSION = 6
#: The entry that says, by metric, how intervals were computed that are not normal, see
#: :class:`flsv.core.IntervalKind`.
INTERVALS = "intervals"


class Record(Sink):
    """Sink that writes ``run.json`` when the fit begins, when an event has occurred, and when the fit ends."""

    def __init__(
        self,
        folder: Path,
        content: Mapping[str, Any],
        events: Callable[[], Sequence[Event]],
    ) -> None:
        self._folder = folder
        self._content = dict(content)
        self._events = events
        # The events in the file. None: the file has not been written.
        self._written_events: list[Event] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._write_news(events())

    def write_round(self, result: RoundResult) -> None:
        """Write new events and kinds of intervals at once, so that the file of a killed run has them, too."""
        self._write_news(result.events, result.interval_kinds)

    def finish(self, result: RunResult) -> None:
        content = dict(result.record)
        # Some events become known at the end of the run.
        content["events"] = [asdict(event) for event in content["events"]]
        if "paid_in" in content:
            content["paid_in"] = self._performances(content["paid_in"])
        write_record(self._folder, content)

    def _performances(self, performances: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the metrics' performances without values on each validation sample, which get a file."""
        shortened = {}
        values_by_metric = {}
        for metric, performance in performances.items():
            shortened[metric] = dict(performance)
            values_by_metric[metric] = shortened[metric].pop("case_values", None)
        write_case_values(self._folder, values_by_metric)
        return shortened

    def close(self, failed: bool = False) -> None:
        """Write the events, including those of a failed round."""
        if failed:
            with suppress(OSError):  # the run's own error is raised instead
                self._write_news(self._events())

    def _write_news(self, events: Sequence[Event], interval_kinds: Mapping[str, Any] = {}) -> None:
        known_kinds = self._content.get(INTERVALS, {})
        has_new_kinds = not interval_kinds.items() <= known_kinds.items()
        if has_new_kinds:
            self._content[INTERVALS] = {**known_kinds, **interval_kinds}
        if has_new_kinds or list(events) != self._written_events:
            self._written_events = list(events)
            self._content["events"] = [asdict(event) for event in events]
            write_record(self._folder, self._content)


def record_of(
    trainer: L.Trainer,
    data: FederatedDataModule,
    metrics: Mapping[str, Metric],
    algorithm: Mapping[str, Any],
    settings: Mapping[str, Any],
    identity: Mapping[str, Mapping[str, str]],
    first_round: int,
    version: str,
) -> dict[str, Any]:
    """Return the content of ``run.json`` for a fit that begins, without its events."""
    return {
        **record_head(trainer.lightning_module, algorithm, metrics, version),
        "first_round": first_round,
        "rounds": trainer.max_epochs,
        **_entries_of_data(data),
        "settings": dict(settings),
        "hashes": dict(identity["samples"]),
        "fingerprint": dict(identity["settings"]),
    }


def _entries_of_data(data: FederatedDataModule) -> dict[str, Any]:
    class_names = None
    class_counts = None
    has_classes = data.no_classes is None
    if has_classes:
        class_names = [str(name) for name in data.class_names or range(data.num_classes)]
        if data.known_class_counts is not None:
            class_counts = data.known_class_counts.tolist()
    return {
        "clients": list(data.client_names),
        "classes": class_names,
        "samples": data.num_samples.tolist(),
        "left_out": data.division.splits.num_left_out,
        "class_counts": class_counts,
        "validation": data.validation(),
        "dictionary": None if data.dictionary is None else data.dictionary.to_plain(),
    }


def record_head(
    module: nn.Module,
    algorithm: Mapping[str, Any],
    metrics: Mapping[str, Metric],
    version: str,
) -> dict[str, Any]:
    """Return the entries of ``run.json`` that depend on neither data nor Trainer."""
    strategies = {role: part for role, part in algorithm.items() if part is not None}
    return {
        "version": RECORD_VERSION,
        "started": now(),
        "packages": {
            "flsv": version,
            "torch": str(torch.__version__),
            "lightning": L.__version__,
            "python": platform.python_version(),
        },
        "module": type(module).__name__,
        "algorithm": {role: type(strategy).__name__ for role, strategy in strategies.items()},
        "metrics": {name: _describe(metric) for name, metric in metrics.items()},
    }


def model_settings(
    module: L.LightningModule,
    optimizer_options: Mapping[str, Any],
) -> dict[str, str]:
    """Return the module's hyperparameters, and its optimizers with their options, as texts by name."""
    settings = {"model": type(module).__name__}
    for name, value in module.hparams_initial.items():
        is_of_lightning = name.startswith("_")
        is_optimizer = name == "optimizer"  # below, as it was made
        if is_of_lightning or is_optimizer or value is None:
            continue
        settings[f"model.{name}"] = str(value)

    settings["optimizer"] = optimizer_options["kinds"]
    for options in optimizer_options["options"]:
        for name, text in options.items():
            if text not in ("None", "False", "0", "0.0"):
                settings[f"optimizer.{name}"] = text
    return settings


def now() -> str:
    """Return the present time in UTC as text, in ISO format."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _describe(metric: Metric) -> dict[str, Any]:
    columns = None
    guide = {}
    has_class_values = bool(getattr(metric, "per_class", False))
    if isinstance(metric, ContributionMetric):
        columns = metric.columns()
        guide = metric.guide()
    return {
        "class": type(metric).__name__,
        "about": plain(what_it_is(metric)),
        "guide": guide,
        "per_class": has_class_values and columns is None,
        "columns": columns,
        "higher_is_better": metric.higher_is_better,
        "to_pay_by": to_pay_by(metric),
        "evaluators": getattr(metric, "evaluators", None),
    }


def to_pay_by(metric: Metric) -> bool:
    """Return whether a metric's values may be the basis of a payment.

    Costs, values of pairs of clients, and metrics whose documentation advises against it are not.
    """
    if not isinstance(metric, ContributionMetric) or metric.columns():
        return False
    return metric.to_pay_by and metric.higher_is_better is not False


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write ``run.json`` into a folder. If this fails, the earlier file stays as it was."""
    text = json.dumps(_to_json_type(record), indent=1, ensure_ascii=False, allow_nan=False)
    with replacing(folder / RECORD) as file:
        file.write(text.encode())


def write_case_values(folder: Path, values_by_metric: Mapping[str, CaseValues | None]) -> None:
    """Write the values on each validation sample that are known into a folder, or no file without any."""
    states = {name: vars(values) for name, values in values_by_metric.items() if values is not None}
    if states:
        with replacing(folder / CASE_VALUES) as file:
            torch.save(states, file)


def read_record(path: Path) -> dict[str, Any]:
    """Read ``run.json`` and return its content, with the events as :class:`Event`."""
    try:
        record = json.loads(path.read_bytes())
        stored_format = record["version"]
    except FileNotFoundError:
        raise ConfigurationError(
            f"there is no {path}, which every run has: name the folder of a run."
        ) from None
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigurationError(
            f"{path} is not the record of a run ({error!r}). Train again, in a new folder."
        ) from error
    check_format(
        str(path),
        stored_format,
        expected=RECORD_VERSION,
        written_by=record.get("packages", {}).get("flsv"),
    )
    events = [Event(**event) for event in record["events"]]
    return {**record, "events": events}


def _to_json_type(value: Any) -> Any:
    """Convert a value to JSON types, numbers that are not finite to None."""
    if isinstance(value, Mapping):
        return {str(key): _to_json_type(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # a tensor or an array
        return _to_json_type(value.tolist())
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value
    if isinstance(value, Sequence):
        return [_to_json_type(item) for item in value]
    return repr(value)
