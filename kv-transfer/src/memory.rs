//! Memory that frames lie in: cut from one mapping in huge pages, where the machine has them, that
//! a transport can register once.
//!
//! One of the two modules here with `unsafe`: disjoint pieces of a mapping belong to different
//! owners, and a transport may write into pieces that nobody reads.

#![allow(unsafe_code)]

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Anonymous memory, zeroed; unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    at: NonNull<u8>,
    len: usize,
    is_fenced: AtomicBool,
}

// SAFETY: it is plain memory; who reads and writes which piece is settled by their owners.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// At least `len` bytes, rounded up to whole huge pages.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        let len = len.next_multiple_of(HUGE_PAGE_BYTES);
        // SAFETY: a new anonymous mapping anywhere.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the mapping is ours. It is advice: the machine may have no huge pages.
        unsafe { libc::madvise(at, len, libc::MADV_HUGEPAGE) };
        let at = NonNull::new(at.cast()).ok_or_else(|| io::Error::other("mmap gave null"))?;
        Ok(Self { at, len, is_fenced: AtomicBool::new(false) })
    }

    /// Writes every byte, so that the system gives all of it now.
    pub(crate) fn fill(&mut self, byte: u8) {
        // SAFETY: all of the mapping, which nobody else has.
        unsafe { self.at.as_ptr().write_bytes(byte, self.len) };
    }

    pub(crate) fn address(&self) -> NonNull<u8> {
        self.at
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes that another process has written.
    ///
    /// The writer has said that it is done, and gets the place again only when the caller has
    /// said that it reads no more: so the protocol says, and peers are trusted to keep to it.
    /// One that does not can spoil its own frame, which its checksum has perhaps passed already.
    ///
    /// # Panics
    /// Outside the mapping.
    pub(crate) fn filled(&self, at: usize, len: usize) -> &[u8] {
        assert!(at + len <= self.len, "outside the mapping");
        // SAFETY: inside the mapping, which is initialised; nobody writes there, as said above.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr().add(at), len) }
    }

    /// When the last reader is gone, memory goes back and the addresses stay taken, so that a late
    /// write of another process meets no memory of anybody. They stay writable: UCX may do such a
    /// write itself, on this process's own thread.
    pub(crate) fn fence_when_dropped(&self) {
        self.is_fenced.store(true, Ordering::Relaxed);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let at = self.at.as_ptr().cast();
        if !*self.is_fenced.get_mut() {
            // SAFETY: the mapping is ours, and its last owner goes.
            unsafe { libc::munmap(at, self.len) };
            return;
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: replaces our own mapping by one that is empty; its last owner goes.
        unsafe { libc::mmap(at, self.len, access, flags, -1, 0) };
    }
}

/// Pieces of one mapping for outgoing frames. Clones share it; what it has not, the heap gives.
#[derive(Clone, Debug)]
pub struct FrameMemory {
    pool: Option<Arc<Pool>>,
}

#[derive(Debug)]
struct Pool {
    mapping: Arc<Mapping>,
    piece_bytes: usize,
    pieces: usize,
    free: Mutex<Vec<usize>>,
}

impl FrameMemory {
    /// `pieces` of at least `piece_bytes` each.
    ///
    /// # Errors
    /// Where the system has no memory.
    pub fn new(pieces: usize, piece_bytes: usize) -> io::Result<Self> {
        let piece_bytes = piece_bytes.next_multiple_of(4096);
        let mapping = Arc::new(Mapping::new(pieces * piece_bytes)?);
        // The lowest is taken first: memory that was never needed is never touched.
        let free = Mutex::new((0..pieces).rev().collect());
        Ok(Self { pool: Some(Arc::new(Pool { mapping, piece_bytes, pieces, free })) })
    }

    /// Everything from the heap.
    pub fn heap() -> Self {
        Self { pool: None }
    }

    /// The mapping, for a transport to register.
    pub(crate) fn mapping(&self) -> Option<Arc<Mapping>> {
        self.pool.as_ref().map(|pool| pool.mapping.clone())
    }

    /// How many pieces there are.
    pub(crate) fn pieces(&self) -> usize {
        self.pool.as_ref().map_or(0, |pool| pool.pieces)
    }

    /// Room for `len` bytes.
    pub(crate) fn take(&self, len: usize) -> FrameBuffer {
        let piece = self.pool.as_ref().filter(|pool| len <= pool.piece_bytes).and_then(|pool| {
            let at = pool.free.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
            Some(Piece { pool: pool.clone(), at })
        });
        let place = piece.map_or_else(|| Place::Heap(Vec::with_capacity(len)), Place::Piece);
        FrameBuffer { place, len: 0, capacity: len }
    }
}

/// One piece, owned alone.
#[derive(Debug)]
struct Piece {
    pool: Arc<Pool>,
    at: usize,
}

impl Piece {
    fn bytes(&self, len: usize) -> &[u8] {
        debug_assert!(len <= self.pool.piece_bytes);
        // SAFETY: the piece lies in the mapping, which is initialised, and is ours alone.
        unsafe { std::slice::from_raw_parts(self.start(), len) }
    }

    fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        debug_assert!(len <= self.pool.piece_bytes);
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start(), len) }
    }

    fn start(&self) -> *mut u8 {
        // SAFETY: `at` is below the count of pieces.
        unsafe { self.pool.mapping.address().as_ptr().add(self.at * self.pool.piece_bytes) }
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.pool.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.at);
    }
}

