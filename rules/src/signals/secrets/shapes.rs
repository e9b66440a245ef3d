//! The table of known shapes. Where a format has a checksum or a structure, it is verified, so that a finding is rarely
//! a false alarm.

use super::candidate::{
    ALNUM, BASE32, BASE64, ByteSet, Candidate, DIGIT, LOWER_HEX, TOKEN, UPPER, Verdict, base64, is_mixed,
    is_varied, run,
};

/// One shape of a secret.
pub(super) struct Shape {
    /// What it is, in words for an analyst.
    pub what: &'static str,
    /// How it begins: any of these.
    pub prefixes: &'static [&'static str],
    pub validate: fn(&Candidate) -> Verdict,
}

/// Distance from an AWS access key within which its secret is looked for.
const AWS_PAIR_DISTANCE: usize = 256;
/// Longest header of a JWT to decode, in base64url characters.
const MAX_JWT_HEADER: usize = 1024;
/// Longest user and password of a connection string, each.
const MAX_CONNECTION_PART: usize = 256;
/// Longest API key of OpenAI to look at.
const MAX_OPENAI_KEY: usize = 256;

/// Every known shape, by name.
pub(super) const SHAPES: &[Shape] = &[
    Shape {
        what: "age secret key",
        prefixes: &["AGE-SECRET-KEY-1"],
        validate: |at| at.exactly(&BECH32, 58, age_checksum),
    },
    Shape { what: "Anthropic API key", prefixes: &["sk-ant-"], validate: anthropic },
    Shape { what: "AWS access key", prefixes: &["AKIA", "ASIA"], validate: aws_key },
    Shape {
        what: "AWS secret access key",
        prefixes: &["AKIA", "ASIA", "AccessKey", "aws_secret_access_key", "AWS_SECRET_ACCESS_KEY"],
        validate: aws_secret,
    },
    Shape { what: "Azure storage key", prefixes: &["AccountKey="], validate: |at| azure(at, 86, b"==") },
    Shape {
        what: "Azure shared access key",
        prefixes: &["SharedAccessKey="],
        validate: |at| azure(at, 43, b"="),
    },
    Shape { what: "connection string with a password", prefixes: &["://"], validate: connection_string },
    Shape {
        what: "Cargo registry token",
        prefixes: &["cio"],
        validate: |at| in_word(at, |at| at.exactly(&ALNUM, 32, is_mixed)),
    },
    Shape {
        what: "DigitalOcean token",
        prefixes: &["dop_v1_", "doo_v1_", "dor_v1_"],
        validate: |at| at.exactly(&LOWER_HEX, 64, is_varied),
    },
    Shape {
        what: "Docker access token",
        prefixes: &["dckr_pat_", "dckr_oat_"],
        validate: |at| at.between(&TOKEN, 27, 40, is_varied),
    },
    Shape {
        what: "GitHub fine-grained token",
        prefixes: &["github_pat_"],
        validate: |at| at.exactly(&TOKEN, 82, |rest| rest.get(22) == Some(&b'_') && is_mixed(rest)),
    },
    Shape {
        what: "GitHub token",
        prefixes: &["ghp_", "gho_", "ghu_", "ghs_", "ghr_"],
        validate: |at| at.exactly(&ALNUM, 36, crc32_base62),
    },
    Shape {
        what: "GitLab token",
        prefixes: &["glpat-", "gldt-", "glrt-", "glptt-", "glcbt-", "gloas-", "glft-", "glagent-"],
        validate: |at| in_word(at, |at| at.at_least(&TOKEN, 20, is_varied)),
    },
    Shape {
        what: "Google API key",
        prefixes: &["AIza"],
        validate: |at| in_word(at, |at| at.exactly(&TOKEN, 35, is_mixed)),
    },
    Shape {
        what: "Google OAuth client secret",
        prefixes: &["GOCSPX-"],
        validate: |at| at.exactly(&TOKEN, 28, is_varied),
    },
    Shape {
        what: "Google OAuth token",
        prefixes: &["ya29."],
        validate: |at| in_word(at, |at| at.at_least(&TOKEN, 40, is_mixed)),
    },
    Shape {
        what: "Hugging Face token",
        prefixes: &["hf_"],
        validate: |at| in_word(at, |at| at.exactly(&ALNUM, 34, is_varied)),
    },
    Shape { what: "JSON web token", prefixes: &["eyJ"], validate: jwt },
    Shape { what: "npm token", prefixes: &["npm_"], validate: |at| at.exactly(&ALNUM, 36, crc32_base62) },
    Shape { what: "OpenAI API key", prefixes: &["sk-"], validate: openai },
    Shape {
        what: "OpenRouter API key",
        prefixes: &["sk-or-v1-"],
        validate: |at| at.exactly(&LOWER_HEX, 64, is_varied),
    },
    Shape {
        what: "OpenSSH private key",
        prefixes: &["-----BEGIN OPENSSH PRIVATE KEY-----", "openssh-key-v1\0"],
        validate: openssh,
    },
    Shape { what: "private key (PEM)", prefixes: &["-----BEGIN "], validate: pem },
    Shape {
        what: "PyPI token",
        prefixes: &["pypi-AgE"],
        validate: |at| at.at_least(&TOKEN, 85, pypi_macaroon),
    },
    Shape { what: "SendGrid API key", prefixes: &["SG."], validate: sendgrid },
    Shape { what: "Slack app token", prefixes: &["xapp-"], validate: |at| slack(at, &DIGIT) },
    Shape { what: "Slack token", prefixes: &["xox"], validate: slack_token },
    Shape {
        what: "Slack webhook",
        prefixes: &["hooks.slack.com/services/T"],
        validate: |at| at.at_least(&ALNUM.union(ByteSet::of(b"/")), 40, is_varied),
    },
    Shape {
        what: "Stripe live key",
        prefixes: &["sk_live_", "rk_live_"],
        validate: |at| at.at_least(&ALNUM, 24, is_varied),
    },
    Shape {
        what: "Twilio API key",
        prefixes: &["SK"],
        validate: |at| in_word(at, |at| at.exactly(&LOWER_HEX, 32, is_varied)),
    },
    Shape {
        what: "Vault token",
        prefixes: &["hvs.", "hvb."],
        validate: |at| in_word(at, |at| at.at_least(&TOKEN, 24, is_mixed)),
    },
];

