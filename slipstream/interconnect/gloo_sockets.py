"""Which interface gloo really uses: the local ends of the connections that this process has to its peers."""

from __future__ import annotations

import os
import socket

import psutil


def transports_in_use() -> tuple[str, ...]:
    """``eth0 (10.0.0.7)``, one line for each interface over which this process is connected, but for the connection
    to the store."""
    store = os.environ.get("MASTER_PORT", "")
    names = {
        address.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }
    local = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections(kind="tcp")
        if connection.status == psutil.CONN_ESTABLISHED and str(connection.raddr.port) != store
    }
    return tuple(sorted(f"{names.get(unmapped(ip), 'unknown')} ({unmapped(ip)})" for ip in local))


def unmapped(address: str) -> str:
    """An IPv4 address that was written as one of IPv6."""
    return address.removeprefix("::ffff:")
