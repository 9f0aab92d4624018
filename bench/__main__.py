"""`make bench`: measures the product against peers and limits, prints the figures and keeps them.

`ONLY=name,…` (or `--only`) chooses figures by name. Each is a ratio taken in one run on one
machine, so that it means the same on another.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping

from bench import batch_warm, commands, projection, upload
from bench.report import Figure, keep

MEASURES: Mapping[tuple[str, ...], Callable[[], list[Figure]]] = {
    ("commands_over_stock_save",): commands.measure,
    ("projection_over_stock_runner",): projection.measure,
    ("upload_over_hash_to_disk", "upload_memory_growth_mib"): upload.measure,
    ("batch_warm_over_run_batch",): batch_warm.measure,
}
"""What gives which figures."""


def main() -> int:
    """Exits with 1 when a figure misses its goal, with 2 for a name that there is not."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", default=os.environ.get("ONLY", ""), help="names, with commas")
    only = {name.strip() for name in parser.parse_args().only.split(",") if name.strip()}
    known = {name for names in MEASURES for name in names}
    if not only <= known:
        print(f"no figure {', '.join(sorted(only - known))}; there are {', '.join(sorted(known))}")
        return 2
    reached = True
    for names, measure in MEASURES.items():
        if only and not only.intersection(names):
            continue
        figures = measure()
        keep(figures)
        for figure in figures:
            reached = reached and figure.reached
            mark = "" if figure.reached else "  MISSED"
            print(f"{figure.name}  {figure.value} {figure.unit} (goal {figure.goal}){mark}")
            print(f"    against {figure.peer}; {figure.conditions}", flush=True)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
