"""The benchmark's program: `bash launch/bench_serving.sh` sets up and runs it. Flags: mtp_bench/options.py.

Where nothing can be installed, any interpreter that imports SGLang and finds the plugin's entry point runs it as it is:
``PYTHONPATH=... python3 launch/bench/bench_serving.py --shape nemotron-nano-9b-v2``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "demo"))

from mtp_bench import cli

if __name__ == "__main__":
    try:
        sys.exit(cli.main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(cli.INTERRUPTED)
