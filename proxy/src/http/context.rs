//! The state of one request between Pingora's phases. Dropping it closes the record of a request that was cut.

use std::sync::Arc;

use audit::{AttemptOutcome, OpenRecord};
use bytes::Bytes;
use pingora_core::ErrorType;
use pingora_core::prelude::{Error, Result};
use rules::budget::UsageKind;
use rules::signals::shape::RequestOutcome;
use rules::{Reason, RuleSet};

use super::RequestMonitor;
use super::outgoing::{BodyRest, Outgoing, OutgoingBody};
use crate::budget::gates::Turn;
use crate::credential::CredentialValue;
use crate::credential::scrub::ResponseScrubber;
use crate::egress::connect::DialledConnection;
use crate::egress::departure::{Departure, LengthHold};
use crate::egress::dial::DialRace;
use crate::quota::{DialledUse, RequestQuota};
use crate::report::record;
use crate::report::refusal::Refusal;

/// The type of a Pingora error that a phase returns for a refusal of ours; the context holds the refusal.
const REFUSED: &str = "refused";

/// The half of a request's state that Pingora owns.
///
/// A request has two halves because two parties hold it. Pingora creates this one before we know the request, passes
/// it by `&mut` from phase to phase, and drops it when the request ends or its task is cancelled: it owns whatever
/// must be closed exactly once (record, departure, scrubber). The other half is [`RequestMonitor`]: our own loops
/// create it, share it by `Arc`, and watch it from outside while Pingora works (bytes moved, cut, answered, broken).
/// `RequestMonitor::digest` says how it reaches the phases.
#[derive(Default)]
pub(super) struct RequestContext {
    /// Empty until `request_filter`, because Pingora creates the context without arguments.
    pub(super) state: Option<RequestState>,
}

/// One request between its first phase and its record's close.
pub(super) struct RequestState {
    pub(super) monitor: Arc<RequestMonitor>,
    pub(super) rules: Arc<RuleSet>,
    /// Taken when it is closed.
    pub(super) record: Option<OpenRecord>,
    /// What the request holds of its sandbox's quota.
    pub(super) quota: Option<RequestQuota>,
    /// Set once the request may leave.
    pub(super) departed: Option<DepartedRequest>,
    pub(super) status: Option<u16>,
    /// Interim responses so far.
    pub(super) interim_answers: u64,
    /// The origin server switches protocols, as the request asked it to.
    pub(super) upgraded: bool,
    /// The refusal behind the error that a phase returned.
    pub(super) refusal: Option<Refusal>,
}

/// A request that may leave, or has left.
pub(super) struct DepartedRequest {
    pub(super) departure: Departure,
    /// The admitted addresses that are left to try.
    pub(super) race: DialRace,
    /// The request's turn to connect, until it has a connection.
    pub(super) turn: Option<Turn<u64>>,
    /// The connection it uses.
    pub(super) dialled: Option<DialledRequest>,
    pub(super) credential: Option<Arc<CredentialValue>>,
    pub(super) scrubber: Option<ResponseScrubber>,
    /// The body on its way out, if there is one.
    pub(super) body: Option<OutgoingBody>,
    /// What its announced length costs until all of it has left.
    pub(super) length_hold: Option<LengthHold>,
    /// Bytes of the bodies that were sent and received.
    pub(super) body_bytes: RequestOutcome,
}

/// The dialled connection of a request.
pub(super) struct DialledRequest {
    pub(super) connection: Arc<DialledConnection>,
    pub(super) in_use: Arc<DialledUse>,
}

impl Drop for RequestState {
    /// Closes the record of a request whose task was cancelled by a cut.
    fn drop(&mut self) {
        if let (Some(record), Some(reason)) = (self.record.take(), self.monitor.cut.reason()) {
            let outcome = AttemptOutcome::new(record::cut_ending(reason));
            record.close(AttemptOutcome { status: self.status, ..outcome });
        }
    }
}

