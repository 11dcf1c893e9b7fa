"""What one participant's page has, and what nobody can work out from it."""

import json
import random
from pathlib import Path

import pytest

from flsv.report import Budget, write_report
from flsv.results.run_table import CSV, Numbers, round_rows
from flsv.results.text import NONE
from flsv.utilities.csv_files import save_csv
from helpers.pages import text_of
from helpers.runs import NAMES, at_fault, copying, made_value, make_game, make_run, retold

ROUNDS, CLASSES = 4, 3
METRICS = ("cssv", "sv")
RETRAINED = "client client_name by value low high share majority seeds rounds"


def drawn(seed: int, who: list[int], total: float) -> dict[int, float]:
    """A number for each of these clients, with this sum."""
    generator = random.Random(seed)
    numbers = [generator.uniform(0.2, 0.9) for _ in who]
    return {
        client: number + (total - sum(numbers)) / len(who) for client, number in zip(who, numbers)
    }


def a_run(
    folder: Path, clients: int, known: list[int], seed: int, total: float
) -> dict[int, float]:
    """A run, with all that is reported of it. What the ``known`` clients have is always the same; what the others
    have and are called hangs on the seed, but for the sums of their last values and of their samples.

    Returns:
        The last values of the others.
    """
    others = [client for client in range(clients) if client not in known]
    random_ = random.Random(seed)
    names = tuple(f"site {i}" if i in known else f"{seed} has {i}" for i in range(clients))
    make_run(folder, clients=clients, classes=CLASSES, rounds=ROUNDS, names=names)
    last = {client: 0.3123 + 0.0717 * client for client in known} | drawn(seed, others, total)
    samples = {client: 100 + client for client in known} | dict.fromkeys(others, 150)
    shift = random_.randint(1, 40)
    samples[others[0]] += shift
    samples[others[-1]] -= shift if len(others) > 1 else 0

    def own(client: int, *what: object) -> float:
        return random.Random(repr((client, *what, *([] if client in known else [seed])))).uniform(
            0.1, 1.0
        )

    file = CSV(folder / "contributions.csv", names)
    (folder / "contributions.csv").unlink()
    file.begin(0)
    everybody = range(clients)
    for r in range(ROUNDS):
        ends = [
            [last[i] - own(i, r, "low") for i in everybody],
            [last[i] + own(i, r, "high") for i in everybody],
        ]
        of_class = [[own(client, r, j) for j in range(CLASSES)] for client in everybody]
        numbers = [Numbers("cssv", of_class, {str(j): str(j) for j in range(CLASSES)})]
        for metric in METRICS:
            values = [last[i] if r + 1 == ROUNDS else own(i, r, metric) for i in everybody]
            numbers.append(Numbers(metric, values, ends=ends if metric == "cssv" else None))
        numbers += [
            Numbers(w, [own(i, r, w) for i in everybody])
            for w in ("weight", "accuracy", "update_norm")
        ]
        file.append(round_rows(r, numbers, names))
    metrics = json.loads((folder / "run.json").read_text())["metrics"]
    metrics["sv"] = {**metrics["cssv"], "class": "PartialFederatedShapley", "per_class": False}
    retold(
        folder,
        metrics=metrics,
        samples=[samples[i] for i in everybody],
        class_counts=[[int(1000 * own(i, "count", j)) for j in range(CLASSES)] for i in everybody],
        hashes={str(i): f"{own(i, 'hash'):.16f}" for i in everybody},
        logged={
            "val_accuracy": 0.1 + sum(last.values()),
            **{f"loss of {name}": 7.75 for name in names},
        },
    )
    retrained = [
        (
            i,
            names[i],
            "accuracy",
            x,
            x - own(i, "a"),
            x + own(i, "b"),
            x / sum(last.values()),
            0.5,
            "7 8",
            2,
        )
        for i, x in sorted(last.items())
    ]
    save_csv(folder / "retrained.csv", [RETRAINED.split(), *retrained])
    return {client: last[client] for client in others}


