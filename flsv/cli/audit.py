"""``flsv audit``: whether a site's audit log is whole.

    flsv audit /var/log/flsv/audit.jsonl
    flsv audit /var/log/flsv/audit.jsonl --key Boston.pub --kept 9f2c...

Every line holds the hash of the line before it, so one that was changed, taken out or moved is named, and the command
ends with 1. It prints the hash of the last line: keep it elsewhere, and give it as --kept the next time; without it
nobody can tell whether lines are missing at the end, or the whole file was written anew. With --key all lines must be
signed by the site's key.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flsv.cli.command import command_parser


def main(args: Sequence[str], quiet: bool = False) -> int:
    """The command line, without ``audit`` itself.

    Returns:
        1 where something is wrong with the log, else 0.
    """
    parser = command_parser("flsv audit", __doc__)
    parser.add_argument("log", metavar="LOG", type=Path, help="the file that the site's policy names")
    parser.add_argument("--key", metavar="PUB", type=Path, help="the site's public key, in OpenSSH's format")
    parser.add_argument("--kept", metavar="HASH", help="of the last line, as this command has printed it earlier")
    options = parser.parse_args(list(args))
    from flsv.engines.remote import verify_audit  # only now: it imports torch

    found = verify_audit(options.log, options.key, options.kept)
    for words in found.wrong:
        print(f"Wrong: {words}.")
    if not quiet:
        print(f"{found.entries} entries. The last one's hash: {found.head or 'there is none'}")
    return 1 if found.wrong else 0
