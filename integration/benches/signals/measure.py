"""Measures the signals: which detector raises an alarm for which item of the benign and the exfiltration corpus.

Usage: measure.py SANDBAR PYTHON_WITH_SDKS [PATTERN]. Needs port 443 of loopback, so it runs in a network namespace.
Each item has a sandbox of its own, by which the log tells findings apart. About a third of each corpus is held back from
tuning and reported apart. The exit status is 0 whatever is found.
"""

import collections
import concurrent.futures
import fnmatch
import glob
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import benign
import held_hostile
import hostile
import origin
import samples

# Everything together. What has not ended by then is reported as not run.
DEADLINE = 220
FIRST_PORT = 20_000
WORKERS = {"benign": 3, "hostile": 4}
CODES = ["beacon", "canary_used", "content_unsearched", "credential_leaving", "drip", "encoded_run", "field_novelty", "header_bits",
         "many_fields", "memory_flow", "secret_found", "sequence", "upload_ratio", "url_novelty", "user_agent_changed"]


def make_certificates(directory, names):
    """A root, and one certificate for all hosts."""
    def openssl(*words):
        subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True)
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30"]
    openssl("req", "-x509", *curve, "-subj", "/CN=origin root", "-keyout", "root.key", "-out", "root.pem")
    alternatives = ",".join(f"DNS:{name}" for name in names)
    (directory / "leaf.ext").write_text(f"subjectAltName={alternatives}\nbasicConstraints=CA:FALSE\n")
    openssl("req", *curve[:5], "-subj", "/CN=origin", "-keyout", "leaf.key", "-out", "leaf.csr")
    openssl("x509", "-req", "-in", "leaf.csr", "-CA", "root.pem", "-CAkey", "root.key", "-CAcreateserial",
            "-days", "30", "-extfile", "leaf.ext", "-out", "leaf.pem")


class Instance:
    """One `sandbar serve`, with a listener for each sandbox."""

    def __init__(self, program, directory, sandboxes, hosts, canary, env=None):
        self.program, self.directory = program, directory
        self.ports = {name: FIRST_PORT + at for at, name in enumerate(sandboxes)}
        (directory / "policies").mkdir(parents=True)
        (directory / "log").mkdir(mode=0o700)
        store = directory / "log/canaries.json"
        store.write_text(json.dumps([{"name": "corpus", "shape": "token", "values": [canary]}]))
        store.chmod(0o600)
        listed = json.dumps([*origin.HOSTS, f"*.{hostile.DROP}"])
        (directory / "policies/p.toml").write_text(
            f'name = "p"\n[[allow]]\nname = "corpus"\nhosts = {listed}\nports = [443, {origin.GRPC_PORT}]\n'
            'resolves_to = ["127.0.0.0/8"]\n')
        text = ['policies = "policies"', "[log]", 'dir = "log"', "[upstream]", "system_roots = false",
                f'roots = ["{directory.parent}/root.pem"]', "[dns]", 'upstreams = ["127.0.0.1:9"]', "pre_resolve = false"]
        for host in hosts:
            text += ["[[dns.host]]", f'name = "{host}"', 'addresses = ["127.0.0.1"]']
        for name, port in self.ports.items():
            text += ["[[listener]]", 'mode = "explicit"', f'bind = ["127.0.0.1:{port}"]', f'sandbox = "{name}"',
                     "dangerously_share_address = true", "[[sandbox]]", f'id = "{name}"', 'base = "system"',
                     'policies = ["p"]']
        (directory / "sandbar.toml").write_text("\n".join(text) + "\n")
        self.said = open(directory / "said", "w+", encoding="utf-8")
        command = [program, "serve", "-c", str(directory / "sandbar.toml")]
        self.process = subprocess.Popen(command, stdout=self.said, stderr=self.said, env={**os.environ, **(env or {})})
        self.wait_until_ready()

    def wait_until_ready(self):
        until = time.monotonic() + 60
        while time.monotonic() < until:
            said = Path(self.said.name).read_text()
            if said.count("listening: explicit ") >= len(self.ports):
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise SystemExit(f"signals: sandbar does not start:\n{Path(self.said.name).read_text()[-2000:]}")

    def trust(self):
        """The variables that make tools trust the authority."""
        ca = self.directory / "ca"
        subprocess.run([self.program, "ca", "bundle", "--dir", str(ca)], check=True, capture_output=True)
        told = subprocess.run([self.program, "ca", "env", "--json", "--dir", str(ca)], check=True, capture_output=True)
        return json.loads(told.stdout)

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def records(self):
        for path in sorted(glob.glob(str(self.directory / "log/**/*.jsonl"), recursive=True)):
            with open(path, encoding="utf-8") as file:
                for line in file:
                    yield json.loads(line)


