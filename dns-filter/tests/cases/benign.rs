//! Measures false alarms of the tunnel score: runs the queries of honest work and expects no finding. Budgets are
//! reported, not asserted, where they may run out: for the largest work below wildcards.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use audit::Log;
use dns_filter::message::DnsTransport;
use dns_filter::{DnsConfig, DnsFilter};
use rules::configuration::{DnsSettings, PreResolve};

use crate::clock::Adversary;
use crate::fixture::{arrival_from, build_query, compile_rules};

/// Wildcards that policies for such work typically have.
const POLICY: &str = r#"
[[allow]]
name = "packages"
hosts = ["*.pypi.example", "*.npm.example", "*.crates.example", "*.debian.example", "*.oci.example", "*.docker.example", "*.maven.example"]
[[allow]]
name = "source"
dangerously_wide = true
hosts = ["*.github.com", "*.githubusercontent.com", "*.gitlab.com", "*.bitbucket.org"]
[[allow]]
name = "storage"
dangerously_wide = true
hosts = ["*.amazonaws.com", "*.blob.core.windows.net", "*.storage.googleapis.com", "*.r2.cloudflarestorage.com"]
[[allow]]
name = "edge"
dangerously_wide = true
hosts = ["*.cloudfront.net", "*.fastly.net", "*.akamaized.net", "*.jsdelivr.net"]
[[allow]]
name = "models"
dangerously_wide = true
hosts = ["*.openai.com", "*.anthropic.com", "*.googleapis.com", "*.huggingface.co", "*.openai.azure.com"]
[[allow]]
name = "pages"
hosts = ["*.wikipedia.org", "*.mozilla.org", "*.stackoverflow.com", "*.python.org"]
"#;

const PACKAGES: &[&str] = &[
    "files.pypi.example",
    "simple.pypi.example",
    "registry.npm.example",
    "static.npm.example",
    "index.crates.example",
    "static.crates.example",
    "deb.debian.example",
    "security.debian.example",
    "cdn-fastly.debian.example",
    "snapshot.debian.example",
    "auth.docker.example",
    "registry-1.docker.example",
    "production.cloudflare.oci.example",
    "download.oci.example",
    "repo1.maven.example",
];
const SOURCE: &[&str] = &[
    "api.github.com",
    "codeload.github.com",
    "uploads.github.com",
    "raw.githubusercontent.com",
    "objects.githubusercontent.com",
    "release-assets.githubusercontent.com",
    "avatars.githubusercontent.com",
    "registry.gitlab.com",
    "api.bitbucket.org",
];
const STORAGE: &[&str] = &[
    "my-build-artifacts.s3.eu-west-1.amazonaws.com",
    "team-datasets-prod.s3.amazonaws.com",
    "sts.eu-west-1.amazonaws.com",
    "ecr.us-east-1.amazonaws.com",
    "dynamodb.eu-west-1.amazonaws.com",
    "123456789012.dkr.ecr.us-east-1.amazonaws.com",
    "mlmodels2026.blob.core.windows.net",
    "productionresultssa4.blob.core.windows.net",
    "conda-packages.storage.googleapis.com",
    "4f3a2b1c0d9e8f7a6b5c4d3e2f1a0b9c.r2.cloudflarestorage.com",
];
const EDGE: &[&str] = &[
    "d111111abcdef8.cloudfront.net",
    "d3q6zl1k8u2x0f.cloudfront.net",
    "d2908q01vomqb2.cloudfront.net",
    "prod.pypi.map.fastly.net",
    "dualstack.j.sni.global.fastly.net",
    "e1234.dscb.akamaized.net",
    "cdn.jsdelivr.net",
    "fastly.jsdelivr.net",
];
const MODELS: &[&str] = &[
    "api.openai.com",
    "files.openai.com",
    "api.anthropic.com",
    "console.anthropic.com",
    "generativelanguage.googleapis.com",
    "us-central1-aiplatform.googleapis.com",
    "oauth2.googleapis.com",
    "cdn-lfs.huggingface.co",
    "cdn-lfs-us-1.huggingface.co",
    "datasets-server.huggingface.co",
    "contoso-eastus2.openai.azure.com",
];
const PAGES: &[&str] = &[
    "en.wikipedia.org",
    "upload.wikipedia.org",
    "developer.mozilla.org",
    "firefox.settings.services.mozilla.org",
    "content-signature-2.cdn.mozilla.org",
    "location.services.mozilla.org",
    "docs.python.org",
    "meta.stackoverflow.com",
];
/// Names that browsers and agents ask for and that no policy has.
const UNLISTED: &[&str] = &[
    "www.google-analytics.com",
    "fonts.gstatic.com",
    "ocsp.digicert.com",
    "sentry.example",
    "telemetry.example",
    "update.example",
    "clients2.google.com",
    "safebrowsing.google.com",
    "connectivity-check.ubuntu.com",
    "o1234567.ingest.us.sentry.example",
    "wpad",
    "isatap",
    "browser-intake-datadoghq.com",
    "statsig.example",
    "featuregates.example",
];
const SEARCH: &[&str] =
    &["default.svc.cluster.local", "svc.cluster.local", "cluster.local", "corp.example", "example"];

