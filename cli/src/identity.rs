//! `sandbar identity`: issues, verifies and inspects the signed identity of a sandbox.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use certs::identity::{
    Environment, IdentityError, IssueRequest, IssuerOptions, LocalIssuer, MAX_TOKEN, RequiredClaims,
    SigningAlgorithm, SubjectTemplate, Tenant, TrustDomain, TrustedIssuer, VerifiedIdentity, Verifier,
    VerifyContext, inspect,
};
use certs::{UnixTime, format_date};
use serde_json::{Value, json};

use super::instance::RunningInstance;
use super::{EXIT_NEGATIVE, OutputOptions};
use crate::terminal::{BAD, FAINT, GOOD, HEAD, WARN, paint, print_json};

/// Issue, verify and inspect the signed identity of a sandbox
#[derive(clap::Args)]
pub(crate) struct IdentityArgs {
    #[command(subcommand)]
    command: IdentityCommand,
}

#[derive(clap::Subcommand)]
enum IdentityCommand {
    Assign(AssignArgs),
    Init(IssuerInitArgs),
    Inspect(InspectArgs),
    Issue(IssueArgs),
    Jwks(JwksArgs),
    /// Rotate the key of an issuer: publish a new key now, sign with it a minute later
    Rotate(RotateArgs),
    Verify(VerifyTokenArgs),
}

/// Assign an identity to a sandbox declared without one; permanent, also across restarts
#[derive(clap::Args)]
struct AssignArgs {
    /// Sandbox to assign the identity to
    #[arg(long, value_name = "ID")]
    sandbox: String,
    /// Tenant of the sandbox
    #[arg(long)]
    tenant: String,
    /// Environment of the sandbox
    #[arg(long)]
    environment: String,
    /// Agent card of the sandbox
    #[arg(long)]
    agent_card: Option<String>,
    #[command(flatten)]
    running: RunningInstance,
}

/// Create an issuer: a private key, a JWK Set with the public key, and a description
#[derive(clap::Args)]
struct IssuerInitArgs {
    /// Directory to store the issuer in; only the owner can read the key file
    #[arg(long)]
    dir: PathBuf,
    /// Trust domain of the issuer
    #[arg(long, value_name = "DOMAIN", default_value = "sandbar.internal")]
    trust_domain: String,
    /// Environment the issuer may name in tokens, so that staging cannot name production; repeatable
    /// [default: all]
    #[arg(long, value_name = "ENVIRONMENT", value_parser = parse_environment)]
    environment: Vec<Environment>,
    /// `iss` claim of its tokens [default: spiffe://DOMAIN/issuer]
    #[arg(long, value_name = "NAME")]
    issuer: Option<String>,
    /// Signature algorithm
    #[arg(long, value_enum, default_value_t, ignore_case = true)]
    algorithm: AlgorithmName,
}

#[derive(Clone, Copy, Default, clap::ValueEnum)]
enum AlgorithmName {
    #[value(name = "EdDSA")]
    EdDsa,
    #[default]
    #[value(name = "ES256")]
    Es256,
    #[value(name = "RS256")]
    Rs256,
}

/// Issue a token for a sandbox and print it
#[derive(clap::Args)]
struct IssueArgs {
    /// Directory of the issuer
    #[arg(long)]
    dir: PathBuf,
    /// Sandbox to issue the token for
    #[arg(long, value_name = "ID")]
    sandbox: String,
    /// Tenant of the sandbox
    #[arg(long)]
    tenant: String,
    /// Environment of the sandbox
    #[arg(long)]
    environment: String,
    /// Memory service the token is for (`aud` claim)
    #[arg(long)]
    audience: String,
    /// Validity period, at most ten minutes
    #[arg(long = "for", value_name = "TIME", default_value = "5m", value_parser = humantime::parse_duration)]
    life: Duration,
    /// Generation (boot counter) of the sandbox, so that the token is invalid for a later sandbox of the same name
    #[arg(long, value_name = "NUMBER")]
    generation: Option<u64>,
}

