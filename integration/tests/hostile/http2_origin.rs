//! An origin that speaks HTTP/2 alone.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use crate::handshake::OriginCa;

/// The running origin.
pub(crate) struct Http2Origin {
    dir: TempDir,
    child: Child,
    pub(crate) port: u16,
}

impl Http2Origin {
    /// Starts an origin that is `name`.
    pub(crate) fn start(root: &OriginCa, name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let (leaf, key) = root.issue_leaf(name);
        fs::write(path("leaf.pem"), leaf).unwrap();
        fs::write(path("leaf.key"), key).unwrap();
        let script = integration::repository_root().join("integration/tests/hostile/origin2.py");
        let mut child = Command::new("/usr/bin/python3")
            .arg(script)
            .args([path("leaf.pem"), path("leaf.key"), path("seen.jsonl")])
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 is installed by `make test`");
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let port = line.trim().rsplit(' ').next().unwrap().parse();
        let port = port.expect("python3-h2 is installed by `make test`");
        Http2Origin { dir, child, port }
    }

    /// Every request that arrived, its fields as `[name, value, whether a table may keep it]`.
    pub(crate) fn requests(&self) -> Vec<Value> {
        self.read_lines("seen.jsonl")
    }

    /// Every DATA frame that arrived: its stream and its length.
    pub(crate) fn frames(&self) -> Vec<Value> {
        self.read_lines("seen.jsonl.frames")
    }

    fn read_lines(&self, name: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.dir.path().join(name)).unwrap_or_default();
        let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        whole.map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

impl Drop for Http2Origin {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
