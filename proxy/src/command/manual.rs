//! `sandbar completions` and `sandbar man`: both are made from the argument definitions.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::CommandFactory;

use super::Arguments;

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
}

/// Prints a completion script. Exit status: 0.
pub(crate) fn completions(args: &CompletionsArgs) -> anyhow::Result<ExitCode> {
    clap_complete::generate(args.shell, &mut Arguments::command(), "sandbar", &mut io::stdout());
    Ok(ExitCode::SUCCESS)
}

/// Prints the manual, or writes it. Exit status: 0, or 2 when it cannot be written.
pub(crate) fn man(args: &ManArgs) -> anyhow::Result<ExitCode> {
    let command = Arguments::command();
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
