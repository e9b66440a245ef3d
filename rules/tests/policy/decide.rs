//! Tables of attempts, friendly and hostile, against one policy.

use std::net::IpAddr;

use rules::Reason::*;
use rules::decision::Treatment;
use rules::facts::*;
use rules::name::{DomainName, Host};
use rules::{Decision, Facts, Reason, RuleSet};

use super::{assert_decisions, compile_lone, decide_attempt, error_texts, sandbox_ref, unwrap_rules};

const POLICY: &str = r#"
name = "p"

[[allow]]
name = "source code"
hosts = ["github.com", "*.githubusercontent.example"]
methods = ["GET", "HEAD"]

[[allow]]
name = "model"
hosts = ["api.openai.com"]
paths = ["/v1/**"]
credential = "openai"

[[allow]]
name = "docs"
hosts = [".docs.example", "plain.example:80", "odd.example:8443"]

[[allow]]
name = "passthrough"
hosts = ["pinned.example"]
tls = "tunnel"

[[allow]]
name = "tolerant"
hosts = ["ech.example"]
tls = "tunnel"
ech = "tolerate"

[[allow]]
name = "database"
hosts = ["db.corp.example"]
tcp = [5432]
resolves_to = ["10.1.0.0/16"]

[[allow]]
name = "appliance"
addresses = ["10.2.3.4/32", "2606:4700::/32"]
ports = [8443]

[[allow]]
name = "internal"
hosts = ["db.corp.internal"]
dns_types = ["A", "SRV"]

[[allow]]
name = "wide"
hosts = ["*.wide.example", "*"]
ports = [7000]
dangerously_wide = true

[[deny]]
hosts = ["secret.docs.example", "*.bad.docs.example"]

[[deny]]
name = "no deletes"
hosts = ["api.openai.com"]
methods = ["DELETE"]

[[deny]]
name = "no admin"
hosts = [".docs.example"]
paths = ["/admin/**"]
"#;

fn rules() -> RuleSet {
    unwrap_rules(compile_lone(POLICY))
}

// proves: allow.hosts, allow.addresses, allow.ports, allow.methods, allow.paths, allow.dangerously_wide, deny.hosts,
// proves: deny.methods, deny.paths
#[test]
fn p1_only_what_a_rule_names_passes() {
    assert_decisions(
        &rules(),
        "p",
        &[
            ("github.com", Ok("source code")),
            ("GET https://github.com/x/y", Ok("source code")),
            ("GET https://GitHub.com./x", Ok("source code")),
            ("POST https://github.com/x", Err(MethodNotAllowed)),
            ("TRACE https://docs.example/", Err(MethodNotAllowed)),
            ("CONNECT https://docs.example/", Err(MethodNotAllowed)),
            ("https://gist.github.com/", Err(PortNotListed)),
            ("raw.githubusercontent.example", Ok("source code")),
            ("a.b.githubusercontent.example", Ok("source code")),
            ("githubusercontent.example", Err(PortNotListed)),
            ("evilgithub.com", Err(PortNotListed)),
            ("github.com.evil.example", Err(PortNotListed)),
            ("github.com:22", Err(PortNotListed)),
            ("github.com:80", Err(PortNotListed)),
            ("POST https://api.openai.com/v1/chat", Ok("model")),
            ("POST https://api.openai.com/v1", Ok("model")),
            ("POST https://api.openai.com/v2/chat", Err(PathNotAllowed)),
            ("POST https://api.openai.com/v1/../v2", Err(AmbiguousPath)),
            ("POST https://api.openai.com/v1/%2e%2e/v2", Err(AmbiguousPath)),
            ("POST https://api.openai.com//v1/chat", Err(AmbiguousPath)),
            ("DELETE https://api.openai.com/v1/files", Err(DeniedByRule)),
            ("http://plain.example/", Ok("docs")),
            ("https://plain.example:80/", Err(WrongProtocol)),
            ("http://docs.example:443/", Err(WrongProtocol)),
            ("https://plain.example", Err(PortNotListed)),
            ("https://odd.example:8443/x", Ok("docs")),
            ("http://odd.example:8443/x", Ok("docs")),
            ("docs.example", Ok("docs")),
            ("a.docs.example", Ok("docs")),
            ("secret.docs.example", Err(DeniedByRule)),
            ("x.secret.docs.example", Ok("docs")),
            ("x.bad.docs.example", Err(DeniedByRule)),
            ("GET https://docs.example/public", Ok("docs")),
            ("GET https://docs.example/admin/users", Err(DeniedByRule)),
            ("GET https://docs.example//admin", Err(AmbiguousPath)),
            ("GET https://docs.example/%61dmin/users", Err(AmbiguousPath)),
            ("10.2.3.4:8443", Ok("appliance")),
            ("10.2.3.4:443", Err(PortNotListed)),
            ("10.2.3.5:8443", Err(AddressNotListed)),
            ("[::ffff:10.2.3.4]:8443", Ok("appliance")),
            ("[2606:4700::1]:8443", Ok("appliance")),
            ("[::1]:8443", Err(AddressNotListed)),
            ("a.wide.example:7000", Ok("wide")),
            ("anything.example:7000", Ok("wide")),
        ],
    );
}

