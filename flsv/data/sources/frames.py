"""Frames of pandas: tables from files of comma-separated values, Parquet files and DataFrames, and words of columns."""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from lightning.pytorch.utilities import rank_zero_info
from pandas.api.types import infer_dtype

from flsv.data.sources.columns import Columns
from flsv.data.sources.table import Table
from flsv.data.sources.text_file import check_column_names, read_text_file
from flsv.utilities.errors import ConfigurationError

#: Number of bytes of a file that takes seconds to read.
_LARGE_FILE_BYTES = 4_000_000
_NUMBER_WITH_POINT = re.compile(r"-?(?:0|[1-9]\d*)\.(\d+)")


def concatenated_tables(tables: Sequence[Table]) -> Table:
    """Concatenate tables, as texts if one of them is a text file."""
    if len(tables) == 1:
        return tables[0]
    are_all_typed = all(table.typed for table in tables)
    frames = []
    for table in tables:
        frame = table.frame.copy(deep=False)
        for name in frame:
            if table.numbers(name) is None:
                continue
            # Numbers are numbers in all tables, or they are texts.
            if any(other_table.numbers(name) is None for other_table in tables):
                frame[name] = table.values(name)
        if table.typed and not are_all_typed:
            frame = frame.apply(as_texts)
        frames.append(frame)
    all_rows = pd.concat(frames, ignore_index=True)
    return Table(f"the {len(tables)} tables", all_rows, are_all_typed, together=tables)


def as_texts(column: pd.Series) -> pd.Series:
    """Convert values to texts. Whole numbers get no decimal point, although missing values make them floats."""
    values = column.to_numpy(dtype=object, na_value=np.nan)
    if infer_dtype(values, skipna=True) == "string":
        is_text = ~pd.isna(values)
        stripped = np.full(len(values), np.nan, dtype=object)
        texts_read = values[is_text].tolist()
        stripped[is_text] = list(map(str.strip, texts_read))
        return pd.Series(stripped, index=column.index, dtype=object)

    are_whole_numbers = all(value.is_integer() for value in values if _is_finite_float(value))
    texts: list[Any] = []
    for value, is_missing in zip(values, pd.isna(values)):
        if is_missing:
            texts.append(np.nan)
            continue
        if are_whole_numbers and _is_finite_float(value):
            value = int(value)  # "7", not "7.0"
        texts.append(str(value).strip())
    return pd.Series(texts, index=column.index, dtype=object)


