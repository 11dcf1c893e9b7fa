"""How far values from predicted outputs lie from those of retrained coalitions.

    python tools/studies/predicted.py train tuning held_out    or names; goes on where it was stopped
    python tools/studies/predicted.py table [--csv FILE]    the held-out federations, once the rule stands
    python tools/studies/predicted.py brackets [--csv FILE] what 90 % intervals hold, in both sets
    python tools/studies/predicted.py lies [NAME...]        what false own models bring, and which checks see it

`train` trains all 2^n coalitions of each federation (`predicted_federations.py`), and keeps all utilities, the outputs
of each client alone and of all but one, and the values in all ways. The truth for a seed is the mean of the exact
values of the *other* seeds.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import be_quiet, grid
from predicted_federations import Training, flat, numbers, play, samples_of, score
from predicted_sets import ALL, HELD_OUT, TUNING
from torch import Tensor

from benchmark.scores import share_error, shares, spearman
from flsv.functional import exact_shapley, few_coalitions, few_coalitions_shapley
from flsv.functional.intervals import (
    INTERVAL_LEVEL,
    interval_over_seeds,
    one_seed_stderr,
    t_quantile,
)
from flsv.functional.shapley.exact import shapley_of_table
from flsv.functional.shapley.predicted_outputs import PredictedGame

#: The rule: the ensemble's part in the mean of the two games, whatever is trained. On the federations for tuning a
#: smaller part changes the misallocation by less than the difference's interval, with each alone and with all but one.
#: A larger part is worse. So one rule serves both.
PART = 0.5
#: Standard error of a prediction, as a multiple of the two games' difference, root mean square over the clients.
FIT = 0.75
#: The least distance of an honest client's own model to the global one, as a part of its move.
NEAR = 0.1
#: Federations in which one seed of the exact game misallocates more, in percent, decide nothing.
DECIDABLE = 15.0
DESIGNS: Any = ("singles", "both")
Kept = dict[str, Any]
Values = dict[str, Tensor]


def exact(utilities: Tensor) -> Tensor:
    return shapley_of_table(utilities[:, None])[:, 0]


def predicted(name: str, kept: Kept, which: Any) -> tuple[Tensor, Tensor]:
    """The values of a design's two games: of interpolated outputs, and of the ensemble's."""
    of, at = ALL[name], numbers(ALL[name].n, which)
    outputs = torch.stack([kept["outputs"][each] for each in at])
    game = PredictedGame(
        few_coalitions(of.n, which),
        kept["utilities"][at],
        outputs,
        kept["sizes"],
        partial(score, of, samples_of(name)[1][1]),
        logits=of.score != "r2",
    )
    inner, ensemble = exact_shapley(game, of.n).values.T
    return inner, ensemble


def mixed(inner: Tensor, ensemble: Tensor, part: float = PART) -> Tensor:
    return (1 - part) * inner + part * ensemble


def estimates(name: str, kept: Kept) -> Values:
    """Values of one seed in all ways."""
    of, utilities = ALL[name], kept["utilities"]
    found = {
        "exact": exact(utilities),
        "truth": exact(kept["elsewhere"] if of.apart else utilities),
    }
    for which in DESIGNS:
        found[f"scores, {which}"] = few_coalitions_shapley(
            few_coalitions(of.n, which), utilities[numbers(of.n, which)]
        ).values
        found[f"interpolated, {which}"], found[f"ensemble, {which}"] = predicted(name, kept, which)
    return found


def train(folder: Path, names: Iterable[str]) -> str:
    for name in names:
        for seed in range({"digits_16": 4}.get(name, 6 if name in HELD_OUT else 5)):
            path = folder / name / f"{seed}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                kept = play(name, seed)
                began = time.process_time()
                kept["found"] = estimates(name, kept)
                torch.save(kept, path)
                seconds = f"{kept['seconds']:.0f} s, and {time.process_time() - began:.0f} s of arithmetic"
                print(f"{name}, seed {seed}: {seconds}", flush=True)
    return ""


def loaded(name: str, folder: Path) -> list[Kept]:
    return [torch.load(path) for path in sorted((folder / name).glob("?.pt"))]


def found_of(names: Iterable[str], folder: Path) -> dict[str, Values]:
    """Of each federation the values ``[seeds, n]`` in all ways, and the utilities of the untrained and of all."""
    found = {}
    for name in names:
        kept = loaded(name, folder)
        of = {key: torch.stack([each["found"][key] for each in kept]) for key in kept[0]["found"]}
        for which in DESIGNS:
            inner, ensemble = of[f"interpolated, {which}"], of[f"ensemble, {which}"]
            of[f"predicted, {which}"], of[f"apart, {which}"] = (
                mixed(inner, ensemble),
                inner - ensemble,
            )
        of["ends"] = torch.stack([each["utilities"][[0, -1]] for each in kept])
        of["counted samples"], of["equal pay"] = (
            kept[0]["sizes"].expand(len(kept), -1),
            torch.ones_like(of["exact"]),
        )
        found[name] = of
    return found


def against_others(
    measure: Callable[..., float], values: Tensor, truths: Tensor, seeds: int
) -> float:
    """Mean over sets of seeds of a measure of their mean values, against the mean of all other seeds."""
    found = []
    for some in map(list, combinations(range(len(values)), seeds)):
        others = [seed for seed in range(len(values)) if seed not in some]
        found.append(measure(values[some].mean(0), truths[others].mean(0)))
    return float(np.mean(found))


def wrong_by(values: Tensor, truths: Tensor, seeds: int = 1) -> float:
    """Percent misallocated."""
    return 100 * against_others(share_error, values, truths, seeds)


def interval(differences: Iterable[float]) -> str:
    """A mean over federations, with half its 90 % interval."""
    found = torch.tensor([*differences])
    return f"{found.mean():+.2f} ± {t_quantile(0.9, len(found) - 1) * found.std() / len(found) ** 0.5:.2f}"


#: Ways of one seed, and of three.
WAYS = {
    "equal pay": ("equal pay", 1),
    "counted samples": ("counted samples", 1),
    "exact": ("exact", 1),
    "alone, scores": ("scores, singles", 1),
    "alone and all but one, scores": ("scores, both", 1),
    "alone, ensemble": ("ensemble, singles", 1),
    "**alone, predicted**": ("predicted, singles", 1),
    "**alone and all but one, predicted**": ("predicted, both", 1),
    "exact, 3 seeds": ("exact", 3),
    "alone, predicted, 3 seeds": ("predicted, singles", 3),
    "alone and all but one, predicted, 3 seeds": ("predicted, both", 3),
}


def table(folder: Path, path: Path | None) -> str:
    """Percent misallocated in the held-out federations, and what it exceeds others by; rank correlations."""
    found, lines = found_of(HELD_OUT, folder), list[list[Any]]()
    wrong, ranks = dict[str, list[float]](), dict[str, list[float]]()
    for name, of in found.items():
        gain = (of["ends"][:, 1] - of["ends"][:, 0]).mean()
        for way, (key, seeds) in WAYS.items():
            each = (
                wrong_by(of[key], of["truth"], seeds),
                against_others(spearman, of[key], of["truth"], seeds),
            )
            wrong.setdefault(way, []).append(each[0])
            ranks.setdefault(way, []).append(each[1])
            lines.append(
                [
                    name,
                    ALL[name].n,
                    f"{gain:.3f}",
                    way.strip("*"),
                    f"{each[0]:.2f}",
                    f"{each[1]:.3f}",
                ]
            )
    if path:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(
                [["federation", "clients", "gain", "way", "misallocated_percent", "rank"], *lines]
            )
    sets = {
        "all": [*range(len(found))],
        "decidable": [
            place for place, percent in enumerate(wrong["exact"]) if percent <= DECIDABLE
        ],
        "10 clients and more": [place for place, name in enumerate(found) if ALL[name].n >= 10],
    }
    rows = [["way", *(f"{title}: {len(some)}" for title, some in sets.items())]]
    rows[0] += ["all, over exact", "most", "rank"]
    for way, (_, seeds) in WAYS.items():
        over = np.subtract(wrong[way], wrong["exact" if seeds == 1 else "exact, 3 seeds"])
        means = [f"{np.mean([wrong[way][place] for place in some]):.2f}" for some in sets.values()]
        rows.append(
            [way, *means, interval(over), f"{over.max():+.1f}", f"{np.mean(ranks[way]):.2f}"]
        )
    return grid(rows)


def half_width(values: Tensor, apart: Tensor, untrained: Tensor) -> Tensor:
    """Compute half the width of the interval around the mean of each seed's own values.

    Args:
        values: ``[seeds, n]``.
        apart: ``[seeds, n]``, the values of the interpolated game minus those of the ensemble's; 0 of exact games.
        untrained: utilities of untrained models.
    """
    fit = FIT * apart.mean(0).square().mean().sqrt().expand(values.shape[1])
    if len(values) == 1:
        return t_quantile(INTERVAL_LEVEL) * one_seed_stderr(values[0], fit, untrained)
    return interval_over_seeds(values, fit)


def brackets(folder: Path, path: Path | None) -> str:
    """The part of the others' values that intervals hold, widened by the error of the others' mean."""
    ways = [("exact", 1, ""), ("exact", 3, ""), ("exact", 3, "spread alone")]
    ways += [(f"predicted, {which}", *each) for which in DESIGNS for each in [(1, ""), (3, "")]]
    rows = [
        [
            "federations",
            "way",
            "seeds",
            "interval",
            "held",
            "least held",
            "half width, % of what is paid",
        ]
    ]
    for title, names in {"tuning": TUNING, "held out": HELD_OUT}.items():
        found = found_of(names, folder)
        for way, seeds, kind in ways:
            held, width = dict[str, float](), list[float]()
            for name, of in found.items():
                values, inside, wide = of[way], list[Tensor](), list[float]()
                apart = (
                    torch.zeros_like(values)
                    if way == "exact"
                    else of[way.replace("predicted", "apart")]
                )
                for some in map(list, combinations(range(len(values)), seeds)):
                    if kind == "spread alone":
                        half = t_quantile(0.9, seeds - 1) * values[some].std(0) / seeds**0.5
                    else:
                        half = half_width(values[some], apart[some], of["ends"][:, 0])
                    rest = of["truth"][[seed for seed in range(len(values)) if seed not in some]]
                    error = t_quantile(0.9) ** 2 * of["truth"].var(0).mean() / len(rest)
                    off = (values[some].mean(0) - rest.mean(0)).abs()
                    inside.append((off <= (half.square() + error).sqrt()).double())
                    wide.append(100 * float(half.mean() / values[some].mean(0).clamp_min(0).sum()))
                held[name] = float(torch.cat(inside).mean())
                width.append(float(np.mean(wide)))
            least = min(held, key=held.__getitem__)
            cells = [
                f"{np.mean([*held.values()]):.2f}",
                f"{held[least]:.2f}, {least}",
                f"{np.mean(width):.1f}",
            ]
            rows.append([f"{title}: {len(found)}", way, str(seeds), kind or "the rule", *cells])
    if path:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    return grid(rows)


class Honest:
    """One seed of a federation, in which a client may send a false own model."""

    def __init__(self, name: str, seed: int, kept: Kept) -> None:
        self.name, self.of, self.kept, self.training = name, ALL[name], kept, Training(name, seed)
        self.start, self.everybody = kept["models"][0], kept["models"][2**self.of.n - 1]
        self.own = torch.stack([kept["models"][1 << client] for client in range(self.of.n)])
        self.shares = self.paid(self.kept)

    def paid(self, kept: Kept) -> Tensor:
        """Shares of the payment by predictions from each design, and with all coalitions trained."""
        ways = [mixed(*predicted(self.name, kept, which)) for which in DESIGNS]
        return torch.stack([shares(way) for way in (*ways, exact(kept["utilities"]))])

    def gain(self, client: int, outputs: Tensor) -> Tensor:
        """What a client gains by other outputs of its own model, in points of the payment."""
        at, utilities = 1 << client, self.kept["utilities"].clone()
        utilities[at] = score(self.of, self.training.validation[1], outputs[None])[0]
        told = {
            **self.kept,
            "outputs": {**self.kept["outputs"], at: outputs},
            "utilities": utilities,
        }
        return 100 * (self.paid(told) - self.shares)[:, client]

    def outputs(self, model: Tensor) -> Tensor:
        parts = zip(
            self.training.start.items(),
            model.split([v.numel() for v in self.training.start.values()]),
        )
        p = {k: part.view(1, *v.shape) for (k, v), part in parts}
        return self.training.outputs(p, self.training.validation[0])[0]

    def elsewhere(self, client: int, rounds: int, samples: Any) -> Tensor:
        """A model that a client trains alone."""
        p = {k: v[None] for k, v in self.training.start.items()}
        for round_index in range(rounds):
            p = self.training.local(p, round_index, client, samples)
        return flat(p)[0]

    def alarms(self, client: int, model: Tensor, first: Tensor) -> list[bool]:
        """Whether each check raises an alarm: the first round's model, the distance, the direction."""
        moves, sums, update = self.own - self.start, self.kept["total"], self.kept["first"][client]
        moves[client] = model - self.start
        cosines = F.cosine_similarity((moves - moves.mean(0))[client], sums - sums.mean(0), dim=1)
        far = (model - self.everybody).norm() / (model - self.start).norm()
        differs = (first - self.start - update).norm() > 1e-3 * update.norm()
        return [bool(differs), bool(far < NEAR), int(cosines.argmax()) != client]

    def lies(self, client: int) -> dict[str, tuple[Tensor, Tensor]]:
        """False own models, after the last round and after the first."""
        part, own = (
            self.kept["sizes"].float() / self.kept["sizes"].sum(),
            self.elsewhere(client, 1, None),
        )
        first, other = self.start + part @ self.kept["first"], (client + 1) % self.of.n
        others = self.training.others
        return {
            "its own, honestly": (self.own[client], own),
            "the global model": (self.everybody, first),
            "half the global model": ((self.everybody + self.own[client]) / 2, (first + own) / 2),
            "the next client's": (self.own[other], self.elsewhere(other, 1, None)),
            "one trained on other samples like the validation's": (
                self.elsewhere(client, self.of.rounds, others),
                self.elsewhere(client, 1, others),
            ),
        }


