"""An option that takes several names, given twice, loses none of them."""

from pathlib import Path

from flsv.tables import command


def test_dictionaries_given_twice_are_all_merged(monkeypatch):
    words = ["--merge", "a.yaml", "--merge", "b.yaml", "c.yaml"]
    all_files = [Path("a.yaml"), Path("b.yaml"), Path("c.yaml")]
    files_of_calls = []
    monkeypatch.setattr(
        command, "merge_files", lambda files, out: files_of_calls.append(list(files))
    )

    command.main(words, quiet=True)
    command.main(words, quiet=True)

    assert files_of_calls == [all_files, all_files]
