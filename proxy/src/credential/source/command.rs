//! Programs that print a credential, such as those of password managers.
//!
//! A program gets no shell, no input and no environment but `PATH`, `HOME` and `LANG`. It leads a process group of its
//! own, which is killed when the program ends, prints too much or is not done in time, so nothing that it started stays
//! behind. The deadline is that of the fetch, which drops the future.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::unix::pipe::Receiver;
use tokio::time::{sleep, timeout};
use zeroize::Zeroizing;

use super::Fetched;
use crate::credential::error::{CommandFault, CredentialError, printable};
use crate::credential::secret_file::{LENGTH, SecretFiles};
use crate::credential::value::CredentialValue;

/// What is passed on of the environment.
const VARIABLES: [&str; 3] = ["PATH", "HOME", "LANG"];
/// Bytes of stderr that are kept for the error.
pub(in crate::credential) const COMPLAINT: usize = 1024;
/// How often to look whether the program has ended while its output stays open.
const POLL: Duration = Duration::from_millis(20);
/// How long the output may stay open once the program has ended and its group is killed.
const LEFTOVERS: Duration = Duration::from_millis(200);

/// A running program. Kills its group when dropped.
struct RunningCommand {
    child: Option<Child>,
    files: SecretFiles,
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        sys::process::kill_group(child.id());
        // Reaps it elsewhere: one that waits for a disk dies late.
        self.files.post(move || drop(child.wait()));
    }
}

/// Runs a program and returns what it prints.
pub(super) async fn run(argv: &[String], files: &SecretFiles) -> Result<Fetched, CredentialError> {
    let program = argv.first().cloned().unwrap_or_default();
    let fault = |fault| CredentialError::Command { program: printable(&program), fault };
    let output = |error: io::Error| fault(CommandFault::Output(error.to_string()));
    let mut running = RunningCommand::start(argv, files)
        .await?
        .map_err(|error| fault(CommandFault::Start(error.to_string())))?;
    let (mut stdout, mut stderr) = running.outputs().map_err(output)?;

    let limit = usize::try_from(LENGTH).unwrap_or(usize::MAX);
    let mut printed = Zeroizing::new(Vec::with_capacity(limit + 1));
    let mut complaint = Vec::new();
    let (status, read) = {
        let reading = async {
            let said = read_up_to(&mut stdout, &mut printed, limit + 1);
            tokio::pin!(said);
            let complained = drain(&mut stderr, &mut complaint);
            tokio::pin!(complained);
            // Too much on stdout must not wait for the end of stderr.
            tokio::select! {
                said = &mut said => match said {
                    Ok(Reading::Ended) => complained.await,
                    Ok(Reading::Full) => {}
                    Err(error) => return Err(error),
                },
                () = &mut complained => drop(said.await?),
            }
            Ok(())
        };
        tokio::pin!(reading);
        tokio::select! {
            biased;
            read = &mut reading => (None, read),
            status = running.ended() => {
                running.kill(); // others of its group may hold the output open
                (Some(status), timeout(LEFTOVERS, reading).await.unwrap_or(Ok(())))
            }
        }
    };
    read.map_err(output)?;
    if printed.len() > limit {
        return Err(fault(CommandFault::Long)); // and is killed
    }
    let status = match status {
        Some(status) => status,
        None => running.ended().await,
    };
    let status = status.map_err(output)?;
    if !status.success() {
        let said = printable(&String::from_utf8_lossy(&complaint));
        return Err(fault(CommandFault::Status { status: status.to_string(), said }));
    }
    let text = std::str::from_utf8(&printed).map_err(|_| CredentialError::Malformed);
    let value = text.and_then(CredentialValue::parse);
    let value = value.map_err(|error| fault(CommandFault::Value(Box::new(error))))?;
    Ok(Fetched { value, life: None })
}