def lies(folder: Path, names: Iterable[str]) -> str:
    """What a client gains by a false own model, and how often checks raise an alarm."""
    gains, alarms = dict[str, list[Tensor]](), dict[str, list[list[bool]]]()
    for name in names:
        if ALL[name].n > 7 or ALL[name].cohort or ALL[name].model == "lora":
            continue
        for seed, kept in enumerate(loaded(name, folder)[:2]):
            run = Honest(name, seed, kept)
            for client in range(run.of.n):
                for lie, (model, first) in run.lies(client).items():
                    gains.setdefault(lie, []).append(run.gain(client, run.outputs(model)))
                    alarms.setdefault(lie, []).append(run.alarms(client, model, first))
                if run.of.score != "r2":
                    louder = run.gain(client, 10 * kept["outputs"][1 << client])
                    gains.setdefault("its own, logits times ten", []).append(louder)
    rows = [
        ["a client sends as its own model", "of", "alone", "alone and all but one", "all trained"]
    ]
    rows[0] += ["round 1", "distance", "direction", "distance or direction"]
    for lie, each in gains.items():
        points = torch.stack(each)
        cells = [
            f"{mean:+.1f}, up to {most:+.0f}"
            for mean, most in zip(points.mean(0), points.max(0).values)
        ]
        raised = torch.tensor(alarms.get(lie, [[False] * 3])).double()
        parts = [*raised.mean(0), raised[:, 1:].any(1).double().mean()]
        rows.append(
            [
                lie,
                str(len(each)),
                *cells,
                *(f"{100 * part:.0f} %" if lie in alarms else "" for part in parts),
            ]
        )
    return grid(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["train", "table", "brackets", "lies"])
    parser.add_argument("names", nargs="*", help="federations, tuning, held_out")
    parser.add_argument("--folder", type=Path, default=Path("runs/predicted"))
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    be_quiet()
    sets = {"tuning": [*TUNING], "held_out": [*HELD_OUT]}
    names: list[str] = []
    for name_or_set in options.names:
        names += sets.get(name_or_set, [name_or_set])
    commands: dict[str, Callable[[], str]] = {
        "train": lambda: train(options.folder, names),
        "table": lambda: table(options.folder, options.csv),
        "brackets": lambda: brackets(options.folder, options.csv),
        "lies": lambda: lies(options.folder, names or HELD_OUT),
    }
    print(commands[options.what]())


if __name__ == "__main__":
    main()
