//! The credentials of the configuration and their values of now. Each is fetched off the path of requests.
//!
//! A reload replaces credentials in two steps, around the change of the rules: first those that are new or changed are
//! there, then those that left are gone. A request that was decided just before finds each credential only for the hosts
//! that its own definition names, so a changed one never goes to a host of the old definition.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use arc_swap::ArcSwap;
use dns_filter::own::OwnResolver;
use rules::configuration::Configuration;
use rules::credential::{Credential, CredentialSource};
use rules::ids::CredentialName;
use rules::signals::secrets::ExactValue;
use rules::{Host, Reason};
use secrecy::ExposeSecret;
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use zeroize::Zeroizing;

use crate::credential::cell::{CredentialCell, ValueStatus};
use crate::credential::error::CredentialError;
use crate::credential::file_watch;
use crate::credential::known::KnownValues;
use crate::credential::scrub::LabelledSecret;
use crate::credential::source::endpoint::{TokenClient, trust_source};
use crate::credential::source::{self, Source};
use crate::credential::value::CredentialValue;
use crate::report::refusal::Refusal;

/// How long the start and a reload wait for the files of all credentials. One that hangs is read later, or never.
pub(super) const FIRST_LOOK: Duration = Duration::from_secs(5);

/// The credentials of the configuration.
pub(crate) struct CredentialStore {
    by: ArcSwap<HashMap<CredentialName, Arc<CredentialEntry>>>,
    known: Arc<KnownValues>,
    /// What sources are asked with; `None` where nothing is fetched.
    fetching: Option<FetchSettings>,
}

struct FetchSettings {
    base: PathBuf,
    client: TokenClient,
    runtime: Handle,
}

/// A credential and its value.
struct CredentialEntry {
    definition: Arc<Credential>,
    cell: Arc<CredentialCell>,
    /// The file that holds the value as it is, which a thread watches.
    file: Option<PathBuf>,
    /// The task that fetches it, which ends with this.
    task: Mutex<JoinSet<()>>,
    /// What is started with the first use, so that a rejected reload leaves no trace.
    start: Mutex<Option<Start>>,
}

/// What keeps a value fresh.
enum Start {
    Watch(Sender<()>),
    Fetch(Box<Source>, Handle),
}

/// Credentials that a reload puts in force.
pub(crate) struct PreparedCredentials {
    store: Arc<CredentialStore>,
    fresh: HashMap<CredentialName, Arc<CredentialEntry>>,
}

/// A credential, for people.
pub(crate) struct CredentialStatus {
    pub(crate) name: CredentialName,
    pub(crate) kind: &'static str,
    pub(crate) value: ValueStatus,
}

impl CredentialStore {
    /// Starts to fetch the credentials of a configuration.
    ///
    /// # Errors
    ///
    /// Fails if what a source needs is missing, malformed or open to others.
    pub(crate) fn open(configuration: &Configuration, base: &Path) -> anyhow::Result<Self> {
        let resolver = configuration.dns.as_ref().map(OwnResolver::new);
        let trust = trust_source(&configuration.upstream, base);
        let client = TokenClient::new(resolver, trust, configuration.upstream.mark);
        let runtime = Handle::try_current().context("credentials are fetched on a runtime")?;
        let fetching = Some(FetchSettings { base: base.to_owned(), client, runtime });
        let store = CredentialStore { fetching, ..CredentialStore::empty() };
        let fresh = store.make_entries(&configuration.credentials)?;
        fresh.values().for_each(|entry| entry.start());
        store.by.store(Arc::new(fresh));
        Ok(store)
    }

    /// Returns a store without credentials.
    pub(crate) fn empty() -> Self {
        CredentialStore { by: ArcSwap::default(), known: Arc::default(), fetching: None }
    }

    /// Reads the credentials that are files, once, and returns the names of the others and of those that cannot be read.
    pub(crate) fn read_files(credentials: &[Credential], base: &Path) -> (Self, Vec<CredentialName>) {
        let (store, mut unread) = (CredentialStore::empty(), Vec::new());
        for one in credentials {
            let read = match &one.source {
                CredentialSource::File(file) => file_watch::read_value(&base.join(file)).ok(),
                CredentialSource::Env(_)
                | CredentialSource::Command(_)
                | CredentialSource::OAuth2(_)
                | CredentialSource::Google(_)
                | CredentialSource::GitHubApp(_)
                | CredentialSource::Aws(_)
                | CredentialSource::Spiffe(_) => None,
            };
            match read {
                Some(value) => store.known.adopt(&one.name, &Arc::new(value)),
                None => unread.push(one.name.clone()),
            }
        }
        (store, unread)
    }

