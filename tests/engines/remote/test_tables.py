"""Sites with tables agree on an encoder before the first round, and give what one process gives."""

import copy
import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pandas as pd
import pytest
import torch
import yaml

from flsv import FederatedLoop
from flsv.cli.data import write_dictionary
from flsv.data import OneClient
from flsv.data.sources.agreed import AgreedEncoder
from flsv.engines.remote import (
    Directory,
    Packet,
    RemoteData,
    RemoteFederation,
    Site,
    SitePolicy,
    agreement,
)
from flsv.privacy import GaussianPrivacy
from flsv.report import write_report
from flsv.results.record import read_record
from flsv.results.round_result import doubts_in
from flsv.utilities.errors import ConfigurationError
from helpers.fits import trainer_for
from helpers.hospitals import (
    COLUMNS,
    FEATURES,
    ROWS,
    fit_in_one_process,
    make_data,
    make_hospital_table,
    make_hospital_tables,
    make_module,
)
from helpers.sites import (
    ADDRESSES,
    NAMES,
    OSAKA_ADDRESS,
    SiteTransport,
    assert_same_runs,
    make_shapfed_loop,
)


class Hospitals:
    """Sites in this process, and the server's start."""

    def __init__(
        self,
        folder: Path,
        tables: Mapping[str, pd.DataFrame],
        make: Any = make_shapfed_loop,
        policy: SitePolicy | None = None,
        **options: Any,
    ) -> None:
        self.folder = folder
        self.make = make
        self.options = options
        sites = {}
        for address, (name, table) in zip(ADDRESSES, tables.items()):
            sites[address] = Site(
                make_module,
                partial(make_data, table, **options),
                make,
                folder / name,
                policy=policy,
            )

        self.transport = SiteTransport(sites)
        self.requests: list[Packet] = []
        self.replies: list[Packet] = []
        self.transport.on_reply = self._note

    def _note(self, address: int, packet: Packet, reply: Packet) -> Packet:
        self.requests.append(packet)
        self.replies.append(reply)
        return reply

    def directory(self) -> Directory:
        directory = Directory(
            self.transport,
            NAMES,
            agreement(make_module(), self.make()),
            self.folder / "book.json",
            timeout=1,
            wait=0.2,
        )
        directory.gather()

        return directory

    def fit(
        self,
        rounds: int = 2,
        val: pd.DataFrame | None = None,
        num_classes: int | None = 2,
        **options: Any,
    ) -> FederatedLoop:
        directory = self.directory()
        if val is None:
            val = make_hospital_table("val")
        data = RemoteData(
            NAMES,
            sizes=[directory.sizes[site] for site in range(len(NAMES))],
            contents=[directory.contents[site] for site in range(len(NAMES))],
            num_classes=num_classes,
            server_data=make_data(val, val=val, **self.options),
        )
        data.take_encoder(directory.encoder, directory.encoder_hash)
        loop = self.make().replace(engine=partial(RemoteFederation, directory))
        trainer = trainer_for(loop, self.folder, rounds)
        trainer.fit(make_module(), data, **options)
        trainer.save_checkpoint(self.folder / "last.ckpt")

        return loop


def test_sites_give_the_encoder_weights_and_values_of_one_process(tmp_path):
    federation = Hospitals(tmp_path / "sites", make_hospital_tables())
    remote = federation.fit()
    local, data = fit_in_one_process(tmp_path / "one")

    assert_same_runs(remote, local)

    inputs, labels = data._data.tensors()
    num_rows = ROWS["Boston"] + ROWS["Lyon"] + ROWS["Osaka"]
    assert inputs.shape == (num_rows, FEATURES)

    for client, site in enumerate(federation.transport.sites.values()):
        rows = data.client_indices(client)
        site_inputs, site_labels = site._data._data.tensors()
        assert torch.equal(site_inputs, inputs[rows])
        assert torch.equal(site_labels, labels[rows])

    # Each site was asked once, and the encoder is part of the checkpoint and of the run's identity.
    kinds = [packet.kind for packet in federation.requests]
    assert kinds.count("agree") == len(NAMES)

    encoder = json.loads((tmp_path / "sites" / "encoder.json").read_text())
    checkpoint = torch.load(tmp_path / "sites" / "last.ckpt", weights_only=False)

    assert checkpoint["RemoteData"] == {"encoder": encoder}
    assert "data.encoder" in str(checkpoint)
    assert data.encoding == encoder
    ages = pd.concat(make_hospital_tables().values())["age"]
    mean = f"{ages.mean():.6g}"
    deviation = f"{ages.std(ddof=0):.6g}"
    for folder in ("sites", "one"):
        page = write_report(tmp_path / folder).read_text()
        assert f"numbers minus {mean}, divided by {deviation}" in page
        assert "categories A, B, Boston, Lyon, Osaka" in page


