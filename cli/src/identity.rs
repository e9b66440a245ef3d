//! `sandbar identity`: issue, verify and look at the signed identity of a sandbox.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use certs::identity::{
    Environment, IdentityError, IssueRequest, IssuerOptions, LocalIssuer, MAX_TOKEN,
    RequiredClaims, SigningAlgorithm, SubjectTemplate, Tenant, TrustDomain, TrustedIssuer,
    VerifiedIdentity, Verifier, VerifyContext, inspect,
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
    /// Give an issuer a new key, published at once and used a minute later
    Rotate(RotateArgs),
    Verify(VerifyTokenArgs),
}

/// Give a sandbox that was declared without one its identity, once; it is fixed then, also over restarts
#[derive(clap::Args)]
struct AssignArgs {
    #[arg(long, value_name = "ID")]
    sandbox: String,
    #[arg(long)]
    tenant: String,
    #[arg(long)]
    environment: String,
    #[arg(long)]
    agent_card: Option<String>,
    #[command(flatten)]
    running: RunningInstance,
}

/// Make an issuer: a key, its public half as a JWK Set, and a description
#[derive(clap::Args)]
struct IssuerInitArgs {
    /// The directory to keep it in; the key file is readable by its owner only
    #[arg(long)]
    dir: PathBuf,
    /// The trust domain it speaks for
    #[arg(long, value_name = "DOMAIN", default_value = "sandbar.internal")]
    trust_domain: String,
    /// An environment it may name, so that staging cannot name production; repeat for more.
    /// Without it the issuer may name every environment
    #[arg(long, value_name = "ENVIRONMENT", value_parser = parse_environment)]
    environment: Vec<Environment>,
    /// The `iss` of its tokens [default: spiffe://DOMAIN/issuer]
    #[arg(long, value_name = "NAME")]
    issuer: Option<String>,
    /// What signs
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
    /// The directory of the issuer
    #[arg(long)]
    dir: PathBuf,
    /// The sandbox
    #[arg(long, value_name = "ID")]
    sandbox: String,
    /// Its tenant
    #[arg(long)]
    tenant: String,
    /// Its environment
    #[arg(long)]
    environment: String,
    /// The memory service the token is for
    #[arg(long)]
    audience: String,
    /// How long it lives, ten minutes at most
    #[arg(long = "for", value_name = "TIME", default_value = "5m", value_parser = humantime::parse_duration)]
    life: Duration,
    /// The boot of the sandbox, so that a later sandbox of the same name refuses this token
    #[arg(long, value_name = "NUMBER")]
    generation: Option<u64>,
}

/// Verify a token: print whom it names, or why it is refused
#[derive(clap::Args)]
#[group(id = "keys", required = true, multiple = false, args = ["dir", "jwks"])]
struct VerifyTokenArgs {
    /// The directory of the issuer
    #[arg(long)]
    dir: Option<PathBuf>,
    /// The keys of another issuer: a JWK Set or a SPIFFE bundle
    #[arg(long, value_name = "FILE")]
    jwks: Option<PathBuf>,
    /// The memory service the token must be for
    #[arg(long)]
    audience: String,
    /// A list of what is revoked (JSON)
    #[arg(long, value_name = "FILE")]
    revocations: Option<PathBuf>,
    #[command(flatten)]
    other: OtherIssuer,
    /// The token, or `-` to read it from standard input, where other users cannot see it
    token: String,
}

/// What is known of an issuer whose keys are given by `--jwks`.
#[derive(clap::Args)]
struct OtherIssuer {
    /// The trust domain the issuer speaks for
    #[arg(long, value_name = "DOMAIN", required_unless_present = "dir", conflicts_with = "dir")]
    trust_domain: Option<String>,
    /// The exact `iss` [default: whatever the token says, as you chose the keys]
    #[arg(long, value_name = "NAME", requires = "jwks")]
    issuer: Option<String>,
    /// What the issuer may sign with; repeat for more
    #[arg(long, value_enum, default_value = "ES256", ignore_case = true, conflicts_with = "dir")]
    algorithm: Vec<AlgorithmName>,
    /// Ask only for the claims of a JWT-SVID (sub, aud, exp), as SPIRE writes them
    #[arg(long, requires = "jwks")]
    jwt_svid: bool,
    /// How the issuer writes the path of a subject
    #[arg(long, value_name = "PATH", default_value = SubjectTemplate::OURS, conflicts_with = "dir")]
    subject: String,
    /// The tenant, where the path does not say it
    #[arg(long, requires = "jwks")]
    tenant: Option<String>,
    /// The environment, where the path does not say it
    #[arg(long, requires = "jwks")]
    environment: Option<String>,
}