    /// Prepares the credentials of a changed configuration: those that changed are started, the others stay.
    ///
    /// # Errors
    ///
    /// As [`CredentialStore::open`], for those that are new or changed.
    pub(crate) fn prepare(
        self: &Arc<Self>,
        credentials: &[Credential],
    ) -> anyhow::Result<PreparedCredentials> {
        Ok(PreparedCredentials { store: self.clone(), fresh: self.make_entries(credentials)? })
    }

    /// Makes the entries of a configuration, with those in use where nothing changed.
    fn make_entries(
        &self,
        credentials: &[Credential],
    ) -> anyhow::Result<HashMap<CredentialName, Arc<CredentialEntry>>> {
        let Some(fetching) = &self.fetching else { return Ok(HashMap::new()) };
        let running = self.by.load();
        let kept =
            |one: &Credential| running.get(&one.name).filter(|entry| *entry.definition == *one).cloned();
        let (mut entries, mut changed) = (HashMap::new(), Vec::new());
        for one in credentials {
            match kept(one) {
                Some(entry) => drop(entries.insert(one.name.clone(), entry)),
                None => changed.push(one),
            }
        }
        check_sources(&changed, &fetching.base)?;
        for one in changed {
            let entry = self.prepare_entry(one, fetching).context("cannot start a thread")?;
            entries.insert(one.name.clone(), Arc::new(entry));
        }
        Ok(entries)
    }

    fn prepare_entry(&self, one: &Credential, fetching: &FetchSettings) -> io::Result<CredentialEntry> {
        let cell = Arc::new(CredentialCell::new(one.name.clone(), one.timeout, self.known.clone()));
        let (file, start) = match &one.source {
            CredentialSource::File(path) => {
                let path = fetching.base.join(path);
                (Some(path.clone()), Start::Watch(file_watch::watch(path, &cell)?))
            }
            CredentialSource::Env(_)
            | CredentialSource::Command(_)
            | CredentialSource::OAuth2(_)
            | CredentialSource::Google(_)
            | CredentialSource::GitHubApp(_)
            | CredentialSource::Aws(_)
            | CredentialSource::Spiffe(_) => {
                let source = Source::open(one, &fetching.base, &fetching.client)?;
                (None, Start::Fetch(Box::new(source), fetching.runtime.clone()))
            }
        };
        let (task, start) = (Mutex::default(), Mutex::new(Some(start)));
        Ok(CredentialEntry { definition: Arc::new(one.clone()), cell, file, task, start })
    }

    /// Returns the value of a credential for a request to this host and port. Waits, within the credential's deadline,
    /// for a fetch in progress.
    ///
    /// # Errors
    ///
    /// Returns a refusal if there is none: the request must not leave without it.
    pub(crate) async fn value(
        &self,
        name: &CredentialName,
        host: &Host,
        port: u16,
    ) -> Result<Arc<CredentialValue>, Refusal> {
        let refused = |why: String| {
            Refusal::from(Reason::CredentialUnavailable).with_detail(format!("credential `{name}`: {why}"))
        };
        let entry = self.by.load().get(name).cloned();
        let entry = entry.ok_or_else(|| refused("it is not in the configuration".to_owned()))?;
        let covered = match host {
            Host::Name(name) => entry.definition.covers(name, port),
            Host::Address(_) => false,
        };
        if !covered {
            return Err(refused(format!("its `hosts` in the configuration do not contain {host}:{port}")));
        }
        entry.value().await.map_err(|error| refused(error.to_string()))
    }

    /// Returns what the configuration says of a credential.
    pub(crate) fn definition(&self, name: &CredentialName) -> Option<Arc<Credential>> {
        self.by.load().get(name).map(|entry| entry.definition.clone())
    }

    /// Returns whether there are credentials, and so placeholders.
    pub(crate) fn is_empty(&self) -> bool {
        self.by.load().is_empty()
    }

    /// Returns a number that grows whenever a value changes.
    pub(crate) fn version(&self) -> u64 {
        self.known.version()
    }

