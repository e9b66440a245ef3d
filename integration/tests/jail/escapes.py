"""Tries every way out of the jail that is known, and says of each what came of it, one JSON object.

Arguments: a JSON object of what the outside has prepared.
"""
import ctypes, errno, fcntl, json, os, socket, struct, subprocess, sys, time

outside = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
found = {}


def attempt(name, work):
    """The name of the error that an attempt met, or what it came to."""
    try:
        came = work()
        found[name] = "done" if came is None else str(came)
    except OSError as error:
        found[name] = errno.errorcode.get(error.errno, str(error))
    except Exception as error:
        found[name] = type(error).__name__


def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def datagram(family, address, port, options=()):
    def work():
        with socket.socket(family, socket.SOCK_DGRAM) as one:
            for option in options:
                one.setsockopt(*option)
            one.sendto(b"out", (address, port))
    return work


four, six = socket.AF_INET, socket.AF_INET6
# Datagrams that are no DNS.
for what, family, address, port in [
    ("quic", four, "93.184.216.99", 443), ("quic six", six, "2606:2800::99", 443),
    ("ntp", four, "93.184.216.99", 123), ("stun", four, "93.184.216.99", 3478),
    ("wireguard", four, "93.184.216.99", 51820), ("dns elsewhere", four, "93.184.216.99", 5353),
    ("doq", four, "93.184.216.99", 853), ("mdns", four, "224.0.0.251", 5353),
    ("mdns six", six, "ff02::fb", 5353), ("metadata", four, "169.254.169.254", 80),
    ("private", four, "10.78.0.2", 9999), ("gateway", four, "10.78.0.1", 9999),
]:
    attempt("udp " + what, datagram(family, address, port))
broadcast = [(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)]
attempt("udp broadcast", datagram(four, "255.255.255.255", 9999, broadcast))


# What is given to TCP arrives at the proxy, and must end there.
def tcp(family, address, port):
    def work():
        with socket.socket(family, socket.SOCK_STREAM) as one:
            one.settimeout(5)
            one.connect((address, port))
            one.sendall(b"SSH-2.0-escape\r\n\r\n")
            return "answer" if b"hello" in one.recv(4096) or b"ready" in one.recv(4096) else "nothing"
    return work


for port in [22, 25, 80, 443, 853, 2525, 5432, 8080]:
    attempt(f"tcp {port}", tcp(four, "93.184.216.99", port))
attempt("tcp six", tcp(six, "2606:2800::99", 5432))
attempt("tcp private", tcp(four, "10.78.0.2", 5432))
attempt("tcp metadata", tcp(four, "169.254.169.254", 80))
attempt("tcp outside's loopback", tcp(four, "127.0.0.1", outside["port"]))
attempt("tcp the proxy's own port", tcp(four, "127.0.0.1", 1))

# Other protocols and families.
attempt("icmp raw", lambda: socket.socket(four, socket.SOCK_RAW, socket.IPPROTO_ICMP))
attempt("icmp datagram", lambda: socket.socket(four, socket.SOCK_DGRAM, socket.IPPROTO_ICMP))
attempt("raw", lambda: socket.socket(four, socket.SOCK_RAW, socket.IPPROTO_RAW))
attempt("sctp", lambda: socket.socket(four, socket.SOCK_STREAM, 132).connect(("93.184.216.99", 80)))
for name, family in [("packet", 17), ("vsock", 40), ("alg", 38), ("bluetooth", 31), ("xdp", 44), ("can", 29)]:
    attempt("family " + name, lambda: socket.socket(family, socket.SOCK_STREAM))
attempt("io_uring", lambda: call(425, 4, ctypes.create_string_buffer(120)))
attempt("spoofed source", datagram(four, "10.78.0.2", 9999, [(socket.SOL_IP, 19, 1)]))
attempt("mark", datagram(four, "10.78.0.2", 9999, [(socket.SOL_SOCKET, 36, 1)]))


# Its own network.
def ran(*words):
    def work():
        done = subprocess.run(words, capture_output=True, timeout=20)
        return "done" if done.returncode == 0 else "failed"
    return work


