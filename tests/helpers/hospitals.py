"""Tables of three hospitals and of the server, and their federation in one process."""

from functools import cache, partial

import numpy as np
import pandas as pd
import torch

from flsv import ClassifierClient, FederatedDataModule
from flsv.data import OneClient, Splits
from flsv.tables.merger import merge
from helpers.fits import trainer_for
from helpers.sites import NAMES, SEED, make_shapfed_loop

#: Each hospital's rows, and the server's.
ROWS = {"Boston": 90, "Lyon": 60, "Osaka": 40, "val": 50}
DICTIONARY = {"excluded": ["patient", "insurer"]}
FEATURES = 8


def make_hospital_table(name):
    """Numbers of unequal size, a column that is empty at Osaka, and rare wards."""
    rows = ROWS[name]
    rng = np.random.default_rng(list(ROWS).index(name))
    age = rng.normal(62, 14, rows)
    ward = rng.choice(["A", "B"], rows).astype(object)
    ward[:6] = name
    ward[6:8] = "rare"
    lab = pd.Series(1e9 * rng.lognormal(0, 1, rows))
    share_of_gaps = 1 if name == "Osaka" else 0.2
    lab[rng.random(rows) < share_of_gaps] = np.nan
    risk = age + rng.normal(0, 9, rows)

    table = pd.DataFrame(
        {
            "patient": np.arange(rows),
            "age": age,
            "lab": lab,
            "ward": ward,
            "died": np.where(risk > 60, "yes", "no"),
        }
    )
    if name == "Lyon":
        table["insurer"] = "A"
    return table


def make_hospital_tables():
    return {name: make_hospital_table(name) for name in NAMES}


def make_module(num_features=FEATURES):
    torch.manual_seed(SEED)
    return ClassifierClient(
        "mlp",
        num_classes=2,
        input_shape=(num_features,),
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )


def make_data(source, **options):
    usual_options = {"partitioner": OneClient(), "splits": Splits(server_val=0.0)}
    return FederatedDataModule(source, labels="died", batch_size=16, **usual_options | options)


def make_tables(**options):
    """All hospitals' tables in one data module."""
    usual_options = {
        "clients": make_hospital_tables(),
        "val": make_hospital_table("val"),
        "dictionary": DICTIONARY,
    }
    return FederatedDataModule(labels="died", batch_size=16, **usual_options | options)


def fit_in_one_process(folder, rounds=2, **options):
    data = make_tables(**options)
    loop = make_shapfed_loop()
    trainer_for(loop, folder, rounds).fit(make_module(), data)

    return loop, data


def without_rare_wards(table):
    """Wards that a site's draft names: each has five rows of a hospital."""
    return table.assign(ward=table["ward"].replace({"rare": "A", "val": "B"}))


#: Tables that sites can draft alone.
TABLES = {name: without_rare_wards(table) for name, table in make_hospital_tables().items()}
VAL = without_rare_wards(make_hospital_table("val"))


@cache
def merged_dictionary():
    """Merge the dictionaries that the sites have drafted of :data:`TABLES`."""
    dictionary_by_site = {}
    for name, table in TABLES.items():
        data = make_data(table, dictionary=DICTIONARY, pos_label="yes")
        data.setup("fit")
        assert data.dictionary is not None
        dictionary_by_site[name] = data.dictionary
    dictionary, _ = merge(dictionary_by_site)
    return dictionary
