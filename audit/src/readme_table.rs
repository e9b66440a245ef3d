//! The README's table of members, generated from `record.rs` and compared with the file.
//! `SANDBAR_BLESS=1 cargo test -p audit table` updates it.

use std::collections::HashMap;
use std::fs;

const SOURCE: &str = include_str!("record.rs");
const README: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/README.md");
const BEGIN: &str = "<!-- members: made from src/record.rs by `cargo test`, not by hand -->\n";
const END: &str = "<!-- end of members -->\n";

/// A member of a struct: its name in the line, its type and its doc comment.
struct Member {
    name: String,
    kind: String,
    meaning: String,
}

#[test]
fn the_readme_has_every_member() {
    let table = format!("{BEGIN}{}{END}", table());
    let readme = fs::read_to_string(README).unwrap();
    let (before, rest) = readme.split_once(BEGIN).unwrap();
    let (_, after) = rest.split_once(END).unwrap();
    let expected = format!("{before}{table}{after}");
    if std::env::var_os("SANDBAR_BLESS").is_some() {
        fs::write(README, expected).unwrap();
    } else {
        assert!(readme == expected, "run: SANDBAR_BLESS=1 cargo test -p audit table");
    }
}

fn table() -> String {
    let structs = parse_structs();
    let mut rows = "| member | type | meaning |\n| --- | --- | --- |\n".to_owned();
    add_rows(&structs, "RecordMembers", "", &mut rows);
    add_rows(&structs, "Metadata", "metadata.", &mut rows);
    rows += "| `metadata.sequence` | number | The record's number: from 1, without gaps. |\n";
    add_rows(&structs, "SandbarExtension", "unmapped.sandbar.", &mut rows);
    rows += "| `unmapped.sandbar.chain.previous` | 64 hex digits | The hash of the previous record; zeros in the very first. |\n";
    rows += "| `unmapped.sandbar.chain.hash` | 64 hex digits | SHA-256 of the line's bytes before `,\"hash\":`. |\n";
    rows
}

fn add_rows(structs: &HashMap<String, Vec<Member>>, name: &str, path: &str, rows: &mut String) {
    for member in &structs[name] {
        let Member { name, kind, meaning } = member;
        assert!(!meaning.is_empty(), "{path}{name} has no comment");
        let list = kind.contains("Vec<") || kind.contains('[');
        let inner = structs.keys().find(|known| words(kind).any(|word| word == known.as_str()));
        match inner {
            Some(inner) => {
                let (shown, nested) = if list { ("list", "[].") } else { ("object", ".") };
                *rows += &format!("| `{path}{name}` | {shown} | {meaning} |\n");
                add_rows(structs, inner, &format!("{path}{name}{nested}"), rows);
            }
            None => *rows += &format!("| `{path}{name}` | {} | {meaning} |\n", type_label(kind)),
        }
    }
}

fn type_label(kind: &str) -> String {
    let aliases = [
        ("SandboxId", "Text<128>"),
        ("TenantId", "Text<128>"),
        ("Environment", "Text<64>"),
        ("HostText", "Text<512>"),
        ("AttemptedText", "Text<640>"),
    ];
    let alias = aliases.iter().find(|(alias, _)| words(kind).any(|word| word == *alias));
    let kind = alias.map_or(kind, |(_, text)| text);
    if let Some((_, rest)) = kind.split_once("Text<") {
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        return format!("text, at most {digits} bytes");
    }
    let has = |word: &str| words(kind).any(|candidate| candidate == word);
    match () {
        () if has("bool") => "boolean",
        () if ["u8", "u16", "u32", "u64"].into_iter().any(has) => "number",
        () if has("IpAddr") => "address",
        () => "text",
    }
    .to_owned()
}

fn words(kind: &str) -> impl Iterator<Item = &str> {
    kind.split(|letter: char| !letter.is_alphanumeric()).filter(|word| !word.is_empty())
}

/// Parses every struct with named members.
fn parse_structs() -> HashMap<String, Vec<Member>> {
    let mut structs = HashMap::new();
    let mut lines = SOURCE.lines().map(str::trim);
    while let Some(line) = lines.next() {
        let Some((_, rest)) = line.split_once("struct ").filter(|_| line.ends_with('{')) else {
            continue;
        };
        let name = words(rest).next().unwrap().to_owned();
        structs.insert(name, parse_members(&mut lines));
    }
    structs
}

fn parse_members<'a>(lines: &mut impl Iterator<Item = &'a str>) -> Vec<Member> {
    let mut members = Vec::new();
    let (mut meaning, mut renamed) = (String::new(), None);
    for line in lines.take_while(|line| *line != "}") {
        if let Some(text) = line.strip_prefix("/// ") {
            meaning = format!("{meaning} {text}");
        } else if let Some((_, rest)) = line.split_once("rename = \"") {
            renamed = rest.split('"').next().map(str::to_owned);
        } else if let Some((name, kind)) = line.trim_end_matches(',').split_once(": ") {
            let name = renamed.take().unwrap_or_else(|| member_name(name));
            let meaning = std::mem::take(&mut meaning).trim().to_owned();
            members.push(Member { name, kind: kind.to_owned(), meaning });
        }
    }
    members
}

/// Returns the member's name without its visibility.
fn member_name(name: &str) -> String {
    name.rsplit(' ').next().unwrap().to_owned()
}
