"""Looks whether each package of the core is covered, branch by branch, by the tests of that package.

What another package's test happens to run does not count: a package is understood from its own tests alone.

    .venv/bin/coverage run -m pytest tests/proxy/core && .venv/bin/python -m tests.kit.own_coverage
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from coverage import Coverage
from coverage.exceptions import NoDataError

from tests.kit.source import ROOT, modules, name_of

FLOOR = 100.0


def covered_by_own_tests(module: Path) -> tuple[float, str]:
    """Percent of the module's statements and branches that the tests of its package run, and the lines that are
    missing. A module outside of all packages has its own test file."""
    own = "/".join(["proxy", *module.parts[1:3]]).removesuffix(".py")
    own = f"{own}/.*" if len(module.parts) > 3 else f"proxy/core/test_{module.stem}"
    coverage = Coverage(config_file=str(ROOT / "pyproject.toml"))
    coverage.load()
    out = io.StringIO()
    contexts = ["^$", rf"^{own}(_\w+)?\.py$"]  # what runs on import, and in these tests
    try:
        percent = coverage.report(include=[str(ROOT / module)], contexts=contexts, file=out, show_missing=True)
    except NoDataError:
        return 0.0, "never imported"
    row = next((line for line in out.getvalue().splitlines() if line.startswith(str(module))), "")
    return percent, row.split("%", 1)[-1].strip()


def main() -> None:
    wanting = []
    for module in modules("ajet_proxy/core"):
        if module.name == "__init__.py":
            continue
        percent, missing = covered_by_own_tests(module)
        sys.stdout.write(f"{percent:6.1f} %  {name_of(module)}  {missing}\n")
        if percent < FLOOR:
            wanting.append(name_of(module))
    if wanting:
        sys.exit(f"under {FLOOR:.0f} % by their own tests: {', '.join(wanting)}")


if __name__ == "__main__":
    main()
