"""What one participant's page has, and what nobody can work out from it."""

import json
import math
import random
import re
from pathlib import Path

import pytest

from flsv.payment import Budget, write_report
from flsv.results.folder import RUNS_SETTINGS
from flsv.results.reading import CHANGED
from flsv.results.rows import client_rows
from flsv.results.run_table import CSV
from flsv.results.text import NO_NUMBER
from helpers.pages import text_of_page
from helpers.retrained import add_retrained_runs, make_trained
from helpers.runs import (
    NAMES,
    add_intervals,
    change_record,
    make_fault_event,
    make_game,
    make_run,
)

NUM_ROUNDS = 4
NUM_CLASSES = 3
METRICS = ("cssv", "sv")
LOSS_OF_CLIENT = 7.75  # logged under each client's name


def random_values(
    seed: int,
    clients: list[int],
    total: float,
) -> dict[int, float]:
    """A number for each of these clients, with this sum."""
    generator = random.Random(seed)
    numbers = [generator.uniform(0.2, 0.9) for _ in clients]
    correction = (total - sum(numbers)) / len(clients)
    return {client: number + correction for client, number in zip(clients, numbers)}


def make_run_for_readers(
    folder: Path, clients: int, readers: list[int], seed: int, total: float
) -> dict[int, float]:
    """A run, with all that is reported of it. What the ``readers`` have is always the same; what the others have and
    are called hangs on the seed, but for the sums of their last values and of their samples.

    Returns:
        The last values of the others.
    """
    everybody = range(clients)
    others_ids = [client for client in everybody if client not in readers]
    names = tuple(f"site {i}" if i in readers else f"{seed} has {i}" for i in everybody)
    make_run(
        folder,
        clients=clients,
        classes=NUM_CLASSES,
        rounds=NUM_ROUNDS,
        names=names,
    )
    readers_values = {client: 0.3123 + 0.0717 * client for client in readers}
    last_values = readers_values | random_values(seed, others_ids, total)

    def draw(client: int, *purpose: object) -> float:
        """A number that hangs on the seed for the others only."""
        seeds = [client, *purpose]
        if client not in readers:
            seeds.append(seed)
        return random.Random(repr(tuple(seeds))).uniform(0.1, 1.0)

    write_contributions(folder / "contributions.csv", names, last_values, draw)

    samples = {client: 100 + client for client in readers} | dict.fromkeys(others_ids, 150)
    if len(others_ids) > 1:
        shift = random.Random(seed).randint(1, 40)
        samples[others_ids[0]] += shift
        samples[others_ids[-1]] -= shift

    class_counts = []
    for client in everybody:
        class_counts.append([int(1000 * draw(client, "count", j)) for j in range(NUM_CLASSES)])

    total_value = sum(last_values.values())
    metrics = json.loads((folder / "run.json").read_text())["metrics"]
    metrics["sv"] = {**metrics["cssv"], "class": "PartialFederatedShapley", "per_class": False}
    change_record(
        folder,
        metrics=metrics,
        samples=[samples[client] for client in everybody],
        class_counts=class_counts,
        hashes={str(client): f"{draw(client, 'hash'):.16f}" for client in everybody},
        logged={
            "val_accuracy": 0.1 + total_value,
            **{f"loss of {name}": LOSS_OF_CLIENT for name in names},
        },
    )

    # Narrow, so that the verdict, which the page shows, does not depend on them.
    values = [value for _client, value in sorted(last_values.items())]
    seeds = [10 * seed, 10 * seed + 1]
    add_retrained_runs(folder, values, seeds=seeds, half_width=0.01, majority=0.5)
    changed = f"federation.sampler.clients [{seed}] instead of [{2 * seed}]"
    settings_file = folder / "retrained" / RUNS_SETTINGS
    settings_file.write_text(json.dumps({CHANGED: changed}))
    return {client: last_values[client] for client in others_ids}


