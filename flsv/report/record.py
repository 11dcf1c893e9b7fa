"""``run.json``: the record of a run, written when it begins.

``contributions.csv`` holds numbers; here are the names of clients and classes, the settings, what the metrics are, and
the hashes by which a second run can be told to be the same. A killed run has it too.
"""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torchmetrics import Metric

from flsv._lightning.durable import replacing
from flsv.csv_files import LARGEST
from flsv.data import FederatedDataModule
from flsv.errors import ConfigurationError
from flsv.metrics import ContributionMetric
from flsv.metrics.base import what_it_is
from flsv.participants.artifacts import client_folders
from flsv.report.folder import RECORD

#: Of the layout of ``run.json``.
VERSION = 1


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
    """What ``run.json`` says of a fit that begins.

    Args:
        trainer: of the fit.
        data: dealt out.
        metrics: of the loop, bound.
        algorithm: role (such as ``"aggregator"``) to the object that has it.
        settings: as the loggers are given them.
        identity: what must be the same in a run that resumes this one: its ``"settings"`` and ``"samples"``.
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
        "samples": None if data.known_num_samples is None else data.known_num_samples.tolist(),
        "class_counts": None if counts is None or data.no_classes is not None else counts.tolist(),
        "validation": data.validation(),
        "metrics": {name: _described(metric) for name, metric in metrics.items()},
        "settings": dict(settings),
        "hashes": dict(identity["samples"]),
        "fingerprint": dict(identity["settings"]),
    }


def ended(trainer: L.Trainer, rounds: int) -> dict[str, Any]:
    """What is added when the fit has come to its end: after how many rounds, and what the module has logged."""
    logged = {name: value.item() for name, value in trainer.callback_metrics.items() if value.numel() == 1}
    return {
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rounds_done": rounds,
        "logged": {name: value for name, value in logged.items() if "/" not in name},
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


Is = Callable[[Any], bool]
#: Of whole numbers: what 64 bits hold.
_MOST = 2**63


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write ``run.json`` anew: whole, or as it was.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / RECORD) as file:
        file.write(json.dumps(_plain(record), indent=1, ensure_ascii=False, allow_nan=False).encode())


def read_record(path: Path) -> dict[str, Any]:
    """``run.json``; empty where there is none.

    Raises:
        ConfigurationError: it is none of this version's, or says what no run does.
    """
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_bytes().decode(), parse_constant=_no_number)
        json.dumps(record, ensure_ascii=False).encode()  # half a character can be told in JSON, and not be written
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read ({error}). {_AWAY}") from error
    if not isinstance(record, dict) or record.get("version") != VERSION:
        raise ConfigurationError(f"{path} was not written by this version of flsv. {_AWAY}")
    fault = fault_of(record)
    if fault:
        raise ConfigurationError(f"{path}: {fault}. {_AWAY}")
    return record


_AWAY = "Move it away to go on without it."


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def fault_of(record: Mapping[str, Any]) -> str | None:
    """What is wrong with a record, in words; None where it is as :func:`flsv.report.record.record_of` makes it.
    Entries that nobody here knows are let be.

    Example:
        >>> fault_of({"clients": ["Boston"], "folders": ["../x"], "metrics": {}})
        "folders is ['../x'], expected names of folders, one per client"
    """
    for name in ("clients", "folders", "metrics"):
        if name not in record:
            return f"there is no {name}, which every run has"
    number = len(record["clients"]) if isinstance(record["clients"], list) else 0
    classes = len(record["classes"]) if isinstance(record.get("classes"), list) else None
    for name, (fits, expected) in _entries(number, classes).items():
        if name in record and not fits(record[name]):
            return f"{name} is {repr(record[name])[:80]}, expected {expected}"
    return None


def _entries(clients: int, classes: int | None) -> dict[str, tuple[Is, str]]:
    def each(of: Is) -> Is:
        return lambda value: _list(of)(value) and len(value) == clients

    def counts(value: Any) -> bool:
        return _list(_whole)(value) and classes in (None, len(value))

    def client(value: Any) -> bool:
        return _whole(value) and value < clients

    def hashes(value: Any) -> bool:
        return _map(_text)(value) and value.keys() <= {"server", *map(str, range(clients))}

    def rounds_of(value: Any) -> bool:
        pairs = _map(lambda pair: _list(_whole)(pair) and len(pair) == 2 and 0 < pair[0] <= pair[1])(value)
        return pairs and value.keys() <= {*map(str, range(clients))}

    texts = _map(_text), "texts by name"
    return {
        "clients": (lambda value: each(_text)(value) and clients > 0, "the clients' names"),
        "folders": (each(_folder), "names of folders, one per client"),
        "metrics": (_map(_metric), "what metrics are, by name"),
        "started": (_text, "a time"),
        "ended": (_text, "a time"),
        "first_round": (_whole, "a round"),
        "rounds": (lambda value: value is None or value == -1 or _whole(value), "a number of rounds"),
        "rounds_done": (_whole, "a number of rounds"),
        "packages": texts,
        "module": (_text, "a class"),
        "algorithm": texts,
        "classes": (_or_none(_list(_text)), "names of classes"),
        "samples": (_or_none(each(_whole)), "a number of samples per client"),
        "class_counts": (_or_none(each(counts)), "a number of samples per client and class"),
        "settings": (_map(lambda value: True), "settings by name"),
        "hashes": (hashes, 'hashes by client, and by "server"'),
        "copies": (_list(_list(client)), f"groups of clients, 0 to {clients - 1}"),
        "named": (rounds_of, "two numbers of rounds by client, the first not above the second"),
        "payment": (_payment, "the terms of a payment"),
        "validation": (_or_none(_validation), "of what the validation set is, and its rows"),
        "paid": (_list(client), f"clients, 0 to {clients - 1}"),
        "paid_in": (_map(_paid_in), "performances by metric"),
        "undecided": (_map(_undecided), "evaluations by metric"),
        "not_known": (_text, "why it is not known whether the model has learned"),
        "logged": (_map(_or_none(_number)), "numbers by name"),
    }


def _metric(value: Any) -> bool:
    kinds: dict[str, Is] = {
        "class": _text,
        "about": _text,
        "guide": _map(_text),
        "per_class": lambda value: isinstance(value, bool),
        "columns": _or_none(_list(_text)),
    }
    return isinstance(value, dict) and all(fits(value[name]) for name, fits in kinds.items() if name in value)


def _paid_in(value: Any) -> bool:
    numbers = ("start", "end", "sum")
    return (
        isinstance(value, dict)
        and value.keys() == {"by", "told_apart", *numbers}
        and _text(value["by"])
        and isinstance(value["told_apart"], bool | None)
        and all(_or_none(_number)(value[name]) for name in numbers)
    )


def _undecided(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"evaluations", "needed"} and all(map(_whole, value.values()))


def _payment(value: Any) -> bool:
    kinds: dict[str, Is] = {
        "budget": lambda given: _number(given) and given > 0,
        "rule": lambda given: given in ("zero", "shift", "softmax", "refuse"),
        "by": _or_none(_text),
        "unit": lambda given: _number(given) and given > 0,
        "currency": _text,
        "repeated": _or_none(_text),
    }
    return isinstance(value, dict) and value.keys() == kinds.keys() and all(kinds[key](value[key]) for key in kinds)


def _validation(value: Any) -> bool:
    return isinstance(value, dict) and _text(value.get("of")) and _or_none(_whole)(value.get("rows"))


def _folder(value: Any) -> bool:
    """One folder below another: nothing that leads out of it."""
    return _text(value) and value not in ("", ".", "..") and not {"/", "\\", "\0"} & set(value)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _list(of: Is) -> Is:
    return lambda value: isinstance(value, list) and all(map(of, value))


def _map(of: Is) -> Is:
    return lambda value: isinstance(value, dict) and all(map(of, value.values()))


def _or_none(of: Is) -> Is:
    return lambda value: value is None or of(value)


def _plain(value: Any) -> Any:
    """As JSON can hold it: numbers that are not finite are null, objects their repr."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # a tensor's: torch is too heavy for whoever only reads
        return _plain(value.tolist())
    if isinstance(value, str) or value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return repr(value)
