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
