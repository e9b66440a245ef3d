//! `sandbar diff`: compares what two policies make reachable.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use rules::diff::{Difference, ReachabilityChange, diff as compare};
use rules::{RuleSet, SandboxRef, compile};
use serde_json::{Value, json};

use super::{EXIT_BAD_INPUT, EXIT_NEGATIVE, OutputOptions, check};
use crate::terminal::{BAD, FAINT, GOOD, HEAD, WARN, paint, print_json};
use proxy::policy::files;

/// Compare two policies: what becomes reachable, and what stops being reachable
#[derive(clap::Args)]
pub(crate) struct DiffArgs {
    /// Old policies: a file, a directory or a sandbar.toml
    old: PathBuf,
    /// New policies
    new: PathBuf,
    /// Exit with status 1 if anything differs
    #[arg(long)]
    exit_code: bool,
}

/// The differences of one sandbox.
struct SandboxDiff {
    name: String,
    differences: Vec<Difference>,
}

/// Compares policies. Exit status: 0; 1 with --exit-code if anything differs; 2 invalid policy.
pub(crate) fn diff(args: &DiffArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let (Some(old), Some(new)) = (load_rules(&args.old, output)?, load_rules(&args.new, output)?) else {
        return Ok(ExitCode::from(EXIT_BAD_INPUT));
    };
    let sections: Vec<SandboxDiff> = pair_sandboxes(&old, &new)
        .into_iter()
        .map(|pair| diff_sandbox(&old.rules, &new.rules, pair))
        .collect();
    let differs = sections.iter().any(|section| !section.differences.is_empty());
    if output.json {
        print_json(&diffs_json(&sections));
    } else {
        sections.iter().for_each(print_diff);
        if !differs {
            anstream::println!("no difference in what is reachable");
        }
    }
    Ok(if differs && args.exit_code { ExitCode::from(EXIT_NEGATIVE) } else { ExitCode::SUCCESS })
}

/// One side of the comparison.
struct LoadedRules {
    rules: RuleSet,
    /// Whether a configuration declares the sandboxes.
    has_configuration: bool,
}

fn load_rules(path: &Path, output: OutputOptions) -> anyhow::Result<Option<LoadedRules>> {
    let sources = files::read_paths(&[path.to_owned()])?;
    let has_configuration = sources.operator.is_some();
    match compile(&sources, &[]) {
        Ok(rules) => Ok(Some(LoadedRules { rules, has_configuration })),
        Err(problems) => {
            check::print_load_errors(&problems, output);
            Ok(None)
        }
    }
}

type SandboxPair<'a> = (Option<&'a SandboxRef>, Option<&'a SandboxRef>);

/// Pairs sandboxes by id; two single policies are compared whatever their names.
fn pair_sandboxes<'a>(old: &'a LoadedRules, new: &'a LoadedRules) -> Vec<SandboxPair<'a>> {
    let (old_all, new_all) = (old.rules.sandboxes(), new.rules.sandboxes());
    let (before, after): (Vec<_>, Vec<_>) = (old_all.iter().collect(), new_all.iter().collect());
    if let ([one], [other], false, false) =
        (&before[..], &after[..], old.has_configuration, new.has_configuration)
    {
        return vec![(Some(one), Some(other))];
    }
    let ids: BTreeSet<_> = before.iter().chain(&after).map(|sandbox| &sandbox.id).collect();
    ids.into_iter().map(|id| (old_all.get(id), new_all.get(id))).collect()
}

fn diff_sandbox(old: &RuleSet, new: &RuleSet, (before, after): SandboxPair<'_>) -> SandboxDiff {
    // A sandbox on one side only is compared with one that may reach nothing.
    let (old_sandbox, new_sandbox) = match (before, after) {
        (Some(before), Some(after)) => (before, after),
        (Some(only), None) | (None, Some(only)) => (only, only),
        (None, None) => return SandboxDiff { name: String::new(), differences: Vec::new() },
    };
    let name = match (before, after) {
        (Some(_), None) => format!("{} (removed)", old_sandbox.id),
        (None, Some(_)) => format!("{} (added)", new_sandbox.id),
        _ => new_sandbox.id.to_string(),
    };
    SandboxDiff { name, differences: compare((old, old_sandbox), (new, new_sandbox)) }
}

fn print_diff(section: &SandboxDiff) {
    if section.differences.is_empty() {
        return;
    }
    anstream::println!("sandbox {}", paint(HEAD, &section.name));
    for difference in &section.differences {
        let (sign, style) = match difference.change {
            ReachabilityChange::BecomesReachable => ("+", GOOD),
            ReachabilityChange::IsTreatedOtherwise { .. } => ("~", WARN),
            ReachabilityChange::StopsBeingReachable => ("-", BAD),
        };
        let by = match difference.rule.as_str() {
            "" => String::new(),
            rule => format!(" {}", paint(FAINT, format!("by `{rule}`"))),
        };
        let what = paint(style, format!("{sign} {}", difference.what));
        anstream::println!("  {what} {}{by}", difference.change);
    }
}

fn diffs_json(sections: &[SandboxDiff]) -> Value {
    let one = |difference: &Difference| {
        let change = match &difference.change {
            ReachabilityChange::BecomesReachable => "becomes_reachable",
            ReachabilityChange::IsTreatedOtherwise { .. } => "is_treated_otherwise",
            ReachabilityChange::StopsBeingReachable => "stops_being_reachable",
        };
        let text = difference.change.to_string();
        json!({ "change": change, "text": text, "what": difference.what, "rule": difference.rule })
    };
    let section = |section: &SandboxDiff| json!({ "sandbox": section.name, "differences": section.differences.iter().map(one).collect::<Vec<_>>() });
    json!({ "sandboxes": sections.iter().map(section).collect::<Vec<_>>() })
}