def _is_finite_float(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def by_distinct_text(
    texts: pd.Series,
    convert: Callable[[list[str]], Iterable[Any]],
    dtype: type = object,
) -> pd.Series:
    """Convert a column's distinct texts, and give each row what its text becomes. Missing values stay NaN."""
    numbers_of_texts, distinct_texts = pd.factorize(texts)
    # The number of a missing value is -1, which is the place of the NaN.
    converted = [*convert(distinct_texts.tolist()), np.nan]
    converted_array: np.ndarray = np.array(converted, dtype=dtype)
    values = converted_array[numbers_of_texts]
    return pd.Series(values, index=texts.index, dtype=dtype)


def as_categories(
    texts: pd.Series,
    convert: Callable[[pd.Series], pd.Series],
) -> pd.Series:
    """Convert a column's distinct texts to other texts or NaN. The result is categorical, to be read text by text."""
    numbers_of_texts, distinct_texts = pd.factorize(texts.to_numpy(dtype=object))
    converted = convert(pd.Series(distinct_texts, dtype=object))
    new_numbers, names = pd.factorize(converted)  # " 7" and "7" are one now
    new_numbers = np.append(new_numbers, -1)
    numbers = new_numbers[numbers_of_texts]
    categories = pd.Index(names, dtype=object)
    values = pd.Categorical.from_codes(numbers, categories)
    return pd.Series(values, index=texts.index)


def by_file(table: Table, values: pd.Series) -> list[pd.Series]:
    """Return a column's values as one series per file."""
    parts = []
    num_rows_before = 0
    for part in table.parts:
        num_rows = num_rows_before + len(part)
        parts.append(values.iloc[num_rows_before:num_rows])
        num_rows_before = num_rows
    return parts


def category_names(values: pd.Series) -> pd.Series:
    """Convert a column's values to names of categories, which do not depend on whether the column has gaps."""
    are_texts_read = isinstance(values.dtype, pd.CategoricalDtype)  # by as_categories
    texts = values if are_texts_read else as_texts(values)
    return by_distinct_text(texts, without_point_zero)


def without_point_zero(words: Iterable[Any]) -> list[Any]:
    """Write ``1.0`` as ``1``, as it was before a gap gave it a fraction, unless a word has another fraction."""
    words = list(words)
    numbers_with_point = set()  # such as 7.0 and 7.5
    for word in words:
        is_text = isinstance(word, str)
        if is_text and _NUMBER_WITH_POINT.fullmatch(word):
            numbers_with_point.add(word)
    are_all_whole = all(word.endswith(".0") for word in numbers_with_point)
    if not are_all_whole:
        return words

    names = []
    for word in words:
        has_point = word in numbers_with_point
        names.append(word.removesuffix(".0") if has_point else word)
    return names


def places_of_words(table: Table, words: pd.Series) -> dict[str, list[str]]:
    """Return for each word the line in which each file has it first."""
    file_sizes = [len(part) for part in table.parts]
    file_numbers = np.arange(len(file_sizes))
    file_of_row = np.repeat(file_numbers, file_sizes)
    columns = {"word": words.to_numpy(), "file": file_of_row}
    occurrences = pd.DataFrame(columns).dropna()
    first_in_each_file = occurrences.drop_duplicates()  # indexed by the row

    places: dict[str, list[str]] = {}
    for row, word in first_in_each_file["word"].items():
        line = table.where(int(row))
        places.setdefault(word, []).append(line)
    return places


def texts_by_file(
    table: Table,
    values: pd.Series,
) -> list[list[str]]:
    """Return a column's distinct values that are texts as one list per file."""
    texts = []
    for part in by_file(table, values):
        distinct_values = part.dropna().unique()
        texts_of_part = [value for value in distinct_values if isinstance(value, str)]
        texts.append(texts_of_part)
    return texts


def read_table_file(
    path: Path,
    columns: Columns | None = None,
    client: str = "",
    text_names: Collection[str] = (),
) -> Table:
    """Read a client's table from a Parquet file or from a text file with a header line.

    Parquet needs pyarrow. Values are separated by ``sep``, or else by the most frequent of comma, semicolon, tab and
    vertical bar in the header. Columns of ``text_names`` are texts, even if all their values are numbers.
    """
    columns = columns or Columns()
    num_bytes = path.stat().st_size
    if num_bytes >= _LARGE_FILE_BYTES:
        rank_zero_info(
            f"flsv: reading {path} ({num_bytes / 1e6:.0f} MB), a second for some ten megabytes."
        )
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return replace(_read_parquet(path), client=client)

    text_format = columns.format_of(client)
    text = _decoded(path, text_format.encoding)
    first_line = text.partition("\n")[0]
    header = re.sub(r'"[^"]*"', "", first_line)
    delimiters = "\t,;|" if suffix == ".tsv" else ",;\t|"
    delimiter = text_format.sep or max(delimiters, key=header.count)
    text_file = read_text_file(path, text, delimiter)

    # What depends on a notation is read from texts.
    names = text_file.names if text_format.states_notation else text_names
    frame = text_file.columns(columns.missing, names)
    return Table(path, frame, client=client, text_file=text_file)


def _read_parquet(path: Path) -> Table:
    try:
        frame = pd.read_parquet(path, engine="pyarrow")
        return replace(frame_table(frame), path=path)
    except (ValueError, OSError) as error:  # pyarrow's errors are subclasses
        raise ConfigurationError(f"{path} cannot be read as a Parquet file: {error}") from error


def _decoded(path: Path, encoding: str | None) -> str:
    """Decode a text file from UTF-8, from UTF-16 with a byte order mark, or else from ``encoding``."""
    data = path.read_bytes()
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        detected_encoding = "utf-16"
    else:
        detected_encoding = "utf-8-sig"

    suggested_encoding = "cp1252"
    reason = ""  # why the encoding tried last does not fit
    for name in (detected_encoding, encoding or "utf-8"):
        try:
            text = data.decode(name)
        except UnicodeDecodeError as error:
            reason = f"{error.reason} at byte {error.start}"
            continue
        if "\0" not in text:
            return text
        reason = "it has zero bytes, as text in UTF-16 has"
        suggested_encoding = "utf-16-le"

    raise ConfigurationError(
        f"{path}: this is not {encoding or 'UTF-8'} ({reason}). Save it in UTF-8, or name its encoding, as cp1252 of "
        f'Excel in Western Europe: columns: {{"encoding": "{suggested_encoding}"}}.'
    )


def frame_table(data: Any) -> Table:
    """Convert a DataFrame to a table. Columns keep their types, and the index is dropped."""
    frame = data if isinstance(data, pd.DataFrame) else data.to_pandas()
    names = [str(name).strip() for name in frame.columns]
    check_column_names(type(data).__name__, names)
    frame = frame.set_axis(names, axis=1).reset_index(drop=True)
    for name in frame.select_dtypes("category"):
        frame[name] = as_texts(frame[name])
    return Table(type(data).__name__, frame, typed=True)
