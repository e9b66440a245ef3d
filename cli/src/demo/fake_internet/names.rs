//! The resolver of the fake internet: answers for every host over UDP and records the queries.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{RData, Record, RecordType};
use tokio::net::UdpSocket;

use super::{ObservedTraffic, lookup_host};

/// Largest accepted query.
const MAX_QUERY: usize = 1232;

/// Answers every query and records its name.
pub(super) async fn serve(socket: UdpSocket, observed: Arc<ObservedTraffic>) {
    let mut buffer = [0; MAX_QUERY];
    loop {
        let Ok((length, from)) = socket.recv_from(&mut buffer).await else { return };
        let query = buffer.get(..length).unwrap_or_default();
        if let Some(bytes) = answer_query(query, &observed) {
            drop(socket.send_to(&bytes, from).await); // the client retries
        }
    }
}

fn answer_query(query: &[u8], observed: &ObservedTraffic) -> Option<Vec<u8>> {
    let query = Message::from_vec(query).ok()?;
    let question = query.queries.first()?.clone();
    // Resolvers randomise the case of the name (0x20 encoding).
    let name = question.name().to_ascii().trim_end_matches('.').to_ascii_lowercase();
    let address = lookup_host(&name, observed.rebound.load(Ordering::Relaxed));
    let wanted = question.query_type() == RecordType::A;
    observed.queries().push(name);
    let mut message = Message::response(query.metadata.id, query.metadata.op_code);
    message.metadata.recursion_desired = query.metadata.recursion_desired;
    message.metadata.recursion_available = true;
    if address.is_none() {
        message.metadata.response_code = ResponseCode::NXDomain;
    }
    let named = question.name().clone();
    message.add_query(question);
    if let Some(address) = address.filter(|_| wanted) {
        message.add_answer(a_record(named, address));
    }
    message.to_vec().ok()
}

/// An answer with TTL 0, as rebinding attacks use.
fn a_record(name: hickory_proto::rr::Name, address: Ipv4Addr) -> Record {
    Record::from_rdata(name, 0, RData::A(A(address)))
}
