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

use super::names::{Names, RESOLVER};
use super::net::Net;
use super::origin::{Minted, Origin};

/// Longest wait for anything that must happen, on a machine that is busy with other things.
pub(crate) const DEADLINE: Duration = Duration::from_secs(90);

/// The hosts of the world.
const HOSTS: &[(&str, &[&str])] = &[
    ("open.example", &["93.184.216.34", "2606:2800::34"]),
    ("six.example", &["2606:2800::66"]),
    ("denied.example", &["93.184.216.99", "2606:2800::99"]),
    ("files.example", &["93.184.216.60"]),
    ("private.example", &["10.78.0.2"]),
];

/// Who runs the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    Root,
    User,
}

impl Who {
    pub(crate) const BOTH: [Who; 2] = [Who::Root, Who::User];

    /// Nobody's uid: no process of this machine has it, so that nothing is allowed by accident.
    pub(crate) fn uid(self) -> u32 {
        match self {
            Who::Root => 0,
            Who::User => 54_321,
        }
    }
}

pub(crate) struct Scene {
    pub(crate) who: Who,
    pub(crate) net: Net,
    pub(crate) names: Names,
    pub(crate) origin: Origin,
    pub(crate) minted: Minted,
    pub(crate) dir: TempDir,
    program: PathBuf,
}

impl Scene {
    pub(crate) fn new(who: Who) -> Self {
        let net = Net::new(0);
        let names = Names::serve(&net.world);
        for (name, addresses) in HOSTS {
            names.set(name, addresses);
        }
        let minted = Minted::new(HOSTS.iter().map(|(name, _)| (*name).to_owned()));
        let origin = Origin::serve(&net.world, &minted);
        // Not in /tmp, which is another one inside.
        let dir = tempfile::Builder::new().prefix("sandbar-jail-").tempdir_in("/var/lib").unwrap();
        let program = dir.path().join("sandbar");
        let built = sandbar().get_program().to_owned();
        fs::hard_link(&built, &program).or_else(|_| fs::copy(&built, &program).map(drop)).unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(dir.path().join("origin.pem"), &minted.root).unwrap();
        let scene = Scene { who, net, names, origin, minted, dir, program };
        for name in ["home", "state", "work"] {
            fs::create_dir(scene.at(name)).unwrap();
            scene.give(&scene.at(name));
        }
        scene
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Makes a path the caller's own.
    pub(crate) fn give(&self, path: &Path) {
        chown(path, Some(self.who.uid()), Some(self.who.uid())).unwrap();
    }

    /// Writes a file that is the caller's own.
    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.at(name);
        if !path.parent().unwrap().exists() {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            self.give(path.parent().unwrap());
        }
        fs::write(&path, text).unwrap();
        self.give(&path);
        path
    }

    /// A program as the caller, outside of any jail.
    pub(crate) fn outside(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = self.net.gateway.command("setpriv");
        let uid = self.who.uid().to_string();
        command.args(["--reuid", &uid, "--regid", &uid, "--clear-groups", "--"]).arg(program);
        command.env_clear().env("HOME", self.at("home")).env("LC_ALL", "C.UTF-8");
        command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        command.current_dir(self.at("work"));
        command
    }

    /// What is typed to run something in a jail, up to the command.
    pub(crate) fn words(&self) -> Vec<String> {
        let program = self.program.display().to_string();
        let state = self.at("state").display().to_string();
        let roots = self.at("origin.pem").display().to_string();
        ["run", "--state", &state, "--resolver", RESOLVER, "--roots", &roots]
            .into_iter()
            .fold(vec![program], |words, word| [words, vec![word.to_owned()]].concat())
    }

    /// `sandbar run` with these options, before its command.
    pub(crate) fn run(&self, options: &[&str]) -> Command {
        let words = self.words();
        let mut command = self.outside(&words[0]);
        command.args(&words[1..]).args(options).arg("--");
        command
    }

    /// Runs a shell script in a jail.
    pub(crate) fn shell(&self, options: &[&str], script: &str) -> Ran {
        Ran::of(self.run(options).args(["sh", "-c", script]))
    }

    /// Runs a shell script in a jail, which must go well; what it printed.
    pub(crate) fn succeed(&self, options: &[&str], script: &str) -> String {
        let ran = self.shell(options, script);
        assert_eq!(ran.status.code(), Some(0), "{script}\n{ran}");
        ran.out
    }

    /// The directories of runs, oldest first.
    pub(crate) fn runs(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.at("state/runs")).map(Iterator::flatten);
        let mut runs: Vec<PathBuf> =
            entries.map(|entries| entries.map(|entry| entry.path()).collect()).unwrap_or_default();
        runs.sort();
        runs
    }

    /// Every record of every run; each log must verify.
    pub(crate) fn records(&self) -> Vec<Value> {
        let mut records = Vec::new();
        for run in self.runs() {
            let log = run.join("log");
            let verified = sandbar().args(["log", "verify"]).arg(&log).output().unwrap();
            assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stdout));
            for (_, segment) in audit::segments(&log).unwrap() {
                let text = fs::read_to_string(segment).unwrap();
                records
                    .extend(text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()));
            }
        }
        records
    }

    /// Whether a refusal with this code towards a host is recorded.
    pub(crate) fn refused(&self, code: &str, host: &str) -> bool {
        let places = ["/http_request/url/hostname", "/dst_endpoint/hostname", "/query/hostname"];
        self.records().iter().any(|record| {
            let found = places.iter().find_map(|place| record.pointer(place)?.as_str());
            record["status_detail"] == code && found.unwrap_or_default() == host
        })
    }

    /// Whether the origin was asked for something with this in its request line.
    pub(crate) fn reached(&self, path: &str) -> bool {
        self.origin.requests().iter().any(|request| request.line.contains(path))
    }
}

/// How a program ended, and what it said.
pub(crate) struct Ran {
    pub(crate) status: ExitStatus,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl std::fmt::Display for Ran {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}\n{}\n{}", self.status, self.out, self.err)
    }
}

impl Ran {
    /// Runs to the end, or kills what takes too long.
    pub(crate) fn of(command: &mut Command) -> Self {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        Self::from(child.unwrap_or_else(|error| panic!("{command:?}: {error}")))
    }

    pub(crate) fn from(mut child: Child) -> Self {
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
        Ran { status: child.wait().unwrap(), out, err }
    }
}

/// Looks again and again until there is something.
pub(crate) fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + DEADLINE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
