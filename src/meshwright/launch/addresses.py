"""Where the processes of a run meet: ports that are listened at, and the address by which others reach this machine."""

import socket
import struct
import sys
from contextlib import suppress

LOOPBACK = "127.0.0.1"

_ELSEWHERE = "192.0.2.1"  # an address that is nobody's (RFC 5737); nothing is sent there
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>


def split(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port of `host:port`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Listen at a port of this machine.

    Arguments:
        host: by which others know this machine; `127.0.0.1` and `localhost`: at its loopback alone, else everywhere.
        port: to listen at.
        shared: whether the port may be held by a socket that lets others in that say so, too (`SO_REUSEPORT`).

    Raises:
        OSError, OverflowError: the port can't be had.
    """
    local = host in (LOOPBACK, "localhost")
    if local or not socket.has_dualstack_ipv6():
        return socket.create_server((LOOPBACK if local else "", port), reuse_port=shared)
    return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, reuse_port=shared)


def own_address(host: str) -> str:
    """The address of this machine by which another one is reached; empty: it isn't."""
    with suppress(OSError):
        family, *_, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            return probe.getsockname()[0]
    return ""


def address_for_others(host: str) -> str:
    """The address of this machine for the processes that meet at a host; empty: not known.

    Gloo would take the one where the name of this machine leads, which may be its loopback (Debian's 127.0.1.1).
    """
    own = own_address(host)
    if own.startswith("127.") and not host.startswith("127."):
        own = own_address(_ELSEWHERE)
    return own


def interface_of(address: str) -> str:
    """The name of this machine's network interface that has an IPv4 address; empty: not known."""
    if sys.platform != "linux":
        return ""
    import fcntl

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""
