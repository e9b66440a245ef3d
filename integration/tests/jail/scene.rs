//! A machine with somebody who runs `sandbar run` on it, and the world around it.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use integration::sandbar;
use serde_json::Value;
use tempfile::TempDir;

use super::names::{FakeResolver, RESOLVER};
use super::net::TestNetwork;
use super::origin::{TestCertificate, TestOrigin};

/// Longest wait for anything that must happen, on a machine that is busy with other things.
pub(crate) const DEADLINE: Duration = Duration::from_secs(90);

/// The hosts of the world.
const HOSTS: &[(&str, &[&str])] = &[
    ("open.example", &["93.184.216.34", "2606:2800::34"]),
    ("six.example", &["2606:2800::66"]),
    ("denied.example", &["93.184.216.99", "2606:2800::99"]),
    ("files.example", &["93.184.216.60"]),
    ("private.example", &["10.78.0.2"]),
    ("api.anthropic.com", &["93.184.216.80"]),
    ("api.openai.com", &["93.184.216.80"]),
];

/// Who runs the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunAs {
    Root,
    User,
}

impl RunAs {
    pub(crate) const BOTH: [RunAs; 2] = [RunAs::Root, RunAs::User];

    /// Nobody's uid: no process of this machine has it, so that nothing is allowed by accident.
    pub(crate) fn uid(self) -> u32 {
        match self {
            RunAs::Root => 0,
            RunAs::User => 54_321,
        }
    }
}

pub(crate) struct JailScene {
    pub(crate) who: RunAs,
    pub(crate) net: TestNetwork,
    pub(crate) names: FakeResolver,
    pub(crate) origin: TestOrigin,
    pub(crate) minted: TestCertificate,
    pub(crate) dir: TempDir,
    program: PathBuf,
}

impl JailScene {
    pub(crate) fn new(who: RunAs) -> Self {
        let net = TestNetwork::new(0);
        let names = FakeResolver::start(&net.world);
        for (name, addresses) in HOSTS {
            names.set_addresses(name, addresses);
        }
        let minted = TestCertificate::new(HOSTS.iter().map(|(name, _)| (*name).to_owned()));
        let origin = TestOrigin::start(&net.world, &minted);
        // Not in /tmp, which is another one inside.
        let dir = tempfile::Builder::new().prefix("sandbar-jail-").tempdir_in("/var/lib").unwrap();
        let program = dir.path().join("sandbar");
        let built = sandbar().get_program().to_owned();
        fs::hard_link(&built, &program).or_else(|_| fs::copy(&built, &program).map(drop)).unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(dir.path().join("origin.pem"), &minted.root).unwrap();
        let scene = JailScene { who, net, names, origin, minted, dir, program };
        for name in ["home", "state", "work"] {
            fs::create_dir(scene.path(name)).unwrap();
            scene.chown_to_caller(&scene.path(name));
        }
        scene
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Makes a path the caller's own.
    pub(crate) fn chown_to_caller(&self, path: &Path) {
        chown(path, Some(self.who.uid()), Some(self.who.uid())).unwrap();
    }

    /// Writes a file that is the caller's own.
    pub(crate) fn write_file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        if !path.parent().unwrap().exists() {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            self.chown_to_caller(path.parent().unwrap());
        }
        fs::write(&path, text).unwrap();
        self.chown_to_caller(&path);
        path
    }

