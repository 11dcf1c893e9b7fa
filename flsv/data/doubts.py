"""Doubts about a federation's tables: what a data manager would ask a site before its rows are trained on.

Each column of each site is compared with the same column of all others by medians, interquartile ranges and shares,
which a few wrong rows do not change. Sites of real federations differ, so that only what sampling and usual differences
do not explain is a doubt.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pandas as pd
from lightning.pytorch.utilities import rank_zero_warn
from scipy.stats import iqr

from flsv.data.copies import STRONG_DOUBT
from flsv.data.federation_view import FederationView
from flsv.utilities.errors import listed

#: Smallest number of known values of a site, and of all others, that are compared.
MIN_VALUES = 20
#: Smallest number of rows or values for which a share is doubted.
MIN_COUNT_OF_SHARE = 5
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
#: Smallest ratio of both medians and interquartile ranges that is doubted.
MIN_RATIO = 2.1
#: Largest distance of a ratio from the factor that explains it, on a logarithmic scale.
MAX_LOG_DISTANCE = 0.2
#: Numbers that stand for a missing value, and their smallest distance from all others, in the width of these.
_GAP_CODE = re.compile(r"-?(9+|8+|7+)")
MIN_WIDTHS_TO_A_CODE = 2.0
#: Largest difference of a site's median from the others', in their interquartile ranges.
MAX_SHIFT_IN_RANGES = 1.5
#: Largest difference of a site's share of missing values from the others'.
MAX_MISSING_DIFFERENCE = 0.25
#: Largest share of a site's values that are categories of this site only.
MAX_OWN_SHARE = 0.05
#: Whole numbers or words look like numbers of cases from these shares of different values on: of all sites, and of the
#: usual site with at least MIN_VALUES_AT_SITE values.
UNIQUE_SHARE = 0.9
UNIQUE_SHARE_AT_SITE = 0.99
MIN_VALUES_AT_SITE = 50
MIN_VALUES_OF_IDENTIFIERS = 5 * MIN_VALUES
#: Largest difference of a class's log odds from the others', in standard errors of sampling and at all.
MAX_STANDARD_ERRORS = 6.0
MAX_LOG_ODDS_DIFFERENCE = math.log(6)
#: Powers of ten that are looked for in a part of a site's values.
POWERS_OF_TEN = (10.0, 100.0, 1000.0)
#: Smallest factor between the units of two parts of a site's values, as its logarithm in interquartile ranges of the
#: usual logarithms: values of nearer units overlap.
MIN_UNIT_DISTANCE = 5.0
#: Smallest and largest share of a site's values that are another unit's, beyond that of the other sites.
MIN_PART = 0.01
MAX_PART = 0.95
#: Largest share of a site's values that may be of another unit where other sites have such a part, too.
MAX_PART_EVERYWHERE = 0.25
#: Largest number of values between two units, as a share of the values of the other unit.
MAX_SHARE_BETWEEN = 0.1
#: Smallest probability at which a site's having one value only is taken for chance.
MIN_PROBABILITY_OF_CHANCE = 1e-3
#: Strength of a doubt about categories that only one site has, for a share of MAX_OWN_SHARE: they may well be right. A
#: share of 4 times MAX_OWN_SHARE is as doubtful as what just exceeds another limit.
STRENGTH_OF_OWN_CATEGORIES = 0.25
#: Largest number of rows that a doubt names.
_MAX_ROWS = 10

#: What is doubtful: values are missing, codes of missing ones, another coding of yes and no, all the same, of another
#: unit, all or in part, or of another origin, or categories are of one site only. A column numbers the cases, or tells
#: the site. A class has another share.
DoubtKind = Literal[
    "missing",
    "gaps",
    "coding",
    "constant",
    "unit",
    "part",
    "origin",
    "categories",
    "identifier",
    "site",
    "class",
]


@dataclass(frozen=True)
class Doubt:
    """A doubt about a column of one or several sites, or about their rows."""

    #: How far beyond what is usual: 1 where a doubt begins.
    strength: float
    text: str
    #: None if only the text is known, as of sites that have told their server about their tables.
    kind: DoubtKind | None = None
    site: str = ""
    column: str = ""
    #: Lines and values of up to ten of its rows, for who has the table. "" without single rows.
    rows: str = ""

    def at(self, site: str, column: str) -> Doubt:
        """Return the doubt as one about a column of a site."""
        return replace(self, site=site, column=column)


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
    for name in sites[0].columns:
        columns = [site.columns[name] for site in sites]
        identifiers = list(_identifiers(name, columns))
        doubts += identifiers
        if identifiers:
            continue
        num_constant = sum(column.nunique() == 1 for column in columns)
        if num_constant > len(sites) / 2 and pd.concat(columns).nunique() > 1:
            text = "has one value at each site: it tells the model where a row is from"
            doubts.append(Doubt(STRONG_DOUBT, text, "site", site="most sites", column=name))
            continue
        doubts += doubts_of_codings(name, _codes_of_sites(sites, columns))
        for index, site in enumerate(sites):
            for finding in _gap_codes(columns[index]):
                doubts.append(finding.at(site.site, name))
            # A site alone is compared with itself: some of its rows may be of another unit.
            other_values = pd.concat(columns[:index] + columns[index + 1 :] or columns)
            for compare in (_missing, _unusual_values):
                for finding in compare(columns[index], other_values):
                    doubts.append(finding.at(site.site, name))
    doubts += doubts_of_classes(sites, class_names)
    return sorted(_without_counterparts(doubts), key=lambda doubt: -doubt.strength)


def _without_counterparts(
    doubts: Sequence[Doubt],
) -> list[Doubt]:
    """Keep the strongest doubt about a column's unit or origin."""
    # If one site's numbers have another unit or origin, the others' differ from its numbers, too.
    strongest_of_scale: dict[tuple[str, str], Doubt] = {}
    other_doubts = []
    for doubt in doubts:
        if doubt.kind not in ("unit", "origin"):
            other_doubts.append(doubt)
            continue
        key = doubt.column, doubt.kind
        strongest = strongest_of_scale.get(key)
        if strongest is None or doubt.strength > strongest.strength:
            strongest_of_scale[key] = doubt
    return [*other_doubts, *strongest_of_scale.values()]


