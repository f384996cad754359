"""Runs a command inside a host: enters its namespaces, ties its life to the parent, then executes the command.

    python -I -S launch.py thinwire.lab.emulate.enter PARENT_PID NETWORK_FD USER_FD|- -- command ...

It is a program of its own because code between fork and exec is unsafe in a parent with threads.
"""

from __future__ import annotations

import os
import sys

from .system import CLONE_NEWNET, CLONE_NEWUSER, die_with_parent, setns


def main(arguments: list[str]) -> None:
    parent, network, user, _, *command = arguments
    if user != "-":
        setns(int(user), CLONE_NEWUSER)
        os.close(int(user))
    if network != "-":
        setns(int(network), CLONE_NEWNET)
        os.close(int(network))
    die_with_parent(int(parent))  # last: a change of user namespace resets it
    try:
        os.execvp(command[0], command)
    except OSError as problem:
        sys.stderr.write(f"thinwire: cannot run {command[0]}: {problem.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
