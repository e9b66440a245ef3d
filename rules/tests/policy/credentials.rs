//! `[[credential]]`: each key reaches its setting, each mistake is reported at its place, and no error repeats a secret.

use std::time::Duration;

use rules::credential::*;
use rules::load::read_configuration;

use super::{compile_configured, error_texts, source_file, unwrap_rules};

/// Reads one `[[credential]]` named `k` for `a.example`, with the rest of its lines.
fn read_one(rest: &str) -> Result<Credential, Vec<rules::load::problem::Problem>> {
    let text = format!("[[credential]]\nname = \"k\"\nhosts = [\"a.example\"]\n{rest}\n");
    read_configuration(&source_file("sandbar.toml", &text)).map(|mut settings| settings.credentials.remove(0))
}

fn read_valid(rest: &str) -> Credential {
    read_one(rest).unwrap_or_else(|problems| panic!("{rest}: {}", super::problem_texts(&problems).join("\n")))
}

fn text(text: &str) -> String {
    text.to_owned()
}

fn some(text: &str) -> Option<String> {
    Some(text.to_owned())
}

fn texts(list: &[&str]) -> Vec<String> {
    list.iter().map(|text| (*text).to_owned()).collect()
}

// proves: credential.env, credential.command, credential.google.file, credential.google.scopes
// proves: credential.google.subject, credential.spiffe.socket, credential.spiffe.audience, credential.spiffe.id
// proves: credential.github_app.id, credential.github_app.key_file, credential.github_app.installation
// proves: credential.github_app.repositories, credential.github_app.permissions, credential.github_app.api_url
#[test]
fn each_source_is_read_as_written() {
    for (rest, expected) in [
        ("file = \"secrets/k\"", CredentialSource::File(text("secrets/k"))),
        ("env = \"API_KEY\"", CredentialSource::Env(text("API_KEY"))),
        (
            "command = [\"pass\", \"show\", \"a b\"]",
            CredentialSource::Command(texts(&["pass", "show", "a b"])),
        ),
        (
            "google = { file = \"g.json\", scopes = [\"https://www.googleapis.com/auth/x\"], subject = \"u@a.example\" }",
            CredentialSource::Google(GoogleSource {
                file: text("g.json"),
                scopes: texts(&["https://www.googleapis.com/auth/x"]),
                subject: some("u@a.example"),
            }),
        ),
        (
            "[credential.github_app]\nid = \"12\"\nkey_file = \"app.pem\"\ninstallation = 34\nrepositories = [\"one\"]\n\
             permissions = { contents = \"read\" }\napi_url = \"https://github.corp.example/api/v3\"",
            CredentialSource::GitHubApp(GitHubAppSource {
                id: text("12"),
                key: text("app.pem"),
                installation: 34,
                repositories: texts(&["one"]),
                permissions: vec![(text("contents"), text("read"))],
                api_url: some("https://github.corp.example/api/v3"),
            }),
        ),
        (
            "spiffe = { socket = \"/run/spire.sock\", audience = [\"a\", \"b\"], id = \"spiffe://d/w\" }",
            CredentialSource::Spiffe(SpiffeSource {
                socket: text("/run/spire.sock"),
                audience: texts(&["a", "b"]),
                id: some("spiffe://d/w"),
            }),
        ),
    ] {
        assert_eq!(read_valid(rest).source, expected, "{rest}");
    }
}