def test_sites_tell_these_fields_and_nothing_of_a_rare_ward(tmp_path):
    federation = Hospitals(tmp_path, make_hospital_tables())
    federation.directory()
    replies = [reply for reply in federation.replies if reply.kind == "agreed"]

    assert len(replies) == len(NAMES)

    for reply in replies:
        assert not reply.tensors
        summary = reply.plain["summary"]
        assert reply.plain.keys() == {"summary"}
        assert summary.keys() == {"settings", "columns", "classes"}
        assert summary["columns"].keys() == {"age", "lab", "ward"}
        assert summary["columns"]["age"].keys() == {"kind", "missing", "moments"}
        assert summary["columns"]["ward"].keys() == {"kind", "missing", "categories"}
        assert "rare" not in json.dumps(reply.plain)


def test_the_server_doubts_a_site_whose_column_has_another_unit(tmp_path):
    tables = make_hospital_tables()
    tables[NAMES[1]]["age"] *= 12
    federation = Hospitals(tmp_path, tables)

    with pytest.warns(UserWarning, match="Doubts about the sites' tables"):
        federation.fit(rounds=1)

    doubts = pd.read_csv(tmp_path / "doubts.csv").set_index(["site", "column"])["doubt"]
    assert "as between months and years" in doubts[NAMES[1], "age"]
    assert doubts["Osaka", "lab"] == "100 % are missing, 15 % at the other sites"
    events = doubts_in(read_record(tmp_path / "run.json")["events"])
    recorded_doubts = {(NAMES[event.client], event.column): event.text for event in events}
    assert recorded_doubts == doubts.to_dict()


def test_resumed_server_keeps_the_encoder_and_refuses_a_site_with_other_rows(
    tmp_path,
):
    encoder = Hospitals(tmp_path, make_hospital_tables()).directory().encoder
    same_federation = Hospitals(tmp_path, make_hospital_tables())
    assert same_federation.directory().encoder == encoder
    assert "agree" not in [packet.kind for packet in same_federation.requests]

    changed = {**make_hospital_tables(), "Lyon": make_hospital_table("Lyon")[:50]}
    federation = Hospitals(tmp_path, changed)
    with pytest.raises(ConfigurationError, match="'Lyon' cannot take part: its samples or labels"):
        federation.directory()

    # Another run of the same sites.
    (tmp_path / "encoder.json").unlink()
    (tmp_path / "book.json").unlink()
    assert federation.directory().encoder != encoder


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            SitePolicy(questions=[]),
            "Boston' .*policy does not let it answer 'flsv.*:table_summary'",
        ),
        (SitePolicy(min_rows=6), r"(?s)min_rows=5. Set columns: {min_rows: 6} everywhere"),
    ],
)
def test_policy_decides_whether_and_of_how_many_rows_a_site_tells(tmp_path, policy, message):
    with pytest.raises(ConfigurationError, match=message):
        Hospitals(tmp_path, make_hospital_tables(), policy=policy).directory()

    listed = SitePolicy(questions=["flsv.engines.remote.tables:table_summary"])
    assert (
        Hospitals(tmp_path, make_hospital_tables(), policy=listed).directory().encoder is not None
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"age": "old"}, "'age' has categories at Lyon and numbers at Boston, Osaka"),
        ({"born": 1970}, "(?s)Boston, Osaka: no column 'born', which others have.*exclude.*born"),
        ({"died": "dead"}, "Lyon: target 'died' has no label of 'no', 'yes'"),
    ],
)
def test_site_whose_table_does_not_fit_is_named_before_the_first_round(tmp_path, change, message):
    lyon = make_hospital_table("Lyon").assign(**change)
    federation = Hospitals(tmp_path, {**make_hospital_tables(), "Lyon": lyon})

    with pytest.raises(ConfigurationError, match=message):
        federation.directory()