#[test]
fn p1_empty_policies_and_lists_allow_nothing() {
    for text in [
        "name = \"p\"",
        "name = \"p\"\n[[allow]]\nname = \"a\"\nhosts = []",
        "name = \"p\"\n[[allow]]\nname = \"a\"\nhosts = [\"x.com\"]\nmethods = []",
        "name = \"p\"\n[[allow]]\nname = \"a\"\nhosts = [\"x.com\"]\npaths = []",
        "name = \"p\"\n[[allow]]\nname = \"a\"\nhosts = [\"x.com\"]\nports = []",
    ] {
        let rules = unwrap_rules(compile_lone(text));
        assert!(decide_attempt(&rules, "p", "GET https://x.com/").is_err(), "{text}");
        assert_eq!(rules.warnings().is_empty(), !text.contains("allow"), "{text}");
    }
    assert_ne!(error_texts(compile_lone("")), [""; 0], "a file without a name is not a policy");
}

#[test]
fn wildcards_do_not_open_special_names_or_resolvers() {
    let text = "name = \"p\"\n[[allow]]\nname = \"all\"\nhosts = [\"*\", \"doh.pub\", \"*.corp.internal\"]\ndangerously_wide = true";
    assert_decisions(
        &unwrap_rules(compile_lone(text)),
        "p",
        &[
            ("anything.example", Ok("all")),
            ("localhost", Err(SpecialName)),
            ("a.localhost", Err(SpecialName)),
            ("printer.local", Err(SpecialName)),
            ("metadata.google.internal", Err(SpecialName)),
            ("db.corp.internal", Ok("all")),
            ("4.3.2.10.in-addr.arpa", Err(SpecialName)),
            ("dns.google", Err(EncryptedResolver)),
            ("x.dns.google", Err(EncryptedResolver)),
            ("doh.pub", Ok("all")),
            ("use-application-dns.net", Err(ResolverDiscovery)),
            ("mask.icloud.com", Err(ResolverDiscovery)),
        ],
    );
}

#[test]
fn a_deny_for_one_port_leaves_the_others() {
    let text = "name = \"p\"\n[[allow]]\nname = \"a\"\nhosts = [\"x.com\", \"x.com:8443\"]\n[[deny]]\nhosts = [\"x.com:8443\"]";
    assert_decisions(
        &unwrap_rules(compile_lone(text)),
        "p",
        &[("x.com", Ok("a")), ("x.com:8443", Err(DeniedByRule))],
    );
}

fn connect_facts(target: ConnectTarget, port: u16, protocol: Protocol) -> Facts {
    Facts::Connect(ConnectFacts { target, port, protocol })
}

fn parse_host(text: &str) -> Host {
    Host::parse(text).unwrap()
}

fn tls_protocol(sni: Option<&str>, ech: EchPresence) -> Protocol {
    Protocol::Tls { sni: sni.map(parse_host), ech }
}

