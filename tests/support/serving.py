"""Models to serve, servers in a thread of the test, and clients of plain HTTP, for the tests of `jaxpar.serve`."""

import asyncio
import contextlib
import http.client
import json
import threading
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import jaxpar
from jaxpar.checkpoint import CheckpointManager
from jaxpar.models import transformer
from jaxpar.serve.app import App
from jaxpar.serve.open_run import ModelSettings, open_model
from jaxpar.serve.requests import Settings
from jaxpar.serve.server import Server, listen
from jaxpar.train import TrainState
from tests.support import tiny_transformer
from tests.support.waiting import WAIT_SECONDS, wait_until

CONFIG = transformer.TransformerConfig(
    **tiny_transformer.SHAPE | {"vocab_size": 256, "num_layers": 2, "max_positions": 64},
    **tiny_transformer.LLAMA,
    tokens="bytes",
)


def write_checkpoint(folder, table, seed=0):
    """Returns random params on the host, drawn without a program of their own, and writes them as step 1 of a run."""
    mesh, rng = jaxpar.make_mesh(), np.random.default_rng(seed)
    draw = lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype(leaf.dtype)
    params = jax.tree.map(draw, jaxpar.params.abstract_params(table))
    state = TrainState(np.int32(0), params, optax.sgd(0.1).init(params), np.int32(0))
    state = jaxpar.shard(state, jax.tree.map(lambda _: jax.NamedSharding(mesh, jax.P()), state))
    CheckpointManager(folder / "checkpoints", mesh).save(state)
    return params


def write_gpt_run(folder, config=CONFIG):
    """Writes a run as recipes/gpt.py does; returns its params."""
    params = write_checkpoint(folder, transformer.param_table(config))
    jaxpar.huggingface.write_description(folder / "model", config)
    (folder / "config.json").write_text(json.dumps({"model": "tiny", "tokenizer": None}))
    return params


class Response(NamedTuple):
    status: int
    headers: Any
    text: str

    @property
    def json(self):
        return json.loads(self.text)

    @property
    def message(self):
        return self.json["error"]["message"]

    @property
    def events(self):
        """The events of a stream, which ends with [DONE]."""
        *events, done = [line.removeprefix("data: ") for line in self.text.split("\n\n") if line]
        assert done == "[DONE]"
        return [json.loads(event) for event in events]


class Client(NamedTuple):
    """Asks a server, each time on a connection of its own."""

    port: int
    app: Any = None
    server: Any = None
    loop: Any = None

    def send(self, method, path, body=b"", headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_SECONDS)
        with contextlib.closing(connection):
            connection.request(
                method,
                path,
                body,
                headers or {},
                encode_chunked="Transfer-Encoding" in (headers or {}),
            )
            response = connection.getresponse()
            return Response(response.status, response.headers, response.read().decode())

    def get(self, path):
        return self.send("GET", path)

    def post(self, path, body):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send("POST", path, content, {"Content-Type": "application/json"})


def answer(folder, body):
    """Returns what the first endpoint of the model in a folder answers, without a server, and the config of the model."""
    (endpoint, *_) = open_model(folder, ModelSettings()).endpoints
    reply = endpoint.make_reply(endpoint.body.model_validate(body))
    return reply.whole([*reply.work()]), endpoint.make_reply.__self__.model.config


@contextlib.contextmanager
def serving(folder, *, limits=None, **model):
    """Yields a client of a server of the model in a folder, which runs in a thread."""
    served = open_model(folder, ModelSettings(**model))
    with (
        listen("127.0.0.1", 0) as listening,
        serving_app(served, listening, limits or Settings()) as client,
    ):
        yield client


@contextlib.contextmanager
def serving_app(served, listening, limits):
    begun, told = threading.Event(), {}

    async def run():
        app = App(served, limits)
        server = Server(app)
        told.update(app=app, server=server, loop=asyncio.get_running_loop())
        begun.set()
        told["code"] = await server.serve(listening)
        app.worker.close()

    port = listening.getsockname()[1]
    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert begun.wait(WAIT_SECONDS)
    client = Client(port, told["app"], told["server"], told["loop"])
    try:
        wait_until(lambda: told["app"].is_ready or not thread.is_alive())
        yield client
    finally:
        told["loop"].call_soon_threadsafe(told["server"].begin_to_stop)
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
        assert told["code"] == 0


def text_of(tokens):
    return bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")