def test_cell_that_cannot_be_read_is_named_in_its_sites_log_only(tmp_path, caplog):
    cell = "1,5"
    lyon = make_hospital_table("Lyon").assign(age=cell)
    federation = Hospitals(tmp_path, {**make_hospital_tables(), "Lyon": lyon})

    with pytest.raises(
        ConfigurationError, match="'Lyon' .*table cannot be read. Its own log names the columns"
    ) as error:
        federation.directory()

    assert cell not in str(error.value)
    assert f"'{cell}' in 'age' is a number stored as text" in caplog.text


def test_class_of_too_few_rows_is_refused_at_its_site_and_named_by_an_option(
    tmp_path,
):
    lyon = make_hospital_table("Lyon")
    lyon.loc[:2, "died"] = "unclear"
    tables = {**make_hospital_tables(), "Lyon": lyon}

    with pytest.raises(ConfigurationError, match="'Lyon' cannot take part: .* columns: {classes"):
        Hospitals(tmp_path / "a", tables).directory()

    columns = {**COLUMNS, "classes": ["no", "yes", "unclear"]}
    encoder = Hospitals(tmp_path / "b", tables, columns=columns).directory().encoder

    assert encoder is not None
    assert encoder.classes == ("no", "unclear", "yes")


def make_private_loop() -> FederatedLoop:
    return make_shapfed_loop(uploads=[GaussianPrivacy(clip=1.0, noise_multiplier=1.0)])


def test_private_sites_tell_nothing_and_take_the_encoder_of_the_configuration(
    tmp_path,
):
    silent = Hospitals(tmp_path / "a", make_hospital_tables(), make=make_private_loop)
    with pytest.raises(ConfigurationError, match="Give all sites the same scales") as error:
        silent.directory()

    assert "agreed" not in {reply.kind for reply in silent.replies}

    # The error says what to write.
    advice = re.search(r"columns: (\{encoder: .*\]\}\})", str(error.value))
    assert advice is not None
    columns = yaml.safe_load(advice[1])
    federation = Hospitals(
        tmp_path / "b", make_hospital_tables(), make=make_private_loop, columns=columns
    )
    directory = federation.directory()

    assert directory.encoder is None
    assert directory.encoder_hash is not None
    assert {packet.kind for packet in federation.requests} == {"hello"}


def test_sites_with_a_data_dictionary_tell_sizes_and_its_hash_alone(tmp_path):
    wards = ["A", "B", "rare", *NAMES]
    dictionary = {
        "target": "died",
        "classes": ["no", "yes"],
        "positive": "yes",
        "columns": {
            "age": {"mean": 62, "scale": 14, "low": -20, "high": 150, "gaps": False},
            "ward": {"categories": wards, "gaps": False},
        },
    }
    columns = {"encoder": dictionary}
    federation = Hospitals(tmp_path / "a", make_hospital_tables(), columns=columns)
    directory = federation.directory()

    assert {packet.kind for packet in federation.requests} == {"hello"}
    for reply in federation.replies:
        assert reply.plain == {
            "sizes": reply.plain["sizes"],
            "contents": reply.plain["contents"],  # a hash that is keyed by the site's secret
            "table": AgreedEncoder.from_plain(dictionary).hash,
        }
        assert reply.plain["sizes"].keys() == {"train", "val", "test"}
        assert not reply.tensors
    assert directory.encoder_hash == AgreedEncoder.from_plain(dictionary).hash


def without_rare_wards(table: pd.DataFrame) -> pd.DataFrame:
    """Wards that a draft of these tables names: each has five rows of a hospital."""
    return table.assign(ward=table["ward"].replace({"rare": "A", "val": "B"}))