def faketime_library():
    found = glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1") + glob.glob("/usr/lib*/faketime/libfaketimeMT.so.1")
    return found[0] if found else None


class Measurement:
    def __init__(self, program, python, pattern, directory):
        self.program, self.python, self.directory = program, python, directory
        self.until = time.monotonic() + DEADLINE
        self.benign = [name for name in benign.names() if fnmatch.fnmatch(name, pattern)]
        hostiles = [*hostile.items(), *held_hostile.items()]
        self.hostile = [item for item in hostiles if fnmatch.fnmatch(item.name, pattern)]
        self.held = {f"hostile.{item.name}" for item in self.hostile if item.held_back}
        self.held |= {f"benign.{name}" for name in self.benign if benign.is_held_back(name)}
        self.canary = samples.Samples("canary").pick(40)
        self.skipped, self.closed, self.damaged = {}, {}, {}
        self.findings = collections.defaultdict(dict)
        self.sent = {}
        self.lock = threading.Lock()

    def run(self):
        hosts = [*origin.HOSTS, *(item.host for item in self.hostile), *held_hostile.HOSTS]
        make_certificates(self.directory, [*origin.HOSTS, f"*.{hostile.DROP}", f"*.many.{hostile.DROP}"])
        world = origin.World(self.directory / "world")
        certificate, key = self.directory / "leaf.pem", self.directory / "leaf.key"
        server = origin.Server(world, certificate, key)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        grpc_server = origin.start_grpc(certificate, key)
        fast = [item for item in self.hostile if not item.slow]
        slow = [item for item in self.hostile if item.slow]
        sandboxes = [f"benign.{name}" for name in self.benign] + [f"hostile.{item.name}" for item in fast]
        ids = [self.id(name) for name in sandboxes]
        instance = Instance(self.program, self.directory / "real", ids, hosts, self.canary)
        try:
            self.run_all(instance, world, fast)
        finally:
            instance.stop()
        self.read(instance)
        if slow:
            self.run_slow(slow, world, hosts)
        grpc_server.stop(None)
        server.shutdown()

    @staticmethod
    def id(name):
        return name.replace(".", "-").replace("_", "-")

    def run_all(self, instance, world, fast):
        trust, sdks = instance.trust(), benign.installed_sdks(self.python)
        with concurrent.futures.ThreadPoolExecutor(WORKERS["benign"]) as pool:
            for name in self.benign:
                pool.submit(self.guard, self.run_benign, name, f"benign.{name}", instance, world, trust, sdks)
        print(f"  benign corpus done after {self.elapsed():.0f} s", file=sys.stderr)
        with concurrent.futures.ThreadPoolExecutor(WORKERS["hostile"]) as pool:
            for item in fast:
                pool.submit(self.guard, self.run_hostile, item, f"hostile.{item.name}", instance, world)
        print(f"  exfiltration corpus done after {self.elapsed():.0f} s", file=sys.stderr)

    def elapsed(self):
        return DEADLINE - (self.until - time.monotonic())

    def guard(self, function, item, name, *more):
        """Whatever goes wrong with an item is said, and the others run."""
        try:
            function(item, name, *more)
        except Exception as error:  # an item that fails must not end the measurement
            self.skipped[name] = f"{type(error).__name__}: {error}"

    def run_benign(self, item, name, instance, world, trust, sdks):
        left = self.until - time.monotonic()
        why = benign.missing(item, sdks) or (left < 1 and "the run takes too long")
        if not why:
            port = instance.ports[self.id(name)]
            why = benign.run_item(item, port, world, trust, self.python, self.directory, min(benign.TIMEOUT, left))
        if why:
            self.skipped[name] = why

    def run_hostile(self, item, name, instance, world, step=None):
        port = instance.ports[self.id(name)]
        wire = hostile.run_item(item, port, self.canary, step, self.until)
        with self.lock:
            self.sent[name] = wire.statuses
        arrived = world.arrived[item.host]
        lost = sum(sent != one.body for sent, one in zip(wire.bodies, arrived))
        if lost:
            self.damaged[name] = (lost, len(wire.bodies))
        if item.closed:
            self.closed[name] = (item.closed(arrived, wire), len(arrived), wire.sent)

    def run_slow(self, items, world, hosts):
        """Items that take minutes or hours, before a clock that is set forward after each request."""
        library = faketime_library()
        if not library:
            for item in items:
                self.skipped[f"hostile.{item.name}"] = "libfaketime is not installed"
            return
        clock = self.directory / "clock"
        passed = 0

        def step(seconds):
            nonlocal passed
            passed += seconds
            clock.write_text(f"+{passed}\n")

        step(0)
        names = [self.id(f"hostile.{item.name}") for item in items]
        env = {"LD_PRELOAD": library, "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1",
               "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        instance = Instance(self.program, self.directory / "slow", names, hosts, self.canary, env)
        try:
            for item in items:
                self.guard(self.run_hostile, item, f"hostile.{item.name}", instance, world, step)
        finally:
            instance.stop()
        self.read(instance)

    def read(self, instance):
        """Collects the messages of the findings, by item and code."""
        names = {self.id(f"benign.{name}"): f"benign.{name}" for name in self.benign}
        names |= {self.id(f"hostile.{item.name}"): f"hostile.{item.name}" for item in self.hostile}
        for record in instance.records():
            if record.get("class_uid") != 2004:
                continue
            name = names.get(record["actor"]["app_uid"])
            if name:
                self.findings[name].setdefault(record["status_detail"], []).append(record["message"])

    def report(self):
        corpora = {
            "benign": [f"benign.{name}" for name in self.benign],
            "hostile": [f"hostile.{item.name}" for item in self.hostile if not item.closed],
        }
        ran = {corpus: [name for name in all if name not in self.skipped] for corpus, all in corpora.items()}
        parts = lambda names: ([name for name in names if name not in self.held],
                               [name for name in names if name in self.held])
        (tuned_benign, held_benign), (tuned_hostile, held_hostile) = parts(ran["benign"]), parts(ran["hostile"])
        columns = [tuned_benign, held_benign, tuned_hostile, held_hostile]
        seen = {code for found in self.findings.values() for code in found}

        def rate(names, has):
            count = sum(map(has, names))
            return f"{count:4}/{len(names):<3} {100 * count / len(names):5.1f} %" if names else "        - "

        print("\nSignals, with the defaults of a policy that says nothing about them")
        print(f"{'':22}{'false alarms: items of the benign corpus':^36}{'caught: items of the exfiltration corpus':^44}")
        print(f"{'detector':22}{'for tuning':>16}{'held back':>18}{'for tuning':>22}{'held back':>18}")
        for code in [*CODES, *sorted(seen - set(CODES))]:
            cells = [rate(names, lambda name: code in self.findings[name]) for names in columns]
            print(f"{code:22}{cells[0]:>16}{cells[1]:>18}{cells[2]:>22}{cells[3]:>18}")
        cells = [rate(names, lambda name: bool(self.findings[name])) for names in columns]
        print(f"{'any detector':22}{cells[0]:>16}{cells[1]:>18}{cells[2]:>22}{cells[3]:>18}")

        shut = {name: ok and name not in self.damaged for name, (ok, _, _) in self.closed.items()}
        print(f"\nChannels that are closed: {sum(shut.values())} of {len(shut)}")
        for name, (ok, arrived, sent) in sorted(self.closed.items()):
            verdict = "unknown" if name in self.damaged else "closed" if ok else "OPEN"
            print(f"  {verdict:8}{name.split('.', 1)[1]}: {arrived} of {sent} requests arrived")
        held = lambda name: " (held back)" if name in self.held else ""
        print("\nFalse alarms")
        for name in ran["benign"]:
            for code, messages in sorted(self.findings[name].items()):
                for message, count in collections.Counter(messages).most_common(4):
                    print(f"  {name.split('.', 1)[1]}{held(name)}: {code}, {count} times: {message}")
        documented = {f"hostile.{item.name}" for item in self.hostile if item.documented}
        print("Missed")
        for name in ran["hostile"]:
            if not self.findings[name]:
                note = ", documented in rules/src/signals/shape.rs" if name in documented else ""
                answers = ", ".join(f"{count} answered {status}" for status, count in sorted(self.sent[name].items()))
                print(f"  {name.split('.', 1)[1]}{held(name)}: {answers}{note}")
        if self.damaged:
            print("Bodies that arrived other than they were sent: nothing is measured by these")
            for name, (lost, sent) in sorted(self.damaged.items()):
                print(f"  {name.split('.', 1)[1]}: {lost} of {sent}")
        if self.skipped:
            print("Not run")
            for name, why in sorted(self.skipped.items()):
                print(f"  {name}{held(name)}: {why}")
        print("Recalled memory (memory_flow) is not part of the corpora: its guarantee has property tests of its own.")
        print(f"{len(ran['benign'])} benign items, {len(ran['hostile'])} of exfiltration, {len(shut)} closed channels "
              f"in {self.elapsed():.0f} s")


def main():
    program, python = os.path.realpath(sys.argv[1]), os.path.abspath(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="sandbar-signals-", ignore_cleanup_errors=True) as directory:
        measurement = Measurement(program, python, sys.argv[3] if len(sys.argv) > 3 else "*", Path(directory))
        measurement.run()
        measurement.report()
        if kept := os.environ.get("SANDBAR_SIGNALS_LOG"):
            subprocess.run(["cp", "-r", f"{directory}/real", f"{directory}/slow", kept], check=False)
    sys.stdout.flush()
    os._exit(0)  # threads of servers may still wait for their clients


if __name__ == "__main__":
    main()
