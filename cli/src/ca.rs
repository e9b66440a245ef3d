//! `sandbar ca`: the certificate authority, and how the tools in a sandbox come to trust it.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use certs::authority::AuthorityInfo;
use certs::bundle::ForeignFiles;
use certs::variables::{self, VariableFormat};
use certs::{AuthorityOptions, CertificateAuthority, NameConstraints, UnixTime, bundle, trust};
use serde_json::json;

use super::OutputOptions;
use crate::terminal::{FAINT, GOOD, HEAD, WARN, paint};

/// When `show` begins to warn about the end of an authority.
pub(crate) const EXPIRY_WARNING: Duration = Duration::from_secs(30 * 24 * 3600);
/// What is added to the name of the authority's directory, which others cannot look into, for the directory of
/// the trust files beside it.
const TRUST_SUFFIX: &str = "-trust";

/// Make and show the certificate authority, and have tools trust it
#[derive(clap::Args)]
pub(crate) struct CaArgs {
    #[command(subcommand)]
    command: CaCommand,
}

#[derive(clap::Subcommand)]
enum CaCommand {
    Bundle(BundleArgs),
    Env(EnvArgs),
    Export(ExportArgs),
    Init(CaInitArgs),
    Show(CaShowArgs),
}

/// Make an authority, or take over one of your own
#[derive(clap::Args)]
struct CaInitArgs {
    /// The directory to keep it in; the key file is readable by its owner only
    #[arg(long)]
    dir: PathBuf,
    /// Its name in certificate viewers
    #[arg(long, default_value = "Sandbar", conflicts_with = "key")]
    name: String,
    /// How long it lives
    #[arg(long = "for", value_name = "TIME", default_value = "365d", value_parser = humantime::parse_duration, conflicts_with = "key")]
    life: Duration,
    /// A name, `*.name` or network that it may speak for; repeat for more, leave out for everything
    #[arg(long, value_name = "PATTERN", conflicts_with = "key")]
    permit: Vec<String>,
    /// Your own private key (PEM), instead of a new one
    #[arg(long, value_name = "FILE", requires = "chain")]
    key: Option<PathBuf>,
    /// Your own certificate and those above it (PEM), the signing one first
    #[arg(long, value_name = "FILE", requires = "key")]
    chain: Option<PathBuf>,
}

/// Show an authority: its name, life, fingerprint, and what it may speak for
#[derive(clap::Args)]
struct CaShowArgs {
    /// The directory it is kept in
    #[arg(long)]
    dir: PathBuf,
}

/// Print the certificate that clients must trust
#[derive(clap::Args)]
struct ExportArgs {
    /// The directory the authority is kept in
    #[arg(long)]
    dir: PathBuf,
    /// As text or as bytes
    #[arg(long, value_enum, default_value_t)]
    format: CertificateFormat,
    /// Write it into this file instead
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Replace that file if it is there
    #[arg(long, requires = "out")]
    force: bool,
}

#[derive(Clone, Copy, Default, clap::ValueEnum)]
enum CertificateFormat {
    Der,
    #[default]
    Pem,
}

/// Print the variables that make tools trust the authority
#[derive(clap::Args)]
struct EnvArgs {
    /// The directory the authority is kept in
    #[arg(long)]
    dir: PathBuf,
    /// Where the sandbox sees the files that `bundle` wrote [default: DIR-trust]
    #[arg(long, value_name = "PATH")]
    at: Option<PathBuf>,
    /// For whom
    #[arg(long, value_enum, default_value_t)]
    format: EnvFormat,
}

#[derive(Clone, Copy, Default, clap::ValueEnum)]
enum EnvFormat {
    /// Lines for `docker run --env-file`
    Docker,
    /// Lines for a `.env` file
    Dotenv,
    /// The `env` list of a container
    K8s,
    /// Lines for `eval` in a shell
    #[default]
    Sh,
}

