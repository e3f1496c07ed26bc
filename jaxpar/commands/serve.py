"""`python -m jaxpar serve RUN`: answers HTTP requests for a trained model, for trying it and for small models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jaxpar.commands.cli import call_with_checkpoint
from jaxpar.runtime.extras import install_extra
from jaxpar.runtime.host_names import allowed_hosts
from jaxpar.runtime.printable import printable, tell
from jaxpar.serve.open_run import ModelSettings, open_model
from jaxpar.serve.requests import Settings

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


def serve(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    address: str = "127.0.0.1",
    port: int = 8000,
    *,
    model: Annotated[ModelSettings, tyro.conf.arg(name="")] = ModelSettings(),  # noqa: B008, it is frozen
    limits: Annotated[Settings, tyro.conf.arg(name="")] = Settings(),  # noqa: B008
) -> int:
    """Serves a run of house_prices.py, digits.py or gpt.py, or a folder with a language model, until SIGTERM or Ctrl-C.

    The interface is at /docs. One request is computed at a time; for load, export the model and serve the folder with vLLM.

    Args:
        run: The folder of a run, its --out-dir, or of a model with config.json, safetensors and tokenizer.json.
        address: Where to listen. The default takes requests from this machine only: there is no authentication.
        port: The port; 0: any that is free.
        model: How the model is opened.
        limits: The limits of requests.
    """
    check_installed()
    from jaxpar.serve.server import listen
    from jaxpar.serve.server import run as run_server

    allowed_hosts(address, limits.allowed_hosts)  # raises for what is no name
    with listen(address, port) as listening:  # before the model is loaded, which may take long
        served = open_model(run, model)
        host, port = listening.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        tell(f"{printable(served.name)}: {printable(served.about)}; {url}/docs")
        return run_server(served, limits, listening)


def check_installed() -> None:
    """Raises ImportError unless the packages of the extra serve are installed."""
    import importlib.util

    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"serving needs the package {package}; got none. {install_extra('serve')}.")


def main(args: Sequence[str]) -> int:
    """Runs the command with its arguments; returns its exit code."""
    return call_with_checkpoint(serve, args, "serve", example="runs/gpt")
