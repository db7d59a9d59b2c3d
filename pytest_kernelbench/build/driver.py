"""Runs the compilers of one build; a script of its own, standard library only, started by `cache.py` as `python -I driver.py`.

It leads a process group. When the pipe at its standard input ends, because pytest is done with it or dead, it kills the group:
no compiler outlives the run that wanted it. Compilers' output goes to the log, one command after the other.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time


def main() -> int:
    """0 when everything was built; 1 when a compiler failed; 2 when one could not be started or was killed."""
    plan = json.loads(sys.argv[1])
    status = 0
    with open(plan["log"], "w") as log:
        for stage in plan["stages"]:
            status = _stage(stage, plan["jobs"], log)
            if status:
                break
    return status


def _stage(commands: list[list[str]], jobs: int, log) -> int:  # type: ignore[no-untyped-def]
    waiting = list(enumerate(commands))
    running: dict[int, subprocess.Popen[bytes]] = {}
    outcomes: dict[int, int] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            number, command = waiting.pop(0)
            try:
                with open(f"output-{number}", "wb") as output:
                    running[number] = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
                    )
            except OSError as error:
                log.write(f"$ {' '.join(command)}\n{command[0]}: {error.strerror}\n")
                return 2
        if select.select([0], [], [], 0)[0] and not os.read(0, 1):
            os.killpg(0, signal.SIGKILL)
        for number, process in list(running.items()):
            if process.poll() is not None:
                outcomes[number] = process.returncode
                del running[number]
        if running:
            time.sleep(0.01)
    for number in sorted(outcomes):
        log.write(f"$ {' '.join(commands[number])}\n")
        with open(f"output-{number}", errors="replace") as output:
            log.write(output.read())
        os.unlink(f"output-{number}")
        if outcomes[number] < 0:
            log.write(f"{commands[number][0]} was Killed by signal {-outcomes[number]}\n")
    if any(code < 0 for code in outcomes.values()):
        return 2
    return 1 if any(outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
