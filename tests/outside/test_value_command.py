"""``flsv value``: table and CSV, without a model."""

import pytest
import torch
from torch.utils.data import TensorDataset

from flsv.cli import main
from flsv.data import FederatedDataModule, IIDPartitioner
from flsv.outside.value_command import value as run_value
from flsv.utilities.seeding import generator_for
from flsv.valuation import FedBary, participants_of
from helpers import make_generator
from helpers.runs import read_rows


@pytest.mark.slow
def test_value_prints_a_table_and_writes_csv(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "value"
    configs = ["--config=digits", "--config=value", "--config=scenarios/fedbary_feature_noise"]

    assert main(["value", *configs]) == 0

    output = capsys.readouterr().out
    assert "Valuation against the server's validation set" in output
    assert "flagged_share" in output

    rows = read_rows(folder / "valuation.csv")
    clients = [row["client"] for row in rows]
    shares = [float(row["share"]) for row in rows]
    assert clients == ["0", "1", "2", "3", "4"]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1, abs=1e-4)

    names = {path.name for path in folder.rglob("*.csv")}
    assert names == {"valuation.csv", "flagged.csv"}


def test_flagged_samples_have_their_index_in_the_data_set(tmp_path):
    """Samples that are far from all others are found again at their places in the data set, with their labels."""
    x = torch.randn(400, 4, generator=make_generator())
    y = torch.arange(400) % 2
    outliers = {17: 1, 202: 0, 311: 1}
    for sample in outliers:
        x[sample] += 40.0

    source = (TensorDataset(x, y), TensorDataset(x[:20], y[:20]))
    data = FederatedDataModule(source, IIDPartitioner(3, seed=2))
    data.setup("fit")

    for sample in data.server_val_indices.tolist():
        outliers.pop(sample, None)
    assert len(outliers) >= 2

    run_value(data, FedBary(support=20), tmp_path, table=False)

    labels = {}
    for client in range(3):
        samples = set(data.client_indices(client).tolist())
        for row in read_rows(tmp_path / f"clients/{client}/flagged.csv"):
            sample = int(row["index"])
            assert sample in samples
            labels[sample] = row["label"]

    for sample, label in outliers.items():
        assert labels[sample] == str(data.class_names[label])


@pytest.mark.slow
def test_value_without_validation_measures_distances_to_the_barycenter(tmp_path):
    x = torch.randn(90, 4, generator=make_generator())
    y = torch.arange(90) % 2
    data = FederatedDataModule((x, y), IIDPartitioner(3, seed=2))
    valuer = FedBary(support=10)

    valuation = run_value(
        data,
        valuer,
        tmp_path,
        seed=1,
        table=False,
        validation=False,
    )

    clients, _server = participants_of(data)
    expected = valuer.value(clients, None, generator_for(1, "value"))
    assert torch.equal(valuation.distances, expected.distances)