    /// Returns every secret of now and of the last day, to recognise it where it must not be.
    pub(crate) fn exact_values(&self) -> Vec<ExactValue> {
        self.known.exact_values()
    }

    /// Returns the secrets of these credentials, now and in the last day, each with the name of its credential, to mask
    /// them in answers.
    pub(crate) fn labelled_secrets(&self, names: &[&CredentialName]) -> Vec<LabelledSecret> {
        let secrets = names.iter().flat_map(|name| {
            let secrets = self.known.secrets_of(name).into_iter();
            secrets.map(|secret| LabelledSecret {
                name: (*name).clone(),
                value: Zeroizing::new(secret.expose_secret().to_owned()),
            })
        });
        secrets.collect()
    }

    /// Returns the state of every credential, by name.
    pub(crate) fn status(&self) -> Vec<CredentialStatus> {
        let by = self.by.load();
        let status = |(name, entry): (&CredentialName, &Arc<CredentialEntry>)| CredentialStatus {
            name: name.clone(),
            kind: source::kind(&entry.definition.source),
            value: entry.cell.status(),
        };
        let mut all: Vec<CredentialStatus> = by.iter().map(status).collect();
        all.sort_by(|one, other| one.name.as_str().cmp(other.name.as_str()));
        all
    }
}

impl CredentialEntry {
    /// Starts to keep the value fresh; once.
    fn start(&self) {
        let start = sys::lock(&self.start).take();
        match start {
            None => {}
            Some(Start::Watch(watch)) => drop(watch.send(())), // the thread waits for it
            Some(Start::Fetch(source, runtime)) => {
                let cell = self.cell.clone();
                sys::lock(&self.task).spawn_on(async move { cell.keep_fresh(*source).await }, &runtime);
            }
        }
    }

    async fn value(&self) -> Result<Arc<CredentialValue>, CredentialError> {
        match (self.cell.usable(), &self.file) {
            (Some(value), _) => Ok(value),
            (None, Some(path)) => self.cell.file_value(path).await,
            (None, None) => self.cell.value().await,
        }
    }
}

impl PreparedCredentials {
    /// Adds what is new and replaces what changed.
    pub(crate) fn add(&self) {
        self.fresh.values().for_each(|entry| entry.start());
        let mut all = HashMap::clone(&self.store.by.load());
        all.extend(self.fresh.iter().map(|(name, entry)| (name.clone(), entry.clone())));
        self.store.by.store(Arc::new(all));
    }

    /// Removes what is no longer in the configuration.
    pub(crate) fn remove_others(self) {
        let before = self.store.by.swap(Arc::new(self.fresh));
        let now = self.store.by.load();
        before.keys().filter(|name| !now.contains_key(name)).for_each(|name| self.store.known.retire(name));
    }
}

/// Checks what sources need, each on a thread of its own, and waits for all for [`FIRST_LOOK`].
fn check_sources(credentials: &[&Credential], base: &Path) -> anyhow::Result<()> {
    let (outcomes, received) = mpsc::channel();
    for one in credentials {
        let (one, base, outcomes) = (Credential::clone(one), base.to_owned(), outcomes.clone());
        let checked = move || drop(outcomes.send((one.name.clone(), source::check(&one, &base))));
        let thread = std::thread::Builder::new().name("credential".to_owned());
        thread.spawn(checked).context("cannot start a thread")?;
    }
    drop(outcomes);
    let until = Instant::now() + FIRST_LOOK;
    let mut faults: Vec<String> = Vec::new();
    loop {
        match received.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok((name, Err(error))) => faults.push(format!("credential `{name}`: {error}")),
            Ok((_, Ok(()))) => {}
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
        }
    }
    faults.sort();
    if faults.is_empty() { Ok(()) } else { bail!("{}", faults.join("\n")) }
}

#[cfg(test)]
mod tests {
    use rules::DomainName;
    use rules::credential::CredentialForm;
    use rules::pattern::{HostPattern, PatternWidth};
    use secrecy::ExposeSecret;

    use super::*;

    fn credential(name: &str, value: &str, host: &str) -> Credential {
        Credential {
            name: CredentialName::parse(name).unwrap(),
            source: CredentialSource::Command(vec!["echo".to_owned(), value.to_owned()]),
            form: CredentialForm::Bearer,
            hosts: vec![HostPattern::parse(host, PatternWidth::Narrow).unwrap()],
            timeout: Duration::from_secs(60),
            cache: None,
        }
    }