const BECH32_ALPHABET: &[u8; 32] = b"QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L";
const BECH32: ByteSet = ByteSet::of(BECH32_ALPHABET);

/// Decides only what begins a word: these prefixes occur inside ordinary words and encoded data.
fn in_word(at: &Candidate, validate: fn(&Candidate) -> Verdict) -> Verdict {
    if at.begins_word() { validate(at) } else { Verdict::No }
}

fn anthropic(at: &Candidate) -> Verdict {
    let rest = at.rest();
    let kind = run(rest, &ALNUM, 12);
    match rest.get(kind) {
        None => at.short(),
        Some(b'-') if kind > 0 => {
            Candidate { prefix: at.prefix + kind + 1, ..*at }.at_least(&TOKEN, 80, is_mixed)
        }
        Some(_) => Verdict::No,
    }
}

fn aws_key(at: &Candidate) -> Verdict {
    if at.before.last().is_some_and(|byte| UPPER.contains(*byte) || DIGIT.contains(*byte)) {
        return Verdict::No;
    }
    let verdict = at.exactly(&BASE32, 16, |rest| is_varied(rest) && has_aws_account(rest));
    match (verdict, at.rest().get(16)) {
        (Verdict::Yes, Some(after)) if UPPER.contains(*after) || DIGIT.contains(*after) => Verdict::No,
        _ => verdict,
    }
}

/// Checks the number of the account, of twelve digits, that the 40 bits after the first contain.
fn has_aws_account(rest: &[u8]) -> bool {
    let value = rest.iter().take(10).fold(0_u64, |bits, byte| {
        let digit = if byte.is_ascii_uppercase() { byte - b'A' } else { byte - b'2' + 26 };
        bits << 5 | u64::from(digit)
    });
    // Ten characters are 50 bits: one flag, 40 of the account, 9 of what follows it.
    (value >> 9) & 0xff_ffff_ffff <= 999_999_999_999
}

