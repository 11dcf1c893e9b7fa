"""Doubts about the tables of sites, from what each site has told about its table and without a row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flsv.data.copies import STRONG_DOUBT
from flsv.data.doubts import (
    MAX_SHIFT_IN_RANGES,
    MIN_RATIO,
    MIN_VALUES,
    Doubt,
    SiteTable,
    doubts_of_classes,
    doubts_of_codings,
    missing_values,
    own_categories,
    ratio_text,
)
from flsv.data.sources.agreed import ColumnSummary, Moments, TableSummary

#: Interquartile range of normal numbers, in their standard deviations.
_RANGE_OF_NORMAL = 1.35
#: Standard error of the logarithm of a standard deviation, times the root of the number of values, of skewed values.
_ERROR_OF_LOGARITHM = 2.0
#: Largest deviation, in means, of a column without long tails, and smallest ratio of deviations that is doubted there.
_MAX_COMPACT_DEVIATION = 0.5
_MIN_RATIO_OF_DEVIATIONS = 4.0


@dataclass(frozen=True)
class _SiteColumn:
    """A site's summary of a column, and its number of rows."""

    summary: ColumnSummary
    num_rows: int


def doubts_of_summaries(
    summaries: Mapping[str, TableSummary],
    num_rows: Mapping[str, int],
) -> list[Doubt]:
    """Compare sites' tables by their summaries, and return all doubts, the strongest first.

    Means and deviations take the place of medians and interquartile ranges in :func:`flsv.data.doubts.find_doubts`, so
    that a few wrong rows of a site can raise or hide a doubt. Numbers of cases and rows that are there twice are not
    seen.

    Args:
        summaries: what each site has told, by its name.
        num_rows: each site's number of training rows.
    """
    doubts: list[Doubt] = []
    if len(summaries) < 2:
        return doubts

    any_summary = next(iter(summaries.values()))
    for name in any_summary.columns:
        columns = {}
        for site, summary in summaries.items():
            if name in summary.columns:
                columns[site] = _SiteColumn(summary.columns[name], num_rows[site])
        doubts += _doubts_of_column(name, columns)

    if any_summary.classes is not None:
        labels: set[str] = set()
        for summary in summaries.values():
            labels.update(summary.classes or ())
        class_names = sorted(labels)
        doubts += doubts_of_classes(_class_counts(summaries, class_names), class_names)
    return sorted(doubts, key=lambda doubt: -doubt.strength)


def _class_counts(
    summaries: Mapping[str, TableSummary],
    class_names: Sequence[str],
) -> list[SiteTable]:
    tables = []
    for site, summary in summaries.items():
        counts = [(summary.classes or {}).get(label, 0) for label in class_names]
        tables.append(SiteTable(site, class_counts=counts))
    return tables


def _doubts_of_column(name: str, columns: Mapping[str, _SiteColumn]) -> Iterator[Doubt]:
    """Compare each site's column with the others', and tell of one scale only, the farthest."""
    doubts_of_coding = list(doubts_of_codings(name, _codes_of_sites(columns)))
    yield from doubts_of_coding
    doubts_of_scale = []
    for site, column in columns.items():
        other_columns = [columns[other_site] for other_site in columns if other_site != site]
        rows_of_others = sum(other_column.num_rows for other_column in other_columns)
        if min(column.num_rows, rows_of_others) < MIN_VALUES:
            continue
        for compare in (_missing, _own_categories):
            for finding in compare(column, other_columns):
                yield finding.at(site, name)
        if doubts_of_coding:
            continue
        for finding in _scale(column, other_columns):
            doubts_of_scale.append(finding.at(site, name))
    if doubts_of_scale:
        yield max(doubts_of_scale, key=lambda doubt: doubt.strength)


def _codes_of_sites(columns: Mapping[str, _SiteColumn]) -> dict[str, tuple[float, float]]:
    """Return each site's two codes of no and yes. Empty if a site has other values."""
    codes_by_site = {}
    for site, column in columns.items():
        moments = column.summary.moments
        if moments is None:
            return {}
        if moments.count < MIN_VALUES or moments.variance == 0:
            continue
        if moments.codes is None:
            return {}
        codes_by_site[site] = moments.codes
    return codes_by_site


def _missing(column: _SiteColumn, other_columns: Sequence[_SiteColumn]) -> Iterator[Doubt]:
    missing_rows = sum(other_column.summary.missing for other_column in other_columns)
    all_rows = sum(other_column.num_rows for other_column in other_columns)
    yield from missing_values(column.summary.missing / column.num_rows, missing_rows / all_rows)


def _own_categories(
    column: _SiteColumn,
    other_columns: Sequence[_SiteColumn],
) -> Iterator[Doubt]:
    other_categories: set[str] = set()
    for other_column in other_columns:
        other_categories.update(other_column.summary.categories or {})
    yield from own_categories(column.summary.categories or {}, other_categories)


def _scale(
    column: _SiteColumn,
    other_columns: Sequence[_SiteColumn],
) -> Iterator[Doubt]:
    """Find another unit or another origin of a site's numbers, or one number alone."""
    moments = column.summary.moments
    usual_moments = Moments()
    for other_column in other_columns:
        if other_column.summary.moments is not None:
            usual_moments += other_column.summary.moments
    if moments is None or min(moments.count, usual_moments.count) < MIN_VALUES:
        return

    deviation = moments.deviation
    usual_deviation = usual_moments.deviation
    if deviation == 0 and usual_deviation > 0:
        text = f"all values are {moments.mean:.4g}, at the other sites they differ"
        yield Doubt(2 * STRONG_DOUBT, text, "constant")
        return
    if usual_deviation == 0:
        return

    allowed = math.log(MIN_RATIO) + 3 * _ERROR_OF_LOGARITHM / math.sqrt(moments.count)
    logarithm_of_deviations = math.log(deviation / usual_deviation)
    if moments.mean * usual_moments.mean > 0:
        logarithm_of_means = math.log(moments.mean / usual_moments.mean)
        are_alike = abs(logarithm_of_deviations - logarithm_of_means) < math.log(2)
        logarithm = (logarithm_of_deviations + logarithm_of_means) / 2
        if are_alike and abs(logarithm) > allowed:
            strength = STRONG_DOUBT * abs(logarithm) / allowed
            yield Doubt(strength, ratio_text(math.exp(logarithm)), "unit")
            return

    # Without long tails, a deviation that is far larger is that of a few values far outside.
    is_compact = usual_deviation < _MAX_COMPACT_DEVIATION * abs(usual_moments.mean)
    ratio = deviation / usual_deviation
    if is_compact and ratio > _MIN_RATIO_OF_DEVIATIONS:
        deviations = f"deviation is {deviation:.3g}, at the other sites {usual_deviation:.3g}"
        text = f"{deviations}, as of some values of another unit, or of codes for missing ones"
        yield Doubt(STRONG_DOUBT * ratio / _MIN_RATIO_OF_DEVIATIONS, text, "part")
        return

    max_shift = MAX_SHIFT_IN_RANGES * _RANGE_OF_NORMAL
    shift = abs(moments.mean - usual_moments.mean) / max(deviation, usual_deviation)
    if shift > max_shift:
        means = f"mean is {moments.mean:.4g}, at the other sites {usual_moments.mean:.4g}"
        yield Doubt(shift / max_shift, f"{means}, far outside the usual spread", "origin")
