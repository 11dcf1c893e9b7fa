"""What class-specific Shapley values of two classes tell: on PneumoniaMNIST, five hospitals.

    python tools/two_classes.py

First the rank correlation with the retrained truth, in the benchmark's federation, whose hospitals differ in their
share of the ill; then what sets one apart that has 35 % of its labels exchanged, where all are alike otherwise. Of
updates, of weights, and CGSV beside them; three seeds. Needs pneumoniamnist.npz in $FLSV_DATA_ROOT.
"""

from __future__ import annotations

from dataclasses import replace

from flsv.benchmark import federation
from flsv.benchmark.registry import entry
from flsv.benchmark.run import run
from flsv.benchmark.scores import spearman
from flsv.benchmark.truth import truth_table

METRICS = ("cssv", "cssv_weights", "cgsv")
FLIPPED = 2


def main() -> None:
    entries = dict(entry(name) for name in METRICS)
    hospitals = federation("pneumonia_hospitals")
    truth = truth_table(hospitals).mean
    alike = {
        "partitioner": {"class_path": "flsv.data.IIDPartitioner", "init_args": {"num_clients": 5, "seed": 0}},
        "corruptions": [
            {"class_path": "flsv.data.ClosedSetLabelNoise", "init_args": {"rate": 0.35, "clients": [FLIPPED]}}
        ],
    }
    one_flipped = replace(hospitals, data={**hospitals.data, **alike})
    print("seed | metric | rank correlation | the flipped one's value | least of the others' | their largest")
    for seed in range(3):
        ranked, separated = run(hospitals, entries, seed).values, run(one_flipped, entries, seed).values
        for name in METRICS:
            values = separated[name].tolist()
            own = values.pop(FLIPPED)
            rank = spearman(ranked[name], truth)
            print(f"{seed} | {name} | {rank:+.2f} | {own:.4f} | {min(values):.4f} | {max(values):.4f}")


if __name__ == "__main__":
    main()
