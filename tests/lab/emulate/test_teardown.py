"""Nothing is left behind: no process, no namespace, no interface; whatever happens to the program that asked for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support import lean
from thinwire.lab.emulate.hosts import Hosts, emulated_hosts

# Starts a worker in each host, tells the processes and the namespaces, and waits.
PARENT = """
import json, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have it ignored
from thinwire.lab.emulate.hosts import emulated_hosts
with emulated_hosts(2, network="100mbit,1ms", prove=False, method="switch") as hosts:
    workers = [hosts.start(rank, ["sleep", "1000"]) for rank in range(2)]
    children = [worker.pid for worker in workers] + [hosts._holder.pid]
    while not all(open(f"/proc/{worker.pid}/comm").read() == "sleep\\n" for worker in workers):
        time.sleep(0.01)
    print(json.dumps([children, [os.readlink(f"/proc/{worker.pid}/ns/net") for worker in workers]]), flush=True)
    END
"""


def interfaces() -> set[str]:
    return set(os.listdir("/sys/class/net"))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def used_namespaces() -> set[str]:
    """All network namespaces that a process is in or holds open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        for link in (process / "ns" / "net", *(process / "fd").glob("*")):
            try:
                found.add(os.readlink(link))
            except OSError:
                continue
    return found


@pytest.mark.parametrize("end", ["kill", "interrupt", "interrupt the group", "terminate", "error", "exit"])
def test_nothing_is_left(tun: str, end: str) -> None:
    before = interfaces()
    code = {"error": "raise ValueError('as a test')", "exit": "sys.exit(3)"}.get(end, "time.sleep(1000)")
    with lean.start(PARENT.replace("END", code), start_new_session=True) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        line = parent.stdout.readline()
        assert line, parent.stderr.read()
        children, namespaces = json.loads(line)
        if end == "kill":
            parent.kill()
        elif end == "interrupt":
            parent.send_signal(signal.SIGINT)
        elif end == "interrupt the group":
            os.killpg(parent.pid, signal.SIGINT)
        elif end == "terminate":
            parent.terminate()
        assert lean.within(lambda: not any(alive(pid) for pid in (*children, parent.pid)))
        assert lean.within(lambda: not used_namespaces() & set(namespaces))
    assert interfaces() == before


def test_a_failed_block_ends_its_workers(tun: str) -> None:
    def fail(hosts: Hosts) -> None:
        workers.append(hosts.start(0, ["sleep", "1000"]))
        raise ZeroDivisionError

    workers: list[subprocess.Popen[bytes]] = []
    with pytest.raises(ZeroDivisionError), emulated_hosts(2, network="5ms", prove=False) as hosts:
        fail(hosts)
    assert workers[0].returncode == -signal.SIGKILL
    hosts.close()  # again: nothing


def test_a_worker_may_be_started_from_any_thread(tun: str) -> None:
    """Linux ends a child with the *thread* that started it; here that thread is ours."""
    from concurrent.futures import ThreadPoolExecutor

    with emulated_hosts(2, network="5ms", prove=False) as hosts:
        with ThreadPoolExecutor(1) as pool:
            worker = pool.submit(hosts.start, 1, ["sleep", "0.3"]).result()
        assert worker.wait(60) == 0


def test_a_command_that_does_not_exist(tun: str) -> None:
    with emulated_hosts(2, network="5ms", prove=False) as hosts:
        worker = hosts.start(0, ["no-such-command"], stderr=subprocess.PIPE, text=True)
        assert "cannot run no-such-command" in worker.communicate(timeout=60)[1]
        assert worker.returncode == 127


def test_environment_and_files_reach_the_worker(tun: str) -> None:
    code = (
        "import os, sys; print(os.environ['GLOO_SOCKET_IFNAME'], os.environ['MINE']); os.write(int(sys.argv[1]), b'x')"
    )
    reading, writing = os.pipe()
    with emulated_hosts(2, network="5ms", prove=False) as hosts, os.fdopen(reading, "rb") as pipe:
        worker = hosts.start(
            0,
            [sys.executable, "-I", "-S", "-c", code, str(writing)],
            env={"MINE": "1"},
            pass_fds=[writing],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert worker.communicate(timeout=60)[0] == "tw0 1\n"
        os.close(writing)
        assert pipe.read() == b"x"
