//! The one departure: everything between a permit and the first upstream byte, for tunnels, HTTP requests and
//! memory calls alike (P3, P7, P10, P18).
//!
//! A new budget, metric or check on what leaves belongs here, where no path can forget it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use audit::{ByteCount, OpenRecord, Receipt, StableCode};
use rules::budget::UsageKind;
use rules::ids::CredentialName;
use rules::signals::bits::broken_body_price;
use rules::{DialPermit, Permit, Reason, RuleSet};
use tokio::net::TcpStream;

use crate::budget::ledger::{ByteLease, Charges};
use crate::budget::live::{CutSignal, LiveEntry};
use crate::egress::connect::DialledConnection;
use crate::egress::dial::dial;
use crate::egress::shared::Shared;
use crate::inspect::{AttemptContent, Inspection, RequestHead};
use crate::report::exhausted::Exhausted;
use crate::report::metrics;
use crate::report::record;
use crate::report::refusal::Refusal;

/// An attempt that may leave: charged, recorded, resolved, admitted, registered as live, decided again.
pub(crate) struct Departure {
    pub(crate) dial_permit: DialPermit,
    pub(crate) receipt: Receipt,
    pub(crate) charges: Arc<Charges>,
    cut: Arc<CutSignal>,
    live_entry: LiveEntry,
    byte_count: Arc<ByteCount>,
    /// Bytes that are charged already and not sent yet.
    upfront: AtomicU64,
    pub(crate) inspection: Inspection,
}

/// The price of an announced length: refunded if all of the body leaves, else spent.
pub(crate) struct LengthHold {
    charges: Arc<Charges>,
    lease: ByteLease,
}

impl LengthHold {
    pub(crate) fn refund(self) {
        self.charges.refund(&self.lease, 0);
    }
}

/// What an attempt brings to its departure besides its permit.
pub(crate) struct DepartureTerms<'a> {
    /// Bytes that leave before all others: a tunnel's first bytes, a request's head, a memory call's head and body.
    pub(crate) upfront: u64,
    /// The treatment in records and metrics. The guard holds a memory call, although its permit says `forward`.
    pub(crate) treatment: &'static str,
    /// The credential that is injected, for the record.
    pub(crate) credential: Option<&'a CredentialName>,
    /// Closes the attempt when it loses its permission.
    pub(crate) cut: Arc<CutSignal>,
    /// What can be searched of it.
    pub(crate) content: AttemptContent<'a>,
}

impl Departure {
    /// Takes a permitted attempt to the point where it may dial.
    ///
    /// # Errors
    ///
    /// Every refusal names the permit's rule: the attempt was allowed, and failed afterwards.
    pub(crate) async fn begin(
        shared: &Shared,
        rules: &RuleSet,
        permit: &Permit,
        terms: DepartureTerms<'_>,
        record: &mut OpenRecord,
    ) -> Result<Self, Refusal> {
        let begun = Self::try_begin(shared, rules, permit, terms, record).await;
        begun.map_err(|refusal| refusal.under(permit))
    }

    async fn try_begin(
        shared: &Shared,
        rules: &RuleSet,
        permit: &Permit,
        terms: DepartureTerms<'_>,
        record: &mut OpenRecord,
    ) -> Result<Self, Refusal> {
        let state = shared.ledger.sandbox(permit.sandbox()).ok_or(Reason::BudgetUnkept)?;
        let signals = state.signals.clone();
        let inspection =
            Inspection::begin(&shared.inspector, signals, permit, &terms.content, record).await?;
        let charges = shared.charge(permit).await?;
        charges.charge(UsageKind::Upload, terms.upfront).await?;
        let receipt = record_permit(rules, permit, &terms, record).await?;
        let started = Instant::now();
        let found = shared.resolver.resolve(permit).await?;
        metrics::observe_resolve(started.elapsed());
        let dial_permit = rules.admit(permit, &found)?;
        let first = dial_permit.addresses().first().copied();
        let (cut, byte_count) = (terms.cut, record.byte_count());
        let live_entry =
            shared.live.register(permit, first, byte_count.clone(), cut.clone(), charges.clone());
        // Registered first, decided again second: a reload in between either finds the entry and cuts it, or
        // is seen here. The other order would leave a gap.
        if let Some(address) = first {
            shared.recheck_permit(permit, address, &charges)?;
        }
        let upfront = AtomicU64::new(terms.upfront);
        Ok(Departure { dial_permit, receipt, charges, cut, live_entry, byte_count, upfront, inspection })
    }

