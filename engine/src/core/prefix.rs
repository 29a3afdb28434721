//! Prefixes that travel from one node's cache to another's: held while they are read, or with
//! blocks reserved while they come. They belong to no request, are named by whoever asks, and end
//! with `drop_prefix`.

use std::ops::Range;

use baton_kv_cache::{BlockTable, prefix_hashes};
use baton_types::{BlockHash, Error, ErrorCode, TokenId, TransferId};

use super::arrive::write_received;
use super::step::read_span;
use super::{Engine, ExportedSpan};
use crate::backend::{Heads, KvSpan};

/// The first tokens of prompts, under the identity of their blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prefix {
    pub tokens: Vec<TokenId>,
    pub tenant_salt: Vec<u8>,
}

/// A prefix between two caches.
pub(super) struct Travelling {
    table: BlockTable,
    prefix: Prefix,
    hashes: Vec<BlockHash>,
}

impl Engine {
    /// Keeps what the cache has of a prefix, for another node to be given. Returns how many of its
    /// tokens that is.
    ///
    /// # Errors
    /// `FailedPrecondition` where that transfer is known already.
    pub fn hold_prefix(&mut self, id: TransferId, prefix: Prefix) -> Result<usize, Error> {
        self.check_unknown(id)?;
        let (table, hashes) = self.cached(&prefix);
        let held = table.len();
        self.travelling.insert(id, Travelling { table, prefix, hashes });
        Ok(held)
    }

    /// K and V of one layer and some tokens of a prefix that is held.
    ///
    /// # Errors
    /// `NotFound`; `InvalidArgument` for what it has not.
    pub fn read_prefix(
        &self,
        id: TransferId,
        layer: usize,
        tokens: Range<usize>,
    ) -> Result<ExportedSpan, Error> {
        let table = &self.travelling.get(&id).ok_or_else(|| unknown(id))?.table;
        if layer >= self.backend.spec().layers || tokens.end > table.len() || tokens.is_empty() {
            let what = format!("layer {layer} and tokens {tokens:?} of {}", table.len());
            return Err(Error::invalid("tokens", what));
        }
        let (blocks, token_first, token_count) = (table.blocks(), tokens.start, tokens.len());
        let span = KvSpan { layer, blocks, token_first, token_count, heads: Heads::All };
        Ok(read_span(self.backend.kv(), &span))
    }

    /// Takes blocks for a prefix that another node sends; what is no whole block of it is left
    /// out. Returns the tokens that are cached, and those that there will be.
    ///
    /// # Errors
    /// `ResourceExhausted` where there is no room beside what runs, `FailedPrecondition` where
    /// that transfer is known already.
    pub fn await_prefix(
        &mut self,
        id: TransferId,
        mut prefix: Prefix,
    ) -> Result<(usize, usize), Error> {
        self.check_unknown(id)?;
        let block_tokens = self.pool.block_tokens();
        prefix.tokens.truncate(prefix.tokens.len() / block_tokens * block_tokens);
        let tokens = prefix.tokens.len();
        let (mut table, hashes) = self.cached(&prefix);
        let cached = table.len();
        let wanted = (tokens - cached) / block_tokens;
        // Each running sequence may need one block at its next step.
        let has_room = self.pool.available() >= wanted + self.sequences();
        if !has_room || table.reserve(&mut self.pool, tokens).is_err() {
            table.release(&mut self.pool);
            let free = self.pool.available();
            let what =
                format!("the prefix needs {wanted} blocks beside what runs, {free} are free");
            return Err(Error::exhausted(what, 250));
        }
        self.travelling.insert(id, Travelling { table, prefix, hashes });
        Ok((cached, tokens))
    }

    /// Places K and V of a prefix, `payload` in canonical order.
    ///
    /// # Errors
    /// `NotFound`, `FailedPrecondition` for tokens that are cached, `DataLoss` where the payload
    /// does not fit.
    pub fn place_prefix(
        &mut self,
        id: TransferId,
        layer: usize,
        tokens: Range<usize>,
        heads: Heads,
        payload: &[u8],
    ) -> Result<(), Error> {
        let table = &self.travelling.get(&id).ok_or_else(|| unknown(id))?.table;
        write_received(&mut *self.backend, table, layer, tokens, heads, payload)?;
        self.counters.received_spans += 1;
        Ok(())
    }

    /// Everything of a prefix is in place: it is in the cache from now on. Returns its tokens.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn publish_prefix(&mut self, id: TransferId) -> Result<usize, Error> {
        let mut travelling = self.travelling.remove(&id).ok_or_else(|| unknown(id))?;
        let Travelling { table, prefix, hashes } = &mut travelling;
        table.append(prefix.tokens.len() - table.len());
        table.publish(&mut self.pool, hashes, &prefix.tokens);
        let tokens = table.len();
        table.release(&mut self.pool);
        Ok(tokens)
    }

    /// Gives the blocks of a prefix back. Whether it was here.
    pub fn drop_prefix(&mut self, id: TransferId) -> bool {
        let travelling = self.travelling.remove(&id);
        let known = travelling.is_some();
        if let Some(mut travelling) = travelling {
            travelling.table.release(&mut self.pool);
        }
        known
    }

    fn check_unknown(&self, id: TransferId) -> Result<(), Error> {
        match self.travelling.contains_key(&id) {
            false => Ok(()),
            true => Err(Error::new(
                ErrorCode::FailedPrecondition,
                format!("the prefix of transfer {id} is on its way already"),
            )),
        }
    }

    fn cached(&mut self, prefix: &Prefix) -> (BlockTable, Vec<BlockHash>) {
        let hashes = prefix_hashes(&self.hash_key(&prefix.tenant_salt), &prefix.tokens);
        let found = self.pool.lookup(&hashes, &prefix.tokens, usize::MAX);
        (BlockTable::from_cached(&self.pool, found), hashes)
    }
}

fn unknown(id: TransferId) -> Error {
    Error::new(ErrorCode::NotFound, format!("no prefix is on its way for transfer {id}"))
}