// proves: credential.oauth2.token_url, credential.oauth2.grant, credential.oauth2.client_id
// proves: credential.oauth2.client_secret_file, credential.oauth2.client_secret_env, credential.oauth2.client_auth
// proves: credential.oauth2.refresh_token_file, credential.oauth2.key_file, credential.oauth2.key_id
// proves: credential.oauth2.issuer, credential.oauth2.subject, credential.oauth2.assertion_audience
// proves: credential.oauth2.scopes, credential.oauth2.audience
#[test]
fn each_grant_of_oauth2_is_read_as_written() {
    let url = "token_url = \"https://id.example/token\"";
    let plain = OAuth2Source {
        token_url: text("https://id.example/token"),
        grant: OAuth2Grant::ClientCredentials,
        client_id: some("c"),
        client_secret: Some(SourceSecret::File(text("s"))),
        client_auth: OAuth2ClientAuth::Basic,
        scopes: Vec::new(),
        audience: None,
    };
    let assertion = AssertionSettings {
        key: text("k.pem"),
        key_id: some("1"),
        issuer: some("i"),
        subject: some("s"),
        audience: some("https://aud.example"),
    };
    let signed = "key_file = \"k.pem\"\nkey_id = \"1\"\nissuer = \"i\"\nsubject = \"s\"\nassertion_audience = \"https://aud.example\"";
    for (rest, expected) in [
        ("client_id = \"c\"\nclient_secret_file = \"s\"".to_owned(), plain.clone()),
        (
            "client_id = \"c\"\nclient_secret_env = \"S\"\nclient_auth = \"post\"\nscopes = [\"a\", \"b\"]\naudience = \"x\""
                .to_owned(),
            OAuth2Source {
                client_secret: Some(SourceSecret::Env(text("S"))),
                client_auth: OAuth2ClientAuth::Post,
                scopes: texts(&["a", "b"]),
                audience: some("x"),
                ..plain.clone()
            },
        ),
        (
            format!("client_id = \"c\"\nclient_auth = \"private_key_jwt\"\n{signed}"),
            OAuth2Source {
                client_secret: None,
                client_auth: OAuth2ClientAuth::PrivateKeyJwt(assertion.clone()),
                ..plain.clone()
            },
        ),
        (
            "grant = \"refresh_token\"\nrefresh_token_file = \"r\"\nclient_id = \"c\"\nclient_secret_file = \"s\"".to_owned(),
            OAuth2Source { grant: OAuth2Grant::RefreshToken { file: text("r") }, ..plain.clone() },
        ),
        (
            format!("grant = \"jwt_bearer\"\n{signed}"),
            OAuth2Source {
                grant: OAuth2Grant::JwtBearer(assertion),
                client_id: None,
                client_secret: None,
                ..plain.clone()
            },
        ),
    ] {
        let credential = read_valid(&format!("[credential.oauth2]\n{url}\n{rest}"));
        assert_eq!(credential.source, CredentialSource::OAuth2(expected), "{rest}");
    }
}

// proves: credential.aws.access_key_id_file, credential.aws.access_key_id_env, credential.aws.secret_access_key_file
// proves: credential.aws.secret_access_key_env, credential.aws.session_token_file, credential.aws.session_token_env
// proves: credential.aws.credentials_file, credential.aws.profile, credential.aws.role, credential.aws.region
// proves: credential.aws.web_identity_token_file, credential.aws.session_name, credential.aws.sts_url
#[test]
fn each_source_of_aws_keys_is_read_as_written() {
    let (file, env) =
        (|name: &str| SourceSecret::File(text(name)), |name: &str| SourceSecret::Env(text(name)));
    for (rest, expected) in [
        (
            "access_key_id_file = \"i\", secret_access_key_file = \"s\", session_token_file = \"t\"",
            AwsSource::Keys { id: file("i"), secret: file("s"), session_token: Some(file("t")) },
        ),
        (
            "access_key_id_env = \"I\", secret_access_key_env = \"S\", session_token_env = \"T\"",
            AwsSource::Keys { id: env("I"), secret: env("S"), session_token: Some(env("T")) },
        ),
        ("credentials_file = \"c\"", AwsSource::Profile { file: text("c"), profile: text("default") }),
        (
            "credentials_file = \"c\", profile = \"p\"",
            AwsSource::Profile { file: text("c"), profile: text("p") },
        ),
        (
            "role = \"arn:aws:iam::1:role/r\", web_identity_token_file = \"w\", session_name = \"n\", \
             sts_url = \"https://sts.example/\", region = \"eu-central-1\"",
            AwsSource::WebIdentity {
                role: text("arn:aws:iam::1:role/r"),
                token: text("w"),
                session_name: some("n"),
                sts_url: some("https://sts.example/"),
                region: some("eu-central-1"),
            },
        ),
    ] {
        let form = "form = { sigv4 = { service = \"s3\", region = \"eu-central-1\" } }";
        let credential = read_valid(&format!("aws = {{ {rest} }}\n{form}"));
        assert_eq!(credential.source, CredentialSource::Aws(expected), "{rest}");
    }
}

