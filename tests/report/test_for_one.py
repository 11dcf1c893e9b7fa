"""What one participant's page has, and what nobody can work out from it."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from made_runs import make_run

from flsv.csv_files import save_csv
from flsv.report import write_report
from flsv.report.run_table import CSV, Numbers, rows_of

ROUNDS, CLASSES = 4, 3
METRICS = ("cssv", "sv")


def drawn(seed: int, who: list[int], total: float) -> dict[int, float]:
    """A number for each of these clients, with this sum."""
    generator = random.Random(seed)
    numbers = [generator.uniform(0.2, 0.9) for _ in who]
    return {client: number + (total - sum(numbers)) / len(who) for client, number in zip(who, numbers)}


def a_run(folder: Path, clients: int, known: list[int], seed: int, total: float) -> tuple[Path, dict[int, float]]:
    """A run, with all that is reported of it. What the ``known`` clients have is always the same; what the others
    have hangs on the seed, but for the sums of their last values and of their samples.

    Returns:
        The folder, and the last values of the others.
    """
    others = [client for client in range(clients) if client not in known]
    random_ = random.Random(seed)
    names = tuple(str(i) for i in range(clients))
    make_run(folder, clients=clients, classes=CLASSES, rounds=ROUNDS, names=names)
    last = {client: 0.3123 + 0.0717 * client for client in known} | drawn(seed, others, total)
    samples = {client: 100 + client for client in known} | dict.fromkeys(others, 150)
    shift = random_.randint(1, 40)
    samples[others[0]] += shift
    samples[others[-1]] -= shift if len(others) > 1 else 0

    def own(client: int, *what: object) -> float:
        return random.Random(repr((client, *what, *([] if client in known else [seed])))).uniform(0.1, 1.0)

    file = CSV(folder / "contributions.csv", names)
    (folder / "contributions.csv").unlink()
    file.begin(0)
    everybody = range(clients)
    for r in range(ROUNDS):
        ends = [[last[i] - own(i, r, "low") for i in everybody], [last[i] + own(i, r, "high") for i in everybody]]
        of_class = [[own(client, r, j) for j in range(CLASSES)] for client in everybody]
        numbers = [Numbers("cssv", of_class, {str(j): str(j) for j in range(CLASSES)})]
        for metric in METRICS:
            values = [last[i] if r + 1 == ROUNDS else own(i, r, metric) for i in everybody]
            numbers.append(Numbers(metric, values, ends=ends if metric == "cssv" else None))
        for what in ("weight", "accuracy", "update_norm"):
            numbers.append(Numbers(what, [own(i, r, what) for i in everybody]))
        file.append(rows_of(r, numbers, names))
    record = json.loads((folder / "run.json").read_text())
    record["samples"] = [samples[i] for i in range(clients)]
    record["class_counts"] = [[int(1000 * own(i, "count", j)) for j in range(CLASSES)] for i in range(clients)]
    record["hashes"] = {str(i): f"{own(i, 'hash'):.16f}" for i in range(clients)}
    record["metrics"]["sv"] = {**record["metrics"]["cssv"], "class": "FederatedShapley", "per_class": False}
    record["logged"] = {"val_accuracy": 0.1 + sum(last.values())}
    (folder / "run.json").write_text(json.dumps(record))
    retrained = [
        (i, names[i], "accuracy", x, x - own(i, "a"), x + own(i, "b"), x / sum(last.values()), x, 0.5, "7 8", 2)
        for i, x in sorted(last.items())
    ]
    head = [
        "client",
        "client_name",
        "by",
        "value",
        "low",
        "high",
        "share",
        "kernel_shap",
        "majority",
        "seeds",
        "rounds",
    ]
    save_csv(folder / "retrained.csv", [head, *retrained])
    return folder, {client: last[client] for client in others}


def pages(folder: Path, readers: list[int]) -> list[str]:
    """What these participants have between them, when they put their pages together."""
    return [write_report(folder, client).read_text(encoding="utf-8") for client in readers]


@pytest.mark.slow
@pytest.mark.parametrize("clients", [3, 4, 5, 10])
@pytest.mark.parametrize("joined", ["one", "all but two"])
def test_pages_are_the_same_whatever_the_others_have(tmp_path: Path, clients: int, joined: str) -> None:
    """Others with other values, the same in sum: the same pages to the byte, so that nothing works them out."""
    readers = [clients - 1] if joined == "one" else list(range(2, clients))
    total = 0.5 * (clients - len(readers))
    first, second = (a_run(tmp_path / str(seed), clients, readers, seed, total) for seed in (1, 2))
    assert all(abs(first[1][i] - second[1][i]) > 0.01 for i in first[1])
    assert pages(first[0], readers) == pages(second[0], readers)


def test_from_five_on_a_mean_in_two_digits_is_told_once_and_at_the_end_of_the_run(tmp_path: Path) -> None:
    folder, _ = a_run(tmp_path, 5, [0], 1, 1.7654321)
    for text in pages(folder, [0]):
        assert "mean of all" in text
        assert "0.42" in text  # (0.3123 + 1.7654321) / 5 = 0.41554...
        assert "0.416" not in text
        assert "14\u00a0%" in text  # of the samples
        assert "2.18" in text  # what the model has logged
        assert "only if all but that one join in" in text
    record = json.loads((folder / "run.json").read_text())
    del record["ended"]
    (folder / "run.json").write_text(json.dumps(record))
    for text in pages(folder, [0]):
        assert "0.42 " not in text
        assert "has not come to its end" in text
        assert "2.18" not in re.sub(r"<(path|use|text|g) [^>]*>", "", text)  # nor where a chart's ink is
        assert "of all training samples" not in text
