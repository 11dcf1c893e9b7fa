"""Doubts about a federation's tables: what a data manager would ask a site before its rows are trained on.

Each column of each site is compared with the same column of all others by medians, interquartile ranges and shares,
which a few wrong rows do not change. Sites of real federations differ, so that only what sampling and usual differences
do not explain is a doubt. A doubt changes nothing: the site knows whether it is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from lightning.pytorch.utilities import rank_zero_warn

from flsv.data.federation_view import FederationView

#: Fewest known values of a site, and of all others, that are compared.
FEWEST = 20
#: Factors between usual units of one quantity, each with an example.
UNIT_FACTORS = {
    2.2046: "kilograms and pounds",
    2.54: "inches and centimeters",
    3.785: "gallons and liters",
    4.184: "calories and joules",
    7.5006: "kilopascals and millimeters of mercury",
    12.0: "months and years",
    16.0: "ounces and pounds",
    17.1: "bilirubin in mg/dl and µmol/l",
    18.02: "glucose in mg/dl and mmol/l",
    24.0: "hours and days",
    30.44: "days and months",
    38.67: "cholesterol in mg/dl and mmol/l",
    60.0: "minutes and hours",
    88.42: "creatinine in mg/dl and µmol/l",
    365.25: "days and years",
}
#: Smallest ratio of both medians and interquartile ranges that is doubted. Within it, a factor is known if the ratio is
#: as close to it as this second number.
LEAST_RATIO, NEAR = 2.1, 0.2
#: Largest difference of a site's median from the others', in their interquartile ranges.
MOST_SHIFT = 1.5
#: Largest differences of a site's share of missing values from the others', and of a category that only it has.
MOST_MISSING, MOST_OWN = 0.25, 0.05
#: From these shares of different values on, whole numbers or words look like numbers of cases: of all sites, and of the
#: usual site with at least so many values.
NEARLY_UNIQUE, UNIQUE_AT_SITES, ENOUGH_AT_SITES = 0.9, 0.99, 50
#: Largest share of a site's rows that are there twice, beyond that of the other sites.
MOST_TWICE = 0.05
#: Largest difference of a class's log odds from the others', in standard errors of sampling and at all.
MOST_ERRORS, MOST_LOG_ODDS = 6.0, math.log(6)
#: Strength from which on a doubt is strong.
STRONG = 2.0
#: Smallest probability at which a site's having one value only is taken for chance.
LEAST_PROBABILITY = 1e-3
#: Strength of a doubt about categories that only one site has, for a share of MOST_OWN: they may well be right. A share
#: of 4 times MOST_OWN is as doubtful as what just exceeds another limit.
STRENGTH_OF_OWN = 0.25


@dataclass(frozen=True)
class Doubt:
    """A doubt about a column of one or several sites, or about their rows."""

    #: How far beyond what is usual: 1 where a doubt begins.
    strength: float
    site: str
    column: str
    text: str


@dataclass(frozen=True)
class SiteTable:
    """A site's training rows: its columns as read, and the numbers of rows of each class."""

    site: str
    columns: pd.DataFrame = field(default_factory=pd.DataFrame)
    class_counts: Sequence[int] = ()


