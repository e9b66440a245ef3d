"""Types into a terminal as a person would. Reads steps from a file, one JSON list a line:
["type", text], ["see", pattern, ...], ["wait", shell command that must succeed]; says everything that was on screen.
"""
import json, os, pty, re, select, subprocess, sys, time

DEADLINE = 60
pid, terminal = pty.fork()
if pid == 0:
    os.environ.update(PS1="out> ", TERM="xterm")
    os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
os.set_blocking(terminal, False)
seen = b""


def look(patience):
    global seen
    if select.select([terminal], [], [], patience)[0]:
        try:
            data = os.read(terminal, 65536)
        except OSError:
            data = b""
        seen += data
        sys.stdout.write(data.decode(errors="replace"))


def fail(step):
    print(f"\n!!! in vain: {step}, screen: {seen!r}")
    os.kill(pid, 9)
    sys.exit(1)


for line in open(sys.argv[1]):
    step = json.loads(line)
    end = time.time() + DEADLINE
    if step[0] == "type":
        os.write(terminal, step[1].encode())
    for pattern in step[1:] if step[0] == "see" else []:
        while not (match := re.search(pattern.encode(), seen, re.S)):
            look(0.1)
            if time.time() > end:
                fail(step)
        seen = seen[match.end():]
    while step[0] == "wait" and subprocess.run(["sh", "-c", step[1]], capture_output=True).returncode:
        look(0.05)
        if time.time() > end:
            fail(step)
os.kill(pid, 9)
