//! Every example of the README is run, and prints what the README says.

use std::fs;

use integration::{repository_root, sandbar, text};

/// The commands of the console blocks of a document, each with what it shows below.
fn console_examples(document: &str) -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = Vec::new();
    for block in document.split("```console\n").skip(1) {
        let block = block.split("```").next().unwrap_or("");
        for line in block.lines() {
            match (line.strip_prefix("$ "), found.last_mut()) {
                (Some(command), _) => found.push((command.to_owned(), String::new())),
                (None, Some((_, shown))) => *shown += &format!("{line}\n"),
                (None, None) => panic!("a console block begins with a command: {line}"),
            }
        }
    }
    found
}

/// What is printed without what differs from run to run: how long it took, where it lies, the number of a record.
fn normalize(printed: &str) -> String {
    let is_path = |word: &str| word.contains("/sandbar/runs/");
    let is_number = |word: &str| {
        let word = word.trim_start_matches('#');
        !word.is_empty() && word.chars().all(|letter| letter.is_ascii_digit() || letter == '.')
    };
    let line = |line: &str| {
        let varies = line.contains(" ms") || line.contains(", in ") || line.contains(", #");
        let varies = varies || line.trim_start().starts_with("used ");
        let word = |word: &str| match (is_path(word), varies && is_number(word)) {
            (true, _) => "PATH".to_owned(),
            (false, true) => "N".to_owned(),
            (false, false) => word.to_owned(),
        };
        line.trim_end().split(' ').map(word).collect::<Vec<_>>().join(" ")
    };
    printed.trim_end().lines().map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn every_example_prints_what_the_readme_says() {
    let document = fs::read_to_string(repository_root().join("README.md")).unwrap();
    let examples = console_examples(&document);
    assert!(examples.len() >= 4, "the README shows its commands at work");
    let state = tempfile::tempdir().unwrap();
    for (command, shown) in examples {
        let arguments =
            command.strip_prefix("sandbar ").unwrap_or_else(|| panic!("{command}: not a sandbar command"));
        let mut sandbar = sandbar();
        let output = sandbar.args(arguments.split_whitespace()).env("XDG_STATE_HOME", state.path());
        let output = output.output().unwrap();
        let printed = text(&output.stdout) + &text(&output.stderr);
        assert_eq!(normalize(&printed), normalize(&shown), "$ {command}");
    }
}

#[test]
fn every_credential_of_the_readme_is_one() {
    let document = fs::read_to_string(repository_root().join("README.md")).unwrap();
    let blocks = document.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next());
    let blocks: Vec<&str> = blocks.filter(|block| block.contains("[[credential]]")).collect();
    assert!(!blocks.is_empty(), "the README shows credentials");
    for block in blocks {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("policies")).unwrap();
        fs::write(dir.path().join("policies/p.toml"), "name = \"p\"\n").unwrap();
        let config = dir.path().join("sandbar.toml");
        fs::write(&config, format!("policies = \"policies\"\n{block}")).unwrap();
        let checked = sandbar().args(["check", "--without-credentials"]).arg(&config).output().unwrap();
        assert!(checked.status.success(), "{}\n{block}", text(&checked.stderr));
    }
}

#[test]
fn every_link_of_the_readme_leads_somewhere() {
    let document = fs::read_to_string(repository_root().join("README.md")).unwrap();
    for target in document.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
        let path = target.split('#').next().unwrap_or("");
        assert!(
            path.is_empty() || target.contains("://") || repository_root().join(path).exists(),
            "{target}"
        );
    }
}