@pytest.mark.parametrize(("clients", "readers"), [(3, [2]), (4, [2, 3]), (5, [4]), (5, [2, 3, 4])])
def test_report_for_one_client_does_not_depend_on_values_of_others(tmp_path, clients, readers):
    """Others with other names and values, the same in sum: the same pages to the byte, so that nothing works them out,
    not even all but two together."""
    total = 0.5 * (clients - len(readers))
    first, second = (a_run(tmp_path / str(seed), clients, readers, seed, total) for seed in (1, 2))
    assert all(abs(first[i] - second[i]) > 0.01 for i in first)
    for client in readers:
        one, other = (write_report(tmp_path / str(seed), client).read_bytes() for seed in (1, 2))
        assert one == other


def test_report_for_one_client_rounds_the_mean_of_all_to_two_digits(tmp_path):
    a_run(tmp_path, 5, [0], 1, 1.7654321)
    text = text_of(write_report(tmp_path, 0))
    assert "mean of all" in text
    assert "| 0.42 |" in text  # (0.3123 + 1.7654321) / 5 = 0.41554...
    assert "0.416" not in text
    assert "0.420" not in text
    assert "14 %" in text  # of the samples
    assert "2.18" in text  # what the model has logged
    assert "7.75" not in text  # under a client's name
    assert "only if all participants but that one combine their pages" in text
    record = json.loads((tmp_path / "run.json").read_text())
    del record["ended"]
    (tmp_path / "run.json").write_text(json.dumps(record))
    text = write_report(tmp_path, 0).read_text(encoding="utf-8")
    assert "0.42 " not in text
    assert "this run has not ended" in text
    assert "2.18" not in text
    assert "of all training samples" not in text


def test_report_for_one_client_shows_only_its_own_values(tmp_path):
    mean = sum(made_value(i, 0, 4) for i in range(5)) / 5
    folder = make_run(tmp_path, clients=5)
    assert "77123" not in text_of(write_report(folder, client="Oslo", budget=Budget(100.0, "cssv")))
    text = text_of(write_report(folder, client="Oslo"))
    own = ("Oslo", f"{made_value(3, 0, 4):.3f}", "121", "4402", "03" * 8, f"{mean:.2g}", "5 of 5")
    assert not [each for each in own if each not in text]
    # From the seed the others' parts of the data follow, settings name clients, and columns may be other clients.
    assert not [
        each for each in ("77123", "SignFlip", "feedface", "3302", *NAMES[:3]) if each in text
    ]
    assert "Class by class" in text
    record = tmp_path / "run.json"
    record.write_text(record.read_text().replace('"per_class": true', '"per_class": false'))
    assert "Class by class" not in text_of(write_report(tmp_path, client="Oslo"))


def test_report_for_one_client_has_its_share_and_explains_it(tmp_path):
    text = text_of(
        write_report(
            make_game(tmp_path, {"sv": [0.061, 0.3, 0.1]}), client=0, budget=Budget(100.0, "sv")
        )
    )
    assert f"| sv | 0.0610 | {NONE} | 13.2 % | 13.23 |" in text
    assert "Your share of 100.00" in text
    assert (
        "The only exception is your share of the budget, from which the sum of the others' values follows"
        in text
    )
    assert "coalition" not in text.partition("How to read")[0]


def test_report_for_one_client_mentions_copies_without_names_of_others(tmp_path):
    folder = retold(
        make_run(tmp_path, clients=5), events=[at_fault(1, 2, 2), at_fault(2, 1, 2), *copying(2, 3)]
    )
    own = text_of(write_report(folder, client="Graz"))
    assert (
        "almost the same updates as another participant; not finite or far too large in 1 of 2 rounds"
        in own
    )
    assert not any(name in own for name in ("Lyon", "Oslo"))
