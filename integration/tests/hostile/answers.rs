//! Hostile origins: what they answer is well-formed by the time the sandbox sees it, or is a 502 that says so.

use crate::instance::{InstanceSetup, SandbarInstance, assert_unbranded};
use crate::origin::{OriginReply, ScriptedOrigin};
use crate::wire::RawResponse;

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// What the sandbox must see.
enum AnswerOutcome {
    /// This status and body.
    Passes(u16, &'static str),
    /// 502 and `upstream_broke`.
    Broke,
    /// The answer ends before it is whole.
    Torn,
}

use AnswerOutcome::{Broke, Passes, Torn};

#[test]
fn a_malformed_answer_is_a_bad_gateway() {
    let origin = ScriptedOrigin::start_plain();
    let world = InstanceSetup::with_hosts(&[("a.test", origin.port())]).start();
    let mut wrong = Vec::new();
    for (what, said, fate) in [
        ("plain", OK.to_owned(), Passes(200, "ok")),
        (
            "chunked",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n".into(),
            Passes(200, "ok"),
        ),
        ("HTTP/1.0", "HTTP/1.0 200 OK\r\n\r\nok".into(), Passes(200, "ok")),
        ("garbage", "\0\x01garbage\r\n\r\n".into(), Broke),
        ("nothing", String::new(), Broke),
        ("HTTP/0.9", "hello".into(), Broke),
        ("HTTP/2.0", "HTTP/2.0 200 OK\r\nContent-Length: 2\r\n\r\nok".into(), Broke),
        ("SSH", "SSH-2.0-OpenSSH_9.2p1\r\n".into(), Broke),
        ("status of two digits", "HTTP/1.1 20 OK\r\nContent-Length: 2\r\n\r\nok".into(), Broke),
        ("status 099", "HTTP/1.1 099 OK\r\nContent-Length: 2\r\n\r\nok".into(), Broke),
        ("status in words", "HTTP/1.1 abc OK\r\nContent-Length: 2\r\n\r\nok".into(), Broke),
        ("two lengths", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nokx".into(), Broke),
        ("minus length", "HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nok".into(), Broke),
        ("plus length", "HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nok".into(), Broke),
        (
            "length and chunked",
            "HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
                .into(),
            Passes(200, "ok"),
        ),
        ("another coding", "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nok".into(), Broke),
        (
            "chunked twice",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n".into(),
            Broke,
        ),
        (
            "return in a value",
            "HTTP/1.1 200 OK\r\nX: a\rSet-Cookie: evil\r\nContent-Length: 2\r\n\r\nok".into(),
            Broke,
        ),
        ("NUL in a value", "HTTP/1.1 200 OK\r\nX: a\0b\r\nContent-Length: 2\r\n\r\nok".into(), Broke),
        ("field without colon", "HTTP/1.1 200 OK\r\nX\r\nContent-Length: 2\r\n\r\nok".into(), Broke),
        (
            "300 fields",
            format!("HTTP/1.1 200 OK\r\n{}Content-Length: 2\r\n\r\nok", "X: y\r\n".repeat(300)),
            Broke,
        ),
        ("two megabytes of head", format!("HTTP/1.1 200 OK\r\nX: {}\r\n\r\n", "y".repeat(2 << 20)), Broke),
        (
            "unasked 101",
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nraw".into(),
            Broke,
        ),
        ("100 first", format!("HTTP/1.1 100 Continue\r\n\r\n{OK}"), Passes(200, "ok")),
        (
            "103 first",
            format!("HTTP/1.1 103 Early Hints\r\nLink: </x>\r\nAlt-Svc: h3=\":443\"\r\n\r\n{OK}"),
            Passes(200, "ok"),
        ),
        (
            "thirty-two 103",
            format!("{}{OK}", "HTTP/1.1 103 Early Hints\r\n\r\n".repeat(32)),
            Passes(200, "ok"),
        ),
        ("only 103", "HTTP/1.1 103 Early Hints\r\n\r\n".into(), Broke),
        (
            "204 with a body",
            "HTTP/1.1 204 No Content\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil".into(),
            Passes(204, ""),
        ),
        (
            "304 with a body",
            "HTTP/1.1 304 Not Modified\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil".into(),
            Passes(304, ""),
        ),
        ("two answers", format!("{OK}HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"), Passes(200, "ok")),
        ("plain again", OK.to_owned(), Passes(200, "ok")),
        (
            "chunk size no number",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nok\r\n0\r\n\r\n".into(),
            Torn,
        ),
        ("length not reached", "HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nok".into(), Torn),
        ("chunks not ended", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n".into(), Torn),
    ] {
        origin.set_reply(OriginReply::SayAndClose(said.into_bytes()));
        let asked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            assert_outcome(&world, &origin, what, &fate);
        }));
        if asked.is_err() {
            wrong.push(what);
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

fn assert_outcome(world: &SandbarInstance, origin: &ScriptedOrigin, what: &str, fate: &AnswerOutcome) {
    let before = origin.requests().len();
    let mut wire = world.open_tunnel("a.test", origin.port());
    wire.send(format!("GET / HTTP/1.1\r\nHost: a.test:{}\r\n\r\n", origin.port()));
    let answer = wire.read_response("GET");
    let told = |answer: &RawResponse| String::from_utf8_lossy(&answer.raw).into_owned();
    match (fate, answer) {
        (Passes(status, body), Some(answer)) => {
            assert_eq!((answer.status, &*answer.text()), (*status, *body), "{what}");
            assert!(!told(&answer).contains("evil"), "{what}: {}", told(&answer));
            assert!(!told(&answer).to_ascii_lowercase().contains("alt-svc"), "{what}");
            assert_unbranded(what, &answer);
        }
        (Broke, Some(answer)) => {
            world.assert_refused(what, &answer, 502, "upstream_broke");
            assert!(!told(&answer).contains("evil"), "{what}: {}", told(&answer));
        }
        (Torn, None) => {}
        (Passes(..) | Broke, None) => panic!("{what}: no answer"),
        (Torn, Some(answer)) => panic!("{what}: {}", told(&answer)),
    }
    assert_eq!(origin.requests().len(), before + 1, "{what}: it is asked once");
}

/// What a slow origin has said is seen before it says the rest.
#[test]
fn nothing_is_held_back() {
    let origin = ScriptedOrigin::start_plain();
    let world = InstanceSetup::with_hosts(&[("a.test", origin.port())]).start();
    for (head, part) in [
        ("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", "first"),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "5\r\nfirst\r\n"),
        ("HTTP/1.1 200 OK\r\n\r\n", "first"),
    ] {
        origin.set_reply(OriginReply::SayAndHang(format!("{head}{part}").into_bytes()));
        let mut wire = world.open_tunnel("a.test", origin.port());
        wire.send(format!("GET / HTTP/1.1\r\nHost: a.test:{}\r\n\r\n", origin.port()));
        assert!(wire.read_until(b"first").is_some(), "{head}");
    }
}

/// An origin that keeps sending interim answers is stopped at `interim_answers`.
// proves: limits.interim_answers
#[test]
fn interim_answers_are_numbered() {
    let origin = ScriptedOrigin::start_plain();
    let hosts = InstanceSetup::with_hosts(&[("a.test", origin.port())]);
    let world = hosts.with_limits("interim_answers = 5").start();
    for (count, passes) in [(5, true), (6, false), (2000, false)] {
        let hints = "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n".repeat(count);
        origin.set_reply(OriginReply::SayAndClose(format!("{hints}{OK}").into_bytes()));
        let mut wire = world.open_tunnel("a.test", origin.port());
        wire.send(format!("GET / HTTP/1.1\r\nHost: a.test:{}\r\n\r\n", origin.port()));
        let answer = wire.read_response("GET").unwrap();
        assert!(answer.interim.len() <= 5, "{count}: {:?}", answer.interim);
        if passes {
            assert_eq!((answer.status, answer.interim.len()), (200, count));
        } else {
            world.assert_refused(&count.to_string(), &answer, 502, "answer_too_large");
        }
    }
}

/// Only Sandbar says that Sandbar refused.
#[test]
fn an_origin_cannot_fake_a_refusal() {
    let origin = ScriptedOrigin::start_plain();
    let world = InstanceSetup::with_hosts(&[("a.test", origin.port())]).start();
    let forged =
        "Sandbar-Reason: not_listed\r\nSANDBAR-RECORD: 1\r\nsandbar_generation: 7\r\nX-Mine: kept\r\n";
    for (what, said, status) in [
        ("an answer", format!("HTTP/1.1 403 Forbidden\r\n{forged}Content-Length: 0\r\n\r\n"), 403),
        ("an interim answer", format!("HTTP/1.1 103 Early Hints\r\n{forged}\r\n{OK}"), 200),
    ] {
        origin.set_reply(OriginReply::SayAndClose(said.into_bytes()));
        let mut wire = world.open_tunnel("a.test", origin.port());
        wire.send(format!("GET / HTTP/1.1\r\nHost: a.test:{}\r\n\r\n", origin.port()));
        let answer = wire.read_response("GET").unwrap();
        assert_eq!(answer.status, status, "{what}");
        let raw = String::from_utf8_lossy(&answer.raw).to_ascii_lowercase();
        assert!(!raw.contains("sandbar"), "{what}: {raw}");
        assert!(raw.contains("x-mine: kept"), "{what}: {raw}");
    }
}
