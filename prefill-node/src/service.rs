//! The `Prefill` service.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use baton_proto::error::to_status;
use baton_proto::internal::prefill_server::Prefill;
use baton_proto::internal::{PrefillEvent, PrefillRunRequest};
use futures::Stream;
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Request, Response, Status};
use tracing::Instrument;

use crate::job::Jobs;

/// Events that wait for the router to read them; a job has a handful.
const EVENTS_MAX: usize = 64;

pub(crate) struct PrefillService {
    jobs: Arc<Jobs>,
}

impl PrefillService {
    pub fn new(jobs: Arc<Jobs>) -> Self {
        Self { jobs }
    }
}

/// The router's stream. Dropping it cancels the job.
pub(crate) struct JobStream {
    events: mpsc::Receiver<Result<PrefillEvent, Status>>,
    _cancel: DropGuard,
}

impl Stream for JobStream {
    type Item = Result<PrefillEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.events.poll_recv(cx)
    }
}

#[tonic::async_trait]
impl Prefill for PrefillService {
    type RunStream = JobStream;

    async fn run(
        &self,
        request: Request<PrefillRunRequest>,
    ) -> Result<Response<Self::RunStream>, Status> {
        let cancel = CancellationToken::new();
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let job = self
            .jobs
            .prepare(request.into_inner(), cancel.clone(), sender)
            .map_err(|error| to_status(&error))?;
        let span = tracing::info_span!("prefill", request_id = %job.request_id());
        tokio::spawn(job.run().instrument(span));
        Ok(Response::new(JobStream { events, _cancel: cancel.drop_guard() }))
    }
}
