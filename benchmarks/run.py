"""Runs every benchmark, stores the figures in benchmarks/results/ and renders benchmarks/RESULTS.md: `make bench`.

    python benchmarks/run.py --only peers traffic    only these; the figures of the others stay
    python benchmarks/run.py --render                runs none: renders the existing figures
    python benchmarks/run.py --only peers --jaxpp-python ../jaxpp/bin/python    beside JaxPP, of another environment
    python benchmarks/run.py --smoke                 runs tiny cases in a temporary folder: prints the page, stores nothing

A benchmark that cannot run here, or fails, does not stop the others, and its earlier figures stay.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import report
import tyro

HERE = Path(__file__).parent
# In the order of the page.
BENCHMARKS = (
    "traffic",
    "memory",
    "remat",
    "pipeline",
    "peers",
    "checkpoint",
    "recovery",
    "scaling",
    "gpu_roofline",
    "gpu_day",
)


@dataclass(frozen=True)
class Config:
    """What to run."""

    only: tuple[str, ...] = BENCHMARKS
    """The benchmarks to run, by name."""
    render: bool = False
    """Run none: render the page from the existing figures."""
    smoke: bool = False
    """Run tiny cases in a temporary folder, to check that they run; print the page and store nothing."""
    jaxpp_python: str | None = None
    """For peers.py: Python of an environment with JaxPP."""


def main(config: Config) -> None:
    if unknown := set(config.only) - set(BENCHMARKS):
        raise SystemExit(f"--only takes {', '.join(BENCHMARKS)}; got {', '.join(sorted(unknown))}.")
    names = () if config.render else config.only
    more = {} if config.jaxpp_python is None else {"peers": ("--jaxpp-python", config.jaxpp_python)}
    if not config.smoke:
        run_all(names, HERE / "results", HERE / "RESULTS.md", more)
        return
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder)
        try:
            run_all(names, results, results / "RESULTS.md", more, "--smoke")
        finally:
            print((results / "RESULTS.md").read_text())


def run_all(
    names: tuple[str, ...], results: Path, page: Path, more: dict[str, tuple[str, ...]], *flags: str
) -> None:
    """Runs benchmarks, with ``more`` flags for some, then renders the folder of results; raises at the end if one failed."""
    results.mkdir(exist_ok=True)
    failed = [
        name
        for name in names
        if not run(name, results / f"{name}.json", *flags, *more.get(name, ()))
    ]
    page.write_text(report.page(BENCHMARKS, results))
    if failed:
        raise SystemExit(
            f"failed: {', '.join(failed)}. Their messages are above; their earlier figures stay."
        )


def run(name: str, out: Path, *flags: str) -> bool:
    """Runs one benchmark and stores its figures once they are complete. Returns whether it did not fail."""
    print(f"== {name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / out.name
        script = [sys.executable, str(HERE / f"{name}.py"), "--out", str(figures), *flags]
        code = subprocess.run(script, check=False).returncode
        if code == 0:
            out.write_text(figures.read_text())
    return code in (0, report.CANNOT_RUN)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
