//! Runs the fuzzers' checks on a bounded number of inputs: tokens of the grammar in any order, and random bytes.

#![allow(clippy::unwrap_used)] // test helpers may unwrap, too

use proptest::prelude::*;

#[path = "../fuzz/checks.rs"]
mod checks;

/// Inputs per check.
const INPUTS: u32 = 1500;

const HEAD_WORDS: &[&str] = &[
    "GET ",
    "POST ",
    "CONNECT ",
    "OPTIONS ",
    "/",
    "*",
    "x",
    "?y",
    "#",
    "<",
    "http://",
    "HTTP://",
    "a.test",
    "A.TEST.",
    "b.test",
    "u@",
    ":80",
    ":",
    " HTTP/1.1\r\n",
    " HTTP/1.0\r\n",
    "GET http://a.test/ HTTP/1.1\r\n",
    "Host: a.test\r\n",
    "host: A.test:80\r\n",
    "Host: b.test\r\n",
    "Content-Length: 3\r\n",
    "Content-Length: +3\r\n",
    "Transfer-Encoding: chunked\r\n",
    "Connection: host\r\n",
    "X : y\r\n",
    " z\r\n",
    "\r\n",
    "\r\n\r\n",
    "\n",
    "\r",
    "\0",
    "é",
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
];

const CHUNK_WORDS: &[&str] = &[
    "0",
    "3",
    "a",
    "ff",
    "0x",
    "+",
    "-",
    "_",
    ";",
    "e=f",
    " ",
    "\t",
    "\r\n",
    "\r",
    "\n",
    "abc",
    "X: y",
    "0\r\n\r\n",
    "3\r\nabc\r\n",
    "1;x\r\ny\r\n",
    "\0",
    "\u{7f}",
    "é",
    "000000000000000",
    "fffffffffffffff",
];

const ECHO_WORDS: &[&str] = &[
    checks::SECRET,
    "sk-",
    "sk-a/b+c=d",
    "9",
    "sk-a%2Fb%2bc%3Dd9",
    "%73k-a/b",
    "%2Bc=d9",
    "\\u002bc=d9",
    "sk-a\\/b",
    "+c&#61;d9",
    "&#x73;k-a/",
    "b&#43;c&#x3d;",
    "d9",
    "c2stYS9iK2M9ZDk",
    "c2stYS9iK2",
    "M9ZDk=",
    "736b2d612f622b633d6439",
    "736B2D612F62",
    "2B633D6439",
    "%",
    "%7",
    "\\",
    "\\u00",
    "&",
    "&#",
    "\\n",
    "\n",
    "\r\n",
    "\n\n",
    "x",
    "é",
];

/// Returns a valid TLS ClientHello, for the strategy to corrupt.
fn client_hello() -> Vec<u8> {
    let config = rustls::ClientConfig::builder_with_provider(certs::crypto_provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let name = "a.test".try_into().unwrap();
    let mut client = rustls::ClientConnection::new(config.into(), name).unwrap();
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).unwrap();
    bytes
}

fn any_input(words: &'static [&'static str]) -> impl Strategy<Value = Vec<u8>> {
    let worded = proptest::collection::vec(proptest::sample::select(words), 0..16)
        .prop_map(|words| words.concat().into_bytes());
    prop_oneof![4 => worded, 1 => proptest::collection::vec(any::<u8>(), 0..200)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(INPUTS))]

    #[test]
    fn head(data in any_input(HEAD_WORDS)) {
        checks::head(&data);
    }

    #[test]
    fn chunks(data in any_input(CHUNK_WORDS)) {
        checks::chunks(&data);
    }

    #[test]
    fn p11_scrub(data in any_input(ECHO_WORDS)) {
        checks::scrub(&data);
    }

    #[test]
    fn first_bytes(data in any_input(HEAD_WORDS)) {
        checks::first_bytes(&data);
    }

    #[test]
    fn hellos(changes in proptest::collection::vec((any::<usize>(), any::<u8>()), 0..4), cut in any::<usize>()) {
        let mut data = client_hello();
        for (at, byte) in changes {
            let length = data.len();
            data[at % length] = byte;
        }
        data.truncate(1 + cut % data.len());
        checks::first_bytes(&data);
    }
}

/// A regression: split after the percent sign, these digits once matched; whole, they did not.
#[test]
fn scrub_digits_behind_a_percent_sign() {
    checks::scrub(b"%736B2D612F62\n2B633D6439");
}
