//! Puts what comes for a request into the blocks that its reservation holds.

use std::time::Instant;

use baton_engine_host::{EngineHost, place_frame};
use baton_kv_transfer::frame::Frame;
use baton_kv_transfer::message::Commit;
use baton_kv_transfer::receive::Placer;
use baton_types::{Error, RequestId};

pub(crate) struct EnginePlacer {
    pub host: EngineHost,
    pub request_id: RequestId,
}

impl Placer for EnginePlacer {
    async fn place(&self, frame: &Frame) -> Result<(), Error> {
        let id = self.request_id;
        let place = place_frame(&self.host, frame, move |engine, layer, tokens, heads, payload| {
            engine.place(id, layer, tokens, heads, payload)
        });
        place.await
    }

    async fn activate(&self, commit: Commit, is_converted: bool) -> Result<(), Error> {
        let id = self.request_id;
        let activate = self.host.ask(move |thread| {
            let info = &commit.info;
            let now = Instant::now();
            let (first_tokens, digest) = (&info.first_tokens, info.sampler_digest);
            thread.engine.activate(id, first_tokens, digest, is_converted, now)
        });
        activate.await?
    }
}
