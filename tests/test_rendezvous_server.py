"""Unknown connections to process 0: whatever they send, and however slowly, only the run's processes count."""

import contextlib
import errno
import random
import socket
import threading
import time

import pytest

from jaxpar.runtime import rendezvous
from jaxpar.runtime.launch import free_port
from jaxpar.runtime.process_env import ProcessEnv, read_process_env
from jaxpar.runtime.rendezvous import MAX_LINE_BYTES, MAX_SILENT, Connections, meet
from tests.support.meetings import call, late_once
from tests.support.waiting import NEVER, WAIT_SECONDS, wait_until

TOKEN = "5f0c2d"


@pytest.fixture
def address():
    return f"127.0.0.1:{free_port()}"


def envs(address, *numbers, count=3, token=TOKEN):
    return [ProcessEnv(address, count, number, token=token) for number in numbers]


@contextlib.contextmanager
def process_0(address, seconds=NEVER, **changes):
    """Process 0 in a thread, once it listens; gives what its call gave, an address or an exception, when it has ended."""
    given = []
    thread = threading.Thread(
        target=lambda: given.extend(call(*envs(address, 0, **changes), seconds=seconds))
    )
    thread.start()
    connect(address).close()
    yield given
    thread.join(timeout=WAIT_SECONDS)
    assert not thread.is_alive(), "process 0 must end by its time-out"


def connect(address):
    host, port = address.split(":")
    made = []

    def connects():
        with contextlib.suppress(OSError):
            made.append(socket.create_connection((host, int(port)), timeout=WAIT_SECONDS))
        return made

    wait_until(connects, "process 0 must listen")
    return made[0]


def say(address, *texts):
    """Connects once for each text, says it and hangs up."""
    for text in texts:
        with contextlib.suppress(OSError), connect(address) as stranger:
            stranger.sendall(text)


NOISE = {
    "nested": b"[" * (MAX_LINE_BYTES - 1) + b"\n",
    "nested objects": b'{"process":' * 400 + b"\n",
    "a number out of range": f"jaxpar 3 of 3 {TOKEN}\n".encode(),
    "a number far out of range": f"jaxpar 999999999 of 3 {TOKEN}\n".encode(),
    "more digits than an integer may have": f"jaxpar {'9' * 4000} of 3 {TOKEN}\n".encode(),
    "no token": b"jaxpar 1 of 3 \n",
    "another token": b"jaxpar 1 of 3 5f0c2e\n",
    "a longer token": f"jaxpar 1 of 3 {TOKEN}0\n".encode(),
    "another count without the token": b"jaxpar 1 of 9 -\n",
    "number 0 without the token": b"jaxpar 0 of 3 -\n",
    "two lines": f"jaxpar 1 of 3 {TOKEN}\njaxpar 2 of 3 {TOKEN}\n".encode(),
    "no end of line": b"jaxpar " * 10_000,
    "a request": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no text": bytes(range(256)) + b"\n",
    "nothing": b"",
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE.keys())
def test_what_strangers_say_neither_counts_nor_stops_the_run(address, noise):
    with process_0(address) as given:
        say(address, noise, noise)
        assert call(*envs(address, 1, 2)) == ["", ""]
    assert given == [address]


