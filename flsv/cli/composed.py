"""What a configuration file takes out of those before it: the later one is used, and the terminal says so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

#: Mappings of parts, which come together; every other mapping is one part.
_SECTIONS = ("", "data", "federation", "federation.metrics", "model", "model.init_args", "trainer")


def overridden(files: Iterable[tuple[str, Any]], used: Mapping[str, Any]) -> list[str]:
    """What later files say otherwise than earlier ones, a line each.

    Args:
        files: name and content, in the order in which they are read.
        used: what has come of all of them. An object of another class keeps those arguments of the earlier one that it
            has and is not given.

    Example:
        >>> adam = {"federation": {"aggregator": {"class_path": "FedAdam", "init_args": {"lr": 0.1}}}}
        >>> mean = {"federation": {"aggregator": "flsv.aggregation.FedAvg"}}
        >>> overridden([("adam", adam), ("mean", mean)], {})
        ['federation.aggregator is FedAvg (mean) and no longer FedAdam(lr=0.1) (adam).']
    """
    lines: list[str] = []
    held: list[tuple[str, str, Any]] = []
    for name, content in files:
        for path, value in _parts(content):
            for entry in list(held):
                known, of, before = entry
                if known.startswith(f"{path}.") or (known == path and _differ(before, value)):
                    held.remove(entry)
                    kept = _kept(before, value, _at(used, path))
                    also = f", of which it keeps {kept}" if kept else ""
                    lines.append(f"{known} is {_short(value)} ({name}) and no longer {_short(before)} ({of}){also}.")
            held.append((path, name, value))
    return lines


def _parts(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if path in _SECTIONS and isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _parts(inner, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def _differ(before: Any, now: Any) -> bool:
    """Whether something that was said is said otherwise; arguments of one class come together."""
    (kind, theirs), (other, ours) = _object(before), _object(now)
    if not (theirs is None or ours is None):
        both = theirs.keys() & ours.keys()
        return bool(kind and other and kind != other) or any(_differ(theirs[name], ours[name]) for name in both)
    return bool(before != now)


def _object(value: Any) -> tuple[str, dict[str, Any] | None]:
    """Name of a class and the arguments that are said; None in their place for what is no object."""
    if isinstance(value, str) and value.replace(".", "_").isidentifier() and _last(value)[:1].isupper():
        return _last(value), {}
    if isinstance(value, Mapping) and value and value.keys() <= {"class_path", "init_args"}:
        return _last(value.get("class_path", "")), dict(value.get("init_args") or {})
    return "", None


def _kept(before: Any, now: Any, used: Any) -> str:
    """The arguments that an object of another class has of the one before it."""
    (kind, theirs), (other, ours), (last, all_of_it) = map(_object, (before, now, used))
    if not theirs or (not ours and ours != {}) or kind == other or other != last:
        return ""
    same = {n: v for n, v in theirs.items() if n not in ours and (all_of_it or {}).get(n, ...) == v}
    return ", ".join(f"{name}={_short(value)}" for name, value in same.items())


def _at(used: Any, path: str) -> Any:
    for name in path.split("."):
        used = used.get(name) if isinstance(used, Mapping) else None
    return used


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _short(value: Any) -> str:
    kind, arguments = _object(value)
    if arguments is None:
        return "null" if value is None else str(value)
    said = ", ".join(f"{name}={_short(inner)}" for name, inner in arguments.items())
    return f"{kind}({said})" if said else kind
