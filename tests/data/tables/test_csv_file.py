"""Comma-separated files, proper and not."""

import pytest

from flsv.data.sources.table import read_csv
from flsv.errors import ConfigurationError


def written(folder, text, encoding="utf-8"):
    path = folder / "table.csv"
    path.write_bytes(text.encode(encoding))
    return path


def test_quotes_unicode_blank_lines_and_lines_inside_values(tmp_path):
    text = 'a, b\r\n"x, y","he said ""no"""\r\n\r\n"two\nlines",Größe 漢字 🐺\r\n'
    file = read_csv(written(tmp_path, text))
    assert file.frame.to_dict("list") == {"a": ["x, y", "two\nlines"], "b": ['he said "no"', "Größe 漢字 🐺"]}
    assert file.frame.index.tolist() == [2, 5]
    assert len(file) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read as a header and rows"),
        ("\na,b\n1,2\n", "cannot be read as a header and rows"),
        ("a,b\n1,2\n3\n", "line 3: 1 values, but the header has 2 names"),
        ("a,b\n1,2,3\n", "Expected 2 fields in line 2, saw 3"),
        ("a,a\n1,2\n", "columns are called 'a', 'a'"),
        ("a,\n1,2\n", "columns are called ''"),
        ("a;b\n1;2\n", "Give the character between values as delimiter"),
        ('a,b\n"x" y,2\n', "cannot be read as a header and rows of comma-separated"),
        ('a,b\n"x,2\n', "cannot be read as a header and rows of comma-separated"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigurationError, match=message):
        read_csv(written(tmp_path, text))
