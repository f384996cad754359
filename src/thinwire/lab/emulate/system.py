"""Linux calls that Python 3.11 lacks: namespaces, network interfaces, death with the parent.

Interfaces are configured by ioctl on a socket: a socket belongs to the network namespace it was made in, so one process
configures many of them, and the `ip` command is not needed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct

CLONE_NEWNET = 0x40000000
CLONE_NEWUSER = 0x10000000

_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = 0x8916, 0x891C, 0x8922
_SIOCSIFTXQLEN, _SIOCETHTOOL = 0x8943, 0x8946
_IFF_UP = 1
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000
_OFFLOADS = {"tx checksum": 0x17, "scatter-gather": 0x19, "tso": 0x1F, "gso": 0x24}  # ETHTOOL_S...
_SOL_PACKET, _PACKET_IGNORE_OUTGOING = 263, 23
_SCHED_RESET_ON_FORK = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        if code == errno.ENOSPC:  # its usual text is about a disk
            raise OSError(code, f"{what}: no more namespaces are allowed (sysctl user.max_net_namespaces)")
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Give this process new namespaces of these kinds."""
    _checked(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace of this file descriptor."""
    _checked(_libc.setns(fd, kind), "setns")


def die_with_parent(parent: int) -> None:
    """Be killed when the thread that started this process ends; at once if process `parent` is gone already."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "prctl")
    if os.getppid() != parent:
        os._exit(1)


def be_prompt(priority: int) -> str:
    """Ask for the processor as soon as there is work: real-time class, else a low nice value, else nothing."""
    _libc.prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)  # ns; the usual 50,000 are half of a LAN's latency
    try:
        os.sched_setscheduler(0, os.SCHED_RR | _SCHED_RESET_ON_FORK, os.sched_param(priority))
        return "real-time"
    except OSError:
        pass
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        return "nice -20"
    except OSError:
        return "ordinary"


def new_network() -> tuple[int, int | None]:
    """Enter a new network namespace, as root or inside a new user namespace; file descriptors of both (or None)."""
    user = None
    try:
        unshare(CLONE_NEWNET)
    except OSError as problem:
        if problem.errno != errno.EPERM:
            raise
        uid, gid = os.getuid(), os.getgid()
        unshare(CLONE_NEWUSER | CLONE_NEWNET)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        user = os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC), user


def open_tun(name: str) -> int:
    """A new TUN device in the current namespace; it goes when the file descriptor is closed."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(fd)
        raise
    return fd


def open_packet_socket(name: str) -> socket.socket:
    """A socket that reads and writes the frames of an interface of the current namespace."""
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
    link.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        link.setsockopt(socket.SOL_SOCKET, option, 32 << 20)  # the system cuts it to its limit
    link.bind((name, 0x0800))  # IPv4 only
    return link


class Interfaces:
    """Configures the interfaces of the namespace in which it was made, also after the process has left it."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def _ioctl(self, request: int, name: str, payload: bytes) -> bytes:
        return fcntl.ioctl(self._socket, request, struct.pack("16s24s", name.encode(), payload))

    def up(self, name: str) -> None:
        flags = struct.unpack_from("H", self._ioctl(_SIOCGIFFLAGS, name, b""), 16)[0]
        self._ioctl(_SIOCSIFFLAGS, name, struct.pack("H", flags | _IFF_UP))

    def address(self, name: str, address: str, mask: str) -> None:
        for request, text in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, mask)):
            self._ioctl(request, name, struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(text)))

    def mtu(self, name: str, size: int) -> None:
        self._ioctl(_SIOCSIFMTU, name, struct.pack("i", size))

    def queue(self, name: str, packets: int) -> None:
        self._ioctl(_SIOCSIFTXQLEN, name, struct.pack("i", packets))

    def without_offloads(self, name: str) -> None:
        """Send whole packets with finished checksums, so that frames read from a socket are as on a wire."""
        for command in _OFFLOADS.values():
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            try:
                self._ioctl(_SIOCETHTOOL, name, struct.pack("P", ctypes.addressof(value)))
            except OSError as problem:
                if problem.errno != errno.EOPNOTSUPP:
                    raise
