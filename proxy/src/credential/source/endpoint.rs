//! The client for token endpoints: HTTPS with verified certificates (or HTTP to this machine), no redirects, and answers
//! within bounds.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ::http::header::{ACCEPT, CONTENT_TYPE, HOST, USER_AGENT};
use ::http::{HeaderValue, Method, Request, Uri};
use bytes::Bytes;
use certs::{HostName, TrustSource, TrustStore};
use dns_filter::own::OwnResolver;
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rules::DomainName;
use serde_json::Value;
use socket2::SockRef;
use sys::worker::{JobLost, Worker};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::OnceCell;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use zeroize::Zeroizing;

use crate::credential::error::{CredentialError, EndpointFault, printable};
use crate::credential::scrub::EchoPatterns;

/// Longest answer of an endpoint, and longest head.
pub(in crate::credential) const ANSWER: usize = 64 << 10;
/// Most addresses of a host that are tried, one after the other.
pub(in crate::credential) const MAX_ADDRESSES: usize = 4;
/// How long one address may take to accept a connection.
pub(in crate::credential) const CONNECT: Duration = Duration::from_secs(3);
/// Name of the thread that reads the root certificates.
const ROOTS: &str = "credential-roots";

/// Where a source asks for its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    host: HostName,
    port: u16,
    tls: bool,
    /// `Host` of a request.
    authority: String,
    path: String,
}

/// What to send to an endpoint.
pub(super) struct EndpointRequest<'a> {
    pub(super) method: Method,
    pub(super) fields: Vec<(&'static str, Zeroizing<String>)>,
    pub(super) kind: &'static str,
    pub(super) body: Zeroizing<String>,
    /// The secrets in it, which the words of an answer must not contain.
    pub(super) secrets: Vec<&'a str>,
}

/// Asks token endpoints.
#[derive(Clone)]
pub(crate) struct TokenClient(Arc<ClientParts>);

struct ClientParts {
    resolver: Option<OwnResolver>,
    trust: TrustSource,
    /// The firewall mark of Sandbar's own connections.
    mark: Option<u32>,
    loaded: OnceCell<Arc<rustls::ClientConfig>>,
}

impl Endpoint {
    /// Parses an URL with `https`, or with `http` for this machine.
    pub(super) fn parse(url: &str) -> Result<Self, CredentialError> {
        let refused = |why: &str| CredentialError::Endpoint {
            host: printable(url.split(['?', '#']).next().unwrap_or_default()),
            fault: EndpointFault::Answer(why.to_owned()),
        };
        let uri: Uri = url.parse().map_err(|_| refused("it is not an URL"))?;
        let authority = uri.authority().ok_or_else(|| refused("it has no host"))?;
        if authority.as_str().contains('@') {
            return Err(refused("an URL of an endpoint has no user"));
        }
        let host = HostName::parse(authority.host()).map_err(|_| refused("its host is not a name"))?;
        let local =
            host.as_str() == "localhost" || host.address().is_some_and(|address| address.is_loopback());
        let tls = match uri.scheme_str() {
            Some("https") => true,
            Some("http") if local => false,
            _ => return Err(refused("write https://, because keys are sent there")),
        };
        let port = authority.port_u16().unwrap_or(if tls { 443 } else { 80 });
        let path = uri.path_and_query().map_or_else(|| "/".to_owned(), ToString::to_string);
        Ok(Endpoint { host, port, tls, authority: authority.to_string(), path })
    }

    /// The same endpoint with another path.
    pub(super) fn with_path(&self, path: String) -> Self {
        Endpoint { path, ..self.clone() }
    }

    /// The path of its URL, without the slash at its end.
    pub(super) fn base_path(&self) -> &str {
        self.path.trim_end_matches('/')
    }

    pub(super) fn fault(&self, fault: EndpointFault) -> CredentialError {
        CredentialError::Endpoint { host: self.authority.clone(), fault }
    }

    /// The answer was not understood.
    pub(super) fn malformed(&self, why: &str) -> CredentialError {
        self.fault(EndpointFault::Answer(why.to_owned()))
    }
}

