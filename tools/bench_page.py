"""The tables of docs/benchmark.md and docs/benchmark_many.md and their pictures, from what ``flsv bench`` has written.

    flsv bench --out runs/benchmark
    python tools/bench_page.py --runs runs/benchmark

A section of a page whose heading is also in ``benchmark.md`` (of many clients ``benchmark_many.md``) of the runs is
replaced by it. All else is written by hand; tests/docs/test_results.py looks whether the openings' numbers are those of
the tables.
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

NAMES = ("benchmark", "benchmark_many")


def sections(page: str) -> list[str]:
    """What stands before the first heading of level 2, and each such section."""
    return re.split(r"^(?=## )", page, flags=re.MULTILINE)


def renewed(page: str, tables: str) -> str:
    """The page with the sections of the tables in the place of its own.

    Example:
        >>> renewed("# A\\n\\n## B\\n\\nold\\n\\n## C\\n\\nkept\\n", "## B\\n\\nnew\\n\\n## D\\n\\nmore\\n")
        '# A\\n\\n## B\\n\\nnew\\n\\n## C\\n\\nkept\\n'
    """
    new = {each.split("\n", 1)[0]: each.rstrip() for each in sections(tables) if each}
    return "\n\n".join(new.get(each.split("\n", 1)[0], each.rstrip()) for each in sections(page)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="folder of flsv bench")
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    options = parser.parse_args()
    for name in NAMES:
        tables, page = options.runs / f"{name}.md", options.docs / f"{name}.md"
        if tables.is_file():
            page.write_text(renewed(page.read_text(encoding="utf-8"), tables.read_text(encoding="utf-8")))
            shutil.copy(options.runs / f"{name}.png", options.docs / "images" / f"{name}.png")
            print(f"{page} has the tables of {tables}")


if __name__ == "__main__":
    main()
