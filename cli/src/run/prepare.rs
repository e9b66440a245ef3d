//! Turns the command line into a plan: directories, the file system view inside, and the rules.

use std::ffi::CString;
use std::fmt::Write as _;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail};
use certs::variables;
use nix::sys::signal::SigSet;
use nix::unistd::{Uid, User};
use rules::ids::SandboxId;
use rules::{LoadSources, SourceFile, compile};
use serde_json::json;

use super::RunArgs;
use super::denials::AllowAdvice;
use super::terminal::TerminalState;
use jail::{
    CommandSpec, CommandStream, FilesystemView, JailListeners, JailPlan, JobPlacement, StreamCopy, TRUST_DIR,
    ViewOptions, command_environment, confine_stdio, runtime_dir, terminal_device,
};
use proxy::policy::files;
use proxy::policy::source::{PolicySource, RunFiles};
use proxy::report::diagnostics::InvalidPolicy;

/// Admin socket for commands such as `sandbar status`, beside the log.
const SOCKET: &str = "admin.sock";
/// Name of the policy built from `--allow`.
const COMMAND_LINE: &str = "command-line";

/// Everything decided before the jail exists.
pub(super) struct PreparedRun {
    pub(super) plan: JailPlan,
    pub(super) started: Instant,
    dir: PathBuf,
    files: RunFiles,
    copies: Vec<StreamCopy>,
}

impl PreparedRun {
    pub(super) fn prepare(args: &RunArgs, terminal: &TerminalState) -> anyhow::Result<Self> {
        let started = Instant::now();
        let id = sandbox_id(args)?;
        let state = state_dir(args)?;
        let dir = create_run_dir(&state)?;
        let built = Self::build_plan(args, terminal, &id, &state, &dir);
        let (plan, files, copies) = built.inspect_err(|_| drop(fs::remove_dir_all(&dir)))?;
        Ok(PreparedRun { plan, started, dir, files, copies })
    }

    fn build_plan(
        args: &RunArgs,
        terminal: &TerminalState,
        id: &SandboxId,
        state: &Path,
        dir: &Path,
    ) -> anyhow::Result<(JailPlan, RunFiles, Vec<StreamCopy>)> {
        let sources = files::read_paths(&args.policy)?;
        if sources.operator.is_some() {
            bail!("--policy takes policy files; a configuration is for `sandbar serve`");
        }
        let view = build_view(args, state, &sources)?;
        let files = build_run_files(args, id, dir, sources, &view)?;
        check_policies(&files)?;
        let (streams, copies) = confine_stdio(&view)?;
        let program = CommandSpec {
            words: args.command.clone(),
            environment: command_environment(std::env::vars_os(), sandbox_variables(id)?),
            place: terminal.placement,
            blocked: SigSet::thread_get_mask()?,
            streams,
        };
        let terminal = match terminal.placement {
            JobPlacement::Background | JobPlacement::Shared => None,
            JobPlacement::Foreground => terminal_device(std::io::stdin().as_fd()),
        };
        let socket = (dir.to_owned(), CString::new(SOCKET)?);
        Ok((JailPlan { view, program, terminal, socket }, files, copies))
    }

    /// Returns what is to be copied between our standard streams and the command's. Closes our copies of the command's
    /// ends, so that the streams end when the command does.
    pub(super) fn take_copies(&mut self) -> Vec<StreamCopy> {
        self.plan.program.streams = [const { CommandStream::Inherited }; 3];
        std::mem::take(&mut self.copies)
    }

    /// Returns the policy source, with a listener for every socket from the jail.
    pub(super) fn policy_source(&self, arrivals: &JailListeners) -> PolicySource {
        let mut files = self.files.clone();
        for (mode, sockets) in [("dns", &arrivals.dns), ("redirect", &arrivals.tcp)] {
            let number = |socket: &OwnedFd| format!("\"inherited:{}\"", socket.as_raw_fd());
            let bind: Vec<String> = sockets.iter().map(number).collect();
            files.settings += &format!(
                "[[listener]]\nmode = \"{mode}\"\nbind = [{}]\nsandbox = {}\n",
                bind.join(", "),
                files.id
            );
        }
        PolicySource::Run(Box::new(files))
    }

