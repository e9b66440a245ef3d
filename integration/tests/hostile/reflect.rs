//! An origin that reflects a credential in every spelling, wherever an answer has room for it, also compressed (P11).

use std::io::Write;
use std::process::{Command, Stdio};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};

use crate::credentials::{CredentialScene, SECRET};
use crate::origin::OriginReply;

/// Spells each octet.
fn each(spell: impl Fn(u8) -> String) -> Vec<u8> {
    SECRET.bytes().flat_map(|octet| spell(octet).into_bytes()).collect()
}

/// Spells what is not a letter or a digit.
fn some(spell: impl Fn(u8) -> String) -> Vec<u8> {
    each(|octet| match octet.is_ascii_alphanumeric() || octet == b'-' {
        true => char::from(octet).to_string(),
        false => spell(octet),
    })
}

fn joined(separator: &str, spell: impl Fn(u8) -> String) -> Vec<u8> {
    SECRET.bytes().map(spell).collect::<Vec<_>>().join(separator).into_bytes()
}

/// Spellings that a field can carry.
fn spellings() -> Vec<Vec<u8>> {
    let based = |text: &str| STANDARD.encode(text).into_bytes();
    let escapes: [fn(u8) -> String; 20] = [
        |octet| format!("%{octet:02X}"),
        |octet| format!("%{octet:02x}"),
        |octet| format!("%25{octet:02X}"),
        |octet| format!("%u{octet:04x}"),
        |octet| format!("\\u{octet:04x}"),
        |octet| format!("\\u{octet:04X}"),
        |octet| format!("\\\\u{octet:04x}"),
        |octet| format!("\\u{{{octet:x}}}"),
        |octet| format!("\\x{octet:02x}"),
        |octet| format!("\\\\x{octet:02x}"),
        |octet| format!("\\{octet:03o}"),
        |octet| format!("&#{octet};"),
        |octet| format!("&#x{octet:x};"),
        |octet| format!("&#x{octet:X};"),
        |octet| format!("&#x00000{octet:x};"),
        |octet| format!("&#00000{octet};"),
        |octet| format!("&amp;#{octet};"),
        |octet| format!("&amp;#x{octet:x};"),
        |octet| format!("={octet:02X}"),
        |octet| format!("%5Cu{octet:04x}"),
    ];
    let mut texts: Vec<Vec<u8>> = escapes.iter().flat_map(|escape| [each(escape), some(escape)]).collect();
    let named = SECRET.replace('/', "&sol;").replace('+', "&plus;").replace('=', "&equals;");
    let hex = |octet: u8| format!("{octet:02x}");
    texts.extend([
        SECRET.into(),
        SECRET.to_ascii_uppercase().into(),
        SECRET.replace('/', r"\/").into(),
        SECRET.replace('/', r"\\/").into(),
        named.replace('&', "&amp;").into(),
        named.replace(';', "").into(),
        named.into(),
        each(hex),
        each(|octet| format!("{octet:02X}")),
        joined(":", hex),
        joined(" ", hex),
        joined("-", hex),
        joined(", ", |octet| format!("0x{octet:02x}")),
        joined(", ", |octet| octet.to_string()),
        joined(",", |octet| octet.to_string()),
        based(SECRET),
        URL_SAFE.encode(SECRET).into(),
        based(&format!("u:{SECRET}")),
        based(&format!("Bearer {SECRET}")),
        based(&STANDARD.encode(SECRET)),
        based(&STANDARD.encode(format!("u:{SECRET}"))),
        based(&format!("{{\"t\":\"{}\"}}", SECRET.replace('/', r"\/"))),
        STANDARD.encode(SECRET).replace('=', "%3D").into(),
    ]);
    texts
}

/// Whether a text still shows what was spelled: six octets of its middle in a row.
fn shows(text: &[u8], spelled: &[u8]) -> bool {
    let middle = &spelled[spelled.len() / 3..spelled.len() * 2 / 3];
    middle.windows(6.min(middle.len())).any(|part| text.windows(part.len()).any(|stands| stands == part))
}

