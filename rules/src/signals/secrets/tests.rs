//! Tests of the shapes and of the matcher.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;

/// One secret for each shape, put together so that no scanner takes this file for a leak.
pub(in crate::signals) fn samples() -> Vec<(&'static str, String)> {
    let id = ["AK", "IAQ3EGRTKX7PM2LZ5W"].concat();
    let github = "zQWBuTSOoRi4A9spHcVY5ncnsDkxkJ0mLq17";
    let varied = "Zq81LmPw02RtYxKdVb7NcJh4Gf9SaEu3QiOo6WrT5yXzMkHpLnBvCgDjFs8At1Ie2Ur0KwPx4ZmQ9JbYdNvRhTc7Gf";
    let hex = "3f9a0c7be1d24865af02c9d7e8b16430f5a1c2d3b4e6978801f2e3d4c5b6a798";
    let take = |length: usize| varied.get(..length).unwrap().to_owned();
    vec![
        (
            "age secret key",
            ["AGE-SECRET", "-KEY-194C3VS4HY6CYGQTZ0J5LHTPJ7HY9XRA3JQ7VFKCZYKR30YS6FZQSHPC8ZC"].concat(),
        ),
        ("Anthropic API key", ["sk-", "ant-api03-", &take(90), "AA"].concat()),
        ("AWS access key", id.clone()),
        ("AWS secret access key", ["aws_secret_access", "_key = ", &take(40)].concat()),
        ("Azure storage key", ["Account", "Key=", &take(86), "=="].concat()),
        ("Azure shared access key", ["SharedAccess", "Key=", &take(43), "="].concat()),
        ("connection string with a password", ["postgres:", "//app:", &take(12), "@db.internal/x"].concat()),
        ("Cargo registry token", ["ci", "o", &take(32)].concat()),
        ("DigitalOcean token", ["dop", "_v1_", hex].concat()),
        ("Docker access token", ["dckr", "_pat_", &take(27)].concat()),
        ("GitHub fine-grained token", ["github", "_pat_", &take(22), "_", &take(59)].concat()),
        ("GitHub token", ["gh", "p_", github].concat()),
        ("GitLab token", ["gl", "pat-", &take(20)].concat()),
        ("Google API key", ["AI", "za", &take(35)].concat()),
        ("Google OAuth client secret", ["GOC", "SPX-", &take(28)].concat()),
        ("Google OAuth token", ["ya", "29.", &take(60)].concat()),
        ("Hugging Face token", ["h", "f_", &take(34)].concat()),
        (
            "JSON web token",
            [
                "ey",
                "JhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJ1c2VyIjoiYWxpY2UiLCJyb2xlIjoiYWRtaW4ifQ.",
                &take(43),
            ]
            .concat(),
        ),
        ("npm token", ["np", "m_", github].concat()),
        ("OpenAI API key", ["sk-", "proj-", &take(74), "T3Blbk", "FJ", &take(74)].concat()),
        ("OpenRouter API key", ["sk-", "or-v1-", hex].concat()),
        (
            "OpenSSH private key",
            ["-----BEGIN OPENSSH", " PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQ"].concat(),
        ),
        ("private key (PEM)", ["-----BEGIN RSA", " PRIVATE KEY-----\n", &take(64), "\n"].concat()),
        ("PyPI token", ["pypi", "-AgEIcHlwaS5vcmcC", &take(80)].concat()),
        ("SendGrid API key", ["S", "G.", &take(22), ".", &take(43)].concat()),
        ("Slack app token", ["xa", "pp-1-A0123ABCDEF-1234567891234-", hex].concat()),
        ("Slack token", ["xo", "xb-2048123456-1029384756012-", &take(24)].concat()),
        ("Slack webhook", ["hooks.slack.com/", "services/T02AB3CD4/B05EF6GH7/", &take(24)].concat()),
        ("Stripe live key", ["sk_", "live_", &take(24)].concat()),
        ("Twilio API key", ["S", "K", hex.get(..32).unwrap()].concat()),
        ("Vault token", ["hv", "s.", &take(90)].concat()),
    ]
}

pub(in crate::signals) fn known() -> Arc<PatternSet> {
    Arc::new(PatternSet::compile(&SecretSettings::default()).unwrap())
}

fn find(matcher: &mut SecretMatcher, pieces: &[&[u8]]) -> Vec<String> {
    let mut found = Vec::new();
    for piece in pieces {
        matcher.feed(piece, &mut found);
        assert!(matcher.undecided() <= MAX_SECRET, "{}", matcher.undecided());
    }
    matcher.finish(&mut found);
    found.into_iter().map(|signal| signal.what).collect()
}

