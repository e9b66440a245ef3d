//! The names of the world: one zone over UDP, in which everybody who would like to be reached has an address.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{RData, Record, RecordType};
use tokio::net::UdpSocket;

use super::{ObservedTraffic, lookup_host};

/// Largest query that is read.
const MAX_QUERY: usize = 1232;

/// Answers every query, and writes down what was asked for.
pub(super) async fn serve(socket: UdpSocket, seen: Arc<ObservedTraffic>) {
    let mut buffer = [0; MAX_QUERY];
    loop {
        let Ok((length, from)) = socket.recv_from(&mut buffer).await else { return };
        let query = buffer.get(..length).unwrap_or_default();
        if let Some(bytes) = answer_query(query, &seen) {
            drop(socket.send_to(&bytes, from).await); // whoever asked asks again
        }
    }
}

fn answer_query(query: &[u8], seen: &ObservedTraffic) -> Option<Vec<u8>> {
    let query = Message::from_vec(query).ok()?;
    let question = query.queries.first()?.clone();
    // The case of the letters is the resolver's own.
    let name = question.name().to_ascii().trim_end_matches('.').to_ascii_lowercase();
    let found = lookup_host(&name, seen.rebound.load(Ordering::Relaxed));
    let wanted = question.query_type() == RecordType::A;
    seen.queries().push(name);
    let mut message = Message::response(query.metadata.id, query.metadata.op_code);
    message.metadata.recursion_desired = query.metadata.recursion_desired;
    message.metadata.recursion_available = true;
    if found.is_none() {
        message.metadata.response_code = ResponseCode::NXDomain;
    }
    let named = question.name().clone();
    message.add_query(question);
    if let Some(address) = found.filter(|_| wanted) {
        message.add_answer(a_record(named, address));
    }
    message.to_vec().ok()
}

/// Good for no time at all, as those who rebind have it.
fn a_record(name: hickory_proto::rr::Name, address: Ipv4Addr) -> Record {
    Record::from_rdata(name, 0, RData::A(A(address)))
}
