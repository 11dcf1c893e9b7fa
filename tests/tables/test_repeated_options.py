"""An option that takes several names, given twice, loses none of them."""

from pathlib import Path

from flsv.tables import command


def test_dictionaries_given_twice_are_all_merged(monkeypatch):
    words = ["--merge", "a.yaml", "--merge", "b.yaml", "c.yaml"]
    expected_files = [Path("a.yaml"), Path("b.yaml"), Path("c.yaml")]
    merged_files = []

    def collect(files, out):
        merged_files.extend(files)

    monkeypatch.setattr(command, "merge_files", collect)
    for _ in range(2):  # nothing is left of an earlier command line
        merged_files.clear()
        command.main(words, quiet=True)

        assert merged_files == expected_files