def mutated(rng):
    """A line of the run with bytes changed, left out, doubled or cut in two, or random bytes; never a valid one."""
    line = bytearray(f"jaxpar {rng.randrange(1, 3)} of 3 {TOKEN}\n".encode())
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(line))
        line[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        line = line or bytearray(b"\n")
    return bytes(line) if TOKEN.encode() not in line else rng.randbytes(rng.randrange(1, 100))


@pytest.mark.parametrize(
    "seed", [0, 1, pytest.param(range(2, 30), marks=pytest.mark.slow)], ids=str
)
def test_lines_at_random_neither_count_nor_stop_the_run(address, seed):
    for each in [seed] if isinstance(seed, int) else seed:
        rng = random.Random(each)
        with process_0(address) as given:
            say(address, *(mutated(rng) for _ in range(100)))
            assert call(*envs(address, 1, 2)) == ["", ""], f"seed {each}"
        assert given == [address], f"seed {each}"


def test_strangers_who_drip_delay_neither_the_run_nor_its_time_out(address, monkeypatch):
    late_once(monkeypatch, lambda connections: connections.present)
    stop = threading.Event()

    def drip(stranger):
        with contextlib.suppress(OSError):
            while not stop.wait(0.05):
                stranger.sendall(b"j")

    with contextlib.ExitStack() as strangers, process_0(address) as given:
        strangers.callback(stop.set)  # they drip until process 0 has ended
        connected = [strangers.enter_context(connect(address)) for _ in range(10)]
        threads = [threading.Thread(target=drip, args=(stranger,)) for stranger in connected]
        for thread in threads:
            thread.start()
        (error,) = call(*envs(address, 1))
    assert "missing: process 2" in str(error), "told to the one that came"
    assert "missing: process 2" in str(given[0])
    for thread in threads:
        thread.join()


def test_more_silent_strangers_than_are_kept_do_not_keep_the_run_out(address):
    with contextlib.ExitStack() as strangers, process_0(address) as given:
        for _ in range(MAX_SILENT + 20):
            strangers.enter_context(connect(address))
        assert call(*envs(address, 1, 2)) == ["", ""]
    assert given == [address]


def test_a_silent_stranger_is_dropped_when_its_time_is_up(address, monkeypatch):
    monkeypatch.setattr(rendezvous, "SECONDS_TO_SPEAK", 0.2)
    with process_0(address) as given:
        with connect(address) as stranger, contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        assert call(*envs(address, 1, 2)) == ["", ""]
    assert given == [address]


class NoFilesLeft(socket.socket):
    """A listener of a process that may open no more files until a connection is closed."""

    failures = 3

    def accept(self):
        self.failures -= 1
        if self.failures >= 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_process_0_that_may_open_no_more_files_waits_on(address):
    listener = NoFilesLeft(socket.AF_INET)
    host, port = address.split(":")
    listener.bind((host, int(port)))
    listener.listen()
    listener.setblocking(False)
    with Connections(*envs(address, 0, count=2), listener) as connections, connect(address) as one:
        one.sendall(f"jaxpar 1 of 2 {TOKEN}\n".encode())
        wait_until(lambda: connections.receive() or connections.present)
        assert list(connections.present) == [1]


def test_another_token_is_told_to_both_sides(address, monkeypatch):
    late_once(monkeypatch, lambda connections: connections.num_refused)
    with process_0(address, count=2) as given:
        (error,) = call(*envs(address, 1, count=2, token="another"))
    assert isinstance(error, ValueError)
    assert (
        "every process of a run must have its token; got another JAXPAR_RUN_TOKEN on process 1"
        in str(error)
    )
    assert "missing: process 1. 1 connected with another JAXPAR_RUN_TOKEN." in str(given[0])
    assert TOKEN not in f"{error} {given}"


def test_a_process_that_ends_while_others_come_is_missing_until_it_comes_again(
    address, monkeypatch
):
    receive, seen = Connections.receive, []
    monkeypatch.setattr(
        Connections, "receive", lambda self: (receive(self), seen.append(sorted(self.present)))
    )
    with process_0(address) as given:
        say(address, f"jaxpar 1 of 3 {TOKEN}\n".encode())
        wait_until(
            lambda: [1] in seen and seen[-1] == [], "a process that hangs up must be missing again"
        )
        assert call(*envs(address, 2, 1)) == ["", ""]
    assert given == [address]


@pytest.mark.parametrize(
    "answer",
    [b"[" * 5000 + b"\n", b"all are there" * 1000, b"yes\n", b"", b"wrong\n", b"all are there \x1b[2J\n"],
    ids=["nested", "endless", "another word", "nothing", "half a word", "more"],
)  # fmt: skip
def test_a_stranger_in_the_place_of_process_0_gets_no_process_to_go_on(address, answer):
    with impostor(address, lambda connection: connection.sendall(answer)):
        (error,) = call(*envs(address, 1), seconds=0.5)
    assert isinstance(error, (TimeoutError, ValueError)), error
    assert str(error).isprintable()


def test_a_stranger_that_drips_in_the_place_of_process_0_delays_nobody(address):
    def drip(connection):
        while True:  # until the process hangs up
            connection.sendall(b"a")
            time.sleep(0.05)

    with impostor(address, drip):
        (error,) = call(*envs(address, 1), seconds=0.5)
    assert isinstance(error, TimeoutError)


@contextlib.contextmanager
def impostor(address, answer):
    """Another program that listens at the address of process 0."""
    host, port = address.split(":")
    with socket.create_server((host, int(port))) as listener:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.recv(100)
                        answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("token", ["two words", "line\nend", "é", "a" * 257])
def test_a_token_that_is_no_word_is_refused_and_not_shown(token):
    told = {
        "JAX_COORDINATOR_ADDRESS": "a:1",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
        "JAXPAR_RUN_TOKEN": token,
    }
    with pytest.raises(ValueError, match="JAXPAR_RUN_TOKEN must be at most 256 letters") as error:
        read_process_env(told)
    assert token not in str(error.value)


def test_the_token_is_taken_from_the_environment_and_not_printed():
    told = {
        "JAX_COORDINATOR_ADDRESS": "a:1",
        "JAX_NUM_PROCESSES": "1",
        "JAX_PROCESS_ID": "0",
        "JAXPAR_RUN_TOKEN": TOKEN,
    }
    env = read_process_env(told)
    assert env.token == TOKEN
    assert TOKEN not in repr(env)


def test_one_process_alone_waits_for_nobody(address):
    assert meet(ProcessEnv(address, 1, 0), 5.0) == address
