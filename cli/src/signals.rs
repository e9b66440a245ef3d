//! `sandbar signals`: lists the detectors, and tries them on a request without sending it.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use proxy::admin::try_request::{
    KnownSignal, TriedBits, TriedRequest, TriedSignal, TryRequest, known_signals,
};
use proxy::app::load_config;
use rules::compile;
use rules::signals::secrets::shape_names;
use rules::signals::shape::ShapeThresholds;
use serde_json::json;

use super::policy_args::PolicyArgs;
use super::{EXIT_BAD_INPUT, EXIT_NEGATIVE, OutputOptions, check};
use crate::terminal::{BAD, FAINT, GOOD, HEAD, WARN, paint, print_json};

/// Largest request that is read.
const MAX_REQUEST: u64 = 64 << 20;

/// List the signals that Sandbar raises about what leaves, or try them on a request
#[derive(clap::Args)]
pub(crate) struct SignalsArgs {
    #[command(subcommand)]
    command: SignalsCommand,
}

#[derive(clap::Subcommand)]
enum SignalsCommand {
    /// List the signals, their thresholds, and the secrets that are recognised
    List,
    /// Print what each detector says about a request, and what the policy does about it; nothing is sent
    Try(TryArgs),
}

/// The request to try.
#[derive(clap::Args)]
struct TryArgs {
    #[command(flatten)]
    policy: PolicyArgs,
    /// Sandbox that sends it; optional if there is only one
    #[arg(long, short, value_name = "ID")]
    sandbox: Option<String>,
    /// Destination, if not the request's `Host` with TLS: `https://host:port`
    #[arg(long, value_name = "URL")]
    host: Option<String>,
    /// File with one HTTP/1.1 request, head and body; `-` for standard input
    #[arg(value_name = "FILE|-")]
    file: PathBuf,
}

/// Lists signals, or tries them. Exit status of `list`: 0. Of `try`: 0 nothing denied, 1 something would be denied,
/// 2 invalid request or policy, 64 usage error.
pub(crate) fn signals(args: &SignalsArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    match &args.command {
        SignalsCommand::List => {
            list(output);
            Ok(ExitCode::SUCCESS)
        }
        SignalsCommand::Try(args) => try_request(args, output),
    }
}

fn try_request(args: &TryArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let request = read_request(&args.file)?;
    let sources = args.policy.is_given().then(|| args.policy.read()).transpose()?;
    let rules = match sources.as_ref().map(|sources| compile(sources, &[])).transpose() {
        Ok(rules) => rules,
        Err(problems) => {
            check::print_load_errors(&problems, output);
            return Ok(ExitCode::from(EXIT_BAD_INPUT));
        }
    };
    let configured = sources.as_ref().filter(|sources| sources.operator.is_some());
    let configuration = configured.map(load_config).transpose()?;
    let path = configured.and_then(|sources| sources.operator.as_ref()).map(|file| Path::new(&file.path));
    let wanted = TryRequest {
        request: &request,
        host: args.host.as_deref(),
        rules: rules.as_ref(),
        sandbox: args.sandbox.as_deref(),
        configuration: path.zip(configuration.as_ref()),
    };
    let tried = wanted.answer()?;
    match output.json {
        true => print_json(&json!(tried)),
        false => print_tried(&tried),
    }
    Ok(if tried.denied { ExitCode::from(EXIT_NEGATIVE) } else { ExitCode::SUCCESS })
}

fn read_request(path: &Path) -> anyhow::Result<Vec<u8>> {
    let shown = path.display();
    let input: Box<dyn Read> = match path.to_str() {
        Some("-") => Box::new(io::stdin()),
        _ => Box::new(File::open(path).with_context(|| format!("cannot read {shown}"))?),
    };
    let mut bytes = Vec::new();
    input.take(MAX_REQUEST + 1).read_to_end(&mut bytes).with_context(|| format!("cannot read {shown}"))?;
    if bytes.len() as u64 > MAX_REQUEST {
        bail!("{shown} is larger than {MAX_REQUEST} bytes");
    }
    Ok(bytes)
}

