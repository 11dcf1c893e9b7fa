"""What a process on the emulated device imports, no other may: not even to look for doctests."""

import os

collect_ignore = [] if os.environ.get("FLSV_EMULATED") else ["emulated.py", "federations.py"]