impl DepartedRequest {
    pub(super) fn new(
        departure: Departure,
        credential: Option<Arc<CredentialValue>>,
    ) -> Result<Self, Reason> {
        let race = DialRace::new(&departure.dial_permit)?;
        Ok(DepartedRequest {
            departure,
            race,
            turn: None,
            dialled: None,
            credential,
            scrubber: None,
            body: None,
            length_hold: None,
            body_bytes: RequestOutcome::default(),
        })
    }

    /// Lets the next request connect: it shares this connection if that speaks HTTP/2, else it dials its own.
    pub(super) fn end_turn(&mut self, version: http::Version) {
        let turn = self.turn.take();
        if version == http::Version::HTTP_2 {
            return;
        }
        if let Some(turn) = turn {
            turn.open_to_all();
        }
        if let Some(dialled) = &self.dialled {
            dialled.connection.release_window(&dialled.in_use);
        }
    }
}

impl RequestContext {
    /// The request. Pingora runs no other phase before `request_filter`, which sets it.
    pub(super) fn state(&mut self) -> Result<&mut RequestState> {
        self.state.as_mut().ok_or_else(internal)
    }
}

impl RequestState {
    /// The departed request. Pingora runs the upstream phases only if `request_filter` let the request depart.
    pub(super) fn departed(&mut self) -> Result<&mut DepartedRequest> {
        self.departed.as_mut().ok_or_else(internal)
    }

    /// Charges bytes before they are passed on.
    pub(super) async fn charge(&mut self, usage: UsageKind, bytes: u64) -> Result<()> {
        let charged = self.departed()?.departure.charges.charge(usage, bytes).await;
        charged.map_err(|exhausted| self.fail(exhausted))
    }

    /// Searches the next bytes of the body, charges what the size of the next piece says, and leaves in `body` what may
    /// be forwarded.
    pub(super) async fn release_body(&mut self, body: &mut Option<Bytes>, last: bool) -> Result<()> {
        let monitor = self.monitor.clone();
        let Some(outgoing) = &mut self.departed()?.body else { return Ok(()) };
        let taken = outgoing.taken() + body.as_ref().map_or(0, Bytes::len) as u64;
        let rest = if last { BodyRest::Over } else { monitor.body_rest(taken) };
        let Outgoing { found, bytes, bits } = outgoing.take(body.as_ref(), rest).await;
        // To Pingora, none is the end of the body, and an empty chunk is nothing yet.
        *body = if last { bytes } else { Some(bytes.unwrap_or_default()) };
        let RequestState { departed: Some(departed), record: Some(record), .. } = &*self else {
            return Err(internal());
        };
        let mut passed = departed.departure.inspection.judge(found, record).await;
        if passed.is_ok() && bits > 0 {
            passed = departed.departure.charge_bits(bits, record).await;
        }
        passed.map_err(|refusal| {
            *body = None;
            self.fail(refusal)
        })
    }

    /// Counts and charges bytes of the response.
    pub(super) async fn count_received(&mut self, bytes: u64) -> Result<()> {
        let counted = self.departed()?.departure.count_received(bytes).await;
        counted.map_err(|exhausted| self.fail(exhausted))
    }

    /// The same as `charge` in a phase that cannot await.
    pub(super) fn charge_blocking(&mut self, usage: UsageKind, bytes: u64) -> Result<()> {
        let charged = self.departed()?.departure.charges.charge_blocking(usage, bytes);
        charged.map_err(|exhausted| self.fail(exhausted))
    }

    /// Keeps a refusal for `fail_to_proxy`, and returns the error that makes Pingora call it.
    pub(super) fn fail(&mut self, refusal: impl Into<Refusal>) -> Box<Error> {
        self.refusal = Some(refusal.into());
        Error::new(ErrorType::Custom(REFUSED))
    }

    pub(super) fn scrubber(&mut self) -> Option<&mut ResponseScrubber> {
        self.departed.as_mut().and_then(|departed| departed.scrubber.as_mut())
    }
}

/// The error for a state that cannot occur. The request ends as `internal`.
pub(super) fn internal() -> Box<Error> {
    Error::new(ErrorType::InternalError)
}
