"""Measures what a client gains by cheating: its share under every metric with and without it, in the same run."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flsv.aggregation import FedAvg
from flsv.benchmark.federation import Federation
from flsv.benchmark.registry import Entry, identity_of
from flsv.benchmark.run import run
from flsv.benchmark.scores import Results, Values, half_width, shares, spearman
from flsv.benchmark.truth import settings, truth_table
from flsv.errors import ConfigurationError
from flsv.filters import CopyFilter, NormCap, OutlierFilter, SampleCap
from flsv.server.identity import described


@dataclass(frozen=True)
class Cheat:
    """One way to cheat.

    Args:
        title: in words.
        apply: the federation in which a client cheats so, of the federation and the client.
        together: with whom, of the client and how many there are: who is paid for the cheat, too.
    """

    title: str
    apply: Callable[[Federation, int], Federation]
    together: Callable[[int, int], list[int]] = lambda client, clients: []


def _nobody(client: int, clients: int) -> list[int]:
    return []


def _next(client: int, clients: int) -> list[int]:
    return [(client + 1) % clients]


def _update(
    class_path: str, together: Callable[[int, int], list[int]] = _nobody, **arguments: Any
) -> Callable[[Federation, int], Federation]:
    """An attack on the client's updates, and on those of others together with it, after those that the federation
    has."""

    def applied(federation: Federation, client: int) -> Federation:
        they = [client, *together(client, len(federation.num_samples))]
        attack = {"class_path": class_path, "init_args": {**arguments, "clients": they}}
        return replace(federation, attacks=[*federation.attacks, attack])

    return applied


def _dealt(class_path: str, **arguments: Any) -> Callable[[Federation, int], Federation]:
    """Another partition of the samples."""

    def applied(federation: Federation, client: int) -> Federation:
        data = copy.deepcopy(dict(federation.data))
        dealt = data.get("partitioner") or {
            "class_path": f"flsv.data.{type(federation.datamodule().partitioner).__name__}"
        }
        inner = {"partitioner": dealt, "client": client, **arguments}
        data["partitioner"] = {"class_path": class_path, "init_args": inner}
        return replace(federation, data=data)

    return applied


def _with_next(class_path: str) -> Callable[[Federation, int], Federation]:
    """Another partition of the samples of a client and the next one."""

    def applied(federation: Federation, client: int) -> Federation:
        (partner,) = _next(client, len(federation.num_samples))
        return _dealt(class_path, partner=partner)(federation, client)

    return applied


CHEATS: dict[str, Cheat] = {
    "scaling": Cheat("sends three times its update", _update("flsv.attacks.Scaling", factor=3.0)),
    "alignment": Cheat(
        "turns its update half way to the server's last step", _update("flsv.attacks.Alignment", mix=0.5)
    ),
    "heads": Cheat(
        "turns its classifier head's rows to the server's last step", _update("flsv.attacks.HeadAlignment", mix=1.0)
    ),
    "echo": Cheat("sends the server's last step, and nothing of its own", _update("flsv.attacks.Alignment", mix=1.0)),
    "flip": Cheat(
        "sends, with the next client, the opposite of what all have learnt, short enough for nobody to look closer",
        _update("flsv.attacks.InnerProductManipulation", _next),
        _next,
    ),
    "noise": Cheat("sends noise as long as an update", _update("flsv.attacks.FreeRider", mode="noise")),
    "sybils": Cheat("comes as two clients, each with all its samples", _dealt("flsv.data.Sybils")),
    "split_sybils": Cheat("comes as two clients, each with half its samples", _dealt("flsv.data.Sybils", split=True)),
    "duplication": Cheat("has each of its samples three times", _dealt("flsv.data.Duplicated", times=3)),
    "reports": Cheat(
        "tells no loss, and that the others' model is of no use to it",
        _update("flsv.attacks.FalseReports", loss=0.0, score=0.0, gain=-1.0),
    ),
    "collusion": Cheat(
        "pools its samples with the next client, who does the same", _with_next("flsv.data.Colluding"), _next
    ),
    "framing": Cheat(
        "trains on the next client's samples instead of its own, to look like it", _with_next("flsv.data.Framing")
    ),
}
"""By the name that ``--attacks`` takes."""

_WATCH, _COPIES, _CAPS = OutlierFilter(), CopyFilter(), (NormCap(1.25), SampleCap(1.25))
SAFEGUARDS: dict[str, Mapping[str, Any]] = {
    "none": {},
    "copies": {"filters": [_WATCH, _COPIES]},
    "claims": {"filters": [_WATCH, *_CAPS]},
    "all": {"filters": [_WATCH, _COPIES, *_CAPS]},
    "uniform": {"aggregator": FedAvg(weighting="uniform")},
    "both": {"filters": [_WATCH, _COPIES], "aggregator": FedAvg(weighting="uniform")},
}
"""Arguments of :class:`flsv.FederatedLoop`, by the name that ``--safeguard`` takes."""
WATCHING: Mapping[str, Any] = {"filters": [_WATCH]}
"""What the loop watches for in every run."""

UTILITY, NOTICED = "*utility", "*noticed"
"""Rows of the results that are no metric's: the last model's utility, and in how many rounds each client was warned
of."""
HONEST = "honest"


@dataclass(frozen=True)
class Trial:
    """One client that cheats in one run, beside the same run in which it does not.

    Args:
        federation: where.
        seed: of both runs.
        client: who cheats.
        before: metric to its share when it does not, of what all clients together are paid; NaN where it has none. Of a
            cheat that takes two clients: both shares.
        after: when it does, all its identities together.
        cost: what the last global model loses, in the federation's utility.
        noticed: in how many rounds it, or an identity of its, was warned of.
        alarms: how many others were warned of in at least one round.
        utility: of the last global model of the run in which it does not cheat.
        rank: metric to the rank correlation of that run's values with the truth; empty where there is none.
        warned: how many were warned of in that run.
    """

    federation: str
    seed: int
    client: int
    before: Mapping[str, float]
    after: Mapping[str, float]
    cost: float
    noticed: int
    alarms: int
    utility: float = float("nan")
    rank: Mapping[str, float] = field(default_factory=dict)
    warned: int = 0


@dataclass(frozen=True)
class Gain:
    """What a cheat brings under a metric, over trials: in points of the payment, 0 to 100.

    Args:
        before: mean share of the honest client, %.
        after: of the cheating one.
        points: mean of the paired differences.
        interval: half the width of their 90 % interval, by Student's t; NaN of one trial.
        trials: how many.
    """

    before: float
    after: float
    points: float
    interval: float
    trials: int


def attackers(clients: int, seed: int, count: int) -> list[int]:
    """Which clients cheat, one after the other, in the runs of a seed: evenly among all, others with every seed.

    Example:
        >>> attackers(6, seed=0, count=2), attackers(6, seed=1, count=2)
        ([0, 3], [1, 4])
    """
    return sorted({(seed + place * clients // count) % clients for place in range(min(count, clients))})


def gain(trials: Sequence[Trial], metric: str, level: float = 0.9) -> Gain:
    """Over all trials in which the metric gave values with the cheating and without."""
    pairs = np.array([(t.before.get(metric, np.nan), t.after.get(metric, np.nan)) for t in trials]).reshape(-1, 2)
    pairs = 100 * pairs[np.isfinite(pairs).all(1)]
    if not len(pairs):
        nothing = float("nan")
        return Gain(nothing, nothing, nothing, nothing, 0)
    difference = pairs[:, 1] - pairs[:, 0]
    half = half_width(float(difference.std(ddof=min(1, len(pairs) - 1))), len(pairs), level)
    before, after = pairs.mean(0)
    return Gain(float(before), float(after), float(difference.mean()), half, len(pairs))


def stress(
    federations: Mapping[str, Federation],
    entries: Mapping[str, Entry],
    cheats: Sequence[str] = tuple(CHEATS),
    safeguards: Sequence[str] = ("none", "copies"),
    *,
    seeds: int = 2,
    first_seed: int = 0,
    attackers_each: int = 2,
    who: Sequence[int] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
    folder: Path | None = None,
    say: Callable[[str], Any] = print,
) -> dict[tuple[str, str], list[Trial]]:
    """Let clients cheat, one at a time, each beside the same run without cheating.

    Args:
        federations: by name.
        entries: metrics by name.
        cheats: names in :data:`flsv.benchmark.stress.CHEATS`.
        safeguards: names in :data:`flsv.benchmark.stress.SAFEGUARDS`. A guarded run is compared with the honest run
            under the same safeguard.
        seeds: runs of each federation.
        first_seed: of the first; the others have those after it.
        attackers_each: clients that cheat, one after the other, per seed.
        who: these clients cheat instead, with every seed.
        options: arguments of :class:`flsv.FederatedLoop` in every run; a safeguard's take the place of those.
        folder: where values are kept, in ``values.csv``; what is there of the same settings is not run again.
        say: is told of every fit.

    Returns:
        Cheat and safeguard to trials.

    Raises:
        ConfigurationError: an unknown cheat or safeguard; what an honest run raises. A cheat that a federation refuses
            is left out, and said.
    """
    for asked, known in ((cheats, CHEATS), (safeguards, SAFEGUARDS)):
        for name in asked:
            if name not in known:
                raise ConfigurationError(f"there is no {name!r}: expected one of {', '.join(known)}.")
    results = Results(folder, identity=identity_of(federations, entries))
    trials: dict[tuple[str, str], list[Trial]] = {(cheat, guard): [] for guard in safeguards for cheat in cheats}
    for name, federation in federations.items():
        clients, truth = len(federation.num_samples), _truth(federation)
        for seed in range(first_seed, first_seed + seeds):
            for guard in safeguards:
                given = {**WATCHING, **options, **SAFEGUARDS[guard]}
                honest = _values(results, federation, HONEST, guard, seed, entries, given, say)
                for client in who or attackers(clients, seed, attackers_each):
                    for cheat in cheats:
                        cheated = CHEATS[cheat].apply(federation, client)
                        what = f"{cheat} of {client}"
                        try:
                            found = _values(results, cheated, what, guard, seed, entries, given, say)
                        except ConfigurationError as why:  # of the cheat: the honest run has passed
                            say(f"{name}, {what}, is left out: {why}")
                            continue
                        they = [client, *CHEATS[cheat].together(client, clients)]
                        trial = _trial(name, seed, they, clients, entries, honest, found)
                        rank = {m: spearman(honest[m], truth) for m in entries if truth is not None and m in honest}
                        trials[cheat, guard].append(replace(trial, rank=rank))
        federation.release()
    return trials


def _truth(federation: Federation) -> Tensor | None:
    """Float64 ``[n]``; None where nobody has worked it out, as for federations of one's own."""
    try:
        return truth_table(federation).mean
    except ConfigurationError:
        return None