def _missing(column: pd.Series, other_values: pd.Series) -> Iterator[Doubt]:
    if min(len(column), len(other_values)) < MIN_VALUES:
        return
    is_missing = column.isna()
    yield from missing_values(is_missing.mean(), other_values.isna().mean())


def missing_values(share: float, usual_share: float) -> Iterator[Doubt]:
    """Compare a site's share of missing values with that of all others."""
    difference = float(share - usual_share)
    if difference > MAX_MISSING_DIFFERENCE:
        text = f"{100 * share:.0f} % are missing, {100 * usual_share:.0f} % at the other sites"
        yield Doubt(difference / MAX_MISSING_DIFFERENCE, text, "missing")


def _gap_codes(column: pd.Series) -> Iterator[Doubt]:
    """Find numbers such as -999 that several rows have, far outside the site's others."""
    numbers = column.dropna()
    if not pd.api.types.is_numeric_dtype(numbers):
        return
    numbers = numbers.astype(float)
    for code, count in numbers.value_counts().items():
        is_code = _GAP_CODE.fullmatch(f"{code:g}") is not None
        other_numbers = numbers[numbers != code]
        if not is_code or count < MIN_COUNT_OF_SHARE or len(other_numbers) < MIN_VALUES:
            continue
        width = other_numbers.max() - other_numbers.min()
        distance = (other_numbers - code).abs().min()
        if width > 0 and distance > MIN_WIDTHS_TO_A_CODE * width:
            text = f"{count} values are {code:g}, far from all others, as a code for a missing value: set gaps"
            rows = _rows_shown(numbers[numbers == code])
            yield Doubt(2 * STRONG_DOUBT, text, kind="gaps", rows=rows)


def _codes_of_sites(
    sites: Sequence[SiteTable],
    columns: Sequence[pd.Series],
) -> dict[str, tuple[float, float]]:
    """Return each site's two whole numbers. Empty if a site has other values."""
    codes_by_site = {}
    for site, column in zip(sites, columns):
        counts = column.value_counts()
        is_numeric = pd.api.types.is_numeric_dtype(counts.index)
        if len(counts) > 2 or not is_numeric or any(code % 1 for code in counts.index):
            return {}
        if len(counts) == 2 and counts.min() >= MIN_COUNT_OF_SHARE:
            low, high = sorted(map(float, counts.index))
            codes_by_site[site.site] = low, high
    return codes_by_site


