"""pFedSV's tables I, II and IV and figures 7 to 10 (Wu et al., IEEE TMC 2024), on what is at hand.

    python tools/pfedsv_table.py [--root DATA] [--workers 2] [--out FILE.md] [--png docs/images/pfedsv_relevance.png]
    python tools/pfedsv_table.py --full --root DATA       the paper's own setting, for a GPU

Tables I and II: mean test accuracy over the clients' own test samples, for the models that they have trained in the
last round and for those that they then receive. Figure 7: who finds whom relevant, against who shares classes with
whom. Figures 8 to 10: what crossed. Table IV: noise on what the clients share, and the epsilon that it buys.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pfedsv_communication
import torch
from common import grid, spread
from matplotlib.figure import Figure
from pfedsv_federation import DEFAULT, METHODS, ROWS, Deployed, Job, K, Result, Setting, full, run
from torch import Tensor

from flsv.functional import discovery_bound, label_overlap, relevance_auroc
from flsv.metrics.plot import plot_contributions
from flsv.privacy import gaussian_epsilon

Results = dict[Job, Result]
NOISES = (0.003, 0.01, 1.0, 2.0)
CLIP = 1.0


def chosen(results: Results, setting: Setting, method: str, noise: float | None = None) -> dict[int, Result]:
    """The runs of one cell by seed."""
    return {j.seed: r for j, r in results.items() if (j.setting, j.method, j.noise) == (setting, method, noise)}


def accuracies(results: Results, setting: Setting, row: str) -> list[float]:
    method, models = ROWS[row]
    return [result.mean(models) for result in chosen(results, setting, method).values()]


# ---- tables I and II


def accuracy_table(results: Results, settings: Sequence[Setting], models: Deployed | None) -> str:
    """One of the two models of every method, or (None) the one that its authors deploy, the best in bold."""
    rows = [["", *(setting.name for setting in settings)]]
    names = list(ROWS) if models is None else list(METHODS)
    best = {
        s: max((statistics.mean(a) for r in names if (a := accuracies(results, s, r))), default=0) for s in settings
    }
    for name in names:
        cells = []
        for setting in settings:
            if models is None:
                values = accuracies(results, setting, name)
            else:
                values = [result.mean(models) for result in chosen(results, setting, name).values()]
            bold = models is None and values and statistics.mean(values) == best[setting]
            cells.append(f"**{spread(values)}**" if bold else spread(values))
        if any(cell != "-" for cell in cells):
            rows.append([f"{name} ({ROWS[name][1]})" if models is None else name, *cells])
    return grid(rows)


def seconds_table(results: Results, settings: Sequence[Setting]) -> str:
    rows = [["", *(f"{setting.partition}, {setting.name}" for setting in settings)]]
    for method in METHODS:
        cells = [spread((r.seconds for r in chosen(results, s, method).values()), 1) for s in settings]
        if any(cell != "-" for cell in cells):
            rows.append([method, *cells])
    return grid(rows)


# ---- figure 7


def auroc(result: Result, setting: Setting, rounds: int) -> float:
    """Of the scores after so many rounds (or the last), against who is relevant."""
    assert result.relevance is not None
    last = min(rounds, len(result.relevance)) - 1
    return float(relevance_auroc(result.relevance[last], setting.relevant(result.class_counts)))


def discovery(result: Result, setting: Setting, k: int = K) -> list[tuple[int | None, int]]:
    """For every client: the round in which it had looked at all who are relevant to it (None: never); the bound."""
    assert result.relevance is not None
    relevant = setting.relevant(result.class_counts)
    found = []
    for client, row in enumerate(relevant):
        known = (~result.relevance[:, client, row].isnan()).all(1)  # [T]
        first = int(known.int().argmax()) + 1 if bool(known.any()) else None
        found.append((first, discovery_bound(len(relevant), int(row.sum()), k)))
    return found


def relevance_table(results: Results, settings: Sequence[Setting]) -> str:
    head = [
        "",
        "AUROC after 10 rounds",
        "at the end",
        "relevant pairs with a score above 0",
        "others",
        "all found in round",
    ]
    rows = [[*head, "bound"]]
    for setting in settings:
        for method in METHODS:
            runs = [each for each in chosen(results, setting, method).values() if each.relevance is not None]
            if not runs:
                continue
            rows.append([f"{setting.partition}, {setting.name}, {method}"])
            rows[-1] += [spread(auroc(each, setting, t) for each in runs) for t in (10, setting.rounds)]
            above: list[list[float]] = [[], []]
            for each in runs:
                assert each.relevance is not None
                positive, relevant = each.relevance[-1] > 0, setting.relevant(each.class_counts)
                others = ~relevant.clone().fill_diagonal_(True)
                above[0].append(100 * float(positive[relevant].float().mean()))
                above[1].append(100 * float(positive[others].float().mean()))
            rows[-1] += [f"{statistics.mean(shares):.0f} %" for shares in above]
            found = [pair for each in runs for pair in discovery(each, setting)]
            late = [first for first, _ in found if first is not None]
            missing = sum(first is None for first, _ in found)
            rows[-1].append((str(max(late)) if late else "-") + (f" ({missing} clients never)" if missing else ""))
            rows[-1].append(str(max(bound for _, bound in found)))
    return grid(rows)


def figure_7(results: Results, setting: Setting) -> Figure | None:
    """The truth and the scores of one federation of each method that has some."""
    runs = {m: chosen(results, setting, m) for m in METHODS}
    shown = {m: r for m, by_seed in runs.items() for r in list(by_seed.values())[:1] if r.relevance is not None}
    if not shown:
        return None
    panels: list[tuple[str, Tensor]] = [
        ("shared label distribution", label_overlap(next(iter(shown.values())).class_counts))
    ]
    panels += [(method, result.relevance[-1]) for method, result in shown.items() if result.relevance is not None]
    figure = Figure(figsize=(5.2 * len(panels), 4.2), dpi=80, layout="constrained")
    for ax, (name, matrix) in zip(figure.subplots(1, len(panels)), panels):
        plot_contributions(matrix.float().fill_diagonal_(float("nan")), ax=ax, name=name, columns="client")
    return figure


# ---- table IV


def privacy_table(results: Results, settings: Sequence[Setting]) -> str:
    columns = [name for s in settings for name in (f"{s.name}: epsilon", "accuracy", "of the trained models")]
    rows = [["", "sigma", *columns]]
    for method in ("FedAvg", "pFedSV"):
        for noise in (None, *sorted({job.noise for job in results if job.noise is not None})):
            cells = []
            for setting in settings:
                runs = list(chosen(results, setting, method, noise).values())
                cells.append("∞" if not noise else f"{gaussian_epsilon(noise, setting.rounds):,.2f}")
                cells += [spread(each.mean(models) for each in runs) for models in ("received", "trained")]
            if any("±" in cell for cell in cells):
                rows.append([method, "0, not clipped" if noise is None else f"{noise:g}", *cells])
    return grid(rows)


# ---- checks


def check(name: str, met: bool, numbers: str) -> str:
    return f"- {name}: **{'met' if met else 'not met'}** ({numbers})"


def checks(results: Results, settings: Sequence[Setting]) -> str:
    lines = []
    for setting in settings:
        ours, title = accuracies(results, setting, "pFedSV"), f"{setting.partition}, {setting.name}"
        if not ours:
            continue
        mean = statistics.mean(ours)
        others = {
            row: statistics.mean(a) for row in ROWS if "pFedSV" not in row and (a := accuracies(results, setting, row))
        }
        if setting.partition == "pathological":
            for row in ("Separate", "FedAvg+FT"):
                if row in others:
                    numbers = f"{spread(ours)} against {spread(accuracies(results, setting, row))}"
                    lines.append(check(f"{title}: pFedSV above {row}", mean > others[row], numbers))
            runs = list(chosen(results, setting, "pFedSV").values())
            scores = [auroc(each, setting, 10) for each in runs]
            numbers = ", ".join(f"{score:.3f}" for score in scores)
            lines.append(check(f"{title}: relevance AUROC at least 0.95 after 10 rounds", min(scores) >= 0.95, numbers))
            found = [pair for each in runs for pair in discovery(each, setting)]
            within = sum(first is not None and first <= bound for first, bound in found)
            met, numbers = within == len(found), f"{within} of {len(found)} clients"
            lines.append(check(f"{title}: all relevant clients found within the paper's bound", met, numbers))
        better = {row: value for row, value in others.items() if value > mean}
        named = ", ".join(f"{row} {value:.2f}" for row, value in sorted(better.items(), key=lambda item: -item[1]))
        lines.append(f"- {title}: above pFedSV ({mean:.2f}): {named or 'none'}")
    return "\n".join(lines)


def report(results: Results, settings: Sequence[Setting]) -> str:
    """Everything, in Markdown."""
    parts = ["## Checks", checks(results, settings)]
    for number, partition in (("I", "pathological"), ("II", "dirichlet")):
        mine = [setting for setting in settings if setting.partition == partition]
        if not mine:
            continue
        parts += [f"## Table {number}: {partition}", "Mean test accuracy, %, of each method's own model:"]
        parts.append(accuracy_table(results, mine, None))
        for models in ("received", "trained"):
            parts += [f"The models {models} in the last round:", accuracy_table(results, mine, models)]
    parts += ["## Figure 7: relevance", relevance_table(results, settings)]
    runs = [
        each
        for s in settings
        if s.partition == "pathological" and s.cohort is None
        for each in chosen(results, s, "pFedSV").values()
    ]
    if runs:
        parts.append("## Figures 8 to 10: communication")
        parts.append(
            "Millions of parameters that a client sends and receives, with the downloads of the pathological runs:"
        )
        shortest = min(len(each.downloads) for each in runs)
        downloads = torch.cat([each.downloads[:shortest] for each in runs], dim=1).round()
        parts.append(pfedsv_communication.report(downloads, K))
    private = [s for s in settings if any(j.setting == s and j.noise is not None for j in results)]
    if private:
        parts += [f"## Table IV: privacy, delta = 1e-5, clipped at {CLIP:g}", privacy_table(results, private)]
    parts += ["## Seconds per run", seconds_table(results, settings)]
    shared = asdict(settings[0])
    varying = [key for key in shared if any(asdict(s)[key] != shared[key] for s in settings)]
    values = ", ".join(f"{key} {value}" for key, value in shared.items() if key not in varying)
    seeds = len({job.seed for job in results})
    parts.append(f"Setting: {values}; {seeds} seeds (0 to {seeds - 1}).")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=os.environ.get("FLSV_DATA_ROOT", "data"))
    parser.add_argument("--full", action="store_true", help="the paper's own setting, for a GPU")
    parser.add_argument("--seeds", type=int, help="default: 3, and 5 with --full")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sources", nargs="+", help="of these data sets only")
    parser.add_argument("--partitions", nargs="+", default=["pathological", "dirichlet"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="NAME")
    parser.add_argument("--noises", nargs="*", type=float, default=list(NOISES), help="of table IV; none: leave it out")
    parser.add_argument("--out", type=Path, help="write the report there, too")
    parser.add_argument("--png", type=Path, help="write figure 7 there")
    arguments = parser.parse_args()
    settings = [s for s in (full() if arguments.full else DEFAULT) if s.partition in arguments.partitions]
    settings = [s for s in settings if arguments.sources is None or s.source in arguments.sources]
    settings = [replace(s, rounds=arguments.rounds or s.rounds) for s in settings]
    seeds = range(arguments.seeds or (5 if arguments.full else 3))
    jobs = [Job(s, method, seed) for s in settings for method in arguments.methods for seed in seeds]
    jobs += [
        Job(s, method, seed, noise, CLIP)
        for s in settings
        if s.partition == "pathological" and s.cohort is None
        for method in ("FedAvg", "pFedSV")
        if method in arguments.methods
        for noise in arguments.noises
        for seed in seeds
    ]
    start = time.perf_counter()
    results: Results = {}
    with ProcessPoolExecutor(arguments.workers) as pool:
        for job, result in zip(jobs, pool.map(partial(run, root=arguments.root), jobs)):
            results[job] = result
            name = f"{job.setting.partition}, {job.setting.name}, {job.method}, seed {job.seed}, noise {job.noise}"
            accuracy = ", ".join(f"{models} {result.mean(models):.2f}" for models in ("received", "trained"))
            print(f"{len(results)}/{len(jobs)} {name}: {accuracy}, {result.seconds:.1f} s", flush=True)
    text = report(results, settings)
    text += f"\n\n{time.perf_counter() - start:.0f} s with {arguments.workers} workers, torch {torch.__version__}.\n"
    print(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)
    if arguments.png is not None and (figure := figure_7(results, settings[0])) is not None:
        arguments.png.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(arguments.png)


if __name__ == "__main__":
    main()