def _values(
    results: Results,
    federation: Federation,
    what: str,
    guard: str,
    seed: int,
    entries: Mapping[str, Entry],
    options: Mapping[str, Any],
    say: Callable[[str], Any],
) -> dict[str, Tensor]:
    """Metric to values ``[n]``, and beside them the utility and what was noticed."""
    name, told = federation.name, what if guard == "none" else f"{what}, {guard}"
    condition = f"{told} [{_hash(federation, options)}]"
    todo = {m: each for m, each in entries.items() if not results.known(name, condition, seed, m)}
    if todo or not results.known(name, condition, seed, UTILITY):
        found = run(federation, todo, seed, options=options)
        for metric, why in found.failed.items():
            raise ConfigurationError(f"{metric} fails in {name}, {told}: {why}")
        if not found.noticed:  # no metric needed a fit
            found = replace(run(federation, {}, seed, options=options), values=found.values, refused=found.refused)
        noticed = torch.stack(list(found.noticed.values())).sum(0).double()
        beside = {UTILITY: torch.tensor([found.utility]), NOTICED: noticed}
        known = results.known(name, condition, seed, UTILITY)
        extra = {} if known else beside
        passing = [m for m, each in todo.items() if each.own]
        results.add(name, condition, seed, Values({**found.values, **extra}, found.refused, {}, {}, found.fit), passing)
        say(f"{name}, {told}, seed {seed}: {found.fit:.1f} s of the processor")
    found_keys = [m for m in (*entries, UTILITY, NOTICED) if (name, condition, seed, m) in results.values]
    return {m: results.values[name, condition, seed, m] for m in found_keys}