def find_doubts(
    sites: Sequence[SiteTable],
    class_names: Sequence[str] = (),
) -> list[Doubt]:
    """Compare the sites' tables, and return all doubts, the strongest first.

    Example:
        >>> ages = pd.DataFrame({"age": [float(age) / 2 for age in range(40, 160)]})
        >>> tables = [SiteTable("Lyon", ages), SiteTable("Graz", ages + 0.25), SiteTable("Bonn", ages * 12)]
        >>> [(doubt.site, doubt.text) for doubt in find_doubts(tables)]
        [('Bonn', 'values are 12 times those of the other sites (as between months and years)')]
    """
    doubts: list[Doubt] = []
    if len(sites) < 2:
        return doubts
    for name in sites[0].columns:
        columns = [site.columns[name] for site in sites]
        identifiers = [*_identifiers(name, columns)]
        doubts += identifiers
        if identifiers:
            continue
        num_constant = sum(column.nunique() == 1 for column in columns)
        if num_constant > len(sites) / 2 and pd.concat(columns).nunique() > 1:
            text = "has one value at each site: it tells the model where a row is from"
            doubts.append(
                Doubt(
                    STRONG,
                    "most sites",
                    name,
                    text,
                )
            )
            continue
        for index, site in enumerate(sites):
            other_values = pd.concat(columns[:index] + columns[index + 1 :])
            for compare in (
                _missing,
                _unusual_values,
            ):
                for strength, text in compare(
                    columns[index],
                    other_values,
                ):
                    doubts.append(
                        Doubt(
                            strength,
                            site.site,
                            name,
                            text,
                        )
                    )
    doubts += _rows_twice(sites)
    doubts += doubts_of_classes(sites, class_names)
    return sorted(_without_counterparts(doubts), key=lambda doubt: -doubt.strength)


#: Strengths and texts of doubts, as :class:`Doubt` has them.
StrengthsAndTexts = Iterator[tuple[float, str]]


def _without_counterparts(
    doubts: Sequence[Doubt],
) -> list[Doubt]:
    """Leave out doubts about the one of two sites that has the usual values, or that no one can tell from the other."""
    # If one site's numbers have another unit or origin, the others' differ from its numbers, too. Texts of `_scale`
    # about a unit begin with "values", and about an origin with "median".
    strongest_of_scale: dict[tuple[str, str], Doubt] = {}
    other_doubts = []
    for doubt in doubts:
        unit_or_origin, *_ = doubt.text.split()
        if unit_or_origin not in ("values", "median"):
            other_doubts.append(doubt)
            continue
        key = doubt.column, unit_or_origin
        strongest = strongest_of_scale.get(key)
        if strongest is None or doubt.strength > strongest.strength:
            strongest_of_scale[key] = doubt
    return [*other_doubts, *strongest_of_scale.values()]


def _missing(column: pd.Series, other_values: pd.Series) -> StrengthsAndTexts:
    if min(len(column), len(other_values)) < FEWEST:
        return
    share = float(column.isna().mean())
    usual_share = float(other_values.isna().mean())
    difference = share - usual_share
    if difference > MOST_MISSING:
        text = f"{100 * share:.0f} % are missing, {100 * usual_share:.0f} % at the other sites"
        yield difference / MOST_MISSING, text


def _unusual_values(column: pd.Series, other_column: pd.Series) -> StrengthsAndTexts:
    """Compare the known values of a site's column with those of all others."""
    own_values = column.dropna()
    other_values = other_column.dropna()
    if min(len(own_values), len(other_values)) < FEWEST:
        return
    if own_values.nunique() == 1 and other_values.nunique() > 1:
        constant = own_values.iloc[0]
        usual_share = float((other_values == constant).mean())
        # That all values are this one by chance.
        probability = usual_share ** len(own_values)
        if probability < LEAST_PROBABILITY:
            # Such a column says nothing about its rows: this comes before most doubts.
            yield 2 * STRONG, f"all values are {constant}, at the other sites they differ"
        return

    is_numeric = pd.api.types.is_numeric_dtype
    if is_numeric(own_values) and is_numeric(other_values):
        yield from _scale(own_values.astype(float), other_values.astype(float))
    else:
        yield from _own_categories(own_values.astype(str), other_values.astype(str))


