"""Machines, as network namespaces of this one: each with an address of its own on a common network."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

PORT = 29400
"""For torchrun's meeting; in the network of the nodes nobody else has it."""
_OUTSIDE = ["unshare", "--map-root-user", "--net", "sleep", "3600"]


def cannot() -> str:
    """Why this machine has no such nodes; empty where it has."""
    try:
        with nodes(2):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces are not allowed here: {error}"


class Node:
    """A namespace, kept by a process that sleeps."""

    def __init__(self, outside: int, number: int):
        self._enter = ["nsenter", f"--target={outside}", "--user", "--net", "--preserve-credentials"]
        self.keeper = subprocess.Popen([*self._enter, "unshare", "--net", "sleep", "3600"])
        self.address, self.jobs = f"10.77.0.{number + 1}", list[subprocess.Popen[str]]()

    def command(self, *words: str) -> list[str]:
        """Words that run a command on this node."""
        return ["nsenter", f"--target={self.keeper.pid}", "--user", "--net", "--preserve-credentials", *words]

    def start(self, *words: str, said: Path, **environment: str) -> subprocess.Popen[str]:
        """Start a program of Python on this node."""
        env = {**os.environ, **environment, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        with open(said, "w", encoding="utf-8") as out:
            job = subprocess.Popen(
                self.command(sys.executable, *words),
                env=env, stdout=out, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )  # fmt: skip
        self.jobs.append(job)
        return job

    def kill(self) -> None:
        """End everything on this node at once, as a power cut does."""
        for job in self.jobs:
            if job.poll() is None:
                everyone = [job, *psutil.Process(job.pid).children(recursive=True)]
                for one in everyone:
                    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                        os.kill(one.pid, signal.SIGKILL)
                job.wait()


@contextlib.contextmanager
def nodes(many: int) -> Iterator[list[Node]]:
    """So many machines, joined by a bridge; nothing is left of them."""
    outside = subprocess.Popen(_OUTSIDE)
    made: list[Node] = []
    try:
        _until_inside(outside.pid, os.getpid())
        enter = ["nsenter", f"--target={outside.pid}", "--user", "--net", "--preserve-credentials"]

        def run(*words: str) -> None:
            subprocess.run(words, check=True, capture_output=True)

        run(*enter, "ip", "link", "add", "hub", "type", "bridge")
        run(*enter, "ip", "link", "set", "hub", "up")
        for number in range(many):
            node = Node(outside.pid, number)
            made.append(node)
            _until_inside(node.keeper.pid, os.getpid(), outside.pid)
            peer = ["peer", "name", "eth0", "netns", str(node.keeper.pid)]
            run(*enter, "ip", "link", "add", f"port{number}", "type", "veth", *peer)
            run(*enter, "ip", "link", "set", f"port{number}", "master", "hub", "up")
            run(*node.command("ip", "addr", "add", f"{node.address}/24", "dev", "eth0"))
            run(*node.command("ip", "link", "set", "eth0", "up"))
            run(*node.command("ip", "link", "set", "lo", "up"))
        yield made
    finally:
        for node in made:
            node.kill()
        for keeper in [*(node.keeper for node in made), outside]:
            keeper.kill()
            keeper.wait()


def _until_inside(pid: int, *others: int) -> None:
    """Wait until a process has the network of its own that it is started for."""
    outer = {os.readlink(f"/proc/{other}/ns/net") for other in others}
    for _ in range(300):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/ns/net") not in outer:
                return
        time.sleep(0.1)
    raise OSError("no namespace within 30 s")


def torchrun(nodes: Sequence[Node], number: int) -> list[str]:
    """Words of a launcher on one of so many nodes, one process each."""
    meeting = ["--master_addr", nodes[0].address, "--master_port", str(PORT)]
    return ["-m", "torch.distributed.run", "--nnodes", str(len(nodes)), "--node_rank", str(number), *meeting]
