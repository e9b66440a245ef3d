#!/usr/bin/env python3
"""Checks that dependencies run one way: between our crates, and between the folders of proxy/src.

Each line below may use only what stands on a later line. Code on one line is beside each other and does
not use each other.
"""

import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

CRATES = """
    integration
    cli
    proxy jail
    dns-filter
    certs audit
    rules sys
"""

PROXY = """
    app
    self_test housekeeping
    admin
    accept
    http
    memory
    egress
    policy
    budget
    inspect
    quota
    credential
    report
    state_file
"""


def main():
    problems = [*crates(), *folders(ROOT / "proxy/src")]
    for problem in problems:
        print(f"layers: {problem}", file=sys.stderr)
    if not problems:
        print("layers: crates and the folders of proxy/src use each other one way")
    return 1 if problems else 0


def ranks(lines):
    return {name: rank for rank, line in enumerate(lines.split("\n")) for name in line.split()}


def crates():
    rank = ranks(CRATES)
    command = ["cargo", "metadata", "--no-deps", "--format-version=1", "--locked"]
    found = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    for package in json.loads(found)["packages"]:
        name = package["name"]
        manifest = pathlib.Path(package["manifest_path"]).relative_to(ROOT)
        if name not in rank:
            yield f"{manifest}: crate {name} has no line in lints/layers.py"
            continue
        for used in sorted({dependency["name"] for dependency in package["dependencies"] if "path" in dependency}):
            if rank.get(used, 0) <= rank[name]:
                yield f"{manifest}: {name} may not depend on {used}"


def folders(src):
    rank = ranks(PROXY)
    for path in sorted(src.rglob("*.rs")):
        parts = path.relative_to(src).with_suffix("").parts
        folder, shown = parts[0], path.relative_to(ROOT)
        if parts == ("lib",):
            continue
        if folder not in rank:
            yield f"{shown}: {folder} has no line in lints/layers.py"
            continue
        depth = len(parts) - (parts[-1] == "mod")
        for line, used in uses(path.read_text(), depth):
            if used in rank and used != folder and rank[used] <= rank[folder]:
                yield f"{shown}:{line}: {folder} may not use {used}"


def uses(text, depth):
    """Finds the modules at the root of the crate that a file names, also as `super::` and in braces.

    `depth` is how many `super::` reach the root from the top of the file.
    """
    code = re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE)  # a comment may name anything
    for root in re.finditer(rf"\b(?:crate|super(?:::super){{{depth - 1}}})::\s*", code):
        rest = code[root.end() :]
        yield from ((code.count("\n", 0, root.end() + at) + 1, name) for at, name in heads(rest))


def heads(rest):
    """The first name of each path: of `a::b` one, of `{a::b, c::{d, e}}` two."""
    if not rest.startswith("{"):
        if name := re.match(r"\w+", rest):
            yield 0, name[0]
        return
    level = 0
    for token in re.finditer(r"[{}]|(?<![:\w])\w+", rest):
        if token[0] in "{}":
            level += 1 if token[0] == "{" else -1
        elif level == 1:
            yield token.start(), token[0]
        if level == 0:
            return


if __name__ == "__main__":
    sys.exit(main())