impl TokenClient {
    pub(crate) fn new(resolver: Option<OwnResolver>, trust: TrustSource, mark: Option<u32>) -> Self {
        TokenClient(Arc::new(ClientParts { resolver, trust, mark, loaded: OnceCell::new() }))
    }

    /// Sends a request and returns the body of a successful answer.
    ///
    /// # Errors
    ///
    /// Fails for any other status, with what the endpoint says about it.
    pub(super) async fn send(
        &self,
        endpoint: &Endpoint,
        request: EndpointRequest<'_>,
    ) -> Result<Zeroizing<Vec<u8>>, CredentialError> {
        let EndpointRequest { method, fields, kind, body, secrets } = request;
        let protocol = |error: &dyn std::fmt::Display| {
            endpoint.fault(EndpointFault::Protocol(printable(&error.to_string())))
        };
        let mut head = Request::builder()
            .method(method)
            .uri(&endpoint.path)
            .header(HOST, &endpoint.authority)
            .header(USER_AGENT, concat!("sandbar/", env!("CARGO_PKG_VERSION")))
            .header(ACCEPT, "application/json")
            .header(CONTENT_TYPE, kind);
        for (name, value) in fields {
            let mut value = HeaderValue::from_str(&value).map_err(|error| protocol(&error))?;
            value.set_sensitive(true);
            if name.eq_ignore_ascii_case("accept") {
                head.headers_mut().and_then(|fields| fields.remove(ACCEPT));
            }
            head = head.header(name, value);
        }
        let body = Bytes::from_owner(Zeroizing::new(body.as_bytes().to_vec()));
        let request = head.body(Full::new(body)).map_err(|error| protocol(&error))?;
        let (status, answer) = match endpoint.tls {
            true => {
                let stream = self.connect(endpoint).await?;
                let config = self.tls_config().await.map_err(|fault| endpoint.fault(fault))?;
                let name = endpoint.host.server_name().clone();
                let stream = TlsConnector::from(config).connect(name, stream).await;
                let stream = stream
                    .map_err(|error| endpoint.fault(EndpointFault::Tls(printable(&error.to_string()))))?;
                exchange(endpoint, stream, request).await?
            }
            false => exchange(endpoint, self.connect(endpoint).await?, request).await?,
        };
        match (200..300).contains(&status) {
            true => Ok(answer),
            false => {
                let said = describe_error(&answer, &secrets);
                Err(endpoint.fault(EndpointFault::Status { status, said }))
            }
        }
    }

    async fn connect(&self, endpoint: &Endpoint) -> Result<TcpStream, CredentialError> {
        let addresses = self.resolve(endpoint).await.map_err(|fault| endpoint.fault(fault))?;
        let mut last = "it has no address".to_owned();
        for address in addresses.into_iter().take(MAX_ADDRESSES) {
            match timeout(CONNECT, self.dial(SocketAddr::new(address, endpoint.port))).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(error)) => last = error.to_string(),
                Err(_) => last = format!("{address} does not answer within {} s", CONNECT.as_secs()),
            }
        }
        Err(endpoint.fault(EndpointFault::Connect(last)))
    }

    async fn dial(&self, address: SocketAddr) -> std::io::Result<TcpStream> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        self.0.mark.map_or(Ok(()), |mark| SockRef::from(&socket).set_mark(mark))?;
        socket.connect(address).await
    }

    async fn resolve(&self, endpoint: &Endpoint) -> Result<Vec<IpAddr>, EndpointFault> {
        if let Some(address) = endpoint.host.address() {
            return Ok(vec![address]);
        }
        let name = endpoint.host.as_str();
        if name == "localhost" {
            return Ok(vec![Ipv4Addr::LOCALHOST.into()]);
        }
        match &self.0.resolver {
            Some(resolver) => {
                let name =
                    DomainName::parse(name).map_err(|error| EndpointFault::Resolve(error.to_string()))?;
                resolver.resolve(&name).await.map_err(|error| EndpointFault::Resolve(error.to_string()))
            }
            None => {
                let found = tokio::net::lookup_host((name, endpoint.port)).await;
                let found = found.map_err(|error| EndpointFault::Resolve(error.to_string()))?;
                Ok(found.map(|address| address.ip()).collect())
            }
        }
    }

    /// Loads the root certificates with the first request: an instance without sources needs none.
    async fn tls_config(&self) -> Result<Arc<rustls::ClientConfig>, EndpointFault> {
        let load = || async {
            let trust = self.0.trust.clone();
            let worker = Worker::start(ROOTS).map_err(|error| EndpointFault::Roots(error.to_string()))?;
            let loaded = worker.run(move || load_config(trust)).await;
            loaded
                .unwrap_or_else(|JobLost| Err("the thread that reads them failed".to_owned()))
                .map_err(EndpointFault::Roots)
        };
        self.0.loaded.get_or_try_init(load).await.cloned()
    }
}