def test_draft_of_the_dictionary_gives_the_weights_and_values_without_it(tmp_path):
    """In one process and at sites, to the bit."""
    tables = {name: without_rare_wards(table) for name, table in make_hospital_tables().items()}
    val = without_rare_wards(make_hospital_table("val"))
    fit = partial(fit_in_one_process, clients=tables, val=val)
    fitted, data = fit(tmp_path / "fitted")
    file = tmp_path / "dictionary.yaml"
    write_dictionary(file, data, [])
    columns = {"encoder": str(file)}

    local, data_by_dictionary = fit(tmp_path / "local", columns=columns)
    sites = Hospitals(tmp_path / "sites", tables, columns=columns)
    remote = sites.fit(val=val, num_classes=None)

    assert data_by_dictionary.encoding["target"] == "died"
    assert_same_runs(local, fitted)
    assert_same_runs(remote, fitted)
    assert "agree" not in {packet.kind for packet in sites.requests}


@pytest.mark.parametrize(
    ("partitioner", "words"),
    [
        (OneClient(), "A table of one site alone cannot be encoded"),
        (None, "the server's table is read by the dictionary"),
    ],
)
def test_server_without_the_dictionary_that_all_sites_have_is_refused(tmp_path, partitioner, words):
    tables = {name: without_rare_wards(table) for name, table in make_hospital_tables().items()}
    val = without_rare_wards(make_hospital_table("val"))
    _, data = fit_in_one_process(tmp_path / "fitted", clients=tables, val=val)
    file = tmp_path / "dictionary.yaml"
    write_dictionary(file, data, [])
    sites = Hospitals(tmp_path / "sites", tables, columns={"encoder": str(file)})
    sites.options = {"columns": {"exclude": ["patient"]}, "partitioner": partitioner}

    with pytest.raises(ConfigurationError, match=words):
        sites.fit(val=val)


def test_server_with_another_dictionary_than_the_sites_is_refused(tmp_path):
    tables = {name: without_rare_wards(table) for name, table in make_hospital_tables().items()}
    val = without_rare_wards(make_hospital_table("val"))
    _, data = fit_in_one_process(tmp_path / "fitted", clients=tables, val=val)
    file = tmp_path / "dictionary.yaml"
    write_dictionary(file, data, [])
    dictionary = yaml.safe_load(file.read_text())
    sites = Hospitals(tmp_path / "sites", tables, columns={"encoder": dictionary})
    other_dictionary = copy.deepcopy(dictionary)
    other_dictionary["columns"]["age"]["mean"] += 1
    sites.options = {"columns": {"encoder": other_dictionary}}  # of the server

    with pytest.raises(ConfigurationError, match="the server's table is read by the dictionary"):
        sites.fit(val=val)


def test_sites_of_which_some_have_no_table_are_named(tmp_path):
    class Arrays(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            samples = torch.utils.data.TensorDataset(torch.zeros(9, FEATURES), torch.arange(9) % 2)
            return torch.utils.data.DataLoader(samples, batch_size=3, shuffle=True)

    federation = Hospitals(tmp_path, make_hospital_tables())
    federation.transport.sites[OSAKA_ADDRESS] = Site(
        make_module, Arrays, make_shapfed_loop, tmp_path / "arrays"
    )

    with pytest.raises(
        ConfigurationError, match="Boston, Lyon: a table without an encoder; Osaka: no table"
    ):
        federation.directory()


@pytest.mark.parametrize("total", ["1/0", "0/0"])
def test_site_that_tells_a_sum_that_is_no_number_is_named(tmp_path, total):
    federation = Hospitals(tmp_path, make_hospital_tables())

    def spoil_sums(address: int, packet: Packet, reply: Packet) -> Packet:
        if packet.kind == "agree" and address == OSAKA_ADDRESS:
            reply.plain["summary"]["columns"]["age"]["moments"][1] = total
        return reply

    federation.transport.on_reply = spoil_sums
    with pytest.raises(ConfigurationError, match="site 'Osaka' has not told of its table: "):
        federation.directory()
