"""What the mesh changes: every model on every layout against one device, on virtual CPU devices in float32.

    python benchmarks/parity.py            writes results/parity.json (about a quarter of an hour on two cores)
    python benchmarks/parity.py FOLDER     the same, keeping the runs' results in a folder, and taking those there

The same matrix as `tests/parity`, whose tests refuse what lies beyond the tolerances.
"""

import os
import sys
import tempfile
from pathlib import Path

from common import machine, write_results

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "parity")]


def main() -> None:
    from cases import FAMILIES, ONE, cases
    from compare import compare
    from matrix import Matrix

    facts = machine("jax", "flax", "optax")
    wanted = {(family, layout.name, accumulate) for family in FAMILIES for layout, accumulate in cases(family)}
    rows = []
    with tempfile.TemporaryDirectory(prefix="meshwright-parity-") as temporary:
        folder = sys.argv[1] if len(sys.argv) > 1 else temporary
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{folder}/cache")  # accumulations share some programs
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        matrix = Matrix(Path(folder), wanted)
        try:
            for family in FAMILIES:
                for layout, accumulate in cases(family):
                    row = compare(matrix.result(family, ONE, 1), matrix.result(family, layout, accumulate))
                    rows.append({"family": family, "layout": layout.name, "accumulate": accumulate, **row})
                    print(
                        family, layout.name, accumulate, {k: row[k] for k in ("loss", "gradient", "param")}, flush=True
                    )
        finally:
            matrix.close()
    write_results("parity", facts, {"rows": rows})


if __name__ == "__main__":
    main()
