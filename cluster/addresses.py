"""Host and port in one word, also where the host is an IPv6 address: `[fd00::2]:6379`."""

import ipaddress

from cluster import ClusterError


def split_address(text: str) -> tuple[str, int] | None:
    """Host and port of `HOST:PORT` or `[IPV6]:PORT`; None where the text is neither.

    Raises:
        ClusterError: It is an IPv6 address without brackets, so that its end is not known.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        return None
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ClusterError(f"{text} has an IPv6 address without brackets: write [{host}]:{port}")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int | str) -> str:
    """`HOST:PORT`; an IPv6 address is put in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def bracketed(text: str) -> str:
    """An address as a user wrote it, with brackets around an IPv6 address without a port.

    Raises:
        ClusterError: It is an IPv6 address with a port, but without brackets.
    """
    if text.startswith("[") or text.count(":") < 2:
        return text
    try:
        ipaddress.IPv6Address(text.partition("%")[0])
    except ValueError:
        split_address(text)  # says how to write it
        raise ClusterError(f"{text} is not an address: write HOST:PORT, or [IPV6]:PORT") from None
    return f"[{text}]"