def _scale(
    own_values: pd.Series,
    other_values: pd.Series,
) -> StrengthsAndTexts:
    """Find another unit or another origin of a site's numbers."""
    if other_values.nunique() < 10:
        return
    median = float(own_values.median())
    usual_median = float(other_values.median())
    spread = _interquartile_range(own_values)
    usual_spread = _interquartile_range(other_values)
    if not spread > 0 or not usual_spread > 0:
        return

    ratio_of_spreads = spread / usual_spread
    ratio_of_medians = median / usual_median if usual_median else math.nan
    # The standard error of the logarithm of an interquartile range is near 1.4 / root n, also of skewed values.
    allowed = math.log(LEAST_RATIO) + 4.2 / math.sqrt(len(own_values))
    logarithms = [math.log(ratio_of_spreads)]
    if ratio_of_medians > 0:
        logarithms.append(math.log(ratio_of_medians))
    are_alike = len(logarithms) == 2 and abs(logarithms[0] - logarithms[1]) < math.log(2)
    size = abs(math.fsum(logarithms)) / len(logarithms)
    if are_alike and size > allowed:
        # Squared standard errors of both logarithms, times the number of values: the better known one counts more.
        error_of_spreads = 1.4**2
        error_of_medians = (0.93 * spread / median) ** 2
        weight = error_of_spreads / (error_of_spreads + error_of_medians)
        logarithm = (1 - weight) * logarithms[0] + weight * logarithms[1]
        yield (
            STRONG * size / allowed,
            ratio_text(math.exp(logarithm)),
        )
        return

    shift = abs(median - usual_median) / max(usual_spread, spread)
    if shift > MOST_SHIFT:
        text = f"median is {median:.4g}, at the other sites {usual_median:.4g}"
        yield shift / MOST_SHIFT, f"{text}, far outside the usual spread"


def _interquartile_range(
    values: pd.Series,
) -> float:
    lower, upper = np.quantile(values, [0.25, 0.75])
    return float(upper - lower)


def ratio_text(ratio: float) -> str:
    """Describe a ratio of values, with the power of ten or the units that explain it."""
    factor = max(ratio, 1 / ratio)
    text = f"values are {ratio:.3g} times those of the other sites"
    powers_of_ten = [float(10**power) for power in range(1, 10)]
    distances = {}  # on a logarithmic scale
    for candidate in (*UNIT_FACTORS, *powers_of_ten):
        distances[candidate] = abs(math.log(factor / candidate))
    nearest = min(distances, key=distances.__getitem__)
    if distances[nearest] > NEAR:
        return text
    if nearest in UNIT_FACTORS:
        return f"{text} (as between {UNIT_FACTORS[nearest]})"
    return f"{text} (a power of ten)"


def _own_categories(
    own_values: pd.Series,
    other_values: pd.Series,
) -> StrengthsAndTexts:
    is_unknown = ~own_values.isin(other_values.unique())
    share = float(is_unknown.mean())
    if share > MOST_OWN and is_unknown.sum() >= 5:
        names = own_values[is_unknown].value_counts().index[:3]
        text = f"only this site has {', '.join(names)} ({100 * share:.0f} % of its values)"
        yield STRENGTH_OF_OWN * share / MOST_OWN, text


def _identifiers(name: str, columns: Sequence[pd.Series]) -> Iterator[Doubt]:
    """Find columns that number the cases."""
    values = pd.concat(columns).dropna()
    if len(values) < 5 * FEWEST:
        return
    if pd.api.types.is_numeric_dtype(values):
        has_fractions = (values.astype(float) % 1 != 0).any()
        if has_fractions:
            return
    share = values.nunique() / len(values)
    shares_at_sites = []
    for column in columns:
        site_values = column.dropna()
        if len(site_values) >= ENOUGH_AT_SITES:
            shares_at_sites.append(site_values.nunique() / len(site_values))
    # Sites may number their cases from 1 each.
    is_unique_at_sites = bool(shares_at_sites) and np.median(shares_at_sites) > UNIQUE_AT_SITES
    if share > NEARLY_UNIQUE or is_unique_at_sites:
        text = f"nearly all of its {values.nunique()} values are different, as of a number of the case: exclude it"
        yield Doubt(STRONG, "all sites", name, text)


