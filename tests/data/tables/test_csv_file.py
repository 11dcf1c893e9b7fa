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


def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path):
    assert list(read_csv(written(tmp_path, "a;b\n1;2\n", "utf-8-sig"), ";").frame) == ["a", "b"]


def test_long_values(tmp_path):
    file = read_csv(written(tmp_path, "tale\n" + "x" * 300_000 + "\n"))
    assert [len(value) for value in file.frame["tale"]] == [300_000]


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


def test_other_encodings_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"table\.csv cannot be read .* in UTF-8"):
        read_csv(written(tmp_path, "a\nGröße\n", "latin-1"))


def test_an_unknown_column_gets_a_suggestion(tmp_path):
    file = read_csv(written(tmp_path, "Clinic,age\nA,3\n"))
    with pytest.raises(ConfigurationError, match=r"no column 'clinic' \(group\)\. Did you mean 'Clinic'\? It has Clin"):
        file.column("clinic", "group")