fn decide_facts(rules: &RuleSet, facts: &Facts) -> Result<&'static str, Reason> {
    match rules.decide(&sandbox_ref(rules, "p"), facts) {
        Decision::Allow(permit) => Ok(permit.treatment().as_str()),
        Decision::Deny(denial) => Err(denial.reason),
    }
}

#[test]
fn p6_names_agree_or_the_connection_is_refused() {
    let dialled = |text: &str| ConnectTarget::Dialled(text.parse::<IpAddr>().unwrap());
    let named = |text: &str| ConnectTarget::Named(parse_host(text));
    let http = |text: Option<&str>| Protocol::Http { host: text.map(parse_host) };
    let rules = rules();
    for (target, port, protocol, expected) in [
        (dialled("9.9.9.9"), 443, tls_protocol(Some("github.com"), EchPresence::Absent), Ok("intercept")),
        (named("github.com"), 443, tls_protocol(Some("github.com"), EchPresence::Absent), Ok("intercept")),
        (named("GITHUB.com."), 443, tls_protocol(Some("github.com"), EchPresence::Absent), Ok("intercept")),
        (
            named("github.com"),
            443,
            tls_protocol(Some("docs.example"), EchPresence::Absent),
            Err(NamesDisagree),
        ),
        (named("github.com"), 443, tls_protocol(None, EchPresence::Absent), Err(NameMissing)),
        (named("10.2.3.4"), 8443, tls_protocol(Some("github.com"), EchPresence::Absent), Err(NamesDisagree)),
        (named("10.2.3.4"), 8443, tls_protocol(None, EchPresence::Absent), Ok("intercept")),
        (dialled("10.2.3.4"), 8443, tls_protocol(None, EchPresence::Absent), Ok("intercept")),
        (dialled("9.9.9.9"), 443, tls_protocol(None, EchPresence::Absent), Err(NameMissing)),
        (dialled("9.9.9.9"), 443, tls_protocol(Some("9.9.9.9"), EchPresence::Absent), Err(AddressAsSni)),
        (dialled("9.9.9.9"), 443, Protocol::Raw, Err(NameMissing)),
        (named("github.com"), 443, Protocol::Raw, Err(RawTcpNotAllowed)),
        (named("db.corp.example"), 5432, Protocol::Raw, Ok("raw")),
        (
            named("db.corp.example"),
            5432,
            tls_protocol(Some("db.corp.example"), EchPresence::Absent),
            Ok("raw"),
        ),
        (
            named("db.corp.example"),
            5432,
            tls_protocol(Some("github.com"), EchPresence::Absent),
            Err(NamesDisagree),
        ),
        (named("db.corp.example"), 5433, Protocol::Raw, Err(PortNotListed)),
        (
            named("db.corp.example"),
            443,
            tls_protocol(Some("db.corp.example"), EchPresence::Absent),
            Err(PortNotListed),
        ),
        (dialled("9.9.9.9"), 80, http(Some("plain.example")), Ok("intercept")),
        (dialled("9.9.9.9"), 80, http(Some("10.0.0.1")), Err(NamesDisagree)),
        (dialled("9.9.9.9"), 80, http(None), Err(NameMissing)),
        (named("plain.example"), 80, http(Some("docs.example")), Err(NamesDisagree)),
        (named("docs.example"), 443, http(Some("docs.example")), Err(WrongProtocol)),
        (
            named("plain.example"),
            80,
            tls_protocol(Some("plain.example"), EchPresence::Absent),
            Err(WrongProtocol),
        ),
        (
            named("pinned.example"),
            443,
            tls_protocol(Some("pinned.example"), EchPresence::Absent),
            Ok("tunnel"),
        ),
        (
            named("pinned.example"),
            443,
            tls_protocol(Some("pinned.example"), EchPresence::Present),
            Err(EchHiddenName),
        ),
        (named("ech.example"), 443, tls_protocol(Some("ech.example"), EchPresence::Present), Ok("tunnel")),
        (named("github.com"), 443, tls_protocol(Some("github.com"), EchPresence::Present), Ok("intercept")),
    ] {
        let facts = connect_facts(target, port, protocol);
        assert_eq!(decide_facts(&rules, &facts), expected, "{facts:?}");
    }
}

