"""Who has the port: from laid-out files, and of this process."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from glm53srv.port_owner import port_owner

TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:7530 00000000:0000 {state} 00000000:00000000 00:00000000 00000000     0        0 4711 1 0
"""


def lay_out(root: Path, state: str, table: str = "tcp") -> Path:
    (root / "proc/net").mkdir(parents=True)
    (root / "proc/net" / table).write_text(TCP.format(state=state))
    for pid, name, link in ((7, "other", "socket:[1]"), (12, "llama-server", "socket:[4711]")):
        (root / f"proc/{pid}/fd").mkdir(parents=True)
        (root / f"proc/{pid}/comm").write_text(f"{name}\n")
        (root / f"proc/{pid}/fd/3").symlink_to(link)
    return root


def test_the_process_with_the_socket_is_named(tmp_path: Path) -> None:
    assert port_owner(30000, lay_out(tmp_path, "0A")) == "llama-server, pid 12"
    assert port_owner(30001, tmp_path) == ""


def test_the_table_of_ipv6_counts_too(tmp_path: Path) -> None:
    assert port_owner(30000, lay_out(tmp_path, "0A", "tcp6")) == "llama-server, pid 12"


def test_a_connection_is_no_listener(tmp_path: Path) -> None:
    assert port_owner(30000, lay_out(tmp_path, "01")) == ""


def test_a_machine_without_these_files_names_nobody(tmp_path: Path) -> None:
    assert port_owner(30000, tmp_path) == ""


def test_this_process_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert port_owner(taken.getsockname()[1]).endswith(f", pid {os.getpid()}")
