//! Requests that a client sends before it has its answers (RFC 9112, section 9.3.2): each is an attempt of its own, in
//! order, and what no answer can be given to is in the log all the same.

use serde_json::Value;

use crate::instance::{InstanceSetup, SandbarInstance};
use crate::origin::ScriptedOrigin;

fn start_scene() -> (SandbarInstance, ScriptedOrigin, ScriptedOrigin) {
    let (origin, denied) = (ScriptedOrigin::start_plain(), ScriptedOrigin::start_plain());
    let mut plan = InstanceSetup::with_hosts(&[("a.test", origin.port())]);
    plan.hosts.push("denied.test");
    (plan.start(), origin, denied)
}

fn targets(origin: &ScriptedOrigin) -> Vec<String> {
    origin.requests().into_iter().map(|request| request.target).collect()
}

#[test]
fn each_is_served_in_its_turn() {
    let (world, origin, _) = start_scene();
    let since = world.record_count();
    let host = format!("a.test:{}", origin.port());
    let get = |at: usize| format!("GET /{at} HTTP/1.1\r\nHost: {host}\r\n\r\n");
    let post = |at: usize| {
        format!(
            "POST /{at} HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        )
    };
    let requests: Vec<String> = (0..12).map(|at| if at % 3 == 1 { post(at) } else { get(at) }).collect();
    for (what, pieces) in [("at once", vec![requests.concat()]), ("one after the other", requests.clone())] {
        let before = origin.requests().len();
        let mut wire = world.open_tunnel("a.test", origin.port());
        pieces.iter().for_each(|piece| wire.send(piece));
        for at in 0..12 {
            let answer = wire.read_response("GET").unwrap_or_else(|| panic!("{what}: no answer to {at}"));
            let said = if at % 3 == 1 { format!("POST /{at} abc") } else { format!("GET /{at} ") };
            assert_eq!((answer.status, answer.text()), (200, said), "{what}");
        }
        let seen = targets(&origin).split_off(before);
        assert_eq!(seen, (0..12).map(|at| format!("/{at}")).collect::<Vec<_>>(), "{what}");
    }
    assert_eq!(origin.faults(), [""; 0]);
    for at in 0..12 {
        let path = format!("/{at}");
        let ended = |record: &Value| {
            record["http_request"]["url"]["path"] == *path && record["http_response"]["code"] == 200
        };
        world.wait_for_record(since, &path, ended);
    }
}

#[test]
fn one_to_a_denied_host_is_refused_between_two_that_are_not() {
    let (world, origin, denied) = start_scene();
    let (here, there) = (format!("a.test:{}", origin.port()), format!("denied.test:{}", denied.port()));
    let get = |host: &str, path: &str| format!("GET http://{host}{path} HTTP/1.1\r\nHost: {host}\r\n\r\n");
    let mut wire = world.connect();
    wire.send([get(&here, "/1"), get(&there, "/2"), get(&here, "/3")].concat());
    assert_eq!(wire.read_response("GET").map(|answer| answer.text()), Some("GET /1 ".into()));
    world.assert_refused("the second", &wire.read_response("GET").unwrap(), 403, "not_listed");
    assert_eq!(wire.read_response("GET").map(|answer| answer.text()), Some("GET /3 ".into()));
    // Inside a tunnel it cannot be another host's, either.
    let mut wire = world.open_tunnel("a.test", origin.port());
    wire.send(format!("GET /4 HTTP/1.1\r\nHost: {here}\r\n\r\nGET /5 HTTP/1.1\r\nHost: {there}\r\n\r\n"));
    assert_eq!(wire.read_response("GET").map(|answer| answer.text()), Some("GET /4 ".into()));
    world.assert_refused("the fifth", &wire.read_response("GET").unwrap(), 403, "names_disagree");
    assert_eq!(targets(&origin), ["/1", "/3", "/4"]);
    assert_eq!(denied.connections().len(), 0, "something reached the denied host");
}

#[test]
fn what_follows_a_body_is_read_as_strictly_as_what_comes_first() {
    let (world, origin, _) = start_scene();
    let host = format!("a.test:{}", origin.port());
    let measured = format!("POST /first HTTP/1.1\r\nHost: {host}\r\nContent-Length: 3\r\n\r\nabc");
    let chunked = format!(
        "POST /first HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    );
    for (what, behind) in [
        ("bare line feeds", format!("GET /second HTTP/1.1\nHost: {host}\n\n")),
        ("a bare line feed", format!("\nGET /second HTTP/1.1\r\nHost: {host}\r\n\r\n")),
        ("two empty lines", format!("\r\n\r\nGET /second HTTP/1.1\r\nHost: {host}\r\n\r\n")),
        ("another chunk", "3\r\nabc\r\n0\r\n\r\n".to_owned()),
        ("a longer body", format!("xyzGET /second HTTP/1.1\r\nX: y\r\nX: {host}\r\n\r\n")),
        (
            "two lengths",
            format!(
                "POST /second HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nContent-Length: 9\r\n\r\n"
            ),
        ),
        ("CONNECT", format!("CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n")),
    ] {
        for first in [&measured, &chunked] {
            let before = origin.requests().len();
            let mut wire = world.open_tunnel("a.test", origin.port());
            wire.send(format!("{first}{behind}"));
            let answer = wire.read_response("POST").unwrap_or_else(|| panic!("{what}: no answer"));
            assert_eq!((answer.status, answer.text()), (200, "POST /first abc".into()), "{what}");
            let answer = wire.read_response("GET").unwrap_or_else(|| panic!("{what}: no refusal"));
            world.assert_refused(what, &answer, 400, "bad_request");
            assert_eq!(wire.read_to_end(), b"", "{what}: the connection ends");
            assert_eq!(targets(&origin).split_off(before), ["/first"], "{what}");
        }
    }
    for first in [&measured, &chunked] {
        let mut wire = world.open_tunnel("a.test", origin.port());
        wire.send(format!("{first}\r\nGET /second HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        assert_eq!(wire.read_response("POST").map(|answer| answer.status), Some(200));
        let second = wire.read_response("GET").map(|answer| answer.text());
        assert_eq!(second, Some("GET /second ".into()), "one empty line is ignored");
    }
}

#[test]
fn one_behind_the_last_request_of_a_connection_is_refused_in_the_log() {
    let (world, origin, _) = start_scene();
    let host = format!("a.test:{}", origin.port());
    let since = world.record_count();
    let mut wire = world.open_tunnel("a.test", origin.port());
    wire.send(format!(
        "GET /last HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\nGET /behind HTTP/1.1\r\nHost: {host}\r\n\r\n"
    ));
    assert_eq!(wire.read_response("GET").map(|answer| answer.text()), Some("GET /last ".into()));
    assert_eq!(wire.read_to_end(), b"");
    let record =
        world.wait_for_record(since, "the refusal", |record| record["status_detail"] == "connection_closing");
    assert_eq!((&record["action_id"], &record["dst_endpoint"]["hostname"]), (&2.into(), &"a.test".into()));
    assert_eq!(targets(&origin), ["/last"]);
}
