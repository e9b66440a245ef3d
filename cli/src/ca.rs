//! `sandbar ca`: manages the certificate authority (CA) and makes the tools in a sandbox trust it.

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

/// Remaining validity below which `show` warns.
pub(crate) const EXPIRY_WARNING: Duration = Duration::from_secs(30 * 24 * 3600);
/// Suffix of the directory with the trust files. It is a sibling of the authority's directory, because only the
/// owner can enter that one.
const TRUST_SUFFIX: &str = "-trust";

/// Manage the certificate authority (CA) and make tools trust it
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

/// Create a CA, or import an existing one
#[derive(clap::Args)]
struct CaInitArgs {
    /// Directory to store the CA in; only the owner can read the key file
    #[arg(long)]
    dir: PathBuf,
    /// Name of the CA, as shown in certificate viewers
    #[arg(long, default_value = "Sandbar", conflicts_with = "key")]
    name: String,
    /// Validity period
    #[arg(long = "for", value_name = "TIME", default_value = "365d", value_parser = humantime::parse_duration, conflicts_with = "key")]
    life: Duration,
    /// Restrict the CA to a name, `*.name` or network; repeatable [default: unrestricted]
    #[arg(long, value_name = "PATTERN", conflicts_with = "key")]
    permit: Vec<String>,
    /// Existing private key to import (PEM)
    #[arg(long, value_name = "FILE", requires = "chain")]
    key: Option<PathBuf>,
    /// Certificate chain of the imported key (PEM), signing certificate first
    #[arg(long, value_name = "FILE", requires = "key")]
    chain: Option<PathBuf>,
}

/// Show a CA: name, validity, fingerprint and name constraints
#[derive(clap::Args)]
struct CaShowArgs {
    /// Directory of the CA
    #[arg(long)]
    dir: PathBuf,
}

/// Print the CA certificate that clients must trust
#[derive(clap::Args)]
struct ExportArgs {
    /// Directory of the CA
    #[arg(long)]
    dir: PathBuf,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    format: CertificateFormat,
    /// Write to this file instead of stdout
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Overwrite an existing file
    #[arg(long, requires = "out")]
    force: bool,
}

#[derive(Clone, Copy, Default, clap::ValueEnum)]
enum CertificateFormat {
    Der,
    #[default]
    Pem,
}

/// Print the environment variables that make tools trust the CA
#[derive(clap::Args)]
struct EnvArgs {
    /// Directory of the CA
    #[arg(long)]
    dir: PathBuf,
    /// Path of the trust files (see `bundle`) inside the sandbox [default: DIR-trust]
    #[arg(long, value_name = "PATH")]
    at: Option<PathBuf>,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    format: EnvFormat,
}

#[derive(Clone, Copy, Default, clap::ValueEnum)]
enum EnvFormat {
    /// For `docker run --env-file`
    Docker,
    /// For a `.env` file
    Dotenv,
    /// The `env` list of a Kubernetes container
    K8s,
    /// For `eval` in a shell
    #[default]
    Sh,
}

/// Write the trust files: combined PEM, CA certificate alone, PKCS#12 store, settings for wget and PHP
#[derive(clap::Args)]
struct BundleArgs {
    /// Directory of the CA
    #[arg(long)]
    dir: PathBuf,
    /// Directory to write to; the sandbox must be able to read it [default: DIR-trust]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Overwrite files that are not as this command wrote them
    #[arg(long)]
    force: bool,
    /// Path of that directory inside the sandbox, if different
    #[arg(long, value_name = "PATH")]
    at: Option<PathBuf>,
    /// Leave out the system's CA certificates, so that the sandbox trusts only Sandbar
    #[arg(long)]
    without_system: bool,
}

/// Runs one of the subcommands. Exit status: 0, or 2 for an invalid file or argument.
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

