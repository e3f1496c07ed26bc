"""`python -m jaxpar watch RUN`: serves the report of a run while it trains, on this machine."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jaxpar.commands.cli import call


def watch(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    port: int = 8765,
    address: str = "127.0.0.1",
    seconds: float = 5.0,
    out: Path | None = None,
    allowed_hosts: tuple[str, ...] = (),
) -> None:
    """Serves the report of a run, live while it trains; --out writes it to a file instead, as of now. Ctrl-C ends it.

    Args:
        run: The run's folder: a recipe's --out-dir.
        port: Port to serve at.
        address: Address to serve at; the default is reachable from this machine only, 0.0.0.0 from all. Anyone who reaches it
            can read the run's figures and settings.
        seconds: Time between two updates of an open page.
        out: File to write, such as report.html, instead of serving.
        allowed_hosts: Names of this server that a request's Host may have, * for any. Without it: localhost, 127.0.0.1 and
            [::1] at a loopback address, any at others.
    """
    from jaxpar.report import read_run, write_page
    from jaxpar.report.data import readable

    if not 0 < port < 2**16:
        raise ValueError(f"--port must be from 1 to 65535; got {port}. Choose 8765, say.")
    if not 0.5 <= seconds < math.inf:
        raise ValueError(f"--seconds must be at least 0.5; got {seconds:g}. Choose 5, say.")
    if out is None:
        return _serve(run, port, address, seconds, allowed_hosts)
    with readable(run):
        write_page(out, read_run(run))
    print(f"wrote {out}")


def _serve(run: Path, port: int, address: str, seconds: float, allowed_hosts: Sequence[str]) -> None:
    from jaxpar.report.server import RunServer

    try:
        server = RunServer(run, port, address=address, seconds=seconds, hosts=allowed_hosts)
    except OSError as error:
        raise ValueError(
            f"--address and --port must be free on this machine; got {address}:{port} ({error.strerror}). Choose another port."
        ) from error
    print(f"{run} at http://{address}:{port}/, until Ctrl-C", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def main(args: Sequence[str]) -> None:
    """Runs the command."""
    call(watch, args, "watch", example="runs/gpt")
