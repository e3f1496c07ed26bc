"""The rendezvous of a run: missing processes, processes that disagree, where process 0 listens. Threads stand for processes."""

import re
import socket
import threading

import pytest

from jaxpar.runtime.launch import free_port
from jaxpar.runtime.process_env import ProcessEnv
from jaxpar.runtime.rendezvous import meet
from tests.support.meetings import call, late_once
from tests.support.waiting import NEVER, WAIT_SECONDS, wait_until


@pytest.fixture
def address():
    return f"127.0.0.1:{free_port()}"


def test_all_who_come_go_on_together_and_the_port_is_free_again(address):
    given = call(*(ProcessEnv(address, 5, number) for number in (3, 1, 0, 4, 2)))
    assert given == ["", "", address, "", ""]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", int(address.split(":")[1])))


def test_a_missing_process_is_named_to_all_at_the_time_out(address, monkeypatch):
    late_once(monkeypatch, lambda connections: len(connections.present) == 2)
    given = call(*(ProcessEnv(address, 4, number) for number in (0, 1, 3)))
    for error in given:
        assert isinstance(error, TimeoutError), error
        assert f"4 processes must connect within {NEVER:g} s; got 3, missing: process 2." in str(
            error
        )
    assert "loopback address" in str(given[0]), "the likeliest cause where hosts are several"


def test_process_0_missing_is_named_to_the_others(address):
    (error,) = call(ProcessEnv(address, 2, 1), seconds=1.0)
    assert isinstance(error, TimeoutError)
    assert (
        f"process 0 must answer within 1 s; process 1 of 2 got none at {address}: Connection refused"
        in str(error)
    )


def test_unequal_counts_are_told_to_both(address):
    given = call(ProcessEnv(address, 2, 0), ProcessEnv(address, 3, 1))
    for error in given:
        assert isinstance(error, ValueError), error
        assert "must have the same number of them; got 2 on process 0 and 3 on process 1" in str(
            error
        )


def test_two_processes_of_one_number_are_told(address):
    given = call(ProcessEnv(address, 3, 0), ProcessEnv(address, 3, 1), ProcessEnv(address, 3, 1))
    assert all("got JAX_PROCESS_ID=1 twice" in str(error) for error in given), given


def test_a_busy_port_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            OSError,
            match=rf"must be able to listen at JAX_COORDINATOR_ADDRESS; got 127.0.0.1:{port}, which an",
        ):
            meet(ProcessEnv(f"127.0.0.1:{port}", 2, 0), 5.0)


def test_process_0_listens_at_the_given_address_alone(address):
    """127.0.0.2 is another address of this machine: what listens on all of them would answer there."""
    port = int(address.split(":")[1])
    thread = threading.Thread(target=call, args=(ProcessEnv(address, 2, 0),), daemon=True)
    thread.start()
    wait_until(lambda: answers("127.0.0.1", port), "process 0 must listen")
    with pytest.raises(OSError, match=r"refused|timed out"):
        socket.create_connection(("127.0.0.2", port), timeout=WAIT_SECONDS)
    assert call(ProcessEnv(address, 2, 1)) == [""]
    thread.join()


def answers(host, port):
    try:
        socket.create_connection((host, port), timeout=WAIT_SECONDS).close()
    except OSError:
        return False
    return True


def test_another_host_s_address_is_refused_with_the_remedy():
    with pytest.raises(
        OSError,
        match=re.escape(
            "got 192.0.2.1:1234, which is not an address of this machine. Run process 0 on"
        ),
    ):
        meet(ProcessEnv("192.0.2.1:1234", 2, 0), 5.0)


def test_a_bind_address_of_its_own_is_used(address):
    given = call(ProcessEnv("192.0.2.1:1234", 1, 0, bind=address))
    assert given == [address]


def test_a_loopback_address_with_several_hosts_is_refused():
    for number in (0, 1):
        with pytest.raises(
            ValueError,
            match=r"every host can reach; got localhost:1234, a loopback address .*several hosts",
        ):
            meet(ProcessEnv("localhost:1234", 2, number, on_several_hosts=True), 5.0)


def test_a_name_that_does_not_resolve_is_told():
    with pytest.raises(
        ValueError, match=r"JAX_COORDINATOR_ADDRESS must name a host; got nowhere.invalid:1234"
    ):
        meet(ProcessEnv("nowhere.invalid:1234", 2, 0), 5.0)


def test_strangers_at_the_port_are_passed_over(address):
    host, port = address.split(":")

    def says(noise):
        try:
            with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as stranger:
                stranger.sendall(noise)
        except OSError:
            return False
        return True

    def disturb():
        for noise in (
            b"GET / HTTP/1.1\r\n\r\n\n",
            b"",
            b"[1, 2]\n",
            b'{"process": "x", "of": 2}\n',
        ):
            wait_until(lambda noise=noise: says(noise), "process 0 must listen")
        return meet(ProcessEnv(address, 2, 1), NEVER)

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    assert meet(ProcessEnv(address, 2, 0), NEVER) == address
    thread.join(timeout=WAIT_SECONDS)
