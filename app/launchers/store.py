"""The store in which ranks meet, open to no more machines than it must be."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

TIMEOUT = timedelta(minutes=30)
"""How long ranks wait for one another."""


def open_store(host: str) -> TCPStore:
    """A store for ranks that reach this machine at this address.

    torch's own listens at every address of the machine. The store has no password, so one for ranks
    of this machine alone must not be reachable from another.

    Args:
        host: An IP address of this machine, which the store listens at. A name, or an address that
            is another machine's in front of this one, makes it listen at every address.
    """
    from torch.distributed import TCPStore

    address = "127.0.0.1" if host == "localhost" else host
    try:
        ipaddress.ip_address(address)
        listener = socket.create_server((address, 0), family=_family(address))
    except (ValueError, OSError):
        return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
