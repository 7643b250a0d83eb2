"""SGLang imported once, forks of it, no option of the plugin set; the demo's server in `test_server`."""

import sys
from pathlib import Path

from ..processes import clean_environment, forked, sglang  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch" / "demo"))
