"""Looks for keys everywhere in the jail: search.py REVERSED_KEY...

They are given in reverse so that they stand nowhere because of this search. Its own memory is left out.
"""

import os
import sys

KEYS = [word[::-1].encode() for word in sys.argv[1:]]
PLACES = ["/dev/shm", "/etc", "/run", "/tmp", "/var/tmp", os.getcwd(), os.environ["HOME"]]
LARGEST = 64 << 20
searched, found = 0, []


def look(name, text):
    global searched
    searched += 1
    found.extend(name for key in KEYS if key in text)


def read(name):
    try:
        with open(name, "rb", buffering=0) as file:
            return file.read(LARGEST)
    except OSError:
        return b""


def memory(process):
    try:
        lines = open(f"/proc/{process}/maps").read().splitlines()
        file = open(f"/proc/{process}/mem", "rb", buffering=0)
    except OSError:
        return
    for line in lines:
        bounds, mode = line.split()[:2]
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        if not mode.startswith("r") or end - start > (1 << 32):
            continue
        for at in range(start, end, LARGEST):
            try:
                file.seek(at)
                look(f"memory of {process}", file.read(min(LARGEST, end - at)))
            except (OSError, ValueError, OverflowError):
                break


processes = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
for process in [*processes, "self"]:
    for name in ("cmdline", "environ"):
        look(f"{name} of {process}", read(f"/proc/{process}/{name}"))
for process in processes:
    memory(process)
for place in PLACES:
    for folder, _, names in os.walk(place):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                look(path, read(path))
print("searched", searched, "found", found)
sys.exit(1 if found or searched < 100 else 0)
