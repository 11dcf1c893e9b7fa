"""What is measured and reported of ShapleyFL's figures and tables (``tables/shapleyfl.yaml``)."""

from __future__ import annotations

from collections.abc import Sequence

import shapleyfl_estimators
import torch
from sklearn.metrics import roc_auc_score
from table_cells import Results
from table_runs import Cell, Measured, built, federated_loop, trained
from table_statistics import Table, against, against_best, gather, means, over_columns

#: Rows, in the page's order. The last two above AFedSV, and the last of all, are this project's own forms.
METHODS = (
    *("FedAvg", "FedProx", "FedSV", "S-FedAvg", "RFA", "FedSV, by the sum", "S-FedAvg, temperature 0.1"),
    *("AFedSV", "AFedSV+", "AFedSV+, cohorts of one size"),
)
OURS = ("AFedSV", "AFedSV+", "AFedSV+, cohorts of one size")
BETAS = (0.1, 0.3, 0.5, 0.7, 0.9)
CLINICS = ("FedAvg", "FedProx", "FedSV", "RFA", "AFedSV")


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
        parts += ["## Table 2: beta", "Test accuracy by beta, %, in brackets the paper's:", means(table, rows)]
        parts += ["Minus the best other beta:"]
        lines = [against_best(table, [row]).splitlines() for row in rows]
        parts += ["\n".join([*lines[0][:2], *(line[2] for line in lines)])]
    parts += shapleyfl_estimators.report(results)
    return "\n\n".join(parts)