    /// A program as the caller, outside of any jail.
    pub(crate) fn outside_command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = self.net.gateway.command("setpriv");
        let uid = self.who.uid().to_string();
        command.args(["--reuid", &uid, "--regid", &uid, "--clear-groups", "--"]).arg(program);
        command.env_clear().env("HOME", self.path("home")).env("LC_ALL", "C.UTF-8");
        command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        command.current_dir(self.path("work"));
        command
    }

    /// What is typed to run something in a jail, up to the command.
    pub(crate) fn run_arguments(&self) -> Vec<String> {
        let program = self.program.display().to_string();
        let state = self.path("state").display().to_string();
        let roots = self.path("origin.pem").display().to_string();
        ["run", "--state", &state, "--resolver", RESOLVER, "--roots", &roots]
            .into_iter()
            .fold(vec![program], |words, word| [words, vec![word.to_owned()]].concat())
    }

    /// `sandbar run` with these options, before its command.
    pub(crate) fn run_command(&self, options: &[&str]) -> Command {
        let words = self.run_arguments();
        let mut command = self.outside_command(&words[0]);
        command.args(&words[1..]).args(options).arg("--");
        command
    }

    /// Runs a shell script in a jail.
    pub(crate) fn run_shell(&self, options: &[&str], script: &str) -> CommandResult {
        CommandResult::run(self.run_command(options).args(["sh", "-c", script]))
    }

    /// Runs a shell script in a jail, which must go well; what it printed.
    pub(crate) fn run_successfully(&self, options: &[&str], script: &str) -> String {
        let ran = self.run_shell(options, script);
        assert_eq!(ran.status.code(), Some(0), "{script}\n{ran}");
        ran.out
    }

    /// The directories of runs, oldest first.
    pub(crate) fn run_dirs(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.path("state/runs")).map(Iterator::flatten);
        let mut runs: Vec<PathBuf> =
            entries.map(|entries| entries.map(|entry| entry.path()).collect()).unwrap_or_default();
        runs.sort();
        runs
    }

    /// Every record of every run; each log must verify.
    pub(crate) fn records(&self) -> Vec<Value> {
        let mut records = Vec::new();
        for run in self.run_dirs() {
            let log = run.join("log");
            let verified = sandbar().args(["log", "verify"]).arg(&log).output().unwrap();
            assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stdout));
            for (_, segment) in audit::list_segments(&log).unwrap() {
                let text = fs::read_to_string(segment).unwrap();
                records.extend(text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()));
            }
        }
        records
    }

    /// Whether a refusal with this code towards a host is recorded.
    pub(crate) fn has_refusal(&self, code: &str, host: &str) -> bool {
        let places = ["/http_request/url/hostname", "/dst_endpoint/hostname", "/query/hostname"];
        self.records().iter().any(|record| {
            let found = places.iter().find_map(|place| record.pointer(place)?.as_str());
            record["status_detail"] == code && found.unwrap_or_default() == host
        })
    }

    /// Whether the origin was asked for something with this in its request line.
    pub(crate) fn origin_saw(&self, path: &str) -> bool {
        self.origin.requests().iter().any(|request| request.line.contains(path))
    }
}

/// How a program ended, and what it said.
pub(crate) struct CommandResult {
    pub(crate) status: ExitStatus,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl std::fmt::Display for CommandResult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}\n{}\n{}", self.status, self.out, self.err)
    }
}

impl CommandResult {
    /// Runs to the end, or kills what takes too long.
    pub(crate) fn run(command: &mut Command) -> Self {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        Self::from_child(child.unwrap_or_else(|error| panic!("{command:?}: {error}")))
    }

    pub(crate) fn from_child(mut child: Child) -> Self {
        let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let read = |stream: &mut dyn Read| {
            let mut bytes = Vec::new();
            drop(stream.read_to_end(&mut bytes));
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let (out, err) = std::thread::scope(|scope| {
            let (out, err) = (scope.spawn(|| read(&mut out)), scope.spawn(|| read(&mut err)));
            let end = Instant::now() + DEADLINE;
            while child.try_wait().unwrap().is_none() {
                if Instant::now() > end {
                    child.kill().unwrap();
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            (out.join().unwrap(), err.join().unwrap())
        });
        CommandResult { status: child.wait().unwrap(), out, err }
    }
}

/// Looks again and again until there is something.
pub(crate) fn wait_until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + DEADLINE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
