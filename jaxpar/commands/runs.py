"""The commands about runs and their models: `python -m jaxpar launch`, `export`, `watch`, `serve` and `plot`.

Each imports what it needs when it is called: `launch` nothing of JAX, and only `serve` the packages of its extra.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jaxpar.commands.cli import call, foreign_flags_told, make_folder
from jaxpar.fields import check_at_least, check_from
from jaxpar.runtime.host_names import allowed_hosts, with_port
from jaxpar.runtime.output import followed, needing_extra, printable, printable_lines, tell

if TYPE_CHECKING:
    from jaxpar.plot.charts import Curve
    from jaxpar.serve.open_run import ModelSettings
    from jaxpar.serve.requests import Settings

LOOK_SECONDS = 1.0  # between two looks for a run that has not begun
Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]


def launch(args: Sequence[str]) -> int:
    """Starts a program's processes; ``args`` is the command line after ``launch``: options, the program and its arguments."""
    from jaxpar.runtime.launch import Launch, only_launch_in, run
    from jaxpar.runtime.program import check_gpus, split_command
    from jaxpar.runtime.supervise import supervise

    options, command = split_command(args)

    def read(
        num_processes: Annotated[int, tyro.conf.arg(aliases=["-n"])],
        devices_per_process: int = 1,
        gpus_per_process: int = 0,
        port: int = 0,
        log_dir: Path = Path("runs/launch"),
        max_restarts: int = 0,
    ) -> tuple[Launch, int]:
        """Starts several processes of a program on this machine: launch -n 2 --devices-per-process 4 recipes/gpt.py --steps 9.

        Args:
            num_processes: Number of processes.
            devices_per_process: Fake CPU devices per process, where the program asks for no others.
            gpus_per_process: GPUs per process, in place of CPU devices.
            port: Port on which process 0 listens; 0: a free one.
            log_dir: Folder for the logs of the processes.
            max_restarts: Restart a failed run at most so often, from its last intact checkpoint.
        """
        return Launch(
            command, num_processes, devices_per_process, gpus_per_process, port, log_dir
        ), max_restarts

    example = "-n 2 --devices-per-process 4 recipes/gpt.py --mesh.data 8"
    with foreign_flags_told(read, options, "launch"):
        started, max_restarts = call(read, options, "launch", example=example)
    check_gpus(started.num_processes, started.gpus_per_process)
    make_folder(started.log_dir, "--log-dir")
    with only_launch_in(started.log_dir):
        return supervise(started, max_restarts) if max_restarts else run(started)