def write_contributions(path: Path, names: tuple[str, ...], last_values: dict[int, float], draw):
    """Values of all metrics in all rounds; in the last round these."""
    everybody = range(len(names))
    class_names = {str(label): str(label) for label in range(NUM_CLASSES)}
    path.unlink()
    file = CSV(path)
    file.keep_rows_before(0)

    for round_index in range(NUM_ROUNDS):
        rows = []
        for column, class_name in class_names.items():
            values = {i: draw(i, round_index, int(column)) for i in everybody}
            rows += client_rows(
                round_index, "cssv", values, names, column=column, class_name=class_name
            )
        intervals = {}
        for i in everybody:
            low = last_values[i] - draw(i, round_index, "low")
            intervals[i] = (low, last_values[i] + draw(i, round_index, "high"))
        for metric in METRICS:
            if round_index + 1 == NUM_ROUNDS:
                values = {i: last_values[i] for i in everybody}
            else:
                values = {i: draw(i, round_index, metric) for i in everybody}
            intervals_of_metric = intervals if metric == "cssv" else {}
            rows += client_rows(round_index, metric, values, names, intervals=intervals_of_metric)
        for name in ("weight", "accuracy", "update_norm"):
            values = {i: draw(i, round_index, name) for i in everybody}
            rows += client_rows(round_index, name, values, names)
        file.append(rows)


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("clients", "readers"),
    [
        (3, [2]),
        (4, [2, 3]),
        (5, [4]),
        (5, [2, 3, 4]),
    ],
)
def test_report_for_one_client_does_not_depend_on_values_of_others(tmp_path, clients, readers):
    """Others with other names and values, the same in sum and verdict: the same pages to the byte, so that nothing
    works them out, not even all but two together."""
    total = 0.5 * (clients - len(readers))

    values = make_run_for_readers(tmp_path / "1", clients, readers, seed=1, total=total)
    different_values = make_run_for_readers(tmp_path / "2", clients, readers, seed=2, total=total)

    assert all(abs(values[i] - different_values[i]) > 0.01 for i in values)

    for client in readers:
        page = write_report(tmp_path / "1", client).read_bytes()
        page_beside_others = write_report(tmp_path / "2", client).read_bytes()
        assert page == page_beside_others


@pytest.fixture
def folder_of_five(tmp_path):
    """A run of five clients, with a reader 0. The readers' value is 0.3123, and the last values sum up to 2.0777."""
    make_run_for_readers(tmp_path, clients=5, readers=[0], seed=1, total=1.7654321)
    return tmp_path


def test_report_for_one_client_rounds_the_mean_of_all_to_two_digits(folder_of_five):
    text = text_of_page(write_report(folder_of_five, client=0))

    assert "mean of all" in text
    assert "| 0.42 |" in text  # (0.3123 + 1.7654321) / 5 = 0.41554...
    assert "0.416" not in text
    assert "0.420" not in text
    assert "14 %" in text  # of the samples: 100 / (100 + 4 x 150) = 0.1428...
    assert "2.18" in text  # the logged val_accuracy: 0.1 + 0.3123 + 1.7654321 = 2.1777...
    assert str(LOSS_OF_CLIENT) not in text
    assert "only if all participants but that one combine their pages" in text


@pytest.mark.parametrize("hidden", ["seeds 10 and 11", "sampler.clients", "seed_1"])
def test_report_for_one_client_has_neither_seeds_nor_settings_of_retraining(folder_of_five, hidden):
    """From seeds, the others' parts of the data can be derived."""
    page = write_report(folder_of_five, client=0).read_text()

    assert hidden not in page
    assert "Models were trained again for this: 3 of 4 rounds. The values are means over 2" in page
    page_of_all = write_report(folder_of_five).read_text()
    assert "seeds 10 and 11, 3 of 4 rounds, federation.sampler.clients [1]" in page_of_all


@pytest.mark.parametrize("budget", [None, Budget(100.0)])
def test_report_for_one_client_has_no_seeds_of_the_run(tmp_path, budget):
    folder = make_game(tmp_path, {"sv": [0.3, 0.2, 0.1]})  # its seed is 77123

    page = write_report(folder, client=0, budget=budget).read_text()

    assert "77123" not in page
    assert "77123" in write_report(folder).read_text()


def test_report_for_one_client_does_not_name_the_coalition_without_a_score(tmp_path):
    reason = "The coalitions [[1, 2]] come to no finite performance."
    values = [math.nan] * 3
    folder = make_trained(make_game(tmp_path, {"sv": values}), why_no_values=reason)

    page = text_of_page(write_report(folder, client=0))

    assert reason in text_of_page(write_report(folder))
    assert "[1, 2]" not in page
    assert "There are no values. The operator's page says why." in page


def test_report_for_one_client_does_not_tell_what_part_of_a_payment_is_uncertain(tmp_path):
    run = make_trained(make_game(tmp_path, {"sv": [0.2, 0.2, 0.2]}))
    folder = add_intervals(run, "sv", 0.2)

    page = text_of_page(write_report(folder, client=0))

    (sentence,) = re.findall(r"The values are uncertain: .*", text_of_page(write_report(folder)))
    (share_moved,) = re.findall(r"[\d.]+ % of a payment would", sentence)
    assert "The values are uncertain" in page
    assert share_moved not in page