fn request_facts(connection: Option<&str>, authorities: &[&str], version: HttpVersion) -> Facts {
    Facts::Request(RequestFacts {
        connection: connection.map(parse_host),
        authorities: authorities.iter().map(|text| RequestAuthority::parse(text).unwrap()).collect(),
        port: 443,
        scheme: UrlScheme::Https,
        version,
        method: HttpMethod::get(),
        path: "/".to_owned(),
    })
}

#[test]
fn p6_names_agree_on_every_request() {
    use HttpVersion::{Http1, Http2};
    let rules = rules();
    for (connection, authorities, version, expected) in [
        (Some("docs.example"), &["docs.example"][..], Http1, Ok("forward")),
        (Some("docs.example"), &["Docs.Example.:443"], Http1, Ok("forward")),
        (Some("docs.example"), &[], Http1, Ok("forward")),
        (None, &["docs.example"], Http1, Ok("forward")),
        (None, &["docs.example", "docs.example:443"], Http1, Ok("forward")),
        (None, &[], Http1, Err(NameMissing)),
        (Some("docs.example"), &["github.com"], Http1, Err(NamesDisagree)),
        (Some("docs.example"), &["github.com"], Http2, Err(Misdirected)),
        (Some("docs.example"), &["docs.example", "github.com"], Http1, Err(NamesDisagree)),
        (Some("docs.example"), &["docs.example:8443"], Http1, Err(NamesDisagree)),
        (None, &["docs.example", "github.com"], Http1, Err(NamesDisagree)),
        (Some("docs.example"), &["10.0.0.1"], Http1, Err(NamesDisagree)),
    ] {
        let facts = request_facts(connection, authorities, version);
        assert_eq!(decide_facts(&rules, &facts), expected, "{facts:?}");
    }
}

#[test]
fn questions_are_decided_by_name_and_type() {
    let rules = rules();
    for (name, query, expected) in [
        ("github.com", 1, Ok("resolve")),
        ("github.com", 28, Ok("resolve")),
        ("github.com", 65, Ok("resolve")),
        ("github.com", 16, Err(DnsTypeNotAllowed)),
        ("github.com", 255, Err(DnsTypeNotAllowed)),
        ("github.com", 10, Err(DnsTypeNotAllowed)),
        ("db.corp.internal", 33, Ok("resolve")),
        ("db.corp.internal", 28, Err(DnsTypeNotAllowed)),
        ("secret.docs.example", 1, Err(DeniedByRule)),
        ("_dmarc.docs.example", 1, Ok("resolve")),
        ("use-application-dns.net", 1, Err(ResolverDiscovery)),
        ("_dns.resolver.arpa", 64, Err(ResolverDiscovery)),
        ("api.openai.com", 1, Ok("resolve")),
    ] {
        let name = DomainName::parse_question(name).unwrap();
        let facts = Facts::Name(NameFacts { name, query: QueryType(query) });
        assert_eq!(decide_facts(&rules, &facts), expected, "{facts:?}");
    }
}

#[test]
fn a_permit_carries_the_terms_of_its_rule() {
    let rules = rules();
    let permit = |text: &str, stage: usize| {
        let probe = rules::probe::PolicyProbe::parse(text).unwrap();
        let facts = probe.facts(&sandbox_ref(&rules, "p"));
        match rules.decide(&sandbox_ref(&rules, "p"), &facts[stage]) {
            Decision::Allow(permit) => permit,
            Decision::Deny(denial) => panic!("{text}: {}", denial.reason),
        }
    };
    let connection = permit("https://api.openai.com/v1/x", 0);
    assert_eq!(
        (connection.credentials().len(), connection.treatment()),
        (0, &Treatment::Intercept),
        "a credential is for requests"
    );
    let request = permit("https://api.openai.com/v1/x", 1);
    assert_eq!(request.credentials().iter().map(|name| name.as_str()).collect::<Vec<_>>(), ["openai"]);
    assert_eq!((request.rule().policy.as_str(), request.generation(), request.port()), ("p", 7, Some(443)));
    assert_eq!(rules.decide_again(&request, None), Decision::Allow(request.clone()));

    let lookup = permit("a.b.githubusercontent.example", 0);
    assert_eq!(lookup.lookup().chosen_octets, "a.b.".len());
    assert!(!lookup.lookup().synthetic);
    assert!(permit("github.com", 0).lookup().chosen_octets == 0);
}