fn load_config(trust: TrustSource) -> Result<Arc<rustls::ClientConfig>, String> {
    let store = TrustStore::load(trust).map_err(|error| error.to_string())?;
    let any_host = HostName::parse("roots.invalid").map_err(|error| error.to_string())?;
    let mut config = rustls::ClientConfig::clone(&store.peer_for(any_host).client_config());
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// Sends a request on a new connection and reads the answer within bounds.
async fn exchange(
    endpoint: &Endpoint,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
) -> Result<(u16, Zeroizing<Vec<u8>>), CredentialError> {
    let broken = |error: hyper::Error| endpoint.fault(EndpointFault::Protocol(printable(&error.to_string())));
    let mut builder = http1::Builder::new();
    builder.max_buf_size(ANSWER);
    let (mut sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(broken)?;
    let mut tasks = JoinSet::new(); // ends the connection with this function
    tasks.spawn(connection);
    let answer = sender.send_request(request).await.map_err(broken)?;
    let status = answer.status().as_u16();
    let body = Limited::new(answer.into_body(), ANSWER).collect().await;
    let body = body.map_err(|error| {
        endpoint.fault(match error.downcast_ref::<http_body_util::LengthLimitError>() {
            Some(_) => EndpointFault::Long(ANSWER),
            None => EndpointFault::Protocol(printable(&error.to_string())),
        })
    })?;
    Ok((status, Zeroizing::new(body.to_bytes().to_vec())))
}

/// Finds what an answer says went wrong: the members of RFC 6749 (section 5.2), `message` as GitHub has it, or the
/// elements of STS. What was sent is masked: a server may repeat it.
fn describe_error(answer: &[u8], secrets: &[&str]) -> String {
    let text = String::from_utf8_lossy(answer);
    let said = match serde_json::from_str::<Value>(&text) {
        Ok(value) => {
            let at = |pointer: &str| value.pointer(pointer).and_then(Value::as_str);
            let code = at("/error").or_else(|| at("/error/status")).or_else(|| at("/error/code"));
            let message =
                at("/error_description").or_else(|| at("/error/message")).or_else(|| at("/message"));
            [code, message].into_iter().flatten().collect::<Vec<_>>().join(": ")
        }
        Err(_) => {
            let parts = ["Code", "Message"].into_iter().filter_map(|name| element(&text, name));
            parts.collect::<Vec<_>>().join(": ")
        }
    };
    let mut said = said.into_bytes();
    for secret in secrets.iter().filter(|secret| !secret.is_empty()) {
        EchoPatterns::new([("secret", secret)]).mask(&mut said);
    }
    printable(&String::from_utf8_lossy(&said))
}

/// Returns the text of the first element of this name.
pub(super) fn element<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, after) = text.split_once(&format!("<{name}>"))?;
    let (inside, _) = after.split_once(&format!("</{name}>"))?;
    Some(inside.trim())
}

/// Encodes fields as `application/x-www-form-urlencoded`.
pub(super) fn form<'a>(fields: impl IntoIterator<Item = (&'a str, &'a str)>) -> Zeroizing<String> {
    let mut text = Zeroizing::new(String::with_capacity(4096)); // no copies while it grows
    for (name, value) in fields {
        if !text.is_empty() {
            text.push('&');
        }
        encode_into(&mut text, name);
        text.push('=');
        encode_into(&mut text, value);
    }
    text
}

