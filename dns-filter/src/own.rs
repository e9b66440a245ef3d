//! Sandbar's own look-ups, such as that of a token endpoint: the operator named the host, so no policy decides and no
//! sandbox is charged. They ask the same resolvers as everything else.

use std::collections::HashMap;
use std::net::IpAddr;

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RData;
use rules::DomainName;
use rules::configuration::DnsSettings;
use rules::facts::QueryType;

use crate::upstream::{ResolverPool, UpstreamError};

/// Most addresses of one name that are returned.
const MAX_ADDRESSES: usize = 8;

/// Resolves the names that Sandbar itself needs.
pub struct OwnResolver {
    pool: ResolverPool,
    hosts: HashMap<DomainName, Vec<IpAddr>>,
}

/// Why a name has no address.
#[derive(Clone, Debug, thiserror::Error)]
pub enum OwnLookupError {
    #[error("it has no address")]
    NoAddress,
    #[error("the resolver answers {0}")]
    Refused(ResponseCode),
    #[error(transparent)]
    Upstream(#[from] UpstreamError),
}

impl OwnResolver {
    pub fn new(settings: &DnsSettings) -> Self {
        let hosts = settings.hosts.iter().map(|host| (host.name.clone(), host.addresses.clone())).collect();
        OwnResolver { pool: ResolverPool::new(settings), hosts }
    }

    /// Returns the addresses of a name, IPv4 first.
    ///
    /// # Errors
    ///
    /// Returns [`OwnLookupError`] if the name has none or no resolver answers.
    pub async fn resolve(&self, name: &DomainName) -> Result<Vec<IpAddr>, OwnLookupError> {
        if let Some(addresses) = self.hosts.get(name).filter(|addresses| !addresses.is_empty()) {
            return Ok(addresses.clone());
        }
        let (v4, v6) = tokio::join!(self.ask(name, QueryType::A), self.ask(name, QueryType::AAAA));
        let mut found: Vec<IpAddr> = [&v4, &v6].into_iter().flatten().flatten().copied().collect();
        found.truncate(MAX_ADDRESSES);
        match found.is_empty() {
            false => Ok(found),
            true => Err(v4.err().or(v6.err()).unwrap_or(OwnLookupError::NoAddress)),
        }
    }

    async fn ask(&self, name: &DomainName, kind: QueryType) -> Result<Vec<IpAddr>, OwnLookupError> {
        let answer = self.pool.ask_with_retries(name, kind).await?.message;
        match answer.metadata.response_code {
            ResponseCode::NoError => {}
            code => return Err(OwnLookupError::Refused(code)),
        }
        let address = |data: &RData| match data {
            RData::A(address) => Some(IpAddr::V4(address.0)),
            RData::AAAA(address) => Some(IpAddr::V6(address.0)),
            _ => None, // the names in between, and signatures
        };
        Ok(answer.answers.iter().filter_map(|record| address(&record.data)).take(MAX_ADDRESSES).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use rules::configuration::HostEntry;
    use tokio::net::UdpSocket;

    use super::*;

    /// A resolver that answers queries for addresses of IPv4 with a canonical name and its address, those for IPv6 with
    /// nothing, and those for `none.example` with NXDOMAIN.
    async fn start_resolver() -> SocketAddr {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        tokio::spawn(async move {
            let mut query = [0; 1500];
            while let Ok((length, client)) = socket.recv_from(&mut query).await {
                let name = query.get(12..length).unwrap();
                let end = 12 + name.iter().position(|byte| *byte == 0).unwrap() + 5;
                let (question, kind) = (query.get(12..end).unwrap(), query[end - 3]);
                let missing = question.get(..5).unwrap().eq_ignore_ascii_case(b"\x04none");
                // CNAME `a` of the name asked for, and the address of that.
                let alias = [&[0xc0, 12, 0, 5, 0, 1, 0, 0, 0, 60, 0, 4, 1, b'a', 0xc0, 12][..]].concat();
                let target = 12 + question.len() as u8 + 12;
                let address = [0xc0, target, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 7];
                let (count, answers) =
                    if kind == 1 && !missing { (2, [alias, address.to_vec()].concat()) } else { (0, vec![]) };
                let code = if missing { 0x83 } else { 0x80 };
                let head = [&query[..2], &[0x81, code, 0, 1, 0, count, 0, 0, 0, 0]].concat();
                socket.send_to(&[&head, question, &answers].concat(), client).await.unwrap();
            }
        });
        address
    }

    #[tokio::test]
    async fn names_of_our_own_are_asked_of_the_configured_resolvers() {
        let mut settings = DnsSettings::new(vec![start_resolver().await]);
        let name = |text: &str| DomainName::parse(text).unwrap();
        let addresses = vec!["10.0.0.1".parse().unwrap()];
        settings.hosts.push(HostEntry { name: name("fixed.example"), addresses: addresses.clone() });
        let resolver = OwnResolver::new(&settings);
        assert_eq!(resolver.resolve(&name("fixed.example")).await.unwrap(), addresses);
        let found = resolver.resolve(&name("login.example")).await.unwrap();
        assert_eq!(found, ["192.0.2.7".parse::<IpAddr>().unwrap()]);
        let refused = resolver.resolve(&name("none.example")).await.unwrap_err();
        assert!(matches!(refused, OwnLookupError::Refused(ResponseCode::NXDomain)), "{refused}");
    }
}
