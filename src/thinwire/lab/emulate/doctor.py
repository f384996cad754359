"""Tells which slow networks this machine can emulate: each way is tried, not guessed from versions and permissions."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from typing import Any

from ...errors import EmulationError, OptionError
from ...predict.spec import parse_network
from .hosts import Hosts

_DELAYED, _LIMITED = "100mbit,1ms", "100mbit"


@dataclass(frozen=True)
class Finding:
    """One capability: whether it works, why not, and how to fix it."""

    name: str
    works: bool
    detail: str = ""
    fix: str = ""

    def __str__(self) -> str:
        line = f"{'yes' if self.works else 'no':4}{self.name}"
        line += f": {self.detail}" if self.detail else ""
        return line + (f" -> {self.fix}" if self.fix and not self.works else "")


def examine() -> list[Finding]:
    """Try everything; about two seconds.

    >>> [finding.name for finding in examine() if finding.name.startswith("network by our switch")]
    ['network by our switch, over TUN', 'network by our switch, over veth']
    """
    return [*_networks(), *_permissions(), *_software()]


def best_method(findings: list[Finding]) -> str:
    """The method that `compare` will use here, in one sentence.

    >>> best_method([Finding("network by our switch, over TUN", False)])
    'networks with a delay: paced inside the process, with a notice on the report'
    """
    works = {finding.name for finding in findings if finding.works}
    if "network by the kernel: rate, delay, jitter, loss" in works:
        return "networks with a delay: by the kernel"
    if any(name.startswith("network by our switch") for name in works):
        return "networks with a delay: by our switch"
    return "networks with a delay: paced inside the process, with a notice on the report"


def _networks() -> list[Finding]:
    privileges = "run as root, or allow unprivileged user namespaces (sysctl user.max_user_namespaces, AppArmor)"
    fixes = {
        "kernel": f"install iproute2; {privileges}; load the module sch_tbf",
        "netem": "load the module sch_netem (modprobe sch_netem); without it our switch does the same",
        "tun": f"{privileges}; load the module tun, and let this user open /dev/net/tun",
        "packet": f"install iproute2; {privileges}",
    }
    tried = [
        ("network by the kernel: rate", "kernel", _LIMITED, fixes["kernel"]),
        ("network by the kernel: rate, delay, jitter, loss", "kernel", _DELAYED, fixes["netem"]),
        ("network by our switch, over TUN", "tun", _DELAYED, fixes["tun"]),
        ("network by our switch, over veth", "packet", _DELAYED, fixes["packet"]),
    ]
    found = [Finding(name, (why := _try(way, network)) is None, why or "", fix) for name, way, network, fix in tried]
    return [*found, Finding("network paced inside the process", True, "always works; nothing is emulated then")]


def _try(way: str, network: str) -> str | None:
    """Build such a network of two hosts; returns the reason if that fails."""
    hosts = Hosts(2, parse_network(network))
    try:
        return hosts.build(way)
    except (EmulationError, OptionError, OSError) as problem:
        return str(problem)
    finally:
        hosts.close()


def _permissions() -> list[Finding]:
    root = os.geteuid() == 0
    limit = _read("/proc/sys/user/max_user_namespaces")
    restricted = _read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool, path=path) is None]
    tun = os.access("/dev/net/tun", os.R_OK | os.W_OK)
    detail = "" if tun else "closed to this user" if os.path.exists("/dev/net/tun") else "missing"
    return [
        Finding("root", root, "" if root else "not needed where user namespaces are allowed"),
        Finding(
            "user namespaces",
            limit not in ("", "0") and not restricted,
            "restricted by AppArmor" if restricted else "",
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or run as root",
        ),
        Finding("/dev/net/tun", tun, detail, "modprobe tun, or use our switch over veth (thinwire does so by itself)"),
        Finding("iproute2 (ip, tc)", not missing, f"missing: {', '.join(missing)}" * bool(missing), "install iproute2"),
    ]


def _software() -> list[Finding]:
    import torch
    import torch.distributed as dist

    names = ("gloo", "nccl", "mpi", "ucc")
    backends = [name for name in names if getattr(dist, f"is_{name}_available", lambda: False)()]
    cores = len(os.sched_getaffinity(0))
    return [
        Finding(f"Python {platform.python_version()}", True, platform.platform(terse=True)),
        Finding(f"torch {torch.__version__}", True, f"backends: {', '.join(backends) or 'none'}"),
        Finding("gloo", "gloo" in backends, "", "install a torch that has gloo: compare needs it"),
        _numba(),
        Finding(
            "cuda", torch.cuda.is_available(), "" if torch.cuda.is_available() else "training runs on the processor"
        ),
        Finding(f"{cores} cores", cores > 1, "", "workers share one core: step times say little about the network"),
    ]


def _numba() -> Finding:
    try:
        import numba
    except Exception as problem:  # a broken numba raises whatever its parts raise
        return Finding(
            "numba", False, str(problem).split("\n")[0], "pip install numba: kernels are several times slower"
        )
    return Finding(f"numba {numba.__version__}", True)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """The findings for a file, with the method that will be used."""
    rows = [{"name": f.name, "works": f.works, "detail": f.detail, "fix": f.fix} for f in findings]
    return {"best": best_method(findings), "findings": rows}
