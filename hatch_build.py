"""The package index's description: README.md with links that lead somewhere from there, and the project's links.

A link in README.md is relative to the repository, which an index does not have. It becomes absolute, at the version's
tag, below ``[project.urls] Repository`` of pyproject.toml. While there is none, links become words, and pictures go.
The other links follow from this one address.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|mailto:|#)([^)\s]+)\)")


def description(readme: str, repository: str | None, version: str) -> str:
    """README.md as an index shows it.

    Example:
        >>> description("![A plot](a.png) See [the guide](docs/a.md#b) and [PyPI](https://pypi.org).", None, "1.0")
        'See the guide and [PyPI](https://pypi.org).'
        >>> description("[Guide](docs/a.md)", "https://example.org/flsv/", "1.0")
        '[Guide](https://example.org/flsv/blob/v1.0/docs/a.md)'
    """

    def elsewhere(found: re.Match[str]) -> str:
        picture, text, path = found.groups()
        if repository:
            kind = "raw" if picture else "blob"
            return f"{picture}[{text}]({repository.rstrip('/')}/{kind}/v{version}/{path})"
        return "" if picture else text

    return _LINK.sub(elsewhere, readme).strip()


def project_links(repository: str, version: str) -> dict[str, str]:
    """Return the links beside the repository's on an index.

    Example:
        >>> project_links("https://example.org/flsv", "1.0")["Changelog"]
        'https://example.org/flsv/blob/v1.0/CHANGELOG.md'
    """
    root = repository.rstrip("/")
    return {
        "Documentation": f"{root}/blob/v{version}/docs/index.md",
        "Changelog": f"{root}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{root}/issues",
    }


class Description(MetadataHookInterface):
    """``readme`` of the project's metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        version = re.search(
            r'^__version__ = "(.+)"$',
            (root / "flsv" / "__about__.py").read_text(),
            flags=re.MULTILINE,
        )
        if version is None:
            raise ValueError(
                'flsv/__about__.py has no line __version__ = "...": links lead to its tag.'
            )
        links = metadata.get("urls", {})
        repository = links.get("Repository")
        if repository:
            metadata["urls"] = {**project_links(repository, version[1]), **links}
        text = description((root / "README.md").read_text(encoding="utf-8"), repository, version[1])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
