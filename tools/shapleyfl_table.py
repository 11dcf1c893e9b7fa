"""ShapleyFL's figures 1 to 3 and tables 2 and 3 (Sun et al., KDD 2023), on what is at hand.

    python tools/shapleyfl_table.py [--out FILE.md]        Fashion-MNIST, beta, clinics; "estimators, Fashion-MNIST"
    python tools/shapleyfl_table.py --columns "CIFAR-10" "estimators, CIFAR-10"
    python tools/shapleyfl_table.py --all                  these, too
    python tools/shapleyfl_table.py --full [--short]

Figures 1 and 2: accuracy of the last global model in five scenarios, and the AUROC with which the surrogate federated
Shapley value (SSV) of AFedSV and AFedSV+ ranks the malicious clients below the honest ones. Figure 3 ("clinics"): six
clinics, two of which poison their updates. Table 2 ("beta"): how fast SSV follows. Table 3 ("estimators"):
``shapleyfl_estimators.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import shapleyfl_estimators
import table_presets
import torch
from sklearn.metrics import roc_auc_score
from table_cells import Results
from table_presets import Preset
from table_runs import Cell, Measured, built, federated_loop, trained
from table_statistics import Table, against, against_best, gather, means, over_columns

Overrides = Mapping[str, Any]

SIZE, NAME = "federation.sampler.init_args.expected_cohort", "data.partitioner"
SHARDS = {"num_clients": 20, "shards_per_client": 3, "seed": 0}
#: Scenario to its file and what fits it to 20 clients.
SCENARIOS: dict[str, tuple[str, Overrides]] = {
    "long tail": (
        "shapleyfl_long_tail",
        {
            f"{NAME}.init_args.imbalance_ratio": 20,
            f"{NAME}.init_args.partitioner": {"class_path": "flsv.data.ShardPartitioner", "init_args": SHARDS},
        },
    ),
    "open-set noise": ("shapleyfl_open_set", {}),
    "closed-set noise": ("shapleyfl_closed_set", {}),
    "data noise": ("shapleyfl_data_noise", {}),
    "gradient poisoning": ("shapleyfl_gradient_poisoning", {}),
}
#: Row to its file and what is not in it. The last two rows above AFedSV, and the last of all, are this project's own
#: forms.
METHODS: dict[str, tuple[str, Overrides]] = {
    "FedAvg": ("fedavg", {}),
    "FedProx": ("fedprox", {}),
    "FedSV": ("fedsv", {SIZE: 6}),
    "S-FedAvg": ("s_fedavg", {"federation.sampler.init_args.cohort_size": 6}),
    "RFA": ("rfa", {}),
    "FedSV, by the sum": (
        "fedsv",
        {
            SIZE: 6,
            "federation.aggregator": {
                "class_path": "flsv.aggregation.ShapleyWeighted",
                "init_args": {"metric": "fedsv", "normalize": True},
            },
        },
    ),
    "S-FedAvg, temperature 0.1": (
        "s_fedavg",
        {"federation.sampler.init_args.cohort_size": 6, "federation.sampler.init_args.temperature": 0.1},
    ),
    "AFedSV": ("afedsv", {SIZE: 6}),
    "AFedSV+": ("afedsv_plus", {SIZE: 6}),
    "AFedSV+, cohorts of one size": ("afedsv_systematic", {"federation.sampler.init_args.cohort_size": 6}),
}
OURS = ("AFedSV", "AFedSV+", "AFedSV+, cohorts of one size")
BETAS = (0.1, 0.3, 0.5, 0.7, 0.9)
BASES = {"Fashion-MNIST": ("tables/shapleyfl.yaml",)}
BASES["CIFAR-10"] = (*BASES["Fashion-MNIST"], "tables/shapleyfl_cifar10.yaml")
MEASURE = "shapleyfl_table:measured"
#: With every clinic in every round there is nothing to draw, so AFedSV+ and S-FedAvg are left out, as in the paper.
CLINICS: dict[str, tuple[str, Overrides]] = {
    name: (METHODS[name][0], {"federation.sampler": "flsv.sampling.FullParticipation"})
    for name in ("FedAvg", "FedProx", "FedSV", "RFA", "AFedSV")
}
TWO_OF_SIX = [{"class_path": "flsv.attacks.GradientPoisoning", "init_args": {"fraction": 0.34, "seed": 0}}]
NETWORKS = {"Fashion-MNIST": "shapley_fl_fmnist", "CIFAR-10": "shapley_fl_cifar"}
#: At the paper's size: 100 clients, and Shapley values by algorithm 3's kin, since a cohort may have 15 clients.
FULL = {SIZE: 10, "federation.sampler.init_args.cohort_size": 10}
ESTIMATED = {
    "fedsv": ("sv", "fedsv"),
    "s_fedavg": ("relevance",),
    **dict.fromkeys(("afedsv", "afedsv_plus", "afedsv_systematic"), ("ssv",)),
}


def comparison(source: str, full: bool, seeds: Sequence[int]) -> list[Cell]:
    """Figure 1 or 2: scenarios x methods."""
    cells = []
    for scenario, (scenario_file, fit) in SCENARIOS.items():
        for method, (file, overrides) in METHODS.items():
            files = (*BASES[source], *(("tables/shapleyfl_full.yaml",) if full else ()))
            files = (*files, f"scenarios/{scenario_file}.yaml", f"{file}.yaml")
            more = dict(overrides) if full else {**fit, **overrides}
            if full:
                more |= {name: value for name, value in FULL.items() if name in more}
                more["model.init_args.network"] = NETWORKS[source]
                more |= {
                    f"federation.metrics.{metric}.init_args.estimator": "surrogate"
                    for metric in ESTIMATED.get(file, ())
                }
            cells += [Cell(method, f"{source}, {scenario}", seed, files, more, MEASURE) for seed in seeds]
    return cells


def clinics(full: bool, seeds: Sequence[int]) -> list[Cell]:
    """Figure 3. The paper's data are not at hand, so the full preset has the same images, all of them."""
    files = ("tables/shapleyfl.yaml", "scenarios/shapfed_ham10000.yaml", "tables/shapleyfl_clinics.yaml")
    more: Overrides = {"federation.attacks": TWO_OF_SIX}
    more = {**more, "data.splits.max_samples": None, "trainer.max_epochs": 25} if full else more
    return [
        Cell(method, "clinics", seed, (*files, f"{file}.yaml"), {**overrides, **more}, MEASURE)
        for method, (file, overrides) in CLINICS.items()
        for seed in seeds
    ]