// proves: credential.form.header, credential.form.prefix, credential.form.basic.user, credential.form.sigv4.service
// proves: credential.form.sigv4.region, credential.form.dangerously_query, credential.form.placeholder.in
// proves: credential.form.placeholder.prefix, credential.timeout_seconds, credential.cache_seconds
#[test]
fn each_form_is_read_as_written() {
    let header = |name: &str, prefix: &str| CredentialForm::Header { name: text(name), prefix: text(prefix) };
    for (form, expected) in [
        ("", CredentialForm::Bearer),
        ("form = \"bearer\"", CredentialForm::Bearer),
        ("form = { header = \"X-Api-Key\" }", header("x-api-key", "")),
        ("form = { header = \"authorization\", prefix = \"token \" }", header("authorization", "token ")),
        (
            "form = { basic = { user = \"x-access-token\" } }",
            CredentialForm::Basic { user: text("x-access-token") },
        ),
        ("form = { dangerously_query = \"key\" }", CredentialForm::DangerouslyQuery { name: text("key") }),
        (
            "form = { placeholder = { in = [\"header:Authorization\", \"header:x-api-key\"], prefix = \"sk-\" } }",
            CredentialForm::Placeholder {
                headers: texts(&["authorization", "x-api-key"]),
                prefix: text("sk-"),
            },
        ),
    ] {
        assert_eq!(read_valid(&format!("file = \"f\"\n{form}")).form, expected, "{form}");
    }
    let signed = read_valid(
        "aws = { credentials_file = \"c\" }\nform = { sigv4 = { service = \"s3\", region = \"us-east-1\" } }",
    );
    assert_eq!(signed.form, CredentialForm::SigV4 { service: text("s3"), region: text("us-east-1") });
    let timed = read_valid("command = [\"x\"]\ntimeout_seconds = 60\ncache_seconds = 5");
    assert_eq!((timed.timeout, timed.cache), (Duration::from_secs(60), Some(Duration::from_secs(5))));
    let plain = read_valid("file = \"f\"");
    assert_eq!((plain.timeout, plain.cache), (Duration::from_secs(10), None));
}

