"""Options of bench and tune that need lab/benchmarks/, which a checkout has and a wheel has not."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def need(option: str, module: str) -> None:
    """Make `import lab.benchmarks.<module>` work, from the checkout of this package.

    Raises ValueError, one sentence that names the option and how to get the module, if there is no checkout.
    """
    if not (ROOT / "lab" / "benchmarks" / f"{module}.py").is_file():
        raise ValueError(
            f"{option} needs lab/benchmarks/{module}.py, which is only in a checkout of the plugin: "
            'git clone it and run `pip install --no-build-isolation -e ".[cli]"` there'
        )
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
