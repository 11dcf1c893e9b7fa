"""``flsv retrain --with``: what a client that took no part would add."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml

from flsv import ClassifierClient, FederatedDataModule
from flsv.cli import main
from flsv.cli.saved_run import make_run, saved_run
from flsv.functional.intervals import interval_over_seeds
from flsv.utilities.errors import ConfigurationError
from helpers.runs import fit_by_command, read_rows, write_config, write_table

NETWORK = {"network": "softmax", "num_classes": 2, "input_shape": [2]}
CONFIG: dict[str, Any] = {
    "seed_everything": 3,
    "model": {"class_path": "flsv.ClassifierClient", "init_args": NETWORK},
    "federation": {"reporting": {"table": False, "figures": 0}},
}


def make_patients(name: str, number: int, shift: int = 0) -> list[list[str]]:
    return [
        [name, str(30 + (i * 7 + shift) % 23), str(i % 5), "ny"[(i + shift) % 3 == 0]]
        for i in range(number)
    ]


HEAD = ["clinic", "age", "dose", "ill"]
TABLE = [HEAD]
for dose, clinic in enumerate("ABC"):
    TABLE += make_patients(clinic, 30, dose)


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("with")
    return fit_by_command(
        folder,
        write_config(folder / "a.yaml", **CONFIG, data=write_table(folder / "clinics.csv", TABLE)),
    )


def write_candidate(folder: Path, table: list[list[str]]) -> Path:
    write_table(folder / "new.csv", table)
    return folder / "new.csv"


def score_on_server(module: Any, data: FederatedDataModule) -> float:
    x, y = (torch.cat(part) for part in zip(*data.val_dataloader()))
    with torch.no_grad():
        return float((module.eval()(x).argmax(1) == y).double().mean())


def test_gain_of_a_newcomer_is_that_of_trainings_by_hand(trained_run, tmp_path, capsys):
    new = write_candidate(
        tmp_path,
        [
            HEAD,
            *make_patients("D", 25, 1),
            [
                "D",
                "90",
                "9",
                "y",
            ],
        ],
    )

    assert (
        main(
            [
                "retrain",
                str(trained_run),
                "--with",
                f"D={new}",
                "--seeds",
                "2",
                "--jobs",
                "1",
            ]
        )
        == 0
    )

    printed = " ".join(capsys.readouterr().out.split())
    assert "with D: accuracy" in printed
    assert "with_D.csv" in printed

    untrained = []
    without = []
    joined = []
    for seed in (3, 4):
        with saved_run(trained_run) as (arguments, _):
            cli = make_run(arguments, seed)
            cli.trainer.fit(cli.model, cli.datamodule)
            without.append(score_on_server(cli.model, cli.datamodule))

            cli = make_run(arguments, seed)
            cli.datamodule.join("D", str(new))
            untrained.append(score_on_server(cli.model, cli.datamodule))
            cli.trainer.fit(cli.model, cli.datamodule)
            joined.append(score_on_server(cli.model, cli.datamodule))

    *seeds, mean = read_rows(trained_run / "with_D.csv")
    assert [float(row["without"]) for row in seeds] == pytest.approx(without)
    assert [float(row["with"]) for row in seeds] == pytest.approx(joined)

    gains = torch.tensor(joined).double() - torch.tensor(without).double()
    gains_of_others = torch.tensor(without).double() - torch.tensor(untrained).double()

    assert float(mean["gain"]) == pytest.approx(float(gains.mean()))

    half = float(interval_over_seeds(torch.stack([gains, gains_of_others], 1))[0])
    assert float(mean["high"]) - float(mean["low"]) == pytest.approx(2 * half)

    # Without the newcomer it is the run itself.
    cli.datamodule.setup("fit")
    saved = ClassifierClient.load_from_checkpoint(trained_run / "checkpoints/last.ckpt")

    assert score_on_server(saved, cli.datamodule) == pytest.approx(float(seeds[0]["without"]))


def test_joining_client_changes_no_data_of_other_clients(tmp_path):
    def data() -> FederatedDataModule:
        module = FederatedDataModule(**write_table(tmp_path / "clinics.csv", TABLE), batch_size=8)
        module.setup("fit")
        return module

    plain = data()
    joined = data()
    newcomers = make_patients("D", 20, 2)
    rows_without_clinic = [row[1:] for row in newcomers]
    candidate = write_candidate(tmp_path, [HEAD[1:], *rows_without_clinic])
    joined.join("D", str(candidate))

    assert joined.client_names == ("A", "B", "C", "D")
    assert joined.num_samples.tolist() == [*plain.num_samples.tolist(), 20]
    assert joined.class_counts[:3].tolist() == plain.class_counts.tolist()

    hashes = joined.content_hashes()
    del hashes["3"]

    assert hashes == plain.content_hashes()

    for client in range(3):
        batches = joined.client_loader(client)
        expected_batches = plain.client_loader(client)
        for (x, y), (expected_x, expected_y) in zip(
            batches,
            expected_batches,
            strict=True,
        ):
            assert torch.equal(x, expected_x)
            assert torch.equal(y, expected_y)

    # Encoded by the others' training rows.
    frame = pd.DataFrame(TABLE[1:], columns=HEAD)
    training_rows = torch.cat([plain.client_indices(client) for client in range(3)]).numpy()
    ages = frame["age"].astype(float).to_numpy()[training_rows]
    ages_of_d = torch.tensor([float(row[1]) for row in newcomers])
    x, y = (torch.cat(part) for part in zip(*joined.client_loader(3, shuffle=False)))
    expected = (ages_of_d - ages.mean()) / ages.std()

    torch.testing.assert_close(
        x[:, 0],
        expected,
        rtol=1e-4,
        atol=1e-4,
    )

    names = [joined.class_names[label] for label in y.tolist()]
    assert names == [row[3] for row in newcomers]


def test_client_joins_a_folder_of_clients(tmp_path):
    for name in "ABD":
        table = [HEAD[1:], *(row[1:] for row in make_patients(name, 20, ord(name)))]
        (tmp_path / "all").mkdir(exist_ok=True)
        folder = tmp_path / "all" if name != "D" else tmp_path
        (folder / f"{name}.csv").write_text("".join(",".join(row) + "\n" for row in table))

    config = {**CONFIG, "data": {"source": str(tmp_path / "all"), "labels": "ill"}}
    run = fit_by_command(tmp_path, write_config(tmp_path / "a.yaml", **config))

    assert (
        main(
            [
                "retrain",
                str(run),
                "--with",
                f"0 new={tmp_path / 'D.csv'}",
                "--seeds",
                "1",
                "--jobs",
                "1",
            ]
        )
        == 0
    )

    (file,) = run.glob("with_*.csv")
    assert read_rows(file)[-1]["client_name"] == "0 new"
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["source"] == str(
        tmp_path / "all"
    )


def test_new_client_that_cannot_join_is_refused(trained_run, tmp_path, capsys):
    candidate_a = write_candidate(tmp_path, [HEAD, *make_patients("A", 5)])
    strange = tmp_path / "strange.csv"
    write_table(
        strange,
        [
            HEAD,
            *make_patients("D", 5),
            ["D", "40", "1", "maybe"],
        ],
    )
    text = tmp_path / "text.csv"
    write_table(
        text,
        [
            HEAD,
            *make_patients("D", 5),
            ["D", "forty", "1", "y"],
        ],
    )

    for argument, message in (
        ("D", "expected a name and data"),
        (f"A={candidate_a}", "there is a client 'A' already"),
        (f"D={tmp_path / 'none.csv'}", "was not found"),
        (f"D={strange}", "'D' cannot join"),
        (f"D={text}", "forty"),
    ):
        status = main(
            [
                "retrain",
                str(trained_run),
                "--with",
                argument,
                "--jobs",
                "1",
            ]
        )
        assert status == 2, argument
        assert message in capsys.readouterr().err, argument

    assert (
        main(
            [
                "retrain",
                str(trained_run),
                "--with",
                f"D={candidate_a}",
                "--without",
                "A",
            ]
        )
        == 2
    )
    assert "two questions" in capsys.readouterr().err

    with pytest.raises(ConfigurationError, match="is a table and"):
        FederatedDataModule("digits").join("D", str(candidate_a))
