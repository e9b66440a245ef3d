//! Turns the command line into a plan: directories, the file system view inside, and the rules.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail};
use nix::sys::signal::SigSet;
use nix::unistd::{Uid, User};
use rules::ids::SandboxId;
use rules::{LoadSources, SourceFile, compile};
use serde_json::json;

use super::denials::AllowAdvice;
use super::draft::{RunDraft, quoted};
use super::environment::{SealedVariables, removed_variables};
use super::terminal::TerminalState;
use super::{OutputOptions, RunArgs};
use crate::terminal::{HEAD, paint, print_json};
use jail::{
    CommandSpec, CommandStream, FilesystemView, JailListeners, JailPlan, JobPlacement, PolicyExposure,
    StreamCopy, ViewOptions, command_environment, confine_stdio, home_credentials, relocated_credentials,
    terminal_device,
};
use proxy::policy::source::{PolicySource, RunFiles};
use proxy::report::diagnostics::InvalidPolicy;

/// Admin socket for commands such as `sandbar status`, beside the log.
pub(super) const SOCKET: &str = "admin.sock";
/// Name of the policy built from `--allow`.
const COMMAND_LINE: &str = "command-line";

/// Everything decided before the jail exists.
pub(super) struct PreparedRun {
    pub(super) plan: JailPlan,
    pub(super) started: Instant,
    /// Credentials in variables, which the proxy gets after the fork.
    sealed: Option<SealedVariables>,
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
        let (plan, files, copies, sealed) = built.inspect_err(|_| drop(fs::remove_dir_all(&dir)))?;
        Ok(PreparedRun { plan, started, sealed: Some(sealed), dir, files, copies })
    }

    fn build_plan(
        args: &RunArgs,
        terminal: &TerminalState,
        id: &SandboxId,
        state: &Path,
        dir: &Path,
    ) -> anyhow::Result<(JailPlan, RunFiles, Vec<StreamCopy>, SealedVariables)> {
        let draft = RunDraft::build(args, dir)?;
        let view = build_view(args, state, &draft)?;
        let environment = draft.variables(id, &dir.join("log"))?;
        let wanted = draft.wanted_variables();
        let files = build_run_files(args, id, draft, &view.exposed)?;
        check_policies(&files)?;
        let sealed = SealedVariables::take(&wanted, &args.env)?;
        let (streams, copies) = confine_stdio(&view)?;
        let program = CommandSpec {
            words: args.command.clone(),
            environment: command_environment(std::env::vars_os(), environment),
            place: terminal.placement,
            blocked: SigSet::thread_get_mask()?,
            streams,
        };
        let terminal = match terminal.placement {
            JobPlacement::Background | JobPlacement::Shared => None,
            JobPlacement::Foreground => terminal_device(std::io::stdin().as_fd()),
        };
        let socket = (dir.to_owned(), CString::new(SOCKET)?);
        Ok((JailPlan { view, program, terminal, socket }, files, copies, sealed))
    }

    /// Returns what is to be copied between our standard streams and the command's. Closes our copies of the command's
    /// ends, so that the streams end when the command does.
    pub(super) fn take_copies(&mut self) -> Vec<StreamCopy> {
        self.plan.program.streams = [const { CommandStream::Inherited }; 3];
        std::mem::take(&mut self.copies)
    }

    /// Gives the proxy the credentials that were in variables. Call it after the fork.
    pub(super) fn restore_variables(&mut self) -> anyhow::Result<()> {
        self.sealed.take().map_or(Ok(()), SealedVariables::restore)
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
        let is_file = |path: &String| path != COMMAND_LINE && !path.starts_with("--");
        let first = first.or_else(|| once.clone().find(is_file));
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

/// Prints what would be in force, without secrets: credentials, policies and variables.
pub(super) fn print_policy(args: &RunArgs, output: OutputOptions) -> anyhow::Result<()> {
    let id = sandbox_id(args)?;
    let draft = RunDraft::build(args, Path::new("/"))?;
    let removed = removed_variables(&draft.wanted_variables(), &args.env);
    let set = draft.chosen_variables();
    let (declared, named) = (draft.declared.clone(), draft.sources.policies.clone());
    let files = build_run_files(args, &id, draft, &BTreeMap::new())?;
    check_policies(&files)?;
    let all = files.once.policies.iter().chain(&named);
    let text = |file: &SourceFile| String::from_utf8_lossy(&file.bytes).into_owned();
    if output.json {
        let policies: Vec<_> = all.map(|file| json!({ "path": file.path, "text": text(file) })).collect();
        let printed =
            json!({ "configuration": declared, "policies": policies, "set": set, "removed": removed });
        print_json(&printed);
        return Ok(());
    }
    let title = |what: &str| anstream::println!("{}", paint(HEAD, format!("# {what}")));
    title("configuration");
    anstream::println!("{declared}");
    for file in all {
        title(&format!("policy {}", file.path));
        anstream::println!("{}", text(file));
    }
    title("variables");
    anstream::println!("set     = {}\nremoved = {}", json!(set), json!(removed));
    Ok(())
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

pub(super) fn create_private_dir(dir: &Path) -> anyhow::Result<()> {
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

fn build_view(args: &RunArgs, state: &Path, draft: &RunDraft) -> anyhow::Result<FilesystemView> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    // Include the files in a directory: they may be symbolic links to elsewhere.
    let policies = draft.sources.policies.iter().map(|file| PathBuf::from(&file.path));
    let lists = draft.sources.lists.keys().map(PathBuf::from);
    let usual = relocated_credentials(|name| std::env::var_os(name)).into_iter();
    let others = other_homes().into_iter().flat_map(|home| home_credentials(&home));
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
        credentials: usual.chain(others).chain(draft.credential_files()).collect(),
        trusted: args.roots.clone(),
        policies: args.policy.iter().cloned().chain(policies).chain(lists).collect(),
    })
}

/// Home directory from the user database. Credentials are there even if `HOME` says otherwise.
fn account_home() -> Option<PathBuf> {
    User::from_uid(Uid::effective()).ok().flatten().map(|user| user.dir)
}

/// Home directories that only root can read: of everybody, and of who has called sudo.
fn other_homes() -> Vec<PathBuf> {
    if !Uid::effective().is_root() {
        return Vec::new();
    }
    let caller = std::env::var("SUDO_USER").ok();
    let caller = caller.and_then(|name| User::from_name(&name).ok().flatten()).map(|user| user.dir);
    let homes = fs::read_dir("/home").into_iter().flatten().flatten().map(|entry| entry.path());
    homes.chain(caller).collect()
}

fn build_run_files(
    args: &RunArgs,
    id: &SandboxId,
    draft: RunDraft,
    exposed: &BTreeMap<PathBuf, PolicyExposure>,
) -> anyhow::Result<RunFiles> {
    let RunDraft { path, settings, selection, sources, .. } = draft;
    let mut once = LoadSources { generation: 1, ..LoadSources::default() };
    let mut policies = args.policy.clone();
    if !exposed.is_empty() {
        for (path, exposure) in exposed.iter().filter(|_| !args.quiet) {
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
    once.policies.extend(selection.policies);
    let id = quoted(id.as_str());
    let sandbox =
        format!("[[sandbox]]\nid = {id}\ntenant = \"local\"\nenvironment = \"local\"\nbase = \"{base}\"\n");
    Ok(RunFiles { path, id, settings, sandbox, policies, once })
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