fn prepare(argv: &[String], files: &SecretFiles) -> Command {
    let (program, arguments) =
        argv.split_first().map_or(("", argv), |(program, rest)| (program.as_str(), rest));
    let mut command = Command::new(program);
    command.args(arguments).env_clear().process_group(0).current_dir(files.resolve("."));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    for name in VARIABLES {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
    command
}

impl RunningCommand {
    /// Starts a program, on the thread for files because it may lie on a mount that does not answer.
    async fn start(argv: &[String], files: &SecretFiles) -> Result<io::Result<Self>, CredentialError> {
        let (mut command, reaper) = (prepare(argv, files), files.clone());
        // Made there, so that a program which nobody waits for any more is killed.
        let start =
            move || Ok(command.spawn().map(|child| RunningCommand { child: Some(child), files: reaper }));
        files.run(start).await
    }

    /// Returns its stdout and stderr.
    fn outputs(&mut self) -> io::Result<(Receiver, Receiver)> {
        let child = self.child.as_mut();
        let pipes = child.and_then(|child| Some((child.stdout.take()?, child.stderr.take()?)));
        let (stdout, stderr) = pipes.ok_or_else(|| io::Error::other("there is no pipe"))?;
        Ok((Receiver::from_owned_fd(stdout.into())?, Receiver::from_owned_fd(stderr.into())?))
    }

    fn kill(&self) {
        if let Some(child) = &self.child {
            sys::process::kill_group(child.id());
        }
    }

    /// Waits until the program itself has ended.
    async fn ended(&mut self) -> io::Result<ExitStatus> {
        loop {
            let child = self.child.as_mut().ok_or_else(|| io::Error::other("it was reaped"))?;
            if let Some(status) = child.try_wait()? {
                return Ok(status);
            }
            sleep(POLL).await;
        }
    }
}

/// How reading ended.
enum Reading {
    Ended,
    Full,
}

/// Reads to the end, or `most` bytes.
async fn read_up_to(
    from: &mut (impl AsyncRead + Unpin),
    into: &mut Vec<u8>,
    most: usize,
) -> io::Result<Reading> {
    while into.len() < most {
        let mut piece = Zeroizing::new([0; 1024]);
        match from.read(&mut *piece).await? {
            0 => return Ok(Reading::Ended),
            count => into.extend(piece.iter().take(count.min(most - into.len()))),
        }
    }
    Ok(Reading::Full)
}

/// Reads to the end and keeps the beginning, so that the program never waits for a reader.
async fn drain(from: &mut (impl AsyncRead + Unpin), beginning: &mut Vec<u8>) {
    let mut piece = [0; 1024];
    while let Ok(count) = from.read(&mut piece).await {
        if count == 0 {
            return;
        }
        let room = COMPLAINT.saturating_sub(beginning.len());
        beginning.extend(piece.iter().take(count.min(room)));
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Instant;

    use super::*;

    async fn shell(script: &str, dir: &Path) -> Result<Fetched, CredentialError> {
        let files = SecretFiles::start(dir).unwrap();
        run(&["sh".to_owned(), "-c".to_owned(), script.to_owned()], &files).await
    }

    fn refusal(outcome: Result<Fetched, CredentialError>) -> String {
        outcome.err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[tokio::test]
    async fn a_command_prints_a_value_and_every_other_end_says_why() {
        let dir = tempfile::tempdir().unwrap();
        let good = shell("printf 'sk-0123456789\\n'", dir.path()).await.unwrap();
        assert_eq!(good.value.text(), Some("sk-0123456789"));
        for (script, why) in [
            ("exit 3", "ended with exit status: 3"),
            (
                "echo 'no such entry' >&2; echo sk-0123456789; exit 1",
                "ended with exit status: 1: no such entry",
            ),
            ("printf '\\033[2Jlocked\\n' >&2; exit 1", "?[2Jlocked"),
            ("yes sk-0123456789", "prints more than 8192 bytes"),
            ("true", "it is empty"),
            ("echo short", "shorter than 8"),
            ("printf 'sk-01234\\r\\nX: y-0123'", "characters that a header field cannot carry"),
            ("printf '\\377\\376xxxxxxxx'", "characters that a header field cannot carry"),
            ("kill -9 $$", "signal: 9"),
        ] {
            let refused = refusal(shell(script, dir.path()).await);
            assert!(refused.contains(why), "{script}: {refused}");
            assert!(!refused.contains("sk-0123"), "{refused}");
        }
        let files = SecretFiles::start(dir.path()).unwrap();
        let refused = refusal(run(&["/no/such/program".to_owned()], &files).await);
        assert!(refused.contains("/no/such/program: cannot be started"), "{refused}");
    }

    #[tokio::test]
    async fn a_command_gets_no_shell_no_input_and_a_bare_environment() {
        let dir = tempfile::tempdir().unwrap();
        let files = SecretFiles::start(dir.path()).unwrap();
        let argv = ["printf", "%s", "$HOME;`id`;sk-0123456789"].map(str::to_owned);
        assert_eq!(run(&argv, &files).await.unwrap().value.text(), Some("$HOME;`id`;sk-0123456789"));
        let script = "read line && exit 9; env | cut -d= -f1 | grep -vxE 'PATH|HOME|LANG|PWD|OLDPWD|SHLVL|_' && exit 8; echo none-of-them";
        assert_eq!(shell(script, dir.path()).await.unwrap().value.text(), Some("none-of-them"));
    }

    /// Waits until no process of the group whose id stands in `file` is left.
    async fn wait_until_gone(file: &Path) {
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let text = std::fs::read_to_string(file).unwrap_or_default();
            let gone = |pid: &str| {
                let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
                stat.map_or(true, |stat| stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" Z")))
            };
            if !text.trim().is_empty() && text.split_whitespace().all(gone) {
                return;
            }
            assert!(Instant::now() < until, "{text} is alive");
            sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test]
    async fn p17_what_a_command_leaves_behind_is_killed_and_delays_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let pids = dir.path().join("pids");
        // The one in the background holds the output open.
        let started = Instant::now();
        let fetched = shell("sleep 600 & echo $! > pids; echo sk-0123456789", dir.path()).await.unwrap();
        assert_eq!(fetched.value.text(), Some("sk-0123456789"));
        assert!(started.elapsed() < Duration::from_secs(60));
        wait_until_gone(&pids).await;
    }

    #[tokio::test]
    async fn p17_a_command_that_is_not_done_in_time_is_killed_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let pids = dir.path().join("pids");
        let hanging = tokio::spawn({
            let dir = dir.path().to_owned();
            async move { shell("sleep 600 & echo $! $$ > pids; sleep 600", &dir).await.is_ok() }
        });
        while !std::fs::read_to_string(&pids).is_ok_and(|text| text.ends_with('\n')) {
            sleep(Duration::from_millis(5)).await;
        }
        hanging.abort();
        assert!(hanging.await.is_err());
        wait_until_gone(&pids).await;
    }
}