/// The queries of one sandbox: hosts, search list, types, pace.
struct Workload {
    name: &'static str,
    hosts: Vec<&'static [&'static str]>,
    search: &'static [&'static str],
    types: &'static [u16],
    pause: Duration,
    rounds: usize,
}

fn workloads() -> Vec<Workload> {
    let each = |name, hosts, search, types, pause, rounds| Workload {
        name,
        hosts,
        search,
        types,
        pause: Duration::from_millis(pause),
        rounds,
    };
    let (plain, browser): (&[u16], &[u16]) = (&[1, 28], &[1, 28, 65]);
    vec![
        each("package build", vec![PACKAGES], &[], plain, 400, 30),
        each("package build in a pod", vec![PACKAGES], SEARCH, plain, 400, 30),
        each("source and storage", vec![SOURCE, STORAGE], &[], plain, 2000, 40),
        each("model calls in a pod", vec![MODELS, UNLISTED], SEARCH, plain, 1000, 20),
        each("browser", vec![PAGES, EDGE, UNLISTED, SOURCE], &[], browser, 150, 20),
        each(
            "everything in a pod",
            vec![PACKAGES, SOURCE, STORAGE, EDGE, MODELS, PAGES, UNLISTED],
            SEARCH,
            browser,
            300,
            30,
        ),
        each(
            "everything, slowly",
            vec![PACKAGES, SOURCE, STORAGE, EDGE, MODELS, PAGES, UNLISTED],
            &[],
            plain,
            20_000,
            12,
        ),
    ]
}

/// Runs a workload; returns the number of queries and the findings in the log.
async fn run_workload(work: &Workload, policy: &str, pre_resolve: PreResolve) -> (usize, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(audit::LogConfig::new(dir.path())).unwrap();
    let mut settings = DnsSettings::new(Vec::new());
    settings.pre_resolve = pre_resolve;
    let config = DnsConfig { settings, budgets: None };
    let rules = Arc::new(ArcSwap::from_pointee(compile_rules(policy, 1)));
    let adversary = Arc::new(Adversary::default());
    let filter = DnsFilter::with_upstreams(rules, log.clone(), config, adversary).unwrap();
    filter.pre_resolve_once().await;
    let beside = filter.clone();
    let background = tokio::spawn(async move { beside.run_periodic().await });
    let mut queries = 0;
    for _ in 0..work.rounds {
        for host in work.hosts.iter().copied().flatten() {
            let expanded = work.search.iter().map(|suffix| format!("{host}.{suffix}"));
            for name in expanded.chain([(*host).to_owned()]) {
                for kind in work.types {
                    filter.answer(&build_query(&name, *kind), &arrival_from("s", DnsTransport::Udp)).await;
                    queries += 1;
                }
            }
            tokio::time::sleep(work.pause).await;
        }
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    background.abort();
    filter.stop();
    log.close();
    (queries, read_findings(dir.path()))
}

fn read_findings(log: &std::path::Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(log).unwrap() {
        let Ok(text) = std::fs::read_to_string(entry.unwrap().path()) else { continue };
        let records = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        let findings = records.filter(|record| record["class_uid"] == 2004);
        found.extend(findings.map(|record| record["status_detail"].to_string()));
    }
    found
}

/// The worst case for a policy: every host of every workload is below a wildcard.
#[tokio::test(start_paused = true)]
async fn honest_work_never_raises_a_tunnel_finding() {
    let (mut queries, mut pairs, mut alarms, mut spent) = (0, 0, 0, 0);
    for work in workloads() {
        let (asked, found) = run_workload(&work, POLICY, PreResolve::Off).await;
        let hosts: HashSet<_> = work.hosts.iter().copied().flatten().collect();
        println!("{}: {asked} queries for {} names, findings {found:?}", work.name, hosts.len());
        let tunnels = found.iter().filter(|code| code.contains("tunnel")).count();
        (queries, pairs) = (queries + asked, pairs + hosts.len());
        (alarms, spent) = (alarms + tunnels, spent + found.len() - tunnels);
    }
    println!(
        "{alarms} alarms in {queries} queries of {pairs} pairs of sandbox and name; {spent} budgets spent"
    );
    assert_eq!(alarms, 0);
    assert!(queries > 20_000 && pairs > 200, "{queries} {pairs}");
}

/// An hour of a build without a pause exhausts no budget, with exact names (which are pre-resolved) or below wildcards
/// (where answers are cached longer).
#[tokio::test(start_paused = true)]
async fn an_hour_of_work_never_exhausts_the_budget() {
    let mut work = workloads().remove(0);
    work.rounds = 600;
    let hour = work.pause * (work.rounds * PACKAGES.len()) as u32;
    assert_eq!(hour, Duration::from_secs(3600));
    let quoted: Vec<String> = PACKAGES.iter().map(|host| format!("{host:?}")).collect();
    let exact = format!("[[allow]]\nname = \"packages\"\nhosts = [{}]\n", quoted.join(", "));
    let (asked, found) = run_workload(&work, &exact, PreResolve::On).await;
    println!("exact names: {asked} queries, findings {found:?}");
    assert!(found.is_empty(), "{found:?}");
    let (asked, found) = run_workload(&work, POLICY, PreResolve::On).await;
    println!("below wildcards: {asked} queries, findings {found:?}");
    assert!(found.is_empty(), "{found:?}");
}