def test_report_for_one_client_has_no_numbers_of_all_before_the_end(folder_of_five):
    record = json.loads((folder_of_five / "run.json").read_text())
    del record["ended"]
    (folder_of_five / "run.json").write_text(json.dumps(record))

    text = write_report(folder_of_five, client=0).read_text(encoding="utf-8")

    assert "this run has not ended" in text
    assert "0.42 " not in text  # the mean of all
    assert "2.18" not in text  # the logged val_accuracy
    assert "of all training samples" not in text


def test_report_for_one_client_has_classes_only_where_columns_are_no_clients(tmp_path):
    folder = make_run(tmp_path, clients=5)
    text = text_of_page(write_report(folder, client="Oslo"))

    record = folder / "run.json"
    record.write_text(record.read_text().replace('"per_class": true', '"per_class": false'))
    text_without_classes = text_of_page(write_report(folder, client="Oslo"))

    assert "Class by class" in text
    assert "Class by class" not in text_without_classes


def test_report_for_one_client_has_its_share_and_explains_it(tmp_path):
    folder = make_game(tmp_path, {"sv": [0.061, 0.3, 0.1]})

    text = text_of_page(write_report(folder, client=0, budget=Budget(100.0, "sv")))

    # 0.061 / (0.061 + 0.3 + 0.1) = 0.1323...
    assert f"| sv | 0.0610 | {NO_NUMBER} | 13.2 % | 13.23 |" in text
    assert "Your share of 100.00" in text
    assert (
        "The only exception is your share of the budget, from which the sum of the others' values follows"
        in text
    )
    assert "coalition" not in text.partition("How to read")[0]


@pytest.mark.parametrize(("clients", "rows"), [(5, "40 samples, "), (3, "")])
def test_report_for_one_client_answers_what_a_participant_asks(tmp_path, clients, rows):
    """Which columns, which of my samples, which score, on what, by what else, and from where."""
    values = [0.1] * clients
    run = make_game(tmp_path, {"sv": values})
    add_retrained_runs(run, values, {"balanced_accuracy": [0.2] * clients}, seeds=[0])
    facts = {
        "dictionary": {
            "target": "outcome",
            "columns": {"age": {}, "smoker": {}},
            "excluded": {"clinic": "the clients"},
        },
        "left_out": {"server_val": [0, 12, *values[2:]], "client_test": [0, 5, *values[2:]]},
        "validation": {"of": "10 % of the partners' data", "rows": 40},
    }
    seed_folder = run / "retrained" / "seed_0"
    for folder in (run, seed_folder):
        change_record(folder, **facts)
    (seed_folder / "coalitions").mkdir()
    (seed_folder / "coalitions" / "untrained.csv").write_text("accuracy\n0.1\n0.2\n0.3\n")

    text = text_of_page(write_report(run, client=1))

    assert "| columns used | age, smoker |" in text
    assert "| column to predict | outcome |" in text
    assert "| columns not used | clinic |" in text
    assert "12 in the server's validation set, 5 in your test set" in text
    assert f"chose the score (accuracy) and the validation samples ({rows}10 % of the" in text
    assert "| retrained (balanced accuracy) | 0.200" in text
    assert "a standard deviation of 0.10" in text
    assert f"each value by {0.1 / clients:.2g}" in text


def test_report_for_one_client_mentions_copied_samples_without_names_of_others(tmp_path):
    lyon = NAMES.index("Lyon")
    graz = NAMES.index("Graz")
    oslo = NAMES.index("Oslo")
    events = [
        make_fault_event(lyon, times=2, num_rounds=2),
        make_fault_event(graz, times=1, num_rounds=2),
        {
            "client": oslo,
            "what": "data_warning",
            "first": 0,
            "last": 0,
            "others": [graz],
            "column": "samples",
            "text": "60 of 60 are also samples of Graz",
        },
    ]
    folder = change_record(make_run(tmp_path, clients=5), events=events)

    page = text_of_page(write_report(folder, client="Graz"))

    assert (
        "updates far too large in 1 of 2 rounds: averaged into the model, but not measured; "
        "samples: some are also samples of another participant" in page
    )
    assert "Lyon" not in page
    assert "Oslo" not in page
