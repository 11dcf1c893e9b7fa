"""Lightning's private names that flsv uses: a new version of Lightning may change them."""

import re
from pathlib import Path

import flsv


def test_private_names_of_a_trainer_are_read_in_one_package():
    for path in Path(flsv.__file__).parent.rglob("*.py"):
        if path.parent.name != "_lightning":
            names = re.findall(r"\b(?:trainer|fit_loop)\._[a-z]\w*", path.read_text())
            assert names == [], f"{path}: move {names} to flsv/_lightning, with the reason"
