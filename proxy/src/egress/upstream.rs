//! Whom Pingora connects to: an address that was admitted, under the name that was decided, verified as such.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::net::SocketAddr;
use std::sync::Arc;

use audit::Receipt;
use pingora_core::ErrorType;
use pingora_core::prelude::{Error, HttpPeer};
use pingora_core::protocols::ALPN;
use pingora_core::upstreams::peer::PeerOptions;
use rules::facts::{HttpVersion, UrlScheme};
use rules::{DialPermit, Host};

use crate::egress::dial::{connect_timeout, set_socket_options};
use crate::egress::shared::Shared;
use crate::http::RequestMonitor;

/// Streams at once on one connection towards an origin.
const MAX_H2_STREAMS: usize = 100;
/// A body up to so many bytes is sent before anybody loses patience with the answer.
const SMALL_BODY: u64 = 1 << 20;

/// How the request is to be spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UpstreamOptions {
    /// It asks to switch to WebSocket, which only HTTP/1 can.
    pub(crate) upgrade: bool,
    /// Bytes of body it announces; none if it does not say.
    pub(crate) body: Option<u64>,
}

/// The peer for the address `at` of those that may be dialled.
pub(crate) fn http_peer(
    shared: &Shared,
    exchange: &RequestMonitor,
    leave: &DialPermit,
    _receipt: &Receipt,
    at: usize,
    manner: UpstreamOptions,
) -> Option<Box<HttpPeer>> {
    let permit = leave.permit();
    let address = SocketAddr::new(*leave.addresses().get(at)?, permit.port()?);
    let tls = exchange.connection.scheme() == UrlScheme::Https;
    // An empty name would turn verification off: a host always has one.
    let name = match permit.host() {
        Host::Address(address) => address.to_string(),
        Host::Name(name) => name.as_str().to_owned(),
    };
    let mut peer = HttpPeer::new(address, tls, name);
    peer.group_key = pool_group(shared, exchange);
    peer.options = peer_options(shared, alpn(exchange, manner), manner);
    let patience = connect_timeout(leave, at, shared.limits.connect());
    peer.options.connection_timeout = Some(patience);
    peer.options.total_connection_timeout = Some(patience);
    Some(Box::new(peer))
}

fn alpn(exchange: &RequestMonitor, manner: UpstreamOptions) -> ALPN {
    match (exchange.connection.scheme(), exchange.version) {
        _ if manner.upgrade => ALPN::H1,
        (UrlScheme::Https, _) => ALPN::H2H1,
        (UrlScheme::Http, HttpVersion::Http1) => ALPN::H1,
        (UrlScheme::Http, HttpVersion::Http2) => ALPN::H2,
    }
}

fn peer_options(shared: &Shared, alpn: ALPN, manner: UpstreamOptions) -> PeerOptions {
    let limits = &shared.limits;
    let mut options = PeerOptions::new();
    options.alpn = alpn;
    options.verify_cert = true;
    options.verify_hostname = true;
    options.max_h2_streams = MAX_H2_STREAMS;
    options.write_timeout = Some(limits.idle());
    options.idle_timeout = Some(limits.keep_alive());
    let small = manner.body.is_some_and(|length| length <= SMALL_BODY) && !manner.upgrade;
    options.read_timeout = small.then(|| limits.first_byte().max(limits.idle()));
    let mark = shared.mark;
    options.upstream_tcp_sock_tweak_hook = Some(Arc::new(move |socket| {
        set_socket_options(socket, mark)
            .map_err(|error| Error::because(ErrorType::SocketError, "cannot set the mark", error))
    }));
    options
}

/// Connections are shared within a sandbox only: the pool's own key knows neither it nor our mark.
fn pool_group(shared: &Shared, exchange: &RequestMonitor) -> u64 {
    let mut hasher = DefaultHasher::new();
    exchange.connection.sandbox.id.as_str().hash(&mut hasher);
    shared.mark.hash(&mut hasher);
    hasher.finish()
}
