//! Sequences at random over a small pool, against a shadow of the memory: every slot of every
//! block remembers which token was written there last.

use std::collections::{HashMap, HashSet};

use baton_types::{KvDtype, ModelFingerprint, NumericsVersion};
use proptest::prelude::*;

use super::*;
use crate::{BlockEvent, HashKey, prefix_hashes};

const POOL_BLOCKS: usize = 12;

#[derive(Clone, Debug)]
enum Op {
    /// A new sequence; the prompt's blocks are drawn from two contents, so prefixes repeat.
    Start {
        contents: Vec<bool>,
        tail_tokens: usize,
    },
    Decode {
        at: usize,
        token: TokenId,
    },
    Publish {
        at: usize,
    },
    Fork {
        at: usize,
    },
    Truncate {
        at: usize,
        keep_percent: usize,
    },
    /// Gives blocks back between the first tokens and a window of the last.
    Forget {
        at: usize,
        keep_tokens: usize,
        window_tokens: usize,
    },
    Release {
        at: usize,
    },
    Pin {
        at: usize,
        block: usize,
    },
    Unpin {
        at: usize,
    },
    ClearCache,
}

fn op() -> impl Strategy<Value = Op> {
    let at = 0_usize..8;
    prop_oneof![
        4 => (prop::collection::vec(any::<bool>(), 0..4), 1_usize..16)
            .prop_map(|(contents, tail_tokens)| Op::Start { contents, tail_tokens }),
        6 => (at.clone(), 0_u32..2).prop_map(|(at, token)| Op::Decode { at, token }),
        4 => at.clone().prop_map(|at| Op::Publish { at }),
        2 => at.clone().prop_map(|at| Op::Fork { at }),
        2 => (at.clone(), 0_usize..100)
            .prop_map(|(at, keep_percent)| Op::Truncate { at, keep_percent }),
        3 => (at.clone(), 0_usize..20, 0_usize..40).prop_map(|(at, keep_tokens, window_tokens)| {
            Op::Forget { at, keep_tokens, window_tokens }
        }),
        3 => at.clone().prop_map(|at| Op::Release { at }),
        2 => (at.clone(), 0_usize..4).prop_map(|(at, block)| Op::Pin { at, block }),
        2 => at.prop_map(|at| Op::Unpin { at }),
        1 => Just(Op::ClearCache),
    ]
}

struct Sequence {
    table: BlockTable,
    tokens: Vec<TokenId>,
    /// What it has said that it will not read again.
    unseen: Range<usize>,
}

struct World {
    pool: BlockPool,
    key: HashKey,
    /// `memory[block][slot]`.
    memory: Vec<Vec<TokenId>>,
    sequences: Vec<Sequence>,
    pinned: Vec<BlockId>,
    /// What a router that follows the events knows: hash → parent.
    followed: HashMap<BlockHash, Option<BlockHash>>,
}

impl World {
    fn new(block_tokens: usize) -> Self {
        let model = ModelFingerprint([3; 32]);
        Self {
            pool: BlockPool::new(POOL_BLOCKS, block_tokens),
            key: HashKey::new(&model, &NumericsVersion("n".into()), KvDtype::Bf16, b"salt"),
            memory: vec![vec![TokenId::MAX; block_tokens]; POOL_BLOCKS],
            sequences: Vec::new(),
            pinned: Vec::new(),
            followed: HashMap::new(),
        }
    }

    fn apply(&mut self, op: Op) {
        let count = self.sequences.len();
        match op {
            Op::Start { contents, tail_tokens } => self.start(&contents, tail_tokens),
            Op::Unpin { at } if !self.pinned.is_empty() => {
                let block = self.pinned.swap_remove(at % self.pinned.len());
                self.pool.unpin(block);
            }
            Op::ClearCache => self.pool.clear_cache(),
            _ if count == 0 => {}
            Op::Decode { at, token } => self.write(at % count, &[token]),
            Op::Publish { at } => {
                let Sequence { table, tokens, .. } = &mut self.sequences[at % count];
                let hashes = prefix_hashes(&self.key, tokens);
                table.publish(&mut self.pool, &hashes, tokens);
            }
            Op::Fork { at } => {
                let Sequence { table, tokens, unseen } = &self.sequences[at % count];
                let (tokens, unseen) = (tokens.clone(), unseen.clone());
                let table = table.fork(&mut self.pool);
                self.sequences.push(Sequence { table, tokens, unseen });
            }
            Op::Truncate { at, keep_percent } => {
                let Sequence { table, tokens, unseen } = &mut self.sequences[at % count];
                tokens.truncate((tokens.len() * keep_percent / 100).max(unseen.end));
                table.truncate(&mut self.pool, tokens.len());
            }
            Op::Forget { at, keep_tokens, window_tokens } => {
                let Sequence { table, tokens, unseen } = &mut self.sequences[at % count];
                let first = if unseen.end == 0 { keep_tokens } else { unseen.start };
                let end = tokens.len().saturating_sub(window_tokens);
                if end > first.max(unseen.end) {
                    *unseen = first..end;
                    table.forget(&mut self.pool, first..end);
                }
            }
            Op::Release { at } => {
                self.sequences.swap_remove(at % count).table.release(&mut self.pool);
            }
            Op::Pin { at, block } => {
                let blocks = self.sequences[at % count].table.blocks();
                if let Some(&block) = blocks.get(block).filter(|&&block| block != BlockId::NONE) {
                    self.pool.pin(block);
                    self.pinned.push(block);
                }
            }
            Op::Unpin { .. } => {}
        }
    }