/// Finds the secret of 40 characters that follows an access key or stands under its own name.
fn aws_secret(at: &Candidate) -> Verdict {
    let after_key = at.text.starts_with(b"A") && at.prefix == 4;
    let (from, distance) = if after_key {
        match aws_key(at) {
            Verdict::Yes => (20, AWS_PAIR_DISTANCE),
            verdict @ (Verdict::No | Verdict::More) => return verdict,
        }
    } else {
        (at.prefix, 16)
    };
    let rest = at.text.get(from..).unwrap_or_default();
    let mut start = 0;
    while start < distance {
        let length = run(rest.get(start..).unwrap_or_default(), &BASE64, 41);
        let end = start + length;
        if end >= rest.len() && !at.ended {
            return Verdict::More;
        }
        if length == 40 && rest.get(start..end).is_some_and(is_mixed) {
            return Verdict::Yes;
        }
        if end >= rest.len() {
            return Verdict::No;
        }
        // The rest of a longer run is not a run of its own.
        start = end + 1;
        if length > 40 {
            start = end + run(rest.get(end..).unwrap_or_default(), &BASE64, distance);
        }
    }
    Verdict::No
}

fn azure(at: &Candidate, length: usize, padding: &[u8]) -> Verdict {
    /// Begins the key of the storage emulator, which everyone knows.
    const EMULATOR: &[u8] = b"Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsu";
    let rest = at.rest();
    let found = run(rest, &BASE64, length);
    let tail = rest.get(found..).unwrap_or_default();
    if found < length || tail.len() < padding.len() {
        return if found + tail.len() < length + padding.len() && padding.starts_with(tail) {
            at.short()
        } else {
            Verdict::No
        };
    }
    Verdict::from_check(tail.starts_with(padding) && !rest.starts_with(EMULATOR) && is_varied(&rest[..found]))
}

/// Finds `scheme://user:password@host`, except for passwords that are plainly placeholders.
fn connection_string(at: &Candidate) -> Verdict {
    let plain = |byte: u8| byte.is_ascii_graphic() && !b"/?#@\"'<>\\`".contains(&byte);
    if !at.before.last().is_some_and(u8::is_ascii_alphanumeric) {
        return Verdict::No;
    }
    let rest = at.rest();
    let user =
        rest.iter().take(MAX_CONNECTION_PART).take_while(|byte| plain(**byte) && **byte != b':').count();
    match rest.get(user) {
        None => return at.short(),
        Some(b':') => {}
        Some(_) => return Verdict::No,
    }
    let after = rest.get(user + 1..).unwrap_or_default();
    let length = after.iter().take(MAX_CONNECTION_PART).take_while(|byte| plain(**byte)).count();
    match (after.get(length), after.get(length + 1)) {
        (None, _) | (Some(b'@'), None) => at.short(),
        (Some(b'@'), Some(host)) if host.is_ascii_alphanumeric() || *host == b'[' => {
            let (user, password) = (rest.get(..user), after.get(..length));
            Verdict::from_check(
                password.is_some_and(|password| !is_placeholder(password) && Some(password) != user)
                    && !after.get(length + 1..).unwrap_or_default().starts_with(b"example."),
            )
        }
        (Some(_), _) => Verdict::No,
    }
}

fn is_placeholder(password: &[u8]) -> bool {
    const WORDS: [&[u8]; 20] = [
        b"changeme",
        b"example",
        b"guest",
        b"hunter2",
        b"mypass",
        b"mypassword",
        b"p@ssw0rd",
        b"pass",
        b"passwd",
        b"password",
        b"postgres",
        b"pw",
        b"pwd",
        b"redacted",
        b"root",
        b"secret",
        b"test",
        b"token",
        b"user",
        b"yourpassword",
    ];
    let simple: Vec<u8> =
        password.iter().filter(|byte| !b"-_.".contains(byte)).map(u8::to_ascii_lowercase).collect();
    // `${VAR}`, `{{ var }}`, `$(cmd)`, `[password]`, `%(password)s`, `***`, `:pass`
    password.len() < 3
        || password.iter().any(|byte| b"${}()[]*|".contains(byte))
        || password.first().is_some_and(|first| password.iter().all(|byte| byte == first))
        || WORDS.contains(&&simple[..])
}