#[test]
fn p11_no_spelling_of_it_arrives_in_any_place() {
    let scene = CredentialScene::new();
    let spellings = spellings();
    assert!(spellings.len() >= 60, "{}", spellings.len());
    for spelled in &spellings {
        let text = String::from_utf8(spelled.clone()).unwrap();
        let body = format!("--b\r\n\r\n{text}\r\n--b--\r\n{{\"a\":\"{text}\"}}\ndata: {text}\n\n");
        let half = body.len() / 2 + 3;
        let (first, second) = body.split_at(half);
        let answer = format!(
            "HTTP/1.1 200 {text}\r\nX-Echo: {text}\r\nLocation: https://b.test/?t={text}\r\n\
             Set-Cookie: t={text}; Secure\r\nTransfer-Encoding: chunked\r\n\r\n\
             {:x}\r\n{first}\r\n{:x}\r\n{second}\r\n0\r\nX-Echo: {text}\r\n\r\n",
            first.len(),
            second.len()
        );
        scene.bound.set_reply(OriginReply::Say(answer.into_bytes()));
        let answer = scene.send_post("");
        assert_eq!(answer.status, 200, "{text}");
        assert!(!shows(&answer.raw, spelled), "{text}: {}", answer.raw.escape_ascii());
        assert!(answer.raw.windows(8).any(|stars| stars == b"********"), "{text}");
    }
    scene.world.wait_for_record(0, "the echo", |record| record.to_string().contains("credential_echoed"));
    assert!(!scene.log_text().contains(SECRET), "it is in no record");
}

/// Runs a compressor of the system on a text.
fn compress(program: &str, arguments: &[&str], text: &[u8]) -> Vec<u8> {
    let mut child = Command::new(program);
    let mut child =
        child.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a compressor");
    child.stdin.take().unwrap().write_all(text).unwrap();
    child.wait_with_output().unwrap().stdout
}

#[test]
fn p11_compressed_answers_are_searched() {
    let scene = CredentialScene::new();
    let text = format!("{{\"you sent\":\"{SECRET}\",\"and\":\"thanks\"}}");
    let deflate = "import sys,zlib; sys.stdout.buffer.write(zlib.compress(sys.stdin.buffer.read()))";
    let gzip = compress("gzip", &["-c"], text.as_bytes());
    for (coding, bytes) in [
        ("gzip", gzip.clone()),
        ("deflate", compress("python3", &["-c", deflate], text.as_bytes())),
        ("gzip, gzip", compress("gzip", &["-c"], &gzip)),
    ] {
        let mut answer = format!(
            "HTTP/1.1 200 OK\r\nContent-Encoding: {coding}\r\nETag: \"x\"\r\nContent-Length: {}\r\n\r\n",
            bytes.len()
        )
        .into_bytes();
        answer.extend_from_slice(&bytes);
        scene.bound.set_reply(OriginReply::Say(answer));
        let answer = scene.send_post("Accept-Encoding: gzip, deflate\r\n");
        let shown = answer.text();
        assert_eq!(answer.status, 200, "{coding}: {shown}");
        assert_eq!(answer.field("content-encoding"), None, "{coding}");
        assert!(
            shown.contains("********") && shown.contains("thanks") && !shown.contains("0123456789"),
            "{shown}"
        );
    }
    let half = &gzip[..gzip.len() / 2];
    let mut cut =
        format!("HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {}\r\n\r\n", half.len())
            .into_bytes();
    cut.extend_from_slice(half);
    scene.bound.set_reply(OriginReply::Say(cut));
    let mut wire = scene.connect_bound();
    wire.send(format!(
        "POST /v1/x HTTP/1.1\r\nHost: a.test:{}\r\nContent-Length: 0\r\n\r\n",
        scene.bound.port()
    ));
    let answer = wire.read_response("POST");
    assert!(answer.is_none_or(|answer| answer.status == 502), "a broken body must not look complete");
    let cut = |record: &serde_json::Value| record.to_string().contains("answer_unreadable");
    scene.world.wait_for_record(0, "the cut", cut);
}