#[test]
fn raw_tcp_names_get_synthetic_addresses() {
    let rules = rules();
    let name = DomainName::parse("db.corp.example").unwrap();
    let facts = Facts::Name(NameFacts { name, query: QueryType::A });
    let Decision::Allow(permit) = rules.decide(&sandbox_ref(&rules, "p"), &facts) else { panic!("denied") };
    assert!(permit.lookup().synthetic);
}

// proves: allow.resolves_to
#[test]
fn p4_addresses_are_admitted_by_the_rule_that_decided() {
    let sources = rules::LoadSources {
        policies: vec![super::source_file("p.toml", POLICY)],
        own: vec!["1.1.1.1:443".parse().unwrap(), "10.1.0.9:5432".parse().unwrap()],
        ..rules::LoadSources::default()
    };
    let rules = unwrap_rules(rules::compile(&sources, &[]));
    for (text, found, expected) in [
        ("github.com", &["140.82.1.1"][..], Ok(&["140.82.1.1"][..])),
        ("github.com", &["10.0.0.1"], Err(PrivateAddress)),
        ("github.com", &["127.0.0.1", "169.254.169.254"], Err(PrivateAddress)),
        ("github.com", &["10.0.0.1", "140.82.1.1"], Ok(&["140.82.1.1"])),
        ("github.com", &["::ffff:10.0.0.1"], Err(PrivateAddress)),
        ("github.com", &["64:ff9b::a00:1"], Err(PrivateAddress)),
        ("github.com", &["1.1.1.1"], Err(OwnAddress)),
        ("github.com", &["64:ff9b::101:101"], Err(OwnAddress)),
        ("github.com", &["2002:101:101::1"], Err(OwnAddress)),
        ("tcp db.corp.example:5432", &["10.1.77.7"], Ok(&["10.1.77.7"])),
        ("github.com", &[], Err(NoAddress)),
        ("tcp db.corp.example:5432", &["10.1.2.3"], Ok(&["10.1.2.3"])),
        ("tcp db.corp.example:5432", &["10.2.2.3"], Err(PrivateAddress)),
        ("tcp db.corp.example:5432", &["140.82.1.1"], Err(AddressNotExpected)),
        ("tcp db.corp.example:5432", &["64:ff9b::a01:203"], Err(PrivateAddress)),
        ("tcp db.corp.example:5432", &["10.1.0.9"], Err(OwnAddress)),
        ("10.2.3.4:8443", &["10.2.3.4"], Ok(&["10.2.3.4"])),
        ("10.2.3.4:8443", &["10.2.3.5"], Err(AddressNotExpected)),
    ] {
        let mut probe = rules::probe::PolicyProbe::parse(text.trim_start_matches("tcp ")).unwrap();
        if text.starts_with("tcp") {
            probe.special = rules::probe::ProbeKind::Raw;
        }
        let Decision::Allow(permit) = probe.decide(&rules, &sandbox_ref(&rules, "p")) else {
            panic!("{text} denied")
        };
        let found: Vec<IpAddr> = found.iter().map(|text| text.parse().unwrap()).collect();
        let admitted = rules.admit(&permit, &found);
        let shown: Result<Vec<String>, Reason> = admitted
            .map(|dial| dial.addresses().iter().map(ToString::to_string).collect())
            .map_err(|denial| denial.reason);
        let expected: Result<Vec<String>, Reason> =
            expected.map(|list| list.iter().map(|s| (*s).to_owned()).collect());
        assert_eq!(shown, expected, "{text} -> {found:?}");
    }
}

