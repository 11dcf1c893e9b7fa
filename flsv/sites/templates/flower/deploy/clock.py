"""Compares this machine's clock with the SuperLink's: python deploy/clock.py server.example:443 keys/ca.pem

Flower refuses a SuperNode whose clock is more than 5 s ahead of the SuperLink's, or 305 s behind it. Exit status: 1 if
this clock is, else 0, also if the SuperLink cannot be reached.
"""

import ssl
import sys
import time
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime

MAX_SECONDS_AHEAD = 6  # the date in a reply may be two seconds old
MAX_SECONDS_BEHIND = 300


def date_of(superlink: str, authority: str) -> str | None:
    """Return the date in a reply of the SuperLink or nginx, or None."""
    try:
        context = ssl.create_default_context(cafile=authority)
        url = f"https://{superlink}/health"
        with urllib.request.urlopen(url, timeout=10, context=context) as reply:
            return reply.headers["Date"]
    except urllib.error.HTTPError as error:  # nginx lets sites reach other paths only
        return error.headers["Date"]
    except OSError:
        return None


def main(superlink: str, authority: str) -> None:
    own_time = time.time()
    date = date_of(superlink, authority)
    if date is None:
        return
    seconds_ahead = own_time - parsedate_to_datetime(date).timestamp()
    if -MAX_SECONDS_BEHIND <= seconds_ahead <= MAX_SECONDS_AHEAD:
        return
    direction = "ahead of" if seconds_ahead > 0 else "behind"
    sys.exit(
        f"this machine's clock is {abs(seconds_ahead):.0f} s {direction} that of the SuperLink {superlink}, which "
        "refuses it: set the clock (timedatectl set-ntp true)"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