fn find_in(text: &str) -> Vec<String> {
    find(&mut SecretMatcher::new(known()), &[text.as_bytes()])
}

#[test]
fn every_shape_has_a_sample_and_is_found() {
    let samples = samples();
    assert_eq!(samples.len(), SHAPES.len());
    let mut matcher = SecretMatcher::new(known());
    for ((what, secret), shape) in samples.iter().zip(SHAPES) {
        assert_eq!(*what, shape.what);
        for (before, after) in [("", ""), ("key: \"", "\","), ("a=", "&b=1"), ("\n", "\n\n"), ("é", "é")] {
            let text = format!("{before}{secret}{after}");
            assert_eq!(find(&mut matcher, &[text.as_bytes()]), [*what], "{text}");
        }
    }
}

#[test]
fn bytes_one_at_a_time_find_the_same() {
    let mut matcher = SecretMatcher::new(known());
    for (what, secret) in samples() {
        let text = format!("some text {secret} more");
        let pieces: Vec<&[u8]> = text.as_bytes().chunks(1).collect();
        assert_eq!(find(&mut matcher, &pieces), [what], "{text}");
    }
}

#[test]
fn what_is_no_secret_is_not_found() {
    let github = "ghp_zQWBuTSOoRi4A9spHcVY5ncnsDkxkJ0mLq18";
    for text in [
        "AKIAIOSFODNN7EXAMPLE",
        "AKIAXXXXXXXXXXXXXXXX",
        "AKIAQ3EGRTKX7PM2LZ5",
        "AKIAQ3EGRTKX7PM2LZ5WA",
        "XAKIAQ3EGRTKX7PM2LZ5W",
        "AKIAQ3EGRTKX7PM2L15W",
        github,
        "npm_install_dependencies_and_then_some_more_text_here",
        "sk-learn is a library; task-list, risk-free",
        "sk_live_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
        "precioZq81LmPw02RtYxKdVb7NcJh4Gf9SaEu3Qi",
        "postgres://user:password@host/db",
        "postgres://user:${DB_PASSWORD}@host/db",
        "postgres://user:***@host/db",
        "postgres://user:<password>@host/db",
        "postgres://{user}:{password}@host/db",
        "redis://localhost:6379/0",
        "https://example.com:8080/a@b",
        "https://user@example.com/",
        "https://user:hunter7even@example.com/",
        "-----BEGIN CERTIFICATE-----\nMIIBIjANBgkqhkiG9w0BAQEFAAOCAQ8A",
        "-----BEGIN RSA PRIVATE KEY-----",
        "look for -----BEGIN PRIVATE KEY----- in your file",
        "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIiwibmFtZSI6IkpvaG4gRG9lIn0.abc",
        "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9",
        "eyJub3QiOiJhIGp3dCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIiwibmFtZSI6IkpvaG4gRG9lIn0.abc",
        "AGE-SECRET-KEY-194C3VS4HY6CYGQTZ0J5LHTPJ7HY9XRA3JQ7VFKCZYKR30YS6FZQSHPC8ZQ",
        "AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
        "SK3f9a0c7be1d24865af02c9d7e8b1643",
        "SG.short.value",
        "xoxo-love-and-kisses-from-all-of-us",
        "hf_transformers",
        "AIza",
    ] {
        assert_eq!(find_in(text), [""; 0], "{text}");
    }
}

#[test]
fn secret_is_found_near_its_access_key() {
    let secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzq81LmPw02";
    let id = ["AK", "IAQ3EGRTKX7PM2LZ5W"].concat();
    for (text, count) in [
        (format!("{id},{secret}\n"), 2),
        (format!("{id}\nregion = eu-west-1\nkey = {secret}"), 2),
        (format!("{id},{secret}a\n"), 1),
        (format!("{id}{}{secret}", " ".repeat(300)), 1),
        (secret.to_owned(), 0),
    ] {
        assert_eq!(find_in(&text).len(), count, "{text}");
    }
}

