"""One end of Lab.measure_rate (lab/benchmarks/netlab.py): a script for its host that imports nothing of the project."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time


def measure(seconds: float) -> None:
    """Prints the payload bits per second that it received."""
    rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank > 1:
        return
    if rank == 0:
        with socket.create_server(address) as server:
            server.settimeout(20)
            connection, _ = server.accept()
    else:
        connection = _connect(address, time.monotonic() + 20)
    connection.settimeout(20)
    start = time.monotonic()
    settled = start + 0.3  # past slow start and the first full bucket

    def send() -> None:
        block = bytes(1 << 18)
        while time.monotonic() < settled + seconds + 0.1:  # longer than the peer counts
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    buffer = bytearray(1 << 18)
    received, first, last = 0, 0.0, 0.0
    while size := connection.recv_into(buffer):
        now = time.monotonic()
        if first and now <= settled + seconds:
            received, last = received + size, now
        elif not first and now >= settled:
            first = now
    sender.join()
    connection.close()
    print(8 * received / (last - first) if last > first else 0.0)


def _connect(address: tuple[str, int], deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address, timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    measure(float(sys.argv[1]))
