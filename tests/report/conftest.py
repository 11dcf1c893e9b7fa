"""The made runs are imported by their name from beside the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