#[test]
fn values_and_own_patterns_are_found() {
    let value = |label: &str, bytes: &[u8]| ExactValue {
        label: label.to_owned(),
        code: SignalCode::CredentialLeaving,
        bytes: bytes.to_vec(),
    };
    let settings = SecretSettings {
        placeholders: false,
        known_shapes: true,
        own_patterns: vec![
            OwnPattern::parse("Acme token", "acme_[a-z0-9]{8,10}").unwrap(),
            OwnPattern::parse("code name", "Project Bluebird").unwrap(),
        ],
        exact_values: vec![value("upstream", b"t0p-Secret"), value("binary", &[0, 255, 1, 254, 2, 253, 3])],
    };
    let set = Arc::new(PatternSet::compile(&settings).unwrap());
    let mut matcher = SecretMatcher::new(set);
    for (text, expected) in [
        (&b"xt0p-Secretx"[..], &["upstream"][..]),
        (b"xt0p-secretx", &[]),
        (b"t0p-Secre", &[]),
        (&[9, 0, 255, 1, 254, 2, 253, 3], &["binary"]),
        (b"acme_12345678", &["Acme token"]),
        (b"acme_1234567", &[]),
        (b"acme_12345678901", &[]),
        (b"on Project Bluebird we", &["code name"]),
        (b"on project bluebird we", &[]),
    ] {
        assert_eq!(find(&mut matcher, &[text]), expected, "{text:?}");
    }
    assert!(!format!("{settings:?}").contains("t0p-Secret"), "debug output shows a value");
}

#[test]
fn settings_out_of_bounds_do_not_compile() {
    let value = |length| ExactValue {
        label: "v".to_owned(),
        code: SignalCode::CredentialLeaving,
        bytes: vec![b'a'; length],
    };
    let compile = |exact_values| {
        PatternSet::compile(&SecretSettings { exact_values, ..SecretSettings::default() }).err()
    };
    let length = |length| Some(PatternSetError::ExactLength { label: "v".to_owned(), length });
    assert_eq!(compile(vec![value(5)]), length(5));
    assert_eq!(compile(vec![value(4097)]), length(4097));
    assert_eq!(compile(vec![value(4096)]), None);
    assert_eq!(compile(vec![value(8); 1025]), Some(PatternSetError::TooManyValues(1025)));
}

#[test]
fn placeholders_are_found_where_they_are_looked_for() {
    let code = "abcdefghijklmnopqrstuvwxyz";
    for (text, found) in [
        (format!("sbxph{code}"), true),
        (format!("sk-sbxph{code}234"), true),
        (format!("SBXPH{}", code.to_uppercase()), true),
        (format!("xsbxphsbxph{code}"), true),
        ("sbxphabcdefghijklmnopqrstuvwxy".to_owned(), false),
        ("sbxphabcdefghijklm-opqrstuvwxyz".to_owned(), false),
        ("sbxph".to_owned(), false),
        (format!("sbxp{code}"), false),
    ] {
        for placeholders in [true, false] {
            let settings = SecretSettings { placeholders, known_shapes: false, ..SecretSettings::default() };
            let mut matcher = SecretMatcher::new(Arc::new(PatternSet::compile(&settings).unwrap()));
            let mut signals = Vec::new();
            text.as_bytes().chunks(3).for_each(|piece| matcher.feed(piece, &mut signals));
            matcher.finish(&mut signals);
            let codes: Vec<SignalCode> = signals.iter().map(|signal| signal.code).collect();
            let expected =
                if found && placeholders { vec![SignalCode::PlaceholderMisused] } else { Vec::new() };
            assert_eq!(codes, expected, "{text} {placeholders}");
        }
    }
}

#[test]
fn hundreds_of_values_use_another_search() {
    let exact_values: Vec<_> = (0..500)
        .map(|at| ExactValue {
            label: format!("v{at}"),
            code: SignalCode::CanaryUsed,
            bytes: format!("{at:03}-canary-value").into_bytes(),
        })
        .collect();
    let settings = SecretSettings { exact_values, ..SecretSettings::default() };
    let mut matcher = SecretMatcher::new(Arc::new(PatternSet::compile(&settings).unwrap()));
    assert_eq!(find(&mut matcher, &[b"x 417-can", b"ary-value y"]), ["v417"]);
}

proptest! {
    #[test]
    fn splitting_never_changes_the_findings(
        parts in prop::collection::vec((0..31_usize, "[ -~\n]{0,40}"), 0..6),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let samples = samples();
        let text: String =
            parts.iter().map(|(sample, filler)| format!("{filler}\n{}\n", samples[*sample].1)).collect();
        let mut places: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
        places.sort_unstable();
        let mut pieces = Vec::new();
        let mut from = 0;
        for place in places.into_iter().chain([text.len()]) {
            pieces.push(&text.as_bytes()[from..place]);
            from = place;
        }
        let mut matcher = SecretMatcher::new(known());
        let mut split = find(&mut matcher, &pieces);
        let mut whole = find(&mut matcher, &[text.as_bytes()]);
        split.sort();
        whole.sort();
        for (sample, _) in &parts {
            prop_assert!(whole.iter().any(|what| what == samples[*sample].0), "{} in {text}", samples[*sample].0);
        }
        prop_assert_eq!(split, whole);
    }
}