    /// Connects to the admitted address that answers first, unless the attempt is cut first.
    pub(crate) async fn dial(
        &self,
        shared: &Shared,
        record: &mut OpenRecord,
    ) -> Result<(TcpStream, DialledConnection), Refusal> {
        let dialling = dial(&self.dial_permit, &self.receipt, shared, shared.limits.connect());
        let dialled = tokio::select! {
            dialled = dialling => dialled,
            reason = self.cut.wait() => Err(reason.into()),
        };
        let (stream, held) = dialled.map_err(|refusal| refusal.under(self.permit()))?;
        self.set_dialled(shared, record, held.address())?;
        Ok((stream, held))
    }

    /// Notes the address that is dialled, in the record and among the live connections. Permission is checked again for
    /// this very address, because it may not be the first of those that were admitted.
    pub(crate) fn set_dialled(
        &self,
        shared: &Shared,
        record: &mut OpenRecord,
        address: SocketAddr,
    ) -> Result<(), Refusal> {
        record.set_dialled(address);
        self.live_entry.set_dialled(address.ip());
        let rechecked = shared.recheck_permit(self.permit(), address.ip(), &self.charges);
        rechecked.map_err(|reason| Refusal::from(reason).under(self.permit()))
    }

    /// Counts and charges a request that is about to be sent: its head, with what leaves together with it. The first
    /// send was charged at the departure, as far as the sandbox made it; a request that is sent again counts again.
    pub(crate) async fn count_send(&self, bytes: u64) -> Result<(), Exhausted> {
        let charged = self.upfront.swap(0, Ordering::Relaxed);
        self.charges.charge(UsageKind::Upload, bytes.saturating_sub(charged)).await?;
        self.byte_count.add_send(bytes);
        Ok(())
    }

    /// Prices what a request says outside its body, how it is sent included, charges that, and learns it, before the
    /// request leaves (P19).
    pub(crate) async fn charge_head(
        &self,
        head: &RequestHead<'_>,
        sending: &str,
        record: &OpenRecord,
    ) -> Result<(), Refusal> {
        let priced = self.inspection.price_head(head, sending).await;
        let bits = priced.bits;
        self.charge_bits(bits, record).await?;
        priced.learn(); // last: what is refused must not make later requests cheaper
        Ok(())
    }

    /// Charges what the announced length of a body says if the body is broken off (P19).
    pub(crate) async fn hold_length(&self, length: u64, open_bodies: u32) -> Result<LengthHold, Refusal> {
        let bits = broken_body_price(length, open_bodies);
        let lease = self.charges.hold(UsageKind::HeaderBits, bits).await?;
        Ok(LengthHold { charges: self.charges.clone(), lease })
    }

    /// Charges what a request says outside its content after its head has left (P19).
    pub(crate) async fn charge_bits(&self, bits: u64, record: &OpenRecord) -> Result<(), Refusal> {
        self.charges.charge(UsageKind::HeaderBits, bits).await?;
        metrics::count_header_bits(bits);
        self.inspection.note_bits(bits, record).await
    }

    /// Counts and charges what is received.
    pub(crate) async fn count_received(&self, bytes: u64) -> Result<(), Exhausted> {
        self.charges.charge(UsageKind::Download, bytes).await?;
        self.byte_count.add_received(bytes);
        Ok(())
    }

    pub(crate) fn permit(&self) -> &Permit {
        self.dial_permit.permit()
    }
}

/// Writes the decision record, then counts the attempt as allowed: one that could not be recorded is refused and
/// counted as such, once.
async fn record_permit(
    rules: &RuleSet,
    permit: &Permit,
    terms: &DepartureTerms<'_>,
    record: &mut OpenRecord,
) -> Result<Receipt, Refusal> {
    let mut details = record::permit_record(permit, rules);
    details.treatment = Some(StableCode(terms.treatment));
    details.inspected = Some(StableCode(terms.content.coverage(permit)));
    details.credential = terms.credential.map(|name| name.as_str().into());
    let started = Instant::now();
    let receipt = record.record_decision(details).await?;
    metrics::observe_record(started.elapsed());
    metrics::count_decision("allowed", terms.treatment);
    Ok(receipt)
}