def doubts_of_codings(
    name: str,
    codes_by_site: Mapping[str, tuple[float, float]],
) -> Iterator[Doubt]:
    """Find sites that write a yes and no by other two numbers than most sites."""
    counts = Counter(codes_by_site.values())
    if len(counts) < 2:
        return
    ((usual_codes, _),) = counts.most_common(1)
    for site, codes in codes_by_site.items():
        if codes[0] == usual_codes[0]:  # 0 and 2 beside 0 and 1 may be counts
            continue
        low, high = codes
        usual_low, usual_high = usual_codes
        text = (
            f"values are {low:g} and {high:g}, at most sites {usual_low:g} and {usual_high:g}, as of two codings of "
            "yes and no: write one"
        )
        yield Doubt(2 * STRONG_DOUBT, text, "coding", site=site, column=name)


def _unusual_values(column: pd.Series, other_column: pd.Series) -> Iterator[Doubt]:
    """Compare the known values of a site's column with those of all others."""
    own_values = column.dropna()
    other_values = other_column.dropna()
    if min(len(own_values), len(other_values)) < MIN_VALUES:
        return
    if own_values.nunique() == 1 and other_values.nunique() > 1:
        constant = own_values.iloc[0]
        usual_share = float((other_values == constant).mean())
        # That all values are this one by chance.
        probability = usual_share ** len(own_values)
        if probability < MIN_PROBABILITY_OF_CHANCE:
            # Such a column says nothing about its rows: this comes before most doubts.
            text = f"all values are {constant}, at the other sites they differ"
            yield Doubt(2 * STRONG_DOUBT, text, "constant")
        return

    is_numeric = pd.api.types.is_numeric_dtype
    if is_numeric(own_values) and is_numeric(other_values):
        own_numbers = own_values.astype(float)
        other_numbers = other_values.astype(float)
        parts = list(_parts_of_another_unit(own_numbers, other_numbers))
        # A mixture of two units is no single one.
        yield from parts or _scale(own_numbers, other_numbers)
    else:
        other_categories = set(other_values.astype(str))
        yield from own_categories(Counter(own_values.astype(str)), other_categories)


def _scale(
    own_values: pd.Series,
    other_values: pd.Series,
) -> Iterator[Doubt]:
    """Find another unit or another origin of a site's numbers."""
    if other_values.nunique() < 10:
        return
    median = float(own_values.median())
    usual_median = float(other_values.median())
    spread = iqr(own_values)
    usual_spread = iqr(other_values)
    if not spread > 0 or not usual_spread > 0:
        return

    ratio_of_spreads = spread / usual_spread
    ratio_of_medians = median / usual_median if usual_median else math.nan
    # The standard error of the logarithm of an interquartile range is near 1.4 / root n, also of skewed values.
    allowed = math.log(MIN_RATIO) + 4.2 / math.sqrt(len(own_values))
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
        ratio = math.exp(logarithm)
        yield Doubt(STRONG_DOUBT * size / allowed, ratio_text(ratio), "unit")
        return

    shift = abs(median - usual_median) / max(usual_spread, spread)
    if shift > MAX_SHIFT_IN_RANGES:
        medians = f"median is {median:.4g}, at the other sites {usual_median:.4g}"
        text = f"{medians}, far outside the usual spread"
        yield Doubt(shift / MAX_SHIFT_IN_RANGES, text, "origin")


def _parts_of_another_unit(
    own_values: pd.Series,
    other_values: pd.Series,
) -> Iterator[Doubt]:
    """Find rows whose numbers are of another unit than all others."""
    own_logarithms = np.log(own_values[own_values > 0])
    other_logarithms = np.log(other_values[other_values > 0])
    if min(len(own_logarithms), len(other_logarithms)) < MIN_VALUES or other_values.nunique() < 10:
        return
    center = float(other_logarithms.median())
    spread = iqr(other_logarithms)
    for factor in (*UNIT_FACTORS, *POWERS_OF_TEN):
        for shift in (math.log(factor), -math.log(factor)):
            if abs(shift) < MIN_UNIT_DISTANCE * spread:
                continue
            own_part = _part_near(own_logarithms - center, shift, spread)
            usual_part = _part_near(other_logarithms - center, shift, spread)
            share = len(own_part) / len(own_logarithms)
            usual_share = len(usual_part) / len(other_logarithms)
            if len(own_part) < MIN_COUNT_OF_SHARE or share < MIN_PART:
                continue

            is_excess = MIN_PART < share - usual_share < MAX_PART
            # Parts of all sites may also be right: this is no strong doubt.
            is_everywhere = spread > 0 and max(share, usual_share) < MAX_PART_EVERYWHERE
            if is_excess or is_everywhere:
                ratio = math.exp(own_part.median())
                unusual_values = np.exp(own_part + center)
                low, high = _rounded_bounds(unusual_values)
                count = f"{len(own_part)} of {len(own_logarithms)}"
                text = f"{count} {ratio_text(ratio, 'the usual ones')}, all between {low:g} and {high:g}"
                strength = STRONG_DOUBT if is_excess else 1.0
                rows = _rows_shown(unusual_values)
                yield Doubt(strength * (1 + share), text, kind="part", rows=rows)
                return