/// Verify a token: print the identity it names, or why it is rejected
#[derive(clap::Args)]
#[group(id = "keys", required = true, multiple = false, args = ["dir", "jwks"])]
struct VerifyTokenArgs {
    /// Directory of the issuer
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Keys of an external issuer: a JWK Set or a SPIFFE bundle
    #[arg(long, value_name = "FILE")]
    jwks: Option<PathBuf>,
    /// Memory service the token must be for (`aud` claim)
    #[arg(long)]
    audience: String,
    /// Revocation list (JSON)
    #[arg(long, value_name = "FILE")]
    revocations: Option<PathBuf>,
    #[command(flatten)]
    other: OtherIssuer,
    /// Token, or `-` to read it from standard input, where other users cannot see it
    token: String,
}

/// Settings of an external issuer, with keys from `--jwks`.
#[derive(clap::Args)]
struct OtherIssuer {
    /// Trust domain of the issuer
    #[arg(long, value_name = "DOMAIN", required_unless_present = "dir", conflicts_with = "dir")]
    trust_domain: Option<String>,
    /// Required `iss` claim [default: that of the token, since you chose the keys]
    #[arg(long, value_name = "NAME", requires = "jwks")]
    issuer: Option<String>,
    /// Signature algorithm the issuer may use; repeatable
    #[arg(long, value_enum, default_value = "ES256", ignore_case = true, conflicts_with = "dir")]
    algorithm: Vec<AlgorithmName>,
    /// Require only the claims of a JWT-SVID (sub, aud, exp), as SPIRE issues them
    #[arg(long, requires = "jwks")]
    jwt_svid: bool,
    /// Path template of the issuer's subjects
    #[arg(long, value_name = "PATH", default_value = SubjectTemplate::OURS, conflicts_with = "dir")]
    subject: String,
    /// Tenant, if the path does not contain it
    #[arg(long, requires = "jwks")]
    tenant: Option<String>,
    /// Environment, if the path does not contain it
    #[arg(long, requires = "jwks")]
    environment: Option<String>,
}

#[derive(clap::Args)]
struct RotateArgs {
    /// Directory of the issuer
    #[arg(long)]
    dir: PathBuf,
}

/// Print public keys as a JWK Set: those of the running instance, with which memory services verify the tokens it
/// signs (`mode = "token"`), or those of an issuer
#[derive(clap::Args)]
struct JwksArgs {
    /// Directory of an issuer
    #[arg(long, conflicts_with_all = ["config", "socket"])]
    dir: Option<PathBuf>,
    #[command(flatten)]
    running: RunningInstance,
}

/// Show the contents of a token without verifying it
#[derive(clap::Args)]
struct InspectArgs {
    /// Token, or `-` to read it from standard input, where other users cannot see it
    token: String,
}

/// Runs one of the subcommands. Exit status: 0, 1 for a rejected token, 2 for an invalid file or argument.
pub(crate) fn identity(args: &IdentityArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    match &args.command {
        IdentityCommand::Assign(args) => assign(args, output),
        IdentityCommand::Init(args) => init(args, output),
        IdentityCommand::Inspect(args) => inspect_token(args, output),
        IdentityCommand::Issue(args) => issue(args, output),
        IdentityCommand::Jwks(args) => jwks(args),
        IdentityCommand::Rotate(args) => rotate(&args.dir, output),
        IdentityCommand::Verify(args) => verify(args, output),
    }
}