/// Bytes that are being laid out; of a fixed capacity.
#[derive(Debug)]
pub(crate) struct FrameBuffer {
    place: Place,
    len: usize,
    capacity: usize,
}

#[derive(Debug)]
enum Place {
    Piece(Piece),
    Heap(Vec<u8>),
}

impl FrameBuffer {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// # Panics
    /// Beyond the capacity.
    pub(crate) fn put_slice(&mut self, bytes: &[u8]) {
        let end = self.len + bytes.len();
        assert!(end <= self.capacity, "a frame outgrows its buffer");
        match &mut self.place {
            Place::Piece(piece) => piece.bytes_mut(end)[self.len..].copy_from_slice(bytes),
            Place::Heap(heap) => heap.extend_from_slice(bytes),
        }
        self.len = end;
    }

    /// What was put, to be changed.
    pub(crate) fn written(&mut self) -> &mut [u8] {
        match &mut self.place {
            Place::Piece(piece) => piece.bytes_mut(self.len),
            Place::Heap(heap) => heap,
        }
    }

    /// No copy; the piece is free again when the last clone is dropped.
    pub(crate) fn freeze(self) -> Bytes {
        match self.place {
            Place::Piece(piece) => Bytes::from_owner(Frozen { piece, len: self.len }),
            Place::Heap(heap) => heap.into(),
        }
    }
}

struct Frozen {
    piece: Piece,
    len: usize,
}

impl AsRef<[u8]> for Frozen {
    fn as_ref(&self) -> &[u8] {
        self.piece.bytes(self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_come_back_and_the_heap_helps_out() {
        let memory = FrameMemory::new(2, 100).unwrap();
        let fill = |byte: u8| {
            let mut buffer = memory.take(80);
            buffer.put_slice(&[0; 40]);
            buffer.put_slice(&[byte; 40]);
            buffer.written()[..40].fill(byte);
            buffer.freeze()
        };
        let frames: Vec<_> = (1..=3).map(fill).collect();
        for (frame, byte) in frames.iter().zip(1..) {
            assert_eq!(frame[..], [byte; 80]);
        }
        let mapping = memory.mapping().unwrap();
        let at = mapping.address().as_ptr() as usize;
        let inside = |frame: &Bytes| (at..at + mapping.len()).contains(&(frame.as_ptr() as usize));
        assert_eq!(frames.iter().map(inside).collect::<Vec<_>>(), [true, true, false]);
        let again = frames[0].slice(10..20);
        drop(frames);
        assert_eq!(again[..], [1; 10]);
        let (one, two) = (fill(4), fill(5));
        assert_eq!((inside(&one), inside(&two), again[0]), (true, false, 1));
    }

    #[test]
    #[should_panic(expected = "outgrows")]
    fn a_buffer_keeps_to_its_capacity() {
        FrameMemory::new(1, 4096).unwrap().take(10).put_slice(&[0; 11]);
    }

    #[test]
    fn what_is_fenced_keeps_its_addresses_and_nothing_else() {
        let mapping = Mapping::new(1 << 20).unwrap();
        let at = mapping.address().as_ptr();
        // SAFETY: inside the mapping, which nobody else uses.
        unsafe { at.write(7) };
        mapping.fence_when_dropped();
        assert_eq!(mapping.filled(0, 1), [7]);
        drop(mapping);
        // SAFETY: the addresses stay taken and may be written to: that is what is tested.
        let (before, after) = unsafe {
            let before = at.read();
            at.write(9);
            (before, at.read())
        };
        assert_eq!((before, after), (0, 9));
    }
}
