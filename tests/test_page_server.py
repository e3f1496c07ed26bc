"""A server of pages answers everyone who asks, whatever other connections do."""

import asyncio
import contextlib
import errno
import http.client
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxpar.runtime import connections, page_server
from jaxpar.runtime.connections import Connections, most_connections
from jaxpar.runtime.page_server import PageServer
from tests.support.waiting import WAIT_SECONDS, wait_until


@pytest.fixture
def server():
    server = PageServer({"/": ("text/plain", lambda: "page")}, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def connect(server):
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=WAIT_SECONDS)


def is_closed(slow):
    """Whether a connection that sends another byte, a little later, is closed."""
    try:
        slow.sendall(b"G")
    except OSError:
        return True
    time.sleep(0.05)
    return False


def get(server, path="/"):
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=WAIT_SECONDS)
    ) as asked:
        asked.request("GET", path)
        answer = asked.getresponse()
        return answer.status, answer.read()


def test_each_of_200_requests_at_a_time_is_answered(server):
    with ThreadPoolExecutor(50) as clients:
        assert set(clients.map(lambda _: get(server), range(200))) == {(200, b"page")}


def test_connections_that_send_nothing_cost_no_thread_and_keep_nobody_out(monkeypatch, server):
    monkeypatch.setattr(page_server, "Connections", lambda: Connections(8))
    before = threading.active_count()
    with contextlib.ExitStack() as held:
        for _ in range(60):
            held.enter_context(connect(server))
        assert get(server) == (200, b"page")
        assert threading.active_count() <= before + page_server.NUM_THREADS + 1


def test_a_new_connection_takes_the_place_of_the_one_that_has_waited_longest(server):
    assert get(server)[0] == 200
    server.connections._most = 8
    with contextlib.ExitStack() as held:
        silent = [held.enter_context(connect(server)) for _ in range(12)]
        assert get(server) == (200, b"page")
        assert silent[0].recv(1) == b""


def test_a_request_that_comes_too_slowly_is_not_waited_for(monkeypatch, server):
    monkeypatch.setattr(connections, "SECONDS_TO_ASK", 0.2)
    with connect(server) as slow:
        wait_until(lambda: is_closed(slow))


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"X" * 2**17, b"POST / HTTP/1.1\r\n\r\n"],
)
def test_what_is_no_request_harms_nothing(server, sent):
    with connect(server) as stranger, contextlib.suppress(OSError):
        stranger.sendall(sent)
        assert not stranger.recv(2**16).startswith(b"HTTP/1.0 200")
    assert get(server) == (200, b"page")


def test_a_server_has_fewer_connections_than_its_process_may_open_files(monkeypatch):
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (1024, 1024))
    assert connections.LEAST < most_connections() <= 1024 - connections.SPARE_FILES
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (64, 64))
    assert most_connections() == connections.LEAST


def test_a_server_that_ends_leaves_no_client_waiting():
    for _ in range(10):
        server = PageServer({"/": ("text/plain", lambda: "page")}, "127.0.0.1", 0)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        clients = [connect(server) for _ in range(5)]
        server.shutdown()
        server.server_close()
        thread.join()
        for client in clients:
            with client, contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""


class Closing(asyncio.WriteTransport):
    def __init__(self, number, closed):
        self.abort = lambda: closed.append(number)


def test_a_process_that_can_open_no_more_files_makes_room_and_says_so_once(capfd):
    closed = []
    full = {
        "exception": OSError(errno.EMFILE, "Too many open files"),
        "message": "socket.accept() out of system resource",
    }

    async def run():
        all_of_them = Connections(8)
        for number in range(3):
            all_of_them.waits(Closing(number, closed))
        for _ in range(2):
            all_of_them.handle(asyncio.get_running_loop(), full)

    asyncio.run(run())
    assert closed == [0, 1]
    assert (
        capfd.readouterr().err.count("this process can open no more files: Too many open files")
        == 1
    )
