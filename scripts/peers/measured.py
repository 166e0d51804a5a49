"""Runs a command and measures it from outside."""

import subprocess
import sys
import tempfile
import time

# Runs a command and writes its peak memory in KiB to a file. Linux counts what the process that starts another had at its peak for the
# other too, so the one that starts has to be small.
LAUNCHER = """
import os, subprocess, sys
child = subprocess.Popen(sys.argv[2:])
_, status, usage = os.wait4(child.pid, 0)
open(sys.argv[1], "w").write(str(usage.ru_maxrss))
sys.exit(status != 0)
"""


def run(command):
    """The seconds of a command, the peak bytes of its process, and the last line that it prints. Ends the program if it fails."""
    command = list(map(str, command))
    with tempfile.NamedTemporaryFile("r") as peak:
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", LAUNCHER, peak.name, *command], stdout=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - start
        if done.returncode:
            sys.exit(f"failed: {' '.join(command)}")
        lines = done.stdout.strip().splitlines()
        return seconds, int(peak.read()) * 1024, lines[-1] if lines else ""
