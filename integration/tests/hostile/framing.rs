//! HTTP/1 framing: whatever two servers could read in two ways is refused with its code in the log, or leaves
//! as exactly one request that can be read in one way only. What follows on the connection is still its own.

use crate::instance::{InstanceSetup, SandbarInstance, assert_unbranded};
use crate::origin::ScriptedOrigin;
use crate::strict_http::StrictRequest;

/// What must become of a payload.
enum FramingOutcome {
    /// Forwarded as one request with this body.
    Passes(&'static str),
    /// The same, and the request behind it as one of its own.
    Follows(&'static str),
    /// 400 and `bad_request`.
    Bad,
    /// Another status and code.
    Refused(u16, &'static str),
    /// Refused without a word, for it is no HTTP.
    Closed(&'static str),
}

use FramingOutcome::{Bad, Closed, Follows, Passes, Refused};

const GET: &str = "GET /x HTTP/1.1\r\nHost: HOST\r\n";
const POST: &str = "POST /x HTTP/1.1\r\nHost: HOST\r\n";
const CHUNKED: &str = "POST /x HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\n\r\n";
const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nHost: HOST\r\n\r\n";

fn head_cases() -> Vec<(&'static str, String, FramingOutcome)> {
    vec![
        ("plain", format!("{GET}\r\n"), Passes("")),
        ("length", format!("{POST}Content-Length: 3\r\n\r\nabc"), Passes("abc")),
        ("length with space after", format!("{POST}Content-Length: 3 \r\n\r\nabc"), Passes("abc")),
        ("length after tab", format!("{POST}Content-Length:\t3\r\n\r\nabc"), Passes("abc")),
        ("length with zeros", format!("{POST}Content-Length: 0003\r\n\r\nabc"), Passes("abc")),
        ("two lengths alike", format!("{POST}Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc"), Bad),
        ("two lengths", format!("{POST}Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc"), Bad),
        ("a list of lengths", format!("{POST}Content-Length: 3, 3\r\n\r\nabc"), Bad),
        ("plus length", format!("{POST}Content-Length: +3\r\n\r\nabc"), Bad),
        ("minus length", format!("{POST}Content-Length: -3\r\n\r\nabc"), Bad),
        ("minus nothing", format!("{POST}Content-Length: -0\r\n\r\n"), Bad),
        ("hexadecimal length", format!("{POST}Content-Length: 0x3\r\n\r\nabc"), Bad),
        ("length with underscore", format!("{POST}Content-Length: 0_3\r\n\r\nabc"), Bad),
        ("length with point", format!("{POST}Content-Length: 3.0\r\n\r\nabc"), Bad),
        ("length with exponent", format!("{POST}Content-Length: 3e0\r\n\r\nabc"), Bad),
        ("length with space inside", format!("{POST}Content-Length: 3 0\r\n\r\nabc"), Bad),
        ("empty length", format!("{POST}Content-Length:\r\n\r\nabc"), Bad),
        ("quoted length", format!("{POST}Content-Length: \"3\"\r\n\r\nabc"), Bad),
        ("length beyond 63 bits", format!("{POST}Content-Length: 9999999999999999999\r\n\r\nabc"), Bad),
        ("length beyond 64 bits", format!("{POST}Content-Length: 18446744073709551619\r\n\r\nabc"), Bad),
        ("length of 40 digits", format!("{POST}Content-Length: {}3\r\n\r\nabc", "0".repeat(40)), Bad),
        ("length in other digits", format!("{POST}Content-Length: ３\r\n\r\nabc"), Bad),
        ("chunked", format!("{CHUNKED}3\r\nabc\r\n0\r\n\r\n"), Passes("abc")),
        ("announced trailers", format!("{POST}Trailer: X-Sum\r\nContent-Length: 3\r\n\r\nabc"), Bad),
        (
            "chunked in capitals",
            format!("{POST}TRANSFER-ENCODING: CHUNKED\r\n\r\n3\r\nabc\r\n0\r\n\r\n"),
            Passes("abc"),
        ),
        (
            "chunked after tab",
            format!("{POST}Transfer-Encoding:\tchunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"),
            Passes("abc"),
        ),
        (
            "length and chunked",
            format!("{POST}Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{SMUGGLED}"),
            Bad,
        ),
        (
            "chunked and length",
            format!("{POST}Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n{SMUGGLED}"),
            Bad,
        ),
        (
            "chunked and no length",
            format!("{POST}Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n0\r\n\r\n"),
            Bad,
        ),
        (
            "chunked twice",
            format!("{POST}Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
            Bad,
        ),
        ("chunked, chunked", format!("{POST}Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n"), Bad),
        ("chunked, identity", format!("{POST}Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n"), Bad),
        ("identity, chunked", format!("{POST}Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n"), Bad),
        ("gzip, chunked", format!("{POST}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"), Bad),
        ("identity", format!("{POST}Transfer-Encoding: identity\r\nContent-Length: 3\r\n\r\nabc"), Bad),
        ("identity alone", format!("{POST}Transfer-Encoding: identity\r\n\r\nabc"), Bad),
        ("xchunked", format!("{POST}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"), Bad),
        ("chunked with parameter", format!("{POST}Transfer-Encoding: chunked;x=y\r\n\r\n0\r\n\r\n"), Bad),
        ("chunked in quotes", format!("{POST}Transfer-Encoding: \"chunked\"\r\n\r\n0\r\n\r\n"), Bad),
        ("chunked after comma", format!("{POST}Transfer-Encoding: ,chunked\r\n\r\n0\r\n\r\n"), Bad),
        ("chunked before comma", format!("{POST}Transfer-Encoding: chunked,\r\n\r\n0\r\n\r\n"), Bad),
        ("chunked after vertical tab", format!("{POST}Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n"), Bad),
        ("chunked with NUL", format!("{POST}Transfer-Encoding: chunked\0\r\n\r\n0\r\n\r\n"), Bad),
        ("empty coding", format!("{POST}Transfer-Encoding:\r\n\r\n"), Bad),
        ("folded coding", format!("{POST}Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n"), Bad),
        ("space before colon of coding", format!("{POST}Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n"), Bad),
        ("tab before colon of length", format!("{POST}Content-Length\t: 3\r\n\r\nabc"), Bad),
        ("folded length", format!("{POST}Content-Length:\r\n 3\r\n\r\nabc"), Bad),
        ("folded field", format!("{GET}X: a\r\n b\r\n\r\n"), Bad),
        ("field folded by tab", format!("{GET}X: a\r\n\tb\r\n\r\n"), Bad),
        ("space before first field", "GET /x HTTP/1.1\r\n Host: HOST\r\nHost: HOST\r\n\r\n".into(), Bad),
        ("bare line feeds", "GET /x HTTP/1.1\nHost: HOST\n\n".into(), Bad),
        ("bare line feed in head", format!("{GET}X: a\nTransfer-Encoding: chunked\r\n\r\n"), Bad),
        ("bare line feed at end", format!("{GET}X: a\r\n\n"), Bad),
        ("bare return in value", format!("{GET}X: a\rTransfer-Encoding: chunked\r\n\r\n"), Bad),
        ("bare return in name", format!("{GET}X\rY: a\r\n\r\n"), Bad),
        ("two returns", format!("{GET}X: a\r\r\n\r\n"), Bad),
        ("NUL in value", format!("{GET}X: a\0b\r\n\r\n"), Bad),
        ("NUL in name", format!("{GET}X\0: a\r\n\r\n"), Bad),
        ("control in value", format!("{GET}X: a\x01b\r\n\r\n"), Bad),
        ("DEL in value", format!("{GET}X: a\x7fb\r\n\r\n"), Bad),
        ("field without colon", format!("{GET}X\r\n\r\n"), Bad),
        ("field without name", format!("{GET}: a\r\n\r\n"), Bad),
        ("field name in brackets", format!("{GET}X(: a\r\n\r\n"), Bad),
        ("field name not ASCII", format!("{GET}Xé: a\r\n\r\n"), Bad),
        ("empty line first", format!("\r\n{GET}\r\n"), Passes("")),
        ("two empty lines first", format!("\r\n\r\n{GET}\r\n"), Closed("raw_tcp_not_allowed")),
        ("bare line feed first", format!("\n{GET}\r\n"), Closed("raw_tcp_not_allowed")),
        ("bare return first", format!("\r{GET}\r\n"), Closed("raw_tcp_not_allowed")),
        ("space first", format!(" {GET}\r\n"), Closed("raw_tcp_not_allowed")),
        ("HTTP/0.9", "GET /x\r\n\r\n".into(), Bad),
        ("HTTP/1.0", "GET /x HTTP/1.0\r\nHost: HOST\r\n\r\n".into(), Passes("")),
        ("HTTP/1.0 without host", "GET /x HTTP/1.0\r\n\r\n".into(), Passes("")),
        (
            "HTTP/1.0 with coding",
            "POST /x HTTP/1.0\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".into(),
            Bad,
        ),
        ("HTTP/1.2", "GET /x HTTP/1.2\r\nHost: HOST\r\n\r\n".into(), Bad),
        ("HTTP/2.0", "GET /x HTTP/2.0\r\nHost: HOST\r\n\r\n".into(), Bad),
        ("HTTP/01.1", "GET /x HTTP/01.1\r\nHost: HOST\r\n\r\n".into(), Bad),
        ("http/1.1", "GET /x http/1.1\r\nHost: HOST\r\n\r\n".into(), Bad),
        ("two spaces", "GET  /x HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), Bad),
        ("tab for space", "GET /x\tHTTP/1.1\r\nHost: HOST\r\n\r\n".into(), Bad),
        ("space after version", "GET /x HTTP/1.1 \r\nHost: HOST\r\n\r\n".into(), Bad),
        ("no host", "GET /x HTTP/1.1\r\nX: y\r\n\r\n".into(), Bad),
        ("empty host", "GET /x HTTP/1.1\r\nHost:\r\n\r\n".into(), Refused(400, "bad_name")),
        ("host twice", format!("{GET}Host: HOST\r\n\r\n"), Bad),
        ("two hosts", format!("{GET}Host: b.test\r\n\r\n"), Bad),
        ("space before colon of host", format!("{GET}Host : b.test\r\n\r\n"), Bad),
        ("control in target", "GET /a\x01b HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), Bad),
        ("NUL in target", "GET /a\0b HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), Bad),
        ("fragment in target", "GET /a#b HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), Bad),
        ("brackets in target", "GET /a<b> HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), Bad),
        ("backquote in target", "GET /a`b HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), Bad),
        ("target without slash", "GET x HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), Bad),
        ("star as target of GET", "GET * HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), Bad),
        ("absolute https target", "GET https://HOST/x HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), Bad),
        ("absolute target", "GET http://HOST/x HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), Passes("")),
        ("method in lower case", "get /x HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), Refused(400, "bad_method")),
        (
            "no method is that long: it is raw TCP, however it is split",
            format!("{} /x HTTP/1.1\r\nHost: HOST\r\n\r\n", "A".repeat(30)),
            Closed("raw_tcp_not_allowed"),
        ),
        (
            "method with underscore",
            "A_B /x HTTP/1.1\r\nHost: HOST\r\n\r\n".into(),
            Closed("raw_tcp_not_allowed"),
        ),
        ("TRACE", "TRACE /x HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), Refused(403, "method_not_allowed")),
        ("CONNECT inside CONNECT", "CONNECT HOST HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), Bad),
        ("HEAD", "HEAD /x HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), Passes("")),
        (
            "body that looks like a request",
            format!("{GET}Content-Length: 19\r\n\r\nGET /s HTTP/1.1\r\n\r\n"),
            Passes("GET /s HTTP/1.1\r\n\r\n"),
        ),
        ("pipelined", format!("{GET}\r\n{SMUGGLED}"), Follows("")),
        ("pipelined after a body", format!("{POST}Content-Length: 3\r\n\r\nabc{SMUGGLED}"), Follows("abc")),
        ("pipelined after chunks", format!("{CHUNKED}0\r\n\r\n{SMUGGLED}"), Follows("")),
        ("nominates host", format!("{GET}Connection: host\r\n\r\n"), Bad),
        (
            "nominates length",
            format!("{POST}Connection: close, Content-Length\r\nContent-Length: 3\r\n\r\nabc"),
            Bad,
        ),
        (
            "nominates coding",
            format!("{POST}Connection: transfer-encoding\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
            Bad,
        ),
        ("nominates another", format!("{GET}Connection: x-hop\r\nX-Hop: y\r\n\r\n"), Passes("")),
        (
            "h2c",
            format!(
                "{GET}Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n"
            ),
            Passes(""),
        ),
        (
            "h2c nominated only once",
            format!(
                "{GET}Connection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n"
            ),
            Passes(""),
        ),
        ("unknown upgrade", format!("{GET}Connection: Upgrade\r\nUpgrade: foo\r\n\r\n"), Passes("")),
        (
            "Expect, body at once",
            format!("{POST}Expect: 100-continue\r\nContent-Length: 3\r\n\r\nabc"),
            Passes("abc"),
        ),
        (
            "Expect twice",
            format!("{POST}Expect: 100-continue\r\nExpect: x\r\nContent-Length: 3\r\n\r\nabc"),
            Passes("abc"),
        ),
        ("Expect without body", format!("{GET}Expect: 100-continue\r\n\r\n"), Passes("")),
        (
            "length with underscore in its name",
            format!("{POST}Content_Length: 30\r\nContent-Length: 3\r\n\r\nabc"),
            Passes("abc"),
        ),
        (
            "coding with underscore in its name",
            format!("{POST}Transfer_Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc"),
            Passes("abc"),
        ),
    ]
}

fn chunk_cases() -> Vec<(&'static str, String, FramingOutcome)> {
    let chunk = |line: &str| format!("{CHUNKED}{line}abc\r\n0\r\n\r\n");
    vec![
        ("extension", chunk("3;a=b\r\n"), Passes("abc")),
        ("quoted extension", chunk("3;a=\"b\"\r\n"), Passes("abc")),
        ("space after size", chunk("3 \r\n"), Passes("abc")),
        ("bare line feed in extension", format!("{CHUNKED}2;\nxx\r\n4c\r\n0\r\n\r\n{SMUGGLED}"), Bad),
        ("bare line feed after size", chunk("3\n"), Bad),
        ("bare line feeds all over", format!("{CHUNKED}3\nabc\n0\n\n"), Bad),
        ("bare line feed after data", format!("{CHUNKED}3\r\nabc\n0\r\n\r\n"), Bad),
        ("bare return after size", chunk("3\r"), Bad),
        ("bare return in extension", chunk("3;a\rb\r\n"), Bad),
        ("hexadecimal prefix", chunk("0x3\r\n"), Bad),
        ("plus size", chunk("+3\r\n"), Bad),
        ("minus size", chunk("-3\r\n"), Bad),
        ("space before size", chunk(" 3\r\n"), Bad),
        ("underscore in size", chunk("0_3\r\n"), Bad),
        ("NUL after size", chunk("3\0\r\n"), Bad),
        ("no size", chunk("\r\n"), Bad),
        ("size beyond 64 bits", chunk("10000000000000003\r\n"), Bad),
        ("size of 64 bits", chunk("ffffffffffffffff\r\n"), Bad),
        ("size no number", chunk("xyz\r\n"), Bad),
        ("data longer than size", format!("{CHUNKED}2\r\nabc\r\n0\r\n\r\n"), Bad),
        ("data shorter than size", format!("{CHUNKED}8\r\nabc\r\n0\r\n\r\n\r\n"), Bad),
        (
            "trailer that sets Authorization",
            format!("{CHUNKED}3\r\nabc\r\n0\r\nAuthorization: Bearer x\r\nHost: b.test\r\n\r\n"),
            Bad,
        ),
        ("trailer", format!("{CHUNKED}3\r\nabc\r\n0\r\nX-Sum: 1\r\n\r\n"), Bad),
        ("trailer that is a request", format!("{CHUNKED}3\r\nabc\r\n0\r\n{SMUGGLED}"), Bad),
        ("last chunk with extension", format!("{CHUNKED}3\r\nabc\r\n0;x=y\r\n\r\n"), Passes("abc")),
        ("several zeros", format!("{CHUNKED}3\r\nabc\r\n000\r\n\r\n"), Passes("abc")),
    ]
}

#[test]
fn a_head_is_read_in_one_way_or_refused() {
    assert_table(head_cases());
}

#[test]
fn chunks_are_read_in_one_way_or_refused() {
    assert_table(chunk_cases());
}

fn assert_table(table: Vec<(&'static str, String, FramingOutcome)>) {
    let origin = ScriptedOrigin::start_plain();
    let world = InstanceSetup::with_hosts(&[("a.test", origin.port())]).start();
    let mut wrong = Vec::new();
    for (what, payload, fate) in table {
        let (world, origin) = (&world, &origin);
        let judged = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            assert_outcome(world, origin, what, &payload, &fate);
        }));
        if judged.is_err() {
            wrong.push(what);
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
    assert_eq!(origin.faults(), [""; 0], "something malformed has reached the origin");
}

fn assert_outcome(
    world: &SandbarInstance,
    origin: &ScriptedOrigin,
    what: &str,
    payload: &str,
    fate: &FramingOutcome,
) {
    let host = format!("a.test:{}", origin.port());
    let method = payload.trim_start().split(' ').next().unwrap_or_default().to_owned();
    let (requests, records) = (origin.requests().len(), world.record_count());
    let mut wire = world.open_tunnel("a.test", origin.port());
    wire.send(payload.replace("HOST", &host));
    let answer = wire.read_response(&method);
    let new = || origin.requests().split_off(requests);
    match (fate, answer) {
        (Passes(body), Some(answer)) => {
            assert_eq!(answer.status, 200, "{what}: {}", answer.text());
            assert_unbranded(what, &answer);
            assert_single_request(what, &new(), &method, body);
            // What was left behind must not have become part of this one, nor a request before it.
            wire.send(format!("GET /sentinel HTTP/1.1\r\nHost: {host}\r\n\r\n"));
            if let Some(answer) = wire.read_response("GET") {
                assert_eq!(answer.text(), "GET /sentinel ", "{what}");
            }
            assert!(new().iter().all(|request| request.target != "/smuggled"), "{what}");
        }
        (Follows(body), Some(answer)) => {
            assert_eq!(answer.status, 200, "{what}: {}", answer.text());
            let second = wire.read_response("GET").unwrap_or_else(|| panic!("{what}: no second answer"));
            assert_eq!(second.text(), "GET /smuggled ", "{what}");
            let mut seen = new();
            assert_eq!(seen.pop().map(|request| request.target), Some("/smuggled".into()), "{what}");
            assert_single_request(what, &seen, &method, body);
            world.wait_for_record(records, what, |record| {
                record["http_request"]["url"]["path"] == "/smuggled" && record["action_id"] == 1
            });
        }
        (Bad, Some(answer)) => {
            world.assert_refused(what, &answer, 400, "bad_request");
            assert_eq!(new(), [], "{what}: something reached the origin");
        }
        (Refused(status, code), Some(answer)) => {
            world.assert_refused(what, &answer, *status, code);
            assert_eq!(new(), [], "{what}: something reached the origin");
        }
        (Closed(code), None) => {
            world.wait_for_record(records, what, |record| record["status_detail"] == *code);
            assert_eq!(new(), [], "{what}: something reached the origin");
        }
        (Passes(_) | Follows(_) | Bad | Refused(..), None) => panic!("{what}: no answer"),
        (Closed(_), Some(answer)) => panic!("{what}: answered {answer:?}"),
    }
}

fn assert_single_request(what: &str, new: &[StrictRequest], method: &str, body: &str) {
    let [request] = new else { panic!("{what}: {new:?}") };
    assert_eq!((&*request.method, &*request.target), (method, "/x"), "{what}");
    assert_eq!(String::from_utf8_lossy(&request.body), body, "{what}");
    for gone in ["http2-settings", "x-hop", "content_length", "transfer_encoding", "trailer"] {
        assert_eq!(request.field(gone), None, "{what}");
    }
    let upgrade = request.field("upgrade").is_none_or(|to| to == "websocket");
    assert!(upgrade, "{what}: {request:?}");
}