/// Checks a token whose last six characters are the CRC-32 of the others, in base 62 (GitHub, npm).
fn crc32_base62(token: &[u8]) -> bool {
    const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let Some((random, checksum)) = token.split_last_chunk::<6>() else { return false };
    let mut value = crc32(random);
    checksum.iter().rev().all(|digit| {
        let expected = DIGITS[(value % 62) as usize];
        value /= 62;
        *digit == expected
    })
}

/// Computes the CRC-32 of ISO 3309, as gzip and PNG use it. For tokens: a bit at a time.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
    })
}

/// Checks the bech32 checksum (BIP 173) of an age secret key.
fn age_checksum(rest: &[u8]) -> bool {
    const GENERATOR: [u32; 5] = [0x3b6a_57b2, 0x2650_8e6d, 0x1ea1_19fa, 0x3d42_33dd, 0x2a14_62b3];
    let step = |sum: u32, value: u8| {
        let shifted = (sum & 0x1ff_ffff) << 5 ^ u32::from(value);
        (0..5).filter(|bit| sum >> 25 >> bit & 1 == 1).fold(shifted, |sum, bit| sum ^ GENERATOR[bit])
    };
    let name = b"age-secret-key-";
    let values = rest.iter().filter_map(|byte| BECH32_ALPHABET.iter().position(|letter| letter == byte));
    let expanded = name.iter().map(|byte| byte >> 5).chain([0]).chain(name.iter().map(|byte| byte & 31));
    expanded.chain(values.map(|value| value as u8)).fold(1, step) == 1
}

/// Finds a header that decodes to JSON with `alg`, and the beginning of a payload that is a JSON object.
fn jwt(at: &Candidate) -> Verdict {
    /// The beginning of the payload that every introduction to JWT shows: `{"sub":"1234567890"`.
    const INTRODUCTION: &[u8] = b"eyJzdWIiOiIxMjM0NTY3ODkwIi";
    const CERTAIN: usize = INTRODUCTION.len();
    if !at.begins_word() {
        return Verdict::No;
    }
    let length = run(at.text, &TOKEN, MAX_JWT_HEADER);
    match at.text.get(length) {
        None => return at.short(),
        Some(b'.') => {}
        Some(_) => return Verdict::No,
    }
    let payload = at.text.get(length + 1..).unwrap_or_default();
    let found = run(payload, &TOKEN, CERTAIN);
    if found < CERTAIN {
        return if found == payload.len() { at.short() } else { Verdict::No };
    }
    let header = at.text.get(..length).and_then(base64).unwrap_or_default();
    Verdict::from_check(
        header.starts_with(b"{")
            && memchr::memmem::find(&header, b"\"alg\"").is_some()
            && payload.starts_with(b"ey")
            && !payload.starts_with(INTRODUCTION),
    )
}

/// Finds `sk-` keys by the `T3BlbkFJ` (`OpenAI` in base64) in their middle.
fn openai(at: &Candidate) -> Verdict {
    const MARK: &[u8] = b"T3BlbkFJ";
    // A key within a key is none, and `sk-sk-sk-` would be looked at once for each.
    if !at.begins_word() || at.before.last().is_some_and(|byte| TOKEN.contains(*byte)) {
        return Verdict::No;
    }
    let rest = at.rest();
    let token = rest.get(..run(rest, &TOKEN, MAX_OPENAI_KEY)).unwrap_or_default();
    match memchr::memmem::find(token, MARK) {
        Some(mark) if mark >= 16 && token.len() >= mark + MARK.len() + 16 => {
            Verdict::from_check(is_mixed(token))
        }
        _ if token.len() == rest.len() && token.len() < MAX_OPENAI_KEY => at.short(),
        _ => Verdict::No,
    }
}

fn openssh(at: &Candidate) -> Verdict {
    // Binary: what follows is the name of a cipher, with its length in four bytes.
    if at.text.starts_with(b"o") {
        return match at.rest().first_chunk::<4>() {
            None => at.short(),
            Some(length) => Verdict::from_check((4..64).contains(&u32::from_be_bytes(*length))),
        };
    }
    pem_body(at, at.prefix)
}