    pub(super) fn advice(&self) -> AllowAdvice {
        let first = self.files.policies.first().map(|path| path.display().to_string());
        let once = self.files.once.policies.iter().map(|file| file.path.clone());
        let first = first.or_else(|| once.clone().find(|path| path != COMMAND_LINE));
        first.map_or(AllowAdvice::Argument, AllowAdvice::Policy)
    }

    pub(super) fn log_dir(&self) -> PathBuf {
        self.dir.join("log")
    }

    /// Removes the admin socket, which is useless without the proxy.
    pub(super) fn remove_socket(&self) {
        drop(fs::remove_file(self.dir.join(SOCKET)));
    }

    /// Removes the run's directory, after a run that never started.
    pub(super) fn remove_run_dir(&self) {
        drop(fs::remove_dir_all(&self.dir));
    }
}

fn sandbox_id(args: &RunArgs) -> anyhow::Result<SandboxId> {
    let name = args.sandbox.clone().unwrap_or_else(|| format!("run-{}", std::process::id()));
    SandboxId::parse(&name).map_err(|error| anyhow::anyhow!("--sandbox `{name}`: {error}"))
}

/// Creates the state directory, accessible only to its owner.
fn state_dir(args: &RunArgs) -> anyhow::Result<PathBuf> {
    let from = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let given = args.state.clone();
    let xdg = || from("XDG_STATE_HOME").map(|dir| dir.join("sandbar"));
    let home = || from("HOME").map(|home| home.join(".local/state/sandbar"));
    let Some(dir) = given.or_else(xdg).or_else(home) else {
        bail!("no directory for the log: set HOME, or use --state DIR");
    };
    create_private_dir(&dir)?;
    fs::canonicalize(&dir).with_context(|| format!("cannot resolve {}", dir.display()))
}

fn create_private_dir(dir: &Path) -> anyhow::Result<()> {
    let created = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    created.with_context(|| format!("cannot create {}: use --state DIR", dir.display()))
}

/// Creates the directory of this run.
fn create_run_dir(state: &Path) -> anyhow::Result<PathBuf> {
    let now = jiff::Timestamp::now().strftime("%Y%m%d-%H%M%S").to_string();
    let dir = state.join("runs").join(format!("{now}-{}", std::process::id()));
    create_private_dir(&dir)?;
    Ok(dir)
}

fn build_view(args: &RunArgs, state: &Path, sources: &LoadSources) -> anyhow::Result<FilesystemView> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    // Include the files in a directory: they may be symbolic links to elsewhere.
    let policies = sources.policies.iter().map(|file| PathBuf::from(&file.path));
    let lists = sources.lists.keys().map(PathBuf::from);
    for path in args.writable.iter().chain(&args.visible) {
        fs::metadata(path).with_context(|| format!("cannot expose {}", path.display()))?;
    }
    FilesystemView::build(&ViewOptions {
        cwd: std::env::current_dir().context("cannot get the working directory")?,
        home: variable("HOME"),
        account: account_home(),
        runtime: variable("XDG_RUNTIME_DIR"),
        writable: args.writable.clone(),
        visible: args.visible.clone(),
        hidden: vec![state.to_owned()],
        trusted: args.roots.clone(),
        policies: args.policy.iter().cloned().chain(policies).chain(lists).collect(),
    })
}

/// Home directory from the user database. Credentials are there even if `HOME` says otherwise.
fn account_home() -> Option<PathBuf> {
    User::from_uid(Uid::effective()).ok().flatten().map(|user| user.dir)
}