fn assign(args: &AssignArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let AssignArgs { sandbox, tenant, environment, agent_card, running } = args;
    let identity = json!({
        "sandbox": sandbox, "tenant": tenant, "environment": environment, "agent_card": agent_card,
    });
    let reply = running.request("POST", "/identities", &identity)?;
    match output.json {
        true => print_json(&reply),
        false => {
            anstream::println!("assigned: sandbox {sandbox}, tenant {tenant}, environment {environment}")
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn init(args: &IssuerInitArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let trust_domain = TrustDomain::parse(&args.trust_domain)?;
    let issuer = args.issuer.clone().unwrap_or_else(|| format!("spiffe://{}/issuer", args.trust_domain));
    let environments = Some(args.environment.clone()).filter(|all| !all.is_empty());
    let algorithm = args.algorithm.into();
    let options = IssuerOptions { issuer, trust_domain, environments, algorithm };
    print_issuer(&LocalIssuer::init(&args.dir, &options, UnixTime::now())?, output);
    Ok(ExitCode::SUCCESS)
}

fn parse_environment(text: &str) -> Result<Environment, String> {
    Environment::parse(text).map_err(|error| error.to_string())
}

fn rotate(dir: &Path, output: OutputOptions) -> anyhow::Result<ExitCode> {
    print_issuer(&LocalIssuer::rotate(dir, UnixTime::now())?, output);
    Ok(ExitCode::SUCCESS)
}

fn print_issuer(issuer: &LocalIssuer, output: OutputOptions) {
    let keys: Vec<&str> = issuer.key_ids().collect();
    let (domain, path) = (issuer.trust_domain(), issuer.jwks_path().display().to_string());
    if output.json {
        let algorithm = issuer.algorithm();
        anstream::println!(
            "{}",
            json!({
                "issuer": issuer.issuer(), "trust_domain": domain, "environments": issuer.environments(),
                "algorithm": algorithm, "keys": keys, "jwks": path,
            })
        );
        return;
    }
    let environments = issuer.environments().map_or("every environment".to_owned(), |all| all.join(", "));
    anstream::println!("{}", paint(HEAD, issuer.issuer()));
    for (name, value) in [
        ("domain", domain),
        ("may name", &environments),
        ("algorithm", issuer.algorithm()),
        ("keys", &keys.join(", ")),
        ("JWKS", &path),
    ] {
        anstream::println!("  {} {value}", paint(FAINT, format!("{name:<10}")));
    }
}

fn issue(args: &IssueArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let now = UnixTime::now();
    let request = IssueRequest {
        tenant: &args.tenant,
        environment: &args.environment,
        sandbox: &args.sandbox,
        audience: &args.audience,
        life: args.life,
        generation: args.generation,
    };
    let token = LocalIssuer::open(&args.dir, now)?.issue(&request, now)?;
    if output.json {
        anstream::println!("{}", json!({ "token": token.expose() }));
    } else {
        anstream::println!("{}", token.expose());
    }
    Ok(ExitCode::SUCCESS)
}

fn verify(args: &VerifyTokenArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let token = read_token(&args.token)?;
    let now = UnixTime::now();
    let issuer = match (&args.dir, &args.jwks) {
        (Some(dir), _) => LocalIssuer::open(dir, now)?.trusted_issuer()?,
        (None, Some(keys)) => match args.other.trusted_issuer(keys, &token)? {
            Ok(issuer) => issuer,
            Err(rejected) => return Ok(print_rejected(rejected, output)),
        },
        (None, None) => bail!("--dir or --jwks is required"),
    };
    let verifier = Verifier::new(vec![issuer], args.revocations.clone(), now)?;
    Ok(match verifier.verify(&token, &VerifyContext::for_audience(&args.audience), now) {
        Ok(identity) => print_accepted(&identity, output),
        Err(rejected) => print_rejected(rejected, output),
    })
}

impl OtherIssuer {
    /// Returns an issuer with the caller's keys and trust domain. The `iss` claim of the token may be trusted here,
    /// because the caller chose the keys.
    fn trusted_issuer(
        &self,
        keys: &Path,
        token: &str,
    ) -> anyhow::Result<Result<TrustedIssuer, IdentityError>> {
        let claims = match inspect(token) {
            Ok(token_parts) => token_parts.claims,
            Err(rejected) => return Ok(Err(rejected)),
        };
        let text = |name: &str| claims.get(name).and_then(Value::as_str);
        let domain = self.trust_domain.as_deref().context("--trust-domain is required")?;
        let trust_domain = TrustDomain::parse(domain)?;
        let issuer = self.issuer.clone().or_else(|| text("iss").map(str::to_owned));
        let mut trusted = TrustedIssuer::new("", trust_domain, keys.to_owned());
        trusted.claims = if self.jwt_svid { RequiredClaims::JwtSvid } else { RequiredClaims::Ours };
        if issuer.is_none() && !self.jwt_svid {
            return Ok(Err(IdentityError::ClaimMissing("iss")));
        }
        trusted.issuer = issuer;
        trusted.algorithms = self.algorithm.iter().copied().map(SigningAlgorithm::from).collect();
        trusted.subject = self.subject_template()?;
        Ok(Ok(trusted))
    }

    fn subject_template(&self) -> anyhow::Result<SubjectTemplate> {
        let tenant = self.tenant.as_deref().map(Tenant::parse).transpose();
        let environment = self.environment.as_deref().map(Environment::parse).transpose();
        let template = SubjectTemplate::parse(
            &self.subject,
            tenant.context("--tenant")?,
            environment.context("--environment")?,
        );
        template.with_context(|| format!("--subject {}", self.subject))
    }
}

fn print_accepted(identity: &VerifiedIdentity, output: OutputOptions) -> ExitCode {
    let subject = identity.subject();
    let (sandbox, tenant, environment) = (&subject.sandbox, &subject.tenant, &subject.environment);
    let until = format_date(identity.expires_at());
    if output.json {
        anstream::println!(
            "{}",
            json!({
                "verified": true, "subject": identity.spiffe_id(), "sandbox": sandbox.as_str(), "tenant": tenant.as_str(),
                "environment": environment.as_str(), "generation": identity.generation(), "issuer": identity.issuer(),
                "token_id": identity.token_id(), "key": identity.key_id(), "expires_at": until,
            })
        );
    } else {
        let label = paint(GOOD, "valid:");
        anstream::println!(
            "{label} sandbox {sandbox} of tenant {tenant}, environment {environment}, until {until}"
        );
    }
    ExitCode::SUCCESS
}

fn print_rejected(rejected: IdentityError, output: OutputOptions) -> ExitCode {
    let code = rejected.code();
    if output.json {
        let detail = rejected.to_string();
        anstream::println!("{}", json!({ "verified": false, "reason": code, "detail": detail }));
    } else {
        anstream::println!("{} {code}: {rejected}", paint(BAD, "rejected:"));
    }
    ExitCode::from(EXIT_NEGATIVE)
}

fn jwks(args: &JwksArgs) -> anyhow::Result<ExitCode> {
    let now = UnixTime::now();
    let set = match &args.dir {
        Some(dir) => LocalIssuer::open(dir, now)?.jwks(now)?,
        None => args.running.request("GET", "/jwks", &Value::Null)?,
    };
    anstream::println!("{set:#}");
    Ok(ExitCode::SUCCESS)
}

fn inspect_token(args: &InspectArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let token_parts = match inspect(&read_token(&args.token)?) {
        Ok(token_parts) => token_parts,
        Err(rejected) => return Ok(print_rejected(rejected, output)),
    };
    if output.json {
        anstream::println!(
            "{}",
            json!({ "verified": null, "header": token_parts.header, "claims": token_parts.claims })
        );
        return Ok(ExitCode::SUCCESS);
    }
    anstream::println!("{}", paint(WARN, "not verified: these are only the token's own claims"));
    for (name, part) in [("header", token_parts.header), ("claims", token_parts.claims)] {
        anstream::println!("{}", paint(HEAD, name));
        for (member, value) in part {
            let (name, text) = (escape_terminal(&member), escape_terminal(&value.to_string()));
            anstream::println!(
                "  {} {text}{}",
                paint(FAINT, format!("{name:<6}")),
                date_suffix(&member, &value)
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Escapes untrusted text, so that it cannot control the terminal.
fn escape_terminal(text: &str) -> String {
    let escaped = |c: char| {
        if matches!(c, ' '..='~') { c.to_string() } else { c.escape_unicode().to_string() }
    };
    text.chars().map(escaped).collect()
}

/// The date of a claim that is a timestamp.
fn date_suffix(member: &str, value: &Value) -> String {
    match (member, value.as_u64()) {
        ("exp" | "iat" | "nbf", Some(timestamp)) => paint(FAINT, format!("  {}", format_date(timestamp))),
        _ => String::new(),
    }
}

/// Returns the argument, or standard input up to just over the size limit of a token.
fn read_token(argument: &str) -> anyhow::Result<String> {
    if argument != "-" {
        return Ok(argument.to_owned());
    }
    let mut text = String::new();
    let limit = u64::try_from(MAX_TOKEN)? + 2;
    std::io::stdin()
        .take(limit)
        .read_to_string(&mut text)
        .context("cannot read the token from standard input")?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

impl From<AlgorithmName> for SigningAlgorithm {
    fn from(name: AlgorithmName) -> Self {
        match name {
            AlgorithmName::EdDsa => Self::EdDsa,
            AlgorithmName::Es256 => Self::Es256,
            AlgorithmName::Rs256 => Self::Rs256,
        }
    }
}
