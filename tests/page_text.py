"""What a report's page says, without its tags."""

import html
import re
from pathlib import Path


def text_of(page: Path) -> str:
    """A line per heading, paragraph, item and row, with bars around the cells; charts are left out."""
    body = page.read_text(encoding="utf-8").partition("</style>")[2]
    body = re.sub(r"<svg.*?</svg>", "", body, flags=re.DOTALL)
    body = re.sub(r"\s*<t[dh]\b[^>]*>", "| ", body).replace("</tr>", "|")
    body = re.sub(r"</t[dh]>", " ", re.sub(r"</(p|li|h\d|tr|figcaption)>", "\n", body))
    lines = (html.unescape(re.sub(r"<[^>]*>", "", line)).strip() for line in body.splitlines())
    return "\n".join(filter(None, lines)).replace("\u00a0", " ")
