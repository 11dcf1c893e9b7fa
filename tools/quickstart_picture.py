"""Draw the first picture of README and of the site from the numbers of the quickstart.

python tools/quickstart_picture.py                            from docs/results/quickstart.csv
python tools/quickstart_picture.py lightning_logs/version_0   from a run, whose numbers are written there first
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import pandas
import torch
from pandas import DataFrame
from torch import Tensor

from flsv.metrics.plot import plot_contributions
from flsv.results import open_run, preferred_basis

matplotlib.use("Agg")

ROOT = Path(__file__).parents[1]
NUMBERS = ROOT / "docs" / "results" / "quickstart.csv"
PICTURE = ROOT / "docs" / "images" / "quickstart_value.png"
COLUMNS = ["what", "client", "client_name", "number"]


def write_numbers(run_folder: Path) -> None:
    """Write the scores of the untrained and the final model, and the clients' values with their intervals."""
    basis = preferred_basis(open_run(run_folder))
    if basis is None:
        raise SystemExit(f"{run_folder} has no values.")
    rows = [
        ["accuracy at the start", None, None, basis.initial_score],
        ["accuracy at the end", None, None, basis.final_score],
    ]
    for client, estimate in basis.estimates.iterrows():
        for what in ("value", "low", "high"):
            rows.append([what, client, basis.client_names[client], estimate[what]])
    table = DataFrame(rows, columns=COLUMNS).astype({"client": "Int64"})
    table.to_csv(NUMBERS, index=False, float_format="%.10g")


def draw() -> str:
    """Draw the steps from the untrained model to the model of all. Return the picture's description."""
    table = pandas.read_csv(NUMBERS)
    numbers = table.pivot(index="client", columns="what", values="number").dropna(how="all", axis=1)
    numbers = numbers[numbers["value"].notna()].sort_index()
    score = table[table["client"].isna()].set_index("what")["number"]

    figure, _axis = plot_contributions(
        tensor_of(numbers["value"]),
        name="value",
        client_names=[str(int(client)) for client in numbers.index],
        unit="accuracy",
        intervals=(tensor_of(numbers["low"]), tensor_of(numbers["high"])),
        waterfall_from=float(score["accuracy at the start"]),
    )
    description = describe(table)
    # With a fixed resolution and without a version, equal numbers give an equal file.
    figure.savefig(PICTURE, metadata={"Software": None, "Description": description})
    return description


def describe(table: DataFrame) -> str:
    """Return the numbers in a picture as text, by which a test compares it with the table."""
    values = table[table["what"] == "value"].sort_values("client")["number"]
    score = table[table["client"].isna()].set_index("what")["number"]
    steps = " ".join(f"{value:+.4f}" for value in values)
    return f"steps from {score['accuracy at the start']:.4f}: {steps}"


def tensor_of(column: pandas.Series) -> Tensor:
    return torch.tensor(column.to_numpy("float64"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", type=Path, help="folder of a run of the quickstart")
    run_folder = parser.parse_args().run
    if run_folder is not None:
        write_numbers(run_folder)
    print(draw())