def _rows_twice(
    sites: Sequence[SiteTable],
) -> Iterator[Doubt]:
    """Find rows that a site has twice, and rows that two sites have."""
    hashes = [pd.util.hash_pandas_object(site.columns, index=False) for site in sites]
    shares_twice = [float(rows.duplicated().mean()) for rows in hashes]
    for site_index, (site, rows) in enumerate(zip(sites, hashes)):
        if len(rows) < FEWEST:
            continue
        usual_share = float(np.median(shares_twice[:site_index] + shares_twice[site_index + 1 :]))
        count = int(rows.duplicated().sum())
        excess = shares_twice[site_index] - usual_share
        if excess > MOST_TWICE and count >= 5:
            text = f"{count} of {len(rows)} rows are there twice"
            yield Doubt(
                STRONG * excess / MOST_TWICE,
                site.site,
                "all columns",
                text,
            )

        for other_site, other_rows in zip(
            sites[site_index + 1 :],
            hashes[site_index + 1 :],
        ):
            if len(other_rows) < FEWEST:
                continue
            is_shared = rows.isin(other_rows.unique())
            usual_share = max(
                usual_share,
                float(np.median(shares_twice)),
            )
            excess = float(is_shared.mean()) - usual_share
            if excess > MOST_TWICE and is_shared.sum() >= 5:
                text = (
                    f"{int(is_shared.sum())} of {len(rows)} rows are rows of {other_site.site}, too"
                )
                yield Doubt(STRONG * excess / MOST_TWICE, site.site, "all columns", text)


def doubts_of_classes(
    sites: Sequence[SiteTable],
    class_names: Sequence[str],
) -> Iterator[Doubt]:
    """Find sites whose share of a class is far from the others'."""
    total = np.sum(
        [site.class_counts for site in sites],
        axis=0,
    )
    for site in sites:
        counts = np.asarray(site.class_counts)
        rows = int(counts.sum())
        if rows < FEWEST or len(counts) != 2:
            continue
        other_values = total - counts
        if other_values.min() < 5:
            continue
        # Half a row more of each class, so that a site without one has finite odds.
        log_odds = math.log((counts[1] + 0.5) / (counts[0] + 0.5))
        usual_log_odds = math.log((other_values[1] + 0.5) / (other_values[0] + 0.5))
        share = other_values[1] / other_values.sum()
        stderr = math.sqrt(1 / (share * (1 - share)) * (1 / rows + 1 / other_values.sum()))
        difference = abs(log_odds - usual_log_odds)
        strength = min(
            difference / stderr / MOST_ERRORS,
            difference / MOST_LOG_ODDS,
        )
        if strength > 1:
            own_share = f"{100 * counts[1] / rows:.0f} %"
            text = f"{own_share} are {class_names[1]}, {100 * share:.0f} % at the other sites"
            yield Doubt(strength, site.site, "class", text)


def warn_of_doubts(
    data: FederationView,
) -> None:
    """Warn in one line if a doubt about a federation's tables is strong."""
    doubts = [doubt for doubt in doubts_of(data) if doubt.strength >= STRONG]
    if not doubts:
        return
    strongest = doubts[0]
    message = f"{strongest.column} of {strongest.site}: {strongest.text}"
    if len(doubts) > 1:
        message += f", and {len(doubts) - 1} more"
    rank_zero_warn(f"the tables are doubtful: {message}. flsv data shows all doubts.")


def doubts_of(
    data: FederationView,
) -> list[Doubt]:
    """Return the doubts about a federation's training rows, the strongest first. None for data that are no table."""
    if not data.column_cards:
        return []
    values_by_column = {}
    for card in data.column_cards:
        values_by_column[card.name] = card.values.reset_index(drop=True)
    table = pd.DataFrame(values_by_column)

    class_names: Sequence[str] = ()
    class_counts: list[Sequence[int]] = [()] * len(data.client_names)
    has_classes = data.no_classes is None
    if has_classes:
        class_names = data.class_names
        class_counts = data.class_counts.tolist()

    sites = []
    for client, name in enumerate(data.client_names):
        rows = data.client_indices(client).numpy()
        if rows.max() < len(table):  # otherwise it has joined with a table of its own
            sites.append(SiteTable(name, table.iloc[rows], class_counts[client]))
    return find_doubts(sites, class_names)
