//! The cost of key operations: `cargo bench -p certs`.
#![allow(clippy::unwrap_used, reason = "a bench stops on failure")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use certs::identity::{
    IssueRequest, IssuerOptions, LocalIssuer, SigningAlgorithm, SigningKey, Subject, TrustDomain, Verifier,
    VerifyContext,
};
use certs::service_token::{ServiceClaims, ServiceProfile, ServiceTokens};
use certs::{AuthorityOptions, CertificateAuthority, HostName, LeafCache, UnixTime};
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};

const NOW: u64 = 1_800_000_000;

fn now() -> UnixTime {
    UnixTime::since_unix_epoch(Duration::from_secs(NOW))
}

fn bench_leaves(criterion: &mut Criterion) {
    let authority = Arc::new(CertificateAuthority::in_memory(&AuthorityOptions::default(), now()).unwrap());
    let cache = LeafCache::new(authority).unwrap();
    let known = HostName::parse("api.openai.com").unwrap();
    cache.leaf(&known, now()).unwrap();
    criterion.bench_function("leaf, cached", |bencher| {
        bencher.iter(|| cache.leaf(black_box(&known), now()).unwrap())
    });
    let mut count = 0u64;
    let mut fresh = || {
        count += 1;
        HostName::parse(&format!("h{count}.flood.example")).unwrap()
    };
    criterion.bench_function("leaf, minted", |bencher| {
        bencher.iter_batched(&mut fresh, |host| cache.leaf(&host, now()).unwrap(), BatchSize::SmallInput);
    });
}

fn request<'a>() -> IssueRequest<'a> {
    let life = Duration::from_secs(300);
    IssueRequest {
        tenant: "acme",
        environment: "staging",
        sandbox: "build-7",
        audience: "memory",
        life,
        generation: Some(1),
    }
}

fn bench_identities(criterion: &mut Criterion) {
    for algorithm in [SigningAlgorithm::Es256, SigningAlgorithm::EdDsa, SigningAlgorithm::Rs256] {
        let dir = tempfile::tempdir().unwrap();
        let trust_domain = TrustDomain::parse("acme.example").unwrap();
        let options = IssuerOptions {
            issuer: "https://issuer.acme.example".to_owned(),
            trust_domain,
            environments: None,
            algorithm,
        };
        let issuer = LocalIssuer::init(dir.path(), &options, now()).unwrap();
        let verifier = Verifier::new(vec![issuer.trusted_issuer().unwrap()], None, now()).unwrap();
        let expected = VerifyContext::for_audience("memory");
        let issue = || issuer.issue(&request(), now()).unwrap();
        let (name, token) = (algorithm.name(), issue());
        verifier.verify(token.expose(), &expected, now()).unwrap();
        criterion.bench_function(&format!("verify {name}, cached"), |bencher| {
            bencher.iter(|| verifier.verify(black_box(token.expose()), &expected, now()).unwrap());
        });
        criterion.bench_function(&format!("verify {name}, new token"), |bencher| {
            bencher.iter_batched(
                issue,
                |token| verifier.verify(token.expose(), &expected, now()).unwrap(),
                BatchSize::SmallInput,
            );
        });
    }
}

/// The cost of refusing a bad token, as in a flood of them.
fn bench_refusals(criterion: &mut Criterion) {
    let dir = tempfile::tempdir().unwrap();
    let trust_domain = TrustDomain::parse("acme.example").unwrap();
    let options = IssuerOptions {
        issuer: "i".to_owned(),
        trust_domain,
        environments: None,
        algorithm: SigningAlgorithm::Es256,
    };
    let issuer = LocalIssuer::init(dir.path(), &options, now()).unwrap();
    let verifier = Verifier::new(vec![issuer.trusted_issuer().unwrap()], None, now()).unwrap();
    let [token, other] = [(); 2].map(|()| issuer.issue(&request(), now()).unwrap().expose().to_owned());
    let (message, signature) = (token.rsplit_once('.').unwrap().0, other.rsplit_once('.').unwrap().1);
    let forged = format!("{message}.{signature}");
    for (what, token, audience) in [
        ("refuse, wrong audience", &token, "other"),
        ("refuse, wrong signature", &forged, "memory"),
        ("refuse, too large", &"a".repeat(8192), "memory"),
    ] {
        criterion.bench_function(what, |bencher| {
            bencher.iter(|| {
                verifier.verify(black_box(token), &VerifyContext::for_audience(audience), now()).unwrap_err()
            });
        });
    }
}

fn bench_service(criterion: &mut Criterion) {
    let subject = Subject::new("acme.example", "acme", "staging", "build-7").unwrap();
    let banks = ["staging:team-a".to_owned()];
    let claims = ServiceClaims { subject: &subject, audience: "memory", banks: &banks, certificate: None };
    let key = SigningKey::generate(SigningAlgorithm::Es256).unwrap();
    let tokens =
        ServiceTokens::new(key, "sandbar", ServiceProfile::Generic, Duration::from_secs(60)).unwrap();
    criterion.bench_function("service token, cached", |bencher| {
        bencher.iter(|| tokens.token(black_box(&claims), now()).unwrap());
    });
    let mut seconds = NOW;
    criterion.bench_function("service token, signed", |bencher| {
        bencher.iter(|| {
            seconds += 30; // half the lifetime: never from the cache
            tokens.token(&claims, UnixTime::since_unix_epoch(Duration::from_secs(seconds))).unwrap()
        });
    });
}

criterion_group!(benches, bench_leaves, bench_identities, bench_refusals, bench_service);
criterion_main!(benches);
