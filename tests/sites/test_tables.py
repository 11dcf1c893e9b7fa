"""Sites with tables read them by one data dictionary, and give what one process gives."""

from dataclasses import replace
from functools import partial

import lightning as L
import pytest
import torch

from flsv.data import (
    FederatedDataModule,
    IIDPartitioner,
    OneClient,
)
from flsv.privacy import GaussianPrivacy
from flsv.results.record import read_record
from flsv.sites import (
    Directory,
    Packet,
    Site,
    agreement,
)
from flsv.tables import Column, Dictionary
from helpers import refused, warns
from helpers.hospitals import (
    DICTIONARY,
    FEATURES,
    TABLES,
    VAL,
    fit_in_one_process,
    make_data,
    make_module,
    merged_dictionary,
)
from helpers.sites import (
    ADDRESSES,
    NAMES,
    OSAKA_ADDRESS,
    SitesInProcess,
    assert_same_runs,
    make_shapfed_loop,
)

MERGED = merged_dictionary()


class Hospitals(SitesInProcess):
    """Sites with tables. The packets of the server and of the sites are recorded."""

    num_classes = 2

    def __init__(
        self,
        folder,
        tables=TABLES,
        make=make_shapfed_loop,
        dictionary=MERGED,
        partitioners=(),
    ):
        self.tables = list(tables.values())
        self.dictionary = dictionary
        self.partitioners = partitioners
        self.requests: list[Packet] = []
        self.replies: list[Packet] = []
        super().__init__(folder, make, make_module)
        self.transport.on_reply = self._record

    def make_site(self, client):
        options = {"dictionary": self.dictionary}
        if self.partitioners:
            options["partitioner"] = self.partitioners[client]
        make_site_data = partial(make_data, self.tables[client], **options)
        return Site(make_module, make_site_data, self.make_loop, self.tmp / NAMES[client])

    def _record(self, address, packet, reply):
        self.requests.append(packet)
        self.replies.append(reply)
        return reply


def server_data(dictionary=MERGED):
    return make_data(VAL, val=VAL, dictionary=dictionary)


@pytest.mark.slow
def test_sites_with_tables_have_the_weights_and_values_of_one_process(tmp_path):
    fit = partial(fit_in_one_process, clients=TABLES, val=VAL, pos_label="yes")
    local, _ = fit(tmp_path / "local", dictionary=MERGED)
    sites = Hospitals(tmp_path / "sites")
    remote = sites.fit(rounds=2, server_data=server_data())

    assert_same_runs(remote, local)
    assert {packet.kind for packet in sites.requests} == {"handshake", "train"}


def test_run_json_and_dictionary_yaml_have_the_dictionary_of_the_sites(tmp_path):
    Hospitals(tmp_path).fit(rounds=1, server_data=server_data())

    record = read_record(tmp_path / "run.json")
    dictionary = Dictionary.from_file(tmp_path / "dictionary.yaml")
    assert dictionary.hash in str(record["settings"])
    assert record["dictionary"] == dictionary.to_plain()


class PartitionerThatCountsItsCalls(OneClient):
    num_calls = 0

    def partition(self, *arguments):
        self.num_calls += 1
        return super().partition(*arguments)


@pytest.mark.slow
def test_data_are_set_up_once_at_each_site(tmp_path):
    partitioners = [PartitionerThatCountsItsCalls() for _ in TABLES]
    federation = Hospitals(tmp_path, partitioners=partitioners)
    federation.fit(rounds=2, server_data=server_data())

    assert [partitioner.num_calls for partitioner in partitioners] == [1, 1, 1]


WITHOUT_CATEGORIES = replace(MERGED, columns={**MERGED.columns, "ward": Column(kind="categories")})


@pytest.mark.parametrize(
    ("dictionary", "reason"),
    [
        (None, "the meaning of some columns of its table is not clear"),
        (DICTIONARY, "its table has no data"),
        (WITHOUT_CATEGORIES, ".*categories of 'ward' are missing.* merge again"),
    ],
)
def test_site_without_a_complete_dictionary_is_refused(tmp_path, dictionary, reason):
    federation = Hospitals(tmp_path, dictionary=dictionary)
    with refused(f"Boston' cannot take part: {reason}"):
        federation.directory()
    assert "patient" not in str([reply.plain for reply in federation.replies])


def test_site_with_data_of_several_clients_is_refused(tmp_path):
    federation = Hospitals(tmp_path, partitioners=[IIDPartitioner(2)] * 3)
    with refused("Boston' cannot take part: its data module has 2 clients"):
        federation.directory()


def make_private_loop():
    return make_shapfed_loop(uploads=[GaussianPrivacy(clip=1.0, noise_multiplier=1.0)])


@pytest.mark.parametrize("make", [make_shapfed_loop, make_private_loop])
def test_sites_tell_sizes_and_the_hash_of_their_dictionary_alone(tmp_path, make):
    federation = Hospitals(tmp_path, make=make)
    directory = federation.directory()

    assert {packet.kind for packet in federation.requests} == {"handshake"}
    for reply in federation.replies:
        assert reply.plain.keys() == {"sizes", "contents", "dictionary", "class_names", "message"}
        assert reply.plain["dictionary"] == MERGED.hash
        # The dictionary has the names.
        assert reply.plain["class_names"] is None
        assert reply.plain["sizes"].keys() == {"train", "val", "test"}
        assert not reply.tensors
    assert directory.dictionary_hash == MERGED.hash