pub(super) fn encode_into(text: &mut String, value: &str) {
    for byte in value.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                text.push(char::from(byte))
            }
            _ => text.push_str(&format!("%{byte:02X}")),
        }
    }
}

/// Kind of a body that [`form`] makes.
pub(super) const FORM: &str = "application/x-www-form-urlencoded";

/// What the configuration says about root certificates.
pub(crate) fn trust_source(
    settings: &rules::configuration::UpstreamSettings,
    base: &std::path::Path,
) -> TrustSource {
    use certs::trust::SystemStore;
    use rules::configuration::SystemRootsSetting;
    let system = match settings.system_roots {
        SystemRootsSetting::Trusted => SystemStore::Included,
        SystemRootsSetting::Ignored => SystemStore::Excluded,
    };
    let files: Vec<PathBuf> = settings.roots.iter().map(|root| base.join(root)).collect();
    TrustSource { system, files, client: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_https_or_on_this_machine() {
        for (url, good) in [
            ("https://login.example.com/token", true),
            ("https://login.example.com", true),
            ("https://login.example.com:8443/a/b?c=d", true),
            ("https://127.0.0.1:1/", true),
            ("http://127.0.0.1:8080/token", true),
            ("http://[::1]:8080/token", true),
            ("http://localhost/token", true),
            ("http://login.example.com/token", false),
            ("http://127.0.0.1.evil.test/token", false),
            ("http://localhost.evil.test/token", false),
            ("https://user:pass@login.example.com/", false),
            ("ftp://127.0.0.1/", false),
            ("login.example.com/token", false),
            ("/token", false),
            ("", false),
        ] {
            assert_eq!(Endpoint::parse(url).is_ok(), good, "{url}");
        }
        let endpoint = Endpoint::parse("https://login.example.com:8443/a/?c=d").unwrap();
        assert_eq!((endpoint.port, endpoint.authority.as_str()), (8443, "login.example.com:8443"));
    }

    #[test]
    fn p11_what_a_server_says_is_shown_without_the_secrets_it_repeats() {
        let secret = "s3cr3t-of-the-client/0123";
        for (answer, shown) in [
            (
                r#"{"error":"invalid_grant","error_description":"the token has been revoked"}"#.to_owned(),
                "invalid_grant: the token has been revoked",
            ),
            (r#"{"message":"Bad credentials"}"#.to_owned(), "Bad credentials"),
            (r#"{"error":{"status":"UNAUTHENTICATED","message":"no"}}"#.to_owned(), "UNAUTHENTICATED: no"),
            (
                "<Error><Code>AccessDenied</Code><Message>Not you</Message></Error>".to_owned(),
                "AccessDenied: Not you",
            ),
            ("<html>".to_owned(), ""),
            ("{\"error\":\"a\\u001b[2Jb\\nsecond line\"}".to_owned(), "a?[2Jb"),
        ] {
            assert_eq!(describe_error(answer.as_bytes(), &[secret]), shown);
        }
        let encoded = secret.replace('/', "%2F");
        for repeated in [secret, encoded.as_str()] {
            let answer = format!(r#"{{"error":"bad","error_description":"secret {repeated} is wrong"}}"#);
            let shown = describe_error(answer.as_bytes(), &[secret]);
            assert!(shown.starts_with("bad: secret ") && !shown.contains("0123"), "{shown}");
        }
        let long = format!(r#"{{"error":"{}"}}"#, "x".repeat(10_000));
        assert_eq!(describe_error(long.as_bytes(), &[]).len(), 200);
    }

    #[test]
    fn a_form_is_encoded() {
        let text = form([("grant_type", "refresh_token"), ("scope", "a b&c=ü"), ("e", "")]);
        assert_eq!(*text, "grant_type=refresh_token&scope=a%20b%26c%3D%C3%BC&e=");
    }
}
