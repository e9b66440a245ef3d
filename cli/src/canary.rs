//! `sandbar canary`: values that no honest program sends, made for the running instance.

use std::process::ExitCode;

use anyhow::bail;
use proxy::admin::canaries::CanaryRequest;
use rules::signals::canary::CanaryShape;
use serde_json::{Value, json};

use super::OutputOptions;
use super::instance::RunningInstance;
use crate::terminal::{FAINT, GOOD, paint, print_json};

/// Make, list and remove canaries: values that no honest program sends, refused and reported wherever they leave
#[derive(clap::Args, Debug)]
pub(crate) struct CanaryArgs {
    #[command(subcommand)]
    command: CanaryCommand,
}

#[derive(clap::Subcommand, Debug)]
enum CanaryCommand {
    /// Make a canary and print the text to plant, once
    New {
        #[command(flatten)]
        running: RunningInstance,
        /// What the canary looks like
        #[arg(long, value_enum, default_value_t, value_name = "SHAPE")]
        shape: ShapeArg,
        /// Name in records and lists: letters, digits, `.`, `_` and `-`
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// List names and shapes, never values
    List {
        #[command(flatten)]
        running: RunningInstance,
    },
    /// Remove a canary: its value may leave again
    Remove {
        #[command(flatten)]
        running: RunningInstance,
        /// Name, as shown by `sandbar canary list`
        #[arg(value_name = "NAME")]
        name: String,
    },
}

#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
enum ShapeArg {
    /// An AWS access key: id and secret
    AwsKey,
    /// A name of a host
    DnsName,
    /// A personal access token of GitHub
    GithubToken,
    /// A sentence with a secret phrase
    Sentence,
    /// Letters and digits
    #[default]
    Token,
}

impl ShapeArg {
    fn shape(self) -> CanaryShape {
        match self {
            ShapeArg::AwsKey => CanaryShape::AwsKey,
            ShapeArg::DnsName => CanaryShape::DnsName,
            ShapeArg::GithubToken => CanaryShape::GithubToken,
            ShapeArg::Sentence => CanaryShape::Sentence,
            ShapeArg::Token => CanaryShape::Token,
        }
    }
}

/// Makes, lists or removes canaries. Exit status: 0, or 2 if refused or no running instance.
pub(crate) fn canary(args: &CanaryArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let reply = match &args.command {
        CanaryCommand::New { running, shape, name } => {
            let request = CanaryRequest { name: name.clone(), shape: shape.shape().to_string() };
            running.request("POST", "/canaries", &json!(request))?
        }
        CanaryCommand::List { running } => running.request("GET", "/canaries", &Value::Null)?,
        CanaryCommand::Remove { running, name } => {
            running.request("DELETE", &format!("/canaries/{}", path_segment(name)?), &Value::Null)?
        }
    };
    match (output.json, &args.command) {
        (true, _) => print_json(&reply),
        (false, CanaryCommand::New { name, shape, .. }) => print_new(name, shape.shape(), &reply),
        (false, CanaryCommand::List { .. }) => print_list(&reply),
        (false, CanaryCommand::Remove { name, .. }) => {
            anstream::println!("{} canary {name}; its value may leave again", paint(GOOD, "removed:"));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns a name that can be a segment of a path; no canary has another.
fn path_segment(name: &str) -> anyhow::Result<&str> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if name.is_empty() || !name.bytes().all(plain) {
        bail!("there is no canary `{}`: see `sandbar canary list`", name.escape_debug());
    }
    Ok(name)
}

fn print_new(name: &str, shape: CanaryShape, reply: &Value) {
    let text = reply.get("text").and_then(Value::as_str).unwrap_or_default();
    anstream::println!(
        "{} canary {name}; the text to plant, which is never shown again:",
        paint(GOOD, "made:")
    );
    anstream::println!("\n{text}\n");
    anstream::println!("{}", paint(FAINT, place_hint(shape)));
    let effect =
        "a request or a name that carries it is refused as `canary_used`, and recorded with this name";
    anstream::println!("{}", paint(FAINT, effect));
}

/// Says where a canary of this shape belongs.
fn place_hint(shape: CanaryShape) -> &'static str {
    match shape {
        CanaryShape::AwsKey => {
            "put it into ~/.aws/credentials of the sandbox, below a profile that nothing uses"
        }
        CanaryShape::DnsName => {
            "put it into /etc/hosts or a configuration of the sandbox, as a host that nothing uses"
        }
        CanaryShape::GithubToken => {
            "put it into ~/.git-credentials or .env of the sandbox, for an account that nothing uses"
        }
        CanaryShape::Sentence => {
            "put it into a document or a memory that the sandbox has no reason to send anywhere"
        }
        CanaryShape::Token => {
            "put it into .env or a configuration of the sandbox, below a name that nothing uses"
        }
    }
}

fn print_list(reply: &Value) {
    let all = reply.get("canaries").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    for canary in all {
        let at = |name: &str| canary.get(name).and_then(Value::as_str).unwrap_or_default();
        anstream::println!("{} {}", at("name"), paint(FAINT, at("shape")));
    }
    if all.is_empty() {
        anstream::println!("no canaries: make one with `sandbar canary new NAME`");
    }
}