@pytest.fixture
def ask_boston(tmp_path):
    """``ask_boston(kind, **fields)``: what Boston replies to the message of a server that it knows."""
    federation = Hospitals(tmp_path)
    federation.directory()
    boston = federation.transport.sites[ADDRESSES[0]]
    facts = agreement(make_module(), federation.make_loop())

    def ask(kind, **fields):
        plain = {"client": 0, "agreement": facts, "clients": len(NAMES), **fields}
        return boston.respond(Packet(kind, plain))

    return ask


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("summary", {}),
        ("query", {"function": "flsv.tables.inference:infer", "arguments": {}}),
    ],
)
def test_request_for_columns_of_a_table_fails(ask_boston, kind, fields):
    reply = ask_boston(kind, **fields)
    assert reply.kind == "failed"
    assert "ward" not in str(reply.plain)


def test_greeting_with_another_id_and_dictionary_has_the_usual_reply(ask_boston):
    usual_reply = ask_boston("handshake")
    dictionary = {**MERGED.to_plain(), "columns": {"ward": {"categories": ["rare"]}}}

    reply = ask_boston("handshake", client=1, dictionary=dictionary)

    # The hash of the samples is keyed by the client's id.
    contents = usual_reply.plain["contents"]
    assert {**reply.plain, "contents": contents} == usual_reply.plain
    assert not reply.tensors


def test_site_compares_its_table_with_the_dictionary_in_its_own_log(tmp_path):
    lyon = TABLES["Lyon"].assign(age=TABLES["Lyon"]["age"] * 0.2)
    federation = Hospitals(tmp_path, {**TABLES, "Lyon": lyon})
    with warns("The tables may contain errors.*0.196 times"):
        federation.directory()

    assert "0.196" not in str([reply.plain for reply in federation.replies])


def test_site_names_a_column_that_it_lacks(tmp_path):
    lyon = TABLES["Lyon"].drop(columns="age")
    reason = "its table has no column 'age', which is named in the data dictionary"
    with refused(f"site 'Lyon' cannot take part: {reason}"):
        Hospitals(tmp_path, {**TABLES, "Lyon": lyon}).directory()


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        ("age", r"in 'age' \(.*numbers from"),
        ("died", r"in 'died' \(one of 2 classes: no, yes\)"),
    ],
)
def test_site_names_a_column_that_does_not_fit_without_its_value(tmp_path, column, reason, caplog):
    lyon = TABLES["Lyon"].astype({column: object})
    lyon.loc[3, column] = "Mrs Smith"
    federation = Hospitals(tmp_path, {**TABLES, "Lyon": lyon})
    with refused(f"site 'Lyon' cannot take part: its table does not fit .* {reason}"):
        federation.directory()

    assert "Smith" not in str([reply.plain for reply in federation.replies])
    assert "Mrs Smith" in caplog.text


class DataWithoutATable(L.LightningDataModule):
    def train_dataloader(self):
        samples = torch.utils.data.TensorDataset(torch.zeros(9, FEATURES), torch.arange(9) % 2)
        return torch.utils.data.DataLoader(samples, batch_size=3, shuffle=True)

    val_dataloader = train_dataloader


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    "make_server_data",
    [
        pytest.param(lambda: server_data(replace(MERGED, excluded={})), id="another dictionary"),
        pytest.param(lambda: server_data(DICTIONARY), id="an inferred dictionary"),
        pytest.param(
            lambda: FederatedDataModule(VAL, labels="died", dictionary=DICTIONARY, val=VAL),
            id="no OneClient",
        ),
        pytest.param(DataWithoutATable, id="no table"),
    ],
)
def test_server_without_the_dictionary_of_the_sites_is_refused(tmp_path, make_server_data):
    message = f"The data dictionaries differ: the sites: {MERGED.hash}; the server: "
    with refused(message):
        Hospitals(tmp_path).fit(server_data=make_server_data())


def test_sites_of_which_some_have_no_table_are_named(tmp_path):
    federation = Hospitals(tmp_path)
    site_without_table = Site(
        make_module, DataWithoutATable, make_shapfed_loop, tmp_path / "no_table"
    )
    federation.transport.sites[OSAKA_ADDRESS] = site_without_table

    message = f"The data dictionaries differ: Boston, Lyon: {MERGED.hash}; Osaka: none"
    with refused(message):
        federation.directory()


def test_num_classes_of_the_server_beside_a_dictionary_of_others_is_refused(tmp_path):
    federation = Hospitals(tmp_path)
    directory = Directory(
        federation.transport,
        NAMES,
        agreement(make_module(), make_shapfed_loop()),
        tmp_path / "book.json",
        wait=0.2,
        run_size={"rounds": 2, "classes": 7},
    )
    with refused(
        f"num_classes=7, but the site's data dictionary {MERGED.hash} has 2 classes in 'died'. Give"
    ):
        directory.gather()