/// Fails on an invalid pattern instead of creating an authority without constraints.
fn name_constraints(patterns: &[String]) -> anyhow::Result<NameConstraints> {
    NameConstraints::from_patterns(patterns.iter().map(String::as_str)).with_context(|| {
        let max = certs::constraints::MAX_SUBTREES;
        format!("--permit takes 1 to {max} names (`x.com`, `*.x.com`) or networks (`10.0.0.0/8`), not `*`")
    })
}

fn show(args: &CaShowArgs, output: OutputOptions) -> anyhow::Result<()> {
    print_authority(&CertificateAuthority::open(&args.dir, UnixTime::now())?.describe(), output)
}

fn print_authority(info: &AuthorityInfo, output: OutputOptions) -> anyhow::Result<()> {
    if output.json {
        anstream::println!("{}", serde_json::to_string_pretty(info)?);
        return Ok(());
    }
    let permitted = match (info.permitted.as_slice(), info.excluded.as_slice()) {
        ([], []) => "everything".to_owned(),
        ([], excluded) => format!("everything but {}", excluded.join(", ")),
        (some, _) => some.join(", "),
    };
    anstream::println!("{}", paint(HEAD, &info.subject));
    for (name, value) in [
        ("key", info.key.to_owned()),
        ("valid", format!("{} to {}", info.valid_from, info.valid_to)),
        ("SHA-256", info.anchor_sha256.clone()),
        ("signs for", permitted),
        ("chain", format!("{} intermediate certificates", info.intermediates)),
    ] {
        anstream::println!("  {} {value}", paint(FAINT, format!("{name:<10}")));
    }
    if info.valid_to_unix < UnixTime::now().as_secs() + EXPIRY_WARNING.as_secs() {
        anstream::println!("{}", paint(WARN, "It expires within 30 days: create a new one in time."));
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

/// Refuses to overwrite an existing file unless `force` is set.
fn write_file(path: &Path, content: &[u8], force: bool) -> anyhow::Result<()> {
    let mut options = fs::OpenOptions::new();
    options.write(true).truncate(true);
    let opened = if force { options.create(true).open(path) } else { options.create_new(true).open(path) };
    let hint = if force { "" } else { " (--force overwrites an existing file)" };
    opened
        .and_then(|mut file| file.write_all(content))
        .with_context(|| format!("cannot write {}{hint}", path.display()))
}

fn print_env(args: &EnvArgs, output: OutputOptions) -> anyhow::Result<()> {
    // Variables that lead to a missing authority would leave every tool without trusted roots.
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

/// Returns the trust directory, or an error if it has no bundle: tools would then trust nothing.
fn find_bundle(dir: &Path) -> anyhow::Result<PathBuf> {
    let trust = trust_dir(dir)?;
    let shown = dir.display();
    let missing = || format!("no trust bundle found; create it with: sandbar ca bundle --dir {shown}");
    fs::metadata(trust.join(bundle::BUNDLE_FILE)).with_context(missing)?;
    Ok(trust)
}

fn write_bundle(args: &BundleArgs, output: OutputOptions) -> anyhow::Result<()> {
    let authority = CertificateAuthority::open(&args.dir, UnixTime::now())?;
    let out = args.out.clone().map_or_else(|| trust_dir(&args.dir), Ok)?;
    let seen_at = args.at.clone().map_or_else(|| absolute(&out), Ok)?;
    let system = if args.without_system { Vec::new() } else { trust::system_roots() };
    let foreign = if args.force { ForeignFiles::Replace } else { ForeignFiles::Keep };
    let written = bundle::write(&out, &seen_at, &authority, &system, foreign)?;
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
            "{} no system CA certificates found; the bundle trusts only Sandbar",
            paint(WARN, "sandbar:")
        );
    }
    Ok(())
}

/// Returns the default trust directory: beside the authority's, so that other users can read it.
pub(crate) fn trust_dir(dir: &Path) -> anyhow::Result<PathBuf> {
    let dir = absolute(dir)?;
    let mut name = dir
        .file_name()
        .context("--out is required: this directory has no name to derive one from")?
        .to_owned();
    name.push(TRUST_SUFFIX);
    Ok(dir.with_file_name(name))
}

fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("cannot resolve {}", path.display()))
}