#[test]
fn p11_every_malformed_entry_is_reported_where_it_is() {
    let oauth2 = |rest: &str| format!("[credential.oauth2]\ntoken_url = \"https://id.example/t\"\n{rest}");
    let aws = |rest: &str| {
        format!("form = {{ sigv4 = {{ service = \"s3\", region = \"r\" }} }}\naws = {{ {rest} }}")
    };
    let file = |rest: &str| format!("file = \"f\"\n{rest}");
    let mut wrong = Vec::new();
    for (rest, place, part) in [
        (String::new(), "2:8", "a credential needs a source"),
        ("env = \"A\"\nfile = \"f\"".to_owned(), "4:7", "`file` and `env` cannot be used together"),
        (file("command = [\"x\"]\nspiffe = { socket = \"s\", audience = [\"a\"] }"), "5:11", "`file` and `command`"),
        ("file = \"\"".to_owned(), "4:8", "a path must not be empty"),
        ("env = \"9A\"".to_owned(), "4:7", "the name of a variable"),
        ("env = \"\"".to_owned(), "4:7", "the name of a variable"),
        ("command = []".to_owned(), "4:11", "takes a program"),
        ("command = [\"\"]".to_owned(), "4:11", "takes a program"),
        ("command = \"pass show x\"".to_owned(), "4:11", "invalid type: a string, expected"),
        (file("value = \"hunter2\""), "5:1", "unknown key `value`"),
        (file("form = \"basic\""), "5:8", "expected `\"bearer\"` or a table"),
        (file("form = {}"), "5:8", "a form needs `header`"),
        (file("form = { header = \"x-a\", basic = { user = \"u\" } }"), "5:8", "`header` and `basic`"),
        (file("form = { basic = { user = \"u\" }, prefix = \"x\" }"), "5:43", "`prefix` needs `header`"),
        (file("form = { header = \"x api\" }"), "5:19", "the name of a header field"),
        (file("form = { header = \"\" }"), "5:19", "the name of a header field"),
        (file("form = { header = \"Host\" }"), "5:19", "no credential can be carried"),
        (file("form = { header = \"content-length\" }"), "5:19", "no credential can be carried"),
        (file("form = { header = \"cookie\" }"), "5:19", "no credential can be carried"),
        (file("form = { header = \"Transfer-Encoding\" }"), "5:19", "no credential can be carried"),
        (file("form = { header = \"proxy-authorization\" }"), "5:19", "no credential can be carried"),
        (file("form = { header = \"x-a\", prefix = \"a\\r\\nb\" }"), "5:35", "a prefix has at most"),
        (file("form = { header = \"x-a\", prefix = \" a\" }"), "5:35", "must not begin with a space"),
        (file("form = { basic = { user = \"a:b\" } }"), "5:27", "no `:`"),
        (file("form = { basic = {} }"), "5:18", "missing key `user`"),
        (file("form = { dangerously_query = \"a&b\" }"), "5:30", "the name of a parameter"),
        (file("form = { placeholder = { in = [] } }"), "5:24", "at least one place"),
        (file("form = { placeholder = { in = [\"query:key\"] } }"), "5:32", "write `header:NAME`"),
        (file("form = { placeholder = { in = [\"header:cookie\"] } }"), "5:32", "no credential can be carried"),
        (file("form = { placeholder = { in = [\"header:a\", \"header:A\"] } }"), "5:44", "defined twice"),
        (file("form = { placeholder = { in = [\"header:a\"], prefix = \"a b\" } }"), "5:54", "the prefix of a placeholder"),
        (file("form = { sigv4 = { service = \"s3\", region = \"r\" } }"), "5:8", "`sigv4` needs `aws`"),
        (file("form = { headr = \"x-api-key\" }"), "5:10", "unknown key `headr`"),
        ("aws = { credentials_file = \"c\" }".to_owned(), "2:8", "`aws` needs `form"),
        ("aws = { credentials_file = \"c\" }\nform = \"bearer\"".to_owned(), "5:8", "`aws` needs `form"),
        (aws("access_key_id_file = \"i\""), "5:7", "AWS keys are"),
        (aws("access_key_id_file = \"i\", secret_access_key_env = \"S\", role = \"arn:x\""), "5:71", "cannot be used together"),
        (aws("access_key_id_file = \"i\", access_key_id_env = \"I\", secret_access_key_env = \"S\""), "5:55", "cannot be used"),
        (aws("profile = \"p\""), "5:7", "`profile` needs `credentials_file`"),
        (aws("role = \"arn:x\""), "5:7", "needs `role` and `web_identity_token_file`"),
        (aws("role = \"admin\", web_identity_token_file = \"w\", region = \"r\""), "5:16", "as ARN"),
        (aws("role = \"arn:x\", web_identity_token_file = \"w\""), "5:7", "needs `region`"),
        (aws(""), "5:7", "`aws` needs"),
        (aws("sts_url = \"http://sts.example\", role = \"arn:x\", web_identity_token_file = \"w\""), "5:19", "`https://`"),
        ("[credential.oauth2]\nclient_id = \"c\"".to_owned(), "4:1", "missing key `token_url`"),
        (oauth2(""), "5:13", "needs `client_id`"),
        (oauth2("client_id = \"c\""), "5:13", "needs `client_id`, and"),
        (oauth2("client_id = \"c\"\nclient_secret_file = \"f\"\nclient_secret_env = \"F\""), "8:21", "cannot be used"),
        (oauth2("grant = \"implicit\""), "6:9", "is not one of"),
        (oauth2("grant = \"refresh_token\"\nclient_id = \"c\""), "5:13", "needs `refresh_token_file`"),
        (oauth2("grant = \"jwt_bearer\"\nclient_id = \"c\""), "5:13", "needs `key_file`"),
        (oauth2("grant = \"jwt_bearer\"\nkey_file = \"k\""), "5:13", "needs `issuer` or `client_id`"),
        (oauth2("client_id = \"c\"\nclient_secret_file = \"s\"\nkey_file = \"k\""), "8:12", "keys of an assertion"),
        (oauth2("client_id = \"c\"\nclient_secret_file = \"s\"\nrefresh_token_file = \"k\""), "8:22", "needs `grant"),
        (oauth2("client_id = \"c\"\nclient_auth = \"post\""), "7:15", "`client_auth` needs"),
        (
            oauth2("client_id = \"c\"\nclient_auth = \"private_key_jwt\"\nkey_file = \"k\"\nclient_secret_file = \"s\""),
            "9:22",
            "remove the secret",
        ),
        (oauth2("client_id = \"c d\"\nclient_secret_file = \"s\""), "6:13", "without spaces"),
        (
            "[credential.oauth2]\ntoken_url = \"http://id.example/t\"\nclient_id = \"c\"\nclient_secret_file = \"s\"".to_owned(),
            "5:13",
            "write a URL with `https://`",
        ),
        ("google = { file = \"g\", scopes = [] }".to_owned(), "4:33", "at least one scope"),
        ("google = { file = \"g\" }".to_owned(), "4:10", "missing key `scopes`"),
        (
            "github_app = { id = \"1\", key_file = \"k\", installation = 1, permissions = { contents = \"all\" } }".to_owned(),
            "4:87",
            "levels are",
        ),
        ("github_app = { id = 1, key_file = \"k\", installation = 1 }".to_owned(), "4:21", "invalid type: integer `1`"),
        ("spiffe = { socket = \"s\", audience = [] }".to_owned(), "4:37", "at least one audience"),
        ("spiffe = { socket = \"s\", audience = [\"a\"], id = \"w\" }".to_owned(), "4:49", "begins with `spiffe://`"),
        (file("timeout_seconds = 0"), "5:19", "0 is out of range: use 1 to 60"),
        (file("timeout_seconds = 61"), "5:19", "61 is out of range: use 1 to 60"),
        ("env = \"A\"\ntimeout_seconds = 5".to_owned(), "5:19", "remove `timeout_seconds`"),
        ("command = [\"x\"]\ncache_seconds = 86401".to_owned(), "5:17", "use 1 to 86400"),
        (file("cache_seconds = 5"), "5:17", "remove `cache_seconds`"),
    ] {
        let found = super::problem_texts(&read_one(&rest).err().unwrap_or_default()).join("\n");
        let prefix = format!("sandbar.toml:{place}:");
        if !found.lines().any(|text| text.starts_with(&prefix) && text.contains(part)) {
            wrong.push(format!("{rest}\n--- {place} {part}\n{found}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

// proves: credential.hosts
#[test]
fn p11_a_rule_sends_a_credential_only_to_the_hosts_of_the_operator() {
    let configuration = |hosts: &str| {
        format!(
            "[[credential]]\nname = \"k\"\nfile = \"f\"\nhosts = {hosts}\n\
             [[sandbox]]\nid = \"a\"\npolicies = [\"p\"]\n"
        )
    };
    for (hosts, rule, refused) in [
        ("[\"a.example\"]", "hosts = [\"a.example\"]", None),
        ("[\"a.example\"]", "hosts = [\"a.example\", \"b.example\"]", Some("`b.example:443`")),
        ("[\"a.example\"]", "hosts = [\"a.example:8443\"]", Some("`a.example:8443`")),
        ("[\"a.example:8443\"]", "hosts = [\"a.example:8443\"]", None),
        ("[\"a.example:8443\"]", "hosts = [\"a.example\"]", Some("`a.example:443`")),
        ("[\"a.example\"]", "hosts = [\"a.example\"]\nports = [443, 444]", Some("`a.example:444`")),
        ("[\"*.a.example\"]", "hosts = [\"b.a.example\"]", None),
        ("[\"*.a.example\"]", "hosts = [\"*.b.a.example\"]", None),
        ("[\"*.a.example\"]", "hosts = [\"a.example\"]", Some("`a.example:443`")),
        ("[\"*.a.example\"]", "hosts = [\".a.example\"]", Some("`.a.example:443`")),
        ("[\"b.a.example\"]", "hosts = [\"*.a.example\"]", Some("`*.a.example:443`")),
    ] {
        let policy = format!("name = \"p\"\n[[allow]]\nname = \"r\"\n{rule}\ncredential = \"k\"\n");
        let found = error_texts(compile_configured(&configuration(hosts), &[&policy])).join("\n");
        match refused {
            None => assert_eq!(found, "", "{hosts} {rule}"),
            Some(host) => {
                let expected = format!("policies/0.toml:3:8: credential `k` may not be sent to {host}");
                assert!(found.contains(&expected), "{hosts} {rule}: {found}");
            }
        }
    }
    let policy = "name = \"p\"\n";
    for (hosts, place, part) in [
        ("[]", "4:9", "a credential needs `hosts`"),
        ("[\"*.com\"]", "4:10", "anyone could register one"),
        ("[\"*\"]", "4:10", "anyone could register one"),
        ("[\"https://a.example\"]", "4:10", "it has a scheme"),
        ("[\"10.0.0.1\"]", "4:10", "is not a host pattern"),
        ("[\"a.example\", \"A.EXAMPLE\"]", "4:23", "host `a.example` is defined twice"),
        (
            "[\"a.example\"]\n[[credential]]\nname = \"k\"\nenv = \"E\"\nhosts = [\"b.example\"]",
            "6:8",
            "defined twice",
        ),
    ] {
        let found = error_texts(compile_configured(&configuration(hosts), &[policy])).join("\n");
        assert!(
            found.contains(&format!("sandbar.toml:{place}: ")) && found.contains(part),
            "{hosts}: {found}"
        );
    }
    let none = "[[credential]]\nname = \"k\"\nfile = \"f\"\n[[sandbox]]\nid = \"a\"\n";
    let found = error_texts(compile_configured(none, &[])).join("\n");
    assert!(found.contains("sandbar.toml:2:8: a credential needs `hosts`"), "{found}");
    unwrap_rules(compile_configured(&configuration("[\"a.example\"]"), &[policy]));
}

/// People paste a secret where its name, its file or the header belongs.
#[test]
fn p11_a_secret_pasted_into_the_configuration_is_not_repeated() {
    for secret in [
        "sk-ant-0123456789abcdef",
        "ghp_0123456789",
        "eyJhbGciOiJSUzI1NiJ9.e30",
        "9f86d081884c7d659a2feaa0c55ad015",
    ] {
        for line in [
            format!("value = \"{secret}\"\nfile = \"f\""),
            format!("key = {secret}\nfile = \"f\""),
            format!("file = \"f\"\ntimeout_seconds = \"{secret}\""),
            format!("file = \"f\"\nform = \"{secret}\""),
            format!("file = \"f\"\nform = {{ header = \"{secret} x\" }}"),
            format!("file = \"f\"\nform = {{ header = \"x-api-key\", value = \"{secret}\" }}"),
            format!("file = \"f\"\nform = {{ placeholder = {{ in = [\"{secret}\"] }} }}"),
            format!("oauth2 = \"{secret}\""),
            format!(
                "oauth2 = {{ token_url = \"https://{secret}@id.example/\", client_id = \"c\", client_secret = \"{secret}\" }}"
            ),
            format!("env = \"{secret}-\""),
            format!("command = [\"echo\", \"{secret}\"]\nfile = \"f\""),
            format!("file = \"f\"\nhosts = [\"{secret} x\"]"),
        ] {
            let text = format!("[[credential]]\nname = \"k\"\n{line}\n");
            let text = if line.contains("hosts") { text } else { format!("{text}hosts = [\"a.example\"]\n") };
            let problems = read_configuration(&source_file("sandbar.toml", &text)).err();
            let shown = format!("{:?}", problems.unwrap_or_else(|| panic!("accepted: {text}")));
            assert!(!shown.contains(secret), "{text}\n{shown}");
        }
        let named = format!("[[credential]]\nname = \"{secret} \"\nfile = \"f\"\nhosts = [\"a.example\"]\n");
        let shown = format!("{:?}", read_configuration(&source_file("sandbar.toml", &named)).unwrap_err());
        assert!(!shown.contains(secret) && shown.contains("invalid credential name"), "{shown}");
        let service = format!(
            "[[memory_service]]\nhost = \"m.example\"\naudience = \"m\"\nmode = \"api-key\"\ncredential = \"{secret}\"\n"
        );
        let shown = format!("{:?}", read_configuration(&source_file("sandbar.toml", &service)).unwrap_err());
        assert!(!shown.contains(secret), "{shown}");
    }
}

/// Two credentials for one host, and a policy with these rules, each with a name of its own.
fn compile_pair(
    forms: [&str; 2],
    rules: &[&str],
) -> Result<rules::RuleSet, Vec<rules::load::problem::Problem>> {
    let [one, two] = forms;
    let configuration = format!(
        "[[credential]]\nname = \"one\"\nfile = \"f\"\nhosts = [\".a.example\"]\n{one}\n\
         [[credential]]\nname = \"two\"\nfile = \"f\"\nhosts = [\".a.example\"]\n{two}\n\
         [[sandbox]]\nid = \"s\"\npolicies = [\"p\"]\n"
    );
    let rule = |(at, body): (usize, &&str)| {
        format!("[[allow]]\nname = \"rule {at}\"\nhosts = [\"a.example\"]\n{body}\n")
    };
    let rules: String = rules.iter().enumerate().map(rule).collect();
    compile_configured(&configuration, &[&format!("name = \"p\"\n{rules}")])
}

// proves: allow.credentials
#[test]
fn p11_a_rule_injects_several_credentials_in_places_of_their_own() {
    let (key, app) = ("form = { header = \"dd-api-key\" }", "form = { header = \"DD-Application-Key\" }");
    let both = "credentials = [\"two\", \"one\"]";
    let rules = unwrap_rules(compile_pair([key, app], &[both]));
    let permit = permit_of(&rules, "GET https://a.example/");
    let names: Vec<&str> = permit.credentials().iter().map(|name| name.as_str()).collect();
    assert_eq!(names, ["one", "two"]);
    let many =
        format!("credentials = [{}]", (0..9).map(|n| format!("\"c{n}\"")).collect::<Vec<_>>().join(", "));
    let query = "form = { dangerously_query = \"KEY\" }";
    for (forms, rules, part) in [
        (["", ""], vec![both], "credentials `one` and `two` both set the header field `authorization`"),
        ([key, "form = { header = \"DD-API-KEY\" }"], vec![both], "both set the header field `dd-api-key`"),
        (
            ["", "form = { basic = { user = \"u\" } }"],
            vec![both],
            "both set the header field `authorization`",
        ),
        (["", "form = { placeholder = { in = [\"header:authorization\"] } }"], vec![both], "`authorization`"),
        ([query, "form = { dangerously_query = \"key\" }"], vec![both], "both set the parameter `KEY`"),
        ([key, app], vec!["credential = \"one\"\ncredentials = [\"two\"]"], "`credential` and `credentials`"),
        ([key, app], vec!["credentials = [\"one\", \"one\"]"], "credential `one` is defined twice"),
        ([key, app], vec!["credentials = []"], "takes 1 to 8 names"),
        ([key, app], vec![many.as_str()], "takes 1 to 8 names"),
        ([key, app], vec!["credentials = [\"one\", \"sk-0123456789\"]"], "never a secret itself"),
        ([key, app], vec!["credentials = [\"one\", \"none\"]"], "unknown credential `none`"),
        ([key, app], vec![both, "credential = \"one\""], "inject different credentials"),
        ([key, app], vec!["tls = \"tunnel\"\ncredentials = [\"one\"]"], "need interception"),
        ([key, app], vec!["ports = [80]\ncredentials = [\"one\"]"], "never sent in the clear"),
    ] {
        let found = error_texts(compile_pair(forms, &rules)).join("\n");
        assert!(found.contains(part), "{forms:?} {rules:?}: {found}");
    }
    unwrap_rules(compile_pair([key, app], &[both, "credentials = [\"one\", \"two\"]\nmethods = [\"GET\"]"]));
}

// proves: allow.pin_account
#[test]
fn p11_the_rule_says_what_becomes_of_other_accounts() {
    let key = "form = { header = \"x-api-key\" }";
    let pinned = |rules: &[&str], url: &str| {
        let rules = unwrap_rules(compile_pair([key, ""], rules));
        permit_of(&rules, url).pin_account()
    };
    let credential = "credential = \"one\"\npaths = [\"/v1/**\"]";
    for (rules, v1, rest) in [
        (vec![credential, ""], PinAccount::Remove, PinAccount::Remove),
        (vec![credential, "pin_account = \"refuse\""], PinAccount::Remove, PinAccount::Refuse),
        (vec![credential, "pin_account = \"off\""], PinAccount::Remove, PinAccount::Off),
        (
            vec!["credential = \"one\"\npaths = [\"/v1/**\"]\npin_account = \"off\"", ""],
            PinAccount::Off,
            PinAccount::Remove,
        ),
        (vec![""], PinAccount::Off, PinAccount::Off),
        (vec!["pin_account = \"remove\""], PinAccount::Remove, PinAccount::Remove),
    ] {
        assert_eq!(pinned(&rules, "GET https://a.example/v1/x"), v1, "{rules:?}");
        assert_eq!(pinned(&rules, "GET https://a.example/x"), rest, "{rules:?}");
    }
    for (rule, part) in [
        ("pin_account = \"keep\"", "`keep` is not one of `off`, `refuse`, `remove`"),
        ("pin_account = \"refuse\"\ntls = \"tunnel\"", "need interception"),
        ("pin_account = \"refuse\"\ntcp = [5432]", "raw TCP carries no requests"),
    ] {
        let found = error_texts(compile_pair([key, ""], &[rule])).join("\n");
        assert!(found.contains(part), "{rule}: {found}");
    }
    let base =
        "name = \"b\"\n[[allow]]\nname = \"base\"\nhosts = [\"a.example\"]\npin_account = \"refuse\"\n";
    let own = "name = \"p\"\n[[allow]]\nname = \"own\"\nhosts = [\"a.example\"]\npin_account = \"off\"\n";
    let rules = unwrap_rules(compile_configured(
        "[[sandbox]]\nid = \"s\"\nbase = \"b\"\npolicies = [\"p\"]\n",
        &[base, own],
    ));
    assert_eq!(
        permit_of(&rules, "GET https://a.example/").pin_account(),
        PinAccount::Refuse,
        "the stricter layer counts"
    );
}

fn permit_of(rules: &rules::RuleSet, text: &str) -> rules::Permit {
    let (method, url) = text.split_once(' ').unwrap();
    let mut probe = rules::probe::PolicyProbe::parse(url).unwrap();
    probe.method = Some(rules::facts::HttpMethod::parse(method).unwrap());
    match probe.decide(rules, &super::sandbox_ref(rules, "s")) {
        rules::Decision::Allow(permit) => permit,
        rules::Decision::Deny(denial) => panic!("{text}: {:?}", denial.reason),
    }
}

#[test]
fn the_example_of_the_readme_loads() {
    let readme = include_str!("../../../README.md");
    let example = readme.split("```toml\n").find(|block| block.starts_with("[[credential]]")).unwrap();
    let example = example.split("```").next().unwrap();
    let settings = read_configuration(&source_file("sandbar.toml", example)).unwrap();
    let forms: Vec<&CredentialForm> = settings.credentials.iter().map(|one| &one.form).collect();
    let header = CredentialForm::Header { name: text("x-api-key"), prefix: String::new() };
    let basic = CredentialForm::Basic { user: text("x-access-token") };
    assert_eq!(forms, [&CredentialForm::Bearer, &header, &basic]);
}