// proves: deny.addresses, deny.ports
#[test]
fn p4_a_denied_address_is_denied_for_every_name() {
    let text = "name = \"p\"\n[[allow]]\nname = \"a\"\nhosts = [\"x.example\", \"x.example:8443\"]\n\
        [[deny]]\naddresses = [\"9.9.9.0/24\"]\n[[deny]]\nname = \"one port\"\naddresses = [\"8.8.8.0/24\"]\nports = [8443]";
    let rules = unwrap_rules(compile_lone(text));
    for (target, address, expected) in [
        ("x.example", "9.9.9.9", Some(DeniedByRule)),
        ("x.example", "9.9.8.9", None),
        ("x.example", "8.8.8.8", None),
        ("x.example:8443", "8.8.8.8", Some(DeniedByRule)),
        ("x.example", "::ffff:9.9.9.9", Some(DeniedByRule)),
    ] {
        let probe = rules::probe::PolicyProbe::parse(target).unwrap();
        let Decision::Allow(permit) = probe.decide(&rules, &sandbox_ref(&rules, "p")) else {
            panic!("{target}")
        };
        let found = rules.admit(&permit, &[address.parse().unwrap()]).err().map(|denial| denial.reason);
        assert_eq!(found, expected, "{target} -> {address}");
    }
}

#[test]
fn p17_the_number_of_addresses_is_bounded() {
    let rules = rules();
    let Decision::Allow(permit) =
        rules::probe::PolicyProbe::parse("github.com").unwrap().decide(&rules, &sandbox_ref(&rules, "p"))
    else {
        panic!("denied")
    };
    let many: Vec<IpAddr> = (0..500u32).map(|n| IpAddr::from((0x0801_0000 + n).to_be_bytes())).collect();
    assert_eq!(rules.admit(&permit, &many).unwrap().addresses().len(), rules::MAX_ADDRESSES);
}

#[test]
fn the_most_specific_rule_wins() {
    let text = r#"
name = "p"
[[allow]]
name = "all"
hosts = ["*.x.example"]
[[allow]]
name = "one"
hosts = ["a.x.example"]
[[allow]]
name = "path"
hosts = ["a.x.example"]
paths = ["/v1/**"]
[[allow]]
name = "longer path"
hosts = ["a.x.example"]
paths = ["/v1/files/*"]
[[allow]]
name = "tree"
hosts = [".y.example"]
[[allow]]
name = "apex"
hosts = ["y.example"]
methods = ["GET"]
"#;
    assert_decisions(
        &unwrap_rules(compile_lone(text)),
        "p",
        &[
            ("b.x.example", Ok("all")),
            ("GET https://a.x.example/", Ok("one")),
            ("GET https://a.x.example/v1/x", Ok("path")),
            ("GET https://a.x.example/v1/files/1", Ok("longer path")),
            ("GET https://y.example/", Ok("apex")),
            ("POST https://y.example/", Ok("tree")),
        ],
    );
}

#[test]
fn p4_a_wildcard_listener_is_on_every_local_address() {
    let sources = rules::LoadSources {
        policies: vec![super::source_file(
            "p.toml",
            "name = \"p\"\n[[allow]]\nname = \"a\"\nhosts = [\"x.example:15001\"]\nresolves_to = [\"10.0.0.0/8\", \"127.0.0.0/8\", \"9.0.0.0/8\"]",
        )],
        own: vec!["0.0.0.0:15001".parse().unwrap(), "[::ffff:9.9.9.9]:15001".parse().unwrap()],
        ..rules::LoadSources::default()
    };
    let rules = unwrap_rules(rules::compile(&sources, &[]));
    let Decision::Allow(permit) = rules::probe::PolicyProbe::parse("x.example:15001")
        .unwrap()
        .decide(&rules, &sandbox_ref(&rules, "p"))
    else {
        panic!("denied")
    };
    for (address, expected) in [
        ("127.0.0.1", Some(OwnAddress)),
        ("10.0.0.5", Some(OwnAddress)),
        ("9.9.9.9", Some(OwnAddress)),
        ("9.9.9.8", None),
    ] {
        let found = rules.admit(&permit, &[address.parse().unwrap()]).err().map(|denial| denial.reason);
        assert_eq!(found, expected, "{address}");
    }
}