    fn open(credentials: Vec<Credential>) -> Arc<CredentialStore> {
        let configuration = Configuration { credentials, ..Configuration::default() };
        Arc::new(CredentialStore::open(&configuration, Path::new(".")).unwrap())
    }

    async fn value(store: &CredentialStore, name: &str, host: &str) -> Result<String, String> {
        let (name, host) =
            (CredentialName::parse(name).unwrap(), Host::Name(DomainName::parse(host).unwrap()));
        let value = store.value(&name, &host, 443).await;
        value
            .map(|value| value.text().unwrap().to_owned())
            .map_err(|refusal| refusal.detail.unwrap_or_default())
    }

    fn known(store: &CredentialStore, name: &str) -> Vec<String> {
        let secrets = store.labelled_secrets(&[&CredentialName::parse(name).unwrap()]);
        secrets.iter().map(|secret| secret.value.to_string()).collect()
    }

    // proves: credential.hosts
    #[tokio::test]
    async fn p11_a_value_goes_to_the_hosts_of_its_credential_only() {
        let store = open(vec![credential("key", "first-value", "a.test")]);
        assert_eq!(value(&store, "key", "a.test").await.as_deref(), Ok("first-value"));
        let elsewhere = value(&store, "key", "b.test").await.unwrap_err();
        assert!(elsewhere.contains("do not contain b.test:443"), "{elsewhere}");
        assert!(value(&store, "other", "a.test").await.unwrap_err().contains("not in the configuration"));
        let address = Host::Address("127.0.0.1".parse().unwrap());
        assert!(store.value(&CredentialName::parse("key").unwrap(), &address, 443).await.is_err());
        let name = Host::Name(DomainName::parse("a.test").unwrap());
        assert!(store.value(&CredentialName::parse("key").unwrap(), &name, 8443).await.is_err());
    }

    #[tokio::test]
    async fn p9_a_reload_adds_changes_and_removes_and_a_rejected_one_leaves_no_trace() {
        let store = open(vec![
            credential("key", "first-value", "a.test"),
            credential("kept", "kept-value", "a.test"),
        ]);
        assert_eq!(value(&store, "key", "a.test").await.as_deref(), Ok("first-value"));
        let kept = store.by.load().get(&CredentialName::parse("kept").unwrap()).cloned().unwrap();

        drop(store.prepare(&[credential("key", "never-used-value", "a.test")]).unwrap());
        assert_eq!(value(&store, "key", "a.test").await.as_deref(), Ok("first-value"));
        assert_eq!(known(&store, "key"), ["first-value"]);

        let changed = [
            credential("key", "other-value", "b.test"),
            credential("kept", "kept-value", "a.test"),
            credential("new", "new-value", "a.test"),
        ];
        let prepared = store.prepare(&changed).unwrap();
        prepared.add();
        assert_eq!(value(&store, "new", "a.test").await.as_deref(), Ok("new-value"));
        assert!(value(&store, "key", "a.test").await.is_err(), "the new value never goes to the old host");
        assert_eq!(value(&store, "key", "b.test").await.as_deref(), Ok("other-value"));
        prepared.remove_others();
        let same = store.by.load().get(&CredentialName::parse("kept").unwrap()).cloned().unwrap();
        assert!(Arc::ptr_eq(&kept, &same), "what did not change goes on");
        assert_eq!(known(&store, "key"), ["other-value", "first-value"]);

        let prepared = store.prepare(&[]).unwrap();
        prepared.add();
        assert!(value(&store, "new", "a.test").await.is_ok(), "rules of before may still name it");
        prepared.remove_others();
        assert!(value(&store, "new", "a.test").await.is_err());
        assert_eq!(known(&store, "new"), ["new-value"], "it is still recognised");
    }

    #[tokio::test]
    async fn a_credential_whose_file_is_missing_is_not_prepared() {
        let store = open(Vec::new());
        let missing = Credential {
            source: CredentialSource::File("/no/such/file".to_owned()),
            ..credential("key", "first-value", "a.test")
        };
        let why = store.prepare(&[missing]).err().unwrap().to_string();
        assert!(why.starts_with("credential `key`: cannot read the file /no/such/file: "), "{why}");
    }
}
