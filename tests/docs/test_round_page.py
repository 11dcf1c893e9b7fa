"""The round and the local training that docs/explanation/round.md shows are the code's."""

import inspect
import textwrap
from pathlib import Path

from flsv.federation.run import FederationRun

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/round.md"


def test_code_of_a_round_in_the_docs_equals_federation_run_round() -> None:
    shown = PAGE.read_text().split("```py\n")[1].split("```")[0]
    body = inspect.getsource(FederationRun.round).split('"""')[-1]
    assert shown == textwrap.dedent(body.strip("\n")) + "\n"


def test_lines_of_local_training_in_the_docs_occur_in_the_code_in_order() -> None:
    page = PAGE.read_text()
    shown = page.split("## Local training")[1].split("```")[1].splitlines()[1:]
    lines = [line.split("  #")[0].strip().split("...")[0] for line in shown if not line.startswith("#")]
    code = (ROOT / "flsv/training/local_training.py").read_text()
    assert len(lines) == 6
    places = [code.find(line) for line in lines]
    assert -1 not in places, lines[places.index(-1)]
    begin, end = places[:3], places[3:]
    assert begin == sorted(begin)
    assert end == sorted(end)