def _hash(federation: Federation, options: Mapping[str, Any]) -> str:
    """Of all settings of a run but its seed and its metrics: a safeguard or a federation that was changed keeps its
    name, and its values are no longer those that were kept."""
    return hashlib.sha256(f"{settings(federation)} {described(dict(options))}".encode()).hexdigest()[:8]


def _trial(
    federation: str,
    seed: int,
    who: Sequence[int],
    clients: int,
    entries: Mapping[str, Entry],
    honest: Mapping[str, Tensor],
    cheated: Mapping[str, Tensor],
) -> Trial:
    def share(values: Mapping[str, Tensor]) -> dict[str, float]:
        found = {}
        for metric in entries:
            if metric in values:
                paid = shares(values[metric])
                found[metric] = float(paid[list(who)].sum() + paid[clients:].sum())
        return found

    noticed = cheated[NOTICED] > 0
    own = torch.zeros_like(noticed)
    own[list(who)], own[clients:] = True, True
    return Trial(
        federation,
        seed,
        who[0],
        share(honest),
        share(cheated),
        float(honest[UTILITY] - cheated[UTILITY]),
        int(cheated[NOTICED][own].max()),
        int((noticed & ~own).sum()),
        float(honest[UTILITY]),
        warned=int((honest[NOTICED] > 0).sum()),
    )
