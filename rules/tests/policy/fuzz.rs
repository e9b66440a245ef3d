//! Runs the fuzzers' checks on a bounded number of inputs: fragments of the language in any order, and any bytes.

use proptest::prelude::*;

#[path = "../../fuzz/checks.rs"]
mod checks;

/// Number of inputs per check.
const INPUTS: u32 = 1500;

const NAME_WORDS: &[&str] = &[
    "a",
    "example",
    ".",
    "..",
    "-",
    "_",
    "*",
    "**",
    "xn--",
    "xn--bcher-kva",
    "ü",
    "。",
    "ａ",
    "\0",
    "%2e",
    "[",
    "]",
    ":",
    "443",
    "0x7f",
    "127",
    "\u{ad}",
    " ",
    "@",
    "com",
    "github.io",
];

const PATH_WORDS: &[&str] = &[
    "/", "//", "*", "**", "..", ".", "%2f", "%20", "%C3%a9", "%", "%4", ";", "\\", "?", "#", "v1", "~",
    "\u{e9}", "\0",
];

const POLICY_WORDS: &[&str] = &[
    "name = \"p\"\n",
    "[[allow]]\n",
    "[[deny]]\n",
    "[[memory]]\n",
    "[[test]]\n",
    "[budget]\n",
    "name = \"r\"\n",
    "name = \"s\"\n",
    "hosts = [\"x.example\"]\n",
    "hosts = [\"*.x.example\", \".y.example:8443\"]\n",
    "hosts = [\"*\"]\n",
    "hosts = []\n",
    "hosts = [\"b d\"]\n",
    "hosts_file = \"l.txt\"\n",
    "addresses = [\"10.0.0.0/8\"]\n",
    "ports = [22, 443]\n",
    "ports = [0]\n",
    "tcp = [22]\n",
    "methods = [\"GET\"]\n",
    "methods = [\"get\"]\n",
    "paths = [\"/v1/**\"]\n",
    "paths = [\"/..\"]\n",
    "access = \"read-only\"\n",
    "tls = \"tunnel\"\n",
    "tls = 1\n",
    "ech = \"tolerate\"\n",
    "credential = \"k\"\n",
    "memory = \"may-receive\"\n",
    "inspect = true\n",
    "dangerously_wide = true\n",
    "resolves_to = [\"10.1.0.0/16\"]\n",
    "dns_types = [\"TXT\"]\n",
    "cname = \"strict\"\n",
    "expect = \"deny\"\n",
    "host = \"x.example\"\n",
    "profile = \"astrocyte\"\n",
    "identity = \"from-channel\"\n",
    "recall = [\"staging:a\"]\n",
    "retain = [\"x\"]\n",
    "requests_per_hour = 5\n",
    "bank = \"staging:a\"\n",
    "=",
    "\"",
    "[",
    "]]",
    "\u{202e}",
    "#\n",
];

const CONFIGURATION_WORDS: &[&str] = &[
    "policies = \"d\"\n",
    "[[sandbox]]\n",
    "[[listener]]\n",
    "[[credential]]\n",
    "hosts = [\"a.example\"]\n",
    "env = \"KEY\"\n",
    "form = \"bearer\"\n",
    "form = { header = \"x-api-key\" }\n",
    "[credential.oauth2]\n",
    "[log]\n",
    "[dns]\n",
    "id = \"a\"\n",
    "id = \"b\"\n",
    "id = \"\"\n",
    "tenant = \"t\"\n",
    "environment = \"e\"\n",
    "base = \"user\"\n",
    "base = \"system\"\n",
    "base = \"p\"\n",
    "base = \"z\"\n",
    "policies = [\"p\"]\n",
    "mark = 0xa1\n",
    "mark = 0\n",
    "interface = \"veth\"\n",
    "unix_uid = 7\n",
    "source_address = \"10.0.0.0/8\"\n",
    "dangerously_trust_source_address = true\n",
    "mode = \"dns\"\n",
    "bind = [\"127.0.0.1:53\"]\n",
    "bind = [\"x\"]\n",
    "sandbox = \"a\"\n",
    "identify = \"mark\"\n",
    "dir = \"\"\n",
    "upstreams = [\"1.1.1.1:53\"]\n",
    "name = \"k\"\n",
    "file = \"f\"\n",
    "=",
    "[",
];

fn any_input(words: &'static [&'static str]) -> impl Strategy<Value = Vec<u8>> {
    let worded = proptest::collection::vec(proptest::sample::select(words), 0..24)
        .prop_map(|words| words.concat().into_bytes());
    prop_oneof![4 => worded, 1 => proptest::collection::vec(any::<u8>(), 0..200)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(INPUTS))]

    #[test]
    fn name(data in any_input(NAME_WORDS)) {
        checks::name(&data);
    }

    #[test]
    fn pattern(data in any_input(NAME_WORDS)) {
        checks::pattern(&data);
    }

    #[test]
    fn path(data in any_input(PATH_WORDS)) {
        checks::path(&data);
    }

    #[test]
    fn list(data in any_input(&["a.example\n", "*.b.example\n", "#c\n", "b d\n", "*.com\n", "x:1\n", "\r\n", "\u{202e}\n", "ü.example\n", " \t"])) {
        checks::list(&data);
    }

    #[test]
    fn policy(data in any_input(POLICY_WORDS)) {
        checks::policy(&data);
    }

    #[test]
    fn content(data in any_input(&["%41", "\\u0041", "&#65;", "QUtJQVEzRUdSVEtYN1BNMkxaNVcK", "\n", " ", "\x1f", "eyJ", "://a:bcd@e", "4142434445464748494a4b4c4d4e", "x\u{9c}", "SK", "sk-"])) {
        checks::content(&data);
    }

    #[test]
    fn operator(data in any_input(CONFIGURATION_WORDS)) {
        checks::operator(&data);
    }

    #[test]
    fn flow_table(data in any_input(&["\0", "\0\x01", "\0\0\0\x01", "\x01a", "\x02b:", "SFLW", "\x01\x02\x03\x04", "\x7f"])) {
        checks::flow_table(&data);
    }
}
