"""The tables of four clinics, made up, as clinics export them: identifiers, dates, gaps, a rare outcome.

Boston.csv, Lyon.csv, Osaka.csv and Quito.csv have a patient per row. Lyon has a column that the others lack, and Osaka
never measures creatinine. val.csv and test.csv are the panel's, which judges the model. Who dies is drawn by age,
pressure, creatinine and days in hospital; in Quito the outcomes of half of the patients are mixed up.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

ROWS = {"Boston": 600, "Lyon": 400, "Osaka": 200, "Quito": 400, "val": 500, "test": 500}


def table(clinic: str, rows: int, rng: np.random.Generator) -> pd.DataFrame:
    """A clinic's patients."""
    admitted = pd.Timestamp("2023-01-01") + pd.to_timedelta(rng.integers(0, 700, rows), unit="D")
    stay, age, pressure = rng.integers(1, 21, rows), rng.normal(62, 14, rows), rng.normal(128, 18, rows)
    creatinine, sex = rng.lognormal(0, 0.4, rows), rng.choice(["f", "m"], rows)
    risk = 0.09 * (age - 62) - 0.03 * (pressure - 128) + 1.5 * np.log(creatinine) + 0.12 * (stay - 10) - 4
    died = rng.random(rows) < 1 / (1 + np.exp(-risk))
    if clinic == "Quito":
        died[: rows // 2] = rng.permutation(died[: rows // 2])
    found = pd.DataFrame(
        {
            "patient": rng.permutation(np.arange(10_000, 10_000 + rows)),
            "admitted": admitted.strftime("%Y-%m-%d"),
            "discharged": (admitted + pd.to_timedelta(stay, unit="D")).strftime("%Y-%m-%d"),
            "age": age.round(),
            "sex": sex,
            "pressure": pd.Series(pressure.round()).mask(rng.random(rows) < 0.1),
            "creatinine": pd.Series(creatinine.round(2)).mask(rng.random(rows) < (1 if clinic == "Osaka" else 0.2)),
            "died": np.where(died, "yes", "no"),
        }
    )
    return found.assign(insurer=rng.choice(["A", "B"], rows)) if clinic == "Lyon" else found


def write_clinics(folder: Path) -> None:
    """Write all tables, the same ones each time."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (clinic, rows) in enumerate(ROWS.items()):
        table(clinic, rows, np.random.default_rng(number)).to_csv(folder / f"{clinic}.csv", index=False)