def _rows_shown(values: pd.Series) -> str:
    """Name rows by their lines, if these are known, with their values."""
    word = values.index.name
    if word is None:
        return ""
    rows = [f"{word} {line}: {value:g}" for line, value in values.items()]
    return f"{listed(rows, _MAX_ROWS)} ({len(rows)} in all)"


def _rounded_bounds(values: pd.Series) -> tuple[float, float]:
    """Return bounds of positive values, of one digit, that are no row's value."""
    # The tables' data dictionary, which goes to all sites, tells them. A value of 70 is between 60 and 80.
    smallest = float(values.min())
    largest = float(values.max())
    step_of_smallest = 10.0 ** math.floor(math.log10(smallest))
    step_of_largest = 10.0 ** math.floor(math.log10(largest))

    # Exponentials of logarithms are not exact.
    low = math.ceil(smallest / step_of_smallest - 1e-9) - 1
    high = math.floor(largest / step_of_largest + 1e-9) + 1
    return low * step_of_smallest, high * step_of_largest


def _part_near(
    distances: pd.Series,
    shift: float,
    spread: float,
) -> pd.Series:
    """Return the distances that gather around ``shift``, if they do."""
    positions = distances / shift  # about 0 in the usual unit, about 1 in the other
    shifted_distances = distances[positions > 0.5]
    if shifted_distances.empty:
        return shifted_distances

    num_between_units = int(positions.between(0.4, 0.6).sum())
    is_apart = num_between_units <= MAX_SHARE_BETWEEN * len(shifted_distances)
    is_narrow = iqr(shifted_distances) <= 2 * spread
    is_at_shift = abs(shifted_distances.median() - shift) < MAX_LOG_DISTANCE
    if is_apart and is_narrow and is_at_shift:
        return shifted_distances
    return distances[:0]


def ratio_text(ratio: float, other_values: str = "those of the other sites") -> str:
    """Describe a ratio of values, with the power of ten or the units that explain it."""
    factor = max(ratio, 1 / ratio)
    text = f"values are {ratio:.3g} times {other_values}"
    powers_of_ten = [float(10**power) for power in range(1, 10)]
    distances = {}  # on a logarithmic scale
    for usual_factor in (*UNIT_FACTORS, *powers_of_ten):
        distances[usual_factor] = abs(math.log(factor / usual_factor))
    nearest_factor = min(distances, key=distances.__getitem__)
    if distances[nearest_factor] > MAX_LOG_DISTANCE:
        return text
    if nearest_factor in UNIT_FACTORS:
        return f"{text} (as between {UNIT_FACTORS[nearest_factor]})"
    return f"{text} (a power of ten)"


def own_categories(counts: Mapping[str, int], other_categories: Collection[str]) -> Iterator[Doubt]:
    """Find categories, with a site's numbers of rows, that no other site has."""
    own_counts = Counter({word: counts[word] for word in counts if word not in other_categories})
    share = own_counts.total() / max(sum(counts.values()), 1)
    if share > MAX_OWN_SHARE and own_counts.total() >= MIN_COUNT_OF_SHARE:
        names = [word for word, _ in own_counts.most_common(3)]
        text = f"only this site has {', '.join(names)} ({100 * share:.0f} % of its values)"
        yield Doubt(STRENGTH_OF_OWN_CATEGORIES * share / MAX_OWN_SHARE, text, "categories")


