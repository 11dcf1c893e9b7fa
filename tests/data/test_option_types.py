"""Options of another type, and a data set's columns of several names."""

import pandas as pd

from flsv.data import FederatedDataModule


def test_the_callers_table_stays_as_it_is():
    frame = pd.DataFrame(
        {
            " age ": [30.0, None, 50.0] * 10,
            "sex": pd.Categorical(["f", "m", None] * 10),
            "smokes": [True, False, None] * 10,
            "ward": ["a"] * 10 + ["b"] * 20,
            "ill": ["no", "yes", None] * 10,
        },
        index=range(100, 130),
    )
    before = frame.copy(deep=True)
    for given in ({"source": frame}, {"clients": {"a": frame, "b": frame.iloc[:12]}}):
        groups = "ward" if "source" in given else None
        data = FederatedDataModule(**given, labels="ill", groups=groups)
        data.setup("fit")
        next(iter(data.client_loader(0)))[0].fill_(7.0)
        pd.testing.assert_frame_equal(frame, before)