#[test]
fn p1_an_empty_resolves_to_admits_nothing() {
    let rules = unwrap_rules(compile_lone(
        "name = \"p\"\n[[allow]]\nname = \"a\"\nhosts = [\"x.example\"]\nresolves_to = []",
    ));
    let Decision::Allow(permit) =
        rules::probe::PolicyProbe::parse("x.example").unwrap().decide(&rules, &sandbox_ref(&rules, "p"))
    else {
        panic!("denied")
    };
    assert!(rules.admit(&permit, &["9.9.9.9".parse().unwrap()]).is_err());
    assert!(rules.warnings().iter().any(|warning| warning.to_string().contains("has an empty list")));
}

#[test]
fn deny_rules_hold_for_every_spelling() {
    let text = "name = \"p\"\n[[allow]]\nname = \"a\"\nhosts = [\"x.example\"]\n\
        [[allow]]\nname = \"net\"\naddresses = [\"2000::/3\", \"64:ff9b::/96\"]\nports = [443]\ndangerously_wide = true\n\
        [[deny]]\nname = \"paths\"\nhosts = [\"x.example\"]\npaths = [\"/@evil/**\", \"/v1/files:upload\", \"/admin\"]\n\
        [[deny]]\nname = \"metadata\"\naddresses = [\"169.254.169.254/32\"]";
    assert_decisions(
        &unwrap_rules(compile_lone(text)),
        "p",
        &[
            ("GET https://x.example/fine", Ok("a")),
            ("GET https://x.example/@evil/x", Err(DeniedByRule)),
            ("GET https://x.example/%40evil/x", Err(AmbiguousPath)),
            ("GET https://x.example/v1/files%3Aupload", Err(AmbiguousPath)),
            ("GET https://x.example/admin", Err(DeniedByRule)),
            ("GET https://x.example/admin/", Err(DeniedByRule)),
            ("GET https://x.example/administration", Ok("a")),
            ("[2606:4700::1]:443", Ok("net")),
            ("[64:ff9b::a9fe:a9fe]:443", Err(DeniedByRule)),
        ],
    );
}

#[test]
fn an_encoded_slash_passes_only_where_an_allow_rule_spells_it_and_no_deny_could_mean_it() {
    let policy = "name = \"p\"\n\
        [[allow]]\nname = \"npm\"\nhosts = [\"npm.example\"]\npaths = [\"/*%2f*\", \"/-/**\"]\n\
        [[deny]]\nname = \"scope\"\nhosts = [\"npm.example\"]\npaths = [\"/@evil/**\"]\n\
        [[allow]]\nname = \"lab\"\nhosts = [\"lab.example\"]\nmethods = [\"GET\"]\npaths = [\"/projects/team%2F*/**\"]\n\
        [[allow]]\nname = \"all\"\nhosts = [\"all.example\"]\n\
        [[deny]]\nname = \"admin\"\nhosts = [\"all.example\"]\npaths = [\"/admin/**\"]\n\
        [[allow]]\nname = \"free\"\nhosts = [\"free.example\"]\n";
    let rules = unwrap_rules(compile_lone(policy));
    for (text, expected) in [
        ("https://npm.example/@babel%2fcore", Ok("npm")),
        ("https://npm.example/@babel%2Fcore", Ok("npm")),
        ("https://npm.example/@babel/core", Err(PathNotAllowed)),
        ("https://npm.example/-/a%2fb", Err(AmbiguousPath)),
        ("https://npm.example/@evil%2fx", Err(DeniedByRule)),
        ("https://npm.example/@evil%2Fx", Err(DeniedByRule)),
        ("https://npm.example/@babel%252fcore", Err(AmbiguousPath)),
        ("https://npm.example/@babel%2f..%2f@evil", Err(AmbiguousPath)),
        ("https://npm.example/..%2f@evil", Err(AmbiguousPath)),
        ("https://npm.example/%2e%2e%2f@evil", Err(AmbiguousPath)),
        ("https://npm.example/@babel%5ccore", Err(AmbiguousPath)),
        ("https://npm.example/@babel%2fcore%2fx", Err(AmbiguousPath)),
        ("https://npm.example/@babel%2fcore/x", Err(AmbiguousPath)),
        ("https://lab.example/projects/team%2Ftool/issues", Ok("lab")),
        ("https://lab.example/projects/other%2Ftool/issues", Err(AmbiguousPath)),
        ("https://lab.example/projects/team%2F..%2Fother/issues", Err(AmbiguousPath)),
        ("POST https://lab.example/projects/team%2Ftool/issues", Err(MethodNotAllowed)),
        ("https://all.example/admin%2fx", Err(DeniedByRule)),
        ("https://all.example/x%2f..%2fadmin", Err(AmbiguousPath)),
        ("https://all.example/x%2fy", Err(AmbiguousPath)),
        ("https://free.example/x%2fy", Ok("free")),
    ] {
        assert_eq!(decide_attempt(&rules, "p", text).as_deref(), expected.as_ref().copied(), "{text}");
    }
}