fn build_run_files(
    args: &RunArgs,
    id: &SandboxId,
    dir: &Path,
    sources: LoadSources,
    view: &FilesystemView,
) -> anyhow::Result<RunFiles> {
    let quoted = |text: &str| json!(text).to_string(); // a JSON string is also a TOML string
    let mut once = LoadSources { generation: 1, ..LoadSources::default() };
    let mut policies = args.policy.clone();
    if !view.exposed.is_empty() {
        for (path, exposure) in view.exposed.iter().filter(|_| !args.quiet) {
            let shown = path.display();
            anstream::eprintln!(
                "sandbar: {shown} {exposure}, so the policies are read once; move or copy it to have edits followed"
            );
        }
        once = sources;
        policies.clear();
    }
    // Policy files may allow anything. `--allow` alone never opens private addresses or raw TCP.
    let base = if args.policy.is_empty() { "user" } else { "system" };
    once.policies.push(command_line_policy(&args.allow));
    let resolvers =
        find_resolvers(args)?.iter().map(|address| quoted(&address.to_string())).collect::<Vec<_>>();
    let roots: Result<Vec<String>, _> = args
        .roots
        .iter()
        .map(std::path::absolute)
        .map(|path| path.map(|path| quoted(&path.to_string_lossy())))
        .collect();
    let roots = roots.context("cannot resolve the path of --roots")?;
    let mut settings = String::new();
    writeln!(settings, "[log]\ndir = \"log\"\n[admin]\nsocket = \"{SOCKET}\"")?;
    writeln!(settings, "[dns]\nupstreams = [{}]", resolvers.join(", "))?;
    writeln!(settings, "[upstream]\nroots = [{}]", roots.join(", "))?;
    let id = quoted(id.as_str());
    let sandbox =
        format!("[[sandbox]]\nid = {id}\ntenant = \"local\"\nenvironment = \"local\"\nbase = \"{base}\"\n");
    Ok(RunFiles { path: dir.join("run.toml"), id, settings, sandbox, policies, once })
}

/// Builds a policy from the hosts on the command line.
fn command_line_policy(hosts: &[String]) -> SourceFile {
    let hosts = json!(hosts);
    let text = format!("name = \"{COMMAND_LINE}\"\n[[allow]]\nname = \"--allow\"\nhosts = {hosts}\n");
    SourceFile { path: COMMAND_LINE.to_owned(), bytes: text.into_bytes() }
}

/// Compiles the policies, so that errors are reported before anything is created.
fn check_policies(files: &RunFiles) -> anyhow::Result<()> {
    let sources = PolicySource::Run(Box::new(files.clone())).read()?;
    let compiled = compile(&sources, &[]).map(drop);
    let compiled = compiled.map_err(|problems| InvalidPolicy { problems });
    compiled.context("invalid policy, not running the command")
}

fn find_resolvers(args: &RunArgs) -> anyhow::Result<Vec<SocketAddr>> {
    const FILE: &str = "/etc/resolv.conf";
    if !args.resolver.is_empty() {
        return Ok(args.resolver.clone());
    }
    let text = fs::read_to_string(FILE).unwrap_or_default();
    let resolvers: Vec<SocketAddr> = text.lines().filter_map(parse_nameserver).collect();
    if resolvers.is_empty() {
        bail!("no resolver in {FILE}: use --resolver ADDRESS:PORT");
    }
    Ok(resolvers)
}

fn parse_nameserver(line: &str) -> Option<SocketAddr> {
    let mut words = line.split_whitespace();
    if words.next()? != "nameserver" {
        return None;
    }
    let address: IpAddr = words.next()?.parse().ok()?;
    Some(SocketAddr::new(address, 53))
}

/// Variables added to the environment of the command.
fn sandbox_variables(id: &SandboxId) -> anyhow::Result<Vec<(String, String)>> {
    let trust = variables::variables(Path::new(TRUST_DIR))?;
    let mut all: Vec<(String, String)> =
        trust.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    all.push(("SANDBAR_SANDBOX".to_owned(), id.to_string()));
    all.push(("XDG_RUNTIME_DIR".to_owned(), runtime_dir().to_string_lossy().into_owned()));
    Ok(all)
}