fn print_tried(tried: &TriedRequest) {
    let TriedRequest { method, host, port, inspected, .. } = tried;
    let word = if tried.denied { paint(BAD, "denied") } else { paint(GOOD, "passes") };
    anstream::println!("{word} {method} to {host}:{port}");
    match &tried.policy {
        None => print_field("policy", "none given: the defaults apply"),
        Some(policy) => {
            let rule = policy.rule.as_ref().map(|rule| format!(" by rule `{rule}`")).unwrap_or_default();
            let verdict = match (policy.reason, policy.how) {
                (Some(reason), _) => {
                    format!("the destination is denied as {reason}{rule}; below, the defaults apply")
                }
                (None, how) => format!("allowed{rule}: {}", how.unwrap_or_default()),
            };
            print_field("policy", &format!("sandbox {}, {verdict}", policy.sandbox));
        }
    }
    let modes = tried.settings.iter().map(|(key, mode)| format!("{key} {mode}")).collect::<Vec<_>>();
    print_field("signals", &modes.join(", "));
    match *inspected {
        "none" => {
            print_field("searched", "the host name only: what is inside the connection is not inspected")
        }
        "head" => print_field("searched", "the head only"),
        _ => print_field("searched", "head and body"),
    }
    print_signals("content", "no secret, canary or credential", &tried.content);
    if let Some(bits) = &tried.header_bits {
        print_bits(bits);
        print_signals("form", "nothing unusual for a first request to this host", &tried.form);
    }
    tried.notes.iter().for_each(|note| print_field("note", note));
}

fn print_signals(head: &str, nothing: &str, signals: &[TriedSignal]) {
    for signal in signals {
        let style = match signal.verdict.as_str() {
            "deny" => BAD,
            "flag" => WARN,
            _ => FAINT,
        };
        let key = signal.key.map_or("always".to_owned(), |key| format!("`{key}`"));
        let (code, verdict) = (signal.code, paint(style, format!("{:<4}", signal.verdict)));
        print_field(head, &format!("{verdict} {code}: {} {}", signal.text, paint(FAINT, format!("({key})"))));
    }
    if signals.is_empty() {
        print_field(head, nothing);
    }
}

fn print_bits(bits: &TriedBits) {
    let budget = match bits.limit {
        Some(limit) if bits.bits > limit => {
            format!("; {} the budget of {limit} per hour", paint(BAD, "exceeds"))
        }
        Some(limit) => format!(" of {limit} per hour"),
        None => String::new(),
    };
    print_field("bits", &format!("{} outside the body, as a first request{budget}", bits.bits));
    for component in &bits.dearest {
        print_field("", &format!("{:>6} {}", component.bits, component.place));
    }
}

fn print_field(head: &str, text: &str) {
    anstream::println!("  {} {text}", paint(FAINT, format!("{head:<8}")));
}

fn list(output: OutputOptions) {
    let (signals, thresholds) = (known_signals(), ShapeThresholds::TABLE);
    if output.json {
        let thresholds = thresholds
            .iter()
            .map(|(name, default, most, meaning)| json!({ "name": name, "default": default, "maximum": most, "meaning": meaning }));
        return print_json(&json!({
            "signals": signals,
            "thresholds": thresholds.collect::<Vec<_>>(),
            "secrets": shape_names().collect::<Vec<_>>(),
        }));
    }
    signals.iter().for_each(print_signal);
    anstream::println!("\n{}", paint(HEAD, "Thresholds"));
    for (name, default, most, meaning) in thresholds {
        let bounds = paint(FAINT, format!("1 to {most} in [signals.thresholds]"));
        anstream::println!("{} = {default} {bounds}\n  {meaning}", paint(HEAD, name));
    }
    anstream::println!("\n{}", paint(HEAD, "Secrets that are recognised"));
    shape_names().for_each(|name| anstream::println!("{name}"));
}

fn print_signal(signal: &KnownSignal) {
    let keys: Vec<String> = signal.keys.iter().map(|key| format!("`{key}`")).collect();
    let governed = match keys.is_empty() {
        true => "always denied".to_owned(),
        false => format!("{} of [signals], {} by default", keys.join(" or "), signal.default),
    };
    anstream::println!("{} {}\n  {}", paint(HEAD, signal.code), paint(FAINT, governed), signal.meaning);
}