/// Finds `-----BEGIN ... PRIVATE KEY-----` and the first characters of a key.
fn pem(at: &Candidate) -> Verdict {
    const LABEL: ByteSet = UPPER.union(DIGIT).union(ByteSet::of(b" "));
    let length = run(at.rest(), &LABEL, 48);
    let (label, after) = at.rest().split_at(length);
    if label.starts_with(b"OPENSSH") {
        return Verdict::No;
    }
    if after.len() < 5 {
        return if b"-----".starts_with(after) && length < 48 { at.short() } else { Verdict::No };
    }
    let is_private = label.ends_with(b"PRIVATE KEY") || label == b"PGP PRIVATE KEY BLOCK";
    if !is_private || !after.starts_with(b"-----") {
        return Verdict::No;
    }
    pem_body(at, at.prefix + length + 5)
}

/// Decides what comes after the first line: white space, lines such as `Proc-Type: 4,ENCRYPTED`, 24 characters of base64.
fn pem_body(at: &Candidate, from: usize) -> Verdict {
    const MOST_BEFORE_KEY: usize = 400;
    let mut rest = at.text.get(from..).unwrap_or_default();
    let mut seen = 0;
    while seen < MOST_BEFORE_KEY {
        let blank = run(rest, &ByteSet::of(b" \t\r\n"), MOST_BEFORE_KEY);
        rest = rest.get(blank..).unwrap_or_default();
        let found = run(rest, &BASE64, 24);
        if found == 24 {
            return Verdict::Yes;
        }
        if found == rest.len() {
            return at.short();
        }
        let is_header = |byte: &u8| byte.is_ascii_graphic() || *byte == b' ';
        let line = rest.iter().take(MOST_BEFORE_KEY).take_while(|byte| is_header(byte)).count();
        if line == rest.len() && line < MOST_BEFORE_KEY {
            return at.short();
        }
        let is_named = rest.get(..line).is_some_and(|line| memchr::memmem::find(line, b": ").is_some());
        if !is_named {
            return Verdict::No;
        }
        rest = rest.get(line..).unwrap_or_default();
        seen += blank + line;
    }
    Verdict::No
}

/// Checks a macaroon of version 2 with a location, the name of a host, and an identifier behind it.
fn pypi_macaroon(rest: &[u8]) -> bool {
    let whole: Vec<u8> = b"AgE".iter().chain(rest.iter().take(61)).copied().collect();
    let Some(macaroon) = base64(&whole) else { return false };
    let [2, 1, length, text @ ..] = macaroon.as_slice() else { return false };
    let Some((location, behind)) = text.split_at_checked(usize::from(*length)) else { return false };
    let is_host =
        location.contains(&b'.') && location.iter().all(|byte| b'.' == *byte || ALNUM.contains(*byte));
    is_host && behind.first() == Some(&2)
}

fn sendgrid(at: &Candidate) -> Verdict {
    if !at.begins_word() {
        return Verdict::No;
    }
    let rest = at.rest();
    let id = run(rest, &TOKEN, 23);
    match rest.get(id) {
        None if id <= 22 => at.short(),
        Some(b'.') if id == 22 => Candidate { prefix: at.prefix + 23, ..*at }.exactly(&TOKEN, 43, is_varied),
        None | Some(_) => Verdict::No,
    }
}

fn slack_token(at: &Candidate) -> Verdict {
    let kinds = ByteSet::of(b"abeoprs");
    match (at.rest().first(), at.rest().get(1)) {
        (Some(kind), _) if !kinds.contains(*kind) => Verdict::No,
        (_, None) => at.short(),
        (_, Some(b'-')) => slack(&Candidate { prefix: at.prefix + 2, ..*at }, &ALNUM),
        (_, Some(_)) => Verdict::No,
    }
}

/// Decides `1-A0123-...`: at least two parts, 24 characters in all, with digits.
fn slack(at: &Candidate, first: &ByteSet) -> Verdict {
    let dashed =
        |token: &[u8]| token.contains(&b'-') && token.iter().any(u8::is_ascii_digit) && is_varied(token);
    match at.rest().first() {
        Some(byte) if !first.contains(*byte) => Verdict::No,
        _ => at.at_least(&ALNUM.union(ByteSet::of(b"-")), 24, dashed),
    }
}