#[derive(clap::Args)]
struct RotateArgs {
    /// The directory of the issuer
    #[arg(long)]
    dir: PathBuf,
}

/// Print public keys as a JWK Set: of the running instance, by which memory services check the tokens it signs
/// for them (`mode = "token"`), or of an issuer
#[derive(clap::Args)]
struct JwksArgs {
    /// The directory of an issuer
    #[arg(long, conflicts_with_all = ["config", "socket"])]
    dir: Option<PathBuf>,
    #[command(flatten)]
    running: RunningInstance,
}

/// Show what a token says, without verifying anything
#[derive(clap::Args)]
struct InspectArgs {
    /// The token, or `-` to read it from standard input, where other users cannot see it
    token: String,
}

/// Runs one of the subcommands. Exit status: 0, 1 for a token that is refused, 2 for a bad file or argument.
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
    let told = running.request("POST", "/identities", &identity)?;
    match output.json {
        true => print_json(&told),
        false => anstream::println!("{sandbox} is of {tenant}, in {environment}"),
    }
    Ok(ExitCode::SUCCESS)
}

fn init(args: &IssuerInitArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let trust_domain = TrustDomain::parse(&args.trust_domain)?;
    let issuer =
        args.issuer.clone().unwrap_or_else(|| format!("spiffe://{}/issuer", args.trust_domain));
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
    let environments =
        issuer.environments().map_or("every environment".to_owned(), |all| all.join(", "));
    anstream::println!("{}", paint(HEAD, issuer.issuer()));
    for (name, value) in [
        ("speaks for", domain),
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
            Err(refused) => return Ok(print_refused(refused, output)),
        },
        (None, None) => bail!("give --dir or --jwks"),
    };
    let verifier = Verifier::new(vec![issuer], args.revocations.clone(), now)?;
    Ok(match verifier.verify(&token, &VerifyContext::for_audience(&args.audience), now) {
        Ok(identity) => print_accepted(&identity, output),
        Err(refused) => print_refused(refused, output),
    })
}

impl OtherIssuer {
    /// The issuer that the token names, with the keys and the trust domain the caller chose: here the caller is
    /// the one who trusts.
    fn trusted_issuer(
        &self,
        keys: &Path,
        token: &str,
    ) -> anyhow::Result<Result<TrustedIssuer, IdentityError>> {
        let said = match inspect(token) {
            Ok(said) => said.claims,
            Err(refused) => return Ok(Err(refused)),
        };
        let text = |name: &str| said.get(name).and_then(Value::as_str);
        let domain = self.trust_domain.as_deref().context("give --trust-domain")?;
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
        let good = paint(GOOD, "good:");
        anstream::println!(
            "{good} sandbox {sandbox} of tenant {tenant}, environment {environment}, until {until}"
        );
    }
    ExitCode::SUCCESS
}

fn print_refused(refused: IdentityError, output: OutputOptions) -> ExitCode {
    let code = refused.code();
    if output.json {
        let detail = refused.to_string();
        anstream::println!("{}", json!({ "verified": false, "reason": code, "detail": detail }));
    } else {
        anstream::println!("{} {code}: {refused}", paint(BAD, "refused:"));
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
    let said = match inspect(&read_token(&args.token)?) {
        Ok(said) => said,
        Err(refused) => return Ok(print_refused(refused, output)),
    };
    if output.json {
        anstream::println!(
            "{}",
            json!({ "verified": null, "header": said.header, "claims": said.claims })
        );
        return Ok(ExitCode::SUCCESS);
    }
    anstream::println!("{}", paint(WARN, "not verified; this is only what the token says"));
    for (name, part) in [("header", said.header), ("claims", said.claims)] {
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

/// A stranger's text without the characters that would steer a terminal.
fn escape_terminal(text: &str) -> String {
    let escaped = |c: char| {
        if matches!(c, ' '..='~') { c.to_string() } else { c.escape_unicode().to_string() }
    };
    text.chars().map(escaped).collect()
}

/// A date beside the numbers that are moments.
fn date_suffix(member: &str, value: &Value) -> String {
    match (member, value.as_u64()) {
        ("exp" | "iat" | "nbf", Some(moment)) => paint(FAINT, format!("  {}", format_date(moment))),
        _ => String::new(),
    }
}

/// The argument, or standard input, which is cut off just after a token would be too large.
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
