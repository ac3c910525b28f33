"""Prints "tests: N passed, N failed, N skipped" over reports of pytest. Called by .ci/run after each test stage."""

import argparse
import sys
from pathlib import Path
from xml.etree import ElementTree as ET


def count(report: Path) -> tuple[int, int, int]:
    """Passed, failed and skipped tests of one report."""
    suites = list(ET.parse(report).getroot().iter("testsuite"))  # noqa: S314  # reads only what pytest has just written
    total, failures, errors, skipped = (
        sum(int(suite.get(key, "0")) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    )
    return total - failures - errors - skipped, failures + errors, skipped


def main() -> int:
    """Print the sum of the reports; 1 if none passed and --require-passed was given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--require-passed", action="store_true", help="exit 1 if not one test passed")
    parser.add_argument("reports", nargs="+", type=Path)
    args = parser.parse_args()
    passed, failed, skipped = map(sum, zip(*map(count, args.reports), strict=True))
    if args.require_passed and not passed:
        sys.stderr.write(f"wanted at least one passed test, there were none ({skipped} skipped): see why above\n")
        return 1
    sys.stdout.write(f"tests: {passed} passed, {failed} failed, {skipped} skipped\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
