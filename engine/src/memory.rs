//! Large buffers: page-aligned, zeroed, on huge pages where the system has them; and mapped files.

mod map;

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;

pub(crate) use map::FileMap;

pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Element types for which all-zero bytes are a value.
///
/// # Safety
/// Implemented for plain numbers only.
pub(crate) unsafe trait Plain: Copy + Send + Sync + 'static {}
// SAFETY: plain numbers.
unsafe impl Plain for u8 {}
// SAFETY: plain numbers.
unsafe impl Plain for i8 {}
// SAFETY: plain numbers.
unsafe impl Plain for u16 {}
// SAFETY: plain numbers.
unsafe impl Plain for i32 {}
// SAFETY: plain numbers.
unsafe impl Plain for f32 {}

/// Whether buffers may get huge pages. Where the system does not say, they may not.
pub(crate) fn has_huge_pages() -> bool {
    let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    enabled.is_ok_and(|enabled| !enabled.contains("[never]"))
}

/// A zeroed slice from the system, aligned to 2 MiB; pages are committed when first touched.
pub(crate) struct Buffer<T: Plain> {
    first: NonNull<T>,
    len: usize,
    map: *mut libc::c_void,
    map_bytes: usize,
}

// SAFETY: the buffer owns its memory as a `Vec` does, and elements are plain numbers.
unsafe impl<T: Plain> Send for Buffer<T> {}
// SAFETY: as above; shared access is read-only.
unsafe impl<T: Plain> Sync for Buffer<T> {}

impl<T: Plain> Buffer<T> {
    /// `len` zeros.
    ///
    /// # Errors
    /// The system's error when it has no room.
    pub(crate) fn zeroed(len: usize) -> std::io::Result<Self> {
        let bytes = len
            .checked_mul(size_of::<T>())
            .and_then(|bytes| bytes.max(1).checked_next_multiple_of(HUGE_PAGE_BYTES))
            .ok_or(std::io::ErrorKind::OutOfMemory)?;
        let map_bytes =
            bytes.checked_add(HUGE_PAGE_BYTES).ok_or(std::io::ErrorKind::OutOfMemory)?;
        // SAFETY: an anonymous private mapping at an address of the system's choice.
        let map = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                map_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if map == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        let skip = map.align_offset(HUGE_PAGE_BYTES);
        // SAFETY: `skip` is below the 2 MiB that were mapped on top.
        let first = unsafe { map.byte_add(skip) };
        if len * size_of::<T>() >= HUGE_PAGE_BYTES {
            // SAFETY: the range was mapped above. It is advice: failure changes nothing.
            unsafe { libc::madvise(first, bytes, libc::MADV_HUGEPAGE) };
        }
        let first = NonNull::new(first.cast()).expect("a mapping is never at address zero");
        Ok(Self { first, len, map, map_bytes })
    }

    /// Lets several threads write, each its own part.
    pub(crate) fn parts(&mut self) -> Parts<'_, T> {
        Parts::new(self)
    }
}

impl<T: Plain> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: mapped in `zeroed` with this address and size, and no reference outlives it.
        unsafe { libc::munmap(self.map, self.map_bytes) };
    }
}

impl<T: Plain> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements were mapped, zero is a value of `T`, and `self` is borrowed.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }
}

impl<T: Plain> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.first.as_ptr(), self.len) }
    }
}

/// A slice of which several threads read and write parts that do not overlap.
pub(crate) struct Parts<'a, T> {
    first: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

impl<T> Clone for Parts<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Parts<'_, T> {}

// SAFETY: parts are handed out by `of` and `of_mut`, whose callers promise that they are disjoint.
unsafe impl<T: Send> Send for Parts<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { first: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// # Safety
    /// Until the next barrier nobody writes into `range`.
    ///
    /// # Panics
    /// When `range` leaves the slice.
    pub(crate) unsafe fn of(&self, range: Range<usize>) -> &'a [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds by the assertion; nobody writes by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.first.add(range.start), range.len()) }
    }

    /// # Safety
    /// Until the next barrier nobody else reads or writes `range`.
    ///
    /// # Panics
    /// When `range` leaves the slice.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn of_mut(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds by the assertion; unshared by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(range.start), range.len()) }
    }

    /// All but the first `count` elements.
    ///
    /// # Panics
    /// When there are fewer.
    pub(crate) fn skip(&self, count: usize) -> Self {
        assert!(count <= self.len);
        let first = self.first.wrapping_add(count);
        Self { first, len: self.len - count, slice: PhantomData }
    }

    /// The part of `thread` where each of `threads` threads gets as much.
    pub(crate) fn share(&self, threads: usize, thread: usize) -> Self {
        let len = self.len / threads;
        let first = self.skip(thread * len).first;
        Self { first, len, slice: PhantomData }
    }

    /// The first element, for kernels that write rows with a stride.
    pub(crate) fn as_ptr(&self) -> *mut T {
        self.first
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroed_aligned_and_written_in_parts() {
        let mut buffer = Buffer::<f32>::zeroed(700_000).unwrap();
        assert_eq!(buffer.as_ptr() as usize % HUGE_PAGE_BYTES, 0);
        assert!(buffer.iter().all(|x| *x == 0.0));
        let parts = buffer.parts();
        std::thread::scope(|scope| {
            for thread in 0..2 {
                scope.spawn(move || {
                    // SAFETY: the two ranges do not overlap.
                    let part = unsafe { parts.of_mut(thread * 350_000..(thread + 1) * 350_000) };
                    part.fill(thread as f32 + 1.0);
                });
            }
        });
        assert_eq!(buffer.iter().sum::<f32>(), 1_050_000.0);
    }

    #[test]
    fn too_large_is_an_error() {
        assert!(Buffer::<f32>::zeroed(usize::MAX / 2).is_err());
    }
}