/// Write the files that tools trust: the combined PEM, ours alone, a PKCS#12 store, settings for wget and PHP
#[derive(clap::Args)]
struct BundleArgs {
    /// The directory the authority is kept in
    #[arg(long)]
    dir: PathBuf,
    /// The directory to write into, which the sandbox must be able to read [default: DIR-trust]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Replace files there that are not as this command wrote them
    #[arg(long)]
    force: bool,
    /// Where the sandbox sees that directory, if elsewhere
    #[arg(long, value_name = "PATH")]
    at: Option<PathBuf>,
    /// Leave the roots of this system out, so that the sandbox trusts Sandbar alone
    #[arg(long)]
    without_system: bool,
}

/// Runs one of the subcommands. Exit status: 0, or 2 when a file or an argument is not good.
pub(crate) fn ca(args: &CaArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    match &args.command {
        CaCommand::Bundle(args) => write_bundle(args, output)?,
        CaCommand::Env(args) => print_env(args, output)?,
        CaCommand::Export(args) => export(args, output)?,
        CaCommand::Init(args) => init(args, output)?,
        CaCommand::Show(args) => show(args, output)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn init(args: &CaInitArgs, output: OutputOptions) -> anyhow::Result<()> {
    let now = UnixTime::now();
    let authority = match (&args.key, &args.chain) {
        (Some(key), Some(chain)) => CertificateAuthority::import(&args.dir, key, chain, now)?,
        _ => CertificateAuthority::create(&args.dir, &authority_options(args)?, now)?,
    };
    print_authority(&authority.describe(), output)
}

fn authority_options(args: &CaInitArgs) -> anyhow::Result<AuthorityOptions> {
    let permitted = match args.permit.as_slice() {
        [] => None,
        patterns => Some(name_constraints(patterns)?),
    };
    Ok(AuthorityOptions { name: args.name.clone(), life: args.life, permitted })
}

/// Who asks for a limit gets it or an error, never an authority without one.
fn name_constraints(patterns: &[String]) -> anyhow::Result<NameConstraints> {
    NameConstraints::from_patterns(patterns.iter().map(String::as_str)).with_context(|| {
        let most = certs::constraints::MAX_SUBTREES;
        format!("--permit takes 1 to {most} names (`x.com`, `*.x.com`) or networks (`10.0.0.0/8`), not `*`")
    })
}

fn show(args: &CaShowArgs, output: OutputOptions) -> anyhow::Result<()> {
    print_authority(&CertificateAuthority::open(&args.dir, UnixTime::now())?.describe(), output)
}

fn print_authority(found: &AuthorityInfo, output: OutputOptions) -> anyhow::Result<()> {
    if output.json {
        anstream::println!("{}", serde_json::to_string_pretty(found)?);
        return Ok(());
    }
    let permitted = match (found.permitted.as_slice(), found.excluded.as_slice()) {
        ([], []) => "everything".to_owned(),
        ([], excluded) => format!("everything but {}", excluded.join(", ")),
        (some, _) => some.join(", "),
    };
    anstream::println!("{}", paint(HEAD, &found.subject));
    for (name, value) in [
        ("key", found.key.to_owned()),
        ("valid", format!("{} to {}", found.valid_from, found.valid_to)),
        ("SHA-256", found.anchor_sha256.clone()),
        ("speaks for", permitted),
        ("sent along", format!("{} intermediate certificates", found.intermediates)),
    ] {
        anstream::println!("  {} {value}", paint(FAINT, format!("{name:<10}")));
    }
    if found.valid_to_unix < UnixTime::now().as_secs() + EXPIRY_WARNING.as_secs() {
        anstream::println!("{}", paint(WARN, "It ends within 30 days: make a new one in time."));
    }
    Ok(())
}

fn export(args: &ExportArgs, output: OutputOptions) -> anyhow::Result<()> {
    let authority = CertificateAuthority::open(&args.dir, UnixTime::now())?;
    let content = match args.format {
        CertificateFormat::Der => authority.anchor().to_vec(),
        CertificateFormat::Pem => authority.anchor_pem().into_bytes(),
    };
    let sha256 = authority.describe().anchor_sha256;
    match &args.out {
        None if output.json => {
            let object = json!({ "pem": authority.anchor_pem(), "sha256": sha256 });
            anstream::println!("{object}");
        }
        None => std::io::stdout().write_all(&content)?,
        Some(path) => {
            write_file(path, &content, args.force)?;
            if output.json {
                let object = json!({ "file": path.display().to_string(), "sha256": sha256 });
                anstream::println!("{object}");
            }
        }
    }
    Ok(())
}

/// Somebody's file is not written over by accident.
fn write_file(path: &Path, content: &[u8], force: bool) -> anyhow::Result<()> {
    let mut options = fs::OpenOptions::new();
    options.write(true).truncate(true);
    let opened =
        if force { options.create(true).open(path) } else { options.create_new(true).open(path) };
    let hint = if force { "" } else { " (--force replaces a file that is there)" };
    opened
        .and_then(|mut file| file.write_all(content))
        .with_context(|| format!("cannot write {}{hint}", path.display()))
}

fn print_env(args: &EnvArgs, output: OutputOptions) -> anyhow::Result<()> {
    // Variables for an authority that is not there would leave every tool without any trust at all.
    CertificateAuthority::open(&args.dir, UnixTime::now())?;
    let dir = match &args.at {
        Some(path) => path.clone(),
        None => find_bundle(&args.dir)?,
    };
    let variables = variables::variables(&dir)?;
    if output.json {
        let object: serde_json::Map<_, _> =
            variables.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
        anstream::println!("{}", serde_json::to_string_pretty(&object)?);
        return Ok(());
    }
    let format = match args.format {
        EnvFormat::Docker => VariableFormat::Docker,
        EnvFormat::Dotenv => VariableFormat::Dotenv,
        EnvFormat::K8s => VariableFormat::Kubernetes,
        EnvFormat::Sh => VariableFormat::Shell,
    };
    anstream::print!("{}", variables::render(&variables, format));
    Ok(())
}

/// Variables that point at nothing would do the same.
fn find_bundle(dir: &Path) -> anyhow::Result<PathBuf> {
    let trust = trust_dir(dir)?;
    let shown = dir.display();
    let missing =
        || format!("there is no bundle yet; write it with: sandbar ca bundle --dir {shown}");
    fs::metadata(trust.join(bundle::BUNDLE_FILE)).with_context(missing)?;
    Ok(trust)
}

fn write_bundle(args: &BundleArgs, output: OutputOptions) -> anyhow::Result<()> {
    let authority = CertificateAuthority::open(&args.dir, UnixTime::now())?;
    let out = args.out.clone().map_or_else(|| trust_dir(&args.dir), Ok)?;
    let seen_at = args.at.clone().map_or_else(|| absolute(&out), Ok)?;
    let system = if args.without_system { Vec::new() } else { trust::system_roots() };
    let others = if args.force { ForeignFiles::Replace } else { ForeignFiles::Keep };
    let written = bundle::write(&out, &seen_at, &authority, &system, others)?;
    if output.json {
        let files: Vec<_> = written.iter().map(|path| path.display().to_string()).collect();
        anstream::println!("{}", json!({ "files": files, "system_roots": system.len() }));
        return Ok(());
    }
    for path in written {
        anstream::println!("{} {}", paint(GOOD, "wrote"), path.display());
    }
    if system.is_empty() && !args.without_system {
        anstream::eprintln!(
            "{} this system has no CA certificates; only Sandbar is trusted",
            paint(WARN, "sandbar:")
        );
    }
    Ok(())
}

/// Beside the authority's own directory, so that other users can read it.
pub(crate) fn trust_dir(dir: &Path) -> anyhow::Result<PathBuf> {
    let dir = absolute(dir)?;
    let mut name =
        dir.file_name().context("give --out: there is nothing beside this directory")?.to_owned();
    name.push(TRUST_SUFFIX);
    Ok(dir.with_file_name(name))
}

fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("cannot find {}", path.display()))
}