    fn start(&mut self, contents: &[bool], tail_tokens: usize) {
        let block_tokens = self.pool.block_tokens();
        let mut tokens: Vec<TokenId> = contents
            .iter()
            .flat_map(|&content| std::iter::repeat_n(TokenId::from(content), block_tokens))
            .collect();
        tokens.extend(std::iter::repeat_n(7, tail_tokens));
        let hashes = prefix_hashes(&self.key, &tokens);
        let cached = self.pool.lookup(&hashes, &tokens, (tokens.len() - 1) / block_tokens);
        assert!(cached.len() <= self.pool.peek(&hashes));
        for (content, block) in tokens.chunks(block_tokens).zip(&cached) {
            assert_eq!(self.memory[block.0 as usize], content, "foreign KV was served");
        }
        let table = BlockTable::from_cached(&self.pool, cached);
        let rest = tokens.split_off(table.len());
        self.sequences.push(Sequence { table, tokens, unseen: 0..0 });
        let at = self.sequences.len() - 1;
        self.write(at, &rest);
    }

    /// Appends to a sequence, or leaves it as it is when the pool is full.
    fn write(&mut self, at: usize, new: &[TokenId]) {
        let in_use = self.in_use();
        let Self { pool, memory, sequences, .. } = self;
        let Sequence { table, tokens, .. } = &mut sequences[at];
        let had: HashSet<BlockId> = table.held().collect();
        let block_tokens = pool.block_tokens();
        if table.reserve(pool, tokens.len() + new.len()).is_err() {
            assert!(pool.available() + table.held().count() < POOL_BLOCKS);
            return;
        }
        for &token in new {
            let position = tokens.len();
            match table.make_writable(pool, position) {
                Err(_) => return assert_eq!(pool.available(), 0),
                Ok(Some(copy)) => {
                    assert_eq!(copy.tokens, position % block_tokens);
                    let (from, to) = (copy.from.0 as usize, copy.to.0 as usize);
                    memory[to] = memory[from].clone();
                }
                Ok(None) => {}
            }
            let block = table.blocks()[position / block_tokens];
            assert!(had.contains(&block) || !in_use.contains(&block), "{block} was in use");
            memory[block.0 as usize][position % block_tokens] = token;
            tokens.push(token);
            table.append(1);
        }
    }

    fn in_use(&self) -> HashSet<BlockId> {
        let referenced = self.sequences.iter().flat_map(|sequence| sequence.table.held());
        referenced.chain(self.pinned.iter().copied()).collect()
    }

    fn check(&mut self) {
        let block_tokens = self.pool.block_tokens();
        let mut references: HashMap<BlockId, u32> = HashMap::new();
        for Sequence { table, tokens, unseen } in &self.sequences {
            assert_eq!(table.len(), tokens.len());
            let seen = |position: &usize| !unseen.contains(position);
            for position in (0..tokens.len()).filter(seen) {
                let token = tokens[position];
                let block = table.blocks()[position / block_tokens].0 as usize;
                assert_eq!(self.memory[block][position % block_tokens], token, "overwritten");
            }
            let whole = unseen.start.div_ceil(block_tokens)..unseen.end / block_tokens;
            assert_eq!(table.held().count(), table.blocks().len() - whole.len());
            table.held().for_each(|block| *references.entry(block).or_default() += 1);
        }
        for block in (0..POOL_BLOCKS as u32).map(BlockId) {
            let expected = references.get(&block).copied().unwrap_or(0);
            assert_eq!(self.pool.references(block), expected);
        }
        let stats = self.pool.stats();
        assert_eq!(stats.used_blocks, self.in_use().len());
        assert_eq!(stats.pinned_blocks, self.pinned.iter().collect::<HashSet<_>>().len());
        let sum = stats.free_blocks + stats.used_blocks + stats.cached_blocks;
        assert_eq!(sum, stats.capacity_blocks);
        self.follow();
    }