#[test]
fn p10_a_connection_is_decided_again_with_its_dialled_address() {
    let before = unwrap_rules(compile_lone(
        "name = \"p\"\n[[allow]]\nname = \"a\"\nhosts = [\"x.example\"]\ntls = \"tunnel\"\nresolves_to = [\"10.1.0.0/16\"]",
    ));
    let Decision::Allow(permit) =
        rules::probe::PolicyProbe::parse("x.example").unwrap().decide(&before, &sandbox_ref(&before, "p"))
    else {
        panic!("denied")
    };
    let dialled: IpAddr = "10.1.2.3".parse().unwrap();
    for (now, expected) in [
        ("tls = \"tunnel\"\nresolves_to = [\"10.1.0.0/16\"]", None),
        ("tls = \"tunnel\"\nresolves_to = [\"10.1.2.0/24\"]", None),
        ("tls = \"tunnel\"\nresolves_to = [\"10.2.0.0/16\"]", Some(PrivateAddress)),
        ("tls = \"tunnel\"", Some(PrivateAddress)),
        ("resolves_to = [\"10.1.0.0/16\"]", Some(TreatmentChanged)),
    ] {
        let after = unwrap_rules(compile_lone(&format!(
            "name = \"p\"\n[[allow]]\nname = \"a\"\nhosts = [\"x.example\"]\n{now}"
        )));
        assert_eq!(after.decide_again(&permit, Some(dialled)).reason(), expected, "{now}");
    }
}

#[test]
fn p3_a_test_of_uninspected_traffic_follows_enforcement() {
    let text = "name = \"p\"\n[[allow]]\nname = \"r\"\nhosts = [\"db.example\"]\ntcp = [443]\n[[test]]\nexpect = \"deny\"\nhost = \"https://db.example/admin\"";
    assert!(
        !unwrap_rules(compile_lone(text)).run_tests()[0].has_passed(),
        "raw TCP passes every byte, so the test must fail"
    );
}

#[test]
fn the_most_specific_path_wins_beside_one_for_everything() {
    let text = "name = \"p\"\n[[allow]]\nname = \"a\"\nhosts = [\"x.example\"]\npaths = [\"/**\", \"/v1/files\"]\n\
        [[allow]]\nname = \"b\"\nhosts = [\"x.example\"]\npaths = [\"/v1/*\"]";
    assert_decisions(
        &unwrap_rules(compile_lone(text)),
        "p",
        &[
            ("GET https://x.example/v1/files", Ok("a")),
            ("GET https://x.example/v1/other", Ok("b")),
            ("GET https://x.example/a//b", Ok("a")),
        ],
    );
}
