//! Every example of the README is run, and prints what the README says.

use std::fs;

use integration::{root, run, text};

/// The commands of the console blocks of a document, each with what it shows below.
fn examples(document: &str) -> Vec<(String, String)> {
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

#[test]
fn every_example_prints_what_the_readme_says() {
    let document = fs::read_to_string(root().join("README.md")).unwrap();
    let examples = examples(&document);
    assert!(examples.len() >= 4, "the README shows its commands at work");
    for (command, shown) in examples {
        let arguments = command
            .strip_prefix("sandbar ")
            .unwrap_or_else(|| panic!("{command}: not a sandbar command"));
        let output = run(arguments);
        let printed = text(&output.stdout) + &text(&output.stderr);
        assert_eq!(printed.trim_end(), shown.trim_end(), "$ {command}");
    }
}

#[test]
fn every_link_of_the_readme_leads_somewhere() {
    let document = fs::read_to_string(root().join("README.md")).unwrap();
    for target in document.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
        let path = target.split('#').next().unwrap_or("");
        assert!(
            path.is_empty() || target.contains("://") || root().join(path).exists(),
            "{target}"
        );
    }
}
