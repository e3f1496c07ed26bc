"""The names by which a server may be asked for: those of this machine at a loopback address, any at others, unless told."""

import pytest

from jaxpar.runtime.host_names import (
    allowed_hosts,
    is_allowed,
    is_by_address,
    is_loopback,
    with_port,
)

LOCAL = ("localhost", "localhost:8000", "LOCALHOST:1", "127.0.0.1:80", "[::1]", "[::1]:8000")
OTHERS = (
    "elsewhere.example",
    "elsewhere.example:8000",
    "localhost.elsewhere.example",
    "",
    "10.0.0.1",
    "[fe80::1]:8000",
)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost", "127.0.0.9"])
def test_at_a_loopback_address_the_names_of_this_machine_are_allowed(address):
    allowed = allowed_hosts(address)
    assert is_loopback(address)
    assert all(is_allowed(host, allowed) for host in LOCAL)
    assert not any(is_allowed(host, allowed) for host in OTHERS)
    assert is_allowed(f"[{address}]:8000" if ":" in address else f"{address}:8000", allowed)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.1", "gpu-box"])
def test_at_other_addresses_any_name_is(address):
    assert all(is_allowed(host, allowed_hosts(address)) for host in (*LOCAL, *OTHERS))


def test_names_that_are_given_are_allowed_beside_those_of_this_machine():
    allowed = allowed_hosts("127.0.0.1", ["GPU-box.example"])
    assert is_allowed("gpu-box.example:8000", allowed)
    assert is_allowed("localhost", allowed)
    assert not is_allowed("elsewhere.example", allowed)
    assert not is_allowed("localhost", allowed_hosts("0.0.0.0", ["gpu-box.example"]))
    assert is_allowed("elsewhere.example", allowed_hosts("127.0.0.1", ["*"]))


def test_a_full_name_may_end_with_a_dot():
    for name in ("gpu-box.example", "gpu-box.example."):
        allowed = allowed_hosts("0.0.0.0", [name])
        assert is_allowed("gpu-box.example.", allowed)
        assert is_allowed("gpu-box.example.:8000", allowed)
        assert is_allowed("gpu-box.example", allowed)


def test_an_address_in_place_of_a_name_is_known():
    hosts = ("10.0.0.1", "10.0.0.1:8000", "[fd00::1]", "[fd00::1]:8000")
    assert all(map(is_by_address, hosts))
    assert not any(map(is_by_address, ("", "localhost", "10.0.0.1.example:80", "10:80", "0x7f.1")))


@pytest.mark.parametrize("name", ["", "http://localhost", "localhost:8000", "a b"])
def test_what_is_no_name_of_a_host_is_refused(name):
    with pytest.raises(
        ValueError, match=r"allowed_hosts must be names of hosts, without ports; got .* for any\."
    ):
        allowed_hosts("127.0.0.1", [name])


@pytest.mark.parametrize(
    ("address", "shown"), [("::", "[::]:8396"), ("127.0.0.1", "127.0.0.1:8396"), ("a", "a:8396")]
)
def test_an_address_is_shown_as_a_url_has_it(address, shown):
    assert with_port(address, 8396) == shown