    /// Events keep children behind their parents, and yield the index as it is.
    fn follow(&mut self) {
        for event in self.pool.drain_events() {
            match event {
                BlockEvent::Reset => self.followed.clear(),
                BlockEvent::Stored { hash, parent, .. } => {
                    assert!(parent.is_none_or(|parent| self.followed.contains_key(&parent)));
                    assert!(self.followed.insert(hash, parent).is_none(), "stored twice");
                }
                BlockEvent::Removed { hash } => {
                    assert!(self.followed.remove(&hash).is_some(), "removed twice");
                    let is_parent = self.followed.values().any(|&parent| parent == Some(hash));
                    assert!(!is_parent, "a parent went before its child");
                }
            }
        }
        let mut stored = 0;
        for event in self.pool.published() {
            if let BlockEvent::Stored { hash, parent, .. } = event {
                assert_eq!(self.followed.get(&hash), Some(&parent));
                stored += 1;
            }
        }
        assert_eq!(stored, self.followed.len());
    }

    /// All that is called available can be had, and nothing is left in the end.
    fn finish(mut self) {
        let available = self.pool.available();
        let in_use = self.in_use();
        assert!(self.pool.alloc(available + 1).is_err());
        let all = self.pool.alloc(available).unwrap();
        assert!(all.iter().all(|block| !in_use.contains(block)));
        all.into_iter().for_each(|block| self.pool.release(block));
        self.check();
        self.pinned.drain(..).for_each(|block| self.pool.unpin(block));
        for mut sequence in self.sequences.drain(..) {
            sequence.table.release(&mut self.pool);
        }
        assert_eq!((self.pool.used(), self.pool.available()), (0, POOL_BLOCKS));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn blocks_are_never_leaked_aliased_or_lost(
        ops in prop::collection::vec(op(), 0..60),
        block_units in 1_usize..3,
    ) {
        let mut world = World::new(16 * block_units);
        for op in ops {
            world.apply(op);
            world.check();
        }
        world.finish();
    }
}

fn pool_and_tokens(len: TokenId) -> (BlockPool, Vec<TokenId>, Vec<BlockHash>) {
    let world = World::new(16);
    let tokens: Vec<TokenId> = (0..len).collect();
    let hashes = prefix_hashes(&world.key, &tokens);
    (world.pool, tokens, hashes)
}

#[test]
fn a_fork_copies_the_tail_once_and_shares_the_rest() {
    let (mut pool, _, _) = pool_and_tokens(0);
    let mut first = BlockTable::new(&pool);
    first.reserve(&mut pool, 24).unwrap();
    first.append(20);
    let mut second = first.fork(&mut pool);
    let copy = second.make_writable(&mut pool, 20).unwrap().unwrap();
    assert_eq!((copy.from, copy.tokens), (first.blocks()[1], 4));
    assert_eq!(second.blocks(), [first.blocks()[0], copy.to]);
    assert_eq!(first.make_writable(&mut pool, 20).unwrap(), None);
    first.release(&mut pool);
    second.release(&mut pool);
    assert_eq!(pool.used(), 0);
}

#[test]
fn a_duplicate_gives_way_to_the_older_block() {
    let (mut pool, tokens, hashes) = pool_and_tokens(40);
    let mut tables: Vec<_> = (0..2).map(|_| BlockTable::new(&pool)).collect();
    for table in &mut tables {
        table.reserve(&mut pool, 40).unwrap();
        table.append(40);
    }
    assert_eq!(tables[0].publish(&mut pool, &hashes, &tokens), 2);
    assert_eq!(tables[1].publish(&mut pool, &hashes, &tokens), 0);
    assert_eq!(tables[0].blocks()[..2], tables[1].blocks()[..2]);
    assert_eq!(pool.used(), 4);
    tables.iter_mut().for_each(|table| table.release(&mut pool));
    assert_eq!((pool.used(), pool.stats().cached_blocks), (0, 2));
}

#[test]
fn a_reservation_leaves_out_what_is_never_seen() {
    let (mut pool, tokens, hashes) = pool_and_tokens(100);
    let mut table = BlockTable::new(&pool);
    assert!(table.reserve_around(&mut pool, 4..4, 13 * 16).is_err());
    table.reserve_around(&mut pool, 20..83, 100).unwrap();
    assert_eq!((table.blocks().len(), table.held().count()), (7, 4));
    assert_eq!(table.blocks()[2..5], [BlockId::NONE; 3]);
    table.append(100);
    // Nothing behind the first gap can be found by others.
    assert_eq!(table.publish(&mut pool, &hashes, &tokens), 2);
    let mut other = table.fork(&mut pool);
    other.forget(&mut pool, 20..96);
    assert_eq!((other.held().count(), table.held().count(), pool.used()), (3, 4, 4));
    other.truncate(&mut pool, 97);
    table.release(&mut pool);
    other.release(&mut pool);
    assert_eq!((pool.used(), pool.available()), (0, POOL_BLOCKS));
}
