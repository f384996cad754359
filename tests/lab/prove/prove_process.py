"""A process for the tests of the launcher: reports, then does what its task says."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from thinwire.lab.prove.worker import end_with_parent, reporter


def main() -> None:
    task = json.loads(sys.argv[1])
    end_with_parent()
    report = reporter()
    print("what a library prints")
    report({"event": "begin", "word": "begun", "pid": os.getpid()})
    what = task["what"] if task["rank"] == task["who"] else task.get("others", "end")
    if what == "raise":
        report({"event": "error", "problem": "ValueError: on purpose"})
        raise SystemExit(1)
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        print("the last words", file=sys.stderr)
        raise SystemExit(3)
    if what == "hang":
        time.sleep(600)


if __name__ == "__main__":
    main()