def _identifiers(name: str, columns: Sequence[pd.Series]) -> Iterator[Doubt]:
    """Find columns that number the cases."""
    values = pd.concat(columns).dropna()
    if len(values) < MIN_VALUES_OF_IDENTIFIERS:
        return
    if pd.api.types.is_numeric_dtype(values):
        has_fractions = (values.astype(float) % 1 != 0).any()
        if has_fractions:
            return
    share = values.nunique() / len(values)
    shares_at_sites = []
    for column in columns:
        site_values = column.dropna()
        if len(site_values) >= MIN_VALUES_AT_SITE:
            shares_at_sites.append(site_values.nunique() / len(site_values))
    # Sites may number their cases from 1 each.
    is_unique_at_sites = bool(shares_at_sites) and np.median(shares_at_sites) > UNIQUE_SHARE_AT_SITE
    if share > UNIQUE_SHARE or is_unique_at_sites:
        text = f"nearly all of its {values.nunique()} values are different, as of a number of the case: exclude it"
        yield Doubt(STRONG_DOUBT, text, "identifier", site="all sites", column=name)


def doubts_of_classes(
    sites: Sequence[SiteTable],
    class_names: Sequence[str],
) -> Iterator[Doubt]:
    """Find sites whose share of a class is far from the others'."""
    total = np.sum([site.class_counts for site in sites], axis=0)
    for site in sites:
        counts = np.asarray(site.class_counts)
        rows = int(counts.sum())
        if rows < MIN_VALUES or len(counts) != 2:
            continue
        other_counts = total - counts
        if other_counts.min() < MIN_COUNT_OF_SHARE:
            continue
        # Half a row more of each class, so that a site without one has finite odds.
        log_odds = math.log((counts[1] + 0.5) / (counts[0] + 0.5))
        usual_log_odds = math.log((other_counts[1] + 0.5) / (other_counts[0] + 0.5))
        other_rows = other_counts.sum()
        share = other_counts[1] / other_rows
        # The delta method: a share's log-odds have the variance 1 / (rows * share * (1 - share)).
        variance_of_a_row = 1 / (share * (1 - share))
        stderr = math.sqrt(variance_of_a_row * (1 / rows + 1 / other_rows))
        difference = abs(log_odds - usual_log_odds)
        strength = min(
            difference / stderr / MAX_STANDARD_ERRORS,
            difference / MAX_LOG_ODDS_DIFFERENCE,
        )
        if strength > 1:
            own_share = f"{100 * counts[1] / rows:.0f} %"
            text = f"{own_share} are {class_names[1]}, {100 * share:.0f} % at the other sites"
            yield Doubt(strength, text, "class", site=site.site, column="class")


def warn_of_doubts(doubts: Sequence[Doubt], min_strength: float = STRONG_DOUBT) -> None:
    """Warn in one line if a doubt about a federation's tables, the strongest first, is strong."""
    strong_doubts = [doubt for doubt in doubts if doubt.strength >= min_strength]
    if not strong_doubts:
        return
    strongest = strong_doubts[0]
    message = f"{strongest.column} of {strongest.site}: {strongest.text}"
    if strongest.rows:
        message += f", {strongest.rows}"
    if len(strong_doubts) > 1:
        message += f", and {len(strong_doubts) - 1} more"
    rank_zero_warn(f"the tables are doubtful: {message}. flsv data shows all doubts.")


def doubts_of(data: FederationView) -> list[Doubt]:
    """Return the doubts about a federation's training rows, the strongest first. None for data that are no table."""
    if not data.column_cards:
        return []
    values_by_column = {card.name: card.values.array for card in data.column_cards}
    lines = data.column_cards[0].values.index
    table = pd.DataFrame(values_by_column, index=lines)

    class_names: Sequence[str] = ()
    counts_by_client: list[Sequence[int]] = [()] * len(data.client_names)
    has_classes = data.no_classes is None
    if has_classes:
        class_names = data.class_names
        counts_by_client = data.class_counts.tolist()

    sites = []
    for client, name in enumerate(data.client_names):
        if len(data.client_names) == 1:
            name = "this site"
        rows = data.client_indices(client).numpy()
        has_rows_of_table = rows.max() < len(table)  # a client that has joined has another table
        if has_rows_of_table:
            sites.append(SiteTable(name, table.iloc[rows], counts_by_client[client]))
    return find_doubts(sites, class_names)
