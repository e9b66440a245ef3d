//! `sandbar serve` and `sandbar dns`.

use serde_json::Value;

use super::DnsNetwork;
use integration::sandbar;

#[test]
fn dns_asks_the_running_filter_and_explains() {
    let mut net = DnsNetwork::new();
    net.start_resolver();
    net.start_filter("127.0.0.1:5300");
    let config = net.config_path().display().to_string();
    for (name, status, decision, reason, source) in [
        ("github.com", 0, "allow", None, "resolver"),
        ("github.com", 0, "allow", None, "cache"),
        ("a.wild.example", 0, "allow", None, "resolver"),
        ("pastebin.com", 1, "deny", Some("not_listed"), "here"),
    ] {
        let args = ["dns", name, "A", "--sandbox", "build-7", "-c", &config, "--json"];
        let output = sandbar().args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        let told: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((told["decision"].as_str(), told["reason"].as_str()), (Some(decision), reason), "{name}");
        assert_eq!(told["source"], source, "{name}");
    }
    let output =
        sandbar().args(["dns", "github.com", "--sandbox", "build-7", "-c", &config]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("allowed github.com A for build-7") && text.contains("bits for this rule"),
        "{text}"
    );
    net.stop();
    let late = sandbar().args(["dns", "github.com", "--sandbox", "build-7", "-c", &config]).output().unwrap();
    assert_eq!(late.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&late.stderr).contains("is `sandbar serve` running?"));
}
