"""``python -m flsv`` is ``flsv``."""

import sys

from flsv.cli import main

if __name__ == "__main__":
    sys.exit(main())
