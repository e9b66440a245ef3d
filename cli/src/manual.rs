//! `sandbar completions` and `sandbar man`: both are made from the argument definitions.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Arg, Command, CommandFactory};

use super::CliArguments;

/// Print the completion script of a shell
#[derive(clap::Args)]
pub(crate) struct CompletionsArgs {
    /// The shell to complete in
    shell: clap_complete::Shell,
}

/// Print the manual page, or write one page a subcommand into a directory
#[derive(clap::Args)]
pub(crate) struct ManArgs {
    /// Write every page into this directory instead
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print the reference of the documentation instead
    #[arg(long, conflicts_with = "dir")]
    markdown: bool,
}

/// Prints a completion script. Exit status: 0.
pub(crate) fn completions(args: &CompletionsArgs) -> anyhow::Result<ExitCode> {
    clap_complete::generate(args.shell, &mut CliArguments::command(), "sandbar", &mut io::stdout());
    Ok(ExitCode::SUCCESS)
}

/// Prints the manual, or writes it. Exit status: 0, or 2 when it cannot be written.
pub(crate) fn man(args: &ManArgs) -> anyhow::Result<ExitCode> {
    let command = CliArguments::command();
    if args.markdown {
        anstream::print!("{}", markdown_reference(command));
        return Ok(ExitCode::SUCCESS);
    }
    match &args.dir {
        None => clap_mangen::Man::new(command).render(&mut io::stdout())?,
        Some(dir) => {
            let shown = dir.display();
            fs::create_dir_all(dir).with_context(|| format!("cannot make {shown}"))?;
            clap_mangen::generate_to(command, dir)
                .with_context(|| format!("cannot write into {shown}"))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The reference of every subcommand, as it stands in `cli/COMMANDS.md`.
fn markdown_reference(mut command: Command) -> String {
    command.build();
    let mut text = String::from(
        "# Commands\n\nMade by `sandbar man --markdown`. `--json` prints JSON and `--color auto|always|never` says when to use \
         colours, everywhere. Exit status, unless a command says otherwise: 0 good; 1 it ran and says no; 2 a file or \
         a running program is not good; 64 usage.\n",
    );
    append_subcommands(&command, &mut text);
    text
}

fn append_subcommands(command: &Command, text: &mut String) {
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
        if inner.get_name() == "help" {
            continue;
        }
        if !inner.has_subcommands() || inner.get_about().is_some() {
            append_command(inner, text);
        }
        append_subcommands(inner, text);
    }
}

fn append_command(command: &Command, text: &mut String) {
    let name = command.get_bin_name().unwrap_or(command.get_name());
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ").replace('\n', " ");
    *text += &format!("\n## {name}\n\n{about}.\n\n    {usage}\n\n");
    let told = |arg: &&Arg| !arg.is_hide_set() && !arg.is_global_set() && arg.get_id() != "help";
    for arg in command.get_arguments().filter(told) {
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        *text += &format!("- `{}`: {help}{}\n", argument_usage(arg), default_text(arg));
    }
}

/// The argument as it is written on a command line.
fn argument_usage(arg: &Arg) -> String {
    let names = arg.get_value_names().unwrap_or_default();
    let values = match arg.get_action().takes_values() {
        true => names.iter().map(|name| format!(" {name}")).collect(),
        false => String::new(),
    };
    match (arg.get_long(), arg.get_short()) {
        (Some(long), Some(short)) => format!("-{short}, --{long}{values}"),
        (Some(long), None) => format!("--{long}{values}"),
        (None, Some(short)) => format!("-{short}{values}"),
        (None, None) => values.trim().to_owned(),
    }
}

fn default_text(arg: &Arg) -> String {
    let values: Vec<String> =
        arg.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect();
    match arg.get_action().takes_values() && !values.is_empty() {
        true => format!(" (default: {})", values.join(", ")),
        false => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documented_reference_is_the_code() {
        assert_eq!(
            include_str!("../COMMANDS.md"),
            markdown_reference(CliArguments::command()),
            "write cli/COMMANDS.md anew: cargo run -p cli -- man --markdown"
        );
    }
}
