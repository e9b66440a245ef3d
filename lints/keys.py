#!/usr/bin/env python3
"""Checks that a test proves each key of the configuration and of policies, and that rules/KEYS.md says which.

The keys are the fields of the structs that read the two files. A test says what it proves in a comment above it:

    // proves: allow.methods, deny.methods
    #[test]
    fn p1_only_listed_methods_pass() {

Such a test must fail if the program took the key and ignored it; that the key parses is not enough. `--write` writes
rules/KEYS.md. A test of `rules` compares the keys in that file with the JSON Schemas.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "rules/KEYS.md"
FILES = [("Policies", "policies/*.toml", "PolicyDocument"), ("Configuration", "sandbar.toml", "ConfigurationDocument")]

FIELD = re.compile(r"^ *(?:pub\(crate\) )?(\w+): (.+),$")
MARKER = re.compile(r"^ *// proves: (.+)$")
FUNCTION = re.compile(r"^ *(?:pub(?:\(\w+\))? )?(?:async )?fn (\w+)")


def main():
    structs = read_structs()
    keys = {}
    for _, _, document in FILES:
        for key, meaning in flatten(structs, document):
            keys[key] = meaning
    proofs, problems = read_markers(keys)
    for key, meaning in keys.items():
        if key not in proofs:
            problems.append(f"{key}: no test proves it; write `// proves: {key}` above the test that does")
        if not meaning:
            problems.append(f"{key}: its field has no doc comment")
    text = render(structs, proofs)
    if "--write" in sys.argv[1:]:
        TABLE.write_text(text)
    elif not TABLE.exists() or TABLE.read_text() != text:
        problems.append("rules/KEYS.md is out of date; run lints/keys.py --write")
    for problem in problems:
        print(f"keys: {problem}", file=sys.stderr)
    if not problems:
        print(f"keys: a test proves each of the {len(keys)} keys")
    return 1 if problems else 0


def read_structs():
    """Returns the fields of each struct as (name, type, meaning)."""
    structs = {}
    for name in ("document.rs", "credential_document.rs"):
        structs.update(plain_structs((ROOT / "rules/src/load" / name).read_text().split("\n")))
    quota = (ROOT / "rules/src/quota.rs").read_text().split("\n")
    structs["QuotaEntryDocument"] = plain_structs(quota)["QuotaEntryDocument"]
    structs["QuotaDocument"] = macro_rows(quota, "resources! {", r"^    \w+ (\w+) \"", "Option<QuotaEntryDocument>")
    limits = (ROOT / "rules/src/limits.rs").read_text().split("\n")
    structs["LimitsDocument"] = macro_rows(limits, "limits! {", r"^    (\w+) = ", "Option<u64>")
    thresholds = (ROOT / "rules/src/signals/shape/thresholds.rs").read_text().split("\n")
    structs["ThresholdsDocument"] = macro_rows(thresholds, "thresholds! {", r"^    (\w+) = ", "Option<u64>")
    return structs


def plain_structs(lines):
    structs, name, meaning, renamed = {}, None, [], None
    for line in lines:
        if found := re.match(r"^pub\(crate\) struct (\w+) \{$", line):
            name, meaning = found[1], []
            structs[name] = []
        elif line == "}":
            name = None
        elif name and line.lstrip().startswith("/// "):
            meaning.append(line.lstrip().removeprefix("/// "))
        elif name and (found := re.match(r'^ *#\[serde\(rename = "(\w+)"\)\]$', line)):
            renamed = found[1]
        elif name and (found := FIELD.match(line)):
            structs[name].append((renamed or found[1], found[2], " ".join(meaning)))
            meaning, renamed = [], None
    return structs


def macro_rows(lines, start, pattern, kind):
    rows, meaning = [], []
    for line in lines[lines.index(start) + 1 :]:
        if line == "}":
            return rows
        if line.startswith("    /// "):
            meaning.append(line.removeprefix("    /// "))
        elif found := re.match(pattern, line):
            rows.append((found[1], kind, " ".join(meaning)))
            meaning = []
    raise SystemExit(f"keys: `{start}` has no end")


def flatten(structs, document, prefix="", context=""):
    for name, kind, meaning in structs[document]:
        inner = next((word for word in re.findall(r"\w+", kind) if word in structs), None)
        if inner:
            yield from flatten(structs, inner, f"{prefix}{name}.", meaning if inner == "QuotaEntryDocument" else "")
        else:
            yield f"{prefix}{name}", f"{context} {meaning}".strip()


def read_markers(keys):
    """Returns the tests of each key as (function, file), and problems."""
    proofs, problems = {}, []
    crates = [path.parent for path in sorted(ROOT.glob("*/Cargo.toml"))]
    paths = [path for crate in crates for folder in ("src", "tests") for path in sorted((crate / folder).rglob("*.rs"))]
    for path in paths:
        lines = path.read_text().split("\n")
        for at, line in enumerate(lines):
            if not (found := MARKER.match(line)):
                continue
            shown = path.relative_to(ROOT)
            function = marked_test(lines[at + 1 :])
            if not function:
                problems.append(f"{shown}:{at + 1}: no test follows")
                continue
            for key in re.split(r",\s*", found[1].strip().rstrip(",")):
                if key not in keys:
                    problems.append(f"{shown}:{at + 1}: `{key}` is not a key")
                proofs.setdefault(key, []).append((function, str(shown)))
    return proofs, problems


def marked_test(lines):
    """Returns the name of the test that begins here, after comments and attributes."""
    is_test = False
    for line in lines:
        text = line.strip()
        if re.match(r"#\[(tokio::)?test\b", text):
            is_test = True
        elif found := FUNCTION.match(line):
            return found[1] if is_test else None
        elif not text.startswith(("//", "#[")):
            return None
    return None


def render(structs, proofs):
    text = [
        "# Keys",
        "",
        "Every key of a policy and of the configuration, with a test that fails if Sandbar ignores the key. Generated by",
        "`lints/keys.py --write`; `make lint` fails for a key without a test.",
    ]
    for title, file, document in FILES:
        text += ["", f"## {title}, `{file}`", "", "| key | meaning | proven by |", "| --- | --- | --- |"]
        for key, meaning in flatten(structs, document):
            tests = [f"`{function}` ({file})" for function, file in proofs.get(key, [])]
            text.append(f"| `{key}` | {meaning.replace('|', chr(92) + '|')} | {', '.join(tests)} |")
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    sys.exit(main())