attempt("address", ran("ip", "addr", "add", "10.9.9.9/32", "dev", "lo"))
attempt("route", ran("ip", "route", "del", "default"))
attempt("link", ran("ip", "link", "add", "x", "type", "dummy"))
attempt("lo down", ran("ip", "link", "set", "lo", "down"))
attempt("flush the firewall", ran("nft", "flush", "ruleset"))
attempt("list the firewall", ran("nft", "list", "ruleset"))
attempt("interfaces", lambda: ",".join(name for _, name in socket.if_nameindex()))


# Namespaces and processes.
def enter(path):
    with open(path) as file:
        call(308, file.fileno(), 0)


for kind in ["net", "mnt", "pid", "user", "ipc"]:
    attempt("setns " + kind, lambda: enter("/proc/1/ns/" + kind))
attempt("unshare net", lambda: call(272, 0x40000000))
attempt("own user and net", ran("unshare", "-Urn", "sh", "-c",
                                "ip link set lo up; curl -sS -m 5 http://93.184.216.99/nested"))
attempt("remount", ran("unshare", "-Urm", "mount", "-o", "remount,rw,bind", "/"))
attempt("uncover state", ran("unshare", "-Urm", "umount", outside["state"]))
attempt("uncover tmp", ran("unshare", "-Urm", "umount", "/tmp"))
attempt("uncover run", ran("unshare", "-Urm", "umount", "/run"))
attempt("write through nested", ran("unshare", "-Urm", "sh", "-c", "mount --bind / /mnt && touch /mnt/etc/escape"))
attempt("see the proxy", lambda: os.stat(f"/proc/{outside['pid']}/exe").st_ino if os.path.exists(
    f"/proc/{outside['pid']}/exe") and b"sandbar" in open(f"/proc/{outside['pid']}/cmdline", "rb").read() else "not there")
attempt("processes", lambda: max(int(name) for name in os.listdir("/proc") if name.isdigit()) < 1000)
attempt("first: memory", lambda: open("/proc/1/mem", "rb").read(1))
attempt("first: environment", lambda: open("/proc/1/environ", "rb").read(1))
attempt("first: descriptors", lambda: os.readlink("/proc/1/fd/0"))
attempt("first: root", lambda: os.listdir("/proc/1/root/"))
attempt("first: ptrace", lambda: call(101, 16, 1, 0, 0))
attempt("first: kill", lambda: (os.kill(1, 9), time.sleep(0.2), "still here")[2])

# Sockets by path and by name.
def unix(path):
    def work():
        with socket.socket(socket.AF_UNIX) as one:
            one.settimeout(5)
            one.connect(path)
            one.sendall(b"out")
    return work


attempt("unix in home", unix(outside["home_socket"]))
attempt("unix by a name alone", unix(outside["named_socket"]))
attempt("unix: move above", lambda: os.rename(outside["home"] + "/agents", outside["home"] + "/moved"))
attempt("unix in work", unix(outside["work_socket"]))
attempt("unix in tmp", unix(outside["tmp_socket"]))
attempt("unix in run", unix(outside["run_socket"]))
attempt("unix abstract", unix("\0" + outside["abstract"]))
admin = [os.path.join(at, name) for at, _, names in os.walk(outside["state"]) for name in names]
attempt("admin socket", lambda: admin)

# Files.
def write(path):
    def work():
        with open(path, "a") as file:
            file.write("escape")
    return work


attempt("state", lambda: os.listdir(outside["state"]))
attempt("state: make", write(outside["state"] + "/x"))
attempt("state: move", lambda: os.rename(os.path.dirname(outside["state"]), outside["home"] + "/moved"))
attempt("policy: write", write(outside["policy"]))
attempt("policy: remove", lambda: os.unlink(outside["policy"]))
attempt("policy: replace", lambda: (write(outside["policies"] + "/new")(), None)[1])
attempt("policy: move", lambda: os.rename(outside["policies"], outside["policies"] + "-moved"))
attempt("policy: move above", lambda: os.rename(outside["above"], outside["above"] + "-moved"))
attempt("startup", write(outside["home"] + "/.bashrc"))
attempt("startup: replace", lambda: os.rename(outside["home"] + "/.profile", outside["home"] + "/.bashrc"))
attempt("startup: link removed", lambda: os.unlink(outside["home"] + "/.zshrc"))
write(outside["home"] + "/spare")()
attempt("startup: link replaced", lambda: os.rename(outside["home"] + "/spare", outside["home"] + "/.zshrc"))
attempt("startup: linked", write(outside["home"] + "/.zshrc"))
attempt("startup: above", lambda: os.rename(outside["home"] + "/.config", outside["home"] + "/moved"))
attempt("startup: above link", lambda: os.rename(outside["home"] + "/dots", outside["home"] + "/moved"))