def betas(full: bool, seeds: Sequence[int]) -> list[Cell]:
    """Table 2: AFedSV+ under open-set noise."""
    base = [cell for cell in comparison("CIFAR-10" if full else "Fashion-MNIST", full, seeds) if cell.row == "AFedSV+"]
    return [
        Cell(
            f"beta {beta}",
            "beta",
            cell.seed,
            cell.files,
            {**cell.overrides, "federation.metrics.ssv.init_args.beta": beta},
            MEASURE,
        )
        for cell in base
        if cell.column.endswith("open-set noise")
        for beta in BETAS
    ]


def cells(full: bool, seeds: Sequence[int]) -> list[Cell]:
    mine = comparison("Fashion-MNIST", full, seeds) + betas(full, seeds) + clinics(full, seeds)
    return mine + shapleyfl_estimators.cells(full, seeds) + comparison("CIFAR-10", full, seeds)


def measured(cell: Cell, root: str) -> Measured:
    """Accuracies, cost, and the AUROC of SSV where some clients are malicious (else NaN)."""
    with built(cell, root) as cli:
        cost = trained(cli)
        loop = federated_loop(cli.trainer)
        scores = cli.trainer.test(cli.model, cli.datamodule, verbose=False)[0]
    clients = cli.datamodule.num_clients
    malicious = loop.uploads[0].chosen(clients) if loop.uploads else cli.datamodule.malicious
    auroc = float("nan")
    if "ssv" in loop.contributions and 0 < len(malicious) < clients:
        bad = torch.zeros(clients)
        bad[malicious] = 1
        auroc = float(roc_auc_score(bad, -loop.board.with_priors()["ssv"]))
    accuracies = {name: 100 * scores[f"test_{name}"] for name in ("accuracy", "balanced_accuracy")}
    return {**accuracies, **cost, "auroc": auroc}


# ---- the report


def begins(table: Table, *names: str) -> Table:
    return {column: rows for column, rows in table.items() if column.startswith(names)}


def report(results: Results, cells: Sequence[Cell]) -> str:
    runs = {key: result for key, result in results.items() if "accuracy" in result}
    accuracy, cpu = gather(runs, lambda r: r["accuracy"]), gather(runs, lambda r: r["cpu"])
    balanced, auroc = gather(runs, lambda r: r["balanced_accuracy"]), gather(runs, lambda r: r["auroc"])
    parts = []
    for title, source in (("Figure 1", "CIFAR-10"), ("Figure 2", "Fashion-MNIST")):
        if table := begins(accuracy, source):
            parts += [f"## {title}: {source}", "Test accuracy, %:", means(table, list(METHODS))]
            others = [name for name in METHODS if name not in OURS]
            parts += ["Minus the best other row, 95 % paired interval:", against_best(table, OURS, others)]
            parts += [against(table, OURS[-1], OURS[:-1])]
            if overall := over_columns(table, "mean of the scenarios"):
                parts += [means(overall, list(METHODS))]
                parts += [against(overall, row, [name for name in METHODS if name != row]) for row in OURS]
            parts += ["AUROC of SSV:", means(begins(auroc, source), OURS, 2, bold=False)]
            parts += ["CPU seconds of a run:", means(begins(cpu, source), list(METHODS), bold=False)]
    if table := begins(balanced, "clinics"):
        parts += ["## Figure 3: clinics", "Balanced accuracy, %:", means(table, list(CLINICS), 2)]
        parts += ["Minus the best other row:", against_best(table, ["AFedSV"])]
        parts += ["Accuracy, %:", means(begins(accuracy, "clinics"), list(CLINICS), 2)]
    if table := begins(accuracy, "beta"):
        rows = [f"beta {beta}" for beta in BETAS]
        parts += ["## Table 2: beta", means(table, rows), "Minus the best other beta:"]
        lines = [against_best(table, [row]).splitlines() for row in rows]
        parts += ["\n".join([*lines[0][:2], *(line[2] for line in lines)])]
    parts += shapleyfl_estimators.report(results)
    return "\n\n".join(parts)


PRESET = Preset(
    "shapleyfl",
    cells,
    report,
    short={"data.splits.max_samples": 3000, "federation.local_epochs": 1},
    asked=("CIFAR-10", "estimators, CIFAR-10"),
)

if __name__ == "__main__":
    table_presets.main(PRESET, __doc__)