def export_model(
    run: Run,
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    step: int | None = None,
    source: Path | None = None,
    dtype: str | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Writes the model of a run's checkpoint as a folder for transformers, with its tokenizer; any mesh may have saved it.

    Args:
        run: The run's folder, its --out-dir, with checkpoints/ and model/, as recipes/gpt.py writes them.
        out: A folder without a model.
        step: The step to export. None: the newest intact checkpoint.
        source: The folder whose config.json and tokenizer to keep. None: model/ in the run's folder.
        dtype: float32, bfloat16 or float16. None: that of the source.
        max_file_bytes: The size of a file of weights, which memory must have room for.
    """
    from jaxpar.checkpoint.stored_params import choosing_again
    from jaxpar.huggingface.export import RunModel, open_run, write_model
    from jaxpar.run.folder import CHECKPOINTS

    if out.resolve().is_relative_to((run / CHECKPOINTS).resolve()):
        raise ValueError(
            f"a model is written to a folder of its own; got {out}, among the checkpoints of the run. Choose "
            f"{run / 'tuned'}, say."
        )

    def write() -> RunModel:
        opened = open_run(run, step, source)
        write_model(
            out,
            opened.config,
            opened.params,
            source=opened.source,
            dtype=dtype,
            max_file_bytes=max_file_bytes,
        )
        return opened

    opened = choosing_again(step, write)
    count = len(list(out.glob("*.safetensors")))
    print(f"{out}: step {opened.step} of {run}, {count} file{'s' * (count > 1)} of weights")


def export(args: Sequence[str]) -> int | None:
    """Writes a run's checkpoint as a folder that transformers reads; returns the exit code if there is no intact one.

    It needs no devices of the run's mesh: a layer of a param is read, converted and written at a time.
    """
    return call(export_model, args, "export", example="runs/gpt exported")


def watch_run(
    run: Run,
    port: int = 8765,
    address: str = "127.0.0.1",
    seconds: float = 5.0,
    out: Path | None = None,
    allowed_hosts: tuple[str, ...] = (),
) -> None:
    """Serves the report of a run, live while it trains; --out writes it to a file instead, as of now. Ctrl-C ends it.

    Args:
        run: The run's folder: a recipe's --out-dir. It is waited for if no run has begun there.
        port: Port to serve at.
        address: Address to serve at; the default is reachable from this machine only, 0.0.0.0 from all. Anyone who reaches it
            can read the run's figures and settings.
        seconds: Time between two updates of an open page.
        out: File to write, such as report.html, instead of serving.
        allowed_hosts: Names of this server that a request's Host may have, * for any. Without it: any, at a loopback address
            localhost, 127.0.0.1 and [::1].
    """
    from jaxpar.metrics.log import OF_A_MODEL, foreign_config
    from jaxpar.report import read_run, write_page
    from jaxpar.report.data import readable

    check_from(1, 65535, "Choose 8765, say.", port=port)
    check_at_least(0.5, "Choose 5, say.", seconds=seconds)
    if (what := foreign_config(run)) == OF_A_MODEL:
        raise ValueError(
            f"a run is watched in its folder, where config.json has its flags; got {run} with a config.json, {what}. Name a "
            "recipe's --out-dir."
        )
    if out is None:
        return _serve_report(run, port, address, seconds, allowed_hosts)
    with readable(run):
        data = read_run(run)
        make_folder(out.absolute().parent, "--out's folder")
        write_page(followed(out), data)
    print(f"wrote {out}")


def _serve_report(
    run: Path, port: int, address: str, seconds: float, allowed_hosts: Sequence[str]
) -> None:
    from jaxpar.report.data import has_begun
    from jaxpar.report.server import RunServer

    try:
        server = RunServer(run, port, address=address, seconds=seconds, hosts=allowed_hosts)
    except OSError as error:
        raise ValueError(
            f"--address and --port must be free on this machine; got {with_port(address, port)} ({error.strerror}). Choose "
            "an address of this machine, or another port."
        ) from error
    with server:
        try:
            if not has_begun(run):
                what = "is empty" if run.is_dir() else "does not exist"
                tell(
                    f"{run} {what}: its report is served once a run begins there; Ctrl-C ends this"
                )
            while not has_begun(run):
                time.sleep(LOOK_SECONDS)
            print(f"{run} at http://{with_port(address, port)}/, until Ctrl-C", flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def watch(args: Sequence[str]) -> None:
    """Serves the report of a run while it trains, on this machine."""
    call(watch_run, args, "watch", example="runs/gpt")


def serve(args: Sequence[str]) -> int:
    """Answers HTTP requests for a trained model, for trying it and for small models; returns the exit code."""
    return _call_serve(args, _serve_model)


def check_serve(args: Sequence[str]) -> None:
    """Ends the process with code 2 where ``serve`` would not take a flag; it opens nothing."""
    _call_serve(args, lambda *_: 0)


def _call_serve(
    args: Sequence[str], act: "Callable[[Path, str, int, ModelSettings, Settings], int]"
) -> int:
    from jaxpar.serve.open_run import ModelSettings
    from jaxpar.serve.requests import Settings

    def serve_model(
        run: Run,
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
        allowed_hosts(address, limits.allowed_hosts)  # raises for what is no name
        return act(run, address, port, model, limits)

    return call(serve_model, args, "serve", example="runs/gpt")


def _serve_model(
    run: Path, address: str, port: int, model: "ModelSettings", limits: "Settings"
) -> int:
    from jaxpar.devices import started_devices
    from jaxpar.serve.open_run import open_model

    with needing_extra("serving needs starlette, uvicorn and prometheus-client", "serve"):
        from jaxpar.serve import server

    started_devices()  # raises where it would answer from the CPU of a machine with a GPU
    with server.listen(
        address, port
    ) as listening:  # before the model is loaded, which may take long
        with server.ending_on_signals():
            served = open_model(run, model)
        host, port = listening.getsockname()[:2]
        url = f"http://{with_port(host, port)}"
        tell(f"{printable(served.name)}: {printable(served.about)}; {url}/docs")
        return server.run(served, limits, listening)


def plot_runs(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    metric: str = "loss",
    out: Path | None = None,
) -> None:
    """Prints a table that compares the loss curves of runs, with a sketch of each; --out also plots them.

    Args:
        runs: Folders with a metrics.jsonl, which every recipe writes, or such files.
        metric: The column to plot: loss, test_loss, grad_norm, step_seconds, or another.
        out: File for the plot: .png, .svg or .pdf; needs matplotlib.
    """
    from jaxpar.plot import plot_curves, render_curves

    if not runs:
        raise ValueError(
            "plot must get one run or more; got none. Name the folders of runs: plot runs/a runs/b."
        )
    curves = {_name(run, runs): read_curve(run, metric) for run in runs}
    print(printable_lines(render_curves(curves, name=metric)))
    if out is not None:
        make_folder(out.absolute().parent, "--out's folder")
        plot_curves(curves, followed(out), name=metric)
        print(f"wrote {out}")


def read_curve(run: Path, metric: str) -> "Curve":
    """Returns the steps of a run that have a metric, and the values of the metric.

    Raises:
        ValueError: The file or the metric does not exist.
    """
    from jaxpar.metrics.log import figures_of, read_metrics

    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise ValueError(
            f"a run must be a folder with a metrics.jsonl, which its first step begins; got {run}, which has none. Name a "
            "recipe's --out-dir."
        )
    with figures_of(path):
        found = read_metrics(path)
        lines = [line for line in found if metric in line]
        curve = [int(line["step"]) for line in lines], [float(line[metric]) for line in lines]
    if not lines:
        columns = sorted({printable(name) for line in found for name in line} - {"step"})
        raise ValueError(
            f"--metric must be in {path}; got {metric!r}. It has {', '.join(columns) or 'no lines yet'}."
        )
    return curve


def _name(run: Path, runs: Sequence[Path]) -> str:
    """Returns the last part of a run's path, or the complete path if that part is not unique."""
    folder = run.parent if run.name == "metrics.jsonl" else run
    names = [(other.parent if other.name == "metrics.jsonl" else other).name for other in runs]
    return folder.name if names.count(folder.name) == 1 else str(folder)


def plot(args: Sequence[str]) -> None:
    """Compares the losses of runs, from their metrics.jsonl."""
    call(plot_runs, args, "plot")
