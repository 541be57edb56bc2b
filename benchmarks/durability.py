"""Runs all benchmarks of docs/results/durability.md unattended, then makes the page. Each continues where it stopped.

python benchmarks/durability.py --minutes 60        # minutes of kills; about two and a half hours in all, on two cores
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", default="60", help="of kills (default: 60)")
    options = parser.parse_args()
    parts = [("faults.py", "--minutes", options.minutes), ("faults_stock.py",), ("resume.py",)]
    parts += [("hangs.py",), ("long_run.py",), ("saving_sizes.py",)]
    for part in [*parts, *((f"{name}.py", "--json", f"docs/results/{name}.json") for name in ("saving", "guards"))]:
        began = time.monotonic()
        status = subprocess.run([sys.executable, str(HERE / part[0]), *part[1:]], check=False).returncode
        print(f"{part[0]}: status {status} after {time.monotonic() - began:.0f} s", flush=True)
    subprocess.run([sys.executable, str(HERE / "pages.py"), "durability"], check=True)


if __name__ == "__main__":
    main()