# From a mount namespace in which nothing of ours is mounted, by a directory that was opened before.
def from_elsewhere():
    home = os.open(outside["home"], os.O_RDONLY)
    if os.fork() == 0:
        try:
            call(272, 0x10000000 | 0x20000)
            os.mkdir("/tmp/elsewhere")
            if libc.mount(b"/tmp", b"/tmp/elsewhere", None, 0x1000, None) == 0:
                call(155, b"/tmp/elsewhere", b"/tmp/elsewhere")
                libc.umount2(b"/", 2)
            os.rename("conf", "conf-moved", src_dir_fd=home, dst_dir_fd=home)
        finally:
            os._exit(0)
    os.wait()
    return "moved" if os.path.exists(outside["home"] + "/conf-moved") else "there"


attempt("policy: move from elsewhere", from_elsewhere)
attempt("mount namespace", ran("unshare", "-Um", "true"))
attempt("cgroup namespace", ran("unshare", "-UC", "true"))
attempt("user namespace", ran("unshare", "-U", "true"))
attempt("ssh key", lambda: open(outside["home"] + "/.ssh/id").read())
attempt("netrc", lambda: open(outside["home"] + "/.netrc").read() or "empty")
attempt("program", write(outside["program"]))
for name, path in [("etc", "/etc/escape"), ("usr", "/usr/bin/escape"), ("cron", "/var/spool/cron/escape"),
                   ("core pattern", "/proc/sys/kernel/core_pattern"), ("sysrq", "/proc/sysrq-trigger"),
                   ("uevent", "/sys/kernel/uevent_helper"), ("cgroup", "/sys/fs/cgroup/release_agent")]:
    attempt("write " + name, write(path))
attempt("home", write(outside["home"] + "/new"))
attempt("work", write("new"))
attempt("tmp", write("/tmp/new"))
attempt("devices", lambda: " ".join(sorted(os.listdir("/dev"))))
attempt("mknod", lambda: os.mknod("/tmp/disk", 0o60600, os.makedev(254, 0)))
attempt("disk", lambda: open(outside["disk"], "rb").read(1))

# What was left open, what may be gained.
attempt("descriptors", lambda: [number for number in os.listdir("/proc/self/fd")
                                if "secret" in os.path.realpath("/proc/self/fd/" + number)])
status = dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\t" in line)
attempt("capabilities", lambda: "".join(status[name].strip("0") for name in ["CapPrm", "CapEff", "CapBnd", "CapAmb"]))
attempt("no new privileges", lambda: status["NoNewPrivs"])
attempt("set-user-id", lambda: subprocess.run([outside["suid"], "-u"], capture_output=True, text=True).stdout.strip())
attempt("keyctl", lambda: call(250, 0, -3, 0))
attempt("add_key", lambda: call(248, b"user", b"x", b"y", 1, -3))
attempt("shared memory", lambda: call(29, outside["shm"], 0, 0))
attempt("typing", lambda: fcntl.ioctl(0, 0x5412, b"x"))
attempt("typing, upper half", lambda: call(16, 0, ctypes.c_ulong(0x100005412), b"x"))
attempt("variables", lambda: sorted(name for name in os.environ if name in outside["variables"]))
attempt("group", lambda: libc.setgroups(1, (ctypes.c_uint * 1)(0)) == 0 and "done" or "refused")
attempt("uid", lambda: os.setuid(1))
print(json.dumps(found))
